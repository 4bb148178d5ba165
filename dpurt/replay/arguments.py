"""The arguments of `dpurt replay`, and the scenarios they stand for. A comma-separated list makes a sweep."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.core.kv_models import KV_MODELS, PRECISIONS
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument
from dpurt.replay.engine import Scenario
from dpurt.replay.formats import FORMATS, Reading
from dpurt.replay.measured_device import device_named
from dpurt.replay.policies import POLICIES
from dpurt.replay.trace import Trace

__all__ = [
    "add_arguments",
    "byte_rate",
    "is_given",
    "positive",
    "reading_of",
    "scenarios_of",
    "share",
    "tokens",
]

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20}
T = TypeVar("T")


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number >= 1, got {text}")
    return value


def share(text: str) -> float:
    """A fraction in (0, 1]."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a fraction in (0, 1], got {text}")
    return value


def _warmup(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a fraction in [0, 1), got {text}")
    return value


def byte_rate(text: str) -> float:
    """Bytes a second, decimal units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes a second such as 14G or 500M, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """A time from 0."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text}")
    return value


def tokens(text: str) -> int:
    """A number of tokens, binary units: 128K is 131,072."""
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected tokens such as 8192, 128K or 1M, got {text!r}")
    return int(match[1]) * _BINARY[match[2]]


class _Default(list[T]):
    """What holds unless it is given, or the trace says otherwise (a recording knows its node)."""


DEFAULT_MODEL, DEFAULT_PRECISION = "llama-3-70b", "fp8"


def is_given(value: object) -> bool:
    """Is this what the caller said, not what holds otherwise?"""
    return value is not None and not isinstance(value, _Default)


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def values(text: str) -> list[T]:
        return [kind(word) for word in text.split(",")]

    values.__name__ = getattr(kind, "__name__", "value")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on a parser."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help=f"trace, plain or gzip: {', '.join(FORMATS[:-1])}"
    )
    parser.add_argument(
        "--policy",
        help=f"comma-separated, of: {', '.join(POLICIES)} (default: all); attention traces have their own",
    )
    _add_scenario(parser)
    _add_reading(parser)
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: as many as cores)")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep finished runs here, skip those in it"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a self-contained page with charts, too"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="of a recording: feed its completions to the same cores again and compare every decision; nothing else",
    )
    add_json_argument(parser)


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    base = Scenario()
    group = parser.add_argument_group(
        "scenario", "each may be a comma-separated list: all combinations are run"
    )
    _sweepable(
        group, "--staging", share, base.staging_share, "FRACTION", "share of the trace's distinct blocks"
    )
    _sweepable(group, "--device", str, base.device.name, "NAME", f"{', '.join(DEVICES)}, or a measured file")
    group.add_argument(
        "--bandwidth",
        type=_list_of(byte_rate),
        default=_Default([None]),
        metavar="B",
        help="bytes a second such as 14G, instead of the device's",
    )
    group.add_argument(
        "--lookahead",
        type=_list_of(positive),
        metavar="L",
        help=f"blocks a predictor looks ahead (default: {base.lookahead_blocks}); layers on an attention trace (1)",
    )
    _sweepable(group, "--budget", positive, base.prefetch_queue_depth, "N", "prefetches in flight at once")
    _sweepable(
        group,
        "--hint-lead",
        seconds,
        base.hint_lead_s,
        "S",
        "the router's hint precedes the engine's start by",
    )
    _sweepable(group, "--seed", int, base.seed, "S", "of the device's jitter")
    group.add_argument("--model", choices=sorted(KV_MODELS), help=f"(default: {DEFAULT_MODEL})")
    group.add_argument(
        "--precision", choices=sorted(PRECISIONS), help=f"of the KV (default: {DEFAULT_PRECISION})"
    )
    group.add_argument(
        "--warmup",
        type=_warmup,
        metavar="F",
        help="share of the requests not counted (default: 0)",
    )


