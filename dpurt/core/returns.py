"""Conversations return: what each block is worth keeping or fetching for the next of them. A predictor and an outlook.

Theory of operation. A *stream* is one conversation: the chain of blocks of its last request. It is *running* from its
arrival to its end, then *idle* until a request continues it; that request makes a new stream in its place. At any time
a stream has a chance of being continued within the next `window_s` (`dpurt.core.return_model`), to which the chance of
that within `LATER_S` is added with a small weight: of two conversations as likely to return soon, the one that will return
later stays, or it would be read back in the rush of its return. A block's worth is the
sum of the chances of the streams it is part of, plus what new conversations on popular branches ask for, plus one for
each request under way that has not read it yet. So a block of many conversations is worth more, one whose conversation
has just arrived is worth little once read, as it cannot be asked for again soon, and one in the dead time after a turn
may leave.

Worths are computed for all blocks at once, with numpy, at most every `RENEW_S`: there is a pair (row of a block, slot of a
stream) for each stream a block is part of, and worth is one weighted sum over a row's pairs. A row is a block's place in
the arrays. Pairs of ended streams are weeded out when they are half of all. Within a stream heads are worth slightly more
than tails, so that what is missing at an arrival is at the end, where its load is soonest ahead of its use; the last block
of a chain, which is often partial and changes, counts for as often as it was seen again.

As an `Outlook` it answers `worth`, and is told what is resident (`came`, `left`). As a `Predictor` it looks around every
`LOOK_S` and predicts absent blocks, as long as each is worth more than the block which would have to leave for it by
`MARGIN`; no more in a look than `GROWTH` times what landed since the last one, since more cannot be fetched. With
`fetches` false it is an outlook only.

A request continues the stream that last held the last block it matched, if it matched all of it but its last two
blocks, or the better half (a conversation that was compacted); otherwise it begins a new one. A pause inside a request
is an idle time, its resumption a return, of which nothing is learned.

Memory: 64 bytes a block and 24 for each pair beyond its first; at most `max_streams` streams, those least likely to return
are dropped first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpurt.core.events import (
    NOBODY,
    Arrived,
    Consumed,
    Dropped,
    Event,
    Finished,
    Owner,
    Paused,
    Resumed,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.eviction import least
from dpurt.core.predictor import Prediction
from dpurt.core.return_model import (
    AGE_EDGES,
    AGE_WIDTHS,
    NUM_AGES,
    Forest,
    ReturnModel,
    Running,
    Traits,
    age_bins,
    running_kind,
    stop_code,
)

__all__ = ["Returns"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HEAD_LEAD = 0.02  # of a stream's worth, from its head to its tail
RUNNING, IDLE, DEAD = 1, 2, 0
_EDGES: list[float] = AGE_EDGES.tolist()


def _age_bin(age: float) -> int:
    """As `age_bins` has it."""
    return min(bisect_right(_EDGES, age) - 1, NUM_AGES - 1)


@dataclass(slots=True)
class _Stream:
    """One conversation, while it lives. `rows` are its blocks' in prefix order; `gaps` those before its turns."""

    slot: int
    sequence: int
    owner: Owner
    rows: list[int]
    matched: int
    depth: int
    came_at: float
    cursor: int = 0
    ended_at: float = 0.0
    stop: int = 0  # the last known of its conversation
    kind: int = 0  # of a request under way, as `Running` has them
    gaps: tuple[float, ...] = ()
    log_gap_sum: float = 0.0
    ran_s: float = 0.0
    teaches: bool = True  # not in a pause

    @property
    def mean_gap(self) -> float:
        """Geometric, negative when there is none."""
        return math.exp(self.log_gap_sum / (self.depth - 1)) if self.depth > 1 else -1.0


