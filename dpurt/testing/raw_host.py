"""A host that speaks the protocol by hand, so that a test can say what no client of ours would say.

`raw_host` gives one DEALER socket; `ask` sends a message and waits for its answer, `send` sends any bytes. It answers no
pings and keeps no promises: a session it opened lives until the node ends it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from dpurt.client.buffers import part_crcs
from dpurt.config import Config
from dpurt.fabric import Endpoint, Piece
from dpurt.fabric import connect as connect_fabric
from dpurt.transport import CurveClient, SocketOptions, ZmqSocket, open_context
from dpurt.wire import messages as m

ANSWER_S = 10.0


class RawHost:
    """One connection to a node's client or admin socket."""

    def __init__(self, socket: ZmqSocket) -> None:
        self.socket = socket
        self._ids = itertools.count(1)

    async def send(self, *parts: bytes) -> None:
        """Any frames."""
        await self.socket.send(parts)

    async def ask(self, request: m.Request) -> m.AnyReply:
        """One message and the answer to it; answers to others are dropped. Fails after `ANSWER_S`."""
        request.id = next(self._ids)
        await self.send(m.encode(request))
        with trio.fail_after(ANSWER_S):
            while True:
                reply = m.decode_reply((await self.socket.recv())[-1])
                if reply.id == request.id:
                    return reply

    async def hello(
        self,
        config: Config,
        host: str,
        fabrics: Sequence[str] = ("tcp",),
        spaces: Sequence[str] | None = None,
    ) -> m.AnyReply:
        """A truthful hello for the spaces (default: all that the topology gives this host)."""
        named = config.host_named(host)
        names = spaces if spaces is not None else named.spaces if named is not None else ()
        claims = [m.claim_of(name, config.to_space(name)) for name in names]
        return await self.ask(m.Hello(host=host, protocol=m.PROTOCOL, spaces=claims, fabrics=list(fabrics)))


@asynccontextmanager
async def raw_host(
    endpoint: str, *, routing_id: bytes = b"", curve: CurveClient | None = None, recv_hwm: int = 1000
) -> AsyncIterator[RawHost]:
    """A raw connection."""
    options = SocketOptions(routing_id=routing_id, curve=curve, max_message_bytes=64 << 20, recv_hwm=recv_hwm)
    with open_context() as context, ZmqSocket(context, "DEALER", options) as socket:
        socket.connect(endpoint)
        yield RawHost(socket)


async def link_of(reply: m.AnyReply) -> Endpoint:
    """Open the fabric link a hello's answer offers."""
    assert isinstance(reply, m.HelloReply), reply
    deadline = trio.current_time() + ANSWER_S
    return await connect_fabric(reply.fabric, reply.fabric_address, reply.session, reply.token, deadline)


async def write_reserved(
    link: Endpoint, reserved: Sequence[m.Reservation], payloads: Sequence[bytes], part_bytes: Sequence[int]
) -> list[m.CommitBlock]:
    """Write payloads where a reserve said, and make what a commit needs."""
    views = [memoryview(payload) for payload in payloads]
    pieces = [
        Piece(one.region, one.offset, one.reservation, view)
        for one, view in zip(reserved, views, strict=True)
    ]
    await link.store(pieces, trio.current_time() + ANSWER_S)
    return [
        m.CommitBlock(reservation=one.reservation, crcs=part_crcs((view,), part_bytes))
        for one, view in zip(reserved, views, strict=True)
    ]
