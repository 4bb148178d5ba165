"""Prefetch and eviction across requests: how much of the way from LRU to the oracle our policy goes, with 14 GB/s.

*At match*: of the blocks a request could reuse when it arrives (the run of its prefix that was stored), the share in
staging at that moment; any present block counts; requests take no time, see `dpurt.replay.at_match`. *Closed*: (ours -
LRU) / (oracle - LRU), in per cent, LRU touching tails first, all with the case's bandwidth. At other bandwidths than
`PUBLISHED_GB_PER_S` there is a second convention, that of the figures published for these traces and of our target: the
oracle is the one at that bandwidth, so a faster device can close more than all. Both are printed. ``dpurt`` has the prior the package
ships, fitted on other sessions than these; ``dpurt_fresh`` learns from nothing; ``predicted`` evicts by prediction and
fetches on demand only. Settings are the same for all traces. The bounds are what prototypes reached that knew the
distribution of each gap but not the gap, with unlimited bandwidth: a figure above them is a look at the future until
proven otherwise.

*Timely at need* is of `dpurt.replay.engine`, where hosts queue and reads take time: of all references, the share in
staging when its host asks, with a router's hint some of `HINT_LEADS_S` before the engine's start; as a share of what the
oracle has then.

Whole traces are not in this repository: name a folder that holds them in `DPURT_TRACES`. Without it the same is
printed of slices, to which the targets do not apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpurt.bench.cross_request_cell import BLOCK_BYTES, Cell, answers
from dpurt.bench.result import BenchResult, Figure
from dpurt.replay.at_match import AtMatch, closed_percent
from dpurt.replay.engine import Scenario
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.sweep import sweep
from dpurt.replay.worker import Run

SUMMARY = "prefetch and eviction across requests: share of the way from LRU to the oracle"

FOLDER = "DPURT_TRACES"
SLICES = Path(__file__).parent / "traces"
SESSIONS = "weka_claude_code_sessions.jsonl.gz"
PUBLISHED_GB_PER_S = 14.0
HINT_LEADS_S = (0.0, 1.0, 2.0, 4.0)
TIMELY_TARGET = 95.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # hashed as itself
class _Case:
    """One row of the table: policies and the closed share each should reach, if any."""

    trace: str
    staging: float
    gigabytes_per_s: float = PUBLISHED_GB_PER_S
    targets: Mapping[str, float | None]
    bound: float

    @property
    def title(self) -> str:
        return f"{self.trace} at {self.staging:.0%}, {self.gigabytes_per_s:g} GB/s"

    @property
    def is_published_speed(self) -> bool:
        """Both conventions of *closed* are one."""
        return self.gigabytes_per_s == PUBLISHED_GB_PER_S

    @property
    def is_first(self) -> bool:
        """The scenario the others are variations of."""
        return self.staging == 0.05 and self.is_published_speed


_WHOLE = {"agents": "weka_merged_512.jsonl.gz", "chat": "mooncake_conversation.jsonl.gz"}
_SLICED = {"agents": "weka_merged_512_300.jsonl.gz", "chat": "mooncake_conversation_1600.jsonl.gz"}
_FIRST_AGENTS = {"predicted": None, "dpurt_fresh": 33.0, "dpurt": 45.0}
_FIRST_CHAT = {"predicted": None, "dpurt": 22.0}  # chats have no stop reason: fresh or not is one
CASES = (
    _Case(trace="agents", staging=0.05, targets=_FIRST_AGENTS, bound=70.0),
    _Case(trace="agents", staging=0.05, gigabytes_per_s=28.0, targets={"dpurt": 60.0}, bound=70.0),
    _Case(trace="agents", staging=0.1, targets={"dpurt_fresh": None, "dpurt": 40.0}, bound=61.0),
    _Case(trace="chat", staging=0.05, targets=_FIRST_CHAT, bound=35.0),
    _Case(trace="chat", staging=0.1, targets={"dpurt": 18.0}, bound=32.0),
)
ENDS = ("lru", "belady", "oracle")
ON_DEMAND = ("lru", "belady", "predicted")  # the same at any bandwidth


def run(quick: bool) -> BenchResult:
    """The table; `quick` takes the rows at 5 % and 14 GB/s, and no times."""
    folder = os.environ.get(FOLDER)
    result = BenchResult(
        name="cross_request",
        conditions={
            "traces": folder or f"slices; set {FOLDER} for whole ones",
            "block": f"512 tokens of Llama-3-70B in FP8, {BLOCK_BYTES / 1e6:.1f} MB",
            "hint_leads_s": ", ".join(f"{lead:g}" for lead in HINT_LEADS_S),
        },
    )
    cases = [case for case in CASES if case.is_first or not quick]
    cells = {case: {policy: _cell(case, policy, folder) for policy in _policies(case)} for case in cases}
    slowest_first = sorted(
        {cell for row in cells.values() for cell in row.values()}
        | {_yardstick(case, folder) for case in cases},
        key=lambda cell: cell.policy in ENDS,
    )
    found = answers(slowest_first)
    for case in cases:
        row = {policy: found[cell] for policy, cell in cells[case].items()}
        result.figures += _rows(case, row, found[_yardstick(case, folder)], is_judged=folder is not None)
    if not quick:
        for name in _WHOLE:
            result.figures += _timely(name, folder)
    return result


def _policies(case: _Case) -> tuple[str, ...]:
    return (*ENDS, *case.targets)


def _files(name: str, folder: str | None) -> tuple[str, str | None]:
    """The trace, and what is read beside it."""
    if folder is None:
        return str(SLICES / _SLICED[name]), None
    return str(Path(folder) / _WHOLE[name]), str(Path(folder) / SESSIONS) if name == "agents" else None


def _cell(case: _Case, policy: str, folder: str | None) -> Cell:
    file, sessions = _files(case.trace, folder)
    speed = PUBLISHED_GB_PER_S if policy in ON_DEMAND else case.gigabytes_per_s
    return Cell(file, sessions, policy, case.staging, speed)


def _yardstick(case: _Case, folder: str | None) -> Cell:
    """The oracle of the published convention."""
    return _cell(replace(case, gigabytes_per_s=PUBLISHED_GB_PER_S), "oracle", folder)


def _rows(case: _Case, found: dict[str, AtMatch], yardstick: AtMatch, *, is_judged: bool) -> Iterator[Figure]:
    for policy, result in found.items():
        yield Figure(name=f"{case.title}: {policy}", value=round(100 * result.rate, 1), unit="% at match")
    for policy, target in case.targets.items():
        judged = target if is_judged else None
        if case.is_published_speed:
            yield _closed(case, policy, closed_percent(found[policy], found["lru"], yardstick), judged)
            continue
        own = closed_percent(found[policy], found["lru"], found["oracle"])
        published = closed_percent(found[policy], found["lru"], yardstick)
        yield _closed(case, f"{policy}, of the way to the oracle at this bandwidth", own, None)
        name = f"{policy}, published convention: to the oracle at {PUBLISHED_GB_PER_S:g} GB/s"
        yield _closed(case, name, published, judged)


def _closed(case: _Case, name: str, closed: float, target: float | None) -> Figure:
    return Figure(
        name=f"{case.title}: {name}",
        value=round(closed, 1),
        unit="% closed",
        peer=None if target is None else "information bound",
        peer_value=None if target is None else case.bound,
        target=None if target is None else f">= {target:g}",
        holds=None if target is None else closed >= target,
    )


def _timely(name: str, folder: str | None) -> Iterator[Figure]:
    file, sessions = _files(name, folder)
    reading = Reading(sessions=sessions)
    runs = [
        Run(policy, Scenario(hint_lead_s=lead)) for lead in HINT_LEADS_S for policy in ("dpurt", "oracle")
    ]
    trace = read_trace(Path(file), reading)
    results = sweep(trace, Path(file), reading, runs, os.cpu_count() or 1)
    rates = [result.hit_rate["blocks"] for result in results]
    return _lead_rows(name, rates[::2], rates[1::2], is_judged=folder is not None)


def _lead_rows(
    name: str, ours: Sequence[float], oracles: Sequence[float], *, is_judged: bool
) -> Iterator[Figure]:
    """A row per lead. Without a hint there is no target: nobody knows who arrives."""
    for lead, rate, oracle in zip(HINT_LEADS_S, ours, oracles, strict=True):
        share = 100 * rate / oracle
        has_target = is_judged and lead > 0
        yield Figure(
            name=f"{name} at 5%, hinted {lead:g} s ahead: timely at need",
            value=round(share, 1),
            unit="% of the oracle's",
            target=f">= {TIMELY_TARGET:g}" if has_target else None,
            holds=share >= TIMELY_TARGET if has_target else None,
        )
