"""What hosts' requests do with bytes: loads, which give leases or push, commits, and the use of what was placed in a host already.

A request's handler waits here for staging and the fabric. Whatever ends its scope meanwhile ends what it holds, and it answers
``cancelled``. Leases of a load are the scope's, with an end of their own unless the host maps our memory. Counts per host what
came of its blocks (`Served`).

Left to others: who may ask (`dpurt.agents.hosts`), and what a task of its own is for (the gateway).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import trio

from dpurt.core.events import Consumed, Event, Stored
from dpurt.core.identity import PartRun
from dpurt.wire import messages as m

from .decode import DecodeAgent
from .fabric import FabricAgent
from .hosts import Hosts, Refusal
from .index import IndexAgent
from .intake import Intake
from .placement import PlacementAgent
from .sessions import NO_HANDLE, Scope, Session
from .spaces import SpaceState
from .staging import Acquired, StagingAgent
from .tape import Tape

__all__ = ["Transfers"]


class Transfers:
    """See above."""

    def __init__(
        self,
        hosts: Hosts,
        index: IndexAgent,
        staging: StagingAgent,
        intake: Intake,
        fabric: FabricAgent,
        decode: DecodeAgent,
        placement: PlacementAgent,
        observe: Callable[[Event], object],
        lease_s: float,
    ) -> None:
        self._hosts = hosts
        self._index = index
        self._staging = staging
        self._intake = intake
        self._fabric = fabric
        self._decode = decode
        self._placement = placement
        self._observe = observe
        self._lease_s = lease_s
        self.tape: Tape | None = None

    async def load(self, session: Session, request: m.Load, deadline: float) -> m.LoadReply:
        scope = self._hosts.scope(session, request.request, request.shard)
        state = scope.state
        parts = self._parts(state, request.parts)
        positions = request.blocks or range(request.first, request.first + request.count)
        if request.landing is not None and len(request.landing.offsets) != len(positions):
            raise Refusal("malformed", "a landing needs one offset a block")
        if max(positions) >= len(scope.handles):
            self._catch_up(scope)
        is_view = session.fabric == "shm" or request.landing is not None
        expires = None if is_view else deadline + self._lease_s
        decoding = self._decode.takes(scope, positions, parts, request.shard)
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
        good = [grant for grant in grants if grant.status == "ok"]
        staged, length = sum(grant.source == "staging" for grant in good), sum(g.length for g in good)
        missed = Counter(grant.status for grant in grants if grant.status != "ok")
        for served in self._hosts.served(session, state):
            served.blocks += len(grants)
            served.bytes_loaded += length
            served.staging += staged
            served.nvme += len(good) - staged
            _add(served.misses, missed)
        if missed:
            for position, grant in zip(positions, grants, strict=True):
                if grant.status != "ok":
                    self._index.note_refusal(state, scope.handles, position, grant.status, grant.reason)

    async def commit(self, session: Session, request: m.Commit, deadline: float) -> m.CommitReply:
        scope = self._hosts.scope(session, request.request)
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

    def _count_stores(self, session: Session, state: SpaceState, statuses: Sequence[str]) -> None:
        not_stored = Counter(statuses)
        stored = not_stored.pop("stored", 0)
        for served in self._hosts.served(session, state):
            served.stored += stored
            served.bytes_stored += stored * state.layout.payload_bytes
            _add(served.not_stored, not_stored)

    def used(self, session: Session, request: m.Used) -> m.Ok:
        """As a load of these blocks, but for the bytes: they are there already."""
        scope = session.scopes.get(request.request)
        if scope is None or scope.state.retired:
            return m.Ok(id=request.id)  # it ended meanwhile
        state, parts = scope.state, self._parts(scope.state, request.parts)
        self._hosts.check_shard(state, request.shard)
        if not self._placement.has_zone(session, state, request.shard):
            return m.Ok(id=request.id)  # nothing can have been there
        known = len(scope.handles)
        positions = [p for p in dict.fromkeys(request.blocks) if p < known and scope.handles[p] != NO_HANDLE]
        refs = state.refs(scope.handles[positions].tolist(), request.shard) if positions else []
        for first, count in _runs(positions):
            self._observe(Consumed(scope.sequence, first, count))
        self._placement.used(session, state, request.shard, scope.sequence, refs)
        for served in self._hosts.served(session, state):
            served.blocks += len(refs)
            served.landing += len(refs)
            served.bytes_loaded += len(refs) * sum(state.part_bytes[parts.start : parts.stop])
        return m.Ok(id=request.id, count=len(refs))


def _add(counts: dict[str, int], more: Counter[str]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


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


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive positions."""
    start = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield positions[start], i - start
            start = i
