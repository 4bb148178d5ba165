"""A recording that knows its times is replayed at its own pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpurt.core.attention import NO_MASS
from dpurt.demo.smollm2_node import Found, ReadTotals
from dpurt.demo.smollm2_recording import read_times, times_of
from dpurt.engines.smollm2.decode import TurnLog
from dpurt.errors import ConfigError
from dpurt.replay.attention import POLICIES, AttentionScenario, Tally, replay_attention
from dpurt.replay.attention_timing import recorded_pace
from dpurt.replay.attention_trace import read_attention

STEPS, LAYERS, TOP, BLOCKS = 40, 3, 4, 60
LAYER_US, READ_US = 1000, 400


def recording(path: Path, **changes: Any) -> Path:
    """Layers want what they wanted before, but for one block that is new each time and was ranked two layers ahead."""
    rng = np.random.default_rng(4)
    masses = np.full((STEPS, LAYERS, BLOCKS), NO_MASS, np.uint8)
    hints = np.full((STEPS, 1, LAYERS, 8), 65535, np.uint16)
    for step in range(STEPS):
        for layer in range(LAYERS):
            wanted = [0, 1, 2, 3 + int(rng.integers(0, 40))]
            masses[step, layer, wanted] = [8, 16, 24, 32]
            hints[step, 0, layer, :TOP] = wanted
    meta = {
        "model": "none", "name": "r", "block_tokens": 8, "n_prefill": 8 * 50, "steps": STEPS, "layers": LAYERS,
        "spec_lookahead_layers": [2], "spec_hot_window_tokens": 8, "spec_sink_tokens": 0, "demanded": TOP,
        "pace": {"read_latency_us": 100, "read_bytes_per_s": 1e9, "block_bytes": 1000},
    }  # fmt: skip
    arrays: dict[str, Any] = {
        "mass_q": masses, "spec_topk": hints, "layer_us": np.full((STEPS, LAYERS), LAYER_US, np.uint32),
        "read_us": np.tile(np.array([READ_US, 0, 0], np.float32), (STEPS, 1)), **changes,
    }  # fmt: skip
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)
    return path


def replayed(path: Path) -> Tally:
    trace = read_attention(path)
    scenario = AttentionScenario(capacity=0.2, budget=2, lookahead=2, pace=recorded_pace(trace))
    return replay_attention(trace, POLICIES["dpurt"], scenario)


def test_reads_shorter_than_the_look_ahead_are_never_late_and_longer_ones_are(tmp_path: Path) -> None:
    quick = replayed(recording(tmp_path / "quick.npz"))
    reads = np.tile(np.array([2.5 * LAYER_US, 0, 0], np.float32), (STEPS, 1))
    slow = replayed(recording(tmp_path / "slow.npz", read_us=reads))
    assert quick.late == 0
    assert slow.late > 20
    assert slow.hits < quick.hits


def test_lateness_is_where_the_recording_was_slow(tmp_path: Path) -> None:
    reads = np.tile(np.array([READ_US, 0, 0], np.float32), (STEPS, 1))
    reads[20:] = 2.5 * LAYER_US, 0, 0
    half = replayed(recording(tmp_path / "half.npz", read_us=reads))
    slow = replayed(
        recording(tmp_path / "slow.npz", read_us=np.full((STEPS, 3), [2.5 * LAYER_US, 0, 0], np.float32))
    )
    assert 0.3 * slow.late < half.late < 0.7 * slow.late


def test_layers_that_take_longer_leave_reads_more_time(tmp_path: Path) -> None:
    reads = np.full((STEPS, 3), [2.5 * LAYER_US, 0, 0], np.float32)
    layers = np.full((STEPS, LAYERS), 2 * LAYER_US, np.uint32)
    assert replayed(recording(tmp_path / "r.npz", read_us=reads, layer_us=layers)).late == 0


def test_a_prefetch_decided_long_after_its_hint_has_that_much_less_time(tmp_path: Path) -> None:
    soon = replayed(
        recording(tmp_path / "soon.npz", read_us=np.full((STEPS, 3), [1.5 * LAYER_US, 0, 0], np.float32))
    )
    lag = np.full((STEPS, 3), [1.5 * LAYER_US, 0, 0.7 * LAYER_US], np.float32)
    assert soon.late == 0
    assert replayed(recording(tmp_path / "lag.npz", read_us=lag)).late > 20


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("layer_us", np.zeros((STEPS, LAYERS + 1), np.uint32)),
        ("read_us", np.full((STEPS, 3), np.nan, np.float32)),
        ("read_us", np.full((STEPS, 3), -1, np.float32)),
        ("read_us", np.zeros((STEPS, 3), np.float64)),
    ],
)
def test_times_that_are_no_times_are_refused(tmp_path: Path, name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        read_attention(recording(tmp_path / "r.npz", **{name: bad}))


def test_a_runs_times_are_told_apart_into_layers_stalls_and_reads() -> None:
    log = TurnLog(began=[0.0, 1.0, 2.0, 5.0], waited=[0.25, 0.25, 2.25, 0.25])
    found = [Found(4, 4), Found(4, 4), Found(4, 3), Found(4, 4)]
    times = times_of(log, found)
    assert times.stall_s == [0, 0, 2.0, 0]
    assert times.layer_s == [1.0, 1.0, 1.0, 1.0]
    totals = [
        ReadTotals(0, 0.0, 0.0, 0, 0.0),
        ReadTotals(2, 0.4, 0.1, 3, 0.3),
        ReadTotals(2, 0.4, 0.1, 3, 0.3),
    ]
    assert read_times(totals).tolist() == pytest.approx(np.array([[2e5, 1e5, 1e5], [2e5, 1e5, 1e5]]))
