"""Pre-placement from end to end: blocks are in the host's landing zone before it asks, both hops' books add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from dpurt.client import Client
from dpurt.core.prefetch import Fetch
from dpurt.errors import RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.node_steps import (
    buffers,
    empty_staging,
    load,
    node_and_host,
    payload,
    payloads,
    slots,
    sources,
    statuses,
    store,
    tokens,
    until,
    written,
)
from dpurt.wire import messages as m

pytestmark = pytest.mark.parametrize("fabric", ["shm", "tcp"])


def placement(node: Node) -> dict[str, Any]:
    found: Any = node.placement.stats()["host-a"]
    return found


def ledger(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = placement(node)["ledger"]
    outcomes = ("refused", "cancelled", "failed", "timely", "late", "early", "useless", "open")
    assert found["planned"] == sum(found[name] for name in outcomes)
    return found


async def arrive(client: Client, node: Node, request: str, *blocks: int) -> None:
    """Look a prompt up and wait until all of it is placed."""
    await client.lookup("s", request, tokens(*blocks))
    await until(lambda: client.placed("s", tokens(*blocks)) == len(blocks))


async def test_what_arrives_is_placed_and_loaded_without_asking(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        assert await client.landing_zone("s", 8)
        await store(client, "w", 1, 2, 3, 4)
        assert client.placed("s", tokens(1, 2, 3, 4)) == 0
        await arrive(client, node, "r", 1, 2, 3, 4)
        await client.stats()  # whatever the node had to hear
        before = node.gateway.messages
        into = buffers(4)
        loaded = await client.load("r", 0, into)
        assert sources(loaded) == ["landing"] * 4
        assert [bytes(block) for block in into] == payloads(1, 2, 3, 4)
        [part] = await client.load("r", 2, [memoryview(bytearray(8192))], parts=(1, 3))
        assert part.data == payload(3)[4096:12288]
        await client.stats()
        assert node.gateway.messages == before + 3, (
            "one word a load of what was taken, and the question just now"
        )
        await until(lambda: ledger(node)["timely"] == 4)
        assert ledger(node)["accuracy"] == 1.0
        assert node.gateway.hosts.by_host["host-a"].landing == 5
        assert node.prefetch.core is not None


async def test_what_is_on_flash_goes_both_hops_and_both_books_say_so(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2, 3, 4)
        await client.finish("w")
        await empty_staging(node)
        await arrive(client, node, "r", 1, 2, 3, 4)
        assert sources(await client.load("r", 0, buffers(4))) == ["landing"] * 4
        await until(lambda: ledger(node)["timely"] == 4)
        core = node.prefetch.core
        assert core is not None
        await until(lambda: core.ledger.totals().timely == 4)


async def test_a_block_taken_before_the_node_hears_that_it_has_landed_was_there_in_time(
    tmp_path: Path, fabric: str
):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2)
        [zone] = node.placement._zones
        place, gate = zone.writer.place, trio.Event()

        async def answered_late(*args: Any, **more: Any) -> str:
            error = await place(*args, **more)
            await gate.wait()
            return error

        zone.writer.place = answered_late  # type: ignore[method-assign]
        await arrive(client, node, "r", 1, 2)
        assert sources(await client.load("r", 0, buffers(2))) == ["landing"] * 2
        await until(lambda: len(zone.early_uses) == 2)
        assert ledger(node)["open"] == 2
        gate.set()
        await until(lambda: ledger(node)["timely"] == 2)
        assert not zone.early_uses


async def test_the_rest_of_a_load_is_asked_for_and_every_byte_is_right(tmp_path: Path, fabric: str):
    tables = {"placement": {"lookahead_blocks": 2}}
    async with node_and_host(tmp_path, fabric, **tables) as (_, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2, 3, 4)
        await client.lookup("s", "r", tokens(1, 2, 3, 4))
        await until(lambda: client.placed("s", tokens(1, 2, 3, 4)) == 2)
        into = buffers(4)
        loaded = await client.load("r", 0, into)
        assert sources(loaded)[:2] == ["landing", "landing"]
        assert set(sources(loaded)[2:]) <= {"staging", "nvme"}
        assert [bytes(block) for block in into] == payloads(1, 2, 3, 4)


async def test_a_zone_smaller_than_what_is_wanted_gives_places_of_used_blocks_away(
    tmp_path: Path, fabric: str
):
    async with node_and_host(tmp_path, fabric, **slots(32)) as (node, client):
        await client.landing_zone("s", 2)
        chains = [tuple(range(10 * n, 10 * n + 2)) for n in range(1, 6)]
        for chain in chains:
            await store(client, f"w{chain[0]}", *chain)
        for chain in chains:
            await arrive(client, node, f"r{chain[0]}", *chain)
            into = buffers(2)
            assert sources(await client.load(f"r{chain[0]}", 0, into)) == ["landing"] * 2
            assert [bytes(block) for block in into] == payloads(*chain)
            await client.finish(f"r{chain[0]}")
        assert placement(node)["placed"] == 2
        await until(lambda: ledger(node)["timely"] == 10)


async def test_what_a_host_does_not_use_is_useless_in_the_end_and_the_books_of_a_closed_zone_stay(
    tmp_path: Path, fabric: str
):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2)
        await arrive(client, node, "r", 1, 2)
        await client.landing_zone("s", 4)  # instead of the one before
        await until(lambda: placement(node)["slots"] == 4)
        assert ledger(node)["useless"] == 2
        assert client.placed("s", tokens(1, 2)) == 0


async def test_an_epoch_bump_empties_the_zones(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2)
        await written(node)
        await arrive(client, node, "r", 1, 2)
        await node.bump_epoch("s")
        await until(lambda: client.placed("s", tokens(1, 2)) == 0)


async def test_without_placement_a_host_loads_by_asking(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric, placement={"enabled": False}) as (node, client):
        assert not await client.landing_zone("s", 8)
        await store(client, "w", 1, 2)
        assert statuses(await load(client, "r", 1, 2)) == ["ok", "ok"]
        assert node.placement.stats() == {}


async def test_the_end_of_a_host_in_the_middle_of_placements_leaves_nothing(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 8)
        await store(client, "w", 1, 2, 3, 4)
        await written(node)
        await client.lookup("s", "r", tokens(1, 2, 3, 4))
        await client._talk.close()
        await until(lambda: placement(node)["zones"] == 0)
        await until(lambda: sum(slab.pool.stats().leases for slab in node.staging.slabs) == 0)
        await trio.lowlevel.checkpoint()
        assert ledger(node)["open"] == 0


async def test_a_zone_that_goes_before_a_placement_begins_leaves_no_lease(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await store(client, "w", 1, 2)
        await client.landing_zone("s", 8)
        [zone], state = node.placement._zones, node.index.spaces["s"]
        refs = state.refs(state.index.handles(node.index.match(state, tokens(1, 2), None)).tolist(), 0)
        node.placement._carry_out(zone, [Fetch(job, ref, None, 1e9, "hint") for job, ref in enumerate(refs)])
        node.placement.close_session(zone.session.number)
        await until(lambda: not zone.cancels)
        assert node.staging.slabs[0].pool.stats().leases == 0
        assert node.staging.lease_staged(refs[0], zone.owner) is None


async def test_what_a_host_says_it_took_from_no_zone_counts_nowhere(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (node, client):
        await store(client, "w", 1, 2)
        await client.lookup("s", "r", tokens(1, 2))
        assert (await client._talk.call(m.Used(request="r", blocks=[0, 1]), m.Ok)).count == 0
        await client.landing_zone("s", 8)
        assert (await client._talk.call(m.Used(request="r", blocks=[0, 1, 1]), m.Ok)).count == 2
        with pytest.raises(RemoteProtocolError, match="shard 7"):
            await client._talk.call(m.Used(request="r", blocks=[0], shard=7), m.Ok)
        assert node.gateway.hosts.by_host["host-a"].landing == 2


async def test_a_block_that_does_not_arrive_takes_the_entry_of_the_one_before_with_it(
    tmp_path: Path, fabric: str, monkeypatch: pytest.MonkeyPatch
):
    """Else the host would find the former block there even when it is no more."""
    async with node_and_host(tmp_path, fabric) as (node, client):
        await client.landing_zone("s", 2)
        await store(client, "w", 1)
        await store(client, "x", 2)
        for block in (1, 2):
            await arrive(client, node, f"r{block}", block)
            assert sources(await client.load(f"r{block}", 0, buffers(1))) == ["landing"]
            await client.finish(f"r{block}")
        await store(client, "y", 3)
        await until(lambda: ledger(node)["timely"] == 2)
        push, calls = node.fabric.push, 0

        async def failing_once(*args: Any) -> str:
            nonlocal calls
            calls += 1
            return "busy" if calls == 1 else await push(*args)

        monkeypatch.setattr(node.fabric, "push", failing_once)
        await client.lookup("s", "q", tokens(3))
        await until(lambda: ledger(node)["failed"] == 1)
        await until(lambda: [client.placed("s", tokens(block)) for block in (1, 2, 3)].count(1) == 1)
        await client.cancel("q")
        await arrive(client, node, "again", 3)


async def test_placements_that_wait_in_vain_leave_nothing(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric, **slots(16)) as (node, client):
        await client.landing_zone("s", 4)
        await store(client, "w", *range(8))
        await client.finish("w")
        for i in range(20):
            await empty_staging(node)
            await client.lookup("s", f"r{i}", tokens(*range(8)))
            await client.cancel(f"r{i}")
        await until(lambda: not node.placement._staged)
