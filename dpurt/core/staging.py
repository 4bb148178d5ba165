"""The staging pool: which slot holds which block, who may read it, and when it may be reused.

One pool per (region, size class). A slot holds the record image of one block of one shard; the block is named
by an opaque int. The pool moves no bytes and awaits nothing: it is told what happened (`now` handed in) and
answers with slot numbers. It has one owner, the staging agent, and is not thread-safe. Finding blocks by key,
deciding what to stage, moving bytes and the offsets of slots in a region are left to others; so is prefix
closure, which holds over all tiers of a node and not in staging alone.

The one rule: **a slot is reused only when nobody can touch it any more** - no fill writing it, no lease on
it, no transfer reading it (even one whose lease has ended), no device write pending from it (a pin), no
abandoned operation unsettled.

Parts. A slot has 1 to 128 parts, kept as bit masks: *ready* (readable), *filling* (an operation writes them),
*abandoned* (the operation was given up but may still write). They never overlap. Partial fills are normal; a
later `take` adds parts.

States. A block is *mapped* while `find` gives its slot. The state follows from what is outstanding, first
match wins:

============= =============================================================================================
quarantined   an outsider we gave up on may still touch it: abandoned parts, a transfer that outlived its
              lease, or a view of a client that went silent. Mapped only if nothing was abandoned
doomed        not mapped, but fills, leases or pins are outstanding; freed when the last of them ends
free          not mapped, nothing outstanding
filling       mapped, some parts are being filled (others may be ready, and leased)
leased        mapped, no part filling, at least one lease
ready         mapped, at rest. Evictable unless pinned
============= =============================================================================================

Which operation takes a slot from where to where (an operation not listed for a state is refused with
ValueError, or cannot happen). *release* stands for every end of a lease: `release`, `release_owner`,
`expire`, `quarantine_owner`; *evict* is a `take` of another block that reuses the slot; the tests read this
table::

    reserve           free         -> doomed
    reserve           ready        -> doomed
    assign            doomed       -> filling
    take              free         -> filling
    take              filling      -> filling
    take              ready        -> filling ready
    take              leased       -> filling leased
    take              quarantined  -> quarantined
    evict             ready        -> filling
    fill_done         filling      -> filling leased ready
    fill_done         doomed       -> doomed free
    fill_done         quarantined  -> quarantined
    fill_failed       filling      -> filling leased ready free
    fill_failed       doomed       -> doomed free
    fill_failed       quarantined  -> quarantined
    abandon           filling      -> quarantined
    abandon           doomed       -> quarantined
    abandon           quarantined  -> quarantined
    settle            quarantined  -> quarantined doomed free
    pin               filling      -> filling
    pin               ready        -> ready
    pin               leased       -> leased
    pin               quarantined  -> quarantined
    unpin             filling      -> filling
    unpin             ready        -> ready
    unpin             leased       -> leased
    unpin             doomed       -> doomed free
    unpin             quarantined  -> quarantined
    lease             filling      -> filling
    lease             ready        -> leased
    lease             leased       -> leased
    lease             quarantined  -> quarantined
    release           filling      -> filling quarantined
    release           leased       -> leased ready quarantined
    release           doomed       -> doomed free quarantined
    release           quarantined  -> quarantined
    end_transfer      filling      -> filling
    end_transfer      leased       -> leased
    end_transfer      doomed       -> doomed
    end_transfer      quarantined  -> quarantined filling leased ready doomed free
    settle_owner      quarantined  -> quarantined filling leased ready doomed free
    drop              filling      -> doomed
    drop              ready        -> free doomed
    drop              leased       -> doomed
    drop              quarantined  -> quarantined

Leases. A lease is an owner's (a request scope's) right to read some ready parts of a slot. Ending the owner
ends all its leases before the call returns. Lease numbers are never reused, so a late or second release is a
counted no-op. A lease with an expiry (a pull) ends by itself; one without (a view, a push) only with its
release or its owner. The content of a leased slot does not change, even when the block is dropped or an
operation filling *other* parts is abandoned.

Stores. A reservation is a slot that is filled before it is mapped (`reserve`); commit is `assign`, then `fill_done`; cancel is
`fill_failed`, once nobody writes there any more. A *pin* keeps a dirty slot while a
device write reads it; the pin of an abandoned write is simply kept until the device has answered.

No room is a normal answer (None, or a shorter list), counted in `no_room`.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpurt.core.eviction import EvictionPolicy, Protect
from dpurt.core.identity import MAX_PARTS

__all__ = ["Ended", "LeaseInfo", "PoolStats", "SlotInfo", "SlotState", "StagingPool", "Taken"]


class SlotState(enum.IntEnum):
    """See the module's docstring."""

    FREE = 0
    FILLING = 1
    READY = 2
    LEASED = 3
    DOOMED = 4
    QUARANTINED = 5


