"""`dpurt replay` on an attention trace: recognised by content, a table for people, the stable JSON for programs."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from dpurt import cli

SLICE = resources.files("dpurt.bench") / "traces" / "attention_agent_hints_44.npz"


def test_an_attention_trace_is_recognised_and_its_conditions_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["replay", str(SLICE), "--staging", "0.2"]) == 0
    said = capsys.readouterr().out
    assert "SmolLM2" in said
    assert "context 2660 to 2703 tokens" in said
    assert [line.split()[0] for line in said.splitlines()[3:]] == [
        "lru", "ewma", "dpurt_no_hints", "hint", "dpurt", "oracle",
    ]  # fmt: skip


def test_json_has_one_object_a_policy_and_ours_lies_between_lru_and_the_oracle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "replay",
        str(SLICE),
        "--policy",
        "lru,dpurt,oracle",
        "--staging",
        "0.1,0.2",
        "--lookahead",
        "1",
        "--json",
        "-",
    ]
    assert cli.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["conditions"]["capacity"]) for row in rows] == [
        (policy, capacity) for capacity in (0.1, 0.2) for policy in ("lru", "dpurt", "oracle")
    ]
    for at in (0, 3):
        lru, ours, oracle = (row["hit_rate"]["blocks"] for row in rows[at : at + 3])
        assert lru < ours < oracle


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "magic"], "unknown magic; for attention traces: lru"),
        (["--lookahead", "31"], "at most"),
        (["--html", "x.html"], "is for request traces"),
        (["--resume", "x"], "is for request traces"),
        (["--device", "tlc-pcie5"], "--device: is for request traces"),
        (["--bandwidth", "14G"], "--bandwidth: is for request traces"),
        (["--model", "llama-3-70b"], "--model: is for request traces"),
        (["--warmup", "0.1"], "--warmup: is for request traces"),
        (["--block-tokens", "64"], "--block-tokens: is for request traces"),
    ],
)
def test_what_makes_no_sense_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(SLICE), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK")
    assert cli.main(["replay", str(tmp_path / "x.npz")]) == 2
