"""The clients when all is not well: no node, a stopped one, one that comes back; and the blocking client's promises."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel

from dpurt.client import BlockingClient, Client, connect, conversation
from dpurt.client.conversation import _address_from
from dpurt.config import Config
from dpurt.demo.nodes import NodeProcess
from dpurt.errors import (
    DeadlineExceeded,
    DpurtError,
    FabricError,
    NodeUnavailable,
    RdmaLimit,
    RemoteProtocolError,
)
from dpurt.fabric.shm import ShmEndpoint
from dpurt.testing.node import running, small_config, small_host, spaces_of
from dpurt.testing.node_steps import (
    PAYLOAD,
    assert_books_balance,
    buffers,
    empty_staging,
    host,
    load,
    node_and_host,
    payload,
    payloads,
    statuses,
    store,
    tokens,
    until,
)
from dpurt.wire import messages as m

BUDGET_S = 0.3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_at(tmp_path: Path, port: int) -> Config:
    gateway = {"bind": f"tcp://127.0.0.1:{port}", "session_timeout_s": 2.0}
    return small_config(tmp_path / "run", gateway=gateway)


# --- no node ---


async def test_an_absent_node_costs_one_budget_and_then_nothing_but_exceptions(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    async with connect(
        config.gateway.bind, host="host-a", spaces=spaces_of(config), timeout_s=BUDGET_S
    ) as client:
        began = trio.current_time()
        with pytest.raises(NodeUnavailable):
            await client.lookup("s", "r", tokens(0))
        first = trio.current_time() - began
        assert first < 3 * BUDGET_S
        for _ in range(20):
            with pytest.raises(NodeUnavailable, match="a moment ago"):
                await client.lookup("s", "r", tokens(0))
        assert trio.current_time() - began - first < BUDGET_S / 3, "within the pause no call waits"
        assert not client.is_connected


async def test_a_short_call_does_not_wait_for_a_long_ones_hello(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    async with connect(config.gateway.bind, host="host-a", spaces=spaces_of(config)) as client:
        async with trio.open_nursery() as nursery:

            async def long_call() -> None:
                await client.lookup("s", "r", tokens(0), timeout_s=60)

            nursery.start_soon(long_call)
            await until(lambda: client._talk._waiting)
            began = trio.current_time()
            with pytest.raises(NodeUnavailable):
                await client.lookup("s", "r", tokens(0), timeout_s=BUDGET_S)
            assert trio.current_time() - began < 3 * BUDGET_S
            nursery.cancel_scope.cancel()


async def test_the_client_recovers_when_the_node_appears_and_after_it_restarts(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    async with connect(
        config.gateway.bind, host="host-a", spaces=spaces_of(config), timeout_s=BUDGET_S
    ) as client:
        with pytest.raises(NodeUnavailable):
            await client.lookup("s", "r", tokens(0))
        for _ in range(2):
            async with running(config) as node:
                await until_it_answers(client)
                assert client.is_connected
                await client.store("s", "r", tokens(0), 0, payloads(0))
                assert statuses(await load(client, "q", 0)) == ["ok"]
                assert_books_balance(node)


async def until_it_answers(client: Client) -> None:
    with trio.fail_after(10):
        while True:
            try:
                await client.lookup("s", "r", tokens(0))
            except (NodeUnavailable, DeadlineExceeded):
                await trio.sleep(0.02)
            else:
                return


async def test_a_draining_node_is_unavailable_to_a_new_client(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        node.gateway.hosts.is_draining = True
        async with host(node, config) as client:
            with pytest.raises(NodeUnavailable, match="draining"):
                await client.lookup("s", "r", tokens(0))
            with pytest.raises(NodeUnavailable, match="a moment ago"):
                await client.lookup("s", "r", tokens(0))


async def test_an_exception_in_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    with pytest.raises(KeyError, match="mine"):
        async with connect(config.gateway.bind, host="host-a", spaces=spaces_of(config)):
            raise KeyError("mine")


async def test_a_call_that_ran_out_of_time_does_not_end_the_session_of_the_others(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config) as client:
        await store(client, "r", 0)
        async with client.view("r", 0, 1):
            node.gateway._handlers[m.Stats] = lambda session, request: None  # never answers this one
            async with trio.open_nursery() as nursery:
                nursery.start_soon(never_answered, client)
                for _ in range(10):
                    await client.lookup("s", "q", tokens(0))
                    await trio.sleep(0.02)
            assert client.is_connected
            assert node.staging.slabs[0].pool.stats().leases == 1
        assert not node.gateway.hosts.ended


async def never_answered(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.stats(timeout_s=0.1)


async def test_a_failure_of_an_old_session_does_not_touch_the_new_one(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config) as client:
        await store(client, "r", 0)
        old = client._talk.current
        assert old is not None
        await client._talk.lose(old)
        await client.lookup("s", "r", tokens(0))
        await client._talk.lose(old)
        assert client.is_connected


async def test_bytes_changed_on_the_way_are_a_checksum_status_and_counted(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config) as client:
        await store(client, "r", 0, 1)
        slab = node.staging.slabs[0]
        slot = next(i for i in range(2) if bytes(slab.image(i)[4096 : 4096 + PAYLOAD]) == payload(1))
        slab.image(slot)[5000] ^= 1
        loaded = await client.load("r", 0, buffers(2))
        assert statuses(loaded) == ["ok", "checksum"]
        assert loaded[1].data is None
        assert client.checksum_errors == 1


async def test_an_ended_lease_is_a_refusal_and_the_session_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config, fabric="tcp") as client:
        await store(client, "r", 0)
        release = node.staging.slabs[0].pool.release_owner
        answer = client._load

        async def answer_and_end(message: m.Load, deadline: float) -> m.LoadReply:
            reply = await answer(message, deadline)
            release(next(iter(node.staging._session_of)))
            return reply

        client._load = answer_and_end  # type: ignore[method-assign]
        with pytest.raises(RemoteProtocolError, match="access"):
            await client.load("r", 0, buffers(1))
        assert client.is_connected


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
async def test_a_node_that_is_behind_hears_all_that_a_closing_client_said(
    tmp_path: Path, fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        dispatch, heard = node.gateway._dispatch, list[m.Request]()

        def noted(*arguments: Any) -> m.Reply | None:
            heard.append(arguments[-1])
            return dispatch(*arguments)

        monkeypatch.setattr(node.gateway, "_dispatch", noted)
        async with connect(
            node.gateway.endpoint, host="host-a", spaces=spaces_of(config), fabrics=[fabric]
        ) as client:
            await store(client, "r", 0)
            socket = node.gateway._socket
            assert socket is not None
            receive = socket.recv_frames

            async def slowly() -> Any:
                await trio.sleep(0.02)
                return await receive()

            monkeypatch.setattr(type(socket), "recv_frames", lambda self: slowly())
            await client.finish("r", "end_turn")
        monkeypatch.undo()
        assert [type(request) for request in heard[-2:]] == [m.Hint, m.Bye]
        assert node.gateway.hosts.ended == {"bye": 1}


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
async def test_a_client_that_is_cancelled_hears_the_answer_to_its_goodbye(
    tmp_path: Path, fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_GOODBYE_S", 60.0)
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        with trio.CancelScope() as scope:
            async with connect(
                node.gateway.endpoint, host="host-a", spaces=spaces_of(config), fabrics=[fabric]
            ) as client:
                await store(client, "r", 0)
                began = trio.current_time()
                scope.cancel()
                await trio.sleep_forever()
        assert trio.current_time() - began < 0.9, "`connect` gives up after a second"
        assert node.gateway.hosts.ended == {"bye": 1}


# --- which fabric, and where ---


async def test_a_fabric_that_does_not_open_gives_way_to_the_next(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        (tmp_path / "run" / "shm.sock").unlink()  # as on a machine where this node does not run
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await store(client, "r", 0)
            assert statuses(await load(client, "q", 0)) == ["ok"]
            terms = await client.session(trio.current_time() + 1)
            assert terms.fabric == "tcp"
            assert "shm.sock" in client.fabric_failures["shm"]
        async with host(node, config) as client:
            with pytest.raises(NodeUnavailable, match=r"shm\.sock"):
                await client.lookup("s", "r", tokens(0))
        await until(lambda: not node.gateway.hosts._by_number)


async def test_a_fabric_whose_links_break_again_and_again_gives_way_for_a_while(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        endpoint, spaces = node.gateway.endpoint, spaces_of(config)
        async with connect(endpoint, host="host-a", spaces=spaces, fabrics=["shm", "tcp"]) as client:
            await store(client, "w", 1, 2)

            async def breaks(*_: object) -> None:
                raise FabricError("a peer", "pull", "closed", 0, "by this test")

            for attempt in range(2):
                assert (await client.session(trio.current_time() + 5)).fabric == "shm"
                await client.lookup("s", f"r{attempt}", tokens(1, 2))
                assert client._talk.current is not None
                client._talk.current.endpoint.pull = breaks  # type: ignore[method-assign]
                with pytest.raises(NodeUnavailable, match="by this test"):
                    await client.load(f"r{attempt}", 0, buffers(2))
            assert (await client.session(trio.current_time() + 5)).fabric == "tcp"
            assert "by this test" in client.fabric_failures["shm"]
            assert statuses(await load(client, "again", 1, 2)) == ["ok", "ok"]


async def test_when_no_fabric_is_left_the_first_ones_failure_is_told(tmp_path: Path) -> None:
    hosts = [small_host("host-a", fabrics=["shm"])]
    config = small_config(tmp_path / "run", host=hosts)
    async with running(config) as node:
        (tmp_path / "run" / "shm.sock").unlink()
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            with pytest.raises(NodeUnavailable, match=r"shm\.sock"):
                await client.lookup("s", "r", tokens(0))


async def test_a_silent_fabric_leaves_the_next_one_time(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    path = tmp_path / "run" / "shm.sock"
    async with running(config) as node:
        path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.bind(str(path))
            silent.listen()
            async with connect(
                node.gateway.endpoint, host="host-a", spaces=spaces_of(config), timeout_s=2.0
            ) as client:
                await store(client, "r", 0)
                assert list(client.fabric_failures) == ["shm"]


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://dpu-1.rack:7571", "dpu-1.rack"),
        ("tcp://10.0.0.7:7571", "10.0.0.7"),
        ("tcp://[fe80::1]:7571", "fe80::1"),
        ("ipc:///run/x.sock", "localhost"),
    ],
)
def test_an_address_without_a_host_is_the_gateways(endpoint: str, reached: str) -> None:
    assert _address_from(endpoint, {"port": 5}) == {"port": 5, "host": reached}
    assert _address_from(endpoint, {"port": 5, "host": "10.1.1.1"})["host"] == "10.1.1.1"
    assert _address_from(endpoint, {"path": "/run/shm.sock"}) == {"path": "/run/shm.sock"}


async def test_any_writable_buffer_will_do_for_a_load(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config) as client:
        await store(client, "r", 0, 1, 2)
        plain, words = bytearray(PAYLOAD), memoryview(bytearray(PAYLOAD)).cast("I")
        loaded = await client.load("r", 0, [plain, words, memoryview(bytearray(PAYLOAD + 8))])
        assert statuses(loaded) == ["ok"] * 3
        assert [bytes(plain), bytes(words)] == payloads(0, 1)
        for wrong in (memoryview(bytes(PAYLOAD)), memoryview(bytearray(2 * PAYLOAD))[::2]):
            with pytest.raises(ValueError, match=r"must be (writable|contiguous)"):
                await client.load("r", 0, [wrong])
        await until(lambda: node.staging.slabs[0].pool.stats().leases == 0)


# --- the blocking client ---


@contextmanager
def node_thread(config: Config) -> Iterator[Callable[..., Any]]:
    """A node on a loop of its own; yields `call(function of the node)`, which runs on that loop."""
    ready: list[Any] = []
    up, stop = threading.Event(), trio.Event()

    async def main() -> None:
        async with running(config) as node:
            ready.extend([node, trio.lowlevel.current_trio_token()])
            up.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert up.wait(10)
    node, token = ready
    try:
        yield lambda function: trio.from_thread.run(function, node, trio_token=token)
    finally:
        token.run_sync_soon(stop.set)
        thread.join(20)
        assert not thread.is_alive()


async def endpoint_of(node: Any) -> str:
    return str(node.gateway.endpoint)


async def leases_of(node: Any) -> int:
    return int(node.staging.slabs[0].pool.stats().leases)


async def scopes_of(node: Any) -> int:
    return sum(len(session.scopes) for session in node.gateway.hosts.sessions.values())


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_every_call_of_the_blocking_client(tmp_path: Path, fabric: str) -> None:
    config = small_config(tmp_path / "run")
    prompt = tokens(0, 1, 2)
    with (
        node_thread(config) as on_node,
        BlockingClient(
            on_node(endpoint_of), host="host-a", spaces=spaces_of(config), fabrics=[fabric]
        ) as client,
    ):
        assert client.lookup("s", "r", prompt).matched_blocks == 0
        assert client.is_connected
        assert client.store("s", "r", prompt, 0, payloads(0, 1, 2)) == ["stored"] * 3
        on_node(empty_staging)
        into = buffers(3)
        assert statuses(client.load("r", 0, into)) == ["ok"] * 3
        assert [bytes(view) for view in into] == payloads(0, 1, 2)
        landing = client.landing(PAYLOAD)
        assert statuses(client.load_pushed("r", 1, landing, [0])) == ["ok"]
        assert bytes(landing.view[:PAYLOAD]) == payload(1)
        if fabric == "shm":
            with client.view("r", 0, 2) as blocks:
                assert [bytes(b.data) for b in blocks if b.data is not None] == payloads(0, 1)
                assert on_node(leases_of) == 2
                del blocks
            eventually(lambda: on_node(leases_of) == 0)
        assert [reason.reason for reason in client.explain("s", prompt)] == ["present"] * 3
        assert client.stats()["hosts"]["host-a"]["stored"] == 3  # type: ignore[index]
        client.hint(m.Hint(request="q", kind="arrival", space="s", tokens=prompt))
        eventually(lambda: on_node(scopes_of) == 2)
        client.finish("q", "end_turn")
        eventually(lambda: on_node(scopes_of) == 1)
        client.cancel("r")
        assert on_node(scopes_of) == 0
        assert client.landing_zone("s", 4)
        client.lookup("s", "z", prompt)
        eventually(lambda: [block.source for block in client.load("z", 0, into)] == ["landing"] * 3)


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
@pytest.mark.parametrize("cuts", [(PAYLOAD // 2,), (1, 4097, 9000)], ids=["at a part", "anywhere"])
async def test_a_block_may_lie_in_several_buffers(tmp_path: Path, fabric: str, cuts: tuple[int, ...]) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config, fabric=fabric) as client:
        gathered = [_cut(memoryview(payload(block)), cuts) for block in (0, 1)]
        assert await client.store("s", "w", tokens(0, 1), 0, gathered) == ["stored"] * 2
        await empty_staging(node)
        await client.lookup("s", "r", tokens(0, 1))
        rooms = [bytearray(PAYLOAD) for _ in range(2)]
        loaded = await client.load("r", 0, [_cut(memoryview(room), cuts) for room in rooms])
        assert statuses(loaded) == ["ok", "ok"]
        assert rooms == payloads(0, 1)
        small = [memoryview(bytearray(PAYLOAD - 2)), memoryview(bytearray(1))]
        with pytest.raises(ValueError, match=f"a buffer of {PAYLOAD - 1} bytes"):
            await client.load("r", 0, [small])
        assert_books_balance(node)


async def test_memories_are_kept_by_every_new_link_beside_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "KEEP_BYTES", 4096)
    kept: list[tuple[int, int]] = []
    memory = memoryview(bytearray(10_000))

    def keep(endpoint: object, piece: memoryview) -> None:
        if len(kept) == 5:
            raise RdmaLimit("test", "max_mr is 5", "keep less")
        kept.append((id(endpoint), len(piece)))

    monkeypatch.setattr(ShmEndpoint, "keep", keep)
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        options = {"host": "host-a", "spaces": spaces_of(config), "fabrics": ["shm"], "memories": [memory]}
        async with connect(node.gateway.endpoint, **options) as client:
            await store(client, "r", 0)
            await until(lambda: [size for _, size in kept] == [4096, 4096, 1808])
            await client._talk.lose(client._talk.current)
            await client.stats()
            await until(lambda: client.fabric_failures)
            assert len({endpoint for endpoint, _ in kept}) == 2
            assert "max_mr" in client.fabric_failures["memories"]
            await client.stats()


def _cut(view: memoryview, cuts: tuple[int, ...]) -> list[memoryview]:
    return [view[start:stop] for start, stop in zip((0, *cuts), (*cuts, len(view)), strict=True)]


def test_a_submitted_call_returns_at_once_and_its_future_has_the_outcome(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with node_thread(config) as on_node:
        client = BlockingClient(on_node(endpoint_of), host="host-a", spaces=spaces_of(config))
        found = client.submit(lambda c, budget: c.lookup("s", "r", tokens(0), timeout_s=budget))
        assert found.result(10).matched_blocks == 0

        async def dawdle(client: Client, budget: float) -> None:
            await trio.sleep(60)

        late = client.submit(dawdle, timeout_s=0.05)
        assert isinstance(late.exception(10), DeadlineExceeded)
        client.close()
        assert isinstance(client.submit(dawdle).exception(10), NodeUnavailable)


def test_hints_arrive_in_the_order_they_were_given_in(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    seen: list[str] = []

    async def listen(node: Any) -> None:
        hint = node.gateway._handlers[m.Hint]

        def noted(session: Any, request: m.Hint) -> Any:
            seen.append(request.request)
            return hint(session, request)

        node.gateway._handlers[m.Hint] = noted

    with (
        node_thread(config) as on_node,
        BlockingClient(on_node(endpoint_of), host="host-a", spaces=spaces_of(config)) as client,
    ):
        on_node(listen)
        client.lookup("s", "r", tokens(0), will_load=False)
        names = [f"r{i}" for i in range(50)]
        for name in names:
            client.hint(m.Hint(request=name, kind="pause"))
        eventually(lambda: len(seen) == 50)
        assert seen == names


def test_the_blocking_client_may_be_used_from_many_threads(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with (
        node_thread(config) as on_node,
        BlockingClient(on_node(endpoint_of), host="host-a", spaces=spaces_of(config)) as client,
    ):

        def one(number: int) -> bool:
            prompt, name = tokens(100 + number), f"r{number}"
            client.lookup("s", name, prompt)
            client.store("s", name, prompt, 0, payloads(number))
            into = buffers(1)
            loaded = client.load(name, 0, into)
            client.finish(name)
            return loaded[0].is_ok and into[0] == payload(number)

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(one, range(40)))


def test_a_closed_client_refuses_and_wakes_those_who_wait(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    client = BlockingClient(config.gateway.bind, host="host-a", spaces=spaces_of(config), timeout_s=60.0)
    errors: list[DpurtError] = []

    def wait() -> None:
        try:
            client.lookup("s", "r", tokens(0))
        except DpurtError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: bool(client._client._talk._waiting))
    client.close()
    client.close()
    waiting.join(10)
    assert [type(error) for error in errors] == [NodeUnavailable]
    with pytest.raises(NodeUnavailable, match="closed"):
        client.lookup("s", "r", tokens(0))
    client.hint(m.Hint(request="r", kind="pause"))
    assert not client._thread.is_alive()


def test_an_absent_node_holds_a_thread_for_its_budget_once_and_then_backs_off(tmp_path: Path) -> None:
    config = config_at(tmp_path, free_port())
    with BlockingClient(
        config.gateway.bind, host="host-a", spaces=spaces_of(config), timeout_s=BUDGET_S
    ) as client:
        began = time.monotonic()
        with pytest.raises(NodeUnavailable):
            client.lookup("s", "r", tokens(0))
        assert time.monotonic() - began < 3 * BUDGET_S
        with pytest.raises(NodeUnavailable, match="a moment ago"):
            client.lookup("s", "r", tokens(0), timeout_s=60)


TOPOLOGY = """\
[node]
name = "stopped"
run_dir = "{run}"
[gateway]
bind = "tcp://127.0.0.1:{port}"
[staging]
bytes = 1310720
[[bdev]]
name = "m"
kind = "memory"
size_bytes = 8388608
segment_bytes = 1048576
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
inbound_bytes = 327680
"""
GROUP = '[[space.geometry.groups]]\nname = "g{}"\nnum_layers = 2\nnum_kv_heads = 2\nhead_size = 16\npart_bytes = 4096\n'


@pytest.mark.slow
def test_a_stopped_node_never_holds_a_thread_longer_than_its_budget(tmp_path: Path) -> None:
    topology = tmp_path / "node.toml"
    groups = "".join(GROUP.format(i) for i in range(4))
    topology.write_text(TOPOLOGY.format(run=tmp_path / "run", port=free_port(), groups=groups))
    spaces = spaces_of(small_config(tmp_path / "run"))
    with (
        NodeProcess(topology, tmp_path / "run", tmp_path / "log") as node,
        BlockingClient(node.endpoint, host="host-a", spaces=spaces, timeout_s=5.0) as client,
    ):
        assert client.store("s", "r", tokens(0), 0, payloads(0), timeout_s=10) == ["stored"]
        os.kill(node.pid, signal.SIGSTOP)
        try:
            calls: list[Callable[[], object]] = [
                lambda: client.lookup("s", "r", tokens(0), timeout_s=BUDGET_S),
                lambda: client.load("r", 0, buffers(1), timeout_s=BUDGET_S),
                lambda: client.store("s", "q", tokens(1), 0, payloads(1), timeout_s=BUDGET_S),
                lambda: client.cancel("r", timeout_s=BUDGET_S),
                lambda: client.stats(timeout_s=BUDGET_S),
            ]
            for call in calls:
                began = time.monotonic()
                with pytest.raises((NodeUnavailable, DeadlineExceeded)):
                    call()
                assert time.monotonic() - began < 3 * BUDGET_S
        finally:
            os.kill(node.pid, signal.SIGCONT)

        def works_again() -> bool:
            try:
                return client.lookup("s", "r2", tokens(0), timeout_s=2.0).matched_blocks == 1
            except DpurtError:
                return False

        eventually(works_again)


# --- what callers give ---


@pytest.mark.parametrize(
    "given",
    [
        np.arange(32),  # numpy's own choice, 64 bits
        np.arange(32, dtype=np.float32),
        list(range(32)),
        b"abc",
        "abcd",
    ],
    ids=["int64", "float32", "list", "odd", "str"],
)
async def test_tokens_of_another_width_are_refused_before_they_are_sent(given: Any, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "run")) as node, host(node, node.config) as client:
        before = node.gateway.messages
        for call in (
            lambda: client.lookup("s", "r", given),
            lambda: client.store("s", "r", given, 0, [payload(1)]),
            lambda: client.explain("s", given),
            lambda: client.route("s", given),
        ):
            with pytest.raises(ValueError, match=r"tokens must be bytes or a buffer of 32-bit integers"):
                await call()
        assert node.gateway.messages == before


async def test_numpy_arrays_are_tokens_payloads_and_buffers(tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "run")) as node, host(node, node.config) as client:
        prompt = np.frombuffer(tokens(1, 2), np.int32)
        kv = [np.frombuffer(one, np.float16) for one in payloads(1, 2)]
        assert await client.store("s", "r", prompt, 0, kv) == ["stored"] * 2
        assert (await client.lookup("s", "q", tokens(1, 2))).matched_blocks == 2
        into = [np.zeros(PAYLOAD // 2, np.float16) for _ in range(2)]
        assert statuses(await client.load("q", 0, into)) == ["ok"] * 2
        assert [one.tobytes() for one in into] == payloads(1, 2)
        for bad in (np.zeros((2, PAYLOAD // 2), np.uint8)[:, ::2], None, 7):
            with pytest.raises(ValueError, match="buffer"):
                await client.load("q", 0, [bad])


# --- one call does not cost the others their session ---


async def test_a_call_with_no_time_left_ends_no_session(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0, 1)
        before = (await client.session(trio.current_time() + 5)).session
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                await client.lookup("s", "late", tokens(0), timeout_s=-1.0)
        into = buffers(1)
        with pytest.raises((DeadlineExceeded, NodeUnavailable)):
            await client.load("r", 0, into, timeout_s=-1.0)
        assert (await client.session(trio.current_time() + 5)).session == before
        assert statuses(await client.load("r", 0, into)) == ["ok"]
        assert len(node.gateway.hosts.sessions) == 1


async def test_a_message_the_node_would_cut_the_connection_for_is_not_sent(tmp_path: Path) -> None:
    gateway = {"bind": "tcp://127.0.0.1:0", "max_message_bytes": 64 << 10}
    async with node_and_host(tmp_path, gateway=gateway) as (node, client):
        await store(client, "r", 0)
        with pytest.raises(RemoteProtocolError, match="max_message_bytes"):
            await client.lookup("s", "large", bytes(128 << 10))
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1
        assert node.gateway.hosts.ended == {}


async def test_an_answer_that_cannot_be_encoded_is_an_error_of_that_question_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        monkeypatch.setattr(node.gateway, "_node_stats", lambda: {"far": {"too": 1 << 70}})
        with pytest.raises(RemoteProtocolError, match="cannot be encoded"):
            await client.stats()
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1


async def test_a_landing_zone_that_cannot_be_had_does_not_stay_in_the_way(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await store(client, "r", 0)
        for slots in (0, (1 << 16) + 1):
            with pytest.raises(ValueError, match="slots"):
                await client.landing_zone("s", slots)
        with pytest.raises(RemoteProtocolError):
            await client.landing_zone("s", 4, shard=7)
        await client._talk.lose(client._talk.current)
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1


async def test_after_a_session_is_lost_its_landing_zone_is_empty_and_the_next_one_has_another(
    tmp_path: Path,
) -> None:
    async with node_and_host(tmp_path) as (_, client):
        assert await client.landing_zone("s", 4)
        await store(client, "r", 0)
        await client.lookup("s", "q", tokens(0))
        await until(lambda: client.placed("s", tokens(0)) == 1)
        await client._talk.lose(client._talk.current)
        assert client.placed("s", tokens(0)) == 0
        await client.lookup("s", "q2", tokens(0))
        assert statuses(await client.load("q2", 0, buffers(1))) == ["ok"]
        await until(lambda: client.placed("s", tokens(0)) == 1)


async def test_reservations_that_come_after_their_store_was_given_up_are_given_back(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with trio.fail_after(30):
        async with (
            running(config) as node,
            host(node, config) as client,
            host(node, config, "host-b") as other,
        ):
            await client.stats()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store, client, "w", *range(16))
                while not client._talk._waiting:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await client.stats()  # after the reserve
            await until(lambda: node.intake.num_reserved == 0)
            await store(other, "w", *range(16))
