"""`dpurt stats`: a running node's counters."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from dpurt.client.admin import ask
from dpurt.config import load_config
from dpurt.json_output import add_json_argument, write_json
from dpurt.wire import messages as m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "topology", nargs="?", default="laptop", help="the node's topology, for its run_dir (default: laptop)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show."""
    stats = ask(load_config(args.topology).node.run_path, m.Stats(), m.StatsReply).stats
    if args.json is not None:
        write_json(args.json, stats)
    else:
        print("\n".join(lines(stats)))
    return 0


def lines(stats: Mapping[str, object], indent: int = 0) -> list[str]:
    """Nested maps as indented text, empty ones left out."""
    shown: list[str] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            inner = lines(value, indent + 2)
            if inner:
                shown += [" " * indent + str(name), *inner]
        else:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            shown.append(f"{' ' * indent}{name:<24} {text}")
    return shown
