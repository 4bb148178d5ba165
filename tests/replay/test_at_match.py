"""Hits at match: exact counts on tiny traces, and what our policy closes on slices of real ones."""

from pathlib import Path

import pytest

from dpurt.priors import shipped_returns
from dpurt.replay.at_match import POLICIES, at_match, closed_percent
from dpurt.replay.formats import read_trace
from dpurt.replay.hits import capacity_blocks
from dpurt.replay.trace import Request

TRACES = Path(__file__).parents[2] / "bench" / "traces"
BLOCKS_PER_S = 14e9 / (512 * 160 * 1024)


def request(at, *blocks):
    return Request(float(at), 512 * len(blocks), 1, blocks)


ROUND = [request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3), request(30, 4, 5, 6)]


def test_any_present_block_of_the_reusable_run_is_a_hit():
    found = at_match([request(0, 1, 2, 3), request(9, 4), request(20, 1, 2, 3, 5)], "lru", 3, 1.0)
    assert (found.reusable, found.hits, found.demand_reads) == (3, 2, 1)


def test_the_oracle_swaps_in_what_comes_next_as_fast_as_the_device_allows():
    assert at_match(ROUND, "lru", 3, 1.0).hits == 0
    assert at_match(ROUND, "belady", 3, 1.0).hits == 3
    assert at_match(ROUND, "oracle", 3, 2.0).hits == 6
    assert at_match(ROUND, "oracle", 3, 0.1).hits == 3


def test_no_bandwidth_left_is_no_prefetch():
    found = at_match(ROUND, "oracle", 3, 1.9)
    assert (found.prefetched, found.hits) == (0, at_match(ROUND, "belady", 3, 0.9).hits)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="unknown policy 'clock'; known: lru, belady"):
        at_match(ROUND, "clock", 3, 1.0)


@pytest.mark.parametrize(
    ("name", "requests", "least_fresh", "least"),
    [
        ("mooncake_conversation_1600.jsonl.gz", 1000, 8.0, 8.0),
        ("weka_merged_512_300.jsonl.gz", 250, 20.0, 25.0),
    ],
)
def test_ours_closes_a_good_part_of_the_way_to_the_oracle(name, requests, least_fresh, least):
    trace = read_trace(TRACES / name).requests[:requests]
    capacity = capacity_blocks(trace, 0.05)
    found = {p: at_match(trace, p, capacity, BLOCKS_PER_S, shipped_returns()) for p in POLICIES}
    assert found["lru"].rate < found["dpurt"].rate < found["oracle"].rate
    assert found["belady"].rate <= found["oracle"].rate
    closed = {p: closed_percent(found[p], found["lru"], found["oracle"]) for p in found}
    assert closed["dpurt_fresh"] >= least_fresh, closed
    assert closed["dpurt"] >= least, closed


def test_equal_runs_give_equal_results():
    trace = read_trace(TRACES / "weka_merged_512_300.jsonl.gz").requests[:60]
    first, second = (at_match(trace, "dpurt", 500, BLOCKS_PER_S, shipped_returns()) for _ in range(2))
    assert first == second
