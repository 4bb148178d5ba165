"""The node's end of one host's verbs link: serves its asks, pushes into its landings, replaces its queue pairs.

Theory of operation: see `dpurt.fabric.verbs`. Each ask is a task that holds the AccessCheck's word. For a pull it also holds the
windows, on each lane the host named, until the host is done, its time is up, or the last of these lanes is gone; windows die
before the AccessCheck is told so. For a store it READs the host's memory, into the place of the bytes.

Leaves to others: opening links and who has one (`dpurt.fabric.verbs`).
"""

from __future__ import annotations

import contextlib
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
    LONG_BYTES,
    Ask,
    Broken,
    Control,
    Done,
    Ended,
    Granted,
    Join,
    Landing,
    Message,
    Pushed,
    Ready,
    Refusal,
    Rejoin,
    Rejoined,
    Run,
    enter,
)
from dpurt.fabric.verbs_lanes import Lane, LaneGroup
from dpurt.fabric.verbs_memory import NodeRail
from dpurt.fabric.verbs_moves import Span, aligned, joined, registered, sges_of
from dpurt.rdma.device import is_up
from dpurt.rdma.memory import Access, Registration, Segment, Window, address_of
from dpurt.rdma.queue_pair import Bind, Opcode, QueuePair, QueuePairAddress, Sge, Work

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

    @property
    def rails(self) -> Mapping[str, NodeRail]: ...

    @property
    def stats(self) -> FabricStats: ...

    def claim(
        self, session: int, op: str, entries: Sequence[Entry]
    ) -> AbstractContextManager[list[memoryview]]:
        """See `AccessTable.claim`."""
        ...


@dataclass(slots=True)
class _Grant:
    """An ask being served. `lanes`: those it is open on; `carried`: bytes by lane, of a pull as the host says; `fetching`: of a
    store.
    """

    op: str
    total: int
    lanes: set[int]
    carried: dict[int, int] | None = None
    over: trio.Event = field(default_factory=trio.Event)
    fetching: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_ok: bool = False
    is_answered: bool = False

    def end(self, *, is_ok: bool) -> None:
        if not self.over.is_set():
            self.is_ok = is_ok
            self.over.set()
            self.fetching.cancel()

    def done(self, message: Done) -> None:
        """The host is done with a pull, or waits for its store no longer."""
        if self.op == "store":
            self.end(is_ok=False)
        else:
            self.carried = message.carried
            self.end(is_ok=message.is_ok)


@dataclass(slots=True)
class _Push:
    """A push that waits to be seen by the host, on each of `lanes`."""

    lanes: set[int] | None = None
    told: set[int] = field(default_factory=set)
    changed: trio.Event = field(default_factory=trio.Event)

    def change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    @property
    def is_seen(self) -> bool:
        return self.lanes is not None and self.lanes <= self.told


