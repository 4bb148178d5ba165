"""Hosts that die, stop, fall silent or come back: what they held is free in time, and never reused too early."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.client import Client, connect
from dpurt.config import Config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.node import Node
from dpurt.testing.node import BLOCK_TOKENS, running, small_config, spaces_of
from dpurt.testing.raw_host import link_of, raw_host
from dpurt.wire import messages as m

PAYLOAD = 4 * 4096
TIMEOUT_S = 1.0
AT_ONCE_S = 0.5  # an end of file tells; no timeout is waited for
PROMPT = tokens_of([1, 2, 3, 4], BLOCK_TOKENS)


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def config_of(tmp_path: Path, **tables: Any) -> Config:
    gateway = {"bind": "tcp://127.0.0.1:0", "session_timeout_s": TIMEOUT_S}
    return small_config(tmp_path / "run", **{"gateway": gateway, **tables})


@asynccontextmanager
async def doomed(node: Node, fabric: str, mode: str) -> AsyncIterator[trio.Process]:
    """A host in a process of its own, ready for its end; it does not outlive the block."""
    script = Path(__file__).with_name("doomed_host.py")
    command = [
        sys.executable,
        str(script),
        str(node.config.node.run_path),
        node.gateway.endpoint,
        fabric,
        mode,
    ]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert await line_from(process) == "ready"
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def line_from(process: trio.Process) -> str:
    assert process.stdout is not None
    line = b""
    with trio.fail_after(20):
        while not line.endswith(b"\n"):
            more = await process.stdout.receive_some(1)
            assert more, "the host ended too early"
            line += more
    return line.decode().strip()


def num_stored(node: Node) -> int:
    counters = node.gateway.hosts.by_host.get("host-a")  # from its first session on
    return counters.stored if counters else 0


async def until(condition: Callable[[], bool], within_s: float) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def held(node: Node) -> dict[str, int]:
    """Whatever hosts hold of the node, by kind, where it is not nothing."""
    pool = node.staging.slabs[0].pool.stats()
    everything = {
        "sessions": len(node.gateway.hosts.sessions), "lingering": len(node.gateway.hosts._by_number),
        "leases": pool.leases, "quarantined": pool.quarantined, "filling": pool.filling, "doomed": pool.doomed,
        "transfers": pool.transfers, "reserved": node.intake.num_reserved, "inbound": len(node.intake._inbound),
        "links": sum(fabric.stats.links for fabric in node.fabric.fabrics.values()),
    }  # fmt: skip
    return {kind: count for kind, count in everything.items() if count}


def is_free(node: Node) -> Callable[[], bool]:
    return lambda: not held(node)


@asynccontextmanager
async def node_with_prompt(tmp_path: Path) -> AsyncIterator[Node]:
    """Blocks 1 to 4 were stored by a host that has left. In the end nobody holds anything, and all is whole."""
    config = config_of(tmp_path)
    with trio.fail_after(40):
        async with running(config) as node:
            async with good(node) as client:
                assert (
                    await client.store("s", "w", PROMPT, 0, [payload(i) for i in (1, 2, 3, 4)])
                    == ["stored"] * 4
                )
            await until(is_free(node), TIMEOUT_S)
            yield node
            await until(is_free(node), 2 * TIMEOUT_S)
            node.staging.slabs[0].pool.check_integrity()
            node.index.spaces["s"].index.check_integrity()
            assert not [agent.name for agent in node._agents if agent.restarts]


@asynccontextmanager
async def good(node: Node, fabric: str = "shm", host: str = "host-b") -> AsyncIterator[Client]:
    spaces = spaces_of(node.config)
    async with connect(node.gateway.endpoint, host=host, spaces=spaces, fabrics=[fabric]) as client:
        yield client


async def use_every_slot(client: Client, start: int) -> None:
    """Store so much that each slot which may be reused is reused."""
    for first in range(start, start + 160, 8):
        blocks = range(first, first + 8)
        payloads = [payload(block) for block in blocks]
        await client.store("s", f"fill{first}", tokens_of(blocks, BLOCK_TOKENS), 0, payloads)
        await client.cancel(f"fill{first}")


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_what_a_killed_host_held_is_free_at_once(tmp_path: Path, fabric: str) -> None:
    """Views or leases, reservations half written: the end of its link tells, long before its silence would."""
    async with node_with_prompt(tmp_path) as node, doomed(node, fabric, "hold") as process:
        before = held(node)
        assert (before["leases"], before["reserved"], before["links"]) == (4, 2, 1)
        process.kill()
        await until(is_free(node), AT_ONCE_S)
        assert "silent" not in node.gateway.hosts.ended


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_a_host_killed_in_the_middle_of_storing_leaves_whole_blocks_or_none(
    tmp_path: Path, fabric: str
) -> None:
    async with node_with_prompt(tmp_path) as node:
        for stored in (0, 7):
            async with doomed(node, fabric, "store") as process:
                before = num_stored(node)
                await until(lambda: num_stored(node) > before + stored, 10)  # noqa: B023
                process.kill()
                await until(is_free(node), AT_ONCE_S)
        async with good(node) as client:
            for number in range(200):
                blocks = range(1000 + 4 * number, 1004 + 4 * number)
                name = f"r{number}"
                found = await client.lookup("s", name, tokens_of(blocks, BLOCK_TOKENS))
                into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
                loaded = await client.load(name, 0, into) if into else []
                for block, answer, got in zip(blocks, loaded, into, strict=False):
                    assert answer.is_ok
                    assert got == payload(block)
                await client.cancel(name)
                if not into:
                    break
            assert number > 1


async def test_a_block_a_dead_host_had_reserved_can_be_stored_by_others_at_once(tmp_path: Path) -> None:
    prompt = tokens_of([50, 51], BLOCK_TOKENS)
    async with (
        node_with_prompt(tmp_path) as node,
        good(node) as client,
        doomed(node, "tcp", "hold") as process,
    ):
        payloads = [payload(50), payload(51)]
        assert await client.store("s", "w1", prompt, 0, payloads) == ["in_flight"] * 2
        process.kill()
        await until(lambda: not node.intake.num_reserved, AT_ONCE_S)
        assert await client.store("s", "w1", prompt, 0, payloads) == ["stored"] * 2


async def test_a_store_that_waits_for_a_dead_hosts_parent_block_ends_at_once(tmp_path: Path) -> None:
    prompt = tokens_of([50, 51, 52], BLOCK_TOKENS)
    async with (
        node_with_prompt(tmp_path) as node,
        good(node) as client,
        doomed(node, "shm", "hold") as process,
    ):
        statuses: list[str] = []

        async def store_children() -> None:
            statuses.extend(await client.store("s", "w1", prompt, 2, [payload(52)], timeout_s=20.0))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store_children)
                await trio.sleep(0.1)
                assert not statuses, "its parent may yet come"
                process.kill()
        assert statuses == ["orphan"]


async def test_a_host_that_says_hello_and_never_links_is_forgotten_after_its_silence(tmp_path: Path) -> None:
    async with node_with_prompt(tmp_path) as node:
        for fabric in ("shm", "tcp"):
            async with raw_host(node.gateway.endpoint) as raw:
                await raw.hello(node.config, "host-a", [fabric])
                await raw.ask(m.Lookup(space="s", request="r", tokens=PROMPT))
                await raw.ask(m.Load(request="r", first=0, count=4))
            assert held(node)["leases"] == 4
            await until(is_free(node), TIMEOUT_S + AT_ONCE_S)
        assert node.gateway.hosts.ended["silent"] == 2


async def test_dead_sessions_leave_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    async with node_with_prompt(tmp_path) as node:
        counts = []
        for number in range(40):
            async with raw_host(node.gateway.endpoint) as raw:
                link = await link_of(await raw.hello(node.config, "host-a", [("shm", "tcp")[number % 2]]))
                await raw.ask(
                    m.Reserve(space="s", request="w", first=0, count=1, tokens=tokens_of([9], BLOCK_TOKENS))
                )
                await link.aclose()
            await until(is_free(node), AT_ONCE_S)
            gc.collect()
            counts.append((len(os.listdir("/proc/self/fd")), count_inbound_mappings()))
        assert counts[-1] == counts[9]
        assert counts[-1][1] == 0


def count_inbound_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("dpurt:inbound")


# --- stopped ---------------------------------------------------------------------------------------------------------


async def answer(process: trio.Process, line: str) -> str:
    assert process.stdin is not None
    await process.stdin.send_all(line.encode() + b"\n")
    return await line_from(process)


@pytest.mark.parametrize("end", ["continued", "killed"])
async def test_views_of_a_stopped_host_stay_untouched_until_it_lets_go_or_dies(
    tmp_path: Path, end: str
) -> None:
    """Its session ends with its silence, but it may run on at any time, and still reads our memory then."""
    async with (
        node_with_prompt(tmp_path) as node,
        doomed(node, "shm", "hold") as process,
        good(node) as client,
    ):
        expected = hashlib.blake2b(b"".join(payload(i) for i in (1, 2, 3, 4)), digest_size=16).hexdigest()
        assert await answer(process, "check") == expected
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: node.gateway.hosts.ended.get("silent") == 1, TIMEOUT_S + AT_ONCE_S)
        assert (held(node)["quarantined"], held(node).get("leases")) == (4, None)
        await use_every_slot(client, 2000)
        assert held(node)["quarantined"] == 4
        if end == "killed":
            process.kill()
        else:
            os.kill(process.pid, signal.SIGCONT)
            assert await answer(process, "check") == expected, "what it was looking at has not changed"
            assert held(node)["quarantined"] == 4
            assert process.stdin is not None
            await process.stdin.send_all(b"bye\n")
        await until(lambda: "quarantined" not in held(node), AT_ONCE_S)
        await use_every_slot(client, 4000)


async def test_a_stopped_hosts_leases_over_tcp_are_free_after_its_silence(tmp_path: Path) -> None:
    """It cannot read our memory by itself, so nothing is quarantined."""
    async with node_with_prompt(tmp_path) as node, doomed(node, "tcp", "hold") as process:
        os.kill(process.pid, signal.SIGSTOP)
        await until(is_free(node), TIMEOUT_S + AT_ONCE_S)
        os.kill(process.pid, signal.SIGCONT)


async def test_a_stopped_host_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with (
        node_with_prompt(tmp_path) as node,
        doomed(node, "tcp", "store") as process,
        good(node) as client,
    ):
        await trio.sleep(0.1)
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(20):
            blocks = range(5000 + 4 * number, 5004 + 4 * number)
            payloads = [payload(block) for block in blocks]
            stored = await client.store("s", f"w{number}", tokens_of(blocks, BLOCK_TOKENS), 0, payloads)
            assert stored == ["stored"] * 4
            await client.cancel(f"w{number}")
        process.kill()


# --- back again ------------------------------------------------------------------------------------------------------


async def test_a_host_may_come_back_under_its_name_while_its_former_life_still_counts(tmp_path: Path) -> None:
    async with node_with_prompt(tmp_path) as node, doomed(node, "shm", "hold") as process:
        os.kill(process.pid, signal.SIGSTOP)
        async with good(node, host="host-a") as client:
            found = await client.lookup("s", "r", PROMPT)
            into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
            assert [block.status for block in await client.load("r", 0, into)] == ["ok"] * 4
            assert [bytes(view) for view in into] == [payload(i) for i in (1, 2, 3, 4)]
            process.kill()
            await until(lambda: len(node.gateway.hosts._by_number) == 1, AT_ONCE_S)
            assert (await client.lookup("s", "r", PROMPT)).matched_blocks == 4
