"""A decode of the SmolLM2 example as an attention trace that `dpurt replay` reads, with the times it was seen to take.

See `dpurt.replay.attention_trace` for the format. Only the blocks a turn asked for have a mass code: the others were not
looked at. `layer_us`, `read_us` and `pace` are what a paced replay needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from dpurt.core.attention import NO_MASS
from dpurt.demo.smollm2_node import Device, Found, ReadTotals, part_slot_bytes
from dpurt.engines.smollm2.decode import Ask, SparseSettings, TurnLog
from dpurt.engines.smollm2.model import Shape
from dpurt.replay.attention_trace import NOT_HINTED


@dataclass(frozen=True, slots=True)
class Times:
    """`layer_s`: from a layer's turn to the next one's, without stalls; `stall_s`: what its cold KV took longer than it takes
    when all of it is staged.
    """

    layer_s: list[float]
    stall_s: list[float]


def times_of(log: TurnLog, found: Sequence[Found]) -> Times:
    """What a run's times amount to."""
    staged = [w for w, f in zip(log.waited, found, strict=True) if f.staged == f.asked]
    usual = median(staged) if staged else min(log.waited)
    stall_s = [
        max(0.0, w - usual) if f.staged < f.asked else 0.0 for w, f in zip(log.waited, found, strict=True)
    ]
    ends = [*log.began[1:], log.began[-1] + median(np.diff(log.began).tolist())]
    layer_s = [
        max(0.0, end - began - stall) for began, end, stall in zip(log.began, ends, stall_s, strict=True)
    ]
    return Times(layer_s, stall_s)


def read_times(totals: Sequence[ReadTotals]) -> npt.NDArray[np.float32]:
    """Of each step, from the node's totals before and after, in microseconds: mean and standard deviation of a read's time,
    and how long after its hint a plan was made. A step without reads has the times of the one before it.
    """
    times = np.zeros((len(totals) - 1, 3), np.float32)
    for step, (before, after) in enumerate(pairwise(totals)):
        count = after.number - before.number
        if count:
            mean = (after.seconds - before.seconds) / count
            variance = (after.squares - before.squares) / count - mean * mean
            lag = (after.plan_seconds - before.plan_seconds) / max(1, after.plans - before.plans)
            times[step] = 1e6 * mean, 1e6 * math.sqrt(max(0.0, variance)), 1e6 * lag
        elif step:
            times[step] = times[step - 1]
    return times


def write_recording(
    path: Path,
    log: TurnLog,
    times: Times,
    reads: npt.NDArray[np.float32],
    device: Device,
    shape: Shape,
    settings: SparseSettings,
    prompt: int,
) -> None:
    """Write the trace. `prompt`: tokens before the first step."""
    steps = len(log.asks) // shape.layers
    blocks = -(-(prompt + steps) // settings.block_tokens)
    masses = np.full((steps, shape.layers, blocks), NO_MASS, np.uint8)
    for ask in log.asks:
        masses[ask.step, ask.layer, ask.blocks] = np.frombuffer(ask.codes, np.uint8)
    meta = {
        "model": "SmolLM2-135M-Instruct", "name": path.stem, "workload": "sparse decode, masses estimated by key digests",
        "block_tokens": settings.block_tokens, "n_prefill": prompt - 1, "steps": steps, "layers": shape.layers,
        "spec_hot_window_tokens": settings.window_tokens, "spec_sink_tokens": 0, "demanded": settings.top,
        "pace": {
            "read_latency_us": device.latency_us, "read_bytes_per_s": device.bytes_per_s,
            "block_bytes": part_slot_bytes(shape, settings.block_tokens),
        },
    }  # fmt: skip
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "mass_q": masses,
        "read_us": reads,
        "layer_us": np.rint(1e6 * np.array(times.layer_s)).astype(np.uint32).reshape(steps, shape.layers),
    }
    if settings.ahead:
        meta["spec_lookahead_layers"] = [settings.ahead]
        arrays["spec_topk"] = _hints(log.asks, steps, shape.layers, settings.ranked)
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]


def _hints(asks: Sequence[Ask], steps: int, layers: int, ranks: int) -> npt.NDArray[np.uint16]:
    hints = np.full((steps, 1, layers, ranks), NOT_HINTED, np.uint16)
    for ask in asks:
        if ask.ranked_layer is not None:
            hints[ask.step, 0, ask.ranked_layer, : len(ask.ranked)] = ask.ranked
    return hints
