"""The storage agent: whose turn it is at the device, batches, failing writes, and room made by reclaim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
import trio.testing

from dpurt.agents.storage import End, ReadJob, WriteJob
from dpurt.bdev.memory import MemoryBdev
from dpurt.bdev.modelled import ModelledBdev
from dpurt.core.device_model import DeviceProfile
from dpurt.testing.agents import Agents, capacity, running_agents
from dpurt.testing.faulty_bdev import Fault, FaultyBdev
from dpurt.testing.node_steps import RECORD

SECOND = DeviceProfile(
    name="slow", read_latency_s=1.0, write_latency_s=1.0, read_bytes_per_s=1e15, write_bytes_per_s=1e15, jitter=0.0
)  # fmt: skip
Log = list[tuple[str, float]]


def read_job(agents: Agents, log: Log, name: str, *blocks: int, is_demand: bool) -> ReadJob:
    """A read of the last of `blocks` that notes how and when it ended."""
    state, ref = agents.state, agents.refs(*blocks)[-1]
    block_id = state.block_id(agents.handles(*blocks)[-1])
    taken = agents.pool.take(ref, 0b1111, trio.current_time())
    assert taken is not None

    def done(jobs: Sequence[ReadJob], ends: Sequence[End]) -> None:
        for job, (status, settled) in zip(jobs, ends, strict=True):
            log.append((f"{name} {status}", trio.current_time()))
            if settled is None:
                agents.pool.fill_failed(job.slot, 0b1111)

    return ReadJob(
        state, ref, state.index.key(block_id), 0, taken.slot, state.extent_of(block_id, 0), 0b1111,
        trio.current_time() + 100, is_demand, done,
    )  # fmt: skip


def write_job(agents: Agents, log: Log, name: str, *blocks: int) -> WriteJob:
    """A write of a staged block's record, again."""
    ref = agents.refs(*blocks)[-1]
    slot = agents.pool.find(ref)
    assert slot is not None

    def done(jobs: Sequence[WriteJob], extents: Sequence[int | None]) -> None:
        log.extend(
            (f"{name} {'lost' if extent is None else 'written'}", trio.current_time()) for extent in extents
        )

    return WriteJob(agents.state, *agents.state.unref(ref), slot, done)


async def test_demand_goes_before_writes_and_writes_before_prefetch(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=3) as agents:
        await agents.store_to_flash(*range(7))
        await agents.store(50)
        await agents.until_written()
        log: Log = []
        began = trio.current_time()
        for i in (4, 5):
            agents.storage.read([read_job(agents, log, f"prefetch{i}", *range(i + 1), is_demand=False)])
        agents.storage.write([write_job(agents, log, "write", 50)])
        for i in range(4):
            agents.storage.read([read_job(agents, log, f"demand{i}", *range(i + 1), is_demand=True)])
        await trio.sleep(20)
        assert {name for name, _ in log[:3]} == {"demand0 ok", "demand1 ok", "demand2 ok"}
        ended = {name.split()[0]: round(at - began) for name, at in log}
        assert [ended[name] for name in ("demand2", "demand3", "prefetch4", "prefetch5")] == [1, 2, 2, 3]


async def test_demand_of_a_lower_priority_number_goes_first(autojump_clock: trio.testing.MockClock) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=3) as agents:
        await agents.store_to_flash(*range(12))
        log: Log = []
        jobs = [read_job(agents, log, str(i), *range(i + 1), is_demand=i != 11) for i in range(12)]
        for job, priority in zip(jobs, (0, 0, 0, 5, 5, 5, 0, 0, -1, 5, 5, 5), strict=True):
            job.priority = priority
            agents.storage.read([job])
        agents.storage.promote(jobs[10], -2)  # somebody else, who is in a hurry, wants it, too
        agents.storage.promote(jobs[11])
        assert agents.storage.bytes_wanted == 12 * jobs[0].record_bytes
        await trio.sleep(20)
        order = [name.split()[0] for name, _ in log]
        turns = [set(order[i : i + 3]) for i in range(0, 12, 3)]
        assert turns == [{"10", "8", "0"}, {"1", "2", "6"}, {"7", "11", "3"}, {"4", "5", "9"}]
        assert (agents.storage.bytes_wanted, agents.storage.is_quiet) == (0, True)


