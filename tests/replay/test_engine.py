"""Replays: exact times on tiny traces, sums and orders on a real one."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dpurt.core.device_model import DeviceProfile
from dpurt.replay.engine import SOURCES, Scenario, replay
from dpurt.replay.policies import POLICIES
from dpurt.replay.report import with_regret
from dpurt.replay.trace import Request

DEVICE = DeviceProfile(
    name="t",
    read_latency_s=0.0,
    write_latency_s=0.0,
    read_bytes_per_s=1.0,
    write_bytes_per_s=1.0,
    queue_depth=8,
)
# one second to read a block, half a second to load it, ten to compute it
SMALL = Scenario(
    staging_share=1.0,
    device=DEVICE,
    block_tokens=10,
    block_bytes=1,
    hosts=1,
    prefill_tokens_per_s=1.0,
    link_bytes_per_s=2.0,
    decode_step_s=0.25,
    lookahead_blocks=4,
)


def request(at, *blocks, output=1):
    return Request(float(at), 10 * len(blocks), output, blocks)


def run(policy, *requests, **changes):
    return replay(requests, POLICIES[policy], dataclasses.replace(SMALL, **changes))


def test_without_a_cache_every_block_is_computed_each_time():
    result = run("none", request(0, 1, 2), request(100, 1, 2))
    assert result.sources["recomputed"] == 4
    assert result.ttft_p50_s == 20.25


def test_what_was_computed_is_a_hit_while_it_stays():
    result = run("lru", request(0, 1, 2), request(100, 1, 2))
    assert result.sources == dict.fromkeys(SOURCES, 0) | {"recomputed": 2, "staging": 2}
    assert (result.at_match, result.leading_at_match) == (1.0, 0.5)
    assert (result.stall_s, result.bytes_read) == (0.0, 0)


def test_at_match_counts_any_present_block_of_the_reusable_run_and_nothing_else():
    """Of 1, 2, 3 the head has left staging when they come again; 4 was never stored."""
    requests = (request(0, 1, 2, 3), request(100, 9), request(200, 1, 2, 3, 4))
    result = run("fifo", *requests, staging_share=0.6)
    assert (result.at_match, result.leading_at_match) == (2 / 3, 0.0)


def test_the_warm_up_runs_but_is_not_counted():
    requests = (request(0, 1, 2), request(100, 1, 2))
    result = run("lru", *requests, warmup_share=0.5)
    assert result.sources == dict.fromkeys(SOURCES, 0) | {"staging": 2}
    assert (result.hit_rate["blocks"], result.ttft_p99_s) == (1.0, 1.25)
    assert result.refs_per_s * result.wall_s == pytest.approx(4)


def test_what_left_staging_is_read_on_demand_and_the_host_stalls():
    requests = (request(0, 1), request(100, 2), request(200, 1))
    result = run("lru", *requests, staging_share=0.5)
    assert result.sources["nvme"] == 1
    assert (result.stall_s, result.bytes_read, result.bytes_read_per_useful_byte) == (1.0, 1, 1.0)


def test_read_ahead_hides_the_device_behind_the_load():
    """Four blocks, read in 1 s each, loaded in 2 s each: only the first is waited for."""
    chain, other = (1, 2, 3, 4), (5, 6, 7, 8)
    requests = (request(0, *chain), request(100, *other), request(200, *chain))
    changes = {"staging_share": 0.5, "link_bytes_per_s": 0.5, "prefetch_share": 1.0}
    on_demand = run("lru", *requests, **changes)
    ahead = run("sliding_window", *requests, **changes)
    assert (on_demand.stall_s, ahead.stall_s) == (4.0, 1.0)
    assert (ahead.timely + ahead.late, ahead.useless, ahead.bytes_read) == (4, 0, 4)


def test_a_queued_request_is_staged_before_its_turn():
    requests = (request(0, 1, 2), request(100, 3, 4), request(200, 5), request(201, 1, 2))
    result = run("sliding_window", *requests, staging_share=0.6, prefetch_share=1.0)
    assert (result.timely, result.sources["prefetched"], result.sources["staging"]) == (1, 1, 1)
    assert result.stall_s == 0.0


def test_one_read_serves_two_hosts():
    requests = (request(0, 1), request(100, 2), request(200, 1), request(200, 1))
    result = run("lru", *requests, staging_share=0.5, hosts=2)
    assert (result.bytes_read, result.sources["nvme"], result.sources["in_flight"]) == (1, 1, 1)
    assert result.bytes_read_per_useful_byte == 1.0


def test_a_prefetch_somebody_waits_for_overtakes_the_others():
    """Read 10 ms each, in the order 1, 5, 2, 3, 4: the fifth is waited for before the second is."""
    fast = dataclasses.replace(DEVICE, read_bytes_per_s=100.0, queue_depth=1)
    chain, lone, other = (1, 2, 3, 4), (5,), (6, 7, 8, 9, 10)
    requests = (request(0, *chain), request(100, *lone), request(200, *other))
    again = (request(300, *chain), request(300, *lone))
    changes = {
        "link_bytes_per_s": 1e9,
        "staging_share": 0.5,
        "prefetch_share": 1.0,
        "prefetch_queue_depth": 8,
    }
    result = run("sliding_window", *requests, *again, device=fast, hosts=2, **changes)
    assert result.stall_s == pytest.approx(0.05 + 0.02, abs=1e-6)


def test_requests_queue_for_hosts_in_order():
    result = run("none", request(0, 1), request(0, 2), request(0, 3))
    assert (result.ttft_p50_s, result.ttft_p99_s) == (20.25, 30.25)


def test_an_empty_request_is_served():
    result = run("dpurt", request(0), request(1, 1), request(2))
    assert result.sources["recomputed"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_sources_add_up_and_equal_seeds_give_equal_results(conversation, policy):
    first, second = (replay(conversation[:150], POLICIES[policy], Scenario(seed=7)) for _ in range(2))
    timeless = {"wall_s": 0.0, "refs_per_s": 0.0}
    assert dataclasses.replace(first, **timeless) == dataclasses.replace(second, **timeless)
    assert sum(first.sources.values()) == sum(len(r.blocks) for r in conversation[:150])
    ended = first.timely + first.late + first.early + first.useless + first.cancelled + first.failed
    assert first.planned == ended + sum(first.refused.values()) + first.open


def test_the_oracle_is_above_everyone_and_regret_is_its_lead(conversation):
    names = ("lru", "belady", "dpurt", "oracle")
    results = with_regret([replay(conversation[:700], POLICIES[name], Scenario()) for name in names])
    hits = {r.policy: r.hit_rate["blocks"] for r in results}
    assert hits["lru"] < hits["dpurt"] < hits["oracle"]
    assert hits["belady"] <= hits["oracle"]
    assert all(r.regret_to_oracle["hit_rate_blocks"] == hits["oracle"] - hits[r.policy] for r in results)
    assert results[-1].regret_to_oracle == {"hit_rate_blocks": 0.0, "stall_s": 0.0}


def test_demand_only_policies_also_tell_the_untimed_statistic(conversation):
    rates = {
        name: replay(conversation[:100], POLICIES[name], Scenario()) for name in ("lru", "dpurt", "none")
    }
    assert 0 < rates["lru"].untimed_prefix_hit_rate <= rates["lru"].untimed_ideal_hit_rate
    assert rates["dpurt"].untimed_prefix_hit_rate is None
    assert rates["none"].untimed_prefix_hit_rate is None


TRACES = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    trace=TRACES,
    policy=st.sampled_from(sorted(POLICIES)),
    share=st.floats(0.05, 1.0),
    hosts=st.integers(1, 3),
)
def test_any_small_trace_ends_with_every_reference_served_once(trace, policy, share, hosts):
    now, requests = 0.0, []
    for gap, family, length in trace:
        now += gap
        requests.append(request(now, *(family * 10 + i for i in range(length))))
    result = run(policy, *requests, staging_share=share, hosts=hosts)
    assert sum(result.sources.values()) == sum(len(r.blocks) for r in requests)
    assert result.at_match <= 1
    assert result.ttft_p50_s >= 0


@pytest.mark.parametrize(
    "wrong", [{"staging_share": 0}, {"hosts": 0}, {"link_bytes_per_s": 0.0}, {"warmup_share": 1.0}]
)
def test_senseless_scenarios_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Scenario(**wrong)
