"""Reclaim: which blocks lose their place on flash when a segment is reused, and which are carried on.

KV is ephemeral: a reclaimed segment's blocks go, with their descendants, unless they are hot. The hottest are appended again
within the store's write-amplification budget, parents before children (a parent was used no earlier than its child).
A block that also has a whole copy in staging only loses its extent. Called by the storage agent, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from dpurt.agents.block_store import Reclaim, StoreFull
from dpurt.agents.flash import SPAN
from dpurt.core.segment_log import METADATA_BYTES
from dpurt.errors import BdevError

from .index import IndexAgent
from .spaces import SpaceState
from .staging import StagingAgent
from .storage import StorageAgent

log = structlog.get_logger()
OWNER = 0  # of the leases reclaim takes while it copies; scopes count from 1
HELD_UP_S = 0.005
BATCH = 16
HOT_SHARE = 0.5  # at most this share of a segment is carried on, hottest first


@dataclass(frozen=True, slots=True)
class _Found:
    """Blocks on flash, one row a record: whose, where, how lately used."""

    state: SpaceState
    ids: NDArray[np.int64]
    shards: NDArray[np.int64]
    extents: NDArray[np.int64]
    last_use: NDArray[np.float64]


class Reclaimer:
    """Frees segments."""

    def __init__(self, index: IndexAgent, staging: StagingAgent, storage: StorageAgent) -> None:
        self._index = index
        self._staging = staging
        self._storage = storage
        self.dropped = 0
        self.carried = 0

    async def reclaim_one(self) -> None:
        """Free one segment, or wait a moment when all are in use by operations."""
        reclaim = self._storage.store.reclaim_one(self._last_use)
        if reclaim is None:
            await trio.sleep(HELD_UP_S)
            return
        try:
            for found in self._find(np.array(reclaim.offsets, np.int64)):
                await self._carry_on(found, reclaim)
            for found in self._find(np.array(reclaim.offsets, np.int64)):
                self._let_go(found, "reclaimed", "its segment on flash was reused: the byte cap is reached")
        finally:
            self._storage.store.finish_reclaim(reclaim)

    def _last_use(self, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        times = np.full(len(offsets), -np.inf)
        order = np.argsort(offsets)
        for found in self._find(offsets):
            at = order[np.searchsorted(offsets, found.extents, sorter=order)]
            times[at] = found.last_use
        return times

    def _find(self, offsets: NDArray[np.int64]) -> list[_Found]:
        """The records at these offsets, by space. One pass over the tables' extents, no map kept."""
        if not len(offsets):
            return []
        base = int(offsets[0]) // SPAN * SPAN + METADATA_BYTES  # of the store all of them are in
        segment_bytes = self._storage.store.segment_bytes_at(base)
        wanted = np.unique((offsets - base) // segment_bytes)
        is_wanted = np.zeros(int(wanted[-1]) + 2, bool)
        is_wanted[wanted] = True
        found = []
        for state in self._index.by_number.values():  # retired epochs too, while they are being swept
            table = state.index.table
            extents = table.where[: table.high_water, table.first_extent :]
            segments = np.clip((extents - base) // segment_bytes, -1, len(is_wanted) - 1)
            ids, shards = np.nonzero(is_wanted[segments] & (extents >= 0))
            exact = np.isin(extents[ids, shards], offsets)
            if exact.any():
                found.append(_found(state, ids[exact], shards[exact]))
        return found

    def lose(self, first: int, stop: int) -> None:
        """The store with these extents is gone: so is what it alone held, with its descendants."""
        for state in list(self._index.by_number.values()):
            table = state.index.table
            extents = table.where[: table.high_water, table.first_extent :]
            ids, shards = np.nonzero((extents >= first) & (extents < stop))
            self._let_go(_found(state, ids, shards), "device_lost", "its bdev came back without its store")

    async def _carry_on(self, found: _Found, reclaim: Reclaim) -> None:
        """Append the hottest blocks again, while the budget lasts."""
        state = found.state
        if state.retired:
            return
        count = min(reclaim.reappend_bytes // reclaim.record_bytes, int(len(found.ids) * HOT_SHARE))
        hottest = np.lexsort((state.index.table.depth[found.ids], -found.last_use))[:count]
        for at in range(0, len(hottest), BATCH):
            rows = hottest[at : at + BATCH]
            for shard in np.unique(found.shards[rows]).tolist():
                chosen = rows[found.shards[rows] == shard]
                if not await self._append_again(
                    state, found.ids[chosen], shard, found.extents[chosen].tolist()
                ):
                    return

    async def _append_again(
        self, state: SpaceState, ids: NDArray[np.int64], shard: int, extents: Sequence[int]
    ) -> bool:
        """Carry these blocks on, as far as they can be read. False: there is no room for any more."""
        handles = state.index.handles(ids.astype(np.int32)).tolist()
        deadline = trio.current_time() + self._storage.deadline_s
        got = await self._staging.acquire(
            state, handles, shard, state.layout.all_parts, OWNER, OWNER, None, deadline
        )
        good = [i for i, one in enumerate(got) if one.status == "ok"]
        try:
            if not good:
                return True
            images = [state.slab.image(got[i].slot) for i in good]
            places = await self._storage.store.append(
                state.layout, images, deadline=deadline, is_reappend=True
            )
            if self._storage.budget is not None:
                self._storage.budget.charge(len(images) * state.layout.record_bytes)
        except (StoreFull, BdevError):
            return False
        finally:
            self._staging.drop_leases(got)
        for i, place in zip(good, places, strict=True):
            self._moved(state, handles[i], shard, extents[i], place)
        return True

    def _moved(self, state: SpaceState, handle: int, shard: int, extent: int, place: int) -> None:
        block_id = state.block_id(handle)
        if block_id >= 0 and state.extent_of(block_id, shard) == extent:
            state.index.clear_extent(block_id, shard)
            state.index.set_extent(block_id, shard, place)
            self.carried += 1
        else:  # dropped meanwhile
            self._storage.store.forget(place)

    def _let_go(self, found: _Found, reason: str, detail: str) -> None:
        now = trio.current_time()
        state = found.state
        if state.retired:  # so that the sweep does not forget what is put there next
            table = state.index.table
            table.where[found.ids, table.first_extent + found.shards] = -1
            return
        handles = state.index.handles(found.ids.astype(np.int32)).tolist()
        for handle, shard, extent in zip(handles, found.shards.tolist(), found.extents.tolist(), strict=True):
            block_id = state.block_id(handle)
            if block_id < 0 or state.extent_of(block_id, shard) != extent:
                continue  # went with its parent
            if self._staging.is_whole(state, handle, shard):
                state.index.clear_extent(block_id, shard)
                continue
            self.dropped += 1
            self._index.drop(state, block_id, reason, now, detail)


def _found(state: SpaceState, ids: NDArray[np.int64], shards: NDArray[np.int64]) -> _Found:
    table = state.index.table
    return _Found(state, ids, shards, table.where[ids, table.first_extent + shards], table.last_use[ids])
