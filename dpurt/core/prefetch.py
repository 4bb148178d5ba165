"""The prefetch core: events in, fetch commands out. Pure; the same code runs live, in shadow and in replay.

::

    event --> predictors that asked for its kind --> predictions --> arbiter --> Fetch, refused, or waiting
          \\-> ledger (what became of each job) ---- settled jobs --> arbiter (trust, staging held)

Contract with the caller (an agent, or the replay):

- Each `Fetch` is answered by exactly one `Staged` or `FetchFailed`, also after a `CancelFetch` for it, which
  is a wish.
- `Demanded` tells every need of a block, demand reads and hits alike, and where the block was; `Evicted` each time it
  leaves staging (where `heeds_eviction`, at least), `Dropped` the device. Without them the ledger is wrong, and nothing else.
- `tick` is called at `next_wakeup()` or somewhat later. Prefetch is advice: nothing breaks if it is not.

Sequences. Jobs are remembered with the sequences that wait for them until they land. When a sequence
finishes, pauses, is cancelled or dies, its jobs that serve nobody else end: waiting ones on the spot, flying
ones by a `CancelFetch`, all booked as cancelled before `handle` returns (U23). A job that outlives sequences
(a conversation's predicted return) is cancelled by none. A sequence unheard of for `forget_s` is treated as
gone.

Protection. `is_wanted` names blocks to spare if others can be evicted (U18): what a live sequence matched when
it arrived and has not asked for yet, and what it is predicted to ask for. A predicted interest ends with the
first demand of the block, or `PROTECT_S` after the predicted need.

Cost: in proportion to the event and the predictions it causes. Memory: live sequences, open jobs, the
predictors' bounded tables.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from dpurt.core.arbiter import Arbiter, Job, Refusal, StagingView
from dpurt.core.events import (
    NOBODY,
    Arrived,
    Consumed,
    Demanded,
    Dropped,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    LatencyMeasured,
    Owner,
    Paused,
    SequenceGone,
    Staged,
)
from dpurt.core.ledger import Ledger, Outcome, Settled, Totals
from dpurt.core.predictor import Prediction, Predictor


class Fetch(Struct, frozen=True, gc=False):
    """Read these parts (None: all) of the block from the device into staging. Behind every demand read."""

    job: int
    block: int
    parts_mask: int | None
    need_by: float
    predictor: str


class CancelFetch(Struct, frozen=True, gc=False):
    """Nobody waits for this fetch any more: drop it if it has not started. Answer the fetch all the same."""

    job: int


Command: TypeAlias = Fetch | CancelFetch


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """A snapshot. `trust` is the arbiter's factor per predictor."""

    total: Totals
    by_predictor: dict[str, Totals]
    by_space: dict[str, Totals]
    trust: dict[str, float]
    waiting: int
    flying: int
    held_bytes: int
    sequences: int


@dataclass(slots=True)
class _Sequence:
    """A live sequence: whose it is, when we last heard of it, the blocks it matched, how many of these it has asked
    for, and its jobs that have not landed."""

    owner: Owner
    heard_at: float
    blocks: tuple[int, ...] = ()
    cursor: int = 0
    jobs: set[int] = field(default_factory=set)


_Reaction = Callable[[Any, float], None]


class _Kind(NamedTuple):
    """What one kind of event calls for. `moves_wakeup`: the next wake-up may be another after it, whatever it causes."""

    react: _Reaction | None
    listeners: tuple[Predictor, ...]
    is_of_sequence: bool
    moves_wakeup: bool


_USED = {Outcome.TIMELY: True, Outcome.LATE: True, Outcome.EARLY: False, Outcome.USELESS: False}


