"""Time in an attention replay: how fast layers follow each other, and when a read lands.

The device is one pipe: transfers follow one another at its bandwidth, latencies overlap, and demand reads go
before prefetches that have not started. A read asked for at `now` reaches the device `hint_to_read_s` later: the
node's own time. Latency has a seeded exponential tail, with the profile's jitter as its mean.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.replay.attention_trace import AttentionTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`step_s`: a decode step of `layers_per_step` layers (the paced model's; its layers follow each other
    `step_s / layers_per_step` apart). `block_bytes`: one layer's part of a block. As recorded: `recorded`, how long each
    layer's turn took instead, [steps, layers]; `reads`, mean and standard deviation of a read's time beyond its transfer,
    and from hint to prefetch, [steps, 3].
    """

    step_s: float = 0.03
    layers_per_step: int = 80
    block_bytes: int = 65_536
    hint_to_read_s: float = 50e-6
    device: DeviceProfile = field(default_factory=lambda: DEVICES["ai_ssd"])
    recorded: npt.NDArray[np.float64] | None = None
    reads: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if min(self.step_s, self.layers_per_step, self.block_bytes) <= 0 or self.hint_to_read_s < 0:
            raise ValueError("step_s, layers_per_step and block_bytes must be > 0, hint_to_read_s >= 0")

    @property
    def layer_s(self) -> float:
        """From a layer's start to the next one's, without stalls."""
        return self.step_s / self.layers_per_step

    def turn_s(self, step: int, layer: int) -> float:
        """The same of one turn; `step` < 0 is before the first."""
        return self.layer_s if self.recorded is None or step < 0 else float(self.recorded[step, layer])


def recorded_pace(trace: AttentionTrace) -> Pace | None:
    """The pace at which a trace was recorded, if it says so."""
    if trace.pace is None or trace.layer_s is None or trace.read_s is None:
        return None
    device = DeviceProfile(
        name="recorded", read_latency_s=trace.pace.read_latency_us / 1e6, write_latency_s=0.0,
        read_bytes_per_s=trace.pace.read_bytes_per_s, write_bytes_per_s=trace.pace.read_bytes_per_s, jitter=0.0,
        source="the recording",
    )  # fmt: skip
    transfer_s = trace.pace.block_bytes / trace.pace.read_bytes_per_s
    return Pace(
        step_s=max(1e-9, float(trace.layer_s.sum(axis=1).mean())), layers_per_step=trace.layers,
        block_bytes=trace.pace.block_bytes, hint_to_read_s=0.0, device=device, recorded=trace.layer_s,
        reads=np.maximum(0.0, trace.read_s - np.array([transfer_s, 0.0, 0.0])),
    )  # fmt: skip


class ReadPipe:
    """See the module's docstring. `now` never falls."""

    def __init__(self, pace: Pace, seed: int) -> None:
        self._transfer_s = pace.block_bytes / pace.device.read_bytes_per_s
        self._latency_s = self._least_s = pace.device.read_latency_s
        self._tail_s = self._latency_s * pace.device.jitter
        self._reads = pace.reads
        self._node_s = self._plan_s = pace.hint_to_read_s
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._waiting: dict[int, float] = {}  # slot -> when it may start, in order of issue
        self._lands: dict[int, float] = {}

    def enter_step(self, step: int) -> None:
        """From now on reads take as long as they did in this step of the recording, if there is one: never less than the device
        needs, and now and then longer (an exponential tail), so that mean and deviation are those recorded. Reads one turn
        waits for share the tail: there it is the machine that was busy, not the device.
        """
        if self._reads is not None and step >= 0:
            mean, deviation, self._plan_s = self._reads[step].tolist()
            beyond = max(0.0, mean - self._least_s)
            self._tail_s = min(deviation, beyond)
            self._latency_s = self._least_s + beyond - self._tail_s

    def prefetch(self, slots: Iterable[int], now: float) -> None:
        """Queue reads behind all others."""
        for slot in slots:
            self._waiting[slot] = now + self._plan_s

    def demand(self, slots: Iterable[int], now: float) -> float:
        """Read these before whatever waits; when the last one lands. `now` for none."""
        self._start(now + self._node_s)
        last, shared = now, None if self._reads is None else self._tail()
        for slot in slots:
            self._waiting.pop(slot, None)
            tail_s = self._tail() if shared is None else shared
            last = max(last, self._read(now + self._node_s, tail_s))
        return last

    def landing(self, slot: int, now: float) -> float | None:
        """When a slot's prefetch lands: ``-inf`` for long ago, None if it still waits to start."""
        self._start(now)
        return None if slot in self._waiting else self._lands.get(slot, float("-inf"))

    def withdraw(self, slot: int) -> bool:
        """Take a waiting prefetch out. False if it has started."""
        return self._waiting.pop(slot, None) is not None

    def _start(self, now: float) -> None:
        while self._waiting:
            slot, ready = next(iter(self._waiting.items()))
            if max(self._free_at, ready) > now:
                return
            del self._waiting[slot]
            self._lands[slot] = self._read(ready, self._tail())

    def _tail(self) -> float:
        return self._tail_s * self._random.expovariate(1.0)

    def _read(self, ready: float, tail_s: float) -> float:
        self._free_at = max(self._free_at, ready) + self._transfer_s
        return self._free_at + self._latency_s + tail_s
