"""Reclaim: a segment's cold blocks go with their descendants, hot ones are carried on within the budget."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from dpurt.bdev.memory import MemoryBdev
from dpurt.core.segment_log import MAX_WRITE_AMPLIFICATION
from dpurt.testing.agents import Agents, capacity, running_agents, small_space
from dpurt.testing.node_steps import push_out, tokens

SEGMENTS = 8


@asynccontextmanager
async def full_store(num_slots: int = 16, chains: int = 60) -> AsyncIterator[Agents]:
    """Single blocks 0, 1, ... until the store has long begun to reclaim; then nothing staged."""
    async with running_agents(MemoryBdev(capacity(SEGMENTS)), num_slots=num_slots) as agents:
        for block in range(chains):
            await store_one(agents, block)
        yield agents


async def store_one(agents: Agents, block: int) -> None:
    assert await agents.store(block) == ["stored"]
    await agents.until_written()
    push_out(agents.staging)
    await trio.sleep(0.01)  # so that the later is the younger


def known(agents: Agents, *blocks: int) -> list[int]:
    return [block for block in blocks if agents.handles(block)]


async def test_the_oldest_segments_go_first_and_the_newest_blocks_stay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_store() as agents:
        kept = known(agents, *range(60))
        assert kept[-12:] == list(range(48, 60))
        assert agents.reclaimer.dropped == 60 - len(kept) > 0
        assert agents.index.drops == {"reclaimed": agents.reclaimer.dropped}
        for block in kept:
            [one] = await agents.acquire(block)
            assert agents.holds(one, block)
            agents.staging.release([one.lease], 1)


async def test_write_amplification_stays_within_its_budget(autojump_clock: trio.testing.MockClock) -> None:
    async with full_store(chains=150) as agents:
        stats = agents.storage.store.stores[0].stats()
        appended = stats.appends - agents.reclaimer.carried
        assert appended == 150
        assert stats.appends <= MAX_WRITE_AMPLIFICATION * appended
        agents.storage.store.stores[0].check_integrity()


async def test_a_block_in_use_is_carried_on_when_its_segment_goes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_store(chains=150) as agents:
        hot = known(agents, *range(150))[0]
        agents.storage.store.stores[0]._log._accepted += 1 << 30  # a budget for re-appending
        carried = agents.reclaimer.carried
        for block in range(200, 240):
            ids = agents.state.index.match(tokens(hot))
            agents.index.touch(agents.state, ids, trio.current_time())
            await store_one(agents, block)
        assert agents.reclaimer.carried > carried
        [one] = await agents.acquire(hot)
        assert one.status == "ok"
        assert agents.holds(one, hot)
        agents.state.index.check_integrity()


async def test_a_chain_is_carried_head_first_and_its_rest_goes_as_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(SEGMENTS))) as agents:
        await agents.store_to_flash(0, 1, 2, 3)
        agents.storage.store.stores[0]._log._accepted += 1 << 30
        block = 100
        while agents.reclaimer.carried < 2:
            await store_one(agents, block)
            block += 1
            assert block < 200
        assert len(agents.handles(0, 1, 2, 3)) == 2, "half a segment is carried, the head of the chain"
        acquired = await agents.acquire(0, 1)
        assert [agents.holds(one, i) for i, one in enumerate(acquired)] == [True, True]
        agents.state.index.check_integrity()


async def test_a_block_staged_whole_only_loses_its_place_on_flash(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(SEGMENTS)), num_slots=64) as agents:
        assert await agents.store(0) == ["stored"]
        for block in range(1, 40):
            assert await agents.store(block) == ["stored"]
            await agents.until_written()
        assert agents.reclaimer.dropped == 0
        [one] = await agents.acquire(0)
        assert agents.holds(one, 0)
        block_id = agents.state.block_id(agents.handles(0)[0])
        assert agents.state.extent_of(block_id, 0) == -1
        agents.staging.release([one.lease], 1)
        push_out(agents.staging)
        assert not agents.handles(0)
        assert agents.index.drops["evicted"] > 0


@pytest.mark.parametrize("num_shards", [1, 3])
async def test_every_record_on_flash_has_its_owner_whatever_was_reclaimed_and_swept(
    autojump_clock: trio.testing.MockClock, num_shards: int
) -> None:
    """What the log says lives there is what the index says lies there, in the shards and epochs of several."""
    async with running_agents(MemoryBdev(capacity(SEGMENTS)), num_shards=num_shards) as agents:
        for block in range(80):
            if block == 50:
                agents.add_epoch(small_space(num_shards, 1))
            for shard in range(num_shards):
                assert await agents.store(block, shard=shard) == ["stored"]
            await agents.until_written()
        assert agents.reclaimer.dropped > 0
        log = agents.storage.store.stores[0]._log
        on_flash = {
            (offset, owner)
            for segment in range(log.num_segments)
            for offset, owner in zip(log.live_offsets(segment), log.live_names(segment).tolist(), strict=True)
        }
        known = set()
        for state in agents.index.by_number.values():
            table = state.index.table
            ids, shards = np.nonzero(table.where[: table.high_water, table.first_extent :] >= 0)
            for block_id, shard in zip(ids.tolist(), shards.tolist(), strict=True):
                known.add((state.extent_of(block_id, shard), state.owner(state.handle(block_id), shard)))
        assert on_flash == known
