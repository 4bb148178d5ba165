"""The intake: how a host's blocks come in. Owns the hosts' inbound regions and the reservations in them. Data and methods, no task.

A host commits what it wrote with the parts' CRC-32Cs; only what agrees becomes visible, whole. Where the fabric lands stores
(`Fabric.lands_stores`: the node's NIC or socket puts the bytes where they go) a reservation is a staging slot, not mapped yet,
and the bytes are checked where they are: no write is begun once the commit has, and one still under way then is a refusal. A
host that maps its memory (shm) could change bytes after a check, so it writes into a *cell* of its own inbound region, and
commit first copies the bytes out, then checks the copy. So does one whose reservation found no slot: each reservation takes a
cell, used or not, which is what a host may have at a time.

The new block is written behind to flash, its slot pinned until the device has it. At most `RESERVED_SHARE` of a pool may be
reserved and `DIRTY_SHARE` of it wait for the device, so that stores cannot fill staging: beyond the one, reservations are cells;
beyond the other a commit waits, at most until its deadline.
Where flash has an endurance budget (`dpurt.core.endurance`) what it does not admit stays in staging alone, and is offered
again when it is used: parents always before children, since a child without its parent is lost.

A reservation is single flight: while it stands, others are told ``in_flight``. It ends by commit, with its scope, or after
`RESERVATION_S`, so a host that dies blocks nobody for long.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from dpurt.core.identity import ROOT_KEY
from dpurt.core.record import RecordHeader, pack_header
from dpurt.fabric.region import MemfdRegion
from dpurt.wire import messages as m

from .index import IndexAgent
from .spaces import SpaceState
from .storage import StorageAgent, WriteJob
from .tape import Tape

log = structlog.get_logger()
OFF_LOOP_BYTES = 1 << 20  # copy and check larger batches in a thread
WAIT_SHARE = 0.8  # of a commit's time, for the device
SMALL_BYTES = 64 << 10  # of a payload: copied without ado
RESERVATION_S = 30.0
RESERVED_SHARE = 0.25
DIRTY_SHARE = 0.5
ALIGN = 4096
Ids = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Inbound:
    """One host's inbound region: equal cells, one a reservation. `has_slots`: its reservations may be staging slots."""

    region: MemfdRegion
    cell_bytes: int
    free: list[int]
    has_slots: bool


@dataclass(slots=True, eq=False)
class Reserved:
    """A host's right to write one block, until commit or `expires`: into `slot`, or else into a cell of its inbound region."""

    number: int
    session: int
    owner: int
    state: SpaceState
    shard: int
    key: bytes
    parent: bytes
    position: int
    cell: int
    expires: float
    tokens: bytes | None
    chained: bool
    slot: int | None = None
    transfers: int = 0
    is_committing: bool = False  # the commit gives it back
    given_back: bool = False
    over: trio.Event | None = None  # once somebody waits

    @property
    def is_over(self) -> bool:
        """Nobody but a commit under way can still use it."""
        return self.given_back or self.is_committing


@dataclass(slots=True, eq=False)
class _Arrival:
    """One block of a commit message, whose reservation stands; `position` in the message. What follows is known once it
    has a slot, which is filling then.
    """

    reserved: Reserved
    crcs: list[int]
    position: int
    block_id: int = -1
    handle: int = -1
    ref: int = -1
    slot: int = -1
    has_landed: bool = False  # the bytes came straight into the slot
    is_good: bool = False


