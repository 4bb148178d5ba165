"""Arena to host and back over the verbs fabric, beside perftest's `ib_read_bw` and `ib_write_bw` on the same link.

Node and host are two processes on this machine, as perftest's server and client are; ours and perftest take turns. A
read is a `pull` into a landing, a write a `store` from one: asked for, granted through a memory window, moved, reported.
*single* is one call a block, *depth* of them under way at a time, as perftest's ``--tx-depth`` is; *batch* is one call
for all blocks, beside perftest at depth 16. perftest does only the moving, and polls. Both have the same path MTU, the
same acknowledge timer (Soft-RoCE needs a long one) and move the same bytes. A pull is a READ of the host's, a store a READ of
the node's, from the host; perftest's write is a WRITE. Batches are of blocks that lie one behind the other on both sides, as in
a fresh arena, and such neighbours are moved as one.

Beside *single* stands what a bare loop over pyverbs makes of the same (`dpurt.bench.verbs_floor`): the interpreter's own share.

How long pulls take is looked at alone and beside `IDLE_HOSTS` others, of a third process, that are connected and do nothing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count

import trio

from dpurt.bench.result import BenchResult, Figure
from dpurt.bench.verbs_floor import BareLoop
from dpurt.errors import RdmaUnavailable
from dpurt.fabric import Address, Endpoint, Piece, connect
from dpurt.fabric.region import MemfdRegion
from dpurt.fabric.verbs import VerbsFabric
from dpurt.rdma.device import RdmaDevice, find
from dpurt.rdma.queue_pair import ACK_TIMEOUT, Opcode

SUMMARY = "arena to host: the verbs fabric beside perftest (ib_read_bw, ib_write_bw) on the same RDMA link"
PROGRAMS = {"pull": "ib_read_bw", "store": "ib_write_bw"}
OPCODES = {"pull": Opcode.READ, "store": Opcode.WRITE}
SIZES = (64 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
BATCH_DEPTH = 16
RUN_BYTES = 24 << 20
REGION_BYTES = 64 << 20
SESSION, TOKEN, SHARED, INBOUND = 1, bytes(range(32)), 1, 2
IDLE_HOSTS = 64
LEAST = 0.9
LATENCIES = 300
MOST_SPREAD = 10
_PORTS = count(18600)
_PATIENCE_S = 120.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Peers:
    """Who moves the same bytes in turn with us; perftest on `device`."""

    floor: BareLoop
    device: RdmaDevice | None


@dataclass(frozen=True, slots=True)
class _Shape:
    op: str
    size: int
    depth: int
    is_batch: bool = False

    @property
    def num_blocks(self) -> int:
        return max(RUN_BYTES // self.size, 2 * self.depth, 5)

    @property
    def title(self) -> str:
        return (
            f"{self.op} {'batch' if self.is_batch else 'single'}, {self.size >> 10} KiB, depth {self.depth}"
        )


def run(quick: bool) -> BenchResult:
    pairs = 3 if quick else 11
    result = BenchResult(name="verbs", conditions=_conditions(pairs))
    try:
        device = find()
    except RdmaUnavailable as error:
        result.conditions["verbs_off"] = str(error)
        return result
    result.conditions["device"] = str(device)
    has_peer = all(map(shutil.which, PROGRAMS.values()))
    if not has_peer:
        result.conditions["peer_missing"] = "install perftest"
    with _node() as address, BareLoop.open(device) as floor:
        result.figures += trio.run(_measure, address, _Peers(floor, device if has_peer else None), pairs)
    return result


def _conditions(pairs: int) -> dict[str, object]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "trio": trio.__version__,
        "pairs": pairs,
        "run_bytes": RUN_BYTES,
        "load": os.getloadavg()[0],
    }


# --- figures ------------------------------------------------------------------------------------------------------------


async def _measure(address: Address, peers: _Peers, pairs: int) -> list[Figure]:
    endpoint = await connect("verbs", address, SESSION, TOKEN, trio.current_time() + _PATIENCE_S)
    local = endpoint.landing(REGION_BYTES).view
    figures = []
    for shape in _shapes():
        figures += await _figures(endpoint, local, shape, peers, pairs)
    figures.append(await _spread(endpoint, local, "alone"))
    async with _idle_hosts(address):
        figures.append(await _spread(endpoint, local, f"beside {IDLE_HOSTS} idle hosts"))
    local.release()
    await endpoint.aclose()
    return figures


async def _spread(endpoint: Endpoint, local: memoryview, beside: str) -> Figure:
    """How much longer than usual a pull of 1 MiB may take, one after the other."""
    times = []
    shape = _Shape("pull", _MIB, 1)
    for number in range(-10, LATENCIES):
        start = time.perf_counter()
        await endpoint.pull([_piece(local, shape, number % 16)], trio.current_time() + _PATIENCE_S)
        times.append(time.perf_counter() - start)
    cuts = statistics.quantiles(times[10:], n=100)
    ratio = cuts[98] / cuts[49]
    return Figure(
        name=f"pull 1 MiB, p99 over p50, {beside} (p50 {cuts[49] * 1000:.1f} ms, n {LATENCIES})",
        value=round(ratio, 2),
        unit="x",
        target=f"<= {MOST_SPREAD}",
        holds=ratio <= MOST_SPREAD,
    )


def _shapes() -> Iterator[_Shape]:
    for op in PROGRAMS:
        for size in SIZES:
            yield _Shape(op, size, BATCH_DEPTH, is_batch=True)
            yield from (_Shape(op, size, depth) for depth in DEPTHS)


async def _figures(
    endpoint: Endpoint, local: memoryview, shape: _Shape, peers: _Peers, pairs: int
) -> list[Figure]:
    """Ours, and for calls of one block the bare loop's; each beside perftest."""
    rates: dict[str, list[float]] = {"ours": [], "perftest": []}
    if not shape.is_batch:
        rates["floor"] = []
    for pair in range(-1, pairs):  # the first warms up
        for who in list(rates)[:: 1 if pair % 2 else -1]:
            if who == "ours":
                rates[who].append(await _ours(endpoint, local, shape))
            elif who == "floor":
                rates[who].append(
                    peers.floor.run(OPCODES[shape.op], shape.size, shape.depth, shape.num_blocks)
                )
            elif peers.device is not None:
                rates[who].append(_perftest(peers.device, shape))
    warm = {who: measured[1:] for who, measured in rates.items()}
    figures = [_verdict(shape, shape.title, warm["ours"], warm["perftest"], f">= {LEAST}x")]
    if "floor" in warm:
        figures.append(_verdict(shape, "  a bare pyverbs loop", warm["floor"], warm["perftest"], None))
    return figures


