"""A device with a fifth of a second of delay: its blocks are read where that pays, computed where it does not, and nobody waits
beyond a deadline. On the modelled device, and on SPDK's delay bdev where DPURT_SPDK_TGT names a target.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev.modelled import ModelledBdev
from dpurt.bdev.spdk_process import OwnTarget, start_target
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.client import Client
from dpurt.core.device_model import DeviceProfile
from dpurt.node import Node
from dpurt.replay.decisions import verify
from dpurt.replay.lint import lint
from dpurt.replay.recording import read_recording
from dpurt.testing.node import serving, small_config, small_space
from dpurt.testing.node_steps import (
    buffers,
    host,
    load,
    reasons,
    statuses,
    store,
    tokens,
    until,
    written,
)  # fmt: skip

DELAY_S = 0.2
SHORT = (1, 2, 3)
LONG = tuple(range(10, 30))
RATE = 16 / 0.02  # tokens a second: 20 ms a block, so that a prefix of 10 pays for the delay


def modelled_bdev() -> dict[str, Any]:
    profile = {
        "read_latency_us": 10, "write_latency_us": 10, "read_bytes_per_s": 1 << 30, "write_bytes_per_s": 1 << 30,
    }  # fmt: skip
    return {
        "name": "m", "kind": "modelled", "size_bytes": 32 << 20, "segment_bytes": 1 << 20, "queue_depth": 32,
        "profile": profile,
    }  # fmt: skip


async def slow_down(node: Node, delay_s: float = DELAY_S) -> None:
    [bdev] = node.bdevs
    assert isinstance(bdev, ModelledBdev)
    bdev.become(
        DeviceProfile(
            name="slow", read_latency_s=delay_s, write_latency_s=1e-5, read_bytes_per_s=2e9, write_bytes_per_s=2e9, jitter=0.0
        )
    )  # fmt: skip


async def unstage(node: Node) -> None:
    """Take all blocks out of staging, each by its name: a recording has no others."""
    await written(node)
    state = node.index.spaces["s"]
    for handle in map(int, state.index.handles(state.index.table.live())):
        block_id = state.block_id(handle)
        if state.slot_of(block_id, 0) >= 0:
            state.slab.pool.drop(state.ref(handle, 0))
            assert not state.index.clear_slot(block_id, 0)


@asynccontextmanager
async def node_on(run_dir: Path, bdev: dict[str, Any], **space: Any) -> AsyncIterator[tuple[Node, Client]]:
    """A node with both prefixes on flash alone, and what it does recorded."""
    spaces = [small_space("s", **{"recompute_tokens_per_s": RATE, **space})]
    prefetch = {"predictors": ["sliding_window"]}
    config = small_config(run_dir / "run", bdev=[bdev], space=spaces, prefetch=prefetch)
    node = Node(config, record_to=run_dir / "recorded")
    with trio.fail_after(20):
        async with serving(node), host(node, config) as client:
            for name, prefix in (("a", SHORT), ("b", LONG)):
                await store(client, name, *prefix)
                await client.cancel(name)
            await unstage(node)
            yield node, client


@asynccontextmanager
async def slow_node(tmp_path: Path, **space: Any) -> AsyncIterator[tuple[Node, Client]]:
    """One on a modelled device, which has become slow."""
    async with node_on(tmp_path, modelled_bdev(), **space) as (node, client):
        await slow_down(node)
        yield node, client


async def measure(node: Node, client: Client) -> None:
    """One load, from which the node learns what its device is like."""
    await load(client, "first", 1)
    await client.cancel("first")
    node.staging._tell_latency()  # what its tick does each second
    core = node.prefetch.core
    assert core is not None
    await until(lambda: core.arbiter.latency_s >= DELAY_S)
    await unstage(node)


def refused(node: Node) -> dict[str, int]:
    core = node.prefetch.core
    assert core is not None
    return dict(core.ledger.totals().reasons)


async def prefetched(client: Client, name: str, prefix: tuple[int, ...], node: Node) -> int:
    """How many prefetches the announcement of a load started."""
    core = node.prefetch.core
    assert core is not None
    before = core.ledger.totals().planned
    await client.lookup("s", name, tokens(*prefix))
    await until(lambda: core.ledger.totals().planned >= before + len(prefix))
    return core.arbiter.num_flying


async def check_break_even(node: Node, client: Client) -> None:
    await measure(node, client)
    assert await prefetched(client, "short", SHORT, node) == 0
    assert refused(node).get("refused:recompute_cheaper") == len(SHORT)
    assert await prefetched(client, "long", LONG, node) > 0
    assert refused(node).get("refused:recompute_cheaper") == len(SHORT)
    loaded = await client.load("long", 0, buffers(len(LONG)))
    assert set(statuses(loaded)) == {"ok"}


async def check_deadline(client: Client, delay_s: float) -> None:
    await client.lookup("s", "hasty", tokens(*SHORT))
    began = trio.current_time()
    loaded = await client.load("hasty", 0, buffers(len(SHORT)), timeout_s=delay_s / 4)
    assert trio.current_time() - began < delay_s
    assert set(statuses(loaded)) == {"late"}
    assert all(block.data is None for block in loaded)


async def test_prefetch_leaves_short_prefixes_to_be_computed_and_brings_long_ones(tmp_path):
    async with slow_node(tmp_path) as (node, client):
        await check_break_even(node, client)


async def test_a_recording_of_it_decides_the_same_again(tmp_path):
    async with slow_node(tmp_path) as (node, client):
        await check_break_even(node, client)
    verdict = verify(read_recording(tmp_path / "recorded"))
    assert verdict.difference == ""
    assert verdict.ledger is not None
    assert verdict.ledger.reasons["refused:recompute_cheaper"] == len(SHORT)
    assert lint(tmp_path / "recorded") == []


async def test_a_load_from_a_slow_device_ends_at_its_deadline_as_a_miss(tmp_path):
    async with node_on(tmp_path, modelled_bdev()) as (node, client):
        await slow_down(node, 2.0)
        await check_deadline(client, 2.0)
        counters = node.gateway.hosts.by_host["host-a"]
        assert counters.misses == {"late": len(SHORT)}


async def test_the_slowness_and_what_follows_from_it_can_be_seen(tmp_path):
    async with slow_node(tmp_path) as (node, client):
        await measure(node, client)
        stats: Any = node.stats()
        assert stats["storage"]["read_latency_ms"] == pytest.approx(1000 * DELAY_S, rel=0.3)
        assert stats["spaces"]["s"]["recompute_ms_per_block"] == 20.0
        found = await client.lookup("s", "seen", tokens(*SHORT))
        assert found.ready_ms >= 1000 * DELAY_S
        assert await reasons(client, *SHORT) == ["present"] * 3
        told = [reason.detail for reason in await client.explain("s", tokens(*SHORT))]
        assert all("in nvme; read in about 2" in one and "recompute_cheaper" in one for one in told), told
        told = [reason.detail for reason in await client.explain("s", tokens(*LONG))]
        assert all("computed in 400.0 ms" in one and "recompute_cheaper" not in one for one in told), told


async def test_without_a_rate_nothing_is_left_to_be_computed(tmp_path):
    async with slow_node(tmp_path, recompute_tokens_per_s=None) as (node, client):
        await measure(node, client)
        assert await prefetched(client, "short", SHORT, node) == len(SHORT)
        assert "refused:recompute_cheaper" not in refused(node)


# --- SPDK's delay bdev ---


@pytest.fixture
async def run_dir() -> AsyncIterator[Path]:
    """Of a real target, which runs. Short, for sockets."""
    path = Path(tempfile.mkdtemp(prefix="dpurt-"))
    target = OwnTarget(path)
    binary = os.environ["DPURT_SPDK_TGT"]
    await start_target(target, binary, path / "rpc.sock", cpumask="0x1", use_huge=False, budget_s=60)
    yield path
    with trio.CancelScope(shield=True):
        await target.kill()
    shutil.rmtree(path)


def spdk_bdev(run_dir: Path, path: str, delay_s: float) -> dict[str, Any]:
    export = "nvmf-tcp" if path == "nvme-tcp" else "vhost"
    return {
        "name": "flash", "kind": "spdk", "rpc": str(run_dir / "rpc.sock"), "bdev": "Delay0", "path": path,
        "profile": "delay", "set": {"EXPORT": export, "READ_US": str(int(1e6 * delay_s))},
        "segment_bytes": 1 << 20, "queue_depth": 32,
    }  # fmt: skip


async def delay(rpc: SpdkRpc, seconds: float) -> None:
    for latency in ("avg_read", "p99_read"):
        change = {"delay_bdev_name": "Delay0", "latency_type": latency, "latency_us": int(1e6 * seconds)}
        await rpc.call("bdev_delay_update_latency", change, deadline=trio.current_time() + 5)


@pytest.mark.spdk
@pytest.mark.parametrize("path", ["vhost-user", "nvme-tcp"])
async def test_on_a_real_delay_bdev_too(run_dir: Path, path: str) -> None:
    async with node_on(run_dir, spdk_bdev(run_dir, path, 0.0)) as (node, client):
        async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
            await delay(rpc, DELAY_S)
            await check_break_even(node, client)
            await delay(rpc, 1.0)
            await check_deadline(client, 1.0)
