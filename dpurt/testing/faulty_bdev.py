"""A bdev that fails on request: slow, erroring, hung with a late completion, silently corrupt, or short.

Faults queue up; each operation of the right kind takes the first that fits. A hung operation is carried out
by `resume()`, so its late write into the caller's buffer really happens, as with a real device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import trio

from dpurt.bdev import Bdev, BdevInfo, DeviceMemory
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.errors import BdevError

__all__ = ["Fault", "FaultyBdev"]

_FOREVER = float("inf")


@dataclass(slots=True, kw_only=True)
class Fault:
    """What happens to the next `count` operations of kind `op` (that cover byte `at`, if given).

    ``delay`` waits `delay_s`; ``error`` fails with `status`, nothing moved; ``hang`` waits for `resume()`;
    ``corrupt`` inverts the byte at `at` (default: the first) with status OK; ``short`` moves the first half,
    then fails with ``"short"``.
    """

    op: Literal["read", "write", "flush", "deallocate"]
    kind: Literal["delay", "error", "hang", "corrupt", "short"]
    count: int = 1
    at: int | None = None
    delay_s: float = 0.0
    status: str = "io_error"

    def fits(self, operation: Operation) -> bool:
        if operation.kind != self.op or self.count < 1:
            return False
        return self.at is None or operation.offset <= self.at < operation.offset + operation.length


class FaultyBdev(QueuedBdev):
    """See `Bdev`. Wraps, and closes, another one."""

    def __init__(self, inner: Bdev) -> None:
        self.inner = inner
        self._faults: list[Fault] = []
        self._resumed = trio.Event()
        self._queue = OperationQueue(inner.info, self._launch)

    def inject(self, fault: Fault) -> None:
        """Queue a fault."""
        self._faults.append(fault)

    def clear(self) -> None:
        """Forget the faults not yet used."""
        self._faults.clear()

    def resume(self) -> None:
        """Let every hung operation complete."""
        self._resumed.set()
        self._resumed = trio.Event()

    @property
    def info(self) -> BdevInfo:
        return self.inner.info

    def _launch(self, operation: Operation) -> None:
        fault = next((f for f in self._faults if f.fits(operation)), None)
        if fault is not None:
            fault.count -= 1
        trio.lowlevel.spawn_system_task(self._serve, operation, fault, self._resumed)

    async def _serve(self, operation: Operation, fault: Fault | None, resumed: trio.Event) -> None:
        error = None
        try:
            await (
                self._carry_out(operation) if fault is None else self._misbehave(operation, fault, resumed)
            )
        except BdevError as problem:
            error = problem
        self._queue.answer(operation, error)

    async def _misbehave(self, operation: Operation, fault: Fault, resumed: trio.Event) -> None:
        match fault.kind:
            case "delay":
                await trio.sleep(fault.delay_s)
            case "hang":
                await resumed.wait()
            case "error":
                raise self._queue.failure(operation, fault.status, "injected")
            case "short":
                await self._carry_out(_first_half(operation, self.info.block_size))
                raise self._queue.failure(operation, "short", "injected")
            case "corrupt" if operation.kind == "write":
                operation = _copied(operation)
                _invert(operation, fault.at)
        await self._carry_out(operation)
        if fault.kind == "corrupt" and operation.kind == "read":
            _invert(operation, fault.at)

    async def _carry_out(self, operation: Operation) -> None:
        match operation.kind:
            case "read":
                await self.inner.read_into(operation.offset, operation.buffers, _FOREVER)
            case "write":
                await self.inner.write_from(operation.offset, operation.buffers, _FOREVER)
            case "flush":
                await self.inner.flush(_FOREVER)
            case _:
                await self.inner.deallocate(operation.offset, operation.length, _FOREVER)

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        await self.inner.add_memory(memory, deadline)

    async def aclose(self) -> None:
        self._queue.close()
        await self.drain()
        await self.inner.aclose()


def _first_half(operation: Operation, block_size: int) -> Operation:
    left = operation.length // 2 // block_size * block_size
    buffers = []
    for buffer in operation.buffers:
        buffers.append(buffer[: min(len(buffer), left)])
        left -= len(buffers[-1])
    return Operation(operation.kind, operation.offset, operation.length // 2, buffers)


def _copied(operation: Operation) -> Operation:
    whole = aligned_buffer(operation.length)
    whole[:] = b"".join(operation.buffers)
    return Operation(operation.kind, operation.offset, operation.length, [whole])


def _invert(operation: Operation, at: int | None) -> None:
    position = 0 if at is None else at - operation.offset
    for buffer in operation.buffers:
        if position < len(buffer):
            buffer[position] ^= 0xFF
            return
        position -= len(buffer)
