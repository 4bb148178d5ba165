"""The gateway agent and its sessions: hello, refusals, scopes, limits, silence, drain, and the admin socket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.agents.storage import ReadJob
from dpurt.client import Client
from dpurt.client.admin import ask
from dpurt.errors import NodeUnavailable, RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.node import running, small_config, small_host, small_space
from dpurt.testing.node_steps import (
    buffers,
    empty_staging,
    host,
    node_and_host,
    payloads,
    statuses,
    store,
    tokens,
    until,
)
from dpurt.wire import messages as m


async def refusal(client: Client, request: m.Request) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        await client._talk.exchange(request, m.Ok, trio.current_time() + 5)
    return caught.value.code


def scopes(node: Node) -> int:
    return sum(len(session.scopes) for session in node.gateway.hosts.sessions.values())


# --- hello ---


async def test_a_request_before_hello_is_refused(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        assert await refusal(client, m.Ping()) == "no_session"
        assert node.gateway.errors == {"no_session": 1}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 2}, "protocol"),
        ({"host": "stranger"}, "unknown_host"),
        ({"fabrics": ["verbs"]}, "no_fabric"),
        ({"spaces": "other"}, "unknown_space"),
        ({"spaces": "vectors"}, "space_mismatch"),
        ({"spaces": "epoch"}, "space_mismatch"),
        ({"spaces": "geometry"}, "malformed"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_a_code(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    config = small_config(tmp_path / "run")
    claim = m.claim_of("s", config.to_space("s"))
    match changes.get("spaces"):
        case "other":
            claim.name = "other"
        case "vectors":
            claim.vectors = [b"x" * 16]
        case "epoch":
            claim.epoch = 3
        case "geometry":
            claim.token_bytes = 5
    fields: dict[str, Any] = {"host": "host-a", "protocol": m.PROTOCOL, "fabrics": ["tcp"]}
    hello = m.Hello(**{**fields, **changes, "spaces": [claim]})
    async with running(config) as node, host(node, config) as client:
        if code == "space_mismatch":
            with pytest.raises(Exception, match="vectors" if claim.epoch is None else "epoch"):
                await client._talk.exchange(hello, m.HelloReply, trio.current_time() + 5)
        else:
            assert await refusal(client, hello) == code
        assert not node.gateway.hosts.sessions


async def test_no_more_clients_than_allowed(tmp_path: Path) -> None:
    gateway = {"bind": "tcp://127.0.0.1:0", "max_clients": 1}
    config = small_config(tmp_path / "run", gateway=gateway)
    async with running(config) as node, host(node, config) as first:
        await first.lookup("s", "r", tokens(0))
        async with host(node, config, "host-b") as second:
            with pytest.raises(NodeUnavailable, match="busy"):
                await second.lookup("s", "r", tokens(0))


# --- scopes ---


async def test_a_probe_opens_no_scope_and_a_lookup_does(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await client.lookup("s", "r", tokens(0), will_load=False)
        assert scopes(node) == 0
        await client.lookup("s", "r", tokens(0))
        await client.lookup("s", "r", tokens(0, 1))
        assert scopes(node) == 1
        assert await client.cancel("r") == 0
        assert await client.cancel("r") == 0
        assert scopes(node) == 0


@pytest.mark.parametrize("has_prefetch", [False, True])
async def test_reads_have_the_priority_of_the_last_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_prefetch: bool
) -> None:
    prefetch = {} if has_prefetch else {"prefetch": {"enabled": False}}
    async with node_and_host(tmp_path, **prefetch) as (node, client):
        await store(client, "r", 0, 1)
        await empty_staging(node)
        turns: list[int] = []
        do_read = node.storage._do_read

        async def noted(run: Sequence[ReadJob]) -> None:
            await until(lambda: all(job.is_demand for job in run))  # a load wants them all
            turns.extend(job.priority for job in run)
            await do_read(run)

        monkeypatch.setattr(node.storage, "_do_read", noted)
        await client.lookup("s", "r", tokens(0, 1), priority=5)
        await client.lookup("s", "r", tokens(0, 1), priority=-3)
        assert statuses(await client.load("r", 0, buffers(2))) == ["ok", "ok"]
        assert turns == [-3, -3]


async def test_ending_a_scope_frees_leases_and_reservations_before_the_answer(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0, 1)
        reply = await client._talk.call(m.Load(request="r", first=0, count=2), m.LoadReply)
        await client._talk.call(
            m.Reserve(space="s", request="r", first=2, count=1, tokens=tokens(0, 1, 2)), m.ReserveReply
        )
        assert [grant.status for grant in reply.blocks] == ["ok"] * 2
        assert await client.cancel("r") == 3
        assert node.staging.slabs[0].pool.stats().leases == 0
        assert node.intake.num_reserved == 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (m.Load(request="nobody", first=0, count=1), "unknown_request"),
        (m.Commit(request="nobody", blocks=[m.CommitBlock(reservation=1, crcs=[0])]), "unknown_request"),
        (m.Lookup(space="other", request="r", tokens=b""), "unknown_space"),
        (m.Lookup(space="s", request="r"), "malformed"),
        (m.Lookup(space="s", request="r", tokens=b"", digests=[]), "malformed"),
        (m.Reserve(space="s", request="new", first=0, count=1), "malformed"),
        (m.Reserve(space="s", request="r", first=0, count=2, tokens=tokens(0)), "malformed"),
        (m.Hint(request="r", kind="arrival", space="s"), "malformed"),
        (m.Load(request="r", first=0, count=2, landing=m.Landing(region=1, offsets=[0])), "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_requests_that_make_no_sense_are_refused(
    tmp_path: Path, request_: m.Request, code: str
) -> None:
    async with node_and_host(tmp_path) as (_, client):
        await store(client, "r", 0)
        assert await refusal(client, request_) == code


async def test_a_load_beyond_the_match_is_a_miss_for_those_blocks(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        loaded = await client.load("r", 0, buffers(3))
        assert statuses(loaded) == ["ok", "miss", "miss"]
        assert loaded[1].reason == "beyond the matched prefix"
        assert node.gateway.hosts.by_host["host-a"].misses == {"miss": 2}


async def test_limits_on_scopes_and_running_loads_are_answered_busy(tmp_path: Path) -> None:
    gateway = {"bind": "tcp://127.0.0.1:0", "max_scopes_per_client": 2, "max_inflight_per_client": 1}
    async with node_and_host(tmp_path, gateway=gateway) as (node, client):
        await store(client, "r0", 0)
        await client.lookup("s", "r1", tokens(1))
        with pytest.raises(RemoteProtocolError, match="busy"):
            await client.lookup("s", "r2", tokens(2))
        [session] = node.gateway.hosts.sessions.values()
        session.in_flight += 1
        with pytest.raises(RemoteProtocolError, match="busy"):
            await client.load("r0", 0, buffers(1))
        session.in_flight -= 1


async def test_a_request_stays_in_its_space(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "space": [small_space("s"), small_space("s2", model="m2")],
        "host": [small_host("host-a", spaces=["s", "s2"])],
    }
    async with node_and_host(tmp_path, **tables) as (_, client):
        await client.lookup("s", "r", tokens(0))
        with pytest.raises(RemoteProtocolError, match="belongs to space 's'"):
            await client.lookup("s2", "r", tokens(0))


# --- sessions ---


async def test_a_silent_host_loses_its_session_and_a_living_one_does_not(tmp_path: Path) -> None:
    gateway = {"bind": "tcp://127.0.0.1:0", "session_timeout_s": 0.4}
    async with node_and_host(tmp_path, gateway=gateway) as (node, client):
        await store(client, "r", 0)
        await trio.sleep(1.0)
        assert not node.gateway.hosts.ended, "its pings keep it"
        node.gateway.hosts.end_silent(trio.current_time() + 0.5)
        assert node.gateway.hosts.ended == {"silent": 1}
        assert scopes(node) == 0
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1


async def test_a_host_that_says_bye_leaves_nothing(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node:
        async with host(node, config) as client:
            await store(client, "r", 0)
            await client._talk.call(m.Load(request="r", first=0, count=1), m.LoadReply)
        await until(lambda: not node.gateway.hosts._by_number)
        assert node.staging.slabs[0].pool.stats().leases == 0
        assert not node.intake._inbound


async def test_a_host_whose_link_breaks_is_gone_at_once(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, "tcp") as (node, client):
        await store(client, "r", 0)
        assert client._talk.current is not None
        await client._talk.current.endpoint.aclose()
        await until(lambda: node.gateway.hosts.ended == {"fabric link closed": 1})
        with pytest.raises(NodeUnavailable):
            await client.load("r", 0, buffers(1))
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1


# --- restart of the agent ---


async def test_a_restarted_gateway_is_found_again_at_the_same_endpoint(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        endpoint = node.gateway.endpoint

        def broken(session: object, request: object) -> m.Reply:
            node.gateway._handlers[m.Stats] = node.gateway._stats
            raise RuntimeError("a bug")

        node.gateway._handlers[m.Stats] = broken
        with trio.move_on_after(0.3):
            await client.stats()
        await until(lambda: node.gateway.restarts == 1)
        assert (await client.lookup("s", "q", tokens(0))).matched_blocks == 1
        assert statuses(await client.load("q", 0, buffers(1))) == ["ok"]
        await until(lambda: len(node.gateway.hosts.sessions) == 1)
        assert node.gateway.endpoint == endpoint


# --- operators ---


async def admin(node: Node, request: m.Request, kind: type[Any]) -> Any:
    return await trio.to_thread.run_sync(ask, node.config.node.run_path, request, kind)


async def test_the_admin_socket_is_private_and_answers(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0)
        assert (node.config.node.run_path / "admin.sock").stat().st_mode & 0o777 == 0o600
        assert (await admin(node, m.Stats(), m.StatsReply)).stats["node"]["name"] == "test"
        assert (await admin(node, m.Ping(), m.Ok)).id == 1
        reply = await admin(node, m.Explain(space="s", tokens=tokens(0, 1)), m.ExplainReply)
        assert [block.reason for block in reply.blocks] == ["present", "never_stored"]
        for request, code in [
            (m.Explain(space="nope", tokens=b""), "unknown_space"),
            (m.Explain(space="s", tokens=b"", shard=1), "malformed"),
            (m.EpochBump(space="nope"), "unknown_space"),
            (m.Lookup(space="s", request="r"), "malformed"),
        ]:
            with pytest.raises(RemoteProtocolError) as caught:
                await admin(node, request, m.Ok)
            assert caught.value.code == code
        assert all(agent.restarts == 0 for agent in node._agents)


async def test_drain_ends_the_node_once_all_is_written(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with trio.fail_after(20):
        async with running(config) as node, host(node, config) as client:
            await client.store("s", "r", tokens(*range(8)), 0, payloads(*range(8)))
            await admin(node, m.Drain(), m.Ok)
            await until(lambda: node.storage.is_quiet and node.gateway.hosts.is_draining)
            assert node.intake.writes_lost == 0


def test_without_a_node_the_operator_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NodeUnavailable, match="no such socket"):
        ask(tmp_path, m.Ping(), m.Ok)
