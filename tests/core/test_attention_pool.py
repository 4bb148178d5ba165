"""The pool of sparse decode: capacity, purse and eviction, against a naive model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dpurt.core.attention_pool import AttentionPool, PoolBudget

GROUPS, WIDTH = 3, 8


def pool_of(capacity, mean=2.0, burst=4, saved=6.0, margin=0.5, threshold=0.1, **kind):
    budget = PoolBudget(mean=mean, burst=burst, saved=saved, margin=margin, threshold=threshold)
    return AttentionPool(capacity, GROUPS, WIDTH, budget, **kind)


def scores(**wanted):
    """Probabilities by column: c3=0.9 is column 3."""
    row = np.zeros(WIDTH)
    for name, score in wanted.items():
        row[int(name[1:])] = score
    return row


def demand_all(pool, group, *columns):
    hits = pool.demand(group, np.array(columns))
    return hits.tolist()


class NaivePool:
    """The same rules on dicts and sorted lists."""

    def __init__(self, capacity, budget, pooled, counts_in_flight):
        self.budget, self.pooled, self.counts = budget, pooled, counts_in_flight
        self.share = capacity if pooled else capacity // GROUPS
        self.value, self.flying, self.purse = {}, set(), 0.0
        self.last = {}

    def scope(self, group):
        return {slot for slot in self.value if self.pooled or slot[0] == group}

    def cheapest(self, group, count):
        free = self.scope(group) - self.flying
        return sorted(free, key=lambda slot: (self.value[slot], slot))[:count]

    def plan(self, group, probability):
        self.purse = min(self.purse + self.budget.mean, self.budget.saved)
        limit = min(int(self.purse), self.budget.burst)
        absent = [c for c in range(WIDTH) if (group, c) not in self.value]
        likely = [c for c in absent if probability[c] > self.budget.threshold]
        wanted = sorted(likely, key=lambda c: (-probability[c], c))[:limit]
        room = max(0, self.share - len(self.scope(group)))
        fetch = wanted[:room]
        victims = self.cheapest(group, len(wanted) - room) if len(wanted) > room else []
        displaced = []
        for column, victim in zip(wanted[room:], victims, strict=False):
            if probability[column] <= self.budget.margin * self.value[victim]:
                break
            fetch.append(column)
            displaced.append(victim)
        if self.counts:
            for victim in displaced:
                del self.value[victim]
        self.purse -= len(fetch)
        for column in fetch:
            self.value[group, column] = self.last.get((group, column), 0.0)
            self.flying.add((group, column))
        return fetch

    def demand(self, group, columns):
        hits = [(group, c) in self.value for c in columns]
        for column in columns:
            self.value.setdefault((group, column), 0.0)
        self.flying = {slot for slot in self.flying if slot[0] != group}
        return hits

    def settle(self, group, value):
        self.last.update({(group, c): value[c] for c in range(WIDTH)})
        for column in range(WIDTH):
            if (group, column) in self.value:
                self.value[group, column] = value[column]
        held = len(self.scope(group))
        if not self.counts:
            held -= len(self.scope(group) & self.flying)
        for victim in self.cheapest(group, max(0, held - self.share)):
            del self.value[victim]


numbers = st.integers(0, 2**31)


class PoolComparison(RuleBasedStateMachine):
    """Turns in any order of groups; values all differ, so that the choice is one."""

    @initialize(
        capacity=st.integers(GROUPS, 14),
        pooled=st.booleans(),
        counts=st.booleans(),
        mean=st.sampled_from([0.0, 0.5, 2.0, 4.0]),
        burst=st.integers(0, 6),
        margin=st.sampled_from([-np.inf, 0.0, 0.5, 1.0]),
    )
    def start(self, capacity, pooled, counts, mean, burst, margin):
        self.budget = PoolBudget(mean=mean, burst=burst, saved=mean * 3, threshold=0.1, margin=margin)
        self.pool = AttentionPool(
            capacity, GROUPS, WIDTH, self.budget, pooled=pooled, counts_in_flight=counts
        )
        self.naive = NaivePool(capacity, self.budget, pooled, counts)
        self.issued = self.plans = 0

    @rule(group=st.integers(0, GROUPS - 1), seed=numbers)
    def plan(self, group, seed):
        probability = np.random.default_rng(seed).random(WIDTH)
        flying_before = set(self.naive.flying)
        fetch, evicted = self.pool.plan(group, probability)
        assert fetch.tolist() == self.naive.plan(group, probability)
        assert not {(slot // WIDTH, slot % WIDTH) for slot in evicted.tolist()} & flying_before
        self.plans += 1
        self.issued += len(fetch)
        assert len(fetch) <= self.budget.burst
        assert self.issued <= self.plans * self.budget.mean

    @rule(
        group=st.integers(0, GROUPS - 1),
        columns=st.lists(st.integers(0, WIDTH - 1), max_size=4, unique=True),
        seed=numbers,
    )
    def turn(self, group, columns, seed):
        hits = self.pool.demand(group, np.array(columns, np.intp))
        assert hits.tolist() == self.naive.demand(group, columns)
        value = np.random.default_rng(seed).random(WIDTH)
        self.pool.settle(group, value)
        self.naive.settle(group, value)

    @invariant()
    def they_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = {(g, int(c)) for g in range(GROUPS) for c in np.flatnonzero(self.pool.resident(g))}
        assert held == set(self.naive.value)
        assert self.pool.num_flying == len(self.naive.flying)


TestPoolComparison = PoolComparison.TestCase
TestPoolComparison.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_group_with_much_to_keep_takes_slots_from_one_with_little():
    pool = pool_of(6)
    demand_all(pool, 0, 0, 1, 2, 3, 4)
    pool.settle(0, np.full(WIDTH, 0.9))
    demand_all(pool, 1, 0, 1, 2, 3)
    pool.settle(1, np.full(WIDTH, 0.2))
    assert (pool.resident(0).sum(), pool.resident(1).sum()) == (5, 1)


def test_apart_each_group_keeps_its_share_whatever_its_blocks_are_worth():
    pool = pool_of(6, pooled=False)
    demand_all(pool, 0, 0, 1, 2, 3, 4)
    pool.settle(0, np.full(WIDTH, 0.9))
    demand_all(pool, 1, 0, 1, 2, 3)
    pool.settle(1, np.full(WIDTH, 0.2))
    assert (pool.resident(0).sum(), pool.resident(1).sum()) == (2, 2)


def test_prefetch_displaces_only_what_is_worth_less_by_the_margin():
    pool = pool_of(3, margin=0.5)
    demand_all(pool, 0, 0, 1, 2)
    pool.settle(0, scores(c0=0.9, c1=0.9, c2=0.3))
    fetch, evicted = pool.plan(1, scores(c5=0.4, c6=0.35))
    assert fetch.tolist() == [5]
    assert evicted.tolist() == [2]


def test_unspent_budget_is_saved_up_to_a_limit_and_bursts_are_bounded():
    pool = pool_of(20, mean=1.0, burst=3, saved=5.0)
    nothing, everything = scores(), np.full(WIDTH, 0.9)
    for _ in range(20):
        pool.plan(0, nothing)
    assert [len(pool.plan(group, everything)[0]) for group in range(3)] == [3, 3, 1]


def test_strict_counts_a_fetch_from_its_issue_and_plain_from_its_turn():
    for counts, evicted_now in ((True, 2), (False, 0)):
        pool = pool_of(3, margin=0.0, counts_in_flight=counts)
        demand_all(pool, 0, 0, 1, 2)
        pool.settle(0, np.full(WIDTH, 0.5))
        _, evicted = pool.plan(1, scores(c0=0.9, c1=0.9))
        assert len(evicted) == evicted_now
        demand_all(pool, 1, 0)
        pool.settle(1, scores(c0=0.9))
        assert len(pool) == 3


def test_what_never_came_frees_its_slot():
    pool = pool_of(6)
    fetch, _ = pool.plan(1, scores(c2=0.9))
    demand_all(pool, 1, 5)
    pool.drop(fetch + WIDTH)
    pool.settle(1, np.zeros(WIDTH))
    pool.check_integrity()
    assert np.flatnonzero(pool.resident(1)).tolist() == [5]


@given(st.integers(-3, 2))
def test_a_pool_has_a_slot_for_each_group_at_least(capacity):
    with pytest.raises(ValueError, match="at least one slot"):
        pool_of(capacity)


def test_a_purse_that_cannot_hold_its_income_is_refused():
    with pytest.raises(ValueError, match="saved >= mean"):
        PoolBudget(mean=4, burst=4, saved=3)
