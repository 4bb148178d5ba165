"""The prefetch core: stories of events and commands, then random ones against the invariants."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpurt.core.arbiter import Arbiter, Budget
from dpurt.core.events import (
    Arrived,
    Consumed,
    DecodeStep,
    Demanded,
    Dropped,
    Evicted,
    FetchFailed,
    Finished,
    Owner,
    Paused,
    Ranked,
    Resumed,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.ledger import Ledger
from dpurt.core.predictor import AttentionEwma, AttentionPrevious, Hints, SlidingWindow
from dpurt.core.prefetch import CancelFetch, Fetch, PrefetchCore
from dpurt.core.returns import Returns

MB = 1_000_000
OWNER = Owner("space", "tenant")


class FakeTiers:
    """All blocks are on the device; the test moves them."""

    def __init__(self, capacity=1000):
        self.places = {}
        self.capacity = capacity
        self.prices = {}

    def where(self, block, parts_mask):
        return self.places.get(block, "nvme")

    def record_bytes(self, block, parts_mask):
        return MB

    def recompute_s(self, block):
        return None

    def demand_backlog_bytes(self):
        return 0

    def price(self, block, now):
        return self.prices.get(block, 0.0)

    def free_bytes(self):
        return (self.capacity - len(self.places)) * MB


def make_core(tiers=None, predictors=None, forget_s=1800.0, **changes):
    base = {"bandwidth_bytes_per_s": 1e12, "staging_bytes": 1000 * MB, "queue_depth": 100}
    arbiter = Arbiter(Budget(**(base | changes)))
    predictors = predictors if predictors is not None else [SlidingWindow(4)]
    return PrefetchCore(predictors, arbiter, Ledger(horizon_s=10.0), tiers or FakeTiers(), forget_s)


def fetched(commands):
    return [c.block for c in commands if isinstance(c, Fetch)]


def arrive(core, sequence=1, blocks=(1, 2, 3, 4, 5), now=0.0):
    return core.handle(Arrived(sequence, OWNER, blocks), now)


def test_arrival_fetches_the_first_window_at_once():
    core = make_core()
    commands = arrive(core)
    assert fetched(commands) == [1, 2, 3, 4]
    assert commands[0] == Fetch(0, 1, None, 0.0, "sliding_window")


def test_the_cursor_pulls_the_window_along():
    core = make_core()
    arrive(core)
    assert fetched(core.handle(Consumed(1, 0, 1), 0.1)) == [5]


def test_one_fetch_serves_all_waiters_and_survives_all_but_the_last():
    core = make_core()
    arrive(core, 1)
    assert fetched(arrive(core, 2)) == []
    assert core.stats().total.reasons == {"refused:duplicate": 4}
    assert core.handle(SequenceGone(1), 0.1) == []
    cancelled = core.handle(SequenceGone(2), 0.2)
    assert cancelled == [CancelFetch(0), CancelFetch(1), CancelFetch(2), CancelFetch(3)]


def test_departures_are_heeded_while_a_job_of_the_block_is_open_or_a_predictor_listens():
    core = make_core()
    arrive(core)
    core.handle(Staged(1, 0), 0.1)
    assert core.heeds_eviction(1)
    assert not core.heeds_eviction(9)
    core.handle(Demanded(1, 1, "staging"), 0.2)
    assert not core.heeds_eviction(1)

    class Listener(SlidingWindow):
        interests = SlidingWindow.interests | {Evicted}

    assert make_core(predictors=[Listener(4)]).heeds_eviction(9)


def test_ending_a_sequence_books_its_prefetches_as_cancelled_before_the_call_returns():
    core = make_core(queue_depth=1)
    arrive(core)
    assert core.handle(Finished(1), 0.1) == [CancelFetch(0)]
    stats = core.stats()
    assert (stats.total.cancelled, stats.waiting, stats.total.open) == (4, 0, 0)
    assert stats.held_bytes == MB  # the device has not answered yet
    core.handle(FetchFailed(0, "cancelled"), 0.2)
    assert core.stats().held_bytes == 0


def test_a_cancelled_fetch_that_lands_all_the_same_frees_its_budget():
    core = make_core(queue_depth=1)
    arrive(core)
    core.handle(Finished(1), 0.1)
    core.handle(Staged(1, 0), 0.2)
    assert (core.stats().held_bytes, core.stats().flying) == (0, 0)
    core.ledger.check_integrity()


def test_landed_blocks_are_not_cancelled():
    core = make_core()
    arrive(core, blocks=(1,))
    core.handle(Staged(1, 0), 0.1)
    assert core.handle(SequenceGone(1), 0.2) == []
    core.handle(Demanded(1, 2, "staging"), 0.3)
    assert core.stats().total.timely == 1


def test_a_pause_cancels_and_a_resume_fetches_again():
    core = make_core()
    arrive(core, blocks=(1,))
    assert core.handle(Paused(1, 5.0), 0.1) == [CancelFetch(0)]
    core.handle(FetchFailed(0, "cancelled"), 0.2)
    assert fetched(core.handle(Resumed(1), 5.0)) == [1]


def test_timely_late_and_early_reach_the_totals_of_the_owner():
    core = make_core()
    arrive(core, blocks=(1, 2, 3))
    core.handle(Staged(1, 0), 0.1)
    core.handle(Demanded(1, 1, "staging"), 0.2)
    core.handle(Demanded(2, 1, "in_flight"), 0.2)
    core.handle(Staged(2, 1), 0.3)
    core.handle(Staged(3, 2), 0.3)
    core.handle(Evicted(3), 0.4)
    assert core.stats().held_bytes == 0
    core.handle(Demanded(3, 1, "nvme"), 0.5)
    total = core.ledger.totals(space="space", tenant="tenant", predictor="sliding_window")
    assert (total.timely, total.late, total.early, total.demand_misses) == (1, 1, 1, 1)


def test_a_demand_read_overtakes_the_waiting_prefetch():
    core = make_core(queue_depth=0)
    arrive(core, blocks=(1,))
    core.handle(Demanded(1, 1, "nvme"), 0.01)
    assert core.stats().total.reasons == {"refused:overtaken": 1}
    assert core.stats().waiting == 0


def test_a_dropped_block_is_neither_fetched_nor_forgotten_in_the_sums():
    tiers = FakeTiers()
    core = make_core(tiers, queue_depth=0)
    arrive(core, blocks=(1, 2))
    tiers.places[1] = "gone"
    core.handle(Dropped(1), 0.01)
    assert core.stats().total.reasons == {"refused:gone": 1}
    core.ledger.check_integrity()


def test_unused_blocks_become_useless_at_the_horizon_and_free_the_budget():
    core = make_core()
    arrive(core, blocks=(1,))
    core.handle(Staged(1, 0), 0.1)
    wakeup = core.next_wakeup()
    assert wakeup == 10.0
    core.tick(wakeup)
    assert (core.stats().total.useless, core.stats().held_bytes) == (1, 0)


def test_a_sequence_unheard_of_is_forgotten_with_its_jobs():
    core = make_core(forget_s=100.0, queue_depth=0)
    arrive(core, blocks=(1,))
    core.handle(Consumed(1, 0, 0), 50.0)
    core.tick(149.0)
    assert core.stats().sequences == 1
    core.tick(150.0)
    assert core.stats().sequences == 0
    assert core.next_wakeup() is None


def test_a_predicted_return_outlives_every_sequence():
    core = make_core(predictors=[Returns()], min_probability=0.0)
    arrive(core, 1, blocks=())
    core.handle(Stored(1, (7, 8, 9)), 0.0)
    core.handle(Finished(1), 0.0)
    core.tick(1.0)
    assert core.arbiter.num_flying == 3
    core.handle(Arrived(2, OWNER, (7,)), 1.0)
    assert core.handle(SequenceGone(2), 2.0) == []


def test_what_a_live_sequence_matched_is_wanted_until_it_asked_for_it_or_ended():
    core = make_core(predictors=[])
    arrive(core, 1, blocks=(1, 2, 3))
    arrive(core, 2, blocks=(1, 4))
    core.handle(Consumed(1, 0, 2), 1.0)
    assert [core.is_wanted(block, 1.0) for block in (1, 2, 3, 4, 5)] == [True, False, True, True, False]
    core.handle(Finished(2), 2.0)
    assert [core.is_wanted(block, 2.0) for block in (1, 2, 3, 4, 5)] == [False, False, True, False, False]


def test_a_sequence_that_arrives_again_wants_what_it_matches_now():
    core = make_core(predictors=[])
    arrive(core, 1, blocks=(1, 2))
    arrive(core, 1, blocks=(2, 3))
    assert [core.is_wanted(block, 0.0) for block in (1, 2, 3)] == [False, True, True]


def test_what_a_sequence_is_predicted_to_touch_is_wanted_until_it_does_or_time_is_up():
    core = make_core(predictors=[AttentionPrevious()])
    arrive(core, blocks=())
    core.handle(DecodeStep(1, 0, 0, (1, 2)), 0.0)
    assert core.is_wanted(1, 0.1)
    core.handle(Demanded(1, 1, "in_flight"), 0.2)
    assert not core.is_wanted(1, 0.2)
    assert core.is_wanted(2, 9.0)
    assert not core.is_wanted(2, 20.0)
    assert not core.is_wanted(3, 0.1)


def test_interests_are_swept_out():
    core = make_core(queue_depth=0)
    for i in range(20_000):
        arrive(core, i, blocks=(i,), now=i * 1.0)
        core.handle(SequenceGone(i), i * 1.0)
    assert len(core._wanted_until) < 2100


def test_events_for_unknown_sequences_and_blocks_do_nothing():
    core = make_core(predictors=[SlidingWindow(), AttentionPrevious(), AttentionEwma(), Hints(), Returns()])
    for event in (Consumed(9, 0, 1), Paused(9), Resumed(9), Finished(9), SequenceGone(9), Stored(9, (1,))):
        assert core.handle(event, 0.0) == []
    for event in (Evicted(5), Dropped(5), Demanded(5, 9, "staging")):
        assert core.handle(event, 0.0) == []


def test_an_arrival_of_64_blocks_costs_microseconds_a_block_not_passes_over_what_waits():
    """Not timed: counts how often the tiers are asked, with many jobs waiting."""
    tiers = FakeTiers(10**6)
    core = make_core(tiers, [SlidingWindow(64)], queue_depth=1)
    for sequence in range(50):
        arrive(core, sequence, tuple(range(sequence * 64, sequence * 64 + 64)))
    asked = 0
    where = tiers.where

    def counting(block, mask):
        nonlocal asked
        asked += 1
        return where(block, mask)

    tiers.where = counting
    arrive(core, 99, tuple(range(10_000, 10_064)))
    assert asked <= 2 * 64


class CoreMachine(RuleBasedStateMachine):
    """Random events, a device that answers in any order, and staging of six blocks."""

    BLOCKS = st.integers(0, 11)
    SEQUENCES = st.integers(0, 3)

    @initialize(depth=st.integers(0, 3), staging=st.integers(0, 6))
    def start(self, depth, staging):
        self.now = 0.0
        self.tiers = FakeTiers(6)
        self.budget = {"queue_depth": depth, "staging_bytes": staging * MB}
        predictors = [
            SlidingWindow(3),
            Returns(),
            AttentionPrevious(),
            AttentionEwma(),
            Hints(),
        ]
        self.core = make_core(
            self.tiers, predictors, forget_s=20.0, min_probability=0.0, late_ok_s=1.0, **self.budget
        )
        self.flying = {}  # job -> Fetch
        self.cancelled = set()

    def obey(self, commands):
        for command in commands:
            if isinstance(command, CancelFetch):
                assert command.job in self.flying
                assert command.job not in self.cancelled
                self.cancelled.add(command.job)
                continue
            assert command.job not in self.flying
            assert self.tiers.places.get(command.block, "nvme") == "nvme" or command.parts_mask is not None
            same = (command.block, command.parts_mask)
            assert same not in [(f.block, f.parts_mask) for f in self.flying.values()], (
                "two reads of one block"
            )
            self.flying[command.job] = command
            self.tiers.places[command.block] = "in_flight"

    def tell(self, event):
        self.obey(self.core.handle(event, self.now))

    @rule(sequence=SEQUENCES, blocks=st.lists(BLOCKS, max_size=6, unique=True), wait=st.floats(0, 3))
    def arrived(self, sequence, blocks, wait):
        self.tell(Arrived(sequence, OWNER, tuple(blocks), self.now + wait))

    @rule(sequence=SEQUENCES, first=st.integers(0, 5))
    def consumed(self, sequence, first):
        self.tell(Consumed(sequence, first, 1))

    @rule(
        sequence=SEQUENCES,
        step=st.integers(0, 9),
        touched=st.lists(BLOCKS, max_size=3, unique=True),
        ranked=st.lists(BLOCKS, max_size=2, unique=True),
    )
    def decoded(self, sequence, step, touched, ranked):
        hint = Ranked(1, tuple(ranked), self.now + 0.5)
        self.tell(DecodeStep(sequence, step, 0, tuple(touched), (hint,)))

    @rule(sequence=SEQUENCES, kind=st.sampled_from([Paused, Resumed, Finished, SequenceGone]))
    def turned(self, sequence, kind):
        self.tell(kind(sequence))
        if kind in (Finished, SequenceGone):
            serving = [job for job, waiters in self.core._waiters.items() if waiters == {sequence}]
            assert serving == []

    @rule(block=BLOCKS, sequence=SEQUENCES)
    def demanded(self, block, sequence):
        self.tell(Demanded(block, sequence, self.tiers.where(block, None)))

    @rule(block=BLOCKS)
    def dropped(self, block):
        if self.tiers.where(block, None) != "in_flight":
            self.tiers.places.pop(block, None)
            self.tell(Dropped(block))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), well=st.booleans())
    def answered(self, data, well):
        job = data.draw(st.sampled_from(sorted(self.flying)))
        fetch = self.flying.pop(job)
        others = [f for f in self.flying.values() if f.block == fetch.block]
        if well:
            self.tiers.places[fetch.block] = "staging"
            self.cancelled.discard(job)
            self.tell(Staged(fetch.block, job))
        else:
            if not others:
                self.tiers.places.pop(fetch.block, None)
            reason = "cancelled" if job in self.cancelled else "io_error"
            self.cancelled.discard(job)
            self.tell(FetchFailed(job, reason))

    @precondition(lambda self: "staging" in self.tiers.places.values())
    @rule(data=st.data())
    def evicted(self, data):
        staged = sorted(b for b, where in self.tiers.places.items() if where == "staging")
        block = data.draw(st.sampled_from(staged))
        del self.tiers.places[block]
        self.tell(Evicted(block))

    @rule(step=st.floats(0.01, 15))
    def time_passes(self, step):
        self.now += step
        self.obey(self.core.tick(self.now))

    @invariant()
    def budgets_hold_and_the_ledger_adds_up(self):
        self.core.ledger.check_integrity()
        arbiter = self.core.arbiter
        assert arbiter.num_flying == len(self.flying) <= self.budget["queue_depth"]
        assert MB * len(self.flying) <= arbiter.held_bytes <= self.budget["staging_bytes"]
        unlanded = set(self.flying) - self.cancelled
        waiting = set(arbiter._waiting)
        assert set(self.core._waiters) == unlanded | waiting
        assert arbiter.num_waiting <= self.core.ledger.num_open

    @invariant()
    def waiters_and_sequences_agree(self):
        for number, sequence in self.core._sequences.items():
            assert sequence.jobs == {
                j for j, waiters in self.core._waiters.items() if waiters and number in waiters
            }

    @invariant()
    def the_wakeup_that_is_remembered_is_the_wakeup(self):
        remembered = self.core.next_wakeup()
        self.core._is_wakeup_known = False
        assert self.core.next_wakeup() == remembered

    @invariant()
    def what_is_ahead_is_what_live_sequences_have_not_passed(self):
        sequences = self.core._sequences.values()
        ahead = Counter(block for s in sequences for block in s.blocks[s.cursor :])
        assert self.core._ahead == ahead


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
