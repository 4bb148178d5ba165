"""The SmolLM2 example with its real weights, as a user runs it; see `make test-smollm2`. About three minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpurt.demo.smollm2 import weights_path
from dpurt.engines.smollm2.decode import InMemory, SparseDecode, SparseSettings
from dpurt.engines.smollm2.gguf import GgufFile
from dpurt.engines.smollm2.model import Model
from dpurt.engines.smollm2.tokenizer import Tokenizer

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def weights() -> tuple[Model, Tokenizer]:
    file = GgufFile(weights_path())
    return Model.from_gguf(file), Tokenizer.of(file)


async def test_the_model_knows_what_it_should(weights: tuple[Model, Tokenizer]) -> None:
    model, tokenizer = weights
    tokens = tokenizer.chat("What is the capital of France? Answer in one short sentence.")
    settings = SparseSettings(block_tokens=4, sink_tokens=4, window_tokens=16, top=100, temperature=0.0)
    sequence = SparseDecode(model, tokens, model.prefill(tokens[:-1]), settings, InMemory(4), 8)
    said = [await sequence.step() for _ in range(7)]
    assert tokenizer.decode(said) == "The capital of France is Paris."


def test_tokens_come_back_as_text(weights: tuple[Model, Tokenizer]) -> None:
    _, tokenizer = weights
    text = Path(__file__).read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hints_lift_hits_replay_tells_them_and_no_token_changes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "dpurt", "smollm2", "--steps", "60", "--json", str(out)]
    subprocess.run(command, check=True, timeout=900)
    result = json.loads(out.read_text())
    assert result["identical"]
    assert result["conditions"]["context_tokens"][1] == 4095
    runs = {run["mode"]: run for run in result["runs"]}
    hits = [runs[mode]["hits"] for mode in ("no prefetch", "history only", "hints, 2 ahead")]
    assert hits == sorted(hits)
    assert runs["hints, 2 ahead"]["stalled_turns"] < 0.6 * runs["no prefetch"]["stalled_turns"]
    for run in list(runs.values())[1:]:
        assert np.isclose(run["hits"], run["predicted"]["hits"], atol=0.02), run["mode"]
        assert np.isclose(run["late"], run["predicted"]["late"], atol=0.02), run["mode"]
