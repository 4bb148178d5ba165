"""`dpurt compare A.json B.json`: two reports of `dpurt replay --json`, figure by figure; see `dpurt.replay.compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpurt.json_output import add_json_argument, write_json
from dpurt.replay.compare import as_json, as_text, pairs, read_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", type=Path, metavar="A.json", help="the report to compare with")
    parser.add_argument("b", type=Path, metavar="B.json", help="the report that is compared")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Pair the runs and show what differs. ConfigError for a file that is no report."""
    found = pairs(read_report(args.a), read_report(args.b))
    if args.json is not None:
        write_json(args.json, as_json(found))
    else:
        print(as_text(found))
    return 0
