"""Predictors: who will want which block, by when, and how surely. Pure; `now` is handed in.

Theory of operation. A predictor sees the stream of events (`observe`) and, asked (`predict`), gives the
predictions that are *new* since it was last asked: it never repeats itself on a later call unless something
made the block wanted again. It does not know what is resident, what the device can do or what others
predicted; the arbiter weighs all that. So predictors are cheap: work is in proportion to the event, never to
everything ever seen, and state is kept per live sequence or in a bounded table.

`Predictor.interests` names the event classes it wants; the prefetch core calls nobody else. `next_wakeup` is
when it will have something to say without any event (None: never). When a sequence ends or is forgotten it
gets `Finished` or `SequenceGone` and drops what it kept for it.

The predictors here are the first forms: `SlidingWindow` (read-ahead of a load), `AttentionPrevious` and
`AttentionEwma` (history of sparse decode steps), `Hints` (an engine's ranked hints) and `CrossRequest` (a
finished or paused conversation returns). `AttentionLearned` combines history and hints by what they proved
worth. Whether they are right is the ledger's business; how much they may
spend is the arbiter's.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from dpurt.core.attention import AttentionModel, AttentionSequence, AttentionSettings, Columns
from dpurt.core.events import (
    NOBODY,
    Arrived,
    Consumed,
    DecodeStep,
    Event,
    Finished,
    Owner,
    Paused,
    Resumed,
    SequenceGone,
    Stored,
)

WHOLE = None  # a parts mask that names every part


class Prediction(NamedTuple):
    """`block` (or those of its parts whose bits are set; None: whole) will be wanted at `need_by` with
    `probability`.

    `sequence` is whose end makes it pointless, or None when it outlives sequences. `worth` is what a place in
    staging is worth to it, in the unit of `dpurt.core.eviction.Outlook`; None: its probability. A tuple, not a dataclass:
    made by the dozen on every arrival.
    """

    block: int
    parts_mask: int | None
    need_by: float
    probability: float
    predictor: str
    sequence: int | None
    owner: Owner = NOBODY
    worth: float | None = None


class Predictor(Protocol):
    """See the module's docstring for the contract."""

    @property
    def name(self) -> str: ...

    @property
    def interests(self) -> frozenset[type[Event]]: ...

    def observe(self, event: Event, now: float) -> None: ...

    def predict(self, now: float) -> list[Prediction]: ...

    def next_wakeup(self) -> float | None: ...


