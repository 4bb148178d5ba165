"""What only a replay can know: when a block is used next. For Belady's eviction and the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpurt.replay.trace import Request


class Future:
    """Uses of blocks, counted as positions in the trace's flat list of references.

    A use is over when it is `consumed`, in whatever order overlapping requests do so: a block's k-th
    consumption ends its k-th use.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._positions: dict[int, list[int]] = {}
        self._arrivals: list[float] = []
        self._used: dict[int, int] = {}
        for request in requests:
            for block in request.blocks:
                self._positions.setdefault(block, []).append(len(self._arrivals))
                self._arrivals.append(request.timestamp_s)

    def next_use(self, block: int, now: float = 0.0) -> float:
        """Position of the block's next use, ``math.inf`` if there is none. `now` is for EvictionPolicy's
        signature only."""
        positions = self._positions.get(block, ())
        used = self._used.get(block, 0)
        return positions[used] if used < len(positions) else math.inf

    def consumed(self, block: int) -> None:
        """The block's next use has happened."""
        self._used[block] = self._used.get(block, 0) + 1

    def arrival_s(self, position: float) -> float:
        """When the request of this use arrives."""
        return self._arrivals[int(position)]
