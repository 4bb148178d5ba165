"""From 16-byte block keys to block ids, in about 16 to 33 bytes a block.

Theory of operation: open addressing with linear probing over one int32 array of ids. The keys themselves live
in the block table's column, which the caller passes in, so nothing is stored twice and a Python object per
key is never made (a dict of `bytes` costs about 140 bytes a block). Batches are probed with numpy, one round
per probe distance; at a load of at most 1/4 the first settles nearly all, and the last few are looked up one by one.
Removed places are left as GONE and never reused; the rebuild that growth needs sweeps them.

Left to others: the key column, and that keys are unique (`BlockTable`). Block keys are keyed BLAKE2b digests,
so no outsider can choose colliding ones; the mixing step only keeps hand-made keys from clustering.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

EMPTY = -1
GONE = -2
_SMALLEST = 64
_ROOM = 4  # places a key, at least
_FEW = 4  # keys whose places are quicker gone through than gathered
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class KeyMap:
    """Ids by key. `keys` in every call is the table's (n, 2) column of 64-bit key halves, indexed by id."""

    def __init__(self) -> None:
        self._places: I32 = np.full(_SMALLEST, EMPTY, np.int32)
        self._live = 0
        self._filled = 0  # live + GONE

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes the map takes."""
        return int(self._places.nbytes)

    def find(self, key: bytes, keys: U64) -> int:
        """The id of one key, or -1."""
        low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        mixed = low ^ (high * _MIX & _WORD)
        return self._find_from((mixed ^ mixed >> 32) & (len(self._places) - 1), low, high, keys)

    def _find_from(self, place: int, low: int, high: int, keys: U64) -> int:
        places, key_half, last = self._places.item, keys.item, len(self._places) - 1
        while (found := places(place)) != EMPTY:
            if found >= 0 and key_half(found, 0) == low and key_half(found, 1) == high:
                return found
            place = (place + 1) & last
        return -1

    def find_many(self, wanted: U64, keys: U64) -> I32:
        """The id of each of the (n, 2) `wanted` keys, -1 where there is none."""
        place = self._home(wanted)
        there = self._places[place]
        hit = self._are_these(there, wanted, keys)
        found = np.where(hit, there, np.int32(-1))
        todo = np.flatnonzero((there != EMPTY) & ~hit)
        place = self._next(place[todo])
        while todo.size > _FEW:
            there = self._places[place]
            hit = self._are_these(there, wanted[todo], keys)
            found[todo[hit]] = there[hit]
            going = (there != EMPTY) & ~hit
            todo, place = todo[going], self._next(place[going])
        for i, at in zip(todo.tolist(), place.tolist(), strict=True):
            found[i] = self._find_from(at, wanted.item(i, 0), wanted.item(i, 1), keys)
        return found

    @staticmethod
    def _are_these(ids: I32, wanted: U64, keys: U64) -> npt.NDArray[np.bool_]:
        """Whether each id (which may be EMPTY or GONE) has this key."""
        rows = keys[ids]
        same: npt.NDArray[np.bool_] = (ids >= 0) & (rows[:, 0] == wanted[:, 0]) & (rows[:, 1] == wanted[:, 1])
        return same

    def add(self, ids: I32, keys: U64) -> None:
        """Map the keys of `ids`, none of which may be mapped yet."""
        self._make_room(len(ids), keys)
        self._live += len(ids)
        self._filled += len(ids)
        self._settle(ids, keys)

    def remove(self, ids: I32, keys: U64) -> None:
        """Unmap `ids`, all of which must be mapped and still have their keys in the column."""
        self._live -= len(ids)
        place = self._home(keys[ids])
        while ids.size:
            hit = self._places[place] == ids
            self._places[place[hit]] = GONE
            ids, place = ids[~hit], self._next(place[~hit])

    def _settle(self, ids: I32, keys: U64) -> None:
        """Put each id in the first empty place from its home on; where several want one place, one gets it."""
        place = self._home(keys[ids])
        while ids.size:
            empty = self._places[place] == EMPTY
            self._places[place[empty]] = ids[empty]
            waiting = self._places[place] != ids
            ids, place = ids[waiting], self._next(place[waiting])

    def _make_room(self, count: int, keys: U64) -> None:
        if (self._filled + count) * _ROOM <= len(self._places):
            return
        ids = self._places[self._places >= 0]
        size = max(_SMALLEST, 1 << (_ROOM * (self._live + count) - 1).bit_length())
        self._places = np.full(size, EMPTY, np.int32)
        self._filled = self._live
        self._settle(ids, keys)

    def _home(self, wanted: U64) -> I64:
        mixed = wanted[:, 0] ^ (wanted[:, 1] * np.uint64(_MIX))
        mixed ^= mixed >> np.uint64(32)
        return (mixed & np.uint64(len(self._places) - 1)).astype(np.int64)

    def _next(self, place: I64) -> I64:
        return (place + 1) & (len(self._places) - 1)