class _Drain:
    """The part all predictors share: what was said since the last `predict`."""

    def __init__(self) -> None:
        self._fresh: list[Prediction] = []

    def predict(self, now: float) -> list[Prediction]:
        """Predictions new since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def next_wakeup(self) -> float | None:
        """Only events make this predictor speak."""
        return None


# --- sliding window -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Load:
    """One sequence's load: `cursor` is the next block the host will ask for, `frontier` the next we will
    predict."""

    blocks: tuple[int, ...]
    owner: Owner
    start: float
    block_s: float
    cursor: int = 0
    frontier: int = 0
    moved_at: float | None = None


class SlidingWindow(_Drain):
    """The `lookahead_blocks` blocks just ahead of each load's cursor, timed by the rate at which the load
    consumes them.

    The first window is predicted on arrival (U20), for the expected start if that is known. `block_s` is the
    time a load takes per block until one is measured; loads teach it to their successors.
    """

    name = "sliding_window"
    interests = frozenset({Arrived, Consumed, Paused, Resumed, Finished, SequenceGone})
    SURE = 0.98  # an arrived request may still be cancelled
    RATE_GAIN = 0.2
    LESSON_GAIN = 0.02  # loads overlap, so each teaches little

    def __init__(self, lookahead_blocks: int = 16, block_s: float = 0.01) -> None:
        super().__init__()
        if lookahead_blocks < 1 or block_s <= 0:
            raise ValueError("lookahead_blocks must be >= 1 and block_s > 0")
        self.lookahead_blocks = lookahead_blocks
        self.block_s = block_s
        self._loads: dict[int, _Load] = {}

    def observe(self, event: Event, now: float) -> None:
        match event:
            case Arrived(sequence, owner, blocks, expected_start):
                start = now if expected_start is None else max(now, expected_start)
                self._loads[sequence] = load = _Load(blocks, owner, start, self.block_s)
                self._extend(sequence, load, start)
            case Consumed(sequence, first, count) if sequence in self._loads:
                self._advance(sequence, self._loads[sequence], first + count, now)
            case Paused(sequence) if sequence in self._loads:
                self._loads[sequence].moved_at = None
            case Resumed(sequence) if sequence in self._loads:
                load = self._loads[sequence]
                load.frontier = load.cursor  # what was staged before the pause may have left
                self._extend(sequence, load, now)
            case Finished(sequence) | SequenceGone(sequence):
                self._loads.pop(sequence, None)
            case _:
                pass

    def _advance(self, sequence: int, load: _Load, cursor: int, now: float) -> None:
        if cursor <= load.cursor:
            return
        if load.moved_at is not None:
            measured = (now - load.moved_at) / (cursor - load.cursor)
            load.block_s += self.RATE_GAIN * (measured - load.block_s)
            self.block_s += self.LESSON_GAIN * (measured - self.block_s)
        load.moved_at = now
        load.cursor = cursor
        self._extend(sequence, load, now)

    def _extend(self, sequence: int, load: _Load, start: float) -> None:
        """Predict from the frontier to the window's end; the block at the cursor is wanted at `start`."""
        first = max(load.frontier, load.cursor)
        end = min(load.cursor + self.lookahead_blocks, len(load.blocks))
        for i in range(first, end):
            need_by = start + (i - load.cursor) * load.block_s
            self._fresh.append(
                Prediction(load.blocks[i], WHOLE, need_by, self.SURE, self.name, sequence, load.owner)
            )
        load.frontier = max(load.frontier, end)


# --- attention: history of sparse decode steps --------------------------------------------------------------


@dataclass(slots=True)
class _StepClock:
    """How long a sequence's decode steps take, measured on one layer group's consecutive steps."""

    step: int
    at: float
    step_s: float

    def tick(self, step: int, now: float) -> None:
        if step > self.step:
            self.step_s += 0.3 * ((now - self.at) / (step - self.step) - self.step_s)
            self.step, self.at = step, now


class _Attention(_Drain, ABC):
    """State per (sequence, layer group), for as long as the sequence lives. Subclasses give `_foresee`."""

    name: str
    interests = frozenset({Arrived, DecodeStep, Finished, SequenceGone})
    STEP_S = 0.02  # until measured: a decode step takes 10-30 ms

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, Owner] = {}
        self._clocks: dict[int, dict[int, _StepClock]] = {}

    def observe(self, event: Event, now: float) -> None:
        match event:
            case Arrived(sequence, owner):
                self._owners[sequence] = owner
            case DecodeStep(sequence, step, group):
                need_by = now + self._clock(sequence, group, step, now).step_s
                owner = self._owners.get(sequence, NOBODY)
                for block, probability in self._foresee(event):
                    self._fresh.append(
                        Prediction(block, 1 << group, need_by, probability, self.name, sequence, owner)
                    )
            case Finished(sequence) | SequenceGone(sequence):
                self._owners.pop(sequence, None)
                self._clocks.pop(sequence, None)
                self._forget(sequence)
            case _:
                pass

    def _clock(self, sequence: int, group: int, step: int, now: float) -> _StepClock:
        clock = self._clocks.setdefault(sequence, {}).setdefault(group, _StepClock(step, now, self.STEP_S))
        clock.tick(step, now)
        return clock

    @abstractmethod
    def _foresee(self, event: DecodeStep) -> Iterator[tuple[int, float]]:
        """(block, probability) for the group's next step."""

    @abstractmethod
    def _forget(self, sequence: int) -> None:
        """Drop what is kept for a sequence that ended."""


