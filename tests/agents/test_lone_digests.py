"""Blocks named by digests that are no chain, as hooks give them that know no parents: each is found, kept and lost alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dpurt.client import Client
from dpurt.errors import RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.node import running, small_config, small_space
from dpurt.testing.node_steps import (
    assert_books_balance,
    buffers,
    empty_staging,
    file_bdev,
    host,
    node_and_host,
    payload,
    payloads,
    sources,
    statuses,
    written,
)
from dpurt.wire import messages as m


def digests(*blocks: int) -> list[bytes]:
    return [block.to_bytes(32, "little") for block in blocks]


async def put(client: Client, request: str, *blocks: int, shard: int = 0) -> list[str]:
    return await client.store(
        "s", request, None, 0, payloads(*blocks), digests=digests(*blocks), chained=False, shard=shard
    )


async def look(client: Client, request: str, *blocks: int, will_load: bool = True) -> list[bool]:
    found = await client.lookup("s", request, digests=digests(*blocks), chained=False, will_load=will_load)
    here = [found.is_present(i) for i in range(len(blocks))]
    assert found.matched_blocks == sum(here) == found.staging + found.in_flight + found.nvme
    return here


async def refused(client: Client, request: m.Request) -> str:
    await client.session(trio.current_time() + 5)
    with pytest.raises(RemoteProtocolError) as caught:
        await client._talk.exchange(request, m.Ok, trio.current_time() + 5)
    return caught.value.message


async def test_each_block_is_found_by_itself(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        assert await put(client, "w", 1, 3, 5) == ["stored"] * 3
        assert await look(client, "r", 0, 1, 2, 3, 4, 5) == [False, True, False, True, False, True]
        assert await look(client, "other", 5, 1) == [True, True]


async def test_a_load_names_blocks_by_their_place_among_the_digests(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await put(client, "w", 1, 3, 5)
        await look(client, "r", 0, 1, 2, 3, 4, 5)
        loaded = await client.load("r", 1, buffers(5))
        assert statuses(loaded) == ["ok", "miss", "ok", "miss", "ok"]
        assert [bytes(b.data or b"") for b in loaded if b.is_ok] == payloads(1, 3, 5)


async def test_a_block_comes_from_flash_without_the_others(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await put(client, "w", *range(8))
        await empty_staging(node)
        await look(client, "r", 6, 1)
        loaded = await client.load("r", 0, buffers(2))
        assert statuses(loaded) == ["ok", "ok"]
        assert [bytes(b.data or b"") for b in loaded] == payloads(6, 1)


async def test_what_is_stored_after_the_lookup_can_be_loaded_in_its_scope(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        assert await look(client, "r", 1, 2) == [False, False]
        await put(client, "r", 1, 2)
        assert sources(await client.load("r", 0, buffers(2))) == ["staging", "staging"]


async def test_a_block_stored_twice_is_kept_once(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await put(client, "w", 1, 2)
        assert await put(client, "again", 2, 7, 1) == ["exists", "stored", "exists"]
        assert len(node.index.spaces["s"].index) == 3


async def test_a_deleted_block_is_a_miss_that_says_so_and_its_neighbours_stay(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await put(client, "w", 1, 2, 3)
        await written(node)
        assert await client.delete("s", digests(2, 9)) == 1
        assert await look(client, "r", 1, 2, 3) == [True, False, True]
        assert [r.reason for r in await client.explain("s", digests=digests(1, 2, 9))] == [
            "present", "deleted", "never_stored",
        ]  # fmt: skip
        assert await put(client, "w2", 2) == ["stored"]
        assert await look(client, "r2", 2) == [True]


async def test_a_block_under_way_to_a_reader_survives_its_deletion_for_that_reader(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await put(client, "w", 1)
        await look(client, "r", 1)
        async with client.view("r", 0, 1) as [block]:
            await client.delete("s", digests(1))
            assert bytes(block.data or b"") == payload(1)
        assert await look(client, "r2", 1) == [False]


async def test_blocks_are_there_after_a_restart(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", **file_bdev(tmp_path / "disk"))
    async with running(config) as node, host(node, config) as client:
        await put(client, "w", 4, 2, 9)
    async with running(config) as node, host(node, config) as client:
        assert node.rebuilt["records"] == 3
        assert await look(client, "r", 9, 3, 2, 4) == [True, False, True, True]
        loaded = await client.load("r", 0, buffers(4))
        assert [bytes(b.data or b"") for b in loaded if b.is_ok] == payloads(9, 2, 4)
        assert_books_balance(node)


async def test_a_block_counts_once_every_shard_is_here(tmp_path: Path) -> None:
    space = [small_space("s", tp_size=2)]
    async with node_and_host(tmp_path, space=space) as (_, client):
        await put(client, "w0", 1, 2, shard=0)
        assert await look(client, "r", 1, 2) == [False, False]
        await put(client, "w1", 2, shard=1)
        assert await look(client, "r2", 1, 2) == [False, True]


async def test_a_probe_opens_no_scope(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await put(client, "w", 1)
        await client.finish("w")
        assert await look(client, "r", 1, will_load=False) == [True]
        await client.stats()
        assert _scopes(node) == 0


async def test_tokens_cannot_stand_alone_and_a_scope_stays_what_it_is(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        lookup = m.Lookup(space="s", request="t", tokens=bytes(64), chained=False)
        assert "only digests" in await refused(client, lookup)
        await look(client, "r", 1)
        again = m.Lookup(space="s", request="r", digests=digests(1))
        assert "another prompt" in await refused(client, again)


async def test_a_chain_and_a_lone_block_of_one_digest_do_not_meet(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await put(client, "w", 2)
        stored = await client.store("s", "c", None, 0, payloads(1, 2), digests=digests(1, 2))
        assert stored == ["stored", "exists"]
        assert (await client.lookup("s", "r", digests=digests(1, 2))).matched_blocks == 1


def _scopes(node: Node) -> int:
    return sum(len(session.scopes) for session in node.gateway.hosts.sessions.values())
