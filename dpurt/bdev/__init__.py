"""Block devices: the one contract every backend keeps, present and future.

Backends: `memory` (tests), `file` (O_DIRECT on a file or block device), `modelled` (memory with a device's
timing), `vhost-user`, `nvme-tcp`, `nvme-rdma`, `spdk` (one of these three, provided over its target's RPC);
`paced` slows a `file` down. `dpurt.testing.bdev_contract.check_bdev` is the contract as a test suite; a
backend that passes it may be used by the storage agent.

Buffers are writable (reads) or readable (writes) memoryviews of format ``"B"``, usually slices of the staging
arena, so a device may DMA straight into a slot. Offsets and lengths are bytes and multiples of
`BdevInfo.block_size`; the buffers' addresses are aligned to `BdevInfo.buffer_align`. Deadlines are absolute
times of `trio.current_time()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["Bdev", "BdevInfo", "BdevStats", "DeviceMemory"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Shared memory a device may be given: `length` bytes at `address` of this process, which are those of the
    open file `fd` from its start (a memfd). The giver keeps it mapped and open until the bdev is closed.
    """

    fd: int
    address: int
    length: int


@dataclass(frozen=True, slots=True)
class BdevInfo:
    """What a device is. Sizes in bytes; `max_transfer_bytes` is per operation (MDTS), larger ones the backend
    splits.
    """

    name: str
    kind: str
    size_bytes: int
    block_size: int
    buffer_align: int
    max_transfer_bytes: int
    optimal_io_bytes: int
    queue_depth: int
    placement_handles: int = 0
    detail: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class BdevStats:
    """Plain counters, owned by the backend."""

    reads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_deallocated: int = 0
    errors: int = 0
    timeouts: int = 0
    in_flight: int = 0
    reconnects: int = (
        0  # times the device, or the way to it, was lost and found again: it may be another's now
    )
    abandoned: int = 0  # timed out or cancelled, and the device has not answered yet


@runtime_checkable
class Bdev(Protocol):
    """One block device.

    Every operation raises `BdevError` (the device is done with the buffers) or `BdevTimeout` (it is not: see
    there). A *cancelled* operation counts as abandoned: the caller must treat the buffers as in use until
    `drain()` returns, so callers that reuse buffers shield the operation and rely on its deadline. Operations
    may run concurrently from several tasks, up to any number; the backend queues beyond its depth. Completion
    order is not promised.
    """

    @property
    def info(self) -> BdevInfo: ...

    @property
    def stats(self) -> BdevStats: ...

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        """Many buffers to come are slices of this memory: a device that moves bytes there by itself is told
        here. Buffers outside of all added memory work too, maybe by a copy. May do nothing. Raises BdevError.
        """
        ...

    async def read_into(self, offset: int, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fill `buffers`, in order, from the device starting at `offset`. All of it or an error."""
        ...

    async def write_from(
        self, offset: int, buffers: Sequence[memoryview], deadline: float, *, placement: int = 0
    ) -> None:
        """Write `buffers`, in order, at `offset`. On error the range holds old, new or mixed content."""
        ...

    async def deallocate(self, offset: int, length: int, deadline: float) -> None:
        """Tell the device the range is not needed (TRIM). Reading it later gives any content. May do nothing."""
        ...

    async def flush(self, deadline: float) -> None:
        """Return when every write that has *returned* survives a power loss."""
        ...

    async def drain(self) -> None:
        """Return when no operation, abandoned ones included, is in flight."""
        ...

    async def aclose(self) -> None:
        """Drain and close. Later operations raise BdevError with status ``"closed"``. Idempotent."""
        ...