class AttentionPrevious(_Attention):
    """What a layer group touched in this step it touches in the next. Keeps nothing but clocks."""

    name = "attention_prev"
    PERSISTENCE = 0.69  # measured: consecutive steps share 67-71 % of their top blocks

    def _foresee(self, event: DecodeStep) -> Iterator[tuple[int, float]]:
        return ((block, self.PERSISTENCE) for block in event.touched)

    def _forget(self, sequence: int) -> None:
        pass


class AttentionEwma(_Attention):
    """Blocks with the highest decayed count of touches (or of attention mass, where the event carries it),
    per layer group.

    Decay is lazy: a block's mass is stored with its step, in a table of at most `max_blocks` per layer group
    from which the lightest are dropped. Predicts the `budget` heaviest at or above `floor` that this step did
    not touch: those it touched are in staging already and `AttentionPrevious` speaks for them.
    """

    name = "attention_ewma"

    def __init__(
        self, alpha: float = 0.2, budget: int = 4, floor: float = 0.05, max_blocks: int = 4096
    ) -> None:
        super().__init__()
        if not 0 < alpha < 1 or budget < 1 or max_blocks < budget:
            raise ValueError("alpha must lie in (0, 1), budget be >= 1 and max_blocks >= budget")
        self.alpha = alpha
        self.budget = budget
        self.floor = floor
        self.max_blocks = max_blocks
        self._mass: dict[int, dict[int, dict[int, tuple[float, int]]]] = {}

    def _foresee(self, event: DecodeStep) -> Iterator[tuple[int, float]]:
        table = self._mass.setdefault(event.sequence, {}).setdefault(event.group, {})
        masses = event.masses if event.masses is not None else (1.0,) * len(event.touched)
        for block, mass in zip(event.touched, masses, strict=True):
            table[block] = (self._decayed(table, block, event.step) + self.alpha * mass, event.step)
        if len(table) > self.max_blocks:
            self._prune(table, event.step)
        return iter(self._heaviest(table, event))

    def _decayed(self, table: dict[int, tuple[float, int]], block: int, step: int) -> float:
        mass, since = table.get(block, (0.0, step))
        return mass * math.pow(1 - self.alpha, max(0, step - since))

    def _heaviest(self, table: dict[int, tuple[float, int]], event: DecodeStep) -> list[tuple[int, float]]:
        touched = set(event.touched)
        weighed = [(self._decayed(table, b, event.step), -b) for b in table if b not in touched]
        top = heapq.nlargest(self.budget, weighed)
        return [(-negative, min(1.0, mass)) for mass, negative in top if mass >= self.floor]

    def _prune(self, table: dict[int, tuple[float, int]], step: int) -> None:
        """Drop the lightest quarter, so that pruning is rare."""
        by_mass = sorted(table, key=lambda block: (self._decayed(table, block, step), -block))
        for block in by_mass[: len(table) - self.max_blocks * 3 // 4]:
            del table[block]

    def _forget(self, sequence: int) -> None:
        self._mass.pop(sequence, None)


class Hints(_Drain):
    """An engine's own ranked hints, taken as they come: the better the rank, the likelier."""

    name = "hint"
    interests = frozenset({Arrived, DecodeStep, Finished, SequenceGone})
    FIRST = 0.95
    FALL = 0.08  # measured: about one half true over the first ranks, one layer ahead

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, Owner] = {}

    def observe(self, event: Event, now: float) -> None:
        match event:
            case Arrived(sequence, owner):
                self._owners[sequence] = owner
            case DecodeStep(sequence):
                self._take(event, self._owners.get(sequence, NOBODY))
            case Finished(sequence) | SequenceGone(sequence):
                self._owners.pop(sequence, None)
            case _:
                pass

    def _take(self, event: DecodeStep, owner: Owner) -> None:
        for hint in event.ranked:
            for rank, block in enumerate(hint.blocks):
                probability = self.FIRST / (1 + self.FALL * rank)
                self._fresh.append(
                    Prediction(
                        block, 1 << hint.group, hint.need_by, probability, self.name, event.sequence, owner
                    )
                )


# --- attention: history and hints, learned ------------------------------------------------------------------


