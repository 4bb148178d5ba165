"""Predictors without a cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpurt.core.attention import MASS_OF, NO_MASS
from dpurt.errors import ConfigError
from dpurt.replay import attention_recall, attention_trace
from dpurt.replay.attention_recall import PREDICTORS, recall
from dpurt.replay.attention_trace import read_attention

SLICE = Path(__file__).parents[2] / "bench" / "traces" / "attention_agent_hints_44.npz"


@pytest.fixture(scope="module")
def trace():
    return read_attention(SLICE, steps=20)


@pytest.mark.parametrize("name", PREDICTORS)
def test_twice_the_guesses_find_no_less_and_nothing_finds_more_than_all(trace, name):
    found = recall(trace, name)
    assert 0 < found.equal.known <= found.twice.known <= 1
    assert found.equal.least <= found.twice.least
    assert found.equal.most <= found.twice.most
    for share in found:
        assert 0 < share.least <= share.most <= 1
        assert 0 < share.known <= 1


@pytest.mark.parametrize("name", ["previous_step", "previous_layer"])
def test_what_a_file_with_more_of_the_masses_says_lies_within_the_bounds_of_one_with_fewer(
    trace, name, monkeypatch
):
    fine = recall(trace, name)
    last = 84  # of the mass codes kept
    codes = np.where(trace.codes > last, NO_MASS, trace.codes).astype(np.uint8)
    demand, mass = attention_trace._demand(codes, trace.columns, trace.top)
    assert (mass == 0).sum() > 1.2 * (trace.mass == 0).sum()
    monkeypatch.setattr(attention_recall, "UNSEEN", float(MASS_OF[last + 1]))
    coarse = recall(replace(trace, codes=codes, demand=demand, mass=mass), name)
    for wide, narrow in zip(coarse, fine, strict=True):
        assert wide.most - wide.least > narrow.most - narrow.least
        assert wide.least - 1e-6 <= narrow.least <= narrow.most <= wide.most + 1e-6


def test_hints_get_worse_the_further_ahead_they_are_given(trace):
    shares = [recall(trace, "hint", lookahead).equal.known for lookahead in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > recall(trace, "previous_step").equal.known > shares[-1]


def test_unknown_and_speechless_predictors_are_refused(trace):
    with pytest.raises(ConfigError, match="expected one of previous_step"):
        recall(trace, "oracle")
    with pytest.raises(ConfigError, match="nothing to say"):
        recall(trace, "hint", lookahead=3)
