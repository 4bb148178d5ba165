"""Adapters, queue pairs, registered memory and windows on Soft-RoCE."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from dpurt.bdev.buffers import address_of
from dpurt.errors import QueuePairError, RdmaUnavailable
from dpurt.rdma.device import discover, find, why_off
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration
from dpurt.rdma.queue_pair import Bind, Opcode, QueuePair, Received, Sge, Work

pytestmark = pytest.mark.vm

SIZE = 1 << 20
REMOTE = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


def soon() -> float:
    return trio.current_time() + 15


@dataclass
class Side:
    adapter: Adapter
    queue_pair: QueuePair
    memory: memoryview
    registration: Registration

    def sge(self, offset: int, length: int) -> Sge:
        [segment] = self.registration.segments(self.registration.address + offset, length)
        return Sge(segment.address, length, segment.chunk.lkey)


def make_side(max_chunk_bytes: int = 1 << 40) -> Side:
    adapter = Adapter(find(), max_completions=512, max_chunk_bytes=max_chunk_bytes)
    access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.MW_BIND | Access.LOCAL_WRITE
    queue_pair = adapter.queue_pair(send_depth=8, receive_depth=4, access=access)
    memory = memoryview(mmap.mmap(-1, SIZE))
    registration = adapter.register(address_of(memory), SIZE, REMOTE | Access.MW_BIND, memory)
    queue_pair.prepare()
    return Side(adapter, queue_pair, memory, registration)


@asynccontextmanager
async def pair(max_chunk_bytes: int = 1 << 40) -> AsyncIterator[tuple[Side, Side]]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            sides = make_side(max_chunk_bytes), make_side(max_chunk_bytes)
            for side in sides:
                await nursery.start(side.adapter.run)
            sides[0].queue_pair.connect(sides[1].queue_pair.address)
            sides[1].queue_pair.connect(sides[0].queue_pair.address)
            try:
                yield sides
            finally:
                for side in sides:
                    await side.queue_pair.aclose()
                    side.adapter.close()


def read(near: Side, far: Side, offset: int, length: int, rkey: int | None = None) -> Work:
    at = far.registration.address + offset
    [segment] = far.registration.segments(at, length)
    key = segment.chunk.rkey if rkey is None else rkey
    return Work(Opcode.READ, (near.sge(offset, length),), at, key)


def test_the_device_is_found_by_name_and_by_address():
    [device] = discover()
    assert why_off() == ""
    assert (device.name, device.address) == ("rxe0", "10.9.0.1")
    assert device.limits.has_windows
    assert find("rxe0") == find(address="10.9.0.1") == find()
    with pytest.raises(RdmaUnavailable, match="no such device; there is rxe0 port 1"):
        find("mlx5_0")


async def test_reads_in_chains_longer_than_the_queue_bring_the_bytes():
    async with pair() as (near, far):
        far.memory[:] = os.urandom(SIZE)
        works = [read(near, far, offset, 8192) for offset in range(0, SIZE, 8192)]
        await near.queue_pair.run(works, soon())
        assert near.memory == far.memory
        assert near.adapter.stats.completions < len(works)  # unsignalled ones are not reported


async def test_a_write_with_immediate_is_received_with_its_number():
    async with pair() as (near, far):
        near.memory[:100] = b"x" * 100
        arrived: list[Received] = []
        got = trio.Event()
        far.queue_pair.post_receive(far.sge(0, 8), lambda r: (arrived.append(r), got.set()))
        [segment] = far.registration.segments(far.registration.address, 100)
        work = Work(
            Opcode.WRITE_IMMEDIATE, (near.sge(0, 100),), segment.address, segment.chunk.rkey, 0xFEED0001
        )
        await near.queue_pair.run([work], soon())
        await got.wait()
        assert arrived == [Received("success", 100, 0xFEED0001)]
        assert far.memory[:100] == b"x" * 100


async def test_a_wrong_key_is_refused_and_named_and_ends_the_queue_pair():
    async with pair() as (near, far):
        failed = trio.Event()
        near.queue_pair.on_failed = failed.set
        [segment] = far.registration.segments(far.registration.address, 10)
        works = [
            read(near, far, 0, 10, segment.chunk.rkey ^ 0xFF),
            *(read(near, far, 0, 10) for _ in range(20)),
        ]
        with pytest.raises(QueuePairError, match="remote_access"):
            await near.queue_pair.run(works, soon())
        assert failed.is_set()
        assert not near.queue_pair.is_usable
        with pytest.raises(QueuePairError, match="flushed"):
            await near.queue_pair.run([read(near, far, 0, 10)], soon())
        assert near.memory[:10] == bytes(10)


async def test_a_window_opens_its_range_only_and_closing_it_ends_that():
    async with pair() as (near, far):
        far.memory[:] = os.urandom(SIZE)
        window = far.adapter.window()
        at = far.registration.address + 4096
        [segment] = far.registration.segments(at, 8192)
        await far.queue_pair.run([Bind(window, segment.chunk, at, 8192, Access.REMOTE_READ)], soon())
        await near.queue_pair.run([read(near, far, 4096, 8192, window.rkey)], soon())
        assert near.memory[4096:12288] == far.memory[4096:12288]
        window.close()
        with pytest.raises(QueuePairError, match="remote_access"):
            await near.queue_pair.run([read(near, far, 4096, 8192, window.rkey)], soon())


async def test_a_window_for_reading_cannot_be_written():
    async with pair() as (near, far):
        window = far.adapter.window()
        at = far.registration.address + 4096
        [segment] = far.registration.segments(at, 64)
        await far.queue_pair.run([Bind(window, segment.chunk, at, 64, Access.REMOTE_READ)], soon())
        with pytest.raises(QueuePairError, match="remote_access"):
            await near.queue_pair.run([Work(Opcode.WRITE, (near.sge(0, 64),), at, window.rkey)], soon())
        window.close()


async def test_memory_is_registered_in_chunks_where_the_limit_asks():
    async with pair(max_chunk_bytes=64 << 10) as (near, far):
        assert far.registration.num_chunks == 16
        far.memory[:] = os.urandom(SIZE)
        start = far.registration.address
        cuts = list(far.registration.segments(start + 1, (200 << 10)))
        assert sum(cut.length for cut in cuts) == 200 << 10
        assert len(cuts) == 4
        works = [
            Work(Opcode.READ, (near.sge(cut.address - start, cut.length),), cut.address, cut.chunk.rkey)
            for cut in cuts
        ]
        await near.queue_pair.run(works, soon())
        assert near.memory[1 : 1 + (200 << 10)] == far.memory[1 : 1 + (200 << 10)]


async def test_a_late_run_leaves_nothing_posted():
    async with pair() as (near, far):
        works = [read(near, far, 0, 64 << 10) for _ in range(64)]
        with pytest.raises(QueuePairError, match="timed_out"):
            await near.queue_pair.run(works, trio.current_time() + 0.01)
        assert near.queue_pair.send_room == 8
        await near.queue_pair.run(works[:1], soon())


async def test_an_idle_adapter_sleeps():
    async with pair() as (near, far):
        await near.queue_pair.run([read(near, far, 0, 10)], soon())
        await trio.sleep(0.3)
        before = near.adapter.stats.polls
        await trio.sleep(0.5)
        assert near.adapter.stats.polls == before
