"""A node in this process and real clients over real sockets: what an engine's integrator relies on."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from dpurt.client import Client, connect
from dpurt.client.admin import ask
from dpurt.core.identity import digest_key
from dpurt.errors import (
    LocalProtocolError,
    NodeUnavailable,
    RemoteAccessError,
    RemoteProtocolError,
    SpaceMismatch,
)
from dpurt.node import Node
from dpurt.testing.faulty_bdev import Fault
from dpurt.testing.node import PART_BYTES, running, small_config, small_host, small_space, spaces_of
from dpurt.testing.node_steps import (
    PAYLOAD,
    RECORD,
    NodeOnFaultyBdev,
    assert_books_balance,
    buffers,
    device_of,
    empty_staging,
    file_bdev,
    host,
    load,
    memory_bdev,
    node_and_host,
    payload,
    payloads,
    reasons,
    slots,
    sources,
    statuses,
    store,
    tokens,
    until,
    written,
)
from dpurt.wire import messages as m


@pytest.fixture(params=["shm", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`running` makes nodes on a bdev that fails on request."""
    monkeypatch.setattr("dpurt.testing.node.Node", NodeOnFaultyBdev)


NO_PREFETCH: dict[str, Any] = {"prefetch": {"enabled": False}}


async def bump(node: Node, space: str = "s") -> int:
    request = m.EpochBump(space=space)
    answer = await trio.to_thread.run_sync(ask, node.config.node.run_path, request, m.Ok)
    return answer.count


# --- stores and loads ---


async def test_what_one_host_stores_another_loads(tmp_path: Path, fabric: str) -> None:
    config = small_config(tmp_path / "run")
    prompt = tokens(*range(5))
    with trio.fail_after(20):
        async with running(config) as node:
            async with host(node, config, "host-a", fabric) as a:
                assert (await a.lookup("s", "r1", prompt)).matched_blocks == 0
                assert await a.store("s", "r1", prompt, 0, payloads(*range(5))) == ["stored"] * 5
            async with host(node, config, "host-b", fabric) as b:
                found = await b.lookup("s", "r2", prompt + tokens(99))
                assert (found.matched_blocks, found.matched_tokens) == (5, 80)
                into = buffers(5)
                loaded = await b.load("r2", 0, into)
                assert [block.status for block in loaded] == ["ok"] * 5
                assert [bytes(view) for view in into] == payloads(*range(5))
                assert await b.store("s", "r2", prompt, 0, payloads(*range(5))) == ["exists"] * 5
            assert_books_balance(node)


