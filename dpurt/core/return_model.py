"""When does a conversation return? The rate of return by age since its last turn ended, learned as it is observed.

Theory of operation. Age is cut into bins (`AGE_EDGES`, finer where things happen). The hazard of return of one
conversation is, in each bin, a *prior* hazard times one factor per trait (`Traits`, cut into buckets) and one for all:
tables of (bucket x age bin), so that "returned in 5 s last time" may mean more within the first 10 s than after a minute.
Observed are, for each combination of buckets that occurs, returns and the risk of one (seconds times the prior hazard),
also of conversations that never return. `refit` makes of them the tables of a penalised Poisson regression, by
proportional fitting: each table in turn becomes events / expected events, shrunk to 1 by so many pseudo-events
(`Settings`), so that what was hardly observed changes nothing, and correlated traits share what they explain.

The prior is a `Forest` fitted beforehand (boosted trees over the same traits and the age, see
`dpurt.replay.fit_returns`), for the stop reasons it was fitted on; for others, or without one, a rate that is about the
same at all time scales, to minutes. So a node that ships with a prior and
one that learns from nothing run the same code.

A request under way cannot return, but will soon be able to: `Running` learns, by time since its start and by how long
its conversation used to be away, how often the *next* request of its conversation was less than a window away.

Nothing here knows of blocks or streams: `dpurt.core.returns` does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AGE_EDGES",
    "AGE_WIDTHS",
    "NUM_AGES",
    "STOPS",
    "Forest",
    "ReturnModel",
    "Running",
    "Settings",
    "Traits",
    "age_bins",
    "running_kind",
    "stop_code",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AGE_EDGES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 180, 256, 360, 512, 720, 1024, 1440, 2048, 3600],
    float,
)
NUM_AGES = len(AGE_EDGES) - 1
AGE_WIDTHS = np.diff(AGE_EDGES)
AGE_MIDS = np.sqrt((AGE_EDGES[:-1] + 0.5) * (AGE_EDGES[1:] + 0.5))
_BIN_OF_SECOND = np.minimum(
    AGE_EDGES.searchsorted(np.arange(AGE_EDGES[-1] + 1), side="right") - 1, NUM_AGES - 1
)


def age_bins(ages: Floats) -> Ints:
    """The bin of each age, the last one of what is older. Edges are whole seconds, so a table tells."""
    return _BIN_OF_SECOND.take(ages.astype(np.intp), mode="clip")


# engines' words for why a response ended; 0 is for those nobody told, 3 for any other
STOPS = {"": 0, "tool_use": 1, "tool_calls": 1, "end_turn": 2, "stop": 2, "stop_sequence": 2}
NUM_STOPS = 4


def stop_code(reason: str) -> int:
    """The kind of a stop reason."""
    return STOPS.get(reason, 3)


class Traits(NamedTuple):
    """What is known of a conversation when its turn ends. Gaps are times from a turn's end to the next arrival, the
    latest first, negative when there is none; `mean_gap` is geometric, over all."""

    stop: int
    api_s: float
    new_blocks: int
    blocks: int
    depth: int
    gap: float = -1.0
    gap_before: float = -1.0
    mean_gap: float = -1.0

    def features(self) -> list[float]:
        """For the forest: numbers in which trees can split."""
        return [
            float(self.stop),
            self.api_s,
            float(self.new_blocks),
            float(self.blocks),
            float(self.depth),
            self.gap,
            self.gap_before,
            self.mean_gap,
        ]


NUM_FEATURES = 9  # the traits and, last, the age


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Events something must have seen to count as much as the assumption that it is ordinary: a bucket, all
    conversations together, and both where a fitted prior has spoken."""

    doubt: float = 8.0
    doubt_of_all: float = 0.5
    doubt_of_prior: float = 40.0


