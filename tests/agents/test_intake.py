"""The intake: single flight, parents in flight elsewhere, checks on a copy, back-pressure, and commits given up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from dpurt.agents import intake as intake_module
from dpurt.agents.intake import RESERVATION_S
from dpurt.bdev.memory import MemoryBdev
from dpurt.bdev.modelled import ModelledBdev
from dpurt.core.device_model import DeviceProfile
from dpurt.testing.agents import Agents, capacity, running_agents, small_space
from dpurt.testing.faulty_bdev import Fault, FaultyBdev
from dpurt.testing.node_steps import PAYLOAD, payload, push_out, tokens
from dpurt.wire import messages as m

SLOW = DeviceProfile(
    name="slow", read_latency_s=0.0, write_latency_s=1.0, read_bytes_per_s=1e15, write_bytes_per_s=1e15, jitter=0.0
)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["cells", "slots"], autouse=True)
def has_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the hosts are on a fabric that lands stores."""
    monkeypatch.setitem(HOSTS, "has_slots", request.param)
    return bool(request.param)


HOSTS = {"has_slots": False}


@asynccontextmanager
async def agents_in_memory(num_slots: int = 16, num_shards: int = 1) -> AsyncIterator[Agents]:
    bdev = MemoryBdev(capacity(16))
    async with running_agents(bdev, num_slots=num_slots, num_shards=num_shards, **HOSTS) as agents:
        yield agents


def words(reservations: list[m.Reservation]) -> list[str]:
    return [one.status for one in reservations]


# --- reservations ---


async def test_a_block_is_reserved_by_one_and_in_flight_to_all_others() -> None:
    async with agents_in_memory() as agents:
        mine = agents.reserve(0, 1)
        assert words(mine) == ["reserved", "reserved"]
        assert words(agents.reserve(0, 1, 2, session=2, owner=2)) == ["in_flight", "in_flight", "reserved"]
        assert words(agents.reserve(0, 1)) == ["in_flight", "in_flight"]
        assert await agents.commit(agents.write(mine, [0, 1])) == ["stored", "stored"]
        assert words(agents.reserve(0, 1, session=2, owner=2)) == ["exists", "exists"]


