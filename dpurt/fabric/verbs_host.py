"""The verbs fabric, host side: an `Endpoint` that READs from and WRITEs to the node's memory, and lets it WRITE into landings.

Theory of operation: see `dpurt.fabric.verbs`. Memory of a landing is registered for its life, so pulling into (or storing from)
a landing's view costs nothing extra; any other memory is registered for the one call, which pins and unpins it: right for a
few large buffers, dear for many small calls.

A queue pair that breaks is replaced once by a task of the endpoint, and calls that were under way ask and move anew, once.
What fails then is a FabricError: the caller falls back, or tries later with a new endpoint.

A call that is cancelled or late waits until the device has let go of its memory, then raises.
"""

from __future__ import annotations

import itertools
import math
import mmap
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

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
from dpurt.fabric.region import MemfdRegion, next_landing_id
from dpurt.fabric.verbs_control import (
    Ask,
    Broken,
    Challenge,
    Control,
    Denied,
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
    Welcome,
    proof,
)
from dpurt.fabric.verbs_moves import Span, aligned, registered, sges_of, with_immediate
from dpurt.rdma.device import RdmaDevice, discover, why_off
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration, address_of
from dpurt.rdma.queue_pair import Opcode, QueuePair, Received, Sge

__all__ = ["VerbsEndpoint", "connect"]

SEND_DEPTH = 64
MAX_ASKS = 16  # at a time; the node allows more
MAX_PUSHES = 16  # receives posted: the node has no more under way
MAX_COMPLETIONS = 512
REJOIN_S = 10.0
FAR_END_S = 0.1