class Forest:
    """Boosted trees: log of the hazard (1/s) from traits and age. Complete binary trees of one depth, node i's
    children 2i + 1 and 2i + 2; right when the feature exceeds the threshold."""

    def __init__(
        self,
        base: float,
        features: Ints,
        thresholds: Floats,
        leaves: Floats,
        stops: frozenset[int],
    ) -> None:
        num_trees, num_nodes = features.shape
        if thresholds.shape != features.shape or leaves.shape != (num_trees, num_nodes + 1):
            raise ValueError(
                f"trees of {features.shape}, {thresholds.shape} and {leaves.shape} do not fit together"
            )
        if num_trees and not 0 <= features.min() <= features.max() < NUM_FEATURES:
            raise ValueError(f"expected features 0 to {NUM_FEATURES - 1}")
        self.base = base
        self.features = features
        self.thresholds = thresholds
        self.leaves = leaves
        self.stops = stops
        self._depth = (num_nodes + 1).bit_length() - 1
        self._tree = np.arange(num_trees)[:, None]

    def log_rates(self, rows: Floats) -> Floats:
        """One row of features each."""
        node = np.zeros((len(self.leaves), len(rows)), np.int64)
        row = np.arange(len(rows))[None, :]
        for _ in range(self._depth):
            goes_right = rows[row, self.features[self._tree, node]] > self.thresholds[self._tree, node]
            node = 2 * node + 1 + goes_right
        leaves: Floats = self.leaves[self._tree, node - self.features.shape[1]]
        return np.asarray(self.base + leaves.sum(0))

    def hazards(self, traits: Traits) -> Floats:
        """By age bin."""
        rows = np.empty((NUM_AGES, NUM_FEATURES))
        rows[:, :-1] = traits.features()
        rows[:, -1] = AGE_MIDS
        return np.asarray(np.exp(self.log_rates(rows)))


_DEPTHS = (1.5, 2.5, 3.5, 4.5, 6.5, 10.5, 20.5)
_GAPS = (0.0, 4.0, 7.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)
_API = (0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
_NEW = (0.5, 1.5, 4.5, 16.5)
_CUTS = (_DEPTHS, _GAPS, _API, _NEW)
NUM_TABLES = 2 + len(_CUTS)  # for all, by stop, and by the others
MAX_BUCKETS = max(NUM_STOPS, *(len(cuts) + 1 for cuts in _CUTS))
ORDINARY = 0.3 / (AGE_MIDS + 10.0) / (1.0 + AGE_MIDS / 300.0)  # hazard when nothing is known


def buckets_of(traits: Traits) -> tuple[int, ...]:
    """The bucket of each table."""
    values = (traits.depth, traits.gap, traits.api_s, traits.new_blocks)
    found = (bisect_left(cuts, value) for cuts, value in zip(_CUTS, values, strict=True))
    return (0, traits.stop, *found)


class ReturnModel:
    """Hazards by traits and age; see the module's docstring. A *row* is a combination of buckets that occurred."""

    FLOOR, CEILING = 0.01, 50.0  # of a factor: few events must not shut out or swamp the others
    SWEEPS = 2

    def __init__(self, prior: Forest | None = None, settings: Settings = Settings()) -> None:
        self._prior = prior
        self._row_of: dict[tuple[int, ...], int] = {}
        self._buckets: Ints = np.zeros((64, NUM_TABLES), np.int64)
        self._is_prior = np.zeros(64, np.int64)
        self._events: Floats = np.zeros((64, NUM_AGES))
        self._risk: Floats = np.zeros((64, NUM_AGES))
        # [0]: on top of the ordinary rate, [1]: of a fitted prior
        self._factors: Floats = np.ones((2, NUM_TABLES, MAX_BUCKETS, NUM_AGES))
        doubts = np.full((2, NUM_TABLES, 1, 1), settings.doubt)
        doubts[0, 0], doubts[1] = settings.doubt_of_all, settings.doubt_of_prior
        self._doubts: Floats = doubts
        self._of_row: Floats = np.ones((64, NUM_AGES))  # each row's product of factors

    def row(self, traits: Traits) -> int:
        """The number of their combination of buckets."""
        key = (int(self.has_prior(traits)), *buckets_of(traits))
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = len(self._row_of)
            if row == len(self._buckets):
                self._grow()
            self._is_prior[row], self._buckets[row] = key[0], key[1:]
            self._of_row[row] = self._product(row)
        return row

    def has_prior(self, traits: Traits) -> bool:
        """Does a fitted prior speak for these?"""
        return self._prior is not None and traits.stop in self._prior.stops

    def prior_hazards(self, traits: Traits) -> Floats:
        """The rate of return (1/s) in each age bin, as far as it is known beforehand."""
        if self._prior is not None and self.has_prior(traits):
            return self._prior.hazards(traits)
        return ORDINARY

    def factors(self, rows: Ints | int) -> Floats:
        """What to multiply them by, for each of these rows (or one), as of the last `refit`."""
        return self._of_row.take(rows, 0)

    def _product(self, rows: slice | int) -> Floats:
        kind, buckets = self._is_prior[rows], self._buckets[rows]
        factors: Floats = self._factors[kind, 0, buckets[..., 0]]
        for table in range(1, NUM_TABLES):
            factors = factors * self._factors[kind, table, buckets[..., table]]
        return factors

    def expose(self, rows: Ints, ages: Ints, risks: Floats) -> None:
        """Conversations of these rows were at risk in these age bins: seconds times their prior hazards."""
        np.add.at(self._risk, (rows, ages), risks)

    def expose_one(self, row: int, age: int, risk: float) -> None:
        """The same of one."""
        self._risk[row, age] += risk

    def returned(self, row: int, age: int) -> None:
        """A conversation came back in this age bin."""
        self._events[row, age] += 1

    def refit(self) -> None:
        """Fit the tables to all that was observed so far, from where they are."""
        known = slice(0, len(self._row_of))
        for kind in (0, 1):
            rows = np.flatnonzero(self._is_prior[known] == kind)
            if len(rows):
                self._fit_tables(kind, rows)
        self._of_row[known] = self._product(known)

    def _fit_tables(self, kind: int, rows: Ints) -> None:
        events, risk, buckets = self._events[rows], self._risk[rows], self._buckets[rows]
        expected = risk * self._factors[kind, np.arange(NUM_TABLES), buckets].prod(1)
        tables = [(of_row, _in_table(of_row), self._doubts[kind, i]) for i, of_row in enumerate(buckets.T)]
        seen = [_by_bucket(at, events) + doubt for _, at, doubt in tables]
        for table in [*range(NUM_TABLES)] * self.SWEEPS:
            factors, (of_row, at, doubt) = self._factors[kind, table], tables[table]
            without = expected / factors[of_row]
            factors[:] = seen[table] / (_by_bucket(at, without) + doubt)
            np.clip(factors, self.FLOOR, self.CEILING, out=factors)
            expected = without * factors[of_row]

    def _grow(self) -> None:
        for name in ("_buckets", "_is_prior", "_events", "_risk", "_of_row"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))


