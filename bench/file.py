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
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from crc32c import crc32c

from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.file import FileBdev
from dpurt.bench.result import BenchResult, Figure
from dpurt.fabric.region import MemfdRegion

SUMMARY = "file to arena with O_DIRECT: the file bdev beside fio (best of io_uring, libaio)"
TARGET = 0.95
FILE_BYTES = 1 << 30
SHAPES = ((256 << 10, 8), (256 << 10, 32), (1 << 20, 8), (1 << 20, 32))  # (block bytes, depth)
ENGINES = ("io_uring", "libaio")
WAITING = 2  # readers more than the depth
_GIB = 1 << 30
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Run:
    gib_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True)
class _Shape:
    block_bytes: int
    depth: int

    @property
    def label(self) -> str:
        return f"{self.block_bytes >> 10} KiB depth {self.depth}"


@dataclass(frozen=True, slots=True)
class _Rig:
    path: Path
    region: MemfdRegion
    fio: str | None
    pairs: int


def run(quick: bool) -> BenchResult:
    widest = max(block_bytes * (depth + WAITING) for block_bytes, depth in SHAPES)
    region = MemfdRegion(1, "bench", widest)
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        rig = _Rig(Path(folder) / "disk", region, shutil.which("fio"), 5 if quick else 13)
        return trio.run(_measure, rig)


async def _measure(rig: _Rig) -> BenchResult:
    await _fill(rig.path)
    result = BenchResult(name="file", conditions=_conditions(rig))
    for block_bytes, depth in SHAPES:
        shape = _Shape(block_bytes, depth)
        engine = None if rig.fio is None else _best_engine(rig, shape)
        async with contextlib.aclosing(await FileBdev.open(rig.path, queue_depth=depth)) as bdev:
            result.figures += await _figures(rig, bdev, shape, engine)
            result.conditions["bdev"] = bdev.info.detail["io"]
            result.conditions["buffered"] = bdev.info.detail.get("buffered", "no, O_DIRECT")
    return result


def _conditions(rig: _Rig) -> dict[str, object]:
    conditions: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "trio": trio.__version__,
        "load": os.getloadavg()[0],
        "file_bytes": FILE_BYTES,
        "pairs": rig.pairs,
        "arena": f"memfd of {rig.region.pages}",
        "readers": f"depth + {WAITING}, of which depth in the device",
    }
    if rig.fio is None:
        conditions["peer_missing"] = "install fio (Debian package fio)"
    else:
        conditions["fio"] = subprocess.run(
            [rig.fio, "--version"], capture_output=True, text=True
        ).stdout.strip()
    return conditions


async def _figures(rig: _Rig, bdev: FileBdev, shape: _Shape, engine: str | None) -> list[Figure]:
    raw, verified, peer = [], [], []
    for i in range(rig.pairs):
        turns = ("ours", "peer") if i % 2 == 0 else ("peer", "ours")
        for turn in turns:
            if turn == "ours":
                raw.append(await _read_all(rig, bdev, shape, seed=i, is_verified=False))
            elif engine is not None:
                peer.append(_run_fio(rig, shape, engine))
    for i in range(3):
        verified.append(await _read_all(rig, bdev, shape, seed=i, is_verified=True))
    return [_rate_figure(shape, raw, peer, engine), *_cpu_figures(shape, raw, verified, peer, engine)]


def _rate_figure(shape: _Shape, raw: list[_Run], peer: list[_Run], engine: str | None) -> Figure:
    ours = statistics.median(r.gib_per_s for r in raw)
    if not peer:
        return Figure(name=f"read {shape.label}", value=ours, unit="GiB/s", target=f">= {TARGET}x fio")
    ratio = statistics.median(a.gib_per_s / b.gib_per_s for a, b in zip(raw, peer, strict=True))
    return Figure(
        name=f"read {shape.label}",
        value=ours,
        unit="GiB/s",
        peer=f"fio {engine}",
        peer_value=statistics.median(r.gib_per_s for r in peer),
        ratio=ratio,
        target=f">= {TARGET}x fio",
        holds=ratio >= TARGET,
    )


def _cpu_figures(
    shape: _Shape, raw: list[_Run], verified: list[_Run], peer: list[_Run], engine: str | None
) -> Iterator[Figure]:
    theirs = statistics.median(r.cpu_s_per_gib for r in peer) if peer else None
    for what, runs in (("raw", raw), ("verified", verified)):
        yield Figure(
            name=f"cpu {what} {shape.label}",
            value=statistics.median(r.cpu_s_per_gib for r in runs),
            unit="s/GiB",
            peer=f"fio {engine}" if peer else None,
            peer_value=theirs,
        )


# --- ours ---


async def _fill(path: Path) -> None:
    buffer = aligned_buffer(4 << 20)
    async with contextlib.aclosing(await FileBdev.open(path, size_bytes=FILE_BYTES)) as bdev:
        for offset in range(0, FILE_BYTES, len(buffer)):
            buffer[:] = random.Random(offset).randbytes(len(buffer))
            await bdev.write_from(offset, [buffer], trio.current_time() + _PATIENCE_S)
        await bdev.flush(trio.current_time() + _PATIENCE_S)


async def _read_all(rig: _Rig, bdev: FileBdev, shape: _Shape, *, seed: int, is_verified: bool) -> _Run:
    """Read the whole file once, in random order, each reader into its own slot."""
    blocks = list(range(0, FILE_BYTES, shape.block_bytes))
    random.Random(seed).shuffle(blocks)
    todo = iter(blocks)
    deadline = trio.current_time() + _PATIENCE_S

    async def reader(slot: memoryview) -> None:
        for offset in todo:
            await bdev.read_into(offset, [slot], deadline)
            if is_verified:
                crc32c(slot)

    cpu, start = _cpu_s(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(shape.depth + WAITING):
            at = i * shape.block_bytes
            nursery.start_soon(reader, rig.region.view[at : at + shape.block_bytes])
    gib = FILE_BYTES / _GIB
    return _Run(gib / (time.perf_counter() - start), (_cpu_s() - cpu) / gib)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- fio ---


def _best_engine(rig: _Rig, shape: _Shape) -> str | None:
    """The engine with the best rate at this shape (of two runs); None if none of them runs here."""
    rates: dict[str, float] = {}
    for engine in ENGINES * 2:
        try:
            rates[engine] = max(rates.get(engine, 0.0), _run_fio(rig, shape, engine).gib_per_s)
        except (subprocess.SubprocessError, ValueError):
            continue
    return max(rates, key=lambda engine: rates[engine], default=None)


def _run_fio(rig: _Rig, shape: _Shape, engine: str) -> _Run:
    assert rig.fio is not None, "asked for only where there is one"
    command = [
        rig.fio, "--name=peer", f"--filename={rig.path}", f"--size={FILE_BYTES}", "--rw=randread", "--direct=1",
        f"--bs={shape.block_bytes}", f"--ioengine={engine}", f"--iodepth={shape.depth}",
        f"--mem=mmapshared:/proc/{os.getpid()}/fd/{rig.region.fd}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE_S)
    return _parse_fio(json.loads(done.stdout)["jobs"][0])


def _parse_fio(job: dict[str, Any]) -> _Run:
    read = job["read"]
    if not read["io_bytes"]:
        raise ValueError("fio read nothing")
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * read["runtime"] / 1000
    return _Run(read["bw_bytes"] / _GIB, cpu_s / (read["io_bytes"] / _GIB))
