"""Device to arena on a real SPDK target, beside SPDK's own tools on the same target.

Needs DPURT_SPDK_TGT (spdk_tgt); its neighbours spdk_nvme_perf and bdevperf are looked for beside it, or named by
DPURT_SPDK_PERF and DPURT_SPDK_BDEVPERF. The target polls core 0; ours and SPDK's initiator take turns on core 1, random
reads of one malloc bdev that is exported both ways in turn (SPDK lets one exporter have it). Its NVMe/TCP transport is
asked for 2 MiB I/O.

- *vhost-user*: our front end; peers: SPDK's own NVMe/TCP initiator, and bdevperf, which reads the bdev inside of SPDK.
- *nvme-tcp*: our initiator; peer: the same initiator of SPDK.

CPU is of our process alone: the target polls a core whatever it does. *Verified* adds the CRC-32C of every block.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import trio
from crc32c import crc32c

from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.bdev.spdk_process import OwnTarget, start_target
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.bench.fio import cpu_s
from dpurt.bench.result import BenchResult, Figure
from dpurt.fabric.region import MemfdRegion

SUMMARY = "reads from a real SPDK target beside SPDK's own initiator and bdevperf (needs DPURT_SPDK_TGT)"
DEVICE_BYTES = 32 << 20  # what a target without huge pages has room for
SHAPES = tuple((size, depth) for size in (1 << 20, 4 << 20) for depth in (1, 8, 32))
SUBNQN = "nqn.2026-11.io.dpurt:bench"
READ_S = 1.0
INITIATOR_TARGET, VHOST_TARGET, INSIDE_TARGET = 0.95, 3.0, 0.8
RAW_CPU_TARGET, VERIFIED_CPU_TARGET = 0.03, 0.09
_GIB = 1 << 30
_BLOCK = 4096
_OFFSETS = 1009  # drawn before the clock starts: it is not the bdev whose dice are timed


@dataclass(frozen=True, slots=True)
class _Rig:
    folder: Path
    region: MemfdRegion
    perf: Path | None
    bdevperf: Path | None
    pairs: int


@dataclass(frozen=True, slots=True)
class _Run:
    gib_per_s: float
    cpu_s_per_gib: float = 0.0


def run(quick: bool) -> BenchResult:
    binary = os.environ.get("DPURT_SPDK_TGT")
    if binary is None:
        missing = "name an spdk_tgt in DPURT_SPDK_TGT"
        return BenchResult(name="spdk", conditions={"peer_missing": missing})
    region = MemfdRegion(1, "bench", max(size * depth for size, depth in SHAPES))
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        rig = _Rig(Path(folder), region, _tool(binary, "PERF", "spdk_nvme_perf"), _tool(binary, "BDEVPERF", "bdevperf"),
                   2 if quick else 5)  # fmt: skip
        return trio.run(_measure, rig, binary)


def _tool(target: str, variable: str, name: str) -> Path | None:
    bin_dir = Path(target).parent
    found = [os.environ.get(f"DPURT_SPDK_{variable}"), bin_dir / name, bin_dir.parent / "examples" / name]
    return next((Path(path) for path in found if path and os.access(path, os.X_OK)), None)


async def _measure(rig: _Rig, binary: str) -> BenchResult:
    result = BenchResult(name="spdk", conditions=_conditions(rig))
    own = OwnTarget(rig.folder)
    rpc_path = rig.folder / "rpc.sock"
    await start_target(own, binary, rpc_path, cpumask="0x1", use_huge=False, budget_s=60)
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(cores)})
        async with open_spdk_rpc(rpc_path) as rpc:
            result.conditions["target"] = await _call(rpc, "spdk_get_version")
            await _call(
                rpc, "bdev_malloc_create", num_blocks=DEVICE_BYTES // _BLOCK, block_size=_BLOCK, name="M0"
            )
            initiator = await _nvme_rows(rig, rpc, result)
            await _vhost_rows(rig, rpc, result, initiator)
    finally:
        os.sched_setaffinity(0, cores)
        with trio.CancelScope(shield=True):
            await own.kill()  # its disk is memory, and after a vhost session it may not end at SIGTERM
    result.figures += _inside(rig, result)
    return result


async def _call(rpc: SpdkRpc, method: str, **params: object) -> object:
    return await rpc.call(method, params, deadline=trio.current_time() + 20)


def _conditions(rig: _Rig) -> dict[str, object]:
    conditions: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load": os.getloadavg()[0], "pairs": rig.pairs, "device_bytes": DEVICE_BYTES, "seconds_each": READ_S,
    }  # fmt: skip
    if rig.perf is None or rig.bdevperf is None:
        conditions["peer_missing"] = (
            "spdk_nvme_perf or bdevperf is not beside spdk_tgt (DPURT_SPDK_PERF, _BDEVPERF)"
        )
    return conditions


async def export_tcp(rpc: SpdkRpc, bdev: str) -> int:
    """Serve a bdev of the target as the one namespace of `SUBNQN`, over NVMe/TCP on loopback. Returns the port: a free
    one, as the last run's is taken for a minute after it (the target closes its connections first).
    """
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port: int = chosen.getsockname()[1]
    listener = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    await _call(rpc, "nvmf_create_transport", trtype="TCP", max_io_size=2 << 20)
    await _call(rpc, "nvmf_create_subsystem", nqn=SUBNQN, allow_any_host=True)
    await _call(rpc, "nvmf_subsystem_add_ns", nqn=SUBNQN, namespace={"bdev_name": bdev})
    await _call(rpc, "nvmf_subsystem_add_listener", nqn=SUBNQN, listen_address=listener)
    return port


# --- rows ---


async def _nvme_rows(rig: _Rig, rpc: SpdkRpc, result: BenchResult) -> dict[tuple[int, int], float]:
    """Rows of our initiator; what SPDK's own reached at each shape."""
    port = await export_tcp(rpc, "M0")
    reached: dict[tuple[int, int], float] = {}
    async with contextlib.aclosing(await NvmeTcpBdev.open([("127.0.0.1", port)], SUBNQN)) as bdev:
        for size, depth in SHAPES:
            ours, peer = [], []
            for i in range(rig.pairs):
                for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
                    if turn == "ours":
                        ours.append(await _read(rig, bdev, size, depth))
                    elif rig.perf is not None:
                        peer.append(await trio.to_thread.run_sync(_run_perf, rig.perf, port, size, depth))
            reached[size, depth] = statistics.median(peer) if peer else 0.0
            result.figures += _initiator_figures(size, depth, ours, peer)
    await _call(rpc, "nvmf_delete_subsystem", nqn=SUBNQN)
    return reached


