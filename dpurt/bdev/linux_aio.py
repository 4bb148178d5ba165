"""Linux native AIO through ctypes: asynchronous O_DIRECT I/O without a thread per operation.

Why this and not io_uring or threads: the kernel's own copies are made by `io_submit`/`io_getevents`, so no
shared ring and no memory barriers, which Python lacks on Arm; every kernel a DPU runs has it, and container
profiles that forbid io_uring allow it. A thread per operation would add a hand-over each way and a fight for
the GIL at each completion.

With O_DIRECT `io_submit` returns once the request is queued. On a buffered file it does the I/O before it
returns, so there the caller submits from a thread. Completions signal `event_fd`. Each request is submitted
by itself: to collect those of one turn of the loop was tried and lost, since the device idles meanwhile. One
context serves one device; not thread-safe but for `submit`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Sequence

__all__ = ["FDSYNC", "PREADV", "PWRITEV", "AioContext"]

FDSYNC, PREADV, PWRITEV = 3, 7, 8
_NUMBERS = {  # setup, destroy, getevents, submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_IOCB = struct.Struct("<QIiHhIQQqQII")  # data key rw_flags opcode prio fd buf nbytes offset - flags resfd
_IOVEC = struct.Struct("<QQ")
_EVENT = struct.Struct("<Q8xq8x")  # data, iocb, result, second result
_SIGNAL_EVENT_FD = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_NONE, _ONE = ctypes.c_long(0), ctypes.c_long(1)


def _syscall(*args: object) -> int:
    result: int = _libc.syscall(*args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class AioContext:
    """Up to `depth` requests in flight, each in a numbered slot the caller chooses in ``[0, depth)``."""

    def __init__(self, depth: int, max_iovecs: int) -> None:
        machine = platform.machine()
        if machine not in _NUMBERS:
            raise OSError(f"no system call numbers of Linux AIO for {machine}")
        self._setup, self._destroy, self._getevents, self._submit = map(ctypes.c_long, _NUMBERS[machine])
        self._depth = depth
        self._most = ctypes.c_long(depth)
        self._max_iovecs = max_iovecs
        self._context = ctypes.c_ulong(0)
        self._create()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._iocbs = ctypes.create_string_buffer(_IOCB.size * depth)
        base = ctypes.addressof(self._iocbs)
        self._pointers = [ctypes.pointer(ctypes.c_void_p(base + slot * _IOCB.size)) for slot in range(depth)]
        self._iovecs = ctypes.create_string_buffer(_IOVEC.size * depth * max_iovecs)
        self._iovecs_address = ctypes.addressof(self._iovecs)
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._unreaped = (
            0  # requests whose end was signalled; below zero when more were reaped than signalled
        )

    def prepare(
        self, slot: int, opcode: int, fd: int, offset: int, pieces: Sequence[tuple[int, int]]
    ) -> None:
        """Describe a request: (address, length) pieces, at most `max_iovecs`, that stay valid until it is
        reaped.
        """
        start = slot * self._max_iovecs * _IOVEC.size
        for i, piece in enumerate(pieces):
            _IOVEC.pack_into(self._iovecs, start + i * _IOVEC.size, *piece)
        vector = self._iovecs_address + start if pieces else 0
        fields = (slot, 0, 0, opcode, 0, fd, vector, len(pieces), offset, 0, _SIGNAL_EVENT_FD, self.event_fd)
        _IOCB.pack_into(self._iocbs, slot * _IOCB.size, *fields)

    def submit(self, slot: int) -> None:
        """Hand a prepared request to the kernel. Raises OSError, and then the request is not in flight."""
        _syscall(self._submit, self._context, _ONE, self._pointers[slot])

    def count_ended(self) -> int:
        """How many requests are known to have ended, which `reap` will name. Does not block, and takes the signal."""
        with contextlib.suppress(BlockingIOError):
            self._unreaped += os.eventfd_read(self.event_fd)
        return max(0, self._unreaped)

    def reap(self) -> list[tuple[int, int]]:
        """(slot, bytes done or minus errno) of every request that has ended. Does not block."""
        count = _syscall(self._getevents, self._context, _NONE, self._most, self._events, None)
        self._unreaped -= count
        return list(_EVENT.iter_unpack(memoryview(self._events)[: count * _EVENT.size]))

    def close(self) -> None:
        """Waits in the kernel for what is in flight."""
        _syscall(self._destroy, self._context)
        os.close(self.event_fd)

    def _create(self) -> None:
        try:
            _syscall(self._setup, ctypes.c_long(self._depth), ctypes.byref(self._context))
        except BlockingIOError as error:
            raise OSError(
                error.errno, f"no {self._depth} asynchronous requests left: raise sysctl fs.aio-max-nr"
            ) from error
