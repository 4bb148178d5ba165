"""The link to the node: down, up, refused; and nobody waits for a node that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from dpurt.engines.store import Access
from dpurt.engines.vllm.link import Link, release, shared_link, until_room
from dpurt.engines.vllm.settings import NodeSettings
from dpurt.testing.node import running, small_config

SETTINGS = NodeSettings(space="s", host="host-a", fabrics=("tcp",))


async def until(what: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not what():  # noqa: ASYNC110 - a thread changes it
            await trio.sleep(0.01)


async def test_a_link_finds_its_node_by_itself_and_says_when_it_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    space = config.to_space("s")
    async with running(config) as node:
        access = Access(node.gateway.endpoint, "host-a", ("tcp",), space.tenant, space.salt, None, None)
        good = await trio.to_thread.run_sync(Link, SETTINGS, access, space)
        bad = await trio.to_thread.run_sync(Link, SETTINGS, access, replace(space, revision="another"))
        await until(lambda: good.state == "up" and bad.state == "refused")
        assert "revision" in bad.refusal
        assert not bad.is_up
        counted = bad.tally.take()
        assert counted is not None
        assert counted["node_errors"]["mismatch_revision"] >= 1
        for link in (good, bad):
            await trio.to_thread.run_sync(link.close)


def test_both_sides_of_a_process_share_a_link_and_the_last_one_closes_it(tmp_path: Path) -> None:
    space = small_config(tmp_path).to_space("s")
    access = Access("tcp://127.0.0.1:9", "host-a", ("tcp",), space.tenant, space.salt, None, None)
    one, other = shared_link(SETTINGS, access, space), shared_link(SETTINGS, access, space)
    assert one is other
    release(one)
    assert one.users == 1
    release(other)
    assert shared_link(SETTINGS, access, space) is not one
    release(shared_link(SETTINGS, access, space))


def test_a_store_waits_for_room_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["stored", "no_room"], ["exists", "stored"]]
    lefts: list[float] = []

    def attempt(left: float) -> list[str]:
        lefts.append(left)
        return answers[len(lefts) - 1]

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert until_room(attempt, 5.0) == ["exists", "stored"]
    assert lefts[1] <= lefts[0] == 5.0
    assert until_room(lambda left: ["no_room"], 0.01) == ["no_room"]
