"""Arena to host: the shm fabric beside a plain memcpy of the same bytes, the tcp fabric beside Mooncake's
TransferEngine.

The node is another process on this machine; both sides of a pair read the same bytes from it, in turns.
*batch* is one call for all blocks, *single* one call a block. Ours is timed on the host's Trio loop. Mooncake
runs over its TCP transport, peer to peer, no metadata server."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import trio

from dpurt.bench.result import BenchResult, Figure, timed
from dpurt.fabric import Endpoint, Fabric, Piece, connect
from dpurt.fabric.region import MemfdRegion
from dpurt.fabric.shm import ShmFabric
from dpurt.fabric.tcp import TcpFabric

SUMMARY = "arena to host: shm beside memcpy, tcp beside Mooncake TransferEngine over TCP"
PEER = "mooncake-transfer-engine-non-cuda"
REGION_BYTES = 64 << 20
SESSION, TOKEN, REGION_ID = 1, bytes(range(32)), 1
Shape = tuple[int, int]  # (block bytes, blocks)
SHM_SHAPES: tuple[Shape, ...] = (
    (256 << 10, 256),
    (1 << 20, 64),
    (4 << 20, 16),
)  # all of the region: past the caches
TCP_SHAPES: tuple[Shape, ...] = ((256 << 10, 64), (1 << 20, 64), (4 << 20, 16))


def run(quick: bool) -> BenchResult:
    pairs = 5 if quick else 101  # a pull takes milliseconds, and one in a few is off by a tenth
    result = BenchResult(name="fabric", conditions=_conditions(pairs))
    with _node("shm") as address:
        result.figures += trio.run(_measure_shm, address, pairs)
    with _node("tcp") as address:
        try:
            mooncake = _Mooncake()
        except (ImportError, OSError, RuntimeError) as error:
            result.conditions["peer_missing"] = f"pip install {PEER} ({error})"
            result.figures += trio.run(_measure_tcp, address, None, pairs)
        else:
            with mooncake.node() as target:
                result.figures += trio.run(_measure_tcp, address, _Peer(mooncake, target), pairs)
    return result


def _conditions(pairs: int) -> dict[str, object]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "trio": trio.__version__,
        PEER: _version(PEER),
        "pairs": pairs,
        "processes": "node and host apart, one machine",
        "region_bytes": REGION_BYTES,
        "memory": f"memfds of {MemfdRegion(0, 'probe', REGION_BYTES).pages}, both sides, peers too",
        "load": os.getloadavg()[0],
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# --- figures ---------------------------------------------------------------------------------------------------------


async def _measure_shm(address: dict[str, str | int], pairs: int) -> list[Figure]:
    endpoint = await connect("shm", address, SESSION, TOKEN, trio.current_time() + 10)
    local = MemfdRegion(2, "bench local", REGION_BYTES)
    source = endpoint.view(REGION_ID, 0, REGION_BYTES)
    assert source is not None
    figures: list[Figure] = []
    for size, count in SHM_SHAPES:
        pieces = _pieces(local, size, count)
        figures.append(_view_figure(endpoint, size, count))
        for name, work in _pulls(endpoint, pieces):
            target = ">= 0.9x memcpy" if name == "batch" else None
            compared = await _pairs(work, partial(_memcpy, source, pieces), pairs)
            figures.append(
                _rate(
                    f"shm pull {name}, {size >> 10} KiB x {count}", size * count, compared, "memcpy", target
                )
            )
    source.release()
    await endpoint.aclose()
    return figures


def _memcpy(source: memoryview, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece.local[:] = source[piece.offset : piece.offset + len(piece.local)]


def _view_figure(endpoint: Endpoint, size: int, count: int) -> Figure:
    def look() -> None:
        for offset in range(0, size * count, size):
            endpoint.view(REGION_ID, offset, size)

    seconds = min(timed(look) for _ in range(20))
    return Figure(name=f"shm view, {size >> 10} KiB block", value=round(seconds / count * 1e6, 2), unit="us")


class _Peer:
    """Mooncake's reads of one target, in the shape of ours."""

    def __init__(self, mooncake: _Mooncake, target: tuple[str, int]) -> None:
        self._engine = mooncake.engine
        self._local = mooncake.address
        self._target, self._remote = target

    def reader(self, name: str, size: int, count: int) -> Callable[[], None]:
        offsets = range(0, size * count, size)
        local = [self._local + offset for offset in offsets]
        remote = [self._remote + offset for offset in offsets]

        def batch() -> None:
            _succeed(self._engine.batch_transfer_sync_read(self._target, local, remote, [size] * count))

        def single() -> None:
            for mine, theirs in zip(local, remote, strict=True):
                _succeed(self._engine.transfer_sync_read(self._target, mine, theirs, size))

        return batch if name == "batch" else single


