"""`dpurt demo`: a node and two GPU-host processes replay a real trace, every byte checked. See `dpurt.demo`."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from dpurt.config.reading import parse_size
from dpurt.demo import report
from dpurt.demo.back_end import check_installed
from dpurt.demo.interrupts import sigterm_interrupts
from dpurt.demo.plan import TRACE_BLOCK_BYTES, Plan, make_plan
from dpurt.demo.run import Outcome, Way, play
from dpurt.doctor import memory_bytes
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, check_writable, write_json
from dpurt.progress import Progress
from dpurt.rdma.device import why_off
from dpurt.replay.trace import read_mooncake

TRACE = "mooncake_conversation_1600.jsonl.gz"
DEVICES = {"file": "a file", "vhost-user": "a vhost-user-blk device (qemu-storage-daemon)"}
SPARE_BYTES = 2 << 30
MEMORY_SHARE = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--requests", type=int, default=1500, metavar="N", help="how many of the trace (default 1500)"
    )
    parser.add_argument("--fabric", choices=["shm", "tcp", "both", "verbs"], default="both")
    parser.add_argument(
        "--speed", type=float, default=12.0, metavar="X", help="times faster than the trace (default 12)"
    )
    parser.add_argument(
        "--block-bytes", default="256 KiB", metavar="SIZE", help="KV bytes of a block (default 256 KiB)"
    )
    parser.add_argument(
        "--staging", type=float, default=0.05, metavar="SHARE", help="of the distinct blocks (default 0.05)"
    )
    parser.add_argument(
        "--policy",
        choices=["dpurt", "lru", "none"],
        default="dpurt",
        help="dpurt (default: with lru beside it on the first fabric), or lru, also called none: demand reads only",
    )
    parser.add_argument(
        "--bdev", choices=["file", "vhost-user"], default="file",
        help="a file of the node's own, or one that a qemu-storage-daemon shows over vhost-user-blk (default file)",
    )  # fmt: skip
    parser.add_argument(
        "--crash", nargs="?", const="node", choices=["node", "bdev"],
        help="kill -9 the node (or, with --bdev vhost-user, the device's process) in the middle and start it again",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, help="another Mooncake JSONL trace (default: the one in the package)"
    )
    parser.add_argument(
        "--dir", type=Path, help="where to work, on the disk to use (default: a temporary folder)"
    )
    parser.add_argument("--picture", type=Path, default=Path("dpurt-demo.html"), metavar="FILE")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Play, show, judge: 1 when a byte was wrong, a host could not be served, or figures do not add up."""
    _check_files(args)
    _check_device(args)
    _check_fabric(args)
    plan = _plan(args)
    quiet = args.json == "-"
    if not quiet:
        print(_intro(plan, args))
    with _work_folder(None if args.dir is None else args.dir.resolve()) as work:
        baseline = _play_baseline(plan, args, work, quiet)
        outcomes = _play_all(plan, args, work, quiet)
    report.write_picture(args.picture, plan, outcomes, baseline)
    if not quiet:
        if baseline is not None:
            print(
                f"\n--- dpurt against lru on the same requests ---\n{report.comparison(baseline, outcomes[0])}"
            )
        print(f"picture: {args.picture}")
    if args.json is not None:
        write_json(args.json, report.as_json(plan, outcomes, baseline))
    played = outcomes if baseline is None else [baseline, *outcomes]
    return 0 if all(is_good(outcome) for outcome in played) else 1


