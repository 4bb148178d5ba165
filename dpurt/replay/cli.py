"""`dpurt replay FILE`: compare prefetch policies on a request trace. A function to add arguments and one to
run."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dpurt.errors import ConfigError
from dpurt.replay.device import DEVICES
from dpurt.replay.engine import Scenario, replay
from dpurt.replay.policies import POLICIES, policies_named
from dpurt.replay.report import as_table, with_regret
from dpurt.replay.trace import Request, read_mooncake

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number >= 1, got {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a fraction in (0, 1], got {text}")
    return value


def _bandwidth(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes a second such as 14G or 500M, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on a parser."""
    base = Scenario()
    parser.add_argument("file", metavar="FILE", type=Path, help="trace: Mooncake JSONL, plain or gzip")
    parser.add_argument(
        "--policy",
        default=",".join(POLICIES),
        help=f"comma-separated, of: {', '.join(POLICIES)} (default: all)",
    )
    parser.add_argument(
        "--staging",
        type=_share,
        default=base.staging_share,
        metavar="FRACTION",
        help="staging, as a share of the trace's distinct blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=sorted(DEVICES),
        default=base.device.name,
        help="device profile (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth", type=_bandwidth, metavar="B", help="the device's bytes a second, such as 14G"
    )
    parser.add_argument(
        "--lookahead",
        type=_positive,
        default=base.lookahead_blocks,
        metavar="L",
        help="blocks a predictor looks ahead (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=_positive,
        default=base.prefetch_queue_depth,
        metavar="N",
        help="prefetches in flight at once (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=base.seed, metavar="S", help="(default: %(default)s)")
    parser.add_argument("--limit", type=_positive, metavar="N", help="the trace's first N requests only")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or to stdout for -, not a table")


def run(args: argparse.Namespace) -> int:
    """Replay and report. Returns the exit code: 2 for a bad trace or policy, with the reason on stderr."""
    try:
        policies = policies_named(args.policy)
        requests = list(read_mooncake(args.file, args.limit))
        if not requests:
            raise ConfigError(str(args.file), "expected at least one request")
    except ConfigError as error:
        print(f"dpurt replay: {error}", file=sys.stderr)
        return 2
    scenario = scenario_of(args)
    results = with_regret([replay(requests, p, scenario, _progress(p.name, requests)) for p in policies])
    _write(args.json, [result.to_json() for result in results], as_table(results))
    return 0


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario the arguments describe."""
    device = DEVICES[args.device]
    if args.bandwidth is not None:
        device = replace(device, bandwidth_bytes_per_s=args.bandwidth)
    return Scenario(
        staging_share=args.staging,
        device=device,
        lookahead_blocks=args.lookahead,
        prefetch_queue_depth=args.budget,
        seed=args.seed,
    )


def _write(json_to: str | None, rows: list[dict[str, object]], table: str) -> None:
    if json_to is None:
        print(table)
    elif json_to == "-":
        print(json.dumps(rows, indent=2))
    else:
        Path(json_to).write_text(json.dumps(rows, indent=2) + "\n")


def _progress(name: str, requests: list[Request]) -> Callable[[int], None] | None:
    """A bar on stderr, redrawn at each per cent; nothing when nobody looks."""
    if not sys.stderr.isatty():
        return None
    total = len(requests)
    step = max(1, total // 100)

    def show(done: int) -> None:
        if done % step == 0 or done == total:
            bar = "#" * (done * 30 // total)
            end = "\r\033[K" if done == total else ""
            print(
                f"\r{name:>15} [{bar:<30}] {done * 100 // total:3d} %", end=end, file=sys.stderr, flush=True
            )

    return show
