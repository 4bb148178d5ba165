"""NVMe over RDMA, what is on the wire besides the commands: connection data, data pointers, and how data is split.

Sans-I/O. Queue pairs are connected by the RDMA connection manager, with private data in each direction:

    request:  format | queue id | our receive entries | our send entries, zero-based | controller id
    accept:   format | the controller's receive entries          reject:  format | status

A command names its data by *one* keyed descriptor (Linux takes no more), so it must lie in one piece of registered
memory: `Layout.runs` tells where an operation has to be cut for that. What lies outside takes a copy, in commands
of at most `BOUNCE_BYTES`. Small data of a write may travel in the capsule instead.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dpurt.errors import RemoteProtocolError

__all__ = [
    "BOUNCE_BYTES",
    "MAX_IN_CAPSULE_BYTES",
    "RESPONSE_BYTES",
    "SQE_BYTES",
    "Chunk",
    "Layout",
    "decode_accept",
    "decode_reject",
    "encode_request",
    "in_capsule_sgl",
    "keyed_sgl",
]

SQE_BYTES, RESPONSE_BYTES = 64, 16
BOUNCE_BYTES = 64 << 10
MAX_IN_CAPSULE_BYTES = 4096  # more than that is better read by the controller's own hardware
CUT_ALIGN = 4096  # buffers are cut at multiples of this only, so at whole logical blocks

_REQUEST = struct.Struct("<HHHHH22x")
_ACCEPT = struct.Struct("<HH")
_KEYED_SGL = struct.Struct("<Q3sIB")
_CAPSULE_SGL = struct.Struct("<QI3xB")
_KEYED, _IN_CAPSULE = 0x40, 0x01  # descriptor type and sub-type
_MAX_SGL_BYTES = 1 << 24
_FORMAT = 0
_REJECTIONS = {
    1: "invalid length of the private data",
    2: "invalid format of the private data",
    3: "invalid queue id",
    4: "invalid host send queue size",
    5: "invalid host receive queue size",
    6: "no resources",
    7: "invalid IRD",
    8: "invalid ORD",
    9: "invalid controller id",
}


def encode_request(queue_id: int, size: int) -> bytes:
    """The private data to connect a queue pair of `size` entries with."""
    return _REQUEST.pack(_FORMAT, queue_id, size, size - 1, 0)


def decode_accept(data: bytes) -> int:
    """How many capsules the controller can receive at once. Raises RemoteProtocolError."""
    if len(data) < _ACCEPT.size:
        raise RemoteProtocolError("nvme_rdma_accept", f"{len(data)} bytes of private data")
    form, entries = _ACCEPT.unpack_from(data)
    if form != _FORMAT or entries < 2:
        raise RemoteProtocolError("nvme_rdma_accept", f"format {form}, {entries} receive entries")
    return int(entries)


def decode_reject(data: bytes) -> str:
    """Why the controller refused to connect, in words."""
    if len(data) < _ACCEPT.size:
        return "no reason given"
    _, status = _ACCEPT.unpack_from(data)
    return _REJECTIONS.get(status, f"status {status}")


def keyed_sgl(address: int = 0, length: int = 0, key: int = 0) -> bytes:
    """The data pointer to a piece of our memory the controller may access by this key; without arguments, none."""
    assert length < _MAX_SGL_BYTES, "commands are split well below that"
    return _KEYED_SGL.pack(address, length.to_bytes(3, "little"), key, _KEYED)


def in_capsule_sgl(length: int) -> bytes:
    """The data pointer to what follows the entry in the capsule."""
    return _CAPSULE_SGL.pack(0, length, _IN_CAPSULE)


class Chunk(NamedTuple):
    """Memory that is registered as one."""

    start: int
    end: int


class Layout:
    """Which addresses are registered, in which chunks."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def add(self, address: int, length: int, chunk_bytes: int) -> list[Chunk]:
        """Returns the new chunks."""
        end = address + length
        new = [Chunk(at, min(at + chunk_bytes, end)) for at in range(address, end, chunk_bytes)]
        self.chunks = sorted([*self.chunks, *new])
        return new

    def find(self, address: int, length: int) -> Chunk | None:
        """The chunk that holds all of it."""
        i = bisect_right(self.chunks, address, key=_start) - 1
        if i >= 0 and address + length <= self.chunks[i].end:
            return self.chunks[i]
        return None

    def runs(self, pieces: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        """Cut (address, length) pieces, taken as one stretch of data, where no command may reach across: (length of
        the run, most bytes of a command in it), in order.
        """
        runs: list[tuple[int, int]] = []
        last: Chunk | None = None
        last_end = 0
        for address, length in self._cut(pieces):
            chunk = self.find(address, length)
            is_next = runs and chunk is last and (chunk is None or address == last_end)
            if is_next:
                runs[-1] = (runs[-1][0] + length, runs[-1][1])
            else:
                runs.append((length, min(BOUNCE_BYTES, most) if chunk is None else most))
            last, last_end = chunk, address + length
        return runs

    def _cut(self, pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Where a piece begins in one chunk and goes on behind it, at the boundary if that is a whole block."""
        for address, length in pieces:
            while length:
                inside = self._reach(address, length)
                yield address, inside
                address += inside
                length -= inside

    def _reach(self, address: int, length: int) -> int:
        chunk = self.find(address, 1)
        if chunk is None or address + length <= chunk.end:
            return length
        inside = chunk.end - address
        return length if inside % CUT_ALIGN else inside


def one_piece(pieces: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(address, length) of pieces that follow each other in memory."""
    address, length = pieces[0]
    for start, size in pieces[1:]:
        if start != address + length:
            return None
        length += size
    return address, length


def _start(chunk: Chunk) -> int:
    return chunk.start
