"""File to arena: the `file` bdev beside fio, on the same file, with the same block size and depth, O_DIRECT.

fio runs each of its engines first; the fastest at each shape is the peer. Then ours and the peer take turns.
Both read the whole file once in random order per run; rates are of the reading alone (fio's own figure),
without process start. *Verified* adds the CRC-32C of every block, which is what the block store does.
"""

from __future__ import annotations

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

SUMMARY = "file to arena with O_DIRECT: the file bdev beside fio (best of io_uring, libaio, psync)"
TARGET = 0.95
FILE_BYTES = 1 << 30
SHAPES = ((256 << 10, 8), (256 << 10, 32), (1 << 20, 8), (1 << 20, 32))  # (block bytes, depth)
ENGINES = ("io_uring", "libaio", "psync")
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


def run(quick: bool) -> BenchResult:
    pairs = 3 if quick else 9
    fio = shutil.which("fio")
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        return trio.run(_measure, Path(folder) / "disk", fio, pairs)


async def _measure(path: Path, fio: str | None, pairs: int) -> BenchResult:
    bdev = await FileBdev.open(path, size_bytes=FILE_BYTES)
    try:
        await _fill(bdev)
        result = BenchResult(name="file", conditions=_conditions(bdev, fio, pairs))
        for block_bytes, depth in SHAPES:
            shape = _Shape(block_bytes, depth)
            peer = None if fio is None else _best_engine(fio, path, shape)
            result.figures += await _figures(bdev, path, shape, fio, peer, pairs)
    finally:
        await bdev.aclose()
    return result


def _conditions(bdev: FileBdev, fio: str | None, pairs: int) -> dict[str, object]:
    conditions: dict[str, object] = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "file_bytes": FILE_BYTES,
        "pairs": pairs,
        "bdev": dict(bdev.info.detail, path="a temporary file"),
    }
    if fio is None:
        conditions["peer_missing"] = "install fio (Debian package fio)"
    return conditions


async def _figures(
    bdev: FileBdev, path: Path, shape: _Shape, fio: str | None, engine: str | None, pairs: int
) -> list[Figure]:
    raw, verified, peer = [], [], []
    for i in range(pairs):
        turns = ("ours", "peer") if i % 2 == 0 else ("peer", "ours")
        for turn in turns:
            if turn == "ours":
                raw.append(await _read_all(bdev, shape, seed=i, is_verified=False))
            elif fio is not None and engine is not None:
                peer.append(_run_fio(fio, path, shape, engine))
        verified.append(await _read_all(bdev, shape, seed=i, is_verified=True))
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


async def _fill(bdev: FileBdev) -> None:
    buffer = aligned_buffer(4 << 20)
    for offset in range(0, FILE_BYTES, len(buffer)):
        buffer[:] = random.Random(offset).randbytes(len(buffer))
        await bdev.write_from(offset, [buffer], trio.current_time() + _PATIENCE_S)
    await bdev.flush(trio.current_time() + _PATIENCE_S)


async def _read_all(bdev: FileBdev, shape: _Shape, *, seed: int, is_verified: bool) -> _Run:
    """Read the whole file once, in random order, `depth` reads at a time, each into its own slot."""
    blocks = list(range(0, FILE_BYTES, shape.block_bytes))
    random.Random(seed).shuffle(blocks)
    todo = iter(blocks)
    arena = aligned_buffer(shape.block_bytes * shape.depth)
    arena[:] = bytes(len(arena))  # touched, as an arena is, before the clock starts
    deadline = trio.current_time() + _PATIENCE_S

    async def reader(slot: memoryview) -> None:
        for offset in todo:
            await bdev.read_into(offset, [slot], deadline)
            if is_verified:
                crc32c(slot)

    cpu, start = _cpu_s(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(shape.depth):
            nursery.start_soon(reader, arena[i * shape.block_bytes : (i + 1) * shape.block_bytes])
    gib = FILE_BYTES / _GIB
    return _Run(gib / (time.perf_counter() - start), (_cpu_s() - cpu) / gib)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- fio ---


def _best_engine(fio: str, path: Path, shape: _Shape) -> str | None:
    """The engine with the best rate at this shape (median of three); None if none of them runs here."""
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for engine in ENGINES:
            try:
                rates.setdefault(engine, []).append(_run_fio(fio, path, shape, engine).gib_per_s)
            except (subprocess.SubprocessError, ValueError):
                continue
    return max(rates, key=lambda engine: statistics.median(rates[engine]), default=None)


def _run_fio(fio: str, path: Path, shape: _Shape, engine: str) -> _Run:
    command = [
        fio, "--name=peer", f"--filename={path}", f"--size={FILE_BYTES}", "--rw=randread", "--direct=1",
        f"--bs={shape.block_bytes}", f"--ioengine={engine}", "--output-format=json",
    ]  # fmt: skip
    if engine == "psync":
        share = FILE_BYTES // shape.depth
        command += ["--thread", f"--numjobs={shape.depth}", "--group_reporting", f"--io_size={share}"]
    else:
        command.append(f"--iodepth={shape.depth}")
    done = subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE_S)
    return _parse_fio(json.loads(done.stdout)["jobs"][0], shape.depth if engine == "psync" else 1)


def _parse_fio(job: dict[str, Any], threads: int) -> _Run:
    read = job["read"]
    if not read["io_bytes"]:
        raise ValueError("fio read nothing")
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * read["runtime"] / 1000 * threads
    return _Run(read["bw_bytes"] / _GIB, cpu_s / (read["io_bytes"] / _GIB))
