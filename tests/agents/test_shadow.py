"""Policies on trial beside a live node: fed its events, never its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.agents import shadow as shadow_module
from dpurt.agents.shadow import ShadowAgent
from dpurt.client import connect
from dpurt.core.events import Arrived, Demanded, Event, Owner
from dpurt.core.shadow import ShadowStats
from dpurt.errors import ConfigError
from dpurt.node import Node
from dpurt.testing.node import serving, small_config, spaces_of
from dpurt.testing.node_steps import empty_staging, load, payloads, slots, statuses, tokens, until

SHADOWS = [
    {"name": "on-demand"},
    {"name": "ours", "eviction": "predicted", "predictors": ["sliding_window", "cross_request"]},
]


class Slow:
    """A shadow that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> None:
        self.told.append((event, now))

    def next_wakeup(self) -> None:
        return None

    def stats(self) -> ShadowStats:
        return ShadowStats(demanded={}, bytes_read=0, no_room=0, ledger=None)


async def test_a_shadow_shows_what_prefetch_would_be_worth_on_a_node_without(tmp_path: Path) -> None:
    tables: dict[str, Any] = {**slots(12), "prefetch": {"enabled": False, "shadow": SHADOWS}}
    config = small_config(tmp_path / "run", **tables)
    chain = range(6)
    async with serving(Node(config)) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await client.store("s", "fill", tokens(*chain), 0, payloads(*chain))
            await empty_staging(node)
            for shadow in node.shadow.shadows.values():
                for ref in list(shadow._stored):
                    shadow._pools[0].drop(ref)
            read_before = node.storage.read_status.get("ok", 0)
            await client.lookup("s", "again", tokens(*chain))
            await trio.sleep(0.1)
            assert node.storage.read_status.get("ok", 0) == read_before, "a shadow reads nothing"
            assert statuses(await load(client, "again", *chain)) == ["ok"] * 6
            await until(lambda: not node.shadow._events)
            stats: Any = node.stats()["shadow"]
    assert stats["live"]["demanded"]["nvme"] == 6
    assert stats["policies"]["on-demand"]["demanded"]["staging"] == 0
    assert stats["policies"]["ours"]["demanded"]["staging"] == 6
    ledger = stats["policies"]["ours"]["total"]
    assert ledger["timely"] == 6
    assert ledger["accuracy"] == 1.0
    assert stats["lost_events"] == 0


async def test_events_keep_their_order_and_times(autojump_clock: trio.testing.MockClock) -> None:
    slow = Slow()
    agent = ShadowAgent({"slow": slow})  # type: ignore[dict-item]
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        began = trio.current_time()
        agent.observe(Arrived(1, Owner("s", "t"), (5,)))
        await trio.sleep(3)
        agent.observe(Demanded(5, 1, "nvme"))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [now - began for _, now in slow.told] == [0, 3]
    assert agent.stats()["live"] == {"demanded": {"staging": 0, "in_flight": 0, "nvme": 1, "gone": 0}}


async def test_a_node_too_busy_for_its_shadows_drops_their_events_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadow_module, "MAX_EVENTS", 3)
    agent = ShadowAgent({"slow": Slow()})  # type: ignore[dict-item]
    for block in range(5):
        agent.observe(Demanded(block, 1, "nvme"))
    assert agent.stats()["lost_events"] == 2


async def test_without_shadows_nothing_is_kept() -> None:
    agent = ShadowAgent({})
    agent.observe(Demanded(1, 1, "nvme"))
    assert not agent._events
    assert agent.stats() == {}
    agent = ShadowAgent({"slow": Slow()})  # type: ignore[dict-item]
    agent.observe(Demanded(1, 1, "nvme"))
    agent.give_up()
    assert not agent._events
    assert agent.stats() == {}


@pytest.mark.parametrize(
    ("shadows", "problem"),
    [
        ([{"name": "a", "eviction": "mru"}], "unknown policy 'mru'"),
        ([{"name": "a"}, {"name": "a"}], "taken"),
        ([{"name": "a", "predictors": ["oracle"]}], "predictors"),
    ],
)
def test_a_shadow_that_cannot_be_is_refused(
    shadows: list[dict[str, Any]], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_config(tmp_path, prefetch={"shadow": shadows})
