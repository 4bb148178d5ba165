"""Replay of attention traces: figures against a naive simulator, the committed slice, and time."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpurt.core.device_profiles import DEVICES
from dpurt.errors import ConfigError
from dpurt.replay.attention import (
    POLICIES,
    AttentionScenario,
    _Replay,
    replay_attention,
    run_attention,
)
from dpurt.replay.attention_policies import LruPool
from dpurt.replay.attention_timing import Pace, ReadPipe
from dpurt.replay.attention_trace import AttentionTrace, read_attention

SLICE = Path(__file__).parents[2] / "bench" / "traces" / "attention_agent_hints_44.npz"
ANCHORED = ("lru", "lfu", "belady", "hint", "oracle")


@pytest.fixture(scope="module")
def trace():
    return read_attention(SLICE, steps=8)


def small(seed=0, turns=30, warm=5, layers=3, columns=12, top=3):
    """A random trace whose demand drifts; hints one and two layers ahead are half right."""
    rng = np.random.default_rng(seed)
    weight = rng.random((turns, layers, columns)).cumsum(axis=0) % 1.0
    demand = np.argsort(-weight, axis=2)[:, :, :top]
    hints = np.full((turns - warm, 2, layers, 4), -1, np.int32)
    for turn, ahead, layer in np.ndindex(turns - warm, 2, layers):
        if layer > ahead:
            guesses = [*demand[warm + turn, layer], *rng.permutation(columns)[:3]]
            ranked = list(dict.fromkeys(rng.permutation(guesses).tolist()))[:4]
            hints[turn, ahead, layer, : len(ranked)] = ranked
    codes = np.clip(8 * (1 - weight) * 10, 0, 104).astype(np.uint8)
    return AttentionTrace(
        name="small",
        model="none",
        workload="",
        block_tokens=16,
        context_tokens=(1, turns),
        warm_turns=warm,
        columns=np.full(turns, columns),
        codes=codes,
        demand=demand,
        mass=np.take_along_axis(weight, demand, 2).astype(np.float32),
        lookaheads=(1, 2),
        hints=hints,
    )


def naive_hits(trace, name, capacity, budget, strict, lookahead=1):
    """Hits of the anchored policies, each layer a list of columns, kept in order of leaving (first leaves first)."""
    order = [[] for _ in range(trace.layers)]
    flying = [[] for _ in range(trace.layers)]
    counts = [dict.fromkeys(range(99), 0) for _ in range(trace.layers)]
    stamps = [dict.fromkeys(range(99), -1.0) for _ in range(trace.layers)]
    slots = max(1, round(capacity * trace.first_columns))
    hits = 0

    def next_use(turn, layer, column):
        later = (t for t in range(turn + 1, trace.turns) if column in trace.demand[t, layer])
        return next(later, trace.turns)

    def value(turn, layer, column):
        if name == "lfu":
            return (counts[layer][column], stamps[layer][column])
        if name == "belady":
            return (-next_use(turn, layer, column),)
        return (stamps[layer][column],)

    def wanted(turn, layer):
        if name == "oracle":
            return trace.demand[turn, layer].tolist()
        ranked = trace.hint(turn, lookahead, layer) if name == "hint" else None
        return [] if ranked is None else ranked[: trace.top].tolist()

    def issue(turn, layer):
        if turn < trace.warm_turns or turn >= trace.turns:
            return
        fetch = [c for c in wanted(turn, layer) if c not in order[layer]][:budget]
        if strict:
            over = max(0, len(order[layer]) + len(fetch) - slots)
            before = order[layer][:over]
            fetch = fetch[: slots - (len(order[layer]) - len(before))]
            order[layer] = order[layer][over:]
        order[layer] += fetch
        flying[layer] = fetch
        for column in fetch:
            stamps[layer][column] = turn - 0.25

    for place in range(-lookahead, trace.turns * trace.layers):
        turn, layer = divmod(place, trace.layers)
        if place >= 0:
            demand = trace.demand[turn, layer].tolist()
            if turn >= trace.warm_turns:
                hits += sum(c in order[layer] for c in demand)
            for rank, column in enumerate(demand):
                stamps[layer][column] = turn + 0.5 - rank / 100
                counts[layer][column] += turn >= trace.warm_turns
            here = set(order[layer]) | set(demand)
            order[layer] = sorted(here, key=lambda c: (value(turn, layer, c), c))[-slots:]
        issue(*divmod(place + lookahead, trace.layers))
    return hits


@pytest.mark.parametrize("name", ANCHORED)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_a_naive_simulator(name, strict, seed):
    trace = small(seed)
    scenario = AttentionScenario(capacity=0.4, budget=2, lookahead=1 + seed % 2, strict=strict)
    tally = replay_attention(trace, POLICIES[name], scenario)
    assert tally.hits == naive_hits(trace, name, 0.4, 2, strict, scenario.lookahead)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pace", [None, Pace(step_s=0.003, layers_per_step=3, hint_to_read_s=4e-4)])
def test_every_prefetch_ends_as_exactly_one_thing(name, pace):
    tally = replay_attention(small(), POLICIES[name], AttentionScenario(capacity=0.4, lookahead=2, pace=pace))
    assert tally.outcomes() == tally.issued
    assert tally.hits + tally.misses + tally.late <= tally.demanded
    assert sum(tally.layer_hits) == tally.hits
    if pace is None:
        assert tally.late == tally.cancelled == tally.stall_s == 0


def test_the_committed_slice_gives_the_known_figures():
    """A change here is a change of definitions: compare with bench/RESULTS.md."""
    trace = read_attention(SLICE)
    known = {"lru": 69.27, "lfu": 63.89, "belady": 79.76, "hint": 82.87, "oracle": 92.99}
    for name, percent in known.items():
        tally = replay_attention(trace, POLICIES[name], AttentionScenario(capacity=0.1))
        assert 100 * tally.hits / tally.demanded == pytest.approx(percent, abs=0.05), name


def test_ours_closes_most_of_the_gap_even_within_44_steps():
    trace = read_attention(SLICE)
    lru, oracle, ours, strict = (
        replay_attention(trace, POLICIES[name], AttentionScenario(capacity=0.2, strict=strict)).hits
        for name, strict in (("lru", False), ("oracle", False), ("dpurt", False), ("dpurt", True))
    )
    assert ours - lru > 0.6 * (oracle - lru)
    assert strict - lru > 0.6 * (oracle - lru)


def test_ours_spends_its_budget_on_average_and_not_more(trace):
    tally = replay_attention(trace, POLICIES["dpurt"], AttentionScenario(capacity=0.1, budget=2))
    assert tally.issued <= 2 * trace.steps * trace.layers


@pytest.mark.parametrize("name", ["hint", "dpurt"])
@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_budget_under_one_is_kept_too(trace, name, budget):
    tally = replay_attention(trace, POLICIES[name], AttentionScenario(capacity=0.1, budget=budget))
    turns = trace.steps * trace.layers
    assert 0.4 * budget * turns <= tally.issued <= budget * turns


def test_without_hints_nothing_of_them_is_used(trace):
    scenario = AttentionScenario(capacity=0.2)
    deaf = replace(trace, hints=None, lookaheads=())
    assert (
        replay_attention(deaf, POLICIES["dpurt"], scenario).hits
        == replay_attention(trace, POLICIES["dpurt_no_hints"], scenario).hits
    )


def test_in_one_pool_of_all_layers_those_about_to_have_their_turn_are_not_older_than_those_that_had_it():
    trace = small(turns=3, warm=1)
    lru = LruPool(trace, 1)
    best = [[float(lru.values(turn, layer).max()) for layer in range(trace.layers)] for turn in (0, 1)]
    assert best[0] == best[1] == [best[0][0]] * trace.layers
    left = np.setdiff1d(trace.demand[0, 0], trace.demand[1:, 0])
    assert len(left)
    assert all(lru.values(2, 0)[left] <= best[0][0] - 1)  # unused for turns of its own layer


@pytest.mark.parametrize(
    "name", ["dpurt", "dpurt_lean", "ewma", "previous_layer", "hint", "next_block", "lru_pool"]
)
def test_nobody_but_the_clairvoyant_looks_at_the_future(name):
    """Another end of the trace leaves the hits before it as they were."""
    whole, changed = small(turns=30), small(turns=30)
    changed.demand[20:] = (changed.demand[20:] + 5) % 12
    changed.codes[20:] = 104 - changed.codes[20:]
    changed.hints[20 - changed.warm_turns :] = changed.hints[20 - changed.warm_turns :, :, :, ::-1]
    before = []
    for trace in (whole, changed):
        replay = _Replay(trace, POLICIES[name], AttentionScenario(capacity=0.4))
        hits = {}
        replay.run(lambda turn, replay=replay, hits=hits: hits.setdefault(turn, replay.tally.hits))
        before.append([hits[turn] for turn in range(1, 21)])
        assert hits[30] > hits[20]
    assert before[0] == before[1]


class TestTime:
    SLOW = DEVICES["nvme_slow"]

    def pace(self, **changed):
        return Pace(**{"step_s": 0.03, "layers_per_step": 30, "device": self.SLOW, **changed})

    def test_a_read_that_lands_after_its_need_is_late_and_no_hit(self, trace):
        quick, slow = (
            replay_attention(
                trace, POLICIES["oracle"], AttentionScenario(capacity=0.1, pace=self.pace(hint_to_read_s=s))
            )
            for s in (0.0, 2e-3)
        )
        assert quick.late < 0.05 * quick.issued
        assert slow.late > 0.15 * slow.issued
        assert slow.hits < quick.hits
        assert slow.stall_s > quick.stall_s

    def test_looking_further_ahead_makes_late_ones_timely(self, trace):
        late = [
            replay_attention(
                trace,
                POLICIES["hint"],
                AttentionScenario(
                    capacity=0.1, lookahead=ahead, pace=self.pace(step_s=0.006, hint_to_read_s=3e-4)
                ),
            ).late
            for ahead in (1, 4)
        ]
        assert late[1] < 0.2 * late[0]

    def test_without_latency_and_at_endless_bandwidth_it_is_the_strict_replay(self, trace):
        ideal = replace(self.SLOW, read_latency_s=1e-9, read_bytes_per_s=1e15)
        paced = replay_attention(
            trace,
            POLICIES["dpurt"],
            AttentionScenario(capacity=0.1, pace=self.pace(device=ideal, hint_to_read_s=0.0)),
        )
        strict = replay_attention(trace, POLICIES["dpurt"], AttentionScenario(capacity=0.1, strict=True))
        assert (paced.hits, paced.issued, paced.late) == (strict.hits, strict.issued, 0)

    def test_demand_goes_before_prefetches_that_have_not_started(self):
        device = replace(self.SLOW, read_latency_s=0.0, read_bytes_per_s=100.0)
        pipe = ReadPipe(self.pace(block_bytes=100, hint_to_read_s=0.0, device=device), seed=0)
        pipe.prefetch([1, 2, 3], 0.0)
        assert pipe.demand([9], 0.5) == pytest.approx(2.0)  # behind the first prefetch only
        assert pipe.landing(1, 0.5) == pytest.approx(1.0)
        assert pipe.landing(2, 0.5) is None
        assert pipe.withdraw(3)
        assert not pipe.withdraw(1)
        assert pipe.landing(2, 5.0) == pytest.approx(3.0)

    @pytest.mark.parametrize("wrong", [{"step_s": 0}, {"layers_per_step": 0}, {"hint_to_read_s": -1}])
    def test_senseless_paces_are_refused(self, wrong):
        with pytest.raises(ValueError, match="must be > 0"):
            Pace(**wrong)


class TestRun:
    def test_objects_have_the_promised_fields_and_say_model_and_context(self):
        rows = run_attention(SLICE, ["lru", "oracle", "hint"], 0.1, 4, 1, steps=10)
        assert [row["policy"] for row in rows] == ["lru", "oracle", "hint"]
        promised = {
            "policy", "hit_rate", "at_match", "timely", "late", "early", "useless", "accuracy", "coverage",
            "bytes_read_per_useful_byte", "stall_s", "ttft_p50_s", "ttft_p99_s", "regret_to_oracle", "wall_s",
            "refs_per_s", "conditions", "strict", "closed_percent", "hit_rate_by_layer",
        }  # fmt: skip
        for row in rows:
            assert promised <= set(row)
            assert set(row["hit_rate"]) == {"blocks", "tokens", "bytes", "mass"}
            assert "SmolLM2-135M" in row["conditions"]["model"]
            assert row["conditions"]["context_tokens"] == [2660, 2669]
            json.dumps(row, allow_nan=False)
        assert [rows[i]["closed_percent"] for i in (0, 1)] == [0, 100]
        assert 0 < rows[2]["closed_percent"] < 100

    def test_equal_seeds_give_equal_figures_byte_for_byte(self):
        def figures(seed):
            rows = run_attention(SLICE, ["dpurt", "lru"], 0.1, 4, 2, seed, pace=Pace(), steps=2)
            for row in rows:
                del row["wall_s"], row["refs_per_s"]
            return json.dumps(rows)

        assert figures(3) == figures(3)
        assert figures(3) != figures(4)

    @pytest.mark.parametrize(
        ("policies", "capacity", "lookahead", "where"),
        [
            (["nonsense"], 0.1, 1, "policy"),
            (["lru"], 0.0, 1, "scenario"),
            (["lru"], 0.1, 0, "scenario"),
            (["lru"], 0.1, 31, "lookahead"),
        ],
    )
    def test_what_makes_no_sense_is_refused_by_name(self, policies, capacity, lookahead, where):
        with pytest.raises(ConfigError) as caught:
            run_attention(SLICE, policies, capacity, 4, lookahead)
        assert caught.value.where == where
