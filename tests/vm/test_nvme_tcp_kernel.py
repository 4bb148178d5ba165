"""The NVMe/TCP bdev against an implementation that is not ours: the Linux kernel's target, in the test VM."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.errors import BdevError, BdevTimeout
from dpurt.testing.bdev_contract import check_bdev

pytestmark = pytest.mark.vm

NQN = os.environ.get("DPURT_VM_NQN", "")
SUBSYSTEM = Path("/sys/kernel/config/nvmet/subsystems") / NQN
TESTBED = Path(__file__).parent / "testbed"
MAIN, OTHER = ("127.0.0.1", 4420), ("127.0.0.1", 4421)
PATIENT = Pacing(connect_s=60.0)


@contextlib.asynccontextmanager
async def opened(*addresses: tuple[str, int], **params: object) -> AsyncIterator[NvmeTcpBdev]:
    bdev = await NvmeTcpBdev.open(addresses or [MAIN], NQN, pacing=PATIENT, **params)  # type: ignore[arg-type]
    async with contextlib.aclosing(bdev):
        yield bdev


def soon(seconds: float = 60.0) -> float:
    return trio.current_time() + seconds


def noise(length: int, seed: int = 0) -> memoryview:
    buffer = aligned_buffer(length)
    buffer[:] = random.Random(seed).randbytes(length)
    return buffer


async def read(bdev: Bdev, offset: int, length: int) -> memoryview:
    buffer = aligned_buffer(length)
    await bdev.read_into(offset, [buffer], soon())
    return buffer


def set_ana(address: tuple[str, int], state: str) -> None:
    subprocess.run([TESTBED / "nvmet-ana", address[0], str(address[1]), state], check=True)


def enable(switch: Path, is_on: bool) -> None:
    switch.write_text(str(int(is_on)))


async def becomes(bdev: NvmeTcpBdev, address: tuple[str, int], state: str) -> None:
    while True:
        if bdev.path_states()[str(address)] == state:
            return
        await trio.sleep(0.05)


@pytest.fixture
def second_path() -> Iterator[None]:
    device = os.environ["DPURT_VM_NVMET_DEVICE"]
    subprocess.run([TESTBED / "nvmet-up", NQN, device, OTHER[0], str(OTHER[1])], check=True)
    yield
    for address in (MAIN, OTHER):
        set_ana(address, "optimized")


@pytest.fixture
def enabled() -> Iterator[Path]:
    switch = SUBSYSTEM / "namespaces/1/enable"
    yield switch
    switch.write_text("1")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"header_digest": True, "data_digest": True},
        {"num_queues": 2, "queue_size": 8, "sq_flow_control": True},
    ],
    ids=["plain", "digests", "flow-control"],
)
async def test_nvme_tcp_on_the_kernels_target_keeps_the_contract(params: dict[str, object]) -> None:
    async def make() -> Bdev:
        return await NvmeTcpBdev.open([MAIN], NQN, pacing=PATIENT, **params)  # type: ignore[arg-type]

    async def reopen(bdev: Bdev) -> Bdev:
        return await make()

    await check_bdev(make, reopen=reopen)


async def test_transfers_without_a_limit_of_the_controllers_are_split_by_ours() -> None:
    async with opened() as bdev:
        assert bdev.info.max_transfer_bytes == 4 << 20
        assert bdev.info.size_bytes == 1 << 30
        data = noise((10 << 20) + 512)
        await bdev.write_from(1 << 20, [data], soon())
        assert await read(bdev, 1 << 20, len(data)) == data


async def test_discovery_leads_to_the_subsystem() -> None:
    async with opened(discovery=True) as bdev:
        assert "Linux" in bdev.info.detail["model"]
        assert len(await read(bdev, 0, 4096)) == 4096


async def test_unknown_subsystem_is_refused_by_name_of_the_status() -> None:
    with pytest.raises(BdevError, match="connect parameters invalid") as caught:
        await NvmeTcpBdev.open([MAIN], "nqn.2024-01.org.example:none", pacing=PATIENT)
    assert caught.value.status == "unavailable"


async def test_several_blocks_in_flight_under_a_short_keep_alive() -> None:
    """Longer than the timer, so that only our keep-alives hold the association."""
    async with opened(keep_alive_s=2.0) as bdev:
        data = noise(1 << 20)
        await bdev.write_from(0, [data], soon())
        await trio.sleep(6)
        assert await read(bdev, 0, len(data)) == data
        assert bdev.path_states() == {str(MAIN): "usable"}


async def test_disabled_namespace_is_gone_and_comes_back(enabled: Path) -> None:
    async with opened(nsid=1) as bdev:
        data = noise(4096)
        await bdev.write_from(0, [data], soon())
        enable(enabled, False)
        with pytest.raises(BdevError) as caught:
            await read(bdev, 0, 4096)
        assert caught.value.status == "gone"
        enable(enabled, True)
        assert await read(bdev, 0, 4096) == data


@pytest.mark.usefixtures("second_path")
async def test_inaccessible_path_is_left_for_the_other() -> None:
    async with opened(MAIN, OTHER) as bdev:
        data = noise(1 << 20)
        for address in (MAIN, OTHER):
            await becomes(bdev, address, "usable")
        set_ana(MAIN, "inaccessible")
        for i in range(4):
            await bdev.write_from(i << 20, [data], soon())
            assert await read(bdev, i << 20, len(data)) == data
        await becomes(bdev, MAIN, "ANA state 3")
        set_ana(MAIN, "non-optimized")
        await becomes(bdev, MAIN, "usable")
        assert bdev.stats.errors == 0


@pytest.mark.usefixtures("second_path")
async def test_without_any_accessible_path_a_read_waits_for_its_deadline_or_access() -> None:
    async with opened(MAIN) as bdev:
        set_ana(MAIN, "inaccessible")
        with pytest.raises(BdevTimeout) as caught:
            await bdev.read_into(0, [aligned_buffer(4096)], soon(1.5))
        await caught.value.settled()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, bdev, 0, 4096)
            await trio.sleep(0.5)
            assert bdev.stats.in_flight == 1
            set_ana(MAIN, "optimized")
        assert bdev.stats.reads == 1
