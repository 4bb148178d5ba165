"""A bdev behind vhost-user-blk: SPDK, or anybody's back end, on the same machine.

The back end maps the arena and moves bytes between the device and our slots by itself; this process writes a few
descriptors, and reads one byte of status per request. Buffers outside of added memory go through a bounce area.

Theory of operation. An operation becomes one request after the other, each as large as the limits allow. The device
is shown each as it comes. Where there is no room (ring, bounce area) the operation waits its turn among the *starved*.
A system task lives through one `Session` after the other: it wakes on completions, notices loss, reconnects with
back-off.

When the back end is lost, what is new fails at once with status "unavailable", and what the back end held ends when it
can no longer touch our memory (`dpurt.bdev.vhost_session` argues when that is): at once if its process died. Until
then those operations count as in flight, their deadlines hold, and their buffers stay quarantined.

    asked ──> starved ──> in the ring ──> answered
                 └ lost: unavailable └ lost: in the used ring after all, or unavailable once its process is dead

`aclose` waits `close_s` for what is in flight. If the back end still holds something then (it is stopped, it hangs),
it is left alone with the memory it has: that is never used again by us, every asker gets a `BdevTimeout`, whose
`settled` returns if the back end answers or dies after all.

Writes: with the FLUSH feature the device may cache them until `flush`; without it they are stable when they return
(so says virtio), and `flush` has nothing to do. `deallocate` is a discard, or write-zeroes with leave to unmap, or
nothing, whatever the device has; "unsupported" in answer to it is no error, since it is a hint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from dpurt.bdev import BdevInfo, DeviceMemory
from dpurt.bdev.memory_fence import load_fence
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.bdev.vhost_memory import BOUNCE_CHUNK_BYTES, Planner, Transfer, TransferLimits
from dpurt.bdev.vhost_ring import BlkRing
from dpurt.bdev.vhost_session import Session, SessionWishes
from dpurt.errors import BdevError, ConfigError, RemoteProtocolError
from dpurt.wire import virtio_blk
from dpurt.wire.virtio_blk import BlkConfig, BlkFeature

__all__ = ["VhostUserBdev"]

_MAX_SEGMENTS = 126
_MIN_QUEUE, _MAX_QUEUE = 4, 1024  # room for one whole chain; what the known back ends take
_CHAIN = 3  # descriptors of a request with one segment, where there are no indirect ones
_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 2.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.25
_LOSSES = (OSError, RemoteProtocolError, trio.TooSlowError, trio.ClosedResourceError)
_KINDS = {"read": virtio_blk.READ, "write": virtio_blk.WRITE}


_Request = tuple[Operation, Transfer]
"""What the device has: one step of an operation. What has no data to move has a transfer without pieces."""


class VhostUserBdev(QueuedBdev):
    """See `Bdev`. Make one with `await VhostUserBdev.open(...)`. `stats.reconnects` counts the sessions after the first."""

    def __init__(
        self, info: BdevInfo, session: Session[_Request], wishes: SessionWishes, close_s: float
    ) -> None:
        self.info = info
        self._wishes = wishes
        self._close_s = close_s
        self._queue = OperationQueue(info, self._launch)
        self._session: Session[_Request] | None = session
        self._planner = self._planner_of(session)
        self._left: set[Session[_Request]] = set()  # lost, and the back end still holds requests
        self._memories: list[DeviceMemory] = []
        self._adding = trio.Lock()
        self._starved: deque[Operation] = deque()
        self._is_paused = False
        self._dry = trio.Event()  # the device holds nothing, or is lost
        self._unsent: deque[tuple[Operation, BdevError | None]] = deque()  # to answer without the device
        self._is_answering = False
        self._life = trio.CancelScope()
        self._ended = trio.Event()
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        name: str | None = None,
        num_queues: int = 1,
        queue_size: int = 128,
        max_transfer_bytes: int = 4 << 20,
        bounce_bytes: int = 8 << 20,
        answer_s: float = 5.0,
        close_s: float = 5.0,
    ) -> VhostUserBdev:
        """Connect to the socket `path`. Control requests get `answer_s`, a close waits `close_s` for operations.
        Raises BdevError, or ConfigError for a number that cannot be.
        """
        path = Path(path)
        label = name or path.name
        _check_numbers(num_queues, queue_size, bounce_bytes)
        try:
            wishes = SessionWishes(
                path, num_queues, queue_size, _MAX_SEGMENTS, bounce_bytes, answer_s, load_fence()
            )
            session: Session[_Request] = await Session.open(wishes, [])
        except _LOSSES as error:
            detail = str(error) or f"no answer in {answer_s} s"
            raise BdevError(label, "open", 0, 0, "unavailable", f"{path}: {detail}") from error
        info = _describe(label, session, wishes, max_transfer_bytes)
        bdev = cls(info, session, wishes, close_s)
        trio.lowlevel.spawn_system_task(bdev._live)
        return bdev

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        """The device reaches this memory from now on, over reconnects too. What a back end cannot take beside
        the rest is reached by copies; `info.detail["copied_memory"]` counts those.
        """
        problem: Exception | None = None
        with trio.move_on_at(deadline) as scope:
            async with self._adding:
                try:
                    await self._give(memory)
                    self._memories.append(memory)
                except _LOSSES as error:
                    problem = error
        if scope.cancelled_caught or problem is not None:
            detail = str(problem or "not taken before the deadline")
            status = "closed" if self._is_closed else "unavailable"
            raise BdevError(self.info.name, "add_memory", 0, memory.length, status, detail) from problem

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            if not self._is_closed:
                self._is_closed = True
                self._queue.close()
                with trio.move_on_after(self._close_s):
                    await self._queue.drain()
                self._life.cancel()
            await self._ended.wait()

    # --- sessions ---

    async def _live(self) -> None:
        with self._life:
            while True:
                session = self._session
                assert session is not None, "connected by open, or by the turn before"
                await session.serve(partial(self._reap, session), self._take_config)
                self._leave(session)
                await self._reconnect()
        if self._session is not None:
            self._leave(self._session)
        self._queue.abandon(operation for left in self._left for operation, _ in left.tokens())
        self._ended.set()

    def _leave(self, session: Session[_Request]) -> None:
        """It is lost, or no more wanted."""
        session.lose(ConnectionAbortedError("closed"))
        self._session = None
        self._dry.set()
        while self._starved:
            self._refuse(self._starved.popleft())
        self._left.add(session)
        trio.lowlevel.spawn_system_task(self._settle, session)

    async def _settle(self, session: Session[_Request]) -> None:
        """Wait until the back end is done with each request it holds, and end those."""
        delay = _FIRST_LOOK_S
        is_dead = False
        try:
            while session.num_held and not is_dead:
                is_dead = await session.has_died(delay)
                delay = min(2 * delay, _LAST_LOOK_S)
                self._reap_left(session)
            for operation, _ in session.tokens():
                self._refuse(operation)
        finally:
            self._left.discard(session)
            session.close()

    def _reap_left(self, session: Session[_Request]) -> None:
        if session.is_trusted:
            try:
                self._reap(session)
            except RemoteProtocolError as error:
                session.lose(error)

    async def _reconnect(self) -> None:
        delay = _FIRST_RETRY_S
        while self._session is None:
            try:
                session: Session[_Request] = await Session.open(self._wishes, self._memories)
            except _LOSSES:
                await trio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
                continue
            if session.config.block_size != self.info.block_size:
                session.close()  # another device; maybe the right one comes back
                await trio.sleep(_LAST_RETRY_S)
                continue
            self._session = session
            self._planner = self._planner_of(session)
            self.stats.reconnects += 1
            self._take_config(session.config)

    def _planner_of(self, session: Session[_Request]) -> Planner:
        segment_bytes = session.config.max_segment_bytes
        limits = TransferLimits(self.info.max_transfer_bytes, session.max_segments, segment_bytes)
        return Planner(limits, session.memory, session.bounce)

    def _take_config(self, config: BlkConfig) -> None:
        """The device may have been resized."""
        if config.block_size != self.info.block_size:
            raise RemoteProtocolError(
                "config", f"block size went from {self.info.block_size} to {config.block_size}"
            )
        if config.size_bytes != self.info.size_bytes:
            self._replace_info(replace(self.info, size_bytes=config.size_bytes))

    def _replace_info(self, info: BdevInfo) -> None:
        self.info = info
        self._queue.replace_info(info)

    # --- memory ---

    async def _give(self, memory: DeviceMemory) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("closed")
        session = self._session
        if session is None:
            return  # the next session gets it
        if session.can_add_memory:
            await session.add_memory(memory)
        elif session.can_replace_table:
            await self._give_while_dry(session, memory)
        else:
            count = int(self.info.detail.get("copied_memory", "0")) + 1
            self._replace_info(replace(self.info, detail={**self.info.detail, "copied_memory": str(count)}))

    async def _give_while_dry(self, session: Session[_Request], memory: DeviceMemory) -> None:
        """Hold back requests until the device has none, then give the memory."""
        self._is_paused = True
        try:
            while session.num_held and session.lost_because is None:
                self._dry = trio.Event()
                await self._dry.wait()
            await session.replace_table(memory)
        finally:
            self._is_paused = False
            self._feed()

    # --- operations ---

    def _launch(self, operation: Operation) -> None:
        session = self._session
        if session is None or session.lost_because is not None:
            self._refuse(operation)
        elif self._is_paused or self._starved or not self._send(session, operation):
            self._starved.append(operation)

    def _refuse(self, operation: Operation) -> None:
        self._answer_unsent(operation, self._queue.failure(operation, "unavailable", "the back end is down"))

    def _answer_unsent(self, operation: Operation, error: BdevError | None = None) -> None:
        """Answer what the device need not be asked. Each answer may launch the next operation, which may end up
        here again: a loop, not a recursion as deep as the queue.
        """
        self._unsent.append((operation, error))
        if self._is_answering:
            return
        self._is_answering = True
        while self._unsent:
            self._queue.answer(*self._unsent.popleft())
        self._is_answering = False

    def _send(self, session: Session[_Request], operation: Operation) -> bool:
        """Put the operation's next request into a ring. False: no room now."""
        ring = min(session.rings, key=_num_held) if len(session.rings) > 1 else session.rings[0]
        if (kind := _KINDS.get(operation.kind)) is not None:
            return self._send_transfer(session, ring, operation, kind)
        if operation.kind == "flush":
            return self._send_flush(session, ring, operation)
        return self._send_deallocate(session, ring, operation)

    def _send_transfer(
        self, session: Session[_Request], ring: BlkRing[_Request], operation: Operation, kind: int
    ) -> bool:
        transfer = self._planner.plan(operation.pieces, is_read=kind == virtio_blk.READ)
        bounced = transfer.bounced
        if bounced is not None and kind == virtio_blk.WRITE:
            bounced.copy_in()
        offset = operation.offset + operation.moved
        if transfer.length and ring.move(kind, offset, transfer.pieces, (operation, transfer)):
            return True
        if bounced is not None:
            session.bounce.give_back(bounced.chunks)
        return False

    def _send_flush(self, session: Session[_Request], ring: BlkRing[_Request], operation: Operation) -> bool:
        if BlkFeature.FLUSH in session.features:
            return ring.move(virtio_blk.FLUSH, 0, b"", (operation, Transfer(0)))
        self._answer_unsent(operation)
        return True

    def _send_deallocate(
        self, session: Session[_Request], ring: BlkRing[_Request], operation: Operation
    ) -> bool:
        config = session.config
        if config.max_discard_bytes:
            kind, most = virtio_blk.DISCARD, config.max_discard_bytes
        elif config.max_zeroes_bytes:
            kind, most = virtio_blk.WRITE_ZEROES, config.max_zeroes_bytes
        else:
            self._answer_unsent(operation)
            return True
        length = min(operation.length - operation.moved, most)
        offset = operation.offset + operation.moved
        return ring.deallocate(kind, offset, length, (operation, Transfer(length)))

    def _reap(self, session: Session[_Request]) -> None:
        """Take what the device has answered, and give it what waited for that. Raises RemoteProtocolError: then it is given
        nothing more.
        """
        for ring in session.rings:
            for (operation, transfer), status in ring.answers():
                self._take_answer(session, operation, transfer, status)
        self._feed()
        if not session.num_held:
            self._dry.set()

    def _take_answer(
        self, session: Session[_Request], operation: Operation, transfer: Transfer, status: int
    ) -> None:
        is_hint = status == virtio_blk.STATUS_UNSUPPORTED and operation.kind == "deallocate"
        is_good = status == virtio_blk.STATUS_OK or is_hint
        if transfer.bounced is not None:
            if is_good and operation.kind == "read" and operation.settled is None:
                transfer.bounced.copy_out()
            session.bounce.give_back(transfer.bounced.chunks)
        if not is_good:
            self._queue.answer(operation, self._queue.failure(operation, "io_error", _words(status)))
            return
        operation.moved += transfer.length
        if operation.moved == operation.length or operation.settled is not None:
            self._queue.answer(operation)  # or nobody waits any more
        else:
            operation.pieces = _rest(operation.pieces, transfer.length)
            self._launch(operation)

    def _feed(self) -> None:
        """Those who waited for room, in order. They wait on where the session is lost: `_leave` refuses them."""
        session = self._session
        if session is None or session.lost_because is not None:
            return
        while self._starved and not self._is_paused:
            operation = self._starved[0]
            if operation.settled is not None:
                self._queue.answer(self._starved.popleft())  # given up, and the device never had it
            elif self._send(session, operation):
                self._starved.popleft()
            else:
                return


