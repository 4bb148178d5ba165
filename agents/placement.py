"""The placement agent: puts predicted blocks into hosts' landing zones before they are asked for: the second hop of prefetch.

Theory of operation. A host that offers a zone (`wire.messages.Zone`) gets a prefetch core of its own: predictors, arbiter and ledger as
for the first hop (`dpurt.core.prefetch`), but what they fetch is from staging, where they fetch it to is the zone, and their budget is
the zone's room and a share of the link. The core hears what this host's sequences do, as the first hop's does. A *placement* waits
for its block to be staged (the first hop brings it, at its own cost and on its own account), leases it for the time of the push, and
writes block, entry and count (`dpurt.core.landing_zone`) in the host's memory. What the host takes it tells afterwards (`Used`), without
waiting for an answer: that is the need the ledger settles by. So both hops' ledgers add up, each for itself.

`observe` only queues, as the first hop's. Restart: everything is kept. Failing too often it gives up, and hosts load by asking.

Leaves to others: what the bytes mean to the host (`dpurt.client`), who may have a zone (gateway).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import structlog
import trio

from dpurt.config import PlacementConfig
from dpurt.core.arbiter import Arbiter, Budget
from dpurt.core.events import (
    Arrived,
    Demanded,
    Dropped,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    SequenceGone,
    Staged,
    Where,
)
from dpurt.core.landing_zone import Taken, ZoneLayout, ZoneSlots
from dpurt.core.ledger import Ledger, Totals
from dpurt.core.predictors import make_predictor
from dpurt.core.prefetch import CancelFetch, Command, Fetch, PrefetchCore
from dpurt.fabric.zone_writer import Push, ZoneWriter
from dpurt.runtime.actor import Actor

from .fabric import FabricAgent
from .sessions import Session
from .spaces import SpaceState
from .staging import Acquired, StagingAgent

log = structlog.get_logger()
PUSH_DEADLINE_S = 5.0
PATIENCE_S = 0.5  # beyond its need, a placement waits that long for its block to be staged
MIN_TICK_S = 0.002
IDLE_S = 3600.0
BATCH = 128


@dataclass(slots=True, eq=False)
class Zone:
    """One host's zone for one shard of a space."""

    session: Session
    state: SpaceState
    shard: int
    writer: ZoneWriter
    owner: int  # of the leases that pushes hold
    slots: ZoneSlots
    core: PrefetchCore = field(init=False)
    sequences: set[int] = field(default_factory=set)
    cancels: dict[int, trio.CancelScope] = field(default_factory=dict)  # jobs under way
    early_uses: dict[int, set[int]] = field(default_factory=dict)  # blocks that land: used by whom
    bytes_placed: int = 0
    is_open: bool = True


class ZoneView:
    """A zone as its arbiter sees it: the zone is the tier to bring blocks to, all that is below is one device."""

    def __init__(self, zone: Zone, staging: StagingAgent) -> None:
        self._zone = zone
        self._staging = staging

    def where(self, ref: int, parts_mask: int | None) -> Where:
        if self._zone.slots.find(ref) is not None:
            return "staging"
        if self._zone.slots.is_filling(ref):
            return "in_flight"
        return "gone" if self._staging.where(ref) == "gone" else "nvme"

    def record_bytes(self, ref: int, parts_mask: int | None) -> int:
        return self._zone.writer.layout.block_bytes

    def recompute_s(self, ref: int) -> float | None:
        return None

    def demand_backlog_bytes(self) -> int:
        return 0

    def price(self, ref: int, now: float) -> float:
        return 0.0  # what leaves a zone is still staged

    def free_bytes(self) -> int:
        return self._zone.slots.num_available * self._zone.writer.layout.block_bytes


