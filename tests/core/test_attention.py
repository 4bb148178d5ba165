"""What a decode will want: learned online from history and hints."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.attention import (
    RANKS,
    AttentionHistory,
    AttentionModel,
    AttentionSequence,
    AttentionSettings,
)

COLUMNS = 24


def columns(*wanted):
    return np.array(wanted, np.intp)


def decode(sequence, turns, demand, hint=None, group=0, first=0):
    """Turns of one group: `demand(turn)` and `hint(turn)` give columns."""
    for turn in range(first, first + turns):
        if hint is not None:
            sequence.hint(group, columns(*hint(turn)))
        sequence.now(group)
        sequence.demanded(group, columns(*demand(turn)))


def test_what_is_wanted_each_turn_is_expected_and_the_rest_is_not():
    sequence = AttentionSequence(AttentionModel(1), COLUMNS)
    decode(sequence, 60, lambda turn: (3, 7))
    now = sequence.now(0)
    assert now[[3, 7]].min() > 0.9
    assert np.delete(now, [3, 7]).max() < 0.1


def test_keep_is_high_for_what_returns_within_the_horizon_only():
    sequence = AttentionSequence(AttentionModel(1, AttentionSettings(horizon=2)), COLUMNS)
    decode(sequence, 199, lambda turn: (turn % 2, 10 + turn % 8))
    keep = sequence.demanded(0, columns(1, 17))
    assert keep[0] > 0.9
    assert keep[1] > 0.8
    assert keep[15] < 0.3


def test_a_hint_that_is_always_right_is_believed_from_any_column():
    def moving(turn):
        return ((turn * 7) % COLUMNS, (turn * 11 + 5) % COLUMNS)

    sequence = AttentionSequence(AttentionModel(1), COLUMNS)
    decode(sequence, 150, moving, hint=moving)
    sequence.hint(0, columns(13, 2))
    now = sequence.now(0)
    assert now[[13, 2]].min() > 0.8
    assert np.delete(now, [13, 2]).max() < 0.2


def test_a_hint_that_is_always_wrong_is_not():
    sequence = AttentionSequence(AttentionModel(1), COLUMNS)
    decode(sequence, 150, lambda turn: (3,), hint=lambda turn: (10 + turn % 8,))
    sequence.hint(0, columns(12))
    now = sequence.now(0)
    assert now[12] < 0.1 < 0.9 < now[3]


def test_groups_learn_apart_what_their_hints_are_worth():
    sequence = AttentionSequence(AttentionModel(2), COLUMNS)
    for turn in range(200):
        truth = (turn * 7) % COLUMNS
        for group, wanted in ((0, truth), (1, (truth + 9) % COLUMNS)):
            sequence.hint(group, columns(truth))
            sequence.now(group)
            sequence.demanded(group, columns(wanted))
    sequence.hint(0, columns(5))
    sequence.hint(1, columns(5))
    assert sequence.now(0)[5] > 0.8
    assert sequence.now(1)[5] < 0.4


def test_a_new_sequence_profits_from_what_the_model_learned_on_others():
    def moving(turn):
        return ((turn * 7) % COLUMNS,)

    model = AttentionModel(1)
    decode(AttentionSequence(model, COLUMNS), 150, moving, hint=moving)
    new = AttentionSequence(model, COLUMNS)
    new.hint(0, columns(5))
    now = new.now(0)
    assert now[5] > 0.7
    assert np.delete(now, 5).max() < 0.3


def test_only_the_first_ranks_of_a_hint_are_told_apart():
    history = AttentionHistory(1, 200)
    history.hint(0, np.arange(100))
    assert np.count_nonzero(history.rank[0]) == RANKS


def test_asking_changes_no_answer():
    sequence = AttentionSequence(AttentionModel(1), COLUMNS)
    decode(sequence, 20, lambda turn: (turn % 5,))
    assert (sequence.now(0) == sequence.now(0)).all()


def test_a_sequence_without_blocks_has_nothing_to_say():
    sequence = AttentionSequence(AttentionModel(1), 0)
    assert len(sequence.now(0)) == 0
    assert len(sequence.demanded(0, columns())) == 0


def test_demand_of_columns_that_came_after_the_question_is_taken():
    sequence = AttentionSequence(AttentionModel(1), 4)
    sequence.now(0)
    sequence.extend(6)
    assert len(sequence.demanded(0, columns(1, 5))) == 6


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sets(st.integers(0, 39), max_size=6), st.booleans()), max_size=25
    )
)
def test_a_history_that_grew_equals_one_that_had_the_room_from_the_start(turns):
    grown, roomy = AttentionHistory(3, 1), AttentionHistory(3, 40)
    for group, wanted, is_hint in turns:
        chosen = columns(*sorted(wanted))
        grown.extend(1 + max(wanted, default=0))
        for history in (grown, roomy):
            if is_hint:
                history.hint(group, chosen)
            history.demanded(group, chosen, None)
    grown.extend(40)
    for group in range(3):
        assert (grown.features(group, True) == roomy.features(group, True)).all()


def test_probabilities_stay_finite_whatever_comes():
    rng = np.random.default_rng(1)
    sequence = AttentionSequence(AttentionModel(2, AttentionSettings(rate=2.0)), COLUMNS)
    for turn in range(300):
        group = turn % 2
        sequence.hint(group, rng.permutation(COLUMNS)[:5])
        now = sequence.now(group)
        wanted = rng.permutation(COLUMNS)[: rng.integers(0, 6)]
        keep = sequence.demanded(group, wanted, np.zeros(len(wanted), np.float32))
        for answer in (now, keep):
            assert ((answer > 0) & (answer < 1)).all()


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"horizon": 0}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="rate must be > 0"):
        AttentionSettings(**wrong)


def test_a_model_needs_a_group():
    with pytest.raises(ValueError, match="groups"):
        AttentionModel(0)
