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
    AGE_EDGES,
    AttentionEwma,
    AttentionPrevious,
    CrossRequest,
    Hints,
    ReturnHazard,
    SlidingWindow,
)

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


def test_hints_keep_order_deadline_and_group():
    hints = Hints()
    hints.observe(Arrived(1, OWNER, ()), 0.0)
    said = say(hints, DecodeStep(1, 0, 0, ranked=(Ranked(2, (5, 6), 9.0),)), 1.0)
    assert [(p.block, p.parts_mask, p.need_by) for p in said] == [(5, 4, 9.0), (6, 4, 9.0)]
    assert said[0].probability > said[1].probability


class TestReturnHazard:
    def test_prior_reproduces_the_measured_share_of_follow_ups(self):
        hazard = ReturnHazard()
        survive = 1.0
        for age_bin in range(AGE_EDGES.index(600.0)):
            width = AGE_EDGES[age_bin + 1] - AGE_EDGES[age_bin]
            survive *= 1 - hazard.probability(1, age_bin, width)
        assert 1 - survive == pytest.approx(0.31, abs=0.01)

    def test_deeper_conversations_return_more_often(self):
        hazard = ReturnHazard()
        chances = [hazard.probability(depth, 4, 100.0) for depth in (1, 2, 3, 9)]
        assert chances == sorted(chances)

    def test_experience_overrules_the_prior(self):
        hazard = ReturnHazard(prior_chains=20)
        before = hazard.probability(1, 0, 10.0)
        for _ in range(200):
            hazard.exposed(1, 0, 5.0)
            hazard.returned(1, 0)
        assert before < 0.01
        assert hazard.probability(1, 0, 10.0) > 0.5


class TestCrossRequest:
    def agent_like(self, **parameters):
        hazard = ReturnHazard(prior_chains=1)
        for _ in range(500):
            hazard.exposed(1, 1, 5.0)
            hazard.returned(1, 1)
        return CrossRequest(hazard=hazard, floor=0.3, **parameters)

    def finish(self, predictor, sequence, blocks, now):
        predictor.observe(Arrived(sequence, OWNER, ()), now)
        predictor.observe(Stored(sequence, blocks), now)
        predictor.observe(Finished(sequence), now)

    def test_nothing_in_the_dead_time_and_the_head_when_a_return_is_likely(self):
        predictor = self.agent_like(head_blocks=2)
        self.finish(predictor, 1, (1, 2, 3), 100.0)
        assert predictor.next_wakeup() == 100.0
        assert predictor.predict(100.0) == []
        assert predictor.next_wakeup() == 110.0
        said = predictor.predict(110.0)
        assert [(p.block, p.sequence, p.owner) for p in said] == [(1, None, OWNER), (2, None, OWNER)]
        assert all(110.0 < p.need_by <= 120.0 for p in said)

    def test_arrival_and_resume_fire_at_once(self):
        predictor = CrossRequest(head_blocks=2)
        assert blocks_of(say(predictor, Arrived(1, OWNER, (1, 2, 3)), 0.0)) == [1, 2]
        assert blocks_of(say(predictor, Resumed(1), 1.0)) == [1, 2]

    def test_pause_with_a_length_is_predicted_for_its_end(self):
        predictor = CrossRequest()
        say(predictor, Arrived(1, OWNER, (1,)), 0.0)
        assert [p.need_by for p in say(predictor, Paused(1, 30.0), 5.0)] == [35.0]
        assert say(predictor, Paused(1, None), 6.0) == []

    def test_a_continued_chain_is_deeper_and_its_timers_are_dead(self):
        predictor = self.agent_like()
        self.finish(predictor, 1, (1, 2, 3), 0.0)
        say(predictor, Arrived(2, OWNER, (1, 2)), 5.0)  # the partial last block changed
        assert predictor._active[2].depth == 2
        assert predictor.next_wakeup() is None
        assert predictor.predict(1000.0) == []

    def test_a_request_sharing_only_the_root_starts_a_chain_of_its_own(self):
        predictor = self.agent_like()
        self.finish(predictor, 1, (1, 2), 0.0)
        say(predictor, Arrived(2, OWNER, (1,)), 5.0)
        assert predictor._active[2].depth == 1
        assert predictor.next_wakeup() is not None

    def test_a_cancelled_sequence_is_not_expected_back(self):
        predictor = self.agent_like()
        say(predictor, Arrived(1, OWNER, (1, 2)), 0.0)
        predictor.observe(SequenceGone(1), 1.0)
        assert predictor.next_wakeup() is None

    def test_chains_and_timers_are_bounded(self):
        predictor = CrossRequest(max_chains=10)
        for i in range(1000):
            self.finish(predictor, i, (2 * i, 2 * i + 1), float(i))
            predictor.predict(float(i))
        predictor.predict(5000.0)
        assert len(predictor._idle) == 0
        assert len(predictor._serial_of_tail) == 0
        assert predictor.next_wakeup() is None
        assert predictor._timers == []
