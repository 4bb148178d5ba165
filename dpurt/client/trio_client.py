"""The Trio client.

One DEALER socket carries every request; a reader task hands replies to their waiters by id. The session (the `hello`
exchange, and the fabric link it opens) is made on first use and again when the node says it does not know us, e.g. after
its restart, or when it was silent during a whole call; between tries that failed there is a growing pause, so a dead node
costs a call nothing but an exception. A session is lost for all calls at once, and only once: who fails on an old one does
not touch the next.

Every session must be of the epochs of the first: after `dpurt epoch bump` (new weights) all calls raise `SpaceMismatch` for
``epoch``, for what this engine computes or holds belongs to the old weights; one with the new weights makes a new client.

A fabric that does not open (shared memory with a node on another machine, say) is left out of a second `hello`, so that the
node picks the next one; so is, for `AVOID_S`, one whose links broke `MAX_BROKEN_LINKS` times in a row. `Client.fabric_failures` keeps why.

A *landing zone* (`landing_zone`) is memory of this host that the node fills with blocks it expects to be loaded. `load` looks there
first, asking nobody, and tells the node afterwards what it took; only the rest is asked for. A zone is made anew with each session.

Every byte a `load` hands back was checked against the CRC-32C the node stated for it, after it arrived. A block that does
not check is reported ``checksum`` and its buffer's content must not be used.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import crc32c
import trio

from dpurt.client.in_order import InOrder
from dpurt.client.mirror import IndexMirror
from dpurt.client.zones import Prompt, Zones
from dpurt.core.identity import Space
from dpurt.core.landing_zone import ZoneLayout
from dpurt.core.rails import LaneState
from dpurt.errors import (
    DeadlineExceeded,
    FabricError,
    LocalProtocolError,
    NodeUnavailable,
    RdmaLimit,
    RemoteAccessError,
    RemoteProtocolError,
    SpaceMismatch,
)
from dpurt.fabric import Address, Endpoint, MemoryRegion, Piece
from dpurt.fabric import connect as connect_fabric
from dpurt.transport import CurveClient, SocketOptions, ZmqSocket, open_context
from dpurt.wire import messages as m

T = TypeVar("T", bound=m.Reply)
Room: TypeAlias = "memoryview | bytearray | Sequence[memoryview]"
Payload: TypeAlias = "memoryview | bytes | Sequence[memoryview]"
_Views: TypeAlias = tuple[memoryview, ...]
MAX_REPLY_BYTES = 16 << 20
KEEP_BYTES = 256 << 20
MAX_BROKEN_LINKS = 2
AVOID_S = 60.0
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0)
_WAY_BACK = 0.1  # share of a call's budget kept for the answer's way, at most
_WAY_BACK_S = 0.1
_SESSION_OVER = frozenset({"no_session", "stale_epoch"})
_NOT_NOW = frozenset({"draining", "busy", "denied"})  # codes of a node that is there and will not have us
FOLLOW_S = 2.0  # a node that says nothing for so long is away
_ANEW = (m.Lookup, m.Reserve, m.Explain, m.Stats, m.Subscribe, m.Route)  # need nothing of an old session


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """One block of a load. `status` ``ok`` means its bytes are in the caller's buffers (or view) and were checked.

    `data` is None also for a block that went into several buffers.
    """

    status: str
    source: str = ""
    reason: str = ""
    data: memoryview | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class _Session:
    """What one successful `hello` gave."""

    reply: m.HelloReply
    endpoint: Endpoint


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    host: str,
    spaces: Mapping[str, Space],
    fabrics: Sequence[str] = ("shm", "verbs", "tcp"),
    timeout_s: float = 5.0,
    curve: CurveClient | None = None,
    epochs: Mapping[str, int] | None = None,
    memories: Sequence[memoryview] = (),
) -> AsyncIterator[Client]:
    """A client of the node at `endpoint`. Does not fail when the node is down: the calls do.

    `host` is this host's name in the node's topology, `spaces` the identities it will use, by their names there.
    `fabrics` are those this host can use, best first. `curve` encrypts and authenticates the channel. `epochs` are the
    spaces' epochs this engine's weights belong to, by name; of the others the client keeps those of its first session.
    `memories` are where the buffers of loads and stores will be: registered once a session where the fabric registers memory.
    """
    options = SocketOptions(
        curve=curve, max_message_bytes=MAX_REPLY_BYTES, linger_ms=200, queue_unconnected=False
    )
    with open_context() as context, ZmqSocket(context, "DEALER", options) as socket:
        socket.connect(endpoint)
        client = Client(socket, endpoint, host, spaces, fabrics, timeout_s, epochs or {}, memories)
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client._read)
            nursery.start_soon(client._keep_alive)
            nursery.start_soon(client._keep_memories)
            try:
                yield client
            except Exception as caught:  # the caller's: raised below as it is, not in the nursery's group
                error = caught
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await client._close()
                nursery.cancel_scope.cancel()
        if error is not None:
            raise error


class Client:
    """One host's conversation with one node. Made by `connect`. Methods may be called from several tasks.

    All raise `NodeUnavailable` when no node answers or the way to it breaks, `DeadlineExceeded` when it answers too late,
    `SpaceMismatch` when it refuses this host's idea of a space (field ``epoch``: the node's has moved on; make a new client
    once the engine has the new weights), `RemoteProtocolError` for any other refusal; and ValueError
    for a buffer or payload of the wrong size.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        endpoint: str,
        host: str,
        spaces: Mapping[str, Space],
        fabrics: Sequence[str],
        timeout_s: float,
        epochs: Mapping[str, int],
        memories: Sequence[memoryview] = (),
    ) -> None:
        self._memories = memories
        self._opened = trio.Event()  # a session was
        self._socket = socket
        self.endpoint = endpoint
        self._host = host
        self._spaces = dict(spaces)
        self._fabrics = list(fabrics)
        self._epochs = dict(epochs)
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[m.AnyReply]]] = {}
        self._session: _Session | None = None
        self._session_lock = trio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._heard_at = 0.0
        self._zones = Zones()
        self._broken_links: dict[str, int] = {}  # in a row, by fabric
        self._avoided_until: dict[str, float] = {}
        self.fabric_failures: dict[str, str] = {}
        self.checksum_errors = 0
        self.bytes_pulled = 0
        self.bytes_stored = 0
        self.blocks_from_landing = 0

    # --- session ---

    @property
    def is_connected(self) -> bool:
        """True while the last word from the node was not a failure."""
        return self._session is not None

    @property
    def lanes(self) -> Sequence[LaneState]:
        """The lanes of the present link (verbs has some): what each carried, how fast it is, how it broke. A snapshot's owner
        changes it.
        """
        group = None if self._session is None else getattr(self._session.endpoint, "lanes", None)
        return [] if group is None else list(group.states)

    async def session(self, deadline: float) -> m.HelloReply:
        """The current session's terms; opens one when there is none."""
        return (await self._ensure_session(deadline)).reply

    async def _ensure_session(self, deadline: float) -> _Session:
        if self._session is not None:
            return self._session
        with trio.move_on_at(deadline) as waiting:
            await self._session_lock.acquire()
        if waiting.cancelled_caught:
            raise NodeUnavailable(self.endpoint, "no session yet")
        try:
            if self._session is None:
                self._session = await self._try_session(deadline)
                self._opened.set()
            return self._session
        finally:
            self._session_lock.release()

    async def _try_session(self, deadline: float) -> _Session:
        if trio.current_time() < self._not_before:
            raise NodeUnavailable(self.endpoint, "did not answer a moment ago")
        try:
            session = await self._open_session(deadline)
        except (DeadlineExceeded, NodeUnavailable, FabricError, OSError, RemoteProtocolError) as error:
            if isinstance(error, RemoteProtocolError) and error.code not in _NOT_NOW:
                raise
            pause = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            self._not_before = trio.current_time() + pause
            why = f"{error.endpoint}: {error.why}" if isinstance(error, NodeUnavailable) else str(error)
            raise NodeUnavailable(self.endpoint, why) from error
        self._failures = 0
        return session

    async def _open_session(self, deadline: float) -> _Session:
        now = trio.current_time()
        left = [kind for kind in self._fabrics if self._avoided_until.get(kind, now) <= now]
        left, failure = left or list(self._fabrics), None
        while True:
            try:
                reply = await self._say_hello(left, deadline)
            except RemoteProtocolError as error:
                if failure is not None and error.code == "no_fabric":
                    raise failure from error
                raise
            try:
                session = _Session(reply, await self._open_link(reply, len(left), deadline))
                self._zones.clear()  # the last session's went with its link
                await self._offer_zones(session, deadline)
                return session
            except (NodeUnavailable, FabricError, OSError, RemoteProtocolError) as error:
                failure = error
                self.fabric_failures[reply.fabric] = str(error)
                left = [kind for kind in left if kind != reply.fabric]
                if not left:
                    raise
                await self._post(m.Bye())  # what the node made for this session need not wait for its timeout

    async def _offer_zones(self, session: _Session, deadline: float) -> None:
        """Those that are wished for and not there."""
        for space, shard, slots in self._zones.missing():
            geometry = self._spaces[space].geometry
            layout = ZoneLayout(slots, tuple(group.part_bytes for group in geometry.groups))
            region = session.endpoint.landing(layout.size)
            offer = m.Zone(space=space, region=region.region_id, slots=slots, shard=shard)
            count = (await self._exchange(offer, m.Ok, deadline)).count
            if count:
                self._zones.open(space, shard, region.view, ZoneLayout(count, layout.part_bytes))

    async def landing_zone(
        self, space: str, slots: int, *, shard: int = 0, timeout_s: float | None = None
    ) -> bool:
        """Have the node put up to `slots` blocks of a space here before they are asked for, in this session and later ones.

        False: it places none (``[placement] enabled = false``)."""
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        if space not in self._spaces:
            raise ValueError(f"no space {space!r} was given to connect")
        self._zones.wish(space, shard, slots)
        if self._session is None:
            await self._ensure_session(deadline)
        else:
            await self._offer_zones(self._session, deadline)
        return self._zones.has(space, shard)

    def placed(self, space: str, tokens: bytes | memoryview, *, shard: int = 0) -> int:
        """How many leading blocks of a prompt are in the landing zone now. Asks nobody."""
        prompt = self._prompt(space, bytes(tokens), None, shard)
        return self._zones.leading(prompt)

    def _prompt(self, space: str, tokens: bytes | None, digests: list[bytes] | None, shard: int) -> Prompt:
        identity = self._spaces[space].with_epoch(self._epochs.get(space, 0))
        return Prompt(space, identity, tokens, digests, shard)

    async def _say_hello(self, fabrics: list[str], deadline: float) -> m.HelloReply:
        claims = [
            m.claim_of(name, space, epoch=self._epochs.get(name)) for name, space in self._spaces.items()
        ]
        hello = m.Hello(host=self._host, protocol=m.PROTOCOL, spaces=claims, fabrics=fabrics)
        reply = await self._exchange(hello, m.HelloReply, deadline)
        for name, epoch in reply.epochs.items():
            self._epochs.setdefault(name, epoch)
        return reply

    async def _open_link(self, reply: m.HelloReply, choices: int, deadline: float) -> Endpoint:
        """The link `reply` offers, in its share of the time: the other `choices` need theirs."""
        now = trio.current_time()
        address = _address_from(self.endpoint, reply.fabric_address)
        limit = now + (deadline - now) / choices
        return await connect_fabric(reply.fabric, address, reply.session, reply.token, limit)

    async def _lose_session(self, session: _Session | None) -> None:
        if session is not None and self._session is session:
            self._session = None
            await session.endpoint.aclose()

    async def _close(self) -> None:
        if self._session is not None:
            await self._post(m.Bye())
            await self._lose_session(self._session)

    async def _keep_memories(self) -> None:
        """Have this host's memory registered for every new link, beside its calls: pinning takes a device seconds per 10 GiB.

        Piece by piece on this thread, so that it neither holds the loop for long nor runs while a link is being closed.
        """
        while True:
            await self._opened.wait()
            self._opened = trio.Event()
            if self._session is None:
                continue
            try:
                await self._keep_all(self._session.endpoint)
            except (RdmaLimit, FabricError) as error:  # what is not kept is registered for each call
                self.fabric_failures["memories"] = str(error)

    async def _keep_all(self, endpoint: Endpoint) -> None:
        for memory in self._memories:
            for start in range(0, len(memory), KEEP_BYTES):
                endpoint.keep(memory[start : start + KEEP_BYTES])
                await trio.lowlevel.checkpoint()

    async def _keep_alive(self) -> None:
        while True:
            session = self._session
            await trio.sleep(session.reply.session_timeout_ms / 4000 if session else 0.25)
            if self._session is not None:
                await self._post(m.Ping(id=next(self._ids)))  # answered, so that silence means something

    # --- wire ---

    async def _read(self) -> None:
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
            elif isinstance(reply, m.LoadReply):
                await self._release(reply)  # who asked has given up
            elif isinstance(reply, m.ErrorReply) and reply.code == "no_session":
                await self._lose_session(self._session)

    async def _post(self, request: m.Request) -> None:
        """Send without an answer; dropped when the socket is full."""
        with trio.move_on_after(0.5):
            await self._socket.send([m.encode(request)])

    async def _exchange(self, request: m.Request, kind: type[T], deadline: float) -> T:
        now = trio.current_time()
        budget = max(deadline - now, 0.001)
        request.id = next(self._ids)
        node_s = budget - min(_WAY_BACK * budget, _WAY_BACK_S)
        request.deadline_ms = max(1, min(int(node_s * 1000), 3_600_000))
        event, box = trio.Event(), list[m.AnyReply]()
        self._waiting[request.id] = event, box
        try:
            with trio.move_on_at(deadline):
                await self._socket.send([m.encode(request)])
                await event.wait()
        finally:
            del self._waiting[request.id]
        if not box:
            raise DeadlineExceeded(type(request).__name__.lower(), budget)
        return _expect(box[0], kind)

    async def _call(self, request: m.Request, kind: type[T], timeout_s: float | None = None) -> T:
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            return await self._call_once(request, kind, deadline)
        except NodeUnavailable as error:
            if not isinstance(request, _ANEW) or not isinstance(error.__cause__, RemoteProtocolError):
                raise
            if error.__cause__.code not in _SESSION_OVER:
                raise
        return await self._call_once(request, kind, deadline)

    async def _call_once(self, request: m.Request, kind: type[T], deadline: float) -> T:
        session = await self._ensure_session(deadline)
        began = trio.current_time()
        try:
            return await self._exchange(request, kind, deadline)
        except RemoteProtocolError as error:
            if error.code not in _SESSION_OVER:
                raise
            await self._lose_session(session)
            raise NodeUnavailable(self.endpoint, f"session lost ({error.code})") from error
        except DeadlineExceeded:
            if self._heard_at < began:  # the node is silent, not only slow with this
                await self._lose_session(session)
            raise

    # --- the protocol ---

    async def lookup(
        self,
        space: str,
        request: str,
        tokens: bytes | memoryview | None = None,
        *,
        digests: Sequence[bytes] | None = None,
        will_load: bool = True,
        shard: int = 0,
        chained: bool = True,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """How much of a prompt (raw little-endian tokens, or digests) the node has.

        Digests that are not `chained` stand alone: `LookupReply.is_present` tells of each; a load's positions are theirs.
        What loads of this request wait for is read before what those of a higher `priority` number do (-100 to 100).
        """
        message = m.Lookup(
            space=space, request=request, shard=shard, chained=chained, intent="will_load" if will_load else "probe",
            priority=priority, tokens=None if tokens is None else bytes(tokens),
            digests=None if digests is None else list(digests),
        )  # fmt: skip
        reply = await self._call(message, m.LookupReply, timeout_s)
        if will_load and self._zones.wishes:
            self._zones.remember(request, self._prompt(space, message.tokens, message.digests, shard))
        return reply

    async def hint(self, hint: m.Hint) -> None:
        """Tell the node something; no answer, may be lost."""
        if hint.kind == "finish":
            self._zones.forget(hint.request)
        if self._session is not None:
            await self._post(hint)

    async def decode_step(
        self,
        request: str,
        step: int,
        group: int,
        touched: Sequence[int],
        *,
        masses: bytes = b"",
        ranked: Sequence[int] = (),
        ranked_group: int | None = None,
        need_s: float = 0.0,
        shard: int = 0,
    ) -> None:
        """Tell what a layer group does in a sparse decode step, before its blocks are loaded; see `wire.messages.Hint`.

        `masses`: `dpurt.core.attention.mass_codes` of the touched blocks' shares of attention, if the engine knows them.
        """
        await self.hint(
            m.Hint(
                request=request, kind="decode", step=step, group=group, touched=list(touched), masses=masses,
                ranked=list(ranked), ranked_group=ranked_group, need_ms=int(1000 * need_s), shard=shard,
            )
        )  # fmt: skip

    async def finish(self, request: str, reason: str = "") -> None:
        """The request is over: its scope ends, `reason` (``end_turn``, ``tool_use``) feeds the predictors."""
        await self.hint(m.Hint(request=request, kind="finish", reason=reason))

    async def load(
        self,
        request: str,
        first: int,
        into: Sequence[Room],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """Copy blocks [first, first + len(into)) of the looked-up prefix into the caller's buffers, and check them.

        Any writable, contiguous buffer will do; a block may also be scattered over a sequence of them. When this returns
        or raises, nothing writes them any more. What is in the landing zone has the source ``landing``.
        """
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        if not into:
            return []
        found = await self._take_placed(request, first, into, parts, shard)
        loaded = [
            LoadedBlock("ok", "landing", "", found[i]) if i in found else _NOT_ASKED for i in range(len(into))
        ]
        for start, count in _gaps(found, len(into)):
            message = m.Load(request=request, first=first + start, count=count, parts=parts, shard=shard)
            loaded[start : start + count] = await self._load_into(
                message, into[start : start + count], deadline
            )
        return loaded

    async def load_blocks(
        self,
        request: str,
        blocks: Sequence[int],
        into: Sequence[memoryview | bytearray],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """As `load`, of any blocks: their positions in the prompt, one buffer each. For sparse attention."""
        if len(blocks) != len(into):
            raise ValueError(f"{len(into)} buffers for {len(blocks)} blocks")
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        message = m.Load(request=request, blocks=list(blocks), parts=parts, shard=shard)
        return await self._load_into(message, into, deadline) if into else []

    @asynccontextmanager
    async def loading(
        self,
        space: str,
        request: str,
        first: int,
        into: Sequence[memoryview | bytearray],
        order: Sequence[tuple[int, int]],
        *,
        shard: int = 0,
        ahead: int = 3,
        timeout_s: float | None = None,
    ) -> AsyncIterator[InOrder[tuple[int, int], list[LoadedBlock]]]:
        """As `load`, run of parts by run of parts, in the `order` the engine needs them: each comes, checked, as soon as it is
        here in every block, while up to `ahead` later ones are on their way::

            async with client.loading("s", "r", 0, buffers, [(0, 1), (1, 2), (2, 4)]) as arriving:
                async for parts, blocks in arriving: ...

        A buffer has room for a whole block; each part goes to its place in it. Leaving the block ends what is still under way.
        """
        if space not in self._spaces:
            raise ValueError(f"no space {space!r} was given to connect")
        sizes = [group.part_bytes for group in self._spaces[space].geometry.groups]
        rooms = [memoryview(buffer).cast("B") for buffer in into]
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)

        async def ask(parts: tuple[int, int]) -> list[LoadedBlock]:
            start, stop = sum(sizes[: parts[0]]), sum(sizes[: parts[1]])
            left = deadline - trio.current_time()
            places = [room[start:stop] for room in rooms]
            return await self.load(request, first, places, parts=parts, shard=shard, timeout_s=left)

        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                yield InOrder(nursery, ask, order, ahead)
            except Exception as caught:  # the caller's: raised below as it is, not in the nursery's group
                error = caught
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _take_placed(
        self,
        request: str,
        first: int,
        into: Sequence[Room],
        parts: tuple[int, int] | None,
        shard: int,
    ) -> dict[int, memoryview]:
        """What the landing zone has of these blocks, checked and in the caller's buffers; the node is told, not asked."""
        found = self._zones.take(request, first, into, parts, shard)
        if found:
            self.blocks_from_landing += len(found)
            positions = [first + i for i in found]
            await self._post(m.Used(request=request, blocks=positions, parts=parts, shard=shard))
        return found

    async def _load_into(self, message: m.Load, into: Sequence[Room], deadline: float) -> list[LoadedBlock]:
        reply = await self._load(message, deadline)
        try:
            arrived = [
                _room_for(grant, buffer) if grant.status == "ok" else None
                for grant, buffer in zip(reply.blocks, into, strict=True)
            ]
            pieces = [
                piece
                for grant, views in zip(reply.blocks, arrived, strict=True)
                if views is not None
                for piece in _pieces(grant.region, grant.offset, grant.lease, views)
            ]
            if pieces:
                session = self._present()
                await self._over_link(session, session.endpoint.pull(pieces, deadline), deadline)
                self.bytes_pulled += sum(len(piece.local) for piece in pieces)
        finally:
            await self._release(reply)
        return self._checked(reply, arrived)

    @asynccontextmanager
    async def view(
        self,
        request: str,
        first: int,
        count: int,
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[list[LoadedBlock]]:
        """As `load`, without a copy: read-only views of the node's memory, valid inside the ``async with``.

        LocalProtocolError ``no_views`` over a fabric that has none (tcp).
        """
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        message = m.Load(request=request, first=first, count=count, parts=parts, shard=shard)
        reply = await self._load(message, deadline)
        try:
            link = self._present().endpoint
            views = [
                link.view(g.region, g.offset, g.length) if g.status == "ok" else None for g in reply.blocks
            ]
            if any(view is None and g.status == "ok" for view, g in zip(views, reply.blocks, strict=True)):
                raise LocalProtocolError("no_views", f"the {link.kind} fabric has no views: use load")
            yield self._checked(reply, [None if view is None else (view,) for view in views])
        finally:
            await self._release(reply)

    async def load_pushed(
        self,
        request: str,
        first: int,
        landing: MemoryRegion,
        offsets: Sequence[int],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """As `load`, but the node writes into `landing` (made by `landing()`), one offset a block.

        NodeUnavailable also when the session that owned the landing region was lost: make a new one.
        """
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        where = m.Landing(region=landing.region_id, offsets=list(offsets))
        message = m.Load(
            request=request, first=first, count=len(offsets), parts=parts, shard=shard, landing=where
        )  # fmt: skip
        reply = await self._load(message, deadline)
        try:
            region = landing.view
        except ValueError as error:
            raise NodeUnavailable(self.endpoint, "the session of this landing region was lost") from error
        return self._checked(
            reply,
            [(region[at : at + grant.length],) for at, grant in zip(offsets, reply.blocks, strict=True)],
        )

    async def landing(self, size: int, timeout_s: float | None = None) -> MemoryRegion:
        """Memory of this host the node may push into, for the life of the session."""
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        return (await self._ensure_session(deadline)).endpoint.landing(size)

    async def store(
        self,
        space: str,
        request: str,
        tokens: bytes | memoryview | None,
        first: int,
        payloads: Sequence[Payload],
        *,
        digests: Sequence[bytes] | None = None,
        shard: int = 0,
        chained: bool = True,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Store the KV of blocks [first, first + len(payloads)) of a prompt; a status for each (`wire.messages.CommitReply`).

        A payload may be gathered from a sequence of buffers. When this returns or raises, nothing reads them any more.
        """
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        if not payloads:
            return []
        views = [_views(payload) for payload in payloads]
        self._check_sizes(space, views)
        reserve = m.Reserve(
            space=space, request=request, first=first, count=len(payloads), shard=shard, chained=chained,
            tokens=None if tokens is None else bytes(tokens),
            digests=None if digests is None else list(digests),
        )  # fmt: skip
        reserved = (await self._call(reserve, m.ReserveReply, deadline - trio.current_time())).blocks
        statuses = [r.status for r in reserved]
        mine = [i for i, r in enumerate(reserved) if r.status == "reserved"]
        if not mine:
            return statuses
        blocks = await self._write(space, [(reserved[i], views[i]) for i in mine], deadline)
        reply = await self._call(
            m.Commit(request=request, blocks=blocks), m.CommitReply, deadline - trio.current_time()
        )
        for i, status in zip(mine, reply.statuses, strict=True):
            statuses[i] = status
        return statuses

    async def _write(
        self,
        space: str,
        written: Sequence[tuple[m.Reservation, _Views]],
        deadline: float,
    ) -> list[m.CommitBlock]:
        """Write payloads into their reservations; when that fails, give these back: others may want to store the blocks."""
        parts = [group.part_bytes for group in self._spaces[space].geometry.groups]
        pieces = [
            piece for r, views in written for piece in _pieces(r.region, r.offset, r.reservation, views)
        ]
        numbers = [r.reservation for r, _ in written]
        try:
            session = self._present()
            await self._over_link(session, session.endpoint.store(pieces, deadline), deadline)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._post(m.Release(reservations=numbers))
            raise
        self.bytes_stored += sum(len(piece.local) for piece in pieces)
        return [
            m.CommitBlock(reservation=r.reservation, crcs=part_crcs(views, parts)) for r, views in written
        ]

    async def cancel(self, request: str, timeout_s: float | None = None) -> int:
        """End a scope; returns how many leases, reservations and prefetches it held."""
        self._zones.forget(request)
        return (await self._call(m.Cancel(request=request), m.Ok, timeout_s)).count

    async def delete(self, space: str, digests: Sequence[bytes], timeout_s: float | None = None) -> int:
        """These blocks are not wanted any more (see `wire.messages.Delete`); how many were there."""
        return (await self._call(m.Delete(space=space, digests=list(digests)), m.Ok, timeout_s)).count

    async def explain(
        self,
        space: str,
        tokens: bytes | None = None,
        *,
        digests: Sequence[bytes] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[m.Reason]:
        """Why each block of a prompt is or is not here."""
        message = m.Explain(
            space=space, tokens=tokens, digests=None if digests is None else list(digests), shard=shard
        )
        return (await self._call(message, m.ExplainReply, timeout_s)).blocks

    async def subscribe(
        self,
        space: str,
        cursor: bytes = b"",
        *,
        max_blocks: int = 1 << 13,
        wait_s: float = FOLLOW_S,
    ) -> m.IndexBatch:
        """The next batch of the index stream after `cursor` (see `wire.messages.Subscribe`); empty after `wait_s`."""
        message = m.Subscribe(space=space, cursor=cursor, max_blocks=max_blocks)
        return await self._call(message, m.IndexBatch, wait_s)

    async def follow(self, space: str, mirror: IndexMirror) -> None:
        """Keep `mirror` like the node's index, until cancelled. Raises nothing: its `status` and `reason` say how it is.

        A node that is away is tried again; what happened meanwhile is caught up with, or all is read anew. Returns when
        the node refuses this host's idea of the space (new weights: make a new client and a new mirror).
        """
        failures = 0
        while True:
            try:
                mirror.apply(await self.subscribe(space, mirror.cursor))
                failures = 0
            except SpaceMismatch as error:
                mirror.end(str(error))
                return
            except (NodeUnavailable, DeadlineExceeded, RemoteProtocolError) as error:
                mirror.lose_touch(str(error))
                await trio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1

    def mirror(self, space: str) -> IndexMirror:
        """An empty mirror of a space, for `follow`."""
        return IndexMirror(self._spaces[space])

    async def route(
        self,
        space: str,
        tokens: bytes | memoryview,
        *,
        will_route: bool = True,
        cache_salt: str = "",
        queued_ms: Mapping[str, float] | None = None,
        among: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> m.RouteReply:
        """Which engine should serve this prompt (see `wire.messages.Route`)."""
        message = m.Route(
            space=space, tokens=bytes(tokens), intent="will_route" if will_route else "probe", cache_salt=cache_salt,
            queued_ms=dict(queued_ms or {}), among=list(among),
        )  # fmt: skip
        return await self._call(message, m.RouteReply, timeout_s)

    async def stats(self, timeout_s: float | None = None) -> dict[str, object]:
        """The node's counters."""
        return (await self._call(m.Stats(), m.StatsReply, timeout_s)).stats

    # --- parts of the above ---

    def _present(self) -> _Session:
        if self._session is None:
            raise NodeUnavailable(self.endpoint, "the session was lost")
        return self._session

    def _check_sizes(self, space: str, payloads: Sequence[_Views]) -> None:
        if space not in self._spaces:
            raise ValueError(f"no space {space!r} was given to connect")
        wanted = self._spaces[space].geometry.payload_bytes
        sizes = {sum([view.nbytes for view in views]) for views in payloads} - {wanted}
        if sizes:
            raise ValueError(f"a block of space {space!r} has {wanted} bytes, got {sorted(sizes)}")

    async def _over_link(self, session: _Session, transfer: Awaitable[None], deadline: float) -> None:
        """A transfer; a broken link ends the session, a refused access does not."""
        began = trio.current_time()
        kind = session.reply.fabric
        try:
            await transfer
            self._broken_links[kind] = 0
        except RemoteAccessError as error:  # a lease or reservation ended: its scope did, or its time was up
            raise RemoteProtocolError("access", str(error)) from error
        except FabricError as error:
            self._note_broken(kind, str(error))
            await self._lose_session(session)
            if error.status == "timed_out":
                raise DeadlineExceeded(error.stage, deadline - began) from error
            raise NodeUnavailable(self.endpoint, str(error)) from error

    def _note_broken(self, kind: str, why: str) -> None:
        """A fabric whose links break again and again is left alone for a while, if there is another."""
        self._broken_links[kind] = self._broken_links.get(kind, 0) + 1
        if self._broken_links[kind] >= MAX_BROKEN_LINKS and len(self._fabrics) > 1:
            self._broken_links[kind] = 0
            self._avoided_until[kind] = trio.current_time() + AVOID_S
            self.fabric_failures[kind] = why

    async def _load(self, message: m.Load, deadline: float) -> m.LoadReply:
        return await self._call(message, m.LoadReply, deadline - trio.current_time())

    async def _release(self, reply: m.LoadReply) -> None:
        leases = [grant.lease for grant in reply.blocks if grant.lease]
        if leases:
            with trio.CancelScope(shield=True):
                await self._post(m.Release(leases=leases))

    def _checked(self, reply: m.LoadReply, arrived: Sequence[_Views | None]) -> list[LoadedBlock]:
        return [
            self._check_one(g, data, reply.part_bytes) for g, data in zip(reply.blocks, arrived, strict=True)
        ]

    def _check_one(self, grant: m.Grant, data: _Views | None, part_bytes: Sequence[int]) -> LoadedBlock:
        if grant.status != "ok" or data is None:
            return LoadedBlock(grant.status, grant.source, grant.reason)
        if part_crcs(data, part_bytes) != grant.crcs:
            self.checksum_errors += 1
            return LoadedBlock(
                "checksum", grant.source, "the bytes that arrived are not the bytes the node described"
            )
        return LoadedBlock("ok", grant.source, "", data[0] if len(data) == 1 else None)


def _room_for(grant: m.Grant, room: Room) -> _Views:
    views = _views(room)
    if any(view.readonly for view in views):
        raise ValueError("a buffer to load into must be writable")
    size = sum([len(view) for view in views])
    if size < grant.length:
        raise ValueError(f"a buffer of {size} bytes for {grant.length} bytes of a block")
    return views if size == grant.length else _head(views, grant.length)


def _views(buffers: Room | Payload) -> _Views:
    """A block's buffers, in order, as bytes."""
    if isinstance(buffers, (memoryview, bytearray, bytes)):
        buffers = (memoryview(buffers),)
    if not all(view.c_contiguous for view in buffers):
        raise ValueError("a block's buffer must be contiguous")
    return tuple([view.cast("B") for view in buffers])


def _head(views: _Views, size: int) -> _Views:
    """The first `size` bytes."""
    head = []
    for view in views:
        head.append(view[:size])
        size -= len(head[-1])
    return tuple(view for view in head if len(view))


def _pieces(region: int, offset: int, lease: int, views: _Views) -> Iterator[Piece]:
    """A block of a region from or to its buffers here."""
    for view in views:
        yield Piece(region, offset, lease, view)
        offset += len(view)


_NOT_ASKED = LoadedBlock("error")


def _gaps(found: Mapping[int, object], count: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of [0, count) that is not in `found`."""
    start = None
    for i in range(count + 1):
        if i < count and i not in found:
            start = i if start is None else start
        elif start is not None:
            yield start, i - start
            start = None


def _address_from(endpoint: str, address: Address) -> Address:
    """A fabric's address as seen from here: a node that listens everywhere names no host, so it is the gateway's."""
    if "port" not in address or address.get("host"):
        return address
    scheme, _, where = endpoint.partition("://")
    host = where.rpartition(":")[0].strip("[]") if scheme == "tcp" else "localhost"
    return {**address, "host": host}


def part_crcs(payload: _Views, part_bytes: Sequence[int]) -> list[int]:
    """CRC-32C of each part of a payload, wherever the cuts between its buffers are."""
    crcs, rest = [], iter(payload)
    view = memoryview(b"")
    for size in part_bytes:
        crc = 0
        while size:
            view = view if len(view) else next(rest)
            crc = crc32c.crc32c(view[:size], crc)
            size, view = size - len(view[:size]), view[size:]
        crcs.append(crc)
    return crcs


def _expect(reply: m.AnyReply, kind: type[T]) -> T:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.ErrorReply):
        if reply.code == "space_mismatch":
            raise SpaceMismatch(reply.field, reply.mine, reply.theirs)
        raise RemoteProtocolError(reply.code, reply.message)
    raise RemoteProtocolError("unexpected_reply", f"expected {kind.__name__}, got {type(reply).__name__}")
