"""Device to arena: every real bdev beside fio, on the same file, into the same memory, page cache bypassed on both
sides.

One file is read through each row of `ROWS`: directly, and through a back end that serves it with O_DIRECT
(qemu-storage-daemon for vhost-user). fio reads the file itself, with the faster of its asynchronous engines at each
shape, into the very region the bdev reads into (see `bench.file` for why that matters). Ours and fio take turns;
each run reads the file once in random order. Both have the same depth in the device; beyond depth 1 ours has two
readers more, so two reads wait in the bdev's own queue, as in a node's batches. CPU is that of our process alone: a
back end's own is not counted, as it would run on another core or in SPDK. *Verified* adds the CRC-32C of every
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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from crc32c import crc32c

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.file import FileBdev
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.bench.result import BenchResult, Figure
from dpurt.fabric.region import MemfdRegion
from dpurt.testing.qemu_storage import QEMU_STORAGE_DAEMON, QemuStorage, file_node

SUMMARY = "device to arena: bdevs beside fio on the same file (file, vhost-user on qemu-storage-daemon)"
FILE_BYTES = 1 << 29
SHAPES = tuple((size, depth) for size in (1 << 20, 4 << 20) for depth in (1, 8, 32))  # (block bytes, depth)
ENGINES = ("io_uring", "libaio")
TARGETS = {("vhost_user", 1 << 20, 8): 0.9}
VERIFIED_RUNS = 3
WAITING = 2  # readers more than the depth
_SMALLEST_QUEUE = 4
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
    def num_readers(self) -> int:
        return self.depth + WAITING if self.depth > 1 else 1

    @property
    def label(self) -> str:
        return f"{self.block_bytes >> 20} MiB depth {self.depth}"


@dataclass(frozen=True, slots=True)
class _Rig:
    folder: Path
    region: MemfdRegion
    fio: str | None
    pairs: int

    @property
    def path(self) -> Path:
        return self.folder / "disk"


Opener = Callable[[_Rig, int], AbstractAsyncContextManager[Bdev]]


@contextlib.asynccontextmanager
async def _open_file(rig: _Rig, depth: int) -> AsyncIterator[Bdev]:
    async with contextlib.aclosing(await FileBdev.open(rig.path, queue_depth=depth)) as bdev:
        yield bdev


@contextlib.asynccontextmanager
async def _open_vhost_user(rig: _Rig, depth: int) -> AsyncIterator[Bdev]:
    async with QemuStorage(rig.folder, [file_node(rig.path, is_direct=True)]) as daemon:
        async with contextlib.aclosing(
            await VhostUserBdev.open(daemon.path, queue_size=max(depth, _SMALLEST_QUEUE))
        ) as bdev:
            yield bdev


ROWS: dict[str, tuple[Opener, str | None]] = {  # opener, and what is missing to open it here
    "file": (_open_file, None),
    "vhost_user": (
        _open_vhost_user,
        None if QEMU_STORAGE_DAEMON else "qemu-storage-daemon (Debian package qemu-system-common)",
    ),
}


def run(quick: bool) -> BenchResult:
    region = MemfdRegion(1, "bench", max(block_bytes * (depth + WAITING) for block_bytes, depth in SHAPES))
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        rig = _Rig(Path(folder), region, shutil.which("fio"), 3 if quick else 9)
        return trio.run(_measure, rig)


async def _measure(rig: _Rig) -> BenchResult:
    await _fill(rig.path)
    result = BenchResult(name="bdev", conditions=_conditions(rig))
    shapes = [_Shape(*shape) for shape in SHAPES]
    engines = {shape: _best_engine(rig, shape) if rig.fio else None for shape in shapes}
    for row, (opener, missing) in ROWS.items():
        if missing is not None:
            result.conditions[f"{row}_missing"] = f"install {missing}"
            continue
        for shape in shapes:
            async with opener(rig, shape.depth) as bdev:
                await bdev.add_memory(_memory(rig.region), trio.current_time() + _PATIENCE_S)
                result.conditions[row] = ", ".join(
                    f"{key}: {value}" for key, value in bdev.info.detail.items()
                )
                result.figures += await _figures(rig, row, bdev, shape, engines[shape])
    return result


def _memory(region: MemfdRegion) -> DeviceMemory:
    return DeviceMemory(region.fd, region.address, region.size)


def _conditions(rig: _Rig) -> dict[str, object]:
    conditions: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "trio": trio.__version__,
        "load": os.getloadavg()[0],
        "file_bytes": FILE_BYTES,
        "pairs": rig.pairs,
    }
    if rig.fio is None:
        conditions["peer_missing"] = "install fio (Debian package fio)"
    return conditions


async def _figures(rig: _Rig, row: str, bdev: Bdev, shape: _Shape, engine: str | None) -> list[Figure]:
    raw, verified, peer = [], [], []
    for i in range(rig.pairs):
        for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            if turn == "ours":
                raw.append(await _read_all(rig, bdev, shape, seed=i, is_verified=False))
            elif engine is not None:
                peer.append(_run_fio(rig, shape, engine))
    for i in range(VERIFIED_RUNS):
        verified.append(await _read_all(rig, bdev, shape, seed=i, is_verified=True))
    label = f"{row} {shape.label}"
    target = TARGETS.get((row, shape.block_bytes, shape.depth))
    return [_rate_figure(label, raw, peer, engine, target), *_cpu_figures(label, raw, verified, peer, engine)]


def _rate_figure(
    label: str, raw: list[_Run], peer: list[_Run], engine: str | None, target: float | None
) -> Figure:
    ours = statistics.median(r.gib_per_s for r in raw)
    words = None if target is None else f">= {target}x fio"
    if not peer:
        return Figure(name=f"read {label}", value=ours, unit="GiB/s", target=words)
    ratio = statistics.median(a.gib_per_s / b.gib_per_s for a, b in zip(raw, peer, strict=True))
    return Figure(
        name=f"read {label}",
        value=ours,
        unit="GiB/s",
        peer=f"fio {engine}",
        peer_value=statistics.median(r.gib_per_s for r in peer),
        ratio=ratio,
        target=words,
        holds=None if target is None else ratio >= target,
    )


def _cpu_figures(
    label: str, raw: list[_Run], verified: list[_Run], peer: list[_Run], engine: str | None
) -> Iterator[Figure]:
    theirs = statistics.median(r.cpu_s_per_gib for r in peer) if peer else None
    for what, runs in (("raw", raw), ("verified", verified)):
        yield Figure(
            name=f"cpu {what} {label}",
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


async def _read_all(rig: _Rig, bdev: Bdev, shape: _Shape, *, seed: int, is_verified: bool) -> _Run:
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
        for i in range(shape.num_readers):
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