async def _measure_tcp(address: dict[str, str | int], peer: _Peer | None, pairs: int) -> list[Figure]:
    endpoint = await connect("tcp", address, SESSION, TOKEN, trio.current_time() + 10)
    local = MemfdRegion(2, "bench local", REGION_BYTES)
    figures = []
    for size, count in TCP_SHAPES:
        for name, work in _pulls(endpoint, _pieces(local, size, count)):
            title = f"tcp pull {name}, {size >> 10} KiB x {count}"
            reader = peer.reader(name, size, count) if peer else None
            compared = await _pairs(work, reader, pairs)
            figures.append(_rate(title, size * count, compared, f"Mooncake {name} read", ">= 1x"))
    await endpoint.aclose()
    return figures


def _pieces(local: MemfdRegion, size: int, count: int) -> list[Piece]:
    return [Piece(REGION_ID, i * size, 0, local.view[i * size : (i + 1) * size]) for i in range(count)]


def _pulls(
    endpoint: Endpoint, pieces: Sequence[Piece]
) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
    async def batch() -> None:
        await endpoint.pull(pieces, trio.current_time() + 30)

    async def single() -> None:
        for piece in pieces:
            await endpoint.pull([piece], trio.current_time() + 30)

    yield "batch", batch
    yield "single", single


Compared = tuple[float, float | None, float | None]
"""Seconds of ours, of the peer, and the ratio (above 1: ours is faster)."""


async def _pairs(
    ours: Callable[[], Awaitable[None]], peer: Callable[[], None] | None, pairs: int
) -> Compared:
    """`interleave`, from inside the loop: ours is timed as an agent or client on that loop sees it."""
    mine: list[float] = []
    theirs: list[float] = []
    for pair in range(-1, pairs):  # the first warms up
        for is_ours in (True, False) if pair % 2 else (False, True):
            start = time.perf_counter()
            if is_ours:
                await ours()
                mine.append(time.perf_counter() - start)
            elif peer is not None:
                peer()
                theirs.append(time.perf_counter() - start)
    if not theirs:
        return statistics.median(mine[1:]), None, None
    ratios = [b / a for a, b in zip(mine[1:], theirs[1:], strict=True)]
    return statistics.median(mine[1:]), statistics.median(theirs[1:]), statistics.median(ratios)


def _rate(title: str, num_bytes: int, compared: Compared, peer: str, target: str | None) -> Figure:
    ours_s, peer_s, ratio = compared
    least = 0.9 if target == ">= 0.9x memcpy" else 1.0
    return Figure(
        name=title,
        value=round(num_bytes / ours_s / 2**30, 2),
        unit="GiB/s",
        peer=peer,
        peer_value=round(num_bytes / peer_s / 2**30, 2) if peer_s else None,
        ratio=round(ratio, 2) if ratio else None,
        target=target,
        holds=ratio >= least if ratio and target else None,
    )


# --- the other processes -----------------------------------------------------------------------------------------------


@contextmanager
def _process(*arguments: str) -> Iterator[dict[str, Any]]:
    """Another process of this module, and the line of JSON it says when it is ready. It ends with its
    input."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dpurt.bench.fabric", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield _ready_line(process.stdout)
    finally:
        process.kill()
        process.wait()


def _ready_line(lines: IO[str]) -> dict[str, Any]:
    for line in lines:
        if line.startswith("{"):
            ready: dict[str, Any] = json.loads(line)
            return ready
    raise RuntimeError("the other process ended before it was ready")


@contextmanager
def _node(kind: str) -> Iterator[dict[str, str | int]]:
    with tempfile.TemporaryDirectory(prefix="dpurt-") as directory, _process(kind, directory) as address:
        yield address


class _AllowAll:
    def begin(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> bool:
        return True

    def end(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> None:
        return None


async def _serve(kind: str, directory: str) -> None:
    """What the node process does."""
    region = MemfdRegion(REGION_ID, "bench", REGION_BYTES)
    region.view[:] = os.urandom(1 << 20) * (REGION_BYTES >> 20)
    access = _AllowAll()
    fabric: Fabric = TcpFabric(access) if kind == "tcp" else ShmFabric(access, Path(directory, "fabric"))
    fabric.add_region(region, None, None)
    fabric.admit(SESSION, TOKEN, [REGION_ID], [])
    async with trio.open_nursery() as nursery:
        print(json.dumps(await nursery.start(fabric.serve, lambda session: None)), flush=True)


class _Mooncake:
    """One TransferEngine with REGION_BYTES registered."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        _succeed(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._region = MemfdRegion(1, "mooncake", REGION_BYTES)
        self._region.view[:] = os.urandom(1 << 20) * (REGION_BYTES >> 20)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._region.view))
        _succeed(self.engine.register_memory(self.address, REGION_BYTES))

    @contextmanager
    def node(self) -> Iterator[tuple[str, int]]:
        """Another process that only serves; (its name, the address of its memory)."""
        with _process("mooncake") as ready:
            yield f"127.0.0.1:{ready['port']}", ready["address"]

    def say_ready(self) -> None:
        print(json.dumps({"port": self.engine.get_rpc_port(), "address": self.address}), flush=True)


def _succeed(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"mooncake returned {status}")


def main() -> None:
    kind = sys.argv[1]
    if kind == "mooncake":
        serving = _Mooncake()
        serving.say_ready()
        sys.stdin.read()
    else:
        trio.run(_serve, kind, sys.argv[2])


if __name__ == "__main__":
    main()
