"""One record per known block: a structure of arrays, indexed by int32 block id.

Theory of operation: columns are numpy arrays that double when full; a new half is not touched before it is
used, so it costs no memory until then. Ids are reused, and a *generation* per id tells a stale holder: the
handle ``generation << 32 | id`` resolves only while that very record lives. Records form a forest by
`parent`, with the children of a block as a doubly linked list (`first_child`, `next_sibling`,
`prev_sibling`), so that a subtree is found whether or not tokens are known.

Where a block is lies in one row of `where`, so that one gather answers for a whole match::

    where[id] = [slot of shard 0 .. S-1, extent of shard 0 .. S-1]

with -1 for no slot (an index into the staging arena) and no extent (a byte offset on the bdev).

Left to others: what the columns mean to each other (closure, when a record may go): `PrefixIndex`.
Single-threaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpurt.core.identity import KEY_BYTES
from dpurt.core.key_map import I32, I64, U64, KeyMap

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[np.generic]

NONE = -1  # no block: the parent of a first block, no child, no sibling
FREE = -2  # in `parent`: this id is not in use
FIRST_SLOT = 0  # column of `where`
_FIRST_CAPACITY = 1024
_COLUMNS = (
    "keys where parent first_child next_sibling prev_sibling num_children depth generation pins uses last_use expires mark"
).split()


def key_words(keys: Sequence[bytes]) -> U64:
    """Keys as an (n, 2) array of 64-bit halves. ValueError if one is not 16 bytes long."""
    if not {KEY_BYTES}.issuperset(lengths := set(map(len, keys))):
        raise ValueError(f"a block key has {KEY_BYTES} bytes, got {max(lengths - {KEY_BYTES})}")
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)


class BlockTable:
    """The columns, the ids and the key -> id map. Columns are public: vectorised readers use them directly."""

    keys: U64
    where: I64
    parent: I32
    first_child: I32
    next_sibling: I32
    prev_sibling: I32
    num_children: I32
    depth: I32  # blocks before it in its chain: 0 for a first block
    generation: I32
    pins: I32
    uses: I32
    last_use: F64
    expires: F64
    mark: U8  # scratch of the set operations, all zero between calls

    def __init__(self, num_shards: int = 1) -> None:
        if num_shards < 1:
            raise ValueError(f"num_shards must be >= 1, got {num_shards}")
        self.num_shards = num_shards
        self.first_extent = FIRST_SLOT + num_shards
        self.high_water = 0  # ids below it have been in use at some time
        self._free = array("i")
        self._map = KeyMap()
        self._allocate(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, the untouched part too, and of the key map."""
        columns: list[AnyArray] = [getattr(self, name) for name in _COLUMNS]
        return sum(int(column.nbytes) for column in columns) + self._map.nbytes

    # --- finding ---

    def find(self, key: bytes) -> int:
        """The id of `key`, or -1."""
        return self._map.find(key, self.keys) if len(key) == KEY_BYTES else NONE

    def find_many(self, wanted: U64) -> I32:
        """The id of each key (see `key_words`), -1 where unknown."""
        return self._map.find_many(wanted, self.keys)

    def key(self, block: int) -> bytes:
        """The key of one block."""
        return bytes(self.keys[block].data)

    def is_live(self, block: int) -> bool:
        """Whether the id is in use."""
        return 0 <= block < self.high_water and self.parent.item(block) != FREE

    def id_of(self, handle: int) -> int:
        """The id of one handle, -1 where its record has gone (or never was)."""
        block = handle & 0xFFFFFFFF
        if block >= self.high_water or self.generation.item(block) != handle >> 32:
            return NONE
        return block if self.parent.item(block) != FREE else NONE

    def are_live(self, ids: I32) -> npt.NDArray[np.bool_]:
        """`is_live` of each id, none of which may be negative."""
        inside = ids < self.high_water
        live: npt.NDArray[np.bool_] = inside & (self.parent[np.where(inside, ids, 0)] != FREE)
        return live

    def live(self) -> I32:
        """All ids in use."""
        return np.flatnonzero(self.parent[: self.high_water] != FREE).astype(np.int32)

    def handles(self, ids: I32) -> I64:
        """``generation << 32 | id`` of each block: good until the record goes, noticed as stale afterwards."""
        return self.generation[ids].astype(np.int64) << 32 | ids

    def resolve(self, handles: I64) -> I32:
        """The ids of `handles`, -1 where the record has gone (or never was)."""
        ids = handles & 0xFFFFFFFF
        inside = ids < self.high_water
        ids = np.where(inside, ids, 0)
        good = inside & (self.generation[ids] == handles >> 32) & (self.parent[ids] != FREE)
        return np.where(good, ids, NONE).astype(np.int32)

    def subtree(self, top: int, into: array[int]) -> None:
        """Append `top` and its descendants to `into`, parents first, skipping what is marked; marks what it appends."""
        mark, first, after = (
            self.mark.data,
            self.first_child.data,
            self.next_sibling.data,
        )
        if mark[top]:
            return
        at = len(into)
        into.append(top)
        mark[top] = 1
        while at < len(into):
            child = first[into[at]]
            while child >= 0:
                if not mark[child]:
                    mark[child] = 1
                    into.append(child)
                child = after[child]
            at += 1

    def closed_part(self, ids: I32) -> I32:
        """The largest part of `ids` (unique) whose every descendant is in it too."""
        parents = self.parent[ids]
        parents = parents[parents >= 0]
        np.subtract.at(self.num_children, parents, 1)
        blocked = ids[self.num_children[ids] != 0]
        np.add.at(self.num_children, parents, 1)
        self.mark[ids] = 1
        while blocked.size:
            self.mark[blocked] = 0
            above = self.parent[blocked]
            above = above[above >= 0]
            blocked = np.unique(above[self.mark[above] == 1])
        closed: I32 = ids[self.mark[ids] == 1]
        self.mark[ids] = 0
        return closed

    def tops(self, ids: I32) -> I32:
        """Those of `ids` whose parent exists and is not among `ids`."""
        self.mark[ids] = 1
        parents = self.parent[ids]
        found: I32 = ids[(parents >= 0) & (self.mark[parents] == 0)]
        self.mark[ids] = 0
        return found

    # --- changing ---

    def add_chain(self, parent: int, words: U64, now: float) -> I32:
        """New records, each the parent of the next, the first under `parent` (-1: none). Keys must be new and unique."""
        ids = self._new(words, now)
        self.parent[ids[1:]] = ids[:-1]
        self.first_child[ids[:-1]] = ids[1:]
        self.num_children[ids[:-1]] = 1
        self._link(int(ids[0]), parent)
        self.depth[ids] = np.arange(len(ids)) + (int(self.depth[parent]) + 1 if parent >= 0 else 0)
        self._map.add(ids, self.keys)
        return ids

    def add_roots(self, words: U64, now: float) -> I32:
        """New records without parents. Keys must be new and unique."""
        ids = self._new(words, now)
        self.parent[ids] = NONE
        self.depth[ids] = 0
        self._map.add(ids, self.keys)
        return ids

    def _new(self, words: U64, now: float) -> I32:
        ids = self._take_ids(len(words))
        self._clear(ids)
        self.keys[ids] = words
        self.last_use[ids] = now
        return ids

    def remove(self, ids: I32) -> None:
        """Free records. `ids` must hold every descendant of its members."""
        for top in self.tops(ids).tolist():
            self._unlink(top)
        self._map.remove(ids, self.keys)
        self.parent[ids] = FREE
        self.expires[ids] = np.inf
        self.where[ids] = NONE
        self.generation[ids] += 1
        self._free.extend(np.sort(ids)[::-1].tolist())

    def _clear(self, ids: I32) -> None:
        self.where[ids] = NONE
        for column in (self.first_child, self.next_sibling, self.prev_sibling):
            column[ids] = NONE
        for column in (self.num_children, self.pins, self.uses):
            column[ids] = 0
        self.expires[ids] = np.inf
        self.mark[ids] = 0

    def _link(self, block: int, parent: int) -> None:
        self.parent[block] = parent
        if parent < 0:
            return
        after = int(self.first_child[parent])
        self.next_sibling[block] = after
        if after >= 0:
            self.prev_sibling[after] = block
        self.first_child[parent] = block
        self.num_children[parent] += 1

    def _unlink(self, block: int) -> None:
        parent, before, after = (int(c[block]) for c in (self.parent, self.prev_sibling, self.next_sibling))
        if before >= 0:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        if after >= 0:
            self.prev_sibling[after] = before
        self.num_children[parent] -= 1

    def _take_ids(self, count: int) -> I32:
        """Free ids first, then fresh ones, ascending: neighbours in a chain should be neighbours in memory."""
        reused = min(count, len(self._free))
        ids = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        fresh = count - reused
        if self.high_water + fresh > len(self.parent):
            self._allocate(max(2 * len(self.parent), self.high_water + fresh))
        self.generation[self.high_water : self.high_water + fresh] = 0
        ids.extend(range(self.high_water, self.high_water + fresh))
        self.high_water += fresh
        return np.sort(np.frombuffer(ids, np.int32)) if ids else np.empty(0, np.int32)

    def _allocate(self, capacity: int) -> None:
        row = FIRST_SLOT + 2 * self.num_shards
        shapes = {"keys": (capacity, 2), "where": (capacity, row)}
        types = {
            "keys": np.uint64,
            "where": np.int64,
            "last_use": np.float64,
            "expires": np.float64,
            "mark": np.uint8,
        }
        for name in _COLUMNS:
            bigger: AnyArray = np.empty(shapes.get(name, (capacity,)), types.get(name, np.int32))
            if self.high_water:
                bigger[: self.high_water] = getattr(self, name)[: self.high_water]
            setattr(self, name, bigger)

    def check_integrity(self) -> None:
        """AssertionError, with what is wrong, unless the records form a forest and every key finds its id."""
        live = self.live()
        assert len(live) == len(self._map), f"{len(live)} live records, {len(self._map)} mapped keys"
        assert len(live) + len(self._free) == self.high_water, "an id is neither live nor free"
        assert np.array_equal(self.find_many(self.keys[live]), live), "a key does not find its record"
        assert not self.mark[: self.high_water].any(), "scratch marks were left behind"
        child = live[self.parent[live] >= 0]
        parents = self.parent[child]
        assert (self.parent[parents] != FREE).all(), "a record's parent is gone"
        assert (self.depth[child] == self.depth[parents] + 1).all(), "a depth is not its parent's plus one"
        assert (self.depth[live[self.parent[live] == NONE]] == 0).all(), "a first block has a depth"
        counts = np.bincount(parents, minlength=self.high_water)
        assert (self.num_children[live] == counts[live]).all(), "a child count is wrong"
        self._check_sibling_lists(live)

    def _check_sibling_lists(self, live: I32) -> None:
        for block in live[self.num_children[live] > 0].tolist():
            child, before, seen = int(self.first_child[block]), NONE, 0
            while child >= 0:
                assert self.parent[child] == block, (
                    f"block {child} is in the child list of {block}, not its parent"
                )
                assert self.prev_sibling[child] == before, f"block {child} has a wrong previous sibling"
                child, before, seen = int(self.next_sibling[child]), child, seen + 1
            assert seen == self.num_children[block], f"block {block} lists {seen} of its children"
        childless = live[self.num_children[live] == 0]
        assert (self.first_child[childless] == NONE).all(), "a childless block has a first child"
