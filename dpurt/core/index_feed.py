"""What happened to an index, for those who follow it: a bounded log of blocks that came and went.

Theory of operation. `PrefixIndex` notes which blocks the node now holds (all shards are in staging or on the bdev, so a
lookup would count them), and which no more. Moves between staging and bdev are no change. A reader has a `Cursor` and reads on
from there. One without a cursor first reads what is there, in *pages* of the record table, and then the log from where it
stood when the first page was read::

    pages   [0 .... a) [a .... b) [b .... end)           each as it is when it is read
    log      ^ start ...................... head          then read from `start` on

A block that changed after its page was read has its change in the log; one that changed before has it there too, and is
told twice, in order. Changes are *set* and *unset*, so telling one again is harmless, and a reader that has reached the head
knows exactly what the index knows.

The log keeps the last `capacity` changed blocks. A reader that is further behind gets None: it must forget what it knows
and begin anew. So a reader costs the node nothing but the reading, and cannot hold it up.

Left to others: waiting for news, the wire. Single-threaded: owned with its index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpurt.core.block_table import FREE
from dpurt.core.identity import KEY_BYTES

if TYPE_CHECKING:
    from dpurt.core.prefix_index import PrefixIndex

DEFAULT_CAPACITY = 1 << 17
_PAGE_SCAN = 1 << 15  # records looked at in one go


class Change(NamedTuple):
    """Blocks that the node now holds, or no more; `keys`: 16 bytes each, one after the other."""

    stored: bool
    keys: bytes


class Cursor(NamedTuple):
    """Where a reader stands: the next record to page through (-1: all were), and the next change."""

    page: int
    seq: int


class Batch(NamedTuple):
    """Changes in order, and where to go on. `is_current`: there was nothing more at that moment."""

    changes: list[Change]
    cursor: Cursor
    is_current: bool


class IndexFeed:
    """The log of one index."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._log: list[Change] = []
        self._first = 0  # sequence number of `_log[0]`
        self._blocks = 0  # in `_log`
        self._waiting: list[Callable[[], None]] = []

    @property
    def head(self) -> int:
        """The sequence number of the next change."""
        return self._first + len(self._log)

    def note(self, stored: bool, keys: bytes) -> None:
        """Something changed. Wakes who waits."""
        self._log.append(Change(stored, keys))
        self._blocks += _weight(keys)
        if self._blocks > 2 * self._capacity:
            self._trim()
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Call whoever waits."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def call_once(self, wake: Callable[[], None]) -> None:
        """Call `wake` at the next change."""
        self._waiting.append(wake)

    def forget(self, wake: Callable[[], None]) -> None:
        """It need not be called any more."""
        if wake in self._waiting:
            self._waiting.remove(wake)

    def since(self, seq: int, max_blocks: int) -> tuple[list[Change], int] | None:
        """Changes from `seq` on, at least one if there is one and about `max_blocks` blocks, and the next number.

        None when they are no longer there, or never were.
        """
        if not self._first <= seq <= self.head:
            return None
        at = stop = seq - self._first
        room = max_blocks
        while stop < len(self._log) and (room > 0 or stop == at):
            room -= _weight(self._log[stop].keys)
            stop += 1
        return _merged(self._log[at:stop]), self._first + stop

    def _trim(self) -> None:
        """Let go of the oldest changes, down to the capacity."""
        gone = 0
        while self._blocks > self._capacity:
            self._blocks -= _weight(self._log[gone].keys)
            gone += 1
        del self._log[:gone]
        self._first += gone


def _weight(keys: bytes) -> int:
    return 1 + len(keys) // KEY_BYTES


def _merged(changes: list[Change]) -> list[Change]:
    """Neighbours of one kind as one."""
    return [
        Change(stored, b"".join(change.keys for change in group))
        for stored, group in itertools.groupby(changes, key=attrgetter("stored"))
    ]


def read(index: PrefixIndex, cursor: Cursor | None, max_blocks: int) -> Batch | None:
    """Go on from `cursor`, or begin. None when the changes after it are gone: begin anew. The index must have a feed."""
    feed = index.feed
    assert feed is not None, "an index that is followed has a feed"
    page, seq = cursor if cursor is not None else (0, feed.head)
    if feed.since(seq, 0) is None:
        return None
    if page >= 0:
        changes, page = _page(index, page, max_blocks)
        return Batch(changes, Cursor(page, seq), page < 0 and seq == feed.head)
    log = feed.since(seq, max_blocks)
    assert log is not None, "it was there a moment ago"
    return Batch(log[0], Cursor(-1, log[1]), log[1] == feed.head)


def _page(index: PrefixIndex, at: int, max_blocks: int) -> tuple[list[Change], int]:
    """What is held among the records from `at` on, until there is enough; and the next record, -1 at the end."""
    table = index.table
    pieces: list[bytes] = []
    room = max_blocks
    while at < table.high_water and room > 0:
        until = min(at + min(_PAGE_SCAN, room), table.high_water)
        ids = np.arange(at, until, dtype=np.int32)
        ids = ids[table.parent[at:until] != FREE]
        pieces.append(table.keys[ids[index.are_resident(ids)]].tobytes())
        room -= len(pieces[-1]) // KEY_BYTES
        at = until
    keys = b"".join(pieces)
    return [Change(True, keys)] if keys else [], at if at < table.high_water else -1
