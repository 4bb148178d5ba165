"""The verbs fabric's control connection: who may touch what, said over TCP; the bytes go by RDMA.

Messages are msgpack, each behind its length, at most `MAX_MESSAGE_BYTES` long. The link's secret, which came over the
authenticated channel, never travels here: each side proves that it has it by a keyed hash over both sides' nonces and queue
pair addresses. Numbers are the asking side's, and never used twice on a link.

    node                                  host
    Challenge(nonce)        ->
                            <-            Join(session, nonce, lanes: (rail, queue pair) each, proof)
    Welcome(queue pairs, proof) or Denied(code)
                            <-            Ready(lane)             each lane on which a byte-less WRITE came through
                            <-            Ask(number, pull, ranges, lanes)
    Granted(number, lane: runs with keys) or Refused(number, which, why)
                            (the host READs)
                            <-            Done(number, ok, lane: bytes)
                            <-            Ask(number, store, ranges, lanes, lane: runs of the host's memory, with keys)
                            (the node READs)
    Ended(number, ok) or Refused  ->      the node's devices touch the host's memory no more
                            <-            Done(number, not ok)    the host does not wait for its store any more
                            <-            Landing(region, rail: runs with keys)
                            (the node WRITEs, the last of each lane with the push's number as immediate)
                            <-            Pushed(number, lane)    the host has seen it
                            <-            Rejoin(lane, queue pair)   the old one is broken
    Rejoined(number, queue pair) ->       number: of the host's queue pair
    Broken(number)          ->            the node's end of the queue pair whose number at the host is this is broken

A *lane* is one queue pair of the link, by its place in Join; its *rail* is named by the node's address on it.
Keys (rkeys) are capabilities: they are in no `repr`, and nothing here is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import socket
import struct
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import trio

from dpurt.errors import FabricError
from dpurt.fabric.wire import Wire
from dpurt.rdma.queue_pair import QueuePairAddress

__all__ = [
    "LONG_BYTES", "Ask", "Broken", "Challenge", "Control", "Denied", "Done", "Ended", "Granted", "Join", "Landing", "LaneOffer",
    "Message", "Pushed", "Ready", "Refusal", "Rejoin", "Rejoined", "Run", "Welcome", "enter", "proof",
]  # fmt: skip

MAX_MESSAGE_BYTES = 1 << 20
MAX_UNSENT_BYTES = 4 << 20
LONG_BYTES = 256 << 10  # a software device may move so many inside the call that posts: see `Control.hurry`
SILENCE_S = 10  # without a sign of the peer's kernel
_LENGTH = struct.Struct("<I")

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
MAX_LANES = 16
_Lane = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LANES)]
_Rail = Annotated[str, msgspec.Meta(max_length=64)]
Entry = tuple[_Natural, _Natural, _Natural, _Natural]  # region id, offset, length, lease


class _Base(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Bytes the peer may touch: `length` at `address`, with `key`."""

    address: _Natural
    length: _Natural
    key: _Key

    def __repr__(self) -> str:
        return f"Run({self.length} bytes)"


class Challenge(_Base, frozen=True):
    nonce: bytes


class LaneOffer(msgspec.Struct, frozen=True, array_like=True):
    """A queue pair of the host's, for the node's rail with this address."""

    rail: _Rail
    queue_pair: QueuePairAddress


class Join(_Base, frozen=True):
    session: int
    nonce: bytes
    lanes: Annotated[list[LaneOffer], msgspec.Meta(min_length=1, max_length=MAX_LANES)]
    proof: bytes


class Welcome(_Base, frozen=True):
    queue_pairs: list[QueuePairAddress]
    proof: bytes


class Ready(_Base, frozen=True):
    lane: _Lane


class Denied(_Base, frozen=True):
    code: str  # "denied" or "busy"
    why: str


class Ask(_Base, frozen=True):
    number: _Natural
    op: str
    entries: list[Entry]
    lanes: Annotated[list[_Lane], msgspec.Meta(min_length=1, max_length=MAX_LANES)]
    runs: dict[_Lane, list[Run]] = {}


class Granted(_Base, frozen=True):
    number: int
    runs: dict[int, list[Run]]


class Refusal(_Base, frozen=True):
    number: int
    index: int
    why: str


class Done(_Base, frozen=True):
    number: int
    is_ok: bool
    carried: dict[_Lane, _Natural] = {}


class Ended(_Base, frozen=True):
    number: int
    is_ok: bool
    why: str = ""


class Landing(_Base, frozen=True):
    region: int
    size: int
    runs: dict[_Rail, list[Run]]


class Pushed(_Base, frozen=True):
    number: int
    lane: _Lane


class Rejoin(_Base, frozen=True):
    lane: _Lane
    queue_pair: QueuePairAddress