@contextmanager
def _work_folder(parent: Path | None) -> Iterator[Path]:
    """A folder and, inside the block, SIGTERM as an interrupt: neither it nor the processes outlive the block."""
    with sigterm_interrupts():
        work = Path(tempfile.mkdtemp(prefix="dpurt-demo-", dir=parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _check_files(args: argparse.Namespace) -> None:
    """What is written at the end must not fail only then."""
    if args.dir is not None and not (args.dir.is_dir() and os.access(args.dir, os.W_OK)):
        raise ConfigError("--dir", f"{args.dir} is no folder that can be written")
    check_writable(args.picture)
    if args.json not in (None, "-"):
        check_writable(Path(args.json))


def _check_device(args: argparse.Namespace) -> None:
    if args.bdev == "vhost-user":
        check_installed()
    elif args.crash == "bdev":
        raise ConfigError(
            "--crash", "bdev can be killed with --bdev vhost-user only: the file is the node's own"
        )


def is_good(outcome: Outcome) -> bool:
    """No wrong byte, and the books balance. With a crash, requests may have found no node."""
    wrong = sum(h.wrong_bytes + h.checksum_errors for h in outcome.hosts)
    lost = (
        0 if outcome.crash and outcome.crash.victim == "node" else sum(h.unreachable for h in outcome.hosts)
    )
    return not wrong and not lost and not outcome.exit_code and report.ledger_adds_up(outcome.stats)


def _check_fabric(args: argparse.Namespace) -> None:
    if args.fabric == "verbs" and (reason := why_off()):
        raise ConfigError("--fabric verbs", reason)


def _plan(args: argparse.Namespace) -> Plan:
    if args.requests < 1 or not 0 < args.speed < math.inf or not 0 < args.staging <= 1:
        raise ConfigError("demo", "--requests >= 1, --speed > 0 and 0 < --staging <= 1 are expected")
    try:
        block_bytes = parse_size(args.block_bytes)
    except ValueError as error:
        raise ConfigError("--block-bytes", str(error)) from error
    if block_bytes < 16384 or block_bytes % 16384:
        raise ConfigError("--block-bytes", f"expected a multiple of 16 KiB, got {args.block_bytes}")
    with resources.as_file(resources.files("dpurt.bench") / "traces" / TRACE) as shipped:
        trace = list(read_mooncake(args.trace or shipped, args.requests))
    if not trace:
        raise ConfigError(str(args.trace), "the trace has no request")
    plan = make_plan(trace, block_bytes=block_bytes, staging_share=args.staging, speed=args.speed)
    _check_room(plan, args)
    return plan


def _check_room(plan: Plan, args: argparse.Namespace) -> None:
    available = memory_bytes()[1]
    if plan.memory_bytes > MEMORY_SHARE * available:
        raise ConfigError(
            "--block-bytes",
            f"{plan.memory_bytes:,} bytes of memory are needed and {available:,} are available; use smaller blocks, "
            "fewer --requests or less --staging",
        )
    free = shutil.disk_usage(args.dir or tempfile.gettempdir()).free
    if plan.store_bytes + SPARE_BYTES > free:
        raise ConfigError(
            "--dir",
            f"{plan.store_bytes:,} bytes of disk are needed and {free:,} are free; use fewer --requests",
        )


def _intro(plan: Plan, args: argparse.Namespace) -> str:
    scales = report.scales(plan)
    share = f"{plan.staging_blocks / plan.distinct_blocks:.0%} of them"
    if plan.staging_blocks > args.staging * plan.distinct_blocks:
        share += ", the least there is"
    prefetch = "with prefetch" if args.policy == "dpurt" else "read on demand only"
    return (
        f"dpurt demo: {len(plan.requests)} requests of a real chat trace (Mooncake), two hosts, one node on {DEVICES[args.bdev]}\n"
        f"  scales: time x{plan.speed:g} ({plan.span_s:.0f} s), bytes 1/{scales['bytes_scale']} "
        f"({plan.block_bytes >> 10} KiB for a 512-token block; the 70B model has {TRACE_BLOCK_BYTES >> 20} MiB);\n"
        f"  arrivals the trace rounds to one time are spread over a step of its clock;\n"
        f"  the trace has block ids only, so tokens and KV bytes are synthetic; there is no GPU\n"
        f"  {plan.block_refs:,} block references, {plan.distinct_blocks:,} distinct blocks "
        f"({plan.store_bytes / 2**30:.1f} GiB file),\n"
        f"  staging {plan.staging_blocks:,} blocks ({share}), {prefetch}"
    )


def _play_all(plan: Plan, args: argparse.Namespace, work: Path, quiet: bool) -> list[Outcome]:
    policy = "dpurt" if args.policy == "dpurt" else "lru"
    return [_play_one(plan, args, work, kind, policy, quiet) for kind in _fabrics(args)]


def _play_baseline(plan: Plan, args: argparse.Namespace, work: Path, quiet: bool) -> Outcome | None:
    """The same requests on demand, over the first fabric; not where something is killed."""
    if args.policy != "dpurt" or args.crash is not None:
        return None
    return _play_one(plan, args, work, _fabrics(args)[0], "lru", quiet)


def _fabrics(args: argparse.Namespace) -> Sequence[str]:
    return ["shm", "tcp"] if args.fabric == "both" else [args.fabric]


def _play_one(
    plan: Plan, args: argparse.Namespace, work: Path, kind: str, policy: str, quiet: bool
) -> Outcome:
    folder = work / (kind if policy == "dpurt" else f"{kind}-lru")
    with Progress(f"{kind} fabric, {policy}", 1000) as progress:
        outcome = play(
            plan, Way(kind, args.bdev, policy, args.crash), folder,
            progress=lambda done: progress.update(int(done * 1000)),
        )  # fmt: skip
    if not quiet:
        print(f"\n--- {kind} fabric, {policy}, {outcome.wall_s:.0f} s ---\n{report.text(plan, outcome)}")
    return outcome
