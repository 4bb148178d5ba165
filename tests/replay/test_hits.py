"""The untimed prefix-hit statistic against a naive model and published figures of the same slice."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dpurt.replay.hits import capacity_blocks, untimed_hit_rate
from dpurt.replay.trace import Request


def naive_lru(requests, capacity, fifo=False):
    cache, hits, references = [], 0, 0
    for request in requests:
        references += len(request.blocks)
        for block in request.blocks:
            if block not in cache:
                break
            hits += 1
        for block in request.blocks:
            if block not in cache:
                cache.append(block)
            elif not fifo:
                cache.remove(block)
                cache.append(block)
        cache = cache[-capacity:]
    return hits / references if references else 0.0


TRACES = st.lists(
    st.lists(st.integers(0, 7), max_size=5, unique=True).map(lambda b: Request(0.0, 1, 1, tuple(b))),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(requests=TRACES, capacity=st.integers(1, 6))
def test_lru_and_fifo_agree_with_a_naive_model(requests, capacity):
    assert untimed_hit_rate(requests, "lru", capacity) == naive_lru(requests, capacity)
    assert untimed_hit_rate(requests, "fifo", capacity) == naive_lru(requests, capacity, fifo=True)


def test_belady_reaches_the_ideal_rate_when_everything_that_returns_fits(conversation):
    seen, ideal = set(), 0
    for request in conversation:
        ideal += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    references = sum(len(r.blocks) for r in conversation)
    assert untimed_hit_rate(conversation, "belady", len(seen)) == pytest.approx(ideal / references, abs=0.001)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "s3fifo"])
def test_no_policy_beats_belady(conversation, policy):
    capacity = capacity_blocks(conversation, 0.05)
    best = untimed_hit_rate(conversation, "belady", capacity)
    assert 0 < untimed_hit_rate(conversation, policy, capacity) < best