class _Rows:
    """Dense numbers for blocks, and what is known of each. `nobody` is the slot of a stream that never lives."""

    ARRAYS = ("block", "is_resident", "ahead", "popular", "exists", "worth", "slot", "weight")

    def __init__(self, nobody: int) -> None:
        self.of: dict[int, int] = {}
        self.nobody = nobody
        self.block: Ints = np.zeros(1024, np.int64)
        self.resident: list[int] = []  # in how many pools
        self.is_resident = np.zeros(1024, np.bool_)
        self.ahead = np.zeros(1024, np.int32)  # requests under way that have not read it
        self.popular: Floats = np.zeros(1024)
        self.exists = np.zeros(1024, np.bool_)  # on some tier of ours
        self.worth: Floats = np.zeros(1024)  # see `Returns._worths`
        self.slot: Ints = np.full(1024, nobody)  # of its first pair, see `_Pairs`
        self.weight: Floats = np.zeros(1024)  # of that pair
        self.latest: list[_Stream | None] = []  # the stream that held it last
        self._free: list[int] = []

    def get(self, block: int) -> int:
        """The block's row, a new one if need be."""
        row = self.of.get(block)
        if row is None:
            row = self.of[block] = self._free.pop() if self._free else self._grown()
            self.block[row] = block
            self.exists[row] = True
        return row

    def forget(self, row: int) -> None:
        """The row may be another block's from now on."""
        del self.of[int(self.block[row])]
        self.ahead[row] = 0
        self.popular[row] = 0.0
        self.latest[row] = None
        self._free.append(row)

    def __len__(self) -> int:
        return len(self.latest)

    def _grown(self) -> int:
        row = len(self.latest)
        self.latest.append(None)
        self.resident.append(0)
        if row == len(self.block):
            for name in self.ARRAYS:
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self.slot[row:] = self.nobody
        return row


