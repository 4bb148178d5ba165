"""Stores under an endurance budget: what is not written is served from DRAM, offered again, and never a child without its
parent."""

import trio
import trio.testing

from dpurt.bdev.memory import MemoryBdev
from dpurt.core.endurance import BURST_S, DAY_S, WriteBudget
from dpurt.testing.agents import Agents, capacity, running_agents
from dpurt.testing.node_steps import RECORD, push_out, tokens


def budget_of(records: float) -> WriteBudget:
    """A bucket that holds so many records."""
    return WriteBudget(records * RECORD / BURST_S * DAY_S, trio.current_time())


def on_flash(agents: Agents, *blocks: int) -> list[int]:
    """Positions in the chain of the blocks that flash has."""
    state = agents.state
    ids = state.index.match(tokens(*blocks)).tolist()
    return [i for i, block_id in enumerate(ids) if state.extent_of(block_id, 0) >= 0]


def use(agents: Agents, *blocks: int) -> None:
    """A lookup that will load."""
    agents.intake.offer_again(agents.state, agents.state.index.match(tokens(*blocks)), 0)


async def test_new_blocks_are_written_from_the_first_on_while_half_of_the_budget_is_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(24))) as agents:
        agents.storage.budget = budget_of(8)
        assert await agents.store(*range(6)) == ["stored"] * 6
        await agents.until_written()
        assert on_flash(agents, *range(6)) == [0, 1, 2, 3]
        assert [one.source for one in await agents.acquire(*range(6))] == ["staging"] * 6
        agents.staging.end_scope(1, host_may_read=False)
        agents.assert_nothing_held()


async def test_a_block_used_again_is_written_then(autojump_clock: trio.testing.MockClock) -> None:
    async with running_agents(MemoryBdev(capacity(24))) as agents:
        agents.storage.budget = budget_of(8)
        await agents.store(*range(6))
        await agents.until_written()
        use(agents, *range(6))
        use(agents, *range(6))  # those under way are not written twice
        await agents.until_written()
        assert on_flash(agents, *range(6)) == [0, 1, 2, 3, 4, 5]
        assert agents.storage.store.stores[0].stats().appends == 6
        push_out(agents.staging)
        assert [one.source for one in await agents.acquire(*range(6))] == ["nvme"] * 6


async def test_no_child_is_written_whose_parent_is_not(autojump_clock: trio.testing.MockClock) -> None:
    async with running_agents(MemoryBdev(capacity(24))) as agents:
        agents.storage.budget = budget_of(8)
        await agents.store(*range(6))  # the last two find the budget short
        await agents.until_written()
        agents.storage.budget = budget_of(100)
        await agents.store(*range(8), first=6)
        await agents.until_written()
        assert on_flash(agents, *range(8)) == [0, 1, 2, 3], "4 and 5 are not there, so 6 and 7 would be lost"
        use(agents, *range(8))
        await agents.until_written()
        assert on_flash(agents, *range(8)) == list(range(8))


async def test_what_flash_did_not_get_is_a_miss_once_dram_needs_its_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(24))) as agents:
        agents.storage.budget = budget_of(8)
        await agents.store(*range(6))
        await agents.until_written()
        push_out(agents.staging)
        assert len(agents.index.match(agents.state, tokens(*range(6)), None)) == 4
        reasons = await agents.index.explain(agents.state, tokens(*range(6)), None, 0, [])
        assert [one.reason for one in reasons] == ["present"] * 4 + ["evicted"] + [reasons[5].reason]
        assert "no copy" in reasons[4].detail
        agents.assert_nothing_held()