@pytest.mark.parametrize("is_failing", [False, True])
async def test_many_blocks_side_by_side_are_few_reads_and_a_failing_one_spoils_no_other(
    is_failing: bool,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(64)))
    async with running_agents(bdev, workers=8, num_slots=80) as agents:
        await agents.store_to_flash(*range(32))
        log: Log = []
        jobs = [read_job(agents, log, f"b{i}", *range(i + 1), is_demand=True) for i in range(32)]
        before = bdev.stats.reads
        if is_failing:
            at = jobs[2].extent
            bdev.inject(Fault(op="read", kind="error", at=at, count=2))  # in the run, and alone
        tell = {job.ref: job.done for job in jobs}

        def done(ended: Sequence[ReadJob], ends: Sequence[End]) -> None:
            for job, end in zip(ended, ends, strict=True):
                tell[job.ref]([job], [end])

        agents.storage.read([replace(job, done=done) for job in jobs])
        while not agents.storage.is_quiet:  # noqa: ASYNC110
            await trio.sleep(0.001)
        failed = ["b2 error"] if is_failing else []
        assert sorted(name for name, _ in log) == sorted(
            failed + [f"b{i} ok" for i in range(32) if not (is_failing and i == 2)]
        )
        assert bdev.stats.reads - before <= 16


async def test_prefetch_never_takes_all_workers(autojump_clock: trio.testing.MockClock) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=4) as agents:
        await agents.store_to_flash(*range(6))
        log: Log = []
        for i in range(5):
            agents.storage.read([read_job(agents, log, f"p{i}", *range(i + 1), is_demand=False)])
        await trio.sleep(0.5)
        assert agents.storage.backlog == 3
        began = trio.current_time()
        agents.storage.read([read_job(agents, log, "demand", *range(6), is_demand=True)])
        await trio.sleep(10)
        assert dict(log)["demand ok"] == pytest.approx(began + 1.0)


async def test_a_promoted_read_overtakes_other_prefetches_and_runs_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=3) as agents:
        await agents.store_to_flash(*range(4))
        log: Log = []
        jobs = [read_job(agents, log, f"p{i}", *range(i + 1), is_demand=False) for i in range(4)]
        for job in jobs:
            agents.storage.read([job])
        await trio.sleep(0.5)
        agents.storage.promote(jobs[3])
        agents.storage.promote(jobs[3])
        agents.storage.promote(jobs[0])
        assert agents.storage.bytes_wanted == 2 * RECORD
        await trio.sleep(10)
        assert [name for name, _ in log] == ["p0 ok", "p3 ok", "p1 ok", "p2 ok"]
        assert agents.storage.bytes_wanted == 0
        assert agents.storage.is_quiet


async def test_a_cancelled_agent_ends_its_reads_first(autojump_clock: trio.testing.MockClock) -> None:
    """The device writes the slots of jobs in hand: they end with its answer. What has not started stays queued."""
    log: Log = []
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=3) as agents:
        await agents.store_to_flash(*range(4))
        began = trio.current_time()
        for i in range(4):
            agents.storage.read([read_job(agents, log, f"r{i}", *range(i + 1), is_demand=True)])
        await trio.sleep(0.5)
    assert trio.current_time() == pytest.approx(began + 1.0)
    assert {name for name, _ in log} == {"r0 ok", "r1 ok", "r2 ok"}
    assert agents.storage.backlog == 1


async def test_only_a_read_that_has_not_started_can_be_taken_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=3) as agents:
        await agents.store_to_flash(*range(3))
        log: Log = []
        jobs = [read_job(agents, log, f"p{i}", *range(i + 1), is_demand=False) for i in range(3)]
        for job in jobs:
            agents.storage.read([job])
        await trio.sleep(0.5)
        assert [agents.storage.cancel(job) for job in jobs] == [False, True, True]
        assert [agents.storage.cancel(job) for job in jobs] == [False, False, False]
        await trio.sleep(5)
        assert [name for name, _ in log] == ["p1 cancelled", "p2 cancelled", "p0 ok"]
        assert agents.storage.is_quiet


