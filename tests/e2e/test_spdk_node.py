"""A node whose flash tier is an SPDK bdev: profile applied, bytes by vhost-user or NVMe/TCP, target killed under load.

On a real spdk_tgt where DPURT_SPDK_TGT names one. Elsewhere the control plane is the fake's, and behind its vhost socket
stands a qemu-storage-daemon: what is shown there is that control and bytes meet, and a restart of both.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev.spdk import SpdkBdev
from dpurt.bdev.spdk_process import OwnTarget, start_target
from dpurt.client import Client
from dpurt.errors import BdevError
from dpurt.node import Node
from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget
from dpurt.testing.node import running, small_config
from dpurt.testing.node_steps import (
    empty_staging,
    host,
    load,
    payloads,
    statuses,
    store,
    tokens,
    until,
)  # fmt: skip
from dpurt.testing.qemu_storage import QEMU_STORAGE_DAEMON, QemuStorage, file_node

DISK_BYTES = 64 << 20
PATIENCE_S = 60.0


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for sockets."""
    path = Path(tempfile.mkdtemp(prefix="dpurt-"))
    (path / "disk").touch()
    os.truncate(path / "disk", DISK_BYTES)
    yield path
    shutil.rmtree(path)


def spdk_bdev(run_dir: Path, profile: str, bdev: str, path: str, **variables: str) -> dict[str, Any]:
    export = "nvmf-tcp" if path == "nvme-tcp" else "vhost"
    variables = {
        "EXPORT": export,
        **({} if profile == "malloc" else {"FILE": str(run_dir / "disk")}),
        **variables,
    }
    return {
        "name": "flash", "kind": "spdk", "rpc": str(run_dir / "rpc.sock"), "bdev": bdev, "path": path,
        "profile": profile, "set": variables, "segment_bytes": 1 << 20, "queue_depth": 8, "deadline_s": 2.0,
    }  # fmt: skip


@asynccontextmanager
async def node_on(run_dir: Path, bdev: dict[str, Any]) -> AsyncIterator[tuple[Node, Client]]:
    config = small_config(run_dir / "run", bdev=[bdev])
    with trio.fail_after(PATIENCE_S):
        async with running(config) as node, host(node, config, timeout_s=20.0) as client:
            yield node, client


class Load:
    """Stores and loads without end; `wrong` can only be an assertion in `load`, which ends the test."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rounds = 0

    async def run(self) -> None:
        while True:
            chain = [1000 * (1 + self.rounds % 8) + i for i in range(8)]
            await self._client.store("s", f"s{self.rounds}", *_chain(chain))
            await load(self._client, f"l{self.rounds}", *chain)
            await self._client.finish(f"s{self.rounds}")
            await self._client.finish(f"l{self.rounds}")
            self.rounds += 1


def _chain(blocks: list[int]) -> tuple[bytes, int, list[bytes]]:
    return tokens(*blocks), 0, payloads(*blocks)


async def check_restart_under_load(node: Node, client: Client, kill: Callable[[], None], start: Any) -> float:
    """Kill, start again; seconds from the start's end until a block from before comes from flash again."""
    await store(client, "before", 1, 2, 3)
    await empty_staging(node)
    assert statuses(await load(client, "look", 1, 2, 3)) == ["ok"] * 3
    await client.finish("look")
    async with trio.open_nursery() as nursery:
        work = Load(client)
        nursery.start_soon(work.run)
        await until(lambda: work.rounds > 3)
        kill()
        await trio.sleep(0.5)
        await start()
        began = trio.current_time()
        await until_from_flash(node, client)
        took = trio.current_time() - began
        rounds = work.rounds
        await until(lambda: work.rounds > rounds + 3)
        nursery.cancel_scope.cancel()
    return took


async def until_from_flash(node: Node, client: Client) -> None:
    for attempt in range(10_000):
        for slab in node.staging.slabs:  # so that a hit can come from flash only
            for ref in node.index.spaces["s"].refs(_handles(node), 0):
                if slab.pool.find(ref) is not None and not _is_dirty(node, ref):
                    node.index.slot_evicted(ref, trio.current_time(), "by a test")
                    slab.pool.drop(ref)
        loaded = await load(client, f"again{attempt}", 1, 2, 3)
        await client.finish(f"again{attempt}")
        if statuses(loaded) == ["ok"] * 3:
            return
        await trio.sleep(0.01)


def _handles(node: Node) -> list[int]:
    state = node.index.spaces["s"]
    handles: list[int] = state.index.handles(state.index.match(tokens(1, 2, 3))).tolist()
    return handles


def _is_dirty(node: Node, ref: int) -> bool:
    state = node.index.spaces["s"]
    handle, shard = state.unref(ref)
    block_id = state.block_id(handle)
    return block_id < 0 or state.extent_of(block_id, shard) < 0


# --- a real target ---


