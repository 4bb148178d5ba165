"""A bdev on a file or block device, with O_DIRECT, so the device moves bytes to and from the arena without a
copy.

Theory of operation. Each operation takes one slot of a `linux_aio.AioContext` and is sent in pieces of at
most `max_transfer_bytes`, one after the other; a short transfer goes on where it stopped. One system task
waits for completions. Its first act is to give the device what waits, in the places of as many as have ended; then it asks
which these are and answers them: an idle device costs more than our order. For that there are twice as many slots as the
device may have operations at once.

A regular file is allocated to its full size when opened, so that the disk cannot fill up under us and `du`
tells the truth; hence `deallocate` does nothing there, and discards on a block device. Where there is no room
for it, the file is as it was before. No file is ever made in /dev: a device that is missing must not become a
file in memory. The file is locked:
two nodes on one file would destroy each other's blocks; a block device in use by a file system is refused by
the kernel (O_EXCL). Where O_DIRECT is refused the file is opened buffered, `info.detail["buffered"]` says
why, and requests are submitted from a thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from dpurt.bdev import BdevInfo
from dpurt.bdev.linux_aio import FDSYNC, PREADV, PWRITEV, AioContext
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.errors import BdevError

__all__ = ["FileBdev"]

_BLOCK_SIZE = 4096  # every logical block size in use divides it
_MAX_IOVECS = 64
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_OPCODES = {"read": PREADV, "write": PWRITEV, "flush": FDSYNC}


@dataclass(frozen=True, slots=True)
class _OpenedFile:
    fd: int
    size_bytes: int
    is_block_device: bool
    buffered_reason: str | None


class FileBdev(QueuedBdev):
    """See `Bdev`. Make one with `await FileBdev.open(...)`."""

    def __init__(self, info: BdevInfo, opened: _OpenedFile) -> None:
        self.info = info
        self._fd = opened.fd
        self._is_block_device = opened.is_block_device
        self._submits_inline = opened.buffered_reason is None
        self._aio = AioContext(2 * info.queue_depth, _MAX_IOVECS)
        self._queue = OperationQueue(info, self._launch)
        self._free_slots = list(range(2 * info.queue_depth))
        self._in_slot: dict[int, Operation] = {}
        self._num_long = 0  # operations of several pieces: the end of one leaves no place
        self._reaping = trio.CancelScope()
        self._reaped = trio.Event()
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        size_bytes: int | None = None,
        name: str | None = None,
        queue_depth: int = 64,
        max_transfer_bytes: int = 4 << 20,
    ) -> FileBdev:
        """Open or create `path`. `size_bytes` is needed for a new file and extends a smaller one. Raises
        BdevError.
        """
        path = Path(path)
        label = name or path.name
        try:
            opened = await trio.to_thread.run_sync(_open_file, path, size_bytes)
        except OSError as error:
            raise BdevError(label, "open", 0, 0, _status(error.errno), f"{path}: {error}") from error
        detail = {"path": str(path), "io": "linux-aio"}
        if opened.buffered_reason is not None:
            detail["buffered"] = opened.buffered_reason
        info = BdevInfo(
            name=label,
            kind="file",
            size_bytes=opened.size_bytes,
            block_size=_BLOCK_SIZE,
            buffer_align=_BLOCK_SIZE,
            max_transfer_bytes=max_transfer_bytes,
            optimal_io_bytes=1 << 20,
            queue_depth=queue_depth,
            detail=detail,
        )
        return cls._start(info, opened)

    @classmethod
    def _start(cls, info: BdevInfo, opened: _OpenedFile) -> FileBdev:
        try:
            bdev = cls(info, opened)
        except OSError as error:
            os.close(opened.fd)
            raise BdevError(info.name, "open", 0, 0, "io_error", str(error)) from error
        trio.lowlevel.spawn_system_task(bdev._reap)
        return bdev

    async def aclose(self) -> None:
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        self._queue.close()
        with trio.CancelScope(
            shield=True
        ):  # closing under a device that still writes our memory would be worse
            await self.drain()
            self._reaping.cancel()
            await self._reaped.wait()
        self._aio.close()
        os.close(self._fd)

    # --- inside ---

    def _launch(self, operation: Operation) -> None:
        if operation.kind == "deallocate":
            trio.lowlevel.spawn_system_task(self._discard, operation)
            return
        slot = self._free_slots.pop()
        self._in_slot[slot] = operation
        self._num_long += self._is_long(operation)
        self._send(slot, operation)

    def _is_long(self, operation: Operation) -> bool:
        return operation.length > self.info.max_transfer_bytes or len(operation.buffers) > _MAX_IOVECS

    def _send(self, slot: int, operation: Operation) -> None:
        pieces = operation.pieces
        if operation.length - operation.moved > self.info.max_transfer_bytes or len(pieces) > _MAX_IOVECS:
            pieces = _first(pieces, self.info.max_transfer_bytes)
        self._aio.prepare(
            slot, _OPCODES[operation.kind], self._fd, operation.offset + operation.moved, pieces
        )
        if not self._submits_inline:
            trio.lowlevel.spawn_system_task(self._submit_in_thread, slot)
            return
        try:
            self._aio.submit(slot)
        except OSError as error:
            self._end(slot, error.errno or errno.EIO)

    async def _submit_in_thread(self, slot: int) -> None:
        try:
            await trio.to_thread.run_sync(self._aio.submit, slot)
        except OSError as error:
            self._end(slot, error.errno or errno.EIO)

    async def _reap(self) -> None:
        with self._reaping:
            while True:
                await trio.lowlevel.wait_readable(self._aio.event_fd)
                ended = self._aio.count_ended()
                if not self._num_long:
                    self._queue.launch_ahead(min(ended, len(self._free_slots)))
                for slot, result in self._aio.reap():
                    self._progress(slot, result)
        self._reaped.set()

    def _progress(self, slot: int, result: int) -> None:
        operation = self._in_slot[slot]
        if result < 0:
            self._end(slot, -result)
            return
        operation.moved += result
        if operation.moved == operation.length:
            self._end(slot, 0)
        elif result == 0 or result % self.info.block_size:
            self._end(slot, errno.ENODATA)
        else:
            operation.pieces = _rest(operation.pieces, result)
            self._send(slot, operation)

    def _end(self, slot: int, code: int) -> None:
        operation = self._in_slot.pop(slot)
        self._free_slots.append(slot)
        self._num_long -= self._is_long(operation)
        error = self._queue.failure(operation, _status(code), os.strerror(code)) if code else None
        self._queue.answer(operation, error)

    async def _discard(self, operation: Operation) -> None:
        error = None
        if self._is_block_device:
            try:
                await trio.to_thread.run_sync(_punch_hole, self._fd, operation.offset, operation.length)
            except OSError as problem:
                error = self._queue.failure(operation, _status(problem.errno), str(problem))
        self._queue.answer(operation, error)


def _first(pieces: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """The first pieces, at most `limit` bytes and `_MAX_IOVECS` of them."""
    chosen = []
    for address, length in pieces[:_MAX_IOVECS]:
        chosen.append((address, min(length, limit)))
        limit -= chosen[-1][1]
        if not limit:
            break
    return chosen


def _rest(pieces: list[tuple[int, int]], done: int) -> list[tuple[int, int]]:
    """The pieces without their first `done` bytes."""
    for i, (address, length) in enumerate(pieces):
        if done < length:
            return [(address + done, length - done), *pieces[i + 1 :]]
        done -= length
    return []


def _status(code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "no_space"
    return "short" if code == errno.ENODATA else "io_error"


def _punch_hole(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate64(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:  # a device without TRIM
            raise OSError(code, os.strerror(code))


def _open_file(path: Path, size_bytes: int | None) -> _OpenedFile:
    is_new = not path.exists()
    is_block_device = not is_new and stat.S_ISBLK(path.stat().st_mode)
    if not is_block_device and _is_in_dev(path):
        raise OSError(errno.ENODEV, "is no block device, and dpurt makes no files in /dev")
    flags = os.O_RDWR | (os.O_EXCL if is_block_device else 0)
    if size_bytes is not None and not is_block_device:
        flags |= os.O_CREAT
    fd, reason = _open_direct(path, flags)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_block_device:
            size = _device_size(fd, size_bytes)
        else:
            size = _allocate(fd, path, size_bytes, is_new)
    except BlockingIOError as error:
        os.close(fd)
        raise OSError(error.errno, "another process uses this file") from error
    except OSError:
        os.close(fd)
        raise
    return _OpenedFile(fd, size, is_block_device, reason)


def _open_direct(path: Path, flags: int) -> tuple[int, str | None]:
    """The file descriptor, and why it is buffered if it is."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), "the file system refuses O_DIRECT"


def _is_in_dev(path: Path) -> bool:
    real = path.resolve()
    return real.is_relative_to("/dev") and not real.is_relative_to("/dev/shm")


def _device_size(fd: int, wanted: int | None) -> int:
    size = os.lseek(fd, 0, os.SEEK_END)
    if wanted is not None and wanted > size:
        raise OSError(errno.ENOSPC, f"the device has {size} bytes, {wanted} were asked for")
    return (wanted or size) // _BLOCK_SIZE * _BLOCK_SIZE


def _allocate(fd: int, path: Path, wanted: int | None, is_new: bool) -> int:
    """The usable size of a regular file, after it has got all of its blocks. Undone if it cannot have them."""
    before = os.fstat(fd).st_size
    if 0 < before < _BLOCK_SIZE:
        raise OSError(
            errno.EINVAL, f"holds {before} bytes that are not a store's; remove it if nobody needs it"
        )
    if wanted is None:
        return before // _BLOCK_SIZE * _BLOCK_SIZE
    try:
        os.posix_fallocate(fd, 0, wanted)
    except OSError:
        os.ftruncate(fd, before)
        if is_new:
            path.unlink()
        raise
    return wanted // _BLOCK_SIZE * _BLOCK_SIZE
