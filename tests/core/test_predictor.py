"""Predictors: what they say, by when, and what they forget."""

import pytest

from dpurt.core.events import (
    Arrived,
    Consumed,
    DecodeStep,
    Finished,
    Owner,
    Paused,
    Ranked,
    Resumed,
    SequenceGone,
    Stored,
)
from dpurt.core.predictor import (
    AttentionEwma,
    AttentionLearned,
    AttentionPrevious,
    Hints,
    SlidingWindow,
)
from dpurt.core.predictors import make_predictor

OWNER = Owner("space", "tenant")


def say(predictor, event, now):
    predictor.observe(event, now)
    return predictor.predict(now)


def blocks_of(predictions):
    return [p.block for p in predictions]


class TestSlidingWindow:
    def test_first_window_comes_on_arrival_timed_from_the_expected_start(self):
        window = SlidingWindow(lookahead_blocks=3, block_s=0.5)
        said = say(window, Arrived(1, OWNER, (10, 11, 12, 13), expected_start=7.0), 5.0)
        assert [(p.block, p.need_by) for p in said] == [(10, 7.0), (11, 7.5), (12, 8.0)]
        assert {(p.sequence, p.owner, p.parts_mask) for p in said} == {(1, OWNER, None)}

    def test_an_expected_start_in_the_past_is_now(self):
        said = say(SlidingWindow(1), Arrived(1, OWNER, (10,), expected_start=1.0), 5.0)
        assert said[0].need_by == 5.0

    def test_window_moves_with_the_cursor_and_names_each_block_once(self):
        window = SlidingWindow(lookahead_blocks=2)
        seen = blocks_of(say(window, Arrived(1, OWNER, tuple(range(6))), 0.0))
        for i in range(6):
            seen += blocks_of(say(window, Consumed(1, i, 1), float(i)))
        assert seen == [0, 1, 2, 3, 4, 5]

    def test_need_follows_the_measured_rate(self):
        window = SlidingWindow(lookahead_blocks=4, block_s=0.01)
        window.observe(Arrived(1, OWNER, tuple(range(100))), 0.0)
        for i in range(60):
            window.predict(0.0)
            window.observe(Consumed(1, i, 1), i * 1.0)
        (last,) = window.predict(0.0)
        assert last.need_by - 59.0 == pytest.approx(3.0, rel=0.05)

    def test_a_cursor_that_moves_back_is_passed_over(self):
        window = SlidingWindow(lookahead_blocks=1)
        window.observe(Arrived(1, OWNER, (1, 2, 3)), 0.0)
        window.observe(Consumed(1, 0, 2), 0.1)
        window.predict(0.1)
        assert say(window, Consumed(1, 0, 1), 0.2) == []

    def test_resume_says_the_window_again(self):
        window = SlidingWindow(lookahead_blocks=2)
        window.observe(Arrived(1, OWNER, (1, 2, 3)), 0.0)
        window.observe(Paused(1, 5.0, "tool"), 0.1)
        window.predict(0.1)
        assert blocks_of(say(window, Resumed(1), 5.0)) == [1, 2]

    @pytest.mark.parametrize("end", [Finished(1), SequenceGone(1)])
    def test_nothing_is_said_for_a_sequence_that_ended(self, end):
        window = SlidingWindow(lookahead_blocks=1)
        window.observe(Arrived(1, OWNER, (1, 2, 3)), 0.0)
        window.predict(0.0)
        window.observe(end, 1.0)
        assert say(window, Consumed(1, 0, 1), 2.0) == []

    @pytest.mark.parametrize(("lookahead", "block_s"), [(0, 0.1), (1, 0.0)])
    def test_senseless_parameters_are_refused(self, lookahead, block_s):
        with pytest.raises(ValueError, match="lookahead_blocks"):
            SlidingWindow(lookahead, block_s)


