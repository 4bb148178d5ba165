"""A vhost-user-blk back end that misbehaves when told to. It shares no code with the front end it is made to test.

As a thread: ``with FakeVhostTarget(path, size) as target``; faults are attributes and methods, safe to use from the
thread of the test. As a process: ``python vhost_target.py PATH SIZE [--die-after N]``, which ends by SIGKILL of itself
when it has taken its Nth request. The default is a good device: it answers every request from `image`.

Like SPDK: polls (`is_polling`), fails with IOERR and no reason, completes late what hung, serves corrupt data with a
good status, keeps a connection whose device is gone. Unlike SPDK, and each for a reason: offers memory slots and
EVENT_IDX if asked to, and lies in the used ring.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import selectors
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

__all__ = ["FakeVhostTarget"]

_HEADER = struct.Struct("=III")
_INDEX = struct.Struct("H")  # native: the front end must never see half of an index
_USED = struct.Struct("II")
_DESCRIPTOR = struct.Struct("=QIHH")
_INDIRECT_BIT, _EVENT_IDX_BIT = 1 << 28, 1 << 29
_BASE_FEATURES = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 12 | 1 << 30 | 1 << 32
_POLL_S = 0.001
_SECTOR = 512


@dataclass
class _Ring:
    size: int = 0
    desc: int = 0
    avail: int = 0
    used: int = 0
    seen: int = 0
    done: int = 0
    kick: int = -1
    call: int = -1
    is_enabled: bool = False
    regions: list[tuple[int, int, memoryview]] = field(default_factory=list)

    def at(self, address: int, length: int) -> memoryview:
        """Memory of the session the ring belongs to, also after its end."""
        for start, size, view in self.regions:
            if start <= address and address + length <= start + size:
                return view[address - start : address - start + length]
        raise RuntimeError(f"the front end named {length} bytes at {address:#x}, outside of what it gave")


@dataclass
class _Taken:
    """A request taken from a ring."""

    ring: _Ring
    head: int
    kind: int
    sector: int
    pieces: list[memoryview] = field(default_factory=list)
    status: memoryview = field(default_factory=lambda: memoryview(bytearray(1)))
    extra: bytes = b""


class FakeVhostTarget:
    """See the module. `image` is the device's content."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        size_bytes: int,
        *,
        is_polling: bool = False,
        has_event_idx: bool = True,
        has_indirect: bool = True,
        has_mem_slots: bool = True,
        has_reply_ack: bool = True,
        is_read_only: bool = False,
        has_discard: bool = True,
        size_max: int = 0,
        block_size: int = 512,
    ) -> None:
        self.image = bytearray(size_bytes)
        self.is_holding = False  # reads hang until `release`
        self.num_to_fail = 0
        self.num_to_corrupt = 0
        self.die_after = 0
        self.lie: str | None = None  # "unknown", "twice", "jump" or "noise": about the next request
        self.garble: Callable[[int, bytes], bytes | None] = lambda request, reply: reply
        self.num_kicks = self.num_requests = self.num_sessions = 0
        self.requests: list[int] = []
        self._noise = random.Random(1)
        self._is_polling = is_polling
        self._features = _BASE_FEATURES | (1 << 1 if size_max else 0) | (1 << 5 if is_read_only else 0)
        self._features |= 1 << 13 if has_discard else 0
        self._features |= (_EVENT_IDX_BIT if has_event_idx else 0) | (_INDIRECT_BIT if has_indirect else 0)
        self._protocol = (
            1 | 1 << 5 | 1 << 9 | (1 << 15 if has_mem_slots else 0) | (1 << 3 if has_reply_ack else 0)
        )
        self._size_max, self._block_size = size_max, block_size
        self._held: list[_Taken] = []
        self._jobs: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener.bind(os.fspath(path))
        self._listener.listen(8)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_over = False
        self._reset()
        self._conn: socket.socket | None = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._do_jobs)
        self._thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> FakeVhostTarget:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(self._end)
        self._thread.join()

    # --- for the test's thread ---

    def release(self, count: int | None = None) -> None:
        """Complete what hung, or so much of it while the rest hangs on."""
        self.is_holding = count is not None
        self._tell(lambda: self._release(count))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def resize(self, size_bytes: int) -> None:
        self._tell(lambda: self._resize(size_bytes))

    def drop(self) -> None:
        """Close the connection, and keep what is held."""
        self._tell(self._drop)

    def say(self, data: bytes, *, unasked_on_backend_channel: bool = False) -> None:
        """Send bytes nobody asked for."""
        sock = self._backend if unasked_on_backend_channel else self._conn
        assert sock is not None, "connected"
        sock.sendall(data)

    def run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(_POLL_S if self._is_polling else None):
                key.data()
            if self._is_polling:
                for ring in self._rings:
                    self._serve(ring)

    # --- control ---

    def _tell(self, job: Callable[[], None]) -> None:
        done = threading.Event()
        self._jobs += [job, done.set]
        os.eventfd_write(self._wake, 1)
        done.wait(5)

    def _do_jobs(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._jobs:
            self._jobs.pop(0)()

    def _end(self) -> None:
        self._drop()
        self._listener.close()
        self._is_over = True

    def _release(self, count: int | None) -> None:
        number = len(self._held) if count is None else count
        held, self._held = self._held[:number], self._held[number:]
        for taken in held:
            self._carry_out(taken)

    def _resize(self, size_bytes: int) -> None:
        self.image = self.image[:size_bytes].ljust(size_bytes, b"\0")
        if self._backend is not None:
            self._backend.sendall(_HEADER.pack(2, 1, 0))

    def _drop(self) -> None:
        if self._conn is None:
            return
        for ring in self._rings:
            self._unwatch(ring)
        self._selector.unregister(self._conn)
        self._conn.close()
        self._conn = None
        if self._backend is not None:
            self._backend.close()
        self._reset()

    def _reset(self) -> None:
        self._regions: list[tuple[int, int, memoryview]] = []
        self._rings = [_Ring(regions=self._regions) for _ in range(4)]
        self._negotiated = 0
        self._backend: socket.socket | None = None

    # --- messages ---

    def _accept(self) -> None:
        conn, _ = self._listener.accept()
        self._drop()
        self.num_sessions += 1
        self._conn = conn
        self._selector.register(conn, selectors.EVENT_READ, self._read_message)

    def _read_message(self) -> None:
        conn = self._conn
        if conn is None:
            return  # the connection ended in the same round of events
        try:
            data, fds, _, _ = socket.recv_fds(conn, _HEADER.size, 8)
            request, flags, size = _HEADER.unpack(data) if len(data) == _HEADER.size else (0, 0, 0)
            payload = conn.recv(size, socket.MSG_WAITALL) if size else b""
            if not request:
                self._drop()
                return
            self.requests.append(request)
            reply = self._obey(request, payload, list(fds))
            if reply is None and flags & 8:
                reply = struct.pack("=Q", 0)
            if reply is not None:
                whole = self.garble(request, _HEADER.pack(request, 5, len(reply)) + reply)
                conn.sendall(whole or b"")
        except OSError:
            self._drop()

    def _obey(self, request: int, payload: bytes, fds: list[int]) -> bytes | None:
        numbers = {1: self._features, 15: self._protocol, 17: 4, 36: 32}
        if request in numbers:
            return struct.pack("=Q", numbers[request])
        if request == 24:
            return payload[:12] + self._config()[: len(payload) - 12]
        if request == 2:
            self._negotiated = struct.unpack("=Q", payload)[0]
        elif request == 5:
            self._regions.clear()
            for i, fd in enumerate(fds):
                self._map(payload[8 + 32 * i : 40 + 32 * i], fd)
        elif request == 37:
            self._map(payload[8:], fds[0])
        elif request == 21:
            self._backend = socket.socket(fileno=fds[0])
        elif request in (8, 9, 10, 11, 12, 13, 18):
            return self._set_ring(request, payload, fds)
        return None

    def _map(self, region: bytes, fd: int) -> None:
        start, length, _, offset = struct.unpack("=QQQQ", region)
        mapped = mmap.mmap(fd, length + offset, mmap.MAP_SHARED)
        os.close(fd)
        self._regions.append((start, length, memoryview(mapped)[offset:]))

    def _config(self) -> bytes:
        config = struct.pack("=QII4xI", len(self.image) // _SECTOR, self._size_max, 126, self._block_size)
        config += bytes(10) + struct.pack("=HIII", 4, 2048, 1, 1)
        return config.ljust(256, b"\0")

    def _set_ring(self, request: int, payload: bytes, fds: list[int]) -> bytes | None:
        index = struct.unpack_from("=I", payload)[0] & 0xFF
        ring = self._rings[index]
        if request == 8:
            ring.size = struct.unpack("=II", payload)[1]
        elif request == 9:
            _, _, ring.desc, ring.used, ring.avail, _ = struct.unpack("=IIQQQQ", payload)
        elif request == 10:
            ring.seen = ring.done = struct.unpack("=II", payload)[1]
        elif request == 11:
            self._unwatch(ring)
            return struct.pack("=II", index, ring.seen)
        elif request == 12:
            ring.kick = fds[0]
            self._selector.register(ring.kick, selectors.EVENT_READ, lambda: self._kicked(ring))
        elif request == 13:
            ring.call = fds[0]
        elif request == 18:
            ring.is_enabled = True
        return None

    def _unwatch(self, ring: _Ring) -> None:
        if ring.kick >= 0:
            self._selector.unregister(ring.kick)
            os.close(ring.kick)
            ring.kick = -1

    # --- rings ---

    def _kicked(self, ring: _Ring) -> None:
        if ring.kick < 0:
            return  # the session ended in the same round of events
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(ring.kick)
        self.num_kicks += 1
        self._serve(ring)

    def _serve(self, ring: _Ring) -> None:
        if ring.kick < 0 or not ring.is_enabled:
            return
        if self._is_polling:
            _INDEX.pack_into(ring.at(ring.used, 2), 0, 1)  # no notify
        ring_now = ring.at(ring.avail, 4 + 2 * ring.size)
        while ring.seen != _INDEX.unpack_from(ring_now, 2)[0]:
            head = _INDEX.unpack_from(ring_now, 4 + ring.seen % ring.size * 2)[0]
            ring.seen = (ring.seen + 1) & 0xFFFF
            if not self._is_polling:
                _INDEX.pack_into(ring.at(ring.used + 4 + 8 * ring.size, 2), 0, ring.seen)
            self._take(ring, head)

    def _take(self, ring: _Ring, head: int) -> None:
        chain = self._chain(ring, head)
        kind, _, sector = struct.unpack("=IIQ", chain[0][0])
        taken = _Taken(ring, head, kind, sector, [view for view, _ in chain[1:-1]], chain[-1][0])
        self.num_requests += 1
        if self.num_requests == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_holding and kind == 0:
            self._held.append(taken)
        else:
            self._carry_out(taken)

    def _chain(self, ring: _Ring, head: int) -> list[tuple[memoryview, int]]:
        table, at, found = ring.at(ring.desc, 16 * ring.size), head, []
        while True:
            address, length, flags, following = _DESCRIPTOR.unpack_from(table, at * 16)
            if flags & 4:
                table, at = ring.at(address, length), 0
                continue
            found.append((ring.at(address, length), flags))
            if not flags & 1:
                return found
            at = following

    def _carry_out(self, taken: _Taken) -> None:
        if self.num_to_fail:
            self.num_to_fail -= 1
            taken.status[0] = 1
        else:
            taken.status[0] = 0 if self._move(taken) else 1
        self._finish(taken)

    def _move(self, taken: _Taken) -> bool:
        cursor = taken.sector * _SECTOR
        if taken.kind == 11:
            start, count, _ = struct.unpack("=QII", taken.pieces[0])
            self.image[start * _SECTOR : (start + count) * _SECTOR] = bytes(count * _SECTOR)
            return True
        if cursor + sum(map(len, taken.pieces)) > len(self.image):
            return False
        for piece in taken.pieces:
            if taken.kind == 0:
                piece[:] = self.image[cursor : cursor + len(piece)]
            else:
                self.image[cursor : cursor + len(piece)] = piece
            cursor += len(piece)
        if taken.kind == 0 and self.num_to_corrupt:
            self.num_to_corrupt -= 1
            taken.pieces[0][7] ^= 0x5A
        return True

    def _finish(self, taken: _Taken) -> None:
        lie, self.lie = self.lie, None
        ring = taken.ring
        self._put_used(ring, ring.size - 1 if lie == "unknown" else taken.head)
        if lie == "twice":
            self._put_used(ring, taken.head)
        if lie == "jump":
            ring.done = (ring.done + 1000) & 0xFFFF
            _INDEX.pack_into(ring.at(ring.used + 2, 2), 0, ring.done)
        if lie == "noise":
            length = 4 + 8 * ring.size
            ring.at(ring.used, length)[:] = self._noise.randbytes(length)
        with contextlib.suppress(OSError):
            os.eventfd_write(ring.call, 1)

    def _put_used(self, ring: _Ring, head: int) -> None:
        place = ring.at(ring.used + 4 + ring.done % ring.size * 8, 8)
        _USED.pack_into(place, 0, head, 0)
        ring.done = (ring.done + 1) & 0xFFFF
        _INDEX.pack_into(ring.at(ring.used + 2, 2), 0, ring.done)


def main() -> None:
    parser = argparse.ArgumentParser(description="a vhost-user-blk back end for fault tests")
    parser.add_argument("path")
    parser.add_argument("size", type=int)
    parser.add_argument("--die-after", type=int, default=0)
    args = parser.parse_args()
    target = FakeVhostTarget(args.path, args.size)
    target.die_after = args.die_after
    target.run()


if __name__ == "__main__":
    main()
