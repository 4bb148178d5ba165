"""The verbs fabric's control connection: who may touch what, said over TCP; the bytes go by RDMA.

Messages are msgpack, each behind its length, at most `MAX_MESSAGE_BYTES` long. The link's secret, which came over the
authenticated channel, never travels here: each side proves that it has it by a keyed hash over both sides' nonces and queue
pair addresses. Numbers are the asking side's, and never used twice on a link.

    node                                  host
    Challenge(nonce)        ->
                            <-            Join(session, nonce, queue pair, proof)
    Welcome(queue pair, proof) or Denied(code)
                            <-            Ask(number, pull or store, ranges)
    Granted(number, runs with keys) or Refused(number, which, why)
                            (the host READs, or WRITEs, the last with its number as immediate)
                            <-            Done(number, ok)        after a pull, and after whatever went wrong
    Stored(number)          ->            the bytes of a store are in the node's memory, its keys are dead
                            <-            Landing(region, runs with keys)
                            (the node WRITEs, the last with the push's number as immediate)
                            <-            Pushed(number)          the host has seen it
                            <-            Rejoin(queue pair)      the old one is broken
    Rejoined(queue pair)    ->
    Broken(number)          ->            the node's end of the queue pair whose number at the host is this is broken

Keys (rkeys) are capabilities: they are in no `repr`, and nothing here is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import socket
import struct
from typing import Annotated, TypeVar

import msgspec
import trio

from dpurt.errors import FabricError
from dpurt.fabric.wire import Wire
from dpurt.rdma.queue_pair import QueuePairAddress

__all__ = [
    "Ask", "Broken", "Challenge", "Control", "Denied", "Done", "Granted", "Join", "Landing", "Message", "Pushed", "Refusal", "Rejoin",
    "Rejoined", "Run", "Stored", "Welcome", "proof",
]  # fmt: skip

MAX_MESSAGE_BYTES = 1 << 20
MAX_UNSENT_BYTES = 4 << 20
_TURN_MESSAGES = 16
_LENGTH = struct.Struct("<I")

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
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


class Join(_Base, frozen=True):
    session: int
    nonce: bytes
    queue_pair: QueuePairAddress
    proof: bytes


class Welcome(_Base, frozen=True):
    queue_pair: QueuePairAddress
    proof: bytes


class Denied(_Base, frozen=True):
    code: str  # "denied" or "busy"
    why: str


class Ask(_Base, frozen=True):
    number: _Natural
    op: str
    entries: list[Entry]


class Granted(_Base, frozen=True):
    number: int
    runs: list[Run]


class Refusal(_Base, frozen=True):
    number: int
    index: int
    why: str


class Done(_Base, frozen=True):
    number: int
    is_ok: bool


class Stored(_Base, frozen=True):
    number: int


class Landing(_Base, frozen=True):
    region: int
    size: int
    runs: list[Run]


class Pushed(_Base, frozen=True):
    number: int


class Rejoin(_Base, frozen=True):
    queue_pair: QueuePairAddress


class Rejoined(_Base, frozen=True):
    queue_pair: QueuePairAddress


class Broken(_Base, frozen=True):
    number: int


Message = (
    Challenge
    | Join
    | Welcome
    | Denied
    | Ask
    | Granted
    | Refusal
    | Done
    | Stored
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
    token: bytes, who: str, nonces: tuple[bytes, bytes], session: int, queue_pair: QueuePairAddress
) -> bytes:
    """What only the bearer of the token can say about these."""
    said = _encoder.encode((who, nonces, session, queue_pair))
    return hmac.digest(token, said, hashlib.sha256)


class Control:
    """One end of the connection. `post` never waits; one task runs `flush`, one calls `receive`."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._wire = Wire(sock, peer)
        self._unsent = bytearray()
        self._received = 0
        self._more = trio.Event()

    @property
    def is_open(self) -> bool:
        return self._wire.is_open

    @property
    def peer(self) -> str:
        return self._wire.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._wire.peer = name

    def post(self, message: Message) -> None:
        """Send at once what the socket takes, the rest by `flush`. On a closed connection nothing happens."""
        data = _encoder.encode(message)
        if not self._wire.is_open:
            return
        self._unsent += _LENGTH.pack(len(data)) + data
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close()
        elif not self._more.is_set():
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
        if self._unsent:
            self._more.set()

    async def flush(self) -> None:
        """Send what `post` could not, until cancelled or closed."""
        while True:
            await self._more.wait()
            if not self._wire.is_open:
                return
            try:
                await trio.lowlevel.wait_writable(self._sock)
            except (trio.ClosedResourceError, OSError):
                return
            self._more = trio.Event()
            self._send()

    async def receive(self, deadline: float = math.inf) -> Message:
        """The next message. Raises FabricError: ``"closed"``, ``"timed_out"``, ``"protocol"``."""
        self._received += 1
        if self._received % _TURN_MESSAGES == 0:  # a flood of them must not starve the loop
            await trio.lowlevel.checkpoint()
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
        """Idempotent; a task that waits gets FabricError ``"closed"``."""
        self._wire.close()
        self._more.set()
