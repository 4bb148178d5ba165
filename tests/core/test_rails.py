"""The striping and health policy: nothing lost, nothing to a broken lane, less to a slow one, and always an end."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.rails import (
    LAST_PAUSE_S,
    MIN_STRIPE_BYTES,
    PATIENCE_S,
    Lanes,
    RailFacts,
    Stripes,
    order,
    stripe_bytes,
)

MIB = 1 << 20
SPEEDS = st.lists(st.sampled_from([1, 3, 10, 30, 100, 1000]), min_size=1, max_size=4)


def lanes_of(*guesses: float) -> Lanes:
    lanes = Lanes([f"lane{i}" for i in range(len(guesses))], guesses)
    for lane in range(len(guesses)):
        lanes.up(lane)
    return lanes


class Link:
    """Simulates one transfer: lanes of given speeds, two stripes each under way at a time, and breaks at given times."""

    def __init__(self, lanes: Lanes, speeds: list[float], breaks: dict[int, float] | None = None) -> None:
        self.lanes = lanes
        self.speeds = speeds
        self.breaks = breaks or {}
        self.now = 0.0
        self.carried: dict[int, list[int]] = {lane: [] for lane in range(len(speeds))}

    def run(self, total: int) -> Stripes:
        used = self.lanes.choose(total)
        step = stripe_bytes(total, len(used))
        sizes = [min(step, total - at) for at in range(0, total, step)]
        stripes = Stripes(self.lanes, used, sizes)
        numbers = itertools.count()
        events = [(at, next(numbers), lane, -1) for lane, at in self.breaks.items() if lane in used]
        free_at = dict.fromkeys(used, self.now)
        flying = dict.fromkeys(used, 0)
        heapq.heapify(events)
        while not stripes.is_over and not stripes.is_stuck:
            for lane in used:
                while flying[lane] < 2 and (stripe := stripes.take(lane, self.now)) is not None:
                    assert self.lanes.is_up(lane)
                    start = max(self.now, free_at[lane])
                    free_at[lane] = start + sizes[stripe] / self.speeds[lane]
                    flying[lane] += 1
                    heapq.heappush(events, (free_at[lane], next(numbers), lane, stripe))
            assert events, "something waits, a lane is up, and nobody takes it"
            self.now, _, lane, stripe = heapq.heappop(events)
            if not self.lanes.is_up(lane):
                continue
            if stripe < 0:
                self.lanes.broke(lane, "by the test", self.now)
                stripes.lost(lane)
                continue
            flying[lane] -= 1
            self.carried[lane].append(stripe)
            stripes.done(lane, stripe, self.now)
        return stripes


@given(speeds=SPEEDS, guesses=SPEEDS, size=st.integers(1, 64 * MIB), data=st.data())
def test_every_stripe_arrives_once_or_every_lane_is_down(speeds, guesses, size, data):
    count = min(len(speeds), len(guesses))
    broken = data.draw(st.dictionaries(st.integers(0, count - 1), st.floats(0, 2), max_size=count))
    lanes = lanes_of(*(g * MIB for g in guesses[:count]))
    link = Link(lanes, [s * MIB for s in speeds[:count]], broken)
    stripes = link.run(size)
    arrived = [stripe for carried in link.carried.values() for stripe in carried]
    assert len(arrived) == len(set(arrived))
    if stripes.is_over:
        assert sorted(arrived) == list(range(len(stripes.sizes)))
        assert sum(stripes.carried_by.values()) == size
    else:
        assert stripes.is_stuck
        assert not any(lanes.is_up(lane) for lane in stripes.used)
    stripes.abandon()
    assert all(state.flying == 0 for state in lanes.states)


@given(slow=st.sampled_from([1, 5, 20]), wrong_guess=st.booleans())
def test_a_slow_lane_is_used_less_in_proportion_and_does_not_hold_up_the_end(slow: int, wrong_guess: bool):
    fast = 100
    guess = fast if wrong_guess else slow
    lanes = lanes_of(fast * MIB, guess * MIB)
    link = Link(lanes, [fast * MIB, slow * MIB])
    for _ in range(8):
        link.run(32 * MIB)  # to learn
    before, began = [state.carried for state in lanes.states], link.now
    link.run(64 * MIB)
    carried = [state.carried - old for state, old in zip(lanes.states, before, strict=True)]
    assert carried[1] <= 1.5 * carried[0] * slow / fast + 2 * MIB
    assert link.now - began <= 1.25 * 64 / (fast + slow) + 2 / fast


def test_two_equal_lanes_share_evenly():
    lanes = lanes_of(MIB, MIB)
    Link(lanes, [50.0 * MIB, 50.0 * MIB]).run(64 * MIB)
    assert lanes.states[0].carried == lanes.states[1].carried == 32 * MIB


def test_a_small_transfer_takes_the_one_lane_that_ends_it_first():
    lanes = lanes_of(10 * MIB, 50 * MIB)
    assert lanes.choose(4096) == [1]
    lanes.began(1, 16 * MIB, 0.0)
    assert lanes.choose(4096) == [0]


def test_a_lane_too_slow_for_even_one_stripe_is_left_out():
    lanes = lanes_of(100 * MIB, 1 * MIB)
    assert lanes.choose(8 * MIB) == [0]
    assert sorted(lanes.choose(256 * MIB)) == [0, 1]


def test_a_lane_that_was_slow_is_tried_again_after_a_while():
    lanes = lanes_of(100 * MIB, 100 * MIB)
    lanes.began(1, 8 * MIB, 0.0)
    lanes.ended(1, 8 * MIB, 100.0)
    assert lanes.choose(4 * MIB) == [0]
    for second in range(101, 200):
        lanes.fade(float(second))
    assert sorted(lanes.choose(4 * MIB)) == [0, 1]


def test_nothing_goes_to_a_lane_that_is_down():
    lanes = lanes_of(MIB, MIB)
    lanes.broke(0, "retries_exceeded", 1.0)
    assert lanes.choose(64 * MIB) == [1]
    assert lanes.choose(1) == [1]
    lanes.broke(1, "port down", 1.0)
    assert lanes.choose(1) == []
    assert not lanes.any_up()


def test_a_lane_that_breaks_again_comes_back_ever_later_until_something_ends_well():
    lanes = lanes_of(MIB)
    pauses = []
    for _ in range(12):
        pauses.append(lanes.broke(0, "no answer", 0.0))
        lanes.up(0)
    assert pauses[0] == 0.0, "the first time at once"
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_PAUSE_S
    lanes.began(0, 10, 0.0)
    lanes.ended(0, 10, 0.1)
    assert lanes.broke(0, "no answer", 0.0) == 0.0


def test_only_a_lane_with_bytes_under_way_stalls_and_progress_counts():
    lanes = lanes_of(100 * MIB, 100 * MIB)
    lanes.began(0, 2 * MIB, 0.0)
    assert lanes.stalled(PATIENCE_S) == []
    assert lanes.stalled(PATIENCE_S + 1) == [0]
    lanes.ended(0, MIB, PATIENCE_S)
    assert lanes.stalled(PATIENCE_S + 1) == []


def test_what_a_broken_lane_had_is_done_first_by_another():
    lanes = lanes_of(MIB, MIB)
    stripes = Stripes(lanes, [0, 1], [MIB] * 4)
    assert [stripes.take(0, 0.0), stripes.take(1, 0.0)] == [0, 1]
    lanes.broke(0, "gone", 0.5)
    stripes.lost(0)
    stripes.done(0, 0, 0.6)  # too late: it was taken back
    assert stripes.take(0, 1.0) is None
    stripes.done(1, 1, 1.0)
    assert stripes.take(1, 1.0) == 0


@given(total=st.integers(1, 1 << 40), num_lanes=st.integers(1, 16))
def test_stripes_are_whole_pages_of_a_sensible_size(total: int, num_lanes: int):
    size = stripe_bytes(total, num_lanes)
    assert MIN_STRIPE_BYTES <= size <= MIB
    assert size % 4096 == 0


def test_rails_are_ordered_by_switch_then_distance_then_speed_and_say_why():
    far = RailFacts("far", "leaf-2", 10, 50e9)
    near = RailFacts("near", "leaf-1", 21, 25e9)
    best = RailFacts("best", "leaf-1", 10, 25e9)
    ranked = order([far, near, best], "leaf-1")
    assert [rail.name for rail, _ in ranked] == ["best", "near", "far"]
    assert ranked[0][1] == "on the host's switch leaf-1, on the memory's NUMA node, 200 Gb/s"
    assert ranked[1][1] == "on the host's switch leaf-1, NUMA distance 21, 200 Gb/s"
    assert [reason for _, reason in order([RailFacts("only")])] == ["in the topology's order"]


def test_a_link_without_lanes_is_refused():
    with pytest.raises(ValueError, match="at least one lane"):
        Lanes([], [])
