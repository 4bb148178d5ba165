"""Attention traces: what is read, and how a wrong file is refused."""

import json

import numpy as np
import pytest

from dpurt.errors import ConfigError
from dpurt.replay.attention_trace import MASS_OF, NOT_HINTED, read_attention

META = {
    "model": "tiny", "name": "t", "block_tokens": 16, "n_prefill": 320, "steps": 3, "layers": 2,
    "spec_lookahead_layers": [1, 2], "spec_hot_window_tokens": 64, "spec_sink_tokens": 32,
}  # fmt: skip
BLOCKS = 21  # 323 tokens
FIRST_COLD, COLD = 2, 14  # (321 - 64) // 16 - 2


def arrays(**changed):
    rng = np.random.default_rng(3)
    hints = rng.integers(FIRST_COLD, FIRST_COLD + COLD, (3, 2, 2, 5)).astype(np.uint16)
    hints[:, 1, 0] = NOT_HINTED
    made = {
        "mass_q": rng.integers(0, 106, (3, 2, BLOCKS)).astype(np.uint8),
        "prefill_tail_mass_q": rng.integers(0, 106, (4, 2, BLOCKS)).astype(np.uint8),
        "spec_topk": hints,
        "meta": np.array(json.dumps(META)),
    }
    made.update(changed)
    return {name: array for name, array in made.items() if array is not None}


@pytest.fixture
def write(tmp_path):
    def to_file(**changed):
        path = tmp_path / "trace.npz"
        np.savez_compressed(path, **arrays(**changed))
        return path

    return to_file


def meta(**changed):
    return np.array(json.dumps({**META, **changed}))


def test_demand_is_the_columns_with_most_mass_most_first(write):
    trace = read_attention(write(), top=5)
    codes = np.concatenate([arrays()["prefill_tail_mass_q"], arrays()["mass_q"]])
    assert (trace.warm_turns, trace.steps, trace.turns, trace.layers, trace.top) == (4, 3, 7, 2, 5)
    assert trace.context_tokens == (321, 323)
    for turn in range(7):
        for layer in range(2):
            cold = codes[turn, layer, FIRST_COLD : FIRST_COLD + trace.columns[turn]]
            chosen = cold[trace.demand[turn, layer]]
            assert sorted(cold)[:5] == chosen.tolist()
            assert (trace.mass[turn, layer] == MASS_OF[chosen]).all()


def test_blocks_turn_cold_as_the_context_grows(write):
    trace = read_attention(write(meta=meta(n_prefill=318)), top=5)
    assert trace.columns.tolist() == [13, 13, 13, 13, 13, 14, 14]


def test_hints_are_columns_and_none_where_there_is_none(write):
    trace = read_attention(write(), top=5)
    assert trace.hint(4, 1, 1).tolist() == (arrays()["spec_topk"][0, 0, 1] - FIRST_COLD).tolist()
    assert trace.hint(4, 2, 0) is None
    assert trace.hint(4, 3, 1) is None
    assert trace.hint(3, 1, 1) is None  # a warm turn


def test_ties_are_broken_alike_every_time_and_mostly_alike_from_turn_to_turn(write):
    path = write(mass_q=np.full((3, 2, BLOCKS), 9, np.uint8), prefill_tail_mass_q=None)
    trace = read_attention(path, top=5)
    assert (read_attention(path, top=5).demand == trace.demand).all()
    kept = [len(set(trace.demand[0, layer]) & set(trace.demand[1, layer])) for layer in range(2)]
    assert sum(kept) >= 6


def test_fewer_steps_are_the_first_ones(write):
    short, whole = read_attention(write(), steps=1, top=5), read_attention(write(), top=5)
    assert (short.demand == whole.demand[:5]).all()
    assert short.context_tokens == (321, 321)


@pytest.mark.parametrize(
    ("changed", "array", "problem"),
    [
        ({"mass_q": None}, "mass_q", "expected this array"),
        ({"meta": None}, "meta", "expected this array"),
        (
            {"mass_q": np.zeros((3, 2, BLOCKS), np.int16)},
            "mass_q",
            r"expected uint8 \[3, 2, any\], got int16",
        ),
        ({"mass_q": np.zeros((3, 3, BLOCKS), np.uint8)}, "mass_q", r"got uint8 \[3, 3, 21\]"),
        ({"mass_q": np.zeros((3, 2, 20), np.uint8)}, "mass_q", "at least 21 blocks, got 20"),
        ({"mass_q": np.full((3, 2, BLOCKS), 106, np.uint8)}, "mass_q", "codes up to 105, got 106"),
        ({"prefill_tail_mass_q": np.zeros((4, 2, 20), np.uint8)}, "prefill_tail_mass_q", "expected uint8"),
        ({"prefill_tail_mass_q": np.zeros((0, 2, 21), np.uint8)}, "prefill_tail_mass_q", "expected uint8"),
        ({"spec_topk": np.full((3, 2, 2, 5), 1, np.uint16)}, "spec_topk", "expected cold blocks"),
        ({"spec_topk": np.full((3, 2, 2, 5), 17, np.uint16)}, "spec_topk", "at step 0"),
        ({"spec_topk": np.zeros((3, 1, 2, 5), np.uint16)}, "spec_topk", "expected uint16"),
        ({"meta": np.array("{")}, "meta", "Expecting property name"),
        ({"meta": np.array([1.5])}, "meta", "one string of JSON"),
        ({"meta": np.array("[]")}, "meta", "Expected `object`"),
        ({"meta": meta(steps=0)}, "meta", r">= 1 - at `\$.steps`"),
        ({"meta": meta(model=7)}, "meta", r"`\$.model`"),
        ({"meta": meta(spec_lookahead_layers=[])}, "meta", "spec_lookahead_layers"),
        ({"meta": meta(spec_hot_window_tokens=300)}, "mass_q", "at least 5 cold blocks"),
        ({"mass_q": np.array([[[None]]], object)}, "mass_q", "without objects"),
    ],
)
def test_a_wrong_array_is_refused_by_file_and_name(write, changed, array, problem):
    path = write(**changed)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_attention(path, top=5)
    assert caught.value.where == f"{path}: {array}"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x93NUMPY"])
def test_what_is_no_npz_is_refused(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"readable \.npz"):
        read_attention(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_attention(tmp_path / "none.npz")


def test_a_torn_array_is_refused(write):
    path = write()
    torn = bytearray(path.read_bytes())
    torn[200:400] = bytes(200)
    path.write_bytes(torn)
    with pytest.raises(ConfigError, match="expected a readable"):
        read_attention(path, top=5)