class RealTarget:
    """An spdk_tgt of the test's own."""

    def __init__(self, run_dir: Path) -> None:
        self._own = OwnTarget(run_dir)

    async def start(self) -> None:
        binary = os.environ["DPURT_SPDK_TGT"]
        path = self._own.run_dir / "rpc.sock"
        await start_target(self._own, binary, path, cpumask="0x1", use_huge=False, budget_s=60)

    def kill(self) -> None:
        pid = self._own.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._own.pid_path.unlink()

    async def stop(self) -> None:
        with trio.CancelScope(shield=True):
            await self._own.kill()


@pytest.fixture
async def target(run_dir: Path) -> AsyncIterator[RealTarget]:
    target = RealTarget(run_dir)
    await target.start()
    yield target
    await target.stop()


@pytest.mark.spdk
@pytest.mark.parametrize("path", ["vhost-user", "nvme-tcp"])
async def test_a_killed_target_is_reconciled_under_load_and_what_was_on_its_disk_is_hit_again(
    target: RealTarget, run_dir: Path, path: str, record_property: Callable[[str, object], None]
) -> None:
    async with node_on(run_dir, spdk_bdev(run_dir, "aio", "Aio0", path)) as (node, client):
        [bdev] = node.bdevs
        assert isinstance(bdev, SpdkBdev)
        assert bdev.info.kind == path
        took = await check_restart_under_load(node, client, target.kill, target.start)
        record_property("seconds_until_hits_again", round(took, 3))
        print(f"{path}: hits again {took:.3f} s after the target was ready")
        await until(lambda: bdev.reconciled == 2)
        assert bdev.stats.reconnects >= 1
        assert not node.index.drops, "nothing was lost"


@pytest.mark.spdk
async def test_a_target_that_comes_back_with_an_empty_medium_costs_what_it_held_and_goes_on(
    target: RealTarget, run_dir: Path
) -> None:
    async with node_on(run_dir, spdk_bdev(run_dir, "malloc", "Malloc0", "auto")) as (node, client):
        assert node.bdevs[0].info.kind == "vhost-user"
        await store(client, "before", 1, 2, 3)
        await empty_staging(node)
        target.kill()
        await target.start()
        await until(lambda: node.bdevs[0].stats.reconnects)
        await store(client, "after", 7, 8)
        await empty_staging(node)
        assert statuses(await load(client, "look", 1, 2, 3)) == ["miss"] * 3
        assert statuses(await load(client, "new", 7, 8)) == ["ok"] * 2


# --- the fake's control plane, qemu's data path ---


@asynccontextmanager
async def fake_target(run_dir: Path) -> AsyncIterator[tuple[FakeRpcServer, QemuStorage]]:
    if QEMU_STORAGE_DAEMON is None:
        pytest.skip("qemu-storage-daemon is not installed (Debian: qemu-system-common)")
    server = FakeRpcServer(FakeTarget(vhost_dir=str(run_dir)), run_dir / "rpc.sock")
    async with QemuStorage(run_dir, [file_node(run_dir / "disk")]) as daemon, trio.open_nursery() as nursery:
        daemon.path.rename(run_dir / "Aio0")  # where the fake says its controller is
        await nursery.start(server.run)
        yield server, daemon
        nursery.cancel_scope.cancel()


async def test_control_and_bytes_meet_and_a_restart_of_both_is_reconciled_under_load(run_dir: Path) -> None:
    async with fake_target(run_dir) as (server, daemon):
        async with node_on(run_dir, spdk_bdev(run_dir, "aio", "Aio0", "auto")) as (node, client):
            [bdev] = node.bdevs
            assert isinstance(bdev, SpdkBdev)
            assert bdev.info.kind == "vhost-user"

            def kill() -> None:
                daemon.kill()
                (run_dir / "Aio0").unlink()

            async def start() -> None:
                await server.restart()
                await daemon.start()
                daemon.path.rename(run_dir / "Aio0")

            await check_restart_under_load(node, client, kill, start)
            await until(lambda: bdev.reconciled == 2)
            assert server.target.find("Aio0") is not None, "the fake came back empty"
            assert not node.index.drops


async def test_a_target_that_is_not_there_is_said_when_the_node_starts(run_dir: Path) -> None:
    with pytest.raises(BdevError, match="there is no such socket"):
        await SpdkBdev.open(run_dir / "rpc.sock", "Aio0")


async def test_a_bdev_that_is_not_there_or_not_exported_is_said_with_what_there_is(run_dir: Path) -> None:
    target = FakeTarget(vhost_dir=str(run_dir))
    target.add_memory("Malloc0", 16)
    server = FakeRpcServer(target, run_dir / "rpc.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        with pytest.raises(BdevError, match="no bdev 'Aio0'; it has: Malloc0"):
            await SpdkBdev.open(run_dir / "rpc.sock", "Aio0")
        with pytest.raises(BdevError, match="not exported over vhost-user, nvme-rdma or nvme-tcp"):
            await SpdkBdev.open(run_dir / "rpc.sock", "Malloc0")
        nursery.cancel_scope.cancel()
