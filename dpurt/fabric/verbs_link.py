"""The node's end of one host's verbs link: serves its asks, pushes into its landings, replaces its queue pair.

Theory of operation: see `dpurt.fabric.verbs`. Each ask is a task that holds the AccessCheck's word and the windows until the
host is done, its time is up, or the queue pair is gone; windows die before the AccessCheck is told so.

Leaves to others: opening links and who has one (`dpurt.fabric.verbs`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import trio

from dpurt.errors import FabricError, QueuePairError, RdmaLimit, RemoteAccessError
from dpurt.fabric import FabricStats
from dpurt.fabric.access import Entry, Refused, within
from dpurt.fabric.exchange import Pace
from dpurt.fabric.frames import FrameLimits
from dpurt.fabric.verbs_control import (
    Ask,
    Broken,
    Control,
    Done,
    Granted,
    Join,
    Landing,
    Message,
    Pushed,
    Refusal,
    Rejoin,
    Rejoined,
    Run,
    Stored,
)
from dpurt.fabric.verbs_memory import ArenaMemory
from dpurt.fabric.verbs_moves import Span, aligned, registered, sges_of, with_immediate
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration, Segment, Window, address_of
from dpurt.rdma.queue_pair import Bind, Opcode, QueuePair, Received

__all__ = ["NodeSide", "VerbsLimits", "VerbsLink", "cut"]


@dataclass(frozen=True, slots=True)
class VerbsLimits:
    """What hosts may cost the node. `max_asks`: of one link at a time; `window_s`: for opening a range."""

    max_links: int = 256
    max_greeting: int = 64
    hello_s: float = 5.0
    send_depth: int = 32
    max_asks: int = 32
    max_pushes: int = 16
    max_landings: int = 64
    window_s: float = 5.0
    max_chunk_bytes: int = 1 << 62
    frames: FrameLimits = field(default_factory=FrameLimits)
    pace: Pace = field(default_factory=Pace)


class NodeSide(Protocol):
    """What a link needs of its fabric."""

    limits: VerbsLimits
    adapter: Adapter
    memory: ArenaMemory

    @property
    def stats(self) -> FabricStats: ...

    def claim(
        self, session: int, op: str, entries: Sequence[Entry]
    ) -> AbstractContextManager[list[memoryview]]:
        """See `AccessTable.claim`."""
        ...


@dataclass(slots=True)
class _Grant:
    """An ask being served."""

    over: trio.Event = field(default_factory=trio.Event)
    is_ok: bool = False

    def end(self, *, is_ok: bool) -> None:
        if not self.over.is_set():
            self.is_ok = is_ok
            self.over.set()


@dataclass(slots=True)
class _Push:
    seen: trio.Event = field(default_factory=trio.Event)
    is_ok: bool = False


class VerbsLink:
    """The node's end of one host's link."""

    def __init__(self, session: int, control: Control, node: NodeSide) -> None:
        self.session = session
        self.close_reason: str | None = None
        self._control = control
        self._node = node
        self._limits = node.limits
        self._queue_pair: QueuePair | None = None
        self._grants: dict[int, _Grant] = {}
        self._asking = trio.Semaphore(self._limits.max_asks)
        self._landings: dict[int, Landing] = {}
        self._landed = trio.Event()  # a landing came, or the link ends
        self._pushes: dict[int, _Push] = {}
        self._push_numbers = itertools.count(1)
        self._pushing = trio.Semaphore(self._limits.max_pushes)
        self._windows: set[Window] = set()  # open ones

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    def close(self, reason: str = "closed by the node") -> None:
        if self.close_reason is None:
            self.close_reason = reason
        self._close_windows()
        if self._queue_pair is not None:
            self._queue_pair.destroy()  # after this the host touches nothing
        self._control.close()
        self._end_grants()
        self._landed.set()

    # --- the queue pair ---

    def join(self, peer: Join | Rejoin) -> QueuePair:
        """A new queue pair, connected to the host's. Raises RdmaLimit, QueuePairError."""
        limits = self._limits
        made = self._node.adapter.queue_pair(
            send_depth=limits.send_depth,
            receive_depth=limits.max_asks,
            access=Access.REMOTE_READ | Access.REMOTE_WRITE | Access.MW_BIND,
        )
        try:
            made.prepare()
            for _ in range(limits.max_asks):
                self._expect_immediate(made)
            made.connect(peer.queue_pair)
        except BaseException:
            made.destroy()
            raise
        made.on_failed = functools.partial(self._broke, peer.queue_pair.number)
        self._queue_pair = made
        return made

    def _expect_immediate(self, queue_pair: QueuePair) -> None:
        def arrived(received: Received) -> None:
            if received.is_ok:
                self._expect_immediate(queue_pair)
                self._end_grant(received.immediate, is_ok=True)

        queue_pair.post_receive(self._node.memory.nothing, arrived)

    def _broke(self, number: int) -> None:
        """Tell the host, whose end would wait long for answers that do not come."""
        self._control.post(Broken(number))
        self._end_grants()

    def _end_grants(self) -> None:
        """The queue pair is in error or gone: nothing that was granted on it will be done."""
        for grant in self._grants.values():
            grant.end(is_ok=False)
        for push in self._pushes.values():
            push.seen.set()

    def _close_windows(self) -> None:
        """Before their queue pair: a device may refuse to destroy one that has windows."""
        while self._windows:
            self._windows.pop().close()

    def _end_grant(self, number: int, *, is_ok: bool) -> None:
        grant = self._grants.get(number)
        if grant is not None:
            grant.end(is_ok=is_ok)

    async def _rejoin(self, message: Rejoin) -> None:
        self._close_windows()
        if self._queue_pair is not None:
            await self._queue_pair.aclose("replaced by the host")
        made = self.join(message)
        self._node.stats.errors += 1
        self._control.post(Rejoined(made.address))

    # --- serving ---

    async def serve(self) -> None:
        """Answer the host until it ends the link or is cut off."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._control.flush)
                await self._answer(nursery)
        finally:
            self.close("the node stopped serving")

    async def _answer(self, nursery: trio.Nursery) -> None:
        try:
            while True:
                await self._obey(await self._control.receive(), nursery)
        except (QueuePairError, RdmaLimit) as error:
            self._broken(str(error))
        except FabricError as error:
            if error.status == "closed":
                self.close("closed by the host")
            else:
                self._broken(str(error))
        finally:
            self.close("the node stopped serving")
            nursery.cancel_scope.cancel()

    def _broken(self, reason: str) -> None:
        if self.is_open:
            self._node.stats.errors += 1
            self.close(reason)

    async def _obey(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Ask():
                await self._asking.acquire()  # who asks for too much at a time is not heard for a while
                self._check_ask(message)
                grant = self._grants[message.number] = _Grant()
                nursery.start_soon(self._serve_ask, message, grant)
            case Done(number, is_ok):
                self._end_grant(number, is_ok=is_ok)
            case Landing():
                self._land(message)
            case Pushed(number):
                self._pushed(number)
            case Rejoin():
                await self._rejoin(message)
            case _:
                raise self._protocol(f"{type(message).__name__} from a host")

    def _protocol(self, problem: str) -> FabricError:
        return FabricError(self._control.peer, "control", "protocol", 0, problem)

    def _check_ask(self, ask: Ask) -> None:
        frames = self._limits.frames
        if ask.op not in ("pull", "store") or not 0 < ask.number < 1 << 32 or ask.number in self._grants:
            raise self._protocol("a malformed ask")
        total = sum(length for _, _, length, _ in ask.entries)
        if len(ask.entries) > frames.max_entries or total > frames.max_request_bytes:
            raise self._protocol(f"an ask for {total} bytes in {len(ask.entries)} ranges")

    # --- pulls and stores ---

    async def _serve_ask(self, ask: Ask, grant: _Grant) -> None:
        total = sum(entry[2] for entry in ask.entries)
        try:
            with self._node.claim(self.session, ask.op, ask.entries):
                await self._serve_claimed(ask, grant, total)
        except Refused as refusal:
            self._node.stats.refused += 1
            self._control.post(Refusal(ask.number, refusal.index, refusal.reason))
        except RdmaLimit as limit:
            self._control.post(Refusal(ask.number, 0, str(limit)))
        except QueuePairError:
            pass  # the host finds out by its own
        else:
            if grant.is_ok:
                self._node.stats.count(ask.op, total)
                if ask.op == "store":
                    self._control.post(Stored(ask.number))
        finally:
            del self._grants[ask.number]
            self._asking.release()

    async def _serve_claimed(self, ask: Ask, grant: _Grant, total: int) -> None:
        with self._node.memory.using({entry[0] for entry in ask.entries if entry[2]}) as registrations:
            async with self._opened(ask, registrations) as runs:
                self._control.post(Granted(ask.number, runs))
                self._node.adapter.expect()
                if not total:
                    grant.end(is_ok=True)
                with trio.CancelScope(deadline=self._limits.pace.deadline(total)):
                    await grant.over.wait()
                self._check_overstay(grant)

    def _check_overstay(self, grant: _Grant) -> None:
        """Without windows, only the end of the queue pair ends the host's access."""
        if not grant.over.is_set():
            self._node.stats.errors += 1
            if not self._has_windows and self._queue_pair is not None:
                self._queue_pair.fail("the host did not finish in its time")

    @property
    def _has_windows(self) -> bool:
        return self._node.adapter.device.limits.has_windows

    @contextlib.asynccontextmanager
    async def _opened(self, ask: Ask, registrations: Mapping[int, Registration]) -> AsyncIterator[list[Run]]:
        """The ranges of an ask, open to the host inside the block; given as runs in the ask's order."""
        wanted = [
            (entry, segment)
            for entry in ask.entries
            if entry[2]
            for segment in _segments(registrations[entry[0]], entry)
        ]
        if not self._has_windows:
            yield [Run(segment.address, segment.length, segment.chunk.rkey) for _, segment in wanted]
            return
        windows: dict[tuple[int, int], Window] = {}
        try:
            await self._bind(ask.op, wanted, windows)
            yield [
                Run(segment.address, segment.length, windows[_window_of(entry, segment)].rkey)
                for entry, segment in wanted
            ]
        finally:
            for window in windows.values():
                window.close()
                self._windows.discard(window)

    async def _bind(
        self,
        op: str,
        wanted: Sequence[tuple[Entry, Segment]],
        windows: dict[tuple[int, int], Window],
    ) -> None:
        """One window for each lease (and chunk), from the first byte asked for to the last."""
        access = Access.REMOTE_READ if op == "pull" else Access.REMOTE_WRITE
        extents: dict[tuple[int, int], Segment] = {}
        for entry, segment in wanted:
            name = _window_of(entry, segment)
            extents[name] = _around(extents[name], segment) if name in extents else segment
        for name in extents:
            windows[name] = self._node.adapter.window()
            self._windows.add(windows[name])
        binds = [
            Bind(windows[name], extent.chunk, extent.address, extent.length, access)
            for name, extent in extents.items()
        ]
        if self._queue_pair is None:
            raise QueuePairError(self._control.peer, "closed")
        await self._queue_pair.run(binds, trio.current_time() + self._limits.window_s)

    # --- pushes ---

    def _land(self, landing: Landing) -> None:
        if len(self._landings) >= self._limits.max_landings:
            raise self._protocol(f"more than {self._limits.max_landings} landings")
        if sum(run.length for run in landing.runs) != landing.size:
            raise self._protocol("a landing whose runs are not its size")
        self._landings[landing.region] = landing
        self._landed.set()
        self._landed = trio.Event()

    def _pushed(self, number: int) -> None:
        push = self._pushes.get(number)
        if push is not None:
            push.is_ok = True
            push.seen.set()

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        total = sum(len(source) for source, _, _ in pieces)
        with trio.CancelScope(deadline=deadline):
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            remote = [
                await self._landing_runs(region, offset, len(source)) for source, region, offset in pieces
            ]
            if total:
                async with self._pushing:
                    await self._push([source for source, _, _ in pieces], remote, deadline)
            self._node.stats.count("push", total)
            return
        raise FabricError(self._control.peer, "push", "timed_out", 0)

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise FabricError(self._control.peer, "push", "closed", 0, self.close_reason)

    async def _landing_runs(self, region: int, offset: int, length: int) -> list[Run]:
        """Where in the host's memory. Waits for a landing that was not announced yet: its news may be behind."""
        while region not in self._landings:
            await self._landed.wait()
            self._check_open()
        landing = self._landings[region]
        if not within(offset, length, landing.size):
            detail = f"no landing at region {region} [{offset}, +{length})"
            raise RemoteAccessError(self._control.peer, "push", detail)
        return cut(landing.runs, offset, length)

    async def _push(
        self, sources: Sequence[memoryview], remote: Sequence[Sequence[Run]], deadline: float
    ) -> None:
        queue_pair = self._queue_pair
        self._check_open()
        assert queue_pair is not None, "an open link has a queue pair"
        number = next(self._push_numbers)
        push = self._pushes[number] = _Push()
        spans: list[Span] = [(address_of(source), len(source)) for source in sources if source]
        memory = self._node.memory
        try:
            with registered(self._node.adapter, memory.known(), spans, Access.NONE) as local:
                runs = [run for several in remote for run in several]
                works = aligned(Opcode.WRITE, sges_of(local, spans), runs)
                await queue_pair.run(with_immediate(works, number), deadline)
            await push.seen.wait()
        except (QueuePairError, RdmaLimit) as error:
            raise self._push_failed(str(error), getattr(error, "status", "limit")) from error
        finally:
            del self._pushes[number]
        if not push.is_ok:
            raise self._push_failed(queue_pair.failure, "closed")

    def _push_failed(self, why: str, status: str) -> FabricError:
        known = status if status in ("timed_out", "limit") else "closed"
        return FabricError(self._control.peer, "push", known, 0, self.close_reason or why)


def _segments(registration: Registration, entry: Entry) -> Iterator[Segment]:
    _, offset, length, _ = entry
    return registration.segments(registration.address + offset, length)


def _window_of(entry: Entry, segment: Segment) -> tuple[int, int]:
    return entry[3], segment.chunk.address


def _around(one: Segment, other: Segment) -> Segment:
    start = min(one.address, other.address)
    end = max(one.address + one.length, other.address + other.length)
    return Segment(start, end - start, one.chunk)


def cut(runs: Sequence[Run], offset: int, length: int) -> list[Run]:
    """The part [offset, +length) of memory that consists of these runs."""
    found = []
    for run in runs:
        if offset < run.length and length:
            size = min(run.length - offset, length)
            found.append(Run(run.address + offset, size, run.key))
            length -= size
        offset = max(0, offset - run.length)
    return found
