"""The vhost-user bdev when the back end is slow, wrong, hostile, stopped or dead.

Who the peer is is said by each test: `FakeVhostTarget` (ours, for what no real back end does on demand) or
qemu-storage-daemon.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

import dpurt.bdev.memory_fence as memory_fence
from dpurt.bdev import DeviceMemory, vhost_session
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.vhost_memory import OwnMemory
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.errors import BdevError, BdevTimeout, ConfigError
from dpurt.fabric.region import MemfdRegion
from dpurt.testing.fake_spdk import vhost_target
from dpurt.testing.fake_spdk.vhost_target import FakeVhostTarget
from dpurt.testing.qemu_storage import QEMU_STORAGE_DAEMON, QemuStorage, file_node

SIZE = 1 << 20
INF = float("inf")


def soon(seconds: float = 10.0) -> float:
    return trio.current_time() + seconds


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "vhost.sock"


@pytest.fixture
def target(socket_path: Path) -> Iterator[FakeVhostTarget]:
    with FakeVhostTarget(socket_path, SIZE) as running:
        running.image[:] = random.Random(1).randbytes(SIZE)
        yield running


@pytest.fixture
def region() -> Iterator[MemfdRegion]:
    made = MemfdRegion(1, "arena", 1 << 20, huge_pages=False)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def opened(
    path: Path, region: MemfdRegion | None = None, **options: Any
) -> AsyncIterator[VhostUserBdev]:
    bdev = await VhostUserBdev.open(path, **{"close_s": 0.05, "answer_s": 2.0} | options)
    try:
        if region is not None:
            await bdev.add_memory(DeviceMemory(region.fd, region.address, region.size), soon())
        yield bdev
    finally:
        await bdev.aclose()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # what is waited for is in another thread or process
            await trio.sleep(0.002)


async def failure_of(operation: Any) -> BdevError:
    with pytest.raises(BdevError) as caught:
        await operation
    return caught.value


async def good_again(bdev: VhostUserBdev, offset: int = 0) -> memoryview:
    """Read until the back end is back."""
    buffer = aligned_buffer(4096)
    with trio.fail_after(10):
        while True:
            try:
                await bdev.read_into(offset, [buffer], soon())
                return buffer
            except BdevError as error:
                if error.status != "unavailable":
                    raise
                await trio.sleep(0.005)


# --- the device's word ---


async def test_status_one_is_an_io_error_and_the_next_read_is_good(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    async with opened(socket_path, region) as bdev:
        target.num_to_fail = 2
        for _ in range(2):
            error = await failure_of(bdev.read_into(0, [region.view[:4096]], soon()))
            assert error.status == "io_error"
        await bdev.read_into(0, [region.view[:4096]], soon())
        assert region.view[:4096] == target.image[:4096]
        assert (bdev.stats.errors, bdev.stats.reads) == (2, 1)


async def test_corrupt_data_with_good_status_is_delivered_as_it_is(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    """Only a checksum above can see it: the block store's business."""
    async with opened(socket_path, region) as bdev:
        target.num_to_corrupt = 1
        await bdev.read_into(0, [region.view[:4096]], soon())
        wrong = [i for i in range(4096) if region.view[i] != target.image[i]]
        assert wrong == [7]


async def test_past_the_end_is_refused_before_the_device_hears_of_it(
    target: FakeVhostTarget, socket_path: Path
) -> None:
    async with opened(socket_path) as bdev:
        error = await failure_of(bdev.read_into(SIZE, [aligned_buffer(512)], soon()))
        assert error.status == "out_of_range"
        assert target.num_requests == 0


async def test_a_read_only_device_is_refused_in_words(socket_path: Path) -> None:
    with FakeVhostTarget(socket_path, SIZE, is_read_only=True):
        error = await failure_of(VhostUserBdev.open(socket_path))
        assert "read-only" in str(error)


async def test_no_back_end_is_unavailable(socket_path: Path) -> None:
    error = await failure_of(VhostUserBdev.open(socket_path))
    assert error.status == "unavailable"
    assert str(socket_path) in str(error)


