"""Unix `SOCK_SEQPACKET` sockets under Trio: whole messages, each with at most one descriptor, in a place only
we may enter."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from dpurt.errors import ConfigError, NodeUnavailable

__all__ = ["Channel", "dial", "listening"]


MAX_MESSAGE_BYTES = 128  # more is cut off, and then has the wrong length for any message of ours


class Channel:
    """One connected socket, owned."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def send(self, message: bytes, fd: int = -1) -> None:
        while True:
            try:
                self.send_now(message, fd)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
            else:
                return

    def send_now(self, message: bytes, fd: int = -1) -> None:
        """Raises BlockingIOError."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
        self.sock.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)

    async def receive(self) -> tuple[bytes, int]:
        """(message, descriptor or -1); an empty message is the end. The descriptor is the caller's to
        close."""
        try:
            while True:
                try:
                    return self._receive_now()
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(self.sock)
        except (OSError, trio.ClosedResourceError):  # closed under us between waking up and reading, too
            return b"", -1

    def _receive_now(self) -> tuple[bytes, int]:
        space = socket.CMSG_SPACE(struct.calcsize("2i"))
        message, ancillary, _, _ = self.sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for *_, data in ancillary for fd in memoryview(data).cast("i")]
        for extra in fds[1:]:
            os.close(extra)
        return message, fds[0] if fds else -1

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()

    def close_after(self, mappings: Sequence[mmap.mmap]) -> None:
        """Wake who waits here now; close when the last of the mappings is gone, whichever thread drops it."""
        if self.sock.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self.sock)
        closing = _Countdown(len(mappings), self.sock.close)
        for mapping in mappings:
            weakref.finalize(mapping, closing.tick)


class _Countdown:
    """Calls `done` after `count` ticks; at once when there are none to wait for."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._count = count + 1
        self._done = done
        self.tick()

    def tick(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._done()


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket at `path`, mode 0600, removed at exit. A stale one of a dead node is replaced, a live one is
    not."""
    where = path.parent.stat()
    if where.st_uid != os.geteuid() or stat.S_IMODE(where.st_mode) & 0o077:
        raise ConfigError(str(path), "the directory must be ours, with mode 0700")
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        try:
            path.chmod(0o600)
            sock.listen(128)
            sock.setblocking(False)
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(str(path), f"exists and is no fabric's socket: {error}") from error
    raise ConfigError(str(path), "another node serves there")


async def dial(path: str, where: str) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(path)
                return Channel(sock)
            except BlockingIOError:
                await trio.sleep(0.01)  # the backlog is full, and a Unix socket cannot be waited for
    except OSError as error:
        sock.close()
        raise NodeUnavailable(where, str(error)) from error
    except BaseException:
        sock.close()
        raise
