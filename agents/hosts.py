"""Who is connected: sessions from `hello` to their end, and the scopes in them. Owned by the gateway agent.

A session ends when its host says ``bye``, falls silent, stops reading, or its fabric link closes. Ending it ends every scope at
once: leases are free, or quarantined while the host may still map the memory; `link_closed` is the proof that it cannot.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import structlog
import trio

from dpurt.config import Config
from dpurt.core.events import Event, Finished, SequenceGone
from dpurt.core.identity import check_same_space, conformance_vectors
from dpurt.errors import ConfigError, SpaceMismatch
from dpurt.wire import messages as m

from .fabric import Choice, FabricAgent
from .index import IndexAgent
from .intake import Intake
from .sessions import Scope, Served, Session
from .spaces import SpaceState
from .staging import StagingAgent

log = structlog.get_logger()
EMPTY = np.empty(0, dtype=np.int64)
DIGEST_COST_BYTES = 100  # of one digest as a Python object


class Refusal(Exception):
    """A request this node will not carry out; becomes an `error` reply. Internal to the gateway."""

    def __init__(self, code: str, message: str, **fields: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fields = fields


class Hosts:
    """The sessions of a node."""

    def __init__(
        self,
        config: Config,
        incarnation: int,
        index: IndexAgent,
        staging: StagingAgent,
        intake: Intake,
        fabric: FabricAgent,
        observe: Callable[[Event], object],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._index = index
        self._staging = staging
        self._intake = intake
        self._fabric = fabric
        self._observe = observe
        self._by_number: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._scope_numbers = itertools.count(1)
        self.sessions: dict[bytes, Session] = {}
        self.by_host: dict[str, Served] = {}
        self.by_space: dict[str, Served] = {}
        self.ended: dict[str, int] = {}
        self.is_draining = False
        self.on_session_ended: list[Callable[[int], None]] = []
        fabric.on_link_closed = self.link_closed

    # --- sessions ---

    def hello(self, routing_id: bytes, hello: m.Hello, key: str | None) -> m.HelloReply:
        """Open a session, or raise Refusal. `key` is the peer's authenticated public key."""
        if self.is_draining:
            raise Refusal("draining", "this node is shutting down")
        if hello.protocol != m.PROTOCOL:
            raise Refusal("protocol", f"node speaks protocol {m.PROTOCOL}, host {hello.protocol}")
        host = self._config.host_named(hello.host)
        if host is None:
            raise Refusal("unknown_host", f"no host {hello.host!r} in the topology")
        if host.public_key and host.public_key != key:
            raise Refusal("unauthorised", f"host {hello.host!r} must use its own key")
        if (
            len(self._by_number) >= self._config.gateway.max_clients
        ):  # those gone that still map our memory count
            raise Refusal("busy", f"more than {len(self._by_number)} clients")
        spaces = {claim.name: self._agreed(claim, host.spaces) for claim in hello.spaces}
        choice = self._fabric.choose(hello.host, hello.fabrics)
        if choice is None:
            raise Refusal(
                "no_fabric", f"none of {', '.join(hello.fabrics)} is offered to host {hello.host!r}"
            )
        self.end_session(routing_id, "said hello again")
        return self._welcome(routing_id, key, hello, choice, host.inbound_bytes, spaces)

    def _agreed(self, claim: m.SpaceClaim, allowed: Sequence[str]) -> SpaceState:
        state = self._index.spaces.get(claim.name)
        if state is None or claim.name not in allowed:
            raise Refusal(
                "unknown_space", f"space {claim.name!r} is not one of this host's: {', '.join(allowed)}"
            )
        mine = state.space.with_epoch(0)
        try:
            check_same_space(mine, claim.to_space(), claim.fingerprint)
        except SpaceMismatch as error:
            raise Refusal(
                "space_mismatch", f"space {claim.name!r}: {error}", field=error.field,
                mine=str(error.mine), theirs=str(error.theirs),
            ) from error  # fmt: skip
        except ValueError as error:
            raise Refusal("malformed", f"space {claim.name!r}: {error}") from error
        if tuple(claim.vectors) != conformance_vectors(mine.fingerprint()):
            raise Refusal("space_mismatch", "the block key vectors differ", field="vectors")
        if claim.epoch is not None and claim.epoch != state.space.epoch:
            raise Refusal(
                "space_mismatch", f"space {claim.name!r}: epoch differs", field="epoch",
                mine=str(state.space.epoch), theirs=str(claim.epoch),
            )  # fmt: skip
        return state

    def _welcome(
        self, routing_id: bytes, key: str | None, hello: m.Hello, choice: Choice, inbound_bytes: int,
        spaces: dict[str, SpaceState],
    ) -> m.HelloReply:  # fmt: skip
        number = next(self._numbers)
        try:
            inbound = self._intake.open_session(
                number, hello.host, inbound_bytes, [s.layout.payload_bytes for s in spaces.values()],
                has_slots=self._fabric.lands_stores(choice.kind),
            )  # fmt: skip
        except ConfigError as error:  # of one host too many, not of the topology
            raise Refusal("no_memory", str(error)) from error
        regions = {state.slab.region.region_id: state.slab.region for state in spaces.values()}
        token = secrets.token_bytes(32)
        self._fabric.admit(choice.kind, number, token, list(regions.values()), inbound)
        served = self.by_host.setdefault(hello.host, Served())
        session = Session(
            number, routing_id, hello.host, choice.kind, spaces, served, trio.current_time(), key
        )
        self.sessions[routing_id] = self._by_number[number] = session
        log.info("session_opened", session=number, host=hello.host, fabric=choice.kind)
        return m.HelloReply(
            id=hello.id, node=self._config.node.name, incarnation=self._incarnation, session=number,
            session_timeout_ms=int(self._config.gateway.session_timeout_s * 1000),
            max_message_bytes=self._config.gateway.max_message_bytes,
            epochs={name: state.space.epoch for name, state in spaces.items()},
            fabric=choice.kind, fabric_reason=choice.reason, fabric_address=dict(choice.address), token=token,
            regions=[
                *(m.RegionInfo(region=r.region_id, size=r.size, access="read") for r in regions.values()),
                m.RegionInfo(region=inbound.region_id, size=inbound.size, access="write"),
            ],
        )  # fmt: skip

    def session_of(self, routing_id: bytes, key: str | None) -> Session | None:
        """Whose message this is. A host may choose its routing id, so an old one's proves nothing: the key must be the same."""
        session = self.sessions.get(routing_id)
        if session is not None and session.key != key:
            self.end_session(routing_id, "its routing id came with another key")
            return None
        return session

    def served(self, session: Session, state: SpaceState) -> tuple[Served, Served]:
        """The counters of what is done for a host in a space."""
        return session.served, self.by_space.setdefault(state.name, Served())

    def end_session(self, routing_id: bytes, why: str) -> None:
        """The session is over: every scope ends now. Memory the host may still map waits for `link_closed`."""
        session = self.sessions.pop(routing_id, None)
        if session is None:
            return
        session.ended = True
        self.ended[why] = self.ended.get(why, 0) + 1
        log.info("session_ended", session=session.number, host=session.host, why=why)
        for tell in self.on_session_ended:
            tell(session.number)
        may_read = self._fabric.may_still_read(session.fabric, session.number)
        for waiting in session.following:
            waiting.cancel()
        for scope in list(session.scopes.values()):
            self.end_scope(session, scope, SequenceGone(scope.sequence), host_may_read=may_read)
        self._fabric.expel(session.fabric, session.number)
        if not may_read:
            self.link_closed(session.number)

    def link_closed(self, number: int) -> None:
        """The host's process can no longer touch the node's memory."""
        session = self._by_number.pop(number, None)
        if session is None:
            return
        if not session.ended:
            self.end_session(session.routing_id, "fabric link closed")
        self._staging.host_gone(number)
        self._intake.close_session(number)
        self._fabric.forget(session.fabric, number)

    def end_silent(self, now: float) -> None:
        """End the sessions that were not heard of for too long."""
        limit = now - self._config.gateway.session_timeout_s
        for session in [s for s in self.sessions.values() if s.last_seen < limit]:
            self.end_session(session.routing_id, "silent")

    # --- scopes ---

    def new_owner(self) -> int:
        """A name for something else that holds leases for a session."""
        return next(self._scope_numbers)

    def state(self, session: Session, name: str, shard: int = 0) -> SpaceState:
        """A space of this session at its present epoch, which has such a shard; or Refusal."""
        state = session.spaces.get(name)
        if state is None:
            raise Refusal("unknown_space", f"space {name!r} was not part of this session's hello")
        if state.retired:
            raise Refusal("stale_epoch", f"space {name!r} has a new epoch: new weights need a new client")
        self.check_shard(state, shard)
        return state

    @staticmethod
    def check_shard(state: SpaceState, shard: int) -> None:
        """Refusal when the space has no such shard."""
        if shard >= state.num_shards:
            raise Refusal("malformed", f"shard {shard} of a space with {state.num_shards}")

    def scope(self, session: Session, request: str, shard: int = 0) -> Scope:
        """An open scope of this session, or Refusal."""
        scope = session.scopes.get(request)
        if scope is None:
            raise Refusal("unknown_request", f"request {request!r} has no scope (look it up first)")
        if scope.state.retired:
            raise Refusal(
                "stale_epoch", f"space {scope.state.name!r} has a new epoch: new weights need a new client"
            )
        self.check_shard(scope.state, shard)
        scope.used_at = trio.current_time()
        return scope

    def open_scope(
        self, session: Session, request: str, state: SpaceState,
        tokens: bytes | None, digests: list[bytes] | None, shard: int, chained: bool = True,
    ) -> Scope:  # fmt: skip
        """The scope of a request, made when there is none. It remembers the longest form of its prompt.

        While it is open the id stands for this one prompt: a load names blocks by their positions, so two prompts under
        one id would serve each other's blocks.
        """
        self.check_shard(state, shard)
        scope = session.scopes.get(request)
        if scope is not None and scope.state is not state:
            raise Refusal("malformed", f"request {request!r} belongs to space {scope.state.name!r}")
        if scope is not None and not scope.is_continued_by(tokens, digests, chained):
            raise Refusal("malformed", f"request {request!r} is open with another prompt: end it first")
        prompt_bytes, known = _prompt_bytes(tokens, digests), scope.prompt_bytes if scope is not None else 0
        total = session.prompt_bytes + prompt_bytes - known
        if total > self._config.gateway.max_prompt_bytes_per_client:
            raise Refusal("busy", f"the prompts of this client's open requests have {total} bytes")
        if scope is None:
            scope = self._new_scope(session, request, state, tokens, digests, chained)
        if prompt_bytes > known:
            session.prompt_bytes, scope.prompt_bytes = total, prompt_bytes
            scope.tokens, scope.digests = tokens, digests
        scope.shard, scope.used_at = shard, trio.current_time()
        return scope

    def _new_scope(
        self, session: Session, request: str, state: SpaceState,
        tokens: bytes | None, digests: list[bytes] | None, chained: bool,
    ) -> Scope:  # fmt: skip
        if self.is_draining:
            raise Refusal("draining", "this node is shutting down")
        if len(session.scopes) >= self._config.gateway.max_scopes_per_client:
            raise Refusal("busy", f"more than {len(session.scopes)} open requests")
        now = trio.current_time()
        scope = Scope(next(self._scope_numbers), request, state, tokens, digests, 0, EMPTY, now, now, chained)
        session.scopes[request] = scope
        self._staging.open_scope(scope.number, session.number)
        return scope

    def end_scope(self, session: Session, scope: Scope, event: Event, *, host_may_read: bool = False) -> int:
        """End a scope; how many leases and reservations it held. `event` tells the predictors why."""
        del session.scopes[scope.request]
        session.prompt_bytes -= scope.prompt_bytes
        for commit in scope.commits:
            commit.cancel()
        count = self._staging.end_scope(scope.number, host_may_read=host_may_read)
        count += self._intake.end_scope(scope.number)
        if isinstance(
            event, Finished
        ):  # all its blocks were used, heads and tails alike: heads outlive tails
            self._staging.touch(scope.state, scope.refs, trio.current_time())
        self._observe(event)
        return count


def _prompt_bytes(tokens: bytes | None, digests: Sequence[bytes] | None) -> int:
    """What a scope costs us in memory, nearly."""
    return len(tokens or b"") + DIGEST_COST_BYTES * len(digests or ())