FREE, FILLING, READY, LEASED, DOOMED, QUARANTINED = SlotState


class Taken(NamedTuple):
    """The slot of a block. `to_fill` are the parts the caller must now fill; `evicted` is the block that had
    to go.
    """

    slot: int
    generation: int
    to_fill: int
    evicted: int | None


class LeaseInfo(NamedTuple):
    """A live lease."""

    owner: int
    slot: int


class Ended(NamedTuple):
    """A lease that ended other than by `release`. `is_in_use`: its reader may still read, so the slot is
    quarantined.
    """

    lease: int
    owner: int
    slot: int
    is_in_use: bool


class SlotInfo(NamedTuple):
    """One slot, as it is now. `unsettled` counts ended leases whose readers may still read; `ready_at` is the
    last fill's end.
    """

    slot: int
    generation: int
    state: SlotState
    block: int | None
    ready_mask: int
    filling_mask: int
    abandoned_mask: int
    leases: int
    unsettled: int
    pins: int
    ready_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A snapshot. The six states add up to `total`; `pinned` and `evictable` are subsets; the rest are live
    or running counts.

    `double_release` counts releases of leases that had ended (released, expired, or gone with their owner).
    """

    total: int
    free: int
    filling: int
    ready: int
    leased: int
    doomed: int
    quarantined: int
    pinned: int
    evictable: int
    leases: int
    owners: int
    transfers: int
    takes: int
    evictions: int
    no_room: int
    expired: int
    double_release: int
    abandoned: int


class _Slot:
    __slots__ = (
        "abandoned",
        "block",
        "evictable",
        "filling",
        "generation",
        "index",
        "leases",
        "pins",
        "ready",
        "ready_at",
        "state",
        "unsettled",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.state = FREE
        self.block: int | None = None  # None: not mapped
        self.ready = self.filling = self.abandoned = 0  # part masks
        self.leases = self.unsettled = self.pins = 0
        self.evictable = False
        self.ready_at = 0.0

    def derive_state(self) -> SlotState:
        if self.abandoned or self.unsettled:
            return QUARANTINED
        if self.block is None:
            return DOOMED if self.filling or self.leases or self.pins else FREE
        if self.filling:
            return FILLING
        return LEASED if self.leases else READY


class _Lease:
    __slots__ = ("expires", "is_silent", "number", "owner", "parts", "slot", "transfers")

    def __init__(self, number: int, slot: _Slot, owner: int, parts: int, expires: float | None) -> None:
        self.number = number
        self.slot = slot
        self.owner = owner
        self.parts = parts
        self.expires = expires
        self.transfers = 0
        self.is_silent = False  # a view whose owner stopped answering, not settled yet

    def has_ended(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


class StagingPool:
    """Slots, leases and eviction of one size class of one region. See the module's docstring."""

    def __init__(self, num_slots: int, num_parts: int, policy: EvictionPolicy) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be >= 1, got {num_slots}")
        if not 1 <= num_parts <= MAX_PARTS:
            raise ValueError(f"num_parts must be 1 to {MAX_PARTS}, got {num_parts}")
        if len(policy):
            raise ValueError("the policy already has blocks: each pool needs its own")
        self._policy = policy
        self._all_parts = (1 << num_parts) - 1
        self._slots = [_Slot(i) for i in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, _Slot] = {}
        self._in_state = [0] * len(SlotState)
        self._in_state[FREE] = num_slots
        self._num_pinned = self._num_evictable = 0
        self._leases: dict[int, _Lease] = {}
        self._owners: dict[int, dict[int, None]] = {}
        self._unsettled: dict[int, _Lease] = {}  # ended leases in a transfer, or silent
        self._silent: dict[int, list[_Lease]] = {}  # by owner
        self._expiries: list[tuple[float, int]] = []  # heap; entries of ended leases are garbage
        self._next_lease = 1
        self._transfers = 0
        self._takes = self._evictions = self._no_room = 0
        self._expired = self._double_release = self._abandoned = 0

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Put something in the place of the eviction policy: one that looks on, or, to end that, what it was put around."""
        self._policy = wrap(self._policy)

    # --- blocks and slots -------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_available(self) -> int:
        """Slots a new block could have now: free or evictable."""
        return len(self._free) + self._num_evictable

    def price(self, now: float) -> float:
        """What the block that leaves for a new one is worth, see `EvictionPolicy`; 0 while a slot is free."""
        return 0.0 if self._free else self._policy.price(now)

    @property
    def num_free(self) -> int:
        """Slots a new block could have without an eviction."""
        return len(self._free)

    @property
    def all_parts(self) -> int:
        """The mask of a whole block."""
        return self._all_parts

    def find(self, block: int) -> int | None:
        """The slot a block is mapped to, whatever parts it has. Valid until the pool's next change."""
        slot = self._slot_of.get(block)
        return None if slot is None else slot.index

    def ready_parts(self, block: int) -> int:
        """The mask of a block's readable parts; 0 if it has no slot."""
        slot = self._slot_of.get(block)
        return 0 if slot is None else slot.ready

    def take(
        self, block: int, parts_mask: int, now: float, *, protect: Protect | None = None
    ) -> Taken | None:
        """A slot in which to fill parts of `block`, evicting if need be; None if there is no room.

        A block that has a slot keeps it. `to_fill` are the parts neither ready nor filling; they are filling
        now and the caller ends each with `fill_done`, `fill_failed` or `abandon`. Stage a prefix with
        `take_many`, or `touch` it afterwards: a block taken later is younger, so taking head first by hand
        would evict heads first.
        """
        self._check_parts(parts_mask)
        slot = self._slot_of.get(block)
        if slot is not None:
            return self._add_parts(slot, parts_mask)
        taken = self._take_new(block, parts_mask, now, protect)
        if taken is not None:
            self._policy.insert(block, now)
        return taken

    def reserve(self, now: float, *, protect: Protect | None = None) -> Taken | None:
        """A slot to be filled whole for a block that is not mapped yet, evicting if need be; None if there is no room.

        End it by `assign`, or by `fill_failed`.
        """
        vacant = self._vacate(now, protect)
        if vacant is None:
            return None
        s, evicted = vacant
        s.filling = self._all_parts
        self._update(s)
        return Taken(s.index, s.generation, s.filling, evicted)

    def assign(self, slots: Sequence[int], blocks_in_prefix_order: Sequence[int], now: float) -> None:
        """Map blocks that have no slot to slots from `reserve`, one each. They are filling, as if they were taken now."""
        pairs = [(self._at(slot), block) for slot, block in zip(slots, blocks_in_prefix_order, strict=True)]
        for s, block in pairs:
            if s.block is not None or s.filling != self._all_parts:
                raise ValueError(f"slot {s.index} ({s.state.name}) is not reserved")
            if block in self._slot_of:
                raise ValueError(f"block {block} has slot {self._slot_of[block].index}")
        for s, block in reversed(pairs):
            s.block = block
            self._slot_of[block] = s
            self._policy.insert(block, now)
            self._update(s)

    def take_many(
        self, blocks: Sequence[int], parts_mask: int, now: float, *, protect: Protect | None = None
    ) -> list[Taken]:
        """`take` for blocks in prefix order. Where room runs out the suffix is trimmed: the list is shorter.

        No block of the batch is evicted for another one of it, and of the new ones heads count as younger
        than tails.
        """
        self._check_parts(parts_mask)
        fresh: list[int] = []
        kept = self._pin_evictable(blocks)
        try:
            taken = self._take_each(blocks, parts_mask, now, protect, fresh)
        finally:
            for block in reversed(fresh):
                self._policy.insert(block, now)
            for slot in kept:
                self._unpin(slot)
        self._no_room += max(0, len(blocks) - len(taken) - 1)  # the first refused is counted already
        return taken

    def touch(self, blocks_in_prefix_order: Sequence[int], now: float) -> None:
        """These blocks were used. Tail first, so that heads outlive tails; blocks without a slot are passed
        over.
        """
        self._policy.touch(reversed(blocks_in_prefix_order), now)

    def drop(self, block: int) -> SlotState | None:
        """Make a block unreachable at once. Returns what became of its slot: FREE, DOOMED (freed when the
        last lease, fill or pin ends) or QUARANTINED; None if it had none.
        """
        slot = self._slot_of.get(block)
        if slot is None:
            return None
        self._unmap(slot)
        self._update(slot)
        return slot.state

    def slot_info(self, slot: int) -> SlotInfo:
        s = self._at(slot)
        return SlotInfo(
            s.index,
            s.generation,
            s.state,
            s.block,
            s.ready,
            s.filling,
            s.abandoned,
            s.leases,
            s.unsettled,
            s.pins,
            s.ready_at,
        )

    # --- fills ------------------------------------------------------------------------------------

    def fill_done(self, slot: int, parts_mask: int, now: float, *, pin: bool = False) -> None:
        """These parts, which were filling, hold their bytes and are readable. `pin` as by `pin`, in one go."""
        s = self._at(slot)
        self._end_filling(s, parts_mask)
        s.ready |= parts_mask
        s.ready_at = now
        if pin:
            self._num_pinned += not s.pins
            s.pins += 1
        self._update(s)

    def fill_failed(self, slot: int, parts_mask: int) -> None:
        """These parts, which were filling, were not filled, and nobody writes them any more. A slot left with
        no part goes.
        """
        s = self._at(slot)
        self._end_filling(s, parts_mask)
        if s.block is not None and not s.ready and not s.filling:
            self._unmap(s)
        self._update(s)

    def abandon(self, slot: int, parts_mask: int | None = None) -> None:
        """The operation filling these parts (default: all that are filling) was given up, but may still
        write.

        The block is unreachable at once. Leases on ready parts stay valid, since the operation does not write
        those. The slot is reused only after `settle`.
        """
        s = self._at(slot)
        parts = s.filling if parts_mask is None else parts_mask
        self._end_filling(s, parts)
        s.abandoned |= parts
        self._abandoned += 1
        if s.block is not None:
            self._unmap(s)
        self._update(s)

    def settle(self, slot: int, parts_mask: int | None = None) -> None:
        """The abandoned operation on these parts (default: all that are abandoned) has provably ended."""
        s = self._at(slot)
        parts = s.abandoned if parts_mask is None else parts_mask
        if not parts or parts & ~s.abandoned:
            raise ValueError(f"slot {slot}: parts {parts:#x} are not abandoned ({s.abandoned:#x} are)")
        s.abandoned &= ~parts
        self._update(s)

    def pin(self, slot: int) -> None:
        """A device write reads this slot. Pins count."""
        s = self._at(slot)
        if s.block is None or not s.ready:
            raise ValueError(f"slot {slot} ({s.state.name}) holds no block with a ready part: nothing to pin")
        self._pin(s)

    def unpin(self, slot: int) -> None:
        """A device write has ended."""
        s = self._at(slot)
        if not s.pins:
            raise ValueError(f"slot {slot} is not pinned")
        self._unpin(s)

    # --- leases -----------------------------------------------------------------------------------

    def lease(self, slot: int, owner: int, parts_mask: int, expires: float | None, now: float) -> int:
        """Give `owner` the right to read ready parts of a mapped slot. Returns the lease's number, from 1."""
        s = self._at(slot)
        if s.block is None or not parts_mask or parts_mask & ~s.ready:
            raise ValueError(
                f"slot {slot} ({s.state.name}): parts {parts_mask:#x} are not ready ({s.ready:#x} are)"
            )
        if expires is not None and expires <= now:
            raise ValueError(f"a lease that expires at {expires} is over at {now}")
        number = self._next_lease
        self._next_lease = number + 1
        self._leases[number] = _Lease(number, s, owner, parts_mask, expires)
        held = self._owners.get(owner)
        if held is None:
            held = self._owners[owner] = {}
        held[number] = None
        if expires is not None:
            self._schedule(expires, number)
        s.leases += 1
        if s.leases == 1:
            self._update(s)
        return number

    def lease_many(
        self, slots: Iterable[int], owner: int, parts_mask: int, expires: float | None, now: float
    ) -> list[int]:
        """`lease` for several slots; on ValueError those before the bad one stay leased (the owner's end
        frees them).
        """
        return [self.lease(slot, owner, parts_mask, expires, now) for slot in slots]

    def lease_ok(self, lease: int, slot: int, now: float) -> bool:
        """Whether this lease lives at `now` and is for this slot."""
        held = self._leases.get(lease)
        return held is not None and held.slot.index == slot and not held.has_ended(now)

    def lease_info(self, lease: int) -> LeaseInfo | None:
        """Whose a live lease is, and on which slot; None when it has ended."""
        held = self._leases.get(lease)
        return None if held is None else LeaseInfo(held.owner, held.slot.index)

    def release(self, lease: int) -> bool:
        """End a lease. False, counted and otherwise without effect, if it has ended already."""
        held = self._leases.get(lease)
        if held is None:
            self._double_release += 1
            return False
        self._disown(held)
        self._end(held)
        return True

    def release_many(self, leases: Iterable[int]) -> int:
        """`release` each; how many were live."""
        return sum(map(self.release, leases))

    def release_owner(self, owner: int) -> list[Ended]:
        """End every lease of a scope, before this returns. An owner without leases is fine."""
        return [self._end(self._leases[number]) for number in self._owners.pop(owner, ())]

    def expire(self, now: float) -> list[Ended]:
        """End every lease whose time has come."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            held = self._leases.get(number)
            if held is not None:
                self._disown(held)
                ended.append(self._end(held))
        self._expired += len(ended)
        return ended

    def next_expiry(self) -> float | None:
        """When `expire` will next find a live lease; None if none expires. For the owner's timer."""
        while self._expiries and self._expiries[0][1] not in self._leases:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def begin_transfer(self, lease: int, now: float) -> bool:
        """Bytes are about to move under a lease; False if it has ended. Until `end_transfer` the slot stays
        untouched, even if the lease ends meanwhile. Transfers of one lease count.
        """
        held = self._leases.get(lease)
        if held is None or held.has_ended(now):
            return False
        held.transfers += 1
        self._transfers += 1
        return True

    def end_transfer(self, lease: int) -> None:
        """A transfer begun under this lease is over: done, failed, or its link is down."""
        held = self._leases.get(lease) or self._unsettled.get(lease)
        if held is None or not held.transfers:
            raise ValueError(f"lease {lease} has no transfer in flight")
        held.transfers -= 1
        self._transfers -= 1
        self._settle_lease(held)

    def quarantine_owner(self, owner: int) -> list[Ended]:
        """A client stopped answering, but its process may live and still read through its views (leases
        without expiry).

        Ends all its leases; the slots of its views stay untouched until `settle_owner`.
        """
        ended = []
        for number in self._owners.pop(owner, ()):
            held = self._leases[number]
            if held.expires is None:
                held.is_silent = True
                self._silent.setdefault(owner, []).append(held)
            ended.append(self._end(held))
        return ended

    def settle_owner(self, owner: int) -> list[int]:
        """A quarantined client provably no longer maps the memory. Returns the slots of its views."""
        views = self._silent.pop(owner, [])
        for held in views:
            held.is_silent = False
            self._settle_lease(held)
        return [held.slot.index for held in views]

    # --- seen from outside ------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """A frozen snapshot, O(1)."""
        return PoolStats(
            total=len(self._slots),
            free=self._in_state[FREE],
            filling=self._in_state[FILLING],
            ready=self._in_state[READY],
            leased=self._in_state[LEASED],
            doomed=self._in_state[DOOMED],
            quarantined=self._in_state[QUARANTINED],
            pinned=self._num_pinned,
            evictable=self._num_evictable,
            leases=len(self._leases),
            owners=len(self._owners),
            transfers=self._transfers,
            takes=self._takes,
            evictions=self._evictions,
            no_room=self._no_room,
            expired=self._expired,
            double_release=self._double_release,
            abandoned=self._abandoned,
        )

    def check_integrity(self) -> None:
        """Recount everything, O(slots + leases), and assert that it agrees. For tests and idle moments."""
        for s in self._slots:
            self._check_slot(s)
        states = [s.state for s in self._slots]
        assert self._in_state == [states.count(state) for state in SlotState]
        assert sum(self._in_state) == len(self._slots)
        assert sorted(self._free) == [s.index for s in self._slots if s.state is FREE]
        assert self._slot_of == {s.block: s for s in self._slots if s.block is not None}
        assert len(self._policy) == len(self._slot_of)
        assert self._num_evictable == sum(s.evictable for s in self._slots)
        assert self._num_pinned == sum(s.pins > 0 for s in self._slots)
        self._check_leases()

    def _check_slot(self, s: _Slot) -> None:
        assert s.state is s.derive_state()
        assert (
            s.ready.bit_count() + s.filling.bit_count() + s.abandoned.bit_count()
            == (s.ready | s.filling | s.abandoned).bit_count()
        )
        assert s.evictable == (s.state is READY and not s.pins)
        assert s.ready or s.filling or s.block is None
        assert not s.ready or s.state is not FREE

    def _check_leases(self) -> None:
        live, unsettled = [0] * len(self._slots), [0] * len(self._slots)
        for held in self._leases.values():
            live[held.slot.index] += 1
            assert not held.parts & ~held.slot.ready
        for held in self._unsettled.values():
            unsettled[held.slot.index] += 1
            assert held.transfers or held.is_silent
        assert live == [s.leases for s in self._slots]
        assert unsettled == [s.unsettled for s in self._slots]
        owned = {number: owner for owner, numbers in self._owners.items() for number in numbers}
        assert owned == {number: held.owner for number, held in self._leases.items()}
        everyone = [*self._leases.values(), *self._unsettled.values()]
        assert self._transfers == sum(held.transfers for held in everyone)

    # --- inside -----------------------------------------------------------------------------------

    def _at(self, slot: int) -> _Slot:
        if not 0 <= slot < len(self._slots):
            raise ValueError(f"no slot {slot} in a pool of {len(self._slots)}")
        return self._slots[slot]

    def _check_parts(self, parts_mask: int) -> None:
        if not 0 < parts_mask <= self._all_parts:
            raise ValueError(f"parts {parts_mask:#x} are not among the pool's ({self._all_parts:#x})")

    def _update(self, s: _Slot) -> None:
        """Bring the state, its counts, the free list and the policy's hold in line after any change to a
        slot.
        """
        state = s.derive_state()
        if state is not s.state:
            self._in_state[s.state] -= 1
            self._in_state[state] += 1
            s.state = state
            if state is FREE:
                s.ready = 0
                self._free.append(s.index)
        evictable = state is READY and not s.pins
        if evictable is not s.evictable:
            self._set_evictable(s, evictable)

    def _set_evictable(self, s: _Slot, evictable: bool) -> None:
        assert s.block is not None
        s.evictable = evictable
        if evictable:
            self._num_evictable += 1
            self._policy.unhold(s.block)
        else:
            self._num_evictable -= 1
            self._policy.hold(s.block)

    def _unmap(self, s: _Slot, *, evicted: bool = False) -> None:
        """Make the slot's block unreachable. The caller updates the slot."""
        assert s.block is not None
        del self._slot_of[s.block]
        self._policy.remove(s.block, evicted=evicted)
        s.block = None
        if s.evictable:
            s.evictable = False
            self._num_evictable -= 1

    def _take_new(self, block: int, parts: int, now: float, protect: Protect | None) -> Taken | None:
        """Map a block that has no slot. The caller tells the policy."""
        vacant = self._vacate(now, protect)
        if vacant is None:
            return None
        s, evicted = vacant
        s.block = block
        s.filling = parts
        self._slot_of[block] = s
        self._update(s)
        return Taken(s.index, s.generation, parts, evicted)

    def _vacate(self, now: float, protect: Protect | None) -> tuple[_Slot, int | None] | None:
        """An empty slot, and the block evicted for it. The caller fills it, and updates it then."""
        evicted = None
        if self._free:
            s = self._slots[self._free.pop()]
        elif self._num_evictable:
            evicted = self._policy.victim(now, protect)
            assert evicted is not None
            s = self._slot_of[evicted]
            assert s.evictable
            self._unmap(s, evicted=True)
            self._evictions += 1
        else:
            self._no_room += 1
            return None
        self._takes += 1
        s.generation += 1
        s.ready = 0
        return s, evicted

    def _take_each(
        self, blocks: Sequence[int], parts: int, now: float, protect: Protect | None, fresh: list[int]
    ) -> list[Taken]:
        """Take until room runs out. Appends the newly mapped blocks, which the policy does not know yet, to
        `fresh`.
        """
        taken: list[Taken] = []
        for block in blocks:
            slot = self._slot_of.get(block)
            one = self._add_parts(slot, parts) if slot else self._take_new(block, parts, now, protect)
            if one is None:
                break
            if slot is None:
                fresh.append(block)
            taken.append(one)
        return taken

    def _add_parts(self, s: _Slot, parts: int) -> Taken:
        missing = parts & ~(s.ready | s.filling)
        if missing:
            s.filling |= missing
            self._update(s)
        return Taken(s.index, s.generation, missing, None)

    def _end_filling(self, s: _Slot, parts: int) -> None:
        if not parts or parts & ~s.filling:
            raise ValueError(f"slot {s.index}: parts {parts:#x} are not being filled ({s.filling:#x} are)")
        s.filling &= ~parts

    def _pin(self, s: _Slot) -> None:
        s.pins += 1
        if s.pins == 1:
            self._num_pinned += 1
            self._update(s)

    def _unpin(self, s: _Slot) -> None:
        s.pins -= 1
        if not s.pins:
            self._num_pinned -= 1
            self._update(s)

    def _pin_evictable(self, blocks: Iterable[int]) -> list[_Slot]:
        pinned = []
        for block in blocks:
            s = self._slot_of.get(block)
            if s is not None and s.evictable:
                self._pin(s)
                pinned.append(s)
        return pinned

    def _schedule(self, expires: float, number: int) -> None:
        heapq.heappush(self._expiries, (expires, number))
        if len(self._expiries) > 2 * len(self._leases) + 64:
            leases = self._leases.values()
            self._expiries = [(held.expires, held.number) for held in leases if held.expires is not None]
            heapq.heapify(self._expiries)

    def _disown(self, held: _Lease) -> None:
        numbers = self._owners[held.owner]
        del numbers[held.number]
        if not numbers:
            del self._owners[held.owner]

    def _end(self, held: _Lease) -> Ended:
        """End a lease its owner no longer lists."""
        del self._leases[held.number]
        s = held.slot
        s.leases -= 1
        is_in_use = held.transfers > 0 or held.is_silent
        if is_in_use:
            s.unsettled += 1
            self._unsettled[held.number] = held
        if is_in_use or not s.leases:
            self._update(s)
        return Ended(held.number, held.owner, s.index, is_in_use)

    def _settle_lease(self, held: _Lease) -> None:
        """Let go of the slot if the lease has ended and its reader is done."""
        if held.transfers or held.is_silent or held.number not in self._unsettled:
            return
        del self._unsettled[held.number]
        held.slot.unsettled -= 1
        self._update(held.slot)
