"""Raw, non-blocking stream sockets under Trio: bytes go straight from and to the caller's memory.

`trio.SocketStream` runs a scheduler pass per call and takes one buffer. Here the system call is tried first,
many buffers at a time (gather, scatter), and the task waits only when the kernel has no room or no bytes; on
a peer that keeps up, a pass is still taken every `_TURN_BYTES`, so that one transfer does not starve the
loop. A `Cursor` remembers how far a transfer came, so a cancelled one can be resumed, drained or reported.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from dpurt.errors import FabricError

__all__ = ["Cursor", "Wire", "accept", "listener", "tune"]

_WINDOW_BYTES = 512 << 10  # per system call: larger calls fall out of the cache (measured slower)
_WINDOW_BUFFERS = 64
_TURN_BYTES = 4 << 20
_SOCKET_BUFFER_BYTES = 4 << 20
_LOW_WATER_BYTES = 256 << 10


_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Cursor:
    """A position in a list of buffers."""

    __slots__ = ("_buffers", "_index", "_offset", "moved", "total")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._index = 0
        self._offset = 0
        self.moved = 0
        self.total = sum(len(buffer) for buffer in self._buffers)

    @property
    def remaining(self) -> int:
        return self.total - self.moved

    def window(self) -> list[memoryview]:
        """The next buffers to move, at most about a window's worth."""
        first = self._buffers[self._index][self._offset : self._offset + _WINDOW_BYTES]
        views, size = [first], len(first)
        for buffer in self._buffers[self._index + 1 : self._index + _WINDOW_BUFFERS]:
            if size + len(buffer) > _WINDOW_BYTES:
                break
            views.append(buffer)
            size += len(buffer)
        return views

    def advance(self, count: int) -> None:
        self.moved += count
        self._offset += count
        while self._index < len(self._buffers) and self._offset >= len(self._buffers[self._index]):
            self._offset -= len(self._buffers[self._index])
            self._index += 1


class Wire:
    """One connected socket, owned. A send and a receive may run at the same time, two of either may not."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer
        self._low_water = 1

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    async def send(self, cursor: Cursor, *, commit: trio.CancelScope | None = None) -> None:
        """Send the rest of the cursor. Raises FabricError ``"closed"``. A complete send never ends as
        cancelled.

        `commit` is shielded once the first byte has left, so that outer cancellation cannot cut a frame in
        two."""
        turn = 0
        while cursor.remaining:
            try:
                count = self._sock.sendmsg(cursor.window())
            except BlockingIOError:
                turn = 0
                await self._wait(trio.lowlevel.wait_writable)
                continue
            except OSError as error:
                raise self._closed("send", cursor.moved, error) from error
            cursor.advance(count)
            if commit is not None:
                commit.shield = True
            turn = await _take_turn(turn + count, cursor)

    async def receive(self, cursor: Cursor) -> None:
        """Fill the rest of the cursor. Raises FabricError ``"closed"``, also when the peer ends early.

        A complete receive never ends as cancelled.
        """
        turn = 0
        try:
            while cursor.remaining:
                try:
                    count = self._sock.recvmsg_into(cursor.window())[0]
                except BlockingIOError:
                    turn = 0
                    self._wake_at(cursor.remaining)
                    await self._wait(trio.lowlevel.wait_readable)
                    continue
                except OSError as error:
                    raise self._closed("receive", cursor.moved, error) from error
                if count == 0:
                    raise self._closed("receive", cursor.moved, "end of stream")
                cursor.advance(count)
                turn = await _take_turn(turn + count, cursor)
        finally:
            self._wake_at(0)

    def _wake_at(self, remaining: int) -> None:
        """Be woken for a worthwhile part of what is to come, not for each segment (measured: half as many
        wake-ups, and up to twice the throughput). Never for more than is sure to come."""
        low_water = max(1, min(_LOW_WATER_BYTES, remaining // 4))
        if low_water != self._low_water and self.is_open:
            self._low_water = low_water
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    async def receive_bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        await self.receive(Cursor([memoryview(buffer)]))
        return bytes(buffer)

    async def discard(self, count: int) -> None:
        """Read and forget."""
        scratch = memoryview(bytearray(min(count, 1 << 16)))
        while count:
            part = scratch[: min(count, len(scratch))]
            await self.receive(Cursor([part]))
            count -= len(part)

    async def at_end(self) -> bool:
        """Wait for the first byte of a next frame (False) or the peer's orderly or sudden end (True)."""
        while True:
            try:
                return not self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_readable)
            except OSError:
                return True

    def close(self) -> None:
        """Idempotent; a task that waits on the wire gets FabricError ``"closed"``."""
        if self.is_open:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        try:
            await wait(self._sock)
        except (trio.ClosedResourceError, ValueError, OSError) as error:
            raise self._closed("wait", 0, error) from error

    def _closed(self, stage: str, moved: int, why: object) -> FabricError:
        return FabricError(self.peer, stage, "closed", moved, str(why))


async def _take_turn(moved: int, cursor: Cursor) -> int:
    if moved < _TURN_BYTES or not cursor.remaining:
        return moved
    await trio.lowlevel.checkpoint()
    return 0


def tune(sock: socket.socket | trio.socket.SocketType) -> None:
    """Buffers as large as helps. Where the kernel caps them lower than that, its own auto-tuning does better:
    keep it."""
    for option, cap in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if int(Path("/proc/sys/net/core", cap).read_text(encoding="ascii")) >= _SOCKET_BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def listener(host: str, port: int) -> socket.socket:
    """A listening socket on exactly this address; accepted ones inherit its buffers."""
    if not host:
        raise ValueError("a listener needs an address; it never picks the wildcard by itself")
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(sock)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


async def accept(listening: socket.socket) -> socket.socket:
    """The next connection."""
    while True:
        try:
            return listening.accept()[0]
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listening)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            await trio.sleep(
                0.1
            )  # others must close something first; pending connections wait in the backlog
