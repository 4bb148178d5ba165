"""The bookkeeping every backend shares: checks, queueing beyond the depth, deadlines, abandonment, drain,
counters.

Theory of operation. An operation is *waiting* (beyond the depth), then *launched* (the device has it), then
*answered*. The task that asked waits for the answer under its deadline. If it gives up, by deadline or
cancellation, a waiting operation is withdrawn at once, a launched one becomes *abandoned*: the device may
still touch its buffers, and the `settled` of the `BdevTimeout` returns when it has answered. An operation
keeps its buffers alive until then.

    asked ── check ──> waiting ──> launched ──> answered
      (deadline passed)   └─ withdrawn   └─ abandoned ──> answered

A backend gives `launch(operation)`, which must not block and must lead to exactly one `answer` call, on the
Trio thread, maybe before it returns. One asked-for operation counts once: as read, write, error or timeout
(cancelled ones not).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio

from dpurt.bdev import BdevInfo, BdevStats
from dpurt.bdev.buffers import address_of, total_bytes
from dpurt.errors import BdevError, BdevTimeout

__all__ = ["Operation", "OperationQueue"]


class Operation:
    """One read, write, deallocate or flush. `kind` is the word used in errors."""

    __slots__ = ("answered", "buffers", "error", "is_abandoned", "is_launched", "kind", "length", "offset")

    def __init__(self, kind: str, offset: int, length: int, buffers: Sequence[memoryview]) -> None:
        self.kind = kind
        self.offset = offset
        self.length = length
        self.buffers = buffers
        self.answered = trio.Event()
        self.error: BdevError | None = None
        self.is_launched = False
        self.is_abandoned = False


class OperationQueue:
    """All unanswered operations of one device."""

    def __init__(self, info: BdevInfo, launch: Callable[[Operation], None]) -> None:
        self.stats = BdevStats()
        self._info = info
        self._launch = launch
        self._waiting: deque[Operation] = deque()
        self._num_launched = 0
        self._idle = trio.Event()
        self._idle.set()
        self._is_closed = False

    async def run(
        self, kind: str, offset: int, length: int, buffers: Sequence[memoryview], deadline: float
    ) -> None:
        """Carry out one operation. Raises BdevError or BdevTimeout as the `Bdev` contract says."""
        self._check(kind, offset, length, buffers)
        await trio.lowlevel.checkpoint_if_cancelled()
        if deadline <= trio.current_time():
            self.stats.timeouts += 1
            raise BdevTimeout(self._info.name, kind, offset, length, trio.lowlevel.checkpoint)
        if length == 0 and kind != "flush":
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        operation = Operation(kind, offset, length, buffers)
        self._enqueue(operation)
        await self._wait(operation, deadline)

    async def read(self, offset: int, buffers: Sequence[memoryview], deadline: float) -> None:
        await self.run("read", offset, total_bytes(buffers), buffers, deadline)

    async def write(self, offset: int, buffers: Sequence[memoryview], deadline: float) -> None:
        await self.run("write", offset, total_bytes(buffers), buffers, deadline)

    def answer(self, operation: Operation, error: BdevError | None = None) -> None:
        """The device is done with the operation and its buffers."""
        assert not operation.answered.is_set(), "an operation is answered once"
        operation.error = error
        self._num_launched -= operation.is_launched
        self.stats.in_flight -= 1
        self.stats.abandoned -= operation.is_abandoned
        operation.answered.set()
        self._launch_waiting()
        if not self.stats.in_flight:
            self._idle.set()

    async def drain(self) -> None:
        """Return when nothing, abandoned or not, is unanswered."""
        while self.stats.in_flight:
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Refuse new operations from now on."""
        self._is_closed = True

    def failure(self, operation: Operation, status: str, detail: str = "") -> BdevError:
        """The error to answer `operation` with."""
        return BdevError(self._info.name, operation.kind, operation.offset, operation.length, status, detail)

    # --- inside ---

    def _enqueue(self, operation: Operation) -> None:
        if not self.stats.in_flight:
            self._idle = trio.Event()
        self.stats.in_flight += 1
        self._waiting.append(operation)
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        while self._waiting and self._num_launched < self._info.queue_depth:
            operation = self._waiting.popleft()
            self._num_launched += 1
            operation.is_launched = True
            self._launch(operation)

    async def _wait(self, operation: Operation, deadline: float) -> None:
        if operation.answered.is_set():  # already: memory is that fast
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._wait_until(operation, deadline)
        if operation.is_abandoned or not operation.is_launched:
            self.stats.timeouts += 1
            raise BdevTimeout(
                self._info.name, operation.kind, operation.offset, operation.length, operation.answered.wait
            )
        if operation.error is not None:
            self.stats.errors += 1
            raise operation.error
        self._count(operation)

    async def _wait_until(self, operation: Operation, deadline: float) -> None:
        with trio.CancelScope(deadline=deadline):
            try:
                await operation.answered.wait()
            except trio.Cancelled:
                self._give_up(operation)
                raise

    def _give_up(self, operation: Operation) -> None:
        if operation.answered.is_set():
            return
        if operation.is_launched:
            operation.is_abandoned = True
            self.stats.abandoned += 1
        else:
            self._waiting.remove(operation)
            self.answer(operation)

    def _count(self, operation: Operation) -> None:
        if operation.kind == "read":
            self.stats.reads += 1
            self.stats.bytes_read += operation.length
        elif operation.kind == "write":
            self.stats.writes += 1
            self.stats.bytes_written += operation.length
        elif operation.kind == "deallocate":
            self.stats.bytes_deallocated += operation.length

    def _check(self, kind: str, offset: int, length: int, buffers: Sequence[memoryview]) -> None:
        problem = self._problem(offset, length, buffers)
        if problem is not None:
            self.stats.errors += 1
            raise BdevError(self._info.name, kind, offset, length, *problem)

    def _problem(self, offset: int, length: int, buffers: Sequence[memoryview]) -> tuple[str, str] | None:
        info = self._info
        if self._is_closed:
            return "closed", ""
        if offset % info.block_size:
            return "unaligned", f"the offset is not a multiple of {info.block_size}"
        if length % info.block_size:
            return "unaligned", f"the length is not a multiple of {info.block_size}"
        if offset < 0 or length < 0 or offset + length > info.size_bytes:
            return "out_of_range", f"the device has {info.size_bytes} bytes"
        for i, buffer in enumerate(buffers):
            if (why := self._misalignment(buffer)) is not None:
                return "unaligned", f"buffer {i} {why}"
        return None

    def _misalignment(self, buffer: memoryview) -> str | None:
        info = self._info
        if len(buffer) % info.block_size:
            return f"has {len(buffer)} bytes, not a multiple of {info.block_size}"
        if len(buffer) and info.buffer_align > 1 and address_of(buffer) % info.buffer_align:
            return f"starts at address {address_of(buffer):#x}, not aligned to {info.buffer_align}"
        return None