def _verdict(shape: _Shape, name: str, mine: list[float], theirs: list[float], target: str | None) -> Figure:
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True)) if theirs else None
    return Figure(
        name=name,
        value=round(statistics.median(mine), 1),
        unit="MiB/s",
        peer=PROGRAMS[shape.op],
        peer_value=round(statistics.median(theirs), 1) if theirs else None,
        ratio=round(ratio, 2) if ratio else None,
        target=None if target is None else f"{target} {PROGRAMS[shape.op]}",
        holds=ratio >= LEAST if ratio and target is not None else None,
    )


async def _ours(endpoint: Endpoint, local: memoryview, shape: _Shape) -> float:
    """MiB/s of one run."""
    pieces = [_piece(local, shape, number) for number in range(shape.num_blocks)]
    calls = iter([pieces] if shape.is_batch else [[piece] for piece in pieces])
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(1 if shape.is_batch else shape.depth):
            nursery.start_soon(_mover, endpoint, shape.op, calls)
    return shape.num_blocks * shape.size / (time.perf_counter() - start) / _MIB


def _piece(local: memoryview, shape: _Shape, number: int) -> Piece:
    region = SHARED if shape.op == "pull" else INBOUND
    at = number % (REGION_BYTES // shape.size) * shape.size
    return Piece(region, at, 0, local[at : at + shape.size])


async def _mover(endpoint: Endpoint, op: str, calls: Iterator[Sequence[Piece]]) -> None:
    move = endpoint.pull if op == "pull" else endpoint.store
    for pieces in calls:
        await move(pieces, trio.current_time() + _PATIENCE_S)


def _perftest(device: RdmaDevice, shape: _Shape) -> float:
    """MiB/s perftest tells of one run of its own pair of processes."""
    command = [
        PROGRAMS[shape.op], "--ib-dev", device.name, "--gid-index", str(device.gid_index), "--size", str(shape.size),
        "--tx-depth", str(shape.depth), "--iters", str(shape.num_blocks), "--mtu", str(device.mtu),
        "--qp-timeout", str(ACK_TIMEOUT), "--port", str(next(_PORTS)), "--CPU-freq", "--output", "bandwidth",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            return _client([*command, device.address])
        finally:
            server.kill()


def _client(command: list[str]) -> float:
    """The server may not listen yet."""
    deadline = time.monotonic() + 20
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
        if done.returncode == 0:
            return float(done.stdout.split()[-1])
        if time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-300:]} {done.stderr[-300:]}")
        time.sleep(0.05)


# --- the node -----------------------------------------------------------------------------------------------------------


@contextmanager
def _node() -> Iterator[Address]:
    command = [sys.executable, "-m", "dpurt.bench.verbs"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


class _AllowAll:
    def begin(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> bool:
        return True

    def end(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> None:
        return None


async def _serve() -> None:
    """What the node process does, until it is killed."""
    fabric = VerbsFabric(_AllowAll(), [find()])
    for region_id, writer in ((SHARED, None), (INBOUND, SESSION)):
        fabric.add_region(MemfdRegion(region_id, f"bench {region_id}", REGION_BYTES), None, writer)
    fabric.admit(SESSION, TOKEN, [SHARED], [INBOUND])
    for idle in range(IDLE_HOSTS):
        fabric.admit(SESSION + 1 + idle, TOKEN, [SHARED], [])
    async with trio.open_nursery() as nursery:
        print(json.dumps(await nursery.start(fabric.serve, lambda session: None)), flush=True)


# --- other hosts --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _idle_hosts(address: Address) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "dpurt.bench.verbs", json.dumps(dict(address))]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = b""
        async for chunk in process.stdout:
            said += chunk
            if said.endswith(b"\n"):
                break
        if said != b"connected\n":
            raise RuntimeError(f"the idle hosts did not connect: {said!r}, exit status {process.poll()}")
        yield
    finally:
        process.kill()
        await process.wait()


async def _connect_idle(address: Address) -> None:
    """What their process does, until it is killed."""
    for idle in range(IDLE_HOSTS):
        await connect("verbs", address, SESSION + 1 + idle, TOKEN, trio.current_time() + _PATIENCE_S)
    print("connected", flush=True)
    await trio.sleep_forever()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(_connect_idle, json.loads(sys.argv[1]))
    else:
        trio.run(_serve)
