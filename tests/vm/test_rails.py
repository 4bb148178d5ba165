"""Several rails and queue pairs: the contract again, striping, and what happens when a rail goes away in the middle."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from dpurt.errors import FabricError
from dpurt.fabric.verbs import VerbsFabric
from dpurt.fabric.verbs_host import VerbsEndpoint
from dpurt.rdma.device import find, is_up
from dpurt.testing.fabric_contract import (
    ALICE_INBOUND,
    CASES,
    SHARED,
    SIZE,
    FabricTraits,
    Rig,
    piece,
    run_case,
    serving,
    soon,
)

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("second_rail")]

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)
INTERFACE = "dummy1"
RXE1 = "10.9.1.1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture(scope="module", autouse=True)
def second_rail() -> Iterator[None]:
    """rxe1, on an interface of its own."""
    subprocess.run(["tests/vm/testbed/rxe-up", "rxe1", INTERFACE, f"{RXE1}/24"], check=True)
    yield
    subprocess.run(["rdma", "link", "delete", "rxe1"], check=True)
    ip("link", "delete", INTERFACE)


def make(queue_pairs: int = 1) -> Callable[..., VerbsFabric]:
    return lambda access: VerbsFabric(access, [find("rxe0"), find("rxe1")], queue_pairs=queue_pairs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract_on_two_rails(case):  # type: ignore[no-untyped-def]
    await run_case(case, make(), TRAITS)


FEW = [
    case
    for case in CASES
    if case.__name__.startswith(("pull_gives", "store_changes", "push_is", "pulls_and"))
]


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.__name__)
async def test_contract_on_two_queue_pairs_of_each_rail(case):  # type: ignore[no-untyped-def]
    await run_case(case, make(queue_pairs=2), TRAITS)


@asynccontextmanager
async def rig_of(queue_pairs: int = 1) -> AsyncIterator[tuple[Rig, VerbsEndpoint]]:
    with trio.fail_after(120):
        async with serving(make(queue_pairs), TRAITS) as rig:
            host = await rig.open()
            assert isinstance(host, VerbsEndpoint)
            await until_up(host, 2 * queue_pairs)
            yield rig, host
            await host.aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # states of the fabric and of the kernel that nobody announces
        await trio.sleep(0.02)


async def until_up(host: VerbsEndpoint, count: int) -> None:
    await until(lambda: sum(state.is_up for state in host.lanes.states) >= count)


def carried(host: VerbsEndpoint) -> dict[str, int]:
    return {state.name: state.carried for state in host.lanes.states}


async def test_a_large_transfer_takes_both_rails_and_a_small_one_takes_one():
    async with rig_of() as (rig, host):
        got = piece(SHARED, 0, 5000)
        await host.pull([got], soon())
        assert sorted(carried(host).values()) == [0, 5000]
        for _ in range(3):
            got = piece(SHARED, 0, SIZE)
            await host.pull([got], soon())
            assert got.local == rig.bytes(SHARED, 0, SIZE)
        stored = piece(ALICE_INBOUND, 0, SIZE, fill=7)
        await host.store([stored], soon())
        assert rig.bytes(ALICE_INBOUND, 0, SIZE) == b"\x07" * SIZE
        landing = host.landing(SIZE)
        await rig.link().push([(rig.regions[SHARED].view, landing.region_id, 0)], soon())
        assert landing.view == rig.regions[SHARED].view
        stats = rig.fabric.rail_stats()  # type: ignore[attr-defined]
        assert [rail.lanes for rail in stats.values()] == [1, 1]
        assert all(rail.bytes_out > SIZE // 2 and rail.bytes_in > 0 for rail in stats.values())
        assert sum(rail.bytes_out for rail in stats.values()) == 4 * SIZE + 5000
        assert sum(rail.bytes_in for rail in stats.values()) == SIZE


async def test_a_rail_taken_down_in_the_middle_costs_no_byte_and_its_return_is_used():
    async with rig_of() as (rig, host):
        landing = host.landing(SIZE)
        moved = 0

        async def pull_on() -> None:
            nonlocal moved
            for _ in range(12):
                got = piece(SHARED, 0, SIZE)
                await host.pull([got], trio.current_time() + 60)
                assert got.local == rig.bytes(SHARED, 0, SIZE)
                moved += 1

        async def push_on() -> None:
            for _ in range(6):
                landing.view[:] = bytes(SIZE)
                await rig.link().push(
                    [(rig.regions[SHARED].view, landing.region_id, 0)], trio.current_time() + 60
                )
                assert landing.view == rig.regions[SHARED].view

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pull_on)
                nursery.start_soon(push_on)
                await until(lambda: moved >= 2)
                ip("link", "set", INTERFACE, "down")
        finally:
            ip("link", "set", INTERFACE, "up")
        [lost] = [state for state in host.lanes.states if state.name.endswith("rxe1")]
        assert lost.breaks >= 1
        assert lost.last_failure
        [rail] = [rail for name, rail in rig.fabric.rail_stats().items() if name.startswith("rxe1")]  # type: ignore[attr-defined]
        assert rail.breaks >= 1
        await until_up(host, 2)
        before = carried(host)
        for _ in range(3):
            await host.pull([piece(SHARED, 0, SIZE)], soon())
        assert all(count > before[name] for name, count in carried(host).items())


async def test_with_every_rail_down_calls_end_with_an_error_in_their_time():
    async with rig_of() as (rig, host):
        try:
            for interface in ("eth0", INTERFACE):
                ip("link", "set", interface, "down")
            began = trio.current_time()
            with pytest.raises(FabricError):
                await host.pull([piece(SHARED, 0, SIZE)], trio.current_time() + 6)
            assert trio.current_time() - began < 15
            await rig.access.idle()
        finally:
            for interface in ("eth0", INTERFACE):
                ip("link", "set", interface, "up")
        await until(lambda: is_up(find("rxe0")) and is_up(find("rxe1")))
