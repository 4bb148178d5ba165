"""The decode agent: owns the staging of sparse decode, where a slot holds one layer group's part of one block.

A decode step of a sequence whose cold KV lies here touches a few blocks in each layer group, other ones in each: slots of
whole blocks would be mostly waste. So a space may have *decode staging* (``[space.decode]``), a slab of part-sized slots
beside its slab of records, divided evenly among its decoding sequences. What is staged and what leaves is decided by a
`DecodeStaging` a sequence (the core that replay runs); this agent moves the bytes: reads go through the storage agent, demand
before prefetch, and hosts get leases as on any slot.

A sequence gets its share with its first `decode` hint and returns it with its scope. One that finds none left decodes from
the space's ordinary staging. A touched block that wins no slot (*passing through*) keeps its memory until the load that the
hint announced has its lease, or until the group's next turn; `spare_slots` are there for these and for reads under way.

A hint starts the reads of what is touched and leaves the rest (learning, planning, some 0.5 ms a turn) until the load it
announces has its answer or waits for the device; the gateway says when (`catch_up`).

Not a task: all runs in the gateway's turn or in a read's completion. Restart: everything is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import trio
from numpy.typing import NDArray

from dpurt.config.schema import DecodeConfig
from dpurt.core.attention import AttentionModel
from dpurt.core.attention_pool import pooled_budget
from dpurt.core.decode_staging import DecodeStaging, Progress
from dpurt.core.events import Event, Finished, SequenceGone
from dpurt.core.identity import PartRun
from dpurt.core.prefix_index import Dropped
from dpurt.core.record import RecordLayout
from dpurt.core.staging import StagingPool
from dpurt.wire import messages as m

from .index import IndexAgent
from .sessions import Scope
from .spaces import Slab, SpaceState
from .staging import SLAB_BITS, Acquired, Gather, Waiting
from .storage import End, ReadJob, StorageAgent

Settled = Callable[[], Awaitable[None]]
NO_ROOM = Acquired("no_room", reason="every slot of decode staging is in use")
PART = 1  # a slot of ours has one part
_LOST = ("checksum", "stale", "expired")


@dataclass(slots=True)
class ReadTimes:
    """How long parts took from the decision to read them until they were there, and how long after its hint a plan was made."""

    count: int = 0
    total_s: float = 0.0
    total_s2: float = 0.0
    plans: int = 0
    plans_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total_s += seconds
        self.total_s2 += seconds * seconds

    def planned(self, seconds: float) -> None:
        """One more plan, so long after its hint."""
        self.plans += 1
        self.plans_s += seconds

    def stats(self) -> dict[str, float]:
        """Numbers, sums, and sum of squares, from which means and deviations follow."""
        return {
            "reads": self.count, "read_s": self.total_s, "read_s_squares": self.total_s2,
            "plans": self.plans, "plan_s": self.plans_s,
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class Room:
    """A space's decode staging. `capacity` is a sequence's share in slots; `ended` adds up the sequences that have ended."""

    slab: Slab
    settings: DecodeConfig
    capacity: int
    model: AttentionModel
    free: list[int]
    ended: dict[str, int] = field(default_factory=dict)
    times: ReadTimes = field(default_factory=ReadTimes)
    no_room: int = 0
    unserved: int = 0  # sequences that found no share left


@dataclass(slots=True, eq=False)
class Read:
    """A part on its way into one of our slots, and the loads that wait for it."""

    job: ReadJob
    began: float
    waiting: list[Waiting] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Undone:
    """What a hint leaves to do once its load was served: learn from the turn, if there was one, and plan for `group`."""

    since: float
    is_turn: bool
    group: int
    ranked: Sequence[int]


@dataclass(slots=True, eq=False)
class Decoding:
    """One decoding sequence, of one shard. `handles`: the block of each column, the longest form of the prompt that was looked
    up; `wanted`: slots its turns touched, by group, whose loads have not come yet; `leaving`: slots the core let go that
    somebody still needs. Slots are the core's numbers, keys the pool's.
    """

    scope: Scope
    shard: int
    handles: NDArray[np.int64]
    room: Room
    share: int
    staging: DecodeStaging
    layouts: list[RecordLayout]
    distance: int
    reads: dict[int, Read] = field(default_factory=dict)
    wanted: dict[int, set[int]] = field(default_factory=dict)
    hits: dict[int, set[int]] = field(default_factory=dict)
    undone: Undone | None = None
    leaving: set[int] = field(default_factory=set)
    is_over: bool = False

    @property
    def pool(self) -> StagingPool:
        return self.room.slab.pool

    def follow(self) -> None:
        """The scope may have been looked up anew, by a shorter form of its prompt too: what that leaves out is as it was."""
        now, before = self.scope.handles, self.handles
        if now is not before:
            self.handles = now if len(now) >= len(before) else np.concatenate((now, before[len(now) :]))
        self.staging.extend(len(self.handles))

    def key(self, slot: int) -> int:
        """The pool's name of a slot's content, among those of all sequences."""
        return self.share * self.staging.groups * self.staging.width + slot

    def place(self, slot: int) -> tuple[int, int]:
        """(group, column) of a slot."""
        return divmod(slot, self.staging.width)

    def progress(self, slot: int) -> Progress:
        """How far the bytes of a slot are."""
        read = self.reads.get(slot)
        if read is not None:
            return "waiting" if read.job.waits else "flying"
        return "landed" if self.pool.ready_parts(self.key(slot)) else "absent"

    def is_wanted(self, slot: int) -> bool:
        """Is a load expected or waiting for it?"""
        read = self.reads.get(slot)
        return slot in self.wanted.get(slot // self.staging.width, ()) or bool(read and read.waiting)


class DecodeAgent:
    """See the module's docstring."""

    def __init__(self, index: IndexAgent, storage: StorageAgent) -> None:
        self._index = index
        self._storage = storage
        self._rooms: dict[str, Room] = {}
        self._sequences: dict[int, Decoding] = {}
        index.on_dropped.append(self._on_dropped)

    def offer(self, name: str, slab: Slab, settings: DecodeConfig, num_parts: int) -> None:
        """A space has decode staging, in this slab."""
        capacity = (slab.pool.num_slots - settings.spare_slots) // settings.sequences
        free = list(range(settings.sequences))
        self._rooms[name] = Room(slab, settings, capacity, AttentionModel(num_parts), free)

    # --- hints ---

    def hint(self, scope: Scope, hint: m.Hint) -> bool:
        """A step's word on one layer group. False when the sequence has no decode staging."""
        decoding = self._decoding(scope)
        if decoding is None:
            return False
        self._catch_up(decoding)
        decoding.follow()
        groups = decoding.staging.groups
        if hint.ranked:
            group = hint.group if hint.ranked_group is None else hint.ranked_group
            decoding.distance = (group - hint.group) % groups or groups
        group = (hint.group + decoding.distance) % groups
        if hint.touched:
            self._turn(decoding, hint.group, hint.touched, hint.masses)
        if hint.touched or hint.ranked:
            decoding.undone = Undone(trio.current_time(), bool(hint.touched), group, hint.ranked)
        return True

    def catch_up(self) -> None:
        """Do what hints left undone, now that nobody waits."""
        for decoding in self._sequences.values():
            self._catch_up(decoding)

    def _catch_up(self, decoding: Decoding) -> None:
        undone, decoding.undone = decoding.undone, None
        if undone is None:
            return
        if undone.is_turn:
            for slot in decoding.staging.settle():
                self._evict(decoding, slot)
        self._plan(decoding, undone.group, undone.ranked)
        decoding.room.times.planned(trio.current_time() - undone.since)

    def _decoding(self, scope: Scope) -> Decoding | None:
        decoding = self._sequences.get(scope.sequence)
        if decoding is not None and decoding.shard == scope.shard:
            return decoding
        if decoding is not None:  # looked up for another rank since: none of its parts are that one's
            self._end(self._sequences.pop(scope.sequence))
        room = self._rooms.get(scope.state.name)
        if room is None or scope.state.retired:
            return None
        if not room.free:
            room.unserved += 1
            return None
        settings, layout = room.settings, scope.state.layout
        staging = DecodeStaging(
            room.model, room.capacity, settings.max_blocks, pooled_budget(settings.prefetch_per_turn),
            settings.lookahead_groups,
        )  # fmt: skip
        layouts = [layout.of_part(part) for part in range(layout.num_parts)]
        decoding = Decoding(
            scope, scope.shard, scope.handles, room, room.free.pop(0), staging, layouts, settings.lookahead_groups
        )  # fmt: skip
        self._sequences[scope.sequence] = decoding
        return decoding

    def _turn(self, decoding: Decoding, group: int, positions: Sequence[int], codes: bytes) -> None:
        staging = decoding.staging
        columns, codes = _distinct(positions, codes, staging.columns)
        for slot in decoding.wanted.pop(group, ()):
            if slot in decoding.leaving and not decoding.is_wanted(slot):  # announced, and never loaded
                self._drop(decoding, slot)
        turn = staging.turn(group, columns, codes, decoding.progress)
        decoding.wanted[group] = set(turn.touched)
        decoding.hits[group] = set(turn.hits)
        for slot in turn.read:
            self._read(decoding, slot, is_demand=True)
        for slot in turn.hasten:
            self._storage.promote(decoding.reads[slot].job)
        for slot in turn.withdraw:
            self._drop(decoding, slot)

    def _plan(self, decoding: Decoding, group: int, ranked: Sequence[int]) -> None:
        if not decoding.room.settings.prefetch_per_turn:
            return
        known = [column for column in dict.fromkeys(ranked) if column < decoding.staging.columns]
        plan = decoding.staging.plan(group, known)
        for slot in plan.evicted:
            self._evict(decoding, slot)
        for slot in plan.fetch:
            self._read(decoding, slot, is_demand=False)

    # --- loads ---

    def takes(self, scope: Scope, positions: Sequence[int], parts: PartRun, shard: int) -> Decoding | None:
        """The decoding sequence that serves this load, if one does: of one layer group, of its shard's blocks it can stage."""
        decoding = self._sequences.get(scope.sequence)
        if decoding is None or decoding.shard != shard or parts.stop - parts.start != 1 or not positions:
            return None
        decoding.follow()
        return decoding if max(positions) < decoding.staging.columns else None

    async def acquire(
        self,
        decoding: Decoding,
        group: int,
        positions: Sequence[int],
        expires: float | None,
        deadline: float,
    ) -> list[Acquired]:
        """Lease these blocks' parts. Every block gets an answer by the deadline. What no hint announced is a turn of its own."""
        slots = decoding.staging.slots(group, positions)
        if not decoding.wanted.get(group, set()).issuperset(slots):
            self._catch_up(decoding)
            self._turn(decoding, group, positions, b"")
            decoding.undone = Undone(
                trio.current_time(), True, (group + decoding.distance) % decoding.staging.groups, ()
            )
        scope = decoding.scope
        late = Acquired("late", reason="deadline")
        gather = Gather(scope.number, scope.sequence, expires, [late] * len(slots))
        for position, slot in enumerate(slots):
            self._serve(decoding, slot, Waiting(gather, position, PART, deadline))
        if gather.missing:
            self._catch_up(decoding)
            try:
                with trio.move_on_at(deadline):
                    await gather.complete.wait()
            finally:
                gather.is_over = True
        return gather.blocks

    def _serve(self, decoding: Decoding, slot: int, waiting: Waiting) -> None:
        if decoding.progress(slot) == "absent":  # its read failed, or there was no room for it
            self._read(decoding, slot, is_demand=True)
        read = decoding.reads.get(slot)
        if read is not None:
            self._storage.promote(read.job)
            waiting.gather.missing += 1
            read.waiting.append(waiting)
            return
        at = decoding.pool.find(decoding.key(slot))
        if at is None:
            gone = self._block_id(decoding, slot) < 0
            answer = Acquired("miss", reason="no longer here") if gone else NO_ROOM
            waiting.gather.blocks[waiting.position] = answer
        else:
            waiting.gather.blocks[waiting.position] = self._leased(decoding, slot, at, waiting.gather)

    def _leased(self, decoding: Decoding, slot: int, at: int, gather: Gather) -> Acquired:
        group, _ = decoding.place(slot)
        slab, now = decoding.room.slab, trio.current_time()
        lease = slab.pool.lease(at, gather.owner, PART, gather.expires, now)
        decoding.wanted.get(group, set()).discard(slot)
        source = "staging" if slot in decoding.hits.get(group, ()) else "nvme"
        if slot in decoding.leaving and not decoding.is_wanted(slot):
            self._drop(decoding, slot)  # the lease keeps the bytes
        return Acquired("ok", at, (lease << SLAB_BITS) | slab.number, source)

    def grant(self, decoding: Decoding, group: int, one: Acquired) -> m.Grant:
        """Where a host finds a part it has a lease on."""
        if one.status != "ok":
            return m.Grant(status=one.status, reason=one.reason)
        slab, layout = decoding.room.slab, decoding.layouts[group]
        start, stop = layout.part_offsets[group], layout.part_offsets[group + 1]
        return m.Grant(
            status="ok", lease=one.lease, region=slab.region.region_id, length=stop - start, source=one.source,
            offset=slab.start + one.slot * slab.stride + layout.header_bytes + start,
            crcs=slab.crcs(one.slot, group, group + 1),
        )  # fmt: skip

    # --- bytes ---

    def _block_id(self, decoding: Decoding, slot: int) -> int:
        handle = int(decoding.handles[decoding.place(slot)[1]])
        return decoding.scope.state.block_id(handle)

    def _read(self, decoding: Decoding, slot: int, *, is_demand: bool) -> None:
        """Bring a part into a slot, unless it is there or on its way. Without room or block it stays absent."""
        if decoding.pool.find(decoding.key(slot)) is not None:
            decoding.leaving.discard(slot)
            if is_demand and slot in decoding.reads:
                self._storage.promote(decoding.reads[slot].job)
            return
        block_id = self._block_id(decoding, slot)
        if block_id < 0:
            return
        now = trio.current_time()
        taken = decoding.pool.take(decoding.key(slot), PART, now) if decoding.pool.num_free else None
        if taken is None:
            decoding.room.no_room += 1
        elif decoding.scope.state.extent_of(block_id, decoding.shard) < 0:
            self._copy(decoding, slot, taken.slot, block_id)
        else:
            self._read_from_flash(decoding, slot, taken.slot, block_id, is_demand=is_demand)

    def _read_from_flash(
        self, decoding: Decoding, slot: int, at: int, block_id: int, *, is_demand: bool
    ) -> None:
        group, column = decoding.place(slot)
        state, shard, layout = decoding.scope.state, decoding.shard, decoding.layouts[group]
        job = ReadJob(
            state, state.ref(int(decoding.handles[column]), shard), state.index.key(block_id), shard, at,
            state.extent_of(block_id, shard), 1 << group, trio.current_time() + self._storage.deadline_s,
            is_demand, partial(self._landed, decoding, slot), layout=layout,
            image=decoding.room.slab.image(at)[: layout.record_bytes],
        )  # fmt: skip
        decoding.reads[slot] = Read(job, trio.current_time())
        self._storage.read([job])

    def _copy(self, decoding: Decoding, slot: int, at: int, block_id: int) -> None:
        """A block the device does not have yet is whole in the space's own slab."""
        state, layout = decoding.scope.state, decoding.layouts[decoding.place(slot)[0]]
        ref = state.ref(state.handle(block_id), decoding.shard)
        source_slot = state.slab.pool.find(ref)
        if source_slot is None or state.slab.pool.ready_parts(ref) != state.layout.all_parts:
            decoding.pool.fill_failed(at, PART)
            return
        source, image, header = (
            state.slab.image(source_slot),
            decoding.room.slab.image(at),
            layout.header_bytes,
        )
        image[:header] = source[:header]
        image[header : layout.record_bytes] = source[header + layout.gap : layout.record_bytes + layout.gap]
        decoding.pool.fill_done(at, PART, trio.current_time())

    def _landed(self, decoding: Decoding, slot: int, jobs: Sequence[ReadJob], ends: Sequence[End]) -> None:
        (job,), ((status, settled),) = jobs, ends
        pool, now = decoding.pool, trio.current_time()
        read = decoding.reads.get(slot)
        waiting: list[Waiting] = []
        if read is not None and read.job is job:
            del decoding.reads[slot]
            waiting = read.waiting
            decoding.room.times.add(now - read.began)
        if status == "ok":
            pool.fill_done(job.slot, PART, now)
        elif settled is not None:
            pool.abandon(job.slot, PART)
            trio.lowlevel.spawn_system_task(_settle_later, pool, job.slot, settled)
        else:
            pool.fill_failed(job.slot, PART)
        if status == "stale" and waiting and self._moved(decoding, slot, job):
            self._read(decoding, slot, is_demand=True)
            again = decoding.reads.get(slot)
            if again is not None:
                again.waiting += waiting
                return
        for one in waiting:
            if not one.gather.is_over:
                self._answer(decoding, slot, status, one)
        if status in _LOST and not self._moved(decoding, slot, job):
            self._lost(job, status, now)
        elif slot in decoding.leaving and not decoding.is_wanted(slot):
            self._drop(decoding, slot)

    def _answer(self, decoding: Decoding, slot: int, status: str, waiting: Waiting) -> None:
        at = decoding.pool.find(decoding.key(slot))
        if status == "ok" and at is not None and not decoding.is_over:
            answer = self._leased(decoding, slot, at, waiting.gather)
        else:
            word = {"ok": "miss", "stale": "miss", "expired": "miss", "down": "error", "cancelled": "late"}
            answer = Acquired(word.get(status, status), reason=f"read: {status}")
        waiting.gather.settle(waiting.position, answer)

    def _moved(self, decoding: Decoding, slot: int, job: ReadJob) -> bool:
        """Has the block another place on the device by now?"""
        block_id = self._block_id(decoding, slot)
        return block_id >= 0 and decoding.scope.state.extent_of(block_id, job.shard) != job.extent

    def _lost(self, job: ReadJob, status: str, now: float) -> None:
        block_id = job.state.block_id(job.state.unref(job.ref)[0])
        if block_id >= 0:
            self._index.drop(job.state, block_id, status, now)

    def _evict(self, decoding: Decoding, slot: int) -> None:
        if decoding.is_wanted(slot):
            decoding.leaving.add(slot)
        else:
            self._drop(decoding, slot)

    def _drop(self, decoding: Decoding, slot: int) -> None:
        """Let go of a slot's bytes, once their read (if it has started) and their readers are done."""
        decoding.leaving.discard(slot)
        read = decoding.reads.pop(slot, None)
        if read is not None:
            self._storage.cancel(read.job)
            for one in read.waiting:
                one.gather.settle(one.position, Acquired("miss", reason="no longer here"))
        decoding.pool.drop(decoding.key(slot))

    # --- the end of things ---

    def observe(self, event: Event) -> None:
        """A sequence that ended returns its share."""
        if isinstance(event, (Finished, SequenceGone)):
            decoding = self._sequences.pop(event.sequence, None)
            if decoding is not None:
                self._end(decoding)

    def _end(self, decoding: Decoding) -> None:
        decoding.is_over = True
        staging, room = decoding.staging, decoding.room
        for slot in list(decoding.reads):
            self._drop(decoding, slot)
        for slot in range(staging.groups * staging.width):
            room.slab.pool.drop(decoding.key(slot))
        for name, count in staging.stats().items():
            room.ended[name] = room.ended.get(name, 0) + count
        room.free.append(decoding.share)

    def _on_dropped(self, state: SpaceState, dropped: Dropped, reason: str) -> None:
        """The index lost blocks: their parts must not be served. They are absent until their sequence notices."""
        for decoding in self._sequences.values():
            if decoding.scope.state is state:
                lost = np.flatnonzero(np.isin(decoding.handles, dropped.handles))
                for column in lost[lost < decoding.staging.width].tolist():
                    for group in range(decoding.staging.groups):
                        self._drop(decoding, group * decoding.staging.width + column)

    # --- looking in ---

    def stats(self) -> dict[str, object]:
        """Per space: sequences, slots, and the sum of all its sequences' counts, as replay counts them."""
        self.catch_up()
        return {name: self._room_stats(room) for name, room in self._rooms.items()}

    def _room_stats(self, room: Room) -> dict[str, object]:
        counts = dict(room.ended)
        live = [decoding for decoding in self._sequences.values() if decoding.room is room]
        for decoding in live:
            for name, count in decoding.staging.stats().items():
                counts[name] = counts.get(name, 0) + count
        pool = room.slab.pool.stats()
        return {
            "sequences": len(live), "unserved": room.unserved, "slots_per_sequence": room.capacity, "slots": pool.total,
            "free": pool.free, "leases": pool.leases, "no_room": room.no_room, **room.times.stats(), **counts,
        }  # fmt: skip


async def _settle_later(pool: StagingPool, slot: int, settled: Settled) -> None:
    await settled()
    pool.settle(slot, PART)


def _distinct(positions: Sequence[int], codes: bytes, known: int) -> tuple[list[int], bytes]:
    """The known positions, each once, with their mass codes."""
    first: dict[int, int] = {}
    for place, position in enumerate(positions):
        if position < known:
            first.setdefault(position, place)
    return list(first), bytes(codes[place] for place in first.values()) if codes else b""
