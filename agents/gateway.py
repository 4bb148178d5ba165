"""The gateway agent: owns the client socket, the admin socket and the sessions; turns messages into calls on the others.

What can be answered at once (lookup, hint, release, reserve ...) is answered in the receive loop itself, without a task
switch. What waits (load, commit) runs in a task of its own, at most `max_inflight_per_client` a client, each with the
deadline its message carries. A host that stops reading is cut off. Sessions and scopes are in `dpurt.agents.hosts`.

Restart: the sockets are bound again, to the same address; requests in hand are never answered. To a new socket every host
is a stranger: it is told ``no_session`` and says hello again, and its old session ends with its link.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import structlog
import trio
import zmq
from numpy.typing import NDArray

from dpurt.config import Config
from dpurt.core.attention import MASS_OF
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
from dpurt.errors import BdevError, ConfigError, RemoteProtocolError
from dpurt.runtime.actor import Actor
from dpurt.transport import CurveServer, SocketOptions, ZmqSocket, open_context, serve_zap, user_id
from dpurt.wire import messages as m

from .decode import DecodeAgent
from .fabric import FabricAgent
from .feeds import next_batch
from .hosts import Hosts, Refusal
from .index import IN_STAGING, IndexAgent
from .intake import Intake
from .placement import PlacementAgent
from .refusals import RefusalLog
from .sessions import NO_HANDLE, Scope, Session
from .spaces import SpaceState
from .staging import Acquired, StagingAgent
from .tape import Tape

log = structlog.get_logger()
WATCH_S = 0.25
HINT_GRACE_S = 0.001
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
        decode: DecodeAgent,
        observe: Callable[[Event], object],
        node_stats: Callable[[], dict[str, object]],
        placement: PlacementAgent,
    ) -> None:
        super().__init__(1)
        self.config = config
        self.endpoint = ""
        self._incarnation = incarnation
        self._index = index
        self._staging = staging
        self._intake = intake
        self._fabric = fabric
        self._decode = decode
        self._observe = observe
        self._node_stats = node_stats
        self._placement = placement
        self.hosts = Hosts(config, incarnation, index, staging, intake, fabric, observe)
        self.hosts.on_session_ended.append(placement.close_session)
        self.errors: dict[str, int] = {}
        self.messages = 0
        self.denied = 0  # connections with a key that is not in the topology
        self._after_reply: list[
            tuple[Session, Scope, NDArray[np.int32], float | None]
        ] = []  # arrivals not told on yet
        self._refusal_log = RefusalLog()
        self.route: Callable[[SpaceState, m.Route], m.RouteReply]
        self.on_epoch_bump: Callable[[str], Awaitable[int]]
        self.on_drain: Callable[[], None] = lambda: None
        self.on_record: Callable[[str], Awaitable[m.RecordReply]]
        self.tape: Tape | None = None
        self._socket: ZmqSocket | None = None
        self._nursery: trio.Nursery | None = None
        self._handlers: dict[type[m.Request], Callable[[Session, Any], m.Reply | None]] = {
            m.Lookup: self._lookup, m.Hint: self._hint, m.Reserve: self._reserve, m.Release: self._release,
            m.Cancel: self._cancel, m.Explain: self._explain, m.Route: self._route, m.Stats: self._stats, m.Ping: self._ping,
            m.Bye: self._bye, m.Delete: self._delete, m.Zone: self._zone, m.Used: self._used,
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
            self._decode.catch_up()
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
        if not request.chained:
            return self._lookup_each(session, state, request)
        ids = self._index.match(state, request.tokens, request.digests)
        if request.intent == "will_load":
            scope = self._arrive(
                session, state, request.request, request.tokens, request.digests, request.shard, ids
            )
            scope.priority = request.priority
        return self._found(state, request, ids, len(ids))

    def _lookup_each(self, session: Session, state: SpaceState, request: m.Lookup) -> m.LookupReply:
        """A lookup of digests of which each stands alone."""
        if request.digests is None:
            raise Refusal("malformed", "tokens are a chain: only digests can stand alone")
        found = self._index.find(state, request.digests)
        is_here = found >= 0
        ids = found[is_here]
        if request.intent == "will_load":
            scope = self.hosts.open_scope(
                session, request.request, state, None, request.digests, request.shard, chained=False
            )
            scope.handles, scope.priority = state.known_handles(found), request.priority
            self._after_reply.append((session, scope, ids, None))
        missing = len(found) if is_here.all() else int(is_here.argmin())
        reply = self._found(state, request, ids, missing)
        reply.present = np.packbits(is_here, bitorder="little").tobytes()
        return reply

    def _found(
        self, state: SpaceState, request: m.Lookup, ids: NDArray[np.int32], missing: int
    ) -> m.LookupReply:
        """The answer to a lookup that found `ids`, and not the block at position `missing`."""
        staged = self._index.count_staged(state, ids, request.shard)
        flying = self._staging.count_in_flight(state, ids, request.shard)
        return m.LookupReply(
            id=request.id, matched_blocks=len(ids), staging=staged, in_flight=flying, nvme=len(ids) - staged - flying,
            matched_tokens=len(ids) * state.space.geometry.block_tokens,
            ready_ms=self._staging.ready_ms(len(ids) - staged, state.layout.record_bytes),
            miss=self._index.why_not(state, request.tokens, request.digests, missing, request.shard),
        )  # fmt: skip

    def _arrive(
        self, session: Session, state: SpaceState, request: str,
        tokens: bytes | None, digests: list[bytes] | None, shard: int, ids: NDArray[np.int32],
        expected_start: float | None = None,
    ) -> Scope:  # fmt: skip
        scope = self.hosts.open_scope(session, request, state, tokens, digests, shard)
        scope.handles = state.index.handles(ids)
        self._after_reply.append((session, scope, ids, expected_start))
        return scope

    def _note_arrival(
        self, session: Session, scope: Scope, ids: NDArray[np.int32], expected_start: float | None
    ) -> None:
        """The chain was used, and will be again in a moment. Told on after the answer has left: nobody waits for it."""
        if session.scopes.get(scope.request) is not scope:
            return  # the host did not take the answer, and is gone
        state = scope.state
        self._index.touch(state, ids, scope.used_at)
        refs = scope.refs
        self._staging.touch(state, refs, scope.used_at)
        self._intake.offer_again(state, ids, scope.shard)
        if self.tape is not None:
            self.tape.prompt(scope.sequence, state.number, *_lengths(scope))
        owner = Owner(state.name, state.space.tenant)
        self._observe(Arrived(scope.sequence, owner, tuple(refs), expected_start))

    def _hint(self, session: Session, hint: m.Hint) -> m.Reply | None:
        if hint.kind == "arrival":
            state = self.hosts.state(session, hint.space, hint.shard)
            if (hint.tokens is None) == (hint.digests is None):
                raise Refusal("malformed", "an arrival hint has either tokens or digests")
            ids = self._index.match(state, hint.tokens, hint.digests)
            start = trio.current_time() + hint.need_ms / 1000 if hint.need_ms else None
            self._arrive(session, state, hint.request, hint.tokens, hint.digests, hint.shard, ids, start)
            return m.Ok(id=hint.id, count=len(ids))
        scope = session.scopes.get(hint.request)
        if scope is None:
            return m.Ok(id=hint.id)  # it ended meanwhile: a hint is advice
        if hint.kind == "finish":
            return m.Ok(
                id=hint.id, count=self.hosts.end_scope(session, scope, Finished(scope.sequence, hint.reason))
            )
        if hint.kind == "decode":
            _check_decode(scope, hint)
            if self._decode.hint(scope, hint):
                assert self._nursery is not None
                self._nursery.start_soon(self._catch_up_decode)
                return m.Ok(id=hint.id, count=1)
        self._observe(self._hint_event(scope, hint))
        return m.Ok(id=hint.id, count=1)

    async def _catch_up_decode(self) -> None:
        """A hint whose load does not come has waited long enough."""
        await trio.sleep(HINT_GRACE_S)
        self._decode.catch_up()

    def _hint_event(self, scope: Scope, hint: m.Hint) -> Event:
        if hint.kind == "pause":
            expected = None if hint.expected_ms is None else hint.expected_ms / 1000
            return Paused(scope.sequence, expected, hint.reason)
        if hint.kind == "resume":
            return Resumed(scope.sequence)
        need_by = trio.current_time() + hint.need_ms / 1000
        group = hint.group if hint.ranked_group is None else hint.ranked_group
        ranked = (Ranked(group, self._refs_at(scope, hint.ranked), need_by),) if hint.ranked else ()
        touched, masses = self._refs_at(scope, hint.touched), None
        if hint.masses and len(touched) == len(hint.touched):
            masses = tuple(MASS_OF[np.frombuffer(hint.masses, np.uint8)].tolist())
        return DecodeStep(scope.sequence, hint.step, hint.group, touched, ranked, masses)

    @staticmethod
    def _refs_at(scope: Scope, positions: Sequence[int]) -> tuple[int, ...]:
        known = len(scope.handles)
        handles = scope.handles[[p for p in positions if p < known]] if positions else scope.handles[:0]
        return tuple(scope.state.refs(handles[handles != NO_HANDLE].tolist(), scope.shard))

    def _reserve(self, session: Session, request: m.Reserve) -> m.ReserveReply:
        state = self.hosts.state(session, request.space, request.shard)
        scope = session.scopes.get(request.request)
        if request.tokens is None and request.digests is None and scope is not None:
            request.tokens, request.digests = scope.tokens, scope.digests
        if (request.tokens is None) == (request.digests is None):
            raise Refusal("malformed", "a reserve has either tokens or digests, or a scope that has")
        scope = self.hosts.open_scope(
            session, request.request, state, request.tokens, request.digests, request.shard, request.chained
        )
        chain = self._index.chain(state, request.tokens, request.digests, request.first, request.count)
        if chain is None:
            raise Refusal(
                "malformed", f"the prompt has fewer than {request.first + request.count} whole blocks"
            )
        grants = self._intake.reserve(
            session.number, scope.number, state, chain, request.first, request.shard, request.tokens,
            request.chained,
        )  # fmt: skip
        return m.ReserveReply(id=request.id, blocks=grants)

    def _zone(self, session: Session, request: m.Zone) -> m.Ok:
        state = self.hosts.state(session, request.space, request.shard)
        if not self._placement.is_enabled:
            return m.Ok(id=request.id)
        slots = min(request.slots, self.config.placement.max_slots)
        owner = self.hosts.new_owner()
        self._placement.open_zone(session, state, request.shard, request.region, slots, owner)
        return m.Ok(id=request.id, count=slots)

    def _used(self, session: Session, request: m.Used) -> m.Ok:
        """As a load of these blocks, but for the bytes: they are there already."""
        scope = session.scopes.get(request.request)
        if scope is None or scope.state.retired:
            return m.Ok(id=request.id)  # it ended meanwhile
        state, parts = scope.state, self._parts(scope.state, request.parts)
        known = len(scope.handles)
        positions = [p for p in request.blocks if p < known and scope.handles[p] != NO_HANDLE]
        refs = state.refs(scope.handles[positions].tolist(), request.shard) if positions else []
        for first, count in _runs(positions):
            self._observe(Consumed(scope.sequence, first, count))
        self._placement.used(session, state, request.shard, scope.sequence, refs)
        session.counters.blocks += len(refs)
        session.counters.landing += len(refs)
        session.counters.bytes_loaded += len(refs) * sum(state.part_bytes[parts.start : parts.stop])
        return m.Ok(id=request.id, count=len(refs))

    def _release(self, session: Session, request: m.Release) -> m.Ok:
        count = self._staging.release(request.leases, session.number)
        return m.Ok(id=request.id, count=count + self._intake.release(request.reservations, session.number))

    def _cancel(self, session: Session, request: m.Cancel) -> m.Ok:
        scope = session.scopes.get(request.request)
        count = 0 if scope is None else self.hosts.end_scope(session, scope, SequenceGone(scope.sequence))
        return m.Ok(id=request.id, count=count)

    def _delete(self, session: Session, request: m.Delete) -> m.Ok:
        state = self.hosts.state(session, request.space)
        return m.Ok(id=request.id, count=self._index.delete(state, request.digests))

    def _explain(self, session: Session, request: m.Explain) -> m.ExplainReply:
        state = self.hosts.state(session, request.space, request.shard)
        others = [s for s in session.spaces.values() if s is not state and not s.retired]
        return m.ExplainReply(
            id=request.id,
            blocks=self._explained(state, request, others),
        )

    def _explained(
        self, state: SpaceState, request: m.Explain, others: Sequence[SpaceState]
    ) -> list[m.Reason]:
        """What the index says, and of blocks on flash whether computing them would be sooner."""
        reasons = self._index.explain(state, request.tokens, request.digests, request.shard, others)
        here = list(itertools.takewhile(lambda reason: reason.reason == "present", reasons))
        unstaged = [reason for reason in here if not reason.detail.startswith(IN_STAGING)]
        if unstaged:
            note = self._staging.break_even(state, len(here) - unstaged[0].block)
            for reason in unstaged:
                reason.detail += note
        return reasons

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
        positions = request.blocks or range(request.first, request.first + request.count)
        if request.landing is not None and len(request.landing.offsets) != len(positions):
            raise Refusal("malformed", "a landing needs one offset a block")
        if max(positions) >= len(scope.handles):
            self._catch_up(scope)
        is_view = session.fabric == "shm" or request.landing is not None
        expires = None if is_view else deadline + self.config.staging.lease_s
        decoding = self._decode.takes(scope, positions, parts)
        if decoding is not None:
            acquired = await self._decode.acquire(decoding, parts.start, positions, expires, deadline)
        else:
            acquired = await self._acquire(scope, request, positions, parts, expires, deadline)
        if (
            session.scopes.get(scope.request) is not scope
        ):  # the scope ended while we waited: so did its leases
            self._staging.drop_leases(acquired)
            raise Refusal("cancelled", f"request {request.request!r} ended")
        if decoding is None:
            grants = _grants(state, acquired, parts)
        else:
            grants = [self._decode.grant(decoding, parts.start, one) for one in acquired]
        if request.landing is not None:
            await self._push(session, state, request.landing, grants, deadline)
        self._count_loads(session, state, scope, positions, grants)
        return m.LoadReply(
            id=request.id, blocks=grants, part_bytes=state.part_bytes[parts.start : parts.stop]
        )

    async def _acquire(
        self,
        scope: Scope,
        request: m.Load,
        positions: Sequence[int],
        parts: PartRun,
        expires: float | None,
        deadline: float,
    ) -> list[Acquired]:
        """From the space's ordinary staging, an answer for each position."""
        known = len(scope.handles)
        handles = scope.handles[[p for p in positions if p < known]].tolist()
        if not request.blocks:
            start, stop = scope.num_here(request.first), scope.num_here(request.first + len(handles))
            self._observe(Consumed(scope.sequence, start, stop - start))
        acquired = await self._staging.acquire(
            scope.state,
            handles,
            request.shard,
            parts.mask,
            scope.number,
            scope.sequence,
            expires,
            deadline,
            scope.priority,
        )
        if len(acquired) == len(positions):
            return acquired
        found = iter(acquired)
        beyond = Acquired("miss", reason="beyond the matched prefix")
        return [next(found) if p < known else beyond for p in positions]

    def _catch_up(self, scope: Scope) -> None:
        """More of the scope's prompt may be here by now: stored in it, or by others."""
        if scope.chained:
            ids = self._index.match(scope.state, scope.tokens, scope.digests)
        else:
            ids = self._index.find(scope.state, scope.digests or ())
        more = scope.catch_up(scope.state.known_handles(ids))
        if more:
            self._observe(Stored(scope.sequence, tuple(scope.state.refs(more, scope.shard))))

    @staticmethod
    def _parts(state: SpaceState, parts: tuple[int, int] | None) -> PartRun:
        start, stop = parts or (0, state.layout.num_parts)
        if not 0 <= start < stop <= state.layout.num_parts:
            raise Refusal("malformed", f"parts [{start}, {stop}) of a block with {state.layout.num_parts}")
        return PartRun(start, stop)

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
            began = trio.current_time()
            error = await self._fabric.push(session.fabric, session.number, pieces, deadline)
            if self.tape is not None and not error:
                moved = sum(len(source) for source, _, _ in pieces)
                self.tape.moved("push", None, began, moved, trio.current_time())
        finally:
            self._staging.end_transfers(leases)
            self._staging.release(leases, session.number)
        for grant in grants:
            if grant.status == "ok":
                grant.lease = grant.region = grant.offset = 0
                if error:
                    grant.status, grant.reason = "error", error

    def _count_loads(
        self,
        session: Session,
        state: SpaceState,
        scope: Scope,
        positions: Sequence[int],
        grants: Sequence[m.Grant],
    ) -> None:
        counters = session.counters
        counters.blocks += len(grants)
        for position, grant in zip(positions, grants, strict=True):
            if grant.status != "ok":
                counters.misses[grant.status] = counters.misses.get(grant.status, 0) + 1
                self._index.note_refusal(state, scope.handles, position, grant.status, grant.reason)
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
        counters, stored = session.counters, statuses.count("stored")
        counters.stored += stored
        counters.bytes_stored += stored * state.layout.payload_bytes
        for status in set(statuses) - {"stored"}:
            counters.not_stored[status] = counters.not_stored.get(status, 0) + statuses.count(status)

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
        except ConfigError as error:
            return m.ErrorReply(id=request.id, code="cannot", message=str(error))

    async def _administer(self, request: m.AdminRequest) -> m.Reply:
        if isinstance(request, m.Stats):
            return m.StatsReply(id=request.id, stats=self._node_stats())
        if isinstance(request, m.Ping):
            return m.Ok(id=request.id)
        if isinstance(request, m.Drain):
            self.on_drain()
            return m.Ok(id=request.id)
        if isinstance(request, m.Record):
            reply = await self.on_record(request.path)
            reply.id = request.id
            return reply
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
            blocks=self._explained(state, request, others),
        )


