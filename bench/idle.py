"""What a node costs that nobody asks anything: its share of a core and its wake-ups, alone and with idle clients.

The kernel's own accounts are read (nanoseconds on a CPU and voluntary switches of every thread), not what the node says. A
client that is connected sends a ping every quarter of the session timeout; that is part of being idle.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from dpurt.bench.live_node import HOST, LiveNode, Shape, live_node
from dpurt.bench.result import BenchResult, Figure
from dpurt.client import connect

SUMMARY = "an idle node's share of a core and its wake-ups, alone and with 8 idle clients"
CLIENTS = 8
LIMIT_PERCENT = 1.0
SETTLE_S = 1.0


def _account(pid: int) -> tuple[float, int]:
    """(seconds on a CPU, voluntary switches) of all threads of a process."""
    busy_s, switches = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        busy_s += int((task / "schedstat").read_text().split()[0]) / 1e9
        status = (task / "status").read_text()
        switches += int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
    return busy_s, switches


async def _observe(pid: int, seconds: float) -> tuple[float, float]:
    """(percent of a core, wake-ups a second) over so many seconds from now."""
    await trio.sleep(SETTLE_S)
    began, (busy, switches) = time.monotonic(), _account(pid)
    await trio.sleep(seconds)
    elapsed, (busy_after, switches_after) = time.monotonic() - began, _account(pid)
    return (busy_after - busy) / elapsed * 100, (switches_after - switches) / elapsed


async def _observe_with_clients(node: LiveNode, seconds: float) -> tuple[float, float]:
    async with AsyncExitStack() as stack:
        for _ in range(CLIENTS):
            client = await stack.enter_async_context(
                connect(node.endpoint, host=HOST, spaces=node.spaces(), fabrics=["shm"])
            )
            await client.session(trio.current_time() + 10)
        return await _observe(node.process.pid, seconds)


def run(quick: bool) -> BenchResult:
    """20 seconds each (5 when quick)."""
    seconds = 5.0 if quick else 20.0
    figures: list[Figure] = []
    with live_node([Shape("s", 16, 1, 4096, 64)]) as node:
        watches: list[tuple[str, Callable[[], tuple[float, float]]]] = [
            ("no client", lambda: trio.run(_observe, node.process.pid, seconds)),
            (f"{CLIENTS} idle clients", lambda: trio.run(_observe_with_clients, node, seconds)),
        ]
        for name, watch in watches:
            percent, wakeups = watch()
            figures.append(
                Figure(
                    name=f"CPU, {name}", value=percent, unit="% of a core",
                    target=f"< {LIMIT_PERCENT:g} %", holds=percent < LIMIT_PERCENT,
                )
            )  # fmt: skip
            figures.append(Figure(name=f"wake-ups, {name}", value=wakeups, unit="1/s"))
    conditions: dict[str, object] = {
        "seconds_each": seconds, "bdev": "memory", "fabric": "shm", "clients": CLIENTS,
        "versions": {"python": platform.python_version(), "trio": trio.__version__},
    }  # fmt: skip
    return BenchResult(name="idle", conditions=conditions, figures=figures)