def _check_numbers(num_queues: int, queue_size: int, bounce_bytes: int) -> None:
    if num_queues < 1:
        raise ConfigError("$.bdev.num_queues", f"must be at least 1, got {num_queues}")
    if not _MIN_QUEUE <= queue_size <= _MAX_QUEUE or queue_size.bit_count() != 1:
        raise ConfigError(
            "$.bdev.queue_size", f"must be a power of two from {_MIN_QUEUE} to {_MAX_QUEUE}, got {queue_size}"
        )
    if bounce_bytes < BOUNCE_CHUNK_BYTES:
        raise ConfigError("$.bdev.bounce_bytes", f"must be at least {BOUNCE_CHUNK_BYTES}, got {bounce_bytes}")


def _num_held(ring: BlkRing[_Request]) -> int:
    return ring.num_held


def _rest(pieces: Sequence[tuple[int, int]], done: int) -> list[tuple[int, int]]:
    """The pieces without their first `done` bytes."""
    for i, (address, length) in enumerate(pieces):
        if done < length:
            return [(address + done, length - done), *pieces[i + 1 :]]
        done -= length
    return []


def _words(status: int) -> str:
    if status == virtio_blk.STATUS_IO_ERROR:
        return "the device says so, without a reason"
    if status == virtio_blk.STATUS_NONE:
        return "the device wrote no status"
    return f"status {status}"


def _describe(
    label: str, session: Session[_Request], wishes: SessionWishes, max_transfer_bytes: int
) -> BdevInfo:
    config, features = session.config, session.features
    is_indirect = BlkFeature.INDIRECT in features
    per_queue = wishes.queue_size if is_indirect else max(1, wishes.queue_size // _CHAIN)
    most = session.max_segments * config.max_segment_bytes or math.inf
    return BdevInfo(
        name=label,
        kind="vhost-user",
        size_bytes=config.size_bytes,
        block_size=config.block_size,
        buffer_align=config.block_size,
        max_transfer_bytes=int(min(max_transfer_bytes, most)) // config.block_size * config.block_size,
        optimal_io_bytes=1 << 20,
        queue_depth=len(session.rings) * per_queue,
        detail={
            "path": str(wishes.path),
            "io": "vhost-user-blk",
            "queues": str(len(session.rings)),
            "features": ", ".join(sorted(feature.name or "" for feature in features)).lower(),
        },
    )
