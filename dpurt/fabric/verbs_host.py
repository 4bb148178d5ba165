"""The verbs fabric, host side: an `Endpoint` that READs from the node's memory, and lets it READ stores and WRITE into landings.

Theory of operation: see `dpurt.fabric.verbs`. Memory of a landing is registered for its life, so pulling into (or storing from)
a landing's view, or memory the host asked to `keep`, costs nothing extra; any other is registered for the one call, which pins
and unpins it: right for a few large buffers, dear for many small calls.

Each lane has a task that brings it up: connects its queue pair, sees a WRITE without bytes come through, tells the node. When it
breaks (an error, or no progress) it is made anew, later and later if that does not help. Calls that were under way on it go on
over the others; where there is none, they wait for one to come up and ask and move anew. What fails then is a FabricError: the
caller falls back, or tries later with a new endpoint. When no lane comes up for `REJOIN_S`, that is the end of the link.

A call that is cancelled or late waits until the devices have let go of its memory, then raises. (A node that does not say so in
`GIVE_UP_S` is not waited for: what it reads then, it will never be told to keep.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from dpurt.core.rails import LaneState
from dpurt.errors import (
    FabricError,
    NodeUnavailable,
    QueuePairError,
    RdmaLimit,
    RdmaUnavailable,
    RemoteAccessError,
    RemoteProtocolError,
)
from dpurt.fabric import Address, FabricStats, MemoryRegion, Piece
from dpurt.fabric.device_region import DeviceRegion
from dpurt.fabric.region import MemfdRegion, next_landing_id
from dpurt.fabric.verbs_control import (
    LONG_BYTES,
    Ask,
    Broken,
    Challenge,
    Control,
    Denied,
    Done,
    Ended,
    Granted,
    Join,
    Landing,
    LaneOffer,
    Message,
    Pushed,
    Ready,
    Refusal,
    Rejoin,
    Rejoined,
    Run,
    Welcome,
    enter,
    proof,
)
from dpurt.fabric.verbs_lanes import Lane, LaneGroup
from dpurt.fabric.verbs_moves import Span, aligned, joined, registered, runs_of, sges_of
from dpurt.rdma.device import RdmaDevice, discover, is_up, why_off
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, DmaBufRegistration, Registration, address_of
from dpurt.rdma.queue_pair import Opcode, QueuePair, Received, Sge, Work

__all__ = ["VerbsEndpoint", "connect"]

SEND_DEPTH = 64
MAX_ASKS = 16  # at a time; the node allows more
MAX_PUSHES = 16  # receives posted: the node has no more under way
MAX_COMPLETIONS = 512
REJOIN_S = 10.0
PROVE_S = 2.0
DIAL_S = 1.0
FAR_END_S = 0.1
GIVE_UP_S = 5.0
_KEPT = Access.LOCAL_WRITE | Access.REMOTE_READ  # pulled into, and stored from


@dataclass(slots=True)
class _Question:
    """An ask that waits for its answers."""

    answer: Granted | Refusal | Ended | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def answered(self, answer: Granted | Refusal | Ended) -> None:
        self.answer = answer
        self.change()

    def change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class VerbsEndpoint:
    """The host's end of a link. `run` is its background task."""

    kind = "verbs"

    def __init__(self, lanes: Sequence[Lane], control: Control) -> None:
        self._control = control
        self._stats = FabricStats(links=1)
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._asking = trio.Semaphore(MAX_ASKS)
        self._landings: dict[int, tuple[MemfdRegion, dict[Adapter, Registration]]] = {}
        self._kept: list[dict[Adapter, Registration]] = []
        self._device_landings: list[DmaBufRegistration] = []  # kept until the devices are closed
        self._closed: str | None = None
        self._adapters = list(dict.fromkeys(lane.adapter for lane in lanes))
        self._scratch = {adapter: _scratch(adapter) for adapter in self._adapters}
        self._changed = trio.Event()  # a lane broke or came up, or the link ended
        self._offered: dict[
            int, QueuePair
        ] = {}  # by number: to replace a broken one, until the node has its own
        self.lanes = LaneGroup(lanes, self._broke)
        self._up_at = math.inf  # when the last lane that was up broke; at first, when the link was made
        for lane in lanes:
            self.lanes.take(lane, self._prepared(lane))

    async def join(self, session: int, token: bytes) -> None:
        """The handshake. Raises FabricError, QueuePairError, RemoteProtocolError, NodeUnavailable."""
        challenge = await self._control.expect(Challenge, math.inf)
        nonces = challenge.nonce, secrets.token_bytes(16)
        mine = [LaneOffer(lane.rail, queue_pair_of(lane).address) for lane in self.lanes.lanes]
        said = proof(token, "host", nonces, session, mine)
        self._control.post(Join(session, nonces[1], mine, said))
        answer = await self._control.receive()
        if isinstance(answer, Denied):
            raise _denial(self._control.peer, answer)
        if not isinstance(answer, Welcome):
            raise self._protocol(f"{type(answer).__name__} where Welcome was due")
        if not secrets.compare_digest(
            proof(token, "node", nonces, session, answer.queue_pairs), answer.proof
        ):
            raise RemoteProtocolError("denied", "whoever answered does not know the session's token")
        if len(answer.queue_pairs) != len(mine):
            raise self._protocol(f"{len(answer.queue_pairs)} queue pairs for {len(mine)} lanes")
        for lane, theirs in zip(self.lanes.lanes, answer.queue_pairs, strict=True):
            with contextlib.suppress(QueuePairError):  # then this lane is down
                queue_pair_of(lane).connect(theirs)

    async def until_up(self) -> None:
        """Wait for the first lane. Raises FabricError when the link ends instead."""
        while not self.lanes.policy.any_up():
            self._check_open("connect")
            await self._changed.wait()

    @property
    def stats(self) -> FabricStats:
        return self._stats

    # --- calls ---

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        await self._call("pull", pieces, deadline)

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        await self._call("store", pieces, deadline)

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        return None

    def keep(self, memory: memoryview) -> None:
        """See `Endpoint.keep`. Takes as long as the device takes to pin it."""
        self._check_open("keep")
        address, length = address_of(memory), memory.nbytes
        made: dict[Adapter, Registration] = {}
        try:
            for adapter in self._adapters:
                made[adapter] = adapter.register(address, length, _KEPT, memory)
        except RdmaLimit:
            for registration in made.values():
                registration.close()
            raise
        self._kept.append(made)

    def landing(self, size: int) -> MemoryRegion:
        """See `Endpoint.landing`. Raises RdmaLimit when it cannot be registered."""
        self._check_open("landing")
        region_id = next_landing_id()
        region = MemfdRegion(region_id, f"landing {region_id}", size, huge_pages=False)
        registrations: dict[Adapter, Registration] = {}
        try:
            access = _KEPT | Access.REMOTE_WRITE
            for adapter in self._adapters:
                registrations[adapter] = adapter.register(region.address, region.size, access)
        except RdmaLimit:
            for registration in registrations.values():
                registration.close()
            region.close()
            raise
        self._landings[region_id] = region, registrations
        span = region.address, region.size
        runs = {lane.rail: runs_of([registrations[lane.adapter]], [span]) for lane in self.lanes.lanes}
        self._control.post(Landing(region_id, region.size, runs))
        return region

    def land_on(self, region: DeviceRegion) -> None:
        """Offer device memory the node may push into, for as long as this endpoint is open. Raises RdmaLimit where the NIC
        cannot register it. Its `region_id` must be one of `next_landing_id`'s. UNTRIED on a device that can.
        """
        self._check_open("landing")
        made: dict[Adapter, DmaBufRegistration] = {}
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        try:
            for adapter in self._adapters:
                made[adapter] = DmaBufRegistration(adapter, region.fd, region.offset, region.size, access)
        except RdmaLimit:
            for registration in made.values():
                registration.close()
            raise
        runs = {
            lane.rail: [Run(region.offset, region.size, made[lane.adapter].rkey)] for lane in self.lanes.lanes
        }
        self._device_landings += made.values()
        self._control.post(Landing(region.region_id, region.size, runs))

    async def aclose(self) -> None:
        self._close("closed by the host")
        await trio.lowlevel.checkpoint()

    async def _call(self, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        self._check_open(op)
        try:
            with trio.CancelScope(deadline=deadline):
                await trio.lowlevel.checkpoint_if_cancelled()
                await enter(self._asking)
                try:
                    await self._attempts(op, pieces, deadline)
                finally:
                    self._asking.release()
                self._stats.count(op, sum(len(piece.local) for piece in pieces))
                return
        except (QueuePairError, RdmaLimit) as error:
            raise self._failed(op, error) from error
        raise FabricError(self._control.peer, op, "timed_out", 0)

    def _failed(self, op: str, error: QueuePairError | RdmaLimit) -> FabricError:
        if isinstance(error, RdmaLimit):
            return FabricError(self._control.peer, op, "limit", 0, str(error))
        status = "timed_out" if error.status == "timed_out" else "closed"
        return FabricError(self._control.peer, op, status, 0, self._closed or str(error))

    async def _attempts(self, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        """Once more for each lane there is, when all that was tried broke."""
        last = len(self.lanes.lanes)
        for attempt in range(last + 1):
            try:
                await self.until_up()
                await self._attempt(op, pieces, deadline)
                return
            except QueuePairError as error:
                if error.status == "timed_out" or attempt == last:
                    raise

    async def _attempt(self, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        """On what lanes are up. What is granted, or read from us, is so for the queue pairs of this time: others that took
        their places are not used.
        """
        lanes = self.lanes.choose(sum(len(piece.local) for piece in pieces))
        asked = {lane.index: queue_pair_of(lane) for lane in lanes}
        number = next(self._numbers)
        question = self._questions[number] = _Question()
        entries = [(piece.region_id, piece.offset, len(piece.local), piece.lease) for piece in pieces]
        ask = Ask(number, op, entries, list(asked))
        local = ((address_of(piece.local), len(piece.local), 0) for piece in pieces if piece.local)
        spans: list[Span] = [(address, length) for address, length, _ in joined(local)]
        move = self._pull if op == "pull" else self._store
        try:
            await move(ask, question, asked, spans, deadline)
        finally:
            del self._questions[number]

    async def _pull(
        self,
        ask: Ask,
        question: _Question,
        asked: Mapping[int, QueuePair],
        spans: Sequence[Span],
        deadline: float,
    ) -> None:
        """Ask, READ, say so. Whatever happens, the node hears that we touch its memory no more."""
        carried: dict[int, int] | None = None
        try:
            self._ask(ask, asked)
            runs = await self._granted(question, asked, ask)
            carried = await self._move(asked, spans, runs, deadline)
        finally:
            self._control.post(Done(ask.number, carried is not None, carried or {}), soon=True)

    async def _store(
        self,
        ask: Ask,
        question: _Question,
        asked: Mapping[int, QueuePair],
        spans: Sequence[Span],
        deadline: float,
    ) -> None:
        """Tell the node where the bytes are, and wait until it has READ them, or does so no more."""
        with contextlib.ExitStack() as stack:
            local = self._registered(stack, asked, spans, Access.REMOTE_READ)
            runs = {index: runs_of(local[self.lanes.lanes[index].adapter], spans) for index in asked}
            try:
                self._ask(msgspec.structs.replace(ask, runs=runs), asked)
                end = await self._end_of(ask, question, asked)
            except BaseException:
                await self._withdraw(ask, question, asked)
                raise
        if not end.is_ok:
            await self._until_one_breaks(asked)
            raise QueuePairError(self._control.peer, "closed", end.why)

    async def _end_of(self, ask: Ask, question: _Question, asked: Mapping[int, QueuePair]) -> Ended:
        """When every lane broke, the node's word on it may be on its way."""
        try:
            answer = await self._answered(question, asked, ask)
        except QueuePairError:
            with trio.move_on_after(FAR_END_S):
                while question.answer is None:
                    await question.changed.wait()
            if not isinstance(question.answer, Ended):
                raise
            answer = question.answer
        if not isinstance(answer, Ended):
            raise self._protocol("a grant where the end of a store was due")
        return answer

    async def _until_one_breaks(self, asked: Mapping[int, QueuePair]) -> None:
        """The node saw one break; our end of it is about to: ask on others, or anew, only then."""
        with trio.move_on_after(2 * FAR_END_S):
            while all(queue_pair.is_usable for queue_pair in asked.values()):
                await self._changed.wait()

    async def _withdraw(self, ask: Ask, question: _Question, asked: Mapping[int, QueuePair]) -> None:
        """Nobody waits for the store: the node must not go on reading memory that is about to be somebody else's."""
        if question.answer is None:
            self._control.post(Done(ask.number, False), soon=True)  # not before the ask, which may wait to go
            with trio.move_on_after(GIVE_UP_S) as limit, contextlib.suppress(QueuePairError):
                limit.shield = True
                while question.answer is None:
                    await self._wait(question, asked)

    def _ask(self, ask: Ask, asked: Mapping[int, QueuePair]) -> None:
        self._control.post(ask, soon=len(self._questions) > 1)
        for index in asked:
            self.lanes.lanes[index].adapter.expect()

    async def _granted(
        self, question: _Question, asked: Mapping[int, QueuePair], ask: Ask
    ) -> dict[int, list[Run]]:
        """By lane; the node leaves out those that broke."""
        answer = await self._answered(question, asked, ask)
        if not isinstance(answer, Granted):
            raise self._protocol("the end of a store where a grant was due")
        return {index: runs for index, runs in answer.runs.items() if index in asked}

    async def _answered(
        self, question: _Question, asked: Mapping[int, QueuePair], ask: Ask
    ) -> Granted | Ended:
        """Raises RemoteAccessError when it is a refusal, QueuePairError when none will come."""
        while question.answer is None:
            await self._wait(question, asked)
        if isinstance(question.answer, Refusal):
            raise RemoteAccessError(self._control.peer, ask.op, _entry_text(ask.entries, question.answer))
        return question.answer

    async def _wait(self, question: _Question, asked: Mapping[int, QueuePair]) -> None:
        if self._closed or not any(queue_pair.is_usable for queue_pair in asked.values()):
            raise self._all_broke(asked)
        await question.changed.wait()

    def _all_broke(self, asked: Mapping[int, QueuePair]) -> QueuePairError:
        failures = "; ".join(queue_pair.failure for queue_pair in asked.values())
        return QueuePairError(
            self._control.peer, "closed", f"every lane that was asked for broke: {failures}"
        )

    async def _move(
        self,
        asked: Mapping[int, QueuePair],
        spans: Sequence[Span],
        runs: Mapping[int, Sequence[Run]],
        deadline: float,
    ) -> dict[int, int]:
        """Bytes by lane."""
        total = sum(length for _, length in spans)
        if any(sum(run.length for run in granted) != total for granted in runs.values()):
            raise self._protocol("a grant of another length than was asked for")
        if not total:
            return {}
        with contextlib.ExitStack() as stack:
            local = self._registered(stack, runs, spans, Access.LOCAL_WRITE)
            works: dict[int, list[Work]] = {}
            for index, granted in runs.items():
                lane = self.lanes.lanes[index]
                if lane.queue_pair is asked[index] and lane.is_usable:
                    works[index] = aligned(Opcode.READ, sges_of(local[lane.adapter], spans), granted)
            if not works:
                raise self._all_broke(asked)
            if total >= LONG_BYTES:
                self._control.hurry()
            return await self.lanes.carry(works, None, deadline)

    def _registered(
        self, stack: contextlib.ExitStack, lanes: Iterable[int], spans: Sequence[Span], access: Access
    ) -> dict[Adapter, list[Registration]]:
        """What holds the spans, on the devices of these lanes, as long as `stack` is. Raises RdmaLimit."""
        return {
            adapter: stack.enter_context(registered(adapter, self._known(adapter), spans, access))
            for adapter in {self.lanes.lanes[index].adapter for index in lanes}
        }

    def _known(self, adapter: Adapter) -> list[Registration]:
        landings = [registrations for _, registrations in self._landings.values()]
        return [registrations[adapter] for registrations in (*landings, *self._kept)]

    # --- lanes ---

    def _broke(self, lane: Lane) -> None:
        for question in self._questions.values():
            question.change()
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _prepared(self, lane: Lane) -> QueuePair:
        pushed = functools.partial(self._pushed, lane.index)
        return prepared(lane.adapter, self._scratch[lane.adapter], pushed)

    async def _keep_up(self, lane: Lane) -> None:
        """The task that brings a lane up, and again whenever it breaks, for as long as the node plays along."""
        policy, state = self.lanes.policy, self.lanes.states[lane.index]
        if lane.is_usable:
            await self._prove(lane)
        while self._closed is None:
            await self._while_up(state)
            self._stats.errors += 1
            if not policy.any_up() and trio.current_time() - self._up_at > REJOIN_S:
                self._broken(f"no lane passes bytes; the last: {state.last_failure}")
                return
            await queue_pair_of(lane).aclose()
            await trio.sleep_until(state.retry_at)
            if await self._rejoin(lane):
                await self._prove(lane)

    async def _while_up(self, state: LaneState) -> None:
        if state.is_up:
            while state.is_up:
                await self._changed.wait()
            self._up_at = trio.current_time()

    async def _prove(self, lane: Lane) -> None:
        """A WRITE without bytes is answered by the peer's device if there is a way to it."""
        queue_pair = queue_pair_of(lane)
        try:
            await queue_pair.run([Work(Opcode.WRITE, ())], trio.current_time() + PROVE_S)
        except QueuePairError as error:
            queue_pair.fail(str(error))
            return
        self.lanes.up(lane)
        self._control.post(Ready(lane.index))
        self._change()

    async def _rejoin(self, lane: Lane) -> bool:
        """Whether the lane has a connected queue pair again."""
        now = trio.current_time()
        if not is_up(lane.adapter.device):
            self.lanes.policy.broke(lane.index, f"{lane.adapter.device.name}: its port is down", now)
            return False
        try:
            offered = self._prepared(lane)
        except (RdmaLimit, QueuePairError) as error:
            self.lanes.policy.broke(lane.index, str(error), now)
            return False
        self._offered[offered.number] = offered
        self._control.post(Rejoin(lane.index, offered.address))
        with trio.move_on_after(REJOIN_S):
            while offered.number in self._offered and self._closed is None:
                await self._changed.wait()
        self._offered.pop(offered.number, None)
        if offered.is_usable:
            self.lanes.take(lane, offered)
            return True
        why = offered.failure or "the node did not replace a broken queue pair"
        offered.destroy()
        self.lanes.policy.broke(lane.index, why, trio.current_time())
        return False

    async def _far_end_broke(self, number: int) -> None:
        """Our end may have the better reason on its way: give it a moment."""
        offered = self._offered.pop(number, None)
        if offered is not None:
            offered.fail("the node could not replace it")
            self._change()
            return
        await trio.sleep(FAR_END_S)
        for lane in self.lanes.lanes:
            if lane.queue_pair is not None and lane.queue_pair.number == number and lane.is_usable:
                lane.queue_pair.fail("the node's end is broken")

    def _rejoined(self, message: Rejoined) -> None:
        offered = self._offered.pop(message.number, None)
        if offered is not None:  # else it comes too late
            with contextlib.suppress(QueuePairError):  # then it is not usable
                offered.connect(message.queue_pair)
            self._change()

    def _pushed(self, lane: int, received: Received) -> None:
        self._control.post(Pushed(received.immediate, lane))

    # --- the background ---

    async def run(self) -> None:
        """Until the link ends, whoever ends it."""
        self._up_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for adapter in self._adapters:
                nursery.start_soon(adapter.run)
            nursery.start_soon(self._control.flush)
            nursery.start_soon(self.lanes.watch)
            for lane in self.lanes.lanes:
                nursery.start_soon(self._keep_up, lane)
            try:
                while True:
                    self._hear(await self._control.receive(), nursery)
            except FabricError as error:
                if error.status == "closed":
                    self._close("closed by the node")
                else:
                    self._broken(str(error))
            except QueuePairError as error:
                self._broken(str(error))
            nursery.cancel_scope.cancel()

    def _hear(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Granted(number) | Refusal(number) | Ended(number):
                if number in self._questions:
                    self._questions[number].answered(message)
            case Rejoined():
                self._rejoined(message)
            case Broken(number):
                nursery.start_soon(self._far_end_broke, number)
            case _:
                raise self._protocol(f"{type(message).__name__} from a node")

    def _protocol(self, problem: str) -> FabricError:
        return FabricError(self._control.peer, "control", "protocol", 0, problem)

    def _check_open(self, stage: str) -> None:
        if self._closed is not None:
            raise FabricError(self._control.peer, stage, "closed", 0, self._closed)

    def _broken(self, reason: str) -> None:
        if self._closed is None:
            self._stats.errors += 1
            self._close(reason)

    def _close(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._stats.links = 0
        self._control.close()
        for adapter in self._adapters:
            adapter.close()
        for region, _ in self._landings.values():
            region.close()
        for question in self._questions.values():
            question.change()
        self._change()


def _denial(where: str, denied: Denied) -> NodeUnavailable | RemoteProtocolError:
    if denied.code == "busy":
        return NodeUnavailable(where, denied.why)
    return RemoteProtocolError("denied", denied.why)


def _entry_text(entries: Sequence[tuple[int, int, int, int]], refusal: Refusal) -> str:
    if refusal.index >= len(entries):
        return refusal.why
    region_id, offset, length, lease = entries[refusal.index]
    return f"entry {refusal.index} refused: region {region_id} [{offset}, +{length}) lease {lease}: {refusal.why}"


def queue_pair_of(lane: Lane) -> QueuePair:
    """A host's lane always has one, good or broken."""
    assert lane.queue_pair is not None
    return lane.queue_pair


def _scratch(adapter: Adapter) -> Sge:
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    registration = adapter.register(address_of(memory), len(memory), Access.LOCAL_WRITE, memory)
    [segment] = registration.segments(registration.address, 8)
    return Sge(segment.address, 8, segment.chunk.lkey)


def prepared(adapter: Adapter, scratch: Sge, on_push: Callable[[Received], None]) -> QueuePair:
    """A queue pair ready to be connected, with receives for the immediates of pushes."""
    queue_pair = adapter.queue_pair(
        send_depth=SEND_DEPTH, receive_depth=MAX_PUSHES, access=Access.REMOTE_READ | Access.REMOTE_WRITE
    )

    def arrived(received: Received) -> None:
        if received.is_ok:
            queue_pair.post_receive(scratch, arrived)
            on_push(received)

    queue_pair.prepare()
    for _ in range(MAX_PUSHES):
        queue_pair.post_receive(scratch, arrived)
    return queue_pair


# --- opening a link -----------------------------------------------------------------------------------------------------


async def connect(address: Address, session: int, token: bytes, deadline: float) -> VerbsEndpoint:
    """Open a link. Raises NodeUnavailable (also when this machine has no verbs, saying why), RemoteProtocolError."""
    where = f"verbs://{address['host']}:{address['port']}"
    if reason := why_off():
        raise NodeUnavailable(where, f"verbs is off on this machine: {reason}")
    with trio.CancelScope(deadline=deadline):
        rails = str(address.get("rails", address["host"])).split(",")
        control = Control(await _dial_one(rails, int(address["port"]), where), where)
        try:
            pairs = paired(rails, discover())
            return await _open(control, pairs * int(address.get("queue_pairs", 1)), session, token)
        except (FabricError, QueuePairError, RdmaLimit, RdmaUnavailable) as error:
            control.close()
            raise NodeUnavailable(where, str(error)) from error
        except BaseException:
            control.close()
            raise
    raise NodeUnavailable(where, "no answer, or no bytes through any rail, before the deadline")


def paired(rails: Sequence[str], devices: Sequence[RdmaDevice]) -> list[tuple[str, RdmaDevice]]:
    """Each of the node's rails with the device of ours that the way to it starts at. Raises RdmaUnavailable for none.

    A single device of ours leads to them all, whatever addresses the ways start at."""
    found = []
    for rail in rails:
        start = _way_starts_at(rail)
        fitting = [device for device in devices if device.address == start]
        if fitting:
            found.append((rail, fitting[0]))
        elif len(devices) == 1:
            found.append((rail, devices[0]))
    if not found:
        names = "; ".join(map(str, devices))
        raise RdmaUnavailable("", f"the way to {', '.join(rails)} starts at none of {names}")
    return found


def _way_starts_at(address: str) -> str:
    """Our address on the way to this one; empty if there is no way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


async def _open(
    control: Control, pairs: Sequence[tuple[str, RdmaDevice]], session: int, token: bytes
) -> VerbsEndpoint:
    adapters: dict[RdmaDevice, Adapter] = {}
    try:
        for _, device in pairs:
            if device not in adapters:
                adapters[device] = Adapter(device, max_completions=MAX_COMPLETIONS)
        lanes = [Lane(index, rail, adapters[device]) for index, (rail, device) in enumerate(pairs)]
        endpoint = VerbsEndpoint(lanes, control)
        await endpoint.join(session, token)
    except BaseException:
        for adapter in adapters.values():
            adapter.close()
        raise
    trio.lowlevel.spawn_system_task(endpoint.run)
    try:
        await endpoint.until_up()
    except BaseException:
        await endpoint.aclose()
        raise
    return endpoint


async def _dial_one(rails: Sequence[str], port: int, where: str) -> socket.socket:
    """Through the first rail that answers."""
    for rail in rails[:-1]:
        with contextlib.suppress(NodeUnavailable), trio.move_on_after(DIAL_S):
            return await _dial(rail, port, where)
    return await _dial(rails[-1], port, where)


async def _dial(host: str, port: int, where: str) -> socket.socket:
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        await sock.connect((host, port))
    except OSError as error:
        sock.close()
        raise NodeUnavailable(where, str(error)) from error
    except BaseException:
        sock.close()
        raise
    return socket.socket(fileno=sock.detach())
