"""A replay's rates by slices of time, and from their spread how far the rates can be trusted.

The counted part of the trace (after the warm-up) is cut into `SLICES` equal times. A rate over all is the ratio
of two sums; its variance is that of a ratio estimated from slices, as if these were drawn independently. They are
not quite (a conversation crosses their borders), so take the intervals as lower bounds on the uncertainty of another
hour like this one. They do not say whether two policies on the *same* trace differ, since those see the same requests:
for that the slices are kept, and `difference_interval` takes the two runs' slices pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SLICES", "TimeSlice", "TimeSlices", "difference_interval", "ratio_interval"]

SLICES = 20
_T95 = {  # Student's t, two-sided 95 %, by degrees of freedom
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13, 16: 2.12, 17: 2.11, 18: 2.10, 19: 2.09,
}  # fmt: skip


@dataclass(slots=True)
class TimeSlice:
    """Sums over the requests that arrived in one slice."""

    references: int = 0
    hits: int = 0
    reusable: int = 0
    at_match: int = 0


class TimeSlices:
    """The slices of a trace, by its requests' arrival times, which must not fall."""

    def __init__(self, arrivals_s: Sequence[float], warmup_share: float) -> None:
        self._arrivals = arrivals_s
        self._first = int(len(arrivals_s) * warmup_share)
        self.slices = [TimeSlice() for _ in range(SLICES)]
        self._began = arrivals_s[self._first] if arrivals_s else 0.0
        self._span = arrivals_s[-1] - self._began if arrivals_s else 0.0

    def of(self, number: int) -> TimeSlice | None:
        """The slice of the trace's request `number`; None for one of the warm-up."""
        if number < self._first:
            return None
        if self._span <= 0:
            return self.slices[0]
        at = (self._arrivals[number] - self._began) / self._span
        return self.slices[min(SLICES - 1, int(at * SLICES))]

    def hits(self) -> list[tuple[int, int]]:
        """(hits, references) of each slice, empty ones too."""
        return [(s.hits, s.references) for s in self.slices]

    def confidence(self) -> dict[str, list[float] | int | None]:
        """95 % intervals of two rates, None with fewer than two slices in use."""
        used = [s for s in self.slices if s.references]
        return {
            "slices": len(used),
            "hit_rate_blocks": ratio_interval([(s.hits, s.references) for s in used]),
            "at_match": ratio_interval([(s.at_match, s.reusable) for s in used if s.reusable]),
        }


def ratio_interval(parts: Sequence[tuple[int, int]]) -> list[float] | None:
    """Low and high end of a 95 % interval of sum(a) / sum(b) over independent parts (a, b), 0 <= a <= b, b > 0."""
    found = _spread(parts)
    return None if found is None else [max(0.0, found[0] - found[1]), min(1.0, found[0] + found[1])]


def difference_interval(
    ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]
) -> list[float] | None:
    """The same of the difference of two runs' rates (ours - theirs), from their slices' (hits, references). None if
    they did not see the same requests, or in fewer than two slices."""
    if [b for _, b in ours] != [b for _, b in theirs]:
        return None
    parts = [(a - c, b) for (a, b), (c, _) in zip(ours, theirs, strict=True) if b]
    found = _spread(parts)
    return None if found is None else [found[0] - found[1], found[0] + found[1]]


def _spread(parts: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """The ratio, and half the width of its interval; None with fewer than two parts."""
    if len(parts) < 2:
        return None
    total = sum(b for _, b in parts)
    rate = sum(a for a, _ in parts) / total
    n = len(parts)
    square = sum((a - rate * b) ** 2 for a, b in parts) * n / (n - 1)
    return rate, _T95[min(n - 1, max(_T95))] * math.sqrt(square) / total