class VerbsLink:
    """The node's end of one host's link."""

    def __init__(self, session: int, control: Control, node: NodeSide) -> None:
        self.session = session
        self.close_reason: str | None = None
        self._control = control
        self._node = node
        self._limits = node.limits
        self._group: LaneGroup | None = None
        self._far_numbers: dict[int, int] = {}  # lane: the number of the host's queue pair
        self._grants: dict[int, _Grant] = {}
        self._unanswered = 0  # of these
        self._asking = trio.Semaphore(self._limits.max_asks)
        self._landings: dict[int, Landing] = {}
        self._landed = trio.Event()  # a landing came, or the link ends
        self._pushes: dict[int, _Push] = {}
        self._push_numbers = itertools.count(1)
        self._pushing = trio.Semaphore(self._limits.max_pushes)
        self._windows: dict[int, set[Window]] = {}  # open ones, by lane
        self._counted: set[int] = set()  # lanes that their rails count as up
        self._raised = trio.Event()  # a lane is up, or the link ends

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    def close(self, reason: str = "closed by the node") -> None:
        if self.close_reason is None:
            self.close_reason = reason
        for lane in self._lanes:
            self._close_windows(lane.index)
            self._count_down(lane)
            if lane.queue_pair is not None:
                lane.queue_pair.on_failed = lambda: None
                lane.queue_pair.destroy()  # after this the host touches nothing
        self._control.close()
        self._end_all()
        self._landed.set()
        self._raised.set()

    # --- lanes ---

    @property
    def _lanes(self) -> Sequence[Lane]:
        return () if self._group is None else self._group.lanes

    def join(self, join: Join) -> list[QueuePair]:
        """Queue pairs connected to the host's. Raises RdmaLimit, QueuePairError; then there are none."""
        lanes = [
            Lane(index, offer.rail, self._node.rails[offer.rail].adapter)
            for index, offer in enumerate(join.lanes)
        ]
        self._group = LaneGroup(lanes, self._broke)
        made: list[QueuePair] = []
        try:
            for lane, offer in zip(lanes, join.lanes, strict=True):
                made.append(self._made(lane, offer.queue_pair))
                self._try_to_connect(made[-1], offer.queue_pair, is_only=len(lanes) == 1)
                self._group.take(lane, made[-1])
        except BaseException:
            for queue_pair in made:
                queue_pair.on_failed = lambda: None
                queue_pair.destroy()
            raise
        return made

    @staticmethod
    def _try_to_connect(queue_pair: QueuePair, peer: QueuePairAddress, *, is_only: bool) -> None:
        """A rail without a way to the host leaves its lane down; the host will ask for it again."""
        try:
            queue_pair.connect(peer)
        except QueuePairError:
            if is_only:
                raise

    def _made(self, lane: Lane, peer: QueuePairAddress) -> QueuePair:
        """A new queue pair for the lane, to be connected to `peer`. Raises RdmaLimit, QueuePairError."""
        made = lane.adapter.queue_pair(
            send_depth=self._limits.send_depth,
            receive_depth=0,
            access=Access.REMOTE_READ | Access.REMOTE_WRITE | Access.MW_BIND,
        )
        try:
            made.prepare()
        except BaseException:
            made.destroy()
            raise
        self._far_numbers[lane.index] = peer.number
        self._windows[lane.index] = set()
        return made

    def _rail(self, lane: Lane) -> NodeRail:
        return self._node.rails[lane.rail]

    def _ready(self, index: int) -> None:
        """The host saw bytes pass: so can ours."""
        lane = self._lane(index)
        assert self._group is not None
        if lane.is_usable and not self._group.policy.is_up(index):
            self._group.up(lane)
            self._counted.add(index)
            self._rail(lane).stats.lanes += 1
            self._raised.set()
            self._raised = trio.Event()

    def _lane(self, index: int) -> Lane:
        if index >= len(self._lanes):
            raise self._protocol(f"lane {index} of a link with {len(self._lanes)}")
        return self._lanes[index]

    def _broke(self, lane: Lane) -> None:
        """Tell the host, whose end would wait long for answers that do not come. What others carry goes on."""
        assert self._group is not None
        state = self._group.states[lane.index]
        self._control.post(Broken(self._far_numbers[lane.index]))
        stats = self._rail(lane).stats
        stats.breaks += 1
        stats.last_failure = state.last_failure
        self._count_down(lane)
        for grant in self._grants.values():
            grant.lanes.discard(lane.index)
            if not grant.lanes:
                grant.end(is_ok=False)
        for push in self._pushes.values():
            push.change()

    def _count_down(self, lane: Lane) -> None:
        """It is up no more, if it was."""
        if lane.index in self._counted:
            self._counted.remove(lane.index)
            self._rail(lane).stats.lanes -= 1

    def _end_all(self) -> None:
        """The link is gone: nothing that was granted on it will be done."""
        for grant in self._grants.values():
            grant.end(is_ok=False)
        for push in self._pushes.values():
            push.change()

    def _close_windows(self, lane: int) -> None:
        """Before their queue pair: a device may refuse to destroy one that has windows."""
        windows = self._windows.get(lane, set())
        while windows:
            windows.pop().close()

    async def _rejoin(self, message: Rejoin) -> None:
        lane = self._lane(message.lane)
        self._close_windows(lane.index)
        if lane.queue_pair is not None:
            await lane.queue_pair.aclose("replaced by the host")
        try:
            if not is_up(
                lane.adapter.device
            ):  # connecting would hold up the loop until it knows that there is no way
                raise QueuePairError(self._control.peer, "closed", "the rail's port is down")
            made = self._made(lane, message.queue_pair)
            made.connect(message.queue_pair)
        except (RdmaLimit, QueuePairError) as error:
            self._rail(lane).stats.last_failure = str(error)
            self._control.post(Broken(message.queue_pair.number))
            return
        assert self._group is not None
        self._group.take(lane, made)
        self._node.stats.errors += 1
        self._rail(lane).stats.rejoins += 1
        self._control.post(Rejoined(message.queue_pair.number, made.address))

    # --- serving ---

    async def serve(self) -> None:
        """Answer the host until it ends the link or is cut off."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._control.flush)
                assert self._group is not None, "a link is served after it was joined"
                nursery.start_soon(self._group.watch)
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
                await enter(self._asking)  # who asks for too much at a time is not heard for a while
                total = self._check_ask(message)
                grant = self._grants[message.number] = _Grant(message.op, total, set(message.lanes))
                self._unanswered += 1
                nursery.start_soon(self._serve_ask, message, grant)
            case Done(number) if number in self._grants:
                self._grants[number].done(message)
            case Done():
                pass
            case Ready(lane):
                self._ready(lane)
            case Landing():
                self._land(message)
            case Pushed(number, lane):
                self._pushed(number, lane)
            case Rejoin():
                await self._rejoin(message)
            case _:
                raise self._protocol(f"{type(message).__name__} from a host")

    def _protocol(self, problem: str) -> FabricError:
        return FabricError(self._control.peer, "control", "protocol", 0, problem)

    def _check_ask(self, ask: Ask) -> int:
        """Bytes asked for."""
        frames = self._limits.frames
        if ask.op not in ("pull", "store") or not 0 < ask.number < 1 << 32 or ask.number in self._grants:
            raise self._protocol("a malformed ask")
        total = sum(length for _, _, length, _ in ask.entries)
        if len(ask.entries) > frames.max_entries or total > frames.max_request_bytes:
            raise self._protocol(f"an ask for {total} bytes in {len(ask.entries)} ranges")
        for lane in ask.lanes:
            self._lane(lane)
        sources = ask.runs.values() if ask.op == "store" else ()
        if any(sum(run.length for run in runs) != total for runs in sources):
            raise self._protocol("a store whose runs are not as long as its ranges")
        if any(len(runs) > 2 * frames.max_entries for runs in sources):  # twice: registrations have ends, too
            raise self._protocol("a store from too many places")
        return total

    # --- pulls and stores ---

    async def _serve_ask(self, ask: Ask, grant: _Grant) -> None:
        try:
            with self._node.claim(self.session, ask.op, ask.entries):
                serve = self._fetch if ask.op == "store" else self._serve_pull
                await serve(ask, grant)
        except Refused as refusal:
            self._node.stats.refused += 1
            self._tell(Refusal(ask.number, refusal.index, refusal.reason))
        except RdmaLimit as limit:
            self._tell(Refusal(ask.number, 0, str(limit)))
        except QueuePairError as error:
            self._end(ask, is_ok=False, why=str(error))
        else:
            if grant.is_ok:
                self._count(grant)
            self._end(ask, is_ok=grant.is_ok)
        finally:
            self._answered(grant)
            del self._grants[ask.number]
            self._asking.release()

    def _end(self, ask: Ask, *, is_ok: bool, why: str = "") -> None:
        """Of a pull that failed the host finds out by its own."""
        if ask.op == "store":
            self._tell(Ended(ask.number, is_ok, why))

    def _tell(self, answer: Granted | Refusal | Ended) -> None:
        """With the answers to other asks that are as far."""
        self._control.post(answer, soon=self._unanswered > 1 or self._control.is_gathering)

    def _answered(self, grant: _Grant) -> None:
        if not grant.is_answered:
            grant.is_answered = True
            self._unanswered -= 1

    def _count(self, grant: _Grant) -> None:
        self._node.stats.count(grant.op, grant.total)
        for index, num_bytes in (grant.carried or {}).items():
            stats = self._rail(self._lane(index)).stats
            if grant.op == "store":
                stats.bytes_in += num_bytes
            else:
                stats.bytes_out += num_bytes

    async def _fetch(self, ask: Ask, grant: _Grant) -> None:
        """READ what the host stores, into its place. After this no device touches that place."""
        if grant.total:
            with contextlib.ExitStack() as stack, grant.fetching:
                works = {
                    index: self._reads(self._lane(index), ask, stack)
                    for index in ask.lanes
                    if index in ask.runs and self._lane(index).is_usable
                }
                if not works:
                    raise QueuePairError(self._control.peer, "closed", "none of the lanes is usable")
                for index in works:
                    self._lane(index).adapter.expect()
                assert self._group is not None, "an open link has lanes"
                deadline = self._limits.pace.deadline(grant.total)
                if grant.total >= LONG_BYTES:
                    self._control.hurry()
                grant.carried = await self._group.carry(works, None, deadline)
        if grant.carried is not None or not grant.total:
            grant.end(is_ok=True)

    def _reads(self, lane: Lane, ask: Ask, stack: contextlib.ExitStack) -> list[Work]:
        """All of a store on one lane, whose memory stays registered as long as `stack` is."""
        memory = self._rail(lane).memory
        registrations = stack.enter_context(memory.using({entry[0] for entry in ask.entries if entry[2]}))
        local = [
            Sge(segment.address, segment.length, segment.chunk.lkey)
            for entry in ask.entries
            if entry[2]
            for segment in _segments(registrations[entry[0]], entry)
        ]
        return aligned(Opcode.READ, local, ask.runs[lane.index])

    async def _serve_pull(self, ask: Ask, grant: _Grant) -> None:
        async with contextlib.AsyncExitStack() as stack:
            runs: dict[int, list[Run]] = {}
            for lane in [self._lane(index) for index in ask.lanes]:
                await self._open_on(lane, ask, stack, runs)
            grant.lanes &= set(runs)
            if not grant.lanes:
                raise QueuePairError(self._control.peer, "closed", "none of the lanes is usable")
            self._tell(Granted(ask.number, runs))
            self._answered(grant)
            for index in runs:
                self._lane(index).adapter.expect()
            if not grant.total:
                grant.end(is_ok=True)
            with trio.CancelScope(deadline=self._limits.pace.deadline(grant.total)):
                await grant.over.wait()
            self._check_overstay(grant)

    async def _open_on(
        self, lane: Lane, ask: Ask, stack: contextlib.AsyncExitStack, runs: dict[int, list[Run]]
    ) -> None:
        """Open the ranges on one lane, as long as `stack` is; not on one that breaks."""
        memory = self._rail(lane).memory
        registrations = stack.enter_context(memory.using({entry[0] for entry in ask.entries if entry[2]}))
        try:
            runs[lane.index] = await stack.enter_async_context(self._opened(lane, ask, registrations))
        except QueuePairError:
            if len(ask.lanes) == 1:
                raise

    def _check_overstay(self, grant: _Grant) -> None:
        """Without windows, only the end of the queue pairs ends the host's access."""
        if grant.over.is_set():
            return
        self._node.stats.errors += 1
        for lane in [self._lane(index) for index in grant.lanes]:
            if not _has_windows(lane) and lane.queue_pair is not None:
                lane.queue_pair.fail("the host did not finish in its time")

    @contextlib.asynccontextmanager
    async def _opened(
        self, lane: Lane, ask: Ask, registrations: Mapping[int, Registration]
    ) -> AsyncIterator[list[Run]]:
        """The ranges of an ask, open to the host inside the block; given as runs in the ask's order."""
        wanted = [
            (entry, segment)
            for entry in ask.entries
            if entry[2]
            for segment in _segments(registrations[entry[0]], entry)
        ]
        if not _has_windows(lane):
            yield [Run(segment.address, segment.length, segment.chunk.rkey) for _, segment in wanted]
            return
        opened = self._windows[lane.index]  # of this queue pair: another's begins anew
        windows: dict[tuple[int, int], Window] = {}
        try:
            await self._bind(lane, wanted, windows)
            yield [
                Run(*stretch)
                for stretch in joined(
                    (segment.address, segment.length, windows[_window_of(entry, segment)].rkey)
                    for entry, segment in wanted
                )
            ]
        finally:
            for window in windows.values():
                window.close()
                opened.discard(window)

    async def _bind(
        self,
        lane: Lane,
        wanted: Sequence[tuple[Entry, Segment]],
        windows: dict[tuple[int, int], Window],
    ) -> None:
        """One window for each lease (and chunk), from the first byte asked for to the last."""
        extents: dict[tuple[int, int], Segment] = {}
        for entry, segment in wanted:
            name = _window_of(entry, segment)
            extents[name] = _around(extents[name], segment) if name in extents else segment
        for name in extents:
            windows[name] = lane.adapter.window()
            self._windows[lane.index].add(windows[name])
        binds = [
            Bind(windows[name], extent.chunk, extent.address, extent.length, Access.REMOTE_READ)
            for name, extent in extents.items()
        ]
        if lane.queue_pair is None:
            raise QueuePairError(self._control.peer, "closed")
        await lane.queue_pair.run(binds, trio.current_time() + self._limits.window_s)

    # --- pushes ---

    def _land(self, landing: Landing) -> None:
        if len(self._landings) >= self._limits.max_landings:
            raise self._protocol(f"more than {self._limits.max_landings} landings")
        if any(sum(run.length for run in runs) != landing.size for runs in landing.runs.values()):
            raise self._protocol("a landing whose runs are not its size")
        if {lane.rail for lane in self._lanes} - set(landing.runs):
            raise self._protocol("a landing that is not registered on every rail")
        self._landings[landing.region] = landing
        self._landed.set()
        self._landed = trio.Event()

    def _pushed(self, number: int, lane: int) -> None:
        push = self._pushes.get(number)
        if push is not None:
            push.told.add(lane)
            push.change()

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        total = sum(len(source) for source, _, _ in pieces)
        with trio.CancelScope(deadline=deadline):
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            landings = [
                await self._landing_at(region, offset, len(source)) for source, region, offset in pieces
            ]
            if total:
                async with self._pushing:
                    await self._push_somehow(pieces, landings, total, deadline)
            self._node.stats.count("push", total)
            return
        raise FabricError(self._control.peer, "push", "timed_out", 0)

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise FabricError(self._control.peer, "push", "closed", 0, self.close_reason)

    async def _landing_at(self, region: int, offset: int, length: int) -> Landing:
        """Where in the host's memory. Waits for a landing that was not announced yet: its news may be behind."""
        while region not in self._landings:
            await self._landed.wait()
            self._check_open()
        landing = self._landings[region]
        if not within(offset, length, landing.size):
            detail = f"no landing at region {region} [{offset}, +{length})"
            raise RemoteAccessError(self._control.peer, "push", detail)
        return landing

    async def _push_somehow(
        self,
        pieces: Sequence[tuple[memoryview, int, int]],
        landings: Sequence[Landing],
        total: int,
        deadline: float,
    ) -> None:
        """On what lanes are up; where all of these break, once more on what is up then."""
        assert self._group is not None, "an open link has lanes"
        last = len(self._lanes) - 1
        for attempt in range(last + 1):
            try:
                await self._until_up()
                await self._push(self._group.choose(total), pieces, landings, deadline)
                return
            except (QueuePairError, RdmaLimit) as error:
                status = getattr(error, "status", "limit")
                if attempt == last or status in ("limit", "timed_out") or not self.is_open:
                    raise self._push_failed(str(error), status) from error

    async def _until_up(self) -> None:
        assert self._group is not None
        while not self._group.policy.any_up():
            await self._raised.wait()
            self._check_open()

    async def _push(
        self,
        lanes: Sequence[Lane],
        pieces: Sequence[tuple[memoryview, int, int]],
        landings: Sequence[Landing],
        deadline: float,
    ) -> None:
        assert self._group is not None
        number = next(self._push_numbers)
        push = self._pushes[number] = _Push()
        spans: list[Span] = [(address_of(source), len(source)) for source, _, _ in pieces if source]
        try:
            with contextlib.ExitStack() as stack:
                works = {}
                for lane in lanes:
                    known = self._rail(lane).memory.known()
                    local = stack.enter_context(registered(lane.adapter, known, spans, Access.NONE))
                    runs = [
                        run
                        for (source, _, offset), landing in zip(pieces, landings, strict=True)
                        for run in cut(landing.runs[lane.rail], offset, len(source))
                    ]
                    works[lane.index] = aligned(Opcode.WRITE, sges_of(local, spans), runs)
                carried = await self._group.carry(works, number, deadline)
            push.lanes = set(carried)
            await self._until_seen(push)
        finally:
            del self._pushes[number]
        for index, num_bytes in carried.items():
            self._rail(self._lane(index)).stats.bytes_out += num_bytes

    async def _until_seen(self, push: _Push) -> None:
        while not push.is_seen:
            assert push.lanes is not None
            broken = [index for index in push.lanes - push.told if not self._lane(index).is_usable]
            if broken or not self.is_open:
                raise QueuePairError(self._control.peer, "closed", "it broke before the host saw the bytes")
            await push.changed.wait()

    def _push_failed(self, why: str, status: str) -> FabricError:
        known = status if status in ("timed_out", "limit") else "closed"
        return FabricError(self._control.peer, "push", known, 0, self.close_reason or why)


def _has_windows(lane: Lane) -> bool:
    return lane.adapter.device.limits.has_windows


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
