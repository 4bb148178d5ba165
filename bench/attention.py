"""Prefetch for sparse decode against an oracle, on recorded attention: what closes how much of the gap, at what cost.

As a benchmark it replays `agent_hints.npz` of the folder named by DPURT_ATTENTION_TRACES (its first 600 steps) and holds
the figures against the targets; without that folder the committed slice of 44 steps, which is too short to learn
much from, and without targets. As a program it prints the tables of bench/RESULTS.md::

    python -m dpurt.bench.attention FOLDER --table hints
    python -m dpurt.bench.attention FOLDER --table baselines --traces agent,docqa

One process, deterministic. Every figure is of one 135 M model at 3 to 8 K context.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dpurt.bench.result import BenchResult, Figure
from dpurt.core.attention_pool import PoolBudget
from dpurt.core.attention_tally import Tally
from dpurt.core.device_profiles import DEVICES
from dpurt.replay.attention import (
    POLICIES,
    AttentionPolicy,
    AttentionScenario,
    closed_percent,
    replay_attention,
)
from dpurt.replay.attention_recall import PREDICTORS, Share, recall
from dpurt.replay.attention_timing import Pace
from dpurt.replay.attention_trace import AttentionTrace, read_attention

SUMMARY = (
    "share of the gap between LRU and an oracle that attention prefetch closes, on recorded decode steps"
)

SLICE = Path(__file__).parent / "traces" / "attention_agent_hints_44.npz"
FOLDER = "DPURT_ATTENTION_TRACES"
STEPS = 600
SHARES = (0.1, 0.2, 0.3)
TRACES = ("agent_hints", "agent", "docqa", "edit", "gen")
CLOSED_TARGETS = {1: (70, 80, 77), 2: (60, 70, 67), 4: (50, 60, 58)}
LEAN_TARGETS = (70, 68, 64)
LEAN_ACCURACY = (0.40, 0.35, 0.35)
HINT_TO_READ_S = 300e-6  # a lookup's round trip is 190 to 360 us and issuing a read 10 to 60 us: `dpurt bench lookup`, `node`

Row = list[str]


def run(quick: bool) -> BenchResult:
    """Ours, look-ahead by staging share; `quick` looks one layer ahead only."""
    folder = os.environ.get(FOLDER)
    path = Path(folder) / "agent_hints.npz" if folder else SLICE
    trace = read_attention(path, STEPS)
    result = BenchResult(name="attention", conditions=_conditions(trace))
    for share in SHARES:
        anchors = _Anchors(trace, share)
        for lookahead, targets in CLOSED_TARGETS.items():
            if quick and lookahead > 1:
                continue
            target = targets[SHARES.index(share)] if folder else None
            result.figures += _closed(trace, anchors, share, lookahead, target)
    result.figures.append(_speed(trace))
    return result


def _conditions(trace: AttentionTrace) -> dict[str, object]:
    return {
        "trace": trace.name,
        "model": trace.model,
        "context_tokens": list(trace.context_tokens),
        "steps": trace.steps,
        "layers": trace.layers,
        "budget_per_turn": 4,
    }


class _Anchors:
    """LRU and the oracle at one staging share: what *closed* is measured between."""

    def __init__(self, trace: AttentionTrace, share: float, budget: float = 4) -> None:
        scenario = AttentionScenario(capacity=share, budget=budget)
        self.lru = replay_attention(trace, POLICIES["lru"], scenario)
        self.oracle = replay_attention(trace, POLICIES["oracle"], scenario)

    def closed(self, tally: Tally) -> float:
        """In per cent."""
        return closed_percent(tally, self.lru, self.oracle) or 0.0


def _closed(
    trace: AttentionTrace, anchors: _Anchors, share: float, lookahead: int, target: float | None
) -> Iterator[Figure]:
    for strict in (False, True):
        scenario = AttentionScenario(capacity=share, lookahead=lookahead, strict=strict)
        closed = anchors.closed(replay_attention(trace, POLICIES["dpurt"], scenario))
        judged = None if strict else target
        yield Figure(
            name=f"{share:.0%} staging, {lookahead} ahead, {'strict' if strict else 'plain'}",
            value=round(closed, 1),
            unit="% closed",
            target=None if judged is None else f">= {judged}",
            holds=None if judged is None else closed >= judged,
        )


def _speed(trace: AttentionTrace) -> Figure:
    start = time.perf_counter()
    replay_attention(trace, POLICIES["dpurt"], AttentionScenario())
    references = trace.turns * trace.layers * trace.top
    return Figure(
        name="replay of ours",
        value=round(references / (time.perf_counter() - start)),
        unit="block references/s",
    )


# --- tables -------------------------------------------------------------------------------------------------


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _hits(tally: Tally) -> str:
    return f"{_percent(tally.hits, tally.demanded):.1f}"


def _mass(tally: Tally) -> str:
    return f"{_percent(tally.hit_mass, tally.mass):.1f}"


def _issued(tally: Tally, trace: AttentionTrace) -> str:
    return f"{tally.issued / (trace.steps * trace.layers):.2f}"


def _accuracy(tally: Tally) -> str:
    return f"{(tally.timely + tally.late) / tally.issued:.2f}" if tally.issued else "-"


def baselines(traces: list[AttentionTrace]) -> Iterator[Row]:
    """Hits of the named baselines, plain and strict where they differ."""
    names = [name for name in POLICIES if not name.startswith("dpurt")]
    yield ["trace", "staging", *names]
    for trace in traces:
        for share in SHARES:
            cells = []
            for name in names:
                scenario = AttentionScenario(capacity=share)
                plain = replay_attention(trace, POLICIES[name], scenario)
                strict = replay_attention(trace, POLICIES[name], replace(scenario, strict=True))
                cells.append(_hits(plain) + (f" ({_hits(strict)})" if plain.issued else ""))
            yield [trace.name, f"{share:.0%}", *cells]


def recalls(traces: list[AttentionTrace]) -> Iterator[Row]:
    """Predictors without a cache: the share found of what has a mass, and what it may have been of all."""
    yield ["trace", "predictor", "equal", "twice", "mass"]
    for trace in traces:
        for name in PREDICTORS:
            for lookahead in trace.lookaheads if name == "hint" else (1,):
                if name != "snapkv" or trace.warm_turns:
                    label = f"hint {lookahead}" if name == "hint" else name
                    yield [trace.name, label, *map(_share, recall(trace, name, lookahead))]


def _share(share: Share) -> str:
    return f"{share.known:.2f} ({share.least:.2f}-{share.most:.2f})"


def hints(
    traces: list[AttentionTrace], names: tuple[str, ...] = ("hint", "dpurt", "dpurt_lean")
) -> Iterator[Row]:
    """With hints, by look-ahead and staging, both accountings."""
    yield ["policy", "ahead", "accounting", "staging", "hits", "mass", "closed", "issued", "accuracy"]
    for trace in (trace for trace in traces if trace.lookaheads):
        anchors = {share: _Anchors(trace, share) for share in SHARES}
        for share in SHARES:
            yield [
                "lru",
                "-",
                "-",
                f"{share:.0%}",
                _hits(anchors[share].lru),
                _mass(anchors[share].lru),
                "0",
                "0",
                "-",
            ]
            oracle = anchors[share].oracle
            yield [
                "oracle",
                "-",
                "plain",
                f"{share:.0%}",
                _hits(oracle),
                _mass(oracle),
                "100",
                _issued(oracle, trace),
                "1",
            ]
        for name in names:
            for lookahead in CLOSED_TARGETS:
                for strict in (False, True):
                    for share in SHARES:
                        scenario = AttentionScenario(capacity=share, lookahead=lookahead, strict=strict)
                        tally = replay_attention(trace, POLICIES[name], scenario)
                        kind = "strict" if strict else "plain"
                        closed = f"{anchors[share].closed(tally):.1f}"
                        yield [
                            name, str(lookahead), kind, f"{share:.0%}", _hits(tally), _mass(tally), closed,
                            _issued(tally, trace), _accuracy(tally),
                        ]  # fmt: skip


def no_hints(traces: list[AttentionTrace]) -> Iterator[Row]:
    """History alone: hits (mass), gains over LRU and EWMA."""
    yield [
        "trace",
        "staging",
        "lru",
        "ewma",
        "ours",
        "ours strict",
        "over lru",
        "over ewma",
        "issued",
        "accuracy",
    ]
    for trace in traces:
        for share in SHARES[:2]:
            scenario = AttentionScenario(capacity=share)
            lru, ewma, ours = (
                replay_attention(trace, POLICIES[name], scenario)
                for name in ("lru", "ewma", "dpurt_no_hints")
            )
            strict = replay_attention(trace, POLICIES["dpurt_no_hints"], replace(scenario, strict=True))
            gains = [f"{_percent(ours.hits - other.hits, ours.demanded):+.1f}" for other in (lru, ewma)]
            cells = [f"{_hits(tally)} ({_mass(tally)})" for tally in (lru, ewma, ours, strict)]
            yield [trace.name, f"{share:.0%}", *cells, *gains, _issued(ours, trace), _accuracy(ours)]


def latency(traces: list[AttentionTrace]) -> Iterator[Row]:
    """With time: late prefetches are no hits. Staging of a fifth, layers as far apart as in a model of 80."""
    yield ["step ms", "ahead", "policy", "hits", "mass", "late % of issued", "stall ms in 30 layers"]
    for trace in (trace for trace in traces if trace.lookaheads):
        for step_s in (0.01, 0.03):
            pace = Pace(step_s=step_s, hint_to_read_s=HINT_TO_READ_S, device=DEVICES["ai_ssd"])
            for lookahead in CLOSED_TARGETS:
                scenario = AttentionScenario(capacity=0.2, lookahead=lookahead, pace=pace)
                for name in ("lru", "hint", "dpurt", "oracle"):
                    tally = replay_attention(trace, POLICIES[name], scenario)
                    late = f"{_percent(tally.late, tally.issued):.1f}"
                    stall = f"{1000 * tally.stall_s / trace.steps:.2f}"
                    yield [
                        f"{step_s * 1000:.0f}",
                        str(lookahead),
                        name,
                        _hits(tally),
                        _mass(tally),
                        late,
                        stall,
                    ]


def frontier(traces: list[AttentionTrace]) -> Iterator[Row]:
    """Hits against reads: ours at several thresholds and margins, strict, one layer ahead."""
    yield ["staging", "threshold", "margin", "hits", "closed", "issued", "accuracy", "reads a turn"]
    for trace in (trace for trace in traces if trace.lookaheads):
        for share in SHARES:
            anchors = _Anchors(trace, share)
            for threshold, margin in (
                (0.5, 1.0),
                (0.3, 1.0),
                (0.2, 0.7),
                (0.12, 0.5),
                (0.06, 0.4),
                (0.02, 0.3),
            ):
                policy = _with(POLICIES["dpurt"], threshold, margin)
                tally = replay_attention(trace, policy, AttentionScenario(capacity=share, strict=True))
                reads = (tally.issued + tally.misses) / (trace.steps * trace.layers)
                yield [
                    f"{share:.0%}", str(threshold), str(margin), _hits(tally), f"{anchors.closed(tally):.1f}",
                    _issued(tally, trace), _accuracy(tally), f"{reads:.2f}",
                ]  # fmt: skip


def _with(policy: AttentionPolicy, threshold: float, margin: float) -> AttentionPolicy:
    def budget(mean: float) -> PoolBudget:
        usual = policy.budget(mean)
        return PoolBudget(
            mean=usual.mean, burst=usual.burst, saved=usual.saved, threshold=threshold, margin=margin
        )

    return replace(policy, budget=budget)


TABLES: dict[str, Callable[[list[AttentionTrace]], Iterator[Row]]] = {
    "baselines": baselines,
    "recall": recalls,
    "hints": hints,
    "no_hints": no_hints,
    "latency": latency,
    "frontier": frontier,
}


def main() -> None:
    """Print one table as Markdown, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the .npz files are")
    parser.add_argument("--table", choices=TABLES, required=True)
    parser.add_argument("--traces", default=",".join(TRACES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="first steps of each (default: %(default)s)")
    args = parser.parse_args()
    traces = [read_attention(args.folder / f"{name}.npz", args.steps) for name in args.traces.split(",")]
    for number, row in enumerate(TABLES[args.table](traces)):
        print("| " + " | ".join(row) + " |", flush=True)
        if number == 0:
            print("|" + " --- |" * len(row), flush=True)


if __name__ == "__main__":
    main()
