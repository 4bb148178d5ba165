"""The prefetch ledger: every planned job ends in exactly one outcome, and the sums always agree. Pure.

Life of a job::

    plan --+-> refused(reason)                         the arbiter would not, at once
           +-> waiting --+-> refused(reason)           overtaken, out of time, block gone
                         +-> cancelled                 everybody who wanted it is gone
                         +-> flying --+-> cancelled
                                      +-> failed(reason)
                                      +-> late         somebody needed it while in flight (settled when it
                                      lands) +-> staged --+-> timely    needed while in staging
                                                   +-> evicted --+-> early      needed after it had left
                                                   +-------------+-> useless    not needed within the horizon

- A job's horizon is `horizon_s` after its need-by. A block needed later than that is a plain hit or miss, and
  the job was useless.
- *Issued* are the jobs that reached the device: timely + late + early + useless + failed, and those cancelled
  in flight. ``accuracy = (timely + late) / issued``, over settled jobs.
- A *demand miss* is a need that found the block on the device only. An early job's need is also a demand
  miss. ``coverage = (timely + late) / (timely + late + demand misses)``.
- Lead time is need time minus ready time: positive for timely, negative for late. Its quantiles come from a
  histogram with bounds that double.

Settled jobs become counters, per (predictor, space, tenant); memory is bounded by the open jobs plus
`max_rows` counter rows (what exceeds them is booked on the row `OTHERS`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from msgspec import Struct

from dpurt.core.events import Owner, Where

LEAD_BOUNDS_S: tuple[float, ...] = tuple(0.0001 * 2.0**i for i in range(20))  # 0.1 ms to 52 s
OTHERS = Owner("(others)", "(others)")


class Outcome(StrEnum):
    """How a job ended."""

    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMELY = "timely"
    LATE = "late"
    EARLY = "early"
    USELESS = "useless"


REFUSED, CANCELLED, FAILED, TIMELY, LATE, EARLY, USELESS = Outcome  # a member by its class is slow to reach
_NAMES = {
    outcome: str(outcome) for outcome in Outcome
}  # an attribute by the member itself is slow to reach, too


class Settled(NamedTuple):
    """A job that just ended. `holds_staging`: its unused bytes were in staging until now."""

    job: int
    outcome: Outcome
    predictor: str
    probability: float
    record_bytes: int
    holds_staging: bool


class _State(Enum):
    WAITING = 0
    FLYING = 1
    STAGED = 2
    EVICTED = 3


WAITING, FLYING, STAGED, EVICTED = _State


@dataclass(slots=True)
class Totals:
    """Counters of one row, or a sum of rows."""

    planned: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    timely: int = 0
    late: int = 0
    early: int = 0
    useless: int = 0
    issued: int = 0  # settled jobs which had reached the device
    open: int = 0
    issued_bytes: int = 0
    used_bytes: int = 0
    demand_misses: int = 0
    lead_sum_s: float = 0.0
    late_sum_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)  # of refusals and failures: "refused:too_late"
    leads: list[int] = field(default_factory=lambda: [0] * (len(LEAD_BOUNDS_S) + 1))

    def count(self, outcome: Outcome) -> None:
        """One more job ended so."""
        name = _NAMES[outcome]
        setattr(self, name, getattr(self, name) + 1)

    @property
    def settled(self) -> int:
        """The sum of all outcomes."""
        return sum(getattr(self, outcome) for outcome in Outcome)

    @property
    def accuracy(self) -> float | None:
        """Used / issued; None before anything issued has settled."""
        return (self.timely + self.late) / self.issued if self.issued else None

    @property
    def coverage(self) -> float | None:
        """Needs served by prefetch / needs that prefetch served or missed; None without any."""
        served = self.timely + self.late
        return served / (served + self.demand_misses) if served + self.demand_misses else None

    def lead_quantile_s(self, q: float) -> float | None:
        """Upper bound of the histogram bucket the quantile of timely jobs' lead lies in; None without timely
        jobs."""
        rank, seen = q * self.timely, 0
        for count, bound in zip(self.leads, (*LEAD_BOUNDS_S, float("inf")), strict=True):
            seen += count
            if seen >= rank and seen:
                return bound
        return None

    def add(self, other: Totals) -> None:
        """Add another row's counters to this one's."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        self.leads = [a + b for a, b in zip(self.leads, other.leads, strict=True)]


_SUMMED = tuple(name for name in Totals.__slots__ if name not in ("reasons", "leads"))


class _Job(Struct, gc=False):
    block: int
    parts_mask: int | None
    predictor: str
    owner: Owner
    probability: float
    record_bytes: int
    expires: float
    row: Totals
    state: _State = WAITING
    staged_at: float = 0.0
    wanted_at: float | None = None


