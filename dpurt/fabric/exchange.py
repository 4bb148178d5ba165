"""One connection's conversation: a `Requester` at one end, `respond` at the other.

The host requests pulls and stores of the node; the node requests pushes of the host, on a second connection.
Both are this one exchange. Requests are answered in order, so they need no tags, and several may be under
way.

A cancelled or late request leaves the conversation intact whenever it can:

    nothing sent yet      it is simply not sent
    partly sent           the rest is sent, shielded, until the deadline; then the link is cut (the peer is stuck)
    reply outstanding     the caller gets its answer at once; a background task reads the rest of the reply into scratch
                          memory, never into the caller's, and cuts the link if that takes longer than `DRAIN_S`

`respond` reads requests, has them allowed, moves the bytes. A peer that is slow beyond `Pace`, or sends what
is no frame, ends the exchange with a FabricError that says why; a refused request is answered and the
exchange goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import trio

from dpurt.errors import FabricError, RemoteAccessError, RemoteProtocolError
from dpurt.fabric import FabricStats
from dpurt.fabric.access import Entry, Refused
from dpurt.fabric.frames import (
    ENTRY,
    HEADER,
    OK,
    OP_NAMES,
    PULL,
    REFUSED,
    FrameLimits,
    decode_entries,
    decode_header,
    encode_request,
)
from dpurt.fabric.wire import Cursor, Wire

__all__ = ["Pace", "Requester", "Service", "respond"]

DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How slow a peer may be: any transfer gets `grace_s`, plus its bytes at `min_bytes_per_s`."""

    grace_s: float = 10.0
    min_bytes_per_s: float = 8 << 20

    def deadline(self, num_bytes: int) -> float:
        return trio.current_time() + self.grace_s + num_bytes / self.min_bytes_per_s


class _Reply:
    """A reply still to be read: its place in the queue, its head, and where its bytes go."""

    def __init__(self, after: trio.Event | None, body: Sequence[memoryview]) -> None:
        self._after = after
        self.done = trio.Event()
        self._head = memoryview(bytearray(HEADER.size))
        self._cursor = Cursor([self._head, *body])

    async def read(self, wire: Wire, deadline: float) -> tuple[int, int]:
        """Wait for our turn, then read. May be cancelled, and drained then. Returns (status, index)."""
        if self._after is not None and not self._after.is_set():
            await _wait_until(self._after, wire.peer, deadline)
        await wire.receive(self._cursor, deadline, least=HEADER.size)
        status, index = HEADER.unpack(self._head)
        if status == OK:
            await wire.receive(self._cursor, deadline)
        else:  # no body: what came along with the head is the next reply's
            wire.unread(self._cursor.moved_beyond(HEADER.size))
        return status, index

    async def drain(self, wire: Wire, deadline: float) -> None:
        """Read the rest without touching the caller's memory."""
        if self._after is not None and not self._after.is_set():
            await _wait_until(self._after, wire.peer, deadline)
        await wire.receive(Cursor([self._head[self._cursor.moved :]]), deadline)
        if HEADER.unpack(self._head)[0] == OK:
            await wire.discard(self._cursor.total - max(self._cursor.moved, HEADER.size), deadline)

    @property
    def moved(self) -> int:
        return max(0, self._cursor.moved - HEADER.size)


async def _wait_until(event: trio.Event, peer: str, deadline: float) -> None:
    with trio.CancelScope(deadline=deadline):
        await event.wait()
        return
    raise FabricError(peer, "wait", "timed_out", 0, "the requests before it are not answered yet")


