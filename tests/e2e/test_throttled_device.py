"""A device that gives far less than it is asked for, as one with a QoS limit does: prefetch yields, demand does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpurt.agents.storage import ReadJob
from dpurt.testing.node_steps import empty_staging, load, node_and_host, payloads, statuses, tokens, until

QUEUE_DEPTH = 4
PREFETCHED = range(100, 132)
WANTED = range(1, 5)


def throttled() -> dict[str, Any]:
    """About 5 ms a block of 20 KiB, however many are asked for at once."""
    profile = {
        "read_latency_us": 100, "write_latency_us": 0, "read_bytes_per_s": 4_000_000, "write_bytes_per_s": 10**9,
    }  # fmt: skip
    bdev = {
        "name": "slow", "kind": "modelled", "size_bytes": 32 << 20, "segment_bytes": 1 << 20,
        "queue_depth": QUEUE_DEPTH, "profile": profile,
    }  # fmt: skip
    return {"bdev": [bdev]}


async def test_prefetch_yields_to_demand_on_a_throttled_device(tmp_path: Path) -> None:
    async with node_and_host(tmp_path, **throttled()) as (node, client):
        for blocks in (PREFETCHED, WANTED):
            for first in range(0, len(blocks), 8):
                part = list(blocks)[first : first + 8]
                done = await client.store(
                    "s", "fill", tokens(*list(blocks)[: first + 8]), first, payloads(*part)
                )
                assert done == ["stored"] * len(part)
            await client.finish("fill")
        await empty_staging(node)
        ended: list[bool] = []
        finish = node.storage._finish

        def note(jobs: Sequence[ReadJob], *rest: Any) -> None:
            ended.extend(job.is_demand for job in jobs)
            finish(jobs, *rest)

        node.storage._finish = note  # type: ignore[method-assign]
        await client.lookup("s", "ahead", tokens(*PREFETCHED))
        await until(lambda: len(ended) >= 2)
        assert not any(ended), "prefetch is under way, far from its end"
        before = len(ended)
        assert statuses(await load(client, "now", *WANTED)) == ["ok"] * len(WANTED)
        during = ended[before:]
        assert during.count(False) <= 2 * QUEUE_DEPTH, "what the device had, and no more than a round of it"
        await until(lambda: node.storage.is_quiet)
        assert ended.count(False) > 2 * QUEUE_DEPTH, "and then prefetch goes on"
        assert node.prefetch.core is not None
        totals = node.prefetch.core.ledger.totals()
        assert totals.failed == 0