def _grants(state: SpaceState, acquired: Sequence[Acquired], parts: PartRun) -> list[m.Grant]:
    """Where a host finds what it has leases on, in the space's own slab."""
    slab, first = state.slab, state.payload_at(0, parts.start)
    region, stride = slab.region.region_id, slab.stride
    length = state.layout.part_offsets[parts.stop] - state.layout.part_offsets[parts.start]
    return [
        m.Grant(
            status="ok", lease=one.lease, region=region, offset=first + one.slot * stride, length=length,
            crcs=slab.crcs(one.slot, parts.start, parts.stop), source=one.source,
        )
        if one.status == "ok"
        else m.Grant(status=one.status, reason=one.reason)
        for one in acquired
    ]  # fmt: skip


def _lengths(scope: Scope) -> tuple[int, int]:
    """Whole blocks and tokens of a scope's prompt; no tokens where the host gave digests."""
    if scope.tokens is None:
        return len(scope.digests or ()), 0
    geometry = scope.state.space.geometry
    return len(scope.tokens) // geometry.block_token_bytes, len(scope.tokens) // geometry.token_bytes


def _check_decode(scope: Scope, hint: m.Hint) -> None:
    """Refusal for a hint that cannot be of this space, or contradicts itself."""
    num_parts = scope.state.layout.num_parts
    for group in (hint.group, hint.ranked_group or 0):
        if group >= num_parts:
            raise Refusal("malformed", f"group {group} of a block with {num_parts}")
    if hint.masses and len(hint.masses) != len(hint.touched):
        raise Refusal("malformed", f"{len(hint.masses)} masses for {len(hint.touched)} touched blocks")
    if hint.shard != scope.shard:
        raise Refusal("malformed", f"shard {hint.shard} of a request that was looked up for {scope.shard}")


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive positions."""
    start = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield positions[start], i - start
            start = i
