"""File to arena: the `file` bdev beside fio, on the same file, into the same memory, with the same block size
and device depth, O_DIRECT.

Both sides read into one `MemfdRegion`, made as a node makes its arena; fio maps it through /proc. That matters
more than anything else here: a device moves bytes by physically contiguous runs (see
`dpurt.fabric.huge_pages`). fio runs its asynchronous engines first; the faster at each shape is the peer (its
psync engine cannot take the region; with memory of its own it is half as fast). Then ours and the peer take
turns. Each run reads the whole file once in random order; rates are of the reading alone (fio's own figure),
without process start or open. Ours has two readers more than the depth, so two reads wait in the bdev's own
queue, as in a node's batches, and take the device's free places at once. *Verified* adds the CRC-32C of every
block, which is what the block store does.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import trio

from dpurt.bdev.file import FileBdev
from dpurt.bench.fio import Rig, Shape, best_engine, figures, fill
from dpurt.bench.result import BenchResult

SUMMARY = "file to arena with O_DIRECT: the file bdev beside fio (best of io_uring, libaio)"
TARGET = 0.95
FILE_BYTES = 1 << 30
WAITING = 2  # readers more than the depth
SHAPES = tuple(
    Shape(block_bytes, depth, depth + WAITING) for block_bytes in (256 << 10, 1 << 20) for depth in (8, 32)
)


def run(quick: bool) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        return trio.run(_measure, Rig.on(Path(folder) / "disk", FILE_BYTES, SHAPES, 5 if quick else 13))


async def _measure(rig: Rig) -> BenchResult:
    await fill(rig)
    result = BenchResult(name="file", conditions=rig.conditions())
    result.conditions["readers"] = f"depth + {WAITING}, of which depth in the device"
    for shape in SHAPES:
        engine = best_engine(rig, shape)
        async with contextlib.aclosing(await FileBdev.open(rig.path, queue_depth=shape.depth)) as bdev:
            result.figures += await figures(rig, bdev, shape, engine, target=TARGET)
            result.conditions["bdev"] = bdev.info.detail["io"]
            result.conditions["buffered"] = bdev.info.detail.get("buffered", "no, O_DIRECT")
    return result