class TestAttention:
    def test_previous_step_predicts_its_own_set_for_its_own_group(self):
        previous = AttentionPrevious()
        previous.observe(Arrived(1, OWNER, ()), 0.0)
        said = say(previous, DecodeStep(1, 0, 3, touched=(7, 9)), 1.0)
        assert [(p.block, p.parts_mask, p.owner) for p in said] == [(7, 8, OWNER), (9, 8, OWNER)]

    def test_need_is_one_measured_step_ahead(self):
        previous = AttentionPrevious()
        for step in range(50):
            said = say(previous, DecodeStep(1, step, 0, touched=(7,)), step * 0.5)
        assert said[0].need_by == pytest.approx(49 * 0.5 + 0.5, rel=0.01)

    def test_ewma_says_the_heaviest_that_this_step_did_not_touch(self):
        ewma = AttentionEwma(alpha=0.2, budget=1, floor=0.01)
        for step in range(5):
            ewma.observe(DecodeStep(1, step, 0, touched=(1, 2)), float(step))
        ewma.observe(DecodeStep(1, 5, 0, touched=(1, 2, 3)), 5.0)
        ewma.predict(5.0)
        said = say(ewma, DecodeStep(1, 6, 0, touched=(1,)), 6.0)
        assert blocks_of(said) == [2]

    def test_ewma_forgets_what_is_not_touched_any_more(self):
        ewma = AttentionEwma(alpha=0.5, budget=4, floor=0.05)
        ewma.observe(DecodeStep(1, 0, 0, touched=(1,)), 0.0)
        ewma.predict(0.0)
        assert blocks_of(say(ewma, DecodeStep(1, 1, 0, touched=(2,)), 1.0)) == [1]
        assert blocks_of(say(ewma, DecodeStep(1, 9, 0, touched=(3,)), 9.0)) == []

    def test_ewma_weighs_by_mass_where_the_event_has_it(self):
        ewma = AttentionEwma(alpha=0.5, budget=1, floor=0.01)
        ewma.observe(DecodeStep(1, 0, 0, touched=(1, 2), masses=(0.1, 0.9)), 0.0)
        ewma.predict(0.0)
        assert blocks_of(say(ewma, DecodeStep(1, 1, 0), 1.0)) == [2]

    def test_ewma_table_is_bounded_and_keeps_the_heavy(self):
        ewma = AttentionEwma(alpha=0.5, budget=1, floor=0.01, max_blocks=8)
        for step in range(200):
            ewma.observe(DecodeStep(1, step, 0, touched=(0, 1000 + step)), float(step))
        assert len(ewma._mass[1][0]) <= 8
        ewma.predict(0.0)
        assert blocks_of(say(ewma, DecodeStep(1, 200, 0), 200.0)) == [0]

    def test_groups_and_sequences_do_not_mix(self):
        ewma = AttentionEwma(floor=0.01)
        ewma.observe(DecodeStep(1, 0, 0, touched=(1,)), 0.0)
        ewma.predict(0.0)
        assert say(ewma, DecodeStep(1, 1, 1), 1.0) == []
        assert say(ewma, DecodeStep(2, 1, 0), 1.0) == []

    def test_end_of_a_sequence_frees_its_state(self):
        ewma = AttentionEwma()
        ewma.observe(Arrived(1, OWNER, ()), 0.0)
        ewma.observe(DecodeStep(1, 0, 0, touched=(1,)), 0.0)
        ewma.observe(Finished(1), 1.0)
        assert (ewma._mass, ewma._owners, ewma._clocks) == ({}, {}, {})


