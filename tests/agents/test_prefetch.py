"""The prefetch agent: events are queued and handled in order, the core's time is kept, a failing core costs one event."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from dpurt.agents.prefetch import PREFETCH_DEADLINE_S, PrefetchAgent
from dpurt.bdev.memory import MemoryBdev
from dpurt.core.arbiter import Arbiter, Budget
from dpurt.core.events import Arrived, Consumed, Event, Owner, Paused, Resumed, SequenceGone
from dpurt.core.ledger import Ledger
from dpurt.core.predictors import make_predictor
from dpurt.core.prefetch import CancelFetch, Command, Fetch, PrefetchCore
from dpurt.runtime.actor import RestartPolicy, supervise
from dpurt.testing.agents import Agents, capacity, running_agents

OWNER = Owner("s", "t")


class FakeCore:
    """Answers with prepared commands; notes what it heard, and when."""

    def __init__(self, wakeups: Sequence[float] = ()) -> None:
        self.heard: list[tuple[Event, float]] = []
        self.ticks: list[float] = []
        self.answers: dict[type[Event], list[Command]] = {}
        self.wakeups = list(wakeups)
        self.fails_on: Event | None = None

    def handle(self, event: Event, now: float) -> list[Command]:
        if event == self.fails_on:
            raise RuntimeError("the core is broken")
        self.heard.append((event, now))
        return self.answers.get(type(event), [])

    def tick(self, now: float) -> list[Command]:
        self.ticks.append(now)
        self.wakeups.pop(0)
        return []

    def next_wakeup(self) -> float | None:
        return self.wakeups[0] if self.wakeups else None


class FakeStaging:
    """Notes what it is told to do."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def prefetch(self, ref: int, parts_mask: int | None, job: int, deadline: float) -> None:
        self.done.append(("prefetch", ref, parts_mask, job, deadline - trio.current_time()))

    def cancel_prefetch(self, job: int) -> None:
        self.done.append(("cancel", job))


def agent_of(core: FakeCore | None, staging: FakeStaging) -> PrefetchAgent:
    return PrefetchAgent(core, staging)  # type: ignore[arg-type]


async def test_events_are_handled_in_order_and_never_in_the_tellers_step(
    autojump_clock: trio.testing.MockClock,
) -> None:
    core, staging = FakeCore(), FakeStaging()
    agent = agent_of(core, staging)
    events = [Resumed(number) for number in range(1000)]
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        for event in events:
            agent.observe(event)
        assert core.heard == []
        await trio.testing.wait_all_tasks_blocked()
        assert [event for event, _ in core.heard] == events
        nursery.cancel_scope.cancel()


async def test_commands_are_carried_out(autojump_clock: trio.testing.MockClock) -> None:
    core, staging = FakeCore(), FakeStaging()
    core.answers[Paused] = [Fetch(7, 42, 0b10, 1.0, "hint"), CancelFetch(3)]
    agent = agent_of(core, staging)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        agent.observe(Paused(1))
        await trio.testing.wait_all_tasks_blocked()
        assert staging.done == [("prefetch", 42, 0b10, 7, PREFETCH_DEADLINE_S), ("cancel", 3)]
        nursery.cancel_scope.cancel()


async def test_the_core_is_woken_when_it_wants_to_be(autojump_clock: trio.testing.MockClock) -> None:
    start = trio.current_time()
    core = FakeCore([start + 2.0, start + 2.5, start + 60.0])
    agent = agent_of(core, FakeStaging())
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(10)
        agent.observe(Resumed(1))
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert [tick - start for tick in core.ticks] == [2.0, 2.5, 60.0]


async def test_a_wakeup_in_the_past_does_not_spin(autojump_clock: trio.testing.MockClock) -> None:
    core = FakeCore([0.0] * 5)
    agent = agent_of(core, FakeStaging())
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    gaps = [b - a for a, b in zip(core.ticks, core.ticks[1:], strict=False)]
    assert len(gaps) == 4
    assert min(gaps) > 0.001


async def test_a_failing_core_loses_the_event_in_hand_and_no_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    core = FakeCore()
    core.fails_on = Resumed(2)
    agent = agent_of(core, FakeStaging())
    async with trio.open_nursery() as nursery:
        await nursery.start(supervise, agent, RestartPolicy())
        for number in range(5):
            agent.observe(Resumed(number))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [event for event, _ in core.heard] == [Resumed(n) for n in (0, 1, 3, 4)]
    assert agent.restarts == 1


async def test_without_a_core_events_are_not_kept() -> None:
    agent = agent_of(None, FakeStaging())
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        agent.observe(Resumed(1))
        assert not agent._events
        nursery.cancel_scope.cancel()


# --- with the real core and staging ---


def real_agent(agents: Agents) -> tuple[PrefetchAgent, PrefetchCore]:
    budget = Budget(bandwidth_bytes_per_s=1e9, staging_bytes=1 << 20, queue_depth=4)
    core = PrefetchCore([make_predictor("sliding_window", 8)], Arbiter(budget), Ledger(), agents.staging)
    agent = PrefetchAgent(core, agents.staging)
    agents.staging.observe = agent.observe
    return agent, core


@pytest.mark.parametrize("ends", [True, False])
async def test_an_arrival_stages_its_blocks_and_the_ledger_says_what_they_were_good_for(
    autojump_clock: trio.testing.MockClock, ends: bool
) -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store_to_flash(0, 1, 2, 3)
        agent, core = real_agent(agents)
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            agent.observe(Arrived(1, OWNER, tuple(agents.refs(0, 1, 2, 3))))
            await trio.sleep(0.5)
            assert [agents.staging.where(ref) for ref in agents.refs(0, 1, 2, 3)] == ["staging"] * 4
            if not ends:
                agent.observe(Consumed(1, 0, 4))
                assert [one.source for one in await agents.acquire(0, 1, 2, 3)] == ["staging"] * 4
            agent.observe(SequenceGone(1))
            await trio.sleep(4000)
            nursery.cancel_scope.cancel()
        total = core.ledger.totals()
        assert (total.timely, total.useless) == ((0, 4) if ends else (4, 0))
        assert (total.planned, total.open) == (total.settled, 0)
        assert core.arbiter.held_bytes == 0
        core.ledger.check_integrity()
