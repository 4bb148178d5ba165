"""A full memory fence, which Python does not have, from libatomic.

A ring shared with a device needs its stores and loads in order (`dpurt.wire.virtqueue` lists where). On x86 only a
later load may overtake an earlier store, and that case is one of ours; on Arm (BlueField) any two may change places.
The interpreter's own locks order our threads among each other and promise nothing to another process, so the order
is asked for: C11's ``atomic_thread_fence(memory_order_seq_cst)``, ``dmb ish`` on Arm, ``mfence`` or a locked
instruction on x86. It is a real function in libatomic, and a call the compiler of the interpreter cannot see through,
so it also keeps the compiler from moving memory accesses over it. Measured: 0.14 us a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["load_fence"]

_LIBRARY = "libatomic.so.1"
_SEQ_CST = 5


def load_fence() -> Callable[[], None]:
    """The fence. Raises OSError saying what to install where there is none."""
    try:
        # PyDLL keeps the interpreter's lock: giving it up and taking it again costs more than the fence.
        fence = ctypes.PyDLL(_LIBRARY).atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise OSError(
            f"no memory fence ({error}): install libatomic (Debian package libatomic1, Fedora libatomic)"
        ) from error
    fence.restype = None
    return functools.partial(fence, _SEQ_CST)