@dataclass(slots=True)
class _Question:
    """An ask that waits for its answers."""

    answer: Granted | Refusal | None = None
    is_stored: bool = False
    changed: trio.Event = field(default_factory=trio.Event)

    def answered(self, answer: Granted | Refusal) -> None:
        self.answer = answer
        self._change()

    def stored(self) -> None:
        self.is_stored = True
        self._change()

    def _change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class VerbsEndpoint:
    """The host's end of a link. `run` is its background task."""

    kind = "verbs"

    def __init__(self, adapter: Adapter, control: Control) -> None:
        self._adapter = adapter
        self._control = control
        self._stats = FabricStats(links=1)
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._asking = trio.Semaphore(MAX_ASKS)
        self._landings: dict[int, tuple[MemfdRegion, Registration]] = {}
        self._closed: str | None = None
        self._scratch = _scratch(adapter)
        self._generation = 0
        self._changed = trio.Event()  # a queue pair broke or was replaced, or the link ended
        self._offered: QueuePair | None = None  # to replace the present one, until the node has its own
        self._take(prepared(adapter, self._scratch, self._pushed))

    async def join(self, session: int, token: bytes) -> None:
        """The handshake. Raises FabricError, QueuePairError, RemoteProtocolError, NodeUnavailable."""
        challenge = await self._control.expect(Challenge, math.inf)
        nonces = challenge.nonce, secrets.token_bytes(16)
        mine = self._queue_pair.address
        said = proof(token, "host", nonces, session, mine)
        self._control.post(Join(session, nonces[1], mine, said))
        answer = await self._control.receive()
        if isinstance(answer, Denied):
            raise _denial(self._control.peer, answer)
        if not isinstance(answer, Welcome):
            raise self._protocol(f"{type(answer).__name__} where Welcome was due")
        if not secrets.compare_digest(proof(token, "node", nonces, session, answer.queue_pair), answer.proof):
            raise RemoteProtocolError("denied", "whoever answered does not know the session's token")
        self._queue_pair.connect(answer.queue_pair)

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

    def landing(self, size: int) -> MemoryRegion:
        """See `Endpoint.landing`. Raises RdmaLimit when it cannot be registered."""
        self._check_open("landing")
        region_id = next_landing_id()
        region = MemfdRegion(region_id, f"landing {region_id}", size, huge_pages=False)
        try:
            access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
            registration = self._adapter.register(region.address, region.size, access)
        except RdmaLimit:
            region.close()
            raise
        self._landings[region_id] = region, registration
        runs = [
            Run(segment.address, segment.length, segment.chunk.rkey)
            for segment in registration.segments(region.address, region.size)
        ]
        self._control.post(Landing(region_id, region.size, runs))
        return region

    async def aclose(self) -> None:
        self._close("closed by the host")
        await trio.lowlevel.checkpoint()

    async def _call(self, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        self._check_open(op)
        try:
            with trio.CancelScope(deadline=deadline):
                await trio.lowlevel.checkpoint_if_cancelled()
                async with self._asking:
                    generation = self._generation
                    try:
                        await self._attempt(op, pieces, deadline)
                    except QueuePairError as error:
                        if error.status == "timed_out":
                            raise
                        await self._until_replaced(generation)
                        await self._attempt(op, pieces, deadline)
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

    async def _attempt(self, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        """Ask, move, say so. Whatever happens, the node hears that we touch its memory no more.

        What is granted holds for the queue pair of that time, so another that took its place is not used."""
        queue_pair = self._queue_pair
        number = next(self._numbers)
        question = self._questions[number] = _Question()
        is_ok = False
        try:
            entries = [(piece.region_id, piece.offset, len(piece.local), piece.lease) for piece in pieces]
            self._control.post(Ask(number, op, entries))
            self._adapter.expect()
            runs = await self._granted(question, queue_pair, op, entries)
            if runs:
                await self._move(queue_pair, op, pieces, runs, number, deadline)
            if op == "store":
                await self._until_stored(question, queue_pair)
            is_ok = True
        finally:
            del self._questions[number]
            if not (is_ok and op == "store"):
                self._control.post(Done(number, is_ok))

    async def _granted(
        self,
        question: _Question,
        queue_pair: QueuePair,
        op: str,
        entries: Sequence[tuple[int, int, int, int]],
    ) -> list[Run]:
        while question.answer is None:
            await self._wait(question, queue_pair)
        if isinstance(question.answer, Refusal):
            raise RemoteAccessError(self._control.peer, op, _entry_text(entries, question.answer))
        return question.answer.runs

    async def _until_stored(self, question: _Question, queue_pair: QueuePair) -> None:
        while not question.is_stored:
            await self._wait(question, queue_pair)

    async def _wait(self, question: _Question, queue_pair: QueuePair) -> None:
        if not queue_pair.is_usable or self._closed:
            raise QueuePairError(queue_pair.peer, "closed", queue_pair.failure)
        await question.changed.wait()

    async def _move(
        self,
        queue_pair: QueuePair,
        op: str,
        pieces: Sequence[Piece],
        runs: Sequence[Run],
        number: int,
        deadline: float,
    ) -> None:
        spans: list[Span] = [(address_of(piece.local), len(piece.local)) for piece in pieces if piece.local]
        is_pull = op == "pull"
        known = [registration for _, registration in self._landings.values()]
        access = Access.LOCAL_WRITE if is_pull else Access.NONE
        if sum(run.length for run in runs) != sum(length for _, length in spans):
            raise self._protocol("a grant of another length than was asked for")
        with registered(self._adapter, known, spans, access) as local:
            works = aligned(Opcode.READ if is_pull else Opcode.WRITE, sges_of(local, spans), runs)
            await queue_pair.run(works if is_pull else with_immediate(works, number), deadline)

    # --- the queue pair ---

    def _take(self, queue_pair: QueuePair) -> None:
        self._queue_pair = queue_pair
        queue_pair.on_failed = self._broke

    def _broke(self) -> None:
        for question in self._questions.values():
            question.changed.set()
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _until_replaced(self, generation: int) -> None:
        while self._generation == generation:
            self._check_open("reconnect")
            await self._changed.wait()

    async def _replace_broken(self) -> None:
        """The task that has a broken queue pair replaced, for as long as the node plays along."""
        while self._closed is None:
            if self._queue_pair.is_usable:
                await self._changed.wait()
                continue
            self._stats.errors += 1
            with trio.move_on_after(REJOIN_S):
                await self._rejoin()
                continue
            self._broken("the node did not replace a broken queue pair")

    async def _rejoin(self) -> None:
        await self._queue_pair.aclose()
        try:
            self._offered = prepared(self._adapter, self._scratch, self._pushed)
        except (RdmaLimit, QueuePairError) as error:
            self._broken(str(error))
            return
        self._control.post(Rejoin(self._offered.address))
        while self._offered is not None and self._closed is None:
            await self._changed.wait()

    async def _far_end_broke(self, number: int) -> None:
        """Our end may have the better reason on its way: give it a moment."""
        await trio.sleep(FAR_END_S)
        if self._queue_pair.number == number and self._queue_pair.is_usable:
            self._queue_pair.fail("the node's end is broken")

    def _rejoined(self, message: Rejoined) -> None:
        offered, self._offered = self._offered, None
        if offered is None:
            raise self._protocol("a queue pair nobody asked for")
        offered.connect(message.queue_pair)
        self._take(offered)
        self._generation += 1
        self._change()

    def _pushed(self, received: Received) -> None:
        self._control.post(Pushed(received.immediate))

    # --- the background ---

    async def run(self) -> None:
        """Until the link ends, whoever ends it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._adapter.run)
            nursery.start_soon(self._control.flush)
            nursery.start_soon(self._replace_broken)
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
            case Granted(number) | Refusal(number):
                if number in self._questions:
                    self._questions[number].answered(message)
            case Stored(number):
                if number in self._questions:
                    self._questions[number].stored()
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
        self._adapter.close()
        for region, _ in self._landings.values():
            region.close()
        for question in self._questions.values():
            question.changed.set()
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


def _scratch(adapter: Adapter) -> Sge:
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    registration = adapter.register(address_of(memory), len(memory), Access.LOCAL_WRITE, memory)
    [segment] = registration.segments(registration.address, 8)
    return Sge(segment.address, 8, segment.chunk.lkey)


def prepared(adapter: Adapter, scratch: Sge, on_push: Callable[[Received], None]) -> QueuePair:
    """A queue pair ready to be connected, with receives for the immediates of pushes."""
    queue_pair = adapter.queue_pair(
        send_depth=SEND_DEPTH, receive_depth=MAX_PUSHES, access=Access.REMOTE_WRITE
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
        sock = await _dial(str(address["host"]), int(address["port"]), where)
        control = Control(sock, where)
        try:
            return await _open(control, local_device(sock.getsockname()[0]), session, token)
        except (FabricError, QueuePairError, RdmaLimit, RdmaUnavailable) as error:
            control.close()
            raise NodeUnavailable(where, str(error)) from error
        except BaseException:
            control.close()
            raise
    raise NodeUnavailable(where, "no answer before the deadline")


def local_device(address: str) -> RdmaDevice:
    """The device whose address the way to the node starts at, or the only one. Raises RdmaUnavailable."""
    devices = discover()
    fitting = [device for device in devices if device.address == address] or devices
    if len(fitting) != 1:
        names = "; ".join(map(str, devices))
        raise RdmaUnavailable("", f"the way to the node starts at {address}, which is none of {names}")
    return fitting[0]


async def _open(control: Control, device: RdmaDevice, session: int, token: bytes) -> VerbsEndpoint:
    adapter = Adapter(device, max_completions=MAX_COMPLETIONS)
    try:
        endpoint = VerbsEndpoint(adapter, control)
        await endpoint.join(session, token)
    except BaseException:
        adapter.close()
        raise
    trio.lowlevel.spawn_system_task(endpoint.run)
    return endpoint


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
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return socket.socket(fileno=sock.detach())
