"""The vhost-user protocol, front end's side: messages to bytes and back. No socket, no descriptors.

Theory of operation. `FrontEndChannel.request` gives the bytes of one request and remembers what answer it must get:
its own reply, an acknowledgement (where REPLY_ACK was negotiated) or none; one at a time. `receive` takes bytes as
they come, in any cut, and checks that they are exactly that answer. `BackEndChannel` reads the other connection, on
which the back end asks *us*. Whatever a peer may not send raises `RemoteProtocolError`, and the connection is of no
more use.

    header: request u32 | flags u32 (version 1 in bits 0-1, reply bit 2, need_reply bit 3) | payload size u32

Features that we leave out, offered or not:
- INFLIGHT_SHMFD (SPDK offers it, qemu-storage-daemon 7.2 does not). With it a back end that took a dead one's place
  finds, in memory that outlives it, what that one had begun, and does it again. It is meant for guests: a virtio driver
  cannot know that its device was replaced, so only the device can repeat. We are the driver and do know. What a back
  end could repeat, we could ask again; it has nothing to offer but the keeping of our rings alive meanwhile, with the
  slots in them, for as long as no back end comes back (SPDK: a second or two until the process is there, and then it
  has no bdevs until somebody makes them). And we do not want it: a read that ends when the back end dies is a miss
  now, which is worth more than a block after the restart, and a write is stored again when it is wanted again. A bdev
  made anew may have other content too, which a repeated read would return with a good status.
- STATUS, LOG, IOTLB, migration: there is no guest.

Leaves to others: sockets and descriptors, what is negotiated, rings (`virtqueue`), what blocks are (`virtio_blk`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from dpurt.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "MAX_TABLE_REGIONS", "BackEndChannel", "BackEndRequest", "FrontEndChannel", "MemoryRegion", "ProtocolFeature",
    "Request", "pack_config", "pack_region", "pack_table", "pack_u64", "pack_vring_address", "pack_vring_state",
    "parse_config", "parse_u64", "parse_vring_state",
]  # fmt: skip

MAX_TABLE_REGIONS = 8
"""What every back end takes in one SET_MEM_TABLE."""

_HEADER = struct.Struct("<III")
_U64 = struct.Struct("<Q")
_VRING_STATE = struct.Struct("<II")
_VRING_ADDRESS = struct.Struct("<IIQQQQ")
_TABLE = struct.Struct("<II")
_REGION = struct.Struct("<QQQQ")
_CONFIG = struct.Struct("<III")
_VERSION, _VERSION_MASK, _REPLY, _NEED_REPLY = 1, 3, 4, 8
_MAX_PAYLOAD = 4096


class Request(IntEnum):
    """What a front end may ask."""

    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18
    SET_BACKEND_REQ_FD = 21
    GET_CONFIG = 24
    GET_MAX_MEM_SLOTS = 36
    ADD_MEM_REG = 37


_HAS_REPLY = {
    Request.GET_FEATURES, Request.GET_VRING_BASE, Request.GET_PROTOCOL_FEATURES, Request.GET_QUEUE_NUM,
    Request.GET_CONFIG, Request.GET_MAX_MEM_SLOTS,
}  # fmt: skip


class BackEndRequest(IntEnum):
    """What a back end may ask of us."""

    CONFIG_CHANGE = 2


_BACK_END_REQUESTS = {int(kind) for kind in BackEndRequest}


class ProtocolFeature(IntFlag):
    """Extensions that we know how to use."""

    MQ = 1 << 0
    REPLY_ACK = 1 << 3
    BACKEND_REQ = 1 << 5
    CONFIG = 1 << 9
    CONFIGURE_MEM_SLOTS = 1 << 15


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory given to the back end. One address is all three the protocol has: the guest's, ours, and (with offset
    0) the start of the file. A chain names memory by our own addresses.
    """

    address: int
    length: int


def pack_u64(value: int) -> bytes:
    return _U64.pack(value)


def pack_vring_state(index: int, value: int) -> bytes:
    return _VRING_STATE.pack(index, value)


def pack_vring_address(index: int, descriptors: int, avail: int, used: int) -> bytes:
    return _VRING_ADDRESS.pack(index, 0, descriptors, used, avail, 0)


def pack_table(regions: Sequence[MemoryRegion]) -> bytes:
    """SET_MEM_TABLE; its descriptors travel beside it, in this order."""
    if not 1 <= len(regions) <= MAX_TABLE_REGIONS:
        raise LocalProtocolError("mem_table", f"{len(regions)} regions, 1 to {MAX_TABLE_REGIONS} are allowed")
    return _TABLE.pack(len(regions), 0) + b"".join(map(_pack_region, regions))


def pack_region(region: MemoryRegion) -> bytes:
    """ADD_MEM_REG."""
    return _U64.pack(0) + _pack_region(region)