def _sweepable(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Callable[[str], T],
    default: T,
    metavar: str,
    what: str,
) -> None:
    group.add_argument(
        name,
        type=_list_of(kind),
        default=_Default([default]),
        metavar=metavar,
        help=f"{what} (default: {default})",
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument("--limit", type=positive, metavar="N", help="the trace's first N requests only")
    group.add_argument(
        "--rechain",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="number blocks by their whole prefix (default: ragpulse yes, qwen-bailian no, others are)",
    )
    group.add_argument("--block-tokens", type=tokens, metavar="N", help="group blocks into larger ones")
    group.add_argument("--arrivals", metavar="FILE", help="an Azure trace, as the load shape")
    group.add_argument(
        "--sessions", metavar="FILE", help="coding-agent sessions, to join with: why and when responses ended"
    )


def reading_of(args: argparse.Namespace) -> Reading:
    """How the arguments want the trace read."""
    return Reading(
        limit=args.limit,
        rechain=args.rechain,
        block_tokens=args.block_tokens,
        arrivals=args.arrivals,
        sessions=args.sessions,
        seed=args.seed[0],
    )


def scenarios_of(args: argparse.Namespace, trace: Trace, recorded: Scenario | None = None) -> list[Scenario]:
    """All combinations of what the arguments list. `recorded`: what holds where they are silent."""
    if recorded is not None:
        return _from_recorded(args, recorded)
    model = KV_MODELS[args.model or DEFAULT_MODEL].at_precision(args.precision or DEFAULT_PRECISION)
    base = replace(
        Scenario(),
        block_tokens=trace.block_tokens,
        block_bytes=round(model.bytes_per_token * trace.block_tokens),
        warmup_share=args.warmup or 0.0,
    )
    lookaheads = args.lookahead or [base.lookahead_blocks]
    return [
        replace(
            base,
            staging_share=staging,
            device=device,
            lookahead_blocks=lookahead,
            prefetch_queue_depth=budget,
            hint_lead_s=lead,
            seed=seed,
        )
        for device in _devices(args.device, args.bandwidth)
        for staging, lookahead, budget, lead, seed in product(
            args.staging, lookaheads, args.budget, args.hint_lead, args.seed
        )
    ]


def _from_recorded(args: argparse.Namespace, recorded: Scenario) -> list[Scenario]:
    """A recorded node, with what was asked for changed. `--bandwidth` alone is another rate of its device."""
    for name in ("model", "precision", "hint_lead"):
        if is_given(getattr(args, name)):
            raise ConfigError(
                "--" + name.replace("_", "-"),
                "a recording has its own: blocks of known bytes, hints as they came",
            )
    devices = [recorded.device]
    if not isinstance(args.device, _Default):
        devices = _devices(args.device, args.bandwidth)
    elif not isinstance(args.bandwidth, _Default):
        devices = [replace(recorded.device, read_bytes_per_s=rate) for rate in args.bandwidth]
    stagings, budgets = (
        _given(args.staging, recorded.staging_share),
        _given(args.budget, recorded.prefetch_queue_depth),
    )
    lookaheads = args.lookahead or [recorded.lookahead_blocks]
    return [
        replace(
            recorded, staging_share=staging, device=device, lookahead_blocks=lookahead, prefetch_queue_depth=budget,
            seed=seed, warmup_share=args.warmup or 0.0,
        )
        for device in devices
        for staging, lookahead, budget, seed in product(stagings, lookaheads, budgets, args.seed)
    ]  # fmt: skip


def _given(values: list[T], otherwise: T) -> list[T]:
    return [otherwise] if isinstance(values, _Default) else values


def _devices(names: Sequence[str], bandwidths: Sequence[float | None]) -> list[DeviceProfile]:
    devices = []
    for name, bandwidth in product(names, bandwidths):
        device = device_named(name)
        devices.append(device if bandwidth is None else replace(device, read_bytes_per_s=bandwidth))
    return devices
