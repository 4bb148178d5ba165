"""A modelled device: one pipe of bandwidth behind a queue, demand reads before prefetch. Pure: the engine
owns the clock.

A read takes its turn on the pipe (bytes / bandwidth, one after the other) and completes a latency later; the
latencies of up to `queue_depth` reads overlap. What has been started cannot be overtaken: that is why the
arbiter keeps prefetch's queue short. The latency has a seeded exponential tail of mean `JITTER` x base.
Writes of new blocks are counted, and cost reads nothing: a first form.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

JITTER = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """`source` says where the numbers come from."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    queue_depth: int
    source: str


_CLAIMS = "vendors' claims, tier tables in articles of 2026"
DEVICES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="ai_ssd", bandwidth_bytes_per_s=14e9, latency_s=100e-6, queue_depth=64, source=_CLAIMS
        ),
        DeviceProfile(
            name="nvme", bandwidth_bytes_per_s=7e9, latency_s=200e-6, queue_depth=64, source=_CLAIMS
        ),
        DeviceProfile(
            name="nvme_slow", bandwidth_bytes_per_s=3e9, latency_s=200e-6, queue_depth=64, source=_CLAIMS
        ),
        DeviceProfile(
            name="storage_node", bandwidth_bytes_per_s=28e9, latency_s=100e-6, queue_depth=256, source=_CLAIMS
        ),
    )
}


@dataclass(slots=True)
class Read:
    """One read of a block. `job` is the prefetch job it serves, if any; `is_demand` may become true while it
    waits."""

    block: int
    num_bytes: int
    job: int | None
    is_demand: bool
    has_started: bool = False


class ModelledDevice:
    """See the module's docstring. `start` gives the reads that start now, with their completion times."""

    def __init__(self, profile: DeviceProfile, seed: int) -> None:
        self.profile = profile
        self.bytes_read = 0
        self.demand_backlog_bytes = 0  # queued or in service
        self._random = random.Random(seed)
        self._demand: deque[Read] = deque()
        self._prefetch: deque[Read] = deque()
        self._outstanding = 0
        self._pipe_free_at = 0.0

    def submit(self, read: Read) -> None:
        """Queue a read."""
        if read.is_demand:
            self.demand_backlog_bytes += read.num_bytes
            self._demand.append(read)
        else:
            self._prefetch.append(read)

    def promote(self, read: Read) -> None:
        """Somebody waits for a prefetch: from now on it is a demand read."""
        if read.is_demand:
            return
        read.is_demand = True
        self.demand_backlog_bytes += read.num_bytes
        if not read.has_started:
            self._prefetch.remove(read)
            self._demand.append(read)

    def cancel(self, read: Read) -> bool:
        """Take a prefetch nobody waits for out of the queue. False if it has started or somebody does."""
        if read.has_started or read.is_demand:
            return False
        self._prefetch.remove(read)
        return True

    def start(self, now: float) -> list[tuple[float, Read]]:
        """Start what the queue depth allows: (completion time, read) of each."""
        started = []
        while self._outstanding < self.profile.queue_depth and (self._demand or self._prefetch):
            read = self._demand.popleft() if self._demand else self._prefetch.popleft()
            read.has_started = True
            self._outstanding += 1
            transfer_s = read.num_bytes / self.profile.bandwidth_bytes_per_s
            self._pipe_free_at = max(now, self._pipe_free_at) + transfer_s
            latency_s = self.profile.latency_s * (1 + JITTER * self._random.expovariate(1.0))
            started.append((self._pipe_free_at + latency_s, read))
        return started

    def complete(self, read: Read) -> None:
        """A started read's completion time has come."""
        self._outstanding -= 1
        self.bytes_read += read.num_bytes
        if read.is_demand:
            self.demand_backlog_bytes -= read.num_bytes
