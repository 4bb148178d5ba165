"""Predictors without a cache."""

from pathlib import Path

import pytest

from dpurt.errors import ConfigError
from dpurt.replay.attention_recall import PREDICTORS, recall
from dpurt.replay.attention_trace import read_attention

SLICE = Path(__file__).parents[2] / "bench" / "traces" / "attention_agent_hints_44.npz"


@pytest.fixture(scope="module")
def trace():
    return read_attention(SLICE, steps=20)


@pytest.mark.parametrize("name", PREDICTORS)
def test_twice_the_guesses_find_no_less_and_nothing_finds_more_than_all(trace, name):
    found = recall(trace, name)
    assert 0 < found.equal <= found.twice <= 1
    assert 0 < found.mass <= 1


def test_hints_get_worse_the_further_ahead_they_are_given(trace):
    shares = [recall(trace, "hint", lookahead).equal for lookahead in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > recall(trace, "previous_step").equal > shares[-1]


def test_unknown_and_speechless_predictors_are_refused(trace):
    with pytest.raises(ConfigError, match="expected one of previous_step"):
        recall(trace, "oracle")
    with pytest.raises(ConfigError, match="nothing to say"):
        recall(trace, "hint", lookahead=3)