@pytest.mark.parametrize("how", ["scope", "session", "time"])
async def test_a_reservation_that_ends_uncommitted_is_free_for_others(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with agents_in_memory() as agents:
        commits = agents.write(agents.reserve(0, 1), [0, 1])
        if how == "scope":
            assert agents.intake.end_scope(1) == 2
        elif how == "session":
            agents.intake.close_session(1)
        else:
            await trio.sleep(RESERVATION_S + 1)
            agents.intake.expire(trio.current_time())
            assert agents.intake.expired == 2
        assert words(agents.reserve(0, 1, session=2, owner=2)) == ["reserved", "reserved"]
        assert await agents.commit(commits) == ["unknown", "unknown"]
        assert agents.intake.num_reserved == 2


async def test_a_host_without_free_cells_gets_no_room_for_the_suffix() -> None:
    async with agents_in_memory() as agents:
        agents.open_host(3, cells=2)
        assert words(agents.reserve(0, 1, 2, 3, session=3)) == ["reserved", "reserved", "no_room", "no_room"]
        agents.intake.end_scope(1)
        assert words(agents.reserve(0, 1, session=3)) == ["reserved", "reserved"]
        agents.intake.close_session(3)


async def test_only_the_reserving_session_writes_and_only_its_cell() -> None:
    async with agents_in_memory() as agents:
        [room] = agents.reserve(0)
        may = agents.intake.begin_store
        assert not may(2, room.region, room.offset, 10, room.reservation)
        assert not may(1, room.region + 1, room.offset, 10, room.reservation)
        assert not may(1, room.region, room.offset, PAYLOAD + 1, room.reservation)
        assert not may(1, room.region, room.offset + PAYLOAD, 10, room.reservation)
        assert not may(1, room.region, room.offset, 10, room.reservation + 1)
        assert may(1, room.region, room.offset, PAYLOAD, room.reservation)
        agents.intake.end_scope(1)
        assert agents.intake.num_reserved == 1, "the cell stays taken while the transfer runs"
        agents.intake.end_store(room.reservation)
        assert agents.intake.num_reserved == 0


# --- reservations that are slots ---


async def test_bytes_land_in_the_slot_itself_and_are_there_for_readers(has_slots: bool) -> None:
    async with agents_in_memory() as agents:
        rooms = agents.reserve(0, 1, 2)
        assert {room.region == agents.region.region_id for room in rooms} == {has_slots}
        assert await agents.commit(agents.write(rooms, [0, 1, 2])) == ["stored"] * 3
        assert agents.intake.landed == (3 if has_slots else 0)
        acquired = await agents.acquire(0, 1, 2)
        assert all(agents.holds(one, block) for block, one in enumerate(acquired))
        if has_slots:
            assert [agents.state.payload_at(one.slot) for one in acquired] == [room.offset for room in rooms]


async def test_nothing_is_written_into_a_slot_once_its_commit_began() -> None:
    async with agents_in_memory() as agents:
        [room] = agents.reserve(0)
        assert await agents.commit(agents.write([room], [0])) == ["stored"]
        assert not agents.intake.begin_store(1, room.region, room.offset, PAYLOAD, room.reservation)


async def test_a_commit_is_refused_while_its_slot_is_written_and_the_slot_waits_for_the_writer(
    has_slots: bool,
) -> None:
    async with agents_in_memory() as agents:
        [room] = agents.reserve(0)
        commits = agents.write([room], [0])
        assert agents.intake.begin_store(1, room.region, room.offset, PAYLOAD, room.reservation)
        assert await agents.commit(commits) == ["checksum" if has_slots else "stored"]
        await agents.until_written()
        assert agents.pool.stats().doomed == has_slots
        agents.intake.end_store(room.reservation)
        agents.assert_nothing_held()


async def test_reservations_take_a_quarter_of_staging_at_most_and_are_cells_beyond() -> None:
    async with agents_in_memory(num_slots=8) as agents:
        agents.open_host(3, has_slots=True)
        rooms = agents.reserve(*range(6), session=3, owner=3)
        is_slot = [room.region == agents.region.region_id for room in rooms]
        assert is_slot == [True, True, False, False, False, False]
        assert await agents.commit(agents.write(rooms, range(6), session=3), session=3) == ["stored"] * 6
        await agents.until_written()
        again = agents.reserve(0, 9, session=3, owner=3)
        assert again[1].region == agents.region.region_id, "slots that were committed count no more"
        agents.intake.end_scope(3)
        agents.intake.close_session(3)
        agents.assert_nothing_held()


async def test_no_block_is_evicted_for_a_reservation_while_another_is_free() -> None:
    async with agents_in_memory(num_slots=4) as agents:
        agents.open_host(3, has_slots=True)
        assert await agents.store(0, 1) == ["stored"] * 2
        await agents.until_written()
        agents.reserve(9, session=3, owner=3)
        assert agents.pool.stats().evictions == 0
        agents.intake.end_scope(3)
        agents.intake.close_session(3)


# --- commits ---


async def test_a_commit_whose_parent_another_host_is_storing_waits_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with agents_in_memory() as agents:
        parents = agents.write(agents.reserve(0, 1), [0, 1])
        rooms = agents.reserve(0, 1, 2, 3, session=2, owner=2)
        children = agents.write(rooms[2:], [2, 3], session=2)
        sibling = agents.write(agents.reserve(0, 1, 9, session=2, owner=2)[2:], [9], session=2)
        statuses: list[str] = []

        async def commit_later(blocks: list[m.CommitBlock]) -> None:
            statuses.extend(await agents.commit(blocks, session=2))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit_later, children)
            nursery.start_soon(commit_later, sibling)
            await trio.sleep(5)
            assert statuses == []
            assert await agents.commit(parents) == ["stored"] * 2
        assert statuses == ["stored"] * 3
        assert len(agents.handles(0, 1, 2, 3)) == 4
        assert len(agents.handles(0, 1, 9)) == 3


