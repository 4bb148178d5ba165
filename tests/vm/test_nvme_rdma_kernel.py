"""The NVMe/RDMA bdev against an implementation that is not ours: the Linux kernel's target over Soft-RoCE, in the test
VM.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.buffers import address_of, aligned_buffer
from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_rdma import NvmeRdmaBdev
from dpurt.bdev.nvme_rdma_memory import Bounce
from dpurt.errors import BdevError, BdevTimeout
from dpurt.testing.bdev_contract import check_bdev

pytestmark = pytest.mark.vm

NQN = os.environ.get("DPURT_VM_NQN", "")
SLOW_NQN = "nqn.2026-11.test:slow"
NVMET = Path("/sys/kernel/config/nvmet")
TESTBED = Path(__file__).parent / "testbed"
MAIN, OTHER = ("10.9.0.1", 4430), ("10.9.0.1", 4431)
PATIENT = Pacing(connect_s=60.0, max_backoff_s=0.5)
SLOW_S = 2.5


@contextlib.asynccontextmanager
async def opened(*addresses: tuple[str, int], **params: object) -> AsyncIterator[NvmeRdmaBdev]:
    given: dict[str, object] = {"subnqn": NQN, "pacing": PATIENT, **params}
    bdev = await NvmeRdmaBdev.open(addresses or [MAIN], **given)  # type: ignore[arg-type]
    async with contextlib.aclosing(bdev):
        yield bdev


def soon(seconds: float = 60.0) -> float:
    return trio.current_time() + seconds


def noise(length: int, seed: int = 0) -> memoryview:
    buffer = aligned_buffer(length)
    buffer[:] = random.Random(seed).randbytes(length)
    return buffer


async def read(bdev: Bdev, offset: int, length: int, within_s: float = 60.0) -> memoryview:
    buffer = aligned_buffer(length)
    await bdev.read_into(offset, [buffer], soon(within_s))
    return buffer


async def becomes(bdev: NvmeRdmaBdev, address: tuple[str, int], state: str) -> None:
    with trio.fail_after(60):
        while True:
            if bdev.path_states()[str(address)] == state:
                return
            await trio.sleep(0.05)


@contextlib.asynccontextmanager
async def arena(bdev: Bdev, length: int) -> AsyncIterator[memoryview]:
    """Memory the bdev was given; gone when the bdev is closed."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, length)
    view = memoryview(mmap.mmap(fd, length, mmap.MAP_SHARED))
    await bdev.add_memory(DeviceMemory(fd, address_of(view), length), soon())
    yield view
    await bdev.aclose()
    os.close(fd)


def listener(service: int) -> Path:
    [port] = [
        port
        for port in (NVMET / "ports").iterdir()
        if (port / "addr_trsvcid").read_text().strip() == str(service)
    ]
    return port


def shown(service: int, subsystem: str = NQN) -> Path:
    """The link by which a listener offers a subsystem."""
    return listener(service) / "subsystems" / subsystem


def offer(link: Path) -> None:
    link.symlink_to(NVMET / "subsystems" / link.name)


def export(nqn: str, device: str, address: tuple[str, int]) -> None:
    subprocess.run([TESTBED / "nvmet-up", nqn, device, address[0], str(address[1]), "rdma"], check=True)


def resources() -> dict[str, int]:
    """What the kernel counts of our device."""
    shown = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True)
    [device] = [device for device in json.loads(shown.stdout) if device["ifname"] == "rxe0"]
    return {word: device[word] for word in ("pd", "cq", "qp", "mr", "ctx")}


@pytest.fixture
def second_path() -> Iterator[None]:
    export(NQN, os.environ["DPURT_VM_NVMET_DEVICE"], OTHER)
    yield
    if not shown(OTHER[1]).exists():
        offer(shown(OTHER[1]))


@pytest.fixture(scope="module")
def slow_device() -> str:
    """A drive that takes `SLOW_S` to answer, and keeps nothing."""
    subprocess.run(["modprobe", "null_blk", "nr_devices=0"], check=True)
    device = Path("/sys/kernel/config/nullb/slow")
    device.mkdir()
    for word, value in {
        "size": 64,
        "blocksize": 4096,
        "irqmode": 2,
        "completion_nsec": int(SLOW_S * 1e9),
    }.items():
        (device / word).write_text(str(value))
    (device / "power").write_text("1")
    return "/dev/slow"


@pytest.fixture
def slow(slow_device: str) -> str:
    export(SLOW_NQN, slow_device, MAIN)
    if not shown(MAIN[1], SLOW_NQN).exists():
        offer(shown(MAIN[1], SLOW_NQN))
    return SLOW_NQN


