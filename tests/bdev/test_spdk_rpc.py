"""The Trio client of a target's RPC socket: every fault of facts about real targets has a named, prompt outcome."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from dpurt.bdev import spdk_rpc
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.errors import (
    DeadlineExceeded,
    DpurtError,
    LocalProtocolError,
    RemoteProtocolError,
    RpcError,
    TargetUnavailable,
)
from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget

MALLOC = {"name": "M0", "num_blocks": 256, "block_size": 4096}


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A hang is a failure in seconds."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 8


def soon(seconds: float = 5.0) -> float:
    return trio.current_time() + seconds


@asynccontextmanager
async def fake(path: Path, **options: int) -> AsyncIterator[FakeRpcServer]:
    """A fake target that is listening; leaving kills it."""
    server = FakeRpcServer(FakeTarget(), path, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield server
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[FakeRpcServer, SpdkRpc]]:
    async with fake(tmp_path / "rpc.sock") as server, open_spdk_rpc(server.path) as rpc:
        yield server, rpc


async def until_answered(rpc: SpdkRpc, seconds: float = 5.0) -> object:
    """The version, as soon as the target answers again."""
    with trio.fail_after(seconds):
        while True:
            try:
                return await rpc.call("spdk_get_version", deadline=soon(0.5))
            except DpurtError:
                await trio.sleep(0.01)


async def failure(rpc: SpdkRpc, params: dict[str, object], seconds: float = 0.003) -> DpurtError | None:
    """How this call fails."""
    try:
        await rpc.call("bdev_get_bdevs", params, deadline=soon(seconds))
    except DpurtError as error:
        return error
    return None


# --- calls ---


async def test_call_gives_the_result_and_an_error_is_structured(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, rpc):
        assert await rpc.call("bdev_malloc_create", MALLOC, deadline=soon()) == "M0"
        with pytest.raises(RpcError) as caught:
            await rpc.call("bdev_get_bdevs", {"name": "nope"}, deadline=soon())
    error = caught.value
    assert (error.method, error.code, error.name, error.message) == (
        "bdev_get_bdevs", -19, "ENODEV", "No such device",
    )  # fmt: skip


@pytest.mark.parametrize("params", [{"nam": "x"}, {"name": 1}])
async def test_wrong_parameters_are_refused_by_the_target(tmp_path: Path, params: dict[str, object]) -> None:
    async with pair(tmp_path) as (_, rpc):
        with pytest.raises(RpcError, match="spdk_json_decode_object failed"):
            await rpc.call("bdev_get_bdevs", params, deadline=soon())


async def test_pipelined_calls_answered_in_reverse_find_their_callers(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.reorder = True
        await rpc.call("spdk_get_version", deadline=soon())
        got: dict[int, object] = {}

        async def create(number: int) -> None:
            params = {**MALLOC, "name": f"B{number}"}
            got[number] = await rpc.call("bdev_malloc_create", params, deadline=soon())

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(create, number)
    assert got == {number: f"B{number}" for number in range(50)}
    assert rpc.connections == 1


async def test_slow_call_does_not_block_others_on_the_same_connection(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.slow_s["framework_get_reactors"] = 60
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(rpc.call, "framework_get_reactors", deadline=soon(60)))
            await server.asked(1)
            assert await rpc.call("spdk_get_version", deadline=soon())
            nursery.cancel_scope.cancel()


async def test_timed_out_calls_late_answer_reaches_nobody_else(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.slow_s["bdev_get_bdevs"] = 0.15
        with pytest.raises(DeadlineExceeded, match="bdev_get_bdevs") as caught:
            await rpc.call("bdev_get_bdevs", {"name": "nope"}, deadline=soon(0.05))
        assert caught.value.budget_s == pytest.approx(0.05, abs=0.02)
        for _ in range(60):  # the late -19 comes somewhere in between
            version = await rpc.call("spdk_get_version", deadline=soon())
            assert isinstance(version, dict)
            await trio.sleep(0.004)
        session = rpc._session
        assert session is not None
        assert session.core.late_answers == 1
        assert session.core.in_flight == {}
        assert (rpc.connections, rpc.timeouts) == (1, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_any_mix_of_deadlines_gives_each_call_its_own_answer_or_its_deadline(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    outcomes: list[str] = []

    async def one(rpc: SpdkRpc, name: str, seconds: float) -> None:
        try:
            answer = await rpc.call("bdev_get_bdevs", {"name": name}, deadline=soon(seconds))
        except DeadlineExceeded:
            outcomes.append("late")
        else:
            assert isinstance(answer, list)
            assert [bdev["name"] for bdev in answer] == [name]
            outcomes.append("good")

    async with pair(tmp_path) as (server, rpc):
        for number in range(20):
            server.target.add_memory(f"B{number}", 4096)
        server.faults.slow_s["bdev_get_bdevs"] = 0.02
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(one, rpc, f"B{draw.randrange(20)}", draw.choice([0.005, 0.02, 0.03, 5.0]))
                await trio.sleep(0 if draw.random() < 0.8 else 0.001)
        assert rpc.connections == 1
    assert len(outcomes) == 200
    assert {"late", "good"} == set(outcomes)


async def test_cancelled_call_leaves_the_connection_usable(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, rpc):
        for _ in range(50):
            with trio.move_on_after(0.001):
                await rpc.call("spdk_get_version", deadline=soon())
        assert await rpc.call("spdk_get_version", deadline=soon())
        assert rpc.connections == 1


async def test_request_over_256_kib_is_refused_here_and_harms_nobody(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        with pytest.raises(LocalProtocolError, match="request_too_large"):
            await rpc.call("bdev_get_bdevs", {"name": "x" * (256 << 10)}, deadline=soon())
        assert await rpc.call("spdk_get_version", deadline=soon())
        assert server.requests == ["spdk_get_version"]


# --- a target that is not there ---


async def test_no_socket_fails_at_once_with_path_and_reason(tmp_path: Path) -> None:
    async with open_spdk_rpc(tmp_path / "none.sock") as rpc:
        with trio.fail_after(1), pytest.raises(TargetUnavailable, match="there is no such socket") as caught:
            await rpc.call("spdk_get_version", deadline=soon(60))
    assert caught.value.path == str(tmp_path / "none.sock")


async def test_socket_file_of_a_killed_target_is_told_from_a_live_one(tmp_path: Path) -> None:
    async with fake(tmp_path / "rpc.sock"):
        pass
    assert (tmp_path / "rpc.sock").exists()
    async with open_spdk_rpc(tmp_path / "rpc.sock") as rpc:
        with pytest.raises(TargetUnavailable, match="nobody listens"):
            await rpc.call("spdk_get_version", deadline=soon(60))


def test_forbidden_socket_says_what_to_do() -> None:
    assert "permission denied" in spdk_rpc._reason("/x", PermissionError(13, "Permission denied"))


async def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="at most 107 bytes"):
        async with open_spdk_rpc(tmp_path / ("x" * 110)):
            raise AssertionError("opened")


async def test_full_backlog_is_a_failure_not_a_connection(tmp_path: Path) -> None:
    path = tmp_path / "rpc.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(os.fspath(path))
            async with open_spdk_rpc(path) as rpc:
                with pytest.raises(TargetUnavailable):
                    await rpc.call("spdk_get_version", deadline=soon(60))


async def test_stopped_target_times_out_calls_and_serves_them_after_it_goes_on(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        await rpc.call("spdk_get_version", deadline=soon())
        server.hang()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await rpc.call("spdk_get_version", deadline=soon(0.03))
        server.resume()
        assert await rpc.call("spdk_get_version", deadline=soon())
        assert rpc.connections == 1


async def test_target_that_never_reads_bounds_what_we_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spdk_rpc, "MAX_UNSENT_BYTES", 100_000)
    async with pair(tmp_path) as (server, rpc):
        await rpc.call("spdk_get_version", deadline=soon())
        server.hang()
        errors = [await failure(rpc, {"name": "x" * 50_000}) for _ in range(100)]
        assert isinstance(errors[0], DeadlineExceeded)
        assert isinstance(errors[-1], TargetUnavailable)
        assert "does not read" in str(errors[-1])


async def test_65th_connection_hangs_silently_and_is_a_deadline_for_us(tmp_path: Path) -> None:
    async with fake(tmp_path / "rpc.sock") as server:
        held = [await trio.open_unix_socket(str(server.path)) for _ in range(64)]
        async with open_spdk_rpc(server.path) as rpc:
            with pytest.raises(DeadlineExceeded):
                await rpc.call("spdk_get_version", deadline=soon(0.1))
            await held.pop().aclose()
            assert await rpc.call("spdk_get_version", deadline=soon())
        for stream in held:
            await stream.aclose()


async def test_callers_error_leaves_the_client_as_it_is(tmp_path: Path) -> None:
    async with fake(tmp_path / "rpc.sock") as server:
        with pytest.raises(RpcError):
            async with open_spdk_rpc(server.path) as rpc:
                await rpc.call("bdev_get_bdevs", {"name": "nope"}, deadline=soon())


# --- a target that goes away and comes back ---


async def test_calls_in_flight_fail_when_the_connection_goes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.slow_s["bdev_get_bdevs"] = 60
        errors: list[Exception] = []

        async def wait() -> None:
            try:
                await rpc.call("bdev_get_bdevs", deadline=soon(60))
            except TargetUnavailable as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait)
            await server.asked(5)
            await server.restart()
        assert len(errors) == 5
        assert all("lost" in str(error) for error in errors)
        await until_answered(rpc)


async def test_owner_reconciles_after_each_restart(tmp_path: Path) -> None:
    async def reconcile(rpc: SpdkRpc) -> None:
        await rpc.call("bdev_malloc_create", MALLOC, deadline=soon())

    async with fake(tmp_path / "rpc.sock") as server, open_spdk_rpc(server.path, reconcile) as rpc:
        for _ in range(3):
            with trio.fail_after(5):
                await server.target.appeared("M0")
            await server.restart()
            assert server.target.bdevs == {}
        await server.target.appeared("M0")
        assert rpc.connections == 4


async def test_new_process_on_the_same_path_is_found_within_the_backoff(tmp_path: Path) -> None:
    path = tmp_path / "rpc.sock"
    async with open_spdk_rpc(path) as rpc:
        for _ in range(2):
            async with fake(path):
                await until_answered(rpc, 3)
            assert isinstance(await failure(rpc, {}, 1.0), TargetUnavailable)


async def test_reconciling_that_meets_a_lost_target_is_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []
    third = trio.Event()

    async def reconcile(rpc: SpdkRpc) -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            await rpc.call("bdev_get_bdevs", deadline=soon(0.02))
        third.set()

    async with fake(tmp_path / "rpc.sock") as server:
        server.faults.slow_s["bdev_get_bdevs"] = 60
        async with open_spdk_rpc(server.path, reconcile) as rpc:
            with trio.fail_after(5):
                await third.wait()
            await until_answered(rpc)
            assert rpc.connections == 3


async def test_reconciling_that_is_refused_ends_the_client_loudly(tmp_path: Path) -> None:
    async def reconcile(rpc: SpdkRpc) -> None:
        await rpc.call("bdev_get_bdevs", {"name": "nope"}, deadline=soon())

    async with fake(tmp_path / "rpc.sock") as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with open_spdk_rpc(server.path, reconcile):
                await trio.sleep(5)
    assert caught.group_contains(RpcError)


# --- a target that talks nonsense ---


async def test_destroyed_key_makes_invalid_json_an_error_for_that_call_and_the_client_goes_on(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (_, rpc):
        key = {"cipher": "AES_XTS", "name": "k0", "key": "00" * 16, "key2": "11" * 16}
        await rpc.call("bdev_malloc_create", MALLOC, deadline=soon())
        await rpc.call("accel_crypto_key_create", key, deadline=soon())
        crypto = {"base_bdev_name": "M0", "name": "C0", "key_name": "k0"}
        assert await rpc.call("bdev_crypto_create", crypto, deadline=soon()) == "C0"
        assert await rpc.call("accel_crypto_key_destroy", {"key_name": "k0"}, deadline=soon()) is True
        with pytest.raises(RemoteProtocolError, match=r"invalid_json.*bdev_get_bdevs.*'C0'"):
            await rpc.call("bdev_get_bdevs", deadline=soon())
        await until_answered(rpc)
        assert rpc.connections == 2


@pytest.mark.parametrize(
    "raw",
    [b"\n\n[]\n", b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"x"}}\n', b"\xff\xfe\n",
     b'{"jsonrpc":"2.0","id":999,"result":1}\n'],
)  # fmt: skip
async def test_nonsense_is_a_protocol_error_and_the_client_connects_again(tmp_path: Path, raw: bytes) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.raw_answers["bdev_get_bdevs"] = raw
        with pytest.raises(RemoteProtocolError):
            await rpc.call("bdev_get_bdevs", deadline=soon())
        server.faults.raw_answers.clear()
        await until_answered(rpc)


async def test_answer_that_never_ends_is_a_deadline(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.raw_answers["bdev_get_bdevs"] = b'{"jsonrpc":"2.0","id":%d,"result":"'
        with pytest.raises(DeadlineExceeded):
            await rpc.call("bdev_get_bdevs", deadline=soon(0.05))


async def test_answer_of_a_megabyte_arrives_whole(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, rpc):
        server.faults.raw_answers["bdev_get_bdevs"] = (
            b'{"jsonrpc":"2.0","id":%d,"result":"' + b"x" * (3 << 20) + b'"}\n'
        )
        assert await rpc.call("bdev_get_bdevs", deadline=soon()) == "x" * (3 << 20)


# --- the fake itself ---


@pytest.mark.parametrize(
    "raw", [b"garbage", b'{"a":nope}', b"{]", b"\xff\xff", b"12", b'{"x":"' + b"y" * (257 << 10)]
)
async def test_fake_closes_on_garbage_and_on_requests_too_large(tmp_path: Path, raw: bytes) -> None:
    async with fake(tmp_path / "rpc.sock") as server:
        stream = await trio.open_unix_socket(str(server.path))
        with trio.fail_after(3):
            try:
                await stream.send_all(raw)
                assert await stream.receive_some() == b""
            except trio.BrokenResourceError:
                pass  # a reset is what a real one does too
        await stream.aclose()


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b'{"jsonrpc":"1.0","method":"x","id":1}', b'"id":null,"error":{"code":-32600'),
        (b'{"jsonrpc":"2.0","id":1}', b'"id":null,"error":{"code":-32600'),
        (b'{"jsonrpc":"2.0","method":"bogus","id":1}', b'"id":1,"error":{"code":-32601'),
    ],
)
async def test_fake_answers_wrong_requests_as_measured(tmp_path: Path, raw: bytes, answer: bytes) -> None:
    async with fake(tmp_path / "rpc.sock") as server:
        stream = await trio.open_unix_socket(str(server.path))
        for at in range(len(raw)):  # whatever the pieces
            await stream.send_all(raw[at : at + 1])
        with trio.fail_after(3):
            assert answer in await stream.receive_some()
        await stream.aclose()
