"""`dpurt replay FILE`: compare prefetch policies on a request trace, in one scenario or a sweep of them. (On an attention
trace: `attention_cli`.)

JSON is a list with one object per policy and scenario, scenarios in the order of the arguments and within each the
policies in theirs; `conditions` tells them apart. Equal arguments give equal bytes but for `wall_s` and `refs_per_s`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from dpurt.json_output import check_writable, write_json, write_text
from dpurt.replay import attention_cli
from dpurt.replay.arguments import add_arguments, reading_of, scenarios_of
from dpurt.replay.attention_cli import is_attention
from dpurt.replay.decisions import verify
from dpurt.replay.engine import Scenario
from dpurt.replay.formats import UNFINISHED, read_trace
from dpurt.replay.page import as_page
from dpurt.replay.policies import POLICIES, policies_named
from dpurt.replay.recording import read_recording, scenario_of
from dpurt.replay.report import Result, as_table, with_regret
from dpurt.replay.sweep import WORTH_A_PROCESS, Journal, sweep
from dpurt.replay.trace import Trace
from dpurt.replay.worker import Run

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Replay and report. ConfigError for a bad trace, policy, device or place to write."""
    for target in (args.json, args.html):
        if target is not None and target != "-":
            check_writable(Path(target))
    if args.verify:
        return _verify(args)
    if is_attention(args.file):
        return attention_cli.run(args)
    policies = policies_named(args.policy or ",".join(POLICIES))
    reading = reading_of(args)
    trace = read_trace(args.file, reading)
    recorded = scenario_of(read_recording(args.file)) if trace.format == "dpurt-recording" else None
    scenarios = scenarios_of(args, trace, recorded)
    runs = [Run(policy.name, scenario) for scenario in scenarios for policy in policies]
    journal = None if args.resume is None else Journal(args.resume, args.file, reading)
    with journal or nullcontext():
        results = sweep(trace, args.file, reading, runs, args.jobs or _jobs(trace, len(runs)), journal)
    compared = list(_compared(results, len(policies), trace))
    if args.html is not None:
        write_text(args.html, as_page(compared))
    _write(args.json, scenarios, compared)
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Decisions of a recording, fed back. 1 when one differs."""
    recording = read_recording(args.file)
    verdict = verify(recording)
    if not recording.is_whole:
        print(f"note: {UNFINISHED}; what comes before it was compared", file=sys.stderr)
    if args.json is not None:
        write_json(args.json, {"is_equal": verdict.is_equal, **asdict(verdict)})
    else:
        counts = ", ".join(f"{count} of kind {kind}" for kind, count in verdict.decisions.items())
        print(f"decisions equal to the recorded ones: {counts}")
        print(f"first difference: {verdict.difference}" if verdict.difference else "no difference")
    return 0 if verdict.is_equal else 1


def _jobs(trace: Trace, num_runs: int) -> int:
    references = sum(len(request.blocks) for request in trace.requests)
    return 1 if references * num_runs < WORTH_A_PROCESS else len(os.sched_getaffinity(0))


def _compared(results: Sequence[Result], num_policies: int, trace: Trace) -> Iterator[list[Result]]:
    """The results of each scenario, with their regret and their trace."""
    about = {
        "file": trace.file,
        "format": trace.format,
        "is_chained": trace.is_chained,
        "modelled": list(trace.model),
    }
    for at in range(0, len(results), num_policies):
        for_one = with_regret(results[at : at + num_policies])
        yield [replace(r, conditions={"trace": about, **r.conditions}) for r in for_one]


def _write(json_to: str | None, scenarios: Sequence[Scenario], compared: Sequence[Sequence[Result]]) -> None:
    if json_to is not None:
        write_json(json_to, [result.to_json() for group in compared for result in group])
        return
    for scenario, group in zip(scenarios, compared, strict=True):
        print(_titled(scenario, as_table(group), len(scenarios)))


def _titled(scenario: Scenario, table: str, num_scenarios: int) -> str:
    if num_scenarios == 1:
        return table
    rate = scenario.device.read_bytes_per_s / 1e9
    title = (
        f"staging {scenario.staging_share:g}, {scenario.device.name} at {rate:g} GB/s, look-ahead "
        f"{scenario.lookahead_blocks}, budget {scenario.prefetch_queue_depth}, seed {scenario.seed}"
    )
    return f"{title}\n{table}"
