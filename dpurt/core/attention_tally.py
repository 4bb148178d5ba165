"""What became of each prefetch of a sparse decode, in the terms of `dpurt.replay.attention`: the same counts live and in
replay. Pure.

A prefetch ends as exactly one of: `timely` (wanted at the very turn it was for, and there), `late` (wanted at it, in
flight), `later` (wanted at a later turn, having stayed), `early` (evicted unused, wanted within `HORIZON` turns),
`useless`, `cancelled` (not started when its turn had passed), `open` (unused so far). A slot is group * width + column.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpurt.core.attention_pool import Slots

HORIZON = 4


@dataclass(slots=True)
class Tally:
    """Counts of one sequence; see the module's docstring. `hits` were there in time; `misses` had no prefetch under way."""

    demanded: int = 0
    hits: int = 0
    mass: float = 0.0
    hit_mass: float = 0.0
    misses: int = 0
    issued: int = 0
    timely: int = 0
    late: int = 0
    later: int = 0
    early: int = 0
    useless: int = 0
    cancelled: int = 0
    open: int = 0
    stall_s: float = 0.0
    clock_s: float = 0.0
    layer_hits: list[int] = field(default_factory=list)

    def outcomes(self) -> int:
        """Equals `issued` when the decode is over and `AttentionFates.finish` was called."""
        return self.timely + self.late + self.later + self.early + self.useless + self.cancelled + self.open


class AttentionFates:
    """The turn each prefetch was issued for, and when it was evicted unused."""

    def __init__(self, tally: Tally, slots: int) -> None:
        self._tally = tally
        self._unused_since = np.full(slots, -1, np.int64)
        self._evicted_since = np.full(slots, -1, np.int64)

    def issued(self, slots: Slots, turn: int) -> None:
        self._tally.issued += len(slots)
        gone = self._evicted_since[slots] >= 0
        self._tally.useless += int(np.count_nonzero(gone))
        self._evicted_since[slots] = -1
        self._unused_since[slots] = turn

    def cancelled(self, slot: int) -> None:
        self._tally.cancelled += 1
        self._unused_since[slot] = -1

    def evicted(self, slots: Slots, turn: int) -> None:
        unused = slots[self._unused_since[slots] >= 0]
        self._unused_since[unused] = -1
        self._evicted_since[unused] = turn

    def demanded(self, slots: Slots, turn: int, late: npt.NDArray[np.bool_]) -> None:
        tally = self._tally
        since = self._unused_since[slots]
        is_now = since == turn
        num_late = int(np.count_nonzero(is_now & late))
        tally.late += num_late
        tally.timely += int(np.count_nonzero(is_now)) - num_late
        tally.later += int(np.count_nonzero((since >= 0) & ~is_now))
        self._unused_since[slots] = -1
        gone = self._evicted_since[slots]
        num_early = int(np.count_nonzero((gone >= 0) & (gone >= turn - HORIZON)))
        tally.early += num_early
        tally.useless += int(np.count_nonzero(gone >= 0)) - num_early
        self._evicted_since[slots] = -1

    def pending(self) -> tuple[int, int]:
        """(unused and there, evicted unused and not yet out of sight) of the prefetches so far."""
        return int(np.count_nonzero(self._unused_since >= 0)), int(np.count_nonzero(self._evicted_since >= 0))

    def finish(self) -> None:
        unused, gone = self.pending()
        self._tally.useless += gone
        self._tally.open += unused
