"""The arbiter: which predictions may use the device, in which order. Pure; `now` and a view of the tiers are
handed in.

Theory of operation. All predictions of all predictors compete for one budget: device bandwidth, device queue,
and bytes of staging.

Admission. A prediction is refused at once, for a reason that is counted, if it is

- ``resident`` or ``duplicate``: there, or on its way or waiting already (one fetch serves all: the refusal
  names its job);
- ``gone``: on no tier of ours;
- ``low_value``: less likely than `Budget.min_probability`; ``throttled``: so after its predictor's record is
  taken into account;
- ``recompute_cheaper``: its sequence would wait longer for it than computing what is left of its prefix takes, or its
  bytes take longer to read than to compute (see `dpurt.core.read_latency`). Asked once a plan for each sequence, of its
  first block there. Parts cannot be computed alone;
- ``too_late``: it would arrive no sooner than a demand read issued at the time of need, give or take
  `late_ok_s`;
- ``over_budget``: too many wait already.

A prediction may come with its `worth` (see `dpurt.core.eviction.Outlook`); without one its probability is it.

Otherwise it *waits*. Order, by rank: the *sure* ones (more likely used than not) before the others, and of them those
a live sequence has asked for before those that are guesses of what nobody asks for yet; then by latest useful start,
in quanta of `quantum_s`, so that deadlines rule; within a quantum by value per byte = worth x time saved / bytes,
where the time saved is that of the demand read or of the recompute, whichever is shorter. Ties are broken by need,
then by job number, so a replay repeats itself.

Issue. While the queue is full nothing is looked at. The first waiting one goes to the device while there is bandwidth
left after what demand reads have queued (a token bucket: demand is always first), and staging for it. A prefetch
holds up each demand read that comes behind it for its whole length, and saves one at best. So while demand reads are
queued, or were within `quiet_s`, only sure ones that must start within `pressing_s` are issued, and none past the
first in the order that need not; the others wait for a quiet moment. One that waits past its use is refused
``over_budget``; one that is not worth `hysteresis` more than the block which would have to leave for it (the view's
`price`) ``not_worth_room``. Those nearly certain (`CERTAIN`) need only be worth more. So prefetch never throws out
what it will want next.

Throttle. For each predictor the arbiter keeps what it promised (the sum of probabilities of its issued jobs)
and what came true, both forgotten slowly. Their ratio, at most 1, scales its later probabilities: a predictor
which claims much and hits little sinks in the order and then below the bar; every `PROBE_EVERY`-th of its
throttled predictions passes all the same, so that it can recover.

The arbiter leaves to others: what becomes of jobs (ledger), whom they serve (prefetch core), how bytes move
(agents).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from dpurt.core.events import Where
from dpurt.core.predictor import Prediction
from dpurt.core.read_latency import is_computing_cheaper


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What prefetch may use. `bandwidth_bytes_per_s` is the device's share prefetch and demand reads have
    together; `staging_bytes` bounds bytes in flight plus staged and not yet used; `queue_depth` bounds jobs
    in flight. `latency_s` is a read's until one is measured (`Arbiter.latency_s`). For the other times, see the
    module's docstring."""

    bandwidth_bytes_per_s: float
    staging_bytes: int
    queue_depth: int = 8
    latency_s: float = 0.0002
    min_probability: float = 0.05
    late_ok_s: float = 0.05
    quantum_s: float = 0.25
    burst_s: float = 0.05
    quiet_s: float = 0.05
    pressing_s: float = 1.0
    hysteresis: float = 0.5
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0 or self.quantum_s <= 0 or self.burst_s <= 0:
            raise ValueError("bandwidth_bytes_per_s, quantum_s and burst_s must be > 0")
        if self.staging_bytes < 0 or self.queue_depth < 0 or self.max_waiting < 0:
            raise ValueError("staging_bytes, queue_depth and max_waiting must be >= 0")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"min_probability must lie in [0, 1], got {self.min_probability}")


class StagingView(Protocol):
    """What the arbiter may ask about the tiers. Answers hold for the present call only."""

    def where(self, block: int, parts_mask: int | None) -> Where: ...

    def record_bytes(self, block: int, parts_mask: int | None) -> int:
        """Bytes a fetch of these parts reads and stages; > 0."""
        ...

    def recompute_s(self, block: int) -> float | None:
        """Estimated time to compute the block instead, if anybody knows."""
        ...

    def demand_backlog_bytes(self) -> int:
        """Bytes that demand reads still want from the device."""
        ...

    def free_bytes(self) -> int:
        """Staging a fetch could take now: free, or evictable for it."""
        ...

    def price(self, block: int, now: float) -> float:
        """What the block that would leave for this one is worth; 0 if none has to, or nobody knows."""
        ...


