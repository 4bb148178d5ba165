"""Requests cancelled at random points leave nothing behind (U23, U49)."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
import trio

from dpurt.client import Client, connect
from dpurt.demo.content import payload_of, tokens_of
from dpurt.errors import DpurtError
from dpurt.node import Node
from dpurt.testing.node import BLOCK_TOKENS, running, small_config, spaces_of

REQUESTS = int(os.environ.get("DPURT_CANCELLED_REQUESTS", "20000"))
WORKERS = 16
PAYLOAD = 4 * 4096
CHAIN = 6


def payloads(first: int, count: int) -> list[bytes]:
    return [payload_of((first + i).to_bytes(16, "little"), PAYLOAD) for i in range(count)]


async def one_request(client: Client, name: str, rng: random.Random, bodies: list[bytes]) -> None:
    """A request that is given up at some point: an await cancelled on the host's side, then `cancel`."""
    start = rng.randrange(40) * 100
    tokens = tokens_of(range(start, start + CHAIN), BLOCK_TOKENS)
    with trio.move_on_after(rng.choice([0.0002, 0.001, 0.003, 0.01, 5.0])):
        found = await client.lookup("s", name, tokens)
        if found.matched_blocks:
            into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
            await client.load(name, 0, into, timeout_s=2.0)
        if rng.random() < 0.3:
            first = found.matched_blocks
            await client.store("s", name, tokens, first, bodies[first:CHAIN])
    if rng.random() < 0.7:
        await client.cancel(name, timeout_s=20.0)
    else:
        await client.finish(name, "end_turn")


def leftovers(node: Node) -> dict[str, int]:
    pool = node.staging.slabs[0].pool
    stats = pool.stats()
    assert node.prefetch.core is not None
    return {
        "leases": stats.leases,
        "leased": stats.leased,
        "quarantined": stats.quarantined,
        "doomed": stats.doomed,
        "filling": stats.filling,
        "pinned": stats.pinned,
        "transfers": stats.transfers,
        "scopes": sum(len(s.scopes) for s in node.gateway.hosts.sessions.values()),
        "reserved": node.intake.num_reserved,
        "dirty": sum(node.intake.dirty.values()),
        "flights": node.staging.num_flights,
        "flying": node.prefetch.core.arbiter.num_flying,
        "waiting": node.prefetch.core.arbiter.num_waiting,
    }


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_cancelled_requests_leave_nothing_behind(tmp_path: Path, fabric: str) -> None:
    config = small_config(tmp_path / "run")
    rng = random.Random(7)
    bodies = payloads(0, CHAIN)
    count = REQUESTS // 2  # half over each fabric
    at_tenth = 0
    async with running(config) as node:
        async with connect(
            node.gateway.endpoint, host="host-a", spaces=spaces_of(config), fabrics=[fabric]
        ) as client:
            numbers = iter(range(count))

            async def worker() -> None:
                nonlocal at_tenth
                for number in numbers:
                    try:
                        await one_request(client, f"r{number}", rng, bodies)
                    except DpurtError:
                        await client.cancel(f"r{number}", timeout_s=20.0)
                    if number == count // 5:
                        gc.collect()
                        at_tenth = rss_bytes()

            async with trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(worker)
            with trio.move_on_after(20):
                while any(leftovers(node).values()):  # noqa: ASYNC110 - many agents' states
                    await trio.sleep(0.05)
            assert {name: count for name, count in leftovers(node).items() if count} == {}
            node.staging.slabs[0].pool.check_integrity()
            node.index.spaces["s"].index.check_integrity()
            node.prefetch.core.ledger.check_integrity()
            gc.collect()
            assert rss_bytes() - at_tenth < 32 << 20, "memory grows with cancelled requests"
