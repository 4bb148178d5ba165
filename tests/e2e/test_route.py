"""Routing through a real node: over ZeroMQ, over HTTP in the shapes of other routers' indexers, and on the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from dpurt.cli import main
from dpurt.client import Client
from dpurt.config import Config
from dpurt.errors import RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.engine import FakeEngine, stored
from dpurt.testing.node import running, small_config
from dpurt.testing.node_steps import host, store, tokens, until


def ids(*blocks: int) -> list[int]:
    return [int(token) for token in np.frombuffer(tokens(*blocks), np.int32)]


def topology(tmp_path: Path, engines: list[FakeEngine]) -> Config:
    tables = [
        {
            "name": e.name,
            "kind": "vllm",
            "space": "s",
            "events": [e.events],
            "replay": [e.replay],
            "prefill_tokens_per_s": 1000,
        }
        for e in engines
    ]
    return small_config(tmp_path / "run", engine=tables, router={"bind": "127.0.0.1:0"})


@asynccontextmanager
async def two_engines(tmp_path: Path) -> AsyncIterator[tuple[Node, Client, list[FakeEngine], Config]]:
    engines = [FakeEngine(tmp_path, name) for name in ("gpu-a", "gpu-b")]
    config = topology(tmp_path, engines)
    with trio.fail_after(20):
        async with (
            engines[0].running(),
            engines[1].running(),
            running(config) as node,
            host(node, config) as client,
        ):
            yield node, client, engines, config


async def until_known(node: Node, engine: str, count: int) -> None:
    await until(lambda: node.stats()["engines"]["ranks"].get(engine, {}).get("blocks_stored") == count)  # type: ignore[index]


async def test_the_holder_is_preferred_until_load_says_otherwise(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (node, client, engines, _):
        engines[1].make(stored(ids(0, 1, 2, 3), 16))
        await until_known(node, "gpu-b", 4)
        prompt = tokens(0, 1, 2, 3, 4)
        first = await client.route("s", prompt)
        assert first.best == "gpu-b"
        assert (first.candidates[0].hbm_tokens, first.prompt_tokens) == (64, 80)
        assert "holds 64 tokens" in first.candidates[0].reason
        sent = [first.best] + [(await client.route("s", prompt)).best for _ in range(40)]
        assert sent[:5] == ["gpu-b"] * 5
        assert "gpu-a" in sent
        assert (
            await client.route("s", prompt, queued_ms={"gpu-b": 60_000}, will_route=False)
        ).best == "gpu-a"


async def test_an_engine_that_does_not_answer_is_named_last_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpurt.agents.engines.TICK_S", 0.02)
    monkeypatch.setattr("dpurt.engines.publisher.PROBE_S", 0.05)
    monkeypatch.setattr("dpurt.engines.publisher.SILENT_S", 1.0)
    engines = [FakeEngine(tmp_path, name) for name in ("gpu-a", "gpu-b")]
    config = topology(tmp_path, engines)
    with trio.fail_after(20):
        async with engines[0].running(), running(config) as node, host(node, config) as client:

            async def best() -> str:
                return (await client.route("s", tokens(0, 1), will_route=False)).best

            async def until_best(name: str) -> None:
                while await best() != name:  # noqa: ASYNC110  a question, not an event
                    await trio.sleep(0.05)

            async with engines[1].running():
                engines[1].make(stored(ids(0, 1), 16))
                await until_known(node, "gpu-b", 2)
                await trio.sleep(1.5)
                assert await best() == "gpu-b", "idle, but it answers"
            await until_best("gpu-a")
            reply = await client.route("s", tokens(0, 1), will_route=False)
            assert "has not answered lately" in reply.candidates[1].reason
            only = await client.route("s", tokens(0, 1), among=["gpu-b"], will_route=False)
            assert only.best == "gpu-b", "better than nobody"
            async with engines[1].running():
                engines[1].make(stored(ids(0, 1), 16))
                await until_best("gpu-b")


async def test_what_the_node_has_is_part_of_every_estimate(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (node, client, _, _):
        await store(client, "r", 0, 1)
        await until(lambda: len(node.engines.ranks) == 2)
        reply = await client.route("s", tokens(0, 1, 2), will_route=False)
        assert [one.node_tokens for one in reply.candidates] == [32, 32]
        assert [one.cached_tokens for one in reply.candidates] == [0, 0]
        assert node.stats()["routing"]["ranks"] != {}  # type: ignore[index]


async def test_a_salted_prompt_meets_only_what_was_salted_alike(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (node, client, engines, _):
        engines[0].make(stored(ids(0), 16, extra_keys=[["secret"]]))
        await until_known(node, "gpu-a", 1)
        held = {
            salt: max(
                c.cached_tokens for c in (await client.route("s", tokens(0), cache_salt=salt)).candidates
            )
            for salt in ("", "secret", "other")
        }
        assert held == {"": 0, "secret": 16, "other": 0}


async def post(port: int, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        await stream.send_all(head.encode() + data)
        answer = b""
        async for piece in stream:
            answer += piece
    first, _, content = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(content)


async def test_routers_made_for_other_indexers_can_ask_this_one(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (node, client, engines, _):
        await store(client, "r", 0, 1, 2)
        await engines[0].publish(stored(ids(0), 16), stored(ids(0), 16, medium="CPU"))
        await engines[1].publish(stored(ids(0, 1), 16, medium="CPU"))
        await until_known(node, "gpu-b", 2)
        await until_known(node, "gpu-a", 2)
        port = node.routing.port
        asked = {"token_ids": ids(0, 1, 2, 3)}
        status, dynamo = await post(port, "/query", {**asked, "model_name": "m"})
        assert status == 200
        assert dynamo["scores"] == {"gpu-a": {"0": 16}, "gpu-b": {"0": 32}}
        assert dynamo["instances"]["gpu-b"] == {
            "longest_matched": 48,
            "gpu": 0,
            "cpu": 32,
            "disk": 48,
            "dp": {"0": 0},
        }
        status, conductor = await post(port, "/query", {**asked, "model": "m"})
        assert conductor["t"]["gpu-a"] == {
            "longest_matched": 48,
            "GPU": 16,
            "CPU": 16,
            "DISK": 48,
            "DP": {"0": 16},
        }
        status, route = await post(port, "/route", {**asked, "model_name": "s"})
        assert (status, len(route["candidates"])) == (200, 2)
        status, workers = await post(port, "/workers", b"", "GET")
        assert sorted(worker["instance_id"] for worker in workers) == ["gpu-a", "gpu-b"]


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/query", b"{", "POST", 400),
        ("/query", {"token_ids": [2**40], "model_name": "s"}, "POST", 400),
        ("/query", {"token_ids": [1], "model_name": "other"}, "POST", 404),
        ("/nothing", b"", "GET", 404),
        ("/query", b"", "GET", 405),
        ("/health", b"", "GET", 200),
    ],
)
async def test_a_bad_question_gets_an_answer_that_says_so(
    tmp_path: Path, path: str, body: Any, method: str, status: int
) -> None:
    async with two_engines(tmp_path) as (node, _, _, _):
        assert (await post(node.routing.port, path, body, method))[0] == status


async def test_a_connection_may_ask_again_and_again(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (node, _, _, _):
        async with await trio.open_tcp_stream("127.0.0.1", node.routing.port) as stream:
            one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            await stream.send_all(one + one)
            answers = b""
            while answers.count(b'{"status":"ok"}') < 2:
                answers += await stream.receive_some(4096)
            await stream.send_all(one.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            while piece := await stream.receive_some(4096):
                answers += piece
        assert answers.count(b"200 OK") == 3


async def test_the_command_line_says_who_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with two_engines(tmp_path) as (node, _, engines, config):
        engines[0].make(stored(ids(0), 16))
        await until_known(node, "gpu-a", 1)
        prompt, topology = tmp_path / "ids.json", tmp_path / "t.toml"
        prompt.write_text(json.dumps(ids(0, 1)))
        topology.write_text(TOPOLOGY.format(run=config.node.run_dir))
        words = ["route", "s", "--tokens", str(prompt), "--topology", str(topology)]
        assert await trio.to_thread.run_sync(main, words) == 0
        shown = capsys.readouterr().out
        assert "32 tokens; best: gpu-a" in shown
        assert "holds 16 tokens" in shown


async def test_a_space_without_engines_has_no_candidates(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    async with running(config) as node, host(node, config) as client:
        reply = await client.route("s", tokens(0))
        assert (reply.best, reply.candidates) == ("", [])
        with pytest.raises(RemoteProtocolError, match="unknown_space"):
            await client.route("other", tokens(0))


TOPOLOGY = """
[node]
run_dir = "{run}"
[staging]
bytes = "2 MiB"
[[bdev]]
name = "m"
kind = "memory"
size_bytes = "64 MiB"
segment_bytes = "1 MiB"
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
[[space.geometry.groups]]
name = "g"
num_layers = 2
num_kv_heads = 2
head_size = 16
part_bytes = 4096
"""
