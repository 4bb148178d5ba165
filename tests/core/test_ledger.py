"""The ledger: each job ends once, the sums agree, and every outcome is told by the story that led to it."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpurt.core.events import Owner
from dpurt.core.ledger import OTHERS, Ledger, Outcome

A = Owner("space", "a")
B = Owner("space", "b")


def planned(ledger, job=0, block=1, mask=None, owner=A, need_by=10.0, predictor="p"):
    ledger.plan(job, block, mask, predictor, owner, 0.5, 100, need_by)


def flying(ledger, job=0, **how):
    planned(ledger, job, **how)
    ledger.issued(job)


def staged(ledger, job=0, at=5.0, **how):
    flying(ledger, job, **how)
    assert ledger.staged(job, at) is None


def outcome_of(settled):
    (one,) = settled
    return one.outcome


def test_needed_in_staging_is_timely_with_its_lead():
    ledger = Ledger()
    staged(ledger, at=5.0)
    assert outcome_of(ledger.demanded(1, None, "staging", A, 7.0)) is Outcome.TIMELY
    total = ledger.totals()
    assert (total.timely, total.lead_sum_s, total.used_bytes, total.issued) == (1, 2.0, 100, 1)
    assert 2.0 <= total.lead_quantile_s(0.5) < 4.0


def test_needed_in_flight_is_late_once_it_lands():
    ledger = Ledger()
    flying(ledger)
    assert ledger.demanded(1, None, "in_flight", A, 5.0) == []
    assert ledger.staged(0, 6.5).outcome is Outcome.LATE
    assert ledger.totals().late_sum_s == 1.5


def test_needed_in_flight_and_then_failed_is_failed():
    ledger = Ledger()
    flying(ledger)
    ledger.demanded(1, None, "in_flight", A, 5.0)
    assert ledger.failed(0, "io_error").outcome is Outcome.FAILED
    assert ledger.totals().reasons == {"failed:io_error": 1}


def test_evicted_and_then_needed_is_early_and_a_demand_miss():
    ledger = Ledger()
    staged(ledger)
    assert ledger.evicted(1) == 100
    assert outcome_of(ledger.demanded(1, None, "nvme", A, 7.0)) is Outcome.EARLY
    assert ledger.totals().demand_misses == 1


def test_evicted_and_never_needed_is_useless():
    ledger = Ledger(horizon_s=60)
    staged(ledger, need_by=10.0)
    ledger.evicted(1)
    assert ledger.expire(69.9) == []
    assert ledger.next_expiry() == 70.0
    assert outcome_of(ledger.expire(70.0)) is Outcome.USELESS
    assert ledger.demanded(1, None, "nvme", A, 80.0) == []


def test_a_need_past_the_horizon_is_a_plain_hit():
    ledger = Ledger(horizon_s=1)
    staged(ledger)
    ledger.expire(100.0)
    assert ledger.demanded(1, None, "staging", A, 101.0) == []
    assert (ledger.totals().useless, ledger.totals().timely) == (1, 0)


def test_a_flying_job_does_not_expire_before_it_is_answered():
    ledger = Ledger(horizon_s=1)
    flying(ledger)
    assert ledger.expire(float("inf")) == []
    ledger.staged(0, 50.0)
    assert outcome_of(ledger.demanded(1, None, "staging", A, 51.0)) is Outcome.TIMELY


def test_only_parts_that_overlap_are_served():
    ledger = Ledger()
    staged(ledger, 0, mask=0b01)
    staged(ledger, 1, mask=0b10)
    (settled,) = ledger.demanded(1, 0b10, "staging", A, 7.0)
    assert settled.job == 1


def test_a_second_need_finds_nothing_to_settle():
    ledger = Ledger()
    staged(ledger)
    ledger.demanded(1, None, "staging", A, 7.0)
    assert ledger.demanded(1, None, "staging", A, 8.0) == []


def test_cancel_ends_waiting_and_flying_jobs_but_not_landed_ones():
    ledger = Ledger()
    planned(ledger, 0, block=1)
    flying(ledger, 1, block=2)
    staged(ledger, 2, block=3)
    assert ledger.cancel(0).outcome is Outcome.CANCELLED
    assert ledger.cancel(1).outcome is Outcome.CANCELLED
    assert ledger.cancel(2) is None
    assert ledger.staged(1, 9.0) is None
    assert ledger.totals().issued == 1


def test_accuracy_and_coverage_by_predictor_space_and_tenant():
    ledger = Ledger()
    staged(ledger, 0, block=1, predictor="p")
    staged(ledger, 1, block=2, predictor="q", owner=B)
    ledger.demanded(1, None, "staging", A, 7.0)
    ledger.demanded(9, None, "nvme", A, 7.0)
    ledger.expire(1e9)
    assert ledger.totals().accuracy == 0.5
    assert ledger.totals(predictor="p").coverage == 0.5
    assert ledger.totals(tenant="b").accuracy == 0.0
    assert ledger.totals(tenant="b").coverage is None
    assert ledger.totals(space="other").accuracy is None
    assert ledger.predictors() == ["p", "q"]


def test_rows_beyond_the_bound_are_booked_together_and_still_add_up():
    ledger = Ledger(max_rows=3)
    for i in range(100):
        ledger.refuse("p", Owner("s", str(i)), "low_value")
    ledger.check_integrity()
    assert ledger.totals().refused == 100
    assert ledger.totals(tenant=OTHERS.tenant).refused == 97


@pytest.mark.parametrize("spacing_s", [0.0, 1.0])
def test_settled_jobs_leave_nothing_behind(spacing_s):
    ledger = Ledger()
    for job in range(10_000):
        staged(ledger, job, block=job, need_by=spacing_s * job)
        ledger.demanded(job, None, "staging", A, 7.0)
    assert len(ledger._expiries) < 200
    assert sum(map(len, ledger._expiring.values())) < 200
    ledger.check_integrity()
    assert (ledger._open, ledger._of_block) == ({}, {})


@pytest.mark.parametrize("step", ["issued", "withdraw"])
def test_a_job_cannot_go_backwards(step):
    ledger = Ledger()
    flying(ledger)
    with pytest.raises(AssertionError):
        ledger.issued(0) if step == "issued" else ledger.withdraw(0, "why")


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of jobs, against a model that keeps each job's whole story."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(horizon_s=5.0)
        self.now = 0.0
        self.state = {}  # job -> waiting, flying, wanted, staged, evicted, or an Outcome
        self.block = {}
        self.expires = {}
        self.misses = 0
        self.refused_at_once = 0

    def in_state(self, *states):
        return [job for job, state in self.state.items() if state in states]

    @rule(block=st.integers(0, 3), horizon=st.floats(0, 3))
    def plan(self, block, horizon):
        job = len(self.state)
        self.state[job], self.block[job] = "waiting", block
        self.expires[job] = self.now + horizon + 5.0
        planned(self.ledger, job, block=block, need_by=self.now + horizon)

    @rule()
    def refuse(self):
        self.refused_at_once += 1
        self.ledger.refuse("p", A, "low_value")

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), go=st.booleans())
    def issue_or_withdraw(self, data, go):
        job = data.draw(st.sampled_from(self.in_state("waiting")))
        if go:
            self.ledger.issued(job)
            self.state[job] = "flying"
        else:
            assert self.ledger.withdraw(job, "over_budget").outcome is Outcome.REFUSED
            self.state[job] = Outcome.REFUSED

    @precondition(lambda self: self.in_state("flying", "wanted"))
    @rule(data=st.data(), well=st.booleans())
    def answer(self, data, well):
        job = data.draw(st.sampled_from(self.in_state("flying", "wanted")))
        if not well:
            assert self.ledger.failed(job, "io_error").outcome is Outcome.FAILED
            self.state[job] = Outcome.FAILED
        elif self.state[job] == "wanted":
            assert self.ledger.staged(job, self.now).outcome is Outcome.LATE
            self.state[job] = Outcome.LATE
        else:
            assert self.ledger.staged(job, self.now) is None
            self.state[job] = "staged"

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def cancel(self, data):
        job = data.draw(st.sampled_from(sorted(self.state)))
        can = self.state[job] in ("waiting", "flying", "wanted")
        assert (self.ledger.cancel(job) is not None) == can
        if can:
            self.state[job] = Outcome.CANCELLED

    @rule(block=st.integers(0, 3))
    def evict(self, block):
        gone = [job for job in self.in_state("staged") if self.block[job] == block]
        assert self.ledger.evicted(block) == 100 * len(gone)
        self.state.update(dict.fromkeys(gone, "evicted"))

    @rule(block=st.integers(0, 3), where=st.sampled_from(["staging", "in_flight", "nvme"]))
    def demand(self, block, where):
        settled = {s.job: s.outcome for s in self.ledger.demanded(block, None, where, A, self.now)}
        self.misses += where == "nvme"
        expected = {}
        for job in self.in_state("flying", "wanted", "staged", "evicted"):
            if self.block[job] != block:
                continue
            if self.state[job] in ("flying", "wanted"):
                self.state[job] = "wanted"
            else:
                there = self.state[job] == "staged" and where != "nvme"
                expected[job] = self.state[job] = Outcome.TIMELY if there else Outcome.EARLY
        assert settled == expected

    @rule(step=st.floats(0.1, 4))
    def expire(self, step):
        self.now += step
        settled = {s.job for s in self.ledger.expire(self.now)}
        landed = self.in_state("staged", "evicted")
        assert settled <= set(landed)
        self.state.update(dict.fromkeys(settled, Outcome.USELESS))
        assert all(self.expires[job] <= self.now for job in settled)

    @invariant()
    def adds_up(self):
        self.ledger.check_integrity()
        total = self.ledger.totals()
        assert total.planned == len(self.state) + self.refused_at_once
        for outcome in Outcome:
            ended = sum(state is outcome for state in self.state.values())
            extra = self.refused_at_once if outcome is Outcome.REFUSED else 0
            assert getattr(total, outcome.value) == ended + extra
        assert total.demand_misses == self.misses


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
