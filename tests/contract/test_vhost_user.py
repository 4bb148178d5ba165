"""The vhost-user bdev keeps the `Bdev` contract on a back end of somebody else's: qemu-storage-daemon."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dpurt.bdev import Bdev
from dpurt.bdev.factory import open_bdev
from dpurt.testing.bdev_contract import MIN_BYTES, check_bdev
from dpurt.testing.qemu_storage import QEMU_STORAGE_DAEMON, QemuStorage, file_node


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[QemuStorage]:
    if QEMU_STORAGE_DAEMON is None:
        pytest.skip("qemu-storage-daemon is not installed (Debian package qemu-system-common)")
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(MIN_BYTES))
    async with QemuStorage(tmp_path, [file_node(disk)], num_queues=2) as running:
        yield running


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_queues": 2, "queue_size": 16},
        {"queue_size": 4, "bounce_bytes": 64 << 10, "max_transfer_bytes": 8192},
    ],
    ids=["as it comes", "two queues", "narrow"],
)
async def test_vhost_user_keeps_the_contract(daemon: QemuStorage, options: dict[str, int]) -> None:
    async def make() -> Bdev:
        return await open_bdev("vhost-user", path=daemon.path, **options)

    async def reopen(bdev: Bdev) -> Bdev:
        daemon.kill()
        await daemon.start()
        return await make()

    @contextlib.asynccontextmanager
    async def suspended(bdev: Bdev) -> AsyncIterator[None]:
        daemon.suspend()
        yield
        daemon.resume()

    await check_bdev(make, reopen=reopen, stall=suspended)