class Requester:
    """The asking end. `on_broken(reason)` is called when the conversation can no longer be kept in step."""

    def __init__(self, wire: Wire, on_broken: Callable[[str], None]) -> None:
        self._wire = wire
        self._on_broken = on_broken
        self._sending = trio.Lock()
        self._last: trio.Event | None = None

    async def request(
        self,
        op: int,
        entries: Sequence[Entry],
        sent: Sequence[memoryview],
        received: Sequence[memoryview],
        deadline: float,
    ) -> None:
        """One request and its reply. Raises FabricError, RemoteAccessError; no buffer is touched after it
        returns."""
        reply = await self._send(op, entries, sent, received, deadline)
        status, index = await self._receive(op, reply, deadline)
        if status != OK:
            raise RemoteAccessError(self._wire.peer, OP_NAMES[op], _entry_text(entries, index))

    async def _send(
        self,
        op: int,
        entries: Sequence[Entry],
        sent: Sequence[memoryview],
        received: Sequence[memoryview],
        deadline: float,
    ) -> _Reply:
        out = Cursor([memoryview(encode_request(op, entries)), *sent])
        await self._take_sending(op, deadline)
        try:
            await self._wire.send(out, deadline, is_frame=True)
        except FabricError as error:
            if error.status == "closed":
                self._on_broken(str(error))
            raise self._failed(op, error, out.moved) from error
        finally:
            if out.moved and out.remaining:
                self._on_broken("a request could not be sent in full by its deadline")
            self._sending.release()
        reply = _Reply(self._last, received)
        self._last = reply.done
        return reply

    async def _take_sending(self, op: int, deadline: float) -> None:
        """The lock, without the scheduler pass that a free one would cost."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with contextlib.suppress(trio.WouldBlock):
            if trio.current_time() < deadline:
                self._sending.acquire_nowait()
                return
        with trio.CancelScope(deadline=deadline):
            await self._sending.acquire()
            return
        raise FabricError(self._wire.peer, OP_NAMES[op], "timed_out", 0, "the request was not sent")

    async def _receive(self, op: int, reply: _Reply, deadline: float) -> tuple[int, int]:
        try:
            status, index = await reply.read(self._wire, deadline)
            reply.done.set()
            return status, index
        except FabricError as error:
            if error.status == "closed":
                reply.done.set()
                self._on_broken(str(error))
            raise self._failed(op, error, reply.moved) from error
        finally:
            if not reply.done.is_set():
                trio.lowlevel.spawn_system_task(self._drain, reply)

    async def _drain(self, reply: _Reply) -> None:
        try:
            await reply.drain(self._wire, trio.current_time() + DRAIN_S)
        except FabricError as error:
            self._on_broken(f"an abandoned reply did not end: {error}")
        finally:
            reply.done.set()

    def _failed(self, op: int, error: FabricError, moved: int) -> FabricError:
        return FabricError(self._wire.peer, OP_NAMES[op], error.status, moved, str(error))


def _entry_text(entries: Sequence[Entry], index: int) -> str:
    if index >= len(entries):
        return "the peer refused the request"
    region_id, offset, length, lease = entries[index]
    return f"entry {index} refused: region {region_id} [{offset}, +{length}) lease {lease}"


@dataclass(frozen=True, slots=True)
class Service:
    """What the answering end serves: which operations, at which limits, and whose word decides."""

    ops: frozenset[int]
    claim: Callable[[str, Sequence[Entry]], AbstractContextManager[list[memoryview]]]
    stats: FabricStats
    limits: FrameLimits = field(default_factory=FrameLimits)
    pace: Pace = field(default_factory=Pace)


async def respond(wire: Wire, service: Service) -> None:
    """Serve requests until the peer ends the connection between two of them. Raises FabricError for any other
    end."""
    while not await wire.at_end():
        op, entries, total = await _read_request(wire, service)
        await _answer(wire, service, op, entries, total)
        wire.answered(len(entries))


async def _read_request(wire: Wire, service: Service) -> tuple[int, list[Entry], int]:
    deadline = service.pace.deadline(0)
    try:
        head = await wire.receive_bytes(HEADER.size, deadline)
        op, count = decode_header(head, service.ops, service.limits)
        body = await wire.receive_bytes(count * ENTRY.size, deadline)
        entries, total = decode_entries(body, service.limits)
    except RemoteProtocolError as error:
        raise FabricError(wire.peer, "request", "protocol", 0, error.message) from error
    return op, entries, total


async def _answer(wire: Wire, service: Service, op: int, entries: list[Entry], total: int) -> None:
    deadline = service.pace.deadline(total)
    try:
        with service.claim(OP_NAMES[op], entries) as views:
            await _move(wire, op, views, deadline)
    except Refused as refusal:
        service.stats.refused += 1
        await _refuse(wire, op, refusal.index, total, deadline)
    else:
        service.stats.count(OP_NAMES[op], total)


async def _move(wire: Wire, op: int, views: Sequence[memoryview], deadline: float) -> None:
    head = memoryview(HEADER.pack(OK, 0))
    if op == PULL:
        await wire.send(Cursor([head, *views]), deadline)
    else:
        await wire.receive(Cursor(views), deadline)
        await wire.send(Cursor([head]), deadline)


async def _refuse(wire: Wire, op: int, index: int, total: int, deadline: float) -> None:
    if op != PULL:
        await wire.discard(total, deadline)
    await wire.send(Cursor([memoryview(HEADER.pack(REFUSED, index))]), deadline)
