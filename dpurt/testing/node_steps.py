"""What tests of a node in this process share: content, buffers, ways to bring the node into a known state, and its books.

Blocks are named by small ints; `payload` and `tokens` make their bytes and tokens. The space is ``s`` of
`dpurt.testing.node`. Looks into the node's agents where no message says what a test must know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from dpurt.agents.spaces import SpaceState
from dpurt.agents.staging import StagingAgent
from dpurt.bdev import Bdev
from dpurt.client import Client, LoadedBlock, connect
from dpurt.config import BdevConfig, Config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.node import Node
from dpurt.testing.faulty_bdev import FaultyBdev
from dpurt.testing.node import BLOCK_TOKENS, PART_BYTES, running, small_config, spaces_of

PAYLOAD = 4 * PART_BYTES
RECORD = PAYLOAD + 4096


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def payloads(*blocks: int) -> list[bytes]:
    return [payload(block) for block in blocks]


def tokens(*blocks: int) -> bytes:
    return tokens_of(blocks, BLOCK_TOKENS)


def buffers(count: int, size: int = PAYLOAD) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def slots(count: int) -> dict[str, Any]:
    """A `staging` table with room for so many blocks."""
    return {"staging": {"bytes": count * RECORD}}


def memory_bdev(size_bytes: int = 64 << 20, segment_bytes: int = 1 << 20) -> dict[str, Any]:
    bdev = {"name": "m", "kind": "memory", "size_bytes": size_bytes, "segment_bytes": segment_bytes}
    return {"bdev": [{**bdev, "queue_depth": 8}]}


def file_bdev(path: Path) -> dict[str, Any]:
    bdev = {
        "name": "f",
        "kind": "file",
        "path": str(path),
        "size_bytes": 32 << 20,
        "capacity_bytes": 32 << 20,
    }
    return {"bdev": [{**bdev, "segment_bytes": 1 << 20, "queue_depth": 8}]}


def statuses(loaded: list[LoadedBlock]) -> list[str]:
    return [block.status for block in loaded]


def sources(loaded: list[LoadedBlock]) -> list[str]:
    return [block.source for block in loaded]


@asynccontextmanager
async def host(
    node: Node, config: Config, name: str = "host-a", fabric: str = "shm", timeout_s: float = 5.0
) -> AsyncIterator[Client]:
    async with connect(
        node.gateway.endpoint, host=name, spaces=spaces_of(config), fabrics=[fabric], timeout_s=timeout_s
    ) as client:
        yield client


@asynccontextmanager
async def node_and_host(
    tmp_path: Path, fabric: str = "shm", **tables: Any
) -> AsyncIterator[tuple[Node, Client]]:
    config = small_config(tmp_path / "run", **tables)
    with trio.fail_after(20):
        async with running(config) as node, host(node, config, fabric=fabric) as client:
            yield node, client
            assert_books_balance(node)


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - conditions of any kind, in tests
            await trio.sleep(0.002)


async def written(node: Node) -> None:
    """Everything stored so far is on the device."""
    await until(lambda: node.storage.is_quiet and not any(node.intake.dirty.values()))


async def empty_staging(node: Node, *, leases: int = 0) -> None:
    """Evict every block that may be evicted, as the demand of others would, once only so many leases are left."""
    await written(node)
    await until(lambda: sum(slab.pool.stats().leases for slab in node.staging.slabs) == leases)
    for slab in node.staging.slabs:
        push_out(node.staging, slab.number)


def push_out(staging: StagingAgent, slab_number: int = 0) -> None:
    pool, now = staging.slabs[slab_number].pool, trio.current_time()
    taken = [pool.take(-1 - i, pool.all_parts, now) for i in range(pool.num_slots)]
    for one in filter(None, taken):
        if one.evicted is not None:
            staging._index.slot_evicted(one.evicted, now, "by a test")
        pool.fill_failed(one.slot, pool.all_parts)


async def store(client: Client, request: str, *blocks: int) -> None:
    """A chain, all of it stored."""
    assert await client.store("s", request, tokens(*blocks), 0, payloads(*blocks)) == ["stored"] * len(blocks)


async def load(client: Client, request: str, *blocks: int) -> list[LoadedBlock]:
    """Look a chain up and load all of it; every block that is ok has the right bytes."""
    await client.lookup("s", request, tokens(*blocks))
    into = buffers(len(blocks))
    loaded = await client.load(request, 0, into)
    for block, number in zip(loaded, blocks, strict=True):
        assert not block.is_ok or (block.data is not None and bytes(block.data) == payload(number))
    return loaded


async def reasons(client: Client, *blocks: int) -> list[str]:
    return [reason.reason for reason in await client.explain("s", tokens(*blocks))]


def assert_books_balance(node: Node) -> None:
    """Every block asked for is a hit of one tier or a miss with a reason; every planned prefetch has one outcome."""
    hosts, sums = node.gateway.hosts, []
    for table in (hosts.by_host, hosts.by_space):
        for served in table.values():
            hits = served.staging + served.nvme + served.landing
            assert served.blocks == hits + sum(served.misses.values())
        sums.append([sum(s.blocks for s in table.values()), sum(s.bytes_loaded for s in table.values())])
    assert sums[0] == sums[1], "by host and by space it is the same"
    core = node.prefetch.core
    if core is not None:
        core.ledger.check_integrity()
        total = core.ledger.totals()
        ended = total.timely + total.late + total.early + total.useless
        assert total.planned == ended + total.cancelled + total.failed + total.refused + total.open
    for slab in node.staging.slabs:
        slab.pool.check_integrity()
    for state in node.index.spaces.values():
        state.index.check_integrity()
        assert_slots_agree(state)


def assert_slots_agree(state: SpaceState) -> None:
    """A slot the index names holds that block."""
    for block_id in state.index.table.live().tolist():
        for shard in range(state.num_shards):
            slot = state.slot_of(block_id, shard)
            assert slot < 0 or state.slab.pool.find(state.ref(state.handle(block_id), shard)) == slot


class NodeOnFaultyBdev(Node):
    """A node whose device fails on request."""

    async def _open_bdev(self, spec: BdevConfig) -> Bdev:
        self.faulty = FaultyBdev(await super()._open_bdev(spec))
        return self.faulty


def device_of(node: Node) -> FaultyBdev:
    """The device of a node that is a `NodeOnFaultyBdev`."""
    assert isinstance(node, NodeOnFaultyBdev)
    return node.faulty
