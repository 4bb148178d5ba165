"""Confidence by time slices."""

import random

import pytest

from dpurt.replay.slices import SLICES, TimeSlices, difference_interval, ratio_interval


def test_requests_fall_into_slices_by_time_after_the_warm_up():
    slices = TimeSlices([0.0, 10.0, 100.0, 105.0, 110.0, 300.0], warmup_share=0.34)
    found = [slices.of(n) for n in range(6)]
    assert found[:2] == [None, None]
    assert [next(i for i, s in enumerate(slices.slices) if s is f) for f in found[2:]] == [
        0,
        0,
        1,
        SLICES - 1,
    ]


def test_requests_at_one_time_are_one_slice():
    slices = TimeSlices([5.0, 5.0], 0.0)
    assert slices.of(0) is slices.of(1) is slices.slices[0]
    assert slices.confidence() == {"slices": 0, "hit_rate_blocks": None, "at_match": None}
    assert TimeSlices([], 0.0).confidence()["slices"] == 0


def test_equal_slices_leave_no_doubt_and_unequal_ones_some():
    assert ratio_interval([(1, 2), (2, 4), (3, 6)]) == [0.5, 0.5]
    assert ratio_interval([(1, 2)]) is None
    low, high = ratio_interval([(1, 4), (3, 4)])
    assert (low, high) == (0.0, 1.0)


def test_intervals_cover_the_true_rate_about_as_often_as_they_say():
    rng = random.Random(4)
    covered = 0
    for _ in range(400):
        parts = [
            (sum(rng.random() < 0.3 for _ in range(n)), n)
            for n in (rng.randint(20, 60) for _ in range(SLICES))
        ]
        low, high = ratio_interval(parts)
        covered += low <= 0.3 <= high
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_pairs_of_slices_tell_a_small_steady_difference_that_each_rate_hides():
    theirs = [(10 * n, 100) for n in range(1, 9)]
    ours = [(hits + 3, references) for hits, references in theirs]
    assert difference_interval(ours, theirs) == [pytest.approx(0.03), pytest.approx(0.03)]
    low, high = ratio_interval(theirs)
    assert high - low > 0.3
    assert difference_interval(theirs, ours)[1] < 0
    assert difference_interval(ours, theirs[:-1]) is None
    assert difference_interval(ours[:1], theirs[:1]) is None
