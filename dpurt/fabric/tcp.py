"""The tcp fabric: anywhere a socket reaches, in any language. No encryption: for a trusted network or a
tunnel.

A link is two connections to the node's listener, each opened by a hello. On the first the host asks (PULL,
STORE) and the node answers; on the second, which a host that wants no pushes need not open, the node asks
(PUSH) and the host answers. Both speak the one request frame of `dpurt.fabric.frames`. A whole client that
pulls, in Python for want of a better pseudo-code:

    def exactly(n):
        data = b""
        while len(data) < n:
            data += sock.recv(n - len(data)) or sys.exit("closed")
        return data

    sock = socket.create_connection((host, port))
    sock.sendall(struct.pack("<4sHHQ", b"DPT1", 0, len(token), session) + token)      # role 0: requests, 1: landing
    magic, status = struct.unpack("<4sI", exactly(8))                                 # 0: welcome
    sock.sendall(struct.pack("<II", 1, 1))                                            # 1 PULL, 2 STORE; one entry
    sock.sendall(struct.pack("<QQQQ", region, offset, length, lease))                 # a STORE's bytes would follow
    status, index = struct.unpack("<II", exactly(8))                                  # 0: done, 1: entry `index` refused
    data = exactly(length)

Theory of operation. Bytes go by gather and scatter system calls straight from and into the region, on the
node's loop; see `dpurt.fabric.wire`. Each link has a task. A link answers one request at a time and reads the
next only then, so a slow host holds back itself alone; beyond `Pace` it is cut off. A malformed frame ends
the link and is counted. The AccessCheck is asked before each transfer and told after, whatever happens in
between.

Leaves to others: what a lease is, when to push, reconnecting, checking the bytes (CRC).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from dpurt.errors import FabricError, NodeUnavailable, RemoteProtocolError
from dpurt.fabric import AccessCheck, Address, FabricStats, MemoryRegion, Piece
from dpurt.fabric.access import Entry, Refused, within
from dpurt.fabric.exchange import Pace, Requester, Service, respond
from dpurt.fabric.frames import (
    BUSY,
    DENIED,
    HELLO,
    HELLO_REPLY,
    LANDING,
    MAGIC,
    MALFORMED,
    PULL,
    PUSH,
    REQUESTS,
    STORE,
    WELCOME,
    FrameLimits,
    check_welcome,
    decode_hello,
    encode_hello,
)
from dpurt.fabric.node_link import FabricBase, Greetings
from dpurt.fabric.region import MemfdRegion, next_landing_id
from dpurt.fabric.wire import Cursor, Wire, accept, listener, tune

__all__ = ["TcpEndpoint", "TcpFabric", "TcpLimits", "TcpLink", "connect"]


@dataclass(frozen=True, slots=True)
class TcpLimits:
    """What hosts may cost the node. Connections past `max_links` are told so; for one past `max_greeting` the
    oldest that has not said hello is dropped."""

    max_links: int = 256
    max_greeting: int = 64
    hello_s: float = 5.0
    frames: FrameLimits = field(default_factory=FrameLimits)
    pace: Pace = field(default_factory=Pace)


class TcpLink:
    """The node's end of one host's pair of connections."""

    def __init__(self, session: int, wire: Wire, stats: FabricStats) -> None:
        self.session = session
        self.close_reason: str | None = None
        self._wire = wire
        self._stats = stats
        self._landing: Wire | None = None
        self._requester: Requester | None = None

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    @property
    def has_landing(self) -> bool:
        return self._landing is not None

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        if self._requester is None:
            raise FabricError(self._wire.peer, "push", "closed", 0, "the host opened no landing connection")
        entries = [(region, offset, len(source), 0) for source, region, offset in pieces]
        sources = [source for source, _, _ in pieces]
        await self._requester.request(PUSH, entries, sources, (), deadline)
        self._stats.count("push", sum(entry[2] for entry in entries))

    def close(self, reason: str = "closed by the node") -> None:
        if self.close_reason is None:
            self.close_reason = reason
        self._wire.close()
        if self._landing is not None:
            self._landing.close()

    def attach_landing(self, wire: Wire) -> bool:
        """Take the host's second connection. False: there is one already, or the link is closing."""
        if self._landing is not None or not self.is_open:
            return False
        self._landing = wire
        self._requester = Requester(wire, self._broken)
        return True

    def _broken(self, reason: str) -> None:
        if self.is_open:
            self._stats.errors += 1
            self.close(reason)

    async def serve(self, service: Service) -> None:
        """Answer the host until it ends the link or is cut off."""
        try:
            await respond(self._wire, service)
            self.close("closed by the host")
        except FabricError as error:
            self._broken(str(error))
        finally:
            self.close("the node stopped serving")


