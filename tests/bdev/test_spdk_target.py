"""Faults that only a process of its own can show; on a real spdk_tgt (DPURT_SPDK_TGT names it), never on the fake."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev.spdk_apply import apply
from dpurt.bdev.spdk_process import OwnTarget, TargetFailed, start_target
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.bdev.spdk_status import read_status
from dpurt.errors import DeadlineExceeded, DpurtError, RpcError, TargetUnavailable
from dpurt.testing.spdk_profiles import on_disk

pytestmark = pytest.mark.spdk


async def start(run_dir: Path) -> int:
    binary = os.environ["DPURT_SPDK_TGT"]
    own = OwnTarget(run_dir)
    return await start_target(own, binary, run_dir / "rpc.sock", cpumask="0x1", use_huge=False, budget_s=60)


@pytest.fixture
async def pid(run_dir: Path) -> AsyncIterator[int]:
    pid = await start(run_dir)
    yield pid
    with trio.CancelScope(shield=True):
        current = OwnTarget(run_dir).pid()
        if current is not None:
            os.kill(current, signal.SIGCONT)
        await OwnTarget(run_dir).stop(30)


async def version(rpc: SpdkRpc, seconds: float = 5.0) -> object:
    return await rpc.call("spdk_get_version", deadline=trio.current_time() + seconds)


async def test_stopped_process_is_a_deadline_and_goes_on_after(pid: int, run_dir: Path) -> None:
    async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
        await version(rpc)
        os.kill(pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await version(rpc, 0.1)
        os.kill(pid, signal.SIGCONT)
        assert await version(rpc)
        assert rpc.connections == 1


async def test_killed_process_fails_calls_in_flight_at_once_and_its_successor_is_reconciled(
    pid: int, run_dir: Path
) -> None:
    profile, keys = on_disk("lvol", run_dir)
    applied: list[int] = []
    changed = trio.Event()

    async def reconcile(rpc: SpdkRpc) -> None:
        nonlocal changed
        applied.append(len(await apply(rpc, profile, keys, trio.current_time() + 30)))
        changed.set()

    async with open_spdk_rpc(run_dir / "rpc.sock", reconcile) as rpc:
        with trio.fail_after(30):
            await changed.wait()
        before = await rpc.call("bdev_lvol_get_lvstores", deadline=trio.current_time() + 5)
        changed = trio.Event()
        began = trio.current_time()
        wait = {"name": "nope", "timeout": 60_000}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_soon, pid)
            with pytest.raises(TargetUnavailable):
                await rpc.call("bdev_get_bdevs", wait, deadline=trio.current_time() + 60)
        assert trio.current_time() - began < 1.0
        with pytest.raises(TargetUnavailable, match=r"nobody listens|closed|broke"):
            await version(rpc)
        await start(run_dir)
        with trio.fail_after(5):
            await changed.wait()
        after = await rpc.call("bdev_lvol_get_lvstores", deadline=trio.current_time() + 5)
    assert applied == [4, 2]  # the volume on the disk was found, not made anew
    assert _uuids(before) == _uuids(after)


async def _kill_soon(pid: int) -> None:
    await trio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def _uuids(stores: Any) -> list[str]:
    return [store["uuid"] for store in stores]


async def test_late_answer_is_dropped_by_its_id(pid: int, run_dir: Path) -> None:
    async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
        wait = {"name": "nope", "timeout": 200}
        with pytest.raises(DeadlineExceeded):
            await rpc.call("bdev_get_bdevs", wait, deadline=trio.current_time() + 0.05)
        for _ in range(40):
            assert "version" in str(await version(rpc))
        await trio.sleep(0.2)
        assert "version" in str(await version(rpc))
        assert rpc._session is not None
        assert rpc._session.core.late_answers == 1


async def test_request_over_256_kib_would_reset_and_so_is_never_sent(pid: int, run_dir: Path) -> None:
    stream = await trio.open_unix_socket(str(run_dir / "rpc.sock"))
    request = (
        b'{"jsonrpc":"2.0","id":1,"method":"bdev_get_bdevs","params":{"name":"' + b"x" * (256 << 10) + b'"}}'
    )
    with trio.fail_after(10):
        try:
            await stream.send_all(request)
            assert await stream.receive_some() == b""
        except trio.BrokenResourceError:
            pass
    await stream.aclose()
    async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
        params = {"name": "x" * ((256 << 10) - 100)}  # just within: the target takes and refuses it
        with pytest.raises(RpcError):
            await rpc.call("bdev_get_bdevs", params, deadline=trio.current_time() + 10)


async def test_connection_beyond_the_targets_limit_is_a_deadline(pid: int, run_dir: Path) -> None:
    path = run_dir / "rpc.sock"
    held = [await trio.open_unix_socket(str(path)) for _ in range(64)]
    await trio.sleep(0.1)
    async with open_spdk_rpc(path) as rpc:
        with pytest.raises(DpurtError):
            await version(rpc, 0.5)
        for stream in held:
            await stream.aclose()
        await trio.sleep(0.5)  # the target sees them go, and we connect anew if it had closed on us
        assert await version(rpc)


async def test_pipelined_calls_each_get_their_own_answer(pid: int, run_dir: Path) -> None:
    async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
        answers: dict[int, object] = {}

        async def create(number: int) -> None:
            params = {"name": f"N{number}", "num_blocks": 8 + number, "block_size": 512}
            await rpc.call("bdev_null_create", params, deadline=trio.current_time() + 30)
            (shown,) = await rpc.call(  # type: ignore[misc]
                "bdev_get_bdevs", {"name": f"N{number}"}, deadline=trio.current_time() + 30
            )
            answers[number] = shown["num_blocks"]

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(create, number)
        everything = await rpc.call("bdev_get_bdevs", deadline=trio.current_time() + 30)
    assert answers == {number: 8 + number for number in range(200)}
    assert isinstance(everything, list)
    assert len(everything) == 200


async def test_status_of_a_real_target(pid: int, run_dir: Path) -> None:
    profile, keys = on_disk("malloc", run_dir, EXPORT="vhost")
    async with open_spdk_rpc(run_dir / "rpc.sock") as rpc:
        await apply(rpc, profile, keys, trio.current_time() + 30)
        status = await read_status(rpc, 0.2, trio.current_time() + 30)
    assert status.version.startswith("SPDK v")
    (bdev,) = status.bdevs
    assert (bdev.name, bdev.kind, bdev.size_bytes) == ("Malloc0", "Malloc disk", 8 << 20)
    assert bdev.exports == [f"vhost {run_dir}/Malloc0"]
    assert set(status.reactors) == {0}
    assert 0.0 <= status.reactors[0] < 0.9


async def test_second_target_on_the_same_core_or_socket_is_explained(pid: int, run_dir: Path) -> None:
    other = run_dir / "other"
    other.mkdir()
    binary, path = os.environ["DPURT_SPDK_TGT"], run_dir / "rpc.sock"
    with pytest.raises(TargetFailed, match=r"ended at once.*to fix it: another") as caught:
        await start_target(OwnTarget(other), binary, path, cpumask="0x1", use_huge=False, budget_s=10)
    assert "Traceback" not in str(caught.value)
    assert OwnTarget(run_dir).pid() == pid
