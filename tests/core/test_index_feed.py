"""The index's log of changes: a reader that has reached the head knows what the index knows, whenever it began."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.identity import ROOT_KEY
from dpurt.core.index_feed import Change, Cursor, IndexFeed, read
from dpurt.core.prefix_index import PrefixIndex

WIDTH = 8
Held = set[bytes]


def tokens(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(WIDTH, "little") for block in blocks)


def key(*blocks: int) -> bytes:
    return random.Random(str(blocks)).randbytes(16)


def keys(*blocks: int) -> list[bytes]:
    return [key(*blocks[: i + 1]) for i in range(len(blocks))]


def truth(index: PrefixIndex) -> Held:
    live = index.table.live()
    return {index.key(block) for block in live[index.are_resident(live)].tolist()}


class Reader:
    """Applies what it is told, as a host would."""

    def __init__(self, index: PrefixIndex, max_blocks: int) -> None:
        self.index, self.max_blocks = index, max_blocks
        self.cursor: Cursor | None = None
        self.held: Held = set()
        self.is_current = False
        self.losses = 0

    def step(self) -> None:
        batch = read(self.index, self.cursor, self.max_blocks)
        if batch is None:
            self.held, self.cursor, self.is_current = set(), None, False
            self.losses += 1
            return
        for change in batch.changes:
            self.apply(change)
        self.cursor, self.is_current = batch.cursor, batch.is_current

    def apply(self, change: Change) -> None:
        told = {change.keys[i : i + 16] for i in range(0, len(change.keys), 16)}
        self.held = self.held | told if change.stored else self.held - told

    def catch_up(self) -> Held:
        while True:
            self.step()
            if self.is_current:
                return self.held


class Following(RuleBasedStateMachine):
    """Any changes, read by readers that began at any time and lag by any amount, some of them too far."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(WIDTH, num_shards=2, feed=IndexFeed(capacity=24))
        self.readers = [Reader(self.index, size) for size in (1, 5, 3)]

    chains = st.lists(st.integers(0, 2), min_size=1, max_size=4)

    @rule(chain=chains, at_once=st.booleans())
    def place(self, chain: list[int], at_once: bool) -> None:
        ids = self.index.insert(tokens(*chain), keys(*chain), 0, 0.0)
        for shard in range(2):
            missing = ids[self.index.locations(ids).slot[:, shard] < 0]
            if at_once:
                self.index.set_slots(missing, shard, [1] * len(missing))
            for block in [] if at_once else missing.tolist():
                self.index.set_slot(block, shard, 1)

    @rule(chain=chains, shard=st.integers(0, 1))
    def lose_shard(self, chain: list[int], shard: int) -> None:
        ids = self.index.match(tokens(*chain))
        if len(ids) and self.index.clear_slot(int(ids[-1]), shard):
            self.index.drop(int(ids[-1]), 0.0)

    @rule(which=st.integers(0, 2))
    def read_a_bit(self, which: int) -> None:
        self.readers[which].step()

    @rule(which=st.integers(0, 2))
    def a_reader_at_the_head_knows_what_the_index_knows(self, which: int) -> None:
        reader = self.readers[which]
        assert reader.catch_up() == truth(self.index)

    @invariant()
    def the_index_is_whole(self) -> None:
        self.index.check_integrity()


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def index_with(blocks: int, capacity: int = 100) -> PrefixIndex:
    index = PrefixIndex(WIDTH, feed=IndexFeed(capacity))
    chain = range(blocks)
    for block in index.insert(tokens(*chain), keys(*chain), 0, 0.0).tolist():
        index.set_slot(block, 0, block)
    return index


def test_a_reader_that_is_too_far_behind_is_told_so() -> None:
    index = index_with(1, capacity=4)
    reader = Reader(index, 100)
    reader.catch_up()
    for i in range(20):
        index.set_slot(int(index.insert_keys(ROOT_KEY, [key(100 + i)], 0.0)[0]), 0, i)
    reader.step()
    assert reader.losses == 1
    assert reader.catch_up() == truth(index)


def test_moves_between_the_nodes_own_tiers_are_no_change() -> None:
    index = index_with(2)
    assert index.feed is not None
    before = index.feed.head
    index.set_extent(0, 0, 4096)
    assert not index.clear_slot(0, 0)
    assert index.feed.head == before


def test_a_large_index_is_read_in_pages_of_about_the_size_asked_for() -> None:
    index = index_with(50)
    cursor, sizes = None, []
    while True:
        batch = read(index, cursor, 10)
        assert batch is not None
        sizes.append(sum(len(change.keys) // 16 for change in batch.changes))
        cursor = batch.cursor
        if batch.is_current:
            break
    assert sum(sizes) == 50
    assert max(sizes) == 10


def test_neighbouring_changes_of_one_kind_are_told_as_one() -> None:
    index = index_with(0)
    reader = Reader(index, 100)
    reader.catch_up()
    for i in range(3):
        index.insert_keys(ROOT_KEY, [key(i)], 0.0)
        index.set_slot(index.get(key(i)) or 0, 0, i)
    batch = read(index, reader.cursor, 100)
    assert batch is not None
    assert batch.changes == [Change(True, b"".join(key(i) for i in range(3)))]


def test_a_waiter_is_woken_once_and_can_leave() -> None:
    feed, woken = IndexFeed(), []
    feed.call_once(lambda: woken.append("a"))

    def leaver() -> None:
        woken.append("b")

    feed.call_once(leaver)
    feed.forget(leaver)
    feed.note(True, key(1))
    feed.note(True, key(2))
    assert woken == ["a"]


@pytest.mark.parametrize("seq", [-1, 1])
def test_a_cursor_from_nowhere_is_not_followed(seq: int) -> None:
    assert read(index_with(0), Cursor(-1, seq), 10) is None