async def test_a_parent_that_is_given_up_makes_its_children_orphans(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with agents_in_memory() as agents:
        agents.reserve(0)
        children = agents.write(agents.reserve(0, 1, session=2, owner=2)[1:], [1], session=2)
        async with trio.open_nursery() as nursery:

            async def commit_child() -> None:
                assert await agents.commit(children, session=2) == ["orphan"]

            nursery.start_soon(commit_child)
            await trio.sleep(1)
            agents.intake.end_scope(1)
        agents.assert_nothing_held()


async def test_commits_that_hold_each_others_parents_do_not_wait_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with agents_in_memory() as agents:
        middle = agents.write(agents.reserve(0, 1, 2, session=2, owner=2, first=1), [1, 2], session=2)
        rooms = agents.reserve(0, 1, 2, 3)
        assert words(rooms) == ["reserved", "in_flight", "in_flight", "reserved"]
        ends = agents.write(rooms, [0, 1, 2, 3])
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for commits, session in ((middle, 2), (ends, 1)):
                nursery.start_soon(all_stored, agents, commits, session)
        assert trio.current_time() == began
        assert len(agents.handles(0, 1, 2, 3)) == 4


async def all_stored(agents: Agents, commits: list[m.CommitBlock], session: int) -> None:
    assert await agents.commit(commits, session) == ["stored"] * len(commits)


async def test_a_reservation_committed_twice_is_stored_once() -> None:
    async with agents_in_memory() as agents:
        [commit] = agents.write(agents.reserve(0), [0])
        assert sorted(await agents.commit([commit, commit])) == ["stored", "unknown"]
        assert await agents.commit([commit]) == ["unknown"]
        await agents.until_written()
        agents.assert_nothing_held()


@pytest.mark.parametrize("crcs", [[1, 2, 3, 4], [1], [1] * 128])
async def test_bytes_that_do_not_check_are_refused_with_all_that_follows_them(crcs: list[int]) -> None:
    async with agents_in_memory() as agents:
        commits = agents.write(agents.reserve(0, 1, 2), [0, 1, 2])
        commits[1].crcs = crcs
        assert await agents.commit(commits) == ["stored", "checksum", "orphan"]
        await agents.until_written()
        assert len(agents.state.index) == 1, "no record of what was not stored"
        agents.assert_nothing_held()


async def test_what_a_host_writes_after_its_commit_is_not_what_is_stored() -> None:
    async with agents_in_memory() as agents:
        [room] = agents.reserve(0)
        assert await agents.commit(agents.write([room], [0])) == ["stored"]
        agents.inbound[1].view[room.offset : room.offset + PAYLOAD] = bytes(PAYLOAD)
        [one] = await agents.acquire(0)
        assert agents.holds(one, 0)


async def test_a_commit_longer_than_what_may_be_dirty_waits_for_the_device_in_pieces(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(ModelledBdev(capacity(16), profile=SLOW), num_slots=4, **HOSTS) as agents:
        began = trio.current_time()
        assert await agents.store(*range(10)) == ["stored"] * 10
        assert trio.current_time() - began >= 4.0, "two at a time may wait for the device"
        await agents.until_written()
        acquired = await agents.acquire(*range(3))
        assert all(agents.holds(one, block) for block, one in enumerate(acquired))


async def test_at_its_deadline_a_commit_says_no_room_for_what_the_device_held_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(ModelledBdev(capacity(16), profile=SLOW), num_slots=4, **HOSTS) as agents:
        commits = agents.write(agents.reserve(*range(6)), list(range(6)))
        statuses = await agents.commit(commits, timeout_s=0.5)
        assert statuses[:2] == ["stored"] * 2
        assert set(statuses[2:]) <= {"no_room", "orphan"}
        await agents.until_written()
        assert len(agents.state.index) == 2
        agents.assert_nothing_held()


async def test_a_commit_of_a_retired_epoch_is_stale() -> None:
    async with agents_in_memory() as agents:
        commits = agents.write(agents.reserve(0), [0])
        agents.add_epoch(small_space(epoch=1))
        assert await agents.commit(commits) == ["stale_epoch"]
        agents.assert_nothing_held()


async def test_one_shard_that_fails_leaves_the_other_alone() -> None:
    async with agents_in_memory(num_shards=2) as agents:
        assert await agents.store(0, shard=0) == ["stored"]
        [commit] = agents.write(agents.reserve(0, session=2, owner=2, shard=1), [0], session=2)
        commit.crcs = [0, 0, 0, 0]
        assert await agents.commit([commit], session=2) == ["checksum"]
        assert [one.status for one in await agents.acquire(0, shard=0)] == ["ok"]
        assert await agents.store(0, session=2, shard=1) == ["stored"]


# --- giving up ---


class _CancelAtStep(trio.abc.Instrument):
    """Cancels a scope when its task has been stepped so often: at each await in turn."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if not self.left:
                self.scope.cancel()


async def cancelled_at(step: int, function: Callable[[], Awaitable[object]]) -> bool:
    """Run it, cancelled at its `step`-th await; False when it ended before."""
    instrument = _CancelAtStep(step)
    instrument.task = trio.lowlevel.current_task()
    trio.lowlevel.add_instrument(instrument)
    try:
        with instrument.scope:
            await function()
            return False
        return True
    finally:
        trio.lowlevel.remove_instrument(instrument)


async def test_a_commit_cancelled_at_any_await_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "OFF_LOOP_BYTES", 0)
    step, was_cancelled = 0, True
    while was_cancelled:
        step += 1
        async with agents_in_memory(num_slots=4) as agents:
            parent = agents.write(agents.reserve(0), [0])
            rooms = agents.reserve(0, 1, 2, 3, 4, 5, session=2, owner=2)
            children = agents.write(rooms[1:], [1, 2, 3, 4, 5], session=2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(agents.commit, parent)
                was_cancelled = await cancelled_at(step, lambda: agents.commit(children, 2))  # noqa: B023
            await agents.until_written()
            agents.assert_nothing_held()
            known = agents.handles(0, 1, 2, 3, 4, 5)
            assert len(agents.state.index) == len(known), "what is known is a chain from its start"
            for block, one in enumerate(await agents.acquire(*range(len(known)))):
                assert one.status != "ok" or agents.holds(one, block)
            assert words(agents.reserve(0, 1)) == ["exists"] + (
                ["exists"] if len(known) > 1 else ["reserved"]
            )
    assert step > 3
    assert payload(0) != payload(1)


async def test_a_scope_that_ends_during_a_commit_does_not_take_its_cells_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "OFF_LOOP_BYTES", 0)
    async with agents_in_memory() as agents:
        commits = agents.write(agents.reserve(0, 1), [0, 1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(all_stored, agents, commits, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert agents.intake.end_scope(1) == 0
            assert words(agents.reserve(0, 1, session=2, owner=2))[0] in ("in_flight", "exists")
        await agents.until_written()
        agents.assert_nothing_held()


async def test_a_host_that_goes_during_a_commit_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "OFF_LOOP_BYTES", 0)
    async with agents_in_memory() as agents:
        commits = agents.write(agents.reserve(0, 1), [0, 1])
        async with trio.open_nursery() as nursery:

            async def commit() -> None:
                assert set(await agents.commit(commits)) <= {"stored", "checksum", "orphan"}

            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            agents.intake.close_session(1)
        await agents.until_written()
        agents.assert_nothing_held()


async def test_one_commit_of_two_ranks_stores_each_under_its_own() -> None:
    async with agents_in_memory(num_shards=2) as agents:
        commits: list[m.CommitBlock] = []
        for shard in (0, 1):
            rooms = agents.reserve(0, 1, 2, shard=shard)
            commits += agents.write(rooms, [10 * shard, 10 * shard + 1, 10 * shard + 2])
        mixed = [commits[i] for i in (0, 3, 1, 4, 2, 5)]
        assert await agents.commit(mixed) == ["stored"] * 6
        ids = agents.index.match(agents.state, tokens(0, 1, 2), None)
        assert len(ids) == 3
        for shard in (0, 1):
            for number, block_id in enumerate(ids.tolist()):
                slot = agents.state.slot_of(block_id, shard)
                assert bytes(agents.state.payload(slot)) == payload(10 * shard + number)


async def test_a_commit_that_costs_its_own_block_another_shards_only_copy_does_not_say_stored(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, num_slots=1, num_shards=3) as agents:
        assert await agents.store(1, shard=1) == ["stored"]
        await agents.until_written()
        push_out(agents.staging)
        bdev.inject(Fault(op="write", kind="error"))
        assert await agents.store(1, shard=0) == ["stored"]
        await agents.until_written()
        assert await agents.store(1, shard=2) == ["no_room"]
        assert not agents.handles(1)
        assert agents.index.drops == {"evicted": 1}
        agents.assert_nothing_held()
        assert await agents.store(2) == ["stored"]
        await agents.until_written()
        agents.assert_nothing_held()