class Ledger:
    """See the module's docstring. All methods are O(1) or O(log open jobs), but the queries."""

    def __init__(self, horizon_s: float = 60.0, max_rows: int = 1024) -> None:
        if horizon_s <= 0 or max_rows < 1:
            raise ValueError("horizon_s must be > 0 and max_rows >= 1")
        self.horizon_s = horizon_s
        self.max_rows = max_rows
        self._open: dict[int, _Job] = {}
        self._of_block: dict[int, list[int]] = {}  # open jobs that are flying, staged or evicted
        self._expiries: list[float] = []  # a heap of the keys of `_expiring`
        self._expiring: dict[float, list[int]] = {}  # jobs that expire then; some may have ended
        self._num_expiring = 0
        self._rows: dict[tuple[str, Owner], Totals] = {}

    # --- the way of a job

    def refuse(self, predictor: str, owner: Owner, reason: str) -> None:
        """Book a prediction that was planned and refused in one breath; it needs no job number."""
        row = self._row(predictor, owner)
        row.planned += 1
        row.refused += 1
        _count(row.reasons, "refused:" + reason)

    def plan(
        self,
        job: int,
        block: int,
        parts_mask: int | None,
        predictor: str,
        owner: Owner,
        probability: float,
        record_bytes: int,
        need_by: float,
    ) -> None:
        """Open a job. Job numbers are the caller's and never reused."""
        assert job not in self._open, f"job {job} planned twice"
        expires = need_by + self.horizon_s
        row = self._row(predictor, owner)
        self._open[job] = _Job(block, parts_mask, predictor, owner, probability, record_bytes, expires, row)
        self._expire_at(expires, job)
        row.planned += 1
        row.open += 1
        if self._num_expiring > 2 * len(self._open) + 64:
            self._compact()

    def withdraw(self, job: int, reason: str) -> Settled:
        """A waiting job is refused after all."""
        record = self._open[job]
        assert record.state is WAITING, f"job {job} is {record.state.name}, not waiting"
        return self._settle(job, record, REFUSED, reason)

    def issued(self, job: int) -> None:
        """A waiting job went to the device."""
        record = self._open[job]
        assert record.state is WAITING, f"job {job} issued in state {record.state.name}"
        record.state = FLYING
        self._of_block.setdefault(record.block, []).append(job)

    def cancel(self, job: int) -> Settled | None:
        """Nobody wants the job any more. None, and nothing changes, if it has landed or ended."""
        record = self._open.get(job)
        if record is None or record.state not in (WAITING, FLYING):
            return None
        return self._settle(job, record, CANCELLED)

    def staged(self, job: int, now: float) -> Settled | None:
        """A flying job's bytes are in staging; it ends as late if somebody has waited for them. Unknown jobs
        are passed over."""
        record = self._open.get(job)
        if record is None:
            return None
        assert record.state is FLYING, f"job {job} staged in state {record.state.name}"
        record.state, record.staged_at = STAGED, now
        return self._settle(job, record, LATE) if record.wanted_at is not None else None

    def failed(self, job: int, reason: str) -> Settled | None:
        """A flying job ended without its bytes. Unknown (cancelled) jobs are passed over."""
        record = self._open.get(job)
        if record is None:
            return None
        assert record.state is FLYING, f"job {job} failed in state {record.state.name}"
        return self._settle(job, record, FAILED, reason)

    def evicted(self, block: int) -> int:
        """The block left staging: its unused jobs are early or useless, time will tell. Returns their
        bytes."""
        jobs = self._of_block.get(block)
        if jobs is None:
            return 0
        freed = 0
        for job in jobs:
            record = self._open[job]
            if record.state is STAGED:
                record.state = EVICTED
                freed += record.record_bytes
        return freed

    def demanded(
        self, block: int, parts_mask: int | None, where: Where, owner: Owner, now: float
    ) -> list[Settled]:
        """Somebody needs the block now and it was at `where`. Settles the jobs this need makes timely or
        early."""
        if where == "nvme":
            self._row("", owner).demand_misses += 1
        settled: list[Settled] = []
        jobs = self._of_block.get(block)
        if jobs is None:
            return settled
        for job in tuple(jobs):
            record = self._open[job]
            if not _overlap(record.parts_mask, parts_mask):
                continue
            if record.state is FLYING:
                record.wanted_at = now if record.wanted_at is None else record.wanted_at
            else:
                was_there = record.state is STAGED and where != "nvme"
                outcome = TIMELY if was_there else EARLY
                settled.append(self._settle(job, record, outcome, lead_s=now - record.staged_at))
        return settled

    def expire(self, now: float) -> list[Settled]:
        """Settle as useless what was staged and not needed within its horizon. Flying jobs are left until
        they are answered."""
        settled: list[Settled] = []
        unanswered = []
        expiries, is_open = self._expiries, self._open.get
        while expiries and expiries[0] <= now:
            jobs = self._expiring.pop(heapq.heappop(expiries))
            self._num_expiring -= len(jobs)
            for job in sorted(jobs):
                record = is_open(job)
                if record is None:
                    continue
                if record.state in (STAGED, EVICTED):
                    settled.append(self._settle(job, record, USELESS))
                else:
                    unanswered.append(job)
        for job in unanswered:
            self._expire_at(now + self.horizon_s, job)
        return settled

    def close(self) -> None:
        """Nothing will happen any more: what waits or flies is cancelled, what was not used is useless."""
        for job, record in list(self._open.items()):
            has_landed = record.state in (STAGED, EVICTED)
            self._settle(job, record, USELESS if has_landed else CANCELLED)

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do."""
        expiries, is_open = self._expiries, self._open
        while expiries:
            jobs = self._expiring[expiries[0]]
            while jobs:
                if jobs[-1] in is_open:
                    return expiries[0]
                jobs.pop()
                self._num_expiring -= 1
            del self._expiring[heapq.heappop(expiries)]
        return None

    # --- queries

    @property
    def num_open(self) -> int:
        """Jobs planned and not yet ended."""
        return len(self._open)

    def follows(self, block: int) -> bool:
        """A job of the block has been issued and has not ended: `evicted` of it would be news."""
        return block in self._of_block

    def is_open(self, job: int) -> bool:
        """Planned, and not ended."""
        return job in self._open

    def totals(
        self, *, predictor: str | None = None, space: str | None = None, tenant: str | None = None
    ) -> Totals:
        """The sum of the rows that match. Demand misses belong to no predictor, so `predictor` does not
        select among them."""
        total = Totals()
        for (name, owner), row in self._rows.items():
            if space in (None, owner.space) and tenant in (None, owner.tenant):
                if predictor in (None, name):
                    total.add(row)
                else:
                    total.demand_misses += row.demand_misses
        return total

    def predictors(self) -> list[str]:
        """Names with at least one planned job, sorted."""
        return sorted({name for (name, _), row in self._rows.items() if row.planned})

    def spaces(self) -> list[str]:
        """Those with at least one planned job, sorted."""
        return sorted({owner.space for (_, owner), row in self._rows.items() if row.planned})

    def check_integrity(self) -> None:
        """Assert that the ledger adds up: per row and in total, ``planned == sum(outcomes) + open``."""
        for key, row in self._rows.items():
            assert row.planned == row.settled + row.open, (
                f"{key}: {row.planned} planned, {row.settled} settled, {row.open} open"
            )
            assert sum(row.leads) == row.timely, f"{key}: leads do not add up to timely"
            refused = sum(n for reason, n in row.reasons.items() if reason.startswith("refused:"))
            assert refused == row.refused, f"{key}: refusals do not add up"
        assert self.totals().open == len(self._open), "open jobs do not add up"
        located = [job for jobs in self._of_block.values() for job in jobs]
        expected = [job for job, record in self._open.items() if record.state is not WAITING]
        assert sorted(located) == sorted(expected), "block table and open jobs disagree"
        assert all(self._of_block.values()), "empty entry in the block table"
        assert sorted(self._expiries) == sorted(self._expiring), "expiries and their jobs disagree"
        expiring = [job for jobs in self._expiring.values() for job in jobs]
        assert len(expiring) == self._num_expiring, "expiring jobs are miscounted"
        assert self._open.keys() <= set(expiring), "an open job never expires"

    # --- inside

    def _row(self, predictor: str, owner: Owner) -> Totals:
        row = self._rows.get((predictor, owner))
        if row is None:
            if len(self._rows) >= self.max_rows:
                owner = OTHERS
            row = self._rows.setdefault((predictor, owner), Totals())
        return row

    def _settle(
        self, job: int, record: _Job, outcome: Outcome, reason: str = "", lead_s: float = 0.0
    ) -> Settled:
        del self._open[job]
        row = record.row
        row.open -= 1
        row.count(outcome)
        if reason:
            _count(row.reasons, f"{outcome}:{reason}")
        if record.state is not WAITING:
            self._book_issued(job, record, row)
        if outcome is TIMELY:
            row.lead_sum_s += lead_s
            row.leads[_lead_bucket(lead_s)] += 1
            row.used_bytes += record.record_bytes
        elif outcome is LATE:
            assert record.wanted_at is not None
            row.late_sum_s += record.staged_at - record.wanted_at
            row.used_bytes += record.record_bytes
        holds = record.state is STAGED
        return Settled(job, outcome, record.predictor, record.probability, record.record_bytes, holds)

    def _book_issued(self, job: int, record: _Job, row: Totals) -> None:
        row.issued += 1
        row.issued_bytes += record.record_bytes
        jobs = self._of_block[record.block]
        if len(jobs) == 1:
            del self._of_block[record.block]
        else:
            jobs.remove(job)

    def _expire_at(self, when: float, job: int) -> None:
        jobs = self._expiring.get(when)
        if jobs is None:
            heapq.heappush(self._expiries, when)
            self._expiring[when] = [job]
        else:
            jobs.append(job)
        self._num_expiring += 1

    def _compact(self) -> None:
        left = {when: [job for job in jobs if job in self._open] for when, jobs in self._expiring.items()}
        self._expiring = {when: jobs for when, jobs in left.items() if jobs}
        self._expiries = sorted(self._expiring)
        self._num_expiring = sum(map(len, self._expiring.values()))


def _overlap(a: int | None, b: int | None) -> bool:
    return a is None or b is None or bool(a & b)


def _count(counters: dict[str, int], name: str) -> None:
    counters[name] = counters.get(name, 0) + 1


def _lead_bucket(lead_s: float) -> int:
    return bisect_left(LEAD_BOUNDS_S, lead_s)
