"""The staging agent: owns the arena's slots, the flights that fill them, and the leases on them.

A *flight* is one read into one slot; everybody who wants the block waits for the same flight (single flight, U64). A *gather*
is one load waiting for its blocks: when a flight lands, each waiting gather gets its lease in the same step, so nothing can
be evicted in between.

Its methods are synchronous (see `dpurt.runtime.actor`), but for `acquire`, which runs in the caller's task. Restart: everything
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from dpurt.core.events import Demanded, Event, Evicted, FetchFailed, LatencyMeasured, Staged, Where
from dpurt.core.events import Dropped as BlockDropped
from dpurt.core.prefix_index import Dropped
from dpurt.core.read_latency import is_computing_cheaper
from dpurt.core.staging import StagingPool
from dpurt.runtime.actor import Actor

from .index import IndexAgent
from .spaces import Slab, SpaceState, number_of
from .storage import End, ReadJob, StorageAgent
from .tape import Tape

log = structlog.get_logger()
SLAB_BITS = 12  # of a lease number: which slab
TICK_S = 1.0
LATENCY_CHANGE = 0.25  # smaller ones are not told


@dataclass(slots=True)
class Acquired:
    """One block of a load. With status ``ok``: a lease on `slot` (of the state's slab), and the tier that served it."""

    status: str
    slot: int = -1
    lease: int = 0
    source: str = ""
    reason: str = ""


@dataclass(slots=True, eq=False)
class Gather:
    """A load in waiting."""

    owner: int
    sequence: int
    expires: float | None
    blocks: list[Acquired]
    missing: int = 0
    is_over: bool = False  # nobody waits any more: late answers take no lease
    priority: int = 0
    complete: trio.Event = field(default_factory=trio.Event)

    def settle(self, position: int, acquired: Acquired) -> None:
        """One more block has its answer."""
        self.blocks[position] = acquired
        self.missing -= 1
        if not self.missing:
            self.complete.set()


@dataclass(slots=True)
class Waiting:
    """One block a gather waits for: its position there, and the parts wanted."""

    gather: Gather
    position: int
    mask: int
    deadline: float


@dataclass(slots=True, eq=False)
class Flight(ReadJob):
    """A read under way into `slot`."""

    prefetch_job: int | None = None
    waiting: list[Waiting] = field(default_factory=list)


class OnFlash(NamedTuple):
    """A block, and where it lies on flash: -1 where it does not."""

    ref: int
    key: bytes
    extent: int


NO_ROOM = Acquired("no_room", reason="every staging slot is in use")


class StagingAgent(Actor[None]):
    """DRAM staging."""

    name = "staging"

    def __init__(self, index: IndexAgent, storage: StorageAgent) -> None:
        super().__init__(1)
        self._index = index
        self._storage = storage
        self.slabs: list[Slab] = []
        self._flights: dict[int, Flight] = {}
        self._by_job: dict[int, Flight] = {}
        self._session_of: dict[int, int] = {}
        self._unreadable: set[int] = set()  # blocks whose last read failed
        self.observe: Callable[[Event], None] = lambda event: None
        self.tape: Tape | None = None
        self.is_wanted: Callable[[int, float], bool] = lambda ref, now: False
        self.foreign_releases = 0
        self.housekeeping: list[Callable[[float], None]] = []
        self.on_staged: list[Callable[[int], None]] = []  # told of each block a read brought
        self._latency_told = 0.0
        index.on_dropped.append(self._on_dropped)
        index.on_evicted.append(lambda ref: self.observe(Evicted(ref)))

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while True:
            await trio.sleep(TICK_S)
            now = trio.current_time()
            self._tell_latency()
            for slab in self.slabs:
                slab.pool.expire(now)
            for keep_house in self.housekeeping:
                keep_house(now)

    @property
    def num_flights(self) -> int:
        """Reads under way."""
        return len(self._flights)

    # --- where a block is (the prefetch core's StagingView) ---

    def where(self, ref: int, parts_mask: int | None = None) -> Where:
        """The fastest of our tiers that has the block (those parts)."""
        state = self._index.by_number.get(number_of(ref))
        if state is None or state.retired:
            return "gone"
        mask = state.layout.all_parts if parts_mask is None else parts_mask
        if self._ready(state.slab.pool, ref, mask) is not None:
            return "staging"
        if ref in self._flights:
            return "in_flight"
        handle, shard = state.unref(ref)
        return "nvme" if self._extent(state, handle, shard) >= 0 else "gone"

    def record_bytes(self, ref: int, parts_mask: int | None = None) -> int:
        """Bytes a read of these parts moves; at least 1, also for a block that is gone."""
        state = self._index.by_number.get(number_of(ref))
        if state is None:
            return 1
        if parts_mask is None:
            return state.layout.record_bytes
        return sum(stop - start for start, stop in state.layout.extents(parts_mask))

    def recompute_s(self, ref: int) -> float | None:
        """How long the host would need to compute the block, as the space's topology says; None where it does not."""
        state = self._index.by_number.get(number_of(ref))
        return None if state is None else state.recompute_s

    def _tell_latency(self) -> None:
        latency_s = self._storage.latency_s()
        if abs(latency_s - self._latency_told) > LATENCY_CHANGE * self._latency_told:
            self._latency_told = latency_s
            self.observe(LatencyMeasured(latency_s))

    def tell_latency_again(self) -> None:
        """For who began to listen."""
        if self._latency_told:
            self.observe(LatencyMeasured(self._latency_told))

    def break_even(self, state: SpaceState, run_blocks: int) -> str:
        """In words: what the first of a run of blocks on flash that is wanted now takes to read, and all to compute."""
        if state.recompute_s is None or not run_blocks:
            return ""
        size = state.layout.record_bytes
        latency_s, read_s = self._storage.latency_s(), self._storage.read_s(size)
        said = (
            f"; read in about {1000 * read_s:.1f} ms, the {run_blocks} block(s) from the first unstaged one on computed in "
            f"{1000 * run_blocks * state.recompute_s:.1f} ms"
        )
        if is_computing_cheaper(read_s, read_s - latency_s, state.recompute_s, run_blocks):
            said += ": recompute_cheaper, so not prefetched when wanted at once"
        return said

    def demand_backlog_bytes(self) -> int:
        """Bytes requests wait for."""
        return self._storage.bytes_wanted

    def ready_ms(self, blocks_on_flash: int, record_bytes: int) -> int:
        """Estimate until so many blocks of the match are staged, at the rate the device was seen to give."""
        return math.ceil(1000 * self._storage.estimate_s(blocks_on_flash * record_bytes))

    def count_in_flight(self, state: SpaceState, ids: NDArray[np.int32], shard: int) -> int:
        """How many of these blocks are on their way, with no part staged yet."""
        if not self._flights or not len(ids):
            return 0
        unstaged = ids[state.index.locations(ids).slot[:, shard] < 0]
        return sum(ref in self._flights for ref in state.refs(state.index.handles(unstaged).tolist(), shard))

    def touch(self, state: SpaceState, refs: Sequence[int], now: float) -> None:
        """These blocks of a chain, in order, were asked for."""
        state.slab.pool.touch(refs, now)

    def free_bytes(self) -> int:
        """Staging bytes that could take a block now: free, or evictable."""
        return sum(slab.pool.num_available * slab.stride for slab in self.slabs if not slab.holds_parts)

    def price(self, ref: int, now: float) -> float:
        """What the block that leaves for this one is worth to those who predict; 0 while there is a free slot."""
        state = self._index.by_number.get(number_of(ref))
        return 0.0 if state is None else state.slab.pool.price(now)

    def is_whole(self, state: SpaceState, handle: int, shard: int) -> bool:
        """Does staging hold every part?"""
        return self._ready(state.slab.pool, state.ref(handle, shard), state.layout.all_parts) is not None

    @staticmethod
    def _ready(pool: StagingPool, ref: int, mask: int) -> int | None:
        return pool.find(ref) if pool.ready_parts(ref) & mask == mask else None

    def _extent(self, state: SpaceState, handle: int, shard: int) -> int:
        block_id = state.block_id(handle)
        return -1 if block_id < 0 else state.extent_of(block_id, shard)

    # --- loads ---

    async def acquire(
        self,
        state: SpaceState,
        handles: Sequence[int],
        shard: int,
        parts_mask: int,
        owner: int,
        sequence: int,
        expires: float | None,
        deadline: float,
        priority: int = 0,
    ) -> list[Acquired]:
        """Lease these blocks, reading those not staged. Every block gets an answer by the deadline.

        When this is cancelled, whatever it leased belongs to `owner` and ends with it.
        """
        late = [Acquired("late", reason="deadline")] * len(handles)
        gather = Gather(owner, sequence, expires, late, priority=priority)
        refs = state.refs(handles, shard)
        wheres = self._want_all(state, refs, handles, shard, parts_mask, gather, deadline)
        wanted = (
            None if parts_mask == state.layout.all_parts else parts_mask
        )  # as predictions name a whole block
        for ref, where in zip(refs, wheres, strict=True):
            self.observe(Demanded(ref, sequence, where, wanted))
        if gather.missing:
            try:
                with trio.move_on_at(deadline):
                    await gather.complete.wait()
            finally:
                gather.is_over = True
        return gather.blocks

    def _want_all(
        self,
        state: SpaceState,
        refs: Sequence[int],
        handles: Sequence[int],
        shard: int,
        mask: int,
        gather: Gather,
        deadline: float,
    ) -> list[Where]:
        """Answer each block at once, or leave it waiting for a flight. Says where each was.

        What is staged is leased first, so that no block of the load is evicted for another of it. The first block
        that finds no room ends the reading: without it, the engine has no use for those after it.
        """
        now, pool = trio.current_time(), state.slab.pool
        wheres: list[Where] = ["staging"] * len(refs)
        rest = []
        for position, ref in enumerate(refs):
            slot = self._ready(pool, ref, mask)
            if slot is None:
                rest.append(position)
            else:
                gather.blocks[position] = self._leased(state, slot, mask, gather, "staging", now)
        wanted: dict[int, list[Waiting]] = {}
        for position in rest:
            ref, waiting = refs[position], Waiting(gather, position, mask, deadline)
            flight = self._flights.get(ref)
            wheres[position] = "in_flight" if flight is not None or ref in wanted else "nvme"
            if flight is not None:
                self._join(flight, waiting, now)
            else:
                wanted.setdefault(ref, []).append(waiting)
        if wanted:
            for position in self._fetch(state, shard, mask, wanted, now, deadline, gather.priority):
                wheres[position] = "gone"
        return wheres

    def _join(self, flight: Flight, waiting: Waiting, now: float) -> None:
        if self.tape is not None and not flight.is_demand:
            self.tape.wanted(flight.ref, now)
        self._storage.promote(flight, waiting.gather.priority)
        waiting.gather.missing += 1
        flight.waiting.append(waiting)

    def _fetch(
        self, state: SpaceState, shard: int, mask: int, wanted: Mapping[int, list[Waiting]], now: float,
        deadline: float, priority: int,
    ) -> list[int]:  # fmt: skip
        """Flights for blocks nobody reads yet, and who waits for them. The positions of those that are gone."""
        blocks = self._on_flash(state, list(wanted), shard)
        found = [block for block in blocks if block.extent >= 0]
        flights = self._start(state, found, shard, mask, now, deadline, is_demand=True, priority=priority)
        for flight in flights:
            flight.waiting = wanted[flight.ref]
            for waiting in flight.waiting:
                waiting.gather.missing += 1
        for block in found[len(flights) :]:
            _refuse(wanted[block.ref], NO_ROOM)
        gone = [] if len(found) == len(blocks) else [block.ref for block in blocks if block.extent < 0]
        for ref in gone:
            _refuse(wanted[ref], Acquired("miss", reason="no longer here"))
        return [waiting.position for ref in gone for waiting in wanted[ref]]

    @staticmethod
    def _on_flash(state: SpaceState, refs: Sequence[int], shard: int) -> list[OnFlash]:
        """Where blocks of one shard lie on flash."""
        if state.retired:
            return [OnFlash(ref, b"", -1) for ref in refs]
        ids = state.index.resolve(np.array(state.handles_of(refs), np.int64))
        extents = np.where(ids < 0, -1, state.index.locations(ids).extent[:, shard])
        return list(map(OnFlash, refs, state.index.keys(ids), extents.tolist()))

    def _leased(
        self, state: SpaceState, slot: int, mask: int, gather: Gather, source: str, now: float
    ) -> Acquired:
        lease = state.slab.pool.lease(slot, gather.owner, mask, gather.expires, now)
        return Acquired("ok", slot, (lease << SLAB_BITS) | state.slab.number, source)

    def lease_staged(self, ref: int, owner: int) -> Acquired | None:
        """A lease on a block that is staged whole, for a push of our own. No demand, and nothing is read for it. None too
        when `owner` has ended: nobody would give the lease back.
        """
        state = self._index.by_number.get(number_of(ref))
        if state is None or state.retired or owner not in self._session_of:
            return None
        pool, mask = state.slab.pool, state.layout.all_parts
        slot = self._ready(pool, ref, mask)
        if slot is None:
            return None
        lease = pool.lease(slot, owner, mask, None, trio.current_time())
        return Acquired("ok", slot, (lease << SLAB_BITS) | state.slab.number, "staging")

    # --- flights ---

    def prefetch(self, ref: int, parts_mask: int | None, job: int, deadline: float) -> None:
        """Start a prefetch job; it is answered by a `Staged` or `FetchFailed` event, perhaps at once."""
        state = self._index.by_number.get(number_of(ref))
        where = self.where(ref, parts_mask)
        if state is None or where == "gone":
            self.observe(FetchFailed(job, "gone"))
        elif where == "staging":
            self.observe(Staged(ref, job))
        elif where == "in_flight":
            self.observe(FetchFailed(job, "in_flight"))
        else:
            _, shard = state.unref(ref)
            mask = state.layout.all_parts if parts_mask is None else parts_mask
            blocks, now = self._on_flash(state, [ref], shard), trio.current_time()
            if not self._start(state, blocks, shard, mask, now, deadline, is_demand=False, job=job):
                self.observe(FetchFailed(job, "no_room"))

    def cancel_prefetch(self, job: int) -> None:
        """Take a job back, if it has not started and nobody waits for it."""
        flight = self._by_job.get(job)
        if flight is not None and all(waiting.gather.is_over for waiting in flight.waiting):
            self._storage.cancel(flight)

    def _start(
        self,
        state: SpaceState,
        blocks: Sequence[OnFlash],
        shard: int,
        mask: int,
        now: float,
        deadline: float,
        *,
        is_demand: bool,
        job: int | None = None,
        priority: int = 0,
    ) -> list[Flight]:
        """Send blocks of a chain on their way into slots; where room runs out, the first of them. None may be under way."""
        if not blocks:
            return []
        refs = [block.ref for block in blocks]
        assert self._flights.keys().isdisjoint(refs)
        taken = state.slab.pool.take_many(
            refs, mask, now, protect=lambda other: self.is_wanted(other, now)
        )  # fmt: skip
        deadline = max(deadline, now + self._storage.deadline_s)
        flights = [
            Flight(
                state, block.ref, block.key, shard, one.slot, block.extent, one.to_fill, deadline, is_demand, self._landed,
                priority=priority, prefetch_job=job,
            )
            for block, one in zip(blocks, taken, strict=False)
        ]  # fmt: skip
        self._flights.update(zip(refs, flights, strict=False))
        if job is not None:
            self._by_job.update((job, flight) for flight in flights)
        if self.tape is not None:
            for flight in flights:
                self.tape.queued(flight.ref, self.record_bytes(flight.ref, flight.parts_mask), job, now)
        for one in taken:
            if one.evicted is not None:  # may drop chains, even one of these: then the flight lands stale
                self._index.slot_evicted(one.evicted, now, f"to stage a block of {state.name!r}")
        self._storage.read(flights)
        return flights

    def _landed(self, jobs: Sequence[ReadJob], ends: Sequence[End]) -> None:
        now = trio.current_time()
        for job, (status, settled) in zip(jobs, ends, strict=True):
            flight = self._flights.pop(job.ref)
            if self.tape is not None:
                self.tape.completed(job.ref, job.began, status, now)
            self._land(flight, self._end_fill(flight, status, settled, now), now)

    def _land(self, flight: Flight, status: str, now: float) -> None:
        for waiting in flight.waiting:
            if not waiting.gather.is_over:
                self._answer(flight, waiting, status, now)
        for tell in self.on_staged if status == "ok" else ():
            tell(flight.ref)
        if flight.prefetch_job is not None:
            self._by_job.pop(flight.prefetch_job, None)
            landed = status == "ok"
            self.observe(
                Staged(flight.ref, flight.prefetch_job)
                if landed
                else FetchFailed(flight.prefetch_job, status)
            )
        if self._is_lost(flight.ref, status):
            self._lost(flight, status, now)

    def _end_fill(
        self, flight: Flight, status: str, settled: Callable[[], Awaitable[None]] | None, now: float
    ) -> str:
        """Tell the pool and the index how a flight ended; ``gone`` when its block was dropped meanwhile."""
        pool = flight.state.slab.pool
        if status == "ok":
            pool.fill_done(flight.slot, flight.parts_mask, now)
            return "ok" if self._placed(flight.state, flight.ref, flight.slot) else "gone"
        if settled is not None:
            pool.abandon(flight.slot, flight.parts_mask)
            self._unplaced(flight, now)
            self._settle_later(pool, flight.slot, flight.parts_mask, settled)
        else:
            pool.fill_failed(flight.slot, flight.parts_mask)
        return status

    def _answer(self, flight: Flight, waiting: Waiting, status: str, now: float) -> None:
        """One of those who waited for a flight: a lease, a reason, or another flight for parts this one did not bring."""
        state, gather = flight.state, waiting.gather
        if status != "ok":
            reported = {
                "stale": "miss", "gone": "miss", "expired": "miss", "down": "error", "cancelled": "late"
            }.get(status, status)  # fmt: skip
            gather.settle(waiting.position, Acquired(reported, reason=f"read: {status}"))
            return
        if state.slab.pool.ready_parts(flight.ref) & waiting.mask == waiting.mask:
            gather.settle(
                waiting.position, self._leased(state, flight.slot, waiting.mask, gather, "nvme", now)
            )
            return
        again = self._flights.get(flight.ref)
        if again is None:
            blocks = self._on_flash(state, [flight.ref], flight.shard)
            started = self._start(
                state,
                blocks,
                flight.shard,
                waiting.mask,
                now,
                waiting.deadline,
                is_demand=True,
                priority=gather.priority,
            )
            again = started[0] if started else None
        if again is None:
            gather.settle(waiting.position, NO_ROOM)
        else:
            again.waiting.append(waiting)

    def _placed(self, state: SpaceState, ref: int, slot: int) -> bool:
        """Tell the index that a slot holds the block. False when the block was dropped meanwhile, or put elsewhere since."""
        if state.slab.pool.find(ref) != slot:
            return False
        handle, shard = state.unref(ref)
        block_id = state.block_id(handle)
        if block_id < 0 or state.extent_of(block_id, shard) < 0:
            state.slab.pool.drop(ref)
            return False
        if state.slot_of(block_id, shard) < 0:
            state.index.set_slot(block_id, shard, slot)
        return True

    def _unplaced(self, flight: Flight, now: float) -> None:
        """A slot is abandoned, with the parts of the block that were there already."""
        state, (handle, shard) = flight.state, flight.state.unref(flight.ref)
        block_id = state.block_id(handle)
        if (
            block_id >= 0
            and state.slot_of(block_id, shard) == flight.slot
            and state.index.clear_slot(block_id, shard)
        ):
            self._index.drop(state, block_id, "lost", now, "its slot is still being written by a late read")

    def _is_lost(self, ref: int, status: str) -> bool:
        """Will the block never be read again? An unreadable one at the second try: kept, it would ``exist`` for ever."""
        if status == "error" and ref not in self._unreadable:
            self._unreadable.add(ref)
            return False
        self._unreadable.discard(ref)
        return status in ("checksum", "stale", "expired", "error")

    def _lost(self, job: Flight, status: str, now: float) -> None:
        block_id = job.state.block_id(job.state.unref(job.ref)[0])
        if block_id >= 0:
            self._index.drop(job.state, block_id, status, now)

    def _settle_later(
        self, pool: StagingPool, slot: int, parts: int, settled: Callable[[], Awaitable[None]]
    ) -> None:
        async def wait() -> None:
            await settled()
            pool.settle(slot, parts)

        trio.lowlevel.spawn_system_task(wait)  # it must outlive a restart of this agent

    def _on_dropped(self, state: SpaceState, dropped: Dropped, reason: str) -> None:
        """The index lost blocks."""
        self.let_go(state, dropped.handles, dropped.extents)

    def let_go(self, state: SpaceState, handles: NDArray[np.int64], extents: NDArray[np.int64]) -> None:
        """Of blocks that are no more: their slots and extents are free, and the predictors hear of each."""
        drop, observe = state.slab.pool.drop, self.observe
        for shard in range(state.num_shards):
            refs = state.refs(handles.tolist(), shard)
            self._unreadable.difference_update(refs)
            for ref in refs:
                drop(ref)
                observe(BlockDropped(ref))
        for extent in extents[extents >= 0].tolist():
            self._storage.store.forget(extent)

    # --- scopes, sessions, leases ---

    def open_scope(self, owner: int, session: int) -> None:
        """From now on `owner` may hold leases, on behalf of `session`."""
        self._session_of[owner] = session

    def session_of(self, owner: int) -> int | None:
        """On whose behalf an open scope holds leases."""
        return self._session_of.get(owner)

    def end_scope(self, owner: int, *, host_may_read: bool) -> int:
        """Everything the scope holds is free or quarantined when this returns; how many things that were.

        `host_may_read`: the host stopped answering but still maps the memory (shm), so its slots stay quarantined until
        `host_gone`.
        """
        count = 0
        for slab in self.slabs:
            if host_may_read:
                count += len(slab.pool.quarantine_owner(owner))
            else:
                count += len(slab.pool.release_owner(owner))
        if not host_may_read:
            del self._session_of[owner]
        return count

    def host_gone(self, session: int) -> None:
        """The host's mappings are gone: what was quarantined for it is free."""
        for owner in [o for o, s in self._session_of.items() if s == session]:
            for slab in self.slabs:
                slab.pool.settle_owner(owner)
            del self._session_of[owner]

    def release(self, numbers: Sequence[int], session: int) -> int:
        """Give leases of this session back; how many were held."""
        released = 0
        for number in numbers:
            slab = self._slab_of(number)
            held = slab.pool.lease_info(number >> SLAB_BITS) if slab is not None else None
            if slab is None or (held is not None and self._session_of.get(held.owner) != session):
                self.foreign_releases += 1
                continue
            if self.tape is not None:
                self._note_release(number, self.tape)
            released += slab.pool.release(number >> SLAB_BITS)
        return released

    def block_under(self, number: int) -> int | None:
        """The block a live lease is on, if it is on a whole one and the block is still there."""
        slab = self._slab_of(number)
        held = None if slab is None or slab.holds_parts else slab.pool.lease_info(number >> SLAB_BITS)
        return None if slab is None or held is None else slab.pool.slot_info(held.slot).block

    def _note_release(self, number: int, tape: Tape) -> None:
        block = self.block_under(number)
        if block is not None:
            tape.released(block, trio.current_time())

    def drop_leases(self, blocks: Sequence[Acquired]) -> None:
        """Give back what a load got for a scope that has ended meanwhile."""
        for one in blocks:
            slab = self._slab_of(one.lease)
            if one.lease and slab is not None:
                slab.pool.release(one.lease >> SLAB_BITS)

    def begin_transfers(self, numbers: Sequence[int]) -> None:
        """We are about to push under these leases, which were just given: their slots stay untouched until `end_transfers`."""
        now = trio.current_time()
        for number in numbers:
            slab = self._slab_of(number)
            assert slab is not None
            began = slab.pool.begin_transfer(number >> SLAB_BITS, now)
            assert began, "a lease for a push does not expire"

    def end_transfers(self, numbers: Sequence[int]) -> None:
        """The push is over."""
        for number in numbers:
            self.end_pull(number)

    def _slab_of(self, number: int) -> Slab | None:
        at = number & ((1 << SLAB_BITS) - 1)
        return self.slabs[at] if at < len(self.slabs) else None

    # --- pulls (half of the fabrics' AccessCheck; the other half is the intake's) ---

    def begin_pull(self, session: int, region_id: int, offset: int, length: int, number: int) -> bool:
        """May this session read these bytes under this lease now?"""
        slab = self._slab_of(number)
        if slab is None or slab.region.region_id != region_id:
            return False
        held = slab.pool.lease_info(number >> SLAB_BITS)
        if held is None or self._session_of.get(held.owner) != session:
            return False
        start = slab.start + held.slot * slab.stride
        if not start <= offset <= offset + length <= start + slab.stride:
            return False
        return slab.pool.begin_transfer(number >> SLAB_BITS, trio.current_time())

    def end_pull(self, number: int) -> None:
        """The transfer is over."""
        slab = self._slab_of(number)
        assert slab is not None
        slab.pool.end_transfer(number >> SLAB_BITS)


def _refuse(everyone: Sequence[Waiting], answer: Acquired) -> None:
    for waiting in everyone:
        waiting.gather.blocks[waiting.position] = answer
