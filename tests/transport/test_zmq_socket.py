"""The rules of `dpurt.transport.zmq_socket`, on real sockets over loopback and inproc. Real time, bounded by
fail_after.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
import zmq

from dpurt import keys
from dpurt.errors import ConfigError, DeadlineExceeded
from dpurt.transport import (
    CurveClient,
    CurveServer,
    SocketOptions,
    ZmqSocket,
    open_context,
    serve_zap,
    user_id,
)
from dpurt.transport.zmq_socket import Kind

Context = zmq.Context[zmq.Socket[bytes]]
ANY_PORT = "tcp://127.0.0.1:0"


OPEN: list[ZmqSocket] = []


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as made:
        yield made
        while OPEN:
            OPEN.pop().close()


def make(context: Context, kind: Kind, options: SocketOptions | None = None) -> ZmqSocket:
    """A socket that the fixture closes."""
    OPEN.append(ZmqSocket(context, kind, options))
    return OPEN[-1]


def connected(
    context: Context, server: Kind = "ROUTER", client: Kind = "DEALER", options: SocketOptions | None = None
) -> tuple[ZmqSocket, ZmqSocket]:
    router = make(context, server, options)
    dealer = make(context, client, options)
    dealer.connect(router.bind(ANY_PORT))
    return router, dealer


async def until_blocked() -> None:
    """Let other tasks run until they wait for the outside."""
    for _ in range(5):
        await trio.lowlevel.checkpoint()


async def test_multipart_messages_go_both_ways_whole(context: Context) -> None:
    router, dealer = connected(context)
    with trio.fail_after(5):
        await dealer.send([b"a", b"", b"c" * 100_000])
        peer, *parts = await router.recv()
        assert parts == [b"a", b"", b"c" * 100_000]
        await router.send([peer, b"reply"])
        assert await dealer.recv() == [b"reply"]
    assert (router.stats.received, router.stats.sent) == (1, 1)


async def test_try_recv_drains_what_is_here_and_then_says_none(context: Context) -> None:
    router, dealer = connected(context)
    for i in range(10):
        await dealer.send([b"%d" % i])
    with trio.fail_after(5):
        batch = [await router.recv()]
        while len(batch) < 10:
            while (more := router.try_recv()) is not None:
                batch.append(more)
            await trio.lowlevel.checkpoint()
    assert [parts[1] for parts in batch] == [b"%d" % i for i in range(10)]
    assert router.try_recv() is None


async def test_what_is_here_is_received_together_up_to_a_limit(context: Context) -> None:
    router, dealer = connected(context)
    for i in range(10):
        await dealer.send([b"%d" % i, b"part"])
    batches = []
    with trio.fail_after(5):
        while sum(map(len, batches)) < 10:
            batches.append(router.try_recv_many(4))
            await trio.lowlevel.checkpoint()
    assert [parts[1:] for batch in batches for parts in batch] == [[b"%d" % i, b"part"] for i in range(10)]
    assert max(map(len, batches)) <= 4
    assert router.try_recv_many(4) == []
    assert router.stats.received == 10


async def test_cancelled_receive_loses_no_message(context: Context) -> None:
    router, dealer = connected(context)
    got = []
    with trio.fail_after(20):
        for i in range(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dealer.send, [b"%d" % i])
                with trio.move_on_after(0.0005 * (i % 3)):
                    got.append((await router.recv())[1])
        while len(got) < 200:
            got.append((await router.recv())[1])
    assert got == [b"%d" % i for i in range(200)]


async def test_cancelled_watcher_hands_the_watch_to_a_parked_task(context: Context) -> None:
    router, dealer = connected(context)
    got: list[list[bytes]] = []

    async def receive() -> None:
        got.append(await router.recv())

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            watcher = trio.CancelScope()

            async def receive_until_cancelled() -> None:
                with watcher:
                    await router.recv()

            nursery.start_soon(receive_until_cancelled)
            await until_blocked()
            nursery.start_soon(receive)
            await until_blocked()
            watcher.cancel()
            await until_blocked()
            await dealer.send([b"for the other"])
    assert got[0][1] == b"for the other"


async def test_duplex_traffic_at_a_tiny_high_water_mark_neither_stalls_nor_loses(context: Context) -> None:
    options = SocketOptions(send_hwm=10, recv_hwm=10)
    left, right = connected(context, "DEALER", "DEALER", options)
    count = 1500

    async def pour(end: ZmqSocket) -> None:
        for i in range(count):
            await end.send([b"%d" % i])

    async def check(end: ZmqSocket) -> None:
        for i in range(count):
            assert await end.recv() == [b"%d" % i]

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for end in (left, right):
                nursery.start_soon(pour, end)
                nursery.start_soon(check, end)


async def test_reader_learns_of_a_message_whose_edge_a_sender_ate(context: Context) -> None:
    """The writer is blocked and watching; the reader is parked; the only edge tells of a message."""
    options = SocketOptions(send_hwm=1, recv_hwm=1)
    left, right = connected(context, "DEALER", "DEALER", options)
    arrived = trio.Event()
    got: list[list[bytes]] = []

    async def fill() -> None:
        while True:
            await left.send([bytes(100_000)])

    async def read() -> None:
        got.append(await left.recv())
        arrived.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill)
            await trio.sleep(
                0.05
            )  # the writer is stuck at the high-water mark by now, or the test proves less
            nursery.start_soon(read)
            await until_blocked()
            await right.send([b"hello"])
            await arrived.wait()
            nursery.cancel_scope.cancel()
    assert got == [[b"hello"]]


async def test_send_to_a_full_peer_ends_at_its_deadline(context: Context) -> None:
    options = SocketOptions(send_hwm=1, recv_hwm=1)
    lonely = make(context, "DEALER", options)
    with pytest.raises(DeadlineExceeded, match="takes no more"):
        await lonely.send([b"nobody is connected"], deadline=trio.current_time() + 0.02)
    assert lonely.stats.sent == 0


async def fill_pipe(router: ZmqSocket, peer: bytes) -> int:
    """Send until the peer's queue has stayed full for a while."""
    sent = idle = 0
    while idle < 20:
        if router.try_send([peer, bytes(100_000)]):
            sent, idle = sent + 1, 0
        else:
            idle += 1
            await trio.sleep(0.005)
    return sent


