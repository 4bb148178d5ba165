"""What each named policy foresees of a decode: scores for prefetch and values for eviction, per layer and turn.

A `Foresight` is asked in the order of time: `scores(turn, layer)` when the layer's prefetch is issued, some
layers ahead of its turn, and `values(turn, layer)` right after the layer's demand. Only clairvoyant ones may
look at what has not happened. Baselines, by name:

- `lru`, `lfu`, `belady`: demand only. LFU counts all demand of the scored steps, whether resident or not.
- `previous_step`, `previous_layer`: the mass of the layer's last step; of the layer before, in this step.
- `ewma`: decayed mass; `heavy_hitters` (H2O): all mass so far; `snapkv`: the mass at the prompt's tail.
- `next_block`: the blocks behind those of most decayed mass.
- `hint`: the hint's first ranks, as many as a layer demands.
- `oracle`: what the layer will demand, under the same budget.

All of these evict by LRU but `lfu` and `belady`; `lru_pool` is one LRU for all layers. Ours, `dpurt`: see `dpurt.core.attention`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpurt.core.attention import AttentionModel, AttentionSequence, AttentionSettings
from dpurt.replay.attention_trace import AttentionTrace

Floats = npt.NDArray[np.floating]


class Foresight(Protocol):
    """See the module's docstring. Answers have one number per cold column of the turn."""

    def scores(self, turn: int, layer: int) -> Floats | None:
        """What to fetch for the layer's turn: higher first, 0 or less never. None: nothing."""
        ...

    def fetched(self, turn: int, layer: int, columns: npt.NDArray[np.intp]) -> None:
        """These are being fetched for the layer's turn."""
        ...

    def values(self, turn: int, layer: int) -> Floats:
        """What to keep, now that the layer's demand of this turn is known: the least leaves first."""
        ...


class Lru:
    """Evicts the column demanded longest ago; within a turn the one with least mass.

    What was fetched is older than the demand it was fetched for, newer than all before.
    """

    def __init__(self, trace: AttentionTrace, lookahead: int) -> None:
        self.trace = trace
        self.lookahead = lookahead
        self._stamp = np.full((trace.layers, int(trace.columns[-1])), -np.inf)
        self._late = np.linspace(1, 0, trace.top, endpoint=False)

    def scores(self, turn: int, layer: int) -> Floats | None:
        return None

    def fetched(self, turn: int, layer: int, columns: npt.NDArray[np.intp]) -> None:
        self._stamp[layer, columns] = turn - 0.25

    def values(self, turn: int, layer: int) -> Floats:
        stamp = self._stamp[layer]
        stamp[self.trace.demand[turn, layer]] = turn + self._late / 2
        known: Floats = stamp[: self.trace.columns[turn]]
        return known


class LruPool(Lru):
    """For one pool of all layers: ages are counted in turns of the column's own layer, of equals the one with less mass leaves.

    By the clock the longest unused are always those the next layer is about to want, and such an LRU is worth less than
    a share for each layer.
    """

    def values(self, turn: int, layer: int) -> Floats:
        return super().values(turn, layer) - turn


class Lfu(Lru):
    """Evicts the column demanded least often, the least recent of equals."""

    def __init__(self, trace: AttentionTrace, lookahead: int) -> None:
        super().__init__(trace, lookahead)
        self._count = np.zeros_like(self._stamp)

    def values(self, turn: int, layer: int) -> Floats:
        stamp = super().values(turn, layer)
        if turn >= self.trace.warm_turns:
            self._count[layer, self.trace.demand[turn, layer]] += 1
        return self._count[layer, : len(stamp)] + 1e-9 * np.maximum(stamp, 0)


class Belady(Lru):
    """Evicts the column whose next use is furthest away. Clairvoyant."""

    def __init__(self, trace: AttentionTrace, lookahead: int) -> None:
        super().__init__(trace, lookahead)
        self._next = _next_uses(trace)

    def values(self, turn: int, layer: int) -> Floats:
        columns = self.trace.columns[turn]
        return -self._next[turn, layer, :columns].astype(np.float64)


def _next_uses(trace: AttentionTrace) -> npt.NDArray[np.int32]:
    """[turns, layers, columns]: the turn of the first use after this one; one past the last if there is none."""
    shape = (trace.turns, trace.layers, int(trace.columns[-1]))
    uses = np.empty(shape, np.int32)
    coming = np.full(shape[1:], trace.turns, np.int32)
    rows = np.arange(trace.layers)[:, None]
    for turn in range(trace.turns - 1, -1, -1):
        uses[turn] = coming
        coming[rows, trace.demand[turn]] = turn
    return uses


