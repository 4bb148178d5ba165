"""Staging of a sparse decode: the live core does what replay does, to the last block, and keeps its books."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.attention import MASS_OF, NO_MASS, AttentionModel, mass_codes
from dpurt.core.attention_pool import pooled_budget
from dpurt.core.decode_staging import DecodeStaging, Progress
from dpurt.replay.attention import POLICIES, AttentionScenario, replay_attention
from dpurt.replay.attention_trace import AttentionTrace, read_attention

LAYERS, BLOCKS, STEPS, TOP, WINDOW = 4, 40, 40, 5, 32


def trace_at(path: Path, ahead: int, seed: int) -> AttentionTrace:
    """Sets that drift, hints that are half right."""
    rng = np.random.default_rng(seed)
    heat = rng.random((LAYERS, BLOCKS))
    masses = np.full((STEPS, LAYERS, BLOCKS + 12), NO_MASS, np.uint8)
    hints = np.full((STEPS, 1, LAYERS, 8), 65535, np.uint16)
    for step in range(STEPS):
        heat += 0.2 * rng.standard_normal(heat.shape)
        for layer in range(LAYERS):
            best = np.argsort(-heat[layer])[:TOP]
            masses[step, layer, best] = np.sort(rng.integers(0, 60, TOP))
            hints[step, 0, layer] = np.argsort(-(heat[layer] + 0.3 * rng.random(BLOCKS)))[:8]
    meta = {
        "model": "none", "name": "t", "block_tokens": 8, "n_prefill": 8 * BLOCKS + WINDOW, "steps": STEPS, "layers": LAYERS,
        "spec_lookahead_layers": [ahead], "spec_hot_window_tokens": WINDOW, "spec_sink_tokens": 0, "demanded": TOP,
    }  # fmt: skip
    np.savez_compressed(path, mass_q=masses, spec_topk=hints, meta=np.array(json.dumps(meta)))
    return read_attention(path)


def landed(slot: int) -> Progress:
    return "landed"


def drive(trace: AttentionTrace, capacity: int, ahead: int, *, hinted: bool) -> DecodeStaging:
    """As the decode agent does, all reads done at once."""
    staging = DecodeStaging(AttentionModel(LAYERS), capacity, int(trace.columns[-1]), pooled_budget(2), ahead)
    end = trace.turns * LAYERS
    for place in range(-ahead, end):
        turn, layer = divmod(place, LAYERS)
        if place >= 0:
            staging.extend(int(trace.columns[turn]))
            columns = trace.demand[turn, layer]
            codes = bytes(trace.codes[turn, layer, columns].tolist())
            staging.turn(layer, columns.tolist(), codes, landed)
            staging.settle()
        later, group = divmod(place + ahead, LAYERS)
        if place + ahead < end:
            staging.extend(int(trace.columns[later]))
            ranked = trace.hint(later, ahead, group) if hinted else None
            staging.plan(group, [] if ranked is None else ranked.tolist())
        staging.pool.check_integrity()
    return staging


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize(("ahead", "capacity"), [(1, 0.2), (2, 0.4), (3, 0.2)])
def test_the_live_core_and_replay_agree_to_the_last_block(
    tmp_path: Path, ahead: int, capacity: float, hinted: bool
) -> None:
    trace = trace_at(tmp_path / "t.npz", ahead, seed=ahead)
    scenario = AttentionScenario(capacity=capacity, budget=2, lookahead=ahead, strict=True)
    told = replay_attention(trace, POLICIES["dpurt" if hinted else "dpurt_no_hints"], scenario)
    slots = round(capacity * trace.first_columns) * LAYERS
    found = drive(trace, slots, ahead, hinted=hinted).stats()
    assert found == {name: getattr(told, name) for name in found}
    assert found["hits"] > 0.3 * found["demanded"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sets(st.integers(0, 11), max_size=6),
            st.lists(st.integers(0, 11), unique=True, max_size=5),
            st.sampled_from(["landed", "flying", "waiting", "absent"]),
        ),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=60)
def test_every_prefetch_has_one_outcome_and_the_capacity_is_kept(
    turns: list[tuple[int, set[int], list[int], Progress]],
) -> None:
    staging = DecodeStaging(AttentionModel(3), 6, 12, pooled_budget(1.5), 1)
    staging.extend(12)
    held: set[int] = set()
    for group, touched, ranked, progress in turns:
        turn = staging.turn(group, sorted(touched), b"", lambda slot, p=progress: p)  # type: ignore[misc]
        assert set(turn.read) | set(turn.hits) | set(turn.hasten) <= set(turn.touched)
        assert not set(turn.withdraw) & set(turn.touched)
        held = (held | set(turn.touched)) - set(turn.withdraw) - set(staging.settle())
        plan = staging.plan((group + 1) % 3, ranked)
        assert not set(plan.fetch) & held
        held = (held - set(plan.evicted)) | set(plan.fetch)
        assert len(held) == len(staging.pool) <= 6
        staging.pool.check_integrity()
    c = staging.stats()
    ended = c["timely"] + c["late"] + c["later"] + c["early"] + c["useless"] + c["cancelled"] + c["open"]
    assert c["issued"] == ended


def test_mass_codes_come_back_near_and_are_never_none() -> None:
    shares = np.array([1.0, 0.5, 0.01, 1e-9], np.float32)
    codes = mass_codes(shares)
    assert (codes < NO_MASS).all()
    assert MASS_OF[codes[:3]] == pytest.approx(shares[:3], rel=0.05)


def test_what_lies_beyond_the_width_is_not_known() -> None:
    staging = DecodeStaging(AttentionModel(2), 4, 8, pooled_budget(1), 1)
    staging.extend(100)
    assert staging.columns == 8
