"""The Fabric contract as a test suite: what every kind must do, whatever moves the bytes.

`check_fabric(make_fabric, traits)` runs all of `CASES`, each on a fabric of its own; a test file may
parametrize over `CASES` and call `run_case` to have them reported one by one. A case gets a `Rig`: a serving
fabric with two admitted sessions, and an AccessCheck that knows lease `LEASE` only and records that begin and
end balance. That is checked after every case."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import crc32c
import trio

from dpurt.core.landing_zone import ZoneLayout, ZoneReader
from dpurt.errors import FabricError, NodeUnavailable, RemoteAccessError, RemoteProtocolError
from dpurt.fabric import AccessCheck, Address, Endpoint, Fabric, Link, Piece, connect
from dpurt.fabric.region import MemfdRegion
from dpurt.fabric.zone_writer import ZoneWriter
from dpurt.testing.fabric_host import digest

__all__ = [
    "CASES",
    "FabricTraits",
    "HostProcess",
    "Peers",
    "RecordingAccess",
    "Rig",
    "check_fabric",
    "host_process",
    "run_case",
    "serving",
]

LEASE, UNKNOWN_LEASE = 11, 12
ALICE, BOB = 7, 8
SHARED, BOBS, ALICE_INBOUND, BOB_INBOUND = 1, 2, 3, 4
SIZE = 6 << 20
_MAX_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricTraits:
    """In what kinds may differ."""

    checks_leases: bool  # the node is asked for every access (not where the host maps the memory)
    has_views: bool
    crosses_processes: bool


MakeFabric = Callable[[AccessCheck], Fabric]


class Running(Protocol):
    """A host program with its ends of two pipes, as `trio.Process` is one."""

    @property
    def stdin(self) -> trio.abc.SendStream | None: ...

    @property
    def stdout(self) -> trio.abc.ReceiveStream | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


async def _launch_here(command: Sequence[str]) -> Running:
    return await trio.lowlevel.open_process(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@dataclass(frozen=True, slots=True)
class Peers:
    """Where hosts are: how an endpoint is opened, and how a host program is started. Here, unless said otherwise."""

    dial: Callable[[str, Address, int, bytes, float], Awaitable[Endpoint]] = connect
    launch: Callable[[Sequence[str]], Awaitable[Running]] = _launch_here


class RecordingAccess:
    """Allows `LEASE`; insists that every end matches one begin."""

    def __init__(self) -> None:
        self.active: Counter[tuple[object, ...]] = Counter()
        self.begun = 0
        self._idle = trio.Event()

    def begin(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> bool:
        if lease != LEASE:
            return False
        self.active[session, op, region_id, offset, length, lease] += 1
        self.begun += 1
        return True

    def end(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> None:
        key = (session, op, region_id, offset, length, lease)
        assert self.active[key] > 0, f"end without begin: {key}"
        self.active[key] -= 1
        if not +self.active:
            self._idle.set()
            self._idle = trio.Event()

    async def idle(self) -> None:
        """Return when every begin has had its end."""
        while +self.active:
            await self._idle.wait()


@dataclass(slots=True)
class Rig:
    """A serving fabric and what a case needs around it."""

    fabric: Fabric
    traits: FabricTraits
    access: RecordingAccess
    peers: Peers = field(default_factory=Peers)
    address: Address = field(default_factory=dict)
    regions: dict[int, MemfdRegion] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    _changed: trio.Event = field(default_factory=trio.Event)

    def on_link_closed(self, session: int) -> None:
        assert not any(key[0] == session for key in +self.access.active), "closed with a transfer in flight"
        self.closed.append(session)
        self._changed.set()
        self._changed = trio.Event()

    async def until_closed(self, session: int) -> None:
        while session not in self.closed:
            await self._changed.wait()

    async def open(self, session: int = ALICE, token: bytes | None = None) -> Endpoint:
        return await self.peers.dial(
            self.fabric.kind, self.address, session, token or token_of(session), soon()
        )

    def link(self, session: int = ALICE) -> Link:
        link = self.fabric.link(session)
        assert link is not None
        return link

    def bytes(self, region_id: int, offset: int, length: int) -> bytes:
        return bytes(self.regions[region_id].view[offset : offset + length])


Case = Callable[[Rig], Awaitable[None]]


def token_of(session: int) -> bytes:
    return bytes([session]) * 32


def soon() -> float:
    """A deadline no healthy transfer misses."""
    return trio.current_time() + 60


def piece(region_id: int, offset: int, length: int, lease: int = LEASE, fill: int = 0) -> Piece:
    """A piece with local memory of its own."""
    return Piece(region_id, offset, lease, memoryview(bytearray([fill]) * length))


@asynccontextmanager
async def serving(
    make_fabric: MakeFabric, traits: FabricTraits, peers: Peers | None = None
) -> AsyncIterator[Rig]:
    access = RecordingAccess()
    rig = Rig(make_fabric(access), traits, access, peers or Peers())
    _offer_regions(rig)
    try:
        async with trio.open_nursery() as nursery:
            rig.address = await nursery.start(rig.fabric.serve, rig.on_link_closed)
            yield rig
            nursery.cancel_scope.cancel()
    finally:
        for region in rig.regions.values():
            region.close()
    assert not +access.active, "an access was begun and never ended"


def _offer_regions(rig: Rig) -> None:
    pattern = os.urandom(65521)  # a prime, so that shifted copies differ
    for region_id, readers, writer in (
        (SHARED, None, None),
        (BOBS, frozenset({BOB}), None),
        (ALICE_INBOUND, frozenset[int](), ALICE),
        (BOB_INBOUND, frozenset[int](), BOB),
    ):
        region = MemfdRegion(region_id, f"region {region_id}", SIZE, huge_pages=False)
        region.view[:] = (pattern * (SIZE // len(pattern) + 1))[:SIZE]
        rig.regions[region_id] = region
        rig.fabric.add_region(region, readers, writer)
    everything = (SHARED, BOBS)
    rig.fabric.admit(ALICE, token_of(ALICE), everything, (ALICE_INBOUND,))
    rig.fabric.admit(BOB, token_of(BOB), everything, (BOB_INBOUND,))


# --- moving bytes ----------------------------------------------------------------------------------------------------

RANGES = (
    (0, 4096),
    (1, 1),
    (4095, 4098),
    (12345, 0),
    (SIZE, 0),
    (65536, 1 << 20),
    (SIZE - 7, 7),
    (3, SIZE - 3),
)


async def pull_gives_the_bytes_of_every_range_in_one_batch(rig: Rig) -> None:
    host = await rig.open()
    pieces = [piece(SHARED, offset, length) for offset, length in RANGES]
    await host.pull(pieces, soon())
    for (offset, length), got in zip(RANGES, pieces, strict=True):
        assert got.local == rig.bytes(SHARED, offset, length)
    assert host.stats.bytes_pulled == sum(length for _, length in RANGES)
    await host.aclose()


async def a_batch_of_many_small_pieces_arrives_in_order(rig: Rig) -> None:
    host = await rig.open()
    local = memoryview(bytearray(1000 * 17))
    pieces = [Piece(SHARED, i * 4096, LEASE, local[i * 17 : i * 17 + 17]) for i in range(1000)]
    await host.pull(pieces, soon())
    assert local == b"".join(rig.bytes(SHARED, i * 4096, 17) for i in range(1000))
    await host.aclose()


async def an_empty_batch_is_no_work(rig: Rig) -> None:
    host = await rig.open()
    await host.pull([], soon())
    await host.store([], soon())
    await rig.link().push([], soon())
    await host.aclose()


async def store_changes_the_named_ranges_and_nothing_else(rig: Rig) -> None:
    host = await rig.open()
    expected = bytearray(rig.bytes(ALICE_INBOUND, 0, SIZE))
    ranges = ((1, 1), (4095, 4098), (100, 0), (65536, 3 << 20), (SIZE - 3, 3))
    pieces = [piece(ALICE_INBOUND, *where, fill=number) for number, where in enumerate(ranges)]
    await host.store(pieces, soon())
    for stored in pieces:
        expected[stored.offset : stored.offset + len(stored.local)] = stored.local
    assert rig.bytes(ALICE_INBOUND, 0, SIZE) == expected
    assert host.stats.bytes_stored == sum(length for _, length in ranges)
    await host.aclose()


async def stores_land_in_memory_that_others_read_where_the_node_puts_them_there(rig: Rig) -> None:
    if not rig.fabric.lands_stores:
        return
    session = 9
    rig.fabric.admit(session, token_of(session), (SHARED,), (SHARED,))
    host, reader = await rig.open(session), await rig.open()
    expected = bytearray(rig.bytes(SHARED, 0, SIZE))
    stored = [piece(SHARED, 777, 300_000, fill=5), piece(SHARED, 500_000, 1, fill=6)]
    await host.store(stored, soon())
    for one in stored:
        expected[one.offset : one.offset + len(one.local)] = one.local
    assert rig.bytes(SHARED, 0, SIZE) == expected
    got = piece(SHARED, 0, SIZE)
    await reader.pull([got], soon())
    assert got.local == expected
    await _refused(host, "store", piece(SHARED, 0, 10, UNKNOWN_LEASE, fill=7))
    await _refused(reader, "store", piece(SHARED, 0, 10, fill=7))
    assert rig.bytes(SHARED, 0, SIZE) == expected
    await host.aclose()
    await reader.aclose()


async def memory_that_is_kept_is_pulled_into_and_stored_from_again_and_again(rig: Rig) -> None:
    host = await rig.open()
    memory = memoryview(mmap.mmap(-1, 2 << 20))
    host.keep(memory)
    for turn in range(3):
        at = 4096 * turn + 1
        await host.pull([Piece(SHARED, at, LEASE, memory[at : at + 70_000])], soon())
        assert memory[at : at + 70_000] == rig.bytes(SHARED, at, 70_000)
        elsewhere = piece(SHARED, 5, 1000)  # kept and other memory in one batch
        stored = Piece(ALICE_INBOUND, turn, LEASE, memory[at : at + 70_000])
        await host.pull([elsewhere, Piece(SHARED, 5, LEASE, memory[-1000:])], soon())
        assert elsewhere.local == memory[-1000:]
        await host.store([stored], soon())
        assert rig.bytes(ALICE_INBOUND, turn, 70_000) == memory[at : at + 70_000]
    await host.aclose()


async def push_is_in_the_landing_when_it_returns(rig: Rig) -> None:
    host = await rig.open()
    first, second = host.landing(3 << 20), host.landing(4096)
    source = rig.regions[SHARED].view
    await rig.link().push(
        [
            (source[5 : (2 << 20) + 5], first.region_id, 11),
            (source[:0], second.region_id, 4096),
            (source[99:100], second.region_id, 4095),
        ],
        soon(),
    )
    assert first.view[11 : (2 << 20) + 11] == source[5 : (2 << 20) + 5]
    assert second.view[4095:4096] == source[99:100]
    assert bytes(first.view[:11]) == bytes(11)
    assert rig.fabric.stats.bytes_pushed == (2 << 20) + 1
    source.release()
    await host.aclose()


async def pulls_and_pushes_run_at_the_same_time_on_one_link(rig: Rig) -> None:
    host = await rig.open()
    landing = host.landing(SIZE)
    source = rig.regions[SHARED].view
    pieces = [piece(SHARED, i << 18, 1 << 18) for i in range(16)]
    stores = [piece(ALICE_INBOUND, i << 18, 1 << 18, fill=i) for i in range(16)]
    async with trio.open_nursery() as nursery:
        for got, stored in zip(pieces, stores, strict=True):
            nursery.start_soon(host.pull, [got], soon())
            nursery.start_soon(host.store, [stored], soon())
            where = got.offset
            part = source[where : where + (1 << 18)]
            nursery.start_soon(rig.link().push, [(part, landing.region_id, where)], soon())
    assert b"".join(got.local for got in pieces) == rig.bytes(SHARED, 0, 4 << 20)
    assert landing.view[: 4 << 20] == source[: 4 << 20]
    assert b"".join(stored.local for stored in stores) == rig.bytes(ALICE_INBOUND, 0, 4 << 20)
    await host.aclose()


async def links_of_two_sessions_run_side_by_side(rig: Rig) -> None:
    hosts = {session: await rig.open(session) for session in (ALICE, BOB)}
    assert rig.fabric.stats.links == 2
    pieces = {session: [piece(SHARED, session << 10, 1 << 20) for _ in range(4)] for session in hosts}
    async with trio.open_nursery() as nursery:
        for session, host in hosts.items():
            for got in pieces[session]:
                nursery.start_soon(host.pull, [got], soon())
    for session in hosts:
        assert all(got.local == rig.bytes(SHARED, session << 10, 1 << 20) for got in pieces[session])
    await hosts[ALICE].aclose()
    await rig.until_closed(ALICE)
    await hosts[BOB].pull([piece(BOBS, 0, 10)], soon())
    await hosts[BOB].aclose()


async def a_view_is_the_nodes_memory_or_there_is_none(rig: Rig) -> None:
    host = await rig.open()
    view = host.view(SHARED, 100, 1000)
    assert (view is not None) == rig.traits.has_views
    if view is not None:
        assert view.readonly
        assert view == rig.bytes(SHARED, 100, 1000)
        rig.regions[SHARED].view[100:104] = b"live"
        assert bytes(view[:4]) == b"live"
        for beyond in ((SHARED, SIZE - 1, 2), (BOBS, 0, 1)):
            await _raises(RemoteAccessError, _view, host, *beyond)
        view.release()
    await host.aclose()


async def _view(host: Endpoint, region_id: int, offset: int, length: int) -> None:
    host.view(region_id, offset, length)


# --- who may -----------------------------------------------------------------------------------------------------------


async def a_wrong_token_opens_no_link(rig: Rig) -> None:
    for session, token in (
        (ALICE, token_of(BOB)),
        (ALICE, token_of(ALICE)[:-1]),
        (99, token_of(99)),
        (ALICE, b"x"),
    ):
        denial = await _raises(RemoteProtocolError, rig.open, session, token)
        assert denial.code == "denied"
    assert rig.fabric.stats.refused == 4
    assert rig.fabric.stats.links == 0
    await (await rig.open()).aclose()


async def a_session_has_one_link_at_a_time(rig: Rig) -> None:
    host = await rig.open()
    await _raises(NodeUnavailable, rig.open)
    await host.pull([piece(SHARED, 0, 10)], soon())
    await host.aclose()
    await rig.until_closed(ALICE)
    again = await rig.open()
    await again.pull([piece(SHARED, 0, 10)], soon())
    await again.aclose()


async def out_of_bounds_and_unknown_regions_are_refused_and_the_link_lives(rig: Rig) -> None:
    host = await rig.open()
    for region_id, offset, length in (
        (SHARED, SIZE, 1),
        (SHARED, SIZE - 5, 6),
        (SHARED, 2**63, 1),
        (99, 0, 1),
    ):
        await _refused(host, "pull", piece(region_id, offset, length))
    for offset, length in ((SIZE, 1), (SIZE - 5, 6), (2**63, 1)):
        await _refused(host, "store", piece(ALICE_INBOUND, offset, length))
    await _still_works(rig, host)
    await host.aclose()


async def one_bad_piece_refuses_the_whole_batch(rig: Rig) -> None:
    host = await rig.open()
    before = rig.bytes(ALICE_INBOUND, 0, 100)
    await _refused(host, "store", piece(ALICE_INBOUND, 0, 100, fill=1), piece(SHARED, 0, 1))
    await _refused(host, "pull", piece(SHARED, 0, 100), piece(SHARED, SIZE, 1))
    assert rig.bytes(ALICE_INBOUND, 0, 100) == before
    await _still_works(rig, host)
    await host.aclose()


async def each_region_is_open_in_its_own_direction_and_to_its_own_session(rig: Rig) -> None:
    host = await rig.open()
    contents = {region_id: digest(region.view) for region_id, region in rig.regions.items()}
    for region_id in (SHARED, BOBS, BOB_INBOUND):
        await _refused(host, "store", piece(region_id, 0, 100, fill=1))
    for region_id in (BOBS, ALICE_INBOUND, BOB_INBOUND):
        await _refused(host, "pull", piece(region_id, 0, 100))
    assert contents == {region_id: digest(region.view) for region_id, region in rig.regions.items()}
    await _still_works(rig, host)
    await host.aclose()


async def without_a_lease_nothing_moves_where_the_node_is_asked(rig: Rig) -> None:
    if not rig.traits.checks_leases:
        return
    host = await rig.open()
    await _refused(host, "pull", piece(SHARED, 0, 10), piece(SHARED, 0, 10, UNKNOWN_LEASE))
    await _refused(host, "store", piece(ALICE_INBOUND, 0, 10, UNKNOWN_LEASE))
    assert rig.fabric.stats.refused == 2
    await _still_works(rig, host)
    rig.fabric.remove_region(SHARED)
    await _refused(host, "pull", piece(SHARED, 0, 10))
    await host.aclose()


async def a_push_outside_any_landing_fails_and_the_link_lives(rig: Rig) -> None:
    host = await rig.open()
    landing = host.landing(4096)
    source = rig.regions[SHARED].view[:100]
    deadline = trio.current_time() + 0.2
    for region_id, offset in ((landing.region_id, 3997), (landing.region_id, 2**63), (99, 0)):
        await _raises(FabricError, rig.link().push, [(source, region_id, offset)], deadline)
    await rig.link().push([(source, landing.region_id, 3996)], soon())
    assert landing.view[3996:4096] == source
    await host.aclose()


async def _refused(host: Endpoint, op: str, *pieces: Piece) -> None:
    before = [bytes(p.local) for p in pieces]
    error = await _raises(RemoteAccessError, getattr(host, op), pieces, soon())
    assert error.stage == op
    assert before == [bytes(p.local) for p in pieces]


E = TypeVar("E", bound=Exception)


async def _raises(expected: type[E], work: Callable[..., Awaitable[object]], *arguments: object) -> E:
    """`pytest.raises` for a suite that needs no pytest."""
    try:
        await work(*arguments)
    except expected as error:
        return error
    raise AssertionError(f"{work} did not raise {expected.__name__}")


async def _still_works(rig: Rig, host: Endpoint) -> None:
    got = piece(SHARED, 77, 777)
    await host.pull([got], soon())
    assert got.local == rig.bytes(SHARED, 77, 777)


# --- landing zones ----------------------------------------------------------------------------------------------------

ZONE = ZoneLayout(2, (4096, 100_000))
_KEYS = (b"k" * 16, b"l" * 16, b"m" * 16)


class _ZoneOf:
    """A zone of a host, and a node that places ranges of the shared region in it."""

    def __init__(self, rig: Rig, host: Endpoint) -> None:
        self._rig = rig
        self.region = host.landing(ZONE.size)
        self._writer = ZoneWriter(ZONE, self.region.region_id, self._push)

    async def _push(self, pieces: Sequence[tuple[memoryview, int, int]]) -> str:
        await self._rig.link().push(pieces, soon())
        return ""

    def block(self, number: int) -> bytes:
        return self._rig.bytes(SHARED, 5 + number * 300_000, ZONE.block_bytes)

    async def place(self, slot: int, number: int, *, replaces: bool = False) -> None:
        at = 5 + number * 300_000
        payload = self._rig.regions[SHARED].view[at : at + ZONE.block_bytes]
        crcs = [crc32c.crc32c(payload[:4096]), crc32c.crc32c(payload[4096:])]
        assert await self._writer.place(slot, payload, _KEYS[number], 0, crcs, replaces=replaces) == ""

    async def empty(self, slot: int) -> None:
        assert await self._writer.empty(slot) == ""

    def found(self, number: int) -> bytes | None:
        """What the host finds of the block; it asks nobody."""
        reader, into = ZoneReader(self.region.view, ZONE), memoryview(bytearray(ZONE.block_bytes))
        slot = reader.find(_KEYS[number], 0)
        is_good = slot is not None and reader.copy(slot, _KEYS[number], 0, (0, 2), into)
        return bytes(into) if is_good else None


async def a_placed_block_is_found_in_the_landing_zone_without_asking(rig: Rig) -> None:
    host = await rig.open()
    zone = _ZoneOf(rig, host)
    assert zone.found(0) is None
    await zone.place(0, 0)
    await zone.place(1, 1)
    assert [zone.found(0), zone.found(1), zone.found(2)] == [zone.block(0), zone.block(1), None]
    await zone.place(0, 2, replaces=True)
    assert [zone.found(0), zone.found(1), zone.found(2)] == [None, zone.block(1), zone.block(2)]
    await zone.empty(1)
    assert [zone.found(1), zone.found(2)] == [None, zone.block(2)]
    assert rig.access.begun == 0
    await host.aclose()


async def a_placement_cancelled_anywhere_leaves_no_wrong_block(rig: Rig) -> None:
    host = await rig.open()
    zone = _ZoneOf(rig, host)
    await zone.place(0, 0)
    await _cancel_at_every_step(rig, host, lambda: zone.place(0, 1, replaces=True))
    for number in range(3):
        assert zone.found(number) in (None, zone.block(number))
    await zone.place(0, 2, replaces=True)
    assert zone.found(2) == zone.block(2)
    await host.aclose()


# --- how it ends -------------------------------------------------------------------------------------------------------


async def a_late_deadline_is_an_error_and_the_link_lives(rig: Rig) -> None:
    host = await rig.open()
    for op, region_id in (("pull", SHARED), ("store", ALICE_INBOUND)):
        too_late = [piece(region_id, 0, 2 << 20)], trio.current_time() - 1
        error = await _raises(FabricError, getattr(host, op), *too_late)
        assert (error.status, error.stage) == ("timed_out", op)
    await _still_works(rig, host)
    await host.aclose()


async def a_cancelled_transfer_ends_its_access_and_the_link_lives(rig: Rig) -> None:
    host = await rig.open()
    landing = host.landing(SIZE)
    push = [(rig.regions[SHARED].view[: 2 << 20], landing.region_id, 0)]
    await _cancel_at_every_step(rig, host, lambda: host.pull([piece(SHARED, 0, 4 << 20)], soon()))
    await _cancel_at_every_step(rig, host, lambda: host.store([piece(ALICE_INBOUND, 0, 2 << 20)], soon()))
    await _cancel_at_every_step(rig, host, lambda: rig.link().push(push, soon()))
    await host.aclose()


async def _cancel_at_every_step(rig: Rig, host: Endpoint, work: Callable[[], Awaitable[None]]) -> None:
    """Cancel at the first step, then at the second ..., until the work is done before its turn comes."""
    for step in range(1, _MAX_STEPS):
        with trio.CancelScope() as scope:
            canceller = _CancelAtStep(trio.lowlevel.current_task(), step, scope)
            trio.lowlevel.add_instrument(canceller)
            try:
                await work()
            finally:
                trio.lowlevel.remove_instrument(canceller)
        await _still_works(rig, host)
        await rig.access.idle()
        if not scope.cancel_called:
            return


class _CancelAtStep(trio.abc.Instrument):
    def __init__(self, task: trio.lowlevel.Task, step: int, scope: trio.CancelScope) -> None:
        self._task = task
        self._left = step
        self._scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def a_closed_endpoint_is_reported_once_and_takes_no_more_work(rig: Rig) -> None:
    host = await rig.open()
    link = rig.link()
    await host.aclose()
    await host.aclose()
    await rig.until_closed(ALICE)
    assert rig.closed == [ALICE]
    assert rig.fabric.link(ALICE) is None
    assert not link.is_open
    assert link.close_reason
    assert rig.fabric.stats.links == host.stats.links == 0
    await _closed(lambda: host.pull([piece(SHARED, 0, 1)], soon()))
    await _closed(lambda: host.store([piece(ALICE_INBOUND, 0, 1)], soon()))
    await _closed(lambda: link.push([(rig.regions[SHARED].view[:1], 1, 0)], soon()))


async def an_expelled_host_is_cut_off_reported_and_stays_out(rig: Rig) -> None:
    host = await rig.open()
    link = rig.link()
    rig.fabric.expel(ALICE)
    rig.fabric.expel(ALICE)
    assert not link.is_open
    assert link.close_reason == "expelled"
    assert rig.fabric.link(ALICE) is None
    await rig.until_closed(ALICE)
    assert rig.closed == [ALICE]
    await _closed(lambda: host.pull([piece(SHARED, 0, 1)], soon()))
    denial = await _raises(RemoteProtocolError, rig.open)
    assert denial.code == "denied"
    await host.aclose()


async def expelling_in_the_middle_of_transfers_balances_every_access(rig: Rig) -> None:
    for session in (ALICE, BOB):
        host = await rig.open(session)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(_ends_somehow, host, [piece(SHARED, 0, 4 << 20)])
            await trio.lowlevel.checkpoint()
            rig.fabric.expel(session)
        await rig.until_closed(session)
        await rig.access.idle()
        await host.aclose()


async def _ends_somehow(host: Endpoint, pieces: list[Piece]) -> None:
    try:
        await host.pull(pieces, soon())
    except FabricError as error:
        if error.status != "closed":
            raise


async def _closed(work: Callable[[], Awaitable[None]]) -> None:
    error = await _raises(FabricError, work)
    assert error.status == "closed"


async def the_counters_of_both_sides_add_up(rig: Rig) -> None:
    host = await rig.open()
    landing = host.landing(4096)
    await host.pull([piece(SHARED, 0, 10), piece(SHARED, 5, 20)], soon())
    await host.store([piece(ALICE_INBOUND, 0, 7)], soon())
    await rig.link().push([(rig.regions[SHARED].view[:3], landing.region_id, 0)], soon())
    await _refused(host, "pull", piece(99, 0, 1))
    mine, nodes = host.stats, rig.fabric.stats
    assert (mine.pulls, mine.bytes_pulled, mine.stores, mine.bytes_stored) == (1, 30, 1, 7)
    assert (nodes.pushes, nodes.bytes_pushed, nodes.links) == (1, 3, 1)
    if rig.traits.checks_leases:
        assert (nodes.pulls, nodes.bytes_pulled, nodes.stores, nodes.bytes_stored) == (1, 30, 1, 7)
        assert nodes.refused == 1
        assert rig.access.begun == 3
    assert mine.errors == nodes.errors == 0
    await host.aclose()


async def admitting_twice_and_short_tokens_are_errors(rig: Rig) -> None:
    for session, token in ((ALICE, token_of(ALICE)), (9, b"short"), (9, bytes(65))):
        try:
            rig.fabric.admit(session, token, (), ())
        except ValueError:
            continue
        raise AssertionError("it was admitted")


async def nobody_there_is_node_unavailable(rig: Rig) -> None:
    nowhere: dict[str, Address] = {
        "memory": {"name": "none"},
        "shm": {"path": "/nonexistent"},
        "tcp": {"host": "127.0.0.1", "port": 1},
        "verbs": {"host": "127.0.0.1", "port": 1},
    }
    kind = rig.fabric.kind
    await _raises(NodeUnavailable, connect, kind, nowhere[kind], ALICE, token_of(ALICE), soon())


# --- another process ---------------------------------------------------------------------------------------------------


class HostProcess:
    """A `dpurt.testing.fabric_host` and its conversation."""

    def __init__(self, process: Running) -> None:
        self.process = process
        self._buffer = b""

    async def tell(self, **command: object) -> None:
        """Send a command and do not wait for its answer."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(command).encode() + b"\n")

    async def ask(self, **command: object) -> dict[str, Any]:
        await self.tell(**command)
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            more = await self.process.stdout.receive_some()
            assert more, "the host process ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def host_process(rig: Rig, session: int) -> AsyncIterator[HostProcess]:
    link = {
        "kind": rig.fabric.kind,
        "address": rig.address,
        "session": session,
        "token": token_of(session).hex(),
    }
    command = [sys.executable, "-m", "dpurt.testing.fabric_host", json.dumps(link)]
    process = await rig.peers.launch(command)
    try:
        yield HostProcess(process)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                await stream.aclose()