def _initiator_figures(size: int, depth: int, ours: list[_Run], peer: list[float]) -> Iterator[Figure]:
    label = f"nvme-tcp {size >> 20} MiB depth {depth}"
    ratio = statistics.median(a.gib_per_s / b for a, b in zip(ours, peer, strict=True)) if peer else None
    yield Figure(
        name=f"read {label}", value=statistics.median(r.gib_per_s for r in ours), unit="GiB/s",
        peer="spdk_nvme_perf", peer_value=statistics.median(peer) if peer else None, ratio=ratio,
        target=f">= {INITIATOR_TARGET}x", holds=None if ratio is None else ratio >= INITIATOR_TARGET,
    )  # fmt: skip
    yield Figure(
        name=f"cpu raw {label}", value=statistics.median(r.cpu_s_per_gib for r in ours), unit="s/GiB"
    )


async def _vhost_rows(
    rig: _Rig, rpc: SpdkRpc, result: BenchResult, initiator: dict[tuple[int, int], float]
) -> None:
    await _call(rpc, "vhost_create_blk_controller", ctrlr="V0", dev_name="M0")
    async with _opened_vhost(rig) as bdev:
        for size, depth in SHAPES:
            raw = [await _read(rig, bdev, size, depth) for _ in range(rig.pairs)]
            verified = [await _read(rig, bdev, size, depth, is_verified=True) for _ in range(rig.pairs)]
            is_target = (size, depth) == (1 << 20, 8)
            result.figures += _vhost_figures(size, depth, raw, verified, initiator[size, depth], is_target)


@contextlib.asynccontextmanager
async def _opened_vhost(rig: _Rig) -> AsyncIterator[Bdev]:
    async with contextlib.aclosing(await VhostUserBdev.open(rig.folder / "V0")) as bdev:
        memory = DeviceMemory(rig.region.fd, rig.region.address, rig.region.size)
        await bdev.add_memory(memory, trio.current_time() + 20)
        yield bdev


