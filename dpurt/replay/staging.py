"""Staging as the replay sees it: which blocks are there or coming, and who leaves. Slots, leases and bytes
are not modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dpurt.core.eviction import EvictionPolicy

Admit = Callable[[int, int], bool]  # may `block` come if `victim` has to leave for it?
Protects = Callable[[int, float], bool]  # is the block wanted soon, as of now?


class ReplayStaging:
    """At most `capacity` blocks resident or reserved. A block being read by a host is held and cannot leave.

    `protects`, if set, names blocks to spare if others can go. `on_evict` is called for each victim. `admit`
    lets a clairvoyant policy keep a better block.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        on_evict: Callable[[int], None],
        admit: Admit | None = None,
    ) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.policy = policy
        self.protects: Protects | None = None
        self._on_evict = on_evict
        self._admit = admit
        self._readers: dict[int, int] = {}
        self.resident: dict[int, bool] = {}  # block -> it came by prefetch and was not used yet

    def __contains__(self, block: int) -> bool:
        return block in self.resident

    def __len__(self) -> int:
        return len(self.resident)

    @property
    def has_free(self) -> bool:
        """A block may come without another leaving."""
        return len(self.resident) + self.reserved < self.capacity

    @property
    def available(self) -> int:
        """Blocks that could come now: free places and evictable blocks."""
        return self.capacity - self.reserved - len(self._readers)

    def price(self, now: float) -> float:
        """What the block that leaves for a newcomer is worth; 0 while there is a free place."""
        if len(self.resident) + self.reserved < self.capacity:
            return 0.0
        return self.policy.price(now)

    def leading(self, blocks: Iterable[int]) -> int:
        """Length of the leading run that is resident."""
        count = 0
        for block in blocks:
            if block not in self.resident:
                break
            count += 1
        return count

    def reserve(self, block: int, now: float) -> bool:
        """Make a place for a block that will come, evicting if need be. False: no room, or not worth its
        victim."""
        if len(self.resident) + self.reserved >= self.capacity:
            protects = self.protects
            victim = self.policy.victim(now, (lambda other: protects(other, now)) if protects else None)
            if victim is None or (self._admit is not None and not self._admit(block, victim)):
                return False
            self.policy.remove(victim, evicted=True)
            del self.resident[victim]
            self._on_evict(victim)
        self.reserved += 1
        return True

    def unreserve(self) -> None:
        """The block will not come."""
        self.reserved -= 1
        assert self.reserved >= 0

    def land(self, block: int, now: float, by_prefetch: bool) -> None:
        """A block for which a place was reserved is here."""
        self.unreserve()
        self.resident[block] = by_prefetch
        self.policy.insert(block, now)
        self.policy.unhold(block)

    def use(self, block: int) -> bool:
        """A host asked for a resident block. True the first time if prefetch brought it."""
        first_use_of_prefetch = self.resident[block]
        self.resident[block] = False
        return first_use_of_prefetch

    def hold(self, block: int) -> None:
        """A host reads the block. Holds nest."""
        readers = self._readers.get(block, 0)
        self._readers[block] = readers + 1
        if not readers:
            self.policy.hold(block)

    def unhold(self, block: int) -> None:
        """One host has read the block."""
        readers = self._readers[block] - 1
        if readers:
            self._readers[block] = readers
        else:
            del self._readers[block]
            self.policy.unhold(block)
