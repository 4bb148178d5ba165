"""`dpurt serve TOPOLOGY`: run one node until SIGTERM or SIGINT, then drain."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import signal
import sys
from pathlib import Path

import structlog
import trio

from dpurt.config import load_config
from dpurt.errors import ConfigError
from dpurt.json_output import check_writable
from dpurt.node import Node
from dpurt.runtime.paced_clock import PacedClock

GC_OBJECTS = 20_000  # made since, and still there: then cycles are looked for
OLD_ROUNDS = 100  # of ten such, before what is old is gone through: with a million blocks that stops the node for milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("topology", help="a TOML file, or the name of a ready one (laptop, host-cpu, ...)")
    parser.add_argument("--ready-file", type=Path, help="write the endpoint here once hosts may connect")
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], help="default: the topology's"
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record all of the node's life for dpurt replay, to a new file",
    )
    parser.add_argument(
        "--pace", type=float, default=1.0, metavar="X",
        help="the node's clock runs so many times faster; for experiments with modelled devices",
    )  # fmt: skip
    parser.add_argument(
        "--format",
        action="store_true",
        help="make a store of the device even if it holds other data, which is lost; a dpurt store is kept",
    )


def run(args: argparse.Namespace) -> int:
    """Serve."""
    config = load_config(args.topology)
    for target in (args.ready_file, args.record):
        if target is not None:
            check_writable(target)
    if not 0 < args.pace < math.inf:
        raise ConfigError("--pace", f"expected a factor > 0, got {args.pace:g}")
    set_up_logging(args.log_level or config.node.log_level, as_json=args.log_json)
    for warning in config.warnings():
        structlog.get_logger().warning("topology", detail=warning)
    node = Node(config, may_format=args.format, record_to=args.record)
    _spare_the_collector()
    clock = None if args.pace == 1.0 else PacedClock(args.pace)
    trio.run(_serve, node, args.ready_file, args.log_json, clock=clock)
    return 0


def set_up_logging(level: str, *, as_json: bool) -> None:
    """structlog to stderr."""
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _spare_the_collector() -> None:
    """What the node makes for a message goes when the last name of it goes: it leaves few cycles. Looking for them after every
    700 objects took a tenth of the node's time, and each time all of what a batch of blocks needs was gone through.
    """
    gc.collect()
    gc.freeze()  # modules and the node itself stay
    gc.set_threshold(GC_OBJECTS, 10, OLD_ROUNDS)


async def _serve(node: Node, ready_file: Path | None, is_quiet: bool) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, signals, node)
            endpoint = await nursery.start(_run, node, nursery.cancel_scope)
            if not is_quiet:  # nothing but JSON in a JSON log
                print(f"dpurt: node {node.config.node.name} serves {endpoint}", file=sys.stderr, flush=True)
            if ready_file is not None:
                scratch = ready_file.with_suffix(".part")
                scratch.write_text(endpoint)
                scratch.rename(ready_file)


async def _run(node: Node, scope: trio.CancelScope, *, task_status: trio.TaskStatus[str]) -> None:
    await node.run(task_status=task_status)
    scope.cancel()


async def _stop_on_signal(signals: object, node: Node) -> None:
    async for _ in signals:  # type: ignore[attr-defined]
        node.stop()
