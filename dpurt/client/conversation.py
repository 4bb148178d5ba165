"""One host's conversation with one node: requests and their replies over one DEALER socket, sessions, and fabric links.

A reader task hands replies to their waiters by id. The session (the `hello` exchange, and the fabric link it opens) is made on first
use and again when the node says it does not know us, e.g. after its restart, or when it was silent during a whole call; between
tries that failed there is a growing pause, so a dead node costs a call nothing but an exception. A session is lost for all calls
at once, and only once: who fails on an old one does not touch the next.

Every session must be of the epochs of the first: after `dpurt epoch bump` (new weights) all calls raise `SpaceMismatch` for
``epoch``, for what this engine computes or holds belongs to the old weights; one with the new weights makes a new client.

A fabric that does not open (shared memory with a node on another machine, say) is left out of a second `hello`, so that the
node picks the next one; so is, for `AVOID_S`, one whose links broke `MAX_BROKEN_LINKS` times in a row. `fabric_failures` keeps why.

Leaves to others: what is said (`dpurt.client.trio_client`).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import trio

from dpurt.core.identity import Space
from dpurt.core.rails import LaneState
from dpurt.errors import (
    DeadlineExceeded,
    FabricError,
    NodeUnavailable,
    RdmaLimit,
    RemoteAccessError,
    RemoteProtocolError,
    SpaceMismatch,
)
from dpurt.fabric import Address, Endpoint
from dpurt.fabric import connect as connect_fabric
from dpurt.transport import ZmqSocket
from dpurt.wire import messages as m

__all__ = ["BACKOFF_S", "MAX_REPLY_BYTES", "Conversation", "Session", "Terms"]

T = TypeVar("T", bound=m.Reply)
MAX_REPLY_BYTES = 16 << 20
KEEP_BYTES = 256 << 20
MAX_BROKEN_LINKS = 2
SILENT_S = 1.0  # nothing heard for so long is silence, however little time a call had
AVOID_S = 60.0
BACKOFF_S = (0.05, 0.2, 0.5, 1.0)
_WAY_BACK = 0.1  # share of a call's budget kept for the answer's way, at most
_WAY_BACK_S = 0.1
_GOODBYE_S = 0.25
_SESSION_OVER = frozenset({"no_session", "stale_epoch"})
_NOT_NOW = frozenset({"draining", "busy", "denied"})  # codes of a node that is there and will not have us
_ANEW = (m.Lookup, m.Reserve, m.Explain, m.Stats, m.Subscribe, m.Route)  # need nothing of an old session


@dataclass(frozen=True, slots=True)
class Session:
    """What one successful `hello` gave."""

    reply: m.HelloReply
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Terms:
    """What a host brings: its name in the node's topology, its spaces, the fabrics it can use (best first), the epochs its
    weights belong to as far as it says, where its buffers will be, and how long a call may take if it does not say.
    """

    host: str
    spaces: Mapping[str, Space]
    fabrics: Sequence[str]
    epochs: Mapping[str, int]
    memories: Sequence[memoryview]
    timeout_s: float


class Conversation:
    """See above. Its three loops, `read`, `keep_alive` and `keep_memories`, run beside the calls until cancelled.

    `prepare` is called on each new session before it counts; `give_back` gets the answer to a load or reserve that nobody
    waits for any more; `lost` hears of the end of a session before its memory goes.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        endpoint: str,
        terms: Terms,
        prepare: Callable[[Session, float], Awaitable[None]],
        give_back: Callable[[m.LoadReply | m.ReserveReply], Awaitable[None]],
        lost: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.terms = terms
        self.epochs = dict(terms.epochs)
        self.current: Session | None = None
        self.fabric_failures: dict[str, str] = {}
        self._socket = socket
        self._prepare = prepare
        self._give_back = give_back
        self._lost = lost
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[m.AnyReply]]] = {}
        self._opened = trio.Event()  # a session was
        self._opening = trio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._heard_at = 0.0
        self._broken_links: dict[str, int] = {}  # in a row, by fabric
        self._avoided_until: dict[str, float] = {}

    # --- session ---

    @property
    def lanes(self) -> Sequence[LaneState]:
        """The lanes of the present link (verbs has some): what each carried, how fast it is, how it broke. A snapshot's owner
        changes it.
        """
        group = None if self.current is None else getattr(self.current.endpoint, "lanes", None)
        return [] if group is None else list(group.states)

    async def ensure(self, deadline: float) -> Session:
        if self.current is not None:
            return self.current
        with trio.move_on_at(deadline) as waiting:
            await self._opening.acquire()
        if waiting.cancelled_caught:
            raise NodeUnavailable(self.endpoint, "no session yet")
        try:
            if self.current is None:
                self.current = await self._try_session(deadline)
                self._opened.set()
            return self.current
        finally:
            self._opening.release()

    async def _try_session(self, deadline: float) -> Session:
        if trio.current_time() < self._not_before:
            raise NodeUnavailable(self.endpoint, "did not answer a moment ago")
        try:
            session = await self._open_session(deadline)
        except (DeadlineExceeded, NodeUnavailable, FabricError, OSError, RemoteProtocolError) as error:
            if isinstance(error, RemoteProtocolError) and error.code not in _NOT_NOW:
                raise
            pause = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures += 1
            self._not_before = trio.current_time() + pause
            why = f"{error.endpoint}: {error.why}" if isinstance(error, NodeUnavailable) else str(error)
            raise NodeUnavailable(self.endpoint, why) from error
        self._failures = 0
        return session

    async def _open_session(self, deadline: float) -> Session:
        now = trio.current_time()
        left = [kind for kind in self.terms.fabrics if self._avoided_until.get(kind, now) <= now]
        left, failure = left or list(self.terms.fabrics), None
        while True:
            try:
                reply = await self._say_hello(left, deadline)
            except RemoteProtocolError as error:
                if failure is not None and error.code == "no_fabric":
                    raise failure from error
                raise
            try:
                session = Session(reply, await self._open_link(reply, len(left), deadline))
                try:
                    await self._prepare(session, deadline)
                except BaseException:
                    self._lost()
                    with trio.CancelScope(shield=True):
                        await session.endpoint.aclose()
                    raise
                return session
            except (NodeUnavailable, FabricError, OSError, RemoteProtocolError) as error:
                failure = error
                self.fabric_failures[reply.fabric] = str(error)
                left = [kind for kind in left if kind != reply.fabric]
                if not left:
                    raise
                await self.post(m.Bye())  # what the node made for this session need not wait for its timeout

    async def _say_hello(self, fabrics: list[str], deadline: float) -> m.HelloReply:
        claims = [
            m.claim_of(name, space, epoch=self.epochs.get(name)) for name, space in self.terms.spaces.items()
        ]
        hello = m.Hello(host=self.terms.host, protocol=m.PROTOCOL, spaces=claims, fabrics=fabrics)
        reply = await self.exchange(hello, m.HelloReply, deadline)
        for name, epoch in reply.epochs.items():
            self.epochs.setdefault(name, epoch)
        return reply

    async def _open_link(self, reply: m.HelloReply, choices: int, deadline: float) -> Endpoint:
        """The link `reply` offers, in its share of the time: the other `choices` need theirs."""
        now = trio.current_time()
        address = _address_from(self.endpoint, reply.fabric_address)
        limit = now + (deadline - now) / choices
        return await connect_fabric(reply.fabric, address, reply.session, reply.token, limit)

    async def lose(self, session: Session | None) -> None:
        if session is not None and self.current is session:
            self.current = None
            self._lost()
            await session.endpoint.aclose()

    async def close(self) -> None:
        """End the session. The link closes when the node has answered, so that it sees what was posted before this first: a
        closed link would end the session under it. A node that is silent is not waited for long.
        """
        if self.current is not None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.read)  # that of a caller who was cancelled has ended
                with suppress(DeadlineExceeded, RemoteProtocolError):
                    await self.exchange(m.Bye(), m.Ok, trio.current_time() + _GOODBYE_S)
                nursery.cancel_scope.cancel()
            await self.lose(self.current)

    async def keep_memories(self) -> None:
        """Have this host's memory registered for every new link, beside its calls: pinning takes a device seconds per 10 GiB.

        Piece by piece on this thread, so that it neither holds the loop for long nor runs while a link is being closed.
        """
        while True:
            await self._opened.wait()
            self._opened = trio.Event()
            if self.current is None:
                continue
            try:
                await self._keep_all(self.current.endpoint)
            except (RdmaLimit, FabricError) as error:  # what is not kept is registered for each call
                self.fabric_failures["memories"] = str(error)

    async def _keep_all(self, endpoint: Endpoint) -> None:
        for memory in self.terms.memories:
            for start in range(0, len(memory), KEEP_BYTES):
                endpoint.keep(memory[start : start + KEEP_BYTES])
                await trio.lowlevel.checkpoint()

    async def keep_alive(self) -> None:
        while True:
            session = self.current
            await trio.sleep(session.reply.session_timeout_ms / 4000 if session else 0.25)
            if self.current is not None:
                await self.post(m.Ping(id=next(self._ids)))  # answered, so that silence means something

    # --- wire ---

    async def read(self) -> None:
        while True:
            frames = await self._socket.recv()
            try:
                reply = m.decode_reply(frames[-1])
            except RemoteProtocolError:
                continue  # not ours to judge; its waiter will time out
            self._heard_at = trio.current_time()
            waiter = self._waiting.get(reply.id)
            if waiter is not None:
                waiter[1].append(reply)
                waiter[0].set()
            elif isinstance(reply, (m.LoadReply, m.ReserveReply)):
                await self._give_back(reply)  # who asked has given up
            elif isinstance(reply, m.ErrorReply) and reply.code == "no_session":
                await self.lose(self.current)

    async def post(self, request: m.Request) -> None:
        """Send without an answer; dropped when the socket is full."""
        with trio.move_on_after(0.5):
            await self._socket.send([m.encode(request)])

    async def exchange(self, request: m.Request, kind: type[T], deadline: float) -> T:
        """Send a request, and its answer; in whatever session there is."""
        now = trio.current_time()
        budget = max(deadline - now, 0.001)
        request.id = next(self._ids)
        node_s = budget - min(_WAY_BACK * budget, _WAY_BACK_S)
        request.deadline_ms = max(1, min(int(node_s * 1000), 3_600_000))
        message = m.encode(request)
        if self.current is not None and len(message) > (most := self.current.reply.max_message_bytes):
            problem = f"a request of {len(message):,} bytes; this node takes {most:,} (max_message_bytes)"
            raise RemoteProtocolError("too_large", problem)
        event, box = trio.Event(), list[m.AnyReply]()
        self._waiting[request.id] = event, box
        try:
            with trio.move_on_at(deadline):
                await self._socket.send([message])
                await event.wait()
        finally:
            del self._waiting[request.id]
        if not box:
            raise DeadlineExceeded(type(request).__name__.lower(), budget)
        return _expect(box[0], kind)

    def deadline(self, timeout_s: float | None) -> float:
        """Of a call that begins now and may take so long."""
        return trio.current_time() + (self.terms.timeout_s if timeout_s is None else timeout_s)

    async def call(self, request: m.Request, kind: type[T], timeout_s: float | None = None) -> T:
        """Ask in a session, once more in a new one when the old one was over and the request needs nothing of it."""
        deadline = self.deadline(timeout_s)
        try:
            return await self._call_once(request, kind, deadline)
        except NodeUnavailable as error:
            if not isinstance(request, _ANEW) or not isinstance(error.__cause__, RemoteProtocolError):
                raise
            if error.__cause__.code not in _SESSION_OVER:
                raise
        return await self._call_once(request, kind, deadline)

    async def _call_once(self, request: m.Request, kind: type[T], deadline: float) -> T:
        session = await self.ensure(deadline)
        began = trio.current_time()
        try:
            return await self.exchange(request, kind, deadline)
        except RemoteProtocolError as error:
            if error.code not in _SESSION_OVER:
                raise
            await self.lose(session)
            raise NodeUnavailable(self.endpoint, f"session lost ({error.code})") from error
        except DeadlineExceeded:
            is_silent = self._heard_at < began and trio.current_time() - began >= SILENT_S
            if is_silent:  # the node, not only slow with this
                await self.lose(session)
            raise

    def present(self) -> Session:
        if self.current is None:
            raise NodeUnavailable(self.endpoint, "the session was lost")
        return self.current

    async def over_link(self, session: Session, transfer: Awaitable[None], deadline: float) -> None:
        """A transfer; a broken link ends the session, a refused access does not."""
        began = trio.current_time()
        kind = session.reply.fabric
        try:
            await transfer
            self._broken_links[kind] = 0
        except RemoteAccessError as error:  # a lease or reservation ended: its scope did, or its time was up
            raise RemoteProtocolError("access", str(error)) from error
        except FabricError as error:
            if (
                error.status == "timed_out" and kind != "verbs"
            ):  # late, not broken; there a late READ must be ended
                raise DeadlineExceeded(error.stage, deadline - began) from error
            self._note_broken(kind, str(error))
            await self.lose(session)
            if error.status == "timed_out":
                raise DeadlineExceeded(error.stage, deadline - began) from error
            raise NodeUnavailable(self.endpoint, str(error)) from error

    def _note_broken(self, kind: str, why: str) -> None:
        """A fabric whose links break again and again is left alone for a while, if there is another."""
        self._broken_links[kind] = self._broken_links.get(kind, 0) + 1
        if self._broken_links[kind] >= MAX_BROKEN_LINKS and len(self.terms.fabrics) > 1:
            self._broken_links[kind] = 0
            self._avoided_until[kind] = trio.current_time() + AVOID_S
            self.fabric_failures[kind] = why


def _address_from(endpoint: str, address: Address) -> Address:
    """A fabric's address as seen from here: a node that listens everywhere names no host, so it is the gateway's."""
    if "port" not in address or address.get("host"):
        return address
    scheme, _, where = endpoint.partition("://")
    host = where.rpartition(":")[0].strip("[]") if scheme == "tcp" else "localhost"
    return {**address, "host": host}


def _expect(reply: m.AnyReply, kind: type[T]) -> T:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.ErrorReply):
        if reply.code == "space_mismatch":
            raise SpaceMismatch(reply.field, reply.mine, reply.theirs)
        raise RemoteProtocolError(reply.code, reply.message)
    raise RemoteProtocolError("unexpected_reply", f"expected {kind.__name__}, got {type(reply).__name__}")
