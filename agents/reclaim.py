"""Reclaim: which blocks lose their place on flash when a segment is reused, and which are carried on.

KV is ephemeral: a reclaimed segment's blocks go, with their descendants, unless they are hot. The hottest are appended again
within the store's write-amplification budget, parents before children (a parent was used no earlier than its child).
A block that also has a whole copy in staging only loses its extent. Called by the storage agent, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from dpurt.agents.block_store import Reclaim, StoreFull
from dpurt.errors import BdevError

from .index import IndexAgent
from .spaces import SpaceState, numbers_of
from .staging import StagingAgent
from .storage import StorageAgent

log = structlog.get_logger()
OWNER = 0  # of the leases reclaim takes while it copies; scopes count from 1
HELD_UP_S = 0.005
BATCH = 16
DROP_BATCH = 64  # blocks, between which others have their turn
HOT_SHARE = 0.5  # at most this share of a segment is carried on, hottest first

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Found:
    """Blocks on flash, one row a record: whose, where, how lately used."""

    state: SpaceState
    ids: NDArray[np.int64]
    shards: NDArray[np.int64]
    extents: NDArray[np.int64]
    last_use: NDArray[np.float64]

    def batches(self) -> Iterator[_Found]:
        """In pieces, between which others have their turn."""
        for at in range(0, len(self.ids), DROP_BATCH):
            rows = slice(at, at + DROP_BATCH)
            yield _Found(
                self.state, self.ids[rows], self.shards[rows], self.extents[rows], self.last_use[rows]
            )


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
            for found in self._find(reclaim):
                await self._carry_on(found, reclaim)
        finally:
            with trio.CancelScope(shield=True):
                await self._empty(reclaim)
            self._storage.store.finish_reclaim(reclaim)

    async def _empty(self, reclaim: Reclaim) -> None:
        for found in self._find(reclaim):
            for batch in found.batches():
                self._let_go(batch, "reclaimed", "its segment on flash was reused: the byte cap is reached")
                await trio.lowlevel.checkpoint()

    def _last_use(self, owners: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of records by their owners."""
        times = np.full(len(owners), -np.inf)
        for state, mine, ids, _ in self._by_space(owners):
            times[mine] = state.index.table.last_use[ids]
        return times

    def _find(self, reclaim: Reclaim) -> list[_Found]:
        """What is in the segment and in the index."""
        extents = np.array(reclaim.offsets, np.int64)
        found = []
        for state, mine, ids, shards in self._by_space(reclaim.names):
            table = state.index.table
            is_there = table.where[ids, table.first_extent + shards] == extents[mine]
            found.append(_found(state, ids[is_there], shards[is_there]))
        return found

    def _by_space(self, owners: NDArray[np.int64]) -> Iterator[tuple[SpaceState, Rows, Rows, Rows]]:
        """By space: which of `owners` are its, the ids of their blocks, their shards."""
        numbers = numbers_of(owners)
        for number in np.unique(numbers).tolist():
            state = self._index.by_number.get(number)  # retired epochs too, while they are being swept
            if state is None:
                continue
            mine = np.flatnonzero(numbers == number)
            yield state, mine, *state.rows_of(owners[mine])

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
            owners = [state.owner(handles[i], shard) for i in good]
            places = await self._storage.store.append(
                state.layout, images, owners, deadline=deadline, is_reappend=True
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