class _Decode:
    """One decoding sequence: its blocks' columns, its layer groups in the order they run, its step time.

    Columns follow the chain where it fits `max_columns`, else the order in which blocks were first named.
    Blocks beyond `max_columns` have none: nothing is learned or said of them.
    """

    def __init__(self, model: AttentionModel, owner: Owner, max_columns: int) -> None:
        self.owner = owner
        self.learned = AttentionSequence(model, 0)
        self.blocks: list[int] = []
        self.clocks: dict[int, _StepClock] = {}
        self._max_columns = max_columns
        self._column_of: dict[int, int] = {}

    def name(self, blocks: Iterable[int]) -> None:
        """Give these blocks columns, as far as there is room."""
        for block in blocks:
            if block not in self._column_of and len(self.blocks) < self._max_columns:
                self._column_of[block] = len(self.blocks)
                self.blocks.append(block)
        self.learned.extend(len(self.blocks))

    def columns(self, blocks: Sequence[int]) -> tuple[Columns, list[int]]:
        """The columns of those blocks that have one, each once, and their places in `blocks`."""
        self.name(blocks)
        first: dict[int, int] = {}
        for place, block in enumerate(blocks):
            column = self._column_of.get(block)
            if column is not None:
                first.setdefault(column, place)
        return np.fromiter(first, np.intp, len(first)), list(first.values())

    def group_after(self, group: int, distance: int) -> int:
        """The group that runs so many groups after this one, of those seen."""
        seen = sorted(self.clocks)
        return seen[(seen.index(group) + distance) % len(seen)]


class AttentionLearned(_Drain):
    """History and hints of sparse decode, combined as they prove worth, per layer group: `dpurt.core.attention`.

    For each group an engine ranks, and without hints for the group that runs `ahead` groups later, the blocks
    likely to be wanted at its turn are said, at most `reach` and none under `floor`. Blocks in staging are said
    too: what is resident is not known here. The weights are shared by all sequences. One turn of one group
    costs 0.2 to 0.5 ms, so this is for some thousand turns a second, not for each layer of many sequences.
    """

    name = "attention"
    interests = frozenset({Arrived, Stored, DecodeStep, Finished, SequenceGone})
    MAX_GROUPS = 128

    def __init__(
        self,
        settings: AttentionSettings | None = None,
        reach: int = 32,
        floor: float = 0.05,
        ahead: int = 4,
        max_columns: int = 1024,
    ) -> None:
        super().__init__()
        if reach < 1 or ahead < 1 or max_columns < reach:
            raise ValueError("reach and ahead must be >= 1, and max_columns >= reach")
        self.reach = reach
        self.floor = floor
        self.ahead = ahead
        self.max_columns = max_columns
        self._model = AttentionModel(self.MAX_GROUPS, settings)
        self._owners: dict[int, Owner] = {}
        self._chains: dict[int, tuple[int, ...]] = {}
        self._decodes: dict[int, _Decode] = {}

    def observe(self, event: Event, now: float) -> None:
        match event:
            case Arrived(sequence, owner, blocks):
                self._owners[sequence] = owner
                self._chains[sequence] = blocks if len(blocks) <= self.max_columns else ()
            case Stored(sequence, blocks) if sequence in self._decodes:
                if self._chains.get(sequence):
                    self._decodes[sequence].name(blocks)
            case DecodeStep(sequence, _, group) if group < self.MAX_GROUPS:
                self._step(event, self._decode(sequence), now)
            case Finished(sequence) | SequenceGone(sequence):
                for table in (self._owners, self._chains, self._decodes):
                    table.pop(sequence, None)
            case _:
                pass

    def _decode(self, sequence: int) -> _Decode:
        decode = self._decodes.get(sequence)
        if decode is None:
            owner = self._owners.get(sequence, NOBODY)
            decode = self._decodes[sequence] = _Decode(self._model, owner, self.max_columns)
            decode.name(self._chains.get(sequence, ()))
        return decode

    def _step(self, event: DecodeStep, decode: _Decode, now: float) -> None:
        clock = decode.clocks.setdefault(event.group, _StepClock(event.step, now, _Attention.STEP_S))
        clock.tick(event.step, now)
        if event.touched:
            columns, places = decode.columns(event.touched)
            masses = None
            if event.masses is not None:
                masses = np.array([event.masses[place] for place in places], np.float32)
            decode.learned.demanded(event.group, columns, masses)
        for hint in event.ranked:
            if hint.group < self.MAX_GROUPS:
                decode.learned.hint(hint.group, decode.columns(hint.blocks)[0])
                self._say(event.sequence, decode, hint.group, hint.need_by)
        if not event.ranked:
            target = decode.group_after(event.group, self.ahead)
            share = min(1.0, self.ahead / len(decode.clocks))
            self._say(event.sequence, decode, target, now + share * clock.step_s)

    def _say(self, sequence: int, decode: _Decode, group: int, need_by: float) -> None:
        probability = decode.learned.now(group)
        likely = np.flatnonzero(probability >= self.floor)
        best = likely[np.argsort(-probability[likely], kind="stable")[: self.reach]]
        for column in best.tolist():
            self._fresh.append(
                Prediction(
                    decode.blocks[column],
                    1 << group,
                    need_by,
                    float(probability[column]),
                    self.name,
                    sequence,
                    decode.owner,
                )
            )


