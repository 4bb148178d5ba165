"""The one connection of this process to an SPDK target's JSON-RPC socket.

Theory of operation. `open_spdk_rpc` starts an owner task that connects, reads answers, and connects again with
backoff for as long as it lives; `call` works from any number of tasks, pipelined on that connection (a target
takes 64 connections and lets the rest hang, so we hold one). Requests are written by one task, so that a
cancelled call never leaves half a request in the stream.

Each call has a deadline, an absolute Trio time, that covers waiting for a connection, sending and the answer. On expiry
the answer is dropped by its id whenever it comes; the connection goes on. While the target is down calls
fail at once with `TargetUnavailable`, which says why; nothing waits for a target that may never come.

A socket file that exists is no target, and a connection is no life (a stopped process connects too): only an answer
resets the backoff. A target that went away with calls in flight may or may not have carried them out.

`on_connected` runs after every connection, as a restarted target has no bdevs: its owner reconciles there. It is
cancelled when that connection ends. If it fails with a fault of the target's (unavailable, deadline, nonsense) the
connection is given up and made again later; any other error of it ends the owner task, and so reaches whoever
opened the client.

Left to others: what to call (`spdk_profile`, `spdk_status`), framing and matching (`dpurt.wire.json_rpc`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from dpurt.errors import (
    DeadlineExceeded,
    DpurtError,
    LocalProtocolError,
    RemoteProtocolError,
    TargetUnavailable,
)
from dpurt.wire.json_rpc import Answer, JsonRpcConnection

__all__ = ["OnConnected", "SpdkRpc", "open_spdk_rpc"]

CONNECT_S = 2.0
BACKOFF_S = (0.05, 1.0)  # first, longest
MAX_UNSENT_BYTES = 1 << 20  # of a target that does not read; then calls fail at once
MAX_PATH_BYTES = 107
PIECE = 256 * 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(eq=False)
class _Waiter:
    """One call. `outcome` is set before `done`."""

    done: trio.Event = field(default_factory=trio.Event)
    outcome: Answer | Exception | None = None

    def finish(self, outcome: Answer | Exception) -> None:
        self.outcome = outcome
        self.done.set()


@dataclass(eq=False)
class _Session:
    """One connection: its protocol state, who waits on it, and what is to be written."""

    stream: trio.SocketStream
    core: JsonRpcConnection = field(default_factory=JsonRpcConnection)
    waiters: dict[int, _Waiter] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    has_unsent: trio.Event = field(default_factory=trio.Event)
    has_answered: bool = False

    def send(self, method: str, params: Mapping[str, object] | None) -> tuple[int, _Waiter]:
        call_id, data = self.core.request(method, params)
        waiter = self.waiters[call_id] = _Waiter()
        self.unsent += data
        self.has_unsent.set()
        return call_id, waiter

    def forget(self, call_id: int) -> None:
        self.waiters.pop(call_id, None)
        self.core.forget(call_id)

    async def write(self) -> None:
        """Write what is queued, for ever. Raises trio.BrokenResourceError."""
        while True:
            await self.has_unsent.wait()
            self.has_unsent = trio.Event()
            data = bytes(self.unsent)
            self.unsent.clear()
            await self.stream.send_all(data)

    async def read(self) -> None:
        """Hand out answers until the peer closes. Raises RemoteProtocolError, trio.BrokenResourceError."""
        while data := await self.stream.receive_some(PIECE):
            for answer in self.core.receive(data):
                self.has_answered = True
                self.waiters.pop(answer.id).finish(answer)
        self.core.receive_end()


class SpdkRpc:
    """Calls to the target at `path`. Made by `open_spdk_rpc`."""

    def __init__(self, path: str | Path, on_connected: OnConnected | None = None) -> None:
        self.path = os.fspath(path)
        self._on_connected = on_connected
        self._session: _Session | None = None
        self._why = "not connected yet"
        self._attempt_ended = trio.Event()  # replaced for each attempt to connect
        self.connections = 0
        self.timeouts = 0

    @property
    def is_connected(self) -> bool:
        return self._session is not None

    @property
    def peer_pid(self) -> int | None:
        """The process that listens at the other end, by the kernel's word; None when not connected."""
        if self._session is None:
            return None
        credentials = self._session.stream.socket.getsockopt(
            trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, _CREDENTIALS.size
        )
        return int(_CREDENTIALS.unpack(credentials)[0])

    async def call(
        self, method: str, params: Mapping[str, object] | None = None, *, deadline: float
    ) -> object:
        """The result of one call.

        Raises RpcError (the target said no), TargetUnavailable, DeadlineExceeded, RemoteProtocolError (its
        answer was nonsense, or another call's in flight with this one was), LocalProtocolError (too large).
        """
        began = trio.current_time()
        with trio.move_on_at(deadline):
            session = await self._connected()
            return await self._answered(session, method, params)
        self.timeouts += 1
        raise DeadlineExceeded(f"{method} at {self.path}", max(deadline - began, 0.0))

    async def _connected(self) -> _Session:
        """The connection; waits for an attempt that is under way, but for no later one."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._session is None:
            await self._attempt_ended.wait()
        if self._session is None:
            raise TargetUnavailable(self.path, self._why)
        if len(self._session.unsent) > MAX_UNSENT_BYTES:
            raise TargetUnavailable(self.path, "it does not read its requests")
        return self._session

    async def _answered(self, session: _Session, method: str, params: Mapping[str, object] | None) -> object:
        call_id, waiter = session.send(method, params)
        try:
            await waiter.done.wait()
        finally:
            session.forget(call_id)
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        assert waiter.outcome is not None
        if waiter.outcome.error is not None:
            raise waiter.outcome.error
        return waiter.outcome.result

    async def run(self) -> None:
        """The owner task: keep a connection, for ever."""
        pause = BACKOFF_S[0]
        while True:
            has_answered = await self._attempt()
            self._attempt_ended.set()
            pause = BACKOFF_S[0] if has_answered else pause
            await trio.sleep(pause)
            pause = min(2 * pause, BACKOFF_S[1])
            self._attempt_ended = trio.Event()

    async def _attempt(self) -> bool:
        """One connection from its start to its end; whether it ever gave an answer."""
        try:
            stream = await _connect(self.path)
        except TargetUnavailable as error:
            self._why = error.why
            return False
        session = _Session(stream)
        self._session = session
        self.connections += 1
        self._attempt_ended.set()
        try:
            await self._serve(session)
        finally:
            self._session = None
            self._fail_all(session, TargetUnavailable(self.path, "our client was closed"))
            await trio.aclose_forcefully(stream)
        return session.has_answered

    async def _serve(self, session: _Session) -> None:
        """Read, write and reconcile until the connection ends; then every waiting call has failed."""
        ended: Exception = TargetUnavailable(self.path, "it closed the connection; calls in flight are lost")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.write)
                if self._on_connected is not None:
                    nursery.start_soon(self._on_connected, self)
                await session.read()
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            ended = TargetUnavailable(self.path, "the connection broke; calls in flight are lost")
        except* (RemoteProtocolError, DeadlineExceeded, TargetUnavailable) as group:
            ended = _first(group)
            session.has_answered &= isinstance(
                ended, TargetUnavailable
            )  # nonsense again and again: slow down
        self._why = str(ended) if not isinstance(ended, TargetUnavailable) else ended.why
        self._session = None
        self._fail_all(session, ended)

    @staticmethod
    def _fail_all(session: _Session, error: Exception) -> None:
        for waiter in session.waiters.values():
            waiter.finish(error)
        session.waiters.clear()


OnConnected = Callable[[SpdkRpc], Awaitable[None]]


@asynccontextmanager
async def open_spdk_rpc(path: str | Path, on_connected: OnConnected | None = None) -> AsyncIterator[SpdkRpc]:
    """A client that is connecting; the first call waits for that. Raises LocalProtocolError for a path no
    socket can have.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        message = f"{path}: a Unix socket's path has at most {MAX_PATH_BYTES} bytes"
        raise LocalProtocolError("bad_path", message)
    rpc = SpdkRpc(path, on_connected)
    failure: DpurtError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rpc.run)
        try:
            yield rpc
        except DpurtError as error:  # the caller's own, so it goes out as it is and not in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _connect(path: str) -> trio.SocketStream:
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        with trio.fail_after(CONNECT_S):
            await sock.connect(path)
        sock.getpeername()  # a full backlog looks like a connection in progress that then never was
    except (OSError, trio.TooSlowError) as error:
        sock.close()
        raise TargetUnavailable(path, _reason(path, error)) from error
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _reason(path: str, error: OSError | trio.TooSlowError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "the socket is there but nobody listens (a target that was killed leaves its file behind)"
    if isinstance(error, PermissionError):
        return (
            f"permission denied (we are user {os.geteuid()}; run as the target's user or give us its socket)"
        )
    if isinstance(error, trio.TooSlowError):
        return f"no connection within {CONNECT_S:.0f} s"
    return error.strerror or str(error)


def _first(group: BaseExceptionGroup[BaseException]) -> Exception:
    """The first leaf of a group of foreseen errors."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Exception)
    return found