_Key = tuple[int, int, float, float, int]  # rank, quantum of the latest start, -value per byte, need_by, job


class Job(Struct, eq=False, gc=False):
    """An admitted prediction. `key` is its place in the order, as long as it waits."""

    number: int
    prediction: Prediction
    record_bytes: int
    key: _Key


class Refusal(Struct, frozen=True, gc=False):
    """`job` is None for a prediction refused on sight; the job that serves it already, for a duplicate; else
    the job that waited and is refused now (`was_waiting`)."""

    prediction: Prediction
    reason: str
    job: int | None = None
    was_waiting: bool = False


class Plan(Struct):
    """`admitted`: new jobs; `fetches`: jobs, new or from before, to give to the device now; `refusals`: see
    there."""

    admitted: list[Job] = []
    fetches: list[Job] = []
    refusals: list[Refusal] = []


ASKED, LIKELY, UNSURE = 0, 1, 2  # ranks
SURE = 0.5
CERTAIN = 0.9
NEVER = float("-inf")
NOT_BY_ITSELF = float("inf")


def _one_block(sequence: int | None) -> int:
    return 1


class _Record:
    """What a predictor promised and what came true."""

    PRIOR = 16.0  # jobs' worth of trust in advance
    FORGET_AT = 512.0

    __slots__ = ("came_true", "factor", "promised", "throttled")

    def __init__(self) -> None:
        self.promised = self.came_true = self.PRIOR
        self.factor = 1.0
        self.throttled = 0

    def learn(self, probability: float, used: bool) -> None:
        self.promised += probability
        self.came_true += used
        if self.promised > self.FORGET_AT:
            self.promised /= 2
            self.came_true /= 2
        self.factor = min(1.0, self.came_true / self.promised)


