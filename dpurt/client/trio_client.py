"""The Trio client: what a GPU host asks of a node (over a `dpurt.client.conversation`).

A *landing zone* (`landing_zone`) is memory of this host that the node fills with blocks it expects to be loaded. `load` looks there
first, asking nobody, and tells the node afterwards what it took; only the rest is asked for. A zone is made anew with each session.

Every byte a `load` hands back was checked against the CRC-32C the node stated for it, after it arrived. A block that does
not check is reported ``checksum`` and its buffer's content must not be used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import trio

from dpurt.client.buffers import Payload, Room, Views, part_crcs, pieces_of, raw_tokens, room_for, views_of
from dpurt.client.conversation import BACKOFF_S, MAX_REPLY_BYTES, Conversation, Session, Terms
from dpurt.client.in_order import InOrder
from dpurt.client.mirror import IndexMirror
from dpurt.client.zones import Prompt, Zones
from dpurt.core.identity import Space
from dpurt.core.landing_zone import MAX_SLOTS, ZoneLayout
from dpurt.core.rails import LaneState
from dpurt.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    NodeUnavailable,
    RemoteProtocolError,
    SpaceMismatch,
)
from dpurt.fabric import MemoryRegion
from dpurt.transport import CurveClient, SocketOptions, ZmqSocket, open_context
from dpurt.wire import messages as m

FOLLOW_S = 2.0  # a node that says nothing for so long is away


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
        terms = Terms(host, dict(spaces), list(fabrics), dict(epochs or {}), memories, timeout_s)
        client = Client(socket, endpoint, terms)
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            for loop in (client._talk.read, client._talk.keep_alive, client._talk.keep_memories):
                nursery.start_soon(loop)
            try:
                yield client
            except Exception as caught:  # the caller's: raised below as it is, not in the nursery's group
                error = caught
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await client._talk.close()
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

    def __init__(self, socket: ZmqSocket, endpoint: str, terms: Terms) -> None:
        self.endpoint = endpoint
        self._spaces = terms.spaces
        self._zones = Zones()
        self._talk = Conversation(
            socket, endpoint, terms, self._renew_zones, self._release, self._zones.clear
        )
        self.checksum_errors = 0
        self.bytes_pulled = 0
        self.bytes_stored = 0
        self.blocks_from_landing = 0

    # --- session ---

    @property
    def is_connected(self) -> bool:
        """True while the last word from the node was not a failure."""
        return self._talk.current is not None

    @property
    def fabric_failures(self) -> Mapping[str, str]:
        """Why each fabric that is not used is not, by its name."""
        return self._talk.fabric_failures

    @property
    def lanes(self) -> Sequence[LaneState]:
        """The lanes of the present link (verbs has some): what each carried, how fast it is, how it broke. A snapshot's owner
        changes it.
        """
        return self._talk.lanes

    async def session(self, deadline: float) -> m.HelloReply:
        """The current session's terms; opens one when there is none."""
        return (await self._talk.ensure(deadline)).reply

    # --- landing zones ---

    async def _renew_zones(self, session: Session, deadline: float) -> None:
        for wish in self._zones.missing():
            with suppress(RemoteProtocolError, OSError):  # a session without it is better than none
                await self._offer_zone(session, *wish, deadline)

    async def _offer_zone(
        self, session: Session, space: str, shard: int, slots: int, deadline: float
    ) -> None:
        geometry = self._spaces[space].geometry
        layout = ZoneLayout(slots, tuple(group.part_bytes for group in geometry.groups))
        region = session.endpoint.landing(layout.size)
        offer = m.Zone(space=space, region=region.region_id, slots=slots, shard=shard)
        count = (await self._talk.exchange(offer, m.Ok, deadline)).count
        if count:
            self._zones.open(space, shard, region.view, ZoneLayout(count, layout.part_bytes))

    async def landing_zone(
        self, space: str, slots: int, *, shard: int = 0, timeout_s: float | None = None
    ) -> bool:
        """Have the node put up to `slots` blocks of a space here before they are asked for, in this session and later ones.

        False: it places none (``[placement] enabled = false``). ValueError for a number of slots no zone can have.
        """
        deadline = self._talk.deadline(timeout_s)
        if space not in self._spaces:
            raise ValueError(f"no space {space!r} was given to connect")
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"a landing zone has 1 to {MAX_SLOTS:,} slots, not {slots:,}")
        session = await self._talk.ensure(deadline)
        self._zones.wish(space, shard, slots)
        try:
            await self._offer_zone(session, space, shard, slots, deadline)
        except BaseException:
            self._zones.unwish(space, shard)
            raise
        return self._zones.has(space, shard)

    def placed(self, space: str, tokens: bytes | memoryview, *, shard: int = 0) -> int:
        """How many leading blocks of a prompt are in the landing zone now. Asks nobody."""
        prompt = self._prompt(space, self._raw(space, tokens), None, shard)
        return self._zones.leading(prompt)

    def _raw(self, space: str, tokens: bytes | memoryview) -> bytes:
        """What a message says of tokens. A space we do not have is for the node to refuse."""
        known = self._spaces.get(space)
        return raw_tokens(tokens, 1 if known is None else known.geometry.token_bytes)

    def _prompt(self, space: str, tokens: bytes | None, digests: list[bytes] | None, shard: int) -> Prompt:
        identity = self._spaces[space].with_epoch(self._talk.epochs.get(space, 0))
        return Prompt(space, identity, tokens, digests, shard)

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
            priority=priority, tokens=None if tokens is None else self._raw(space, tokens),
            digests=None if digests is None else list(digests),
        )  # fmt: skip
        reply = await self._talk.call(message, m.LookupReply, timeout_s)
        if will_load and self._zones.wishes:
            self._zones.remember(request, self._prompt(space, message.tokens, message.digests, shard))
        return reply

    async def hint(self, hint: m.Hint) -> None:
        """Tell the node something; no answer, may be lost."""
        if hint.kind == "finish":
            self._zones.forget(hint.request)
        if self._talk.current is not None:
            await self._talk.post(hint)

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
        deadline = self._talk.deadline(timeout_s)
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
        deadline = self._talk.deadline(timeout_s)
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
        deadline = self._talk.deadline(timeout_s)

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
            await self._talk.post(m.Used(request=request, blocks=positions, parts=parts, shard=shard))
        return found

    async def _load_into(self, message: m.Load, into: Sequence[Room], deadline: float) -> list[LoadedBlock]:
        reply = await self._load(message, deadline)
        try:
            arrived = [
                room_for(grant, buffer) if grant.status == "ok" else None
                for grant, buffer in zip(reply.blocks, into, strict=True)
            ]
            pieces = [
                piece
                for grant, views in zip(reply.blocks, arrived, strict=True)
                if views is not None
                for piece in pieces_of(grant.region, grant.offset, grant.lease, views)
            ]
            if pieces:
                session = self._talk.present()
                await self._talk.over_link(session, session.endpoint.pull(pieces, deadline), deadline)
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
        deadline = self._talk.deadline(timeout_s)
        message = m.Load(request=request, first=first, count=count, parts=parts, shard=shard)
        reply = await self._load(message, deadline)
        try:
            link = self._talk.present().endpoint
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
        """As `load`, but the node writes into `landing` (made by `landing()`), one offset a block. After a call that was
        cancelled it may still do so until `timeout_s` from its beginning: use these places for nothing else until then.

        NodeUnavailable also when the session that owned the landing region was lost: make a new one.
        """
        deadline = self._talk.deadline(timeout_s)
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
        deadline = self._talk.deadline(timeout_s)
        return (await self._talk.ensure(deadline)).endpoint.landing(size)

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
        deadline = self._talk.deadline(timeout_s)
        if not payloads:
            return []
        views = [views_of(payload) for payload in payloads]
        self._check_sizes(space, views)
        reserve = m.Reserve(
            space=space, request=request, first=first, count=len(payloads), shard=shard, chained=chained,
            tokens=None if tokens is None else self._raw(space, tokens),
            digests=None if digests is None else list(digests),
        )  # fmt: skip
        reserved = (await self._talk.call(reserve, m.ReserveReply, deadline - trio.current_time())).blocks
        statuses = [r.status for r in reserved]
        mine = [i for i, r in enumerate(reserved) if r.status == "reserved"]
        if not mine:
            return statuses
        blocks = await self._write(space, [(reserved[i], views[i]) for i in mine], deadline)
        reply = await self._talk.call(
            m.Commit(request=request, blocks=blocks), m.CommitReply, deadline - trio.current_time()
        )
        for i, status in zip(mine, reply.statuses, strict=True):
            statuses[i] = status
        return statuses

    async def _write(
        self,
        space: str,
        written: Sequence[tuple[m.Reservation, Views]],
        deadline: float,
    ) -> list[m.CommitBlock]:
        """Write payloads into their reservations; when that fails, give these back: others may want to store the blocks."""
        parts = [group.part_bytes for group in self._spaces[space].geometry.groups]
        pieces = [
            piece for r, views in written for piece in pieces_of(r.region, r.offset, r.reservation, views)
        ]
        numbers = [r.reservation for r, _ in written]
        try:
            session = self._talk.present()
            await self._talk.over_link(session, session.endpoint.store(pieces, deadline), deadline)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._talk.post(m.Release(reservations=numbers))
            raise
        self.bytes_stored += sum(len(piece.local) for piece in pieces)
        return [
            m.CommitBlock(reservation=r.reservation, crcs=part_crcs(views, parts)) for r, views in written
        ]

    async def cancel(self, request: str, timeout_s: float | None = None) -> int:
        """End a scope; returns how many leases, reservations and prefetches it held."""
        self._zones.forget(request)
        return (await self._talk.call(m.Cancel(request=request), m.Ok, timeout_s)).count

    async def delete(self, space: str, digests: Sequence[bytes], timeout_s: float | None = None) -> int:
        """These blocks are not wanted any more (see `wire.messages.Delete`); how many were there."""
        return (await self._talk.call(m.Delete(space=space, digests=list(digests)), m.Ok, timeout_s)).count

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
            space=space,
            tokens=None if tokens is None else self._raw(space, tokens),
            digests=None if digests is None else list(digests),
            shard=shard,
        )
        return (await self._talk.call(message, m.ExplainReply, timeout_s)).blocks

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
        return await self._talk.call(message, m.IndexBatch, wait_s)

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
                await trio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
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
            space=space, tokens=self._raw(space, tokens), intent="will_route" if will_route else "probe", cache_salt=cache_salt,
            queued_ms=dict(queued_ms or {}), among=list(among),
        )  # fmt: skip
        return await self._talk.call(message, m.RouteReply, timeout_s)

    async def stats(self, timeout_s: float | None = None) -> dict[str, object]:
        """The node's counters."""
        return (await self._talk.call(m.Stats(), m.StatsReply, timeout_s)).stats

    # --- parts of the above ---

    def _check_sizes(self, space: str, payloads: Sequence[Views]) -> None:
        if space not in self._spaces:
            raise ValueError(f"no space {space!r} was given to connect")
        wanted = self._spaces[space].geometry.payload_bytes
        sizes = {sum([view.nbytes for view in views]) for views in payloads} - {wanted}
        if sizes:
            raise ValueError(f"a block of space {space!r} has {wanted} bytes, got {sorted(sizes)}")

    async def _load(self, message: m.Load, deadline: float) -> m.LoadReply:
        return await self._talk.call(message, m.LoadReply, deadline - trio.current_time())

    async def _release(self, reply: m.LoadReply | m.ReserveReply) -> None:
        message = m.Release()
        if isinstance(reply, m.LoadReply):
            message.leases = [grant.lease for grant in reply.blocks if grant.lease]
        else:
            message.reservations = [one.reservation for one in reply.blocks if one.reservation]
        if message.leases or message.reservations:
            with trio.CancelScope(shield=True):
                await self._talk.post(message)

    def _checked(self, reply: m.LoadReply, arrived: Sequence[Views | None]) -> list[LoadedBlock]:
        return [
            self._check_one(g, data, reply.part_bytes) for g, data in zip(reply.blocks, arrived, strict=True)
        ]

    def _check_one(self, grant: m.Grant, data: Views | None, part_bytes: Sequence[int]) -> LoadedBlock:
        if grant.status != "ok" or data is None:
            return LoadedBlock(grant.status, grant.source, grant.reason)
        if part_crcs(data, part_bytes) != grant.crcs:
            self.checksum_errors += 1
            return LoadedBlock(
                "checksum", grant.source, "the bytes that arrived are not the bytes the node described"
            )
        return LoadedBlock("ok", grant.source, "", data[0] if len(data) == 1 else None)


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
