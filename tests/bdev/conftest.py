"""`live`: the same tests on a fake target and, with DPURT_SPDK_TGT, on a real one started for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from dpurt.bdev.spdk_process import OwnTarget, start_target
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget


@dataclass
class Live:
    """A target that runs: fake or real."""

    kind: str
    path: Path
    run_dir: Path
    rpc: SpdkRpc

    async def call(self, method: str, **params: object) -> object:
        return await self.rpc.call(method, params, deadline=trio.current_time() + 20)


@pytest.fixture(params=["fake", pytest.param("spdk", marks=pytest.mark.spdk)])
def live_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for sockets."""
    path = Path(tempfile.mkdtemp(prefix="dpurt-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def live(live_kind: str, run_dir: Path) -> AsyncIterator[Live]:
    path = run_dir / "rpc.sock"
    if live_kind == "spdk":
        own = OwnTarget(run_dir)
        binary = os.environ["DPURT_SPDK_TGT"]
        await start_target(own, binary, path, cpumask="0x1", use_huge=False, budget_s=60)
        async with open_spdk_rpc(path) as rpc:
            yield Live(live_kind, path, run_dir, rpc)
        with trio.CancelScope(shield=True):
            await own.stop(30)
        return
    server = FakeRpcServer(FakeTarget(vhost_dir=str(run_dir)), path)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(path) as rpc:
            yield Live(live_kind, path, run_dir, rpc)
        nursery.cancel_scope.cancel()
