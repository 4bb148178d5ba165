"""`dpurt replay FILE.npz`: policies on a recording of sparse attention in decode. The same command and JSON as for request
traces, with `--staging` a share of the cold blocks, `--lookahead` in layers, `--budget` prefetches a layer turn.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dpurt.errors import ConfigError
from dpurt.json_output import write_json
from dpurt.progress import Progress
from dpurt.replay.arguments import is_given
from dpurt.replay.attention import POLICIES, run_attention

__all__ = ["is_attention", "run"]

DEFAULT_POLICIES = ("lru", "ewma", "dpurt_no_hints", "hint", "dpurt", "oracle")
DEFAULT_LOOKAHEAD = 1
_OF_REQUESTS = (
    "html", "resume", "device", "bandwidth", "hint_lead", "model", "precision", "warmup", "rechain", "block_tokens", "arrivals",
    "sessions",
)  # fmt: skip


def is_attention(path: Path) -> bool:
    """Is this a numpy archive, as attention traces are? False for what is not there."""
    return path.is_file() and zipfile.is_zipfile(path)


def run(args: argparse.Namespace) -> int:
    """Replay and report. ConfigError for a bad trace, policy or argument."""
    for name in _OF_REQUESTS:
        if is_given(getattr(args, name)):
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, "is for request traces; an attention trace has a table or --json")
    names = _policies(args.policy)
    rows: list[dict[str, Any]] = []
    lookaheads = args.lookahead or [DEFAULT_LOOKAHEAD]
    combinations = list(product(args.staging, lookaheads, args.budget, args.seed))
    with Progress("replay", len(combinations)) as progress:
        for done, (staging, lookahead, budget, seed) in enumerate(combinations):
            found = run_attention(args.file, names, staging, budget, lookahead, seed, steps=args.limit)
            rows += found
            if args.json is None:
                print(_table(found))
            progress.update(done + 1)
    if args.json is not None:
        write_json(args.json, rows)
    return 0


def _policies(wanted: str | None) -> Sequence[str]:
    names = DEFAULT_POLICIES if wanted is None else tuple(wanted.split(","))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError(
            "--policy", f"unknown {', '.join(unknown)}; for attention traces: {', '.join(POLICIES)}"
        )
    return names


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    about = rows[0]["conditions"]
    low, high = min(about["context_tokens"]), max(about["context_tokens"])
    lines = [
        f"{about['model']}, context {low} to {high} tokens, {about['steps']} steps x {about['layers']} layers, "
        f"{about['demanded_per_turn']} cold blocks of {about['block_tokens']} tokens demanded a layer",
        f"staging {about['capacity']:g} of the cold blocks, {about['lookahead_layers']} layers ahead, budget "
        f"{about['budget_per_turn']:g} a layer turn; strict: a prefetch takes its place when it is issued",
        f"{'policy':<16}{'hit %':>8}{'mass %':>8}{'strict %':>10}{'closed %':>10}{'accuracy':>10}{'coverage':>10}"
        f"{'reads/turn':>12}",
    ]
    if rows[0]["recorded_pace"] is None:
        return "\n".join([*lines, *(_row(row) for row in rows)])
    return "\n".join([*lines, *(_row(row) for row in rows), *_paced_lines(rows, about["steps"])])


def _paced_lines(rows: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    head = f"{'at the recorded pace':<22}{'hit %':>8}{'late % of issued':>18}{'stall ms/step':>15}"
    return [head, *(_paced_row(row["policy"], row["recorded_pace"], steps) for row in rows)]


def _paced_row(policy: str, row: Mapping[str, Any], steps: int) -> str:
    late = row["late"] / row["issued"] if row["issued"] else None
    stall = _number(1000 * row["stall_s"] / steps, 2)
    return f"  {policy:<20}{_percent(row['hit_rate']['blocks']):>8}{_percent(late):>18}{stall:>15}"


def _row(row: Mapping[str, Any]) -> str:
    strict = row["strict"]
    return (
        f"{row['policy']:<16}{_percent(row['hit_rate']['blocks']):>8}{_percent(row['hit_rate']['mass']):>8}"
        f"{_percent(strict and strict['hit_rate']['blocks']):>10}{_number(row['closed_percent'], 1):>10}"
        f"{_number(row['accuracy'], 2):>10}{_number(row['coverage'], 2):>10}{_number(row['reads_per_turn'], 2):>12}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
