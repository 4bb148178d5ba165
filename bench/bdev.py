"""Device to arena: every real bdev beside fio, on the same file, into the same memory, page cache bypassed on both
sides.

One file is read through each row of `ROWS`: directly, and through a back end that serves it with O_DIRECT
(qemu-storage-daemon for vhost-user; for NVMe/TCP a real SPDK target on an AIO bdev, if DPURT_SPDK_TGT names one: nearly
all of its time is the target's and TCP's, and `bench spdk` has SPDK's own initiator beside ours). fio reads the file
itself, with the faster of its asynchronous engines at each shape, into the very region the bdev reads into (see
`bench.file` for why that matters). Ours and fio take turns; each run reads the file once in random order. Both have the
same depth in the device; beyond depth 1 ours has two readers more, so two reads wait in the bdev's own queue, as in a
node's batches. CPU is that of our process alone: a back end's own is not counted, as it would run on another core or in
SPDK. *Verified* adds the CRC-32C of every block, which is what the block store does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.file import FileBdev
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.bdev.spdk_process import OwnTarget, TargetFailed, start_target
from dpurt.bdev.spdk_rpc import open_spdk_rpc
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.bench.fio import PATIENCE_S, Rig, Shape, best_engine, figures, fill
from dpurt.bench.result import BenchResult
from dpurt.bench.spdk import SUBNQN, export_tcp
from dpurt.testing.qemu_storage import QEMU_STORAGE_DAEMON, QemuStorage, file_node

SUMMARY = "device to arena: bdevs beside fio on the same file (file, vhost-user on qemu-storage-daemon, NVMe/TCP on SPDK)"
SPDK_TGT = os.environ.get("DPURT_SPDK_TGT", "")
FILE_BYTES = 1 << 29
WAITING = 2  # readers more than the depth
SHAPES = tuple(
    Shape(block_bytes, depth, depth + WAITING if depth > 1 else 1)
    for block_bytes in (1 << 20, 4 << 20)
    for depth in (1, 8, 32)
)
TARGETS = {("vhost_user", 1 << 20, 8): 0.9}
_SMALLEST_QUEUE = 4

Opener = Callable[[Rig, int], AbstractAsyncContextManager[Bdev]]


@contextlib.asynccontextmanager
async def _open_file(rig: Rig, depth: int) -> AsyncIterator[Bdev]:
    async with contextlib.aclosing(await FileBdev.open(rig.path, queue_depth=depth)) as bdev:
        yield bdev


@contextlib.asynccontextmanager
async def _open_vhost_user(rig: Rig, depth: int) -> AsyncIterator[Bdev]:
    async with QemuStorage(rig.path.parent, [file_node(rig.path, is_direct=True)]) as daemon:
        async with contextlib.aclosing(
            await VhostUserBdev.open(daemon.path, queue_size=max(depth, _SMALLEST_QUEUE))
        ) as bdev:
            yield bdev


@contextlib.asynccontextmanager
async def _open_nvme_tcp(rig: Rig, depth: int) -> AsyncIterator[Bdev]:
    folder = rig.path.parent
    own = OwnTarget(folder)
    rpc_path = folder / "rpc.sock"
    await start_target(own, SPDK_TGT, rpc_path, cpumask="0x1", use_huge=False, budget_s=60)
    try:
        async with open_spdk_rpc(rpc_path) as rpc:
            aio = {"name": "A0", "filename": str(rig.path), "block_size": 4096}
            await rpc.call("bdev_aio_create", aio, deadline=trio.current_time() + PATIENCE_S)
            port = await export_tcp(rpc, "A0")
            async with contextlib.aclosing(await NvmeTcpBdev.open([("127.0.0.1", port)], SUBNQN)) as bdev:
                yield bdev
    finally:
        with contextlib.suppress(TargetFailed), trio.CancelScope(shield=True):
            await own.stop(20)


ROWS: dict[str, tuple[Opener, str | None]] = {  # opener, and what is missing to open it here
    "file": (_open_file, None),
    "vhost_user": (
        _open_vhost_user,
        None if QEMU_STORAGE_DAEMON else "qemu-storage-daemon (Debian package qemu-system-common)",
    ),
    "nvme_tcp": (_open_nvme_tcp, None if SPDK_TGT else "SPDK, and name its spdk_tgt in DPURT_SPDK_TGT"),
}


def run(quick: bool) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        return trio.run(_measure, Rig.on(Path(folder) / "disk", FILE_BYTES, SHAPES, 3 if quick else 9))


async def _measure(rig: Rig) -> BenchResult:
    await fill(rig)
    result = BenchResult(name="bdev", conditions=rig.conditions())
    engines = {shape: best_engine(rig, shape) for shape in SHAPES}
    for row, (opener, missing) in ROWS.items():
        if missing is not None:
            result.conditions[f"{row}_missing"] = f"install {missing}"
            continue
        for shape in SHAPES:
            target = TARGETS.get((row, shape.block_bytes, shape.depth))
            async with opener(rig, shape.depth) as bdev:
                await bdev.add_memory(_memory(rig), trio.current_time() + PATIENCE_S)
                result.conditions[row] = ", ".join(
                    f"{key}: {value}" for key, value in bdev.info.detail.items()
                )
                result.figures += await figures(rig, bdev, shape, engines[shape], row, target)
    return result


def _memory(rig: Rig) -> DeviceMemory:
    return DeviceMemory(rig.region.fd, rig.region.address, rig.region.size)