# --- cross-request: a conversation returns ------------------------------------------------------------------

AGE_EDGES = (0.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
# Mooncake conversation trace: share of requests with a follow-up within each edge above (any depth)
FOLLOW_UP = (0.0, 0.002, 0.022, 0.084, 0.195, 0.315, 0.388, 0.409)
# the same trace: follow-up within 10 minutes at turn depth 1, 2, ... 6 and more
BY_DEPTH = (0.31, 0.42, 0.52, 0.63, 0.62, 0.77)


class ReturnHazard:
    """Rate (1/s) at which a conversation idle for some time returns, by turn depth; a table of depth x age
    bins.

    The priors are the tables above, worth `prior_chains` observed conversations; `exposed` and `returned`
    teach it online, so a trace of agents, which return in seconds, soon looks unlike one of chats.
    """

    def __init__(self, prior_chains: float = 20.0) -> None:
        self._returns = [[0.0] * len(AGE_EDGES) for _ in BY_DEPTH]
        self._exposure_s = [[0.0] * len(AGE_EDGES) for _ in BY_DEPTH]
        for depth, within_10_min in enumerate(BY_DEPTH):
            scale = within_10_min / FOLLOW_UP[AGE_EDGES.index(600.0)]
            for age_bin in range(len(AGE_EDGES) - 1):
                self._set_prior(depth, age_bin, scale, prior_chains)

    def _set_prior(self, depth: int, age_bin: int, scale: float, chains: float) -> None:
        gone_before, gone_after = (min(0.99, FOLLOW_UP[i] * scale) for i in (age_bin, age_bin + 1))
        waiting = chains * (1 - (gone_before + gone_after) / 2)
        self._returns[depth][age_bin] = chains * (gone_after - gone_before)
        self._exposure_s[depth][age_bin] = waiting * (AGE_EDGES[age_bin + 1] - AGE_EDGES[age_bin])

    def exposed(self, depth: int, age_bin: int, seconds: float) -> None:
        """A conversation was idle for `seconds` within the bin."""
        self._exposure_s[_row(depth)][age_bin] += seconds

    def returned(self, depth: int, age_bin: int) -> None:
        """A conversation came back at an age in the bin."""
        self._returns[_row(depth)][age_bin] += 1

    def probability(self, depth: int, age_bin: int, seconds: float) -> float:
        """That a conversation whose age is in the bin returns within the next `seconds` of it."""
        row = _row(depth)
        exposure = self._exposure_s[row][age_bin]
        return -math.expm1(-self._returns[row][age_bin] / exposure * seconds) if exposure > 0 else 0.0


def _row(depth: int) -> int:
    return min(depth, len(BY_DEPTH)) - 1


def _age_bin(age: float) -> int:
    """The bin an age lies in; the last edge and beyond belong to the last bin."""
    last = len(AGE_EDGES) - 2
    return next((i for i in range(last) if age < AGE_EDGES[i + 1]), last)


@dataclass(slots=True)
class _Chain:
    """A conversation: its blocks in prefix order, its depth in turns, and, while idle, since when."""

    blocks: tuple[int, ...]
    depth: int
    owner: Owner
    idle_since: float | None = None
    age_bin: int = 0


class CrossRequest(_Drain):
    """After a turn ends its chain returns with a hazard that depends on depth and age; arrival and resume
    fire at once.

    An idle chain is looked at when it enters an age bin: if its chance of returning within the next
    `window_s` reaches `floor`, its first `head_blocks` blocks are predicted (later ones arrive while those
    load), and it is looked at again a window later. While the chance is below the floor (the dead time)
    nothing is predicted, so the blocks may leave. The window should not exceed the time an unused block
    survives in staging: what is fetched earlier has left when its use comes. A pause with an expected length
    is predicted for its end instead.

    A request continues a chain when the last block it matched is one of that chain's last two (a turn's last
    block is often partial and changes). At most `max_chains` are kept, oldest dropped first.
    """

    name = "cross_request"
    interests = frozenset({Arrived, Stored, Paused, Resumed, Finished, SequenceGone})
    SURE = 0.98

    def __init__(
        self,
        head_blocks: int = 16,
        floor: float = 0.05,
        window_s: float = 10.0,
        block_s: float = 0.01,
        max_chains: int = 16_384,
        hazard: ReturnHazard | None = None,
    ) -> None:
        super().__init__()
        if head_blocks < 1 or max_chains < 1 or window_s <= 0:
            raise ValueError("head_blocks and max_chains must be >= 1 and window_s > 0")
        self.head_blocks = head_blocks
        self.floor = floor
        self.window_s = window_s
        self.block_s = block_s
        self.max_chains = max_chains
        self.hazard = hazard or ReturnHazard()
        self._active: dict[int, _Chain] = {}  # by sequence
        self._idle: dict[int, _Chain] = {}  # by serial number, oldest first
        self._serial = 0
        self._serial_of_tail: dict[int, int] = {}
        self._timers: list[tuple[float, int, int]] = []  # when, serial, age bin entered
        self._reactions: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Stored: self._stored,
            Paused: self._paused,
            Resumed: self._resumed,
            Finished: self._finished,
            SequenceGone: self._gone,
        }

    def observe(self, event: Event, now: float) -> None:
        self._reactions[type(event)](event, now)

    def predict(self, now: float) -> list[Prediction]:
        while self._timers and self._timers[0][0] <= now:
            when, serial, age_bin = heapq.heappop(self._timers)
            chain = self._idle.get(serial)
            if chain is not None and chain.age_bin < age_bin:
                self._left_bin(serial, chain, chain.age_bin)
            if serial in self._idle and chain is not None:
                self._look_at(serial, chain, age_bin, when)
        return super().predict(now)

    def next_wakeup(self) -> float | None:
        while self._timers and self._timers[0][1] not in self._idle:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _arrived(self, event: Arrived, now: float) -> None:
        parent = self._continue_chain(event.blocks, now)
        depth = parent.depth + 1 if parent else 1
        self._active[event.sequence] = _Chain(event.blocks, depth, event.owner)
        start = now if event.expected_start is None else max(now, event.expected_start)
        self._say(self._active[event.sequence], start, self.block_s, self.SURE, event.sequence)

    def _stored(self, event: Stored, now: float) -> None:
        chain = self._active.get(event.sequence)
        if chain is not None:
            chain.blocks += event.blocks

    def _paused(self, event: Paused, now: float) -> None:
        chain = self._active.get(event.sequence)
        if chain is not None and event.expected_s is not None:
            self._say(chain, now + event.expected_s, self.block_s, self.SURE, event.sequence)

    def _resumed(self, event: Resumed, now: float) -> None:
        chain = self._active.get(event.sequence)
        if chain is not None:
            self._say(chain, now, self.block_s, self.SURE, event.sequence)

    def _gone(self, event: SequenceGone, now: float) -> None:
        """A cancelled or forgotten sequence teaches nothing about returns."""
        self._active.pop(event.sequence, None)

    def _finished(self, event: Finished, now: float) -> None:
        chain = self._active.pop(event.sequence, None)
        if chain is None or not chain.blocks:
            return
        self._serial += 1
        chain.idle_since, chain.age_bin = now, 0
        self._idle[self._serial] = chain
        for block in chain.blocks[1:][-2:]:  # never the root: it is everybody's
            self._serial_of_tail[block] = self._serial
        self._set_timer(now, self._serial, 0)
        if len(self._idle) > self.max_chains:
            self._drop(next(iter(self._idle)))

    def _continue_chain(self, blocks: tuple[int, ...], now: float) -> _Chain | None:
        serial = self._serial_of_tail.get(blocks[-1]) if blocks else None
        chain = self._idle.get(serial) if serial is not None else None
        if serial is None or chain is None or chain.idle_since is None:
            return None
        age = max(0.0, now - chain.idle_since)
        age_bin = _age_bin(age)
        self.hazard.exposed(chain.depth, age_bin, age - AGE_EDGES[age_bin])
        self.hazard.returned(chain.depth, age_bin)
        self._drop(serial)
        return chain

    def _drop(self, serial: int) -> None:
        chain = self._idle.pop(serial)
        for block in chain.blocks[-2:]:
            if self._serial_of_tail.get(block) == serial:
                del self._serial_of_tail[block]

    def _look_at(self, serial: int, chain: _Chain, age_bin: int, when: float) -> None:
        """Predict for the window ahead if it is worth it, and set the timer for the next look."""
        assert chain.idle_since is not None, "only idle chains have timers"
        leaves_bin = chain.idle_since + AGE_EDGES[age_bin + 1]
        window_s = min(self.window_s, leaves_bin - when)
        probability = self.hazard.probability(chain.depth, age_bin, window_s)
        if probability < self.floor:
            self._set_timer(leaves_bin, serial, age_bin + 1)
            return
        self._say(chain, when + window_s / 2, 0.0, probability, None)
        is_last_window = when + window_s >= leaves_bin
        self._set_timer(when + window_s, serial, age_bin + 1 if is_last_window else age_bin)

    def _set_timer(self, when: float, serial: int, age_bin: int) -> None:
        heapq.heappush(self._timers, (when, serial, age_bin))

    def _left_bin(self, serial: int, chain: _Chain, age_bin: int) -> None:
        """The chain has grown out of this bin without returning."""
        self.hazard.exposed(chain.depth, age_bin, AGE_EDGES[age_bin + 1] - AGE_EDGES[age_bin])
        chain.age_bin = age_bin + 1
        if chain.age_bin == len(AGE_EDGES) - 1:
            self._drop(serial)

    def _say(
        self, chain: _Chain, start: float, block_s: float, probability: float, sequence: int | None
    ) -> None:
        for i, block in enumerate(islice(chain.blocks, self.head_blocks)):
            self._fresh.append(
                Prediction(block, WHOLE, start + i * block_s, probability, self.name, sequence, chain.owner)
            )


_FIRST_FORM: dict[str, Callable[[int], Predictor]] = {
    "sliding_window": lambda lookahead: SlidingWindow(lookahead_blocks=lookahead),
    "hint": lambda _lookahead: Hints(),
    "attention_prev": lambda _lookahead: AttentionPrevious(),
    "attention_ewma": lambda _lookahead: AttentionEwma(),
    "attention": lambda _lookahead: AttentionLearned(),
    "cross_request": lambda _lookahead: CrossRequest(),
}


def make_predictor(name: str, lookahead_blocks: int) -> Predictor:
    """A predictor by its name, with its usual settings. Raises KeyError for an unknown one."""
    return _FIRST_FORM[name](lookahead_blocks)
