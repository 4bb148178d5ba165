"""Eviction policies against naive references: same history, same victims, with holds and protection."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpurt.core.eviction import (
    LOOK,
    POLICIES,
    Belady,
    Blind,
    EvictionPolicy,
    Lru,
    Predicted,
    Protect,
    S3Fifo,
    _AgeOrder,
    least,
    make_policy,
)

CAPACITY = 12  # below LOOK, so that a search with protection sees every candidate
BLOCKS = st.integers(0, 20)
OP_NAMES = ["insert", "touch", "hold", "unhold", "unhold", "evict", "evict", "drop"]
OPS = st.lists(
    st.tuples(
        st.sampled_from(OP_NAMES),
        BLOCKS,
    ),
    max_size=120,
)


def next_use(block: int, now: float) -> float:
    """A fixed future: block b is used every b + 2 time units; the last five never again."""
    return math.inf if block > 15 else (now // (block + 2) + 1) * (block + 2)


# --- naive references: plain lists, full scans ----------------------------------------------------


class Naive:
    """Resident blocks in a list, oldest first; subclasses say how a touch moves them and how they rank."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.held: set[int] = set()

    def insert(self, block: int, now: float) -> None:
        self.blocks.append(block)
        self.held.add(block)

    def touch(self, block: int, now: float) -> None:
        pass

    def remove(self, block: int, evicted: bool) -> None:
        self.blocks.remove(block)
        self.held.discard(block)

    def ranked(self, now: float) -> list[int]:
        return self.blocks

    def victim(self, now: float, protect: Protect) -> int | None:
        free = [b for b in self.ranked(now) if b not in self.held]
        return next((b for b in free if not protect(b)), free[0] if free else None)


class NaiveLru(Naive):
    def touch(self, block: int, now: float) -> None:
        if block in self.blocks:
            self.blocks.remove(block)
            self.blocks.append(block)


class NaiveLfu(NaiveLru):
    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def insert(self, block: int, now: float) -> None:
        super().insert(block, now)
        self.count[block] = 0

    def touch(self, block: int, now: float) -> None:
        super().touch(block, now)
        if block in self.blocks:
            self.count[block] += 1

    def ranked(self, now: float) -> list[int]:
        return sorted(self.blocks, key=lambda b: self.count[b])  # stable: the least recent of equals first


class NaiveBelady(NaiveLru):
    def __init__(self) -> None:
        super().__init__()
        self.next: dict[int, float] = {}

    def insert(self, block: int, now: float) -> None:
        super().insert(block, now)
        self.next[block] = next_use(block, now)

    def touch(self, block: int, now: float) -> None:
        super().touch(block, now)
        if block in self.blocks:
            self.next[block] = next_use(block, now)

    def ranked(self, now: float) -> list[int]:
        return sorted(self.blocks, key=lambda b: -self.next[b])


