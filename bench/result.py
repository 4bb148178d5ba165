"""What a benchmark returns, and how ours and a peer are measured fairly: interleaved pairs, medians, one run.

`dpurt bench NAME --json -` prints `BenchResult.to_json()`; others script against its keys.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. With a peer: `ratio` is ours over the target's sense (see `BenchResult`), `holds` the verdict."""

    name: str
    value: float | int | str
    unit: str
    peer: str | None = None
    peer_value: float | int | None = None
    ratio: float | None = None
    target: str | None = None
    holds: bool | None = None


@dataclass(slots=True, kw_only=True)
class BenchResult:
    """`holds` is True when every figure with a target holds, None when a peer is missing or there is no target."""

    name: str
    conditions: dict[str, object]
    figures: list[Figure] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        verdicts = [figure.holds for figure in self.figures if figure.target is not None]
        if not verdicts or None in verdicts:
            return False if False in verdicts else None
        return all(verdicts)

    def to_json(self) -> dict[str, object]:
        headline = next((f for f in self.figures if f.target is not None), None)
        rows = [
            {key: value for key in Figure.__slots__ if (value := getattr(figure, key)) is not None}
            for figure in self.figures
        ]
        return {
            "name": self.name,
            "conditions": self.conditions,
            "figures": rows,
            "peer": headline.peer if headline else None,
            "ratio": headline.ratio if headline else None,
            "target": headline.target if headline else None,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True)
class Pairs:
    """Medians of interleaved runs, in seconds. `ratio` is the median of the per-pair peer/ours (above 1: we are faster)."""

    ours_s: float
    peer_s: float
    ratio: float
    pairs: int


def timed(work: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(ours: Callable[[], object], peer: Callable[[], object], pairs: int) -> Pairs:
    """Run ours, peer, ours, peer ... after one warm-up each, alternating who goes first."""
    ours(), peer()
    mine: list[float] = []
    theirs: list[float] = []
    for i in range(pairs):
        for work, into in ((ours, mine), (peer, theirs))[:: 1 if i % 2 == 0 else -1]:
            into.append(timed(work))
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    return Pairs(statistics.median(mine), statistics.median(theirs), ratio, pairs)
