"""The node's statistics: plain values all the way down, and figures that agree with each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpurt.testing.node_steps import PAYLOAD, RECORD, empty_staging, load, node_and_host, store
from dpurt.wire import messages as m

PLAIN = (int, float, str, bool, type(None))


def leaves(value: object) -> list[object]:
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value)
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, (list, tuple)):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]


async def test_all_statistics_are_plain_values_and_survive_the_wire(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", 0, 1)
        stats = node.stats()
        assert all(isinstance(leaf, PLAIN) for leaf in leaves(stats))
        reply = m.StatsReply(id=1, stats=stats)
        assert m.decode_reply(m.encode(reply)).id == 1
        assert set(await client.stats()) == set(stats)


async def test_hits_add_up_per_host_and_tier(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, prefetch={"enabled": False}) as (node, client):
        await store(client, "r", *range(4))
        await load(client, "q", 0, 1, 2, 3, 4, 5)
        await empty_staging(node)
        await load(client, "q2", 0, 1)
        stats: Any = await client.stats()
        one = stats["hosts"]["host-a"]
        assert (one["blocks"], one["staging"], one["nvme"], one["misses"]) == (8, 4, 2, {"miss": 2})
        assert one["bytes_loaded"] == 6 * PAYLOAD
        assert (one["stored"], one["bytes_stored"]) == (4, 4 * PAYLOAD)
        space = stats["spaces"]["s"]
        assert {**space["served"]} == {**one}, "one host, one space"
        assert space["tenant"] == node.config.space[0].tenant
        assert stats["intake"]["stored"] == 4
        [bdev] = stats["bdevs"].values()
        assert bdev["store"]["appends"] == 4
        assert bdev["store"]["bytes_read"] == 2 * RECORD
        assert stats["storage"]["reads"] == {"ok": 2}
        pool = stats["spaces"]["s"]["staging"]
        assert pool["total"] == sum(
            pool[name] for name in ("free", "filling", "ready", "leased", "doomed", "quarantined")
        )
        assert stats["prefetch"] == {"enabled": 0}


async def test_the_ledger_in_the_statistics_adds_up(tmp_path: Path) -> None:
    async with node_and_host(tmp_path) as (node, client):
        await store(client, "r", *range(6))
        await client.finish("r")
        await empty_staging(node)
        await load(client, "q", *range(6))
        stats: Any = await client.stats()
        total = stats["prefetch"]["total"]
        outcomes = ("timely", "late", "early", "useless", "cancelled", "failed", "refused", "open")
        assert total["planned"] == sum(total[name] for name in outcomes) > 0
        assert total["planned"] == sum(row["planned"] for row in stats["prefetch"]["predictors"].values())
        assert stats["prefetch"]["by_space"]["s"] == total
        assert (total["lead_p50_s"] is None) == (total["timely"] == 0)
