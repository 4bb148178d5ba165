"""What a sparse decode step will want: learned online from the steps before and from engines' ranked hints. Pure.

Theory of operation. A sequence's cold blocks are *columns* 0, 1, 2 ... in the order of the context; the layers
that fetch together are *groups*. Per (group, column) the history keeps when it was last demanded, three
averages of demand that forget at different speeds, the average of its mass, and how well it was hinted of
late. Demand of the groups that ran just before, whichever they were, is kept as two sums that fade from group
to group. From these come some thirty features, and from the features two probabilities:

- `now`: demanded at the group's next turn. Prefetch goes by it.
- `keep`: demanded at one of the group's next `horizon` turns. Eviction goes by it.

Each is a logistic regression whose weights are the sum of one set for all groups and one per group: groups
differ (early layers are steady and follow history, late ones follow the hint), and the shared set speaks for a
group before it has learned. Both learn at every turn (AdaGrad), `now` on the features it was asked with, `keep`
on those of `horizon` turns ago. A model serves all sequences of a space; histories are per sequence.

Causality. Features use what was known when `now` was asked: whoever asks some groups ahead of the turn gets an
answer without the groups in between, and teaches the model for just that distance.

Cost: 0.2 ms a turn at 150 columns, 0.3 ms at 500, in numpy. Memory: 36 bytes a (group, column)
once the group has run, and `horizon` feature matrices a group.

What is resident, and what may be spent, is not known here: see `dpurt.core.attention_pool`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Columns = npt.NDArray[np.intp]

NO_MASS = 105  # a mass code q means a share of attention of 2 ** (-q / 8); this one none
MASS_OF = np.where(np.arange(256) < NO_MASS, np.exp2(-np.arange(256) / 8.0), 0.0).astype(np.float32)
RANKS = 48  # ranks told apart; worse ones count as not hinted
_AGES = 256  # ages told apart, in turns
_RANK_EDGES = (1, 2, 4, 6, 8, 10, 13, 17, 22, 30, 40, RANKS)
_AGE_EDGES = (1, 2, 3, 4, 6, 9, 14, 24, 48, 128)
_LEAST_MASS = np.float32(2**-13)  # what is less counts as this
_SPEEDS = (0.5, 0.12, 0.02)
_FADES = (0.5, 0.85)


def mass_codes(masses: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """The nearest mass codes of shares of attention; none reaches `NO_MASS`, for these were wanted."""
    floor = 2.0 ** (-(NO_MASS - 1) / 8)
    codes: npt.NDArray[np.uint8] = np.rint(-8 * np.log2(np.clip(masses, floor, 1.0))).astype(np.uint8)
    return codes


def _thermometer(size: int, edges: tuple[int, ...], first: int) -> Floats:
    """Row i is 1 for values less than `edges[i]` above `first`."""
    values = np.arange(size) - first
    return np.array([values < edge for edge in edges], np.float32)


_RANK_SCORE = np.where(np.arange(RANKS + 1) > 0, np.exp(-(np.arange(RANKS + 1) - 1) / 8.0), 0)
_RANK_ROWS = np.vstack([_thermometer(RANKS + 1, _RANK_EDGES, 1), _RANK_SCORE[None]]).astype(np.float32)
_RANK_ROWS[:, 0] = 0
_AGE_ROWS = np.vstack(
    [_thermometer(_AGES, _AGE_EDGES, 1), 1.0 / np.sqrt(np.maximum(1, np.arange(_AGES)))[None]]
).astype(np.float32)
_HINT_SCORE = _RANK_ROWS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """`rate`: step size of learning; `horizon`: turns of a group that `keep` looks ahead."""

    rate: float = 0.2
    horizon: int = 4

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.horizon < 1:
            raise ValueError("rate must be > 0 and horizon >= 1")


class OnlineLogistic:
    """P(y | x) = sigmoid((shared + own[group]) x), AdaGrad. `x` is features by columns."""

    def __init__(self, groups: int, features: int, rate: float) -> None:
        self._rate = np.float32(rate)
        self._shared = np.zeros(features, np.float32)
        self._own = np.zeros((groups, features), np.float32)
        self._shared_squares = np.full(features, 1e-2, np.float32)
        self._own_squares = np.full((groups, features), 1e-2, np.float32)

    def probability(self, group: int, x: Floats) -> Floats:
        """One per column."""
        z = (self._shared + self._own[group]) @ x
        answer: Floats = 1 / (1 + np.exp(-np.clip(z, -15, 15)))
        return answer

    def learn(self, group: int, x: Floats, error: Floats) -> None:
        """`error` is the probability given for each column, minus what came true (0 or 1)."""
        gradient = x @ error
        squares = gradient * gradient
        self._shared_squares += squares
        self._own_squares[group] += squares
        step = self._rate * gradient
        self._shared -= step / np.sqrt(self._shared_squares)
        self._own[group] -= step / np.sqrt(self._own_squares[group])


class AttentionModel:
    """The weights, for all sequences of one space; see the module's docstring."""

    def __init__(self, groups: int, settings: AttentionSettings | None = None) -> None:
        if groups < 1:
            raise ValueError(f"groups must be >= 1, got {groups}")
        self.groups = groups
        self.settings = settings or AttentionSettings()
        self.now = OnlineLogistic(groups, FEATURES, self.settings.rate)
        self.keep = OnlineLogistic(groups, FEATURES, self.settings.rate)


