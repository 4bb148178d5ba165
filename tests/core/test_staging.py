"""The staging pool against a naive model with bytes: no reader sees a slot change, and nothing leaks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpurt.core import staging
from dpurt.core.eviction import POLICIES, Lru, make_policy
from dpurt.core.staging import Ended, SlotState, StagingPool

ALL = 0b111


def make_pool(num_slots: int = 4, num_parts: int = 3, policy: str = "lru") -> StagingPool:
    return StagingPool(num_slots, num_parts, make_policy(policy, num_slots))


def stage(pool: StagingPool, block: int, parts: int = ALL) -> int:
    """A block with these parts ready; its slot."""
    taken = pool.take(block, parts, 0.0)
    assert taken is not None
    if taken.to_fill:
        pool.fill_done(taken.slot, taken.to_fill, 0.0)
    return taken.slot


def state(pool: StagingPool, slot: int) -> str:
    return pool.slot_info(slot).state.name.lower()


# --- random histories against a naive model -------------------------------------------------------


def bits(mask: int) -> set[int]:
    return {part for part in range(8) if mask >> part & 1}


@dataclass
class ModelLease:
    slot: int
    owner: int
    expires: float | None
    seen: dict[int, object]  # the content the reader must keep seeing
    is_live: bool = True
    is_silent: bool = False
    transfers: int = 0

    @property
    def may_read(self) -> bool:
        return self.is_live or self.is_silent or self.transfers > 0


@dataclass
class ModelSlot:
    block: int | None = None
    generation: int = 0
    ready: set[int] = field(default_factory=set)
    memory: dict[int, object] = field(default_factory=dict)
    pins: list[dict[int, object]] = field(default_factory=list)  # what each pending device write must find


class PoolMachine(RuleBasedStateMachine):
    """Outsiders (device, peers) are played here: fills scribble into memory while they run, abandoned ones
    until settled; readers and device writes check that what they read stays. Completions come in any order.
    """

    SLOTS, PARTS, BLOCKS, OWNERS = 3, 3, 6, 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(self.SLOTS, self.PARTS, Lru(self.SLOTS))
        self.now = 0.0
        self.serial = 0
        self.slots = [ModelSlot() for _ in range(self.SLOTS)]
        self.recency: list[int] = []  # mapped blocks, oldest first
        self.fills: list[tuple[int, int]] = []  # (slot, parts) in flight
        self.reserved: list[int] = []  # slots that were, and may be still
        self.zombies: list[tuple[int, int]] = []  # abandoned, still writing
        self.leases: dict[int, ModelLease] = {}
        self.double_release = self.no_room = self.evictions = 0

    # what the model derives by full scans

    def mapped(self, block: int) -> int | None:
        return next((i for i, s in enumerate(self.slots) if s.block == block), None)

    def filling(self, slot: int) -> int:
        return sum(parts for at, parts in self.fills if at == slot)

    def abandoned(self, slot: int) -> int:
        return sum(parts for at, parts in self.zombies if at == slot)

    def readers(self, slot: int) -> list[ModelLease]:
        return [x for x in self.leases.values() if x.slot == slot and x.may_read]

    def expected_state(self, slot: int) -> str:
        s = self.slots[slot]
        readers = self.readers(slot)
        if self.abandoned(slot) or any(not x.is_live for x in readers):
            return "QUARANTINED"
        if s.block is None:
            return "DOOMED" if self.filling(slot) or readers or s.pins else "FREE"
        return "FILLING" if self.filling(slot) else "LEASED" if readers else "READY"

    def is_evictable(self, slot: int) -> bool:
        return self.expected_state(slot) == "READY" and not self.slots[slot].pins

    # effects on the model

    def scribble(self, slot: int, parts: int) -> None:
        self.serial += 1
        for part in bits(parts):
            self.slots[slot].memory[part] = ("torn", self.serial)

    def unmap(self, slot: int) -> None:
        block = self.slots[slot].block
        if block is not None:
            self.recency.remove(block)
            self.slots[slot].block = None

    def start_fill(self, slot: int, parts: int) -> None:
        if parts:
            self.fills.append((slot, parts))
            self.scribble(slot, parts)

    def expect_new(self, batch: frozenset[int]) -> tuple[int | None, int | None]:
        """(victim's slot or None for any free one, evicted block); raises LookupError for no room."""
        if any(self.expected_state(i) == "FREE" for i in range(self.SLOTS)):
            return None, None
        for old in self.recency:
            slot = self.mapped(old)
            assert slot is not None
            if self.is_evictable(slot) and old not in batch:
                return slot, old
        raise LookupError

    def apply_take(
        self, block: int, parts: int, taken: staging.Taken | None, batch: frozenset[int] = frozenset()
    ) -> bool:
        """Check one answer of take and follow it. False: rightly no room."""
        slot = self.mapped(block)
        if slot is not None:
            assert taken is not None
            missing = parts & ~self.filling(slot) & ~sum(1 << p for p in self.slots[slot].ready)
            assert taken == (slot, self.slots[slot].generation, missing, None)
            self.start_fill(slot, missing)
            return True
        try:
            victim_slot, evicted = self.expect_new(batch)
        except LookupError:
            assert taken is None
            return False
        assert taken is not None
        assert taken.evicted == evicted
        assert taken.to_fill == parts
        if victim_slot is None:
            assert self.expected_state(taken.slot) == "FREE"
        else:
            assert taken.slot == victim_slot
            self.unmap(victim_slot)
            self.evictions += 1
        s = self.slots[taken.slot]
        s.block, s.ready = block, set()
        s.generation += 1
        assert taken.generation == s.generation
        self.start_fill(taken.slot, parts)
        return True

    # rules

    @rule(block=st.integers(0, BLOCKS - 1), parts=st.integers(1, ALL))
    def take(self, block: int, parts: int) -> None:
        was_mapped = self.mapped(block) is not None
        if not self.apply_take(block, parts, self.pool.take(block, parts, self.now)):
            self.no_room += 1
        elif not was_mapped:
            self.recency.append(block)

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=4), parts=st.integers(1, ALL))
    def take_many(self, blocks: list[int], parts: int) -> None:
        before = list(self.recency)
        taken = self.pool.take_many(blocks, parts, self.now)
        batch = frozenset(blocks)
        for i, block in enumerate(blocks):
            if not self.apply_take(block, parts, taken[i] if i < len(taken) else None, batch):
                assert len(taken) == i
                self.no_room += len(blocks) - i
                break
        fresh = dict.fromkeys(b for b in blocks[: len(taken)] if b not in before)
        self.recency += reversed(fresh)

    @rule()
    def reserve(self) -> None:
        taken = self.pool.reserve(self.now)
        try:
            victim_slot, evicted = self.expect_new(frozenset())
        except LookupError:
            assert taken is None
            self.no_room += 1
            return
        assert taken is not None
        assert (taken.evicted, taken.to_fill) == (evicted, ALL)
        if victim_slot is not None:
            assert taken.slot == victim_slot
            self.unmap(victim_slot)
            self.evictions += 1
        assert self.slots[taken.slot].block is None
        self.slots[taken.slot].ready = set()
        self.slots[taken.slot].generation += 1
        self.start_fill(taken.slot, ALL)
        self.reserved.append(taken.slot)

    def is_reserved(self, slot: int) -> bool:
        return (slot, ALL) in self.fills and self.slots[slot].block is None

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), block=st.integers(0, BLOCKS - 1))
    def assign(self, data: st.DataObject, block: int) -> None:
        slot = data.draw(st.sampled_from(self.reserved))
        if not self.is_reserved(slot) or self.mapped(block) is not None:
            return
        self.reserved.remove(slot)
        self.pool.assign([slot], [block], self.now)
        self.slots[slot].block = block
        self.recency.append(block)

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True))
    def touch(self, blocks: list[int]) -> None:
        self.pool.touch(blocks, self.now)
        present = [b for b in reversed(blocks) if b in self.recency]
        self.recency = [b for b in self.recency if b not in present] + present

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "done", "failed", "abandoned"]))
    def fill_ends(self, data: st.DataObject, how: str) -> None:
        slot, parts = data.draw(st.sampled_from(self.fills))
        s = self.slots[slot]
        if how == "done":
            self.finish(slot, parts)
            return
        self.fills.remove((slot, parts))
        if how == "failed":
            self.pool.fill_failed(slot, parts)
            if not s.ready and not self.filling(slot):
                self.unmap(slot)
        else:
            self.pool.abandon(slot, parts)
            self.zombies.append((slot, parts))
            self.unmap(slot)

    def finish(self, slot: int, parts: int) -> None:
        self.fills.remove((slot, parts))
        s = self.slots[slot]
        self.pool.fill_done(slot, parts, self.now)
        self.serial += 1
        s.memory.update({part: ("whole", self.serial) for part in bits(parts)})
        s.ready |= bits(parts)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        slot, parts = data.draw(st.sampled_from(self.zombies))
        self.zombies.remove((slot, parts))
        self.scribble(slot, parts)  # its last write, just before it ends
        self.pool.settle(slot, parts)

    @rule(block=st.integers(0, BLOCKS - 1))
    def stage(self, block: int) -> None:
        """A whole block at once, so that histories have something to lease."""
        self.take(block, ALL)
        slot = self.mapped(block)
        for fill in [fill for fill in self.fills if fill[0] == slot]:
            self.finish(*fill)

    def readable(self) -> list[int]:
        return [i for i, s in enumerate(self.slots) if s.block is not None and s.ready]

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.readable()))
        s = self.slots[slot]
        self.pool.pin(slot)
        s.pins.append({part: s.memory[part] for part in s.ready})

    @precondition(lambda self: any(s.pins for s in self.slots))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([i for i, s in enumerate(self.slots) if s.pins]))
        s = self.slots[slot]
        found = s.pins.pop(data.draw(st.integers(0, len(s.pins) - 1)))
        assert found.items() <= s.memory.items()
        self.pool.unpin(slot)

    @precondition(lambda self: self.readable())
    @rule(data=st.data(), owner=st.integers(0, OWNERS - 1), ttl=st.sampled_from([None, 1.0, 3.0]))
    def lease(self, data: st.DataObject, owner: int, ttl: float | None) -> None:
        slot = data.draw(st.sampled_from(self.readable()))
        s = self.slots[slot]
        parts = data.draw(st.sets(st.sampled_from(sorted(s.ready)), min_size=1))
        expires = None if ttl is None else self.now + ttl
        number = self.pool.lease(slot, owner, sum(1 << part for part in parts), expires, self.now)
        assert number not in self.leases
        self.leases[number] = ModelLease(slot, owner, expires, {part: s.memory[part] for part in parts})

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.leases)[-6:]))
        lease = self.leases[number]
        assert self.pool.release(number) is lease.is_live
        self.double_release += not lease.is_live
        lease.is_live = False

    def expect_ended(self, ended: list[Ended], numbers: list[int]) -> None:
        assert sorted(x.lease for x in ended) == numbers
        for x in ended:
            lease = self.leases[x.lease]
            assert (x.owner, x.slot) == (lease.owner, lease.slot)
            assert x.is_in_use == (lease.transfers > 0 or lease.is_silent)

    def live_of(self, owner: int) -> list[int]:
        return [n for n, x in self.leases.items() if x.owner == owner and x.is_live]

    @rule(owner=st.integers(0, OWNERS - 1))
    def release_owner(self, owner: int) -> None:
        numbers = self.live_of(owner)
        for number in numbers:
            self.leases[number].is_live = False
        self.expect_ended(self.pool.release_owner(owner), numbers)

    @rule(owner=st.integers(0, OWNERS - 1))
    def quarantine_owner(self, owner: int) -> None:
        numbers = self.live_of(owner)
        for number in numbers:
            lease = self.leases[number]
            lease.is_silent = lease.expires is None
            lease.is_live = False
        self.expect_ended(self.pool.quarantine_owner(owner), numbers)

    @rule(owner=st.integers(0, OWNERS - 1))
    def settle_owner(self, owner: int) -> None:
        views = [x for x in self.leases.values() if x.owner == owner and x.is_silent]
        for view in views:
            view.is_silent = False
        assert sorted(self.pool.settle_owner(owner)) == sorted(x.slot for x in views)

    @rule(step=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule()
    def expire(self) -> None:
        due = [
            n for n, x in self.leases.items() if x.is_live and x.expires is not None and x.expires <= self.now
        ]
        for number in due:
            self.leases[number].is_live = False
        self.expect_ended(self.pool.expire(self.now), due)
        later = [x.expires for x in self.leases.values() if x.is_live and x.expires is not None]
        assert self.pool.next_expiry() == min(later, default=None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def begin_transfer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.leases)[-4:]))
        lease = self.leases[number]
        is_ok = lease.is_live and (lease.expires is None or self.now < lease.expires)
        assert self.pool.lease_ok(number, lease.slot, self.now) is is_ok
        assert not self.pool.lease_ok(number, lease.slot + 1, self.now)
        assert self.pool.begin_transfer(number, self.now) is is_ok
        lease.transfers += is_ok

    @precondition(lambda self: any(x.transfers for x in self.leases.values()))
    @rule(data=st.data())
    def end_transfer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, x in self.leases.items() if x.transfers]))
        self.leases[number].transfers -= 1
        self.pool.end_transfer(number)

    @rule(block=st.integers(0, BLOCKS - 1))
    def drop(self, block: int) -> None:
        slot = self.mapped(block)
        if slot is not None:
            self.unmap(slot)
        became = self.pool.drop(block)
        assert (None if became is None else became.name) == (
            None if slot is None else self.expected_state(slot)
        )

    # invariants

    @invariant()
    def readers_and_device_writes_see_what_they_saw_first(self) -> None:
        for slot, s in enumerate(self.slots):
            for seen in [*s.pins, *(x.seen for x in self.readers(slot))]:
                assert seen.items() <= s.memory.items()

    @invariant()
    def slots_are_as_the_model_says(self) -> None:
        for i, s in enumerate(self.slots):
            info = self.pool.slot_info(i)
            assert info.state.name == self.expected_state(i)
            assert (info.block, info.generation, info.pins) == (s.block, s.generation, len(s.pins))
            assert (info.filling_mask, info.abandoned_mask) == (self.filling(i), self.abandoned(i))
            if info.state is not SlotState.FREE:
                assert bits(info.ready_mask) == s.ready
            assert info.leases == sum(x.is_live for x in self.readers(i))
            assert info.unsettled == sum(not x.is_live for x in self.readers(i))
        assert {b: self.pool.find(b) for b in range(self.BLOCKS)} == {
            b: self.mapped(b) for b in range(self.BLOCKS)
        }

    @invariant()
    def slots_and_leases_are_conserved(self) -> None:
        self.pool.check_integrity()
        stats = self.pool.stats()
        in_states = stats.free + stats.filling + stats.ready + stats.leased + stats.doomed + stats.quarantined
        assert in_states == stats.total == self.SLOTS
        live = [x for x in self.leases.values() if x.is_live]
        assert stats.leases == len(live)
        assert stats.owners == len({x.owner for x in live})
        assert stats.transfers == sum(x.transfers for x in self.leases.values())
        assert (stats.double_release, stats.no_room) == (self.double_release, self.no_room)
        assert stats.evictions == self.evictions
        assert stats.evictable == sum(map(self.is_evictable, range(self.SLOTS)))

    def teardown(self) -> None:
        """Every owner ends, every operation ends: nothing may be left but free and evictable slots."""
        for owner in range(self.OWNERS):
            self.pool.release_owner(owner)
            self.pool.settle_owner(owner)
        for number, lease in self.leases.items():
            for _ in range(lease.transfers):
                self.pool.end_transfer(number)
        for slot, parts in self.fills:
            self.pool.fill_failed(slot, parts)
        for slot, parts in self.zombies:
            self.pool.settle(slot, parts)
        for slot, s in enumerate(self.slots):
            for _ in s.pins:
                self.pool.unpin(slot)
        stats = self.pool.stats()
        assert stats.free + stats.evictable == stats.total
        assert (stats.leases, stats.owners, stats.transfers, stats.pinned) == (0, 0, 0, 0)
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)


