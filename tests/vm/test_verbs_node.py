"""A served node and a host, two processes, over verbs: every byte compared, and what happens when verbs cannot be had."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from dpurt.client import Client, connect
from dpurt.config import load_config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.demo.nodes import NodeProcess
from dpurt.errors import DeadlineExceeded, FabricError, NodeUnavailable

pytestmark = pytest.mark.vm

PART = 65536
PAYLOAD = 4 * PART
BLOCK_TOKENS = 16
TOPOLOGY = """
[node]
name = "verbs"
run_dir = "{folder}/run"
[gateway]
bind = "tcp://127.0.0.1:7571"
session_timeout_s = 20.0
[staging]
bytes = 16777216
[fabric]
verbs = {{device = "{device}"}}
[[bdev]]
name = "flash"
kind = "file"
path = "{folder}/flash.img"
size_bytes = 134217728
segment_bytes = 8388608
[[tenant]]
name = "t"
salt = "sixteen bytes or more"
[[space]]
name = "s"
model = "m"
revision = "r"
kv_dtype = "fp16"
tenant = "t"
[space.geometry]
block_tokens = 16
{groups}
[[host]]
name = "host-a"
spaces = ["s"]
fabrics = ["verbs", "tcp"]
inbound_bytes = 8388608
"""
GROUP = '[[space.geometry.groups]]\nname = "g{}"\nnum_layers = 1\nnum_kv_heads = 1\nhead_size = 8\npart_bytes = 65536\n'


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def topology(folder: Path, device: str = "rxe0") -> Path:
    path = folder / "topology.toml"
    groups = "".join(GROUP.format(i) for i in range(4))
    path.write_text(TOPOLOGY.format(folder=folder, device=device, groups=groups))
    return path


@asynccontextmanager
async def served(folder: Path, device: str = "rxe0") -> AsyncIterator[NodeProcess]:
    path = topology(folder, device)
    process = NodeProcess(path, load_config(str(path)).node.run_path, folder / "node.log")
    with trio.fail_after(150):
        await trio.to_thread.run_sync(process.start)
        try:
            yield process
        finally:
            await trio.to_thread.run_sync(process.kill)


@asynccontextmanager
async def host(folder: Path, process: NodeProcess, *fabrics: str) -> AsyncIterator[Client]:
    spaces = {"s": load_config(str(folder / "topology.toml")).to_space("s")}
    async with connect(
        process.endpoint, host="host-a", spaces=spaces, fabrics=fabrics, timeout_s=30.0
    ) as client:
        yield client


async def store(client: Client, name: str, blocks: range) -> None:
    tokens = tokens_of(blocks, BLOCK_TOKENS)
    assert await client.store("s", name, tokens, 0, [payload(b) for b in blocks]) == ["stored"] * len(blocks)


async def load(client: Client, name: str, blocks: range) -> list[str]:
    """Load a chain; every block must be right. Where each came from."""
    found = await client.lookup("s", name, tokens_of(blocks, BLOCK_TOKENS))
    assert found.matched_blocks == len(blocks)
    into = [memoryview(bytearray(PAYLOAD)) for _ in blocks]
    loaded = await client.load(name, 0, into)
    assert [answer.status for answer in loaded] == ["ok"] * len(blocks)
    assert [bytes(got) for got in into] == [payload(block) for block in blocks]
    return [answer.source for answer in loaded]


async def test_blocks_are_stored_loaded_and_pushed_over_verbs(tmp_path: Path):
    async with served(tmp_path) as process, host(tmp_path, process, "verbs") as client:
        session = await client.session(trio.current_time() + 30)
        assert session.fabric == "verbs"
        for chain in range(6):  # more than staging holds
            await store(client, f"w{chain}", range(100 * chain, 100 * chain + 16))
        sources: list[str] = []
        for chain in range(6):
            sources += await load(client, f"r{chain}", range(100 * chain, 100 * chain + 16))
        sources += await load(client, "last", range(500, 516))  # just loaded, so it is in staging
        assert set(sources) == {"staging", "nvme"}
        landing = await client.landing(4 * PAYLOAD)
        await client.lookup("s", "p", tokens_of(range(4), BLOCK_TOKENS))
        pushed = await client.load_pushed("p", 0, landing, [i * PAYLOAD for i in range(4)])
        assert [block.data for block in pushed] == [payload(block) for block in range(4)]
        stats = await client.stats()
        assert stats["intake"]["landed"] == 6 * 16, "every store went straight into its slot"
        stats = stats["fabrics"]["verbs"]
        assert (stats["bytes_pulled"], stats["bytes_stored"]) == (7 * 16 * PAYLOAD, 6 * 16 * PAYLOAD)
        assert (stats["bytes_pushed"], stats["errors"], stats["refused"]) == (4 * PAYLOAD, 0, 0)


async def test_a_node_killed_under_a_verbs_client_is_noticed_and_its_next_life_serves(tmp_path: Path):
    async with served(tmp_path) as process, host(tmp_path, process, "verbs") as client:
        await store(client, "w", range(16))
        await trio.to_thread.run_sync(process.kill)
        began = trio.current_time()
        with pytest.raises((NodeUnavailable, DeadlineExceeded, FabricError)):
            await client.load("w", 0, [memoryview(bytearray(PAYLOAD))], timeout_s=3.0)
        assert trio.current_time() - began < 10
        await trio.to_thread.run_sync(process.start)
        for attempt in range(50):
            try:
                await store(client, f"again{attempt}", range(1000, 1016))
                break
            except (NodeUnavailable, DeadlineExceeded, FabricError):
                await trio.sleep(0.2)
        await load(client, "r", range(1000, 1016))


async def test_a_host_falls_back_to_tcp_and_both_ends_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dpurt.fabric.verbs_host.why_off", lambda: "no pyverbs in this test")
    async with served(tmp_path) as process, host(tmp_path, process, "verbs", "tcp") as client:
        session = await client.session(trio.current_time() + 30)
        assert session.fabric == "tcp"
        assert session.fabric_reason == "verbs: the host cannot use it"
        assert "verbs is off on this machine: no pyverbs in this test" in client.fabric_failures["verbs"]
        await store(client, "w", range(4))
        await load(client, "r", range(4))


async def test_a_node_without_its_device_serves_tcp_and_says_why(tmp_path: Path):
    async with served(tmp_path, "mlx5_9") as process, host(tmp_path, process, "verbs", "tcp") as client:
        session = await client.session(trio.current_time() + 30)
        assert session.fabric == "tcp"
        assert session.fabric_reason.startswith(
            "verbs: RDMA device mlx5_9: no such device; there is rxe0 port 1"
        )
        await store(client, "w", range(4))
        await load(client, "r", range(4))


def test_doctor_prints_the_device_its_limits_and_the_hosts_fabric(tmp_path: Path):
    command = [sys.executable, "-m", "dpurt", "doctor", str(topology(tmp_path))]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    assert "rxe0 port 1, GID 1 (10.9.0.1), MTU 4096" in shown
    assert "524,287 type-2 windows" in shown
    assert "RDMA by rdma (rxe0 port 1, GID 1 (10.9.0.1), MTU 4096)" in shown
    assert "rail rdma" in shown
    assert "max_mr 524,287" in shown
