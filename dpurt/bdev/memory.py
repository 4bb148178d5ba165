"""A bdev in memory: the fake the others are measured against, as strict about alignment as a real device.

Operations complete at once, in order. Its memory is taken when it is opened, so that no later write finds the machine
without, or pays for a first touch. `image` is the device's content; it outlives `aclose`, so a second
device over the same image is a restart. Faults are injected from outside by `dpurt.testing.faulty_bdev.FaultyBdev`.
"""

from __future__ import annotations

from dpurt.bdev import BdevInfo
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev

__all__ = ["MemoryBdev", "copy_operation"]


def copy_operation(image: memoryview, operation: Operation) -> None:
    """Carry out a read or write on an image of the device. Deallocated bytes read as zero; a flush has no
    effect.
    """
    cursor = operation.offset
    for buffer in operation.buffers:
        piece = image[cursor : cursor + len(buffer)]
        if operation.kind == "read":
            buffer[:] = piece
        else:
            piece[:] = buffer
        cursor += len(buffer)
    if operation.kind == "deallocate":
        image[operation.offset : operation.offset + operation.length] = bytes(operation.length)


class MemoryBdev(QueuedBdev):
    """See `Bdev`. `image` may be handed in to reopen an old device; its length is the size."""

    def __init__(
        self,
        size_bytes: int = 0,
        *,
        name: str = "memory",
        block_size: int = 4096,
        queue_depth: int = 64,
        image: memoryview | None = None,
    ) -> None:
        self.image = aligned_buffer(size_bytes, is_present=True) if image is None else image
        self.info = BdevInfo(
            name=name,
            kind="memory",
            size_bytes=len(self.image),
            block_size=block_size,
            buffer_align=block_size,
            max_transfer_bytes=1 << 20,
            optimal_io_bytes=block_size,
            queue_depth=queue_depth,
        )
        self._queue = OperationQueue(self.info, self._launch)

    def _launch(self, operation: Operation) -> None:
        copy_operation(self.image, operation)
        self._queue.answer(operation)

    async def aclose(self) -> None:
        self._queue.close()
        await self.drain()
