"""How long a device takes: the one model behind the `modelled` bdev and the replay. Pure; `now` is handed in.

The model is a *latency* stage with `queue_depth` servers, each operation holding one for the access latency
(with a long tail now and then), beside one shared *transfer* stage at the device's bandwidth, booked in order
of arrival. So a deep queue of large reads runs at the bandwidth, a single small read takes the latency, and
one slow access does not hold up the others. Deterministic by seed.

Who goes first is not decided here: operations are booked as they come (see `dpurt.core.device_queue`). What
devices there are is in `dpurt.core.device_profiles`.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

__all__ = ["DeviceModel", "DeviceProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a device can do. `tail_probability` of operations take `tail_factor` times the latency; jitter is
    +-fraction. `source` says where the figures come from.
    """

    name: str
    read_latency_s: float
    write_latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    queue_depth: int = 64
    jitter: float = 0.1
    tail_probability: float = 0.0
    tail_factor: float = 10.0
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.read_latency_s, self.write_latency_s) < 0:
            raise ValueError(f"device profile {self.name!r}: latencies must be >= 0")
        if min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0:
            raise ValueError(f"device profile {self.name!r}: bandwidths must be > 0")
        if self.queue_depth < 1:
            raise ValueError(
                f"device profile {self.name!r}: queue_depth must be >= 1, got {self.queue_depth}"
            )


class DeviceModel:
    """One device's queues. `completion` must be called with non-decreasing `now`."""

    def __init__(self, profile: DeviceProfile, seed: int = 0) -> None:
        self.profile = profile
        self._random = random.Random(seed)
        self._servers = [0.0] * profile.queue_depth  # a heap of the times they become free
        self._transfer_free = 0.0

    def completion(self, now: float, length: int, *, is_write: bool = False) -> float:
        """Queue one operation now; the time it will be complete."""
        profile = self.profile
        rate = profile.write_bytes_per_s if is_write else profile.read_bytes_per_s
        transfer = length / rate
        free, server = self._transfer_free, self._servers[0]
        self._transfer_free = shared = (free if free > now else now) + transfer
        alone = (server if server > now else now) + self._latency(is_write) + transfer
        done = alone if alone > shared else shared
        heapq.heapreplace(self._servers, done)
        return done

    def _latency(self, is_write: bool) -> float:
        profile = self.profile
        base = profile.write_latency_s if is_write else profile.read_latency_s
        factor = 1.0 + profile.jitter * (2.0 * self._random.random() - 1.0)
        if profile.tail_probability and self._random.random() < profile.tail_probability:
            factor *= profile.tail_factor
        return base * factor
