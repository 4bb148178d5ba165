"""Memory a vhost-user back end may touch: our own, the arena's, and the way in between for everything else.

An operation's buffers are turned into segments the device can reach. A buffer inside of memory the device was given
is reached where it is. For one outside, pieces of a bounce area are taken and bytes copied, before a write, after a
read; the area is bounded, and where it has no piece left the transfer is made shorter, or waits.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from dpurt.bdev import DeviceMemory
from dpurt.bdev.buffers import address_of
from dpurt.wire.virtqueue import pack_pieces

__all__ = [
    "BOUNCE_CHUNK_BYTES",
    "BouncePool",
    "Bounced",
    "MemoryMap",
    "OwnMemory",
    "Planner",
    "Transfer",
    "TransferLimits",
]

BOUNCE_CHUNK_BYTES = 64 << 10
_MAX_REMEMBERED = 1 << 16
_Pieces = Sequence[tuple[int, int]]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnMemory:
    """A memfd of our own, zeroed, allocated in full, and sealed: a peer that cut it short would end us with a SIGBUS.
    After `close` a peer's mapping of it stays good, ours too while somebody has a view.
    """

    def __init__(self, name: str, length: int) -> None:
        self.fd = os.memfd_create(f"dpurt:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, length)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.view = memoryview(mmap.mmap(self.fd, length, mmap.MAP_SHARED))
        except OSError:
            os.close(self.fd)
            raise
        self.address = address_of(self.view)

    @property
    def as_device_memory(self) -> DeviceMemory:
        return DeviceMemory(self.fd, self.address, len(self.view))

    def close(self) -> None:
        os.close(self.fd)


class MemoryMap:
    """Which of our addresses the device can reach."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, memory: DeviceMemory) -> None:
        at = bisect.bisect(self._starts, memory.address)
        self._starts.insert(at, memory.address)
        self._ends.insert(at, memory.address + memory.length)

    def has(self, address: int, length: int) -> bool:
        """All of it, in one piece of memory."""
        at = bisect.bisect(self._starts, address) - 1
        return at >= 0 and address + length <= self._ends[at]


class BouncePool:
    """Chunks of memory the device can reach, for buffers it cannot."""

    def __init__(self, address: int, length: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._free = list(range(address, address + length - chunk_bytes + 1, chunk_bytes))

    def take(self) -> int | None:
        """The address of a chunk."""
        return self._free.pop() if self._free else None

    def give_back(self, chunks: Sequence[int]) -> None:
        self._free += chunks


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Of one request to the device; `segment_bytes` 0 means none."""

    total_bytes: int
    segments: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one request moves: the first `length` bytes of an operation's pieces, packed for the ring; `bounced` where
    some go the long way.
    """

    length: int
    pieces: bytes = b""
    bounced: Bounced | None = None


@dataclass(slots=True)
class Bounced:
    """The chunks of the bounce area that a transfer has, and what is to be copied there or back."""

    chunks: list[int] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (in the chunk, the caller's, length)

    def copy_in(self) -> None:
        for chunk, buffer, length in self.copies:
            ctypes.memmove(chunk, buffer, length)

    def copy_out(self) -> None:
        for chunk, buffer, length in self.copies:
            ctypes.memmove(buffer, chunk, length)


class Planner:
    """Makes transfers of the pieces of operations, for one session's limits and memory.

    A buffer that was read into once is a slot of the arena and comes again, always the same way: the transfer of one
    such piece is remembered, packed, which saves a fifth of the work of a read (measured). An arena has some ten
    thousand slots; with more than `_MAX_REMEMBERED` (some 30 MB at 1 MiB each) the remembering starts anew.
    """

    def __init__(self, limits: TransferLimits, memory: MemoryMap, bounce: BouncePool) -> None:
        self._limits = limits
        self._memory = memory
        self._bounce = bounce
        self._remembered: dict[tuple[tuple[int, int], bool], Transfer] = {}

    def plan(self, pieces: _Pieces, *, is_read: bool) -> Transfer:
        """As much of the pieces as one request can move now; length 0 if it needs the bounce area and that is in use."""
        known = self._remembered.get((pieces[0], is_read)) if len(pieces) == 1 else None
        return known or self._plan(pieces, is_read)

    def _plan(self, pieces: _Pieces, is_read: bool) -> Transfer:
        segments: list[tuple[int, int]] = []
        bounced = Bounced()
        moved = 0
        for address, length in pieces:
            room = min(length, self._limits.total_bytes - moved)
            if self._memory.has(address, length):
                done = _direct(segments, address, room, self._limits)
            else:
                done = _bounced(segments, bounced, address, room, self._limits, self._bounce)
            moved += done
            if done < length:
                break
        transfer = Transfer(
            moved, pack_pieces(segments, is_writable=is_read), bounced if bounced.chunks else None
        )
        if len(pieces) == 1 and transfer.bounced is None and moved:
            self._remember(pieces[0], is_read, transfer)
        return transfer

    def _remember(self, piece: tuple[int, int], is_read: bool, transfer: Transfer) -> None:
        if len(self._remembered) == _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[piece, is_read] = transfer


def _direct(segments: list[tuple[int, int]], address: int, wanted: int, limits: TransferLimits) -> int:
    step = limits.segment_bytes or wanted
    done = min(wanted, step * (limits.segments - len(segments)))
    if done > 0:
        segments += zip(range(address, address + done, step), repeat(step), strict=False)
        if rest := done % step:
            segments[-1] = (address + done - rest, rest)
    return done


def _bounced(
    segments: list[tuple[int, int]],
    bounced: Bounced,
    address: int,
    wanted: int,
    limits: TransferLimits,
    bounce: BouncePool,
) -> int:
    done = 0
    while done < wanted:
        place, room = _bounce_place(segments, bounced, limits, bounce)
        if not room:
            break
        size = min(room, wanted - done)
        bounced.copies.append((place, address + done, size))
        start, before = segments[-1]
        segments[-1] = (start, before + size)
        done += size
    return done


def _bounce_place(
    segments: list[tuple[int, int]], bounced: Bounced, limits: TransferLimits, bounce: BouncePool
) -> tuple[int, int]:
    """Where the last segment can grow in the bounce area, and by how much; a new segment if need be."""
    if bounced.chunks and segments:
        start, used = segments[-1]
        if start == bounced.chunks[-1] and used < bounce.chunk_bytes:
            return start + used, bounce.chunk_bytes - used
    if len(segments) == limits.segments or (chunk := bounce.take()) is None:
        return 0, 0
    bounced.chunks.append(chunk)
    segments.append((chunk, 0))
    return chunk, bounce.chunk_bytes
