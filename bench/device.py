"""What this machine's file can do, as a device profile for `dpurt replay --device FILE` and `dpurt size`.

A file is made in the working folder (so choose the folder to measure), read and written through the `file` bdev with
O_DIRECT: latency is the median of single 4 KiB operations, one at a time; the rate is of 1 MiB operations, `QUEUE_DEPTH`
at once. The figures carry what the replay's model needs and nothing else: no tail, no mix of reads and writes. There
is no peer and no target.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import trio

from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.file import FileBdev
from dpurt.bench.result import BenchResult, Figure

SUMMARY = "this machine's file as a device profile for replay and size"

QUEUE_DEPTH = 16
SMALL, LARGE = 4 << 10, 1 << 20
_PATIENCE_S = 60.0

Operation = Callable[[int, memoryview], Awaitable[None]]


def run(quick: bool) -> BenchResult:
    """Measure a file of 512 MiB, or 64 when `quick`."""
    size_bytes = (64 if quick else 512) << 20
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-", dir=Path.cwd()) as folder:
        figures, detail = trio.run(_measure, Path(folder) / "disk", size_bytes)
    conditions: dict[str, object] = {"file_bytes": size_bytes, "queue_depth": QUEUE_DEPTH, **detail}
    return BenchResult(name="device", conditions=conditions, figures=figures)


async def _measure(path: Path, size_bytes: int) -> tuple[list[Figure], dict[str, str]]:
    async with contextlib.aclosing(await FileBdev.open(path, size_bytes=size_bytes)) as bdev:

        async def read(offset: int, buffer: memoryview) -> None:
            await bdev.read_into(offset, [buffer], trio.current_time() + _PATIENCE_S)

        async def write(offset: int, buffer: memoryview) -> None:
            await bdev.write_from(offset, [buffer], trio.current_time() + _PATIENCE_S)

        await _rate(write, size_bytes)  # no holes: their reads cost nothing
        figures = [
            Figure(name=f"{name} {what}", value=await measure(operation, size_bytes), unit=unit)
            for name, operation in (("write", write), ("read", read))
            for what, measure, unit in (("rate", _rate, "B/s"), ("latency", _latency_us, "us"))
        ]
        await bdev.flush(trio.current_time() + _PATIENCE_S)
        return figures, bdev.info.detail


async def _rate(operation: Operation, size_bytes: int) -> float:
    """Bytes a second over the whole file once, in random order."""
    todo = _offsets(size_bytes, LARGE, size_bytes // LARGE)
    buffer = aligned_buffer(LARGE * QUEUE_DEPTH)

    async def user(slot: memoryview) -> None:
        for offset in todo:
            await operation(offset, slot)

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(QUEUE_DEPTH):
            nursery.start_soon(user, buffer[i * LARGE : (i + 1) * LARGE])
    return size_bytes / (time.perf_counter() - start)


async def _latency_us(operation: Operation, size_bytes: int) -> float:
    """Median time of one small operation, nothing else going on."""
    buffer = aligned_buffer(SMALL)
    times = []
    for offset in _offsets(size_bytes, SMALL, 500):
        start = time.perf_counter()
        await operation(offset, buffer)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _offsets(size_bytes: int, step: int, count: int) -> Iterator[int]:
    """Different multiples of `step` in random order."""
    return iter([n * step for n in random.Random(count).sample(range(size_bytes // step), count)])
