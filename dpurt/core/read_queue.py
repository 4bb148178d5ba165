"""Which reads a device does next, and which of them in one operation.

Theory of operation. Reads are queued in batches and leave as *runs*: reads of one batch of which each goes on where the one
before it ends, so that one operation does them all. A run is a share of what was queued with it, since a device should have
several to do at once, and no more than `RUN_BYTES`. Runs that were queued one after the other, and fit, leave together. A read
that was taken back, or begun through another queue, is passed over when its turn comes.

Left to others: what makes two reads fit (`Read.goes_on`), who reads, and which of several queues comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

__all__ = ["RUN_BYTES", "SPREAD", "Read", "ReadQueue"]

RUN_BYTES = 256 << 10
SPREAD = 4  # operations that many waiting reads make, at least


class Read(Protocol):
    """One read of a record, or of some of its parts."""

    waits: bool  # False: begun, or taken back

    @property
    def record_bytes(self) -> int: ...

    def goes_on(self, last: Self) -> bool:
        """Does it lie right behind `last` on the device, and is it to be read like it?"""


R = TypeVar("R", bound=Read)


class ReadQueue(Generic[R]):
    """Reads that wait, in the order they were queued."""

    def __init__(self) -> None:
        self._runs: deque[list[R]] = deque()
        self._count = 0

    def __len__(self) -> int:
        """How many wait, those to be passed over included."""
        return self._count

    def push(self, reads: Sequence[R]) -> int:
        """Queue a batch; how many runs it made, each of which somebody could read now."""
        runs = _runs(reads, len(reads) // SPREAD)
        self._runs.extend(runs)
        self._count += len(reads)
        return len(runs)

    def pop(self) -> list[R]:
        """The next run, its reads marked as begun; empty when nothing waits."""
        while self._runs:
            most = self._count // SPREAD
            run = self._take()
            if not run:
                continue
            while self._runs and _fit(run, self._runs[0], most):
                run += self._take()
            for read in run:
                read.waits = False
            return run
        return []

    def _take(self) -> list[R]:
        """The first run, as far as it still waits: a gap in it makes two."""
        run = self._runs.popleft()
        self._count -= len(run)
        waiting = [read for read in run if read.waits]
        if len(waiting) < len(run):
            waiting, *others = _runs(waiting, len(waiting)) or [[]]
            self._runs.extendleft(reversed(others))
            self._count += sum(map(len, others))
        return waiting


def _runs(reads: Sequence[R], most: int) -> list[list[R]]:
    """Cut into runs of at most so many."""
    runs: list[list[R]] = []
    room = 0
    for read in reads:
        if room > 0 and read.goes_on(runs[-1][-1]):
            runs[-1].append(read)
            room -= 1
        else:
            runs.append([read])
            room = min(most, RUN_BYTES // read.record_bytes) - 1
    return runs


def _fit(run: Sequence[R], after: Sequence[R], most: int) -> bool:
    """May the run after it be read with it?"""
    if len(run) + len(after) > min(most, RUN_BYTES // run[0].record_bytes):
        return False
    return all(read.waits for read in after) and after[0].goes_on(run[-1])