class AttentionHistory:
    """What one sequence's groups demanded and what they were hinted; see the module's docstring."""

    def __init__(self, groups: int, columns: int) -> None:
        self.columns = columns
        self.turn = np.full(groups, _AGES, np.int64)  # so that 0 means never
        self._groups = groups
        room = max(columns, 16)
        self.demand = np.zeros((groups, len(_SPEEDS), room), np.float32)
        self.mass = np.zeros((groups, room), np.float32)
        self.hinted = np.zeros((groups, room), np.float32)
        self.last = np.zeros((groups, room), np.int64)
        self.rank = np.zeros((groups, room), np.int64)  # from 1; 0 is not hinted
        self.demanded_lately = np.zeros((len(_FADES), room), np.float32)
        self.hinted_lately = np.zeros(room, np.float32)

    def _grow(self, room: int) -> None:
        def zeros(array: Floats) -> Floats:
            return np.concatenate([array, np.zeros((*array.shape[:-1], more), np.float32)], axis=-1)

        def no_turns(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return np.concatenate([array, np.zeros((*array.shape[:-1], more), np.int64)], axis=-1)

        more = room - len(self.hinted_lately)
        self.demand, self.mass, self.hinted = zeros(self.demand), zeros(self.mass), zeros(self.hinted)
        self.last, self.rank = no_turns(self.last), no_turns(self.rank)
        self.demanded_lately, self.hinted_lately = zeros(self.demanded_lately), zeros(self.hinted_lately)

    def extend(self, columns: int) -> None:
        """The context has grown to so many columns."""
        room = len(self.hinted_lately)
        if columns > room:
            self._grow(max(columns, 2 * room))
        self.columns = max(self.columns, columns)

    def hint(self, group: int, ranked: Columns) -> None:
        """The engine's ranking for the group's next turn, best first."""
        rank = self.rank[group]
        rank[:] = 0
        ranked = ranked[:RANKS]
        rank[ranked] = np.arange(1, len(ranked) + 1)
        score = _HINT_SCORE[rank]
        self.hinted_lately *= 0.7
        self.hinted_lately += score

    def demanded(self, group: int, columns: Columns, masses: Floats | None) -> None:
        """The group's turn: it wanted these columns (`masses`: their shares of attention)."""
        demand = self.demand[group]
        for row, speed in zip(demand, _SPEEDS, strict=True):
            row *= 1 - speed
            row[columns] += speed
        for row, fade in zip(self.demanded_lately, _FADES, strict=True):
            row *= fade
            row[columns] += 1
        if len(columns):
            self._weigh(group, columns, masses)
        hinted = self.hinted[group]
        hinted += 0.3 * (_HINT_SCORE[self.rank[group]] - hinted)
        self.turn[group] += 1
        self.last[group, columns] = self.turn[group]

    def _weigh(self, group: int, columns: Columns, masses: Floats | None) -> None:
        mass = self.mass[group]
        mass *= 0.8
        if masses is None:
            mass[columns] += 0.2
        else:
            seen = np.maximum(masses, _LEAST_MASS)
            mass[columns] += 0.2 * (0.3 + np.log2(seen / seen.min()))

    def features(self, group: int, spoken: bool) -> Floats:
        """Features by columns, for the group's next turn. `spoken`: its hint, if any, is for that turn."""
        n = self.columns
        x = np.empty((FEATURES, n), np.float32)
        if n == 0:
            return x
        rank = self.rank[group, :n]
        age = np.minimum(self.turn[group] + 1 - self.last[group, :n], _AGES - 1)
        x[_BIAS] = 1
        x[_RANK] = _RANK_ROWS[:, rank]
        if not spoken:
            x[_RANK] *= 0.5
        x[_AGE] = _AGE_ROWS[:, age]
        demand = self.demand[group, :, :n]
        x[_DEMAND] = demand
        x[_ODDS] = np.log(demand[1:] + 0.01)
        x[_MASS] = self.mass[group, :n]
        self._neighbours(x[_NEAR], demand[0] + demand[1], group, n)
        x[_LATELY] = self.demanded_lately[:, :n]
        x[_HINTED] = self.hinted[group, :n]
        x[_HINTED_LATELY] = self.hinted_lately[:n]
        score = x[_RANK][-1]
        x[_BOTH] = score * x[_DEMAND][1], score * x[_AGE][0], score * x[_LATELY][0]
        x[_PLACE] = np.log((n - np.arange(n)) / n + 0.01)
        return x

    def _neighbours(self, x: Floats, recent: Floats, group: int, n: int) -> None:
        """Columns before and behind, and the groups before and behind."""
        x[0, 0] = x[1, n - 1] = 0
        x[0, 1:] = recent[:-1]
        x[1, :-1] = recent[1:]
        x[2] = self.demand[max(0, group - 1), 0, :n]
        x[3] = self.demand[min(self._groups - 1, group + 1), 0, :n]


def _rows() -> dict[str, slice]:
    sizes = {
        "bias": 1, "rank": len(_RANK_ROWS), "age": len(_AGE_ROWS), "demand": len(_SPEEDS), "odds": len(_SPEEDS) - 1,
        "mass": 1, "near": 4, "lately": len(_FADES), "hinted": 1, "hinted_lately": 1, "both": 3, "place": 1,
    }  # fmt: skip
    rows, at = {}, 0
    for name, size in sizes.items():
        rows[name] = slice(at, at + size)
        at += size
    return rows


_ROWS = _rows()
FEATURES = max(rows.stop for rows in _ROWS.values())
_BIAS, _RANK, _AGE, _DEMAND, _ODDS, _MASS, _NEAR, _LATELY, _HINTED, _HINTED_LATELY, _BOTH, _PLACE = (
    _ROWS.values()
)


class AttentionSequence:
    """One sequence under a model: hints and demand in, probabilities out.

    Per group and turn: `hint` if there is one, `now` (some groups ahead), then `demanded`, which teaches.
    """

    def __init__(self, model: AttentionModel, columns: int) -> None:
        self._model = model
        self.history = AttentionHistory(model.groups, columns)
        self._asked: list[tuple[Floats, Floats] | None] = [None] * model.groups
        horizon = model.settings.horizon
        self._kept: list[deque[Floats]] = [deque(maxlen=horizon) for _ in range(model.groups)]

    def extend(self, columns: int) -> None:
        """See `AttentionHistory.extend`."""
        self.history.extend(columns)

    def hint(self, group: int, ranked: Columns) -> None:
        """See `AttentionHistory.hint`."""
        self.history.hint(group, ranked)

    def now(self, group: int) -> Floats:
        """P(demanded at the group's next turn) per column. Learned from at that turn; asked twice, the last counts."""
        x = self.history.features(group, spoken=True)
        answer = self._model.now.probability(group, x)
        self._asked[group] = x, answer
        return answer

    def demanded(self, group: int, columns: Columns, masses: Floats | None = None) -> Floats:
        """The group's turn has come. Learns, and returns `keep` per column."""
        self._learn_now(group, columns)
        self.history.demanded(group, columns, masses)
        self._learn_keep(group)
        x = self.history.features(group, spoken=False)
        self._kept[group].append(x)
        return self._model.keep.probability(group, x)

    def _learn_now(self, group: int, columns: Columns) -> None:
        asked, self._asked[group] = self._asked[group], None
        if asked is None:
            return
        x, answer = asked
        error = answer.copy()
        error[columns[columns < len(error)]] -= 1
        self._model.now.learn(group, x, error)

    def _learn_keep(self, group: int) -> None:
        kept = self._kept[group]
        horizon = self._model.settings.horizon
        if len(kept) < horizon:
            return
        x = kept[0]
        n = x.shape[1]
        history = self.history
        came = history.last[group, :n] > history.turn[group] - horizon
        error = self._model.keep.probability(group, x) - came
        self._model.keep.learn(group, x, error)