async def test_without_libatomic_the_error_says_what_to_install(
    target: FakeVhostTarget, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fence, "_LIBRARY", "libatomic-missing.so")
    assert "libatomic1" in str(await failure_of(VhostUserBdev.open(socket_path)))


# --- all kinds of back ends ---


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"has_event_idx": False},
        {"has_indirect": False, "has_mem_slots": False},
        {"has_reply_ack": False, "has_mem_slots": False},
        {"size_max": 131072, "block_size": 4096},
        {"is_polling": True, "has_event_idx": False, "has_mem_slots": False},
    ],
    ids=lambda traits: ",".join(traits) or "all features",
)
async def test_data_is_right_whatever_the_back_end_offers(
    socket_path: Path, region: MemfdRegion, traits: dict[str, Any]
) -> None:
    with FakeVhostTarget(socket_path, SIZE, **traits) as target:
        target.image[:] = random.Random(2).randbytes(SIZE)
        async with opened(socket_path, region) as bdev:
            await bdev.read_into(0, [region.view], soon())
            assert region.view == target.image
            outside = aligned_buffer(SIZE)
            await bdev.read_into(0, [outside], soon())
            assert outside == target.image
            region.view[:8192] = os.urandom(8192)
            await bdev.write_from(8192, [region.view[:8192]], soon())
            assert target.image[8192:16384] == region.view[:8192]
            await bdev.deallocate(8192, 4096, soon())
            await bdev.flush(soon())
            assert not any(target.image[8192:12288])


async def test_memory_is_added_under_load_without_an_operation_lost(
    socket_path: Path, region: MemfdRegion
) -> None:
    """A back end without memory slots: rings run dry, stop, get the new table and start again."""
    with FakeVhostTarget(socket_path, SIZE, has_mem_slots=False) as target:
        target.image[:] = random.Random(3).randbytes(SIZE)
        async with opened(socket_path) as bdev, trio.open_nursery() as nursery:
            into = aligned_buffer(SIZE)

            async def read(start: int) -> None:
                for offset in range(start, SIZE, 8 * 4096):
                    await bdev.read_into(offset, [into[offset : offset + 4096]], soon())

            for i in range(8):
                nursery.start_soon(read, i * 4096)
            await trio.lowlevel.checkpoint()
            await bdev.add_memory(DeviceMemory(region.fd, region.address, region.size), soon())
            assert target.requests.count(5) == 2, "SET_MEM_TABLE"
        assert into == target.image


async def test_more_memory_than_the_table_holds_is_reached_by_copies(socket_path: Path) -> None:
    with FakeVhostTarget(socket_path, SIZE, has_mem_slots=False) as target:
        regions = [MemfdRegion(i, "r", 4096, huge_pages=False) for i in range(9)]
        async with opened(socket_path) as bdev:
            for each in regions:
                await bdev.add_memory(DeviceMemory(each.fd, each.address, each.size), soon())
            assert bdev.info.detail["copied_memory"] == "2"
            for i, each in enumerate(regions):
                await bdev.read_into(i * 4096, [each.view], soon())
                assert each.view == target.image[i * 4096 : (i + 1) * 4096]
        for each in regions:
            each.close()


async def test_a_polling_back_end_is_not_kicked(socket_path: Path, region: MemfdRegion) -> None:
    with FakeVhostTarget(socket_path, SIZE, is_polling=True, has_event_idx=False) as target:
        async with opened(socket_path, region) as bdev:
            await bdev.read_into(0, [region.view[:4096]], soon())
            before = target.num_kicks
            for _ in range(20):
                await bdev.read_into(0, [region.view[:4096]], soon())
            assert target.num_kicks == before


