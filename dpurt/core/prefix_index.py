"""Who holds which prefix, and where: the index of one space.

Theory of operation. Every known block has one record (`BlockTable`): its key, its place in the forest of
prefixes, and where its bytes are: this node's *own tiers* (a staging slot and an extent on the bdev, per
shard). What GPU hosts hold is hearsay and changes faster: see `HeldBlocks`. Where tokens are known, a
`TokenTree` finds the longest prefix exactly; where a hook gives only chained keys, the same forest is
searched by key. A chain is known by tokens or by keys, never half and half.

Two rules hold between calls:

- *Known is closed*: the parent of a known block is known. A block with children keeps its record even when it
  is nowhere.
- *Own tiers are closed*, per shard: a block with a copy in staging or on the bdev has a parent with one
  (U17). `set_slot` and `set_extent` refuse a block whose parent has none; when `clear_slot` or `clear_extent`
  answers True, the last own copy of a shard went and the caller must `drop` the block, which drops everything
  below it: it would never be reached again. (In between, and only then, the rule is broken.)

A record goes when it is nowhere, unpinned and childless, at the moment one of these becomes so; a *new*
record is nowhere yet and stays. A store in flight pins its blocks, so that neither ends it by accident.

Left to others: the keys' formula (`identity`), what to evict and when (policy), freeing slots and extents
(their owners, from `Dropped`), why a block went (`Tombstones`). Single-threaded: owned by the index agent.
`now` is the caller's clock. Ids stay valid until the record goes; who keeps one across an await keeps its
handle and resolves it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpurt.core.block_table import F64, FIRST_SLOT, NONE, BlockTable, key_words
from dpurt.core.identity import KEY_BYTES, ROOT_KEY
from dpurt.core.index_feed import IndexFeed
from dpurt.core.key_map import I32, I64
from dpurt.core.token_tree import TokenTree

Bools = npt.NDArray[np.bool_]


class Locations(NamedTuple):
    """Where each asked block is, row by row: a snapshot.

    `slot` and `extent` are (n, shards), -1 for none.
    """

    slot: I64
    extent: I64


class Dropped(NamedTuple):
    """Blocks that lost all their own copies, or their record, parents first. The owners must free `slots` and `extents`.

    `handles` are those from before. Where `forgotten`, the record is gone and the id free; elsewhere a child or
    a pin keeps it. `idle_s` is the time since the last use.
    """

    ids: I32
    handles: I64
    keys: npt.NDArray[np.uint8]  # (n, 16)
    slots: I64
    extents: I64
    forgotten: Bools
    idle_s: F64

    def key_list(self) -> list[bytes]:
        """The keys as bytes."""
        return [row.tobytes() for row in self.keys]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """A snapshot. The last three count since the start."""

    blocks: int
    token_blocks: int
    strands: int
    nbytes: int
    inserted: int
    dropped: int
    forgotten: int


class PrefixIndex:
    """The index of one space; `block_token_bytes` is a block's width on the wire, `num_shards` the ranks of its group."""

    def __init__(self, block_token_bytes: int, num_shards: int = 1, feed: IndexFeed | None = None) -> None:
        self.table = BlockTable(num_shards)
        self.feed = feed  # told who holds what; None: nobody follows this index
        self.tree = TokenTree(block_token_bytes)
        self._next_expiry = np.inf  # no block expires before
        self._inserted = self._dropped = self._forgotten = 0

    def __len__(self) -> int:
        return len(self.table)

    # --- finding: none of these mutates anything ---

    def match(self, tokens: bytes | memoryview) -> I32:
        """Ids of the longest known chain that `tokens` starts with; whole blocks only. Read-only array."""
        return self.tree.match(tokens if isinstance(tokens, bytes) else bytes(tokens))

    def match_keys(self, keys: Sequence[bytes]) -> I32:
        """Ids of the longest known chain from a first block on that `keys` starts with. Known is closed, so it gallops."""
        known, step, stop = 0, 1, len(keys)
        while known < stop:
            probe = min(known + step, stop)
            if self.table.find(keys[probe - 1]) >= 0:
                known, step = probe, 2 * step
            else:
                stop, step = probe - 1, max(1, (probe - 1 - known) // 2)
        ids = self.table.find_many(key_words(keys[:known]))
        return ids[: self._linked(NONE, ids)]

    def find(self, keys: Sequence[bytes]) -> I32:
        """The id of each key, -1 where it is unknown."""
        return self.table.find_many(key_words(keys))

    def get(self, key: bytes) -> int | None:
        """The id of a key."""
        block = self.table.find(key)
        return None if block < 0 else block

    def key(self, block: int) -> bytes:
        """The key of a known block."""
        return self.table.key(self._known(block))

    def keys(self, ids: I32) -> list[bytes]:
        """The key of each known block, anything where the id is -1."""
        data = self.table.keys[ids].tobytes()
        return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]

    def tokens_of(self, block: int) -> bytes:
        """The tokens of a known block; KeyError where only its key is known."""
        return self.tree.tokens_of(block, int(self.table.depth[self._known(block)]))

    def handles(self, ids: I32) -> I64:
        """Handles to keep across awaits."""
        return self.table.handles(ids)

    def resolve(self, handles: I64) -> I32:
        """The ids of handles, -1 where the record has gone since."""
        return self.table.resolve(handles)

    def locations(self, ids: I32) -> Locations:
        """Where each block is: one gather."""
        rows = self.table.where.take(ids, axis=0)
        split = self.table.first_extent
        return Locations(rows[:, FIRST_SLOT:split], rows[:, split:])

    def resident_prefix(self, ids: I32) -> int:
        """How many leading blocks have every shard in staging or on the bdev."""
        if not len(ids):  # what a new prompt finds, and numpy takes its time over
            return 0
        resident = self.are_resident(ids)
        return len(ids) if resident.all() else int(resident.argmin())

    def are_resident(self, ids: I32) -> Bools:
        """Whether each block has every shard in staging or on the bdev; an id of -1 has not."""
        rows = self.table.where.take(np.maximum(ids, 0), axis=0)
        return (ids >= 0) & _all_of_each(self._own_copies(rows))

    # --- growing ---

    def insert(self, tokens: bytes | memoryview, keys: Sequence[bytes], first_block: int, now: float) -> I32:
        """Make the blocks [first_block, first_block + len(keys)) of the chain `tokens` known; their ids, in order.

        Known ones are kept. New ones are nowhere yet. KeyError when a block before `first_block` is unknown, ValueError
        when keys and tokens disagree with what is known; then nothing was changed.
        """
        stop = (first_block + len(keys)) * self.tree.block_token_bytes
        if first_block < 0 or len(tokens) < stop:
            raise ValueError(
                f"{len(tokens)} token bytes do not hold {len(keys)} blocks from block {first_block} on"
            )
        chain = bytes(tokens[:stop])
        known = self.tree.match(chain)
        if len(known) < first_block:
            raise KeyError(
                f"block {len(known)} of the chain is unknown, cannot insert from block {first_block} on"
            )
        parent = int(known[first_block - 1]) if first_block else NONE
        return self._extend(
            parent, chain[first_block * self.tree.block_token_bytes :], known[first_block:], keys, now
        )

    def insert_after(
        self, parent_key: bytes, tokens: bytes | memoryview, keys: Sequence[bytes], now: float
    ) -> I32:
        """As `insert`, for who knows the parent's key and only the new blocks' tokens (events, a restart's scan)."""
        parent = self._parent(parent_key)
        if len(tokens) != len(keys) * self.tree.block_token_bytes:
            raise ValueError(f"{len(tokens)} token bytes are not {len(keys)} blocks")
        if parent >= 0 and parent not in self.tree:
            raise ValueError("the parent is known by its key only, so its children cannot be known by tokens")
        blocks = bytes(tokens)
        known = self.tree.match(blocks, parent, int(self.table.depth[parent]) if parent >= 0 else -1)
        return self._extend(parent, blocks, known, keys, now)

    def insert_keys(self, parent_key: bytes, keys: Sequence[bytes], now: float) -> I32:
        """Make a chain of blocks known by key only, below `parent_key` (ROOT_KEY: none). Errors as for `insert`."""
        parent = self._parent(parent_key)
        found = self.table.find_many(key_words(keys))
        known = found[: self._linked(parent, found)]
        if len(known) == len(keys):
            return known
        if parent in self.tree:
            raise ValueError("the parent is known by its tokens, so its children cannot be known by key only")
        return self._add(parent, known, keys, now)

    def insert_lone(self, keys: Sequence[bytes], now: float) -> I32:
        """Make blocks known that stand alone, each by its key; those that are known stay what they are. ValueError for the root's key."""
        words = key_words(keys)
        ids = self.table.find_many(words)
        fresh = list(dict.fromkeys(key for key, block in zip(keys, ids.tolist(), strict=True) if block < 0))
        if not fresh:
            return ids
        if ROOT_KEY in fresh:
            raise ValueError("the root's key is no block's")
        self.table.add_roots(key_words(fresh), now)
        self._inserted += len(fresh)
        return self.table.find_many(words)

    # --- own tiers ---

    def set_slot(self, block: int, shard: int, slot: int) -> None:
        """The shard is now in a staging slot. ValueError if it has one, or if the parent has no own copy of the shard."""
        self._place_copy(block, shard, FIRST_SLOT, "slot", slot)

    def set_extent(self, block: int, shard: int, extent: int) -> None:
        """The shard is now on the bdev at that byte offset. Errors as for `set_slot`."""
        self._place_copy(block, shard, self.table.first_extent, "extent", extent)

    def set_slots(self, ids: I32, shard: int, slots: Sequence[int]) -> None:
        """`set_slot` of one shard of several blocks, all or none: a block may be the parent of another one of them."""
        self._place_copies(ids, shard, FIRST_SLOT, "slot", slots)

    def set_extents(self, ids: I32, shard: int, extents: Sequence[int]) -> None:
        """`set_extent` of one shard of several blocks, as `set_slots`."""
        self._place_copies(ids, shard, self.table.first_extent, "extent", extents)

    def clear_slot(self, block: int, shard: int) -> bool:
        """The shard left staging. True when no own copy of it is left: the caller must then `drop` the block."""
        return self._clear_copy(block, shard, FIRST_SLOT)

    def clear_extent(self, block: int, shard: int) -> bool:
        """The shard left the bdev. True as for `clear_slot`."""
        return self._clear_copy(block, shard, self.table.first_extent)

    def drop(self, blocks: int | I32, now: float) -> Dropped:
        """Take blocks, and all below them, out of the tiers; forget those that no pin keeps."""
        members = array("i")
        for block in np.atleast_1d(blocks).tolist():
            self.table.subtree(self._known(block), members)
        ids = np.array(members, np.int32)
        self.table.mark[ids] = 0
        before = self.table.where[ids]
        self._tell(False, ids[_all_of_each(self._own_copies(before))])
        self.table.where[ids, FIRST_SLOT:] = NONE
        self.table.expires[ids] = np.inf
        return self._forget(ids, before, now)

    def set_expiry(self, ids: I32, when: float) -> None:
        """`expire` drops these blocks at `when`, or later; what they follow not before, unless it never expires."""
        expires, parent = self.table.expires, self.table.parent
        expires[ids] = when
        above = parent[ids]
        above = above[above >= 0]
        for block in above[expires[above] < when].tolist():
            while block >= 0 and expires[block] < when:
                expires[block] = when
                block = int(parent[block])
        self._next_expiry = min(self._next_expiry, when)

    def is_due(self, now: float) -> bool:
        """May a block's time have come?"""
        return now >= self._next_expiry

    def expire(self, now: float, most: int | None = None) -> Dropped:
        """Drop all chains that have a block whose time has come, from that block on; of so many such blocks at most."""
        if not self.is_due(now):
            return self.drop(np.empty(0, np.int32), now)
        expires = self.table.expires
        due = np.flatnonzero(expires[: self.table.high_water] <= now)[:most].astype(np.int32)
        dropped = self.drop(due, now)
        self._next_expiry = float(expires[: self.table.high_water].min(initial=np.inf))
        return dropped

    # --- use ---

    def touch(self, ids: I32, now: float) -> None:
        """Count a use of each block. Their ancestors become no older than they are."""
        self.table.uses[ids] += 1
        self._freshen(ids, now)

    def pin(self, ids: I32) -> None:
        """Keep these records (not their bytes) until as many `unpin`: for a store in flight, or queued interest (U18)."""
        np.add.at(self.table.pins, ids, 1)

    def unpin(self, ids: I32, now: float) -> Dropped:
        """Undo one `pin`; forgets the records that turn out to be nowhere. ValueError if one was not pinned."""
        np.subtract.at(self.table.pins, ids, 1)
        if (self.table.pins[ids] < 0).any():
            np.add.at(self.table.pins, ids, 1)
            raise ValueError("unpin without a pin")
        return self._forget_if_nowhere(ids, now)

    # --- inside ---

    def stats(self) -> IndexStats:
        """Counters and sizes; `nbytes` counts reserved columns in full and no per-strand Python overhead."""
        return IndexStats(
            blocks=len(self.table),
            token_blocks=len(self.tree),
            strands=self.tree.num_strands,
            nbytes=self.table.nbytes + self.tree.nbytes,
            inserted=self._inserted,
            dropped=self._dropped,
            forgotten=self._forgotten,
        )

    def _known(self, block: int) -> int:
        if not self.table.is_live(block):
            raise ValueError(f"no block has id {block}")
        return block

    def _parent(self, parent_key: bytes) -> int:
        if parent_key == ROOT_KEY:
            return NONE
        parent = self.table.find(parent_key)
        if parent < 0:
            raise KeyError(f"parent {parent_key.hex()} is unknown")
        return parent

    def _linked(self, parent: int, ids: I32) -> int:
        """How many leading ids are known and form a chain below `parent`."""
        expected = np.concatenate((np.array([parent], np.int32), ids))[:-1]
        good = (ids >= 0) & (self.table.parent[ids] == expected)
        return len(ids) if good.all() else int(good.argmin())

    def _extend(self, parent: int, tokens: bytes, known: I32, keys: Sequence[bytes], now: float) -> I32:
        """Add what of `tokens` below `parent` is not among the `known` ones, to table and tree."""
        if not np.array_equal(self.table.keys[known], key_words(keys[: len(known)])):
            raise ValueError("tokens are known under another key: two formulas, or two spaces in one index")
        ids = self._add(parent, known, keys, now)
        if new := len(keys) - len(known):
            last = int(ids[-new - 1]) if new < len(ids) else parent
            depth = int(self.table.depth[last]) if last >= 0 else -1
            self.tree.extend(last, depth, tokens[len(known) * self.tree.block_token_bytes :], ids[-new:])
        return ids

    def _add(self, parent: int, known: I32, keys: Sequence[bytes], now: float) -> I32:
        """Add records for the keys after the `known` ones; the ids of all."""
        new = keys[len(known) :]
        if not new:
            return known
        words = key_words(new)
        if len(set(new)) != len(new) or (self.table.find_many(words) >= 0).any() or ROOT_KEY in new:
            raise ValueError("a key is already known elsewhere, comes twice, or is the root's")
        last = int(known[-1]) if len(known) else parent
        added = self.table.add_chain(last, words, now)
        self._inserted += len(added)
        self._freshen(added[:1], now)
        return np.concatenate((known, added))

    def _freshen(self, ids: I32, now: float) -> None:
        """Set the last use of blocks, then of every ancestor that would be older."""
        last_use, parent = self.table.last_use, self.table.parent
        last_use[ids] = np.maximum(last_use[ids], now)
        above = parent[ids]
        above = above[above >= 0]
        for block in above[last_use[above] < now].tolist():
            if last_use[block] >= now:
                continue
            if block in self.tree:
                chain = self.tree.chain(block, int(self.table.depth[block]))
                last_use[chain] = np.maximum(last_use[chain], now)
            while block >= 0 and last_use[block] < now:
                last_use[block] = now
                block = int(parent[block])

    def _own_copies(self, rows: I64) -> Bools:
        """(n, shards): whether the shard is in staging or on the bdev."""
        split = self.table.first_extent
        return (rows[:, FIRST_SLOT:split] >= 0) | (rows[:, split:] >= 0)

    def _column(self, shard: int, first: int) -> int:
        if not 0 <= shard < self.table.num_shards:
            raise ValueError(f"shard {shard} of {self.table.num_shards}")
        return first + shard

    def _has_copy(self, block: int, shard: int) -> bool:
        where = self.table.where
        return (
            where.item(block, FIRST_SLOT + shard) >= 0
            or where.item(block, self.table.first_extent + shard) >= 0
        )

    def _place_copy(self, block: int, shard: int, first: int, what: str, value: int) -> None:
        table, column = self.table, self._column(shard, first)
        parent = table.parent.item(self._known(block))
        if value < 0:
            raise ValueError(f"{what} must be >= 0, got {value}")
        if table.where.item(block, column) >= 0:
            raise ValueError(f"block {block} shard {shard} already has {what} {table.where[block, column]}")
        if parent >= 0 and not self._has_copy(parent, shard):
            raise ValueError(
                f"block {block} shard {shard}: its parent {parent} is neither in staging nor on the bdev"
            )
        is_first_copy = not self._has_copy(block, shard)
        table.where[block, column] = value
        if is_first_copy and self._is_block_whole(block):
            self._tell_own(True, block)

    def _place_copies(self, ids: I32, shard: int, first: int, what: str, values: Sequence[int]) -> None:
        table, column = self.table, self._column(shard, first)
        placed = np.array(values, np.int64)
        if not (table.are_live(ids) & (placed >= 0) & (table.where[ids, column] < 0)).all():
            raise ValueError(f"shard {shard}: an id is unknown, a {what} is negative, or a block has one")
        new = ids[~self._own_copies(table.where[ids])[:, shard]]  # the others have a parent: closure
        if len(new) and not self._have_parents(new, shard).all():
            raise ValueError(f"shard {shard}: a block's parent is neither in staging nor on the bdev")
        table.where[ids, column] = placed
        if len(new):
            self._tell(True, new[self.are_resident(new)])

    def _have_parents(self, ids: I32, shard: int) -> Bools:
        """Whether the parent has an own copy of the shard, is about to get one with these, or need not be."""
        table = self.table
        parents = table.parent[ids]
        table.mark[ids] = 1
        among = table.mark[parents] == 1
        table.mark[ids] = 0
        have: Bools = (parents < 0) | among | self._own_copies(table.where[parents])[:, shard]
        return have

    def _clear_copy(self, block: int, shard: int, first: int) -> bool:
        column = self._column(shard, first)
        was_whole = self._is_block_whole(self._known(block))
        self.table.where[block, column] = NONE
        is_last = not self._has_copy(block, shard)
        if is_last and was_whole:
            self._tell_own(False, block)
        return is_last

    def _is_block_whole(self, block: int) -> bool:
        if self.table.num_shards == 1:
            return self._has_copy(block, 0)
        return all(self._has_copy(block, shard) for shard in range(self.table.num_shards))

    def _tell_own(self, stored: bool, block: int) -> None:
        if self.feed is not None:
            self.feed.note(stored, self.table.key(block))

    def _tell(self, stored: bool, ids: I32) -> None:
        if self.feed is not None and len(ids):
            self.feed.note(stored, self.table.keys[ids].tobytes())

    def _is_nowhere(self, ids: I32) -> Bools:
        """In no tier, and unpinned."""
        held: Bools = (self.table.where[ids] >= 0).any(axis=1) | (self.table.pins[ids] > 0)
        return ~held

    def _forget_if_nowhere(self, ids: I32, now: float) -> Dropped:
        ids = ids[self._is_nowhere(ids)]
        if len(ids):  # seldom
            ids = np.unique(ids)
        return self._forget(ids, self.table.where[ids], now)

    def _forget(self, ids: I32, before: I64, now: float) -> Dropped:
        """Forget what of `ids` is nowhere with all below it, and the ancestors only they kept; report, with rows `before`."""
        table = self.table
        if not len(ids):
            return self._report(ids, before, np.empty(0, np.bool_), now)
        doomed = table.closed_part(ids[self._is_nowhere(ids)])
        above = self._kept_only_by(doomed)
        others = np.setdiff1d(above, ids)
        everyone, rows = np.concatenate((ids, others)), np.concatenate((before, table.where[others]))
        doomed = np.concatenate((doomed, above))
        table.mark[doomed] = 1
        forgotten = table.mark[everyone] == 1
        table.mark[doomed] = 0
        affected = forgotten | (rows[:, FIRST_SLOT:] >= 0).any(axis=1)
        dropped = self._report(everyone[affected], rows[affected], forgotten[affected], now)
        self.tree.remove(self.tree.among(doomed))
        table.remove(doomed)
        self._dropped += len(dropped.ids)
        self._forgotten += len(doomed)
        return dropped

    def _report(self, ids: I32, rows: I64, forgotten: Bools, now: float) -> Dropped:
        table = self.table
        order = np.argsort(table.depth[ids], kind="stable")
        ids, rows = ids[order], rows[order]
        keys = table.keys[ids].view(np.uint8).reshape(-1, 16)
        slots, extents = rows[:, FIRST_SLOT : table.first_extent], rows[:, table.first_extent :]
        return Dropped(
            ids, table.handles(ids), keys, slots, extents, forgotten[order], now - table.last_use[ids]
        )

    def _kept_only_by(self, doomed: I32) -> I32:
        """Ancestors that are nowhere themselves and whose every child goes with `doomed`."""
        parent, children = self.table.parent, self.table.num_children
        lost: dict[int, int] = {}
        found = array("i")
        for top in self.table.tops(doomed).tolist():
            block = int(parent[top])
            while block >= 0:
                lost[block] = lost.get(block, 0) + 1
                if lost[block] < children[block] or not self._is_nowhere(np.array([block], np.int32))[0]:
                    break
                found.append(block)
                block = int(parent[block])
        return np.array(found, np.int32)

    def check_integrity(self) -> None:
        """AssertionError, with what is wrong, unless the rules of the module's docstring hold. Slow: for tests."""
        table, live = self.table, self.table.live()
        table.check_integrity()
        self.tree.check_integrity()
        child = live[table.parent[live] >= 0]
        parents = table.parent[child]
        orphaned = self._own_copies(table.where[child]) & ~self._own_copies(table.where[parents])
        assert not orphaned.any(), f"blocks {child[orphaned.any(axis=1)]} have own copies, their parents none"
        assert (table.last_use[parents] >= table.last_use[child]).all(), "a parent was used before its child"
        assert (table.pins[live] >= 0).all(), "a block has a negative number of pins"
        assert (table.expires[live] >= self._next_expiry).all(), "a block expires before the next expiry"
        assert len(self.tree.among(live)) == len(self.tree), "the tree holds a block that is unknown"
        assert len(self.tree.among(parents)) == len(self.tree.among(child)), (
            "a chain is half tokens, half keys"
        )


def _all_of_each(rows: Bools) -> Bools:
    return np.asarray(rows.all(axis=1))
