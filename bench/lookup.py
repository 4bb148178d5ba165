"""A lookup's round trip beside a bare pyzmq echo of the same bytes.

The node is `dpurt serve` in a process of its own; every block of an 8,192-token prompt is known and staged. The peer is a
ROUTER in a process of its own that does nothing but answer: with as many bytes as our reply has (*reply sized*), or with all it
got (*full echo*). Both are asked over loopback TCP, one request at a time, in turns.

Our side is asked in two ways. *Bare*: a blocking pyzmq DEALER with the request encoded in advance, the same client code
as the peer's, so the difference is the node. *Client*: `dpurt.Client` on a Trio loop, all in: encoding, waiting, decoding.
The target is held by a *probe* asked by the bare client, against the reply-sized echo, the smaller of the two peers. A
lookup that announces a load (*will_load*) opens a request and plans its prefetch besides; asked for again at once, as here,
it also waits for the planning of the one before. It is shown without a target.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy as np
import trio
import zmq

from dpurt.bench.live_node import HOST, BareHost, LiveNode, Shape, bare_host, live_node, node_conditions
from dpurt.bench.result import BenchResult, Figure, Pairs, interleave
from dpurt.client import Client, connect
from dpurt.wire import messages as m

SUMMARY = "lookup round trip of 8,192 tokens beside a bare pyzmq echo of the same bytes"
PROMPT_TOKENS = 8192
TARGET = 2.0
SHAPES = [
    Shape("block-16", 16, 1, 4096, PROMPT_TOKENS // 16 + 64),
    Shape("block-512", 512, 1, 4096, PROMPT_TOKENS // 512 + 64),
]
INTENTS = ("probe", "will_load")
PEER = "pyzmq echo"
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
keep = int(sys.argv[1]) or None
while True:
    who, frame = socket.recv_multipart()
    socket.send_multipart((who, frame[:keep]))
"""


def run(quick: bool) -> BenchResult:
    pairs = 200 if quick else 2000
    result = BenchResult(name="lookup", conditions={**node_conditions(), "pairs": pairs})
    result.conditions |= {"prompt_tokens": PROMPT_TOKENS, "request_bytes": len(_request("block-16", "probe"))}
    with live_node(SHAPES) as node, bare_host(node) as host:
        for shape in SHAPES:
            node.store(shape.name, _tokens())
            for intent in INTENTS:
                result.figures += _figures(node, host, shape, intent, pairs)
    return result


def _tokens() -> bytes:
    return np.random.default_rng(5).integers(0, 128_000, PROMPT_TOKENS, dtype=np.int32).tobytes()


def _request(space: str, intent: str) -> bytes:
    return m.encode(m.Lookup(id=7, space=space, request=space, tokens=_tokens(), intent=intent))  # type: ignore[arg-type]


def _figures(node: LiveNode, host: BareHost, shape: Shape, intent: str, pairs: int) -> Iterator[Figure]:
    frame = _request(shape.name, intent)
    reply = host.exchange(frame)
    _check(m.decode_reply(reply), shape)
    with _echo(len(reply)) as short, _echo(0) as full:
        label = f"{shape.name} {intent}"
        bare = interleave(lambda: host.exchange(frame), lambda: short(frame), pairs)
        yield _figure(f"{label}, bare, reply sized", bare, target=intent == "probe")
        yield _figure(
            f"{label}, bare, full echo", interleave(lambda: host.exchange(frame), lambda: full(frame), pairs)
        )
        yield _figure(
            f"{label}, client, reply sized", trio.run(_client_pairs, node, shape, intent, short, pairs)
        )


def _figure(name: str, measured: Pairs, *, target: bool = False) -> Figure:
    slower = 1 / measured.ratio
    return Figure(
        name=name,
        value=measured.ours_s * 1e6,
        unit="us",
        peer=PEER,
        peer_value=measured.peer_s * 1e6,
        ratio=slower,
        target=f"<= {TARGET:g}x" if target else None,
        holds=slower <= TARGET if target else None,
    )


def _check(reply: m.AnyReply, shape: Shape) -> None:
    assert isinstance(reply, m.LookupReply), reply
    if reply.staging != PROMPT_TOKENS // shape.block_tokens:
        raise RuntimeError(f"the prompt is not all staged: {reply}")


@contextmanager
def _echo(keep: int) -> Iterator[Callable[[bytes], bytes]]:
    """A peer that answers the first `keep` bytes of what it gets, or all of it."""
    command = [sys.executable, "-c", _ECHO, str(keep)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, context.socket(zmq.DEALER) as socket:
        assert process.stdout is not None
        socket.connect(f"tcp://127.0.0.1:{int(process.stdout.readline())}")

        def exchange(frame: bytes) -> bytes:
            socket.send(frame)
            return socket.recv()

        try:
            exchange(b"hello")
            yield exchange
        finally:
            process.kill()
    context.term()


async def _client_pairs(
    node: LiveNode, shape: Shape, intent: str, echo: Callable[[bytes], bytes], pairs: int
) -> Pairs:
    """As `interleave`, with our side on the Trio loop it needs."""
    tokens, frame = _tokens(), _request(shape.name, intent)
    async with connect(node.endpoint, host=HOST, spaces=node.spaces(), fabrics=["shm"]) as client:
        ask = _ask(client, shape.name, intent, tokens)
        _check(await ask(), shape)
        ours: list[float] = []
        peer: list[float] = []
        for i in range(pairs):
            for is_ours in (True, False) if i % 2 == 0 else (False, True):
                start = time.perf_counter()
                if is_ours:
                    await ask()
                else:
                    echo(frame)
                (ours if is_ours else peer).append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(ours, peer, strict=True))
    return Pairs(statistics.median(ours), statistics.median(peer), ratio, pairs)


def _ask(client: Client, space: str, intent: str, tokens: bytes) -> Callable[[], Awaitable[m.LookupReply]]:
    async def ask() -> m.LookupReply:
        return await client.lookup(space, space, tokens, will_load=intent == "will_load")

    return ask
