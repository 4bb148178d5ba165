"""Memory of the engine's, which hooks name by address, as buffers. Nothing is copied and nothing kept alive."""

from __future__ import annotations

import ctypes


def memory_at(address: int, size: int) -> memoryview:
    """Writable bytes at an address of this process, which the caller must keep alive."""
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
