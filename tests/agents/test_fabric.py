"""The fabric agent: which fabric a host gets and why, who may open a link, pushes to hosts that are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dpurt.agents.fabric import Access, FabricAgent
from dpurt.bdev.memory import MemoryBdev
from dpurt.fabric import connect
from dpurt.fabric.region import MemfdRegion
from dpurt.fabric.tcp import TcpFabric
from dpurt.testing.agents import Agents, capacity, running_agents
from dpurt.testing.node_steps import PAYLOAD, payload

TOKEN = b"t" * 32


@asynccontextmanager
async def fabric_of(agents: Agents) -> AsyncIterator[FabricAgent]:
    access = Access(agents.staging, agents.intake)
    fabric = FabricAgent(
        {"tcp": TcpFabric(access, host="127.0.0.1", port=0)}, {"both": ["shm", "tcp"], "far": ["tcp"], "near": ["shm"]}
    )  # fmt: skip
    fabric.offer(agents.region)
    async with trio.open_nursery() as nursery:
        await nursery.start(fabric.run)
        yield fabric
        nursery.cancel_scope.cancel()


async def test_the_first_fabric_both_sides_have_is_chosen_and_the_reason_said() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents, fabric_of(agents) as fabric:
        choice = fabric.choose("far", ["shm", "tcp"])
        assert choice is not None
        assert (choice.kind, choice.reason) == ("tcp", "first of the topology's ['tcp']")
        choice = fabric.choose("both", ["tcp", "shm"])
        assert choice is not None
        assert (choice.kind, choice.reason) == ("tcp", "shm: not served here")
        choice = fabric.choose("both", ["tcp"])
        assert choice is not None
        assert choice.reason == "shm: the host cannot use it"
        assert fabric.choose("near", ["shm", "tcp"]) is None
        assert fabric.choose("stranger", ["tcp"]) is None


async def test_a_push_reaches_the_landing_region_and_one_to_nobody_is_an_answer() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents, fabric_of(agents) as fabric:
        await agents.store(0)
        [one] = await agents.acquire(0)
        source = agents.state.layout.payload(agents.slab.image(one.slot))
        deadline = trio.current_time() + 5
        assert await fabric.push("tcp", 1, [(source, 1, 0)], deadline) == "the host has no open link"
        inbound = agents.inbound[1]
        assert isinstance(inbound, MemfdRegion)
        fabric.admit("tcp", 1, TOKEN, [agents.region], inbound)
        choice = fabric.choose("far", ["tcp"])
        assert choice is not None
        host = await connect("tcp", choice.address, 1, TOKEN, deadline)
        landing = host.landing(2 * PAYLOAD)
        assert await fabric.push("tcp", 1, [(source, landing.region_id, PAYLOAD)], deadline) == ""
        assert bytes(landing.view[PAYLOAD:]) == payload(0)
        assert "after 0 bytes" in await fabric.push("tcp", 1, [(source, 99, 0)], deadline)
        assert fabric.push_errors == 2
        await host.aclose()


async def test_the_end_of_a_link_is_told_and_expelling_ends_it() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents, fabric_of(agents) as fabric:
        closed: list[int] = []
        ended = trio.Event()

        def note(session: int) -> None:
            closed.append(session)
            ended.set()

        fabric.on_link_closed = note
        choice = fabric.choose("far", ["tcp"])
        assert choice is not None
        for session in (1, 2):
            ended = trio.Event()
            fabric.admit("tcp", session, TOKEN, [agents.region], agents.inbound[session])
            host = await connect("tcp", choice.address, session, TOKEN, trio.current_time() + 5)
            if session == 1:
                await host.aclose()
            else:
                fabric.expel("tcp", session)
            with trio.fail_after(5):
                await ended.wait()
            assert not fabric.may_still_read("tcp", session)
            await host.aclose()
        assert closed == [1, 2]


def test_a_host_is_given_the_rails_that_lead_to_it_best_first_and_why() -> None:
    paths = {
        "far": [("10.0.1.1", "on the host's switch x"), ("10.0.9.9", "not served"), ("10.0.0.1", "40 Gb/s")]
    }
    railed = FabricAgent({}, {"far": ["verbs"], "other": ["verbs"]}, None, paths)
    railed._addresses["verbs"] = {"host": "10.0.0.1", "port": 7, "rails": "10.0.0.1,10.0.1.1"}
    choice = railed.choose("far", ["verbs"])
    assert choice is not None
    assert choice.address == {"host": "10.0.1.1", "port": 7, "rails": "10.0.1.1,10.0.0.1"}
    assert "rail 10.0.1.1: on the host's switch x" in choice.reason
    choice = railed.choose("other", ["verbs"])
    assert choice is not None
    assert choice.address["rails"] == "10.0.0.1,10.0.1.1"
