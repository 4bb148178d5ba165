"""A host's landing zone: memory of the host in which a node puts predicted blocks, and in which the host finds them. Pure.

::

    zone      [ count of changes | entry 0 | entry 1 | ... ][ slot 0 ][ slot 1 ] ...
               `--------------- the directory ------------'  whole blocks, page-aligned

Both sides work the layout out from the space's geometry and the number of slots. An *entry* says which block a slot holds: key,
shard, a generation that never comes twice, a CRC-32C of each part, and a CRC of the entry itself.

The node writes in this order, each step only when the one before is in the host's memory: an empty entry (if the slot was used), the
block, the entry, the count. So an entry that reads well is of a block that was written before it. The host asks nobody: it looks at
the count, reads the entries that changed, *copies* the block out, and believes the copy only if the parts' CRCs hold and the entry is
still the same. A slot that is overwritten under a reader is thus noticed, whatever the order in which a fabric moves bytes.

`ZoneSlots` is the node's book of one zone: which block is where, and whose place the next one takes. A block the host has used
goes first (oldest use first), then one nobody waits for any more.

Leaves to others: moving bytes (`dpurt.fabric`), what to place and when (`dpurt.agents.placement`).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import crc32c
import numpy as np

__all__ = [
    "Entry",
    "Taken",
    "ZoneLayout",
    "ZoneReader",
    "ZoneSlots",
    "empty_entry",
    "pack_count",
    "pack_entry",
]

PAGE = 4096
KEY_BYTES = 16
MAGIC = 0x65_6E_6F_5A  # "Zone"
MAX_SLOTS = 1 << 16
COUNT_BYTES = 64
_HEAD = struct.Struct("<IIQ16sHHI")  # magic, CRC of the rest, generation, key, shard, parts, length
_COUNT = struct.Struct("<Q")


class Entry(NamedTuple):
    """What a slot holds."""

    key: bytes
    shard: int
    generation: int
    length: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZoneLayout:
    """Where things are in a zone of `slots` blocks of these parts."""

    slots: int
    part_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS or not self.part_bytes:
            raise ValueError(f"a zone has 1 to {MAX_SLOTS} slots of at least one part, not {self.slots}")

    @property
    def block_bytes(self) -> int:
        return sum(self.part_bytes)

    @property
    def entry_bytes(self) -> int:
        return _up(_HEAD.size + 4 * len(self.part_bytes), 64)

    @property
    def stride(self) -> int:
        return _up(self.block_bytes, PAGE)

    @property
    def directory_bytes(self) -> int:
        return _up(COUNT_BYTES + self.slots * self.entry_bytes, PAGE)

    @property
    def size(self) -> int:
        return self.directory_bytes + self.slots * self.stride

    def entry_at(self, slot: int) -> int:
        return COUNT_BYTES + slot * self.entry_bytes

    def slot_at(self, slot: int) -> int:
        return self.directory_bytes + slot * self.stride


def pack_entry(layout: ZoneLayout, entry: Entry) -> bytes:
    """As the node writes it. Its length is the layout's."""
    crcs = struct.pack(f"<{len(entry.crcs)}I", *entry.crcs)
    head = _HEAD.pack(MAGIC, 0, entry.generation, entry.key, entry.shard, len(entry.crcs), entry.length)
    body = (head[8:] + crcs).ljust(layout.entry_bytes - 8, b"\0")
    return head[:4] + struct.pack("<I", crc32c.crc32c(body)) + body


def empty_entry(layout: ZoneLayout) -> bytes:
    """No block."""
    return bytes(layout.entry_bytes)


def pack_count(changes: int) -> bytes:
    return _COUNT.pack(changes)


