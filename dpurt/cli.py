"""The `dpurt` command: one table of subcommands, each in a module of its own with `add_arguments(parser)` and
`run(args)`.

Only the chosen command's module is imported, so that `dpurt --help` is quick and a missing optional package
hurts nobody else. A command whose module is not there is not listed.

Exit codes: 0 all is well; 1 the command ran and the result is bad, or dpurt could not do it; 2 the command
line or a topology is wrong; 130 interrupted. A foreseen error is one line on stderr; a traceback means a bug
in dpurt.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from dpurt.errors import ConfigError, DpurtError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {
    "serve": ("dpurt.commands.serve", "run one node"),
    "demo": ("dpurt.commands.demo", "see it work: nodes, hosts and real bytes on this machine"),
    "smollm2": ("dpurt.commands.smollm2", "a real model decodes with its cold KV in a node"),
    "replay": ("dpurt.replay.cli", "compare prefetch policies on a request trace"),
    "compare": ("dpurt.commands.compare", "two reports of replay side by side"),
    "size": ("dpurt.commands.size", "how much KV, staging, bandwidth and money a load needs"),
    "stats": ("dpurt.commands.stats", "a running node's counters"),
    "record": ("dpurt.commands.record", "record what a running node does, for replay"),
    "explain": ("dpurt.commands.explain", "why blocks were hits or misses"),
    "route": ("dpurt.commands.route", "which engine should serve a prompt, and why"),
    "epoch": ("dpurt.commands.epoch", "make all blocks of old weights unreachable"),
    "bench": ("dpurt.commands.bench", "measure dpurt beside its peers"),
    "doctor": ("dpurt.commands.doctor", "what this machine can do, what is off, and why"),
    "spdk": ("dpurt.commands.spdk", "bring an SPDK target up, look at it, stop it"),
    "check": ("dpurt.commands.check", "check a topology"),
    "keys": ("dpurt.commands.keys", "make CURVE keys and tenant salts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Never raises for what a user or a machine can do wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words).parse_args(words)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _quietly()
    except DpurtError as error:
        return _complain([error])
    except BaseExceptionGroup as group:
        return _from_group(group)


def available() -> dict[str, tuple[str, str]]:
    """The commands whose modules are there."""
    package = Path(__file__).parent
    return {
        name: (module, summary)
        for name, (module, summary) in COMMANDS.items()
        if package.joinpath(*module.split(".")[1:]).with_suffix(".py").is_file()
    }


class _Version(argparse.Action):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        print(f"dpurt {version()}")
        sys.exit(OK)


def version() -> str:
    """The installed version; a checkout that was never installed has none."""
    try:
        return metadata.version("dpurt")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dpurt", description="A DPU offload runtime for LLM KV caches.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (module, summary) in available().items():
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            implementation = importlib.import_module(module)
            implementation.add_arguments(sub)
            sub.set_defaults(run=implementation.run)
    return parser


def _from_group(group: BaseExceptionGroup[BaseException]) -> int:
    """What Trio raises: any interrupt wins; foreseen errors are lines; the rest is a bug and goes on."""
    leaves = list(_leaves(group))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return INTERRUPTED
    foreseen = [leaf for leaf in leaves if isinstance(leaf, DpurtError)]
    if len(foreseen) < len(leaves):
        raise group
    return _complain(foreseen)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _leaves(inner)


def _complain(errors: Sequence[DpurtError]) -> int:
    for error in errors:
        print(f"dpurt: error: {error}", file=sys.stderr)
    return USAGE if any(isinstance(error, ConfigError) for error in errors) else FAILED


def _quietly() -> int:
    """The reader of our output is gone; keep the interpreter from complaining at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
