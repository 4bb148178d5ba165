"""Every backend keeps the `Bdev` contract; what is special to one is tested below it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import address_of, aligned_buffer
from dpurt.bdev.factory import open_bdev
from dpurt.bdev.file import FileBdev
from dpurt.bdev.memory import MemoryBdev
from dpurt.bdev.modelled import ModelledBdev
from dpurt.bdev.operation_queue import Operation, OperationQueue
from dpurt.bdev.paced import PacedBdev
from dpurt.core.device_model import DeviceProfile
from dpurt.errors import BdevError, BdevTimeout, ConfigError
from dpurt.testing.bdev_contract import MIN_BYTES, check_bdev
from dpurt.testing.faulty_bdev import Fault, FaultyBdev

FAST = DeviceProfile(
    name="fast", read_latency_s=1e-4, write_latency_s=2e-4, read_bytes_per_s=2e9, write_bytes_per_s=1e9
)
FLAT = DeviceProfile(
    name="flat",
    read_latency_s=1.0,
    write_latency_s=2.0,
    read_bytes_per_s=4096.0,
    write_bytes_per_s=2048.0,
    jitter=0.0,
)
INF = float("inf")


@contextlib.asynccontextmanager
async def hung(bdev: Bdev) -> AsyncIterator[None]:
    assert isinstance(bdev, FaultyBdev)
    bdev.inject(Fault(op="read", kind="hang", count=10_000))
    yield
    bdev.clear()
    bdev.resume()


async def test_memory_keeps_the_contract() -> None:
    async def make() -> Bdev:
        return await open_bdev("memory", size_bytes=MIN_BYTES)

    async def reopen(bdev: Bdev) -> Bdev:
        assert isinstance(bdev, MemoryBdev)
        return MemoryBdev(image=bdev.image)

    await check_bdev(make, reopen=reopen)


async def test_faulty_keeps_the_contract_even_when_it_hangs() -> None:
    async def make() -> Bdev:
        return FaultyBdev(MemoryBdev(MIN_BYTES, queue_depth=8))

    await check_bdev(make, stall=hung)


async def test_paced_keeps_the_contract() -> None:
    made: list[MemoryBdev] = []

    async def make() -> Bdev:
        made.append(MemoryBdev(MIN_BYTES, queue_depth=8))
        return PacedBdev(made[-1], FAST)

    async def reopen(bdev: Bdev) -> Bdev:
        return PacedBdev(MemoryBdev(image=made[-1].image), FAST)

    await check_bdev(make, reopen=reopen)


async def test_paced_takes_the_longer_of_its_own_time_and_the_profiles(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faulty = FaultyBdev(MemoryBdev(MIN_BYTES))
    bdev, buffer = PacedBdev(faulty, FLAT), aligned_buffer(4096)
    began = trio.current_time()
    await bdev.read_into(0, [buffer], INF)
    assert trio.current_time() - began == pytest.approx(2.0), "1 s to get there, 1 s to move"
    faulty.inject(Fault(op="read", kind="delay", delay_s=5.0))
    began = trio.current_time()
    await bdev.read_into(0, [buffer], INF)
    assert trio.current_time() - began == pytest.approx(5.0)
    await bdev.aclose()


async def test_modelled_keeps_the_contract(autojump_clock: trio.testing.MockClock) -> None:
    async def make() -> Bdev:
        return await open_bdev("modelled", profile=FAST, size_bytes=MIN_BYTES, seed=1)

    async def reopen(bdev: Bdev) -> Bdev:
        assert isinstance(bdev, ModelledBdev)
        return ModelledBdev(profile=FAST, image=bdev.image)

    await check_bdev(make, reopen=reopen)


async def test_file_keeps_the_contract(tmp_path: Path) -> None:
    async def make() -> Bdev:
        return await open_bdev("file", path=tmp_path / "disk", size_bytes=MIN_BYTES)

    async def reopen(bdev: Bdev) -> Bdev:
        return await open_bdev("file", path=bdev.info.detail["path"])

    await check_bdev(make, reopen=reopen)


async def test_file_keeps_the_contract_in_small_pieces_and_shallow(tmp_path: Path) -> None:
    async def make() -> Bdev:
        return await FileBdev.open(
            tmp_path / "disk", size_bytes=MIN_BYTES, queue_depth=2, max_transfer_bytes=8192
        )

    await check_bdev(make)


# --- file ---


@pytest.fixture
def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def picky(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", picky)


@pytest.mark.usefixtures("refuse_direct")
async def test_file_falls_back_to_buffered_and_says_why(tmp_path: Path) -> None:
    async def make() -> Bdev:
        bdev = await FileBdev.open(tmp_path / "disk", size_bytes=MIN_BYTES)
        assert "O_DIRECT" in bdev.info.detail["buffered"]
        return bdev

    await check_bdev(make)


async def test_file_is_direct_where_the_file_system_allows(tmp_path: Path) -> None:
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=1 << 20)) as bdev:
        assert "buffered" not in bdev.info.detail


async def test_file_occupies_its_full_size_from_the_start(tmp_path: Path) -> None:
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=4 << 20)) as bdev:
        assert bdev.info.size_bytes == 4 << 20
        assert (tmp_path / "disk").stat().st_blocks * 512 >= 4 << 20


async def test_file_in_use_is_refused(tmp_path: Path) -> None:
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=1 << 20)):
        with pytest.raises(BdevError, match="another process uses this file"):
            await FileBdev.open(tmp_path / "disk")
    await (await FileBdev.open(tmp_path / "disk")).aclose()


async def test_missing_file_without_a_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BdevError, match="No such file"):
        await FileBdev.open(tmp_path / "disk")
    assert not (tmp_path / "disk").exists()


async def test_a_larger_file_is_not_truncated(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"x" * 65536)
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=8192)) as bdev:
        assert bdev.info.size_bytes == 8192
    assert (tmp_path / "disk").stat().st_size == 65536


async def test_file_cut_short_under_us_is_a_short_read(tmp_path: Path) -> None:
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=65536)) as bdev:
        os.truncate(tmp_path / "disk", 8192)
        with pytest.raises(BdevError) as caught:
            await bdev.read_into(0, [aligned_buffer(65536)], INF)
        assert caught.value.status == "short"
        assert bdev.stats.errors == 1


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_file_that_cannot_have_its_size_is_as_it_was_before(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 65536)
    with largest_file(1 << 20):
        for name in ("old", "new"):
            with pytest.raises(BdevError, match="File too large"):
                await FileBdev.open(tmp_path / name, size_bytes=4 << 20)
    assert (tmp_path / "old").read_bytes() == b"x" * 65536
    assert not (tmp_path / "new").exists()


async def test_a_file_too_small_to_be_ours_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("do not lose me")
    with pytest.raises(BdevError, match="holds 14 bytes that are not a store's"):
        await FileBdev.open(tmp_path / "note", size_bytes=1 << 20)
    assert (tmp_path / "note").read_text() == "do not lose me"


async def test_no_file_is_made_in_the_place_of_a_missing_device() -> None:
    path = Path("/dev/dpurt-no-such-device")
    with pytest.raises(BdevError, match="makes no files in /dev"):
        await FileBdev.open(path, size_bytes=1 << 20)
    assert not await trio.Path(path).exists()


# --- factory ---


async def test_unknown_kind_and_parameters_are_named() -> None:
    with pytest.raises(
        ConfigError, match="unknown kind 'tape'; known: file, memory, modelled, nvme-rdma, nvme-tcp"
    ):
        await open_bdev("tape")
    with pytest.raises(ConfigError, match="colour"):
        await open_bdev("memory", size_bytes=4096, colour="red")


# --- modelled ---


async def test_modelled_read_takes_latency_plus_transfer(autojump_clock: trio.testing.MockClock) -> None:
    bdev = ModelledBdev(1 << 20, profile=FLAT)
    start = trio.current_time()
    await bdev.read_into(0, [aligned_buffer(8192)], INF)
    assert trio.current_time() - start == pytest.approx(1.0 + 2.0)


async def test_modelled_deep_queue_runs_at_the_bandwidth(autojump_clock: trio.testing.MockClock) -> None:
    bdev = ModelledBdev(1 << 20, profile=FLAT)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for i in range(32):
            nursery.start_soon(bdev.read_into, i * 4096, [aligned_buffer(4096)], INF)
    assert trio.current_time() - start == pytest.approx(32.0)


async def test_modelled_times_repeat_by_seed(autojump_clock: trio.testing.MockClock) -> None:
    async def elapsed(seed: int) -> float:
        bdev = ModelledBdev(1 << 20, profile=FAST, seed=seed)
        start = trio.current_time()
        for _ in range(20):
            await bdev.read_into(0, [aligned_buffer(4096)], INF)
        return round(trio.current_time() - start, 9)

    assert await elapsed(3) == await elapsed(3) != await elapsed(4)


async def test_modelled_abandoned_read_still_lands_late(autojump_clock: trio.testing.MockClock) -> None:
    bdev = ModelledBdev(1 << 20, profile=FLAT)
    bdev.image[:4096] = b"k" * 4096
    into = aligned_buffer(4096)
    with pytest.raises(BdevTimeout) as caught:
        await bdev.read_into(0, [into], trio.current_time() + 0.5)
    assert trio.current_time() == pytest.approx(0.5)
    assert not any(into)
    await caught.value.settled()
    assert trio.current_time() == pytest.approx(2.0)
    assert into == b"k" * 4096


# --- deadlines ---


async def test_each_operation_is_given_up_at_its_own_deadline(autojump_clock: trio.testing.MockClock) -> None:
    bdev = FaultyBdev(MemoryBdev(1 << 20, queue_depth=2))
    bdev.inject(Fault(op="read", kind="hang", count=10))
    ends = {}

    async def read(delay: float) -> None:
        with pytest.raises(BdevTimeout):
            await bdev.read_into(0, [aligned_buffer(4096)], trio.current_time() + delay)
        ends[delay] = trio.current_time()

    start = trio.current_time()
    delays = [5.0, 3.0, 8.0, 1.0, 3.0001]
    async with trio.open_nursery() as nursery:
        for delay in delays:
            nursery.start_soon(read, delay)
            await trio.sleep(0.01)
    for nth, delay in enumerate(delays):
        assert ends[delay] - start == pytest.approx(delay + nth * 0.01)
    assert (bdev.stats.timeouts, bdev.stats.abandoned) == (5, 2), "the others never reached the device"
    bdev.resume()
    await bdev.drain()
    assert (bdev.stats.in_flight, bdev.stats.abandoned) == (0, 0)


async def test_a_deadline_to_come_keeps_no_buffer_of_an_answered_operation(tmp_path: Path) -> None:
    async with contextlib.aclosing(await FileBdev.open(tmp_path / "disk", size_bytes=1 << 20)) as bdev:
        memory = mmap.mmap(-1, 4096)
        await bdev.read_into(0, [memoryview(memory)], trio.current_time() + 1000)
        memory.close()  # BufferError if somebody held it


async def test_many_operations_leave_few_deadlines_behind(autojump_clock: trio.testing.MockClock) -> None:
    bdev = ModelledBdev(1 << 20, profile=FAST)
    buffer = aligned_buffer(4096)
    tracemalloc.start()
    try:
        for _ in range(2000):
            await bdev.read_into(0, [buffer], trio.current_time() + 1000)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


# --- faults ---


async def test_faults_do_what_they_say(autojump_clock: trio.testing.MockClock) -> None:
    bdev = FaultyBdev(MemoryBdev(1 << 20))
    data, into = aligned_buffer(8192), aligned_buffer(8192)
    data[:] = b"d" * 8192
    await bdev.write_from(0, [data], INF)

    bdev.inject(Fault(op="read", kind="error", status="io_error"))
    with pytest.raises(BdevError, match="injected"):
        await bdev.read_into(0, [into], INF)

    bdev.inject(Fault(op="read", kind="corrupt", at=5000))
    await bdev.read_into(0, [into[:4096], into[4096:]], INF)
    assert [i for i in range(8192) if into[i] != data[i]] == [5000]

    bdev.inject(Fault(op="read", kind="delay", delay_s=2.0))
    start = trio.current_time()
    await bdev.read_into(0, [into], INF)
    assert trio.current_time() - start == pytest.approx(2.0)

    bdev.inject(Fault(op="write", kind="short"))
    with pytest.raises(BdevError, match="short"):
        await bdev.write_from(8192, [data], INF)
    await bdev.read_into(8192, [into], INF)
    assert into[:4096] == data[:4096]
    assert not any(into[4096:])

    bdev.inject(Fault(op="write", kind="corrupt", at=100))
    await bdev.write_from(0, [data], INF)
    await bdev.read_into(0, [into], INF)
    assert into[100] == data[100] ^ 0xFF
    assert data[100] == ord("d"), "the caller's buffer is not touched"


def test_address_of_views() -> None:
    buffer = aligned_buffer(8192)
    assert address_of(buffer) % 4096 == 0
    assert address_of(buffer[100:]) == address_of(buffer) + 100 == address_of(buffer[100:].toreadonly())


async def test_file_gives_the_device_what_waits_before_it_answers_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    launch, answer = FileBdev._launch, OperationQueue.answer

    def note_launch(bdev: FileBdev, operation: Operation) -> None:
        steps.append("launch")
        launch(bdev, operation)

    def note_answer(queue: OperationQueue, operation: Operation, error: BdevError | None = None) -> None:
        steps.append("answer")
        answer(queue, operation, error)

    monkeypatch.setattr(FileBdev, "_launch", note_launch)
    monkeypatch.setattr(OperationQueue, "answer", note_answer)
    async with contextlib.aclosing(
        await FileBdev.open(tmp_path / "disk", size_bytes=1 << 20, queue_depth=1)
    ) as bdev:
        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(bdev.read_into, i * 4096, [aligned_buffer(4096)], INF)
    assert steps[:3] == ["launch", "launch", "answer"]


async def test_what_is_launched_ahead_takes_the_places_of_those_that_ended_and_no_more() -> None:
    launched: list[Operation] = []
    queue = OperationQueue(replace(MemoryBdev(1 << 20).info, queue_depth=3), launched.append)
    async with trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(queue.run, "read", i * 4096, 4096, [aligned_buffer(4096)], INF)
        await trio.testing.wait_all_tasks_blocked()
        assert len(launched) == 3
        queue.launch_ahead(2)
        assert len(launched) == 5
        for operation in launched[:2]:
            queue.answer(operation)
        assert len(launched) == 5, "their places are taken"
        while queue.stats.in_flight:
            queue.answer(next(operation for operation in launched if not operation.is_answered))
            assert sum(not operation.is_answered for operation in launched) <= 3