async def test_many_operations_that_need_no_device_end_without_a_recursion(
    socket_path: Path, region: MemfdRegion
) -> None:
    with FakeVhostTarget(socket_path, SIZE, has_discard=False) as target:
        async with opened(socket_path, region, queue_size=4) as bdev:
            target.is_holding = True
            async with trio.open_nursery() as nursery:
                for i in range(4):
                    nursery.start_soon(bdev.read_into, 0, [region.view[i * 512 : (i + 1) * 512]], soon())
                await until(lambda: target.num_held == 4)
                for _ in range(3000):
                    nursery.start_soon(bdev.deallocate, 0, 512, soon())
                await trio.testing.wait_all_tasks_blocked()
                target.release()
            assert bdev.stats.bytes_deallocated == 3000 * 512


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"queue_size": 100}, "queue_size"),
        ({"num_queues": 0}, "num_queues"),
        ({"bounce_bytes": 1}, "bounce_bytes"),
    ],
)
async def test_numbers_that_cannot_be_are_named(
    socket_path: Path, options: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await VhostUserBdev.open(socket_path, **options)


def test_a_back_end_cannot_cut_our_memory_short() -> None:
    memory = OwnMemory("test", 1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.close()


# --- late ---


async def test_a_late_completion_never_shows_in_another_operations_buffer(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    """The slot of a hung read stays the device's until it answers; others go on beside it."""
    hung, other = region.view[:4096], region.view[4096:8192]
    async with opened(socket_path, region, queue_size=4) as bdev:
        target.is_holding = True
        error = await failure_of(bdev.read_into(0, [hung], soon(0.03)))
        assert isinstance(error, BdevTimeout)
        assert (bdev.stats.abandoned, target.num_held) == (1, 1)
        target.is_holding = False
        for i in range(20):
            await bdev.read_into(8192 + i * 4096, [other], soon())
            assert other == target.image[8192 + i * 4096 : 12288 + i * 4096]
        with trio.move_on_after(0.01) as too_early:
            await error.settled()
        assert too_early.cancelled_caught, "not free before the device has answered"
        assert not any(hung)
        target.release()
        await error.settled()
        assert hung == target.image[:4096], "it did write there, late"
        assert other == target.image[8192 + 19 * 4096 : 12288 + 19 * 4096]
        assert bdev.stats.abandoned == 0


async def test_a_late_bounced_read_touches_nobodys_buffer(target: FakeVhostTarget, socket_path: Path) -> None:
    hung, other = aligned_buffer(4096), aligned_buffer(4096)
    async with opened(socket_path, bounce_bytes=128 << 10) as bdev:
        target.is_holding = True
        error = await failure_of(bdev.read_into(0, [hung], soon(0.03)))
        assert isinstance(error, BdevTimeout)
        target.is_holding = False
        for i in range(1, 20):
            await bdev.read_into(i * 4096, [other], soon())
            assert other == target.image[i * 4096 : (i + 1) * 4096]
        target.release()
        await error.settled()
        assert not any(hung)


async def test_buffers_beyond_the_bounce_area_wait_for_it(target: FakeVhostTarget, socket_path: Path) -> None:
    async with opened(socket_path, bounce_bytes=64 << 10) as bdev:
        target.is_holding = True
        first = aligned_buffer(4096)
        rest = [aligned_buffer(4096) for _ in range(5)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bdev.read_into, 0, [first], soon())
            await until(lambda: target.num_held == 1)
            for i, buffer in enumerate(rest):
                nursery.start_soon(bdev.read_into, i * 4096, [buffer], soon())
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert target.num_requests == 1
            target.release()
        assert [bytes(b) for b in rest] == [bytes(target.image[i * 4096 : (i + 1) * 4096]) for i in range(5)]


# --- lies ---


@pytest.mark.parametrize("lie", ["unknown", "twice", "jump"])
async def test_a_lie_in_the_used_ring_costs_the_session_and_frees_no_buffer(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion, lie: str
) -> None:
    async with opened(socket_path, region) as bdev:
        target.is_holding = True
        ends: list[BdevError] = []

        async def read() -> None:
            ends.append(await failure_of(bdev.read_into(0, [region.view[:4096]], soon(0.2))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: target.num_held == 1)
            target.is_holding = False
            target.lie = lie
            with contextlib.suppress(BdevError):
                await bdev.read_into(4096, [region.view[4096:8192]], soon(0.2))
            await until(lambda: bdev.stats.reconnects == 1)
        assert isinstance(ends[0], BdevTimeout), "the liar lives, so the buffer is not free"
        assert bdev.stats.abandoned >= 1
        target.release()  # even now its word is not believed
        with trio.move_on_after(0.05) as too_early:
            await ends[0].settled()
        assert too_early.cancelled_caught
        assert await good_again(bdev) == target.image[:4096]


async def test_what_waits_for_room_is_not_shown_to_a_liar(target: FakeVhostTarget, socket_path: Path) -> None:
    async with opened(socket_path, bounce_bytes=128 << 10) as bdev:
        target.is_holding = True
        ends: dict[str, str] = {}

        async def read(name: str) -> None:
            try:
                await bdev.read_into(0, [aligned_buffer(4096)], soon(0.5))
                ends[name] = "ok"
            except BdevError as error:
                ends[name] = error.status

        async with trio.open_nursery() as nursery:
            for held, name in enumerate(("first", "second"), 1):
                nursery.start_soon(read, name)
                await until(lambda held=held: target.num_held == held)  # type: ignore[misc]
            nursery.start_soon(read, "waiting")
            await trio.testing.wait_all_tasks_blocked(0.01)
            target.lie = "twice"  # once is good, and makes room
            target.release(1)
        assert ends == {"first": "ok", "second": "timed_out", "waiting": "unavailable"}
        target.is_holding = False
        assert await good_again(bdev) == target.image[:4096]


async def test_noise_in_the_used_ring_never_harms_more_than_the_session(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    async with opened(socket_path, region, queue_size=64) as bdev:
        for nth in range(1, 21):
            target.lie = "noise"
            with contextlib.suppress(BdevError):
                await bdev.read_into(0, [region.view[:4096]], soon(0.02))
            await until(lambda nth=nth: bdev.stats.reconnects == nth)  # type: ignore[misc]
            into = region.view[nth * 4096 : (nth + 1) * 4096]
            await bdev.read_into(8192, [into], soon())
            assert into == target.image[8192:12288]
        assert bdev.stats.in_flight <= 20


async def test_garbled_answers_fail_the_opening_and_hang_nobody(
    target: FakeVhostTarget, socket_path: Path
) -> None:
    rng = random.Random(4)

    def garble(request: int, reply: bytes) -> bytes:
        cut = bytearray(reply)
        how = rng.randrange(3)
        if how == 0:
            cut[rng.randrange(len(cut))] ^= 1 << rng.randrange(8)
        elif how == 1:
            cut[rng.randrange(12, len(cut)) :] = rng.randbytes(rng.randrange(40))
        else:
            cut[:] = rng.randbytes(rng.randrange(1, 64))
        return bytes(cut)

    outcomes = set()
    for _ in range(150):
        turns = rng.randrange(12)
        seen = [0]

        def some(request: int, reply: bytes, turns: int = turns, seen: list[int] = seen) -> bytes:
            seen[0] += 1
            return garble(request, reply) if seen[0] == turns else reply

        target.garble = some
        try:
            bdev = await VhostUserBdev.open(socket_path, answer_s=0.02, close_s=0.01)
        except BdevError as error:
            outcomes.add(error.status)
        else:
            outcomes.add("opened")
            await bdev.aclose()
    assert outcomes == {"unavailable", "opened"}


@pytest.mark.parametrize("is_backend_channel", [False, True])
async def test_noise_on_a_live_connection_costs_the_session_only(
    target: FakeVhostTarget, socket_path: Path, is_backend_channel: bool
) -> None:
    rng = random.Random(6)
    async with opened(socket_path) as bdev:
        for nth in range(1, 6):
            await good_again(bdev)
            target.say(b"\xff" * 12 + rng.randbytes(20), unasked_on_backend_channel=is_backend_channel)
            await until(lambda nth=nth: bdev.stats.reconnects == nth)  # type: ignore[misc]
        assert await good_again(bdev) == target.image[:4096]


# --- loss ---


async def test_a_connection_lost_with_a_living_back_end_frees_a_buffer_only_when_it_answers(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    hung = region.view[:4096]
    async with opened(socket_path, region) as bdev:
        target.is_holding = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bdev.read_into, 0, [hung], soon())
            await until(lambda: target.num_held == 1)
            target.drop()
            await until(lambda: bdev.stats.reconnects == 1)
            assert bdev.stats.in_flight == 1
            target.release()
        assert hung == target.image[:4096], "the old ring showed that it was read after all"


async def test_while_the_back_end_is_down_operations_fail_at_once(socket_path: Path) -> None:
    with FakeVhostTarget(socket_path, SIZE):
        bdev = await VhostUserBdev.open(socket_path)
        await bdev.read_into(0, [aligned_buffer(512)], soon())
    with trio.fail_after(1):
        await until(lambda: bdev._session is None)
        for operation in (bdev.read_into(0, [aligned_buffer(512)], INF), bdev.flush(INF)):
            assert (await failure_of(operation)).status == "unavailable"
        errors = []

        async def read() -> None:
            errors.append(await failure_of(bdev.read_into(0, [aligned_buffer(512)], INF)))

        async with trio.open_nursery() as nursery:
            for _ in range(2000):
                nursery.start_soon(read)
        assert len(errors) == 2000
    with FakeVhostTarget(socket_path, SIZE):
        await good_again(bdev)
        assert bdev.stats.reconnects == 1
        await bdev.aclose()


@pytest.mark.parametrize("has_peer_pidfd", [True, False])
async def test_a_back_end_that_dies_with_requests_ends_them_and_comes_back(
    socket_path: Path, region: MemfdRegion, monkeypatch: pytest.MonkeyPatch, has_peer_pidfd: bool
) -> None:
    """The fake as a process that kills itself when it has taken the third request; on old kernels (before 6.5) too."""
    if not has_peer_pidfd:
        monkeypatch.setattr(vhost_session, "_SO_PEERPIDFD", 9999)
    command = [sys.executable, vhost_target.__file__, str(socket_path), str(SIZE)]
    process = await trio.lowlevel.open_process([*command, "--die-after", "3"])
    await until(socket_path.exists)
    await until_connects(socket_path)
    async with opened(socket_path, region) as bdev:
        errors: list[BdevError] = []

        async def read(i: int) -> None:
            try:
                await bdev.read_into(0, [region.view[i * 512 : (i + 1) * 512]], INF)
            except BdevError as error:
                errors.append(error)

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for i in range(8):
                    nursery.start_soon(read, i)
        assert {error.status for error in errors} == {"unavailable"}
        assert (bdev.stats.in_flight, bdev.stats.abandoned) == (0, 0)
        await process.wait()
        with FakeVhostTarget(socket_path, SIZE) as target:
            assert await good_again(bdev) == target.image[:4096]
            await bdev.read_into(0, [region.view[:4096]], soon())


async def until_connects(path: Path) -> None:
    with trio.fail_after(10):
        while True:
            try:
                await (await trio.open_unix_socket(path)).aclose()
                return
            except OSError:
                await trio.sleep(0.005)


async def test_closing_under_a_hung_read_ends_and_tells_the_reader(
    target: FakeVhostTarget, socket_path: Path, region: MemfdRegion
) -> None:
    async with opened(socket_path, region) as bdev:
        target.is_holding = True
        errors = []

        async def read() -> None:
            errors.append(await failure_of(bdev.read_into(0, [region.view[:4096]], INF)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: target.num_held == 1)
            with trio.fail_after(2):
                await bdev.aclose()
        assert isinstance(errors[0], BdevTimeout)
        target.release()
        with trio.fail_after(3):
            await errors[0].settled()


async def test_a_resize_is_seen(target: FakeVhostTarget, socket_path: Path) -> None:
    async with opened(socket_path) as bdev:
        target.resize(2 * SIZE)
        await until(lambda: bdev.info.size_bytes == 2 * SIZE)
        await bdev.read_into(2 * SIZE - 512, [aligned_buffer(512)], soon())
        target.resize(SIZE)
        await until(lambda: bdev.info.size_bytes == SIZE)
        assert (
            await failure_of(bdev.read_into(SIZE, [aligned_buffer(512)], soon()))
        ).status == "out_of_range"


# --- qemu-storage-daemon ---


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[QemuStorage]:
    if QEMU_STORAGE_DAEMON is None:
        pytest.skip("qemu-storage-daemon is not installed (Debian package qemu-system-common)")
    disk = tmp_path / "disk"
    disk.write_bytes(random.Random(7).randbytes(SIZE) * 16)
    slow = "throttle,node-name=slow,throttle-group=limit,file=disk"
    daemon = QemuStorage(
        tmp_path, [file_node(disk), slow], export="slow", objects=["throttle-group,id=limit"]
    )
    async with daemon:
        yield daemon


def throttle(daemon: QemuStorage, bytes_per_s: int) -> None:
    limits = {"bps-total": bytes_per_s}
    daemon.qmp("qom-set", path="/objects/limit", property="limits", value=limits)


async def test_qemu_killed_in_flight_ends_operations_and_serves_again_after_a_restart(
    daemon: QemuStorage, tmp_path: Path, region: MemfdRegion
) -> None:
    disk = (tmp_path / "disk").read_bytes()
    async with opened(daemon.path, region) as bdev:
        throttle(daemon, 1 << 20)
        errors: list[BdevError] = []

        async def read(i: int) -> None:
            try:
                await bdev.read_into(i << 16, [region.view[i << 16 : (i + 1) << 16]], INF)
            except BdevError as error:
                errors.append(error)

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for i in range(16):
                    nursery.start_soon(read, i)
                await trio.sleep(0.05)
                daemon.kill()
        assert {error.status for error in errors} == {"unavailable"}
        assert not any(isinstance(error, BdevTimeout) for error in errors), "the dead touch no buffer"
        await daemon.start()
        assert await good_again(bdev) == disk[:4096]
        await bdev.read_into(0, [region.view], soon())
        assert region.view == disk[: len(region.view)]


async def test_qemu_finishes_into_the_old_ring_what_it_had_when_the_connection_was_lost(
    daemon: QemuStorage, tmp_path: Path, region: MemfdRegion
) -> None:
    async with opened(daemon.path, region) as bdev:
        throttle(daemon, 4 << 20)
        async with trio.open_nursery() as nursery:
            for i in range(16):
                at = slice(i << 16, (i + 1) << 16)
                nursery.start_soon(bdev.read_into, i << 16, [region.view[at]], soon())
            await trio.sleep(0.02)
            assert bdev.stats.in_flight > 0
            assert bdev._session is not None
            bdev._session.lose(ConnectionResetError("by the test"))
        assert region.view == (tmp_path / "disk").read_bytes()[: 1 << 20]
        await good_again(bdev)
        assert bdev.stats.reconnects == 1


async def test_qemu_stopped_deadlines_hold_and_it_goes_on_afterwards(
    daemon: QemuStorage, tmp_path: Path, region: MemfdRegion
) -> None:
    async with opened(daemon.path, region) as bdev:
        daemon.suspend()
        start = trio.current_time()
        error = await failure_of(bdev.read_into(0, [region.view[:4096]], soon(0.1)))
        assert isinstance(error, BdevTimeout)
        assert trio.current_time() - start < 1
        daemon.resume()
        with trio.fail_after(5):
            await error.settled()
        await bdev.read_into(0, [region.view[:4096]], soon())
        assert region.view[:4096] == (tmp_path / "disk").read_bytes()[:4096]


async def test_qemu_stopped_a_close_ends_and_the_buffer_is_free_once_it_is_dead(
    daemon: QemuStorage, region: MemfdRegion
) -> None:
    bdev = await VhostUserBdev.open(daemon.path, close_s=0.1)
    await bdev.add_memory(DeviceMemory(region.fd, region.address, region.size), soon())
    daemon.suspend()
    error = await failure_of(bdev.read_into(0, [region.view[:4096]], soon(0.05)))
    assert isinstance(error, BdevTimeout)
    with trio.fail_after(2):
        await bdev.aclose()
    with trio.move_on_after(0.05) as too_early:
        await error.settled()
    assert too_early.cancelled_caught
    daemon.kill()
    with trio.fail_after(2):
        await error.settled()


async def test_qemu_stopped_memory_cannot_be_added_and_that_is_said_in_time(
    daemon: QemuStorage, region: MemfdRegion
) -> None:
    async with opened(daemon.path) as bdev:
        daemon.suspend()
        memory = DeviceMemory(region.fd, region.address, region.size)
        assert (await failure_of(bdev.add_memory(memory, soon(0.05)))).status == "unavailable"
        daemon.resume()
        await good_again(bdev)
        await bdev.add_memory(memory, soon())


async def test_qemu_failing_one_read_is_an_io_error_and_the_next_is_good(tmp_path: Path) -> None:
    if QEMU_STORAGE_DAEMON is None:
        pytest.skip("qemu-storage-daemon is not installed (Debian package qemu-system-common)")
    disk = tmp_path / "disk"
    disk.write_bytes(random.Random(8).randbytes(SIZE))
    fault = (
        "inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.sector=16,inject-error.0.once=on"
    )
    words = [file_node(disk), f"blkdebug,node-name=bad,image=disk,{fault}"]
    async with QemuStorage(tmp_path, words, export="bad") as daemon, opened(daemon.path) as bdev:
        buffer = aligned_buffer(4096)
        await bdev.read_into(0, [buffer], soon())
        assert (await failure_of(bdev.read_into(8192, [buffer], soon()))).status == "io_error"
        await bdev.read_into(8192, [buffer], soon())
        assert buffer == disk.read_bytes()[8192:12288]


async def test_qemu_not_writable_is_refused_in_words(tmp_path: Path) -> None:
    if QEMU_STORAGE_DAEMON is None:
        pytest.skip("qemu-storage-daemon is not installed (Debian package qemu-system-common)")
    (tmp_path / "disk").write_bytes(bytes(SIZE))
    async with QemuStorage(tmp_path, [file_node(tmp_path / "disk")], is_writable=False) as daemon:
        assert "read-only" in str(await failure_of(VhostUserBdev.open(daemon.path)))


async def test_qemu_restarted_with_a_larger_disk_is_seen(daemon: QemuStorage, tmp_path: Path) -> None:
    async with opened(daemon.path) as bdev:
        daemon.kill()
        os.truncate(tmp_path / "disk", 32 << 20)
        await daemon.start()
        await until(lambda: bdev.info.size_bytes == 32 << 20)
        await bdev.read_into(bdev.info.size_bytes - 4096, [aligned_buffer(4096)], soon())


async def test_the_bytes_of_the_arena_are_not_read_by_this_process(
    daemon: QemuStorage, tmp_path: Path
) -> None:
    """The kernel's own count of what we read and wrote: 256 MiB arrive, some KiB pass through our hands."""
    region = MemfdRegion(1, "arena", 4 << 20, huge_pages=False)
    async with opened(daemon.path, region) as bdev:
        before = own_io()
        for i in range(64):
            await bdev.read_into((i % 4) * (4 << 20), [region.view], soon())
        delta = {key: value - before[key] for key, value in own_io().items()}
        assert region.view == (tmp_path / "disk").read_bytes()[12 << 20 : 16 << 20]
        assert delta["rchar"] < 64 << 10
        assert delta["wchar"] < 64 << 10
    region.close()


def own_io() -> dict[str, int]:
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return {key: int(value) for key, value in (line.split(": ") for line in text.splitlines())}