async def a_host_in_another_process_pulls_stores_and_lands(rig: Rig) -> None:
    if not rig.traits.crosses_processes:
        return
    async with host_process(rig, ALICE) as host:
        where = {"region": SHARED, "offset": 4097, "length": 3 << 20, "lease": LEASE}
        expected = digest(rig.bytes(SHARED, 4097, 3 << 20))
        assert (await host.ask(do="pull", **where)) == {"digest": expected}
        viewed = await host.ask(do="view", **where)
        assert viewed == {"digest": expected if rig.traits.has_views else None}
        inbound = where | {"region": ALICE_INBOUND}
        assert (await host.ask(do="store", fill=9, **inbound)) == {"stored": 3 << 20}
        assert rig.bytes(ALICE_INBOUND, 4097, 3 << 20) == b"\x09" * (3 << 20)
        assert (await host.ask(do="store", fill=9, **where)) == {"error": "RemoteAccessError"}
        await _push_to(rig, host)
        assert rig.closed == []
    await rig.until_closed(ALICE)


async def _push_to(rig: Rig, host: HostProcess) -> None:
    landing = (await host.ask(do="landing", size=1 << 20))["landing"]
    source = rig.regions[SHARED].view[1 : 1 + (1 << 19)]
    await rig.link().push([(source, landing, 100)], soon())
    got = await host.ask(do="landing_digest", landing=landing, offset=100, length=1 << 19)
    assert got == {"digest": digest(source)}


