"""What is special to tcp: the documented bytes, malformed ones, slow and numerous hosts, abandoned
replies."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import asynccontextmanager

import pytest
import trio

from dpurt.errors import FabricError, NodeUnavailable, RemoteAccessError
from dpurt.fabric import connect, wire
from dpurt.fabric.exchange import Pace
from dpurt.fabric.frames import FrameLimits
from dpurt.fabric.tcp import TcpFabric, TcpLimits
from dpurt.testing.fabric_contract import (
    ALICE,
    ALICE_INBOUND,
    BOB,
    CASES,
    LEASE,
    SHARED,
    SIZE,
    FabricTraits,
    piece,
    run_case,
    serving,
    soon,
    token_of,
)

from .turns import turns_while

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)
HELLO = struct.pack("<4sHHQ", b"DPT1", 0, 32, ALICE) + token_of(ALICE)


@pytest.fixture(autouse=True)
def _bounded(monkeypatch):
    """Small socket buffers, so that transfers of this size must wait for their peer."""
    monkeypatch.setattr(wire, "_SOCKET_BUFFER_BYTES", 64 << 10)


@asynccontextmanager
async def tcp_rig(**limits):
    async with serving(lambda access: TcpFabric(access, limits=TcpLimits(**limits)), TRAITS) as rig:
        with trio.fail_after(20):
            yield rig


async def dial(rig):
    return await trio.open_tcp_stream(rig.address["host"], rig.address["port"])


async def exactly(stream, count):
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        assert more, f"closed after {data!r}"
        data += more
    return data


async def ends(stream):
    """Say no more and read to the end, however rude."""
    try:
        await stream.send_eof()
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        return


async def welcome(rig):
    stream = await dial(rig)
    await stream.send_all(HELLO)
    assert await exactly(stream, 8) == b"DPT1" + bytes(4)
    return stream


def request(op, *entries):
    return struct.pack("<II", op, len(entries)) + b"".join(struct.pack("<QQQQ", *entry) for entry in entries)


@pytest.mark.parametrize(
    "name",
    [
        "pulls_and_pushes_run_at_the_same_time_on_one_link",
        "a_cancelled_transfer_ends_its_access_and_the_link_lives",
        "expelling_in_the_middle_of_transfers_balances_every_access",
        "a_host_killed_in_the_middle_of_pulls_is_reported_and_balanced",
    ],
)
async def test_contract_when_every_transfer_must_wait(name):
    case = next(case for case in CASES if case.__name__ == name)
    await run_case(case, TcpFabric, TRAITS)


async def test_a_client_of_a_dozen_lines_pulls_and_stores():
    async with tcp_rig() as rig, await welcome(rig) as stream:
        await stream.send_all(request(1, (SHARED, 5, 100, LEASE)))
        assert await exactly(stream, 8) == bytes(8)
        assert await exactly(stream, 100) == rig.bytes(SHARED, 5, 100)
        await stream.send_all(request(2, (ALICE_INBOUND, 9, 3, LEASE)) + b"abc")
        assert await exactly(stream, 8) == bytes(8)
        assert rig.bytes(ALICE_INBOUND, 9, 3) == b"abc"
        await stream.send_all(request(1, (SHARED, 0, 1, LEASE), (SHARED, SIZE, 1, LEASE)))
        assert struct.unpack("<II", await exactly(stream, 8)) == (1, 1)


async def test_pipelined_requests_are_answered_in_order():
    async with tcp_rig() as rig, await welcome(rig) as stream:
        await stream.send_all(b"".join(request(1, (SHARED, i, 3, LEASE)) for i in range(50)))
        for i in range(50):
            assert await exactly(stream, 11) == bytes(8) + rig.bytes(SHARED, i, 3)


async def test_a_host_that_opens_no_landing_connection_cannot_be_pushed_to():
    async with tcp_rig() as rig, await welcome(rig):
        with pytest.raises(FabricError, match="no landing connection"):
            await rig.link().push([(rig.regions[SHARED].view[:1], 1, 0)], soon())


MALFORMED = {
    "unknown operation": request(9, (SHARED, 0, 1, LEASE)),
    "a push to the node": request(3, (1, 0, 1, 0)) + b"x",
    "oversize count": struct.pack("<II", 1, 2**32 - 1),
    "oversize total": request(1, *[(SHARED, 0, 2**63, LEASE)] * 2),
    "half a frame": request(1, (SHARED, 0, 1, LEASE))[:-1],
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_frame_ends_the_link_and_is_counted(frame):
    async with tcp_rig() as rig:
        stream = await welcome(rig)
        link = rig.link()
        await stream.send_all(frame)
        await ends(stream)
        await rig.until_closed(ALICE)
        assert rig.fabric.stats.errors == 1
        assert link.close_reason
        await stream.aclose()
        await (await rig.open()).aclose()


async def test_random_bytes_never_hurt_the_node():
    rng = random.Random(1)
    async with tcp_rig(hello_s=0.2, pace=Pace(grace_s=0.2)) as rig:
        for number in range(60):
            stream = await (welcome(rig) if number % 2 else dial(rig))
            noise = rng.randbytes(rng.randrange(1, 200))
            await stream.send_all(HELLO[: rng.randrange(20)] + noise if number % 4 == 0 else noise)
            await ends(stream)
            await stream.aclose()
            if number % 2:
                await rig.until_closed(ALICE)
                rig.closed.clear()
        stats = rig.fabric.stats
        assert stats.links == 0
        assert stats.errors + stats.refused >= 55  # noise may chance to be a refused request
        await (await rig.open()).aclose()


async def test_a_hello_that_does_not_come_costs_its_time_and_no_more():
    async with tcp_rig(hello_s=0.05) as rig:
        stream = await dial(rig)
        assert await stream.receive_some() == b""
        assert rig.fabric.stats.errors == 1
        await stream.aclose()


async def test_a_slow_reader_is_cut_off_and_the_others_do_not_notice():
    async with tcp_rig(pace=Pace(grace_s=0.3, min_bytes_per_s=1 << 30)) as rig:
        slow = await welcome(rig)
        link = rig.link()
        await slow.send_all(request(1, (SHARED, 0, SIZE, LEASE)))
        other = await rig.open(BOB)
        while ALICE not in rig.closed:
            with trio.fail_after(0.25):
                await other.pull([piece(SHARED, 0, 4096)], soon())
            await trio.sleep(0.01)
        assert "too slow" in link.close_reason
        assert rig.fabric.stats.errors == 1
        await other.aclose()
        await slow.aclose()


async def test_links_beyond_the_limit_are_told_there_is_no_room():
    async with tcp_rig(max_links=1) as rig:
        host = await rig.open(ALICE)
        with pytest.raises(NodeUnavailable, match="no room"):
            await rig.open(BOB)
        assert rig.fabric.stats.refused == 1
        await host.aclose()


async def test_of_connections_that_do_not_say_hello_the_oldest_goes_and_who_says_it_comes_in():
    async with tcp_rig(max_greeting=2, hello_s=50) as rig:
        idle = [await dial(rig) for _ in range(5)]
        for stream in idle[:3]:
            await ends(stream)
        assert rig.fabric.stats.errors == 3
        host = await rig.open()
        assert rig.fabric.is_linked(ALICE)
        await host.aclose()
        for stream in idle:
            await stream.aclose()


async def test_a_request_beyond_the_nodes_limits_ends_the_link():
    async with tcp_rig(frames=FrameLimits(max_request_bytes=1000)) as rig:
        host = await rig.open()
        with pytest.raises(FabricError):
            await host.pull([piece(SHARED, 0, 1001)], soon())
        await rig.until_closed(ALICE)
        await host.aclose()


async def test_an_abandoned_reply_is_drained_and_never_touches_the_callers_memory():
    async with tcp_rig() as rig:
        host = await rig.open()
        for _ in range(5):
            late = piece(SHARED, 0, SIZE)
            with pytest.raises(FabricError, match="timed_out"):
                await host.pull([late], trio.current_time() + 0.0005)
            seen = bytes(late.local)
            got = piece(SHARED, 5, 1 << 20)
            await host.pull([got], soon())
            assert got.local == rig.bytes(SHARED, 5, 1 << 20)
            assert late.local == seen
        assert host.stats.errors == 0
        await host.aclose()


async def test_a_refusal_shifts_no_byte_of_the_replies_behind_it():
    async with tcp_rig() as rig:
        host = await rig.open()
        good = [piece(SHARED, i * 1000, 100_000) for i in range(40)]

        async def pull(number):
            if number % 3:
                await host.pull([good[number]], soon())
            else:
                with pytest.raises(RemoteAccessError):
                    await host.pull([piece(SHARED, 0, 300_000), piece(SHARED, SIZE, 1)], soon())

        async with trio.open_nursery() as nursery:
            for number in range(len(good)):
                nursery.start_soon(pull, number)
        for number, got in enumerate(good):
            if number % 3:
                assert got.local == rig.bytes(SHARED, number * 1000, 100_000)
        assert host.stats.errors == 0
        await host.aclose()


async def test_a_host_that_floods_the_node_with_requests_leaves_the_loop_its_turns():
    async with tcp_rig() as rig, await welcome(rig) as stream:
        turns = 0

        async def count_turns():
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        await stream.send_all(b"".join(request(1, (SHARED, 0, 1, LEASE)) for _ in range(640)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            while rig.fabric.stats.pulls < 640:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert turns >= 640 / 32


async def test_a_node_that_stops_answering_is_an_error_by_the_deadline():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        host, port = listener.getsockname()
        with pytest.raises(NodeUnavailable, match="deadline"):
            await connect("tcp", {"host": host, "port": port}, 1, bytes(32), trio.current_time() + 0.05)


async def test_the_address_that_is_asked_for_is_the_one_bound():
    async with serving(lambda access: TcpFabric(access, host="127.0.0.2"), TRAITS) as rig:
        assert rig.address["host"] == "127.0.0.2"
        with pytest.raises(OSError, match="all attempts"):
            await trio.open_tcp_stream("127.0.0.1", rig.address["port"])
    with pytest.raises(ValueError, match="wildcard"):
        wire.listener("", 0)


async def test_many_entries_of_no_bytes_do_not_keep_others_from_their_turn():
    async with tcp_rig() as rig:
        stream = await welcome(rig)
        crowd = request(1, *[(SHARED, 0, 0, LEASE)] * 1024)

        async def ask():
            await stream.send_all(crowd * 15)
            await exactly(stream, 8 * 15)

        assert await turns_while(ask) >= 15
        await stream.aclose()
