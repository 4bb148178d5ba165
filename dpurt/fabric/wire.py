"""Raw, non-blocking stream sockets under Trio: bytes go straight from and to the caller's memory.

`trio.SocketStream` runs a scheduler pass per call and takes one buffer. Here the system call is tried first,
many buffers at a time (gather, scatter), and the task waits only when the kernel has no room or no bytes; on
a peer that keeps up, a pass is still taken every `_TURN_BYTES` and `_TURN_FRAMES`, so that one link does not
starve the loop. A `Cursor` remembers how far a transfer came, so a cancelled one can be resumed, drained or reported.
"""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from dpurt.errors import FabricError

__all__ = ["Cursor", "Wire", "accept", "listener", "tune"]

_WINDOW_BYTES = 2 << 20  # per system call: smaller ones measured slower, larger ones no faster
_WINDOW_BUFFERS = 64
_TURN_BYTES = 4 << 20
_TURN_FRAMES = 16
_FRAME_ENTRIES = 64  # that are as much work as a frame
_SOCKET_BUFFER_BYTES = 4 << 20
_LOW_WATER_BYTES = 1 << 20
_AHEAD_BYTES = 4096  # of a request's frame and what follows it: these are copied once more


_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Cursor:
    """A position in a list of buffers."""

    __slots__ = ("_buffers", "_index", "_offset", "moved", "total")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer]
        self._index = 0
        self._offset = 0
        self.moved = 0
        self.total = sum(map(len, self._buffers))

    @property
    def remaining(self) -> int:
        return self.total - self.moved

    def window(self) -> list[memoryview]:
        """The next buffers to move, at most a window's worth."""
        first = self._buffers[self._index][self._offset : self._offset + _WINDOW_BYTES]
        views, room = [first], _WINDOW_BYTES - len(first)
        for buffer in self._buffers[self._index + 1 : self._index + _WINDOW_BUFFERS]:
            if not room:
                break
            views.append(buffer[:room])
            room -= len(views[-1])
        return views

    def advance(self, count: int) -> None:
        self.moved += count
        self._offset += count
        while self._index < len(self._buffers) and self._offset >= len(self._buffers[self._index]):
            self._offset -= len(self._buffers[self._index])
            self._index += 1

    def fill(self, data: memoryview) -> int:
        """Move as much of `data` in as there is room for; how much that is."""
        taken = 0
        while taken < len(data) and self.remaining:
            into = self._buffers[self._index][self._offset :]
            part = data[taken : taken + len(into)]
            into[: len(part)] = part
            self.advance(len(part))
            taken += len(part)
        return taken

    def moved_beyond(self, start: int) -> bytes:
        """What was moved so far but for the first `start` bytes."""
        moved = b"".join(self._buffers[: self._index])
        if self._offset:
            moved += self._buffers[self._index][: self._offset]
        return moved[start:]