class TestAttentionLearned:
    def taught(self, turns=80, **parameters):
        """Groups 3 and 5 run in turn; group 5 wants what it was hinted, and block 900 always."""
        predictor = AttentionLearned(**parameters)
        predictor.observe(Arrived(1, OWNER, tuple(range(100, 140))), 0.0)
        for step in range(turns):
            wanted = 100 + step * 7 % 40
            now = step * 0.02
            predictor.observe(
                DecodeStep(1, step, 3, (120,), ranked=(Ranked(5, (wanted, 139), now + 0.01),)), now
            )
            predictor.predict(now)
            predictor.observe(DecodeStep(1, step, 5, (wanted, 900), masses=(0.2, 0.1)), now + 0.01)
            predictor.predict(now)
        return predictor

    def test_a_hinted_group_is_told_what_hint_and_history_make_likely(self):
        predictor = self.taught()
        said = say(predictor, DecodeStep(1, 80, 3, (120,), ranked=(Ranked(5, (111, 139), 9.5),)), 9.0)
        assert set(blocks_of(said)[:2]) == {111, 900}
        assert {(p.parts_mask, p.need_by, p.sequence, p.owner) for p in said} == {(1 << 5, 9.5, 1, OWNER)}
        assert [p.probability for p in said] == sorted((p.probability for p in said), reverse=True)
        assert min(p.probability for p in said[:2]) > 0.8

    def test_without_hints_the_group_some_groups_later_is_told_from_history(self):
        predictor = AttentionLearned(ahead=1)
        for step in range(40):
            for group in (0, 1):
                now = step * 0.1 + group * 0.05
                said = say(predictor, DecodeStep(1, step, group, (7 + group, step)), now)
        (likely,) = (p for p in said if p.probability > 0.9)
        assert (likely.block, likely.parts_mask) == (7, 1)
        assert likely.need_by - now == pytest.approx(0.05, rel=0.05)

    def test_no_more_than_reach_and_nothing_under_the_floor_is_said(self):
        predictor = self.taught(reach=2, floor=0.3)
        said = say(predictor, DecodeStep(1, 80, 3, ranked=(Ranked(5, tuple(range(100, 140)), 9.5),)), 9.0)
        assert len(said) <= 2
        assert all(p.probability >= 0.3 for p in said)

    def test_blocks_beyond_the_table_are_passed_over(self):
        predictor = AttentionLearned(reach=1, max_columns=3)
        predictor.observe(Arrived(1, OWNER, tuple(range(50))), 0.0)  # too long to be told by position
        for step in range(30):
            said = say(predictor, DecodeStep(1, step, 0, (step, step + 1, 2)), float(step))
        assert blocks_of(said) == [2]

    def test_a_block_named_twice_or_a_group_out_of_range_is_taken(self):
        predictor = AttentionLearned()
        predictor.observe(DecodeStep(1, 0, 0, (7, 7), masses=(0.5, 0.1)), 0.0)
        predictor.observe(DecodeStep(1, 0, 128, (7,)), 0.0)
        predictor.observe(DecodeStep(1, 1, 0, (), ranked=(Ranked(200, (7,), 1.0), Ranked(1, (), 1.0))), 0.0)
        assert all(p.parts_mask < 1 << 128 for p in predictor.predict(0.0))

    def test_stored_blocks_take_their_place_in_the_chain(self):
        predictor = AttentionLearned()
        predictor.observe(Arrived(1, OWNER, (5, 6)), 0.0)
        predictor.observe(DecodeStep(1, 0, 0, (6,)), 0.0)
        predictor.observe(Stored(1, (8,)), 0.0)
        assert predictor._decodes[1].blocks == [5, 6, 8]

    @pytest.mark.parametrize("end", [Finished(1), SequenceGone(1)])
    def test_end_of_a_sequence_frees_its_state(self, end):
        predictor = self.taught(turns=2)
        predictor.observe(end, 1.0)
        assert (predictor._owners, predictor._chains, predictor._decodes) == ({}, {}, {})

    def test_it_has_a_name_a_node_can_ask_for(self):
        assert isinstance(make_predictor("attention", 64), AttentionLearned)

    def test_senseless_parameters_are_refused(self):
        with pytest.raises(ValueError, match="reach"):
            AttentionLearned(reach=0)


def test_hints_keep_order_deadline_and_group():
    hints = Hints()
    hints.observe(Arrived(1, OWNER, ()), 0.0)
    said = say(hints, DecodeStep(1, 0, 0, ranked=(Ranked(2, (5, 6), 9.0),)), 1.0)
    assert [(p.block, p.parts_mask, p.need_by) for p in said] == [(5, 4, 9.0), (6, 4, 9.0)]
    assert said[0].probability > said[1].probability
