"""The order of reads in front of a modelled device: demand before prefetch. Pure; the caller owns the clock.

A read waits here until one of the device's `queue_depth` places is free; from then on the `DeviceModel` says
when it is complete. What has been started cannot be overtaken: that is why the arbiter keeps prefetch's queue
short. A prefetch somebody comes to wait for is promoted to a demand read.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from dpurt.core.device_model import DeviceModel, DeviceProfile

__all__ = ["DeviceQueue", "Read"]


class Read(Struct, eq=False, gc=False):
    """One read of a block. `job` is the prefetch job it serves, if any; `is_demand` may become true while it
    waits."""

    block: int
    num_bytes: int
    job: int | None
    is_demand: bool
    has_started: bool = False


class DeviceQueue:
    """See the module's docstring. `start` gives the reads that start now, with their completion times."""

    def __init__(self, profile: DeviceProfile, seed: int) -> None:
        self._model = DeviceModel(profile, seed)
        self.bytes_read = 0
        self.demand_backlog_bytes = 0  # queued or in service
        self._demand: deque[Read] = deque()
        self._prefetch: deque[Read] = deque()
        self._free_places = profile.queue_depth

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
        while self._free_places and (self._demand or self._prefetch):
            read = self._demand.popleft() if self._demand else self._prefetch.popleft()
            read.has_started = True
            self._free_places -= 1
            started.append((self._model.completion(now, read.num_bytes), read))
        return started

    def complete(self, read: Read) -> None:
        """A started read's completion time has come."""
        self._free_places += 1
        self.bytes_read += read.num_bytes
        if read.is_demand:
            self.demand_backlog_bytes -= read.num_bytes