async def test_writes_that_wait_together_go_together(autojump_clock: trio.testing.MockClock) -> None:
    async with running_agents(ModelledBdev(capacity(24), profile=SECOND), workers=4) as agents:
        await agents.store(0)
        await agents.until_written()
        before = agents.storage.store.stores[0].stats().appends
        log: Log = []
        began = trio.current_time()
        job = write_job(agents, log, "w", 0)
        for _ in range(8):
            agents.storage.write([replace(job)])
        await trio.sleep(20)
        assert agents.storage.store.stores[0].stats().appends == before + 8
        assert max(at for _, at in log) - began < 8


async def test_a_write_that_fails_is_told_and_counted(autojump_clock: trio.testing.MockClock) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev) as agents:
        bdev.inject(Fault(op="write", kind="error", count=2))
        assert await agents.store(0) == ["stored"]
        await agents.until_written()
        assert (agents.storage.write_failures, agents.intake.writes_lost) == (1, 1)
        assert agents.state.extent_of(agents.state.block_id(agents.handles(0)[0]), 0) == -1
        assert [one.status for one in await agents.acquire(0)] == ["ok"], "it is still in staging"


async def test_a_hung_write_holds_its_slot_until_the_device_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, deadline_s=2.0) as agents:
        bdev.inject(Fault(op="write", kind="hang"))
        await agents.store(0)
        await trio.sleep(30)
        assert agents.pool.stats().pinned == 1
        bdev.resume()
        await agents.until_written()
        assert agents.pool.stats().pinned == 0
        assert agents.intake.writes_lost == 0, "it was tried once more"


async def test_a_write_that_hangs_twice_is_lost_to_the_device_and_stays_staged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, deadline_s=2.0) as agents:
        await agents.store_to_flash(1)
        bdev.inject(Fault(op="write", kind="hang", count=2))
        await agents.store(0)
        for _ in range(2):
            await trio.sleep(30)
            bdev.resume()
        await agents.until_written()
        assert agents.intake.writes_lost == 1
        assert agents.storage.write_failures == 1
        assert [one.status for one in await agents.acquire(0)] == ["ok"]


async def test_a_batch_larger_than_the_store_can_ever_hold_at_once_is_split(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(
        MemoryBdev(capacity(4)), num_slots=64
    ) as agents:  # four segments of four records
        agents.open_host(3, cells=32)
        for first in range(0, 30, 15):
            for block in range(first, first + 15):
                rooms = agents.reserve(block, session=3)
                assert await agents.commit(agents.write(rooms, [block], 3), 3) == ["stored"]
        with trio.fail_after(60):
            await agents.until_written()
        agents.storage.store.stores[0].check_integrity()
        assert agents.storage.store.stores[0].stats().appends == 30 + agents.reclaimer.carried
        agents.intake.close_session(3)


async def test_no_estimate_is_below_one_read_of_a_device_as_slow_as_it_was_seen(
    autojump_clock: trio.testing.MockClock,
) -> None:
    profile = DeviceProfile(
        name="slow",
        read_latency_s=0.2,
        write_latency_s=0.0,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        jitter=0.0,
    )
    async with running_agents(ModelledBdev(capacity(8), profile=profile)) as agents:
        agents.open_host(1)
        await agents.store_to_flash(1)
        await agents.acquire(1)
        assert agents.storage.latency_s() == pytest.approx(0.2, rel=0.01)
        assert agents.storage.estimate_s(1) >= 0.2


async def test_the_estimate_grows_with_what_is_asked_and_what_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        storage = agents.storage
        assert storage.estimate_s(0) == 0
        assert 0 < storage.estimate_s(RECORD) < storage.estimate_s(2 * RECORD)
        storage.bytes_wanted = 1000 * RECORD
        waits_s = storage.estimate_s(RECORD)
        storage.bytes_wanted = 2001 * RECORD
        assert storage.estimate_s(RECORD) == pytest.approx(2 * waits_s, rel=0.01)
        assert agents.staging.ready_ms(1, RECORD) >= 1
        assert agents.staging.ready_ms(0, RECORD) == 0
