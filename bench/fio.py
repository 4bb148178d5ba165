"""What the benchmarks of devices share: one file read whole in random order, by a bdev and by fio, into the same memory.

fio's buffers lie in the very region the bdev reads into (see `bench.file` for why that matters). CPU is that of the
reading process alone.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from crc32c import crc32c

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.file import FileBdev
from dpurt.bench.result import Figure
from dpurt.fabric.region import MemfdRegion

ENGINES = ("io_uring", "libaio")
GIB = 1 << 30
PATIENCE_S = 120.0
FILL_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One reading of the file."""

    gib_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Block size, depth in the device, and how many readers keep it busy."""

    block_bytes: int
    depth: int
    num_readers: int

    @property
    def label(self) -> str:
        return f"{self.block_bytes >> 10} KiB depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Rig:
    """The file, its size, the memory it is read into, and fio's program if there is one."""

    path: Path
    file_bytes: int
    region: MemfdRegion
    fio: str | None
    pairs: int

    @classmethod
    def on(cls, path: Path, file_bytes: int, shapes: tuple[Shape, ...], pairs: int) -> Rig:
        """A rig with room for the widest of these shapes."""
        widest = max(shape.block_bytes * shape.num_readers for shape in shapes)
        return cls(path, file_bytes, MemfdRegion(1, "bench", widest), shutil.which("fio"), pairs)

    def conditions(self) -> dict[str, object]:
        """What every figure depends on."""
        conditions: dict[str, object] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
            "python": platform.python_version(), "trio": trio.__version__, "load": os.getloadavg()[0],
            "file_bytes": self.file_bytes, "pairs": self.pairs, "arena": f"memfd of {self.region.pages}",
        }  # fmt: skip
        if self.fio is None:
            conditions["peer_missing"] = "install fio (Debian package fio)"
        else:
            done = subprocess.run([self.fio, "--version"], capture_output=True, text=True, check=True)
            conditions["fio"] = done.stdout.strip()
        return conditions


async def fill(rig: Rig) -> None:
    """Make the file, of noise."""
    buffer = aligned_buffer(FILL_BYTES)
    async with contextlib.aclosing(await FileBdev.open(rig.path, size_bytes=rig.file_bytes)) as bdev:
        for offset in range(0, rig.file_bytes, len(buffer)):
            buffer[:] = random.Random(offset).randbytes(len(buffer))
            await bdev.write_from(offset, [buffer], trio.current_time() + PATIENCE_S)
        await bdev.flush(trio.current_time() + PATIENCE_S)


async def read_all(rig: Rig, bdev: Bdev, shape: Shape, *, seed: int, is_verified: bool) -> Run:
    """Read the whole file once, in random order, each reader into its own slot."""
    blocks = list(range(0, rig.file_bytes, shape.block_bytes))
    random.Random(seed).shuffle(blocks)
    todo = iter(blocks)
    deadline = trio.current_time() + PATIENCE_S

    async def reader(slot: memoryview) -> None:
        for offset in todo:
            await bdev.read_into(offset, [slot], deadline)
            if is_verified:
                crc32c(slot)

    cpu, start = cpu_s(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(shape.num_readers):
            at = i * shape.block_bytes
            nursery.start_soon(reader, rig.region.view[at : at + shape.block_bytes])
    gib = rig.file_bytes / GIB
    return Run(gib / (time.perf_counter() - start), (cpu_s() - cpu) / gib)


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def take_turns(rig: Rig, bdev: Bdev, shape: Shape, engine: str | None) -> tuple[list[Run], list[Run]]:
    """Interleaved pairs: ours, and fio's (none without an engine)."""
    ours, peer = [], []
    for i in range(rig.pairs):
        for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            if turn == "ours":
                ours.append(await read_all(rig, bdev, shape, seed=i, is_verified=False))
            elif engine is not None:
                peer.append(run_fio(rig, shape, engine))
    return ours, peer


def best_engine(rig: Rig, shape: Shape) -> str | None:
    """fio's engine with the best rate at this shape (of two runs); None if none of them, or no fio, runs here."""
    rates: dict[str, float] = {}
    for engine in ENGINES * 2 if rig.fio is not None else ():
        try:
            rates[engine] = max(rates.get(engine, 0.0), run_fio(rig, shape, engine).gib_per_s)
        except (subprocess.SubprocessError, ValueError):
            continue
    return max(rates, key=lambda engine: rates[engine], default=None)


def run_fio(rig: Rig, shape: Shape, engine: str) -> Run:
    """One reading of the file by fio."""
    assert rig.fio is not None, "asked for only where there is one"
    command = [
        rig.fio, "--name=peer", f"--filename={rig.path}", f"--size={rig.file_bytes}", "--rw=randread", "--direct=1",
        f"--bs={shape.block_bytes}", f"--ioengine={engine}", f"--iodepth={shape.depth}",
        f"--mem=mmapshared:/proc/{os.getpid()}/fd/{rig.region.fd}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
    return _parsed(json.loads(done.stdout)["jobs"][0])


def _parsed(job: dict[str, Any]) -> Run:
    read = job["read"]
    if not read["io_bytes"]:
        raise ValueError("fio read nothing")
    used_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * read["runtime"] / 1000
    return Run(read["bw_bytes"] / GIB, used_s / (read["io_bytes"] / GIB))


# --- figures ---

VERIFIED_RUNS = 3


async def figures(
    rig: Rig, bdev: Bdev, shape: Shape, engine: str | None, name: str = "", target: float | None = None
) -> list[Figure]:
    """Rate beside fio's, CPU time raw and verified. `name` is put before the shape's label."""
    label = f"{name} {shape.label}".strip()
    raw, peer = await take_turns(rig, bdev, shape, engine)
    verified = [await read_all(rig, bdev, shape, seed=i, is_verified=True) for i in range(VERIFIED_RUNS)]
    program = f"fio {engine}" if peer else None
    return [
        _rate_figure(f"read {label}", raw, peer, program, target),
        _cpu_figure(f"cpu raw {label}", raw, peer, program),
        _cpu_figure(f"cpu verified {label}", verified, peer, program),
    ]


def _rate_figure(
    name: str, ours: list[Run], peer: list[Run], program: str | None, target: float | None
) -> Figure:
    rate = statistics.median(r.gib_per_s for r in ours)
    words = None if target is None else f">= {target}x fio"
    if not peer:
        return Figure(name=name, value=rate, unit="GiB/s", target=words)
    ratio = statistics.median(a.gib_per_s / b.gib_per_s for a, b in zip(ours, peer, strict=True))
    return Figure(
        name=name, value=rate, unit="GiB/s", peer=program,
        peer_value=statistics.median(r.gib_per_s for r in peer), ratio=ratio, target=words,
        holds=None if target is None else ratio >= target,
    )  # fmt: skip


def _cpu_figure(name: str, ours: list[Run], peer: list[Run], program: str | None) -> Figure:
    theirs = statistics.median(r.cpu_s_per_gib for r in peer) if peer else None
    value = statistics.median(r.cpu_s_per_gib for r in ours)
    return Figure(name=name, value=value, unit="s/GiB", peer=program, peer_value=theirs)