async def test_router_sender_blocked_by_one_full_peer_goes_on_when_it_reads(context: Context) -> None:
    options = SocketOptions(send_hwm=2, recv_hwm=2)
    router, dealer = connected(context, options=options)
    await dealer.send([b"here"])
    with trio.fail_after(20):
        peer, _ = await router.recv()
        sent = await fill_pipe(router, peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.send, [peer, b"last"])
            nursery.start_soon(router.send, [peer, b"last"])
            await until_blocked()
            for _ in range(sent):
                assert len((await dealer.recv())[0]) == 100_000
            assert [await dealer.recv() for _ in range(2)] == [[b"last"]] * 2


async def test_router_tells_when_the_addressed_peer_is_gone(context: Context) -> None:
    router, _ = connected(context)
    with pytest.raises(trio.BrokenResourceError):
        await router.send([b"no such peer", b"x"])
    with pytest.raises(trio.BrokenResourceError):
        router.try_send([b"no such peer", b"x"])


async def test_close_wakes_every_waiting_task(context: Context) -> None:
    router, _ = connected(context)
    closed: list[str] = []

    async def receive(name: str) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await router.recv()
        closed.append(name)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive, "watcher")
            nursery.start_soon(receive, "parked")
            await until_blocked()
            router.close()
    router.close()
    assert sorted(closed) == ["parked", "watcher"]
    with pytest.raises(trio.ClosedResourceError):
        router.try_recv()


async def test_published_messages_reach_the_subscribers_of_their_prefix(context: Context) -> None:
    publisher, subscriber = connected(context, "PUB", "SUB")
    subscriber.subscribe(b"kv.")
    with trio.fail_after(5):
        while (got := subscriber.try_recv()) is None:  # the subscription travels at its own pace
            await publisher.send([b"other", b"0"])
            await publisher.send([b"kv.a", b"1"])
            await trio.sleep(0.001)
    assert got == [b"kv.a", b"1"]


# --- hostile and odd peers ---------------------------------------------------------------------------------


JUNK = b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 50


async def test_junk_bytes_on_the_port_do_not_disturb_the_others(context: Context) -> None:
    router = make(context, "ROUTER")
    endpoint = router.bind(ANY_PORT)
    with socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) as junk:
        junk.sendall(JUNK)
        dealer = make(context, "DEALER")
        dealer.connect(endpoint)
        with trio.fail_after(5):
            await dealer.send([b"proper"])
            while (await router.recv())[-1] != b"proper":  # libzmq may take the junk for ZMTP 1.0 frames
                pass


async def test_peer_that_sends_too_large_a_frame_is_cut_off(context: Context) -> None:
    router = make(context, "ROUTER", SocketOptions(max_message_bytes=1000))
    endpoint = router.bind(ANY_PORT)
    big, small = make(context, "DEALER"), make(context, "DEALER")
    big.connect(endpoint)
    small.connect(endpoint)
    with trio.fail_after(5):
        await big.send([bytes(1001)])
        await small.send([bytes(1000)])
        assert len((await router.recv())[1]) == 1000
    await trio.sleep(0.05)
    assert router.try_recv() is None