def _unpack_entry(data: bytes) -> Entry | None:
    """None: empty, or in the middle of being written."""
    magic, crc, generation, key, shard, parts, length = _HEAD.unpack_from(data)
    if magic != MAGIC or crc32c.crc32c(data[8:]) != crc or _HEAD.size + 4 * parts > len(data):
        return None
    crcs = struct.unpack_from(f"<{parts}I", data, _HEAD.size)
    return Entry(key, shard, generation, length, crcs)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# --- the host's side ---


class ZoneReader:
    """Finds blocks in a zone. One owner; the memory is written by others at any time."""

    def __init__(self, view: memoryview, layout: ZoneLayout) -> None:
        if len(view) < layout.size:
            raise ValueError(f"a zone of {layout.size} bytes does not fit into {len(view)}")
        self.layout = layout
        self._view = view
        self._count = -1
        names = {"names": ["generation"], "formats": ["<u8"], "offsets": [8], "itemsize": layout.entry_bytes}
        directory = view[COUNT_BYTES : COUNT_BYTES + layout.slots * layout.entry_bytes]
        self._generations = np.frombuffer(directory, np.dtype(names))["generation"]  # type: ignore[call-overload]
        self._seen = np.zeros(layout.slots, np.uint64)
        self._entries: dict[int, Entry] = {}
        self._slots: dict[tuple[bytes, int], int] = {}

    def find(self, key: bytes, shard: int) -> int | None:
        """The slot that holds the block, as far as the directory says; `copy` tells the truth."""
        [count] = _COUNT.unpack_from(self._view)
        if count != self._count:
            self._count = count
            self._look_again()
        return self._slots.get((key, shard))

    def _look_again(self) -> None:
        changed = np.flatnonzero(self._generations != self._seen)
        for slot in changed.tolist():
            self._forget(slot)
            at = self.layout.entry_at(slot)
            entry = _unpack_entry(bytes(self._view[at : at + self.layout.entry_bytes]))
            if entry is None:
                continue
            self._seen[slot] = entry.generation
            self._entries[slot] = entry
            self._slots[entry.key, entry.shard] = slot

    def _forget(self, slot: int) -> None:
        entry = self._entries.pop(slot, None)
        self._seen[slot] = 0
        if entry is not None and self._slots.get((entry.key, entry.shard)) == slot:
            del self._slots[entry.key, entry.shard]

    def copy(self, slot: int, key: bytes, shard: int, parts: tuple[int, int], into: memoryview) -> bool:
        """Copy parts [start, stop) of the block to the front of `into`. False: it is not there (any more), and what `into`
        holds must not be used.
        """
        entry = self._entries.get(slot)
        layout = self.layout
        if entry is None or (entry.key, entry.shard) != (key, shard):
            return False
        if entry.length != layout.block_bytes or len(entry.crcs) != len(layout.part_bytes):
            return False
        start, stop = parts
        at = layout.slot_at(slot) + sum(layout.part_bytes[:start])
        length = sum(layout.part_bytes[start:stop])
        np.copyto(
            np.frombuffer(into[:length], np.uint8), np.frombuffer(self._view[at : at + length], np.uint8)
        )
        done = 0
        for size, crc in zip(layout.part_bytes[start:stop], entry.crcs[start:stop], strict=True):
            if crc32c.crc32c(into[done : done + size]) != crc:
                return False
            done += size
        return int(self._generations[slot]) == entry.generation


# --- the node's side ---


class _State(Enum):
    FREE = 0
    FILLING = 1
    PLACED = 2
    EMPTYING = 3  # its entry is being taken away


class Taken(NamedTuple):
    """A slot for a block, and whose it was."""

    slot: int
    evicted: int | None


