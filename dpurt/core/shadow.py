"""A second policy on a live node's events, without any I/O: what it would have had in staging, and what its prefetch was worth.

Theory of operation. A shadow is told the same facts as the node's own prefetch core - requests, loads, stores, blocks that are
gone - but not what became of the node's reads. It keeps staging pools of the node's sizes under an eviction policy of its own, a
core of its own (or none: then it reads on demand only), and a modelled device of the node's bandwidth and latency in the
place of the real one. So its blocks are where its own decisions put them; each `Demanded` is answered from there, and its
ledger says of its prefetches what the node's says of the real ones.

What it cannot know: that requests would have gone faster or slower under it. Its demands come when the live node's came.
Parts are not told apart, and leases do not hold blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_queue import DeviceQueue, Read
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
    Stored,
    Where,
)
from dpurt.core.eviction import EvictionPolicy
from dpurt.core.ledger import Totals
from dpurt.core.prefetch import Command, Fetch, PrefetchCore
from dpurt.core.staging import StagingPool

__all__ = ["Shadow", "ShadowPool", "ShadowStats"]

WHOLE = 1  # the only part there is


@dataclass(frozen=True, slots=True)
class ShadowPool:
    """A pool of the node's: how many slots of how many bytes, and the shadow's policy for them."""

    slots: int
    record_bytes: int
    policy: EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStats:
    """A snapshot. `demanded`: needs by where the shadow had the block; `ledger` None without prefetch."""

    demanded: dict[Where, int]
    bytes_read: int
    no_room: int
    ledger: Totals | None


class Shadow:
    """See the module's docstring. One owner task; not thread-safe. It is its core's view of the tiers."""

    def __init__(
        self, pools: Sequence[ShadowPool], pool_of: Callable[[int], int | None], device: DeviceProfile
    ) -> None:
        """`pool_of` a block: its pool's place in `pools`, None for a block nobody knows any more."""
        self.core: PrefetchCore | None = None
        self._pools = [StagingPool(pool.slots, 1, pool.policy) for pool in pools]
        self._bytes = [pool.record_bytes for pool in pools]
        self._pool_of = pool_of
        self._device = DeviceQueue(device, seed=0)
        self._landings: list[tuple[float, int, Read]] = []
        self._order = 0
        self._reads: dict[int, Read] = {}
        self._of_job: dict[int, Read] = {}
        self._slot: dict[int, int] = {}  # of blocks being read that have one
        self._stored: set[int] = set()
        self._chains: dict[int, list[int]] = {}
        self._outbox: list[Event] = []
        self._demanded: dict[Where, int] = {"staging": 0, "in_flight": 0, "nvme": 0, "gone": 0}

    # --- the tiers, as the core sees them

    def where(self, block: int, parts_mask: int | None) -> Where:
        pool = self._pool(block)
        if pool is None or block not in self._stored:
            return "gone"
        if pool.ready_parts(block):
            return "staging"
        return "in_flight" if block in self._reads else "nvme"

    def record_bytes(self, block: int, parts_mask: int | None) -> int:
        at = self._pool_of(block)
        return 1 if at is None else self._bytes[at]

    def recompute_s(self, block: int) -> float | None:
        return None

    def demand_backlog_bytes(self) -> int:
        return self._device.demand_backlog_bytes

    def price(self, block: int, now: float) -> float:
        pool = self._pool(block)
        return 0.0 if pool is None else pool.price(now)

    def free_bytes(self) -> int:
        return sum(pool.num_available * size for pool, size in zip(self._pools, self._bytes, strict=True))

    # --- what happens

    def handle(self, event: Event, now: float) -> None:
        """The live node was told this."""
        self._advance(now)
        match event:
            case Staged() | FetchFailed() | Evicted():
                return  # of the node's own reads
            case Demanded(block, sequence):
                self._tell(Demanded(block, sequence, self._demand(block, now)), now)
            case Arrived(sequence, _, blocks):
                self._stored.update(blocks)
                self._chains[sequence] = list(blocks)
                self._touch(blocks, now)
                self._tell(event, now)
            case Stored(sequence, blocks):
                self._store(sequence, blocks, now)
                self._tell(event, now)
            case Finished(sequence) | SequenceGone(sequence):
                chain = self._chains.pop(sequence, [])
                if isinstance(event, Finished):
                    self._touch(chain, now)
                self._tell(event, now)
            case Dropped(block):
                self._drop(block)
                self._tell(event, now)
            case _:
                self._tell(event, now)

    def tick(self, now: float) -> None:
        """The time has come, or somewhat later, that `next_wakeup` said."""
        self._advance(now)
        due = None if self.core is None else self.core.next_wakeup()
        if self.core is not None and due is not None and due <= now:
            self._obey(self.core.tick(now), now)
            self._send_outbox(now)

    def next_wakeup(self) -> float | None:
        """When `tick` should be called, unless something is told first."""
        times = [self._landings[0][0]] if self._landings else []
        due = None if self.core is None else self.core.next_wakeup()
        return min([*times, due] if due is not None else times, default=None)

    def stats(self) -> ShadowStats:
        """A snapshot."""
        return ShadowStats(
            demanded=dict(self._demanded),
            bytes_read=self._device.bytes_read,
            no_room=sum(pool.stats().no_room for pool in self._pools),
            ledger=None if self.core is None else self.core.ledger.totals(),
        )

    # --- hosts

    def _demand(self, block: int, now: float) -> Where:
        where = self.where(block, None)
        self._demanded[where] += 1
        if where == "in_flight":
            self._device.promote(self._reads[block])
        elif where == "nvme":
            self._read(Read(block, self.record_bytes(block, None), None, is_demand=True), now)
        self._start_reads(now)
        return where

    def _store(self, sequence: int, blocks: Sequence[int], now: float) -> None:
        """A host stored what was new of these: it is in staging, as far as there is room."""
        self._chains.setdefault(sequence, []).extend(blocks)
        for block in blocks:
            pool = self._pool(block)
            if block in self._stored or pool is None:
                continue
            self._stored.add(block)
            slot = self._take(pool, block, now)
            if slot is not None:
                pool.fill_done(slot, WHOLE, now)

    def _touch(self, blocks: Sequence[int], now: float) -> None:
        pool = self._pool(blocks[0]) if blocks else None
        if pool is not None:
            pool.touch(blocks, now)

    def _drop(self, block: int) -> None:
        self._stored.discard(block)
        pool = self._pool(block)
        if pool is not None:
            pool.drop(block)

    # --- the core

    def _tell(self, event: Event, now: float) -> None:
        if self.core is not None:
            self._obey(self.core.handle(event, now), now)
        self._send_outbox(now)

    def _send_outbox(self, now: float) -> None:
        """What commands and demands caused is told after them: never from inside, where room is half made."""
        while self._outbox:
            event = self._outbox.pop(0)
            if self.core is not None:
                self._obey(self.core.handle(event, now), now)

    def _obey(self, commands: Sequence[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Fetch):
                self._fetch(command, now)
            else:
                self._cancel(command.job)
        if commands:
            self._start_reads(now)

    def _fetch(self, command: Fetch, now: float) -> None:
        read = Read(command.block, self.record_bytes(command.block, None), command.job, is_demand=False)
        if self.where(command.block, None) != "nvme" or not self._read(read, now):
            self._outbox.append(FetchFailed(command.job, "no_room"))
        else:
            self._of_job[command.job] = read

    def _cancel(self, job: int) -> None:
        read = self._of_job.get(job)
        if read is not None and self._device.cancel(read):
            pool = self._pool(read.block)
            self._end(read)
            slot = self._slot.pop(read.block, None)
            if slot is not None and pool is not None:
                pool.fill_failed(slot, WHOLE)
            self._outbox.append(FetchFailed(job, "cancelled"))

    # --- the modelled device

    def _read(self, read: Read, now: float) -> bool:
        """Queue a read into a slot. Without one a demand is read all the same and not kept; a prefetch is not: False."""
        pool = self._pool(read.block)
        slot = None if pool is None else self._take(pool, read.block, now)
        if slot is None and not read.is_demand:
            return False
        if slot is not None:
            self._slot[read.block] = slot
        self._reads[read.block] = read
        self._device.submit(read)
        return True

    def _take(self, pool: StagingPool, block: int, now: float) -> int | None:
        core = self.core
        protect = None if core is None else (lambda other: core.is_wanted(other, now))
        taken = pool.take(block, WHOLE, now, protect=protect)
        if taken is None:
            return None
        if taken.evicted is not None:
            self._outbox.append(Evicted(taken.evicted))
        return taken.slot

    def _start_reads(self, now: float) -> None:
        for done_at, read in self._device.start(now):
            self._order += 1
            heapq.heappush(self._landings, (done_at, self._order, read))

    def _advance(self, now: float) -> None:
        """Land what the device has done by now, each at its time."""
        while self._landings and self._landings[0][0] <= now:
            done_at, _, read = heapq.heappop(self._landings)
            self._device.complete(read)
            self._land(read, done_at)
            self._start_reads(done_at)
            self._send_outbox(now)

    def _land(self, read: Read, at: float) -> None:
        self._end(read)
        pool, slot = self._pool(read.block), self._slot.pop(read.block, None)
        if slot is not None and pool is not None:
            pool.fill_done(slot, WHOLE, at)
        if read.job is not None:
            is_here = read.block in self._stored
            self._outbox.append(Staged(read.block, read.job) if is_here else FetchFailed(read.job, "stale"))

    def _end(self, read: Read) -> None:
        del self._reads[read.block]
        if read.job is not None:
            self._of_job.pop(read.job, None)

    def _pool(self, block: int) -> StagingPool | None:
        at = self._pool_of(block)
        return None if at is None else self._pools[at]
