"""Predictors: who will want which block, by when, and how surely. Pure; `now` is handed in.

Theory of operation. A predictor sees the stream of events (`observe`) and, asked (`predict`), gives the
predictions that are *new* since it was last asked: it never repeats itself on a later call unless something
made the block wanted again. It does not know what is resident, what the device can do or what others
predicted; the arbiter weighs all that. So predictors are cheap: work is in proportion to the event, never to
everything ever seen, and state is kept per live sequence or in a bounded table.

`Predictor.interests` names the event classes it wants; the prefetch core calls nobody else. `next_wakeup` is
when it will have something to say without any event (None: never). When a sequence ends or is forgotten it
gets `Finished` or `SequenceGone` and drops what it kept for it.

The predictors here are `SlidingWindow` (read-ahead of a load), `AttentionPrevious` and `AttentionEwma` (history of
sparse decode steps), `Hints` (an engine's ranked hints) and `AttentionLearned`, which combines history and hints by
what they proved worth; that conversations return is foreseen in `dpurt.core.returns`. Whether predictions are right is
the ledger's business; how much they may spend is the arbiter's.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct

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


class Prediction(Struct, frozen=True, gc=False):
    """`block` (or those of its parts whose bits are set; None: whole) will be wanted at `need_by` with
    `probability`.

    `sequence` is whose end makes it pointless, or None when it outlives sequences. `worth` is what a place in
    staging is worth to it, in the unit of `dpurt.core.eviction.Outlook`; None: its probability. Made by the dozen on every
    arrival.
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
    interests: frozenset[type[Event]] = frozenset(
        {Arrived, Consumed, Paused, Resumed, Finished, SequenceGone}
    )
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
        if isinstance(event, Consumed):  # the most frequent first
            load = self._loads.get(event.sequence)
            if load is not None:
                self._advance(event.sequence, load, event.first + event.count, now)
            return
        match event:
            case Arrived(sequence, owner, blocks, expected_start):
                start = now if expected_start is None else max(now, expected_start)
                self._loads[sequence] = load = _Load(blocks, owner, start, self.block_s)
                self._extend(sequence, load, start)
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
    interests: frozenset[type[Event]] = frozenset({Arrived, DecodeStep, Finished, SequenceGone})
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
    interests: frozenset[type[Event]] = frozenset({Arrived, DecodeStep, Finished, SequenceGone})
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
    interests: frozenset[type[Event]] = frozenset({Arrived, Stored, DecodeStep, Finished, SequenceGone})
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
