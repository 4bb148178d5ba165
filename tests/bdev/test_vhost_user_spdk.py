"""The vhost-user bdev on a real SPDK: the same contract, and the faults SPDK itself can inject.

Run where DPURT_SPDK_TGT names the program; it needs no root and no huge pages, and burns one core meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.factory import open_bdev
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.errors import BdevError, BdevTimeout
from dpurt.fabric.region import MemfdRegion
from dpurt.testing.bdev_contract import MIN_BYTES, check_bdev

pytestmark = [pytest.mark.spdk, pytest.mark.slow]

BLOCK = 4096


class Spdk:
    """A spdk_tgt with a malloc bdev, an error bdev on it, and a vhost controller for that."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self._folder = folder
        self._rpc_path = folder / "rpc.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        words = [os.environ["DPURT_SPDK_TGT"], "--no-huge", "-s", "1024", "-m", "0x1"]
        words += ["-r", str(self._rpc_path), "-S", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = await trio.to_thread.run_sync(
                lambda: subprocess.Popen(words, stdout=log, stderr=log)
            )
        with trio.fail_after(30):
            while not self._is_ready():  # noqa: ASYNC110  # another process
                await trio.sleep(0.05)
        self.rpc("bdev_malloc_create", name="raw", num_blocks=MIN_BYTES // BLOCK, block_size=BLOCK)
        self.rpc("bdev_error_create", base_name="raw")
        self.rpc("vhost_create_blk_controller", ctrlr="disk", dev_name="EE_raw")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def inject(self, **fault: object) -> None:
        self.rpc("bdev_error_inject_error", name="EE_raw", io_type="read", **fault)

    def rpc(self, method: str, **params: object) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(os.fspath(self._rpc_path))
            request = {"jsonrpc": "2.0", "id": 1, "method": method} | ({"params": params} if params else {})
            sock.sendall(json.dumps(request).encode())
            with sock.makefile("rb") as stream:
                answer = json.loads(stream.readline())
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            self.rpc("spdk_get_version")
        except OSError:
            return False
        return True


@pytest.fixture
async def spdk(tmp_path: Path) -> AsyncIterator[Spdk]:
    running = Spdk(tmp_path)
    try:
        await running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture
async def bdev(spdk: Spdk) -> AsyncIterator[VhostUserBdev]:
    opened = await VhostUserBdev.open(spdk.path, close_s=0.2)
    yield opened
    await opened.aclose()


def soon(seconds: float = 20.0) -> float:
    return trio.current_time() + seconds


async def filled(bdev: VhostUserBdev, region: MemfdRegion) -> bytes:
    """Give the region to the device and write the whole of it; what was written."""
    await bdev.add_memory(DeviceMemory(region.fd, region.address, region.size), soon())
    data = random.Random(1).randbytes(region.size)
    region.view[:] = data
    await bdev.write_from(0, [region.view], soon())
    region.view[:] = bytes(region.size)
    return data


@pytest.mark.parametrize(
    "options", [{}, {"num_queues": 4, "queue_size": 32}], ids=["one queue", "four queues"]
)
async def test_vhost_user_keeps_the_contract_on_spdk(spdk: Spdk, options: dict[str, int]) -> None:
    async def make() -> Bdev:
        return await open_bdev("vhost-user", path=spdk.path, **options)

    async def reopen(bdev: Bdev) -> Bdev:
        return await make()

    @contextlib.asynccontextmanager
    async def suspended(bdev: Bdev) -> AsyncIterator[None]:
        os.kill(spdk.pid, signal.SIGSTOP)
        yield
        os.kill(spdk.pid, signal.SIGCONT)

    await check_bdev(make, reopen=reopen, stall=suspended)


async def test_a_hung_read_of_spdk_settles_when_it_is_resumed(spdk: Spdk, bdev: VhostUserBdev) -> None:
    region = MemfdRegion(1, "arena", 1 << 20, huge_pages=False)
    data = await filled(bdev, region)
    spdk.inject(error_type="pending", num=1)
    with pytest.raises(BdevTimeout) as caught:
        await bdev.read_into(0, [region.view[:BLOCK]], soon(0.1))
    await bdev.read_into(BLOCK, [region.view[BLOCK : 2 * BLOCK]], soon())
    assert not any(region.view[:BLOCK])
    spdk.rpc("bdev_error_resume_pending", name="EE_raw")
    with trio.fail_after(10):
        await caught.value.settled()
    assert region.view[: 2 * BLOCK] == data[: 2 * BLOCK]


async def test_injected_failures_and_corruption_of_spdk(spdk: Spdk, bdev: VhostUserBdev) -> None:
    region = MemfdRegion(1, "arena", 1 << 20, huge_pages=False)
    data = await filled(bdev, region)
    spdk.inject(error_type="failure", num=1)
    with pytest.raises(BdevError) as caught:
        await bdev.read_into(0, [region.view[:BLOCK]], soon())
    assert caught.value.status == "io_error"
    spdk.inject(error_type="corrupt_data", num=1, corrupt_offset=9, corrupt_value=255)
    await bdev.read_into(0, [region.view[:BLOCK]], soon())
    assert [i for i in range(BLOCK) if region.view[i] != data[i]] == [9]
    await bdev.read_into(0, [region.view[:BLOCK]], soon())
    assert region.view[:BLOCK] == data[:BLOCK]


async def test_spdk_killed_in_flight_ends_operations_and_serves_again(
    spdk: Spdk, bdev: VhostUserBdev
) -> None:
    region = MemfdRegion(1, "arena", 1 << 20, huge_pages=False)
    await filled(bdev, region)
    spdk.inject(error_type="pending", num=4)
    errors: list[BdevError] = []

    async def read() -> None:
        with pytest.raises(BdevError) as caught:
            await bdev.read_into(0, [region.view[:BLOCK]], float("inf"))
        errors.append(caught.value)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read)
            await trio.sleep(0.1)
            spdk.kill()
    assert {error.status for error in errors} == {"unavailable"}
    await spdk.start()
    with trio.fail_after(10):
        while bdev.reconnects == 0:  # noqa: ASYNC110  # a task inside of the bdev
            await trio.sleep(0.01)
    region.view[:] = data = random.Random(2).randbytes(region.size)
    await bdev.write_from(0, [region.view], soon())
    region.view[:] = bytes(region.size)
    await bdev.read_into(0, [region.view], soon())
    assert region.view == data