class Intake:
    """Stores from hosts."""

    def __init__(self, index: IndexAgent, storage: StorageAgent, wall: Callable[[float], float]) -> None:
        self._index = index
        self._storage = storage
        self._wall = wall
        self._inbound: dict[int, _Inbound] = {}
        self._reserved: dict[int, Reserved] = {}
        self._reserving: dict[tuple[int, bytes, int], Reserved] = {}
        self._numbers = itertools.count(1)
        self._region_ids: Callable[[], int] = itertools.count(1 << 20).__next__
        self.is_wanted: Callable[[int, float], bool] = lambda ref, now: False
        self.tape: Tape | None = None
        self._cleaner = trio.lowlevel.ParkingLot()
        self._slots_reserved: dict[int, int] = {}  # by slab
        self.dirty: dict[int, int] = {}  # by slab: slots the device does not have yet
        self.stored = 0
        self.landed = 0  # of these, without a copy
        self.refused: dict[str, int] = {}
        self.expired = 0
        self.writes_lost = 0

    @property
    def num_reserved(self) -> int:
        """Reservations that stand."""
        return len(self._reserved)

    # --- sessions and scopes ---

    def open_session(
        self, session: int, host: str, inbound_bytes: int, payload_bytes: Sequence[int], *, has_slots: bool
    ) -> MemfdRegion:
        """Make a host's inbound region, cells as large as its largest block. `has_slots`: its fabric lands stores."""
        cell = -(-max(payload_bytes) // ALIGN) * ALIGN
        cells = max(1, inbound_bytes // cell)
        region = MemfdRegion(self._region_ids(), f"inbound-{host}-{session}", cells * cell)
        self._inbound[session] = _Inbound(region, cell, list(range(cells - 1, -1, -1)), has_slots)
        return region

    def close_session(self, session: int) -> None:
        """The host provably cannot write any more. A commit under way ends by itself, as it can."""
        inbound = self._inbound.pop(session, None)
        for reserved in [r for r in self._reserved.values() if r.session == session and not r.is_committing]:
            self._give_back(reserved)
        if inbound is not None:
            inbound.region.close()

    def end_scope(self, owner: int) -> int:
        """Give back what a scope reserved and is not committing; how many that were."""
        mine = [r for r in self._reserved.values() if r.owner == owner and not r.is_over]
        for reserved in mine:
            self._give_back(reserved)
        return len(mine)

    def release(self, numbers: Sequence[int], session: int) -> int:
        """Give reservations of this session back that will not be committed; how many stood."""
        found = [self._reserved.get(number) for number in numbers]
        mine = [r for r in found if r is not None and r.session == session and not r.is_over]
        for reserved in mine:
            self._give_back(reserved)
        return len(mine)

    def expire(self, now: float) -> None:
        """Give back what was never committed."""
        for reserved in [r for r in self._reserved.values() if r.expires <= now and not r.is_over]:
            self.expired += 1
            self._give_back(reserved)

    # --- reserving ---

    def reserve(
        self,
        session: int,
        owner: int,
        state: SpaceState,
        chain: Sequence[bytes],
        first: int,
        shard: int,
        tokens: bytes | None,
        chained: bool = True,
    ) -> list[m.Reservation]:
        """Room for the blocks ``chain[1:]``, at positions from `first`; ``chain[0]`` is the parent's key.

        `tokens` of the whole prompt, from its start, where they are known. Not `chained`, each block is the first of a
        chain of its own.
        """
        inbound, expires = self._inbound[session], trio.current_time() + RESERVATION_S
        grants = []
        for i, is_here in enumerate(self._index.have_shard(state, chain[1:], shard)):
            name = (state.number, chain[i + 1], shard)
            if is_here:
                grants.append(m.Reservation(status="exists"))
            elif name in self._reserving:
                grants.append(m.Reservation(status="in_flight"))
            elif not inbound.free:
                grants.append(m.Reservation(status="no_room"))
            else:
                parent, position = (chain[i], first + i) if chained else (ROOT_KEY, 0)
                reserved = self._reserving[name] = Reserved(
                    next(self._numbers), session, owner, state, shard, chain[i + 1], parent, position,
                    inbound.free.pop(), expires, tokens, chained,
                )  # fmt: skip
                grants.append(self._granted(reserved, inbound))
        return grants

    def _granted(self, reserved: Reserved, inbound: _Inbound) -> m.Reservation:
        self._reserved[reserved.number] = reserved
        if inbound.has_slots:
            self._reserve_slot(reserved)
        region, start = self._place(reserved, inbound)
        return m.Reservation(
            status="reserved", reservation=reserved.number, region=region.region_id,
            offset=start, length=reserved.state.layout.payload_bytes,
        )  # fmt: skip

    def _reserve_slot(self, reserved: Reserved) -> None:
        """If there is one for it."""
        state, now = reserved.state, trio.current_time()
        slab, count = state.slab, self._slots_reserved.get(state.slab.number, 0)
        if count >= RESERVED_SHARE * slab.pool.num_slots:
            return
        taken = slab.pool.reserve(now, protect=lambda other: self.is_wanted(other, now))
        if taken is None:
            return
        reserved.slot = taken.slot
        self._slots_reserved[slab.number] = count + 1
        if taken.evicted is not None:
            self._index.slot_evicted(taken.evicted, now, f"for a store into {state.name!r}")

    @staticmethod
    def _place(reserved: Reserved, inbound: _Inbound) -> tuple[MemfdRegion, int]:
        """Where the host writes: a region, and from where."""
        if reserved.slot is None:
            return inbound.region, reserved.cell * inbound.cell_bytes
        return reserved.state.slab.region, reserved.state.payload_at(reserved.slot)

    def _give_back(self, reserved: Reserved) -> None:
        if reserved.given_back:
            return
        reserved.given_back = True
        del self._reserving[reserved.state.number, reserved.key, reserved.shard]
        if reserved.over is not None:
            reserved.over.set()
        if not reserved.transfers:
            self._free_place(reserved)

    def _free_place(self, reserved: Reserved) -> None:
        """Nobody writes there any more."""
        del self._reserved[reserved.number]
        if reserved.slot is not None:
            reserved.state.slab.pool.fill_failed(self._handed_over(reserved), reserved.state.layout.all_parts)
        inbound = self._inbound.get(reserved.session)
        if inbound is not None:
            inbound.free.append(reserved.cell)

    # --- transfers (half of the fabrics' AccessCheck) ---

    def begin_store(self, session: int, region_id: int, offset: int, length: int, number: int) -> bool:
        """May this session write these bytes under this reservation now?"""
        reserved, inbound = self._reserved.get(number), self._inbound.get(session)
        if reserved is None or inbound is None or reserved.session != session or reserved.is_over:
            return False
        region, start = self._place(reserved, inbound)
        end = start + reserved.state.layout.payload_bytes
        if region.region_id != region_id or not start <= offset <= offset + length <= end:
            return False
        reserved.transfers += 1
        return True

    def end_store(self, number: int) -> None:
        """The transfer is over."""
        reserved = self._reserved[number]
        reserved.transfers -= 1
        if reserved.given_back and not reserved.transfers:
            self._free_place(reserved)

    # --- committing ---

    async def commit(self, session: int, blocks: Sequence[m.CommitBlock], deadline: float) -> list[str]:
        """Take written reservations over, in order. A status for each block (`wire.messages.CommitReply`).

        Cancelled in the middle, it still ends what it began: every reservation is given back, no slot is left filling.
        """
        statuses = ["unknown"] * len(blocks)
        written = self._claim(session, blocks)
        try:
            for run in _runs(written):
                await self._wait_for_parent(run[0].reserved, written, deadline)
                state = run[0].reserved.state
                for at in range(0, len(run), self._max_dirty(state)):
                    piece = run[at : at + self._max_dirty(state)]
                    await self._wait_for_device(state, len(piece), deadline)
                    await self._take_in(piece, statuses)
                    self._give_back_all(piece)  # who waits for these may be who we wait for next
        finally:
            self._conclude(written, statuses)
        return statuses

    async def _take_in(self, run: Sequence[_Arrival], statuses: list[str]) -> None:
        """A run of consecutive blocks, all the way: entered, copied, checked, and visible or gone."""
        state = run[0].reserved.state
        ids = None if state.retired else self._enter(run)
        if ids is None:
            for one in run:
                statuses[one.position] = "stale_epoch" if state.retired else "orphan"
            return
        with self._index.pinned(state, ids):
            arrivals = self._prepare(run, ids, statuses)
            try:
                await self._copy_and_check(arrivals)
            finally:
                self._admit(state, run[0].reserved.shard, arrivals, statuses)

    def _enter(self, run: Sequence[_Arrival]) -> Ids | None:
        """The records of a run's blocks; None when they fit nowhere."""
        first, keys, now = run[0].reserved, [one.reserved.key for one in run], trio.current_time()
        if not first.chained:
            return self._index.enter_each(first.state, keys, now)
        return self._index.enter(
            first.state, first.parent, keys, first.position, run[-1].reserved.tokens, now
        )

    def _claim(self, session: int, blocks: Sequence[m.CommitBlock]) -> list[_Arrival]:
        """The reservations that stand. From now on they are this commit's, and nobody else gives them back."""
        written = []
        for i, block in enumerate(blocks):
            reserved = self._reserved.get(block.reservation)
            if reserved is not None and reserved.session == session and not reserved.is_over:
                reserved.is_committing = True
                written.append(_Arrival(reserved, block.crcs, i))
        return written

    def _conclude(self, written: Sequence[_Arrival], statuses: Sequence[str]) -> None:
        self._give_back_all(written)
        self.stored += statuses.count("stored")
        for status in set(statuses) - {"stored"}:
            self.refused[status] = self.refused.get(status, 0) + statuses.count(status)

    def _give_back_all(self, written: Sequence[_Arrival]) -> None:
        for one in written:
            self._give_back(one.reserved)

    async def _wait_for_parent(
        self, reserved: Reserved, written: Sequence[_Arrival], deadline: float
    ) -> None:
        """Another commit may be about to bring the parent."""
        other = self._reserving.get((reserved.state.number, reserved.parent, reserved.shard))
        if other is not None and all(other is not one.reserved for one in written):
            if other.over is None:
                other.over = trio.Event()
            with trio.move_on_at(deadline):
                await other.over.wait()

    async def _wait_for_device(self, state: SpaceState, count: int, deadline: float) -> None:
        """Back-pressure: too much is waiting to be written. Goes on before the deadline all the same, with what room there is:
        the host should have its answer by then.
        """
        now = trio.current_time()
        with trio.move_on_at(now + WAIT_SHARE * (deadline - now)):
            while self._clean_room(state) < count and self.dirty.get(state.slab.number, 0):
                await self._cleaner.park()

    @staticmethod
    def _max_dirty(state: SpaceState) -> int:
        return max(1, int(state.slab.pool.num_slots * DIRTY_SHARE))

    def _clean_room(self, state: SpaceState) -> int:
        """How many more slots may become dirty."""
        return self._max_dirty(state) - self.dirty.get(state.slab.number, 0)

    def _prepare(self, run: Sequence[_Arrival], ids: Ids, statuses: list[str]) -> list[_Arrival]:
        """Filling slots for a run of blocks whose records are `ids`; a status for each that gets none."""
        state, shard, handles = (
            run[0].reserved.state,
            run[0].reserved.shard,
            run[0].reserved.state.index.handles(ids).tolist(),
        )
        where = state.index.locations(ids)
        are_here = (where.slot[:, shard] >= 0) | (where.extent[:, shard] >= 0)
        fresh: list[_Arrival] = []
        for arrival, is_here, block_id, handle, ref in zip(
            run, are_here.tolist(), ids.tolist(), handles, state.refs(handles, shard), strict=True
        ):
            if is_here:
                statuses[arrival.position] = "exists"
            elif len(arrival.crcs) != state.layout.num_parts or _is_being_written(arrival.reserved):
                statuses[arrival.position] = "checksum"
            else:
                statuses[arrival.position] = "no_room"  # until it is known better, see `_admit`
                arrival.block_id, arrival.handle, arrival.ref = block_id, handle, ref
                fresh.append(arrival)
        return self._take_slots(state, fresh[: max(self._clean_room(state), 0)])

    def _take_slots(self, state: SpaceState, fresh: Sequence[_Arrival]) -> list[_Arrival]:
        """In their order. What landed has its slot, and is mapped to it; the rest gets one, as far as there are."""
        slab, now = state.slab, trio.current_time()
        landed = [arrival for arrival in fresh if arrival.reserved.slot is not None]
        for arrival in landed:
            arrival.slot, arrival.has_landed = self._handed_over(arrival.reserved), True
        slab.pool.assign([arrival.slot for arrival in landed], [arrival.ref for arrival in landed], now)
        self._take_free(state, [arrival for arrival in fresh if not arrival.has_landed], now)
        arrivals = [arrival for arrival in fresh if arrival.slot >= 0]
        self.dirty[slab.number] = self.dirty.get(slab.number, 0) + len(arrivals)
        return arrivals

    def _handed_over(self, reserved: Reserved) -> int:
        """Its slot, which is the reservation's no more."""
        assert reserved.slot is not None
        slot, reserved.slot = reserved.slot, None
        self._slots_reserved[reserved.state.slab.number] -= 1
        return slot

    def _take_free(self, state: SpaceState, arrivals: Sequence[_Arrival], now: float) -> None:
        """Slots for those whose bytes are in a cell; the last may get none."""
        refs = [arrival.ref for arrival in arrivals]
        taken = (
            state.slab.pool.take_many(
                refs, state.layout.all_parts, now, protect=lambda other: self.is_wanted(other, now)
            )
            if refs
            else []
        )
        for arrival, one in zip(arrivals, taken, strict=False):
            arrival.slot = one.slot
            if one.evicted is not None:
                self._index.slot_evicted(one.evicted, now, f"to store a block of {state.name!r}")

    async def _copy_and_check(self, arrivals: Sequence[_Arrival]) -> None:
        if sum(a.reserved.state.layout.payload_bytes for a in arrivals) >= OFF_LOOP_BYTES:
            await trio.to_thread.run_sync(self._copy_all, arrivals)
        else:
            self._copy_all(arrivals)

    def _copy_all(self, arrivals: Sequence[_Arrival]) -> None:
        """Bytes first, check second. May run in a thread: the slot is filling and the cell reserved, so both are ours."""
        for arrival in arrivals:
            state = arrival.reserved.state
            payload = state.payload(arrival.slot)
            is_there = arrival.has_landed or self._copy(arrival.reserved, payload)
            arrival.is_good = is_there and _is_intact(state.layout.part_offsets, payload, arrival.crcs)

    def _copy(self, reserved: Reserved, payload: memoryview) -> bool:
        inbound = self._inbound.get(reserved.session)
        if inbound is None:
            return False
        at = reserved.cell * inbound.cell_bytes
        source = inbound.region.view[at : at + len(payload)]
        if len(payload) < SMALL_BYTES:
            payload[:] = source
        else:  # without the interpreter's lock, and slow to begin
            np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(source, np.uint8))
        return True

    def _admit(
        self, state: SpaceState, shard: int, arrivals: Sequence[_Arrival], statuses: list[str]
    ) -> None:
        """The bytes are here and checked (or not): make the blocks visible, or nothing of them."""
        now = trio.current_time()
        stored: list[_Arrival] = []
        for arrival in arrivals:
            was_dropped = state.slab.pool.find(arrival.ref) != arrival.slot  # with another shard's only copy
            if state.retired or was_dropped or not arrival.is_good or not _has_parent(arrival, stored):
                status = (
                    "stale_epoch" if state.retired else "checksum" if not arrival.is_good
                    else "no_room" if was_dropped else "orphan"
                )  # fmt: skip
                state.slab.pool.fill_failed(arrival.slot, state.layout.all_parts)
                self._cleaned(state, 1)
            else:
                status = "stored"
                stored.append(arrival)
                self.landed += arrival.has_landed
            statuses[arrival.position] = status
        if stored:
            self._make_visible(state, shard, stored, now)

    def _make_visible(self, state: SpaceState, shard: int, arrivals: Sequence[_Arrival], now: float) -> None:
        wall = self._wall(now)
        count = self._num_admitted(state, shard, arrivals, now)
        for i, arrival in enumerate(arrivals):
            _write_header(arrival, wall)
            state.slab.pool.fill_done(arrival.slot, state.layout.all_parts, now, pin=i < count)
        ids = np.array([arrival.block_id for arrival in arrivals], np.int32)
        keys = [arrival.reserved.key for arrival in arrivals]
        self._index.place(state, ids, keys, shard, [arrival.slot for arrival in arrivals], now)
        if self.tape is not None:
            for i, arrival in enumerate(arrivals):
                self.tape.taken(arrival.ref, now)
                if i >= count:
                    self.tape.written(arrival.ref, False, now)
        self._storage.write(
            [WriteJob(state, one.handle, shard, one.slot, self._written) for one in arrivals[:count]]
        )
        if count < len(arrivals):
            self._cleaned(state, len(arrivals) - count)

    # --- endurance ---

    def _num_admitted(self, state: SpaceState, shard: int, arrivals: Sequence[_Arrival], now: float) -> int:
        """How many of these new blocks, from the first on, flash takes."""
        budget = self._storage.budget
        if budget is None:
            return len(arrivals)
        for i, arrival in enumerate(arrivals):
            follows = i > 0 and arrivals[i - 1].reserved.key == arrival.reserved.parent
            if not (follows or self._has_kept_parent(state, arrival.block_id, shard)):
                return i
            if not budget.admit(state.layout.record_bytes, now, is_again=False):
                return i
        return len(arrivals)

    @staticmethod
    def _has_kept_parent(state: SpaceState, block_id: int, shard: int) -> bool:
        """Is the parent on flash, or on its way there?"""
        parent = state.index.table.parent.item(block_id)
        if parent < 0 or state.extent_of(parent, shard) >= 0:
            return True
        slot = state.slot_of(parent, shard)
        return slot >= 0 and state.slab.pool.slot_info(slot).pins > 0

    def offer_again(self, state: SpaceState, ids: Ids, shard: int) -> None:
        """A chain, from its first block on, was asked for: write what the budget left out, as far as it lets."""
        budget = self._storage.budget
        if budget is None or state.retired:
            return
        pool, where, now = state.slab.pool, state.index.locations(ids), trio.current_time()
        handles = state.index.handles(ids)
        unwritten = np.flatnonzero((where.extent[:, shard] < 0) & (where.slot[:, shard] >= 0))
        for i in unwritten.tolist():
            slot = int(where.slot[i, shard])
            ref = state.ref(int(handles[i]), shard)
            if pool.find(ref) != slot or pool.ready_parts(ref) != state.layout.all_parts:
                continue  # in part only
            if pool.slot_info(slot).pins:
                continue  # on its way
            if self._clean_room(state) < 1:
                return
            if not budget.admit(state.layout.record_bytes, now, is_again=True):
                return
            pool.pin(slot)
            self.dirty[state.slab.number] = self.dirty.get(state.slab.number, 0) + 1
            self._storage.write([WriteJob(state, int(handles[i]), shard, slot, self._written)])

    def _cleaned(self, state: SpaceState, count: int) -> None:
        self.dirty[state.slab.number] -= count
        if self._cleaner:
            self._cleaner.unpark_all()

    def _written(self, jobs: Sequence[WriteJob], places: Sequence[int | None]) -> None:
        """The device has these records (or never will)."""
        state = jobs[0].state
        if self.tape is not None:
            for job, place in zip(jobs, places, strict=True):
                self.tape.written(state.ref(job.handle, job.shard), place is not None, trio.current_time())
        self._cleaned(state, len(jobs))
        for job in jobs:
            state.slab.pool.unpin(job.slot)
        for shard in {job.shard for job in jobs}:
            mine = [(job, place) for job, place in zip(jobs, places, strict=True) if job.shard == shard]
            extents = [place for _, place in mine if place is not None]
            if len(extents) == len(mine):
                self._enter_extents(state, shard, [job for job, _ in mine], extents)
            else:  # they stay in staging; their eviction will be a loss
                self.writes_lost += len(mine)

    def _enter_extents(
        self, state: SpaceState, shard: int, jobs: Sequence[WriteJob], extents: Sequence[int]
    ) -> None:
        ids = state.index.resolve(np.array([job.handle for job in jobs], np.int64))
        slots = state.index.locations(ids).slot[:, shard]
        is_there = (ids >= 0) & (slots == [job.slot for job in jobs]) & (not state.retired)
        if not is_there.all():
            # those dropped meanwhile: a pinned slot leaves no other way
            for extent, is_kept in zip(extents, is_there.tolist(), strict=True):
                if not is_kept:
                    self._storage.store.forget(extent)
            ids, extents = ids[is_there], [extents[i] for i in np.flatnonzero(is_there).tolist()]
        state.index.set_extents(ids, shard, extents)


def _is_being_written(reserved: Reserved) -> bool:
    """Into the slot itself, which then cannot be checked."""
    return reserved.slot is not None and reserved.transfers > 0


def _is_intact(offsets: Sequence[int], payload: memoryview, crcs: Sequence[int]) -> bool:
    return all([crc32c.crc32c(payload[offsets[i] : offsets[i + 1]]) == crc for i, crc in enumerate(crcs)])


def _has_parent(arrival: _Arrival, stored: Sequence[_Arrival]) -> bool:
    """Is the block's parent one of ours, or the last of those about to be?"""
    reserved = arrival.reserved
    if stored and stored[-1].reserved.key == reserved.parent:
        return True
    return reserved.state.may_place(arrival.block_id, reserved.shard)


def _write_header(arrival: _Arrival, wall: float) -> None:
    reserved, state = arrival.reserved, arrival.reserved.state
    step = state.layout.max_token_bytes
    at = reserved.position * step
    tokens = reserved.tokens[at : at + step] if reserved.tokens else b""
    expires_at = 0.0  # the index keeps the TTL, which runs from the last use
    header = RecordHeader(
        reserved.key, reserved.parent, state.fingerprint, reserved.shard, reserved.position,
        array("I", arrival.crcs), wall, expires_at, tokens,
    )  # fmt: skip
    pack_header(state.slab.image(arrival.slot), state.layout, header)


def _runs(written: Sequence[_Arrival]) -> list[list[_Arrival]]:
    """As runs of consecutive blocks of one chain, or of blocks that stand alone; each of one shard."""
    runs: list[list[_Arrival]] = []
    for one in written:
        if runs and _follows(runs[-1][-1].reserved, one.reserved):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _follows(last: Reserved, this: Reserved) -> bool:
    if last.state is not this.state or last.shard != this.shard or last.chained != this.chained:
        return False
    return last.key == this.parent or not this.chained
