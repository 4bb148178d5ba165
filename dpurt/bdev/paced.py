"""A bdev that answers no sooner than a device of a given `DeviceProfile` would: real bytes on a real device, slowed down.

For trials on a machine whose device is faster than the one in question. An operation's time is the longer of the two; its
errors and the rest of the contract are those of the bdev inside, which is closed with this one.
"""

from __future__ import annotations

import trio

from dpurt.bdev import Bdev, BdevInfo, DeviceMemory
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.core.device_model import DeviceModel, DeviceProfile
from dpurt.errors import BdevError

__all__ = ["PacedBdev"]

_FOREVER = float("inf")  # deadlines are kept by our own queue


class PacedBdev(QueuedBdev):
    """See `Bdev`."""

    def __init__(self, inner: Bdev, profile: DeviceProfile, seed: int = 0) -> None:
        self._inner = inner
        self._model = DeviceModel(profile, seed)
        self._queue = OperationQueue(inner.info, self._launch)

    @property
    def info(self) -> BdevInfo:
        return self._inner.info

    def _launch(self, operation: Operation) -> None:
        length = 0 if operation.kind in ("deallocate", "flush") else operation.length
        done = self._model.completion(trio.current_time(), length, is_write=operation.kind != "read")
        trio.lowlevel.spawn_system_task(self._serve, operation, done)

    async def _serve(self, operation: Operation, done: float) -> None:
        error = None
        try:
            await self._carry_out(operation)
        except BdevError as problem:
            error = problem
        await trio.sleep_until(done)
        self._queue.answer(operation, error)

    async def _carry_out(self, operation: Operation) -> None:
        match operation.kind:
            case "read":
                await self._inner.read_into(operation.offset, operation.buffers, _FOREVER)
            case "write":
                await self._inner.write_from(operation.offset, operation.buffers, _FOREVER)
            case "flush":
                await self._inner.flush(_FOREVER)
            case _:
                await self._inner.deallocate(operation.offset, operation.length, _FOREVER)

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        await self._inner.add_memory(memory, deadline)

    async def aclose(self) -> None:
        self._queue.close()
        await self.drain()
        await self._inner.aclose()
