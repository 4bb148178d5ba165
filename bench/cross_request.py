"""Prefetch and eviction across requests: how much of the way from LRU to the oracle our policy goes, with 14 GB/s.

*At match*: of the blocks a request could reuse when it arrives (the run of its prefix that was stored), the share in
staging at that moment; any present block counts. *Closed*: (ours - LRU) / (oracle - LRU), in per cent, all of one
scenario, LRU touching tails first. `dpurt` has the prior the package ships, fitted on other sessions than these;
`dpurt_fresh` learns from nothing; `predicted` evicts by prediction and fetches on demand only. Settings are the same
for all traces. The bounds are what prototypes reached that know the distribution of each gap but not the gap, with
unlimited bandwidth: a figure above them is a look at the future until proven otherwise.

*Timely at need*: of all references, the share in staging when its host asks, where the router's hint comes
`HINT_LEAD_S` before the engine's start; as a share of the oracle's.

Whole traces are not in this repository: name a folder that holds them in `DPURT_TRACES`. Without it the same is
printed of slices, to which the targets do not apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpurt.bench.result import BenchResult, Figure
from dpurt.core.device_profiles import DEVICES
from dpurt.replay.engine import Scenario
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.report import Result
from dpurt.replay.sweep import sweep
from dpurt.replay.worker import Run

SUMMARY = "prefetch and eviction across requests: share of the way from LRU to the oracle"

FOLDER = "DPURT_TRACES"
SLICES = Path(__file__).parent / "traces"
SESSIONS = "weka_claude_code_sessions.jsonl.gz"
HINT_LEAD_S = 1.0
TIMELY_TARGET = 95.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One row of the table: which policies to judge in which scenario, and against which closed shares."""

    trace: str
    staging: float
    gigabytes_per_s: float = 14.0
    targets: dict[str, float | None]
    bound: float | None = None


_WHOLE = {"agents": "weka_merged_512.jsonl.gz", "chat": "mooncake_conversation.jsonl.gz"}
_SLICED = {"agents": "weka_merged_512_300.jsonl.gz", "chat": "mooncake_conversation_1600.jsonl.gz"}
CASES = (
    _Case(
        trace="agents",
        staging=0.05,
        targets={"predicted": None, "dpurt_fresh": 33.0, "dpurt": 45.0},
        bound=70.0,
    ),
    _Case(
        trace="agents", staging=0.05, gigabytes_per_s=28.0, targets={"dpurt_fresh": None, "dpurt": 60.0}, bound=70.0
    ),
    _Case(trace="agents", staging=0.1, targets={"dpurt_fresh": None, "dpurt": 40.0}, bound=61.0),
    _Case(
        trace="chat",
        staging=0.05,
        targets={"predicted": None, "dpurt_fresh": None, "dpurt": 22.0},
        bound=35.0,
    ),
    _Case(trace="chat", staging=0.1, targets={"dpurt_fresh": None, "dpurt": 18.0}, bound=32.0),
)  # fmt: skip
ENDS = ("lru", "belady", "oracle")


def run(quick: bool) -> BenchResult:
    """The table; `quick` takes the rows at 5 % and 14 GB/s."""
    folder = os.environ.get(FOLDER)
    result = BenchResult(
        name="cross_request",
        conditions={
            "traces": folder or f"slices; set {FOLDER} for whole ones",
            "block": "512 tokens of Llama-3-70B in FP8, 83.9 MB",
            "hint_lead_s": HINT_LEAD_S,
        },
    )
    for name in _WHOLE:
        cases = [case for case in CASES if case.trace == name and not (quick and not _is_first(case))]
        result.figures += _figures_of(name, cases, folder)
    return result


def _is_first(case: _Case) -> bool:
    return case.staging == 0.05 and case.gigabytes_per_s == 14.0


def _figures_of(name: str, cases: Sequence[_Case], folder: str | None) -> Iterator[Figure]:
    path = Path(folder) / _WHOLE[name] if folder else SLICES / _SLICED[name]
    reading = Reading(sessions=str(Path(folder) / SESSIONS) if folder and name == "agents" else None)
    runs = [run for case in cases for run in _runs(case)]
    results = iter(sweep(read_trace(path, reading), path, reading, runs, jobs=os.cpu_count() or 1))
    for case in cases:
        at_match = {run.policy: next(results) for run in _runs(case) if not run.scenario.hint_lead_s}
        hinted = {run.policy: next(results) for run in _runs(case) if run.scenario.hint_lead_s}
        yield from _rows(case, at_match, is_judged=folder is not None)
        if hinted:
            yield _timely(case, hinted, is_judged=folder is not None)


def _runs(case: _Case) -> list[Run]:
    device = replace(DEVICES["ai_ssd"], read_bytes_per_s=case.gigabytes_per_s * 1e9)
    scenario = Scenario(staging_share=case.staging, device=device)
    runs = [Run(policy, scenario) for policy in (*ENDS, *case.targets)]
    if _is_first(case):
        runs += [Run(policy, replace(scenario, hint_lead_s=HINT_LEAD_S)) for policy in ("oracle", "dpurt")]
    return runs


def _rows(case: _Case, results: dict[str, Result], *, is_judged: bool) -> Iterator[Figure]:
    title = f"{case.trace} at {case.staging:.0%}, {case.gigabytes_per_s:g} GB/s"
    for end in ENDS:
        yield Figure(name=f"{title}: {end}", value=round(100 * results[end].at_match, 1), unit="% at match")
    for policy, target in case.targets.items():
        ours = results[policy]
        yield Figure(name=f"{title}: {policy}", value=round(100 * ours.at_match, 1), unit="% at match")
        closed = closed_percent(ours, results["lru"], results["oracle"])
        judged = target if is_judged else None
        yield Figure(
            name=f"{title}: {policy}",
            value=round(closed, 1),
            unit="% closed",
            peer="information bound" if is_judged and case.bound else None,
            peer_value=case.bound if is_judged else None,
            target=None if judged is None else f">= {judged:g}",
            holds=None if judged is None else closed >= judged,
        )  # fmt: skip


def closed_percent(ours: Result, lru: Result, oracle: Result) -> float:
    """How far `ours` is on the way from LRU to the oracle, by what was there at match."""
    way = oracle.at_match - lru.at_match
    return 100 * (ours.at_match - lru.at_match) / way if way else 0.0


def _timely(case: _Case, hinted: dict[str, Result], *, is_judged: bool) -> Figure:
    share = 100 * hinted["dpurt"].hit_rate["blocks"] / hinted["oracle"].hit_rate["blocks"]
    return Figure(
        name=f"{case.trace} at {case.staging:.0%}, hinted {HINT_LEAD_S:g} s ahead: timely at need",
        value=round(share, 1),
        unit="% of the oracle's",
        target=f">= {TIMELY_TARGET:g}" if is_judged else None,
        holds=share >= TIMELY_TARGET if is_judged else None,
    )
