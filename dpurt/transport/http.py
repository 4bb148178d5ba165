"""HTTP/1.1 between programs: a GET to an engine, and the connections of a loopback server of small pages. `h11` has the protocol.

Everything is bounded: heads and bodies in bytes, a server's connections in number (one too many ends the one whose last request
is longest ago), a client's requests in time; a `get` in time by the caller's cancel scope. Whatever a client sends ends its own
connection at worst. What is here is read without a turn of Trio's loop: on a busy node a turn takes a millisecond, and a question
would wait for three of them where one is enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from dpurt.errors import ConfigError, NodeUnavailable, RemoteProtocolError

__all__ = ["HttpAnswer", "HttpRequest", "get", "listen", "port_of", "serve"]

MAX_HEAD_BYTES = 16_384
MAX_CONNECTIONS = 64  # of one server
REQUEST_S = 30.0  # for a request, and for the next one to come
_STATUS_OF = {"too_large": 413, "head_too_large": 431}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What was asked."""

    method: str
    path: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A page, or why there is none."""

    status: int
    body: bytes
    content_type: str = "application/json"


async def get(url: str, max_bytes: int = 4 << 20) -> bytes:
    """The body of a plain ``http://`` resource. Raises NodeUnavailable when it cannot be had, RemoteProtocolError if malformed."""
    where = urlsplit(url)
    try:
        async with await trio.open_tcp_stream(where.hostname or "", where.port or 80) as stream:
            peer = _Peer(stream, h11.Connection(h11.CLIENT, MAX_HEAD_BYTES), max_bytes)
            fields = [("Host", where.netloc), ("Connection", "close")]
            target = (where.path or "/") + (f"?{where.query}" if where.query else "")
            await peer.send(h11.Request(method="GET", target=target, headers=fields), h11.EndOfMessage())
            head, body = await peer.message()
    except (OSError, trio.BrokenResourceError, h11.LocalProtocolError, ValueError) as error:
        # the last two: it is no URL that can be asked for
        raise NodeUnavailable(url, str(error)) from error
    if not isinstance(head, h11.Response) or head.status_code != 200:
        said = f"{head.status_code}" if isinstance(head, h11.Response) else "nothing"
        raise NodeUnavailable(url, f"answered {said}")
    return body


async def listen(bind: str) -> list[trio.SocketListener]:
    """Listeners on ``host:port``. Raises ConfigError."""
    host, _, port = bind.rpartition(":")
    try:
        return await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
    except OSError as error:
        raise ConfigError(bind, f"cannot bind: {error.strerror}") from error


def port_of(listeners: list[trio.SocketListener]) -> int:
    """Which port it became."""
    port: int = listeners[0].socket.getsockname()[1]
    return port


async def serve(
    listeners: list[trio.SocketListener], answer: Callable[[HttpRequest], HttpAnswer], max_bytes: int
) -> None:
    """Answer requests, with bodies of at most `max_bytes`, until cancelled."""

    open_: dict[trio.SocketStream, trio.CancelScope] = {}  # by last request, the longest ago first

    def served(stream: trio.SocketStream) -> None:
        if scope := open_.pop(stream, None):
            open_[stream] = scope

    async def converse(stream: trio.SocketStream) -> None:
        if len(open_) >= MAX_CONNECTIONS:
            open_.pop(next(iter(open_))).cancel()
        async with stream:
            with trio.CancelScope() as scope:
                open_[stream] = scope
                await _converse(stream, answer, max_bytes, partial(served, stream))
            open_.pop(stream, None)

    await trio.serve_listeners(converse, listeners)


async def _converse(
    stream: trio.SocketStream,
    answer: Callable[[HttpRequest], HttpAnswer],
    max_bytes: int,
    served: Callable[[], None],
) -> None:
    peer = _Peer(stream, h11.Connection(h11.SERVER, MAX_HEAD_BYTES), max_bytes)
    with suppress(trio.BrokenResourceError):
        while await peer.serve_one(answer):
            served()


class _Peer:
    """One connection, at either end."""

    def __init__(self, stream: trio.SocketStream, connection: h11.Connection, max_bytes: int) -> None:
        self._stream = stream
        self._connection = connection
        self._max_bytes = max_bytes
        self._is_asked_for_head = False

    async def serve_one(self, answer: Callable[[HttpRequest], HttpAnswer]) -> bool:
        """One request and its answer; whether there may be another."""
        with trio.move_on_after(REQUEST_S):
            try:
                head, body = await self.message()
                if not isinstance(head, h11.Request):
                    return False
                request = HttpRequest(head.method.decode("ascii"), _path_of(head), body)
            except RemoteProtocolError as error:
                await self._refuse(error)
                return False
            await self._answer(answer(request))
            if self._connection.our_state is h11.DONE and self._connection.their_state is h11.DONE:
                self._connection.start_next_cycle()
                return True
        return False

    async def message(self) -> tuple[h11.Event, bytes]:
        """A head and the whole body. ConnectionClosed for a head: the peer has gone. Raises RemoteProtocolError."""
        self._is_asked_for_head = False
        head = await self._event()
        body = bytearray()
        if not isinstance(head, (h11.Request, h11.Response)):
            return head, b""
        self._is_asked_for_head = isinstance(head, h11.Request) and head.method == b"HEAD"
        self._check_size(next((int(size) for name, size in head.headers if name == b"content-length"), 0))
        while isinstance(event := await self._event(), h11.Data):
            if body:
                await trio.lowlevel.checkpoint()  # thousands of small chunks may have come at once
            body += event.data
            self._check_size(len(body))
        return head, bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise RemoteProtocolError("too_large", f"a body of more than {self._max_bytes} bytes")

    async def send(self, *events: h11.Event) -> None:
        await self._stream.send_all(b"".join(self._connection.send(event) or b"" for event in events))

    async def _event(self) -> h11.Event:
        while True:
            try:
                event = self._connection.next_event()
            except h11.RemoteProtocolError as error:
                code = "head_too_large" if error.error_status_hint == 431 else "malformed"
                raise RemoteProtocolError(code, str(error)) from error
            if isinstance(event, h11.Event) and not isinstance(event, h11.InformationalResponse):
                return event
            if self._connection.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self._connection.receive_data(await self._receive())

    async def _receive(self) -> bytes:
        """What is here, or comes next; nothing at the end."""
        socket = self._stream.socket
        while True:
            try:
                return os.read(socket.fileno(), 65_536)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(socket)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def _answer(self, answer: HttpAnswer, *more: tuple[str, str]) -> None:
        fields = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))), *more]
        reason = HTTPStatus(answer.status).phrase
        head = h11.Response(status_code=answer.status, headers=fields, reason=reason.encode("ascii"))
        body = b"" if self._is_asked_for_head else answer.body
        await self.send(head, h11.Data(data=body), h11.EndOfMessage())

    async def _refuse(self, error: RemoteProtocolError) -> None:
        if self._connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode({"error": error.message, "code": error.code})
            await self._answer(HttpAnswer(_STATUS_OF.get(error.code, 400), body), ("Connection", "close"))


def _path_of(head: h11.Request) -> str:
    """Which page is meant. Raises RemoteProtocolError where none can be."""
    target = head.target.decode("ascii")
    try:
        where = urlsplit(target)
    except ValueError as error:
        raise RemoteProtocolError("malformed", f"{target!r}: {error}") from error
    if head.method == b"CONNECT":
        raise RemoteProtocolError("malformed", "this is no proxy")
    return where.path
