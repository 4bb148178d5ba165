"""Which of a node's stores takes the next batch of records, and which gives up a segment.

Each in turn, so that writes and later reads are spread over the devices; of those with room for the batch first. A device that
was seen to be down is left alone for `RETRY_S`.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RETRY_S", "StoreTurns"]

RETRY_S = 0.5


class StoreTurns:
    """Whose turn it is among `count` stores, numbered from 0. Times are in seconds, on one clock."""

    def __init__(self, count: int) -> None:
        self._down_until = [float("-inf")] * count
        self._turn = 0

    def usable(self, now: float) -> list[int]:
        """Those not known to be down, in the order of their numbers."""
        return [number for number, until in enumerate(self._down_until) if until <= now]

    def set_down(self, number: int, now: float) -> None:
        """Its device did not take what it was given."""
        self._down_until[number] = now + RETRY_S

    def to_write(self, now: float, has_room: Callable[[int], bool]) -> list[int]:
        """Whom to give a batch, in order of preference."""
        self._turn += 1
        order = self.to_reclaim(now)
        return sorted(order, key=lambda number: not has_room(number)) if len(order) > 1 else order

    def to_reclaim(self, now: float) -> list[int]:
        """Whom to ask for a segment, in order of preference."""
        usable = self.usable(now)
        start = self._turn % len(usable) if usable else 0
        return usable[start:] + usable[:start]

    def reclaimed(self) -> None:
        """A segment was given up: the next is another's."""
        self._turn += 1
