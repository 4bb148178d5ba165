"""The live experiment, small: a node process on a throttled device, hosts over ZeroMQ, and its recording fed back."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpurt.bench.live import NODE_BLOCK_TOKENS, QUICK, Setup, _topology, drive, play, predict
from dpurt.demo.nodes import NodeProcess
from dpurt.replay.decisions import verify
from dpurt.replay.formats import read_trace
from dpurt.replay.lint import lint
from dpurt.replay.recording import read_recording
from dpurt.replay.trace import Request

TURNS = 3
CHAINS = [tuple(range(100 * k, 100 * k + 12)) for k in range(4)]


def requests() -> list[Request]:
    """Four conversations of twelve blocks, in turn, in staging for half of them."""
    return [
        Request(
            timestamp_s=6.0 * turn + 1.5 * k,
            input_tokens=len(chain) * NODE_BLOCK_TOKENS,
            output_tokens=20,
            blocks=chain,
            stop="tool_use",
        )
        for turn in range(TURNS)
        for k, chain in enumerate(CHAINS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "dpurt"])
def test_a_live_nodes_decisions_are_those_of_its_replay(policy: str, tmp_path: Path) -> None:
    setup = Setup(speed=12.0, staging_share=0.5)
    live = play(policy, requests(), setup, tmp_path / policy)
    assert live.verdict.difference == ""
    assert live.verdict.decisions["victim"] > 10
    assert (live.verdict.decisions["fetch"] > 10) is (policy == "dpurt")
    assert live.heard.wrong_bytes == 0
    assert live.heard.checked_bytes == live.heard.loaded * setup.block_bytes
    recorded = live.recorded
    assert recorded.references == TURNS * 4 * 12
    assert recorded.staging + recorded.in_flight + recorded.nvme == live.heard.loaded
    assert recorded.recomputed == live.heard.computed >= 4 * 12, (
        "more where a stalled machine let two turns overlap"
    )
    assert live.recording.lost == 0
    assert lint(live.recording.path) == []
    predicted = predict(live, policy, setup)
    assert set(predicted) >= {"hits", "in flight at need"}
    assert 0 < predicted["hits"] <= 100 * (1 - 1 / TURNS), "the first turn is computed"


@pytest.mark.slow
def test_a_node_killed_in_the_middle_leaves_a_recording_that_is_good_to_its_last_line(tmp_path: Path) -> None:
    setup = Setup(speed=12.0, staging_share=0.5)
    topology, record = tmp_path / "live.toml", tmp_path / "killed"
    topology.write_text(_topology("dpurt", requests(), setup, tmp_path))
    options = ["--record", str(record), "--pace", "12"]
    with NodeProcess(topology, tmp_path / "run", tmp_path / "node.log", options) as node:
        drive(topology, node.endpoint, requests()[:6], setup)
        node.kill()
    recording = read_recording(record)
    assert not recording.is_whole
    assert recording.lost == 0
    assert lint(record) == []
    verdict = verify(recording)
    assert verdict.difference == ""
    assert sum(verdict.decisions.values()) > 0
    assert any("killed" in note for note in read_trace(record).model)


def test_the_experiments_requests_begin_at_once_and_end_with_the_span() -> None:
    found = QUICK.requests()
    assert found[0].timestamp_s == 0
    assert found[-1].timestamp_s < QUICK.span_s
    assert len(QUICK.requests()) < len(Setup().requests())
