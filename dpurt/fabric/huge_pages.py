"""Huge pages for a memfd on a machine that has reserved none.

A device moves bytes by physically contiguous runs, so memory scattered in 4 KiB pages costs it a descriptor
per page. Measured on a virtio disk with O_DIRECT reads: 1.1-1.5 GiB/s into scattered pages, 2.2-2.8 into huge
ones; copying is 10-20% faster too.

`MADV_COLLAPSE` (Linux 6.1) makes them regardless of the machine's transparent huge page settings, but for
"deny". It wants a mapping aligned to the huge page, which `mmap.mmap` does not promise, so a temporary one is
made here, and at least one page present in each.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

__all__ = ["collapse"]

_PMD_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def collapse(fd: int, size: int) -> str | None:
    """Back the empty memfd with huge pages, as far as whole ones fit. None, or why not all could be had; what
    is missing is the caller's to allocate.
    """
    try:
        huge = int(_PMD_SIZE.read_text(encoding="ascii"))
        for offset in range(0, size - huge + 1, huge):
            os.posix_fallocate(fd, offset, mmap.PAGESIZE)
        if size >= huge:
            _collapse(fd, size // huge * huge, huge)
    except OSError as error:
        return str(error)
    return None


def _collapse(fd: int, size: int, huge: int) -> None:
    anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _map(None, size + huge, _PROT_NONE, anywhere, -1)
    try:
        aligned = -(-reserved // huge) * huge
        _map(aligned, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        if _libc.madvise(aligned, size, _MADV_COLLAPSE):
            raise _error()
    finally:
        _libc.munmap(reserved, size + huge)


def _map(at: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    address: int = _libc.mmap(at, size, protection, flags, fd, 0)
    if address == _FAILED:
        raise _error()
    return address


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
