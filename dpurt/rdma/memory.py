"""Memory the device may touch: registrations, in chunks where the device asks for it, and type-2 windows on them.

A registration pins its pages and costs what pinning costs, so it is made once for what lives long. `lkey` is for our own
requests; an `rkey` is a capability for the peer: it is never printed. A *window* opens a range of a registration to the peer
of one queue pair only, and closing it ends that at once, whatever the peer does: after `close` no request of the peer is
carried out any more. Windows are not reused: a device may refuse a key it has seen, and making one is cheap. Soft-RoCE in
Linux 6.1 enforces a window's key, queue pair, direction and end, but of its bounds only those of the registration below.

Leaves to others: who may have which key; keeping the memory alive while it is registered (`Registration` holds the view).
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np

from dpurt.errors import RdmaLimit
from dpurt.rdma.binding import verbs
from dpurt.rdma.device import RdmaDevice, memlock_bytes

if TYPE_CHECKING:
    from dpurt.rdma.endpoint import Adapter

__all__ = ["Access", "Chunk", "DmaBufRegistration", "Registration", "Segment", "Window", "address_of"]

_PAGE = 4096
_MW_TYPE_2 = 2
_Byte = ctypes.c_char


def address_of(view: memoryview) -> int:
    """Address of the first byte of a non-empty contiguous view, writable or not. Valid while the view is."""
    if not view.readonly:
        return ctypes.addressof(_Byte.from_buffer(view))  # an eighth of what numpy takes
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


class Access(IntFlag):
    """What may be done with registered memory (the numbers are those of verbs). Our own reading is always allowed."""

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    MW_BIND = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """One memory region of the device."""

    address: int
    length: int
    handle: Any = field(repr=False)

    @property
    def lkey(self) -> int:
        key: int = self.handle.lkey
        return key

    @property
    def rkey(self) -> int:
        key: int = self.handle.rkey
        return key


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes inside one chunk."""

    address: int
    length: int
    chunk: Chunk


class Registration:
    """[address, address + length) of this process, registered. Made by `Adapter.register`."""

    def __init__(
        self, adapter: Adapter, address: int, length: int, access: Access, owner: object = None
    ) -> None:
        self.address = address
        self.length = length
        self._owner = owner  # keeps the memory alive
        self._adapter = adapter
        self._step = _chunk_bytes(adapter.max_chunk_bytes)
        self._chunks: list[Chunk] = []
        try:
            for start in range(0, length, self._step):
                size = min(self._step, length - start)
                self._chunks.append(
                    Chunk(address + start, size, adapter.make_mr(address + start, size, access))
                )
        except BaseException:
            self.close()
            raise

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def holds(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def segments(self, address: int, length: int) -> Iterator[Segment]:
        """The range, cut where the chunks end. It must be inside."""
        if not self.holds(address, length):
            raise ValueError(f"[{address:#x}, +{length}) is outside the registered memory")
        while length:
            chunk = self._chunks[(address - self.address) // self._step]
            size = min(length, chunk.address + chunk.length - address)
            yield Segment(address, size, chunk)
            address, length = address + size, length - size

    def close(self) -> None:
        """Give the registration back. Idempotent. Windows on it and requests that use it must have ended."""
        while self._chunks:
            self._adapter.forget_mr(self._chunks.pop().handle)
        self._owner = None


class DmaBufRegistration:
    """`length` bytes at `offset` of a dma-buf, for a peer to write. Untried on a device that can do it."""

    def __init__(self, adapter: Adapter, fd: int, offset: int, length: int, access: Access) -> None:
        self.address = offset  # what the peer calls its first byte
        self.length = length
        self._adapter = adapter
        self._handle = adapter.make_dmabuf_mr(fd, offset, length, access)

    @property
    def rkey(self) -> int:
        key: int = self._handle.rkey
        return key

    def close(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._adapter.forget_mr(self._handle)
            self._handle = None


class Window:
    """A type-2 memory window; unbound until a queue pair has carried out a `Bind` of it, which also sets `rkey`."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.rkey = 0
        self.handle = adapter.make_window()

    def __repr__(self) -> str:
        return "Window()"

    def close(self) -> None:
        """Take the peer's access away, now. Idempotent."""
        if self.handle is not None:
            self._adapter.forget_window(self.handle)
            self.handle = None


def _chunk_bytes(most: int) -> int:
    """Whole pages: then no page of page-aligned memory is pinned twice."""
    return max(_PAGE, most // _PAGE * _PAGE)


def refused(device: RdmaDevice, what: str, error: Any) -> RdmaLimit:
    """Which limit a failed registration has probably met, and what to do about it."""
    number = getattr(error, "error_code", 0)
    problem = f"{what} refused: {errno.errorcode.get(number, error)}"
    memlock = memlock_bytes()
    if number in (errno.ENOMEM, errno.EAGAIN, errno.EPERM) and memlock is not None:
        return RdmaLimit(
            device.name,
            f"{problem}; this process may lock {memlock} bytes",
            "raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
        )
    limits = device.limits
    return RdmaLimit(
        device.name,
        f"{problem}; the device has room for {limits.max_mr} regions of {limits.max_mr_bytes} bytes, "
        f"{limits.max_mw} windows, {limits.max_qp} queue pairs",
        "make the staging arena smaller or connect fewer hosts",
    )


def allocate_mr(pd: Any, device: RdmaDevice, address: int, length: int, access: Access) -> Any:
    v = verbs()
    try:
        return v.MR(pd, length, int(access), address)
    except v.PyverbsError as error:
        raise refused(device, f"registering {length} bytes", error) from error


def allocate_dmabuf_mr(pd: Any, device: RdmaDevice, fd: int, offset: int, length: int, access: Access) -> Any:
    v = verbs()
    try:
        return v.DmaBufMR(pd, length, int(access), fd, offset)
    except v.PyverbsError as error:
        number = getattr(error, "error_code", 0)
        raise RdmaLimit(
            device.name,
            f"registering {length} bytes of device memory (dma-buf) refused: {errno.errorcode.get(number, error)}",
            "take a NIC and a kernel driver that can pin dma-bufs, or a landing in host memory",
        ) from error


def allocate_window(pd: Any, device: RdmaDevice) -> Any:
    v = verbs()
    try:
        return v.MW(pd, _MW_TYPE_2)
    except v.PyverbsError as error:
        raise refused(device, "a memory window", error) from error
