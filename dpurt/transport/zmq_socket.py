"""The Trio view of one `zmq.Socket`: send and receive whole multi-part messages without blocking the loop or
losing any.

Theory of operation. libzmq tells of news through one descriptor (`zmq.FD`) that is *edge-triggered*: it
becomes readable when the socket's mailbox gets a command, and any call on the socket may read the mailbox,
and so eat the edge. Hence:

1. An operation is tried with DONTWAIT. On EAGAIN we read `zmq.EVENTS` (which handles all pending commands)
   and try once more if the wanted flag is set; only then we wait.
2. At most one task, the *watcher*, waits on the descriptor; the others are parked. Whoever touches the socket
   reads EVENTS afterwards if anybody waits, and dismisses the watcher when a wanted flag is set: Trio's
   `notify_closing` ends its wait (a cancel scope around every wait would cost more than all else here). A
   watcher that leaves, for whatever reason, cancellation included, wakes all parked tasks: each tries again
   and one becomes the new watcher.
3. There is no checkpoint between a successful operation and its return, so cancellation loses no message: a
   cancelled receive has taken nothing, a cancelled send has sent nothing. The fair yield comes *before* the
   attempt.

A ROUTER always claims to be writable (one full peer among many has no flag of its own), so a sender blocked
by a full peer also looks again every `ROUTER_RETRY_S`. A node that must not wait for slow readers uses
`try_send` and cuts them off.

All calls are made on the Trio thread. Closed and vanished ends raise Trio's own errors:
`trio.ClosedResourceError` (we closed it), `trio.BrokenResourceError` (the addressed peer of a ROUTER is
gone). Message content is for `dpurt.wire` to judge; here only
sizes are bounded: libzmq disconnects a peer that sends a frame over `max_message_bytes`, and messages of more
than `max_parts` frames come up without those beyond, and are counted (skipping them here would let a flood of
them keep the loop for itself). Without CURVE libzmq still speaks ZMTP 1.0, which has no
greeting, so *any* bytes sent to the port may come up as a message: expect junk. With CURVE they never do.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import socket as stdlib_socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, TypeVar, cast
from urllib.parse import urlsplit

import trio
import zmq

from dpurt.errors import ConfigError, DeadlineExceeded

__all__ = [
    "CurveClient",
    "CurveServer",
    "SocketOptions",
    "ZmqSocket",
    "ZmqStats",
    "open_context",
    "user_id",
]

ROUTER_RETRY_S = 0.01
_DONTWAIT = int(zmq.DONTWAIT)  # a plain int costs libzmq's wrapper less than the enum
_EVENTS = int(zmq.EVENTS)
ZAP_DOMAIN = b"dpurt"
Z85_KEY_CHARS = 40
Kind = Literal["DEALER", "ROUTER", "PUB", "SUB", "REP"]
Part = bytes | memoryview | zmq.Frame
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurveServer:
    """Encrypt and demand known clients: `dpurt.transport.zap.serve_zap` must run on the same context, else
    none gets in.
    """

    secret_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Our key pair and the server's public key, all in Z85 as `dpurt.keys` reads them. Raises ConfigError."""

    public_key: str
    secret_key: str = field(repr=False)
    server_key: str

    def __post_init__(self) -> None:
        for name in ("public_key", "secret_key", "server_key"):
            key = getattr(self, name)
            if not isinstance(key, str) or not key.isascii() or len(key) != Z85_KEY_CHARS:
                raise ConfigError(f"curve.{name}", f"expected a Z85 key, a str of {Z85_KEY_CHARS} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """Bounds and security of one socket. High-water marks count messages, per peer.

    `queue_unconnected`: whether messages may queue for a peer that is not there yet; else sends wait for it.
    """

    send_hwm: int = 1000
    recv_hwm: int = 1000
    max_message_bytes: int = 8 << 20
    max_parts: int = 64
    linger_ms: int = 0
    routing_id: bytes = b""
    queue_unconnected: bool = True
    curve: CurveServer | CurveClient | None = None


@dataclass(slots=True)
class ZmqStats:
    """Plain counters. `cut`: received messages with too many parts."""

    sent: int = 0
    received: int = 0
    cut: int = 0


@contextmanager
def open_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A libzmq context; leaving it closes every socket made from it, unsent messages dropped."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def user_id(frames: Sequence[zmq.Frame]) -> str | None:
    """The authenticated public key (Z85) of the peer that sent these frames; None without CURVE."""
    try:
        return str(frames[-1].get("User-Id"))
    except zmq.ZMQError:
        return None


class ZmqSocket:
    """One DEALER, ROUTER, PUB, SUB or REP socket. Any number of tasks may send and receive at once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: Kind, options: SocketOptions | None = None
    ) -> None:
        self.options = options or SocketOptions()
        self.stats = ZmqStats()
        self._socket: zmq.Socket[bytes] = context.socket(getattr(zmq, kind))
        self._out_flag_lies = kind == "ROUTER"
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._is_watched = False
        self._parked = trio.lowlevel.ParkingLot()
        self._readers = 0
        self._writers = 0
        self._monitor: zmq.Socket[bytes] | None = None
        _apply(self._socket, kind, self.options)

    # --- addresses -----------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> str:
        """Listen at `endpoint` and return the real one (port 0 resolved).

        Raises ConfigError when the address cannot be had, or when libzmq bound anything but what was asked
        for.
        """
        wanted = _numeric(endpoint)
        self._allow_ipv6(wanted)
        try:
            self._socket.bind(wanted)
        except zmq.ZMQError as error:
            raise ConfigError(endpoint, f"cannot bind: {error.strerror}") from error
        actual = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if not _same_address(wanted, actual):
            self._socket.unbind(actual)
            raise ConfigError(endpoint, f"was bound as {actual}, which is not what was configured")
        return actual

    def connect(self, endpoint: str) -> None:
        """Connect in the background; libzmq reconnects for ever. ConfigError for a malformed endpoint."""
        self._allow_ipv6(endpoint)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(endpoint, f"cannot connect: {error.strerror}") from error

    def _allow_ipv6(self, endpoint: str) -> None:
        if "[" in endpoint:  # not always: with it on, libzmq shows 127.0.0.1 as ::ffff:127.0.0.1
            self._socket.setsockopt(zmq.IPV6, 1)

    def subscribe(self, prefix: bytes = b"") -> None:
        """SUB only: also receive messages whose first part starts with `prefix`."""
        self._socket.setsockopt(zmq.SUBSCRIBE, prefix)

    # --- receiving -----------------------------------------------------------------------------------------

    async def recv(self) -> list[bytes]:
        """The next message, all parts."""
        return await self._until(zmq.POLLIN, self.try_recv)

    async def recv_frames(self) -> list[zmq.Frame]:
        """The next message as frames: no copy of large ones, and `user_id` tells who sent it."""
        return await self._until(zmq.POLLIN, self.try_recv_frames)

    def try_recv(self) -> list[bytes] | None:
        """The next message if it is here, else None. Drains a batch without awaiting."""
        return self._attempt(self._receive_bytes)

    def try_recv_frames(self) -> list[zmq.Frame] | None:
        """As `try_recv`, for frames."""
        return self._attempt(self._receive)

    def try_recv_many(self, limit: int) -> list[list[bytes]]:
        """Messages that are here, `limit` at most."""
        messages: list[list[bytes]] = []

        def receive() -> None:
            while len(messages) < limit:
                messages.append(self._receive_bytes())

        self._attempt(receive)
        return messages

    def _receive(self) -> list[zmq.Frame]:
        """A message's frames: once the first is here the others are, so this raises Again or gets them all."""
        frame = self._socket.recv(_DONTWAIT, copy=False)
        frames = [frame]
        while frame.more:
            frame = self._socket.recv(_DONTWAIT, copy=False)
            if len(frames) <= self.options.max_parts:
                frames.append(frame)
        self.stats.received += 1
        self.stats.cut += len(frames) > self.options.max_parts
        return frames[: self.options.max_parts]

    def _receive_bytes(self) -> list[bytes]:
        """As `_receive`, copied at once: for what is small or is copied anyway. A frame knows whether more follow; to ask the
        socket that costs three times what it does to receive.
        """
        receive, most = self._socket.recv, self.options.max_parts
        frame = receive(_DONTWAIT, copy=False)
        parts = [frame.bytes]
        while frame.more:
            frame = receive(_DONTWAIT, copy=False)
            if len(parts) <= most:
                parts.append(frame.bytes)
        self.stats.received += 1
        if len(parts) > most:
            self.stats.cut += 1
            parts.pop()
        return parts

    # --- sending -------------------------------------------------------------------------------------------

    async def send(self, parts: Sequence[Part], deadline: float = math.inf) -> None:
        """Hand the message to libzmq, waiting for room at the high-water mark.

        Raises DeadlineExceeded when there is no room by `deadline` (nothing was sent), and
        BrokenResourceError when the peer a ROUTER message is addressed to is not connected. A PUB never
        waits: slow subscribers lose messages.
        """
        await trio.lowlevel.checkpoint()
        if self.try_send(parts):
            return
        began = trio.current_time()
        with trio.CancelScope(deadline=deadline):
            await self._until(zmq.POLLOUT, lambda: self.try_send(parts) or None)
            return
        raise DeadlineExceeded("send: the peer takes no more messages", max(deadline - began, 0.0))

    def try_send(self, parts: Sequence[Part]) -> bool:
        """Send if there is room now. False: nothing was sent. Raises as `send`."""
        if self._attempt(lambda: self._put(parts)) is None:
            return False
        self.stats.sent += 1
        return True

    def _put(self, parts: Sequence[Part]) -> bool:
        self._socket.send_multipart(parts, zmq.DONTWAIT)
        return True

    # --- waiting -------------------------------------------------------------------------------------------

    def _attempt(self, operation: Callable[[], T]) -> T | None:
        """One non-blocking operation; None on EAGAIN. It may have eaten the edge, so the watcher is told."""
        try:
            return operation()
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise _as_trio_error(error) from error
        finally:
            if self._is_watched:
                self._events()

    def _events(self) -> int:
        """Handle libzmq's pending commands, dismiss the watcher if a flag somebody waits for is up; the
        flags.
        """
        try:
            events = cast(int, self._socket.getsockopt(_EVENTS))
        except zmq.ZMQError as error:
            raise _as_trio_error(error) from error
        if self._is_watched and events & self._wanted():
            trio.lowlevel.notify_closing(self._fd)
        return events

    def _wanted(self) -> int:
        reading = zmq.POLLIN if self._readers else 0
        writing = zmq.POLLOUT if self._writers and not self._out_flag_lies else 0
        return reading | writing

    async def _until(self, flag: int, attempt: Callable[[], T | None]) -> T:
        """Repeat `attempt` until it gives a result. No checkpoint follows success."""
        ready = self._events() & flag
        if ready:
            await trio.lowlevel.checkpoint()
        while True:
            if ready and (result := attempt()) is not None:
                return result
            await self._changed(flag)
            ready = self._events() & flag

    async def _changed(self, flag: int) -> None:
        """Return when the socket's state may have changed. EVENTS was read since the last failed attempt."""
        if flag == zmq.POLLIN:
            self._readers += 1
            try:
                await self._edge()
            finally:
                self._readers -= 1
            return
        self._writers += 1
        try:
            with trio.move_on_after(ROUTER_RETRY_S if self._out_flag_lies else math.inf):
                await self._edge()
        finally:
            self._writers -= 1

    async def _edge(self) -> None:
        if self._is_watched:
            await self._parked.park()
            return
        self._is_watched = True
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            pass  # dismissed; or really closed, which the next attempt finds out
        finally:
            self._is_watched = False
            self._parked.unpark_all()

    # --- connections ---------------------------------------------------------------------------------------

    def watch_connections(self) -> None:
        """Let `was_interrupted` know what happens to this socket's connections from now on."""
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def was_interrupted(self) -> bool:
        """Was a connection lost since this was last asked? libzmq tells before it hands on what came over a new one."""
        assert self._monitor is not None, "watch_connections comes first"
        found = False
        while cast(int, self._monitor.getsockopt(_EVENTS)) & zmq.POLLIN:
            self._monitor.recv_multipart(_DONTWAIT)
            found = True
        return found

    # --- end of life ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close at once; tasks waiting here get ClosedResourceError. Idempotent."""
        if self._is_watched:
            trio.lowlevel.notify_closing(self._fd)
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        if not self._socket.closed:
            self._socket.close(linger=self.options.linger_ms)

    def __enter__(self) -> ZmqSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _apply(socket: zmq.Socket[bytes], kind: Kind, options: SocketOptions) -> None:
    socket.setsockopt(zmq.SNDHWM, options.send_hwm)
    socket.setsockopt(zmq.RCVHWM, options.recv_hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    socket.setsockopt(zmq.LINGER, options.linger_ms)
    socket.setsockopt(zmq.IMMEDIATE, 0 if options.queue_unconnected else 1)
    if options.routing_id:
        socket.setsockopt(zmq.ROUTING_ID, options.routing_id)
    if kind == "ROUTER":  # an unknown or full peer is told to us instead of being dropped silently
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if options.curve is not None:
        _apply_curve(socket, options.curve)


def _apply_curve(socket: zmq.Socket[bytes], curve: CurveServer | CurveClient) -> None:
    if isinstance(curve, CurveClient):
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public_key.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key.encode())
        return
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Without this libzmq lets *every* client in while no authenticator runs.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _as_trio_error(error: zmq.ZMQError) -> Exception:
    if error.errno in (zmq.ENOTSOCK, zmq.ETERM):
        return trio.ClosedResourceError("the ZeroMQ socket is closed")
    if error.errno == errno.EHOSTUNREACH:
        return trio.BrokenResourceError("the addressed peer is not connected")
    return error


def _numeric(endpoint: str) -> str:
    """A tcp endpoint with its host resolved, so that what gets bound can be compared; others unchanged."""
    url = urlsplit(endpoint)
    if url.scheme != "tcp":
        return endpoint
    try:
        host, port = url.hostname or "", url.port
        family, _, _, _, address = stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)[0]
    except (ValueError, OSError) as error:
        raise ConfigError(endpoint, f"not an address to bind: {error}") from error
    if not host or port is None:
        raise ConfigError(endpoint, "needs a host and a port, as in tcp://127.0.0.1:7571")
    shown = f"[{address[0]}]" if family == stdlib_socket.AF_INET6 else str(address[0])
    return f"tcp://{shown}:{port}"


def _same_address(wanted: str, actual: str) -> bool:
    if not wanted.startswith("tcp:"):
        return wanted == actual
    mine, theirs = urlsplit(wanted), urlsplit(actual)
    same_host = ipaddress.ip_address(mine.hostname or "") == ipaddress.ip_address(theirs.hostname or "")
    return same_host and mine.port in (0, theirs.port)