class Arbiter:
    """See the module's docstring. `plan` costs O(new predictions x log waiting), whatever waits."""

    PROBE_EVERY = 16

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.latency_s = budget.latency_s  # of one read on an idle device, besides its bytes
        self.held_bytes = 0  # in flight, or staged and not yet used
        self.flying_bytes = 0
        self._next_job = 0
        self._waiting: dict[int, Job] = {}
        self._order: list[_Key] = []
        self._flying: dict[int, Job] = {}
        self._job_of: dict[tuple[int, int | None], int] = {}  # waiting and flying
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        self._burst_bytes = budget.bandwidth_bytes_per_s * budget.burst_s
        self._tokens = self._burst_bytes
        self._tokens_at: float = NEVER
        self._demand_at: float = NEVER  # when demand reads were last seen queued
        self._wakeup: float | None = None
        self._blocked_until: float = NEVER
        self._run_of: Callable[[int | None], int] = _one_block
        self._to_compute: dict[
            int | None, bool
        ] = {}  # sequences asked about in this plan: is computing cheaper?

    def plan(
        self,
        predictions: Sequence[Prediction],
        view: StagingView,
        now: float,
        run_of: Callable[[int | None], int] = _one_block,
    ) -> Plan:
        """Admit or refuse each prediction, then issue what the budget allows. `run_of`: how many blocks a sequence still wants."""
        plan = Plan()
        if predictions:
            self._run_of = run_of
            self._to_compute.clear()
            queued_s = (view.demand_backlog_bytes() + self.flying_bytes) / self.budget.bandwidth_bytes_per_s
            for prediction in predictions:
                self._admit(prediction, view, now, now + queued_s, plan)
        self._issue(view, now, plan)
        return plan

    def withdraw(self, number: int) -> bool:
        """Forget a waiting job. False if it does not wait (any more)."""
        job = self._waiting.pop(number, None)
        if job is None:
            return False
        del self._job_of[job.prediction.block, job.prediction.parts_mask]
        return True

    def answered(self, number: int) -> Job:
        """A flying job landed or failed: it leaves the queue. Its bytes stay held until `release`."""
        job = self._flying.pop(number)
        self.flying_bytes -= job.record_bytes
        self._blocked_until = NEVER
        del self._job_of[job.prediction.block, job.prediction.parts_mask]
        return job

    def release(self, num_bytes: int) -> None:
        """Bytes of an answered job are not held for prefetch any more: used, evicted, useless, or never
        came."""
        self.held_bytes -= num_bytes
        self._blocked_until = NEVER
        assert self.held_bytes >= 0, "released more than was held"

    def learn(self, predictor: str, probability: float, used: bool) -> None:
        """An issued job of this predictor was used, or was not."""
        self._records[predictor].learn(probability, used)

    def is_ready(self, now: float) -> bool:
        """Something waits, and might be issued: the last `plan` ended for a reason that may be gone."""
        return now >= self._blocked_until and bool(self._waiting)

    def waiting_on(self, block: int, parts_mask: int | None) -> int | None:
        """The waiting job for exactly these parts of the block."""
        if not self._waiting:
            return None
        number = self._job_of.get((block, parts_mask))
        return number if number in self._waiting else None

    def is_flying(self, number: int) -> bool:
        """The job was issued and has not been answered."""
        return number in self._flying

    def trust(self, predictor: str) -> float:
        """The factor on a predictor's probabilities, in (0, 1]."""
        return self._records[predictor].factor

    def next_wakeup(self) -> float | None:
        """When `plan` may do something without an event; as of the last `plan`."""
        return self._wakeup if self._waiting else None

    @property
    def num_waiting(self) -> int:
        """Admitted jobs not yet given to the device."""
        return len(self._waiting)

    @property
    def num_flying(self) -> int:
        """Jobs given to the device and not answered."""
        return len(self._flying)

    # --- admission

    def _admit(
        self, prediction: Prediction, view: StagingView, now: float, device_free: float, plan: Plan
    ) -> None:
        block, mask = prediction.block, prediction.parts_mask
        jobs = self._job_of
        serving = jobs.get((block, mask))
        if serving is None and mask is not None:  # part of a whole block that is on its way
            serving = jobs.get((block, None))
        if serving is not None:
            self._hasten(serving, prediction)
            plan.refusals.append(Refusal(prediction, "duplicate", serving))
            return
        where = view.where(block, mask)
        if where != "nvme":
            plan.refusals.append(Refusal(prediction, _ELSEWHERE[where]))
            return
        num_bytes = view.record_bytes(block, mask)
        read_s = saved_s = self.read_s(num_bytes)
        recompute_s = view.recompute_s(block) if mask is None else None
        probability = prediction.probability * self._records[prediction.predictor].factor
        reason = self._objection(prediction, probability, device_free)
        if recompute_s is not None:
            if reason is None and self._is_computed(
                prediction, num_bytes, recompute_s, now, device_free + read_s
            ):
                reason = "recompute_cheaper"
            if recompute_s < read_s:
                saved_s = recompute_s
        if reason is not None:
            plan.refusals.append(Refusal(prediction, reason))
            return
        number = self._next_job
        self._next_job += 1
        value = _worth(prediction, probability) * saved_s / num_bytes
        key = self._key(_rank(prediction, probability), read_s, value, prediction.need_by, number)
        self._waiting[number] = job = Job(number, prediction, num_bytes, key)
        jobs[block, mask] = number
        heapq.heappush(self._order, key)
        plan.admitted.append(job)

    def _objection(
        self,
        prediction: Prediction,
        probability: float,
        device_free: float,
    ) -> str | None:
        budget = self.budget
        if probability < budget.min_probability:
            if prediction.probability < budget.min_probability:
                return "low_value"
            if not self._may_probe(prediction.predictor):
                return "throttled"
        if device_free >= prediction.need_by + budget.late_ok_s:
            return "too_late"
        if len(self._waiting) >= budget.max_waiting:
            return "over_budget"
        return None

    def _is_computed(
        self, prediction: Prediction, num_bytes: int, recompute_s: float, now: float, read_at: float
    ) -> bool:
        """Is the host better off computing? What a sequence's first block of this plan is told holds for the others."""
        sequence = prediction.sequence
        cheaper = self._to_compute.get(sequence)
        if cheaper is None:
            need_by = prediction.need_by
            wait_s = read_at - (need_by if need_by > now else now)
            transfer_s = num_bytes / self.budget.bandwidth_bytes_per_s
            cheaper = is_computing_cheaper(wait_s, transfer_s, recompute_s, self._run_of(sequence))
            if sequence is not None:
                self._to_compute[sequence] = cheaper
        return cheaper

    def read_s(self, num_bytes: int) -> float:
        """Time of one read on an idle device."""
        return self.latency_s + num_bytes / self.budget.bandwidth_bytes_per_s

    def _may_probe(self, predictor: str) -> bool:
        record = self._records[predictor]
        record.throttled += 1
        return record.throttled % self.PROBE_EVERY == 0

    def _key(self, rank: int, read_s: float, value: float, need_by: float, number: int) -> _Key:
        return (rank, int((need_by - read_s) // self.budget.quantum_s), -value, need_by, number)

    def _hasten(self, number: int, prediction: Prediction) -> None:
        """A waiting job is wanted once more: it takes the better place of the two. A guess does not change when something
        surer needs it."""
        job = self._waiting.get(number)
        probability = prediction.probability * self._records[prediction.predictor].factor
        rank = _rank(prediction, probability)
        if job is None or rank > job.key[0]:
            return
        read_s = self.read_s(job.record_bytes)
        value = max(-job.key[2], _worth(prediction, probability) * read_s / job.record_bytes)
        need_by = prediction.need_by if rank < job.key[0] else min(job.key[3], prediction.need_by)
        key = self._key(rank, read_s, value, need_by, number)
        if key < job.key:
            job.key = key
            heapq.heappush(self._order, key)
            if len(self._order) > 2 * len(self._waiting) + 64:
                self._order = [job.key for job in self._waiting.values()]
                heapq.heapify(self._order)

    # --- issue

    def _issue(self, view: StagingView, now: float, plan: Plan) -> None:
        self._wakeup = None
        self._blocked_until = now
        if not self._waiting:
            self._order.clear()
            return
        self._refill(now)
        backlog = view.demand_backlog_bytes()
        if backlog:
            self._demand_at = now
        spendable = self._tokens - backlog
        quiet_at = self._demand_at + self.budget.quiet_s
        room: int | None = None
        while self._waiting:
            if len(self._flying) >= self.budget.queue_depth:
                self._blocked_until = NOT_BY_ITSELF  # an answer is the next event
                return
            job = self._first(view, now, plan)
            if job is None:
                break
            if room is None:
                room = min(view.free_bytes(), self.budget.staging_bytes - self.held_bytes)
            if job.record_bytes > room:
                break  # until any event: leases end without one of ours
            if now < quiet_at and not self._is_pressing(job, now):
                self._wakeup = self._blocked_until = quiet_at
                break
            if spendable <= 0:
                # demand reads end without an event of ours: look again soon, not when tokens alone allow
                wait_s = (1 - spendable) / self.budget.bandwidth_bytes_per_s
                self._wakeup = now + max(wait_s, self.budget.burst_s / 4)
                self._blocked_until = now if backlog else now + wait_s
                break
            self._launch(job, plan)
            room -= job.record_bytes
            spendable -= job.record_bytes
        if self._waiting and self._wakeup is None:
            self._wakeup = self._order[0][3] + self.budget.late_ok_s

    def _first(self, view: StagingView, now: float, plan: Plan) -> Job | None:
        """The first waiting job that is still worth a fetch; refuses those before it that are not."""
        order, waiting = self._order, self._waiting
        while order:
            key = order[0]
            job = waiting.get(key[4])
            if job is None or job.key is not key:
                heapq.heappop(order)
                continue
            reason = self._second_thoughts(job.prediction, key[3], view, now)
            if reason is None:
                return job
            heapq.heappop(order)
            self.withdraw(key[4])
            plan.refusals.append(Refusal(job.prediction, reason, key[4], was_waiting=True))
        return None

    def _second_thoughts(
        self, prediction: Prediction, need_by: float, view: StagingView, now: float
    ) -> str | None:
        """Why a waiting job is not worth a fetch any more."""
        block = prediction.block
        where = view.where(block, prediction.parts_mask)
        if where != "nvme":
            return _ELSEWHERE[where]
        if now >= need_by + self.budget.late_ok_s:
            return "over_budget"
        price = view.price(block, now)
        if price <= 0.0:
            return None
        worth = _worth(prediction, prediction.probability)
        if worth < CERTAIN:
            price *= 1.0 + self.budget.hysteresis
        return "not_worth_room" if worth <= price else None

    def _is_pressing(self, job: Job, now: float) -> bool:
        rank, _, _, need_by, _ = job.key
        latest_start = need_by - self.read_s(job.record_bytes)
        return rank != UNSURE and latest_start <= now + self.budget.pressing_s

    def _launch(self, job: Job, plan: Plan) -> None:
        heapq.heappop(self._order)
        del self._waiting[job.number]
        self._flying[job.number] = job
        self._tokens -= job.record_bytes
        self.held_bytes += job.record_bytes
        self.flying_bytes += job.record_bytes
        plan.fetches.append(job)

    # --- bandwidth

    def _refill(self, now: float) -> None:
        """At most a burst is saved up; a record larger than that runs up a debt."""
        if self._tokens_at != NEVER:
            earned = (now - self._tokens_at) * self.budget.bandwidth_bytes_per_s
            self._tokens = min(self._burst_bytes, self._tokens + earned)
        self._tokens_at = now


def _rank(prediction: Prediction, probability: float) -> int:
    if probability < SURE:
        return UNSURE
    return LIKELY if prediction.sequence is None else ASKED


def _worth(prediction: Prediction, probability: float) -> float:
    return probability if prediction.worth is None else prediction.worth


_ELSEWHERE: dict[Where, str] = {"staging": "resident", "in_flight": "duplicate", "gone": "gone"}
