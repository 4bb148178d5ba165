"""The engines agent against publishers with real sockets: loss, replay, restart, discovery, silence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import trio

from dpurt.agents import engines
from dpurt.agents.engines import EnginesAgent
from dpurt.config import EngineConfig
from dpurt.core.identity import Geometry, LayerGroup
from dpurt.testing.engine import FakeEngine
from dpurt.testing.engine import stored as stored_blocks
from dpurt.transport import ZmqSocket, http, open_context

BLOCK = 4
GROUP = LayerGroup(name="g", num_layers=1, num_kv_heads=1, head_size=1, part_bytes=1)
SHAPES = dict.fromkeys(("s", "s-adapter"), Geometry(block_tokens=BLOCK, groups=(GROUP,)))


def stored(*tokens: int, **fields: Any) -> dict[str, Any]:
    """One block of a prompt of its own."""
    return stored_blocks(tokens, BLOCK, **fields)


def config(name: str = "e", **fields: Any) -> EngineConfig:
    return msgspec.convert({"name": name, "kind": "vllm", "space": "s", **fields}, EngineConfig)


@asynccontextmanager
async def following(*configs: EngineConfig) -> AsyncIterator[EnginesAgent]:
    agent = EnginesAgent(tuple(configs), SHAPES)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            yield agent
            nursery.cancel_scope.cancel()


def holders(agent: EnginesAgent, *tokens: int, space: str = "s") -> list[str]:
    prompt = b"".join(token.to_bytes(4, "little") for token in tokens)
    ranks = agent.serving(space)
    return [one.engine for one in agent.holdings(space, ranks, prompt) if one.hbm_tokens]


async def until_held(agent: EnginesAgent, *tokens: int, by: Sequence[str] = ("e",), space: str = "s") -> None:
    while holders(agent, *tokens, space=space) != list(by):  # noqa: ASYNC110
        await trio.sleep(0.005)


async def test_what_was_published_before_we_came_while_we_listened_and_lost_is_all_known(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(tmp_path)
    async with engine.running():
        engine.make(stored(1, 1, 1, 1))
        async with following(config(events=[engine.events], replay=[engine.replay])) as agent:
            await until_held(agent, 1, 1, 1, 1)
            engine.make(stored(2, 2, 2, 2))  # lost
            while not holders(agent, 3, 3, 3, 3):
                await engine.publish(stored(3, 3, 3, 3))  # the subscription takes a moment
                await trio.sleep(0.01)
            await until_held(agent, 2, 2, 2, 2)
            stats = agent.ranks["e", 0].core.stats
            assert (stats.gaps, stats.lost) == (1, 0)


async def test_a_restarted_engine_holds_nothing_of_what_its_former_process_did(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    async with following(config(events=[engine.events], replay=[engine.replay])) as agent:
        async with engine.running():
            engine.make(stored(1, 1, 1, 1))
            await until_held(agent, 1, 1, 1, 1)
        async with engine.running():
            while not holders(agent, 2, 2, 2, 2):
                await engine.publish(stored(2, 2, 2, 2))
                await trio.sleep(0.01)
            await until_held(agent, 1, 1, 1, 1, by=())
        assert agent.ranks["e", 0].core.stats.generations == 1


async def test_ranks_are_instances_of_their_own_and_adapters_have_their_own_space(tmp_path: Path) -> None:
    both = [FakeEngine(tmp_path, f"e{i}") for i in range(2)]
    ranks = config(events=[e.events for e in both], replay=[e.replay for e in both], loras={"a": "s-adapter"})
    async with both[0].running(), both[1].running(), following(ranks) as agent:
        both[0].make(stored(1, 1, 1, 1))
        both[1].make(stored(2, 2, 2, 2), stored(3, 3, 3, 3, lora_name="a"))
        await until_held(agent, 1, 1, 1, 1, by=["e/0"])
        await until_held(agent, 2, 2, 2, 2, by=["e/1"])
        assert holders(agent, 3, 3, 3, 3) == []
        await until_held(agent, 3, 3, 3, 3, by=["e/1"], space="s-adapter")


@pytest.mark.parametrize("kind", ["vllm", "vllm-0.33", "sglang"])
async def test_an_engine_is_asked_where_its_ranks_publish(tmp_path: Path, kind: str) -> None:
    engine, paths = FakeEngine(tmp_path), list[str]()
    with open_context() as context, ZmqSocket(context, "PUB") as pub, ZmqSocket(context, "ROUTER") as router:
        ports = [int(socket.bind("tcp://127.0.0.1:0").rpartition(":")[2]) for socket in (pub, router)]
        rank = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}", "topic": ""}
        info = {
            "endpoint_host": "*", "endpoint_port_base": ports[0], "replay_endpoint_port_base": ports[1],
            "topic": "", "dp_size": 1, "block_size": BLOCK, "publisher": "zmq",
        }  # fmt: skip
        told = {
            "vllm": [{**rank, "data_parallel_rank": 0}],
            "vllm-0.33": {"0": rank},
            "sglang": {"kv_events": info},
        }
        async with trio.open_nursery() as nursery:

            def answer(request: http.HttpRequest) -> http.HttpAnswer:
                paths.append(request.path)
                return http.HttpAnswer(200, msgspec.json.encode(told[kind]))

            listeners = await http.listen("127.0.0.1:0")
            nursery.start_soon(http.serve, listeners, answer, 1000)
            nursery.start_soon(engine.serve_replays, router)
            address = f"http://127.0.0.1:{http.port_of(listeners)}"
            engine.make(stored(1, 1, 1, 1))
            async with following(config(kind=kind.split("-")[0], discovery=address)) as agent:
                await until_held(agent, 1, 1, 1, 1)
            nursery.cancel_scope.cancel()
    assert paths == ["/server_info" if kind == "sglang" else "/kv_event_sources"]


async def test_an_engine_that_cannot_be_found_is_warned_of_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "PAUSES_S", (0.01,))
    with structlog.testing.capture_logs() as logs:
        async with following(config(discovery="http://127.0.0.1:9")) as agent:
            await trio.sleep(0.1)
            assert list(agent.unfound) == ["e"]
    assert [entry["event"] for entry in logs] == ["engine_not_found"]


async def test_a_silent_engine_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "TICK_S", 0.01)
    monkeypatch.setattr("dpurt.engines.publisher.SILENT_S", 0.05)
    with structlog.testing.capture_logs() as logs:
        async with following(config(events=[f"ipc://{tmp_path}/nobody"])) as agent:
            await trio.sleep(0.2)
            assert agent.stats()["ranks"]["e"]["is_silent"] == 1  # type: ignore[index]
    assert [entry["event"] for entry in logs] == ["engine_silent"]


async def test_a_restarted_agent_goes_on_with_what_it_knew(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    agent = EnginesAgent((config(events=[engine.events], replay=[engine.replay]),), SHAPES)
    async with engine.running():
        engine.make(stored(1, 1, 1, 1))
        for block in (1, 2):
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    await nursery.start(agent.run)
                    await until_held(agent, block, block, block, block)
                    nursery.cancel_scope.cancel()
            engine.make(stored(2, 2, 2, 2))
    assert holders(agent, 1, 1, 1, 1) == ["e"]


async def test_an_engine_with_an_endpoint_that_cannot_be_had_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "PAUSES_S", (0.05,))
    engine = FakeEngine(tmp_path)
    bad = config(name="bad", events=["tcp://a$b:5557"])
    agent = EnginesAgent((bad, config(events=[engine.events], replay=[engine.replay])), SHAPES)
    async with engine.running():
        with trio.fail_after(5), structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                await nursery.start(agent.run)
                engine.make(stored(1, 1, 1, 1))
                await until_held(agent, 1, 1, 1, 1)
                assert list(agent.unfound) == ["bad"]
                nursery.cancel_scope.cancel()
    assert "engine_not_followed" in [entry["event"] for entry in logs]