class Thirds:
    """An outlook: block b is worth b % 3. Knows who is resident; a block's handle is ten more than its number."""

    def __init__(self) -> None:
        self.resident: set[int] = set()

    def came(self, block: int) -> int:
        self.resident.add(block)
        return block + 10

    def left(self, handle: int) -> None:
        self.resident.remove(handle - 10)

    def worth(self, handles: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        assert self.resident.issuperset((handles - 10).tolist())
        return ((handles - 10) % 3).astype(float)


class NaivePredicted(NaiveLru):
    def ranked(self, now: float) -> list[int]:
        return sorted(self.blocks, key=lambda b: b % 3)


class NaiveS3Fifo(Naive):
    """The paper's three queues as lists; held blocks are stepped over."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.main, self.ghost = self.blocks, list[int](), list[int]()
        self.count: dict[int, int] = {}

    def insert(self, block: int, now: float) -> None:
        self.held.add(block)
        self.count[block] = 0
        if block in self.ghost:
            self.ghost.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)

    def touch(self, block: int, now: float) -> None:
        if block in self.small + self.main:
            self.count[block] = min(3, self.count[block] + 1)

    def remove(self, block: int, evicted: bool) -> None:
        self.held.discard(block)
        if block in self.main:
            self.main.remove(block)
            return
        self.small.remove(block)
        if evicted:
            self.ghost = [*self.ghost, block][-(CAPACITY - CAPACITY // 10) :]

    def victim(self, now: float, protect: Protect) -> int | None:
        if len(self.small) >= CAPACITY // 10:
            return self._from_small(protect) or self._from_main(protect)
        return self._from_main(protect) or self._from_small(protect) or self._from_main(protect)

    def _from_small(self, protect: Protect) -> int | None:
        while free := [b for b in self.small if b not in self.held]:
            if self.count[free[0]] < 2:
                cold = [b for b in free if self.count[b] < 2]
                return next((b for b in cold if not protect(b)), cold[0])
            self.small.remove(free[0])
            self.main.append(free[0])
            self.count[free[0]] = 0
        return None

    def _from_main(self, protect: Protect) -> int | None:
        while free := [b for b in self.main if b not in self.held]:
            if self.count[free[0]] == 0:
                cold = [b for b in free if self.count[b] == 0]
                return next((b for b in cold if not protect(b)), cold[0])
            self.main.remove(free[0])
            self.main.append(free[0])
            self.count[free[0]] -= 1
        return None


PAIRS: dict[str, tuple[Callable[[], EvictionPolicy], Callable[[], Naive]]] = {
    "lru": (lambda: make_policy("lru", CAPACITY), NaiveLru),
    "fifo": (lambda: make_policy("fifo", CAPACITY), Naive),
    "lfu": (lambda: make_policy("lfu", CAPACITY), NaiveLfu),
    "s3fifo": (lambda: make_policy("s3fifo", CAPACITY), NaiveS3Fifo),
    "belady": (lambda: Belady(next_use), NaiveBelady),
    "predicted": (lambda: make_policy("predicted", CAPACITY, Thirds()), NaivePredicted),
    "predicted, blind": (lambda: make_policy("predicted", CAPACITY), NaiveLru),
}


class Twins:
    """A policy and its naive reference fed one history, which keeps the rules a pool keeps."""

    def __init__(self, policy: EvictionPolicy, naive: Naive) -> None:
        self.policy, self.naive = policy, naive
        self.resident: set[int] = set()
        self.now = 0.0

    def step(self, op: str, block: int, protect: Protect | None) -> None:
        self.now += 1
        if op == "touch":
            self.policy.touch([block], self.now)
            self.naive.touch(block, self.now)
        elif op == "evict":
            self.evict(protect)
        elif op == "insert":
            if block not in self.resident and len(self.resident) < CAPACITY:
                self.resident.add(block)
                self.policy.insert(block, self.now)
                self.naive.insert(block, self.now)
        elif block in self.resident:
            self.change(op, block)
        assert len(self.policy) == len(self.resident)

    def change(self, op: str, block: int) -> None:
        held = block in self.naive.held
        if op == "drop":
            self.gone(block, evicted=False)
        elif op == "hold" and not held:
            self.policy.hold(block)
            self.naive.held.add(block)
        elif op == "unhold" and held:
            self.policy.unhold(block)
            self.naive.held.discard(block)

    def evict(self, protect: Protect | None) -> None:
        victim = self.policy.victim(self.now, protect)
        assert victim == self.naive.victim(self.now, protect or (lambda block: False))
        if victim is not None:
            self.gone(victim, evicted=True)

    def gone(self, block: int, evicted: bool) -> None:
        self.resident.remove(block)
        self.policy.remove(block, evicted=evicted)
        self.naive.remove(block, evicted)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=150, deadline=None)
@given(ops=OPS, protected=st.none() | st.frozensets(st.integers(1, 20)))
def test_victims_are_those_of_the_naive_reference(
    name: str, ops: list[tuple[str, int]], protected: frozenset[int] | None
) -> None:
    make, naive = PAIRS[name]
    twins = Twins(make(), naive())
    for op, block in ops:
        twins.step(op, block + 1, None if protected is None else protected.__contains__)


@pytest.mark.parametrize("name", PAIRS)
def test_victims_stay_equal_over_a_long_history(name: str) -> None:
    """Long enough for queues to fill with garbage entries and be compacted."""
    make, naive = PAIRS[name]
    twins, rng = Twins(make(), naive()), random.Random(7)
    ops = ["insert"] * 4 + ["touch"] * 8 + ["hold", "unhold", "unhold", "evict", "drop"]
    for _ in range(20_000):
        twins.step(rng.choice(ops), rng.randint(1, 40), None)


# --- holds, protection, cost ----------------------------------------------------------------------


def filled(policy: EvictionPolicy, blocks: Sequence[int]) -> EvictionPolicy:
    for block in blocks:
        policy.insert(block, 0.0)
        policy.unhold(block)
    return policy


def drain(policy: EvictionPolicy) -> list[int]:
    """Evict until nothing evictable is left."""
    gone = []
    while (victim := policy.victim(0.0)) is not None:
        policy.remove(victim, evicted=True)
        gone.append(victim)
    return gone


def test_block_held_during_searches_comes_back_at_its_own_age() -> None:
    policy = filled(Lru(8), [1, 2, 3, 4, 5])
    policy.hold(1)
    policy.hold(2)
    assert policy.victim(0.0) == 3
    policy.unhold(2)
    policy.unhold(1)
    assert drain(policy) == [1, 2, 3, 4, 5]


def test_touch_while_held_and_set_aside_makes_a_block_young() -> None:
    policy = filled(Lru(8), [1, 2, 3])
    policy.hold(1)
    assert policy.victim(0.0) == 2
    policy.touch([1], 0.0)
    policy.unhold(1)
    assert drain(policy) == [2, 3, 1]


def test_fresh_block_is_held_until_its_fill_ends() -> None:
    policy = Lru(4)
    policy.insert(1, 0.0)
    assert policy.victim(0.0) is None
    policy.unhold(1)
    assert policy.victim(0.0) == 1


class CountingSet(set[int]):
    lookups = 0

    def __contains__(self, item: object) -> bool:
        self.lookups += 1
        return super().__contains__(item)


def test_held_blocks_at_the_old_end_are_met_once_not_by_every_search() -> None:
    held = CountingSet()
    order = _AgeOrder(held)
    for block in range(2_000):
        order.append(block)
    held.update(range(1_000))
    for block in range(1_000, 2_000):
        assert order.oldest(1) == [block]
        order.discard(block)
    assert held.lookups < 10_000  # a scan per search would need a million
    assert order.oldest(1) == []


def test_protected_blocks_are_passed_over_within_a_bounded_look() -> None:
    asked: list[int] = []

    def victim_when_protected(below: int) -> int | None:
        asked.clear()

        def protect(block: int) -> bool:
            asked.append(block)
            return block < below

        return filled(Lru(100), range(100)).victim(0.0, protect)

    assert victim_when_protected(LOOK - 1) == LOOK - 1
    for below in (LOOK, 1_000):
        assert victim_when_protected(below) == 0
        assert len(asked) == LOOK


def test_protection_also_reaches_past_blocks_that_were_set_aside() -> None:
    policy = filled(Lru(8), [1, 2, 3, 4])
    policy.hold(1)
    policy.hold(2)
    assert policy.victim(0.0) == 3
    policy.unhold(1)
    policy.unhold(2)
    assert policy.victim(0.0, {1, 2}.__contains__) == 3
    assert policy.victim(0.0, {1}.__contains__) == 2
    assert drain(policy) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", PAIRS)
def test_gone_blocks_and_old_ranks_take_no_memory(name: str) -> None:
    policy = PAIRS[name][0]()
    for block in range(1, 1_000):
        filled(policy, [block, block + 5_000])
        policy.hold(block)
        policy.victim(0.0)
        policy.remove(block, evicted=False)
        policy.remove(block + 5_000, evicted=True)
    filled(policy, [1])
    for now in range(5_000):
        policy.touch([1], now)
    policy.remove(1, evicted=False)
    assert len(policy) == 0
    sizes = {key: len(value) for key, value in vars(policy).items() if hasattr(value, "__len__")}
    assert sizes.pop("_ghost", 0) <= CAPACITY
    assert sum(sizes.values()) == 0
    for order in [value for value in vars(policy).values() if hasattr(value, "__slots__")]:
        heap = getattr(order, "_aside", order)
        assert len(heap._heap) < 200


# --- S3-FIFO --------------------------------------------------------------------------------------


def use(policy: EvictionPolicy, resident: set[int], capacity: int, block: int) -> bool:
    """One reference in a demand-filled cache; whether it hit."""
    if block in resident:
        policy.touch([block], 0.0)
        return True
    if len(resident) == capacity:
        victim = policy.victim(0.0)
        assert victim is not None
        policy.remove(victim, evicted=True)
        resident.remove(victim)
    policy.insert(block, 0.0)
    policy.unhold(block)
    resident.add(block)
    return False


def test_s3fifo_scan_does_not_displace_what_was_used_twice() -> None:
    outcome = {}
    for name in ("lru", "s3fifo"):
        policy, resident = make_policy(name, 20), set[int]()
        for block in [1, 2, 3] * 3 + list(range(100, 160)):
            use(policy, resident, 20, block)
        outcome[name] = {1, 2, 3} <= resident
    assert outcome == {"lru": False, "s3fifo": True}


def test_s3fifo_block_touched_once_leaves_small_and_returns_into_main() -> None:
    policy = filled(S3Fifo(20), [1, 2, 3])
    policy.touch([1], 0.0)
    assert policy.victim(0.0) == 1
    policy.remove(1, evicted=True)
    filled(policy, [1])  # a ghost: enters main
    assert drain(policy) == [2, 1, 3]  # small (2, 3) sheds down to below its target, then main goes first


def test_s3fifo_dropped_block_leaves_no_ghost() -> None:
    policy = filled(S3Fifo(20), [1, 2, 3])
    policy.remove(1, evicted=False)
    filled(policy, [1])
    assert drain(policy) == [2, 3, 1]


def test_s3fifo_ghosts_are_bounded_and_forgotten_oldest_first() -> None:
    policy = S3Fifo(10)  # small aims at 1; 9 ghosts
    for block in range(1, 11):
        filled(policy, [block])
        policy.remove(block, evicted=True)
    filled(policy, [2, 1])  # 2 enters main, 1 is forgotten and enters small
    assert drain(policy) == [1, 2]


def test_s3fifo_touched_block_in_main_gets_as_many_more_rounds_as_touches_up_to_three() -> None:
    policy = filled(S3Fifo(100), [1, 2])
    policy.touch([1, 1], 0.0)
    policy.touch([2, 2], 0.0)
    assert policy.victim(0.0) in (1, 2)  # both moved to main, counts cleared
    policy.touch([1] * 9, 0.0)
    policy.touch([2], 0.0)
    assert drain(policy) == [2, 1]


def test_s3fifo_finds_unheld_blocks_that_its_own_search_moved() -> None:
    policy = filled(S3Fifo(100), [1])
    policy.touch([1, 1], 0.0)  # small is below its target, main is empty: 1 moves to main during the search
    assert policy.victim(0.0) == 1


# --- Belady ---------------------------------------------------------------------------------------


def belady_hits(refs: Sequence[int], capacity: int) -> int:
    def next_ref(block: int, now: float) -> float:
        return next((i for i in range(int(now) + 1, len(refs)) if refs[i] == block), math.inf)

    policy, resident, hits = Belady(next_ref), set[int](), 0
    for i, block in enumerate(refs):
        if block in resident:
            policy.touch([block], i)
            hits += 1
            continue
        if len(resident) == capacity:
            victim = policy.victim(i)
            assert victim is not None
            policy.remove(victim, evicted=True)
            resident.remove(victim)
        policy.insert(block, i)
        policy.unhold(block)
        resident.add(block)
    return hits


def best_hits(refs: tuple[int, ...], capacity: int) -> int:
    """By trying every victim."""

    @cache
    def best(i: int, resident: frozenset[int]) -> int:
        if i == len(refs):
            return 0
        if refs[i] in resident:
            return 1 + best(i + 1, resident)
        if len(resident) < capacity:
            return best(i + 1, resident | {refs[i]})
        return max(best(i + 1, resident - {gone} | {refs[i]}) for gone in resident)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(refs=st.lists(st.integers(0, 5), max_size=14), capacity=st.integers(1, 3))
def test_belady_reaches_the_optimum(refs: list[int], capacity: int) -> None:
    assert belady_hits(refs, capacity) == best_hits(tuple(refs), capacity)


# --- on prefixes ----------------------------------------------------------------------------------


def leading_hits(name: str, capacity: int, requests: Sequence[Sequence[int]], tail_first: bool) -> int:
    """Blocks in the leading run of resident blocks of each request, summed."""
    policy, resident, hits = make_policy(name, capacity), set[int](), 0
    for request in requests:
        run = next((i for i, block in enumerate(request) if block not in resident), len(request))
        hits += run
        for block in reversed(request) if tail_first else request:
            use(policy, resident, capacity, block)
    return hits


def agent_sessions(sessions: int, turns: int) -> list[list[int]]:
    """Interleaved sessions whose context grows by two blocks a turn behind one shared system prompt."""
    prompt = [0, 1]
    return [
        prompt + [1_000 * (s + 1) + b for b in range(2 * (turn + 1))]
        for turn in range(turns)
        for s in range(sessions)
    ]


def test_touching_tail_first_keeps_heads_and_so_hits_more() -> None:
    requests = agent_sessions(sessions=4, turns=6)
    for capacity in (16, 24, 32):
        tail_first = leading_hits("lru", capacity, requests, tail_first=True)
        assert tail_first > leading_hits("lru", capacity, requests, tail_first=False)


def test_frequency_alone_is_worse_than_recency_once_sessions_end() -> None:
    old, new = agent_sessions(2, 8), agent_sessions(5, 8)[2::5]
    requests = old + [[block + 50_000 for block in request] for request in new] * 2
    assert leading_hits("lfu", 20, requests, True) < leading_hits("lru", 20, requests, True)


# --- the registry ---------------------------------------------------------------------------------


def test_every_policy_is_made_by_its_name_and_starts_empty() -> None:
    for name in POLICIES:
        policy = make_policy(name, 4)
        assert policy.name == name
        assert len(policy) == 0
        assert policy.victim(0.0) is None


def test_unknown_policy_or_senseless_capacity_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown eviction policy 'mru'; known: fifo, lfu, lru, predicted, s3fifo"
    ):
        make_policy("mru", 4)
    with pytest.raises(ValueError, match="capacity"):
        make_policy("lru", 0)


# --- prediction -----------------------------------------------------------------------------------


def test_the_price_of_room_is_what_the_next_victim_is_worth() -> None:
    policy = filled(make_policy("predicted", CAPACITY, Thirds()), (2, 5, 4, 1))
    assert (policy.price(0.0), policy.victim(0.0)) == (1.0, 4)
    assert (policy.price(0.0), policy.victim(0.0, protect={1, 4}.__contains__)) == (1.0, 2)


def test_policies_that_predict_nothing_sell_room_for_nothing() -> None:
    for name in POLICIES:
        assert filled(make_policy(name, CAPACITY), (2, 5)).price(0.0) == 0.0


def test_a_ranking_serves_many_victims_and_is_renewed_when_it_has_aged() -> None:
    class Counting(Thirds):
        asked = 0

        def worth(self, handles: NDArray[np.int64], now: float) -> NDArray[np.float64]:
            self.asked += 1
            return super().worth(handles, now)

    outlook = Counting()
    policy = filled(make_policy("predicted", 1000, outlook), range(1000))
    for _ in range(100):
        victim = policy.victim(0.0)
        assert victim is not None
        policy.remove(victim, evicted=True)
    assert outlook.asked == 1
    policy.victim(Predicted.REFRESH_S)
    assert outlook.asked == 2


def test_of_a_long_ranking_none_leaves_that_was_used_since() -> None:
    policy = filled(make_policy("predicted", 4000, Blind()), range(4000))
    left = []
    for _ in range(160):
        victim = policy.victim(0.0)
        assert victim is not None
        policy.remove(victim, evicted=True)
        left.append(victim)
        policy.touch([victim + 100], 0.0)
    assert left == [*range(100), *range(200, 260)]


def test_a_touched_block_is_not_the_next_to_leave_whatever_it_was_worth() -> None:
    policy = filled(make_policy("predicted", CAPACITY, Thirds()), (3, 6, 5))
    assert policy.victim(0.0) == 3
    policy.touch([3], 0.1)
    assert policy.victim(0.1) == 6


def test_more_blocks_than_the_capacity_are_ranked_like_others() -> None:
    policy = filled(make_policy("predicted", 2), range(9))
    policy.touch([3, 0], 0.0)
    policy.remove(5, evicted=False)
    assert drain(policy) == [1, 2, 4, 6, 7, 8, 3, 0]


@pytest.mark.parametrize("count", [3, 40, 200, 500])
def test_the_least_values_come_in_order_of_equals_the_first_or_the_oldest(count: int) -> None:
    values = np.array([(7 * n) % 13 for n in range(400)], float)
    ages = np.array([(97 * n) % 400 for n in range(400)])
    assert least(values, count).tolist() == sorted(range(400), key=lambda n: (values[n], n))[:count]
    by_age = sorted(range(400), key=lambda n: (values[n], ages[n]))
    assert least(values, count, ages).tolist() == by_age[:count]
