"""The index stream through a real node: what a follower knows, after losses, restarts, epochs and while it is away."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dpurt.client import BlockingClient
from dpurt.core.identity import ROOT_KEY, chain_keys
from dpurt.errors import RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.node import running, small_config, spaces_of
from dpurt.testing.node_steps import (
    empty_staging,
    file_bdev,
    host,
    node_and_host,
    payloads,
    store,
    tokens,
    until,
)


def keys(node: Node, *blocks: int) -> list[bytes]:
    state = node.index.spaces["s"]
    return chain_keys(state.fingerprint, ROOT_KEY, tokens(*blocks), state.space.geometry.block_token_bytes)


async def test_a_follower_is_told_what_is_there_and_what_comes_and_goes(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client), trio.open_nursery() as nursery:
        await store(client, "r", 0, 1)
        mirror = client.mirror("s")
        assert mirror.holds(keys(node, 0)[0]) is None  # not known yet
        nursery.start_soon(client.follow, "s", mirror)
        await until(lambda: mirror.status == "current")
        assert mirror.match(keys(node, 0, 1, 2)) == 2
        assert await client.store("s", "r", tokens(0, 1, 2), 2, payloads(2)) == ["stored"]
        await until(lambda: mirror.match(keys(node, 0, 1, 2)) == 3)
        await empty_staging(node)
        assert mirror.match(keys(node, 0, 1, 2)) == 3  # on flash still
        node.index.drop(
            node.index.spaces["s"],
            node.index.match(node.index.spaces["s"], tokens(0, 1), None)[1],
            "lost",
            0.0,
        )
        await until(lambda: mirror.match(keys(node, 0, 1, 2)) == 1)
        nursery.cancel_scope.cancel()


async def test_an_empty_batch_says_that_nothing_happened(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        first = await client.subscribe("s")
        began = trio.current_time()
        nothing = await client.subscribe("s", first.cursor, wait_s=1.0)
        assert trio.current_time() - began > 0.5
        assert (nothing.changes, nothing.is_current, nothing.lost) == ([], True, False)


async def test_a_node_that_restarted_says_so_and_tells_all_anew(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", **file_bdev(tmp_path / "kv.img"))
    with trio.fail_after(20):
        async with running(config) as node, host(node, config) as client:
            await store(client, "r", 0, 1)
            before = await client.subscribe("s")
        async with running(config) as node, host(node, config) as client:
            after = await client.subscribe("s", before.cursor)
            assert (after.lost, after.reason) == (True, "node_restarted")
            assert after.incarnation != before.incarnation
            assert sum(len(change.keys) for change in after.changes) == 32


async def test_a_slow_reader_is_cut_off_with_a_reason_and_begins_anew(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        feed = node.index.spaces["s"].index.feed
        assert feed is not None
        feed._capacity = 2
        start = await client.subscribe("s")
        for block in range(12):
            await store(client, f"r{block}", block)
        late = await client.subscribe("s", start.cursor)
        assert (late.lost, late.reason) == (True, "slow_reader")
        assert sum(len(change.keys) for change in late.changes) == 12 * 16


async def test_a_follower_of_an_old_epoch_hears_that_it_is_over_at_once(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client), trio.open_nursery() as nursery:
        await store(client, "r", 0)
        mirror = client.mirror("s")
        nursery.start_soon(client.follow, "s", mirror)
        await until(lambda: mirror.status == "current")
        key = keys(node, 0)[0]
        await node.bump_epoch("s")
        with trio.fail_after(1):
            await until(lambda: mirror.status == "over")
        assert "epoch" in mirror.reason
        assert mirror.holds(key) is False


async def test_a_mirror_of_a_node_that_is_away_holds_nothing_and_catches_up_later(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run", gateway={"bind": f"ipc://{tmp_path}/door.sock"}, **file_bdev(tmp_path / "kv.img")
    )
    with trio.fail_after(20):
        async with (
            running(config) as node,
            host(node, config, timeout_s=0.5) as client,
            trio.open_nursery() as nursery,
        ):
            await store(client, "r", 0)
            mirror, key = client.mirror("s"), keys(node, 0)[0]
            nursery.start_soon(client.follow, "s", mirror)
            await until(lambda: mirror.holds(key))
            node.stop()
            await until(lambda: mirror.status == "away")
            assert mirror.holds(key) is False
            await until(lambda: not (config.node.run_path / "admin.sock").exists())
            async with running(config):
                await until(lambda: mirror.holds(key))
                assert (mirror.losses, mirror.reason) == (1, "node_restarted")
                nursery.cancel_scope.cancel()


async def test_a_waiting_follower_keeps_no_node_from_draining(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client), trio.open_nursery() as nursery:
        mirror = client.mirror("s")
        nursery.start_soon(client.follow, "s", mirror)
        await until(lambda: mirror.status == "current")
        nursery.cancel_scope.cancel()


async def test_junk_for_a_cursor_is_refused(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        with pytest.raises(RemoteProtocolError, match="malformed"):
            await client.subscribe("s", b"junk")


async def test_a_blocking_client_has_a_mirror_that_threads_may_ask(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        key = keys(node, 0)[0]

        def ask() -> bool:
            with BlockingClient(
                node.gateway.endpoint, host="host-b", spaces=spaces_of(node.config)
            ) as blocking:
                batch = blocking.subscribe("s")
                mirror = blocking.follow("s")
                while mirror.holds(key) is None:
                    pass
                return bool(mirror.holds(key)) and batch.is_current

        assert await trio.to_thread.run_sync(ask)
