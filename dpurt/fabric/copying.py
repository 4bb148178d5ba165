"""memcpy for fabrics whose peer's memory is mapped here, without stopping the event loop for long.

Measured: a memoryview slice assignment, `numpy.copyto` and `ctypes.memmove` all run at memcpy speed from 64
KiB up, and the slice assignment is the cheapest below. It holds the GIL, though, and any of them holds the
loop. So small batches are copied in place, and large ones by numpy (which drops the GIL) in a worker thread,
a chunk at a time, so that a deadline or cancellation waits for one chunk at most and never returns while a
byte is still moving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import trio

__all__ = ["INLINE_BYTES", "copy_all"]

INLINE_BYTES = 2 << 20
_HOLD_BYTES = 1 << 20  # copied by slices, with the GIL held, before one copy by numpy lets others have it
_CHUNK_BYTES = 16 << 20

Pair = tuple[memoryview, memoryview]


async def copy_all(pairs: Sequence[Pair]) -> None:
    """Copy each (source, target), of equal lengths. When this returns or raises, no copying is going on any
    more."""
    if sum(len(source) for source, _ in pairs) <= INLINE_BYTES:
        await trio.lowlevel.checkpoint_if_cancelled()
        for source, target in pairs:
            target[:] = source
        await trio.lowlevel.cancel_shielded_checkpoint()
    else:
        await trio.to_thread.run_sync(_copy_in_thread, pairs)


def _copy_in_thread(pairs: Sequence[Pair]) -> None:
    held = unchecked = 0
    for source, target in pairs:
        held += len(source)
        if held < _HOLD_BYTES:
            target[:] = source
            continue
        for start in range(0, len(source), _CHUNK_BYTES):
            stop = start + _CHUNK_BYTES
            np.copyto(
                np.frombuffer(target[start:stop], np.uint8), np.frombuffer(source[start:stop], np.uint8)
            )
            unchecked += held
            held = 0
            if unchecked >= _CHUNK_BYTES:
                trio.from_thread.check_cancelled()
                unchecked = 0
