"""Just enough HTTP/1.1 for small JSON bodies between programs: a GET to an engine, and a loopback server's connections.

Bodies with a length only, one request at a time, everything bounded in bytes; time is bounded by the caller's cancel scope.
What does not fit raises RemoteProtocolError.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

from dpurt.errors import NodeUnavailable, RemoteProtocolError

MAX_HEAD_BYTES = 16_384
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What was asked."""

    method: str
    path: str
    body: bytes
    wants_more: bool = False  # the connection is to stay open


async def get(url: str, max_bytes: int = 4 << 20) -> bytes:
    """The body of a plain ``http://`` resource. Raises NodeUnavailable when it cannot be had, RemoteProtocolError if malformed."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    head = f"GET {where.path or '/'} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(head.encode("ascii"))
            first, fields, rest = await _read_head(stream, b"")
            status = first.split(" ")[1] if first.startswith("HTTP/1.") else ""
            if status != "200":
                raise NodeUnavailable(url, f"answered {first!r}")
            return (await _read_body(stream, fields, rest, max_bytes, until_close=True))[0]
    except (OSError, trio.BrokenResourceError) as error:
        raise NodeUnavailable(url, str(error)) from error


class HttpConnection:
    """The server's end of one connection: requests in, answers out, in turn."""

    def __init__(self, stream: trio.abc.Stream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._left = b""  # came after the last request

    async def receive(self) -> HttpRequest | None:
        """The next request; None when the client has gone. RemoteProtocolError (``malformed``, ``too_large``) if it is none."""
        if not self._left:
            self._left = bytes(await self._stream.receive_some(65_536))
            if not self._left:
                return None
        first, fields, rest = await _read_head(self._stream, self._left)
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise RemoteProtocolError("malformed", "this is no HTTP/1.1 request")
        body, self._left = await _read_body(self._stream, fields, rest, self._max_bytes, until_close=False)
        wants_more = words[2] == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        return HttpRequest(words[0], urlsplit(words[1]).path, body, wants_more)

    async def answer(self, status: int, body: bytes) -> None:
        """A JSON answer to the last request."""
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        await self._stream.send_all(head.encode("ascii") + body)


async def _read_head(stream: trio.abc.ReceiveStream, data: bytes) -> tuple[str, dict[str, str], bytes]:
    """(first line, fields in lower case, what came after); `data` came already."""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some(8192)
        if not more or len(data) > MAX_HEAD_BYTES:
            raise RemoteProtocolError("malformed", "an HTTP message ended within its head, or has no end")
        data += more
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines[1:]]
    return lines[0], {name.strip().lower(): value.strip() for name, _, value in pairs}, rest


async def _read_body(
    stream: trio.abc.ReceiveStream, fields: dict[str, str], rest: bytes, max_bytes: int, *, until_close: bool
) -> tuple[bytes, bytes]:
    """The body, and what came after it."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        raise RemoteProtocolError("malformed", "chunked bodies are not taken: send a Content-Length")
    length = fields.get("content-length", "" if until_close else "0")
    if length and not (length.isascii() and length.isdigit() and len(length) < 16):
        raise RemoteProtocolError("malformed", f"Content-Length {length!r}")
    wanted = int(length) if length else None
    if wanted is not None and wanted > max_bytes:
        raise RemoteProtocolError("too_large", f"a body of {wanted} bytes; at most {max_bytes}")
    body = bytearray(rest)
    while wanted is None or len(body) < wanted:
        more = await stream.receive_some(65_536)
        if not more:
            break
        body += more
        if len(body) > max_bytes:
            raise RemoteProtocolError("too_large", f"a body of more than {max_bytes} bytes")
    if wanted is not None and len(body) < wanted:
        raise RemoteProtocolError("malformed", "an HTTP body ended early")
    return bytes(body[:wanted]), b"" if wanted is None else bytes(body[wanted:])
