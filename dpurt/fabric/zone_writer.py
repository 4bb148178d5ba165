"""The node's hand in one landing zone: what it writes into a host's memory, over any fabric, and in which order.

Each step is pushed when the one before it has arrived (see `dpurt.core.landing_zone`), so an entry is never there before its block.
Placements in different slots may run at the same time; those in one slot must not.

Leaves to others: which block goes where (`ZoneSlots`), finding it (`ZoneReader`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from dpurt.core.landing_zone import Entry, ZoneLayout, empty_entry, pack_count, pack_entry

__all__ = ["Push", "ZoneWriter"]

Push = Callable[[Sequence[tuple[memoryview, int, int]]], Awaitable[str]]
"""Copy each (source, landing region id, offset) into the host's memory, in order; empty when they are there, else why not."""


class ZoneWriter:
    """See the module's docstring. `region` is the landing's id."""

    def __init__(self, layout: ZoneLayout, region: int, push: Push) -> None:
        self.layout = layout
        self._region = region
        self._push = push
        self._generation = 0
        self._changes = 0

    async def place(
        self,
        slot: int,
        payload: memoryview,
        key: bytes,
        shard: int,
        crcs: Sequence[int],
        *,
        replaces: bool,
    ) -> str:
        """Put a block into a slot, which holds another if `replaces`. Empty, or why it is not there."""
        layout = self.layout
        pieces = [(payload, self._region, layout.slot_at(slot))]
        if replaces:  # spares the host to copy what will not check
            old = memoryview(empty_entry(layout))
            pieces.insert(0, (old, self._region, layout.entry_at(slot)))
        self._generation += 1
        entry = Entry(key, shard, self._generation, len(payload), tuple(crcs))
        return await self._push(pieces) or await self._announce(slot, pack_entry(layout, entry))

    async def empty(self, slot: int) -> str:
        """Take the slot's entry away. Empty, or why not."""
        return await self._announce(slot, empty_entry(self.layout))

    async def _announce(self, slot: int, entry: bytes) -> str:
        self._changes += 1
        count = memoryview(pack_count(self._changes))
        where = self.layout.entry_at(slot)
        return await self._push([(memoryview(entry), self._region, where), (count, self._region, 0)])