async def a_host_killed_in_the_middle_of_pulls_is_reported_and_balanced(rig: Rig) -> None:
    if not rig.traits.crosses_processes:
        return
    async with host_process(rig, BOB) as host:
        where = {"do": "pull", "region": SHARED, "offset": 0, "length": SIZE, "lease": LEASE}
        await host.ask(**where)
        assert host.process.stdin is not None
        await host.process.stdin.send_all((json.dumps(where).encode() + b"\n") * 50)
        await host.answer()
        host.process.kill()
        await rig.until_closed(BOB)
        await rig.access.idle()
    survivor = await rig.open()
    await _still_works(rig, survivor)
    await survivor.aclose()


CASES: tuple[Case, ...] = (
    pull_gives_the_bytes_of_every_range_in_one_batch,
    a_batch_of_many_small_pieces_arrives_in_order,
    an_empty_batch_is_no_work,
    store_changes_the_named_ranges_and_nothing_else,
    stores_land_in_memory_that_others_read_where_the_node_puts_them_there,
    memory_that_is_kept_is_pulled_into_and_stored_from_again_and_again,
    push_is_in_the_landing_when_it_returns,
    pulls_and_pushes_run_at_the_same_time_on_one_link,
    links_of_two_sessions_run_side_by_side,
    a_view_is_the_nodes_memory_or_there_is_none,
    a_wrong_token_opens_no_link,
    a_session_has_one_link_at_a_time,
    out_of_bounds_and_unknown_regions_are_refused_and_the_link_lives,
    one_bad_piece_refuses_the_whole_batch,
    each_region_is_open_in_its_own_direction_and_to_its_own_session,
    without_a_lease_nothing_moves_where_the_node_is_asked,
    a_push_outside_any_landing_fails_and_the_link_lives,
    a_placed_block_is_found_in_the_landing_zone_without_asking,
    a_placement_cancelled_anywhere_leaves_no_wrong_block,
    a_late_deadline_is_an_error_and_the_link_lives,
    a_cancelled_transfer_ends_its_access_and_the_link_lives,
    a_closed_endpoint_is_reported_once_and_takes_no_more_work,
    an_expelled_host_is_cut_off_reported_and_stays_out,
    expelling_in_the_middle_of_transfers_balances_every_access,
    the_counters_of_both_sides_add_up,
    admitting_twice_and_short_tokens_are_errors,
    nobody_there_is_node_unavailable,
    a_host_in_another_process_pulls_stores_and_lands,
    a_host_killed_in_the_middle_of_pulls_is_reported_and_balanced,
)


async def run_case(
    case: Case,
    make_fabric: MakeFabric,
    traits: FabricTraits,
    peers: Peers | None = None,
    patience_s: float = 30.0,
) -> None:
    """One case on a fabric of its own, in bounded time."""
    with trio.fail_after(patience_s):
        async with serving(make_fabric, traits, peers) as rig:
            await case(rig)


async def check_fabric(make_fabric: MakeFabric, traits: FabricTraits) -> None:
    """Every case. `make_fabric` makes a fabric that is not serving yet, a new one each time."""
    for case in CASES:
        await run_case(case, make_fabric, traits)
