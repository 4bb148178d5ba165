"""The staging agent: single flight, parts, room, deadlines, leases, and what is left when a load is given up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import pytest
import trio
import trio.testing

from dpurt.agents.spaces import MAX_NUMBER, Slab, SpaceState
from dpurt.agents.staging import Acquired
from dpurt.bdev.memory import MemoryBdev
from dpurt.bdev.modelled import ModelledBdev
from dpurt.core.device_model import DeviceProfile
from dpurt.core.events import Demanded, Evicted, FetchFailed, Staged
from dpurt.core.identity import ROOT_KEY
from dpurt.core.prefix_index import PrefixIndex
from dpurt.core.record import RecordLayout
from dpurt.testing.agents import Agents, capacity, running_agents, small_space
from dpurt.testing.faulty_bdev import Fault, FaultyBdev
from dpurt.testing.node_steps import RECORD, assert_slots_agree, push_out

READ_S = 0.5
FLASH = DeviceProfile(
    name="slow", read_latency_s=READ_S, write_latency_s=0.0, read_bytes_per_s=1e15, write_bytes_per_s=1e15, jitter=0.0
)  # fmt: skip


@asynccontextmanager
async def slow_agents(num_slots: int = 16, workers: int = 16) -> AsyncIterator[Agents]:
    """Every read takes half a (virtual) second."""
    bdev = ModelledBdev(capacity(24), profile=FLASH)
    async with running_agents(bdev, num_slots=num_slots, workers=workers) as agents:
        yield agents


def answers(acquired: list[Acquired]) -> list[tuple[str, str]]:
    return [(one.status, one.source) for one in acquired]


# --- loads ---


async def test_staged_blocks_are_leased_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with slow_agents() as agents:
        await agents.store(0, 1)
        began = trio.current_time()
        acquired = await agents.acquire(0, 1)
        assert trio.current_time() == began
        assert answers(acquired) == [("ok", "staging")] * 2
        assert agents.holds(acquired[0], 0)
        assert agents.staging.end_scope(1, host_may_read=False) == 2


async def test_blocks_on_flash_take_one_read_time_all_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents() as agents:
        await agents.store_to_flash(*range(6))
        began = trio.current_time()
        acquired = await agents.acquire(*range(6))
        assert trio.current_time() - began == pytest.approx(READ_S)
        assert answers(acquired) == [("ok", "nvme")] * 6
        assert all(agents.holds(one, block) for block, one in enumerate(acquired))
        assert agents.staging.end_scope(1, host_may_read=False) == 6
        agents.assert_nothing_held()


async def test_loads_of_one_block_share_one_read(autojump_clock: trio.testing.MockClock) -> None:
    async with slow_agents() as agents:
        await agents.store_to_flash(0)
        before = agents.storage.store.stores[0].stats().reads
        results: list[list[Acquired]] = []

        async def one() -> None:
            results.append(await agents.acquire(0))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for delay in (0.0, 0.1, 0.3):
                nursery.start_soon(one)
                await trio.sleep(delay)
        assert trio.current_time() - began == pytest.approx(READ_S)
        assert [answers(result) for result in results] == [[("ok", "nvme")]] * 3
        assert agents.storage.store.stores[0].stats().reads == before + 1
        assert len({result[0].lease for result in results}) == 3
        wheres = [event.where for event in agents.events if isinstance(event, Demanded)]
        assert wheres == ["nvme", "in_flight", "in_flight"]


async def test_a_flight_that_brings_other_parts_is_followed_by_one_for_ours(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents() as agents:
        await agents.store_to_flash(0)
        done: dict[int, float] = {}
        began = trio.current_time()

        async def one(mask: int) -> None:
            assert answers(await agents.acquire(0, mask=mask)) == [("ok", "nvme")]
            done[mask] = trio.current_time() - began

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 0b0001)
            await trio.sleep(0.1)
            nursery.start_soon(one, 0b0110)
            nursery.start_soon(one, 0b0001)
        assert done == {0b0001: pytest.approx(READ_S), 0b0110: pytest.approx(2 * READ_S)}
        assert agents.pool.ready_parts(agents.refs(0)[0]) == 0b0111


async def test_blocks_not_there_by_the_deadline_are_late_and_land_for_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents() as agents:
        await agents.store_to_flash(0, 1)
        await agents.acquire(0)
        began = trio.current_time()
        acquired = await agents.acquire(0, 1, timeout_s=0.2)
        assert trio.current_time() - began == pytest.approx(0.2)
        assert answers(acquired) == [("ok", "staging"), ("late", "")]
        await trio.sleep(READ_S)
        assert answers(await agents.acquire(0, 1)) == [("ok", "staging")] * 2


async def test_no_room_is_said_of_exactly_the_suffix_that_found_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents(num_slots=6) as agents:
        await agents.store_to_flash(*range(8))
        assert answers(await agents.acquire(*range(2), owner=2)) == [("ok", "nvme")] * 2
        acquired = await agents.acquire(*range(8))
        assert answers(acquired) == ([("ok", "staging")] * 2 + [("ok", "nvme")] * 4 + [("no_room", "")] * 2)
        agents.staging.end_scope(1, host_may_read=False)
        acquired = await agents.acquire(*range(8), owner=2)
        assert [one.status for one in acquired] == ["ok"] * 6 + ["no_room"] * 2


async def test_a_load_never_evicts_a_block_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    async with slow_agents(num_slots=4) as agents:
        await agents.store_to_flash(*range(6))
        await agents.acquire(0, 1, 2, 3, owner=2)
        agents.staging.release([one.lease for one in await agents.acquire(0, 1, 2, 3, owner=2)], 2)
        agents.staging.end_scope(2, host_may_read=False)
        acquired = await agents.acquire(*range(6))
        assert answers(acquired) == [("ok", "staging")] * 4 + [("no_room", "")] * 2
        assert not any(isinstance(event, Evicted) for event in agents.events[-8:])


async def test_a_dropped_block_is_a_miss_for_those_who_wait_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents() as agents:
        await agents.store_to_flash(0, 1)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                acquired = await agents.acquire(0, 1)
                assert answers(acquired) == [("ok", "nvme"), ("miss", "")]

            nursery.start_soon(wait)
            await trio.sleep(0.1)
            state = agents.state
            agents.index.drop(state, state.block_id(agents.handles(0, 1)[1]), "lost", trio.current_time())
        agents.staging.end_scope(1, host_may_read=False)
        agents.assert_nothing_held()


# --- failing devices ---


async def test_a_bad_record_is_dropped_with_its_descendants() -> None:
    bdev = MemoryBdev(capacity(8))
    async with running_agents(bdev) as agents:
        await agents.store_to_flash(0, 1, 2)
        state = agents.state
        bdev.image[state.extent_of(state.block_id(agents.handles(0, 1)[1]), 0) + 4096] ^= 1
        acquired = await agents.acquire(0, 1, 2)
        assert [one.status for one in acquired][:2] == ["ok", "checksum"]
        assert len(agents.handles(0, 1, 2)) == 1
        assert agents.index.drops == {"checksum": 2}
        agents.staging.end_scope(1, host_may_read=False)
        agents.assert_nothing_held()


async def test_a_read_error_is_reported_and_the_block_stays(autojump_clock: trio.testing.MockClock) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev) as agents:
        await agents.store_to_flash(0)
        bdev.inject(Fault(op="read", kind="error"))
        assert answers(await agents.acquire(0)) == [("error", "")]
        assert answers(await agents.acquire(0)) == [("ok", "nvme")]


async def test_the_slot_of_a_hung_read_is_quarantined_until_the_device_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, deadline_s=5.0) as agents:
        await agents.store_to_flash(0)
        bdev.inject(Fault(op="read", kind="hang"))
        assert answers(await agents.acquire(0, timeout_s=1.0)) == [("late", "")]
        await trio.sleep(5)
        assert agents.pool.stats().quarantined == 1
        assert answers(await agents.acquire(0)) == [("ok", "nvme")], "another slot serves meanwhile"
        bdev.resume()
        await trio.sleep(0.1)
        assert agents.pool.stats().quarantined == 0
        agents.staging.end_scope(1, host_may_read=False)
        agents.assert_nothing_held()


# --- giving up ---


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.49999, 0.50001, 0.75, 1.0])
async def test_a_load_cancelled_at_any_moment_leaves_nothing(
    autojump_clock: trio.testing.MockClock, after_s: float
) -> None:
    async with slow_agents(num_slots=6, workers=4) as agents:  # so reads queue: three rounds of them
        await agents.store_to_flash(*range(8))
        with trio.move_on_after(after_s):
            await agents.acquire(*range(8))
        agents.staging.end_scope(1, host_may_read=False)
        await trio.sleep(10)
        agents.assert_nothing_held()
        agents.staging.open_scope(3, 1)
        assert [one.status for one in await agents.acquire(0, 1, owner=3)] == ["ok"] * 2


async def test_leases_of_a_silent_host_are_quarantined_until_its_memory_is_gone() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0, 1)
        await agents.until_written()
        await agents.acquire(0, 1)
        assert agents.staging.end_scope(1, host_may_read=True) == 2
        assert agents.pool.stats().quarantined == 2
        agents.staging.host_gone(1)
        agents.assert_nothing_held()


# --- leases ---


async def test_only_its_own_session_releases_or_pulls_under_a_lease() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0)
        [one] = await agents.acquire(0)
        at = agents.slab.start + one.slot * RECORD
        assert agents.staging.release([one.lease], session=2) == 0
        assert agents.staging.foreign_releases == 1
        assert not agents.staging.begin_pull(2, 1, at, 10, one.lease)
        assert not agents.staging.begin_pull(1, 9, at, 10, one.lease), "another region"
        assert not agents.staging.begin_pull(1, 1, at + RECORD, 10, one.lease), "another slot"
        assert not agents.staging.begin_pull(1, 1, at, RECORD + 1, one.lease), "beyond the slot"
        assert not agents.staging.begin_pull(1, 1, at, 10, one.lease + (1 << 12)), "no such lease"
        assert agents.staging.begin_pull(1, 1, at, RECORD, one.lease)
        agents.staging.end_pull(one.lease)
        assert agents.staging.release([one.lease, one.lease], session=1) == 1


async def test_a_slot_being_pushed_outlives_its_scope() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0)
        await agents.until_written()
        [one] = await agents.acquire(0)
        agents.staging.begin_transfers([one.lease])
        agents.staging.end_scope(1, host_may_read=False)
        assert agents.pool.stats().quarantined == 1
        agents.staging.end_transfers([one.lease])
        agents.assert_nothing_held()


# --- prefetch ---


async def test_a_prefetch_is_answered_once_whatever_becomes_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents(num_slots=2) as agents:
        await agents.store_to_flash(0, 1, 2)
        refs = agents.refs(0, 1, 2)
        deadline = trio.current_time() + 100
        agents.events.clear()
        agents.staging.prefetch(refs[0], None, 10, deadline)
        agents.staging.prefetch(refs[0], None, 11, deadline)
        agents.staging.prefetch(refs[1], 0b0001, 12, deadline)
        agents.staging.prefetch(refs[2], None, 13, deadline)
        agents.staging.prefetch(-1, None, 14, deadline)
        await trio.sleep(1)
        agents.staging.prefetch(refs[0], None, 15, deadline)
        replies = [event for event in agents.events if isinstance(event, (Staged, FetchFailed))]
        assert sorted(replies, key=lambda reply: reply.job) == [
            Staged(refs[0], 10),
            FetchFailed(11, "in_flight"),
            Staged(refs[1], 12),
            FetchFailed(13, "no_room"),
            FetchFailed(14, "gone"),
            Staged(refs[0], 15),
        ]
        assert agents.pool.ready_parts(refs[1]) == 0b0001


async def test_a_demand_promotes_the_prefetch_it_meets_and_it_is_then_not_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with slow_agents(workers=3) as agents:  # one of them for prefetch
        await agents.store_to_flash(0, 1, 2, 3)
        for job, ref in enumerate(agents.refs(0, 1, 2, 3)):
            agents.staging.prefetch(ref, None, job, trio.current_time() + 100)
        await trio.sleep(0.1)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def demand() -> None:
                deadline = began + 100
                [one] = await agents.staging.acquire(
                    agents.state, agents.handles(0, 1, 2, 3)[3:], 0, 0b1111, 1, 1, None, deadline
                )
                assert one.status == "ok"
                assert trio.current_time() - began == pytest.approx(READ_S), "ahead of jobs 1 and 2"

            nursery.start_soon(demand)
            await trio.testing.wait_all_tasks_blocked()
            for job in (1, 3):
                agents.staging.cancel_prefetch(job)
        await trio.sleep(5)
        failed = [event for event in agents.events if isinstance(event, FetchFailed)]
        assert failed == [FetchFailed(1, "cancelled")]


# --- what others do meanwhile ---


async def test_a_block_some_parts_of_which_are_staged_is_wholly_unstaged_when_a_late_read_keeps_its_slot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, deadline_s=1.0) as agents:
        await agents.store_to_flash(1)
        [first] = await agents.acquire(1, mask=0b0001)
        agents.staging.release([first.lease], 1)
        bdev.inject(Fault(op="read", kind="hang"))
        [late] = await agents.acquire(1, timeout_s=5)
        assert late.status == "late"
        assert_slots_agree(agents.state)
        bdev.resume()
        [again] = await agents.acquire(1)
        assert agents.holds(again, 1)
        assert_slots_agree(agents.state)


async def test_a_read_that_comes_home_to_a_block_stored_anew_leaves_that_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As a commit of another shard keeps the record, the new block has the old one's name."""
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, num_shards=2, deadline_s=50.0) as agents:
        for shard in (0, 1):
            assert await agents.store(1, shard=shard) == ["stored"]
            await agents.until_written()
        push_out(agents.staging)
        [handle] = agents.handles(1)
        block_id = agents.state.block_id(handle)
        bdev.inject(Fault(op="read", kind="hang"))
        found: list[Acquired] = []

        async def load() -> None:
            found.extend(await agents.acquire(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            await trio.testing.wait_all_tasks_blocked()
            with agents.index.pinned(agents.state, np.array([block_id], np.int32)):
                agents.index.drop(agents.state, block_id, "deleted", trio.current_time())
                assert [await agents.store(1, shard=shard) for shard in (0, 1)] == [["stored"]] * 2
            assert agents.handles(1) == [handle]
            bdev.resume()
        assert answers(found) == [("miss", "")]
        await agents.until_written()
        [again] = await agents.acquire(1)
        assert agents.holds(again, 1)
        agents.staging.end_scope(1, host_may_read=False)
        agents.assert_nothing_held()


@pytest.mark.parametrize(("num_shards", "times"), [(1, 10_000), (8, 1200)])
def test_a_ref_fits_63_bits_and_leads_back_to_its_block_however_often_its_row_was_used(
    num_shards: int, times: int
) -> None:
    index = PrefixIndex(64, num_shards)
    space = small_space(num_shards)
    state = SpaceState(
        "s", MAX_NUMBER, space, b"f" * 32, RecordLayout.of(space), index, cast(Slab, None), 0.0
    )  # fmt: skip
    before = -1
    for i in range(times):
        ids = index.insert_after(ROOT_KEY, bytes(64), [(i + 1).to_bytes(16, "big")], 0.0)
        [handle] = index.handles(ids).tolist()
        assert int(ids[0]) == 0, "the same row each time"
        refs = [state.ref(handle, shard) for shard in range(num_shards)]
        assert refs == [state.refs([handle], shard)[0] for shard in range(num_shards)]
        assert max(refs) < 1 << 63
        assert [state.unref(ref) for ref in refs] == [(handle, shard) for shard in range(num_shards)]
        assert state.handles_of(refs) == [handle] * num_shards
        if before >= 0:
            assert state.block_id(state.unref(before)[0]) == -1, "that of the block before is nobody's"
        before = refs[-1]
        index.drop(0, 0.0)


async def test_a_block_stored_and_deleted_many_times_under_prediction(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(8)), num_shards=8, eviction="predicted") as agents:
        for _ in range(300):
            for shard in range(8):
                assert await agents.store(1, shard=shard) == ["stored"]
            await agents.until_written()
            agents.index.drop(agents.state, agents.state.block_id(agents.handles(1)[0]), "deleted", 0.0)
        agents.assert_nothing_held()
