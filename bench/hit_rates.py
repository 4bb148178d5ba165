"""Demand-only hit rates beside the figures others publish or compute for the same traces.

Two checks, both of the untimed statistic (`dpurt.replay.hits`). The published tables are of whole traces, which are not
in this repository: name a folder that holds them in `DPURT_TRACES`. The simulator of kvcache.ai (PyPI
`kvcache-simulator`, if installed) is run on a slice that is here: it counts tokens in the last half of a trace, and
leaves out sizes that are not full by then.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dpurt.bench.result import BenchResult, Figure
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.hits import capacity_blocks, ideal_hit_rate, untimed_hit_rate, untimed_hit_rates
from dpurt.replay.trace import Request

SUMMARY = "demand-only hit rates beside published tables and kvcache-simulator"

FOLDER = "DPURT_TRACES"
SLICE = Path(__file__).parent / "traces" / "mooncake_conversation_1600.jsonl.gz"
POLICIES = ("lru", "lfu", "fifo", "belady")
WITHIN, WITHIN_PEER = 0.5, 1.0  # points

# traces/README.md of the data: share of distinct blocks -> hit rate in %, in the order of POLICIES
PUBLISHED = {
    "mooncake_conversation.jsonl.gz": (
        35.1,
        {
            0.01: (4.6, 5.6, 4.5, 20.8),
            0.02: (5.9, 6.8, 5.7, 27.2),
            0.05: (14.2, 11.4, 13.4, 34.7),
            0.1: (23.0, 17.8, 20.6, 35.1),
            0.2: (30.5, 28.3, 27.3, 35.1),
        },
    ),
    "weka_merged_512.jsonl.gz": (
        95.0,
        {
            0.01: (4.6, 0.5, 4.5, 26.5),
            0.02: (12.2, 2.0, 12.2, 42.1),
            0.05: (38.4, 5.3, 35.4, 67.5),
            0.1: (67.3, 13.1, 59.5, 82.5),
            0.2: (87.7, 25.1, 78.1, 92.3),
        },
    ),
}
RAGPULSE, RAGPULSE_IDEAL = "ragpulse.jsonl.gz", 19.5  # ids as they are
PEER_POLICIES = {"lru": "lru", "fifo": "fifo", "optimal": "belady"}
PEER_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
PEER_MODEL, PEER_BLOCK_GIB = "llama-3.1-70b", 512 * 327_680 / (1 << 30)


class _PeerRate(msgspec.Struct, frozen=True):
    hitRate: float  # the peer's names


class _Point(msgspec.Struct, frozen=True):
    cacheBlocks: int
    results: dict[str, _PeerRate]


class _Points(msgspec.Struct, frozen=True):
    points: list[_Point]


def run(quick: bool) -> BenchResult:
    """Compare; `quick` takes two sizes of the published tables."""
    folder = os.environ.get(FOLDER)
    result = BenchResult(name="hit_rates", conditions={"whole traces": folder or f"none; set {FOLDER}"})
    if folder is not None:
        for name in PUBLISHED:
            result.figures += _published(Path(folder) / name, quick)
        as_they_are = read_trace(Path(folder) / RAGPULSE, Reading(rechain=False)).requests
        ideal = ideal_hit_rate(as_they_are)
        result.figures.append(_figure("ragpulse ideal", ideal, "published", RAGPULSE_IDEAL, WITHIN))
    result.figures += _peer() if importlib.util.find_spec("kvcache_sim") else [_no_peer()]
    return result


def _published(path: Path, quick: bool) -> Iterator[Figure]:
    ideal, table = PUBLISHED[path.name]
    requests = read_trace(path).requests
    yield _figure(f"{path.stem} ideal", ideal_hit_rate(requests), "published", ideal, WITHIN)
    for share in list(table)[-2:] if quick else table:
        capacity = capacity_blocks(requests, share)
        for policy, published in zip(POLICIES, table[share], strict=True):
            rate = untimed_hit_rate(requests, policy, capacity)
            yield _figure(f"{path.stem} {policy} at {share:.1%}", rate, "published", published, WITHIN)


def _figure(name: str, rate: float, peer: str, theirs: float, within: float) -> Figure:
    ours = round(100 * rate, 2)
    return Figure(
        name=name,
        value=ours,
        unit="%",
        peer=peer,
        peer_value=theirs,
        target=f"within {within} points",
        holds=abs(ours - theirs) <= within,
    )


def _no_peer() -> Figure:
    return Figure(
        name="kvcache-simulator", value="not installed", unit="", target=f"within {WITHIN_PEER} points"
    )


def _peer() -> Iterator[Figure]:
    requests = read_trace(SLICE).requests
    sizes = {capacity_blocks(requests, share): share for share in PEER_SHARES}
    for point in _simulated(list(sizes)):
        for theirs, ours in PEER_POLICIES.items():
            name = f"slice, last half, tokens: {ours} at {sizes[point.cacheBlocks]:.1%}"
            rate = _last_half(requests, ours, point.cacheBlocks)
            percent = round(100 * point.results[theirs].hitRate, 2)
            yield _figure(name, rate, "kvcache-simulator", percent, WITHIN_PEER)


def _last_half(requests: Sequence[Request], policy: str, capacity: int) -> float:
    return untimed_hit_rates(requests, policy, capacity, warmup_share=0.5).tokens


def _simulated(capacities: Sequence[int]) -> list[_Point]:
    """The peer's points. Half a block more than each size, so that rounding down gives it."""
    budgets = ",".join(f"{(capacity + 0.5) * PEER_BLOCK_GIB:.6f}" for capacity in capacities)
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as folder:
        output = Path(folder) / "out.json"
        command = [sys.executable, "-m", "kvcache_sim", "run", "--trace", str(SLICE), "--model", PEER_MODEL]
        command += ["--block-size", "512", "--budgets-gib", budgets, "--backend", "python", "--no-progress"]
        subprocess.run([*command, "--format", "json", "-o", str(output)], check=True, timeout=600)
        return msgspec.json.decode(output.read_bytes(), type=_Points).points
