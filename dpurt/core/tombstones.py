"""Why blocks are no longer here: a bounded memory of the last losses, for `explain`.

Theory of operation: an ordered dict is the ring: a new tombstone goes last, and when full the first goes (a
plain dict would search its start past all it ever deleted). A key that dies twice keeps only its last death.
`detail` is cut, so memory is bounded by `capacity` alone.

Left to others: what "known" and "never stored" mean (`PrefixIndex`), and when to forget a tombstone because
the block is back (`discard`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

REASONS = frozenset(
    {
        "evicted",
        "reclaimed",
        "device_lost",
        "expired",
        "checksum",
        "epoch",
        "lost",  # its slot was given up with a read that came too late
        "parent_lost",
        "deleted",  # by a host
        "error",
        "stale",
        # of loads that were refused while the block was there, as are some with an error:
        "late",
        "no_room",
        "miss",
    }
)
MAX_DETAIL = 120


class Tombstone(NamedTuple):
    """One loss: a word of `REASONS`, when, and what a person should know."""

    reason: str
    now: float
    detail: str


class Tombstones:
    """The last `capacity` losses by block key. Single-threaded; at most about 500 bytes each."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._by_key: OrderedDict[bytes, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def put(self, key: bytes, reason: str, now: float, detail: str = "") -> None:
        """Remember a loss. ValueError for a reason that is not in `REASONS`: they are counted and shown by name."""
        self.put_many([key], reason, now, detail)

    def put_many(self, keys: Iterable[bytes], reason: str, now: float, detail: str = "") -> None:
        """`put` for blocks lost alike."""
        if reason not in REASONS:
            raise ValueError(f"unknown reason {reason!r}, expected one of {', '.join(sorted(REASONS))}")
        stone, by_key = Tombstone(reason, now, detail[:MAX_DETAIL]), self._by_key
        for key in keys:
            by_key.pop(key, None)
            by_key[key] = stone
            if len(by_key) > self.capacity:
                by_key.popitem(last=False)

    def get(self, key: bytes) -> Tombstone | None:
        """The last loss of `key`, or None when it never died or that is too long ago. Mutates nothing."""
        return self._by_key.get(key)

    def discard(self, key: bytes) -> None:
        """Forget the loss of `key`, which is back. No-op when there is none."""
        self._by_key.pop(key, None)
