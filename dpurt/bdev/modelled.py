"""A bdev with the timing of a `DeviceProfile` and the bytes of memory, on Trio's clock: virtual under a
MockClock.

Each operation sleeps until the time the `DeviceModel` gives, then copies. It sleeps in a system task, so an
abandoned operation still lands late, as on a real device.
"""

from __future__ import annotations

import trio

from dpurt.bdev import BdevInfo
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.memory import copy_operation
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.core.device_model import DeviceModel, DeviceProfile

__all__ = ["ModelledBdev"]


class ModelledBdev(QueuedBdev):
    """See `Bdev`."""

    def __init__(
        self,
        size_bytes: int = 0,
        *,
        profile: DeviceProfile,
        seed: int = 0,
        name: str | None = None,
        block_size: int = 4096,
        image: memoryview | None = None,
    ) -> None:
        self.image = aligned_buffer(size_bytes) if image is None else image
        self.info = BdevInfo(
            name=name or profile.name,
            kind="modelled",
            size_bytes=len(self.image),
            block_size=block_size,
            buffer_align=block_size,
            max_transfer_bytes=1 << 20,
            optimal_io_bytes=1 << 17,
            queue_depth=profile.queue_depth,
            detail={"profile": profile.name, "seed": str(seed)},
        )
        self._model = DeviceModel(profile, seed)
        self._queue = OperationQueue(self.info, self._launch)

    def become(self, profile: DeviceProfile) -> None:
        """From the next operation on, be as fast or as slow as this; the queue stays as deep as it is."""
        self._model.profile = profile

    def _launch(self, operation: Operation) -> None:
        length = 0 if operation.kind == "deallocate" else operation.length
        done = self._model.completion(trio.current_time(), length, is_write=operation.kind != "read")
        trio.lowlevel.spawn_system_task(self._complete, operation, done)

    async def _complete(self, operation: Operation, done: float) -> None:
        await trio.sleep_until(done)
        copy_operation(self.image, operation)
        self._queue.answer(operation)

    async def aclose(self) -> None:
        self._queue.close()
        await self.drain()
