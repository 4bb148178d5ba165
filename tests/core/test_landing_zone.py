"""A landing zone: what is found is what was placed, a slot overwritten under a reader is noticed, the node's book adds up."""

from __future__ import annotations

import random

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.landing_zone import (
    Entry,
    ZoneLayout,
    ZoneReader,
    ZoneSlots,
    empty_entry,
    pack_count,
    pack_entry,
)

PARTS = (4096, 1000, 5000)
LAYOUT = ZoneLayout(3, PARTS)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def block_of(number: int) -> bytes:
    return random.Random(number).randbytes(sum(PARTS))


def entry_of(number: int, generation: int) -> Entry:
    block, crcs, at = block_of(number), [], 0
    for size in PARTS:
        crcs.append(crc32c.crc32c(block[at : at + size]))
        at += size
    return Entry(key_of(number), 0, generation, len(block), tuple(crcs))


class Zone:
    """A zone, and the writes a node would do."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(LAYOUT.size))
        self.reader = ZoneReader(self.memory, LAYOUT)
        self.changes = 0

    def write(self, at: int, data: bytes) -> None:
        self.memory[at : at + len(data)] = data

    def count(self) -> None:
        self.changes += 1
        self.write(0, pack_count(self.changes))

    def place(self, slot: int, number: int, generation: int) -> None:
        self.write(LAYOUT.slot_at(slot), block_of(number))
        self.write(LAYOUT.entry_at(slot), pack_entry(LAYOUT, entry_of(number, generation)))
        self.count()

    def read(self, number: int, parts: tuple[int, int] = (0, 3)) -> bytes | None:
        slot = self.reader.find(key_of(number), 0)
        if slot is None:
            return None
        into = bytearray(sum(PARTS[parts[0] : parts[1]]))
        is_good = self.reader.copy(slot, key_of(number), 0, parts, memoryview(into))
        return bytes(into) if is_good else None


def test_an_empty_zone_has_nothing_and_what_is_placed_is_found_whole_and_in_parts():
    zone = Zone()
    assert zone.read(1) is None
    zone.place(2, 1, 1)
    zone.place(0, 2, 2)
    assert zone.read(1) == block_of(1)
    assert zone.read(2) == block_of(2)
    assert zone.read(2, (1, 3)) == block_of(2)[4096:]
    assert zone.read(2, (1, 2)) == block_of(2)[4096:5096]
    assert zone.read(3) is None
    assert zone.reader.find(key_of(1), 1) is None, "of another shard"


def test_a_slot_given_to_another_block_is_not_believed_at_any_moment():
    zone = Zone()
    zone.place(0, 1, 1)
    assert zone.read(1) == block_of(1)
    zone.write(LAYOUT.slot_at(0), block_of(2)[:100])  # the next block is on its way
    assert zone.read(1) is None
    zone.write(LAYOUT.slot_at(0), block_of(2))
    assert zone.read(1) is None
    zone.write(LAYOUT.entry_at(0), pack_entry(LAYOUT, entry_of(2, 2)))
    assert zone.read(1) is None, "before the count"
    zone.count()
    assert zone.read(1) is None
    assert zone.read(2) == block_of(2)


def test_an_emptied_entry_is_no_block():
    zone = Zone()
    zone.place(1, 5, 9)
    zone.write(LAYOUT.entry_at(1), empty_entry(LAYOUT))
    zone.count()
    assert zone.reader.find(key_of(5), 0) is None


@given(cut=st.integers(0, LAYOUT.entry_bytes - 1))
def test_an_entry_in_the_middle_of_being_written_is_not_believed_and_read_later(cut: int):
    zone = Zone()
    zone.place(0, 1, 1)
    zone.read(1)
    whole = pack_entry(LAYOUT, entry_of(2, 2))
    zone.write(LAYOUT.slot_at(0), block_of(2))
    zone.write(LAYOUT.entry_at(0), whole[:cut])
    zone.count()
    assert zone.read(1) is None
    assert zone.read(2) in (None, block_of(2))
    zone.write(LAYOUT.entry_at(0), whole)
    zone.count()
    assert zone.read(2) == block_of(2)


@given(where=st.integers(0, sum(PARTS) - 1))
def test_a_flipped_byte_is_noticed(where: int):
    zone = Zone()
    zone.place(0, 1, 1)
    zone.memory[LAYOUT.slot_at(0) + where] ^= 0x40
    assert zone.read(1) is None


def test_a_layout_is_pages_and_does_not_overlap():
    assert LAYOUT.slot_at(0) % 4096 == LAYOUT.stride % 4096 == 0
    assert LAYOUT.entry_at(LAYOUT.slots) <= LAYOUT.slot_at(0)
    assert LAYOUT.size == LAYOUT.slot_at(3)
    many = ZoneLayout(2, (4096,) * 128)
    assert len(pack_entry(many, Entry(key_of(1), 0, 1, many.block_bytes, (0,) * 128))) == many.entry_bytes
    with pytest.raises(ValueError, match="slots"):
        ZoneLayout(0, PARTS)
    with pytest.raises(ValueError, match="does not fit"):
        ZoneReader(memoryview(bytearray(100)), LAYOUT)


class Book(RuleBasedStateMachine):
    """`ZoneSlots` against plain sets."""

    refs = st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self.slots = ZoneSlots(3)
        self.filling: set[int] = set()
        self.placed: dict[int, bool] = {}  # ref: was it used?
        self.emptying: set[int] = set()

    @rule(ref=refs, spared=st.sets(refs))
    def take(self, ref: int, spared: set[int]) -> None:
        if ref in self.filling or ref in self.placed:
            with pytest.raises(ValueError, match="already"):
                self.slots.take(ref, lambda other: False)
            return
        taken = self.slots.take(ref, lambda other: other in spared)
        is_full = len(self.filling) + len(self.placed) + len(self.emptying) == 3
        if taken is None:
            assert is_full
            assert set(self.placed) <= spared
            return
        if is_full:
            assert taken.evicted in self.placed
            assert taken.evicted not in spared
            if not self.placed[taken.evicted]:
                assert not any(used and other not in spared for other, used in self.placed.items())
            del self.placed[taken.evicted]
        else:
            assert taken.evicted is None
        self.filling.add(ref)

    @rule(ref=refs)
    def arrive(self, ref: int) -> None:
        self.slots.placed(ref)
        if ref in self.filling:
            self.filling.remove(ref)
            self.placed[ref] = False

    @rule(ref=refs)
    def fail(self, ref: int) -> None:
        slot = self.slots.failed(ref)
        assert (slot is not None) == (ref in self.filling), (
            "what its entry says is not known: it is taken away"
        )
        self.filling.discard(ref)
        if slot is not None:
            self.emptying.add(slot)

    @rule(ref=refs)
    def use(self, ref: int) -> None:
        assert self.slots.used(ref) == (ref in self.placed)
        if ref in self.placed:
            self.placed[ref] = True

    @rule(ref=refs)
    def drop(self, ref: int) -> None:
        slot = self.slots.drop(ref)
        assert (slot is not None) == (ref in self.placed)
        self.placed.pop(ref, None)
        if slot is not None:
            self.emptying.add(slot)

    @rule(slot=st.integers(0, 2))
    def emptied(self, slot: int) -> None:
        self.slots.emptied(slot)
        self.emptying.discard(slot)

    @invariant()
    def adds_up(self) -> None:
        self.slots.check_integrity()
        assert set(self.slots.refs()) == set(self.placed)
        assert self.slots.num_available == 3 - len(self.filling) - len(self.emptying)
        assert all(self.slots.is_filling(ref) for ref in self.filling)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