class TcpFabric(FabricBase[TcpLink]):
    """The node side. `host` is the address that is bound, exactly; port 0 lets the kernel choose."""

    kind = "tcp"
    lands_stores = True

    def __init__(
        self,
        access: AccessCheck,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: TcpLimits | None = None,
    ) -> None:
        self._limits = limits or TcpLimits()
        super().__init__(access, self._limits.max_links)
        self._bind = host, port
        self._greetings = Greetings(self._limits.max_greeting, self._limits.hello_s)

    async def serve(
        self,
        on_link_closed: Callable[[int], None],
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self._on_link_closed = on_link_closed
        with listener(*self._bind) as listening:
            host, port = listening.getsockname()[:2]
            async with trio.open_nursery() as nursery:
                # not an address to go to; hosts know how they reached us
                everywhere = ipaddress.ip_address(host).is_unspecified
                task_status.started({"port": port} if everywhere else {"host": host, "port": port})
                while True:
                    nursery.start_soon(self._serve_connection, await accept(listening))
                    await trio.lowlevel.checkpoint()  # a flood of connections must not starve the loop

    async def _serve_connection(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(sock, "unknown host")
        try:
            link = await self._greet(wire)
        except BaseException:
            wire.close()
            raise
        if link is None:
            return
        try:
            await _send_status(wire, WELCOME)
            await link.serve(self._service(link.session))
        finally:
            self._gone(link)

    async def _greet(self, wire: Wire) -> TcpLink | None:
        """The link to serve, if this connection opens one; else the connection is attached to its link, or
        closed."""
        try:
            with self._greetings.one():
                return await self._hello(wire)
            self._stats.errors += 1
        except FabricError:
            self._stats.errors += 1
        except RemoteProtocolError:
            self._stats.errors += 1
            await _send_status(wire, MALFORMED)
        wire.close()
        return None

    async def _hello(self, wire: Wire) -> TcpLink | None:
        role, token_bytes, session = decode_hello(MAGIC, await wire.receive_bytes(HELLO.size))
        token = await wire.receive_bytes(token_bytes)
        if not self._table.authenticate(session, token):
            await self._deny(wire, DENIED)
            return None
        wire.peer = f"session {session}"
        if role == LANDING:
            await self._attach(wire, session)
            return None
        if not self._has_room(session):
            await self._deny(wire, BUSY)
            return None
        link = TcpLink(session, wire, self._stats)
        self._opened(link)  # and nothing is awaited until the caller's `finally` guards it
        return link

    async def _attach(self, wire: Wire, session: int) -> None:
        link = self.link(session)
        if link is None or link.has_landing:
            await self._deny(wire, BUSY)
            return
        await _send_status(wire, WELCOME)  # before the first push may follow it
        if not link.attach_landing(wire):
            wire.close()

    async def _deny(self, wire: Wire, status: int) -> None:
        self._stats.refused += 1
        await _send_status(wire, status)
        wire.close()

    def _service(self, session: int) -> Service:
        return Service(
            ops=frozenset({PULL, STORE}),
            claim=lambda op, entries: self._table.claim(session, op, entries),
            stats=self._stats,
            limits=self._limits.frames,
            pace=self._limits.pace,
        )


async def _send_status(wire: Wire, status: int) -> None:
    """A few bytes into an empty socket: they fit, or the peer is gone and does not matter."""
    with trio.move_on_after(1):
        try:
            await wire.send(Cursor([memoryview(HELLO_REPLY.pack(MAGIC, status))]))
        except FabricError:
            return


# --- the host --------------------------------------------------------------------------------------------------------


class TcpEndpoint:
    """The host's end: pulls and stores on one connection; a background task answers pushes on the other."""

    kind = "tcp"

    def __init__(self, requests: Wire, landing: Wire) -> None:
        self._requests = requests
        self._landing = landing
        self._stats = FabricStats(links=1)
        self._requester = Requester(requests, self._broken)
        self._regions: dict[int, MemfdRegion] = {}
        self._closed: str | None = None

    @property
    def stats(self) -> FabricStats:
        return self._stats

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        buffers = [piece.local for piece in pieces]
        await self._request(PULL, pieces, (), buffers, deadline)
        self._stats.count("pull", sum(map(len, buffers)))

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        buffers = [piece.local for piece in pieces]
        await self._request(STORE, pieces, buffers, (), deadline)
        self._stats.count("store", sum(map(len, buffers)))

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        return None

    def keep(self, memory: memoryview) -> None:
        """See `Endpoint.keep`: no memory is registered here."""

    def landing(self, size: int) -> MemoryRegion:
        self._check_open("landing")
        region_id = next_landing_id()
        region = MemfdRegion(region_id, f"landing {region_id}", size, huge_pages=False)
        self._regions[region_id] = region
        return region

    async def aclose(self) -> None:
        self._close("closed by the host")
        for region in self._regions.values():
            region.close()
        await trio.lowlevel.checkpoint()

    async def answer_pushes(self) -> None:
        """The background task: receives pushes into the landing regions until the link ends."""
        service = Service(ops=frozenset({PUSH}), claim=self._claim_landing, stats=self._stats)
        try:
            await respond(self._landing, service)
            self._close("closed by the node")
        except FabricError as error:
            self._broken(str(error))

    async def _request(
        self,
        op: int,
        pieces: Sequence[Piece],
        sent: Sequence[memoryview],
        received: Sequence[memoryview],
        deadline: float,
    ) -> None:
        self._check_open("request")
        entries = [(piece.region_id, piece.offset, len(piece.local), piece.lease) for piece in pieces]
        await self._requester.request(op, entries, sent, received, deadline)

    @contextmanager
    def _claim_landing(self, op: str, entries: Sequence[Entry]) -> Iterator[list[memoryview]]:
        views = []
        for index, (region_id, offset, length, _) in enumerate(entries):
            region = self._regions.get(region_id)
            if region is None or region.is_closed or not within(offset, length, region.size):
                raise Refused(index, f"no landing at region {region_id} [{offset}, +{length})")
            views.append(region.view[offset : offset + length])
        yield views

    def _check_open(self, stage: str) -> None:
        if self._closed is not None:
            raise FabricError(self._requests.peer, stage, "closed", 0, self._closed)

    def _broken(self, reason: str) -> None:
        if self._closed is None:
            self._stats.errors += 1
            self._close(reason)

    def _close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._stats.links = 0
        self._requests.close()
        self._landing.close()


async def connect(address: Address, session: int, token: bytes, deadline: float) -> TcpEndpoint:
    """Open both connections of a link. Raises NodeUnavailable, RemoteProtocolError."""
    where = f"tcp://{address['host']}:{address['port']}"
    with trio.CancelScope(deadline=deadline):
        requests = await _open(address, where, REQUESTS, session, token)
        try:
            landing = await _open(address, where, LANDING, session, token)
        except BaseException:
            requests.close()
            raise
        endpoint = TcpEndpoint(requests, landing)
        trio.lowlevel.spawn_system_task(endpoint.answer_pushes)
        return endpoint
    raise NodeUnavailable(where, "no answer before the deadline")


async def _open(address: Address, where: str, role: int, session: int, token: bytes) -> Wire:
    wire = await _dial(address, where)
    try:
        await wire.send(Cursor([memoryview(encode_hello(MAGIC, role, session, token))]))
        magic, status = HELLO_REPLY.unpack(await wire.receive_bytes(HELLO_REPLY.size))
        check_welcome(where, magic == MAGIC, status)
    except FabricError as error:
        wire.close()
        raise NodeUnavailable(where, str(error)) from error
    except BaseException:
        wire.close()
        raise
    return wire


async def _dial(address: Address, where: str) -> Wire:
    host, port = str(address["host"]), int(address["port"])
    try:
        family, kind, proto, _, to = (await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        sock = trio.socket.socket(family, kind, proto)
        with sock:
            tune(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await sock.connect(to)
            return Wire(socket.socket(fileno=sock.detach()), where)
    except OSError as error:
        raise NodeUnavailable(where, str(error)) from error