async def test_of_two_hosts_storing_one_chain_exactly_one_stores_each_block(
    tmp_path: Path, fabric: str
) -> None:
    config = small_config(tmp_path / "run")
    answers: list[list[str]] = []

    async def store_it(client: Client) -> None:
        answers.append(await client.store("s", "r", tokens(*range(6)), 0, payloads(*range(6))))

    with trio.fail_after(20):
        async with (
            running(config) as node,
            host(node, config, "host-a", fabric) as a,
            host(node, config, "host-b", fabric) as b,
        ):
            await a.lookup("s", "r", tokens(*range(6)))
            await b.lookup("s", "r", tokens(*range(6)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store_it, a)
                nursery.start_soon(store_it, b)
            for pair in zip(*answers, strict=True):
                assert sorted(pair)[-1] == "stored"
                assert sorted(pair)[0] in ("exists", "in_flight")
            assert node.intake.stored == 6
            assert statuses(await load(b, "r2", *range(6))) == ["ok"] * 6
            assert_books_balance(node)


async def test_stored_blocks_load_in_the_same_scope(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric) as (_, client):
        await client.lookup("s", "r", tokens(*range(4)))
        assert await client.store("s", "r", tokens(*range(4)), 0, payloads(0, 1)) == ["stored"] * 2
        assert await client.store("s", "r", tokens(*range(4)), 2, payloads(2, 3)) == ["stored"] * 2
        into = buffers(4)
        assert statuses(await client.load("r", 0, into)) == ["ok"] * 4
        assert [bytes(view) for view in into] == payloads(*range(4))


async def test_a_block_another_host_stored_meanwhile_does_not_break_the_scopes_chain(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with (
        running(config) as node,
        host(node, config, "host-a") as a,
        host(node, config, "host-b") as b,
    ):
        assert (await a.lookup("s", "r", tokens(*range(4)))).matched_blocks == 0
        await store(b, "r", 0, 1)
        answer = await a.store("s", "r", tokens(*range(4)), 0, payloads(*range(4)))
        assert answer == ["exists", "exists", "stored", "stored"]
        assert statuses(await a.load("r", 0, buffers(4))) == ["ok"] * 4


async def test_a_scope_never_serves_the_blocks_of_another_prompt(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await store(client, "r", 0, 1)
        with pytest.raises(RemoteProtocolError, match="another prompt"):
            await client.store("s", "r", tokens(7, 8), 0, payloads(7, 8))
        into = buffers(2)
        assert statuses(await client.load("r", 0, into)) == ["ok"] * 2
        assert [bytes(view) for view in into] == payloads(0, 1)


async def test_stores_of_one_scope_may_overlap_and_come_in_any_length(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric) as (_, client):
        answers: dict[int, list[str]] = {}

        async def store_from(first: int, length: int) -> None:
            prompt, count = tokens(*range(length)), length - first
            answers[first] = await client.store(
                "s", "r", prompt, first, payloads(*range(first, first + count))
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store_from, 0, 3)
            await until(lambda: client._talk._waiting or answers)
            nursery.start_soon(store_from, 3, 7)
        assert answers == {0: ["stored"] * 3, 3: ["stored"] * 4}
        assert statuses(await load(client, "r2", *range(7))) == ["ok"] * 7


async def test_payloads_and_buffers_of_the_wrong_size_are_the_callers_error(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        with pytest.raises(ValueError, match=f"has {PAYLOAD} bytes, got \\[1\\]"):
            await client.store("s", "r", tokens(0), 0, [b"x"])
        await store(client, "r", 0)
        with pytest.raises(ValueError, match="a buffer of 8 bytes for"):
            await client.load("r", 0, buffers(1, 8))
        await until(lambda: node.staging.slabs[0].pool.stats().leases == 0)


# --- parts ---


async def test_a_run_of_parts_loads_from_staging_and_from_flash(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric, **NO_PREFETCH) as (node, client):
        await store(client, "r", 0, 1)
        assert await load_parts(client, "r", (1, 3), 0, 1) == ["staging"] * 2
        await empty_staging(node)
        before = node.bdevs[0].stats.bytes_read
        assert await load_parts(client, "r", (1, 3), 0, 1) == ["nvme"] * 2
        assert node.bdevs[0].stats.bytes_read - before == 2 * (4096 + 2 * PART_BYTES)
        assert await load_parts(client, "r", (1, 3), 0, 1) == ["staging"] * 2


async def load_parts(client: Client, request: str, parts: tuple[int, int], *blocks: int) -> list[str]:
    start, stop = (PART_BYTES * part for part in parts)
    into = buffers(len(blocks), stop - start)
    loaded = await client.load(request, 0, into, parts=parts)
    assert statuses(loaded) == ["ok"] * len(blocks)
    assert [bytes(view) for view in into] == [payload(block)[start:stop] for block in blocks]
    return sources(loaded)


async def test_a_later_load_reads_only_the_parts_that_are_not_staged(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, **NO_PREFETCH) as (node, client):
        await store(client, "r", 0)
        await empty_staging(node)
        assert await load_parts(client, "r", (0, 1), 0) == ["nvme"]
        before = node.bdevs[0].stats.bytes_read
        assert await load_parts(client, "r", (0, 4), 0) == ["nvme"]
        assert node.bdevs[0].stats.bytes_read - before == 4096 + 3 * PART_BYTES
        assert await load_parts(client, "r", (2, 4), 0) == ["staging"]


async def test_loads_of_different_parts_at_once_all_get_theirs(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric, **NO_PREFETCH) as (node, client):
        await store(client, "r", 0, 1, 2)
        await empty_staging(node)
        async with trio.open_nursery() as nursery:
            for parts in [(0, 1), (2, 4), (1, 2), (0, 4)]:
                nursery.start_soon(load_parts, client, "r", parts, 0, 1, 2)
        assert sources(await load(client, "r2", 0, 1, 2)) == ["staging"] * 3


async def test_parts_and_shards_a_space_does_not_have_are_refused(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        asks: list[Callable[[], object]] = [
            lambda: client.load("r", 0, buffers(1), parts=(2, 2)),
            lambda: client.load("r", 0, buffers(1), parts=(0, 5)),
            lambda: client.load("r", 0, buffers(1), shard=1),
            lambda: client.lookup("s", "r", tokens(0), will_load=False, shard=1),
            lambda: client.explain("s", tokens(0), shard=7),
            lambda: client.store("s", "r", tokens(0), 0, payloads(0), shard=1),
        ]
        for one in asks:
            with pytest.raises(RemoteProtocolError, match="malformed"):
                await one()  # type: ignore[misc]
        await client.hint(m.Hint(request="r", kind="decode", group=2**31 - 1, touched=[0]))
        await until(lambda: node.gateway.errors["malformed"] == len(asks) + 1)
        assert all(agent.restarts == 0 for agent in node._agents)


# --- views and pushes ---


async def test_a_view_is_the_nodes_memory_and_leased_until_the_block_ends(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0, 1, 2)
        pool = node.staging.slabs[0].pool
        async with client.view("r", 0, 3) as blocks:
            views = [block.data for block in blocks]
            assert [bytes(view) for view in views if view is not None] == payloads(0, 1, 2)
            assert all(view is not None and view.readonly for view in views)
            assert pool.stats().leases == 3
            await written(node)
            slab = node.staging.slabs[0]
            slot = next(i for i in range(3) if bytes(slab.image(i)[4096:RECORD]) == payload(1))
            slab.image(slot)[4096] ^= 0xFF
            assert views[1] is not None
            assert views[1][0] == payload(1)[0] ^ 0xFF, "a view is not a copy"
            slab.image(slot)[4096] ^= 0xFF
            del views, blocks
        await until(lambda: pool.stats().leases == 0)


async def test_a_viewed_block_is_not_evicted(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, **slots(4)) as (node, client):
        await store(client, "r", 0, 1)
        await written(node)
        async with client.view("r", 0, 2) as blocks:
            await empty_staging(node, leases=2)
            for i in range(10, 16):
                await store(client, f"r{i}", i)
            assert [bytes(b.data) for b in blocks if b.data is not None] == payloads(0, 1)
            del blocks


async def test_a_fabric_without_views_says_so(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, "tcp") as (node, client):
        await store(client, "r", 0)
        with pytest.raises(LocalProtocolError, match="no_views"):
            async with client.view("r", 0, 1):
                pass
        await until(lambda: node.staging.slabs[0].pool.stats().leases == 0)


async def test_the_node_pushes_into_a_landing_region(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric) as (node, client):
        await store(client, "r", 0, 1, 2)
        await empty_staging(node)
        landing = await client.landing(8 * PAYLOAD)
        at = [4 * PAYLOAD, 0, 2 * PAYLOAD]
        loaded = await client.load_pushed("r", 0, landing, at)
        assert statuses(loaded) == ["ok"] * 3
        for offset, block in zip(at, [0, 1, 2], strict=True):
            assert bytes(landing.view[offset : offset + PAYLOAD]) == payload(block)
        part = await client.load_pushed("r", 0, landing, [PAYLOAD], parts=(3, 4))
        assert part[0].data is not None
        assert bytes(part[0].data) == payload(0)[3 * PART_BYTES :]
        stats = node.staging.slabs[0].pool.stats()
        assert (stats.leases, stats.transfers) == (0, 0)


async def test_a_push_beyond_the_landing_region_is_an_error_per_block_and_nothing_stays_leased(
    tmp_path: Path, fabric: str
) -> None:
    async with node_and_host(tmp_path, fabric) as (node, client):
        await store(client, "r", 0)
        landing = await client.landing(PAYLOAD)
        message = m.Load(
            request="r", first=0, count=1, landing=m.Landing(region=landing.region_id, offsets=[1 << 40])
        )
        reply = await client._talk.call(message, m.LoadReply)
        assert [grant.status for grant in reply.blocks] == ["error"]
        assert reply.blocks[0].reason
        assert node.staging.slabs[0].pool.stats().leases == 0
        assert statuses(await load(client, "r2", 0)) == ["ok"]


# --- shards and digests ---


async def test_a_match_counts_only_what_every_rank_has(tmp_path: Path, fabric: str) -> None:
    tables: dict[str, Any] = {"space": [small_space("s", tp_size=2)]}
    async with node_and_host(tmp_path, fabric, **tables) as (node, client):
        assert await client.store("s", "r0", tokens(0, 1, 2), 0, payloads(0, 1, 2)) == ["stored"] * 3
        assert (await client.lookup("s", "r0", tokens(0, 1, 2))).matched_blocks == 0
        answer = await client.store("s", "r1", tokens(0, 1, 2), 0, payloads(10, 11), shard=1)
        assert answer == ["stored"] * 2
        found = await client.lookup("s", "r2", tokens(0, 1, 2))
        assert (found.matched_blocks, found.staging, found.nvme) == (2, 2, 0)
        for source in ["staging", "nvme"]:
            for shard, wanted in [(0, payloads(0, 1)), (1, payloads(10, 11))]:
                await client.lookup("s", f"q{shard}", tokens(0, 1, 2), shard=shard)
                into = buffers(2)
                loaded = await client.load(f"q{shard}", 0, into, shard=shard)
                assert statuses(loaded) == ["ok"] * 2
                assert source == "nvme" or sources(loaded) == ["staging"] * 2
                assert [bytes(view) for view in into] == wanted
            await empty_staging(node)


async def test_a_block_without_all_its_shards_is_incomplete_and_explain_names_those(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"space": [small_space("s", tp_size=8)]}
    async with node_and_host(tmp_path, **tables) as (_, client):
        for shard in (0, 4):
            assert await client.store("s", f"r{shard}", tokens(0), 0, payloads(0), shard=shard) == ["stored"]
        found = await client.lookup("s", "q", tokens(0, 1))
        assert (found.matched_blocks, found.miss) == (0, "incomplete")
        for shard in (0, 1):  # all ranks hear the same
            first, second = await client.explain("s", tokens(0, 1), shard=shard)
            assert (first.reason, second.reason) == ("incomplete", "never_stored")
            assert "of shards 0-7, 1-3, 5-7 are not here" in first.detail
        for shard in (1, 2, 3, 5, 6, 7):
            assert await client.store("s", f"r{shard}", tokens(0), 0, payloads(0), shard=shard) == ["stored"]
        assert (await client.lookup("s", "q2", tokens(0))).matched_blocks == 1
        assert await reasons(client, 0) == ["present"]


async def test_a_bad_shard_takes_nothing_from_the_good_one(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"space": [small_space("s", tp_size=2)]}
    async with node_and_host(tmp_path, **tables) as (node, client):
        assert await client.store("s", "r", tokens(0), 0, payloads(0)) == ["stored"]
        reserve = m.Reserve(space="s", request="r1", first=0, count=1, tokens=tokens(0), shard=1)
        [room] = (await client._talk.call(reserve, m.ReserveReply)).blocks
        commit = m.Commit(
            request="r1", blocks=[m.CommitBlock(reservation=room.reservation, crcs=[1, 2, 3, 4])]
        )
        assert (await client._talk.call(commit, m.CommitReply)).statuses == ["checksum"]
        assert await client.store("s", "r1", tokens(0), 0, payloads(9), shard=1) == ["stored"]
        found = await client.lookup("s", "r", tokens(0))
        assert (found.matched_blocks, node.intake.stored) == (1, 2)


async def test_a_chain_known_by_digests_only(tmp_path: Path, fabric: str) -> None:
    chain = [bytes([i]) * 32 for i in range(4)]
    async with node_and_host(tmp_path, fabric) as (node, client):
        answer = await client.store("s", "r", None, 0, payloads(0, 1), digests=chain[:2])
        assert answer == ["stored"] * 2
        assert await client.store("s", "r", None, 2, payloads(2, 3), digests=chain) == ["stored"] * 2
        await empty_staging(node)
        found = await client.lookup("s", "r2", digests=[*chain, b"unknown digest"])
        assert found.matched_blocks == 4
        into = buffers(4)
        assert statuses(await client.load("r2", 0, into)) == ["ok"] * 4
        assert [bytes(view) for view in into] == payloads(0, 1, 2, 3)
        why = await client.explain("s", digests=[*chain, b"unknown digest"])
        assert [reason.reason for reason in why] == ["present"] * 4 + ["never_stored"]
        assert (
            node.index.spaces["s"].index.get(digest_key(node.index.spaces["s"].fingerprint, chain[0]))
            is not None
        )


async def test_a_digest_stored_under_another_parent_is_an_orphan_not_a_crash(tmp_path: Path) -> None:
    one, two, other = b"1" * 16, b"2" * 16, b"3" * 16
    tables: dict[str, Any] = {"space": [small_space("s", tp_size=2)]}
    async with node_and_host(tmp_path, **tables) as (node, client):
        assert await client.store("s", "r", None, 0, payloads(1, 2), digests=[one, two]) == ["stored"] * 2
        answer = await client.store("s", "q", None, 0, payloads(3, 2), digests=[other, two], shard=1)
        assert answer == ["orphan"] * 2
        assert all(agent.restarts == 0 for agent in node._agents)


# --- tiers ---


async def test_blocks_evicted_to_flash_come_back_right_and_are_counted_by_tier(
    tmp_path: Path, fabric: str
) -> None:
    async with node_and_host(tmp_path, fabric, **slots(8), **NO_PREFETCH) as (node, client):
        for first in range(0, 24, 4):
            answer = await client.store(
                "s", "r", tokens(*range(24)), first, payloads(*range(first, first + 4))
            )
            assert answer == ["stored"] * 4
        await written(node)
        found = await client.lookup("s", "q", tokens(*range(24)))
        assert (found.matched_blocks, found.staging + found.nvme) == (24, 24)
        assert found.staging == 8
        assert found.ready_ms > 0
        tiers: list[str] = []
        for first in range(0, 24, 4):
            into = buffers(4)
            loaded = await client.load("q", first, into)
            assert statuses(loaded) == ["ok"] * 4
            assert [bytes(view) for view in into] == payloads(*range(first, first + 4))
            tiers += sources(loaded)
        stats = await client.stats()
        counters = stats["hosts"]["host-a"]  # type: ignore[index]
        assert counters["staging"] == tiers.count("staging")
        assert counters["nvme"] == tiers.count("nvme") > 0
        assert counters["blocks"] == 24
        assert counters["bytes_loaded"] == 24 * PAYLOAD


async def test_no_room_is_answered_for_exactly_the_blocks_that_found_none(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, **slots(4), **NO_PREFETCH) as (node, client):
        await store(client, "held", 0, 1)
        async with client.view("held", 0, 2):
            await store(client, "r", 10, 11)
            await client.store("s", "r", tokens(10, 11, 12), 2, payloads(12))
            await client.store("s", "r", tokens(10, 11, 12, 13), 3, payloads(13))
            await written(node)
            loaded = await load(client, "r", 10, 11, 12, 13)
            assert sorted(statuses(loaded)) == ["no_room", "no_room", "ok", "ok"]
            ready = [i for i, block in enumerate(loaded) if block.is_ok]
            assert sources(loaded)[ready[0]] == "staging", "what is staged is not evicted for its neighbours"
            why = await client.explain("s", tokens(10, 11, 12, 13))
            assert [reason.reason for reason in why] == ["present"] * 4
            assert ["no_room" in reason.detail for reason in why] == [not b.is_ok for b in loaded]
        await until(lambda: node.staging.slabs[0].pool.stats().leases == 0)
        assert statuses(await load(client, "r", 10, 11, 12, 13)) == ["ok"] * 4


async def test_a_slow_device_makes_blocks_late_within_the_loads_deadline(
    tmp_path: Path, fabric: str, faulty: None
) -> None:
    async with node_and_host(tmp_path, fabric, **NO_PREFETCH) as (node, client):
        await store(client, "r", 0, 1, 2)
        await empty_staging(node)
        assert sources(await load(client, "q", 0)) == ["nvme"]
        device_of(node).inject(Fault(op="read", kind="hang", count=2))
        began = trio.current_time()
        loaded = await client.load("r", 0, buffers(3), timeout_s=0.4)
        assert trio.current_time() - began < 3 * 0.4
        assert statuses(loaded) == ["ok", "late", "late"]
        why = await client.explain("s", tokens(0, 1, 2))
        assert ["late" in reason.detail for reason in why] == [False, True, True]
        device_of(node).resume()
        await until(lambda: node.staging.num_flights == 0)
        assert sources(await load(client, "r", 0, 1, 2)) == ["staging"] * 3


async def test_a_load_nobody_waits_for_any_more_leaves_no_lease(tmp_path: Path, faulty: None) -> None:
    async with node_and_host(tmp_path, "tcp", **NO_PREFETCH) as (node, client):
        await store(client, "r", 0)
        await empty_staging(node)
        device_of(node).inject(Fault(op="read", kind="hang"))
        with trio.move_on_after(0.1):
            await client.load("r", 0, buffers(1))
        device_of(node).resume()
        await until(lambda: node.staging.num_flights == 0)
        await until(lambda: not any(s.in_flight for s in node.gateway.hosts.sessions.values()))
        pool = node.staging.slabs[0].pool
        await until(lambda: pool.stats().leases == 0)


# --- why not ---


async def test_explain_tells_present_from_never_stored(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await store(client, "r", 0, 1)
        assert await reasons(client, 0, 1, 2, 3) == ["present", "present", "never_stored", "never_stored"]


async def test_explain_names_what_a_bad_record_took_with_it(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, **NO_PREFETCH) as (node, client):
        await store(client, "r", 0, 1, 2)
        await empty_staging(node)
        state = node.index.spaces["s"]
        bad = int(state.index.match(tokens(0, 1, 2))[1])
        node.bdevs[0].image[state.extent_of(bad, 0) + 4096] ^= 1  # type: ignore[attr-defined]
        assert statuses(await load(client, "q", 0, 1, 2))[:2] == ["ok", "checksum"]
        assert await reasons(client, 0, 1, 2) == ["present", "checksum", "parent_lost"]
        assert (await client.lookup("s", "q2", tokens(0, 1, 2))).matched_blocks == 1


async def test_explain_says_evicted_when_the_only_copy_was_in_staging(tmp_path: Path, faulty: None) -> None:
    async with node_and_host(tmp_path, **NO_PREFETCH) as (node, client):
        device_of(node).inject(Fault(op="write", kind="error", count=9))
        await store(client, "r", 0)
        await until(lambda: node.intake.writes_lost == 1)
        device_of(node).clear()
        assert statuses(await load(client, "q", 0)) == ["ok"]
        await client.finish("q")
        await until(lambda: node.staging.slabs[0].pool.stats().leases == 0)
        await empty_staging(node)
        assert await reasons(client, 0) == ["evicted"]


async def test_explain_says_reclaimed_when_the_device_needed_the_place(tmp_path: Path) -> None:
    tables: dict[str, Any] = {**slots(8), **memory_bdev(2 << 20, 256 << 10), **NO_PREFETCH}
    async with node_and_host(tmp_path, **tables) as (node, client):
        for block in range(120):
            await store(client, f"r{block}", block)
        await written(node)
        why = [(await reasons(client, block))[0] for block in range(120)]
        assert set(why) == {"reclaimed", "present"}
        assert why[-8:] == ["present"] * 8
        assert why.count("reclaimed") == node.reclaimer.dropped > 0
        first = why.index("present")
        assert statuses(await load(client, "q", first)) == ["ok"]


async def test_blocks_expire_after_their_time_to_live(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, space=[small_space("s", ttl_s=0.2)]) as (node, client):
        await store(client, "r", 0, 1)
        assert (await client.lookup("s", "q", tokens(0, 1))).matched_blocks == 2
        await until(lambda: node.index.drops.get("expired") == 2)
        assert (await client.lookup("s", "q2", tokens(0, 1))).matched_blocks == 0
        assert await reasons(client, 0, 1) == ["expired", "expired"]


async def test_explain_names_the_field_in_which_another_space_differs(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "space": [small_space("s"), small_space("fp8", kv_dtype="fp8")],
        "host": [small_host("host-a", spaces=["s", "fp8"])],
    }
    async with node_and_host(tmp_path, **tables) as (_, client):
        await store(client, "r", 0)
        [reason] = await client.explain("fp8", tokens(0))
        assert reason.reason == "other_space"
        assert "kv_dtype: 'fp8' here, 'fp16' there" in reason.detail


async def test_a_host_with_another_idea_of_the_space_is_refused_by_field(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    theirs = small_config(tmp_path / "run", space=[small_space("s", kv_dtype="fp8")])
    async with running(config) as node:
        with pytest.raises(SpaceMismatch, match=r"'kv_dtype'.*node has 'fp16', host has 'fp8'"):
            async with host(node, theirs) as client:
                await client.lookup("s", "r", tokens(0))


# --- epochs and restarts ---


async def test_an_epoch_bump_hides_all_blocks_while_readers_drain(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0, 1)
        pool = node.staging.slabs[0].pool
        async with client.view("r", 0, 2) as blocks:
            assert await bump(node) == 1
            assert [bytes(b.data) for b in blocks if b.data is not None] == payloads(0, 1)
            with pytest.raises(RemoteProtocolError, match="stale_epoch"):
                await client._talk.exchange(
                    m.Lookup(space="s", request="r", tokens=tokens(0)), m.LookupReply, trio.current_time() + 2
                )
            async with host(node, node.config, "host-b") as other:
                for block in range(10, 30):  # the slots of the draining reader are not reused
                    await store(other, f"r{block}", block)
            assert [bytes(b.data) for b in blocks if b.data is not None] == payloads(0, 1)
            del blocks
        async with host(node, node.config, "host-b") as new:
            assert (await new.lookup("s", "q", tokens(0, 1))).matched_blocks == 0
            assert await reasons(new, 0, 1) == ["epoch", "epoch"]
            await store(new, "r", 0, 1)
            assert statuses(await load(new, "q", 0, 1)) == ["ok"] * 2
        await client._talk.close()
        await until(lambda: pool.stats().quarantined == 0)


async def test_after_a_bump_a_client_of_the_old_weights_stores_and_loads_nothing(
    tmp_path: Path, fabric: str
) -> None:
    async with node_and_host(tmp_path, fabric) as (node, old):
        await store(old, "r", 0)
        await bump(node)
        with pytest.raises(NodeUnavailable, match="stale_epoch"):
            await old.load("r", 0, buffers(1))
        for _ in range(2):
            with pytest.raises(
                SpaceMismatch, match=r"'epoch'.*'1', host has '0'; new weights need a new client"
            ):
                await old.store("s", "r", tokens(0, 1), 0, payloads(0, 1))
        with pytest.raises(SpaceMismatch, match="epoch"):
            await old.lookup("s", "q", tokens(0))
        async with host(node, node.config, fabric=fabric) as new:
            assert (await new.lookup("s", "r", tokens(0, 1))).matched_blocks == 0
            await store(new, "r", 0)
            assert statuses(await load(new, "q", 0)) == ["ok"]


async def test_after_a_bump_nobody_plans_what_is_gone(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        for turn in range(3):
            blocks = range(10 * turn, 10 * turn + 3)
            await store(client, f"s{turn}", *blocks)
            await client.lookup("s", f"q{turn}", tokens(*blocks))
            await client.finish(f"q{turn}")
        await bump(node)
        core = node.prefetch.core
        assert core is not None
        planned = core.stats().total.planned
        await trio.sleep(2)
        assert core.stats().total.planned == planned


async def test_a_lookup_under_way_at_a_bump_says_so_in_the_same_call(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        await bump(node)
        with pytest.raises(SpaceMismatch, match="epoch"):
            await client.lookup("s", "q", tokens(0))
        assert not node.gateway.hosts.sessions


async def test_a_client_may_say_which_epoch_its_weights_are_of(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, _):
        await bump(node)
        for epoch in (0, 2):
            async with connect(
                node.gateway.endpoint, host="host-b", spaces=spaces_of(node.config), epochs={"s": epoch}
            ) as client:
                with pytest.raises(SpaceMismatch, match="epoch"):
                    await client.lookup("s", "r", tokens(0))
        async with connect(
            node.gateway.endpoint, host="host-b", spaces=spaces_of(node.config), epochs={"s": 1}
        ) as client:
            await store(client, "r", 0)


async def test_hits_from_before_a_restart_and_none_from_before_an_epoch(tmp_path: Path, fabric: str) -> None:
    config = small_config(tmp_path / "run", **file_bdev(tmp_path / "flash"))
    with trio.fail_after(30):
        async with running(config) as node, host(node, config, fabric=fabric) as client:
            await store(client, "r", *range(20))
        async with running(config) as node:
            async with host(node, config, "host-b", fabric) as client:
                found = await client.lookup("s", "q", tokens(*range(20)))
                assert (found.matched_blocks, found.nvme) == (20, 20)
                assert found.ready_ms > 0
                assert statuses(await load(client, "q", *range(20))) == ["ok"] * 20
                await bump(node)
                with pytest.raises(SpaceMismatch, match="epoch"):
                    await client.lookup("s", "q2", tokens(*range(20)))
        async with running(config) as node, host(node, config, fabric=fabric) as client:
            assert (await client.lookup("s", "r", tokens(*range(20)))).matched_blocks == 0
            assert (await client.session(trio.current_time() + 5)).epochs == {"s": 1}
            assert node.store.incarnation == 3


async def test_a_changed_space_is_told_at_the_start_and_nothing_of_it_served(tmp_path: Path) -> None:
    device = file_bdev(tmp_path / "flash")
    config = small_config(tmp_path / "run", **device)
    changed = small_config(tmp_path / "run", space=[small_space("s", revision="r2")], **device)
    with trio.fail_after(30):
        async with running(config) as node, host(node, config) as client:
            await store(client, "r", 0, 1)
        told = []
        for topology in (config, changed):
            with structlog.testing.capture_logs() as logs:
                async with running(topology) as node, host(node, topology) as client:
                    found = await client.lookup("s", "r", tokens(0, 1))
            told.append(
                (found.matched_blocks, [x["count"] for x in logs if x["event"] == "foreign_segments"])
            )
        assert told == [(2, []), (0, [1])]


async def test_after_a_restart_blocks_are_as_old_as_their_storing_and_their_segments_are_reclaimed(
    tmp_path: Path,
) -> None:
    [device] = file_bdev(tmp_path / "flash")["bdev"]
    device |= {"size_bytes": 2 << 20, "capacity_bytes": 2 << 20, "segment_bytes": 256 << 10}
    config = small_config(tmp_path / "run", bdev=[device], **slots(8), **NO_PREFETCH)
    with trio.fail_after(60):
        async with running(config) as node, host(node, config) as client:
            await store(client, "head", 0)
            await store(client, "other", 50)
            assert await client.store("s", "tail", tokens(0, 1), 1, [payload(1)]) == ["stored"]
            await written(node)
        async with running(config) as node, host(node, config) as client:
            index = node.index.spaces["s"].index
            ids = [int(index.match(tokens(*chain))[-1]) for chain in ((50,), (0, 1), (0,))]
            other, tail, head = index.table.last_use[ids].tolist()
            assert other < tail == head <= trio.current_time(), "a head is as young as what follows it"
            for block in range(100, 220):
                await store(client, f"r{block}", block)
            await written(node)
            assert (await reasons(client, 0, 1))[1] == "reclaimed", "the head may have been carried on"
            extents = index.table.where[index.table.live(), index.table.first_extent]
            live = [
                offset
                for segment in range(node.store.stores[0]._log.num_segments)
                for offset in node.store.stores[0]._log.live_offsets(segment)
            ]
            assert sorted(extents[extents >= 0].tolist()) == live


async def test_a_restart_after_their_time_finds_no_blocks_and_orphans_of_one_shard_leave_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "flash"
    timed = small_config(tmp_path / "run", space=[small_space("s", ttl_s=0.3)], **file_bdev(path))
    with trio.fail_after(30):
        async with running(timed) as node, host(node, timed) as client:
            await store(client, "r", 0, 1)
        await trio.sleep(0.4)
        async with running(timed) as node, host(node, timed) as client:
            assert (await client.lookup("s", "q", tokens(0, 1))).matched_blocks == 0
            assert await reasons(client, 0, 1) == ["expired", "expired"]
    path.unlink()
    ranks = small_config(tmp_path / "run", space=[small_space("s", tp_size=2)], **file_bdev(path))
    with trio.fail_after(30):
        async with running(ranks) as node, host(node, ranks) as client:
            for shard in (0, 1):
                assert (
                    await client.store("s", f"r{shard}", tokens(0, 1), 0, payloads(0, 1), shard=shard)
                    == ["stored"] * 2
                )
            await written(node)
        image = bytearray(path.read_bytes())
        first_of_shard_1 = bytes([1, 0, 0, 0, 0, 0, 0, 0])  # shard and position, see `dpurt.core.record`
        torn = [
            at
            for at in range(0, len(image), 4096)
            if image[at : at + 8] == b"dpurtREC" and image[at + 24 : at + 32] == first_of_shard_1
        ]
        for at in torn:
            image[at : at + 4096] = bytes(4096)
        path.write_bytes(image)
        assert len(torn) == 1
        async with running(ranks) as node, host(node, ranks) as client:
            index = node.index.spaces["s"].index
            table = index.table
            copies = (table.where[table.live()] >= 0).any(axis=1)
            assert copies.all(), "a record that is nowhere is forgotten"
            assert node.rebuilt["orphans"] == 1


async def test_a_node_told_to_stop_before_it_is_up_serves_nobody_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpurt.node.REBUILD_LOG_S", -1.0)
    config = small_config(tmp_path / "run", **file_bdev(tmp_path / "flash"))
    with trio.fail_after(30):
        async with running(config) as node, host(node, config) as client:
            await store(client, "r", *range(12))
        node = Node(config)
        node.stop()
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
        assert [line["segments"] for line in logs if line["event"] == "rebuilding"]
        assert not node.index.spaces["s"].index.table.live().size
        async with running(config) as node, host(node, config) as client:
            assert (await client.lookup("s", "q", tokens(*range(12)))).matched_blocks == 12


async def test_what_a_drain_leaves_behind_is_said(tmp_path: Path, faulty: None) -> None:
    config = small_config(
        tmp_path / "run", node={"name": "n", "run_dir": str(tmp_path / "run"), "drain_s": 0.2}
    )
    with trio.fail_after(30), structlog.testing.capture_logs() as logs:
        async with running(config) as node, host(node, config) as client:
            device_of(node).inject(Fault(op="write", kind="delay", delay_s=0.6, count=99))
            await store(client, "r", 0, 1, 2)
    [line] = [line for line in logs if line["event"] == "node_not_drained"]
    assert (line["blocks_not_written"], line["requests"], line["log_level"]) == (3, 0, "warning")
    assert not [line for line in logs if line["event"] == "node_drained"]


async def test_stopping_drains_what_the_device_does_not_have_yet(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", **file_bdev(tmp_path / "flash"))
    with trio.fail_after(30):
        async with running(config) as node:
            async with host(node, config) as client:
                await store(client, "r", *range(12))
                node.gateway.hosts.is_draining = (
                    True  # as `stop` does first; how long the rest takes is the device's
                )
                with pytest.raises(RemoteProtocolError, match="draining"):
                    await client.lookup("s", "new", tokens(0))
                node.stop()
        async with running(config) as node, host(node, config) as client:
            assert (await client.lookup("s", "q", tokens(*range(12)))).matched_blocks == 12


# --- hints ---


def outcomes(node: Node) -> dict[str, int]:
    assert node.prefetch.core is not None
    total = node.prefetch.core.ledger.totals()
    names = ("timely", "late", "cancelled", "open", "failed")
    return {name: getattr(total, name) for name in names if getattr(total, name)}


def staged_blocks(node: Node) -> int:
    return sum(slab.pool.stats().ready for slab in node.staging.slabs)


async def test_an_arrival_hint_stages_the_prefix_before_the_load(tmp_path: Path, fabric: str) -> None:
    async with node_and_host(tmp_path, fabric) as (node, client):
        await store(client, "r", *range(6))
        await client.finish("r")
        await empty_staging(node)
        await client.hint(m.Hint(request="q", kind="arrival", space="s", tokens=tokens(*range(6))))
        await until(lambda: staged_blocks(node) == 6)
        loaded = await client.load("q", 0, buffers(6))
        assert sources(loaded) == ["staging"] * 6
        await until(lambda: outcomes(node).get("timely") == 6)


async def test_a_resumed_sequence_gets_its_blocks_staged_again(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", *range(4))
        await client.finish("r")
        await client.lookup("s", "q", tokens(*range(4)))
        await client.hint(m.Hint(request="q", kind="pause", expected_ms=60_000, reason="tool_use"))
        await empty_staging(node)
        assert staged_blocks(node) == 0
        await client.hint(m.Hint(request="q", kind="resume"))
        await until(lambda: staged_blocks(node) == 4)
        await client.finish("q", "end_turn")
        await until(lambda: not any(session.scopes for session in node.gateway.hosts.sessions.values()))


async def test_a_decode_hint_stages_the_ranked_parts_only(tmp_path: Path) -> None:
    prefetch: dict[str, Any] = {"prefetch": {"predictors": ["hint"]}}
    async with node_and_host(tmp_path, **prefetch) as (node, client):
        await store(client, "r", *range(6))
        await client.lookup("s", "q", tokens(*range(6)))
        await empty_staging(node)
        before = node.bdevs[0].stats.bytes_read
        hint = m.Hint(request="q", kind="decode", step=1, group=2, ranked=[4, 1], touched=[0], need_ms=200)
        await client.hint(hint)
        await until(lambda: node.bdevs[0].stats.bytes_read - before >= 2 * (4096 + PART_BYTES))
        into = buffers(1, PART_BYTES)
        loaded = await client.load("q", 4, into, parts=(2, 3))
        assert sources(loaded) == ["staging"]
        assert bytes(into[0]) == payload(4)[2 * PART_BYTES : 3 * PART_BYTES]
        assert node.bdevs[0].stats.bytes_read - before == 2 * (4096 + PART_BYTES)


@pytest.mark.parametrize("end", ["cancel", "finish"])
async def test_ending_a_request_ends_its_prefetches(tmp_path: Path, faulty: None, end: str) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", *range(12))
        await client.finish("r")
        await empty_staging(node)
        device_of(node).inject(Fault(op="read", kind="hang", count=100))
        await client.lookup("s", "q", tokens(*range(12)))
        await until(lambda: outcomes(node).get("open") == 12)
        await getattr(client, end)("q")
        await until(lambda: outcomes(node).get("cancelled") == 12)
        device_of(node).clear()
        device_of(node).resume()
        await until(lambda: node.staging.num_flights == 0)
        core = node.prefetch.core
        assert core is not None
        await until(lambda: core.arbiter.held_bytes == 0)


async def test_a_demand_waits_for_the_prefetch_under_way_and_reads_nothing_twice(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", *range(8))
        await client.finish("r")
        await empty_staging(node)
        before = node.bdevs[0].stats.bytes_read
        assert statuses(await load(client, "q", *range(8))) == ["ok"] * 8
        assert node.bdevs[0].stats.bytes_read - before == 8 * RECORD


async def test_a_store_that_fails_on_the_way_gives_its_reservations_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await client.lookup("s", "r1", tokens(1, 2))

        async def broken(pieces: object, deadline: float) -> None:
            raise RemoteAccessError("node", "store", "made to fail by the test")

        with monkeypatch.context() as patch:
            patch.setattr(client._talk.present().endpoint, "store", broken)
            with pytest.raises(RemoteProtocolError):
                await client.store("s", "r1", tokens(1, 2), 0, payloads(1, 2))
        await until(lambda: node.intake.num_reserved == 0)
        assert await client.store("s", "r1", tokens(1, 2), 0, payloads(1, 2)) == ["stored", "stored"]


async def test_a_lookup_says_why_the_block_after_the_match_is_not_here(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r1", 1, 2)
        assert (await client.lookup("s", "r1", tokens(1, 2))).miss == ""
        assert (await client.lookup("s", "r2", tokens(1, 2, 3))).miss == "never_stored"
        block_id = node.index.spaces["s"].index.match(tokens(1, 2))[1]
        node.index.drop(node.index.spaces["s"], int(block_id), "expired", trio.current_time())
        assert (await client.lookup("s", "r3", tokens(1, 2, 3))).miss == "expired"


async def test_an_arrival_hint_takes_digests_too(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        digests = [bytes([i]) * 32 for i in range(3)]
        assert (await client.store("s", "r1", None, 0, payloads(1, 2, 3), digests=digests))[0] == "stored"
        await client.hint(m.Hint(request="r2", kind="arrival", space="s", digests=digests))
        assert len(await client.load("r2", 0, buffers(3))) == 3


# --- endurance ---


async def test_a_node_writes_no_more_than_its_drives_may_take_a_day_but_what_is_used_again(
    tmp_path: Path,
) -> None:
    writes_a_day = 24 * 20.9 * RECORD / (64 << 20)  # twenty blocks an hour: ten for newcomers
    bdev = [{**one, "drive_writes_per_day": writes_a_day} for one in memory_bdev()["bdev"]]
    config = small_config(tmp_path, bdev=bdev)
    async with running(config) as node, host(node, config) as client:
        await store(client, "a", *range(14))
        await written(node)
        assert node.store.stores[0].stats().appends == 10
        assert sources(await load(client, "b", *range(14))) == ["staging"] * 14
        await written(node)
        stats = node.stats()["endurance"]
        assert isinstance(stats, dict)
        assert (stats["admitted"], stats["admitted_again"], stats["spent_bytes"]) == (14, 4, 14 * RECORD)
        assert stats["bytes_written"] == 14 * RECORD


async def test_a_node_without_descriptors_left_still_tells_its_counters(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        before = (await client.stats())["node"]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            found = (await client.stats())["node"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert before.keys() - found.keys() == {"rss_bytes", "open_fds"}
        assert node.gateway.restarts == 0