class Wire:
    """One connected socket, owned. A send and a receive may run at the same time, two of either may not.

    Deadlines are absolute times of `trio.current_time()` and cost something only where a call must wait. Past
    them FabricError ``"timed_out"`` is raised; when the connection ends, FabricError ``"closed"``.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer
        self._low_water = 1
        self._frames = 0  # that were there at once
        self._ahead = memoryview(b"")  # received, and not asked for yet

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    async def send(self, cursor: Cursor, deadline: float = math.inf, *, is_frame: bool = False) -> None:
        """Send the rest of the cursor. A complete send never ends as cancelled.

        `is_frame`: once the first byte has left, nor does any other: cancellation must not cut a frame in two.
        """
        turn = 0
        while cursor.remaining:
            try:
                count = self._sock.sendmsg(cursor.window())
            except BlockingIOError:
                turn = 0
                wait = trio.lowlevel.wait_writable
                await self._wait("send", wait, cursor.moved, deadline, shield=is_frame and cursor.moved > 0)
                continue
            except OSError as error:
                raise self._closed("send", cursor.moved, error) from error
            cursor.advance(count)
            turn += count
            if turn >= _TURN_BYTES and cursor.remaining:
                turn = 0
                await self._wait("send", _take_turn, cursor.moved, deadline, shield=is_frame)

    async def receive(self, cursor: Cursor, deadline: float = math.inf, *, least: int | None = None) -> None:
        """Fill the rest of the cursor, or more of it until `least` bytes of it are there. FabricError also
        when the peer ends early. A complete receive never ends as cancelled.
        """
        if self._ahead:
            self._ahead = self._ahead[cursor.fill(self._ahead) :]
        least = cursor.total if least is None else least
        turn = 0
        while cursor.moved < least:
            try:
                count = self._sock.recvmsg_into(cursor.window())[0]
            except BlockingIOError:
                turn = 0
                self._wake_at(least - cursor.moved)
                await self._wait("receive", trio.lowlevel.wait_readable, cursor.moved, deadline)
                continue
            except OSError as error:
                raise self._closed("receive", cursor.moved, error) from error
            if count == 0:
                raise self._closed("receive", cursor.moved, "end of stream")
            cursor.advance(count)
            turn += count
            if turn >= _TURN_BYTES and cursor.moved < least:
                turn = 0
                await self._wait("receive", _take_turn, cursor.moved, deadline)

    def unread(self, data: bytes) -> None:
        """Give back what was received too much; the next receive begins with it."""
        self._ahead = memoryview(data + self._ahead)

    async def receive_bytes(self, count: int, deadline: float = math.inf) -> bytes:
        if len(self._ahead) >= count:
            taken, self._ahead = self._ahead[:count], self._ahead[count:]
            return bytes(taken)
        buffer = bytearray(count)
        await self.receive(Cursor([memoryview(buffer)]), deadline)
        return bytes(buffer)

    async def discard(self, count: int, deadline: float = math.inf) -> None:
        """Read and forget."""
        scratch = memoryview(bytearray(min(count, 1 << 16)))
        while count:
            part = scratch[: min(count, len(scratch))]
            await self.receive(Cursor([part]), deadline)
            count -= len(part)

    def answered(self, entries: int) -> None:
        """The last frame had so many entries: many are as much work as many frames."""
        self._frames += entries // _FRAME_ENTRIES

    async def at_end(self) -> bool:
        """Wait for the first bytes of a next frame (False) or the peer's orderly or sudden end (True)."""
        self._frames += 1
        if self._frames >= _TURN_FRAMES:
            self._frames = 0
            await trio.lowlevel.checkpoint()
        while not self._ahead:
            try:
                data = self._sock.recv(_AHEAD_BYTES)
            except BlockingIOError:
                self._frames = 0
                self._wake_at(1)
                await self._wait("wait", trio.lowlevel.wait_readable, 0, math.inf)
                continue
            except OSError:
                return True
            if not data:
                return True
            self._ahead = memoryview(data)
        return False

    def close(self) -> None:
        """Idempotent; a task that waits on the wire gets FabricError ``"closed"``."""
        if self.is_open:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def _wake_at(self, sure: int) -> None:
        """Be woken for a worthwhile part of the bytes that are sure to come, not for each segment."""
        low_water = max(1, min(_LOW_WATER_BYTES, sure // 4))
        if low_water != self._low_water and self.is_open:
            self._low_water = low_water
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    async def _wait(
        self,
        stage: str,
        wait: Callable[[socket.socket], Awaitable[None]],
        moved: int,
        deadline: float,
        *,
        shield: bool = False,
    ) -> None:
        try:
            if deadline == math.inf and not shield:
                await wait(self._sock)
                return
            with trio.CancelScope(deadline=deadline, shield=shield):
                await wait(self._sock)
                return
        except (trio.ClosedResourceError, ValueError, OSError) as error:
            raise self._closed(stage, moved, error) from error
        raise FabricError(self.peer, stage, "timed_out", moved, "the peer is too slow")

    def _closed(self, stage: str, moved: int, why: object) -> FabricError:
        return FabricError(self.peer, stage, "closed", moved, str(why))


async def _take_turn(_: socket.socket) -> None:
    """Let the other tasks run, in the middle of a transfer that never has to wait."""
    await trio.lowlevel.checkpoint()


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
