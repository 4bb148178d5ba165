"""Memfd regions: the arena's memory, made once, mapped by whoever may see it.

Theory of operation. A region is one anonymous file (memfd), allocated in full when it is made, so that a
machine without room says so at start-up and not with a SIGBUS later. It is sealed against shrinking and
growing (a peer that holds a descriptor cannot pull the pages from under us) and against more seals. It is
*not* sealed against writing: a vhost-user backend must map it writable. A host that may only read gets a
descriptor re-opened read-only; together with mode 0600 that is a wall between user ids, and a guard against
bugs within one.

Huge pages reserved by the machine are taken when there are any; where there are none, `huge_pages_refused`
says why in words, and the region is put together from transparent ones as far as they can be had
(`collapse_refused`): as good for copies and kernel drivers, but not for a driver that needs the file system's
page size to be huge (SPDK on PCIe).

Leaves to others: who may map what (`dpurt.fabric.access`), how descriptors travel (`dpurt.fabric.shm`), slots
(staging)."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
from pathlib import Path
from typing import Literal

from dpurt.errors import ConfigError
from dpurt.fabric.huge_pages import collapse

__all__ = ["MemfdRegion", "map_readonly", "map_writable", "next_landing_id"]

next_landing_id = itertools.count(1).__next__
"""Ids of this process's landing regions: never the same twice, so that a push meant for a link that was lost cannot land
in a region of the link after it."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemfdRegion:
    """One memfd, mapped writable. `size` is the asked size rounded up to whole pages; the first byte is
    page-aligned.

    Raises ConfigError when the memory cannot be had (or huge pages, if `huge_pages=True` insists on them).
    """

    def __init__(
        self, region_id: int, name: str, size: int, *, huge_pages: bool | Literal["auto"] = "auto"
    ) -> None:
        if size < 1:
            raise ValueError(f"region {name}: size must be >= 1, got {size}")
        self.region_id = region_id
        self.name = name
        self.fd = -1
        self.huge_pages_refused: str | None = None if huge_pages else "not asked for"
        self.collapse_refused: str | None = None if huge_pages else "not asked for"
        self._map: mmap.mmap | None = None
        if huge_pages:
            self._try_huge(size)
        if self._map is None and huge_pages is True:
            raise ConfigError(f"region {name}", f"huge pages required, but {self.huge_pages_refused}")
        if self._map is None:
            _check_available(name, size)
            self._take_pages(size, mmap.PAGESIZE, 0)
        assert self._map is not None
        self._view: memoryview | None = memoryview(self._map)

    @property
    def has_huge_pages(self) -> bool:
        return self.page_bytes > mmap.PAGESIZE

    @property
    def pages(self) -> str:
        """What it is made of, in words."""
        if self.has_huge_pages:
            return "huge pages"
        if self.collapse_refused is None:
            return "transparent huge pages, and small ones at the end"
        return f"small pages ({self.collapse_refused})"

    @property
    def is_closed(self) -> bool:
        return self._view is None

    @property
    def view(self) -> memoryview:
        """The whole region, writable, format ``"B"``. Slices of it stay valid after `close`, which then frees
        later."""
        if self._view is None:
            raise ValueError(f"region {self.name} is closed")
        return self._view

    @property
    def address(self) -> int:
        """Where the region starts in this process, for drivers that take numbers (verbs, vhost-user)."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def open_readonly(self) -> int:
        """A new descriptor (the caller's to close) through which the region can be mapped for reading
        only."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> bool:
        """Give the memory back. Idempotent. False: somebody still holds a view; the memory goes with the last
        one."""
        if self._view is None or self._map is None:
            return True
        os.close(self.fd)
        self.fd = -1
        mapping, view = self._map, self._view
        self._map = self._view = None
        try:
            view.release()
            mapping.close()
        except BufferError:
            return False
        return True

    def _try_huge(self, size: int) -> None:
        try:
            page_bytes = _huge_page_bytes()
            self._take_pages(size, page_bytes, getattr(os, "MFD_HUGETLB", 0x4))
        except (OSError, ConfigError, LookupError) as error:
            self.huge_pages_refused = f"{_huge_page_supply()}: {error}"

    def _take_pages(self, size: int, page_bytes: int, flags: int) -> None:
        self.page_bytes = page_bytes
        self.size = -(-size // page_bytes) * page_bytes
        self.fd = os.memfd_create(f"dpurt:{self.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.size)
            if self.collapse_refused is None and not self.has_huge_pages:
                self.collapse_refused = collapse(self.fd, self.size)
            self._map = _allocate(self.fd, self.size)
        except OSError as error:
            os.close(self.fd)
            self.fd = -1
            raise ConfigError(f"region {self.name}", f"cannot allocate {self.size} bytes: {error}") from error


def _check_available(name: str, size: int) -> None:
    """Asked for too much, the kernel would not refuse: it would kill somebody."""
    available = int(_meminfo("MemAvailable").split()[0]) * 1024
    if size > available:
        raise ConfigError(f"region {name}", f"cannot allocate {size} bytes: {available} are available")


def _allocate(fd: int, size: int) -> mmap.mmap:
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _meminfo(field: str) -> str:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    raise LookupError(f"the kernel reports no {field}")


def _huge_page_bytes() -> int:
    return int(_meminfo("Hugepagesize").split()[0]) * 1024


def _huge_page_supply() -> str:
    try:
        return f"{_meminfo('HugePages_Free')} free huge pages of {_meminfo('Hugepagesize')}"
    except LookupError as error:
        return str(error)


def map_readonly(fd: int, size: int) -> mmap.mmap:
    """Map somebody's region for reading. Its pages exist already, so none is allocated, only found."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)


def map_writable(fd: int, size: int) -> mmap.mmap:
    """Map somebody's region for writing."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