def _in_table(of_row: Ints) -> Ints:
    """Where the ages of rows lie in a flat table of these buckets."""
    return np.asarray((of_row[:, None] * NUM_AGES + np.arange(NUM_AGES)).ravel())


def _by_bucket(at: Ints, values: Floats) -> Floats:
    """Sums of rows by bucket, for each age."""
    sums = np.bincount(at, values.ravel(), MAX_BUCKETS * NUM_AGES)
    return np.asarray(sums.reshape(MAX_BUCKETS, NUM_AGES), float)


_RUN_GAPS = (0.0, 6.0, 12.0, 40.0)
NUM_KINDS = NUM_STOPS * (len(_RUN_GAPS) + 1)


def running_kind(stop: int, mean_gap: float) -> int:
    """The kind of a request under way, by its conversation's last known stop and mean gap (negative: none yet)."""
    return stop + NUM_STOPS * bisect_left(_RUN_GAPS, mean_gap)


class Running:
    """P(the next request of its conversation comes within a window), a weighted sum over windows, by the request's
    `running_kind` and the time since it came. `windows`: pairs of seconds and weights."""

    EDGES = np.array([0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 64, math.inf])

    def __init__(self, windows: Sequence[tuple[float, float]], doubt_s: float = 20.0) -> None:
        self._windows = tuple(windows)
        self._edges: list[float] = self.EDGES.tolist()
        shape = (NUM_KINDS, len(self.EDGES) - 1)
        self._exposed_s = np.full(shape, doubt_s)
        self._close_s = np.full(shape, 0.05 * doubt_s * sum(weight for _, weight in windows))

    def finished(self, kind: int, ran_s: float) -> None:
        """A request ran so long."""
        self._exposed_s[kind] += _overlap(self.EDGES, 0.0, ran_s)

    def returned(self, kind: int, ran_s: float, gap_s: float) -> None:
        """The next one came `gap_s` after its end."""
        for window_s, weight in self._windows:
            close = _overlap(self.EDGES, max(0.0, ran_s + gap_s - window_s), ran_s)
            self._close_s[kind] += weight * close

    def probability_of(self, kind: int, age: float) -> float:
        """For one."""
        at = min(bisect_right(self._edges, age) - 1, len(self._edges) - 2)
        return float(self._close_s[kind, at] / self._exposed_s[kind, at])

    def probability(self, kinds: Ints, ages: Floats) -> Floats:
        """For requests under way since `ages` seconds."""
        at = kinds * (len(self.EDGES) - 1) + self.EDGES.searchsorted(ages, side="right") - 1
        return np.asarray(self._close_s.take(at) / self._exposed_s.take(at))


def _overlap(edges: Floats, start: float, end: float) -> Floats:
    """Seconds of [start, end] in each bin."""
    return np.asarray(np.maximum(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0.0))