# --- the table of states in the docstring ---------------------------------------------------------


def table() -> set[tuple[str, str, str]]:
    rows = re.findall(r"^    (\w+) +(\w+) +-> ([\w ]+)$", staging.__doc__ or "", re.MULTILINE)
    return {(op, before, after) for op, before, afters in rows for after in afters.split()}


class Recorder:
    """Does random things to a pool; notes (operation, state before, state after) of the slots concerned."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = make_pool(2, 3)
        self.seen: set[tuple[str, str, str]] = set()
        self.reserved: list[int] = []
        self.leases: list[tuple[int, int]] = []  # (lease, slot) of all that ever were
        self.transfers: list[tuple[int, int]] = []

    def states(self) -> list[str]:
        return [state(self.pool, slot) for slot in range(2)]

    def slot_call(self, call: Callable[[int], object]) -> list[int]:
        slot = self.rng.randrange(2)
        call(slot)
        return [slot]

    def some_of(self, mask: int) -> int:
        return mask & self.rng.randint(1, ALL) or mask

    def filling_part(self, slot: int) -> int:
        return self.some_of(self.pool.slot_info(slot).filling_mask)

    def take(self) -> tuple[str, list[int]]:
        block = self.rng.randrange(4)
        taken = self.pool.take(block, self.rng.randint(1, ALL), 0.0)
        if taken is None:
            return "take", []
        return "take" if taken.evicted is None else "evict", [taken.slot]

    def reserve(self) -> tuple[str, list[int]]:
        taken = self.pool.reserve(0.0)
        if taken is None:
            return "reserve", []
        self.reserved.append(taken.slot)
        return "reserve", [taken.slot]

    def assign(self) -> tuple[str, list[int]]:
        slot = self.reserved.pop(self.rng.randrange(len(self.reserved)))
        self.pool.assign([slot], [self.rng.randrange(4)], 0.0)
        return "assign", [slot]

    def fill_done(self) -> tuple[str, list[int]]:
        return "fill_done", self.slot_call(lambda s: self.pool.fill_done(s, self.filling_part(s), 0.0))

    def fill_failed(self) -> tuple[str, list[int]]:
        return "fill_failed", self.slot_call(lambda s: self.pool.fill_failed(s, self.filling_part(s)))

    def abandon(self) -> tuple[str, list[int]]:
        return "abandon", self.slot_call(lambda s: self.pool.abandon(s, self.filling_part(s)))

    def settle(self) -> tuple[str, list[int]]:
        return "settle", self.slot_call(
            lambda s: self.pool.settle(s, self.some_of(self.pool.slot_info(s).abandoned_mask))
        )

    def pin(self) -> tuple[str, list[int]]:
        return "pin", self.slot_call(self.pool.pin)

    def unpin(self) -> tuple[str, list[int]]:
        return "unpin", self.slot_call(self.pool.unpin)

    def lease(self) -> tuple[str, list[int]]:
        expires, owner = self.rng.choice([None, 1.0]), self.rng.randrange(3)

        def call(slot: int) -> None:
            parts = self.some_of(self.pool.slot_info(slot).ready_mask)
            self.leases.append((self.pool.lease(slot, owner, parts, expires, 0.0), slot))

        return "lease", self.slot_call(call)

    def release(self) -> tuple[str, list[int]]:
        how = self.rng.choice([self.pool.release_owner, self.pool.quarantine_owner, self.pool.expire])
        return "release", sorted({x.slot for x in how(self.rng.randrange(3))})

    def begin_transfer(self) -> tuple[str, list[int]]:
        lease = self.rng.choice(self.leases[-6:])
        if self.pool.begin_transfer(lease[0], 0.0):
            self.transfers.append(lease)
        return "begin_transfer", []

    def end_transfer(self) -> tuple[str, list[int]]:
        number, slot = self.transfers.pop(self.rng.randrange(len(self.transfers)))
        self.pool.end_transfer(number)
        return "end_transfer", [slot]

    def settle_owner(self) -> tuple[str, list[int]]:
        return "settle_owner", sorted(set(self.pool.settle_owner(self.rng.randrange(3))))

    def drop(self) -> tuple[str, list[int]]:
        block = self.rng.randrange(4)
        slot = self.pool.find(block)
        self.pool.drop(block)
        return "drop", [] if slot is None else [slot]

    def step(self) -> None:
        ops = [
            self.take, self.take, self.reserve, self.assign, self.fill_done, self.fill_done, self.fill_failed, self.abandon, self.settle,
            self.pin, self.unpin, self.lease, self.lease, self.release, self.begin_transfer,
            self.end_transfer, self.end_transfer, self.settle_owner, self.drop,
        ]  # fmt: skip
        before = self.states()
        try:
            op, slots = self.rng.choice(ops)()
        except (ValueError, IndexError):  # refused in this state, or nothing to choose from
            assert self.states() == before
            return
        self.seen |= {(op, before[slot], state(self.pool, slot)) for slot in slots}


def test_the_docstrings_table_lists_exactly_the_transitions_that_happen() -> None:
    recorder = Recorder(seed=1)
    for _ in range(60_000):
        recorder.step()
    assert len(table()) > 50
    assert recorder.seen - table() == set(), "missing from the table"
    assert table() - recorder.seen == set(), "in the table, but never happens"


# --- blocks, slots, parts -------------------------------------------------------------------------


def test_taking_a_block_again_fills_only_what_is_missing() -> None:
    pool = make_pool()
    first = pool.take(7, 0b001, 0.0)
    assert first is not None
    assert first.to_fill == 0b001
    again = pool.take(7, 0b011, 0.0)
    assert again == (first.slot, first.generation, 0b010, None)
    pool.fill_done(first.slot, 0b001, 1.0)
    assert (pool.ready_parts(7), state(pool, first.slot)) == (0b001, "filling")
    pool.fill_done(first.slot, 0b010, 2.0)
    assert (pool.ready_parts(7), state(pool, first.slot)) == (0b011, "ready")
    assert pool.slot_info(first.slot).ready_at == 2.0
    assert pool.take(7, 0b011, 3.0) == (first.slot, first.generation, 0, None)


def test_a_slot_with_one_failed_part_keeps_its_others_and_goes_with_the_last() -> None:
    pool = make_pool()
    taken = pool.take(7, 0b111, 0.0)
    assert taken is not None
    pool.fill_done(taken.slot, 0b001, 0.0)
    pool.fill_failed(taken.slot, 0b110)
    assert pool.ready_parts(7) == 0b001
    other = pool.take(8, 0b111, 0.0)
    assert other is not None
    pool.fill_failed(other.slot, 0b011)
    assert state(pool, other.slot) == "filling"
    pool.fill_failed(other.slot, 0b100)
    assert (pool.find(8), state(pool, other.slot)) == (None, "free")


def test_reused_slot_has_a_new_generation() -> None:
    pool = make_pool(num_slots=1)
    stage(pool, 1)
    taken = pool.take(2, ALL, 0.0)
    assert taken == (0, 2, ALL, 1)
    assert pool.find(1) is None
    assert pool.ready_parts(2) == 0


def test_no_room_is_an_answer_and_is_counted() -> None:
    pool = make_pool(num_slots=2)
    pool.lease(stage(pool, 1), 9, ALL, None, 0.0)
    pool.pin(stage(pool, 2))
    assert pool.take(3, ALL, 0.0) is None
    assert pool.take_many([3, 4, 5], ALL, 0.0) == []
    assert pool.stats().no_room == 4


def test_take_many_trims_the_suffix_and_evicts_no_block_of_its_own_batch() -> None:
    pool = make_pool(num_slots=4)
    for block in (1, 2, 8, 9):
        stage(pool, block)
    taken = pool.take_many([1, 2, 3, 4, 5, 6], ALL, 0.0)
    assert [t.evicted for t in taken] == [None, None, 8, 9]
    assert [t.to_fill for t in taken] == [0, 0, ALL, ALL]
    assert pool.stats().no_room == 2
    assert pool.stats().pinned == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_heads_of_a_staged_prefix_outlive_its_tails(policy: str) -> None:
    pool = make_pool(num_slots=6, policy=policy)
    for taken in pool.take_many(range(6), ALL, 0.0):
        pool.fill_done(taken.slot, ALL, 0.0)
    evicted = [one.evicted for one in pool.take_many(range(10, 14), ALL, 0.0)]
    assert evicted == [5, 4, 3, 2]


def test_touching_a_prefix_makes_its_tail_the_first_to_go() -> None:
    pool = make_pool(num_slots=4)
    for block in (1, 2, 3, 4):
        stage(pool, block)
    pool.touch([1, 2, 3], 0.0)
    assert [t.evicted for t in pool.take_many([10, 11, 12, 13], ALL, 0.0)] == [4, 3, 2, 1]


def test_protected_blocks_go_last() -> None:
    pool = make_pool(num_slots=3)
    for block in (1, 2, 3):
        stage(pool, block)
    evicted = [pool.take(block, ALL, 0.0, protect={1, 2}.__contains__) for block in (10, 11)]
    assert [t and t.evicted for t in evicted] == [3, 1]


def test_pins_count_and_keep_a_dirty_slot() -> None:
    pool = make_pool(num_slots=1)
    slot = stage(pool, 1)
    pool.pin(slot)
    pool.pin(slot)
    pool.unpin(slot)
    assert pool.take(2, ALL, 0.0) is None
    assert pool.drop(1) is SlotState.DOOMED
    pool.unpin(slot)
    assert state(pool, slot) == "free"


# --- giving up, dropping --------------------------------------------------------------------------


def test_abandoned_slot_is_unreachable_at_once_and_reused_only_when_settled() -> None:
    pool = make_pool(num_slots=1)
    taken = pool.take(1, ALL, 0.0)
    assert taken is not None
    pool.abandon(taken.slot)
    assert pool.find(1) is None
    assert pool.take(1, ALL, 0.0) is None
    pool.settle(taken.slot)
    assert pool.take(1, ALL, 0.0) == (0, 2, ALL, None)


def test_lease_on_ready_parts_survives_an_abandoned_fill_of_others() -> None:
    pool = make_pool(num_slots=1)
    slot = stage(pool, 1, 0b001)
    lease = pool.lease(slot, 9, 0b001, None, 0.0)
    pool.take(1, 0b110, 0.0)
    pool.abandon(slot, 0b010)
    pool.fill_done(slot, 0b100, 0.0)  # another operation on the slot ends as usual
    assert pool.lease_ok(lease, slot, 0.0)
    pool.settle(slot)
    assert state(pool, slot) == "doomed"
    assert pool.release(lease)
    assert state(pool, slot) == "free"


def test_dropped_block_is_unreachable_at_once_and_its_reader_drains() -> None:
    pool = make_pool()
    slot = stage(pool, 1)
    lease = pool.lease(slot, 9, ALL, 5.0, 0.0)
    assert pool.drop(1) is SlotState.DOOMED
    assert pool.find(1) is None
    assert pool.lease_ok(lease, slot, 1.0)
    with pytest.raises(ValueError, match="not ready"):
        pool.lease(slot, 9, ALL, 5.0, 0.0)
    assert stage(pool, 1) != slot
    assert [x.lease for x in pool.expire(5.0)] == [lease]
    assert state(pool, slot) == "free"
    assert pool.drop(77) is None


def test_policy_remembers_what_it_evicted_but_not_what_was_dropped() -> None:
    gone: list[tuple[int, bool]] = []

    class Remembering(Lru):
        def remove(self, block: int, *, evicted: bool) -> None:
            super().remove(block, evicted=evicted)
            gone.append((block, evicted))

    pool = StagingPool(1, 3, Remembering(1))
    stage(pool, 1)
    stage(pool, 2)
    pool.drop(2)
    pool.take(3, ALL, 0.0)
    pool.fill_failed(0, ALL)
    assert gone == [(1, True), (2, False), (3, False)]


# --- leases ---------------------------------------------------------------------------------------


def test_second_release_is_a_counted_no_op() -> None:
    pool = make_pool()
    first, second = pool.lease_many([stage(pool, 1)] * 2, 9, ALL, None, 0.0)
    assert pool.release(first)
    assert not pool.release(first)
    assert pool.stats().double_release == 1
    assert pool.lease_ok(second, 0, 0.0)
    assert pool.release_many([first, second, 12345]) == 1
    assert pool.stats().double_release == 3


def test_owner_end_frees_all_it_holds_and_nothing_else() -> None:
    pool = make_pool()
    a, b = stage(pool, 1), stage(pool, 2)
    mine = [*pool.lease_many([a, b], 9, ALL, None, 0.0), pool.lease(a, 9, 0b1, 3.0, 0.0)]
    others = pool.lease(b, 8, ALL, None, 0.0)
    ended = pool.release_owner(9)
    assert ended == [Ended(n, 9, slot, False) for n, slot in zip(mine, (a, b, a), strict=True)]
    assert (state(pool, a), state(pool, b)) == ("ready", "leased")
    assert pool.release_owner(9) == []
    assert pool.lease_ok(others, b, 0.0)


def test_lease_info_tells_whose_a_live_lease_is_and_nothing_of_an_ended_one() -> None:
    pool = make_pool()
    stage(pool, 1)
    lease = pool.lease(stage(pool, 2), 9, ALL, None, 0.0)
    assert pool.lease_info(lease) == (9, 1)
    pool.release_owner(9)
    assert pool.lease_info(lease) is None


def test_views_do_not_expire() -> None:
    pool = make_pool()
    view = pool.lease(stage(pool, 1), 9, ALL, None, 0.0)
    assert pool.next_expiry() is None
    assert pool.expire(1e12) == []
    assert pool.lease_ok(view, 0, 1e12)


def test_expired_lease_is_refused_before_and_after_the_sweep() -> None:
    pool = make_pool()
    lease = pool.lease(stage(pool, 1), 9, ALL, 2.0, 0.0)
    assert pool.lease_ok(lease, 0, 1.99)
    assert not pool.lease_ok(lease, 0, 2.0)
    assert not pool.begin_transfer(lease, 2.0)
    assert pool.expire(1.99) == []
    assert pool.expire(2.0) == [Ended(lease, 9, 0, False)]
    assert not pool.release(lease)
    assert pool.stats().expired == 1


@pytest.mark.parametrize("end", ["release", "owner", "expiry"])
def test_slot_of_an_ended_lease_stays_until_its_transfer_ends(end: str) -> None:
    pool = make_pool(num_slots=1)
    lease = pool.lease(stage(pool, 1), 9, ALL, 2.0, 0.0)
    assert pool.begin_transfer(lease, 0.0)
    if end == "release":
        assert pool.release(lease)
    else:
        ended = pool.release_owner(9) if end == "owner" else pool.expire(2.0)
        assert ended == [Ended(lease, 9, 0, True)]
    assert state(pool, 0) == "quarantined"
    assert pool.take(2, ALL, 2.0) is None
    assert pool.find(1) == 0  # its content is intact: others may read it
    pool.end_transfer(lease)
    assert state(pool, 0) == "ready"
    with pytest.raises(ValueError, match="no transfer"):
        pool.end_transfer(lease)


def test_views_of_a_silent_client_stay_untouched_until_it_is_settled() -> None:
    pool = make_pool(num_slots=2)
    view = pool.lease(stage(pool, 1), 9, ALL, None, 0.0)
    pull = pool.lease(stage(pool, 2), 9, ALL, 5.0, 0.0)
    assert pool.quarantine_owner(9) == [Ended(view, 9, 0, True), Ended(pull, 9, 1, False)]
    assert not pool.lease_ok(view, 0, 0.0)
    assert [state(pool, slot) for slot in (0, 1)] == ["quarantined", "ready"]
    assert pool.drop(1) is SlotState.QUARANTINED
    assert pool.settle_owner(9) == [0]
    assert state(pool, 0) == "free"
    assert pool.settle_owner(9) == []


def test_a_hundred_thousand_cancelled_requests_leave_nothing_behind() -> None:
    pool, rng = make_pool(num_slots=64, num_parts=4), random.Random(3)
    for scope in range(100_000):
        block = rng.randrange(200)
        lease = pool.lease(stage(pool, block, 0b1111), scope, 0b1111, scope + 50.0, float(scope))
        if scope % 7 == 0:
            pool.begin_transfer(lease, float(scope))
        assert len(pool.release_owner(scope)) == 1
        if scope % 7 == 0:
            pool.end_transfer(lease)
    stats = pool.stats()
    assert (stats.leases, stats.owners, stats.transfers, stats.quarantined, stats.no_room) == (0, 0, 0, 0, 0)
    assert stats.evictable == 64
    assert pool.next_expiry() is None
    pool.check_integrity()


def test_expiry_records_of_ended_leases_do_not_pile_up() -> None:
    pool = make_pool()
    slot = stage(pool, 1)
    keep = pool.lease(slot, 1, ALL, 500.0, 0.0)
    for _ in range(10_000):
        pool.release(pool.lease(slot, 2, ALL, 1_000.0, 0.0))
    assert len(pool._expiries) < 200
    assert pool.next_expiry() == 500.0
    assert [x.lease for x in pool.expire(1_000.0)] == [keep]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda pool: pool.take(1, 0, 0.0), "not among"),
        (lambda pool: pool.take(1, 0b1000, 0.0), "not among"),
        (lambda pool: pool.take_many([1], -1, 0.0), "not among"),
        (lambda pool: pool.fill_done(0, 0b010, 0.0), "not being filled"),
        (lambda pool: pool.fill_done(0, 0, 0.0), "not being filled"),
        (lambda pool: pool.fill_failed(1, 0b001), "not being filled"),
        (lambda pool: pool.abandon(1), "not being filled"),
        (lambda pool: pool.settle(0), "not abandoned"),
        (lambda pool: pool.pin(0), "nothing to pin"),
        (lambda pool: pool.unpin(1), "not pinned"),
        (lambda pool: pool.lease(0, 9, 0b001, None, 0.0), "not ready"),
        (lambda pool: pool.lease(1, 9, 0, None, 0.0), "not ready"),
        (lambda pool: pool.lease(1, 9, ALL, 1.0, 1.0), "is over"),
        (lambda pool: pool.slot_info(4), "no slot 4"),
        (lambda pool: pool.pin(-1), "no slot -1"),
        (lambda pool: pool.end_transfer(1), "no transfer"),
    ],
)
def test_what_a_caller_gets_wrong_is_refused_and_changes_nothing(
    call: Callable[[StagingPool], object], match: str
) -> None:
    pool = make_pool()
    pool.take(1, 0b101, 0.0)  # slot 0: filling
    stage(pool, 2)  # slot 1: ready
    before = pool.stats()
    with pytest.raises(ValueError, match=match):
        call(pool)
    assert pool.stats() == before
    pool.check_integrity()


def test_senseless_pools_are_refused() -> None:
    for slots, parts in [(0, 1), (1, 0), (1, 129)]:
        with pytest.raises(ValueError, match="must be"):
            StagingPool(slots, parts, Lru(1))
    used = Lru(1)
    used.insert(1, 0.0)
    with pytest.raises(ValueError, match="own"):
        StagingPool(1, 1, used)