@dataclass(slots=True)
class ZoneSlots:
    """The node's book of a zone. Blocks go by opaque numbers (refs)."""

    num_slots: int
    _free: list[int] = field(init=False)
    _states: list[_State] = field(init=False)
    _slot_of: dict[int, int] = field(default_factory=dict, init=False)  # filling and placed
    _ref_of: dict[int, int] = field(default_factory=dict, init=False)
    _used: OrderedDict[int, None] = field(
        default_factory=OrderedDict, init=False
    )  # placed refs, oldest use first
    _unused: OrderedDict[int, None] = field(
        default_factory=OrderedDict, init=False
    )  # placed refs, oldest first

    def __post_init__(self) -> None:
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._states = [_State.FREE] * self.num_slots

    def find(self, ref: int) -> int | None:
        """The slot that holds the block, placed."""
        slot = self._slot_of.get(ref)
        return slot if slot is not None and self._states[slot] is _State.PLACED else None

    def is_filling(self, ref: int) -> bool:
        slot = self._slot_of.get(ref)
        return slot is not None and self._states[slot] is _State.FILLING

    @property
    def num_available(self) -> int:
        """Slots that a block could take, if nothing is spared."""
        return len(self._free) + len(self._used) + len(self._unused)

    def take(self, ref: int, spare: Callable[[int], bool]) -> Taken | None:
        """A slot to fill with the block; None: every one is filling or spared. The block must not be in the zone."""
        if ref in self._slot_of:
            raise ValueError(f"block {ref} is in the zone already")
        evicted = None
        if not self._free:
            evicted = self._victim(spare)
            if evicted is None:
                return None
            self._leave(evicted)
        slot = self._free.pop()
        self._states[slot] = _State.FILLING
        self._slot_of[ref], self._ref_of[slot] = slot, ref
        return Taken(slot, evicted)

    def _victim(self, spare: Callable[[int], bool]) -> int | None:
        for refs in (self._used, self._unused):
            for ref in refs:
                if not spare(ref):
                    return ref
        return None

    def placed(self, ref: int) -> None:
        """The block, which was filling, and its entry are in the host's memory."""
        if self.is_filling(ref):
            self._states[self._slot_of[ref]] = _State.PLACED
            self._unused[ref] = None

    def failed(self, ref: int) -> int | None:
        """The block did not arrive, or nobody can say; nothing is under way any more. The slot whose entry, its own or that of
        the block before, must be taken away; then say `emptied`. None if it was placed.
        """
        return self._to_empty(ref) if self.is_filling(ref) else None

    def used(self, ref: int) -> bool:
        """The host took the block. False: it was not placed (any more)."""
        if self.find(ref) is None:
            return False
        self._unused.pop(ref, None)
        self._used.pop(ref, None)
        self._used[ref] = None
        return True

    def drop(self, ref: int) -> int | None:
        """The block no longer exists: the slot whose entry must be taken away, if it was placed; then say `emptied`. One that
        is filling stays until it is answered.
        """
        return None if self.find(ref) is None else self._to_empty(ref)

    def emptied(self, slot: int) -> None:
        """The entry of a block that was dropped, or did not arrive, is gone."""
        if self._states[slot] is _State.EMPTYING:
            self._states[slot] = _State.FREE
            self._free.append(slot)

    def refs(self) -> Sequence[int]:
        """Blocks placed."""
        return [*self._used, *self._unused]

    def _to_empty(self, ref: int) -> int:
        slot = self._slot_of[ref]
        self._leave(ref)
        self._free.remove(slot)
        self._states[slot] = _State.EMPTYING
        return slot

    def _leave(self, ref: int) -> None:
        slot = self._slot_of.pop(ref)
        del self._ref_of[slot]
        self._states[slot] = _State.FREE
        self._used.pop(ref, None)
        self._unused.pop(ref, None)
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Assert that every slot is in one state, and every block in one place."""
        states = {slot: _State.FREE for slot in self._free}
        for ref, slot in self._slot_of.items():
            assert slot not in states
            assert self._ref_of[slot] == ref
            is_placed = ref in self._used or ref in self._unused
            states[slot] = _State.PLACED if is_placed else _State.FILLING
        known = [states.get(slot, _State.EMPTYING) for slot in range(self.num_slots)]
        assert known == self._states
        assert not set(self._used) & set(self._unused)