def _pack_region(region: MemoryRegion) -> bytes:
    return _REGION.pack(region.address, region.length, region.address, 0)


def pack_config(length: int) -> bytes:
    """GET_CONFIG of the first `length` bytes."""
    return _CONFIG.pack(0, length, 0) + bytes(length)


def parse_u64(payload: bytes) -> int:
    value: int = _exactly(_U64, payload)[0]
    return value


def parse_vring_state(payload: bytes, index: int) -> int:
    """The value, of the ring that was asked about."""
    got, value = _exactly(_VRING_STATE, payload)
    if got != index:
        raise RemoteProtocolError(
            "vring_index", f"the answer is about ring {got}, the question was about {index}"
        )
    return int(value)


def parse_config(payload: bytes, length: int) -> bytes:
    if len(payload) < _CONFIG.size:
        raise RemoteProtocolError("size", f"{len(payload)} bytes of configuration")
    offset, size, _ = _CONFIG.unpack_from(payload)
    body = payload[_CONFIG.size :]
    if size == 0:
        raise RemoteProtocolError("config_refused", "the back end did not give its configuration")
    if offset or size != length or len(body) != length:
        raise RemoteProtocolError(
            "config", f"{len(body)} bytes at {offset} ({size} announced), asked {length} at 0"
        )
    return body


def _exactly(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise RemoteProtocolError("size", f"payload of {len(payload)} bytes, expected {layout.size}")
    return layout.unpack(payload)


@dataclass(frozen=True, slots=True)
class _Message:
    request: int
    flags: int
    payload: bytes


class _Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> list[_Message]:
        self._buffer += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> _Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        request, flags, size = _HEADER.unpack_from(self._buffer)
        if flags & _VERSION_MASK != _VERSION:
            raise RemoteProtocolError("version", f"message {request} has flags {flags:#x}")
        if size > _MAX_PAYLOAD:
            raise RemoteProtocolError("size", f"message {request} announces {size} bytes")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return _Message(request, flags, payload)


class FrontEndChannel:
    """The connection on which we ask. `acknowledges` is set once REPLY_ACK is negotiated."""

    def __init__(self) -> None:
        self.acknowledges = False
        self._reader = _Reader()
        self._asked: Request | None = None
        self._reply: bytes | None = None

    @property
    def is_waiting(self) -> bool:
        """A request has no answer yet."""
        return self._asked is not None

    def request(self, kind: Request, payload: bytes = b"") -> bytes:
        """The bytes to send. The answer to the one before must have come."""
        if self._asked is not None:
            raise LocalProtocolError("busy", f"{self._asked.name} has no answer yet")
        flags = _VERSION
        if kind in _HAS_REPLY:
            self._asked = kind
        elif self.acknowledges:
            self._asked = kind
            flags |= _NEED_REPLY
        return _HEADER.pack(kind, flags, len(payload)) + payload

    def receive(self, data: bytes) -> None:
        """Take what the back end sent. Raises RemoteProtocolError."""
        for message in self._reader.receive(data):
            asked = self._asked
            if asked is None:
                raise RemoteProtocolError("unasked", f"message {message.request} answers nothing")
            if message.request != asked or not message.flags & _REPLY:
                raise RemoteProtocolError(
                    "reply",
                    f"message {message.request}, flags {message.flags:#x}, is no answer to {asked.name}",
                )
            self._asked = None
            self._take(asked, message.payload)

    def take_reply(self) -> bytes:
        """The payload of the last answer, which has come; nothing for an acknowledgement."""
        assert self._reply is not None, "asked for after is_waiting became false"
        reply, self._reply = self._reply, None
        return reply

    def _take(self, asked: Request, payload: bytes) -> None:
        if asked in _HAS_REPLY:
            self._reply = payload
        elif code := parse_u64(payload):
            raise RemoteProtocolError("refused", f"the back end refused {asked.name}: code {code}")
        else:
            self._reply = b""


class BackEndChannel:
    """The connection on which the back end asks us."""

    def __init__(self) -> None:
        self._reader = _Reader()

    def receive(self, data: bytes) -> tuple[list[BackEndRequest], bytes]:
        """What it asks, and what to send back. Unknown requests are refused where an answer is wanted."""
        known, answers = [], b""
        for message in self._reader.receive(data):
            if message.flags & _REPLY:
                raise RemoteProtocolError("reply", f"message {message.request} answers nothing")
            is_known = message.request in _BACK_END_REQUESTS
            if is_known:
                known.append(BackEndRequest(message.request))
            if message.flags & _NEED_REPLY:
                answers += _HEADER.pack(message.request, _VERSION | _REPLY, _U64.size) + _U64.pack(
                    not is_known
                )
        return known, answers
