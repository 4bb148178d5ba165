"""The gateway agent: owns the hosts' socket and the sessions; turns messages into calls on the others.

What can be answered at once (lookup, hint, release, reserve ...) is answered in the receive loop itself, without a task
switch. What waits (load, commit) runs in a task of its own, at most `max_inflight_per_client` a client, each with the
deadline its message carries. A host that stops reading is cut off. Sessions and scopes are in `dpurt.agents.hosts`, loads and
commits in `dpurt.agents.transfers`, the operators' door in `dpurt.agents.admin`.

Restart: the sockets are bound again, to the same address; requests in hand are never answered. To a new socket every host
is a stranger: it is told ``no_session`` and says hello again, and its old session ends with its link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog
import trio
import zmq
from numpy.typing import NDArray

from dpurt.config import Config
from dpurt.core.events import Arrived, Event, Finished, Owner, SequenceGone
from dpurt.errors import RemoteProtocolError
from dpurt.runtime.actor import Actor
from dpurt.transport import CurveServer, SocketOptions, ZmqSocket, open_context, serve_zap, user_id
from dpurt.wire import messages as m

from .admin import AdminDoor
from .decode import DecodeAgent
from .explain import explain
from .fabric import FabricAgent
from .feeds import next_batch
from .hints import check_decode, event_of
from .hosts import Hosts, Refusal
from .index import IndexAgent
from .intake import Intake
from .placement import PlacementAgent
from .refusals import RefusalLog
from .sessions import Scope, Session
from .spaces import SpaceState
from .staging import StagingAgent
from .tape import Tape
from .transfers import Transfers

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
        route: Callable[[SpaceState, m.Route], m.RouteReply],
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
        self._route_of = route
        self.hosts = Hosts(config, incarnation, index, staging, intake, fabric, observe)
        self.hosts.on_session_ended.append(placement.close_session)
        self.admin = AdminDoor(config.node.run_path, index, staging, self.hosts, route, node_stats)
        self.transfers = Transfers(
            self.hosts, index, staging, intake, fabric, decode, placement, observe, config.staging.lease_s
        )
        self.errors: dict[str, int] = {}
        self.messages = 0
        self.denied = 0  # connections with a key that is not in the topology
        self._after_reply: list[
            tuple[Session, Scope, NDArray[np.int32], float | None]
        ] = []  # arrivals not told on yet
        self._refusal_log = RefusalLog()
        self.tape: Tape | None = None
        self._socket: ZmqSocket | None = None
        self._nursery: trio.Nursery | None = None
        self._handlers: dict[type[m.Request], Callable[[Session, Any], m.Reply | None]] = {
            m.Lookup: self._lookup, m.Hint: self._hint, m.Reserve: self._reserve, m.Release: self._release,
            m.Cancel: self._cancel, m.Route: self._route, m.Stats: self._stats, m.Ping: self._ping,
            m.Bye: self._bye, m.Delete: self._delete, m.Zone: self._zone, m.Used: self.transfers.used,
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
                self.admin.bind(door)
                self._nursery.start_soon(self._watch)
                self._nursery.start_soon(self.admin.serve, door)
                task_status.started()
                await self._serve_hosts(self._socket)

    def _denied(self, address: str, key: str) -> None:
        self.denied += 1
        self._refusal_log.warn("peer_denied", address=address, public_key=key)

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
        if isinstance(request, (m.Load, m.Commit, m.Explain)):
            self._spawn(session, request)
            return None
        if isinstance(request, m.Subscribe):
            self._follow(session, request)
            return None
        return self._handlers[type(request)](session, request)

    def _spawn(self, session: Session, request: m.Load | m.Commit | m.Explain) -> None:
        if session.in_flight >= self.config.gateway.max_inflight_per_client:
            raise Refusal("busy", f"more than {session.in_flight} loads, commits and explains at once")
        assert self._nursery is not None
        session.in_flight += 1
        self._nursery.start_soon(self._answer_later, session, request)

    async def _answer_later(self, session: Session, request: m.Load | m.Commit | m.Explain) -> None:
        deadline = trio.current_time() + request.deadline_ms / 1000
        try:
            if isinstance(request, m.Load):
                reply: m.Reply = await self.transfers.load(session, request, deadline)
            elif isinstance(request, m.Explain):
                reply = await self._explain(session, request)
            else:
                reply = await self.transfers.commit(session, request, deadline)
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
            frame = m.encode(reply)
        except (
            OverflowError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # of one answer, not of all hosts
            log.error("answer_not_sent", kind=type(reply).__name__, error=str(error))
            frame = m.encode(
                m.ErrorReply(id=reply.id, code="internal", message="the answer cannot be encoded")
            )
        try:
            if not self._socket.try_send([routing_id, frame]):
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
        for served in self.hosts.served(session, state):
            served.lookups += 1
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
            check_decode(scope, hint)
            if self._decode.hint(scope, hint):
                assert self._nursery is not None
                self._nursery.start_soon(self._catch_up_decode)
                return m.Ok(id=hint.id, count=1)
        self._observe(event_of(scope, hint, trio.current_time()))
        return m.Ok(id=hint.id, count=1)

    async def _catch_up_decode(self) -> None:
        """A hint whose load does not come has waited long enough."""
        await trio.sleep(HINT_GRACE_S)
        self._decode.catch_up()

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

    async def _explain(self, session: Session, request: m.Explain) -> m.ExplainReply:
        state = self.hosts.state(session, request.space, request.shard)
        others = [s for s in session.spaces.values() if s is not state and not s.retired]
        return m.ExplainReply(
            id=request.id, blocks=await explain(self._index, self._staging, state, request, others)
        )

    def _route(self, session: Session, request: m.Route) -> m.RouteReply:
        return self._route_of(self.hosts.state(session, request.space), request)

    def _stats(self, session: Session, request: m.Stats) -> m.StatsReply:
        return m.StatsReply(id=request.id, stats=self._node_stats())

    def _ping(self, session: Session, request: m.Ping) -> m.Ok:
        return m.Ok(id=request.id)

    def _bye(self, session: Session, request: m.Bye) -> m.Ok:
        self.hosts.end_session(session.routing_id, "bye")
        return m.Ok(id=request.id)


def _lengths(scope: Scope) -> tuple[int, int]:
    """Whole blocks and tokens of a scope's prompt; no tokens where the host gave digests."""
    if scope.tokens is None:
        return len(scope.digests or ()), 0
    geometry = scope.state.space.geometry
    return len(scope.tokens) // geometry.block_token_bytes, len(scope.tokens) // geometry.token_bytes
