"""Fit the prior of `dpurt.core.return_model`: boosted trees for the rate of return of coding-agent conversations.

    python -m dpurt.replay.fit_returns SESSIONS --without TRACE --out dpurt/priors/returns.npz

SESSIONS is a file in the Weka session format; sessions that occur in TRACE (by ``session_id``) are left out, so that
figures on TRACE are of conversations the prior has not seen.

Method. Every response with a stop reason is at risk of being followed up from its end on, in each age bin until the next
request of its thread, or for ever if there is none. The log of the rate is fitted by gradient boosting of the Poisson
likelihood of events per seconds at risk: complete trees of depth `DEPTH` grown level by level, splits at quantiles,
Newton steps. A fifth of the sessions is held out to show how well it predicts: deviance per response, beside that of one
rate per age and of one per (stop, age). No randomness: equal files give equal priors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpurt.core.return_model import AGE_EDGES, AGE_MIDS, NUM_AGES, NUM_FEATURES, Forest, Traits, stop_code
from dpurt.replay.lines import read_json_lines
from dpurt.replay.weka import BLOCK_TOKENS, WekaRequest, WekaSession

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_TREES, DEPTH, RATE, NUM_QUANTILES = 160, 5, 0.1, 40
LEAST_EVENTS, DAMPING = 20.0, 10.0  # of a leaf: expected events on either side, and added to them
SOURCE = "GitHub callanjfox/kv-cache-tester, traces/ (captured at WEKA), Copyright 2024 Callan Fox"
LICENCE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Risks:
    """One row per response and age bin it lived to see: features, seconds at risk, whether it was followed up."""

    features: Floats
    seconds: Floats
    events: Floats
    num_responses: int


class _Named(msgspec.Struct, frozen=True):
    session_id: str = ""


def responses(session: WekaSession) -> Iterator[tuple[Traits, float]]:
    """Each response with a stop reason, and the gap to the next request of its thread (infinite: none)."""
    threads: dict[int, list[WekaRequest]] = {}
    for request in sorted(session.requests, key=lambda request: request.t):
        threads.setdefault(request.agent, []).append(request)
    for thread in threads.values():
        yield from _responses_of(thread, session.block_size)


def _responses_of(thread: Sequence[WekaRequest], block_size: int) -> Iterator[tuple[Traits, float]]:
    gaps: list[float] = []
    before: Ints = np.zeros(0, np.int64)
    for depth, request in enumerate(thread, 1):
        ids = _expanded(request.hash_runs)
        known = _common(before, ids) * block_size // BLOCK_TOKENS
        blocks = -(-request.input_length // BLOCK_TOKENS)
        gap = np.inf
        if depth < len(thread):
            gap = max(0.0, thread[depth].t - request.t - (request.api_time or 0.0))
        if stop_code(request.stop) and request.api_time is not None:
            mean = float(np.exp(np.mean(np.log(np.array(gaps) + 0.5)))) if gaps else -1.0
            last, before_last = ([*gaps[::-1], -1.0, -1.0])[:2]
            yield (
                Traits(
                    stop_code(request.stop), request.api_time, blocks - known, blocks, depth, last, before_last, mean
                ),
                gap,
            )  # fmt: skip
        gaps.append(gap)
        before = ids


def _expanded(runs: Iterable[tuple[int, int]]) -> Ints:
    parts = [np.arange(first, first + count) for first, count in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _common(a: Ints, b: Ints) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def risks_of(sessions: Iterable[WekaSession]) -> Risks:
    """All rows of these sessions."""
    features, seconds, events = [], [], []
    count = 0
    for session in sessions:
        for traits, gap in responses(session):
            bins = min(NUM_AGES, int(np.searchsorted(AGE_EDGES, gap, side="right")))
            rows = np.empty((bins, NUM_FEATURES))
            rows[:, :-1], rows[:, -1] = traits.features(), AGE_MIDS[:bins]
            at_risk = np.minimum(AGE_EDGES[1 : bins + 1], gap) - AGE_EDGES[:bins]
            happened = np.zeros(bins)
            happened[-1] = gap < AGE_EDGES[-1]
            features.append(rows)
            seconds.append(np.maximum(at_risk, 0.05))
            events.append(happened)
            count += 1
    return Risks(np.concatenate(features), np.concatenate(seconds), np.concatenate(events), count)


# --- boosting -----------------------------------------------------------------------------------------------


def fit(risks: Risks) -> Forest:
    """Boosted trees for the log of the rate."""
    cuts = [_cuts(risks.features[:, f]) for f in range(NUM_FEATURES)]
    codes = np.stack([np.searchsorted(cut, risks.features[:, f]) for f, cut in enumerate(cuts)])
    base = float(np.log(risks.events.sum() / risks.seconds.sum()))
    log_rate = np.full(len(risks.seconds), base)
    trees = [_Tree(codes, cuts) for _ in range(NUM_TREES)]
    for tree in trees:
        expected = risks.seconds * np.exp(log_rate)
        log_rate += tree.grow(risks.events - expected, expected)
    return Forest(
        base,
        np.stack([tree.feature for tree in trees]),
        np.stack([tree.threshold for tree in trees]),
        np.stack([tree.leaf for tree in trees]),
        frozenset(int(stop) for stop in np.unique(risks.features[:, 0])),
    )


def _cuts(values: Floats) -> Floats:
    """Thresholds between quantiles: exact in 32 bits, so that the file holds them as they were used."""
    quantiles = np.unique(np.quantile(values, np.linspace(0, 1, NUM_QUANTILES + 1)))
    return np.asarray(((quantiles[1:] + quantiles[:-1]) / 2).astype(np.float32), float)


class _Tree:
    """A complete tree; nodes that should not be split send all to the left."""

    def __init__(self, codes: Ints, cuts: Sequence[Floats]) -> None:
        self._codes = codes
        self._cuts = cuts
        self._width = max(len(cut) for cut in cuts) + 1
        num_nodes = (1 << DEPTH) - 1
        self.feature: Ints = np.zeros(num_nodes, np.int64)
        self.threshold: Floats = np.full(num_nodes, np.inf)
        self.leaf: Floats = np.zeros(num_nodes + 1)

    def grow(self, slope: Floats, curve: Floats) -> Floats:
        """Fit to first and second derivatives; returns what it adds to each row."""
        place: Ints = np.zeros(len(slope), np.int64)
        for level in range(DEPTH):
            place = self._split_level(level, place, slope, curve)
        num = 1 << DEPTH
        gain = np.bincount(place, slope, num) / (np.bincount(place, curve, num) + DAMPING)
        self.leaf[:] = (RATE * gain).astype(np.float32)
        return np.asarray(self.leaf[place])

    def _split_level(self, level: int, place: Ints, slope: Floats, curve: Floats) -> Ints:
        num, width = 1 << level, self._width
        best = np.full(num, 1e-9)
        code: Ints = np.full(num, width, np.int64)
        chosen: Ints = np.zeros(num, np.int64)
        for f in range(NUM_FEATURES):
            at = place * width + self._codes[f]
            g = np.bincount(at, slope, num * width).reshape(num, width).cumsum(1)
            h = np.bincount(at, curve, num * width).reshape(num, width).cumsum(1)
            gain = _gain(g, h)
            where = gain.argmax(1)
            better = gain[np.arange(num), where] > best
            best[better] = gain[np.arange(num), where][better]
            code[better], chosen[better] = where[better], f
        for node in np.flatnonzero(code < width).tolist():
            self.feature[num - 1 + node] = chosen[node]
            self.threshold[num - 1 + node] = self._cuts[chosen[node]][code[node]]
        goes_right = self._codes[chosen[place], np.arange(len(place))] > code[place]
        return np.asarray(2 * place + goes_right)


def _gain(g: Floats, h: Floats) -> Floats:
    """Of splitting after each code; the last column is no split."""
    rest_g, rest_h = g[:, -1:] - g, h[:, -1:] - h
    score = g**2 / (h + DAMPING) + rest_g**2 / (rest_h + DAMPING) - g[:, -1:] ** 2 / (h[:, -1:] + DAMPING)
    score[(h < LEAST_EVENTS) | (rest_h < LEAST_EVENTS)] = 0.0
    return np.asarray(score)


def deviance(risks: Risks, log_rates: Floats) -> float:
    """Minus twice the log-likelihood, per response."""
    expected = risks.seconds * np.exp(log_rates)
    return float(-2 * (risks.events * log_rates - expected).sum() / risks.num_responses)


def _table(train: Risks, test: Risks, columns: Sequence[int]) -> Floats:
    """Log rates of a table over these feature columns, shrunk to the overall rate."""
    overall = train.events.sum() / train.seconds.sum()
    keys, inverse = np.unique(
        np.concatenate([train.features, test.features])[:, columns], axis=0, return_inverse=True
    )
    inverse = inverse.reshape(-1)
    mine, theirs = inverse[: len(train.events)], inverse[len(train.events) :]
    events = np.bincount(mine, train.events, len(keys)) + 1.0
    seconds = np.bincount(mine, train.seconds, len(keys)) + 1.0 / overall
    return np.asarray(np.log(events / seconds)[theirs])


# --- the command --------------------------------------------------------------------------------------------


def save(forest: Forest, path: Path, fitted_on: str) -> None:
    """In 32 bits, with where it comes from."""
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            base=np.float64(forest.base),
            features=forest.features.astype(np.int8),
            thresholds=forest.thresholds.astype(np.float32),
            leaves=forest.leaves.astype(np.float32),
            stops=np.array(sorted(forest.stops), np.int8),
            about=np.array([fitted_on, SOURCE, LICENCE]),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, show what the held-out fifth says, then fit on all and write."""
    parser = argparse.ArgumentParser(description="Fit the prior for the return of agents' conversations.")
    parser.add_argument("sessions", type=Path, metavar="SESSIONS")
    parser.add_argument("--without", type=Path, metavar="TRACE", help="a trace whose sessions are left out")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    excluded = (
        {line.session_id for _, line in read_json_lines(args.without, _Named)} if args.without else set()
    )
    sessions = [s for _, s in read_json_lines(args.sessions, WekaSession) if s.id not in excluded]
    train = risks_of(s for n, s in enumerate(sessions) if n % 5)
    test = risks_of(s for n, s in enumerate(sessions) if not n % 5)
    print(
        f"{len(sessions)} sessions, {train.num_responses + test.num_responses} responses; held out: a fifth"
    )
    for name, columns in (("by age", [8]), ("by stop and age", [0, 8])):
        print(f"deviance {name}: {deviance(test, _table(train, test, columns)):.4f}")
    print(f"deviance of the trees: {deviance(test, fit(train).log_rates(test.features)):.4f}")
    fitted_on = f"{len(sessions)} of the sessions of {args.sessions.name}"
    fitted_on += f", none of those in {args.without.name}" if args.without else ""
    save(fit(risks_of(sessions)), args.out, fitted_on)


if __name__ == "__main__":
    main(sys.argv[1:])