async def test_message_of_too_many_parts_is_cut_and_counted(context: Context) -> None:
    router, dealer = connected(context, options=SocketOptions(max_parts=4))
    with trio.fail_after(5):
        await dealer.send([b"x"] * 100)  # and the peer's routing id
        await dealer.send([b"y"] * 3)
        assert (await router.recv())[1:] == [b"x"] * 3
        assert (await router.recv())[1:] == [b"y"] * 3
    assert router.stats.cut == 1


# --- addresses ---------------------------------------------------------------------------------------------


async def test_bound_address_is_the_configured_one(context: Context) -> None:
    for wanted, host in ((ANY_PORT, "tcp://127.0.0.1:"), ("tcp://localhost:0", "tcp://127.0.0.1:")):
        actual = make(context, "ROUTER").bind(wanted)
        assert actual.startswith(host)
        assert not actual.endswith(":0")


async def test_ipv6_loopback_binds_as_itself(context: Context) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    assert make(context, "ROUTER").bind("tcp://[::1]:0").startswith("tcp://[::1]:")


async def test_taken_or_malformed_address_is_a_config_error(context: Context) -> None:
    taken = make(context, "ROUTER").bind(ANY_PORT)
    other = make(context, "ROUTER")
    for endpoint in (
        taken,
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:http",
        "nonsense",
        "tcp://x.invalid:1",
    ):
        with pytest.raises(ConfigError):
            other.bind(endpoint)
    with pytest.raises(ConfigError):
        other.connect("tcp://127.0.0.1:noport")


# --- CURVE -------------------------------------------------------------------------------------------------

SERVER = keys.generate()
KNOWN = keys.generate()
STRANGER = keys.generate()


def as_client(pair: keys.KeyPair, server: str = SERVER.public) -> SocketOptions:
    return SocketOptions(curve=CurveClient(pair.public, pair.secret, server))


@asynccontextmanager
async def curve_router(context: Context, refused: list[str]) -> AsyncIterator[tuple[ZmqSocket, str]]:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_zap, context, {KNOWN.public}, lambda _address, key: refused.append(key))
        router = make(context, "ROUTER", SocketOptions(curve=CurveServer(SERVER.secret.encode())))
        yield router, router.bind(ANY_PORT)
        nursery.cancel_scope.cancel()


async def test_known_client_gets_in_and_each_message_names_its_key(context: Context) -> None:
    async with curve_router(context, []) as (router, endpoint):
        dealer = make(context, "DEALER", as_client(KNOWN))
        dealer.connect(endpoint)
        with trio.fail_after(5):
            await dealer.send([b"secret"])
            frames = await router.recv_frames()
            assert frames[1].bytes == b"secret"
            assert user_id(frames) == KNOWN.public
            await router.send([frames[0], b"reply"])
            assert await dealer.recv() == [b"reply"]


async def test_unknown_wrong_and_plain_clients_stay_out(context: Context) -> None:
    refused: list[str] = []
    async with curve_router(context, refused) as (router, endpoint):
        for options in (as_client(STRANGER), as_client(KNOWN, server=STRANGER.public), SocketOptions()):
            dealer = make(context, "DEALER", options)
            dealer.connect(endpoint)
            await dealer.send([b"let me in"])
        with trio.fail_after(5):
            while not refused:  # noqa: ASYNC110 - a callback of libzmq's handshake, at its own pace
                await trio.sleep(0.005)
        await trio.sleep(0.1)
        assert router.try_recv() is None
        assert set(refused) == {STRANGER.public}


async def test_junk_bytes_never_come_up_as_messages_under_curve(context: Context) -> None:
    async with curve_router(context, []) as (router, endpoint):
        with socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) as junk:
            junk.sendall(JUNK)
            dealer = make(context, "DEALER", as_client(KNOWN))
            dealer.connect(endpoint)
            with trio.fail_after(5):
                await dealer.send([b"proper"])
                assert (await router.recv())[1:] == [b"proper"]
        await trio.sleep(0.05)
        assert router.try_recv() is None


async def test_without_an_authenticator_nobody_gets_in(context: Context) -> None:
    router = make(context, "ROUTER", SocketOptions(curve=CurveServer(SERVER.secret.encode())))
    dealer = make(context, "DEALER", as_client(KNOWN))
    dealer.connect(router.bind(ANY_PORT))
    await dealer.send([b"let me in"])
    await trio.sleep(0.15)
    assert router.try_recv() is None


async def test_user_id_is_none_without_curve(context: Context) -> None:
    router, dealer = connected(context)
    with trio.fail_after(5):
        await dealer.send([b"x"])
        assert user_id(await router.recv_frames()) is None


@pytest.mark.parametrize("bad", ["", "short", b"x" * 40, "\u00e4" * 40])
def test_a_key_that_is_none_is_said_by_its_name(bad: object) -> None:
    good = "x" * 40
    with pytest.raises(ConfigError, match=r"curve.server_key: expected a Z85 key"):
        CurveClient(good, good, bad)  # type: ignore[arg-type]
