"""`dpurt record FILE`: record what a running node is told, asked and decides, for `dpurt replay FILE`; `--lint` proves that such
a file holds no token, prompt or name.

The node writes the file, on its own machine; this command begins it, waits, and ends it. A recording in which decisions can
be replayed (`dpurt replay FILE --verify`) begins with the node: `dpurt serve --record FILE`.
"""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpurt.client.admin import ask
from dpurt.config import load_config
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, write_json
from dpurt.replay.lint import lint
from dpurt.wire import messages as m

SHOWN = 20  # problems
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=Path, help="a new file, or with --lint an existing one")
    parser.add_argument(
        "--topology", default="laptop", help="the node's topology, for its run_dir (default: laptop)"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="end after so long (default: when interrupted)"
    )
    parser.add_argument("--lint", action="store_true", help="check a recording instead of making one")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Record, or check a recording: then 1 when something is wrong with it."""
    if args.lint:
        return _lint(args)
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ConfigError("--seconds", f"expected a time > 0, got {args.seconds:g}")
    run_path = load_config(args.topology).node.run_path
    with _interrupts_kept():
        begun = ask(run_path, m.Record(path=str(args.file.absolute())), m.RecordReply)
        _wait(args.seconds)
        ended = ask(run_path, m.Record(), m.RecordReply)
    if args.json is not None:
        write_json(args.json, ended)
        return 0
    print(f"{ended.path}: {ended.lines:,} lines, {ended.bytes:,} bytes, {ended.lost:,} lines lost")
    if not begun.is_fresh:
        print("the node had served before: rates can be replayed, single decisions not")
    return 0


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """SIGINT and SIGTERM wait for `_wait`: one that comes sooner ends the recording too, and never leaves it running."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(seconds: float | None) -> None:
    """Until the time is over, or an interrupt, which is a normal end."""
    if seconds is None:
        signal.sigwait(INTERRUPTS)
    else:
        signal.sigtimedwait(INTERRUPTS, seconds)


def _lint(args: argparse.Namespace) -> int:
    problems = lint(args.file)
    if args.json is not None:
        write_json(args.json, {"file": str(args.file), "is_clean": not problems, "problems": problems})
    elif problems:
        print("\n".join(problems[:SHOWN]))
        print(f"{args.file}: {len(problems)} problems")
    else:
        print(f"{args.file}: clean: numbers, words of the format and keyed hashes only")
    return 1 if problems else 0
