"""The `Bdev` contract as a test suite: `await check_bdev(make)`. Whatever passes may serve the storage agent.

`make()` gives a fresh open device of at least `MIN_BYTES`, any content; the suite overwrites and closes it.
Two optional hooks cover what a backend cannot show by itself: `reopen(bdev)` opens a closed device again
(persistence), and `stall(bdev)` is a context in which the device answers nothing (late completions).
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.buffers import address_of, aligned_buffer
from dpurt.errors import BdevError, BdevTimeout

__all__ = ["MIN_BYTES", "check_bdev"]

MIN_BYTES = 16 << 20
_PATIENCE_S = 30.0

Make = Callable[[], Awaitable[Bdev]]
Reopen = Callable[[Bdev], Awaitable[Bdev]]
Stall = Callable[[Bdev], AbstractAsyncContextManager[None]]


async def check_bdev(make: Make, *, reopen: Reopen | None = None, stall: Stall | None = None) -> None:
    """Run every check on its own device; AssertionError names what failed."""
    for check in _CHECKS:
        bdev = await make()
        await check(bdev)
        await bdev.aclose()
    if reopen is not None:
        await _check_persistence(await make(), reopen)
    if stall is not None:
        for stalled_check in _STALLED_CHECKS:
            bdev = await make()
            await stalled_check(bdev, stall)
            await bdev.aclose()


def _soon() -> float:
    return trio.current_time() + _PATIENCE_S


def _noise(length: int, seed: int = 0) -> memoryview:
    buffer = aligned_buffer(length)
    buffer[:] = random.Random(seed).randbytes(length)
    return buffer


async def _read(bdev: Bdev, offset: int, length: int) -> memoryview:
    buffer = aligned_buffer(length)
    await bdev.read_into(offset, [buffer], _soon())
    return buffer


async def _refusal(operation: Awaitable[None]) -> BdevError:
    try:
        await operation
    except BdevError as error:
        return error
    raise AssertionError("the operation should have been refused")


async def _check_info(bdev: Bdev) -> None:
    info = bdev.info
    assert isinstance(bdev, Bdev), "all methods of the Protocol are there"
    assert info.name, info
    assert info.kind, info
    assert info.size_bytes >= MIN_BYTES, f"the suite needs {MIN_BYTES} bytes, got {info.size_bytes}"
    for power_of_two in (info.block_size, info.buffer_align):
        assert power_of_two.bit_count() == 1, info
    assert not info.size_bytes % info.block_size, info
    assert max(info.block_size, info.buffer_align) <= 4096, "slots are aligned to 4096 only"
    assert info.max_transfer_bytes >= info.block_size, info
    assert info.queue_depth >= 1, info


async def _check_round_trip(bdev: Bdev) -> None:
    block = bdev.info.block_size
    data = _noise(8 * block)
    await bdev.write_from(3 * block, [data], _soon())
    assert await _read(bdev, 3 * block, 8 * block) == data
    assert await _read(bdev, 5 * block, block) == data[2 * block : 3 * block]


async def _check_scatter_lists(bdev: Bdev) -> None:
    block = bdev.info.block_size
    data = _noise(16 * block)
    cuts = [0, 1, 4, 4, 9, 16]
    pieces = [data[a * block : b * block] for a, b in itertools.pairwise(cuts)]
    await bdev.write_from(0, pieces, _soon())
    into = aligned_buffer(40 * block)
    places = [into[20 * block : 27 * block], into[0:block], into[8 * block : 16 * block]]
    await bdev.read_into(0, places, _soon())
    assert b"".join(places) == data, "pieces are filled in order"
    assert not any(into[16 * block : 20 * block]), "nothing beside the buffers is touched"


async def _check_long_scatter_list(bdev: Bdev) -> None:
    block = bdev.info.block_size
    data = _noise(300 * block)
    await bdev.write_from(block, [data], _soon())
    into = aligned_buffer(300 * block)
    order = random.Random(1).sample(range(300), 300)
    await bdev.read_into(block, [into[i * block : (i + 1) * block] for i in order], _soon())
    for nth, i in enumerate(order):
        assert into[i * block : (i + 1) * block] == data[nth * block : (nth + 1) * block]


async def _check_read_only_source(bdev: Bdev) -> None:
    data = _noise(bdev.info.block_size).toreadonly()
    await bdev.write_from(0, [data], _soon())
    assert await _read(bdev, 0, len(data)) == data


async def _check_larger_than_max_transfer(bdev: Bdev) -> None:
    block = bdev.info.block_size
    length = min(bdev.info.max_transfer_bytes * 2 + block, MIN_BYTES)
    data = _noise(length)
    await bdev.write_from(0, [data[:block], data[block:]], _soon())
    assert await _read(bdev, 0, length) == data


async def _check_added_memory(bdev: Bdev) -> None:
    """Buffers inside of the memory the device was given, beside it, and both in one operation."""
    block = bdev.info.block_size
    memories = [_shared_memory(32 << 10), _shared_memory(2 << 20)]
    data = _noise(4 * block)
    await bdev.write_from(0, [data], _soon())
    for fd, mapping in memories:
        view = memoryview(mapping)
        await bdev.add_memory(DeviceMemory(fd, address_of(view), len(view)), _soon())
    first, second = (memoryview(mapping) for _, mapping in memories)
    outside = aligned_buffer(block)
    places = [second[-block:], outside, first[block : 2 * block], second[:block]]
    await bdev.read_into(0, places, _soon())
    assert b"".join(places) == data, "memory inside and outside, in order"
    await bdev.write_from(8 * block, [second[:block], outside, first[block : 2 * block]], _soon())
    assert await _read(bdev, 8 * block, 3 * block) == b"".join(places[i] for i in (3, 1, 2))
    await bdev.aclose()
    for fd, _ in memories:
        os.close(fd)


def _shared_memory(length: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("contract", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, length)
    return fd, mmap.mmap(fd, length, mmap.MAP_SHARED)


async def _check_last_block(bdev: Bdev) -> None:
    block = bdev.info.block_size
    data = _noise(block)
    await bdev.write_from(bdev.info.size_bytes - block, [data], _soon())
    assert await _read(bdev, bdev.info.size_bytes - block, block) == data


async def _check_concurrency_beyond_depth(bdev: Bdev) -> None:
    block = bdev.info.block_size
    count = min(2 * bdev.info.queue_depth + 3, MIN_BYTES // block)
    data, into = _noise(count * block), aligned_buffer(count * block)

    async def write_then_read(i: int) -> None:
        span = slice(i * block, (i + 1) * block)
        await bdev.write_from(i * block, [data[span]], _soon())
        await bdev.read_into(i * block, [into[span]], _soon())

    async with trio.open_nursery() as nursery:
        for i in range(count):
            nursery.start_soon(write_then_read, i)
    assert into == data, "operations are independent, whatever their number"
    assert bdev.stats.in_flight == 0


async def _check_zero_length(bdev: Bdev) -> None:
    await bdev.read_into(0, [], _soon())
    await bdev.write_from(bdev.info.block_size, [], _soon())
    await bdev.deallocate(0, 0, _soon())
    assert bdev.stats.bytes_read == bdev.stats.bytes_written == 0


async def _check_alignment(bdev: Bdev) -> None:
    block = bdev.info.block_size
    buffer = aligned_buffer(4 * block)
    if block > 1:
        for operation in (
            bdev.read_into(1, [buffer], _soon()),
            bdev.read_into(0, [buffer[: block + 1]], _soon()),
            bdev.read_into(0, [buffer[: block - 1], buffer[: block + 1]], _soon()),
            bdev.write_from(block // 2, [buffer], _soon()),
            bdev.deallocate(0, block + 1, _soon()),
        ):
            assert (await _refusal(operation)).status == "unaligned"
    if bdev.info.buffer_align > 1:
        askew = buffer[1 : block + 1]
        error = await _refusal(bdev.read_into(0, [buffer[:block], askew], _soon()))
        assert error.status == "unaligned"
        assert "buffer 1" in str(error), "the message names the buffer"


async def _check_out_of_range(bdev: Bdev) -> None:
    block, size = bdev.info.block_size, bdev.info.size_bytes
    buffer = aligned_buffer(2 * block)
    for operation in (
        bdev.read_into(size, [buffer], _soon()),
        bdev.read_into(size - block, [buffer], _soon()),
        bdev.write_from(size - block, [buffer], _soon()),
        bdev.read_into(-block, [buffer], _soon()),
        bdev.deallocate(size, block, _soon()),
    ):
        error = await _refusal(operation)
        assert error.status == "out_of_range"
        assert str(size) in str(error), "the message names the limit"


async def _check_passed_deadline(bdev: Bdev) -> None:
    data = _noise(bdev.info.block_size)
    await bdev.write_from(0, [data], _soon())
    error = await _refusal(bdev.read_into(0, [aligned_buffer(len(data))], trio.current_time() - 1))
    assert isinstance(error, BdevTimeout)
    assert error.status == "timed_out"
    await error.settled()
    assert bdev.stats.timeouts == 1
    assert bdev.stats.abandoned == 0
    assert await _read(bdev, 0, len(data)) == data, "a timeout does not harm the device"


async def _check_cancellation(bdev: Bdev) -> None:
    data = _noise(1 << 20)
    with trio.CancelScope() as scope:
        scope.cancel()
        await bdev.write_from(0, [data], _soon())
    assert scope.cancelled_caught, "a cancelled caller is told so"
    await bdev.drain()
    assert bdev.stats.in_flight == bdev.stats.abandoned == 0
    await bdev.write_from(0, [data], _soon())
    assert await _read(bdev, 0, len(data)) == data


async def _check_cancellation_in_flight(bdev: Bdev) -> None:
    async with trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(bdev.read_into, i << 20, [aligned_buffer(1 << 20)], _soon())
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    await bdev.drain()
    assert bdev.stats.in_flight == bdev.stats.abandoned == 0


async def _check_deallocate_and_flush(bdev: Bdev) -> None:
    block = bdev.info.block_size
    data = _noise(2 * block)
    await bdev.write_from(0, [data], _soon())
    await bdev.flush(_soon())
    await bdev.deallocate(block, block, _soon())
    assert await _read(bdev, 0, block) == data[:block], "the neighbour of a deallocated range is kept"
    assert bdev.stats.bytes_deallocated == block


async def _check_stats_add_up(bdev: Bdev) -> None:
    block = bdev.info.block_size
    for i in range(3):
        await bdev.write_from(i * block, [aligned_buffer(block)], _soon())
    await bdev.read_into(0, [aligned_buffer(block), aligned_buffer(block)], _soon())
    await _refusal(bdev.read_into(bdev.info.size_bytes, [aligned_buffer(block)], _soon()))
    stats = bdev.stats
    assert (stats.writes, stats.bytes_written) == (3, 3 * block)
    assert (stats.reads, stats.bytes_read) == (1, 2 * block)
    assert (stats.errors, stats.timeouts, stats.in_flight, stats.abandoned) == (1, 0, 0, 0)


async def _check_close(bdev: Bdev) -> None:
    await bdev.aclose()
    await bdev.aclose()
    buffer = aligned_buffer(bdev.info.block_size)
    for operation in (
        bdev.read_into(0, [buffer], _soon()),
        bdev.write_from(0, [buffer], _soon()),
        bdev.deallocate(0, len(buffer), _soon()),
        bdev.flush(_soon()),
    ):
        assert (await _refusal(operation)).status == "closed"
    await bdev.drain()


async def _check_persistence(bdev: Bdev, reopen: Reopen) -> None:
    data = _noise(1 << 20)
    await bdev.write_from(0, [data], _soon())
    await bdev.flush(_soon())
    await bdev.aclose()
    again = await reopen(bdev)
    assert again.info.size_bytes == bdev.info.size_bytes
    assert await _read(again, 0, len(data)) == data, "what was written is there after a restart"
    await again.aclose()


async def _check_late_completion(bdev: Bdev, stall: Stall) -> None:
    data, into = _noise(bdev.info.block_size), aligned_buffer(bdev.info.block_size)
    await bdev.write_from(0, [data], _soon())
    async with stall(bdev):
        error = await _refusal(bdev.read_into(0, [into], trio.current_time() + 0.05))
        assert isinstance(error, BdevTimeout)
        assert (bdev.stats.timeouts, bdev.stats.abandoned, bdev.stats.in_flight) == (1, 1, 1)
        with trio.move_on_after(0.01) as too_early:
            await error.settled()
        assert too_early.cancelled_caught, "settled() waits for the device"
    await error.settled()
    assert (bdev.stats.abandoned, bdev.stats.in_flight) == (0, 0)


async def _check_drain_waits_for_the_abandoned(bdev: Bdev, stall: Stall) -> None:
    async with stall(bdev):
        with trio.move_on_after(0.02):
            await bdev.read_into(0, [aligned_buffer(bdev.info.block_size)], _soon())
        assert bdev.stats.abandoned == 1, "a cancelled operation is abandoned"
        with trio.move_on_after(0.01) as too_early:
            await bdev.drain()
        assert too_early.cancelled_caught
    await bdev.drain()
    assert (bdev.stats.abandoned, bdev.stats.in_flight) == (0, 0)


async def _check_timeout_while_queued(bdev: Bdev, stall: Stall) -> None:
    """An operation the device has not been given yet is withdrawn: its buffers are free at once."""
    block = bdev.info.block_size
    errors: list[BdevError] = []

    async def read(i: int, deadline: float) -> None:
        errors.append(await _refusal(bdev.read_into(i * block, [aligned_buffer(block)], deadline)))

    async with stall(bdev):
        deadline = trio.current_time() + 0.1
        async with trio.open_nursery() as nursery:
            for i in range(bdev.info.queue_depth + 4):
                nursery.start_soon(read, i, deadline)
        assert len(errors) == bdev.info.queue_depth + 4
        assert bdev.stats.abandoned == bdev.stats.in_flight <= bdev.info.queue_depth
    await bdev.drain()
    assert bdev.stats.in_flight == 0
    assert len(await _read(bdev, 0, block)) == block


_CHECKS = (
    _check_info,
    _check_round_trip,
    _check_scatter_lists,
    _check_long_scatter_list,
    _check_read_only_source,
    _check_larger_than_max_transfer,
    _check_added_memory,
    _check_last_block,
    _check_concurrency_beyond_depth,
    _check_zero_length,
    _check_alignment,
    _check_out_of_range,
    _check_passed_deadline,
    _check_cancellation,
    _check_cancellation_in_flight,
    _check_deallocate_and_flush,
    _check_stats_add_up,
    _check_close,
)
_STALLED_CHECKS = (_check_late_completion, _check_drain_waits_for_the_abandoned, _check_timeout_while_queued)
