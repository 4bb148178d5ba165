"""NVMe over RDMA: the bdev beside the kernel's own initiator with fio, on the same namespace of the same target.

Both connect to the target `DPURT_NVME_RDMA` names ("host:port/NQN"), which should be one nobody needs the content of;
in the test machine (`tests/vm/run --exec python3 -m dpurt bench nvme_rdma`) it is the kernel's, over Soft-RoCE. Each run
moves the same bytes in random order with the same number of commands in flight, over one queue pair a CPU, which is what
the kernel takes (Soft-RoCE serves a queue pair on one CPU at a time); ours into added memory, fio's by the faster of its
asynchronous engines. They take turns. CPU is that of our process, and for fio its own and the system's on its behalf;
what a kernel thread does for either is in neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.nvme_rdma import NvmeRdmaBdev
from dpurt.bench.fio import cpu_s
from dpurt.bench.result import BenchResult, Figure
from dpurt.fabric.region import MemfdRegion
from dpurt.rdma.binding import missing
from dpurt.rdma.device import why_off

SUMMARY = (
    "NVMe/RDMA: the bdev beside the kernel's initiator with fio (needs RDMA and a target, DPURT_NVME_RDMA)"
)
RUN_BYTES = 64 << 20
TARGET = 0.9
_MIB = 1 << 20
_OTHER_PAIRS = 3  # of a shape without a target
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Shape:
    rw: str
    block_bytes: int
    depth: int
    target: float | None = None

    @property
    def label(self) -> str:
        return f"{self.rw} {self.block_bytes >> 10} KiB depth {self.depth}"


SHAPES = (
    _Shape("read", _MIB, 8, TARGET),
    _Shape("read", _MIB, 1),
    _Shape("read", 64 << 10, 8),
    _Shape("write", _MIB, 8),
)


@dataclass(frozen=True, slots=True)
class _Run:
    mib_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True)
class _Rig:
    address: tuple[str, int]
    nqn: str
    region: MemfdRegion
    disk: Path | None
    pairs: int


def run(quick: bool) -> BenchResult:
    result = BenchResult(name="nvme_rdma", conditions=_conditions())
    if "peer_missing" in result.conditions:
        return result
    where, _, nqn = os.environ["DPURT_NVME_RDMA"].partition("/")
    host, _, port = where.rpartition(":")
    address = host, int(port)
    most = max(shape.block_bytes * shape.depth for shape in SHAPES)
    with _attached(address, nqn) as disk:
        rig = _Rig(address, nqn, MemfdRegion(1, "bench", most), disk, 5 if quick else 11)
        result.conditions["pairs"] = rig.pairs
        result.figures += trio.run(_measure, rig)
    return result


def _conditions() -> dict[str, object]:
    conditions: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "target": os.environ.get("DPURT_NVME_RDMA", ""),
        "run_bytes": RUN_BYTES,
    }
    lacking = [name for name in ("nvme", "fio") if shutil.which(name) is None]
    if reason := missing() or why_off():
        conditions["peer_missing"] = reason
    elif not conditions["target"]:
        conditions["peer_missing"] = "set DPURT_NVME_RDMA to the target's host:port/NQN"
    elif lacking:
        conditions["peer_missing"] = f"install {' and '.join(lacking)} (Debian packages nvme-cli, fio)"
    return conditions


async def _measure(rig: _Rig) -> list[Figure]:
    figures = []
    async with contextlib.aclosing(
        await NvmeRdmaBdev.open([rig.address], rig.nqn, num_queues=_num_queues())
    ) as bdev:
        region = rig.region
        await bdev.add_memory(
            DeviceMemory(region.fd, region.address, region.size), trio.current_time() + _PATIENCE_S
        )
        for shape in SHAPES:
            figures += await _figures(rig, bdev, shape)
    return figures


def _num_queues() -> int:
    """One a CPU, as the kernel's initiator takes."""
    return min(os.cpu_count() or 1, 64)


