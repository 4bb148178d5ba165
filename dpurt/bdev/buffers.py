"""Addresses and page-aligned scratch memory, for backends that hand memory to a device.

Leaves the real buffers, slices of the staging arena, to their owner; this is for metadata and tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

__all__ = ["address_of", "aligned_buffer", "total_bytes"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_Byte = ctypes.c_char


def address_of(view: memoryview) -> int:
    """Address of the first byte of a non-empty contiguous view, writable or not. Valid while the view is."""
    if not view.readonly:
        return ctypes.addressof(_Byte.from_buffer(view))
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def aligned_buffer(length: int, *, is_present: bool = False) -> memoryview:
    """Zeroed, page-aligned, private memory; freed with its last view. `is_present`: taken from the machine now, in huge
    pages where the kernel has them, and not page by page as it is first written.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_present:
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):  # an older kernel: it comes when it is written
                memory.madvise(advice)
    return memoryview(memory)


def total_bytes(buffers: Sequence[memoryview]) -> int:
    return sum(map(len, buffers))
