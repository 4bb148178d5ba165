"""A served node on an NVMe/RDMA bdev (the Linux kernel's target over Soft-RoCE), and a host on another process: every
byte compared, also after the node was killed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.client import Client, connect
from dpurt.config import load_config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.demo.nodes import NodeProcess

pytestmark = pytest.mark.vm

PART = 65536
PAYLOAD = 4 * PART
BLOCK_TOKENS = 16
CHAINS, BLOCKS = 6, 16  # 24 MiB: more than staging holds
TOPOLOGY = """
[node]
name = "rdma"
run_dir = "{folder}/run"
[gateway]
bind = "tcp://127.0.0.1:7573"
session_timeout_s = 30.0
[staging]
bytes = 16777216
[[bdev]]
name = "flash"
kind = "nvme-rdma"
addresses = ["10.9.0.1:4430"]
subnqn = "{nqn}"
capacity_bytes = 134217728
segment_bytes = 8388608
deadline_s = 20.0
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
fabrics = ["tcp"]
inbound_bytes = 8388608
"""
GROUP = '[[space.geometry.groups]]\nname = "g{}"\nnum_layers = 1\nnum_kv_heads = 1\nhead_size = 8\npart_bytes = 65536\n'


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def chain(number: int) -> range:
    return range(100 * number, 100 * number + BLOCKS)


@pytest.fixture(autouse=True)
def blank_drive() -> None:
    """A node refuses what other tests have left there."""
    subprocess.run(["blkdiscard", "--zeroout", os.environ["DPURT_VM_NVMET_DEVICE"]], check=True)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[NodeProcess]:
    path = folder / "topology.toml"
    groups = "".join(GROUP.format(i) for i in range(4))
    path.write_text(TOPOLOGY.format(folder=folder, nqn=os.environ["DPURT_VM_NQN"], groups=groups))
    process = NodeProcess(path, load_config(str(path)).node.run_path, folder / "node.log")
    with trio.fail_after(240):
        await trio.to_thread.run_sync(process.start)
        try:
            yield process
        finally:
            await trio.to_thread.run_sync(process.kill)


@asynccontextmanager
async def host(folder: Path, process: NodeProcess) -> AsyncIterator[Client]:
    spaces = {"s": load_config(str(folder / "topology.toml")).to_space("s")}
    async with connect(
        process.endpoint, host="host-a", spaces=spaces, fabrics=["tcp"], timeout_s=60.0
    ) as client:
        yield client


async def store(client: Client, name: str, blocks: range) -> None:
    tokens = tokens_of(blocks, BLOCK_TOKENS)
    assert await client.store("s", name, tokens, 0, [payload(b) for b in blocks]) == ["stored"] * len(blocks)
    await client.finish(name)


async def load(client: Client, name: str, blocks: range) -> list[str]:
    """Load a chain; every block must be right. Where each came from."""
    found = await client.lookup("s", name, tokens_of(blocks, BLOCK_TOKENS))
    assert found.matched_blocks == len(blocks)
    into = [memoryview(bytearray(PAYLOAD)) for _ in blocks]
    loaded = await client.load(name, 0, into)
    assert [answer.status for answer in loaded] == ["ok"] * len(blocks)
    assert [bytes(got) for got in into] == [payload(block) for block in blocks]
    await client.finish(name)
    return [answer.source for answer in loaded]


async def device_bytes_read(process: NodeProcess) -> int:
    stats: Any = await trio.to_thread.run_sync(process.stats)
    return int(stats["bdevs"]["flash"]["io"]["bytes_read"])


async def test_blocks_are_stored_and_loaded_through_an_nvme_rdma_bdev_and_outlive_the_node(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as process:
        async with host(tmp_path, process) as client:
            for number in range(CHAINS):
                await store(client, f"w{number}", chain(number))
            sources = [source for n in range(CHAINS) for source in await load(client, f"r{n}", chain(n))]
            sources += await load(client, "last", chain(CHAINS - 1))  # just loaded, so it is in staging
            assert set(sources) == {"staging", "nvme"}
        await trio.to_thread.run_sync(process.kill)
        await trio.to_thread.run_sync(process.start)
        async with host(tmp_path, process) as client:
            before = await device_bytes_read(process)
            await load(client, "again", chain(0))
            moved = await device_bytes_read(process) - before
            assert moved >= BLOCKS * PAYLOAD, "staging was empty: every block came from the target"
