"""HTTP/1.1 between programs: a GET to an engine, and the connections of a loopback server of small pages. `httptools` (llhttp) reads
it: a router's question costs a third of what it did with a parser in Python.

Everything is bounded: heads, bodies and all that frames them in bytes, a server's connections in number (one too many ends the one
whose last request is longest ago), a client's requests in time; a `get` in time by the caller's cancel scope. Whatever a client
sends ends its own connection at worst. What is here is read without a turn of Trio's loop: on a busy node a turn takes a
millisecond, and a question would wait for three of them where one is enough.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

import httptools
import msgspec
import trio

from dpurt.errors import NodeUnavailable, RemoteProtocolError

__all__ = ["HttpAnswer", "HttpRequest", "get", "listen", "port_of", "serve"]

MAX_HEAD_BYTES = 16_384  # and at most so much besides, in the read it began in and the one it ends in
MAX_CONNECTIONS = 64  # of one server
REQUEST_S = 30.0  # for a request, and for the next one to come
_READ_BYTES = 65_536  # of a body
_FRAMING = 8  # so much more than the largest body may come for one, in chunks
_STATUS_OF = {"too_large": 413, "head_too_large": 431}
_SENDABLE = re.compile("[!-~]+")


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
    try:
        where = urlsplit(url)
        target = (where.path or "/") + (f"?{where.query}" if where.query else "")
        if not _SENDABLE.fullmatch(target + where.netloc):
            raise NodeUnavailable(url, "not an address that can be asked for")
        async with await trio.open_tcp_stream(where.hostname or "", where.port or 80) as stream:
            await stream.send_all(
                f"GET {target} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            answer = await _Peer(stream, _Reader(httptools.HttpResponseParser, max_bytes)).message()
    except (OSError, trio.BrokenResourceError, ValueError) as error:  # the last: no such port
        raise NodeUnavailable(url, str(error)) from error
    if answer is None or answer.status != 200:
        raise NodeUnavailable(url, f"answered {answer.status if answer else 'nothing'}")
    return bytes(answer.body)


async def listen(bind: str) -> list[trio.SocketListener]:
    """Listeners on ``host:port``."""
    host, _, port = bind.rpartition(":")
    return await trio.open_tcp_listeners(int(port), host=host.strip("[]"))


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
    peer = _Peer(stream, _Reader(httptools.HttpRequestParser, max_bytes))
    with suppress(trio.BrokenResourceError):
        while await peer.serve_one(answer):
            served()


@dataclass(slots=True)
class _Message:
    """A request, or an answer, as far as it was read."""

    method: bytes = b""  # of a request
    target: bytes = b""
    status: int = 0  # of an answer
    body: bytearray = field(default_factory=bytearray)
    num_hosts: int = 0
    length: int | None = None  # of its body, where it is said before
    is_chunked: bool = False
    has_head: bool = False
    waits: bool = False  # for leave to send its body
    stays: bool = False  # its connection, for another


class _Reader:
    """What llhttp finds in a connection's bytes: whole messages in order, and what was wrong after them. Nothing raises."""

    def __init__(
        self, make: type[httptools.HttpRequestParser | httptools.HttpResponseParser], max_bytes: int
    ) -> None:
        self.whole: deque[_Message] = deque()
        self.fault: RemoteProtocolError | None = None
        self.message = _Message()  # under way
        self._max_bytes = max_bytes
        self._read = 0  # since the last whole message
        self._parser = make(self)

    @property
    def wants(self) -> int:
        """How many bytes to read, at most."""
        return _READ_BYTES if self.message.has_head else MAX_HEAD_BYTES

    def feed(self, data: bytes) -> None:
        """What came next; nothing, at the end."""
        if not data:
            self._end()
            return
        self._read += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # we speak nothing else: answered as if it were not asked for
            if self.whole:
                self.whole[-1].stays = False
            self._refuse("malformed", "nothing but HTTP/1.1 is spoken here")
        except httptools.HttpParserError as error:
            self._refuse("malformed", str(error))
        if not self.message.has_head and self._read > MAX_HEAD_BYTES:
            self._refuse("head_too_large", f"a head of more than {MAX_HEAD_BYTES} bytes")
        elif self._read > MAX_HEAD_BYTES + _FRAMING * self._max_bytes:
            self._refuse("too_large", f"more than {_FRAMING} bytes for each of a body")

    def _end(self) -> None:
        message = self.message
        if message.status and message.length is None and not message.is_chunked:
            self.whole.append(message)  # the end of the connection is that of the body
        elif self._read:
            self._refuse("malformed", "the connection ended amid a message")

    def _refuse(self, code: str, why: str) -> None:
        self.fault = self.fault or RemoteProtocolError(code, why)

    # --- llhttp's callbacks ---

    def on_url(self, piece: bytes) -> None:
        self.message.target += piece

    def on_header(self, name: bytes, value: bytes | None) -> None:
        message = self.message
        name = name.lower()
        if message.has_head:
            return  # it trails
        if name == b"host":
            message.num_hosts += 1
        elif name == b"content-length":
            message.length = int(value or b"0")
        elif name == b"transfer-encoding":
            message.is_chunked = True
        elif name == b"expect":
            message.waits = (value or b"").lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        message, parser = self.message, self._parser
        message.has_head = True
        if isinstance(parser, httptools.HttpResponseParser):
            message.status = parser.get_status_code()
        else:
            message.method = parser.get_method()
            if message.num_hosts != 1 and parser.get_http_version() == "1.1":
                self._refuse("malformed", "one Host must be named")
            if message.method == b"CONNECT":
                self._refuse("malformed", "this is no proxy")
        self._check_size(message.length or 0)

    def on_body(self, piece: bytes) -> None:
        if self.fault is None:
            self.message.body += piece
            self._check_size(len(self.message.body))

    def on_message_complete(self) -> None:
        message = self.message
        if self.fault is None and not 100 <= message.status < 200:
            message.stays = self._parser.should_keep_alive()
            self.whole.append(message)
        if self.fault is None:
            self.message, self._read = _Message(), 0

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            self._refuse("too_large", f"a body of more than {self._max_bytes} bytes")