async def _figures(rig: _Rig, bdev: Bdev, shape: _Shape) -> list[Figure]:
    engine = _best_engine(rig, shape)
    ours, peer = [], []
    for i in range(rig.pairs if shape.target else _OTHER_PAIRS):
        for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            if turn == "ours":
                ours.append(await _move_all(rig, bdev, shape, seed=i))
            else:
                peer.append(_run_fio(rig, shape, engine))
    ratio = statistics.median(a.mib_per_s / b.mib_per_s for a, b in zip(ours, peer, strict=True))
    name = f"kernel initiator, fio {engine}"
    return [
        Figure(
            name=shape.label,
            value=statistics.median(r.mib_per_s for r in ours),
            unit="MiB/s",
            peer=name,
            peer_value=statistics.median(r.mib_per_s for r in peer),
            ratio=ratio,
            target=None if shape.target is None else f">= {shape.target}x",
            holds=None if shape.target is None else ratio >= shape.target,
        ),
        Figure(
            name=f"cpu {shape.label}",
            value=statistics.median(r.cpu_s_per_gib for r in ours),
            unit="s/GiB",
            peer=name,
            peer_value=statistics.median(r.cpu_s_per_gib for r in peer),
        ),
    ]


# --- ours ---


async def _move_all(rig: _Rig, bdev: Bdev, shape: _Shape, *, seed: int) -> _Run:
    blocks = list(range(0, RUN_BYTES, shape.block_bytes))
    random.Random(seed).shuffle(blocks)
    todo = iter(blocks)
    deadline = trio.current_time() + _PATIENCE_S
    move = bdev.read_into if shape.rw == "read" else bdev.write_from

    async def mover(slot: memoryview) -> None:
        for offset in todo:
            await move(offset, [slot], deadline)

    cpu, start = cpu_s(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(shape.depth):
            at = i * shape.block_bytes
            nursery.start_soon(mover, rig.region.view[at : at + shape.block_bytes])
    seconds = time.perf_counter() - start
    return _Run(RUN_BYTES / _MIB / seconds, (cpu_s() - cpu) / (RUN_BYTES / (1 << 30)))


# --- the kernel's initiator ---


@contextlib.contextmanager
def _attached(address: tuple[str, int], nqn: str) -> Iterator[Path]:
    """The block device the kernel makes of the subsystem."""
    subprocess.run(["modprobe", "nvme-rdma"], check=True)
    subprocess.run(
        ["nvme", "connect", "-t", "rdma", "-a", address[0], "-s", str(address[1]), "-n", nqn], check=True
    )
    try:
        yield _wait_for_disk(nqn)
    finally:
        subprocess.run(["nvme", "disconnect", "-n", nqn], check=True, stdout=subprocess.DEVNULL)


def _wait_for_disk(nqn: str) -> Path:
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        for name in Path("/sys/class/nvme-subsystem").glob("*/subsysnqn"):
            disks = [Path("/dev", disk.name) for disk in name.parent.glob("nvme*n*")]
            if name.read_text().strip() == nqn and disks and disks[0].exists():
                return disks[0]
        time.sleep(0.05)
    raise TimeoutError(f"the kernel made no block device of {nqn}")


def _best_engine(rig: _Rig, shape: _Shape) -> str:
    rates = {engine: _run_fio(rig, shape, engine).mib_per_s for engine in ("io_uring", "libaio")}
    return max(rates, key=lambda engine: rates[engine])


def _run_fio(rig: _Rig, shape: _Shape, engine: str) -> _Run:
    command = [
        "fio", "--name=peer", f"--filename={rig.disk}", f"--size={RUN_BYTES}", f"--rw=rand{shape.rw}", "--direct=1",
        f"--bs={shape.block_bytes}", f"--ioengine={engine}", f"--iodepth={shape.depth}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE_S)
    job = json.loads(done.stdout)["jobs"][0]
    return _parse_fio(job, job[shape.rw])


def _parse_fio(job: dict[str, Any], moved: dict[str, Any]) -> _Run:
    if moved["io_bytes"] != RUN_BYTES:
        raise ValueError(f"fio moved {moved['io_bytes']} bytes")
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * moved["runtime"] / 1000
    return _Run(moved["bw_bytes"] / _MIB, cpu_s / (RUN_BYTES / (1 << 30)))
