"""The index against a naive model: a dict from prefixes to what is known of them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpurt.core.identity import ROOT_KEY
from dpurt.core.prefix_index import Dropped, PrefixIndex

WIDTH = 8
Chain = tuple[str | int, ...]  # ("t" | "k", symbol, symbol, ...): by tokens or by keys
symbols = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def key_of(chain: Chain) -> bytes:
    return hashlib.blake2b(repr(chain).encode(), digest_size=16).digest() if len(chain) > 1 else ROOT_KEY


def tokens_of(chain: Chain) -> bytes:
    return b"".join(bytes(WIDTH - 1) + bytes([int(symbol)]) for symbol in chain[1:])


def ids_of(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


@dataclass(eq=False)
class Record:
    slots: list[int]
    extents: list[int]
    last_use: float
    expires: float = math.inf
    pins: int = 0
    uses: int = 0

    def has_copy(self, shard: int) -> bool:
        return self.slots[shard] >= 0 or self.extents[shard] >= 0

    @property
    def has_own(self) -> bool:
        return any(self.has_copy(shard) for shard in range(len(self.slots)))

    @property
    def is_nowhere(self) -> bool:
        return not (self.has_own or self.pins)


class IndexMachine(RuleBasedStateMachine):
    """Token chains and key chains in one index, two shards."""

    num_shards = 2

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(WIDTH, self.num_shards)
        self.known: dict[Chain, Record] = {}
        self.handed_out: list[tuple[int, Chain, Record]] = []
        self.now = 0.0
        self.next_place = 0

    @initialize()
    def start(self) -> None:
        self.index.check_integrity()

    # --- the model ---

    def prefix(self, chain: Chain) -> list[Chain]:
        found = []
        for stop in range(2, len(chain) + 1):
            if chain[:stop] not in self.known:
                break
            found.append(chain[:stop])
        return found

    def block(self, chain: Chain) -> int:
        found = self.index.get(key_of(chain))
        assert found is not None
        return found

    def pick(self, choice: int) -> Chain:
        return sorted(self.known, key=repr)[choice % len(self.known)]

    def learn(self, chain: Chain) -> None:
        for stop in range(2, len(chain) + 1):
            if chain[:stop] not in self.known:
                nowhere = [-1] * self.num_shards
                self.known[chain[:stop]] = Record(list(nowhere), list(nowhere), self.now)
                self.freshen(chain[:stop])
        for part in self.prefix(chain):
            handle = int(self.index.handles(ids_of(self.block(part)))[0])
            self.handed_out.append((handle, part, self.known[part]))

    def freshen(self, chain: Chain) -> None:
        for part in self.prefix(chain):
            self.known[part].last_use = max(self.known[part].last_use, self.now)

    def forget(self, candidates: list[Chain]) -> list[Chain]:
        gone, todo = [], sorted(candidates, key=len)
        while todo:
            chain = todo.pop()
            if chain not in self.known or not self.known[chain].is_nowhere:
                continue
            if any(other[:-1] == chain for other in self.known):
                continue
            del self.known[chain]
            gone.append(chain)
            todo = sorted([*todo, chain[:-1]], key=len)
        return gone

    def dropping(self, tops: list[Chain]) -> dict[bytes, tuple[list[int], list[int], bool]]:
        members = [c for c in self.known if any(c[: len(top)] == top for top in tops)]
        lost = {
            c: (self.known[c].slots[:], self.known[c].extents[:]) for c in members if self.known[c].has_own
        }
        for chain in members:
            record = self.known[chain]
            record.slots, record.extents = [-1] * self.num_shards, [-1] * self.num_shards
            record.expires = math.inf
        return self.forgetting(members, lost)

    def forgetting(
        self, candidates: list[Chain], lost: dict[Chain, tuple[list[int], list[int]]]
    ) -> dict[bytes, tuple[list[int], list[int], bool]]:
        gone = set(self.forget(candidates))
        none = [-1] * self.num_shards
        return {key_of(c): (*lost.get(c, (none, none)), c in gone) for c in gone | set(lost)}

    def check_dropped(
        self, dropped: Dropped, expected: dict[bytes, tuple[list[int], list[int], bool]]
    ) -> None:
        rows = zip(dropped.slots.tolist(), dropped.extents.tolist(), dropped.forgotten.tolist(), strict=True)
        assert dict(zip(dropped.key_list(), rows, strict=True)) == expected
        assert len(dropped.ids) == len(expected)
        still = self.index.resolve(dropped.handles)
        assert (still == np.where(dropped.forgotten, -1, dropped.ids)).all()

    # --- growing ---

    @rule(path=symbols, first=st.integers(0, 4))
    def insert_tokens(self, path: tuple[int, ...], first: int) -> None:
        chain: Chain = ("t", *path)
        first = min(first, len(path) - 1)
        keys = [key_of(chain[: stop + 1]) for stop in range(first + 1, len(path) + 1)]
        if len(self.prefix(chain)) < first:
            with pytest.raises(KeyError):
                self.index.insert(tokens_of(chain), keys, first, self.now)
            return
        ids = self.index.insert(tokens_of(chain), keys, first, self.now)
        self.learn(chain)
        assert [self.index.key(i) for i in ids.tolist()] == keys

    @rule(path=symbols, cut=st.integers(0, 4), kind=st.sampled_from("tk"))
    def insert_below_a_parent(self, path: tuple[int, ...], cut: int, kind: str) -> None:
        chain: Chain = (kind, *path)
        parent = chain[: min(cut, len(path)) + 1]
        keys = [key_of(chain[:stop]) for stop in range(len(parent) + 1, len(chain) + 1)]

        def insert() -> np.ndarray:
            if kind == "k":
                return self.index.insert_keys(key_of(parent), keys, self.now)
            below = memoryview(tokens_of(chain))[len(tokens_of(parent)) :]
            return self.index.insert_after(key_of(parent), below, keys, self.now)

        if len(parent) > 1 and parent not in self.known:
            with pytest.raises(KeyError):
                insert()
            return
        ids = insert()
        self.learn(chain)
        assert [self.index.key(i) for i in ids.tolist()] == keys

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def insert_blocks_that_stand_alone(self, numbers: list[int]) -> None:
        chains: list[Chain] = [("l", number) for number in numbers]
        keys = [key_of(chain) for chain in chains]
        ids = self.index.insert_lone(keys, self.now)
        for chain in chains:
            self.learn(chain)
        assert [self.index.key(i) for i in ids.tolist()] == keys
        assert self.index.find([*keys, key_of(("l", 99))]).tolist() == [*ids.tolist(), -1]

    # --- own tiers ---

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0), shard=st.integers(0, 1), slot=st.booleans())
    def place(self, choice: int, shard: int, slot: bool) -> None:
        chain, shard = self.pick(choice), shard % self.num_shards
        record, above = self.known[chain], self.known.get(chain[:-1])
        places = record.slots if slot else record.extents
        put = self.index.set_slot if slot else self.index.set_extent
        self.next_place += 1
        if places[shard] >= 0 or (above is not None and not above.has_copy(shard)):
            with pytest.raises(ValueError, match=r"already has|neither in staging"):
                put(self.block(chain), shard, self.next_place)
            return
        put(self.block(chain), shard, self.next_place)
        places[shard] = self.next_place

    @precondition(lambda self: self.known)
    @rule(path=symbols, slot=st.booleans(), kind=st.sampled_from("tk"))
    def place_all_of_a_chain(self, path: tuple[int, ...], slot: bool, kind: str) -> None:
        for part in self.prefix((kind, *path)):
            for shard in range(self.num_shards):
                if not self.known[part].has_copy(shard):
                    self.next_place += 1
                    places = self.known[part].slots if slot else self.known[part].extents
                    (self.index.set_slot if slot else self.index.set_extent)(
                        self.block(part), shard, self.next_place
                    )
                    places[shard] = self.next_place

    @precondition(lambda self: self.known)
    @rule(
        choices=st.lists(st.integers(0), min_size=1, max_size=4), shard=st.integers(0, 1), slot=st.booleans()
    )
    def place_several(self, choices: list[int], shard: int, slot: bool) -> None:
        chains = list(dict.fromkeys(self.pick(choice) for choice in choices))
        shard %= self.num_shards
        ids = ids_of(*map(self.block, chains))
        values = [self.next_place + 1 + i for i in range(len(chains))]
        self.next_place += len(chains)
        put = self.index.set_slots if slot else self.index.set_extents
        places = [self.known[c].slots if slot else self.known[c].extents for c in chains]
        above = [self.known.get(c[:-1]) for c in chains if c[:-1] not in chains]
        if any(p[shard] >= 0 for p in places) or any(a is not None and not a.has_copy(shard) for a in above):
            with pytest.raises(ValueError, match=r"a block has one|neither in staging"):
                put(ids, shard, values)
            return
        put(ids, shard, values)
        for place, value in zip(places, values, strict=True):
            place[shard] = value

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0), shard=st.integers(0, 1), slot=st.booleans())
    def clear(self, choice: int, shard: int, slot: bool) -> None:
        chain, shard = self.pick(choice), shard % self.num_shards
        record, block = self.known[chain], self.block(chain)
        (record.slots if slot else record.extents)[shard] = -1
        must_drop = (self.index.clear_slot if slot else self.index.clear_extent)(block, shard)
        assert must_drop == (not record.has_copy(shard))
        if must_drop:
            self.check_dropped(self.index.drop(block, self.now), self.dropping([chain]))

    @precondition(lambda self: self.known)
    @rule(choices=st.lists(st.integers(0), min_size=1, max_size=3))
    def drop(self, choices: list[int]) -> None:
        tops = [self.pick(choice) for choice in choices]
        blocks = ids_of(*map(self.block, tops))
        self.check_dropped(self.index.drop(blocks, self.now), self.dropping(tops))

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0), after=st.integers(-1, 3))
    def set_expiry(self, choice: int, after: int) -> None:
        chain = self.pick(choice)
        self.index.set_expiry(ids_of(self.block(chain)), self.now + after)
        self.known[chain].expires = self.now + after
        for stop in range(len(chain) - 1, 1, -1):  # its prefix lasts as long
            above = self.known[chain[:stop]]
            if above.expires >= self.now + after:
                break
            above.expires = self.now + after

    @rule()
    def expire(self) -> None:
        due = [c for c, record in self.known.items() if record.expires <= self.now]
        self.check_dropped(self.index.expire(self.now), self.dropping(due))

    @rule(by=st.integers(1, 2))
    def time_passes(self, by: int) -> None:
        self.now += by

    # --- use ---

    @rule(path=symbols, kind=st.sampled_from("tk"), skip=st.integers(0, 2))
    def touch(self, path: tuple[int, ...], kind: str, skip: int) -> None:
        parts = self.prefix((kind, *path))[skip:]
        self.index.touch(ids_of(*map(self.block, parts)), self.now)
        for part in parts:
            self.known[part].uses += 1
            self.freshen(part)

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0), pins=st.booleans())
    def pin_or_unpin(self, choice: int, pins: bool) -> None:
        chain = self.pick(choice)
        record, ids = self.known[chain], ids_of(self.block(chain))
        if pins:
            self.index.pin(ids)
            record.pins += 1
        elif record.pins:
            record.pins -= 1
            self.check_dropped(self.index.unpin(ids, self.now), self.forgetting([chain], {}))
        else:
            with pytest.raises(ValueError, match="without a pin"):
                self.index.unpin(ids, self.now)

    # --- what must hold ---

    @rule(path=symbols)
    def a_match_is_the_longest_known_prefix(self, path: tuple[int, ...]) -> None:
        by_tokens, by_keys = self.prefix(("t", *path)), self.prefix(("k", *path))
        assert self.index.match(tokens_of(("t", *path))).tolist() == list(map(self.block, by_tokens))
        assert self.index.match(memoryview(tokens_of(("t", *path)))).tolist() == list(
            map(self.block, by_tokens)
        )
        for kind, expected in (("t", by_tokens), ("k", by_keys)):
            keys = [key_of((kind, *path[:stop])) for stop in range(1, len(path) + 1)]
            ids = self.index.match_keys(keys)
            assert ids.tolist() == list(map(self.block, expected))
            resident = [all(self.known[c].has_copy(s) for s in range(self.num_shards)) for c in expected]
            assert self.index.resident_prefix(ids) == [*resident, False].index(False)

    @invariant()
    def records_are_as_the_model_has_them(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.known)
        chains = list(self.known)
        ids = ids_of(*map(self.block, chains))
        where, table = self.index.locations(ids), self.index.table
        for row, chain in enumerate(chains):
            record, block = self.known[chain], int(ids[row])
            assert where.slot[row].tolist() == record.slots
            assert where.extent[row].tolist() == record.extents
            seen = table.uses[block], table.last_use[block], table.expires[block], table.pins[block]
            assert seen == (record.uses, record.last_use, record.expires, record.pins)

    @invariant()
    def a_handle_resolves_while_its_own_record_lives(self) -> None:
        ids = self.index.resolve(np.array([handle for handle, _, _ in self.handed_out], np.int64)).tolist()
        for block, (_, chain, record) in zip(ids, self.handed_out, strict=True):
            assert block == (self.block(chain) if self.known.get(chain) is record else -1)


class OneShardMachine(IndexMachine):
    """The same with one shard."""

    num_shards = 1


TestOneShard = OneShardMachine.TestCase
TestOneShard.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestTwoShards = IndexMachine.TestCase
TestTwoShards.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def a_resident_chain(index: PrefixIndex, path: tuple[int, ...]) -> list[int]:
    chain: Chain = ("t", *path)
    keys = [key_of(chain[: stop + 1]) for stop in range(1, len(path) + 1)]
    ids = index.insert(tokens_of(chain), keys, 0, 0.0)
    for place, block in enumerate(ids.tolist()):
        if index.locations(ids_of(block)).slot[0, 0] < 0:
            index.set_slot(block, 0, place)
    return ids.tolist()


def test_a_lost_head_takes_its_tail_with_it() -> None:
    """U17: nothing unreachable stays resident."""
    index = PrefixIndex(WIDTH)
    head, *tail = a_resident_chain(index, (1, 2, 3))
    a_resident_chain(index, (1, 2, 9))
    assert index.clear_slot(head, 0)
    dropped = index.drop(head, 1.0)
    assert len(dropped.ids) == 4
    assert dropped.ids[0] == head
    assert set(dropped.slots[:, 0].tolist()) == {-1, 1, 2}
    assert len(index) == 0
    assert tail


def test_a_block_that_stands_alone_may_be_known_with_a_parent_and_the_roots_key_is_none() -> None:
    index = PrefixIndex(WIDTH)
    chain = index.insert_keys(ROOT_KEY, [key_of(("k", 1)), key_of(("k", 1, 2))], 0.0)
    ids = index.insert_lone([key_of(("k", 1, 2)), key_of(("l", 1)), key_of(("l", 1))], 0.0)
    assert ids[0] == chain[1]
    assert ids[1] == ids[2]
    assert len(index) == 3
    with pytest.raises(ValueError, match="root"):
        index.insert_lone([ROOT_KEY], 0.0)


def test_an_aborted_store_does_not_end_its_neighbours_that_are_in_flight() -> None:
    index = PrefixIndex(WIDTH)
    ids = index.insert_keys(ROOT_KEY, [key_of(("k", 1)), key_of(("k", 1, 2))], 0.0)
    index.pin(ids)
    index.unpin(ids[1:], 0.0)
    assert index.get(key_of(("k", 1, 2))) is None
    assert index.get(key_of(("k", 1))) == ids[0]


def test_idle_time_is_told_with_what_was_dropped() -> None:
    index = PrefixIndex(WIDTH)
    ids = a_resident_chain(index, (1, 2))
    index.touch(ids_of(ids[0]), 4.0)
    assert index.drop(ids[0], 10.0).idle_s.tolist() == [6.0, 10.0]


@pytest.mark.parametrize("kind", ["t", "k"])
@pytest.mark.parametrize("grows", [True, False])
def test_no_ancestor_is_older_than_what_was_just_used_or_added(kind: str, grows: bool) -> None:
    index = PrefixIndex(WIDTH)
    chain: Chain = (kind, 1, 2, 1, 2)

    def insert(start: int, stop: int, now: float) -> list[int]:
        keys = [key_of(chain[: n + 1]) for n in range(start + 1, stop + 1)]
        if kind == "k":
            return index.insert_keys(key_of(chain[: start + 1]), keys, now).tolist()
        tokens = tokens_of(chain)[start * WIDTH : stop * WIDTH]
        return index.insert_after(key_of(chain[: start + 1]), tokens, keys, now).tolist()

    ids = insert(0, 3, 1.0)
    if grows:
        insert(3, 4, 5.0)
    else:
        index.touch(ids_of(ids[2]), 5.0)
    assert index.table.last_use[ids].tolist() == [5.0, 5.0, 5.0]
    index.touch(ids_of(ids[2]), 3.0)
    assert index.table.last_use[ids].tolist() == [5.0, 5.0, 5.0]


def test_expiry_that_was_put_off_drops_nothing_early() -> None:
    index = PrefixIndex(WIDTH)
    ids = ids_of(*a_resident_chain(index, (1, 2)))
    index.set_expiry(ids, 5.0)
    index.set_expiry(ids, 9.0)
    assert len(index.expire(6.0).ids) == 0
    assert len(index.expire(9.0).ids) == 2
    assert not index.is_due(1e9)


def test_what_is_due_may_go_in_pieces() -> None:
    index = PrefixIndex(4)
    for i in range(10):
        index.set_expiry(index.insert_after(ROOT_KEY, bytes([i]) * 4, [bytes([i + 1]) * 16], 0.0), 5.0)
    counts = []
    while index.is_due(5.0):
        counts.append(len(index.expire(5.0, 4).ids))
    assert counts == [4, 4, 2]
    assert not len(index)


def test_tokens_of_a_block_come_back_unless_it_is_known_by_key() -> None:
    index = PrefixIndex(WIDTH)
    ids = a_resident_chain(index, (1, 2))
    assert index.tokens_of(ids[1]) == tokens_of(("t", 2))
    (block,) = index.insert_keys(ROOT_KEY, [key_of(("k", 1))], 0.0).tolist()
    with pytest.raises(KeyError):
        index.tokens_of(block)


@pytest.mark.parametrize(
    ("tokens", "keys", "first", "error", "message"),
    [
        ((1, 2), [("t", 1), ("t", 1, 7)], 0, ValueError, "another key"),
        ((1, 2, 3), [("t", 1)], 2, ValueError, "already known elsewhere"),
        ((5, 6), [("t", 5), ("t", 5)], 0, ValueError, "comes twice"),
        ((5,), [("t",)], 0, ValueError, "the root's"),
        ((5,), [("t", 5), ("t", 5, 6)], 0, ValueError, "do not hold 2 blocks"),
        ((5, 6), [("t", 5, 6)], 1, KeyError, "block 0 of the chain is unknown"),
    ],
)
def test_a_refused_insert_changes_nothing(
    tokens: Chain, keys: list[Chain], first: int, error: type[Exception], message: str
) -> None:
    index = PrefixIndex(WIDTH)
    a_resident_chain(index, (1, 2))
    with pytest.raises(error, match=message):
        index.insert(tokens_of(("t", *tokens)), [key_of(key) for key in keys], first, 1.0)
    assert len(index) == 2
    index.check_integrity()


def test_a_chain_is_known_by_tokens_or_by_keys_never_half_and_half() -> None:
    index = PrefixIndex(WIDTH)
    a_resident_chain(index, (1,))
    index.insert_keys(ROOT_KEY, [key_of(("k", 1))], 0.0)
    with pytest.raises(ValueError, match="known by its tokens"):
        index.insert_keys(key_of(("t", 1)), [key_of(("k", 1, 2))], 0.0)
    with pytest.raises(ValueError, match="known by its key only"):
        index.insert_after(key_of(("k", 1)), tokens_of(("t", 2)), [key_of(("k", 1, 2))], 0.0)
    assert len(index) == 2


def test_keys_that_are_no_chain_match_only_as_far_as_they_are_one() -> None:
    index = PrefixIndex(WIDTH)
    index.insert_keys(ROOT_KEY, [key_of(("k", 1)), key_of(("k", 1, 2))], 0.0)
    index.insert_keys(ROOT_KEY, [key_of(("k", 3))], 0.0)
    assert len(index.match_keys([key_of(("k", 1)), key_of(("k", 3))])) == 1
    assert len(index.match_keys([key_of(("k", 1, 2))])) == 0
    assert len(index.match_keys([])) == 0


def test_an_id_that_is_not_in_use_is_refused() -> None:
    index = PrefixIndex(WIDTH)
    (block,) = a_resident_chain(index, (1,))
    index.drop(block, 0.0)
    for block_id in (block, -1, 10**6):
        with pytest.raises(ValueError, match="no block has id"):
            index.drop(block_id, 0.0)


def test_check_integrity_notices_an_orphan_in_own_tiers() -> None:
    index = PrefixIndex(WIDTH)
    head, _ = a_resident_chain(index, (1, 2))
    index.clear_slot(head, 0)
    with pytest.raises(AssertionError, match="their parents none"):
        index.check_integrity()


def test_stats_count_what_came_and_went() -> None:
    index = PrefixIndex(WIDTH)
    ids = a_resident_chain(index, (1, 2))
    index.insert_keys(ROOT_KEY, [key_of(("k", 1))], 0.0)
    index.drop(ids[1], 1.0)
    stats = index.stats()
    assert (stats.blocks, stats.token_blocks, stats.strands) == (2, 1, 1)
    assert (stats.inserted, stats.dropped, stats.forgotten) == (3, 1, 1)
