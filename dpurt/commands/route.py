"""`dpurt route SPACE --tokens FILE`: which engine should serve a prompt, and why."""

from __future__ import annotations

import argparse
import sys

import msgspec

from dpurt.client.admin import ask
from dpurt.commands.explain import read_tokens
from dpurt.config import load_config
from dpurt.json_output import add_json_argument, write_json
from dpurt.wire import messages as m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("space")
    parser.add_argument(
        "--topology", default="laptop", help="the node's topology, for its run_dir (default: laptop)"
    )
    parser.add_argument("--tokens", metavar="FILE|-", required=True, help="a JSON array of token ids")
    parser.add_argument("--salt", default="", help="the cache salt the engines get with this prompt")
    parser.add_argument(
        "--book", action="store_true", help="the request will go there: count it as that engine's load"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show. Exit code 1 when the space has no engine."""
    config = load_config(args.topology)
    tokens = read_tokens(args.tokens, args.space, config)
    assert tokens is not None, "argparse demands them"
    intent: m.RouteIntent = "will_route" if args.book else "probe"
    request = m.Route(space=args.space, tokens=tokens, cache_salt=args.salt, intent=intent)
    reply = ask(config.node.run_path, request, m.RouteReply)
    if args.json is not None:
        write_json(args.json, msgspec.to_builtins(reply))
    elif reply.candidates:
        print("\n".join(table(reply)))
    if not reply.candidates:
        print(f"no [[engine]] of the topology serves space {args.space!r}", file=sys.stderr)
    return 0 if reply.candidates else 1


def table(reply: m.RouteReply) -> list[str]:
    """A line an engine, best first."""
    lines = [f"{reply.prompt_tokens} tokens; best: {reply.best}"]
    lines += [f"{one.host:<20} ready in {one.ready_ms:>10,.1f} ms  {one.reason}" for one in reply.candidates]
    return lines
