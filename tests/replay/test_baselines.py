"""Demand-only baselines on slices of real traces against a simulator written here from the definitions alone.

The same definitions on the whole traces give the published tables; `dpurt bench hit_rates` checks those.
"""

import pytest

from dpurt.replay.curve import SHARES, Point, hit_rate_curve, knee
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.hits import capacity_blocks, ideal_hit_rate, untimed_hit_rate

from .conftest import TRACES

SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
WITHIN = 0.005  # half a point
SLICES = {
    "conversation": ("mooncake_conversation_1600.jsonl.gz", 180),
    "agents": ("weka_merged_512_300.jsonl.gz", 30),
    "ragpulse": ("ragpulse_600.jsonl.gz", 250),
}


@pytest.fixture(scope="module", params=SLICES)
def requests(request):
    name, limit = SLICES[request.param]
    return read_trace(TRACES / name, Reading(limit=limit)).requests


def naive(requests, policy, capacity):
    """Leading cached run of each request over all references; the victim is found by looking at every block."""
    flat = [block for request in requests for block in request.blocks]
    later: dict[int, list[float]] = {block: [float("inf")] for block in flat}
    for at in range(len(flat) - 1, -1, -1):
        later[flat[at]].append(at)
    came, used, count = {}, {}, {}
    value = {
        "lru": used.__getitem__,
        "fifo": came.__getitem__,
        "lfu": lambda block: (count[block], used[block]),
        "belady": lambda block: -later[block][-1],
    }[policy]

    def leave(victim):
        del came[victim], used[victim], count[victim]

    hits = at = 0
    for request in requests:
        hits += next((i for i, b in enumerate(request.blocks) if b not in came), len(request.blocks))
        for block in request.blocks[::-1] if policy == "lfu" else request.blocks:
            at += 1
            later[block].pop()
            if policy == "belady" and block not in came:
                if later[block] == [float("inf")]:
                    continue
                if len(came) == capacity:
                    victim = min(came, key=value)
                    if later[victim][-1] <= later[block][-1]:
                        continue
                    leave(victim)
            came.setdefault(block, at)
            used[block] = at
            count[block] = count.get(block, 0) + 1
        for victim in sorted(came, key=value)[: max(0, len(came) - capacity)]:
            leave(victim)
    return hits / len(flat)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady"])
def test_baselines_are_those_of_an_independent_simulator_at_every_size(requests, policy):
    for share in SIZES:
        capacity = capacity_blocks(requests, share)
        expected = naive(requests, policy, capacity)
        assert untimed_hit_rate(requests, policy, capacity) == pytest.approx(expected, abs=WITHIN), share


def test_ideal_is_what_an_endless_cache_hits(requests):
    everything = capacity_blocks(requests, 1.0)
    ideal = ideal_hit_rate(requests)
    assert untimed_hit_rate(requests, "lru", everything) == ideal
    assert untimed_hit_rate(requests, "belady", everything) == pytest.approx(ideal, abs=1e-3)


def test_the_curve_has_the_rate_of_each_size(requests):
    curve = hit_rate_curve(requests, "lru")
    assert [point.share for point in curve] == list(SHARES)
    assert all(point.hit_rate == untimed_hit_rate(requests, "lru", point.blocks) for point in curve)


def test_the_knee_is_where_the_curve_stops_paying():
    rates = (0.0, 0.1, 0.5, 0.8, 0.85, 0.9)
    shares = (0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
    curve = [Point(share=s, blocks=1, hit_rate=r) for s, r in zip(shares, rates, strict=True)]
    assert knee(curve).share == 0.1
