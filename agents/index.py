"""The index agent: owns every space's prefix index, the tombstones, expiry and epochs.

Others ask it by plain method calls (see `dpurt.runtime.actor`). Whatever leaves the index goes through `drop`, which tells
the owners of slots, extents and predictions through `on_dropped`. A restart keeps all state: the structures live in the
object, and no method leaves them half changed across an await.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from dpurt.core.block_table import key_words
from dpurt.core.identity import ROOT_KEY, Space, chain_keys, digest_key, first_difference
from dpurt.core.prefix_index import Dropped
from dpurt.core.tombstones import Tombstones
from dpurt.runtime.actor import Actor
from dpurt.wire import messages as m

from .spaces import SpaceState, number_of

log = structlog.get_logger()
EXPLAINED = 64  # blocks at a time
EXPIRED = 512
EXPIRY_TICK_S = 1.0
_Chain: TypeAlias = tuple[SpaceState, list[bytes]]


class IndexAgent(Actor[None]):
    """Who holds which prefix, in which space."""

    name = "index"

    def __init__(self, tombstones: int = 65_536) -> None:
        super().__init__(1)
        self.spaces: dict[str, SpaceState] = {}
        self.by_number: dict[int, SpaceState] = {}
        self.tombstones = Tombstones(tombstones)
        self.refusals = Tombstones(tombstones // 8)
        self.on_dropped: list[Callable[[SpaceState, Dropped, str], None]] = []
        self.on_evicted: list[Callable[[int], None]] = []
        self.drops: dict[str, int] = {}

    # --- spaces and epochs ---

    def add(self, state: SpaceState) -> None:
        """Take a space (or its next epoch) into service."""
        old = self.spaces.get(state.name)
        if old is not None:
            old.retired = True
            if old.index.feed is not None:
                old.index.feed.wake()  # who follows the old epoch hears that it is over
        self.spaces[state.name] = state
        self.by_number[state.number] = state

    def bury(self, state: SpaceState, ids: NDArray[np.int32]) -> None:
        """Remember why these blocks of a retired epoch are gone."""
        now = trio.current_time()
        for block_id in ids.tolist():
            self.tombstones.put(
                state.index.key(block_id), "epoch", now, f"stored in epoch {state.space.epoch}"
            )

    def forget_retired(self, state: SpaceState) -> None:
        """A retired epoch has nothing left."""
        assert state.retired
        self.by_number.pop(state.number, None)

    # --- asking ---

    def match(
        self, state: SpaceState, tokens: bytes | None, digests: Sequence[bytes] | None
    ) -> NDArray[np.int32]:
        """Ids of the longest chain the node itself can serve (every shard in staging or on the bdev)."""
        if tokens is not None:
            ids = state.index.match(tokens)
        else:
            ids = state.index.match_keys([digest_key(state.fingerprint, d) for d in digests or ()])
        return ids[: state.index.resident_prefix(ids)]

    def find(self, state: SpaceState, digests: Sequence[bytes]) -> NDArray[np.int32]:
        """The id of each block by itself, -1 where the node cannot serve it (some shard is neither in staging nor on the bdev)."""
        found = state.index.find([digest_key(state.fingerprint, digest) for digest in digests])
        found[~state.index.are_resident(found)] = -1
        return found

    def touch(self, state: SpaceState, ids: NDArray[np.int32], now: float) -> None:
        """The chain was used: it is young again, and its expiry starts anew."""
        state.index.touch(ids, now)
        if state.ttl_s:
            state.index.set_expiry(ids, now + state.ttl_s)

    def chain(
        self, state: SpaceState, tokens: bytes | None, digests: Sequence[bytes] | None, first: int, count: int
    ) -> list[bytes] | None:
        """Key of the block before `first`, then the keys of `count` blocks from there; None when the prompt is shorter."""
        if tokens is None:
            keys = [
                digest_key(state.fingerprint, d) for d in (digests or ())[max(first - 1, 0) : first + count]
            ]
            chain = keys if first else [ROOT_KEY, *keys]
            return chain if len(chain) == count + 1 else None
        step = state.space.geometry.block_token_bytes
        if len(tokens) < (first + count) * step:
            return None
        parent, at = self._nearest_known(state, tokens, first)
        keys = chain_keys(
            state.fingerprint, parent, memoryview(tokens)[at * step : (first + count) * step], step
        )
        return [parent, *keys][first - at :]

    def _nearest_known(self, state: SpaceState, tokens: bytes, position: int) -> tuple[bytes, int]:
        """(key, blocks before it) of the last block before `position` whose key need not be computed."""
        step = state.space.geometry.block_token_bytes
        ids = state.index.match(memoryview(tokens)[: position * step])
        return (state.index.key(int(ids[-1])), len(ids)) if len(ids) else (ROOT_KEY, 0)

    def count_staged(self, state: SpaceState, ids: NDArray[np.int32], shard: int) -> int:
        """How many of these blocks have a staging slot."""
        return int(np.count_nonzero(state.index.locations(ids).slot[:, shard] >= 0)) if len(ids) else 0

    def has_shard(self, state: SpaceState, key: bytes, shard: int) -> bool:
        """Is this shard of the block on one of our tiers?"""
        block_id = state.index.get(key)
        return block_id is not None and state.has_shard(block_id, shard)

    def have_shard(self, state: SpaceState, keys: Sequence[bytes], shard: int) -> list[bool]:
        """`has_shard` of many keys."""
        table = state.index.table
        ids = table.find_many(key_words(keys))
        where = state.index.locations(ids)  # of an id of -1: any row
        here: list[bool] = (
            (ids >= 0) & ((where.slot[:, shard] >= 0) | (where.extent[:, shard] >= 0))
        ).tolist()
        return here

    def why_not(
        self, state: SpaceState, tokens: bytes | None, digests: Sequence[bytes] | None, position: int, shard: int
    ) -> str:  # fmt: skip
        """Why the block at `position`, the first after a match, is not here; empty when the prompt ends there."""
        chain = self.chain(state, tokens, digests, position, 1)
        if chain is None:
            return ""
        if self._missing_shards(state, chain[1]):
            return "incomplete"
        tomb = self.tombstones.get(chain[1])
        return "never_stored" if tomb is None else tomb.reason

    @staticmethod
    def _missing_shards(state: SpaceState, key: bytes) -> list[int]:
        """The shards without which a block is of no use though others are here; empty when all or none are."""
        block_id = state.index.get(key)
        if block_id is None:
            return []
        missing = [shard for shard in range(state.num_shards) if not state.has_shard(block_id, shard)]
        return missing if len(missing) < state.num_shards else []

    async def explain(
        self, state: SpaceState, tokens: bytes | None, digests: Sequence[bytes] | None, shard: int,
        others: Sequence[SpaceState],
    ) -> list[m.Reason]:  # fmt: skip
        """Why each whole block of a prompt is here or is not; of its first `m.MAX_BLOCKS`. Takes long for many: others have
        their turn in between.
        """
        step = state.space.geometry.block_token_bytes
        tokens = None if tokens is None else tokens[: m.MAX_BLOCKS * step]
        digests = (digests or ())[: m.MAX_BLOCKS]
        count = len(digests) if tokens is None else len(tokens) // step
        keys = self.chain(state, tokens, digests, 0, count) or [ROOT_KEY]
        former = _keys_of_last_epoch(state.space, tokens, digests)
        elsewhere = self._chains_elsewhere(state, tokens, digests, count, others)
        reasons = []
        for i, key in enumerate(keys[1:]):
            if i % EXPLAINED == 0:
                await trio.lowlevel.checkpoint()
            reasons.append(self._explain_one(state, i, key, former[i], shard, elsewhere, trio.current_time()))
        return reasons

    def _explain_one(
        self, state: SpaceState, position: int, key: bytes, former: bytes, shard: int,
        chains: Sequence[_Chain], now: float,
    ) -> m.Reason:  # fmt: skip
        refusal = self.refusals.get(key)
        missing = self._missing_shards(state, key)
        if missing:
            detail = f"of shards 0-{state.num_shards - 1}, {_ranges(missing)} are not here: a match needs all"
            return m.Reason(block=position, reason="incomplete", detail=detail)
        if self.has_shard(state, key, shard):
            where = state.index.locations(np.array([state.index.get(key)], np.int32))
            tiers = [t for t, v in (("staging", where.slot), ("nvme", where.extent)) if v[0, shard] >= 0]
            detail = " and ".join(f"in {tier}" for tier in tiers)
            if refusal is not None:
                detail += f"; {now - refusal.now:.1f} s ago it was refused: {refusal.reason} {refusal.detail}".rstrip()
            return m.Reason(block=position, reason="present", detail=detail, tiers=tiers)
        tomb = self.tombstones.get(key) or self.tombstones.get(former)
        if tomb is not None:
            return m.Reason(block=position, reason=tomb.reason, detail=tomb.detail, age_s=now - tomb.now)
        elsewhere = self._held_elsewhere(state, position, shard, chains)
        if elsewhere:
            return m.Reason(block=position, reason="other_space", detail=elsewhere)
        if refusal is not None:
            return m.Reason(
                block=position, reason=refusal.reason, detail=refusal.detail, age_s=now - refusal.now
            )
        return m.Reason(
            block=position, reason="never_stored", detail="not since this node started, nor found on its bdev"
        )

    def _chains_elsewhere(
        self, state: SpaceState, tokens: bytes | None, digests: Sequence[bytes], count: int,
        others: Sequence[SpaceState],
    ) -> list[_Chain]:  # fmt: skip
        """The prompt's keys in each other space that cuts it into the same blocks."""
        block_tokens = state.space.geometry.block_tokens
        alike = [other for other in others if other.space.geometry.block_tokens == block_tokens]
        chains = [(other, self.chain(other, tokens, digests, 0, count)) for other in alike]
        return [(other, keys[1:]) for other, keys in chains if keys is not None]

    def _held_elsewhere(self, state: SpaceState, position: int, shard: int, chains: Sequence[_Chain]) -> str:
        for other, keys in chains:
            if self.has_shard(other, keys[position], min(shard, other.num_shards - 1)):
                name, mine, theirs = first_difference(state.space, other.space) or (
                    "salt",
                    "<secret>",
                    "<secret>",
                )
                return (
                    f"held in space {other.name!r}, which differs in {name}: {mine!r} here, {theirs!r} there"
                )
        return ""

    def note_refusal(
        self, state: SpaceState, handles: NDArray[np.int64], position: int, status: str, detail: str
    ) -> None:
        """A load of this block did not get it; kept for `explain`."""
        if position >= len(handles):
            return
        block_id = state.block_id(int(handles[position]))
        if block_id >= 0:
            self.refusals.put(state.index.key(block_id), status, trio.current_time(), detail)

    # --- changing ---

    def drop(self, state: SpaceState, block_id: int, reason: str, now: float, detail: str = "") -> None:
        """A block is gone, and with it its descendants."""
        self._gone(state, state.index.drop(block_id, now), reason, now, detail, first=block_id)

    def delete(self, state: SpaceState, digests: Sequence[bytes]) -> int:
        """A host does not want these blocks any more; how many were here."""
        found = state.index.find([digest_key(state.fingerprint, digest) for digest in digests])
        ids, now = np.unique(found[found >= 0]), trio.current_time()
        self._gone(state, state.index.drop(ids, now), "deleted", now)
        return len(ids)

    def enter(
        self,
        state: SpaceState,
        parent: bytes,
        keys: Sequence[bytes],
        first: int,
        tokens: bytes | None,
        now: float,
    ) -> NDArray[np.int32] | None:
        """Records for blocks about to be placed, existing ones kept; None when they do not fit what is known.

        That is: their parent is unknown, or the chain is known by keys and comes with tokens, or the other way round.
        """
        if first and state.index.get(parent) is None:
            return None
        try:
            if tokens is not None:
                return state.index.insert(tokens, keys, first, now)
            return state.index.insert_keys(parent, keys, now)
        except (KeyError, ValueError):
            return None

    def enter_each(self, state: SpaceState, keys: Sequence[bytes], now: float) -> NDArray[np.int32]:
        """Records for blocks about to be placed that stand alone, existing ones kept as they are."""
        return state.index.insert_lone(keys, now)

    @contextmanager
    def pinned(self, state: SpaceState, ids: NDArray[np.int32]) -> Iterator[None]:
        """Records that stay while a store of them is under way; those that are nowhere at its end go."""
        state.index.pin(ids)
        try:
            yield
        finally:
            state.index.unpin(ids, trio.current_time())

    def place(
        self, state: SpaceState, ids: NDArray[np.int32], keys: Sequence[bytes], shard: int, slots: Sequence[int], now: float
    ) -> None:  # fmt: skip
        """The blocks with these keys are in staging, new."""
        state.index.set_slots(ids, shard, slots)
        if state.ttl_s:
            state.index.set_expiry(ids, now + state.ttl_s)
        for key in keys:
            self.tombstones.discard(key)

    def slot_evicted(self, ref: int, now: float, why: str) -> None:
        """A block left its staging slot for another's sake (`why`); without a copy on the bdev it is gone."""
        state = self.by_number.get(number_of(ref))
        if state is None or state.retired:
            return
        handle, shard = state.unref(ref)
        block_id = state.block_id(handle)
        if block_id < 0:
            return
        for notify in self.on_evicted:
            notify(ref)
        if state.index.clear_slot(block_id, shard):
            self.drop(state, block_id, "evicted", now, f"from staging {why}; the bdev had no copy")

    def _gone(
        self, state: SpaceState, dropped: Dropped, reason: str, now: float, detail: str = "", first: int = -1
    ) -> None:
        if not len(dropped.ids):
            return
        keys, below = dropped.key_list(), []
        if first >= 0:
            is_first = dropped.ids == first
            below = [key for key, is_it in zip(keys, is_first.tolist(), strict=True) if not is_it]
            keys = [keys[int(is_first.argmax())]] if is_first.any() else []
        self.tombstones.put_many(keys, reason, now, detail)
        self.tombstones.put_many(below, "parent_lost", now, f"its prefix was {reason}")
        self.drops[reason] = self.drops.get(reason, 0) + len(dropped.ids)
        for notify in self.on_dropped:
            notify(state, dropped, reason)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while True:
            await trio.sleep(EXPIRY_TICK_S)
            await self.expire(trio.current_time())

    async def expire(self, now: float) -> None:
        """Blocks whose time has come are gone; others have their turn in between."""
        for state in list(self.spaces.values()):
            while state.ttl_s and state.index.is_due(now):
                self._gone(state, state.index.expire(now, EXPIRED), "expired", now)
                await trio.lowlevel.checkpoint()


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, as a person writes them: ``1-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _keys_of_last_epoch(space: Space, tokens: bytes | None, digests: Sequence[bytes] | None) -> list[bytes]:
    """What a prompt's blocks were called before the last bump; in epoch 0, what they are called now."""
    fingerprint = space.with_epoch(max(space.epoch - 1, 0)).fingerprint()
    if tokens is not None:
        return chain_keys(fingerprint, ROOT_KEY, tokens, space.geometry.block_token_bytes)
    return [digest_key(fingerprint, digest) for digest in digests or ()]
