"""`dpurt epoch bump SPACE`: new weights; every block of the space becomes unreachable at once."""

from __future__ import annotations

import argparse

from dpurt.client.admin import ask
from dpurt.config import load_config
from dpurt.json_output import add_json_argument, write_json
from dpurt.wire import messages as m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=["bump"])
    parser.add_argument("space")
    parser.add_argument(
        "--topology", default="laptop", help="the node's topology, for its run_dir (default: laptop)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Bump."""
    config = load_config(args.topology)
    config.space_named(args.space)
    reply = ask(config.node.run_path, m.EpochBump(space=args.space), m.Ok)
    if args.json is not None:
        write_json(args.json, {"space": args.space, "epoch": reply.count})
        return 0
    print(
        f"space {args.space}: epoch is now {reply.count}; hosts of the old epoch are refused: new weights, a new client"
    )
    return 0
