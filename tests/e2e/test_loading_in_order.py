"""Loading part by part: in the order the engine asks for, each as soon as it is there, while the rest is on its way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from dpurt.client import Client
from dpurt.errors import RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.faulty_bdev import Fault
from dpurt.testing.node import PART_BYTES, serving, small_config
from dpurt.testing.node_steps import (
    NodeOnFaultyBdev,
    buffers,
    device_of,
    empty_staging,
    host,
    memory_bdev,
    node_and_host,
    payload,
    payloads,
    statuses,
    store,
    tokens,
)

ORDER = [(2, 3), (0, 1), (1, 2), (3, 4)]


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_parts_come_in_the_order_asked_for_and_every_byte_is_in_its_place(tmp_path: Path, fabric: str):
    async with node_and_host(tmp_path, fabric) as (_, client):
        await store(client, "w", 1, 2, 3)
        await client.lookup("s", "r", tokens(1, 2, 3))
        into = buffers(3)
        seen = []
        async with client.loading("s", "r", 0, into, ORDER) as arriving:
            async for (start, stop), blocks in arriving:
                assert statuses(blocks) == ["ok"] * 3
                at = slice(start * PART_BYTES, stop * PART_BYTES)
                assert [bytes(buffer[at]) for buffer in into] == [payload(b)[at] for b in (1, 2, 3)]
                seen.append((start, stop))
        assert seen == ORDER
        assert [bytes(buffer) for buffer in into] == payloads(1, 2, 3)


@asynccontextmanager
async def on_faulty_device(tmp_path: Path) -> AsyncIterator[tuple[Node, Client]]:
    config = small_config(tmp_path / "run", **memory_bdev())
    with trio.fail_after(20):
        async with serving(NodeOnFaultyBdev(config)) as node, host(node, config) as client:
            yield node, client


async def test_the_first_part_is_handed_out_while_the_device_still_has_the_others(tmp_path: Path):
    async with on_faulty_device(tmp_path) as (node, client):
        await store(client, "w", 1, 2)
        await client.finish("w")
        await empty_staging(node)
        node.prefetch.give_up()
        await client.lookup("s", "r", tokens(1, 2))
        device = device_of(node)
        into = buffers(2)
        async with client.loading("s", "r", 0, into, ORDER, ahead=0) as arriving:
            parts, blocks = await anext(arriving)
            assert (parts, statuses(blocks)) == ((2, 3), ["ok", "ok"])
        async with client.loading("s", "r", 0, into, ORDER) as arriving:
            device.inject(Fault(op="read", kind="hang", count=100))
            parts, blocks = await anext(arriving)
            assert (parts, statuses(blocks)) == ((2, 3), ["ok", "ok"])
            device.clear()
            device.resume()
            assert [statuses(blocks) async for _, blocks in arriving] == [["ok", "ok"]] * 3
        assert [bytes(buffer) for buffer in into] == payloads(1, 2)


async def test_leaving_early_ends_the_rest_and_leaves_no_lease(tmp_path: Path):
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "w", 1, 2)
        await client.lookup("s", "r", tokens(1, 2))
        async with client.loading("s", "r", 0, buffers(2), ORDER) as arriving:
            await anext(arriving)
        await client.cancel("r")
        assert sum(slab.pool.stats().leases for slab in node.staging.slabs) == 0


async def test_what_one_part_raises_is_raised_in_its_turn(tmp_path: Path):
    async with node_and_host(tmp_path) as (_, client):
        await store(client, "w", 1)
        await client.lookup("s", "r", tokens(1))
        seen: list[tuple[int, int]] = []
        with pytest.raises(RemoteProtocolError, match="parts"):
            await take_all(client, [(0, 1), (3, 9), (1, 2)], seen)
        assert seen == [(0, 1)]


async def take_all(client: Client, order: list[tuple[int, int]], seen: list[tuple[int, int]]) -> None:
    async with client.loading("s", "r", 0, buffers(1), order) as arriving:
        async for parts, _ in arriving:
            seen.append(parts)