class PlacementAgent(Actor[None]):
    """Keeps hosts' landing zones filled with what they will want."""

    name = "placement"

    def __init__(self, config: PlacementConfig, staging: StagingAgent, fabric: FabricAgent) -> None:
        super().__init__(1)
        self._config = config
        self._staging = staging
        self._fabric = fabric
        self._zones: list[Zone] = []
        self._of_sequence: dict[int, list[Zone]] = {}
        self._events: deque[tuple[Zone | None, Event]] = deque()
        self._staged: dict[int, trio.lowlevel.ParkingLot] = {}  # blocks that placements wait for
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._past: dict[str, Totals] = {}  # of zones that are closed, by host
        self.is_enabled = config.enabled
        self.first_hop: Callable[[Event], None] = lambda event: None
        staging.on_staged.append(self._on_staged)

    # --- zones ---

    def open_zone(
        self, session: Session, state: SpaceState, shard: int, region: int, num_slots: int, owner: int
    ) -> None:
        """`session` offers `num_slots` slots of the space's blocks at its landing region. It replaces one it had."""
        old = self._zone_of(session, state, shard)
        if old is not None:
            self._close(old)
        layout = ZoneLayout(num_slots, tuple(state.part_bytes))
        writer = ZoneWriter(layout, region, self._push_to(session))
        zone = Zone(session, state, shard, writer, owner, ZoneSlots(num_slots))
        zone.core = self._core(zone)
        self._staging.open_scope(owner, session.number)
        self._zones.append(zone)

    def _core(self, zone: Zone) -> PrefetchCore:
        config = self._config
        budget = Budget(
            bandwidth_bytes_per_s=float(config.bandwidth_bytes_per_s),
            staging_bytes=zone.slots.num_slots * zone.writer.layout.block_bytes,
            queue_depth=config.queue_depth,
            min_probability=config.min_probability,
        )
        predictors = [make_predictor(name, config.lookahead_blocks) for name in config.predictors]
        return PrefetchCore(predictors, Arbiter(budget), Ledger(), ZoneView(zone, self._staging))

    def has_zone(self, session: Session, state: SpaceState, shard: int) -> bool:
        """Does the session offer one for such blocks?"""
        return self._zone_of(session, state, shard) is not None

    def _zone_of(self, session: Session, state: SpaceState, shard: int) -> Zone | None:
        for zone in self._zones:
            if zone.session is session and zone.state is state and zone.shard == shard:
                return zone
        return None

    def close_session(self, number: int) -> None:
        """The session is over: its zones are memory nobody writes to any more."""
        for zone in [zone for zone in self._zones if zone.session.number == number]:
            self._close(zone)

    def _close(self, zone: Zone) -> None:
        zone.is_open = False
        self._zones.remove(zone)
        for sequence in zone.sequences:
            self._forget(zone, sequence)
        for scope in zone.cancels.values():
            scope.cancel()
        zone.core.ledger.close()
        self._past.setdefault(zone.session.host, Totals()).add(zone.core.ledger.totals())
        self._staging.end_scope(zone.owner, host_may_read=False)

    def retire(self, state: SpaceState) -> None:
        """A new epoch: nothing of the old may be found any more."""
        for zone in [zone for zone in self._zones if zone.state is state]:
            for ref in zone.slots.refs():
                self._empty(zone, ref)

    def give_up(self) -> None:
        self.is_enabled = False
        for zone in list(self._zones):
            self._close(zone)
        self._events.clear()

    # --- events ---

    def observe(self, event: Event) -> None:
        """Something happened. Handled soon, in order; nothing is kept for hosts without a zone."""
        if not self._zones:
            return
        if isinstance(event, Arrived):
            self._meet(event)
        if isinstance(event, Dropped):
            self._queue(None, event)
        elif not isinstance(event, Staged | FetchFailed | Evicted):  # those are the first hop's
            for zone in self._of_sequence.get(getattr(event, "sequence", -1), ()):
                self._queue(zone, self._from_here(zone, event))
        if isinstance(event, Finished | SequenceGone):
            for zone in self._of_sequence.pop(event.sequence, ()):
                zone.sequences.discard(event.sequence)

    def _meet(self, event: Arrived) -> None:
        session = self._staging.session_of(event.sequence)
        zones = [z for z in self._zones if z.session.number == session and z.state.name == event.owner.space]
        if zones:
            self._of_sequence[event.sequence] = zones
            for zone in zones:
                zone.sequences.add(event.sequence)

    def _forget(self, zone: Zone, sequence: int) -> None:
        others = [other for other in self._of_sequence.get(sequence, ()) if other is not zone]
        self._of_sequence[sequence] = others
        if not others:
            del self._of_sequence[sequence]

    @staticmethod
    def _from_here(zone: Zone, event: Event) -> Event:
        """A need of a block that the host asked us for, as the zone's ledger sees it: it was not found there."""
        if not isinstance(event, Demanded):
            return event
        is_filling = zone.slots.is_filling(event.block)
        return Demanded(event.block, event.sequence, "in_flight" if is_filling else "nvme", event.parts_mask)

    def _queue(self, zone: Zone | None, event: Event) -> None:
        self._events.append((zone, event))
        self._wake.set()

    def used(
        self, session: Session, state: SpaceState, shard: int, sequence: int, refs: Sequence[int]
    ) -> None:
        """The host has taken these blocks out of its zone: needs that the first hop served too."""
        for ref in refs:
            self.first_hop(Demanded(ref, sequence, self._staging.where(ref)))
        zone = self._zone_of(session, state, shard)
        if zone is None:
            return
        for ref in refs:
            if zone.slots.is_filling(ref):  # the host found it there before we heard that it is
                zone.early_uses.setdefault(ref, set()).add(sequence)
            else:
                self._count_use(zone, ref, sequence)

    def _count_use(self, zone: Zone, ref: int, sequence: int) -> None:
        zone.slots.used(ref)
        self._queue(zone, Demanded(ref, sequence, "staging"))

    def _on_staged(self, ref: int) -> None:
        waiting = self._staged.pop(ref, None)
        if waiting is not None:
            waiting.unpark_all()

    # --- the loop ---

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self._handle_some()
                if self._events:
                    await trio.lowlevel.checkpoint()
                    continue
                self._wake = trio.Event()
                with trio.move_on_at(self._due()):
                    await self._wake.wait()
                    continue
                for zone in list(self._zones):
                    self._carry_out(zone, zone.core.tick(trio.current_time()))

    def _handle_some(self) -> None:
        for _ in range(min(BATCH, len(self._events))):
            zone, event = self._events.popleft()
            for each in list(self._zones) if zone is None else [zone]:
                if each.is_open:
                    self._handle(each, event)

    def _handle(self, zone: Zone, event: Event) -> None:
        if isinstance(event, Dropped) and zone.slots.find(event.block) is not None:
            self._empty(zone, event.block)
        self._carry_out(zone, zone.core.handle(event, trio.current_time()))

    def _due(self) -> float:
        now = trio.current_time()
        wakeups = [wakeup for zone in self._zones if (wakeup := zone.core.next_wakeup()) is not None]
        return max(min(wakeups, default=now + IDLE_S), now + MIN_TICK_S)

    def _carry_out(self, zone: Zone, commands: Sequence[Command]) -> None:
        assert self._nursery is not None
        for command in commands:
            if isinstance(command, CancelFetch):
                if command.job in zone.cancels:
                    zone.cancels[command.job].cancel()
            else:
                scope = zone.cancels[command.job] = trio.CancelScope()
                self._nursery.start_soon(self._place, zone, command, scope)

    # --- placing ---

    async def _place(self, zone: Zone, fetch: Fetch, scope: trio.CancelScope) -> None:
        """Carry one placement out and answer it."""
        reason = "cancelled"
        try:
            with scope:
                reason = await self._placed(zone, fetch)
        finally:
            del zone.cancels[fetch.job]
            if zone.is_open:
                self._queue(
                    zone, FetchFailed(fetch.job, reason) if reason else Staged(fetch.block, fetch.job)
                )
                for sequence in sorted(zone.early_uses.pop(fetch.block, ())):
                    self._count_use(zone, fetch.block, sequence)

    async def _placed(self, zone: Zone, fetch: Fetch) -> str:
        """Empty when the block is in the zone, else why not."""
        ref = fetch.block
        if zone.state.unref(ref)[1] != zone.shard:
            return "other_shard"
        if zone.slots.find(ref) is not None or zone.slots.is_filling(ref):
            return "in_flight"
        lease = await self._lease(zone, ref, fetch.need_by + PATIENCE_S)
        if lease is None:
            return "not_staged"
        try:
            return await self._write(zone, ref, lease)
        finally:
            self._staging.release([lease.lease], zone.session.number)

    async def _lease(self, zone: Zone, ref: int, deadline: float) -> Acquired | None:
        """A lease on the staged block, once it is, if the zone is still there."""
        with trio.move_on_at(deadline):
            while (lease := self._staging.lease_staged(ref, zone.owner)) is None:
                if not zone.is_open or self._staging.where(ref) == "gone":
                    return None
                await self._until_staged(ref)
            return lease
        return None

    async def _until_staged(self, ref: int) -> None:
        waiting = self._staged.setdefault(ref, trio.lowlevel.ParkingLot())
        try:
            await waiting.park()
        finally:
            if not waiting and self._staged.get(ref) is waiting:
                del self._staged[ref]

    async def _write(self, zone: Zone, ref: int, lease: Acquired) -> str:
        now = trio.current_time()
        block_id = zone.state.block_id(zone.state.unref(ref)[0])
        if block_id < 0:
            return "gone"
        taken = zone.slots.take(ref, lambda other: zone.core.is_wanted(other, now))
        if taken is None:
            return "no_room"
        if taken.evicted is not None:
            self._queue(zone, Evicted(taken.evicted))
        try:
            return await self._fill(zone, ref, zone.state.index.key(block_id), lease, taken)
        finally:
            self._start_emptying(zone, zone.slots.failed(ref))

    async def _fill(self, zone: Zone, ref: int, key: bytes, lease: Acquired, taken: Taken) -> str:
        state, num_bytes = zone.state, zone.writer.layout.block_bytes
        at = state.payload_at(lease.slot)
        payload = state.slab.region.view[at : at + num_bytes]
        crcs = state.slab.crcs(lease.slot, 0, len(state.part_bytes))
        self._staging.begin_transfers([lease.lease])
        try:
            error = await zone.writer.place(
                taken.slot, payload, key, zone.shard, crcs, replaces=taken.evicted is not None
            )
        finally:
            self._staging.end_transfers([lease.lease])
        if error:
            return "push"
        zone.slots.placed(ref)
        zone.bytes_placed += num_bytes
        if self._staging.where(ref) == "gone":  # dropped while it was on its way
            self._empty(zone, ref)
        return ""

    def _push_to(self, session: Session) -> Push:
        async def push(pieces: Sequence[tuple[memoryview, int, int]]) -> str:
            deadline = trio.current_time() + PUSH_DEADLINE_S
            return await self._fabric.push(session.fabric, session.number, pieces, deadline)

        return push

    def _empty(self, zone: Zone, ref: int) -> None:
        """The block is no more: its entry goes, soon, and its slot is free then."""
        self._start_emptying(zone, zone.slots.drop(ref))

    def _start_emptying(self, zone: Zone, slot: int | None) -> None:
        if slot is not None and self._nursery is not None:
            self._nursery.start_soon(self._emptied, zone, slot)

    @staticmethod
    async def _emptied(zone: Zone, slot: int) -> None:
        await zone.writer.empty(slot)  # where that fails, the link is at its end, and the zone with it
        zone.slots.emptied(slot)

    # --- looking in ---

    def stats(self) -> dict[str, object]:
        """Per host: zones, and the ledger of this hop, open zones and closed ones together."""
        found: dict[str, object] = {}
        for host in sorted({*self._past, *(zone.session.host for zone in self._zones)}):
            zones = [zone for zone in self._zones if zone.session.host == host]
            total = Totals()
            total.add(self._past.get(host, Totals()))
            for zone in zones:
                total.add(zone.core.ledger.totals())
            found[host] = {
                "zones": len(zones), "slots": sum(zone.slots.num_slots for zone in zones),
                "placed": sum(len(zone.slots.refs()) for zone in zones),
                "bytes_placed": sum(zone.bytes_placed for zone in zones),
                "ledger": {**asdict(total), "accuracy": total.accuracy, "coverage": total.coverage},
            }  # fmt: skip
        return found