class PrefetchCore:
    """See the module's docstring. One owner task; not thread-safe."""

    PROTECT_S = 10.0

    def __init__(
        self,
        predictors: Sequence[Predictor],
        arbiter: Arbiter,
        ledger: Ledger,
        view: StagingView,
        forget_s: float = 1800.0,
    ) -> None:
        self.arbiter = arbiter
        self.ledger = ledger
        self.view = view
        self._predictors = tuple(predictors)
        self._kinds: dict[type[Event], _Kind] = {}
        self._hears_evictions = any(Evicted in predictor.interests for predictor in predictors)
        self._said_at = math.inf  # when a predictor will speak without an event
        self._note_wakeups()
        self._wakeup: float | None = None
        self._is_wakeup_known = False
        self._forget_s = forget_s
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()  # the one heard of longest ago first
        self._waiters: dict[int, set[int] | None] = {}  # job not landed -> sequences; None: whoever leaves
        self._ahead: dict[
            int, int
        ] = {}  # block -> live sequences that matched it and have not asked for it yet
        self._wanted_until: dict[int, float] = {}
        self._sweep_at = 1024  # expired interests are swept out when there are this many
        self._commands: list[Command] = []
        self._reactions: dict[type[Event], _Reaction] = {
            Arrived: self._arrived,
            Consumed: self._consumed,
            Demanded: self._demanded,
            Staged: self._staged,
            FetchFailed: self._fetch_failed,
            Evicted: self._evicted,
            Dropped: self._dropped,
            Paused: self._let_go,
            Finished: self._ended,
            SequenceGone: self._ended,
            LatencyMeasured: self._latency_measured,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take note of the event and say what to fetch or to stop. Mutates; the commands are the caller's."""
        react, listeners, is_of_sequence, moves_wakeup = self._kinds.get(type(event)) or self._kind_of(event)
        if moves_wakeup:
            self._is_wakeup_known = False
        if is_of_sequence:
            self._hear_of(event.sequence, now)  # type: ignore[union-attr]
        if react is not None:
            react(event, now)
        predictions = self._ask(listeners, event, now) if listeners else []
        if predictions or self.arbiter.is_ready(now):
            self._plan(predictions, now)
        return self._take_commands() if self._commands else []

    def tick(self, now: float) -> list[Command]:
        """Do what is due without an event: expiries, timed predictions, bandwidth that became free."""
        self._is_wakeup_known = False
        self._settled(self.ledger.expire(now))
        self._forget_stale(now)
        predictions: list[Prediction] = []
        for predictor in self._predictors:
            due = predictor.next_wakeup()
            if due is not None and due <= now:
                predictions += predictor.predict(now)
        self._note_wakeups()
        if predictions or self.arbiter.num_waiting:
            self._plan(predictions, now)
        return self._take_commands()

    def next_wakeup(self) -> float | None:
        """When `tick` should be called, unless an event comes first; None: not before one does. May lie in
        the past."""
        if not self._is_wakeup_known:
            self._wakeup = self._next_wakeup()
            self._is_wakeup_known = True
        return self._wakeup

    def _next_wakeup(self) -> float | None:
        earliest = self._said_at
        due = self.arbiter.next_wakeup()
        if due is not None and due < earliest:
            earliest = due
        due = self.ledger.next_expiry()
        if due is not None and due < earliest:
            earliest = due
        if self._sequences:
            due = self._sequences[next(iter(self._sequences))].heard_at + self._forget_s
            if due < earliest:
                earliest = due
        return None if earliest == math.inf else earliest

    def heeds_eviction(self, block: int) -> bool:
        """`Evicted` of this block would tell the ledger or a predictor something; need not be told otherwise."""
        return self._hears_evictions or self.ledger.follows(block)

    def is_wanted(self, block: int, now: float) -> bool:
        """A live sequence is expected to ask for the block soon. Holds for the present call."""
        return block in self._ahead or self._wanted_until.get(block, now) > now

    def stats(self) -> PrefetchStats:
        """A snapshot of counters. Costs a pass over the ledger's rows."""
        names = self.ledger.predictors()
        return PrefetchStats(
            total=self.ledger.totals(),
            by_predictor={name: self.ledger.totals(predictor=name) for name in names},
            by_space={name: self.ledger.totals(space=name) for name in self.ledger.spaces()},
            trust={name: self.arbiter.trust(name) for name in names},
            waiting=self.arbiter.num_waiting,
            flying=self.arbiter.num_flying,
            held_bytes=self.arbiter.held_bytes,
            sequences=len(self._sequences),
        )

    # --- events

    def _arrived(self, event: Arrived, now: float) -> None:
        sequence = self._sequences.setdefault(event.sequence, _Sequence(event.owner, now))
        sequence.owner = event.owner
        self._pass(sequence, len(sequence.blocks))
        sequence.blocks, sequence.cursor = event.blocks, 0
        ahead = self._ahead
        for block in event.blocks:
            ahead[block] = ahead.get(block, 0) + 1

    def _consumed(self, event: Consumed, now: float) -> None:
        sequence = self._sequences.get(event.sequence)
        if sequence is not None:
            self._pass(sequence, event.first + event.count)

    def _pass(self, sequence: _Sequence, cursor: int) -> None:
        """The sequence has asked for its blocks before `cursor`, or will not."""
        ahead = self._ahead
        for block in sequence.blocks[sequence.cursor : cursor]:
            if ahead[block] == 1:
                del ahead[block]
            else:
                ahead[block] -= 1
        sequence.cursor = max(sequence.cursor, cursor)

    def _demanded(self, event: Demanded, now: float) -> None:
        self._wanted_until.pop(event.block, None)
        sequence = self._sequences.get(event.sequence)
        owner = sequence.owner if sequence else NOBODY
        self._settled(self.ledger.demanded(event.block, event.parts_mask, event.where, owner, now))
        if event.where == "nvme":
            self._withdraw_waiting(event.block, event.parts_mask, "overtaken")

    def _staged(self, event: Staged, now: float) -> None:
        job = self.arbiter.answered(event.job)
        self._land(event.job)
        settled = self.ledger.staged(event.job, now)
        if settled is not None:
            self._settled([settled])
        elif not self.ledger.is_open(event.job):  # cancelled meanwhile: nobody's bytes
            self.arbiter.release(job.record_bytes)

    def _fetch_failed(self, event: FetchFailed, now: float) -> None:
        job = self.arbiter.answered(event.job)
        self._land(event.job)
        self.ledger.failed(event.job, event.reason)
        self.arbiter.release(job.record_bytes)

    def _evicted(self, event: Evicted, now: float) -> None:
        freed = self.ledger.evicted(event.block)
        if freed:
            self.arbiter.release(freed)

    def _dropped(self, event: Dropped, now: float) -> None:
        """Flying jobs of the block will be answered with a failure; waiting ones end here."""
        freed = self.ledger.evicted(event.block)
        if freed:
            self.arbiter.release(freed)
        self._withdraw_waiting(event.block, None, "gone")

    def _let_go(self, event: Paused, now: float) -> None:
        self._cancel_jobs_of(event.sequence)

    def _ended(self, event: Finished | SequenceGone, now: float) -> None:
        self._cancel_jobs_of(event.sequence)
        sequence = self._sequences.pop(event.sequence, None)
        if sequence is not None:
            self._pass(sequence, len(sequence.blocks))

    def _latency_measured(self, event: LatencyMeasured, now: float) -> None:
        self.arbiter.latency_s = event.latency_s

    # --- sequences

    def _run_of(self, number: int | None) -> int:
        """How many of the blocks it matched a sequence has not asked for yet; 1 where nobody knows."""
        sequence = None if number is None else self._sequences.get(number)
        return 1 if sequence is None else max(1, len(sequence.blocks) - sequence.cursor)

    def _hear_of(self, number: int, now: float) -> None:
        sequence = self._sequences.get(number)
        if sequence is not None:
            sequence.heard_at = now
            self._sequences.move_to_end(number)

    def _cancel_jobs_of(self, number: int) -> None:
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        jobs, sequence.jobs = sorted(sequence.jobs), set()
        for job in jobs:
            waiters = self._waiters[job]
            assert waiters is not None, f"job {job} lasts and sequence {number} has it"
            waiters.discard(number)
            if not waiters:
                self._cancel(job)

    def _cancel(self, job: int) -> None:
        del self._waiters[job]
        settled = self.ledger.cancel(job)
        assert settled is not None, f"job {job} has waiters and has landed"
        if not self.arbiter.withdraw(job):
            self._commands.append(CancelFetch(job))

    def _forget_stale(self, now: float) -> None:
        while self._sequences:
            number, sequence = next(iter(self._sequences.items()))
            if sequence.heard_at + self._forget_s > now:
                return
            gone = SequenceGone(number)
            self._ended(gone, now)
            for predictor in self._kind_of(gone).listeners:
                predictor.observe(gone, now)

    def _wait(self, job: int, sequence: int | None) -> None:
        """`sequence` waits for the job. One we do not know (it ended, or never arrived) cannot cancel
        anything, and with it nobody can."""
        known = None if sequence is None else self._sequences.get(sequence)
        if sequence is None or known is None:
            if self._waiters.get(job):
                self._land(job)
            self._waiters[job] = None
            return
        waiters = self._waiters.setdefault(job, set())
        if waiters is not None:
            waiters.add(sequence)
            known.jobs.add(job)

    def _land(self, job: int) -> None:
        for number in self._waiters.pop(job, None) or ():
            self._sequences[number].jobs.discard(job)

    # --- jobs

    def _ask(self, predictors: Iterable[Predictor], event: Event, now: float) -> list[Prediction]:
        predictions: list[Prediction] = []
        for predictor in predictors:
            predictor.observe(event, now)
            predictions += predictor.predict(now)
        self._note_wakeups()
        return predictions

    def _note_wakeups(self) -> None:
        """Predictors were told something, or have spoken: nothing else changes when they will."""
        said_at = math.inf
        for predictor in self._predictors:
            due = predictor.next_wakeup()
            if due is not None and due < said_at:
                said_at = due
        self._said_at = said_at

    def _kind_of(self, event: Event) -> _Kind:
        kind = type(event)
        listeners = tuple(p for p in self._predictors if kind in p.interests)
        moves_wakeup = kind is not Evicted or bool(listeners)
        found = _Kind(self._reactions.get(kind), listeners, hasattr(event, "sequence"), moves_wakeup)
        return self._kinds.setdefault(kind, found)

    def _protect(self, predictions: Iterable[Prediction], now: float) -> None:
        wanted = self._wanted_until
        for prediction in predictions:
            if prediction.sequence is not None:
                until = prediction.need_by + self.PROTECT_S
                wanted[prediction.block] = max(until, wanted.get(prediction.block, until))
        if len(wanted) > self._sweep_at:
            self._wanted_until = {block: until for block, until in wanted.items() if until > now}
            self._sweep_at = 2 * len(self._wanted_until) + 1024

    def _plan(self, predictions: list[Prediction], now: float) -> None:
        self._is_wakeup_known = False
        if predictions:
            self._protect(predictions, now)
        plan = self.arbiter.plan(predictions, self.view, now, self._run_of)
        for job in plan.admitted:
            self._open(job)
        for refusal in plan.refusals:
            self._refused(refusal)
        for job in plan.fetches:
            self.ledger.issued(job.number)
            wanted = job.prediction
            self._commands.append(
                Fetch(job.number, wanted.block, wanted.parts_mask, wanted.need_by, wanted.predictor)
            )

    def _refused(self, refusal: Refusal) -> None:
        prediction, number = refusal.prediction, refusal.job
        if refusal.was_waiting:
            assert number is not None
            self._land(number)
            self.ledger.withdraw(number, refusal.reason)
            return
        self.ledger.refuse(prediction.predictor, prediction.owner, refusal.reason)
        if number is not None and number in self._waiters:
            self._wait(number, prediction.sequence)

    def _open(self, job: Job) -> None:
        wanted = job.prediction
        self.ledger.plan(
            job.number,
            wanted.block,
            wanted.parts_mask,
            wanted.predictor,
            wanted.owner,
            wanted.probability,
            job.record_bytes,
            wanted.need_by,
        )
        self._wait(job.number, wanted.sequence)

    def _withdraw_waiting(self, block: int, mask: int | None, reason: str) -> None:
        job = self.arbiter.waiting_on(block, mask)
        if job is not None:
            self.arbiter.withdraw(job)
            self._land(job)
            self.ledger.withdraw(job, reason)

    def _settled(self, settled: Iterable[Settled]) -> None:
        for _, outcome, predictor, probability, num_bytes, holds_staging in settled:
            if holds_staging:
                self.arbiter.release(num_bytes)
            if outcome in _USED:
                self.arbiter.learn(predictor, probability, _USED[outcome])

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands
