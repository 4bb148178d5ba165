"""memcpy for fabrics whose peer's memory is mapped here, without stopping the event loop for long.

Measured: a memoryview slice assignment, `numpy.copyto` and `ctypes.memmove` all run at memcpy speed from 64 KiB up,
and the slice assignment is the cheapest below. A worker thread costs a hop and a cold cache: 0.63-0.92x of a plain
memcpy, against 0.8-1.0x for copying in place with a turn of the loop every 4 MiB, which holds it (and the GIL) for
0.4 ms. So that is what we do. Cancellation and deadlines are seen at the turns: when this returns or raises, no byte
is moving any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

__all__ = ["copy_all"]

_TURN_BYTES = 4 << 20


async def copy_all(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Copy each (source, target), of equal lengths, in order."""
    await trio.lowlevel.checkpoint_if_cancelled()
    copied = 0
    for source, target in pairs:
        for start in range(0, len(source), _TURN_BYTES):
            part = source[start : start + _TURN_BYTES]
            if copied + len(part) > _TURN_BYTES:
                await trio.lowlevel.checkpoint()
                copied = 0
            target[start : start + len(part)] = part
            copied += len(part)
    await trio.lowlevel.cancel_shielded_checkpoint()
