"""Hit rate over capacity, and where more capacity stops paying: the curve's knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.replay.hits import capacity_blocks, untimed_hit_rate
from dpurt.replay.trace import Request

__all__ = ["SHARES", "Point", "hit_rate_curve", "knee"]

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A capacity, as a share of the distinct blocks and in blocks, and its untimed prefix-hit rate."""

    share: float
    blocks: int
    hit_rate: float


def hit_rate_curve(
    requests: Sequence[Request], eviction: str, shares: Sequence[float] = SHARES
) -> list[Point]:
    """The points of one eviction policy, by growing capacity."""
    return [
        Point(share=share, blocks=blocks, hit_rate=untimed_hit_rate(requests, eviction, blocks))
        for share in sorted(shares)
        for blocks in (capacity_blocks(requests, share),)
    ]


def knee(curve: Sequence[Point]) -> Point:
    """The point furthest above the straight line from the first to the last, capacity on a logarithmic axis."""
    first, last = curve[0], curve[-1]
    width = math.log(last.share / first.share) or 1.0
    height = last.hit_rate - first.hit_rate or 1.0

    def above(point: Point) -> float:
        along = math.log(point.share / first.share) / width
        return (point.hit_rate - first.hit_rate) / height - along

    return max(curve, key=above)
