"""`dpurt explain SPACE --tokens FILE`: why each block of a prompt is here or is not."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import msgspec
import numpy as np

from dpurt.client.admin import ask
from dpurt.config import Config, load_config
from dpurt.errors import ConfigError, NodeUnavailable
from dpurt.json_output import add_json_argument, write_json
from dpurt.wire import messages as m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("space")
    parser.add_argument(
        "--topology", default="laptop", help="the node's topology, for its run_dir (default: laptop)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tokens", metavar="FILE|-", help="a JSON array of token ids, e.g. as a tokenizer prints"
    )
    source.add_argument(
        "--digest", action="append", metavar="HEX", help="an engine's block digest; repeat in prefix order"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show. Exit code 1 when no node answers: then every block misses, for that reason."""
    config = load_config(args.topology)
    config.space_named(args.space)
    request = m.Explain(
        space=args.space, tokens=read_tokens(args.tokens, args.space, config), digests=_digests(args)
    )
    try:
        blocks = ask(config.node.run_path, request, m.ExplainReply).blocks
    except NodeUnavailable as error:
        if args.json is not None:
            write_json(args.json, {"reason": "peer_down", "detail": str(error)})
        print(f"every block misses: peer down ({error})", file=sys.stderr)
        return 1
    if args.json is not None:
        write_json(args.json, msgspec.to_builtins(blocks))
    else:
        print("\n".join(table(blocks)))
    return 0


def table(blocks: list[m.Reason]) -> list[str]:
    """One line a run of blocks with the same answer."""
    rows = []
    for (reason, detail), group in itertools.groupby(blocks, key=lambda b: (b.reason, b.detail)):
        run = list(group)
        first, last = run[0].block, run[-1].block
        span = f"block {first}" if first == last else f"blocks {first}-{last}"
        age = f", {run[0].age_s:.1f} s ago" if run[0].age_s else ""
        rows.append(f"{span:<18} {reason}{age}" + (f" ({detail})" if detail else ""))
    return rows or ["the prompt has no whole block"]


def read_tokens(source: str | None, space: str, config: Config) -> bytes | None:
    """A JSON array of token ids in a file, or on standard input (``-``), as the space's raw tokens. ConfigError if it is none."""
    if source is None:
        return None
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        ids = msgspec.json.decode(content, type=list[int])
    except OSError as error:
        raise ConfigError(source, f"cannot read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(source, f"expected a JSON array of token ids: {error}") from error
    width = config.space_named(space).geometry.token_bytes
    limits = np.iinfo(f"<i{width}")
    for i, token in enumerate(ids):
        if not 0 <= token <= limits.max:
            raise ConfigError(f"{source}[{i}]", f"expected a token id from 0 to {limits.max}, got {token}")
    return np.array(ids, limits.dtype).tobytes()


def _digests(args: argparse.Namespace) -> list[bytes] | None:
    if args.digest is None:
        return None
    try:
        return [bytes.fromhex(text) for text in args.digest]
    except ValueError as error:
        raise ConfigError("--digest", str(error)) from error