@pytest.mark.parametrize(
    "params",
    [{}, {"num_queues": 2, "queue_size": 8, "sq_flow_control": True}],
    ids=["plain", "flow-control"],
)
async def test_nvme_rdma_on_the_kernels_target_keeps_the_contract(params: dict[str, object]) -> None:
    async def make() -> Bdev:
        return await NvmeRdmaBdev.open([MAIN], NQN, pacing=PATIENT, **params)  # type: ignore[arg-type]

    async def reopen(bdev: Bdev) -> Bdev:
        return await make()

    await check_bdev(make, reopen=reopen)


async def test_bytes_move_between_the_target_and_added_memory_without_a_copy_by_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no bounce slot to be had, added memory works and other memory does not."""
    async with opened() as bdev, arena(bdev, 8 << 20) as view:
        view[: 3 << 20] = noise(3 << 20)
        monkeypatch.setattr(Bounce, "take", lambda self: None)
        await bdev.write_from(1 << 20, [view[: 2 << 20], view[2 << 20 : 3 << 20]], soon())
        await bdev.read_into(1 << 20, [view[5 << 20 :], view[3 << 20 : 3 << 20]], soon())
        assert view[5 << 20 :] == view[: 3 << 20]
        with pytest.raises(BdevTimeout):
            await read(bdev, 0, 1 << 20, within_s=0.5)


async def test_slots_in_any_order_are_filled_in_order() -> None:
    async with opened() as bdev, arena(bdev, 4 << 20) as view:
        data = noise(2 << 20)
        await bdev.write_from(0, [data], soon())
        order = random.Random(3).sample(range(16), 8)
        slots = [view[i << 18 : (i + 1) << 18] for i in order]
        await bdev.read_into(0, slots, soon())
        assert b"".join(slots) == data


async def test_transfers_over_the_controllers_limit_are_split() -> None:
    async with opened() as bdev, arena(bdev, 12 << 20) as view:
        assert bdev.info.max_transfer_bytes == 1 << 20
        view[: 5 << 20] = noise(5 << 20)
        await bdev.write_from(512, [view[: 5 << 20]], soon())
        await bdev.read_into(512, [view[6 << 20 : 11 << 20]], soon())
        assert view[6 << 20 : 11 << 20] == view[: 5 << 20]


async def test_more_outside_buffers_than_bounce_slots_wait_their_turn() -> None:
    async with opened() as bdev:
        data = noise(6 << 20)
        await bdev.write_from(0, [data], soon())
        assert await read(bdev, 0, len(data)) == data


async def test_unaligned_buffers_in_added_memory_are_served() -> None:
    async with opened() as bdev, arena(bdev, 1 << 20) as view:
        data = noise(64 << 10)
        await bdev.write_from(0, [data], soon())
        await bdev.read_into(0, [view[1 : (64 << 10) + 1]], soon())
        assert view[1 : (64 << 10) + 1] == data
        assert view[0] == view[(64 << 10) + 1] == 0


async def test_discovery_leads_to_the_subsystem() -> None:
    async with opened(discovery=True) as bdev:
        assert "Linux" in bdev.info.detail["model"]
        assert len(await read(bdev, 0, 4096)) == 4096


async def test_unknown_subsystem_is_refused_by_name_of_the_status() -> None:
    with pytest.raises(BdevError, match="connect parameters invalid") as caught:
        await NvmeRdmaBdev.open([MAIN], "nqn.2024-01.org.example:none", pacing=PATIENT)
    assert caught.value.status == "unavailable"


async def test_port_nobody_listens_on_is_refused_with_the_reason() -> None:
    with pytest.raises(BdevError, match="nobody listens there") as caught:
        await NvmeRdmaBdev.open([("10.9.0.1", 4999)], NQN, pacing=PATIENT)
    assert caught.value.status == "unavailable"


async def test_address_without_rdma_is_refused() -> None:
    with pytest.raises(BdevError, match="unavailable"):
        await NvmeRdmaBdev.open([("127.0.0.1", 4420)], NQN, pacing=PATIENT)


async def test_several_reads_under_a_short_keep_alive() -> None:
    """Longer than the timer, so that only our keep-alives hold the association."""
    async with opened(keep_alive_s=2.0) as bdev:
        data = noise(1 << 20)
        await bdev.write_from(0, [data], soon())
        await trio.sleep(6)
        assert await read(bdev, 0, len(data)) == data
        assert bdev.path_states() == {str(MAIN): "usable"}


async def test_disabled_namespace_is_gone_and_comes_back() -> None:
    switch = NVMET / "subsystems" / NQN / "namespaces/1/enable"
    async with opened(nsid=1) as bdev:
        data = noise(4096)
        await bdev.write_from(0, [data], soon())
        switch.write_text("0")
        try:
            with pytest.raises(BdevError) as caught:
                await read(bdev, 0, 4096)
        finally:
            switch.write_text("1")
        assert caught.value.status == "gone"
        assert await read(bdev, 0, 4096) == data


async def test_target_that_goes_and_comes_back_is_found_again() -> None:
    async with opened() as bdev, arena(bdev, 1 << 20) as view:
        view[:] = noise(1 << 20)
        await bdev.write_from(0, [view], soon())
        link = shown(MAIN[1])
        link.unlink()
        try:
            with pytest.raises(BdevError) as caught:
                await read_until_it_fails(bdev)
            assert caught.value.status == "unavailable"
        finally:
            offer(link)
        await becomes(bdev, MAIN, "usable")
        before = bytes(view)
        view[:] = bytes(1 << 20)
        await bdev.read_into(0, [view], soon())
        assert view == before, "the memory is known to the new connection"
        assert bdev.stats.reconnects == 1


@pytest.mark.usefixtures("second_path")
async def test_lost_path_is_left_for_the_other_and_no_read_fails() -> None:
    async with opened(MAIN, OTHER) as bdev:
        data = noise(1 << 20)
        await bdev.write_from(0, [data], soon())
        for address in (MAIN, OTHER):
            await becomes(bdev, address, "usable")
        link = shown(OTHER[1])
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read, bdev, 0, 1 << 20)
            await trio.sleep(0.05)
            await trio.to_thread.run_sync(link.unlink)
        assert await read(bdev, 0, 1 << 20) == data
        assert bdev.stats.errors == 0


async def test_target_gone_in_flight_frees_the_buffers_at_once(slow: str) -> None:
    async with opened(subnqn=slow) as bdev:
        begin = time.monotonic()
        async with trio.open_nursery() as nursery:

            async def fails() -> None:
                with pytest.raises(BdevError) as caught:
                    await read(bdev, 0, 4096)
                assert caught.value.status == "unavailable"
                assert time.monotonic() - begin < SLOW_S

            nursery.start_soon(fails)
            await trio.sleep(0.2)
            await trio.to_thread.run_sync(shown(MAIN[1], slow).unlink)
        offer(shown(MAIN[1], slow))


async def test_after_a_timeout_is_settled_the_late_answer_touches_nothing(slow: str) -> None:
    async with opened(subnqn=slow) as bdev, arena(bdev, 1 << 20) as view:
        with pytest.raises(BdevTimeout) as caught:
            await bdev.read_into(0, [view[8192:12288]], soon(0.5))
        with trio.fail_after(SLOW_S - 1.0):
            await caught.value.settled()
        view[8192:12288] = b"\xaa" * 4096
        await trio.sleep(SLOW_S + 1)
        assert view[8192:12288] == b"\xaa" * 4096
        await bdev.read_into(0, [view[8192:12288]], soon())
        assert view[8192:12288] != b"\xaa" * 4096, "an answer in time does"


async def test_closed_bdevs_leave_nothing_in_the_kernel() -> None:
    before = resources()
    for _ in range(10):
        async with opened(num_queues=2) as bdev, arena(bdev, 1 << 20) as view:
            assert resources()["qp"] >= before["qp"] + 3
            await bdev.read_into(0, [view], soon())
    assert resources() == before


async def test_lost_connections_leave_nothing_in_the_kernel() -> None:
    async with opened() as bdev:
        before = resources()
        for _ in range(5):
            shown(MAIN[1]).unlink()
            offer(shown(MAIN[1]))
            await read_again(bdev)
        # Kernel target's own are counted with ours, and die a moment later.
        await resources_become(before)


async def resources_become(wanted: dict[str, int]) -> None:
    with trio.fail_after(30):
        while True:
            if resources() == wanted:
                return
            await trio.sleep(0.1)


async def read_until_it_fails(bdev: Bdev) -> None:
    with trio.fail_after(30):
        while True:
            await read(bdev, 0, 4096)


async def read_again(bdev: Bdev) -> None:
    with trio.fail_after(60):
        while True:
            with contextlib.suppress(BdevError):
                await read(bdev, 0, 4096)
                return
            await trio.sleep(0.05)
