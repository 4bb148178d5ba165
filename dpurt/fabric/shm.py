"""The shm fabric: a host on the same machine maps the arena; nothing is copied unless the host asks for it.

A link is one Unix `SOCK_SEQPACKET` connection (message boundaries, and descriptors ride along), in a
directory only the node's user can enter. Little-endian messages:

    host -> node  hello    "DPS1", 0 u16, token length u16, session u64, token
    node -> host  reply    "DPS1", status u32, count u32
                  region   region id u64, size u64, writable u32          + its descriptor; `count` such messages
    host -> node  landing  "LAND", 0 u32, landing id u64, size u64        + its descriptor, sealed against shrinking

Theory of operation. The host gets read-only descriptors of the regions its session may read and a writable
one of its own inbound region. From then on it reads and writes by itself, so **leases are not checked per
access here**: the node cannot. A lease used over shm must be held until it is released or the link ends. End
of file on the socket is the proof: the host's process is gone, or its endpoint has unmapped everything
(`aclose` keeps the socket open while a view is alive). Only then is `on_link_closed` called. A node that cuts
a host off shuts its own direction down: the endpoint sees that, lets go, and the end of file follows;
`is_open` is False at once.

A push is a memcpy into the host's landing memfd, which the node maps after checking that the host can not
shrink it.

Trust: within one user id, read-only is a guard against bugs, not against malice (the owner of a memfd may
reopen it); a session maps only regions of its own trust domain, so a dishonest host can harm that domain and
its own link."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import trio

from dpurt.errors import (
    FabricError,
    NodeUnavailable,
    RemoteAccessError,
    RemoteProtocolError,
)
from dpurt.fabric import AccessCheck, Address, FabricStats, MemoryRegion, Piece
from dpurt.fabric.access import within
from dpurt.fabric.copying import Copier
from dpurt.fabric.frames import (
    BUSY,
    DENIED,
    HELLO,
    MALFORMED,
    WELCOME,
    check_welcome,
    decode_hello,
    encode_hello,
)
from dpurt.fabric.node_link import FabricBase, Greetings
from dpurt.fabric.region import MemfdRegion, map_readonly, map_writable, next_landing_id
from dpurt.fabric.seqpacket import Channel, dial, listening
from dpurt.fabric.wire import accept

__all__ = ["ShmEndpoint", "ShmFabric", "ShmLimits", "ShmLink", "connect"]

MAGIC = b"DPS1"
REPLY = struct.Struct("<4sII")  # magic, status, count
REGION = struct.Struct("<QQI")  # id, size, writable
LANDING = struct.Struct("<4sIQQ")  # magic, 0, id, size
LANDING_MAGIC = b"LAND"

_DISCARD_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ShmLimits:
    """What hosts may cost the node."""

    max_links: int = 256
    max_greeting: int = 64
    hello_s: float = 5.0
    max_landings: int = 64
    max_landing_bytes: int = 1 << 40


class ShmLink:
    """The node's end. It stays in the fabric's table after `close` until the host's end of file proves it
    gone."""

    def __init__(self, session: int, channel: Channel, stats: FabricStats, limits: ShmLimits) -> None:
        self.session = session
        self.close_reason: str | None = None
        self._channel = channel
        self._stats = stats
        self._limits = limits
        self._landings: dict[int, memoryview] = {}
        self._landing_bytes = 0
        self._copier = Copier()
        self._changed = trio.Event()

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        is_done = False
        with trio.CancelScope(deadline=deadline):
            pairs = [(piece[0], await self._landing(*piece)) for piece in pieces]
            is_done = await self._copier.copy(pairs, deadline)
        if not is_done:
            raise FabricError(self._peer, "push", "timed_out")
        self._check_open()
        self._stats.count("push", sum(len(source) for source, _, _ in pieces))

    def close(self, reason: str = "closed by the node") -> None:
        if self.close_reason is None:
            self.close_reason = reason
            self._wake_pushes()
            try:
                self._channel.sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the host was faster; its end of file is there to be read

    async def serve(self, regions: Sequence[tuple[MemoryRegion, bool]]) -> None:
        """Hand out the regions, take landings; return at the host's end of file and not before."""
        try:
            await self._welcome(regions)
            await self._take_landings()
        except (RemoteProtocolError, OSError) as error:
            self._stats.errors += 1
            self.close(str(error))
        await self._wait_for_end()

    async def _welcome(self, regions: Sequence[tuple[MemoryRegion, bool]]) -> None:
        with trio.CancelScope(deadline=trio.current_time() + self._limits.hello_s) as scope:
            await self._channel.send(REPLY.pack(MAGIC, WELCOME, len(regions)))
            for region, writable in regions:
                with _descriptor(region, writable) as fd:
                    await self._channel.send(REGION.pack(region.region_id, region.size, writable), fd)
        if scope.cancelled_caught:
            raise RemoteProtocolError("timed_out", "the host did not take its regions in time")

    async def _take_landings(self) -> None:
        while self.is_open:
            message, fd = await self._channel.receive()
            if not message:
                self.close("closed by the host")
                return
            try:
                self._take_landing(message, fd)
            finally:
                if fd >= 0:
                    os.close(fd)

    def _take_landing(self, message: bytes, fd: int) -> None:
        if len(message) != LANDING.size or fd < 0:
            raise RemoteProtocolError("malformed", f"a message of {len(message)} bytes is no landing")
        magic, _, region_id, size = LANDING.unpack(message)
        if magic != LANDING_MAGIC or region_id in self._landings:
            raise RemoteProtocolError("malformed", f"landing {region_id} is malformed or there already")
        total = size + self._landing_bytes
        if len(self._landings) >= self._limits.max_landings or total > self._limits.max_landing_bytes:
            raise RemoteProtocolError("limit", f"landing {region_id} of {size} bytes is over the limit")
        _check_landing(fd, size)
        self._landings[region_id] = memoryview(map_writable(fd, size))
        self._landing_bytes += size
        self._wake_pushes()

    async def _wait_for_end(self) -> None:
        """Read and drop, slowly: a host that goes on talking must not cost much."""
        while True:
            message, fd = await self._channel.receive()
            if fd >= 0:
                os.close(fd)
            if not message:
                return
            await trio.sleep(_DISCARD_PAUSE_S)

    async def _landing(self, source: memoryview, region_id: int, offset: int) -> memoryview:
        """The bytes of a landing. It may still be on its way: control messages can overtake it."""
        self._check_open()
        while region_id not in self._landings:
            await self._changed.wait()
            self._check_open()
        landing = self._landings[region_id]
        if not within(offset, len(source), len(landing)):
            raise RemoteAccessError(self._peer, "push", f"landing {region_id} [{offset}, +{len(source)})")
        return landing[offset : offset + len(source)]

    def _wake_pushes(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise FabricError(self._peer, "push", "closed", 0, self.close_reason)

    @property
    def _peer(self) -> str:
        return f"session {self.session}"


def _check_landing(fd: int, size: int) -> None:
    """A host that could shrink it, or whose huge pages could run out, could kill us with a SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError("malformed", "a landing must be a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RemoteProtocolError("malformed", "a landing must be sealed against shrinking")
    if os.fstatvfs(fd).f_bsize > mmap.PAGESIZE:
        raise RemoteProtocolError("malformed", "a landing must not be of huge pages")
    if not 0 < size <= os.fstat(fd).st_size:
        raise RemoteProtocolError("malformed", f"a landing of {size} bytes is larger than its memfd")


@contextmanager
def _descriptor(region: MemoryRegion, writable: bool) -> Iterator[int]:
    if writable:
        yield region.fd
        return
    fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class ShmFabric(FabricBase[ShmLink]):
    """The node side. `path`: of the socket, in a directory of ours that nobody else may enter. Regions need
    an fd."""

    kind = "shm"
    lands_stores = False

    def __init__(self, access: AccessCheck, path: Path, *, limits: ShmLimits | None = None) -> None:
        self._limits = limits or ShmLimits()
        super().__init__(access, self._limits.max_links)
        self._path = path
        self._greetings = Greetings(self._limits.max_greeting, self._limits.hello_s)

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        if region.fd < 0:
            raise ValueError(f"region {region.name} has no descriptor, so no host can map it")
        super().add_region(region, readers, writer)

    async def serve(
        self,
        on_link_closed: Callable[[int], None],
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self._on_link_closed = on_link_closed
        with listening(self._path) as listener:
            async with trio.open_nursery() as nursery:
                task_status.started({"path": str(self._path)})
                while True:
                    nursery.start_soon(self._serve_connection, await accept(listener))
                    await trio.lowlevel.checkpoint()  # a flood of connections must not starve the loop

    async def _serve_connection(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            link = await self._greet(channel)
            if link is not None:
                await self._serve_link(link)
        finally:
            channel.close()

    async def _serve_link(self, link: ShmLink) -> None:
        saw_end = False
        try:
            await link.serve(self._table.mappable(link.session))
            saw_end = True
        finally:
            link.close("the node stopped serving")
            self._gone(link, report=saw_end)  # without an end of file the host may still map our memory

    async def _greet(self, channel: Channel) -> ShmLink | None:
        status = MALFORMED
        try:
            with self._greetings.one():
                message, fd = await channel.receive()
                if fd >= 0:
                    os.close(fd)
                session, token = _decode_hello(message)
                status = self._judge(session, token)
        except (RemoteProtocolError, OSError):
            status = MALFORMED
        if status == WELCOME:
            link = ShmLink(session, channel, self._stats, self._limits)
            self._opened(link)
            return link
        self._turn_away(channel, status)
        return None

    def _judge(self, session: int, token: bytes) -> int:
        if not self._table.authenticate(session, token):
            return DENIED
        return WELCOME if self._has_room(session) else BUSY

    def _turn_away(self, channel: Channel, status: int) -> None:
        if status == MALFORMED:
            self._stats.errors += 1
        else:
            self._stats.refused += 1
        try:
            channel.send_now(REPLY.pack(MAGIC, status, 0))
        except OSError:
            return  # it did not wait for the answer


def _decode_hello(message: bytes) -> tuple[int, bytes]:
    if len(message) < HELLO.size:
        raise RemoteProtocolError("malformed", f"a hello of {len(message)} bytes")
    _, token_bytes, session = decode_hello(MAGIC, message[: HELLO.size])
    token = message[HELLO.size :]
    if len(token) != token_bytes:
        raise RemoteProtocolError("malformed", "a hello's token has another length than it says")
    return session, token


# --- the host --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Mapping:
    memory: mmap.mmap
    view: memoryview
    writable: bool

    def unmap(self) -> bool:
        """False: somebody holds a view, and the memory goes with the last one."""
        try:
            self.view.release()
            self.memory.close()
        except BufferError:
            return False
        return True


class ShmEndpoint:
    """The host's end: maps what it was handed; pulls and stores are memcpy."""

    kind = "shm"

    def __init__(self, channel: Channel, where: str, mappings: dict[int, _Mapping]) -> None:
        self._channel = channel
        self._where = where
        self._mappings = mappings
        self._landings: dict[int, MemfdRegion] = {}
        self._stats = FabricStats(links=1)
        self._closed: str | None = None
        self._copier = Copier()
        self._copying = 0

    @property
    def stats(self) -> FabricStats:
        return self._stats

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        self._check_open("pull")
        pairs = [(self._range("pull", piece), piece.local) for piece in pieces]
        await self._copy("pull", pairs, deadline)

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        self._check_open("store")
        pairs = [(piece.local, self._range("store", piece)) for piece in pieces]
        await self._copy("store", pairs, deadline)

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        self._check_open("view")
        mapping = self._mapping("view", region_id, offset, length)
        return mapping.view[offset : offset + length].toreadonly()

    def keep(self, memory: memoryview) -> None:
        """See `Endpoint.keep`: no memory is registered here."""

    def landing(self, size: int) -> MemoryRegion:
        self._check_open("landing")
        region_id = next_landing_id()
        region = MemfdRegion(region_id, f"landing {region_id}", size, huge_pages=False)
        try:
            self._channel.send_now(LANDING.pack(LANDING_MAGIC, 0, region_id, region.size), region.fd)
        except OSError as error:
            region.close()
            raise FabricError(self._where, "landing", "closed", 0, str(error)) from error
        self._landings[region_id] = region
        return region

    async def aclose(self) -> None:
        self._close("closed by the host")
        await trio.lowlevel.checkpoint()

    async def watch(self) -> None:
        """The background task: lets go of the node's memory when the node ends the link."""
        if self._closed is not None:
            return  # closed before this task's first step
        message, fd = await self._channel.receive()
        if fd >= 0:
            os.close(fd)
        self._close("closed by the node" if not message else "the node sent what is no message")

    async def _copy(self, op: str, pairs: Sequence[tuple[memoryview, memoryview]], deadline: float) -> None:
        self._copying += 1
        try:
            is_done = await self._copier.copy(pairs, deadline)
        finally:
            self._copying -= 1
            if self._closed is not None:
                self._let_go()
        if not is_done:
            raise FabricError(self._where, op, "timed_out")
        self._check_open(op)  # cut off meanwhile: the lease may have ended under the copy
        self._stats.count(op, sum([len(source) for source, _ in pairs]))

    def _range(self, op: str, piece: Piece) -> memoryview:
        mapping = self._mapping(op, piece.region_id, piece.offset, len(piece.local))
        if (op == "store") != mapping.writable:
            self._refuse(op, f"region {piece.region_id} is not open to a {op}")
        return mapping.view[piece.offset : piece.offset + len(piece.local)]

    def _mapping(self, op: str, region_id: int, offset: int, length: int) -> _Mapping:
        mapping = self._mappings.get(region_id)
        if mapping is None or not within(offset, length, len(mapping.view)):
            self._refuse(op, f"region {region_id} [{offset}, +{length}) is not mapped here")
        return mapping

    def _refuse(self, op: str, why: str) -> NoReturn:
        self._stats.refused += 1
        raise RemoteAccessError(self._where, op, why)

    def _check_open(self, stage: str) -> None:
        if self._closed is not None:
            raise FabricError(self._where, stage, "closed", 0, self._closed)

    def _close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._stats.links = 0
            for region in self._landings.values():
                region.close()
            self._let_go()

    def _let_go(self) -> None:
        """Unmap, then tell the node by closing the socket; where views are alive, the last one does both."""
        if self._closed is None or self._copying:
            return
        held = [mapping.memory for mapping in self._mappings.values() if not mapping.unmap()]
        self._mappings.clear()
        self._channel.close_after(held)


async def connect(address: Address, session: int, token: bytes, deadline: float) -> ShmEndpoint:
    """Open a link and map its regions. Raises NodeUnavailable, RemoteProtocolError."""
    where = f"shm:{address['path']}"
    with trio.CancelScope(deadline=deadline):
        channel = await dial(str(address["path"]), where)
        try:
            await channel.send(encode_hello(MAGIC, 0, session, token))
            mappings = await _take_regions(channel, where)
        except OSError as error:
            channel.close()
            raise NodeUnavailable(where, str(error)) from error
        except BaseException:
            channel.close()
            raise
        endpoint = ShmEndpoint(channel, where, mappings)
        trio.lowlevel.spawn_system_task(endpoint.watch)
        return endpoint
    raise NodeUnavailable(where, "no answer before the deadline")


async def _take_regions(channel: Channel, where: str) -> dict[int, _Mapping]:
    message, _ = await _expect(channel, where, REPLY.size, with_fd=False)
    magic, status, count = REPLY.unpack(message)
    check_welcome(where, magic == MAGIC, status)
    mappings = {}
    for _ in range(count):
        message, fd = await _expect(channel, where, REGION.size, with_fd=True)
        region_id, size, writable = REGION.unpack(message)
        try:
            memory = await trio.to_thread.run_sync(map_writable if writable else map_readonly, fd, size)
        finally:
            os.close(fd)
        mappings[region_id] = _Mapping(memory, memoryview(memory), bool(writable))
    return mappings


async def _expect(channel: Channel, where: str, size: int, *, with_fd: bool) -> tuple[bytes, int]:
    message, fd = await channel.receive()
    if len(message) == size and (fd >= 0) == with_fd:
        return message, fd
    if fd >= 0:
        os.close(fd)
    if not message:
        raise NodeUnavailable(where, "the node closed the link")
    raise RemoteProtocolError("malformed", f"{where}: {len(message)} bytes where {size} were due")