class _Pairs:
    """Which blocks are part of which streams, with which weight. The pairs of a row are in the order in which they came: the
    first is kept with the row, as most have no other, those after it in flat arrays of which `num_more` are used."""

    def __init__(self, rows: _Rows, slots: _Slots) -> None:
        self._rows = rows
        self._slots = slots
        self.num_more = 0
        self._weed_at = 4096  # so many more
        self._row: Ints = np.zeros(4096, np.int64)
        self._slot: Ints = np.zeros(4096, np.int64)
        self._weight: Floats = np.zeros(4096)

    def add(self, rows: Ints, slot: int, weights: Floats) -> None:
        """A stream's blocks."""
        is_first = self._rows.slot.take(rows) == self._rows.nobody
        if len(set(rows.tolist())) < len(rows):  # a block is twice in the chain
            is_first &= np.isin(np.arange(len(rows)), np.unique(rows, return_index=True)[1])
        first = rows[is_first]
        self._rows.slot[first], self._rows.weight[first] = slot, weights[is_first]
        if len(first) < len(rows):
            self._add_more(rows[~is_first], slot, weights[~is_first])

    def _add_more(self, rows: Ints, slot: int, weights: Floats) -> None:
        end = self.num_more + len(rows)
        while end > len(self._row):
            for name in ("_row", "_slot", "_weight"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._row[self.num_more : end] = rows
        self._slot[self.num_more : end] = slot
        self._weight[self.num_more : end] = weights
        self.num_more = end

    def weed(self) -> None:
        """Forget those of streams that have ended. A row without a first pair gets its next."""
        state, rows = self._slots.state, self._rows
        rows.slot[state.take(rows.slot) == DEAD] = rows.nobody
        self._keep(state.take(self._slot[: self.num_more]) != DEAD)
        row, more = self._row[: self.num_more], np.arange(self.num_more)
        at = more[rows.slot.take(row) == rows.nobody]
        vacant, first = np.unique(row[at], return_index=True)
        rows.slot[vacant], rows.weight[vacant] = self._slot[at[first]], self._weight[at[first]]
        self._keep(~np.isin(more, at[first]))
        self._weed_at = 2 * self.num_more + 4096

    def _keep(self, is_kept: NDArray[np.bool_]) -> None:
        kept = np.flatnonzero(is_kept)
        for array in (self._row, self._slot, self._weight):
            array[: len(kept)] = array[kept]
        self.num_more = len(kept)

    def add_up(self) -> None:
        """Rows' worths: the weighted sums over their streams' chances."""
        if self.num_more > self._weed_at:
            self.weed()
        chance, used = self._slots.chance, slice(0, len(self._rows))
        worth = self._rows.worth[used]
        chance.take(self._rows.slot[used], out=worth, mode="clip")
        worth *= self._rows.weight[used]
        more = slice(0, self.num_more)
        np.add.at(worth, self._row[more], chance.take(self._slot[more]) * self._weight[more])


class _Slots:
    """Per stream, what is computed for all at once."""

    def __init__(self, num_slots: int) -> None:
        self.state = np.zeros(num_slots, np.int8)
        self.since: Floats = np.zeros(num_slots)
        # by age bin first: neighbours in the slots came at about the same time
        self.risk: Floats = np.zeros((NUM_AGES, num_slots))  # cumulative hazard at the start of each age bin
        self.hazards: Floats = np.zeros((NUM_AGES, num_slots))
        self.prior: Floats = np.zeros((NUM_AGES, num_slots))  # hazards known beforehand
        self.row: Ints = np.zeros(num_slots, np.int64)  # of the model
        self.booked: Floats = np.zeros(num_slots)  # age up to which the model knows
        self.kind: Ints = np.zeros(num_slots, np.int64)  # while it runs
        self.chance: Floats = np.zeros(num_slots)  # of a return within the windows, as last computed


class Returns:
    """See the module's docstring. One owner task; not thread-safe."""

    name = "cross_request"
    interests: frozenset[type[Event]] = frozenset(
        {Arrived, Consumed, Stored, Paused, Resumed, Finished, SequenceGone, Staged, Dropped}
    )
    LOOK_S = 0.5
    RENEW_S = 1.0  # worths' age at most; arrivals, reads and ends count at once
    MARGIN = 1.7  # above the arbiter's own, 1 + `Budget.hysteresis`: what it refuses is not worth asking
    GROWTH = 4
    MIN_REACH, MAX_REACH = 64, 1024
    FLOOR = 0.0002  # uses a second below which nothing is fetched, even into free room
    LATER_S, LATER_WEIGHT = 60.0, 0.1
    LASTING_S = 120.0  # a fetched block is taken to stay: what is not used by then was useless
    FULL_S = 5.0  # after its policy last asked what to evict, staging is taken to be full
    REFIT_S = 15.0
    POPULAR_S = 600.0  # how long a new conversation on a branch speaks for more of them

    def __init__(
        self,
        prior: Forest | None = None,
        window_s: float = 5.0,
        max_streams: int = 16_384,
        *,
        fetches: bool = True,
    ) -> None:
        if window_s <= 0 or max_streams < 64:
            raise ValueError("window_s must be > 0 and max_streams >= 64")
        self.window_s = window_s
        self._fetches = fetches
        self._model = ReturnModel(prior)
        self._windows = ((window_s, 1.0), (self.LATER_S, self.LATER_WEIGHT))
        self._spans: Floats = np.array([[0.0], *([seconds] for seconds, _ in self._windows)])
        self._weights: Floats = np.array([[-weight] for _, weight in self._windows])
        self._running_model = Running(self._windows)
        self._slots = _Slots(max_streams + 1)  # the last is nobody's
        self._rows = _Rows(max_streams)
        self._pairs = _Pairs(self._rows, self._slots)
        self._live_pairs = 0
        self._ended_pairs = 0  # since the last weeding
        self._free_slots = list(range(max_streams - 1, -1, -1))
        self._streams: dict[int, _Stream] = {}  # by slot
        self._of_sequence: dict[int, _Stream] = {}
        self._tails = [8.0, 4.0]  # last blocks of continued chains, and those seen again
        self._worth_at = -math.inf
        self._refit_at = -math.inf
        self._asked_at = -math.inf
        self._look_at: float | None = None
        self._reach = self.MIN_REACH
        self._level = 0.0  # what the first block was worth that the last look left out
        self._landed = 0
        self._asked_for: set[int] = set()  # at the last look
        self._branches: Ints = np.zeros(0, np.int64)  # rows of blocks that were popular, ever
        self._popular_from = 0.0

    # --- the outlook

    def came(self, block: int) -> int:
        rows = self._rows
        row = rows.get(block)
        rows.resident[row] += 1
        rows.is_resident[row] = True
        return row

    def left(self, handle: int) -> None:
        rows = self._rows
        rows.resident[handle] -= 1
        if not rows.resident[handle]:
            rows.is_resident[handle] = False

    def worth(self, handles: Ints, now: float) -> Floats:
        self._refresh(now)
        self._asked_at = now
        return self._worths(handles)

    # --- the predictor

    def observe(self, event: Event, now: float) -> None:
        if isinstance(event, Staged):  # the most frequent first
            self._landed += event.block in self._asked_for
        elif isinstance(event, Consumed):
            stream = self._of_sequence.get(event.sequence)
            if stream is not None:
                self._pass(stream, event.first + event.count)
        elif isinstance(event, Arrived):
            self._arrived(event.sequence, event.owner, event.blocks, now)
        elif isinstance(event, Dropped):
            self._dropped(event.block)
        else:
            stream = self._of_sequence.get(getattr(event, "sequence", -1))
            if stream is not None:
                self._observe_of(stream, event, now)

    def _observe_of(self, stream: _Stream, event: Event, now: float) -> None:
        """Something about the request under way that is this stream."""
        match event:
            case Stored(_, blocks):
                rows = [self._rows.get(block) for block in blocks]
                self._append(stream, rows, self._tails[1] / self._tails[0])
            case Finished(sequence, reason):
                del self._of_sequence[sequence]
                self._finished(stream, reason, now)
            case SequenceGone():
                self._end(stream)
            case Paused():
                self._paused(stream, now)
            case Resumed():
                self._resumed(stream, now)
            case _:
                pass

    def predict(self, now: float) -> list[Prediction]:
        if self._look_at is None or now < self._look_at:
            return []
        if not self._streams:
            self._look_at = None
            return []
        self._look_at = now + self.LOOK_S
        self._refresh(now)
        self._reach = min(self.MAX_REACH, max(self.MIN_REACH, self.GROWTH * self._landed + 8))
        self._landed = 0
        is_full = now - self._asked_at <= self.FULL_S
        wanted = self._wanted(is_full)
        blocks, worths = self._rows.block[wanted].tolist(), self._worths(wanted).tolist()
        self._asked_for = set(blocks)
        need_by = now + self.LOOK_S
        return [
            Prediction(block, None, need_by, self._lasting(worth), self.name, None, self._owner(row), worth)
            for row, block, worth in zip(wanted.tolist(), blocks, worths, strict=True)
        ]

    def next_wakeup(self) -> float | None:
        return self._look_at

    # --- streams

    def _arrived(self, sequence: int, owner: Owner, blocks: tuple[int, ...], now: float) -> None:
        if sequence in self._of_sequence:  # its prompt grew
            self._end(self._of_sequence[sequence])
        rows = [self._rows.get(block) for block in blocks]
        parent = self._parent(rows)
        stream = self._begin(sequence, owner, rows, now)
        if parent is not None:
            self._continue(parent, stream, now)
        else:
            self._branch(rows, now)
        self._of_sequence[sequence] = stream
        self._slots.chance[stream.slot] = self._chance(stream.slot, now)
        self._append(stream, rows)
        self._rows.ahead[rows] += 1
        if self._look_at is None and self._fetches:
            self._look_at = now + self.LOOK_S

    def _begin(self, sequence: int, owner: Owner, rows: Sequence[int], now: float) -> _Stream:
        if not self._free_slots:
            self._shed(now)
        slot = self._free_slots.pop()
        slots = self._slots
        slots.state[slot], slots.since[slot], slots.kind[slot], slots.chance[slot] = RUNNING, now, 0, 0.0
        stream = self._streams[slot] = _Stream(slot, sequence, owner, [], len(rows), 1, now)
        return stream

    def _parent(self, rows: Sequence[int]) -> _Stream | None:
        """The stream these matched blocks continue."""
        if not rows:
            return None
        stream = self._rows.latest[rows[-1]]
        if stream is None or self._streams.get(stream.slot) is not stream:
            return None
        held = len(stream.rows)
        if len(rows) > held or stream.rows[len(rows) - 1] != rows[-1]:
            return None
        is_most = len(rows) >= max(2, held - 2) or (held >= 8 and 2 * len(rows) >= held)
        return stream if is_most else None

    def _continue(self, parent: _Stream, stream: _Stream, now: float) -> None:
        slots = self._slots
        gap = max(0.0, now - parent.ended_at)
        if slots.state[parent.slot] == IDLE:
            self._book_return(parent, gap, now)
        else:
            gap, parent.ran_s = 0.0, now - parent.came_at
            self._running_model.finished(parent.kind, parent.ran_s)
        self._running_model.returned(parent.kind, parent.ran_s, gap)
        is_whole = stream.matched >= len(parent.rows)
        self._tails[0] += 1
        self._tails[1] += is_whole
        stream.depth = parent.depth + 1
        stream.gaps = (gap, *parent.gaps[:1])
        stream.log_gap_sum = parent.log_gap_sum + math.log(gap + 0.5)
        stream.stop = parent.stop
        stream.kind = running_kind(stream.stop, stream.mean_gap)
        slots.kind[stream.slot] = stream.kind
        self._end(parent)

    def _book_return(self, parent: _Stream, gap: float, now: float) -> None:
        if not parent.teaches:
            return
        slots, slot = self._slots, parent.slot
        row, booked = int(slots.row[slot]), float(slots.booked[slot])
        age = min(now - float(slots.since[slot]), _EDGES[-1])
        for age_bin in range(_age_bin(booked), _age_bin(age) + 1):
            seconds = min(_EDGES[age_bin + 1], age) - max(_EDGES[age_bin], booked)
            if seconds > 0:
                self._model.expose_one(row, age_bin, slots.prior[age_bin, slot] * seconds)
        if gap < _EDGES[-1]:
            self._model.returned(row, _age_bin(gap))

    def _branch(self, rows: Sequence[int], now: float) -> None:
        """A new conversation began with these blocks: others may."""
        if now - self._popular_from > 20 * self.POPULAR_S:
            self._rows.popular *= math.exp((self._popular_from - now) / self.POPULAR_S)
            self._popular_from = now
        at, popular = np.array(rows, np.int64), self._rows.popular
        self._branches = np.concatenate([self._branches, at[popular[at] == 0.0]])
        popular[at] += math.exp((now - self._popular_from) / self.POPULAR_S)

    def _expect(self, stream: _Stream, chance: float) -> None:
        """Its blocks' worths follow at once; all that age changes follows with the next refresh."""
        slots, slot = self._slots, stream.slot
        self._rows.worth[np.array(stream.rows, int)] += chance - slots.chance[slot]
        slots.chance[slot] = chance

    def _append(self, stream: _Stream, rows: list[int], tail: float = 1.0) -> None:
        """Blocks that follow the stream's; the last of them counts for `tail`."""
        if not rows:
            return
        latest = self._rows.latest
        for row in rows:
            latest[row] = stream
        at = np.array(rows)
        self._rows.exists[at] = True
        first = len(stream.rows)
        stream.rows += rows
        end = len(stream.rows)
        weights = 1.0 - HEAD_LEAD * np.arange(first, end) / max(64, end)
        weights[-1] *= tail
        self._pairs.add(at, stream.slot, weights)
        self._live_pairs += len(rows)
        self._rows.worth[at] += self._slots.chance[stream.slot]

    def _pass(self, stream: _Stream, cursor: int) -> None:
        """The request under way has read its blocks before the cursor, or will not."""
        end = min(cursor, stream.matched)
        if end == stream.cursor + 1:
            self._rows.ahead[stream.rows[stream.cursor]] -= 1
        elif end > stream.cursor:
            self._rows.ahead[stream.rows[stream.cursor : end]] -= 1
        else:
            return
        stream.cursor = end

    def _finished(self, stream: _Stream, reason: str, now: float) -> None:
        self._pass(stream, len(stream.rows))
        stream.ran_s = now - stream.came_at
        self._running_model.finished(stream.kind, stream.ran_s)
        stream.stop = stop_code(reason) or stream.stop
        self._rest(stream, stop_code(reason), now)

    def _rest(self, stream: _Stream, stop: int, now: float) -> None:
        """From now on it is idle, with the hazards of its traits."""
        slots, slot = self._slots, stream.slot
        traits = Traits(
            stop,
            stream.ran_s,
            len(stream.rows) - stream.matched,
            len(stream.rows),
            stream.depth,
            stream.gaps[0] if stream.gaps else -1.0,
            stream.gaps[1] if len(stream.gaps) > 1 else -1.0,
            stream.mean_gap,
        )
        slots.state[slot], slots.since[slot], slots.booked[slot] = IDLE, now, 0.0
        slots.row[slot], slots.prior[:, slot] = self._model.row(traits), self._model.prior_hazards(traits)
        self._apply_model(slot)
        stream.ended_at = now
        self._expect(stream, self._chance(slot, now))

    def _apply_model(self, idle: Ints | int) -> None:
        """The hazards of these slots, as the model sees them now."""
        slots = self._slots
        hazards = slots.hazards[:, idle] = slots.prior.take(idle, 1) * self._model.factors(slots.row[idle]).T
        slots.risk[1:, idle] = (hazards.T * AGE_WIDTHS).T[:-1].cumsum(0)

    def _paused(self, stream: _Stream, now: float) -> None:
        stream.ran_s, stream.teaches = now - stream.came_at, False
        self._rest(stream, stop_code("tool_use"), now)
        self._slots.booked[stream.slot] = AGE_EDGES[-1]

    def _resumed(self, stream: _Stream, now: float) -> None:
        stream.teaches = True
        slots, slot = self._slots, stream.slot
        slots.state[slot], slots.since[slot] = RUNNING, now
        self._expect(stream, self._chance(slot, now))

    def _end(self, stream: _Stream) -> None:
        """Nobody will continue it: its pairs count for nothing, and go with the next weeding."""
        self._pass(stream, len(stream.rows))
        self._expect(stream, 0.0)
        self._slots.state[stream.slot] = DEAD
        self._live_pairs -= len(stream.rows)
        self._ended_pairs += len(stream.rows)
        del self._streams[stream.slot]
        if self._of_sequence.get(stream.sequence) is stream:
            del self._of_sequence[stream.sequence]

    def _shed(self, now: float) -> None:
        """Make room: weed, and if that frees no slot drop the idle streams least likely to return."""
        idle = np.flatnonzero(self._slots.state == IDLE)
        worst = idle[np.argsort(self._idle_chances(idle, now), kind="stable")][: max(1, len(idle) // 8)]
        for slot in worst.tolist():
            self._end(self._streams[slot])
        self._weed()
        if not self._free_slots:  # all run: the oldest are given up
            for slot in list(self._streams)[: len(self._streams) // 8]:
                self._end(self._streams[slot])
            self._weed()

    def _weed(self) -> None:
        """Forget pairs of dead streams, free their slots, and the rows of blocks nobody speaks of."""
        rows = self._rows
        self._pairs.weed()
        self._ended_pairs = 0
        self._free_slots = np.flatnonzero(self._slots.state[:-1] == DEAD)[::-1].tolist()
        is_used = (rows.slot != rows.nobody) | rows.is_resident | (rows.ahead > 0)
        for row in [row for row in rows.of.values() if not is_used[row]]:
            rows.forget(row)
        self._branches = np.flatnonzero(rows.popular)
        self._worth_at = -math.inf

    def _dropped(self, block: int) -> None:
        """No tier has it: nothing to fetch, until it is stored again."""
        row = self._rows.of.get(block)
        if row is not None:
            self._rows.exists[row] = False

    # --- worths

    def _refresh(self, now: float) -> None:
        if now - self._worth_at < self.RENEW_S:
            return
        if now - self._refit_at >= self.REFIT_S:
            self._refit(now)
        if self._ended_pairs > (self._live_pairs + self._ended_pairs) // 2 + 1024:
            self._weed()
        idle = np.flatnonzero(self._slots.state == IDLE)
        self._slots.chance[idle] = self._idle_chances(idle, now)
        running = np.flatnonzero(self._slots.state == RUNNING)
        self._slots.chance[running] = self._running_chances(running, now)
        share = self.window_s / self.POPULAR_S * math.exp((self._popular_from - now) / self.POPULAR_S)
        self._pairs.add_up()
        self._rows.worth[self._branches] += share * self._rows.popular[self._branches]
        self._worth_at = now

    def _refit(self, now: float) -> None:
        self._refit_at = now
        self._book_exposure(np.flatnonzero(self._slots.state == IDLE), now)
        self._model.refit()
        self._apply_model(np.flatnonzero(self._slots.state == IDLE))

    def _worths(self, rows: Ints) -> Floats:
        """As of the last refresh, but for streams that came or ended and blocks that were read since."""
        known = self._rows
        worths = np.maximum(known.worth.take(rows), 0.0)
        worths += known.ahead.take(rows)
        worths *= known.exists.take(rows)
        return worths

    def _idle_chances(self, idle: Ints, now: float) -> Floats:
        """Of a return within the windows, for these slots."""
        ages = np.maximum(0.0, now - self._slots.since.take(idle))
        risk = self._risk(idle, ages + self._spans)
        return np.asarray((self._weights * np.expm1(risk[0] - risk[1:])).sum(0))

    def _running_chances(self, running: Ints, now: float) -> Floats:
        """The same for streams whose request is under way."""
        ages = np.maximum(0.0, now - self._slots.since.take(running))
        return self._running_model.probability(self._slots.kind.take(running), ages)

    def _chance(self, slot: int, now: float) -> float:
        """The same for one."""
        slots = self._slots
        age = max(0.0, now - float(slots.since[slot]))
        if slots.state[slot] != IDLE:
            return self._running_model.probability_of(int(slots.kind[slot]), age)
        risk = self._risk_of(slot, age)  # and numpy's expm1, the same to the last bit as for many
        soon, later = (-w * np.expm1(risk - self._risk_of(slot, age + s)) for s, w in self._windows)
        return float(soon + later)

    def _risk_of(self, slot: int, age: float) -> float:
        age_bin = _age_bin(age)
        into = min(age, _EDGES[age_bin + 1]) - _EDGES[age_bin]
        return float(self._slots.risk[age_bin, slot] + into * self._slots.hazards[age_bin, slot])

    def _risk(self, slots: Ints, ages: Floats) -> Floats:
        """Cumulative hazards, linear between the edges."""
        age_bin = age_bins(ages)
        into = np.minimum(ages, AGE_EDGES[-1]) - AGE_EDGES.take(age_bin)
        at = age_bin * self._slots.risk.shape[1] + slots  # in the flat tables: half the time of two indices
        return np.asarray(self._slots.risk.take(at) + into * self._slots.hazards.take(at))

    def _book_exposure(self, idle: Ints, now: float) -> None:
        """These idle streams did not return since the last time; those that never will are ended."""
        slots = self._slots
        ages = np.minimum(now - slots.since[idle], AGE_EDGES[-1])
        first = age_bins(slots.booked[idle])
        num_bins = np.maximum(age_bins(ages) + 1 - first, 0)
        which = np.repeat(np.arange(len(idle)), num_bins)
        bins = np.arange(len(which)) - np.repeat(num_bins.cumsum() - num_bins - first, num_bins)
        starts = np.maximum(AGE_EDGES[bins], slots.booked[idle[which]])
        seconds = np.minimum(AGE_EDGES[bins + 1], ages[which]) - starts
        some = np.flatnonzero(seconds > 0)
        at, bins = idle[which[some]], bins[some]
        self._model.expose(slots.row[at], bins, slots.prior[bins, at] * seconds[some])
        slots.booked[idle] = np.maximum(ages, slots.booked[idle])
        for slot in idle[ages >= AGE_EDGES[-1]].tolist():
            self._end(self._streams[slot])

    # --- predictions

    def _wanted(self, is_full: bool) -> Ints:
        """Rows worth fetching, the best first, the older row of equals: in a full staging each worth more, by a margin, than
        the resident one it would push out. Looked at first is what lies about the level at which the last look ended: that
        mostly tells."""
        bar = self.FLOOR * self.window_s
        near = max(bar, 0.8 * self._level), 1.25 * self._level / self.MARGIN
        for above, below in (near, (bar, math.inf)):
            best, worths = self._best(above)
            prices = self._prices(below) if is_full else np.zeros(len(best))
            num_compared = min(len(best), len(prices))
            pays = worths[:num_compared] > prices[:num_compared]
            if not pays.all() or num_compared == self._reach:
                break
        num_wanted = len(best) if pays.all() else int(np.argmin(pays))
        self._level = float(worths[: num_wanted + 1].min(initial=math.inf))
        return best[:num_wanted]

    def _best(self, bar: float) -> tuple[Ints, Floats]:
        """The `_reach` absent rows worth most of those worth more than the bar, and what they are worth."""
        known, used = self._rows, slice(0, len(self._rows))
        may_be = (known.worth[used] > bar) | (known.ahead[used] > 0)
        rows = np.flatnonzero(may_be & ~known.is_resident[used])
        worths = self._worths(rows)
        above = np.flatnonzero(worths > bar)
        best = above[least(-worths[above], self._reach)]
        return rows[best], worths[best]

    def _prices(self, below: float) -> Floats:
        """What must be exceeded to push out each of the resident ones that are worth less than that, the least first."""
        known, used = self._rows, slice(0, len(self._rows))
        may_be = (known.worth[used] < below) | ~known.exists[used]
        worths = self._worths(np.flatnonzero(may_be & known.is_resident[used]))
        return np.sort(self.MARGIN * worths[worths < below])

    def _lasting(self, worth: float) -> float:
        """Probability of a use as long as a fetched block stays."""
        return 1.0 if worth >= 1.0 else 1.0 - (1.0 - worth) ** (self.LASTING_S / self.window_s)

    def _owner(self, row: int) -> Owner:
        stream = self._rows.latest[row]
        return NOBODY if stream is None else stream.owner
