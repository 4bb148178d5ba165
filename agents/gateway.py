"""The gateway agent: owns the client socket, the admin socket and the sessions; turns messages into calls on the others.

What can be answered at once (lookup, hint, release, reserve ...) is answered in the receive loop itself, without a task
switch. What waits (load, commit) runs in a task of its own, at most `max_inflight_per_client` a client, each with the
deadline its message carries. A host that stops reading is cut off. Sessions and scopes are in `dpurt.agents.hosts`.

Restart: the sockets are bound again, to the same address; requests in hand are never answered. To a new socket every host
is a stranger: it is told ``no_session`` and says hello again, and its old session ends with its link.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import structlog
import trio
import zmq
from numpy.typing import NDArray

from dpurt.config import Config
from dpurt.core.events import (
    Arrived,
    Consumed,
    DecodeStep,
    Event,
    Finished,
    Owner,
    Paused,
    Ranked,
    Resumed,
    SequenceGone,
    Stored,
)
from dpurt.core.identity import PartRun
from dpurt.errors import BdevError, RemoteProtocolError
from dpurt.runtime.actor import Actor
from dpurt.transport import CurveServer, SocketOptions, ZmqSocket, open_context, serve_zap, user_id
from dpurt.wire import messages as m

from .fabric import FabricAgent
from .feeds import next_batch
from .hosts import Hosts, Refusal
from .index import IndexAgent
from .intake import Intake
from .refusals import RefusalLog
from .sessions import Scope, Session
from .spaces import SpaceState
from .staging import Acquired, StagingAgent

log = structlog.get_logger()
WATCH_S = 0.25
UNREAD_MESSAGES = 32  # of one host, that we have not read: they may be large, and then TCP holds it back
MAX_FOLLOWED = 64  # batches of the index that one host may wait for at once
UNREAD_REPLIES = 512  # of ours, that a host has not read: beyond, it is cut off


class GatewayAgent(Actor[None]):
    """The hosts' door."""

    name = "gateway"

    def __init__(
        self,
        config: Config,
        incarnation: int,
        index: IndexAgent,
        staging: StagingAgent,
        intake: Intake,
        fabric: FabricAgent,
        observe: Callable[[Event], object],
        node_stats: Callable[[], dict[str, object]],
    ) -> None:
        super().__init__(1)
        self.config = config
        self.endpoint = ""
        self._incarnation = incarnation
        self._index = index
        self._staging = staging
        self._intake = intake
        self._fabric = fabric
        self._observe = observe
        self._node_stats = node_stats
        self.hosts = Hosts(config, incarnation, index, staging, intake, fabric, observe)
        self.errors: dict[str, int] = {}
        self.messages = 0
        self.denied = 0  # connections with a key that is not in the topology
        self._after_reply: list[tuple[Session, Scope, NDArray[np.int32]]] = []  # arrivals not told on yet
        self._refusal_log = RefusalLog()
        self.route: Callable[[SpaceState, m.Route], m.RouteReply]
        self.on_epoch_bump: Callable[[str], Awaitable[int]]
        self.on_drain: Callable[[], None] = lambda: None
        self._socket: ZmqSocket | None = None
        self._nursery: trio.Nursery | None = None
        self._handlers: dict[type[m.Request], Callable[[Session, Any], m.Reply | None]] = {
            m.Lookup: self._lookup, m.Hint: self._hint, m.Reserve: self._reserve, m.Release: self._release,
            m.Cancel: self._cancel, m.Explain: self._explain, m.Route: self._route, m.Stats: self._stats, m.Ping: self._ping,
            m.Bye: self._bye,
        }  # fmt: skip

    # --- sockets ---

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        gateway = self.config.gateway
        curve = None if gateway.curve is None else CurveServer(gateway.curve.secret_key())
        options = SocketOptions(
            max_message_bytes=gateway.max_message_bytes, linger_ms=200, curve=curve,
            recv_hwm=UNREAD_MESSAGES, send_hwm=UNREAD_REPLIES,
        )  # fmt: skip
        admin = SocketOptions(max_message_bytes=1 << 20, linger_ms=200)
        with (
            open_context() as context,
            ZmqSocket(context, "ROUTER", options) as self._socket,
            ZmqSocket(context, "ROUTER", admin) as door,
        ):
            async with (
                trio.open_nursery() as self._nursery
            ):  # ends first: whoever still answers needs a socket
                if curve is not None:
                    await self._nursery.start(serve_zap, context, self.config.authorized_keys(), self._denied)
                self.endpoint = self._socket.bind(self.endpoint or gateway.bind)
                self._bind_admin(door)
                self._nursery.start_soon(self._watch)
                self._nursery.start_soon(self._serve_admin, door)
                task_status.started()
                await self._serve_hosts(self._socket)

    def _denied(self, address: str, key: str) -> None:
        self.denied += 1
        self._refusal_log.warn("peer_denied", address=address, public_key=key)

    def _bind_admin(self, door: ZmqSocket) -> None:
        path = self.config.node.run_path / "admin.sock"
        path.unlink(missing_ok=True)
        old = os.umask(0o177)  # never open to others, not even for a moment
        try:
            door.bind(f"ipc://{path}")
        finally:
            os.umask(old)

    async def _serve_hosts(self, socket: ZmqSocket) -> None:
        while True:
            # one a turn: what a lookup set in motion (prefetch) starts before the next message is looked at
            self._on_message(await socket.recv_frames())

    def _on_message(self, frames: Sequence[zmq.Frame]) -> None:
        self.messages += 1
        routing_id = frames[0].bytes
        key = user_id(frames) if self.config.gateway.curve is not None else None
        session = self.hosts.session_of(routing_id, key)
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("malformed", f"expected one frame, got {len(frames) - 1}")
            request = m.decode_request(frames[1].buffer)
        except RemoteProtocolError as error:
            request_id = m.request_id(frames[1].buffer) if len(frames) > 1 else 0
            self._refuse(routing_id, request_id, Refusal(error.code, error.message))
            return
        try:
            reply = self._dispatch(routing_id, key, session, request)
        except Refusal as refusal:
            if isinstance(request, m.Hello):
                self._refusal_log.warn(
                    "hello_refused", host=request.host, code=refusal.code, message=refusal.message
                )
            self._refuse(routing_id, request.id, refusal)
            return
        if reply is not None and request.id:
            self._send(routing_id, reply)
        while self._after_reply:
            self._note_arrival(*self._after_reply.pop())

    def _dispatch(
        self, routing_id: bytes, key: str | None, session: Session | None, request: m.AnyRequest
    ) -> m.Reply | None:
        if isinstance(request, m.Hello):
            return self.hosts.hello(routing_id, request, key)
        if session is None:
            raise Refusal("no_session", "say hello first (the node may have restarted)")
        session.last_seen = trio.current_time()
        if isinstance(request, (m.Load, m.Commit)):
            self._spawn(session, request)
            return None
        if isinstance(request, m.Subscribe):
            self._follow(session, request)
            return None
        return self._handlers[type(request)](session, request)

    def _spawn(self, session: Session, request: m.Load | m.Commit) -> None:
        if session.in_flight >= self.config.gateway.max_inflight_per_client:
            raise Refusal("busy", f"more than {session.in_flight} loads and commits at once")
        assert self._nursery is not None
        session.in_flight += 1
        self._nursery.start_soon(self._answer_later, session, request)

    async def _answer_later(self, session: Session, request: m.Load | m.Commit) -> None:
        deadline = trio.current_time() + request.deadline_ms / 1000
        try:
            if isinstance(request, m.Load):
                reply: m.Reply = await self._load(session, request, deadline)
            else:
                reply = await self._commit(session, request, deadline)
        except Refusal as refusal:
            self._refuse(session.routing_id, request.id, refusal)
        else:
            if request.id and not session.ended:
                self._send(session.routing_id, reply)
        finally:
            session.in_flight -= 1

    def _follow(self, session: Session, request: m.Subscribe) -> None:
        """Answer with the next batch of an index, when there is one. Waiting for it keeps no drain from its end."""
        state = self.hosts.state(session, request.space)
        if len(session.following) >= MAX_FOLLOWED:
            raise Refusal("busy", f"more than {MAX_FOLLOWED} subscribe requests at once")
        assert self._nursery is not None
        scope = trio.CancelScope()
        session.following.add(scope)
        self._nursery.start_soon(self._answer_follower, session, state, request, scope)

    async def _answer_follower(
        self, session: Session, state: SpaceState, request: m.Subscribe, scope: trio.CancelScope
    ) -> None:
        deadline = trio.current_time() + request.deadline_ms / 1000
        with scope:
            try:
                reply = await next_batch(state, request, self._incarnation, deadline)
                if request.id and not session.ended:
                    self._send(session.routing_id, reply)
            except Refusal as refusal:
                self._refuse(session.routing_id, request.id, refusal)
            finally:
                session.following.discard(scope)

    def _send(self, routing_id: bytes, reply: m.Reply) -> None:
        assert self._socket is not None
        try:
            if not self._socket.try_send([routing_id, m.encode(reply)]):
                self.hosts.end_session(routing_id, "slow_reader")
        except trio.BrokenResourceError:
            self.hosts.end_session(routing_id, "disconnected")

    def _refuse(self, routing_id: bytes, request_id: int, refusal: Refusal) -> None:
        self.errors[refusal.code] = self.errors.get(refusal.code, 0) + 1
        self._send(
            routing_id,
            m.ErrorReply(id=request_id, code=refusal.code, message=refusal.message, **refusal.fields),
        )

    async def _watch(self) -> None:
        while True:
            await trio.sleep(WATCH_S)
            self.hosts.end_silent(trio.current_time())

    # --- requests answered at once ---

    def _lookup(self, session: Session, request: m.Lookup) -> m.LookupReply:
        state = self.hosts.state(session, request.space, request.shard)
        session.counters.lookups += 1
        if (request.tokens is None) == (request.digests is None):
            raise Refusal("malformed", "a lookup has either tokens or digests")
        ids = self._index.match(state, request.tokens, request.digests)
        if request.intent == "will_load":
            self._arrive(session, state, request.request, request.tokens, request.digests, request.shard, ids)
        staged = self._index.count_staged(state, ids, request.shard)
        flying = self._staging.count_in_flight(state, ids, request.shard)
        return m.LookupReply(
            id=request.id, matched_blocks=len(ids), staging=staged, in_flight=flying, nvme=len(ids) - staged - flying,
            matched_tokens=len(ids) * state.space.geometry.block_tokens,
            ready_ms=self._staging.ready_ms(len(ids) - staged, state.layout.record_bytes),
            miss=self._index.why_not(state, request.tokens, request.digests, len(ids), request.shard),
        )  # fmt: skip

    def _arrive(
        self, session: Session, state: SpaceState, request: str,
        tokens: bytes | None, digests: list[bytes] | None, shard: int, ids: NDArray[np.int32],
    ) -> None:  # fmt: skip
        scope = self.hosts.open_scope(session, request, state, tokens, digests, shard)
        scope.handles = state.index.handles(ids)
        self._after_reply.append((session, scope, ids))

    def _note_arrival(self, session: Session, scope: Scope, ids: NDArray[np.int32]) -> None:
        """The chain was used, and will be again in a moment. Told on after the answer has left: nobody waits for it."""
        if session.scopes.get(scope.request) is not scope:
            return  # the host did not take the answer, and is gone
        state = scope.state
        self._index.touch(state, ids, scope.used_at)
        refs = state.refs(scope.handles.tolist(), scope.shard)
        self._staging.touch(state, refs, scope.used_at)
        self._observe(Arrived(scope.sequence, Owner(state.name, state.space.tenant), tuple(refs)))

    def _hint(self, session: Session, hint: m.Hint) -> m.Reply | None:
        if hint.kind == "arrival":
            state = self.hosts.state(session, hint.space, hint.shard)
            if (hint.tokens is None) == (hint.digests is None):
                raise Refusal("malformed", "an arrival hint has either tokens or digests")
            ids = self._index.match(state, hint.tokens, hint.digests)
            self._arrive(session, state, hint.request, hint.tokens, hint.digests, hint.shard, ids)
            return m.Ok(id=hint.id, count=len(ids))
        scope = session.scopes.get(hint.request)
        if scope is None:
            return m.Ok(id=hint.id)  # it ended meanwhile: a hint is advice
        if hint.kind == "finish":
            return m.Ok(
                id=hint.id, count=self.hosts.end_scope(session, scope, Finished(scope.sequence, hint.reason))
            )
        if hint.kind == "decode" and hint.group >= scope.state.layout.num_parts:
            raise Refusal("malformed", f"group {hint.group} of a block with {scope.state.layout.num_parts}")
        self._observe(self._hint_event(scope, hint))
        return m.Ok(id=hint.id, count=1)

    def _hint_event(self, scope: Scope, hint: m.Hint) -> Event:
        if hint.kind == "pause":
            expected = None if hint.expected_ms is None else hint.expected_ms / 1000
            return Paused(scope.sequence, expected, hint.reason)
        if hint.kind == "resume":
            return Resumed(scope.sequence)
        need_by = trio.current_time() + hint.need_ms / 1000
        ranked = (Ranked(hint.group, self._refs_at(scope, hint.ranked), need_by),) if hint.ranked else ()
        return DecodeStep(scope.sequence, hint.step, hint.group, self._refs_at(scope, hint.touched), ranked)

    @staticmethod
    def _refs_at(scope: Scope, positions: Sequence[int]) -> tuple[int, ...]:
        known = len(scope.handles)
        handles = scope.handles[[p for p in positions if p < known]].tolist() if positions else []
        return tuple(scope.state.refs(handles, scope.shard))

    def _reserve(self, session: Session, request: m.Reserve) -> m.ReserveReply:
        state = self.hosts.state(session, request.space, request.shard)
        scope = session.scopes.get(request.request)
        if request.tokens is None and request.digests is None and scope is not None:
            request.tokens, request.digests = scope.tokens, scope.digests
        if (request.tokens is None) == (request.digests is None):
            raise Refusal("malformed", "a reserve has either tokens or digests, or a scope that has")
        scope = self.hosts.open_scope(
            session, request.request, state, request.tokens, request.digests, request.shard
        )
        chain = self._index.chain(state, request.tokens, request.digests, request.first, request.count)
        if chain is None:
            raise Refusal(
                "malformed", f"the prompt has fewer than {request.first + request.count} whole blocks"
            )
        grants = self._intake.reserve(
            session.number, scope.number, state, chain, request.first, request.shard, request.tokens
        )
        return m.ReserveReply(id=request.id, blocks=grants)

    def _release(self, session: Session, request: m.Release) -> m.Ok:
        count = self._staging.release(request.leases, session.number)
        return m.Ok(id=request.id, count=count + self._intake.release(request.reservations, session.number))

    def _cancel(self, session: Session, request: m.Cancel) -> m.Ok:
        scope = session.scopes.get(request.request)
        count = 0 if scope is None else self.hosts.end_scope(session, scope, SequenceGone(scope.sequence))
        return m.Ok(id=request.id, count=count)

    def _explain(self, session: Session, request: m.Explain) -> m.ExplainReply:
        state = self.hosts.state(session, request.space, request.shard)
        others = [s for s in session.spaces.values() if s is not state and not s.retired]
        return m.ExplainReply(
            id=request.id,
            blocks=self._index.explain(state, request.tokens, request.digests, request.shard, others),
        )

    def _route(self, session: Session, request: m.Route) -> m.RouteReply:
        return self.route(self.hosts.state(session, request.space), request)

    def _stats(self, session: Session, request: m.Stats) -> m.StatsReply:
        return m.StatsReply(id=request.id, stats=self._node_stats())

    def _ping(self, session: Session, request: m.Ping) -> m.Ok:
        return m.Ok(id=request.id)

    def _bye(self, session: Session, request: m.Bye) -> m.Ok:
        self.hosts.end_session(session.routing_id, "bye")
        return m.Ok(id=request.id)

    # --- requests that wait ---

    async def _load(self, session: Session, request: m.Load, deadline: float) -> m.LoadReply:
        scope = self.hosts.scope(session, request.request, request.shard)
        state = scope.state
        parts = self._parts(state, request.parts)
        if request.landing is not None and len(request.landing.offsets) != request.count:
            raise Refusal("malformed", "a landing needs one offset a block")
        if request.first + request.count > len(scope.handles):
            self._catch_up(scope)
        handles = scope.handles[request.first : request.first + request.count].tolist()
        self._observe(Consumed(scope.sequence, request.first, len(handles)))
        is_view = session.fabric == "shm" or request.landing is not None
        expires = None if is_view else deadline + self.config.staging.lease_s
        acquired = await self._staging.acquire(
            state, handles, request.shard, parts.mask, scope.number, scope.sequence, expires, deadline
        )
        acquired += [Acquired("miss", reason="beyond the matched prefix")] * (request.count - len(handles))
        if (
            session.scopes.get(scope.request) is not scope
        ):  # the scope ended while we waited: so did its leases
            self._staging.drop_leases(acquired)
            raise Refusal("cancelled", f"request {request.request!r} ended")
        grants = [self._grant(state, one, parts) for one in acquired]
        if request.landing is not None:
            await self._push(session, state, request.landing, grants, deadline)
        self._count_loads(session, state, scope, request.first, grants)
        return m.LoadReply(
            id=request.id, blocks=grants, part_bytes=state.part_bytes[parts.start : parts.stop]
        )

    def _catch_up(self, scope: Scope) -> None:
        """More of the scope's prompt may be here by now: stored in it, or by others."""
        ids = self._index.match(scope.state, scope.tokens, scope.digests)
        more = scope.catch_up(scope.state.index.handles(ids))
        if more:
            self._observe(Stored(scope.sequence, tuple(scope.state.refs(more, scope.shard))))

    @staticmethod
    def _parts(state: SpaceState, parts: tuple[int, int] | None) -> PartRun:
        start, stop = parts or (0, state.layout.num_parts)
        if not 0 <= start < stop <= state.layout.num_parts:
            raise Refusal("malformed", f"parts [{start}, {stop}) of a block with {state.layout.num_parts}")
        return PartRun(start, stop)

    def _grant(self, state: SpaceState, one: Acquired, parts: PartRun) -> m.Grant:
        if one.status != "ok":
            return m.Grant(status=one.status, reason=one.reason)
        at = state.payload_at(one.slot, parts.start)
        length = state.layout.part_offsets[parts.stop] - state.layout.part_offsets[parts.start]
        return m.Grant(
            status="ok", lease=one.lease, region=state.slab.region.region_id, offset=at, length=length,
            crcs=state.crcs(one.slot, parts.start, parts.stop), source=one.source,
        )  # fmt: skip

    async def _push(
        self,
        session: Session,
        state: SpaceState,
        landing: m.Landing,
        grants: Sequence[m.Grant],
        deadline: float,
    ) -> None:
        """Copy what was granted into the host's landing region; afterwards the host needs no lease."""
        view = state.slab.region.view
        pieces = [
            (view[g.offset : g.offset + g.length], landing.region, at)
            for g, at in zip(grants, landing.offsets, strict=True)
            if g.status == "ok"
        ]
        leases = [g.lease for g in grants if g.status == "ok"]
        self._staging.begin_transfers(leases)  # the slots stay untouched even if the scope ends meanwhile
        try:
            error = await self._fabric.push(session.fabric, session.number, pieces, deadline)
        finally:
            self._staging.end_transfers(leases)
            self._staging.release(leases, session.number)
        for grant in grants:
            if grant.status == "ok":
                grant.lease = grant.region = grant.offset = 0
                if error:
                    grant.status, grant.reason = "error", error

    def _count_loads(
        self, session: Session, state: SpaceState, scope: Scope, first: int, grants: Sequence[m.Grant]
    ) -> None:
        counters = session.counters
        counters.blocks += len(grants)
        for i, grant in enumerate(grants):
            if grant.status != "ok":
                counters.misses[grant.status] = counters.misses.get(grant.status, 0) + 1
                self._index.note_refusal(state, scope.handles, first + i, grant.status, grant.reason)
                continue
            counters.bytes_loaded += grant.length
            if grant.source == "staging":
                counters.staging += 1
            else:
                counters.nvme += 1

    async def _commit(self, session: Session, request: m.Commit, deadline: float) -> m.CommitReply:
        scope = self.hosts.scope(session, request.request)
        with trio.move_on_at(deadline) as limit:
            scope.commits.add(limit)
            try:
                statuses = await self._intake.commit(session.number, request.blocks, deadline)
            finally:
                scope.commits.discard(limit)
            self._catch_up(scope)
            self._count_stores(session, scope.state, statuses)
            return m.CommitReply(id=request.id, statuses=statuses)
        if session.scopes.get(scope.request) is not scope:
            raise Refusal("cancelled", f"request {request.request!r} ended")
        raise Refusal("deadline", "the commit did not end in its time; uncommitted blocks were given back")

    @staticmethod
    def _count_stores(session: Session, state: SpaceState, statuses: Sequence[str]) -> None:
        counters = session.counters
        for status in statuses:
            if status == "stored":
                counters.stored += 1
                counters.bytes_stored += state.layout.payload_bytes
            else:
                counters.not_stored[status] = counters.not_stored.get(status, 0) + 1

    # --- operators ---

    async def _serve_admin(self, door: ZmqSocket) -> None:
        while True:
            frames = await door.recv()
            reply = await self._answer_admin(frames[-1])
            try:
                door.try_send([frames[0], m.encode(reply)])
            except trio.BrokenResourceError:
                continue

    async def _answer_admin(self, frame: bytes) -> m.Reply:
        try:
            request = m.decode_admin(frame)
            return await self._administer(request)
        except RemoteProtocolError as error:
            return m.ErrorReply(id=m.request_id(frame), code=error.code, message=error.message)
        except Refusal as refusal:
            return m.ErrorReply(id=request.id, code=refusal.code, message=refusal.message)
        except BdevError as error:
            return m.ErrorReply(id=request.id, code="device", message=str(error))

    async def _administer(self, request: m.AdminRequest) -> m.Reply:
        if isinstance(request, m.Stats):
            return m.StatsReply(id=request.id, stats=self._node_stats())
        if isinstance(request, m.Ping):
            return m.Ok(id=request.id)
        if isinstance(request, m.Drain):
            self.on_drain()
            return m.Ok(id=request.id)
        state = self._index.spaces.get(request.space)
        if state is None:
            raise Refusal("unknown_space", f"no space {request.space!r}: {', '.join(self._index.spaces)}")
        if isinstance(request, m.Route):
            return self.route(state, request)
        if isinstance(request, m.Explain):
            self.hosts.check_shard(state, request.shard)
        if isinstance(request, m.EpochBump):
            return m.Ok(id=request.id, count=await self.on_epoch_bump(request.space))
        others = [s for s in self._index.spaces.values() if s is not state]
        return m.ExplainReply(
            id=request.id,
            blocks=self._index.explain(state, request.tokens, request.digests, request.shard, others),
        )