class Rejoined(_Base, frozen=True):
    number: int
    queue_pair: QueuePairAddress


class Broken(_Base, frozen=True):
    number: int


Message = (
    Challenge
    | Join
    | Welcome
    | Ready
    | Denied
    | Ask
    | Granted
    | Refusal
    | Done
    | Ended
    | Landing
    | Pushed
    | Rejoin
    | Rejoined
    | Broken
)
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def proof(
    token: bytes,
    who: str,
    nonces: tuple[bytes, bytes],
    session: int,
    lanes: Sequence[LaneOffer | QueuePairAddress],
) -> bytes:
    """What only the bearer of the token can say about these."""
    said = _encoder.encode((who, nonces, session, list(lanes)))
    return hmac.digest(token, said, hashlib.sha256)


def _tune(sock: socket.socket) -> None:
    """No waiting for more to send; and a way that answers no more, busy or idle, is the end of the connection."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, SILENCE_S // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, SILENCE_S - SILENCE_S // 2),
        (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def enter(semaphore: trio.Semaphore) -> None:
    """Acquire it, without a scheduler pass where there is room."""
    try:
        semaphore.acquire_nowait()
    except trio.WouldBlock:
        await semaphore.acquire()


class Control:
    """One end of the connection. `post` never waits; one task runs `flush`, one calls `receive`.

    Sending costs more than what is sent (a system call, and the peer's waking): what nobody waits for, or what is likely to be
    followed by more in the same scheduler pass, is better posted `soon`, and goes out with the others a pass later.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        if sock.family == socket.AF_INET:
            _tune(sock)
        self._wire = Wire(sock, peer)
        self._unsent = bytearray()
        self._soon = bytearray()
        self._more = trio.Event()
        self._is_full = False

    @property
    def is_open(self) -> bool:
        return self._wire.is_open

    @property
    def is_gathering(self) -> bool:
        """Something is about to be sent anyway."""
        return bool(self._soon)

    @property
    def peer(self) -> str:
        return self._wire.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._wire.peer = name

    def post(self, message: Message, *, soon: bool = False) -> None:
        """Send at once what the socket takes, the rest by `flush`; `soon`: all of it, and maybe behind what is posted later.
        On a closed connection nothing happens.
        """
        if not self._wire.is_open:
            return
        data = _encoder.encode(message)
        into = self._soon if soon else self._unsent
        into += _LENGTH.pack(len(data)) + data
        if len(into) > MAX_UNSENT_BYTES:
            self.close()
        elif soon:
            self._more.set()
        elif not self._is_full:
            self._send()

    def hurry(self) -> None:
        """Send what is to be sent soon now, if the socket takes it: this task is about to keep the loop for a while."""
        if self._soon and self._wire.is_open and not self._is_full:
            self._gather()
            self._send()

    def _send(self) -> None:
        try:
            count = self._sock.send(self._unsent)
        except BlockingIOError:
            count = 0
        except OSError:
            self.close()
            return
        del self._unsent[:count]
        self._is_full = bool(self._unsent)
        if self._is_full:
            self._more.set()

    async def flush(self) -> None:
        """Send what `post` did not, until cancelled or closed."""
        while True:
            await self._more.wait()
            if self._wire.is_open and self._is_full:
                with contextlib.suppress(trio.ClosedResourceError, OSError):
                    await trio.lowlevel.wait_writable(self._sock)
            if not self._wire.is_open:
                return
            self._more = trio.Event()
            self._gather()
            self._send()

    def _gather(self) -> None:
        self._unsent += self._soon
        self._soon.clear()

    async def receive(self, deadline: float = math.inf) -> Message:
        """The next message. Raises FabricError: ``"closed"``, ``"timed_out"``, ``"protocol"``."""
        if (
            deadline == math.inf and await self._wire.at_end()
        ):  # which takes in all there is of a message, and its turns
            raise FabricError(self.peer, "receive", "closed", 0, "end of stream")
        [length] = _LENGTH.unpack(await self._wire.receive_bytes(_LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise FabricError(self.peer, "control", "protocol", 0, f"a message of {length} bytes")
        data = await self._wire.receive_bytes(length, deadline)
        try:
            return _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise FabricError(self.peer, "control", "protocol", 0, str(error)) from error

    async def expect(self, kind: type[M], deadline: float) -> M:
        """The next message, which must be of that kind."""
        message = await self.receive(deadline)
        if not isinstance(message, kind):
            raise FabricError(
                self.peer, "control", "protocol", 0, f"{type(message).__name__} where {kind.__name__} was due"
            )
        return message

    def close(self) -> None:
        """Idempotent; a task that waits gets FabricError ``"closed"``. What was to be sent soon is, if the socket takes it."""
        self.hurry()
        self._wire.close()
        self._more.set()
