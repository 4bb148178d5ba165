"""Two rails between two machines: both carry, a slow one carries less, and one that loses its cable costs no byte."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from dpurt.fabric.verbs import VerbsFabric
from dpurt.rdma.device import find
from dpurt.testing.fabric_contract import SHARED, SIZE, FabricTraits, Peers, Rig, piece, serving, soon
from dpurt.testing.far_endpoint import FarEndpoint, dial

pytestmark = pytest.mark.vm

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)
ENDPOINTS = ("10.9.9.2", 7702)
RAILS = ("10.9.0.1", "10.9.1.1")


@pytest.fixture(scope="module")
def endpoints(far) -> Iterator[Peers]:  # type: ignore[no-untyped-def]
    command = ("python3", "-m", "dpurt.testing.far_endpoint", ENDPOINTS[0], str(ENDPOINTS[1]))
    with far.running(*command, port=ENDPOINTS):
        yield Peers(dial(ENDPOINTS), far.launch)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@asynccontextmanager
async def rig_of(peers: Peers) -> AsyncIterator[tuple[Rig, FarEndpoint]]:
    with trio.fail_after(150):
        async with serving(
            lambda access: VerbsFabric(access, [find("rxe0"), find("rxe1")]), TRAITS, peers
        ) as rig:
            host = await rig.open()
            assert isinstance(host, FarEndpoint)
            await until_up(rig, 2)
            yield rig, host
            await host.aclose()


async def until_up(rig: Rig, count: int) -> None:
    while sum(rail.lanes for rail in rails(rig)) < count:  # noqa: ASYNC110  # a counter that nobody announces
        await trio.sleep(0.05)


def rails(rig: Rig):  # type: ignore[no-untyped-def]
    return [rig.fabric.rails[address].stats for address in RAILS]  # type: ignore[attr-defined]


async def pull(rig: Rig, host: FarEndpoint, times: int) -> list[int]:
    """Bytes that each rail carried of so many large pulls; every byte is right."""
    before = [rail.bytes_out for rail in rails(rig)]
    for _ in range(times):
        got = piece(SHARED, 0, SIZE)
        await host.pull([got], trio.current_time() + 60)
        assert got.local == rig.bytes(SHARED, 0, SIZE)
    return [rail.bytes_out - old for rail, old in zip(rails(rig), before, strict=True)]


async def test_both_rails_carry_and_a_slow_one_carries_less(endpoints: Peers) -> None:
    async with rig_of(endpoints) as (rig, host):
        even = await pull(rig, host, 4)
        assert min(even) > sum(even) / 5
        run("tc", "qdisc", "add", "dev", "eth3", "root", "netem", "rate", "6mbit")
        try:
            await pull(rig, host, 3)  # finds out
            uneven = await pull(rig, host, 4)
        finally:
            run("tc", "qdisc", "del", "dev", "eth3", "root")
        assert uneven[1] < even[1] / 2
        assert uneven[0] > uneven[1]


async def test_a_rail_whose_cable_is_pulled_in_the_middle_costs_no_byte(endpoints: Peers, far) -> None:  # type: ignore[no-untyped-def]
    async with rig_of(endpoints) as (rig, host):
        await pull(rig, host, 1)
        began = trio.current_time()

        async def pull_the_cable() -> None:
            await trio.sleep(0.3)
            run("ip", "link", "set", "eth3", "down")

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pull_the_cable)
                carried = await pull(rig, host, 8)
        finally:
            run("ip", "link", "set", "eth3", "up")
        assert sum(carried) >= 8 * SIZE
        assert trio.current_time() - began < 60
        lost = rails(rig)[1]
        assert (lost.lanes, lost.breaks >= 1, lost.last_failure != "") == (0, True, True)
        await until_up(rig, 2)
        again = await pull(rig, host, 3)
        assert again[1] > 0
        got = piece(SHARED, 5, 1000)
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 5, 1000)