def _vhost_figures(
    size: int, depth: int, raw: list[_Run], verified: list[_Run], initiator: float, is_target: bool
) -> Iterator[Figure]:
    label = f"vhost-user {size >> 20} MiB depth {depth}"
    rate = statistics.median(r.gib_per_s for r in raw)
    ratio = rate / initiator if initiator else None
    yield Figure(
        name=f"read {label}", value=rate, unit="GiB/s", peer="spdk_nvme_perf over TCP", peer_value=initiator or None,
        ratio=ratio, target=f">= {VHOST_TARGET:g}x" if is_target else None,
        holds=None if ratio is None or not is_target else ratio >= VHOST_TARGET,
    )  # fmt: skip
    for what, runs, limit in (("raw", raw, RAW_CPU_TARGET), ("verified", verified, VERIFIED_CPU_TARGET)):
        cpu = statistics.median(r.cpu_s_per_gib for r in runs)
        yield Figure(
            name=f"cpu {what} {label}", value=cpu, unit="s/GiB",
            target=f"<= {limit:g}" if is_target else None, holds=cpu <= limit if is_target else None,
        )  # fmt: skip


def _inside(rig: _Rig, result: BenchResult) -> Iterator[Figure]:
    """The vhost-user rate beside what a reader inside of SPDK gets, 1 MiB depth 8; the target is stopped by now."""
    if rig.bdevperf is None:
        return
    rate = next(float(f.value) for f in result.figures if f.name == "read vhost-user 1 MiB depth 8")
    inside = statistics.median(_run_bdevperf(rig.bdevperf, rig.folder, 1 << 20, 8) for _ in range(rig.pairs))
    yield Figure(
        name="read vhost-user 1 MiB depth 8, in process", value=rate, unit="GiB/s", peer="bdevperf", peer_value=inside,
        ratio=rate / inside, target=f">= {INSIDE_TARGET:g}x", holds=rate >= INSIDE_TARGET * inside,
    )  # fmt: skip


# --- ours ---


async def _read(rig: _Rig, bdev: Bdev, size: int, depth: int, *, is_verified: bool = False) -> _Run:
    """Random reads for `READ_S`, each reader into its own slot."""
    chance = random.Random(size + depth)
    offsets = itertools.cycle([chance.randrange(DEVICE_BYTES // size) * size for _ in range(_OFFSETS)])
    done = 0
    start, cpu = time.perf_counter(), cpu_s()
    until = start + READ_S
    deadline = trio.current_time() + 20

    async def reader(slot: memoryview) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await bdev.read_into(next(offsets), [slot], deadline)
            if is_verified:
                crc32c(slot)
            done += size

    async with trio.open_nursery() as nursery:
        for i in range(depth):
            nursery.start_soon(reader, rig.region.view[i * size : (i + 1) * size])
    gib = done / _GIB
    return _Run(gib / (time.perf_counter() - start), (cpu_s() - cpu) / gib)


# --- SPDK's ---


def _run_perf(program: Path, port: int, size: int, depth: int) -> float:
    """GiB/s of SPDK's NVMe/TCP initiator. ValueError if it says none."""
    where = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{SUBNQN}"
    command = [
        str(program), "--no-huge", "-s", "512", "-c", "0x2", "-q", str(depth), "-o", str(size), "-w", "randread",
        "-t", str(max(1, round(READ_S))), "-r", where,
    ]  # fmt: skip
    return _mib_per_s(_output_of(command), r"Total\s*:\s*[\d.]+\s+([\d.]+)") / 1024


def _run_bdevperf(program: Path, folder: Path, size: int, depth: int) -> float:
    """GiB/s of a reader inside of SPDK on a malloc bdev of its own."""
    make = {"method": "bdev_malloc_create",
            "params": {"num_blocks": DEVICE_BYTES // _BLOCK, "block_size": _BLOCK, "name": "M0"}}  # fmt: skip
    config = folder / "bdevperf.json"
    config.write_text(json.dumps({"subsystems": [{"subsystem": "bdev", "config": [make]}]}))
    command = [
        str(program), "--no-huge", "-s", "1024", "-r", str(folder / "bdevperf.sock"), "-m", "0x2", "-c", str(config),
        "-q", str(depth), "-o", str(size), "-w", "randread", "-t", str(max(1, round(READ_S))),
    ]  # fmt: skip
    return _mib_per_s(_output_of(command), r"Total\s*:\s*[\d.]+\s+([\d.]+)") / 1024


def _output_of(command: list[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return done.stdout


def _mib_per_s(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"SPDK's tool did not say how fast it was:\n{text[-1000:]}")
    return float(found[1])
