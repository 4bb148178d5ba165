"""The verbs fabric on Soft-RoCE: the contract every fabric keeps, and what only this one can get wrong."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from dpurt.errors import FabricError, RdmaLimit
from dpurt.fabric.device_region import DeviceRegion
from dpurt.fabric.exchange import Pace
from dpurt.fabric.region import MemfdRegion, next_landing_id
from dpurt.fabric.verbs import VerbsFabric, VerbsLimits
from dpurt.fabric.verbs_control import Run
from dpurt.fabric.verbs_host import VerbsEndpoint
from dpurt.fabric.verbs_moves import aligned, runs_of
from dpurt.rdma.device import find
from dpurt.rdma.queue_pair import Opcode
from dpurt.testing.fabric_contract import (
    ALICE,
    ALICE_INBOUND,
    BOB,
    CASES,
    LEASE,
    SHARED,
    SIZE,
    FabricTraits,
    Rig,
    host_process,
    piece,
    run_case,
    serving,
    soon,
    token_of,
)

pytestmark = pytest.mark.vm

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)
Tamper = Callable[[list[Run]], Awaitable[list[Run]]]


def make(limits: VerbsLimits | None = None, *, has_windows: bool = True) -> Callable[..., VerbsFabric]:
    device = find("rxe0")
    device = replace(device, limits=replace(device.limits, has_windows=has_windows))
    return lambda access: VerbsFabric(access, [device], limits=limits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case):
    await run_case(case, make(), TRAITS)


CHUNKED = [
    case
    for case in CASES
    if case.__name__.startswith(
        ("pull_gives", "store_changes", "push_is", "one_bad", "the_counters", "out_of_bounds")
    )
]


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: case.__name__)
async def test_contract_with_regions_of_many_registrations(case):
    await run_case(case, make(VerbsLimits(max_chunk_bytes=1 << 20)), TRAITS)


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: case.__name__)
async def test_contract_on_a_device_without_windows(case):
    await run_case(case, make(has_windows=False), TRAITS)


@asynccontextmanager
async def rig_of(limits: VerbsLimits | None = None, *, has_windows: bool = True) -> AsyncIterator[Rig]:
    with trio.fail_after(60):
        async with serving(make(limits, has_windows=has_windows), TRAITS) as rig:
            yield rig


async def opened(rig: Rig, tamper: Tamper | None = None, *, times: int = 1) -> VerbsEndpoint:
    """A host that does something to the next grants before it uses them."""
    host = await rig.open()
    assert isinstance(host, VerbsEndpoint)
    original = host._granted
    left = times

    async def granted(*arguments):  # type: ignore[no-untyped-def]
        nonlocal left
        granted = await original(*arguments)
        left -= 1
        if tamper is None or left < 0:
            return granted
        return {lane: await tamper(runs) for lane, runs in granted.items()}

    host._granted = granted
    return host


async def wrong_key(runs: list[Run]) -> list[Run]:
    return wrong_keys(runs)


def wrong_keys(runs: list[Run]) -> list[Run]:
    return [Run(run.address, run.length, run.key ^ 0x55) for run in runs]


async def beyond_the_region(runs: list[Run]) -> list[Run]:
    return [Run(run.address + SIZE, run.length, run.key) for run in runs]


async def too_late(runs: list[Run]) -> list[Run]:
    await trio.sleep(1)
    return runs


@pytest.mark.parametrize("op", ["pull", "store"])
async def test_a_wrong_key_is_refused_and_named(op: str, monkeypatch: pytest.MonkeyPatch):
    async with rig_of() as rig:
        host = await opened(rig, wrong_key, times=2)
        monkeypatch.setattr("dpurt.fabric.verbs_host.runs_of", lambda *where: wrong_keys(runs_of(*where)))
        before = {number: bytes(region.view) for number, region in rig.regions.items()}
        got = piece(SHARED if op == "pull" else ALICE_INBOUND, 0, 4096, fill=1)
        with pytest.raises(FabricError, match="remote_access") as caught:
            await getattr(host, op)([got], soon())
        assert (caught.value.stage, caught.value.status) == (op, "closed")
        assert bytes(got.local) == b"\x01" * 4096
        assert before == {number: bytes(region.view) for number, region in rig.regions.items()}
        await rig.access.idle()
        await host.aclose()


async def test_after_one_refusal_the_queue_pair_is_replaced_and_the_call_succeeds():
    async with rig_of() as rig:
        host = await opened(rig, wrong_key)
        got = piece(SHARED, 5, 100_000)
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 5, 100_000)
        landing = host.landing(4096)
        await rig.link().push([(rig.regions[SHARED].view[:50], landing.region_id, 7)], soon())
        assert landing.view[7:57] == rig.regions[SHARED].view[:50]
        assert host.stats.errors == rig.fabric.stats.errors == 1
        await host.aclose()


async def test_what_a_push_leaves_in_a_work_request_does_not_spoil_the_window_of_the_next_pull():
    async with rig_of() as rig:
        host = await opened(rig)
        landing = host.landing(4096)
        await rig.link().push([(rig.regions[SHARED].view[:50], landing.region_id, 0)], soon())
        got = piece(SHARED, 5, 5000)
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 5, 5000)
        assert host.stats.errors == rig.fabric.stats.errors == 0
        await host.aclose()


async def test_nothing_outside_the_region_can_be_read():
    async with rig_of() as rig:
        host = await opened(rig, beyond_the_region, times=2)
        before = {number: bytes(region.view) for number, region in rig.regions.items()}
        with pytest.raises(FabricError, match="remote_access"):
            await host.pull([piece(SHARED, 0, 100, fill=9)], soon())
        assert before == {number: bytes(region.view) for number, region in rig.regions.items()}
        await host.aclose()


@pytest.mark.parametrize("has_windows", [True, False])
async def test_no_host_can_write_the_nodes_memory(monkeypatch: pytest.MonkeyPatch, has_windows: bool):
    async with rig_of(has_windows=has_windows) as rig:
        host = await opened(rig)
        before = rig.bytes(SHARED, 0, SIZE)
        monkeypatch.setattr(
            "dpurt.fabric.verbs_host.aligned", lambda _, *sides: aligned(Opcode.WRITE, *sides)
        )
        with pytest.raises(FabricError, match="remote_access"):
            await host.pull([piece(SHARED, 0, 100, fill=9)], soon())
        assert rig.bytes(SHARED, 0, SIZE) == before
        await host.aclose()


@pytest.mark.parametrize("has_windows", [True, False])
async def test_a_host_that_overstays_finds_its_keys_dead(has_windows: bool):
    limits = VerbsLimits(pace=Pace(grace_s=0.2))
    async with rig_of(limits, has_windows=has_windows) as rig:
        host = await opened(rig, too_late, times=2)
        got = piece(SHARED, 0, 4096)
        with pytest.raises(FabricError, match=r"remote_access|retries|flushed|remote_invalid|node's end"):
            await host.pull([got], soon())
        assert bytes(got.local) == bytes(4096)
        assert not +rig.access.active
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 0, 4096)
        await host.aclose()


async def test_one_hosts_key_is_no_use_to_another():
    async with rig_of() as rig:
        stolen: list[Run] = []
        pulled, robbed = piece(SHARED, 0, 100), piece(SHARED, 0, 100, fill=2)
        lent, release = trio.Event(), trio.Event()

        async def lend(runs: list[Run]) -> list[Run]:
            stolen.extend(runs)
            lent.set()
            await release.wait()
            return runs

        async def lend_to_bob() -> dict[int, list[Run]]:
            return {0: list(stolen)}

        alice = await opened(rig, lend)
        bob = await rig.open(BOB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.pull, [pulled], soon())
            await lent.wait()
            original = bob._granted
            bob._granted = lambda *a: lend_to_bob()  # type: ignore[attr-defined]
            with pytest.raises(FabricError, match="remote_"):
                await bob.pull([robbed], soon())
            bob._granted = original  # type: ignore[attr-defined]
            release.set()
        assert pulled.local == rig.bytes(SHARED, 0, 100)
        assert bytes(robbed.local) == b"\x02" * 100
        await alice.aclose()
        await bob.aclose()


async def test_transfers_under_way_survive_a_broken_queue_pair():
    async with rig_of() as rig:
        host = await opened(rig)
        pieces = [piece(SHARED, i << 19, 1 << 19) for i in range(8)]
        stores = [piece(ALICE_INBOUND, i << 19, 1 << 19, fill=i + 1) for i in range(4)]
        async with trio.open_nursery() as nursery:
            for got in pieces:
                nursery.start_soon(host.pull, [got], soon())
            for stored in stores:
                nursery.start_soon(host.store, [stored], soon())
            await trio.sleep(0.05)
            host.lanes.lanes[0].queue_pair.fail("by this test")
        assert b"".join(got.local for got in pieces) == rig.bytes(SHARED, 0, 4 << 20)
        assert rig.bytes(ALICE_INBOUND, 0, 2 << 20) == b"".join(bytes(stored.local) for stored in stores)
        await host.aclose()


@pytest.mark.parametrize("after", [0, 0.02, 0.2])
@pytest.mark.parametrize("op", ["pull", "store", "landing"])
async def test_a_host_killed_at_any_step_leaves_nothing_begun(op: str, after: float):
    async with rig_of() as rig, host_process(rig, ALICE) as host:
        where = {
            "region": SHARED if op == "pull" else ALICE_INBOUND,
            "offset": 0,
            "length": SIZE,
            "lease": LEASE,
        }
        await host.ask(do="view", **where)  # it is connected
        async with trio.open_nursery() as nursery:
            if op == "landing":
                number = (await host.ask(do="landing", size=SIZE))["landing"]
                nursery.start_soon(push_somehow, rig, number)
            else:
                await host.tell(do=op, fill=1, **where)
            await trio.sleep(after)
            host.process.kill()
            await rig.until_closed(ALICE)
            await rig.access.idle()
        [rail] = rig.fabric.rails.values()
        assert rail.adapter.stats.queue_pairs == 0
        assert rail.adapter.stats.windows == 0
        assert rail.stats.lanes == 0


async def push_somehow(rig: Rig, number: int) -> None:
    try:
        await rig.link().push([(rig.regions[SHARED].view[:], number, 0)], soon())
    except FabricError as error:
        if error.status != "closed":
            raise


async def test_sixty_four_idle_hosts_cost_no_cpu_time():
    async with rig_of() as rig:
        hosts = [await rig.open()]
        for session in range(100, 163):
            rig.fabric.admit(session, token_of(session), (SHARED,), ())
            hosts.append(await rig.open(session))
        await trio.sleep(1)
        before = time.process_time()
        await trio.sleep(5)
        assert time.process_time() - before < 0.05, "of node and hosts together, one percent of a core"
        got = piece(SHARED, 0, 5000)
        await hosts[-1].pull([got], soon())
        assert got.local == rig.bytes(SHARED, 0, 5000)
        for host in hosts:
            await host.aclose()


async def test_device_memory_is_refused_by_a_device_that_cannot_with_a_remedy_and_the_link_lives():
    async with rig_of() as rig:
        host = await opened(rig)
        memory = MemfdRegion(0, "stands for a GPU", 1 << 20, huge_pages=False)
        device = DeviceRegion(next_landing_id(), "gpu0", 1 << 20, memory.fd)
        with pytest.raises(RdmaLimit, match=r"dma-buf.*ENOTSUP.*take a NIC"):
            host.land_on(device)
        with pytest.raises(FabricError, match="cannot be read by the CPU"):
            _ = device.view
        got = piece(SHARED, 0, 5000)
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 0, 5000)
        await host.aclose()
        memory.close()
