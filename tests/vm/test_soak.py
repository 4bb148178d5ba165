"""Connections that come and go, and hosts that are killed: nothing is left of them, by the kernel's own count.

DPURT_VM_CYCLES says how many of each (100; set it to 1000 for the whole test: killing that many takes 11 minutes here).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio

from dpurt.fabric.verbs import VerbsFabric
from dpurt.rdma.device import find
from dpurt.testing.fabric_contract import ALICE, SHARED, FabricTraits, Rig, piece, serving, token_of

pytestmark = pytest.mark.vm

CYCLES = int(os.environ.get("DPURT_VM_CYCLES", "100"))
PATIENCE_S = 60 + 3 * CYCLES
TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)


@asynccontextmanager
async def rig_of() -> AsyncIterator[Rig]:
    with trio.fail_after(PATIENCE_S):
        async with serving(lambda access: VerbsFabric(access, [find("rxe0")]), TRAITS) as rig:
            yield rig


def left() -> Counter[str]:
    """What the kernel has of each kind of RDMA object (it does not count windows), and our open files."""
    shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
    found = Counter({kind: int(count) for kind, count in pairwise(shown.split()) if count.isdigit()})
    found["fd"] = len(os.listdir("/proc/self/fd"))
    return found


def own(rig: Rig) -> tuple[int, int, int]:
    """Queue pairs, regions and windows by the node's own count."""
    [rail] = rig.fabric.rails.values()  # type: ignore[attr-defined]
    stats = rail.adapter.stats
    return stats.queue_pairs, stats.regions, stats.windows


async def test_a_thousand_links_leave_nothing_behind() -> None:
    async with rig_of() as rig:
        await (await rig.open()).aclose()
        await rig.until_closed(ALICE)
        before, mine = left(), own(rig)
        for cycle in range(CYCLES):
            rig.closed.clear()
            host = await rig.open()
            host.landing(4096)
            if cycle % 10 == 0:
                await host.pull([piece(SHARED, cycle, 5000)], trio.current_time() + 30)
            await host.aclose()
            await rig.until_closed(ALICE)
        assert (left(), own(rig)) == (before, mine)
        assert rig.fabric.stats.errors == 0
        print(f"{CYCLES} links: {dict(before)}")


# A host as soon as it is forked: starting an interpreter for each would take longer than all the rest.
NURSERY = """
import os, signal, sys
import trio
from dpurt.fabric import Piece, connect
import dpurt.fabric.verbs_host, dpurt.rdma.binding
dpurt.rdma.binding.verbs()
port, session, token, region, lease = sys.argv[1:]

async def host(step):
    address = {"host": "10.9.0.1", "port": int(port)}
    endpoint = await connect("verbs", address, int(session), bytes.fromhex(token), trio.current_time() + 60)
    endpoint.landing(1 << 20)
    os.write(1, b"up\\n")
    buffer = memoryview(bytearray(4 << 20))
    while step:
        await endpoint.pull([Piece(int(region), 0, int(lease), buffer)], trio.current_time() + 60)
    await trio.sleep_forever()

for line in sys.stdin:
    child = os.fork()
    if not child:
        trio.run(host, int(line))
    os.write(1, b"%d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


async def test_a_thousand_killed_hosts_leave_nothing_behind() -> None:
    async with rig_of() as rig:
        await (await rig.open()).aclose()
        await rig.until_closed(ALICE)
        before, mine = left(), own(rig)
        await kill_hosts(rig)
        assert (left(), own(rig)) == (before, mine)
        assert not +rig.access.active
        print(f"{CYCLES} killed: {dict(before)}")


async def kill_hosts(rig: Rig) -> None:
    words = (rig.address["port"], ALICE, token_of(ALICE).hex(), SHARED, 11)
    command = [sys.executable, "-c", NURSERY, *map(str, words)]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    lines = Lines(process.stdout)
    for cycle in range(CYCLES):
        rig.closed.clear()
        await process.stdin.send_all(
            b"%d\n" % (cycle % 2)
        )  # every other one is killed in the middle of pulls
        child = int(await lines.next())
        assert await lines.next() == b"up"
        await trio.sleep(0.01 * (cycle % 5))
        os.kill(child, signal.SIGKILL)
        assert await lines.next() == b"gone"
        await rig.until_closed(ALICE)
        await rig.access.idle()
    await process.stdin.aclose()
    await process.wait()
    await process.stdout.aclose()


class Lines:
    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def next(self) -> bytes:
        while b"\n" not in self._buffer:
            data = await self._stream.receive_some()
            assert data, "the hosts' process ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
