"""`dpurt size`: how much KV, staging, bandwidth and money a load needs; see `dpurt.core.sizing` for the formulas.

With `--trace` it also draws the trace's hit-rate curve and says where its knee is; with `--topology` it says
what the topology's node holds of the load.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from dpurt.config import Config, load_config
from dpurt.config.schema import EnvelopeConfig
from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.core.kv_models import KV_MODELS, PRECISIONS
from dpurt.core.sizing import (
    DECODE_STEP_S,
    WINDOW_TOKENS,
    Load,
    Reading,
    break_even,
    fits,
    reading,
    tier_fits,
    window,
)
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, write_json
from dpurt.replay.arguments import byte_rate, positive, share, tokens
from dpurt.replay.curve import hit_rate_curve, knee
from dpurt.replay.formats import read_trace
from dpurt.replay.measured_device import device_named

GIB = 1 << 30
CONTEXTS = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Memory of one GPU, and what of it weights and runtime take; a budget given outright wins."""

    name: str
    memory_gb: float
    weights_gb: float
    runtime_gb: float

    @property
    def budget_bytes(self) -> float:
        return (self.memory_gb - self.weights_gb - self.runtime_gb) * 1e9


B300 = Gpu(name="b300", memory_gb=288, weights_gb=155, runtime_gb=25)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--model", required=True, choices=sorted(KV_MODELS), help="KV model")
    parser.add_argument("--context", type=tokens, default=128 << 10, metavar="N", help="tokens; 128K, 1M")
    parser.add_argument("--requests", type=positive, default=1, metavar="R", help="running at once")
    parser.add_argument("--hit", type=share, default=0.9, metavar="H", help="stored share of a context")
    parser.add_argument("--output", type=positive, default=512, metavar="N", help="tokens a request decodes")
    parser.add_argument(
        "--gpus", type=positive, default=1, metavar="N", help="they run on, for rates per GPU"
    )
    parser.add_argument("--device", default="ai_ssd", metavar="NAME", help=f"{', '.join(DEVICES)}, or a file")
    parser.add_argument("--bandwidth", type=byte_rate, metavar="B", help="bytes a second, instead of its own")
    parser.add_argument("--precision", choices=sorted(PRECISIONS), help="of the KV; default the model's")
    parser.add_argument("--window", type=tokens, default=WINDOW_TOKENS, metavar="N", help="tokens ahead")
    parser.add_argument(
        "--gpu-budget-gb",
        type=float,
        default=B300.budget_bytes / 1e9,
        metavar="GB",
        help="GPU memory for KV, 10^9 bytes (default: %(default)g, a B300's 288 less 155 of weights, 25 of runtime)",
    )
    parser.add_argument("--trace", type=Path, help="also this trace's hit-rate curve and its knee")
    parser.add_argument("--topology", help="also what this topology's node holds of the load")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compute and show. ConfigError for a senseless load, trace or topology."""
    if args.gpu_budget_gb <= 0:
        raise ConfigError("--gpu-budget-gb", f"expected more than 0, got {args.gpu_budget_gb:g}")
    device = device_named(args.device)
    if args.bandwidth is not None:
        device = replace(device, read_bytes_per_s=args.bandwidth)
    answer = size(_load(args), device, args.window, args.gpu_budget_gb * 1e9, args.gpus)
    if args.trace is not None:
        answer["trace"] = _trace_part(args.trace, answer)
    if args.topology is not None:
        config = load_config(args.topology)
        answer["topology"] = _topology_part(config, _load(args), device, args.window)
    if args.json is not None:
        write_json(args.json, answer)
    else:
        print(as_text(answer))
    return 0


def _load(args: argparse.Namespace) -> Load:
    model = KV_MODELS[args.model]
    if args.precision is not None:
        model = model.at_precision(args.precision)
    return Load(
        model=model,
        context_tokens=args.context,
        requests=args.requests,
        hit=args.hit,
        output_tokens=args.output,
    )


def size(
    load: Load, device: DeviceProfile, window_tokens: int, gpu_budget_bytes: float, gpus: int
) -> dict[str, object]:
    """Everything `dpurt size` says, as plain values."""
    return {
        "model": load.model.name,
        "source": load.model.source,
        "formula": load.model.formula,
        "bytes_per_token": load.model.bytes_per_token,
        "context_tokens": load.context_tokens,
        "requests": load.requests,
        "hit": load.hit,
        "kv_per_request_bytes": load.request_bytes,
        "kv_per_request_gib": load.request_bytes / GIB,
        "kv_total_bytes": load.total_bytes,
        "device": {
            "name": device.name,
            "read_bytes_per_s": device.read_bytes_per_s,
            "read_latency_s": device.read_latency_s,
            "source": device.source,
        },
        "window": _window_part(load, device, window_tokens),
        "break_even": _break_even_part(load),
        "gpu": _gpu_part(load, gpu_budget_bytes),
        "reading": _reading_part(load, device, window_tokens, gpus),
        "tiers": [
            {"tier": t.tier, "dollars": list(t.dollars), "requests_per_node": list(t.requests)}
            for t in tier_fits(load)
        ],
        "remarks": list(load.model.remarks),
    }


def _window_part(load: Load, device: DeviceProfile, tokens_ahead: int) -> dict[str, object]:
    ahead = window(load.model, device, tokens_ahead)
    return {
        "tokens": ahead.tokens,
        "bytes": ahead.num_bytes,
        "read_s": ahead.read_s,
        "decode_step_s": list(DECODE_STEP_S),
        "lasts_s": list(ahead.lasts_s),
        "margin": list(ahead.margin),
        "staging_bytes": ahead.num_bytes * load.requests,
    }


def _break_even_part(load: Load) -> dict[str, object]:
    here = break_even(load.model, load.context_tokens)
    return {
        "weights_bytes": load.model.weights_bytes,
        "tokens_in_flight": here.tokens,
        "requests": here.requests,
        "exact_requests": here.exact_requests,
        "pays": load.requests >= here.exact_requests,
        "requests_by_context": {str(n): break_even(load.model, n).requests for n in CONTEXTS},
    }


def _gpu_part(load: Load, budget_bytes: float) -> dict[str, object]:
    return {
        "budget_bytes": budget_bytes,
        "requests": fits(budget_bytes, load.request_bytes),
        "requests_by_context": {str(n): fits(budget_bytes, load.model.request_bytes(n)) for n in CONTEXTS},
    }


def _reading_part(load: Load, device: DeviceProfile, window_tokens: int, gpus: int) -> dict[str, object]:
    read = reading(load, device, window_tokens)
    return {
        "output_tokens": load.output_tokens,
        "restore_bytes_per_request": read.restore_bytes,
        "restore_s": read.restore_s,
        "window_bytes_per_s": list(read.window_bytes_per_s),
        "restore_bytes_per_s": list(read.restore_bytes_per_s),
        "bytes_per_s_per_gpu": [
            (w + r) / gpus for w, r in zip(read.window_bytes_per_s, read.restore_bytes_per_s, strict=True)
        ],
        "device_load": list(read.load_share),
    }


def _trace_part(path: Path, answer: dict[str, object]) -> dict[str, object]:
    trace = read_trace(path)
    curve = hit_rate_curve(trace.requests, "lru")
    bend = knee(curve)
    per_token = answer["bytes_per_token"]
    assert isinstance(per_token, float)
    block_bytes = per_token * trace.block_tokens
    return {
        "file": str(path),
        "format": trace.format,
        "eviction": "lru",
        "curve": [
            {
                "staging": point.share,
                "blocks": point.blocks,
                "bytes": point.blocks * block_bytes,
                "hit_rate": point.hit_rate,
            }
            for point in curve
        ],
        "knee": {"staging": bend.share, "bytes": bend.blocks * block_bytes, "hit_rate": bend.hit_rate},
    }


def _topology_part(
    config: Config, load: Load, device: DeviceProfile, window_tokens: int
) -> dict[str, object]:
    """Staging and flash of the node against what the load wants, and both against its envelope, if it states one."""
    staging = sum(share for spaces in config.staging_plan().values() for share in spaces.values())
    flash = sum(bdev.capacity(config) for bdev in config.bdev)
    window_bytes = load.model.bytes_per_token * min(load.context_tokens, window_tokens)
    part: dict[str, object] = {
        "node": config.node.name,
        "staging_bytes": staging,
        "staging_windows": fits(staging, window_bytes),
        "staging_holds_windows": staging >= window_bytes * load.requests,
        "flash_bytes": flash,
        "flash_requests": fits(flash, load.request_bytes),
        "flash_holds_load": flash >= load.total_bytes,
    }
    if config.envelope is not None:
        part["envelope"] = _envelope_part(config.envelope, staging, reading(load, device, window_tokens))
    return part


def _envelope_part(envelope: EnvelopeConfig, staging: int, read: Reading) -> dict[str, object]:
    """Whether the card can hold the staging it is asked for, and its link and devices carry the load's reading, at the
    slow and the fast decode step."""
    wanted = [w + r for w, r in zip(read.window_bytes_per_s, read.restore_bytes_per_s, strict=True)]
    return {
        "source": envelope.source,
        "dram_bytes": envelope.dram_bytes,
        "dram_holds_staging": staging <= envelope.dram_bytes,
        "wanted_bytes_per_s": wanted,
        "link_bytes_per_s": envelope.link_bytes_per_s,
        "link_carries_load": [rate <= envelope.link_bytes_per_s for rate in wanted],
        "device_bytes_per_s": envelope.device_bytes_per_s,
        "devices_carry_load": [rate <= envelope.device_bytes_per_s for rate in wanted],
    }


def as_text(answer: dict[str, object]) -> str:
    """The answer to read: nested names indented, bytes in their own words."""
    return "\n".join(_lines(answer, 0))


def _lines(value: dict[str, object], depth: int) -> list[str]:
    lines: list[str] = []
    for name, inner in value.items():
        head = "  " * depth + name
        if isinstance(inner, dict):
            lines += [head, *_lines(inner, depth + 1)]
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            lines += [head, *("  " * (depth + 1) + _row(row) for row in inner)]
        elif isinstance(inner, list) and inner and isinstance(inner[0], str):
            lines += [head, *("  " * (depth + 1) + text for text in inner)]
        else:
            lines.append(f"{head:<26} {_shown(name, inner)}")
    return lines


def _row(row: dict[str, object]) -> str:
    return "  ".join(f"{name} {_shown(name, inner)}" for name, inner in row.items())


def _shown(name: str, value: object) -> str:
    if isinstance(value, list):
        return " to ".join(_shown(name, inner) for inner in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes_per_s" in name:
        return f"{value / 1e9:.2f} GB/s"
    if "bytes" in name and value >= 1e6:
        return f"{value / 1e9:.2f} GB ({value / GIB:.2f} GiB)"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.0f}" if value >= 10_000 else f"{value:,.4g}"
    return f"{value:,.0f}"