class _Peer:
    """One connection, at either end."""

    def __init__(self, stream: trio.SocketStream, reader: _Reader) -> None:
        self._stream = stream
        self._reader = reader

    async def serve_one(self, answer: Callable[[HttpRequest], HttpAnswer]) -> bool:
        """One request and its answer; whether there may be another."""
        with trio.move_on_after(REQUEST_S):
            try:
                message = await self.message()
                if message is None:
                    return False
                request = HttpRequest(
                    message.method.decode("ascii"), _path_of(message.target), bytes(message.body)
                )
            except RemoteProtocolError as error:
                body = msgspec.json.encode({"error": error.message, "code": error.code})
                await self._send(HttpAnswer(_STATUS_OF.get(error.code, 400), body), self._reader.message)
                return False
            await self._send(answer(request), message)
            return message.stays
        return False

    async def message(self) -> _Message | None:
        """The next one, whole; None when the peer has gone. Raises RemoteProtocolError."""
        reader, is_told, num_reads = self._reader, False, 0
        while not reader.whole:
            if reader.fault is not None:
                raise reader.fault
            if reader.message.waits and reader.message.has_head and not is_told:
                is_told = True
                await self._stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
            if num_reads > 1:
                await trio.lowlevel.checkpoint()  # a client that always has more
            data = await self._receive(reader.wants)
            reader.feed(data)
            num_reads += 1
            if not data and not reader.whole and reader.fault is None:
                return None
        return reader.whole.popleft()

    async def _receive(self, max_bytes: int) -> bytes:
        """What is here, or comes next; nothing at the end."""
        socket = self._stream.socket
        while True:
            try:
                return os.read(socket.fileno(), max_bytes)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(socket)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def _send(self, answer: HttpAnswer, to: _Message) -> None:
        close = "" if to.stays else "Connection: close\r\n"
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n{close}\r\n"
        ).encode("ascii")
        await self._stream.send_all(head if to.method == b"HEAD" else head + answer.body)


def _path_of(target: bytes) -> str:
    """Which page is meant. Raises RemoteProtocolError where none can be."""
    try:
        return urlsplit(target.decode("ascii")).path
    except ValueError as error:
        raise RemoteProtocolError("malformed", f"{target!r}: {error}") from error