class _Scored(Lru):
    """A baseline that fetches by a score: those of its first columns that are missing, `REACH` times as many
    considered as a layer demands.
    """

    REACH = 1.0

    def __init__(self, trace: AttentionTrace, lookahead: int) -> None:
        super().__init__(trace, lookahead)
        self._table = np.zeros_like(self._stamp)

    def scores(self, turn: int, layer: int) -> Floats | None:
        row = self.table(turn, layer)
        reach = min(len(row), int(self.REACH * self.trace.top))
        best = np.argpartition(-row, reach - 1)[:reach]
        scores = np.zeros_like(row)
        scores[best] = row[best]
        return scores

    def table(self, turn: int, layer: int) -> Floats:
        """The scores of all columns."""
        return self._table[layer, : self.trace.columns[turn]]


class PreviousStep(_Scored):
    """The layer's masses of the step before."""

    def values(self, turn: int, layer: int) -> Floats:
        masses = self.trace.masses(turn, layer)
        self._table[layer, : len(masses)] = masses
        return super().values(turn, layer)


class PreviousLayer(_Scored):
    """The masses of the layer before, in the same step; the last layer's, a step ago, for the first."""

    def values(self, turn: int, layer: int) -> Floats:
        masses = self.trace.masses(turn, layer)
        self._table[(layer + self.lookahead) % self.trace.layers, : len(masses)] = masses
        return super().values(turn, layer)


class Ewma(_Scored):
    """Decayed masses. Gain and reach are those that reproduce the figures published for it."""

    GAIN = 0.1
    REACH = 1.2

    def values(self, turn: int, layer: int) -> Floats:
        masses = self.trace.masses(turn, layer)
        row = self._table[layer, : len(masses)]
        row += self.GAIN * (masses - row)
        return super().values(turn, layer)


class HeavyHitters(_Scored):
    """All mass so far."""

    def values(self, turn: int, layer: int) -> Floats:
        masses = self.trace.masses(turn, layer)
        self._table[layer, : len(masses)] += masses
        return super().values(turn, layer)


class SnapKv(_Scored):
    """The mass at the prompt's tail, never changed after."""

    def values(self, turn: int, layer: int) -> Floats:
        if turn < self.trace.warm_turns:
            masses = self.trace.masses(turn, layer)
            self._table[layer, : len(masses)] += masses
        return super().values(turn, layer)


class NextBlock(Ewma):
    """The blocks behind those with most decayed mass."""

    def table(self, turn: int, layer: int) -> Floats:
        row = super().table(turn, layer)
        behind = np.zeros_like(row)
        behind[1:] = row[:-1]
        return behind


class HintedRanks(_Scored):
    """All ranks of the hint, the first highest."""

    def table(self, turn: int, layer: int) -> Floats:
        scores = np.zeros(self.trace.columns[turn])
        ranked = self.trace.hint(turn, self.lookahead, layer)
        if ranked is not None:
            scores[ranked] = 1 - np.arange(len(ranked)) / (1 + len(ranked))
        return scores


class Oracle(Lru):
    """What the layer will demand, most mass first. Clairvoyant."""

    def scores(self, turn: int, layer: int) -> Floats | None:
        scores = np.zeros(self.trace.columns[turn])
        scores[self.trace.demand[turn, layer]] = 0.5 + self._late / 2
        return scores


class Learned:
    """Ours: `dpurt.core.attention`, with hints where the trace has them for the look-ahead."""

    settings = AttentionSettings()
    hears_hints = True

    def __init__(self, trace: AttentionTrace, lookahead: int) -> None:
        self.trace = trace
        self.lookahead = lookahead
        model = AttentionModel(trace.layers, self.settings)
        self._sequence = AttentionSequence(model, int(trace.columns[0]))

    def scores(self, turn: int, layer: int) -> Floats | None:
        self._sequence.extend(int(self.trace.columns[turn]))
        ranked = self.trace.hint(turn, self.lookahead, layer) if self.hears_hints else None
        if ranked is not None:
            self._sequence.hint(layer, ranked)
        return self._sequence.now(layer)

    def fetched(self, turn: int, layer: int, columns: npt.NDArray[np.intp]) -> None:
        pass

    def values(self, turn: int, layer: int) -> Floats:
        self._sequence.extend(int(self.trace.columns[turn]))
        trace = self.trace
        return self._sequence.demanded(layer, trace.demand[turn, layer], trace.mass[turn, layer])


class LearnedWithoutHints(Learned):
    """Ours, deaf to hints."""

    hears_hints = False
