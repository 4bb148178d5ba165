"""One session with a vhost-user-blk back end: connection, handshake, memory, rings; it ends once and for all.

Theory of operation. A session has its own memory (rings, and the bounce area behind them), fresh and zeroed, so that
nothing an earlier back end may still write to is used again. `open` connects and shakes hands; `serve` then watches
the connection, reads what the back end asks, and wakes on the call descriptor (one for all rings). It returns when the
session is lost, for the reason in `lost_because`. Memory is added while it runs: by ADD_MEM_REG where the back end has
memory slots, else by a new SET_MEM_TABLE, for which the caller must have let the rings run dry (see `replace_table`).

After that, *may the back end still touch our memory?* It may: a lost connection says nothing about requests it has
taken, and neither does a stopped ring (qemu answers GET_VRING_BASE, and closes, with requests still in flight in its
block layer). What proves that it is done is
- the request's entry in the used ring, which a living back end may still write after the connection is gone; or
- the death of its process: the kernel has then undone all of its mappings. `has_died` waits for that on a pidfd
  from SO_PEERPIDFD (else SO_PEERCRED) taken while it was alive, so a reused process id cannot deceive us. That is the
  process that listens, which with every known back end is the one that maps; one in another pid namespace cannot be
  seen, and there only the used ring counts.
The used ring of a back end that broke the protocol proves nothing any more: then only its death does.

Leaves to others: operations (`dpurt.bdev.vhost_user`), the protocol (`dpurt.wire.vhost_user`).
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import trio

from dpurt.bdev import DeviceMemory
from dpurt.bdev.vhost_memory import BOUNCE_CHUNK_BYTES, BouncePool, MemoryMap, OwnMemory
from dpurt.bdev.vhost_ring import BlkRing
from dpurt.errors import RemoteProtocolError
from dpurt.wire import vhost_user as wire
from dpurt.wire.vhost_user import BackEndChannel, FrontEndChannel, MemoryRegion, ProtocolFeature, Request
from dpurt.wire.virtio_blk import CONFIG_BYTES, BlkConfig, BlkFeature
from dpurt.wire.virtqueue import QueueLayout

__all__ = ["Session", "SessionWishes"]

_Token = TypeVar("_Token")
_SO_PEERPIDFD = 77
_UCRED = struct.Struct("iii")
_PAGE = 4096
_RECV_BYTES = 4096
_MAX_QUEUES = 64
_MANDATORY = BlkFeature.VERSION_1 | BlkFeature.PROTOCOL_FEATURES
_WANTED = (
    _MANDATORY | BlkFeature.SIZE_MAX | BlkFeature.SEG_MAX | BlkFeature.BLK_SIZE | BlkFeature.FLUSH | BlkFeature.MQ
    | BlkFeature.DISCARD | BlkFeature.WRITE_ZEROES | BlkFeature.INDIRECT | BlkFeature.EVENT_IDX
)  # fmt: skip
_PROTOCOL_WANTED = (
    ProtocolFeature.MQ | ProtocolFeature.REPLY_ACK | ProtocolFeature.BACKEND_REQ | ProtocolFeature.CONFIG
    | ProtocolFeature.CONFIGURE_MEM_SLOTS
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SessionWishes:
    """What the opener wants of a session."""

    path: Path
    num_queues: int
    queue_size: int
    max_segments: int
    bounce_bytes: int
    answer_s: float  # the longest a control request may take
    fence: Callable[[], None]


class Session(Generic[_Token]):
    """Make one with `open`. `rings`, `memory` and `bounce` are for the caller to use while it lives."""

    features: BlkFeature
    config: BlkConfig
    rings: Sequence[BlkRing[_Token]]
    bounce: BouncePool
    max_segments: int

    def __init__(self, sock: trio.socket.SocketType, wishes: SessionWishes) -> None:
        self.memory = MemoryMap()
        self.lost_because: Exception | None = None
        self._wishes = wishes
        self._sock = sock
        self._channel = FrontEndChannel()
        self._asking = trio.Lock()
        self._news = trio.Event()
        self._is_served = False
        self._backend_sock: trio.socket.SocketType | None = None
        self._regions: list[DeviceMemory] = []
        self._max_slots = 0  # memory slots for ADD_MEM_REG, 0 if it is not offered
        self._call_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._own: OwnMemory | None = None
        self._life = trio.CancelScope()
        self._pid_fd = _peer_process(sock)
        self.rings = ()

    @classmethod
    async def open(cls, wishes: SessionWishes, memories: Sequence[DeviceMemory]) -> Session[_Token]:
        """Connect, shake hands, start the rings. Raises OSError, RemoteProtocolError, trio.TooSlowError."""
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with trio.fail_after(wishes.answer_s):
                await sock.connect(os.fspath(wishes.path))
        except BaseException:
            sock.close()
            raise
        session = cls(sock, wishes)
        try:
            with trio.fail_after(wishes.answer_s):
                await session._shake_hands(memories)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def is_trusted(self) -> bool:
        """What it writes into the used rings may be believed."""
        return not isinstance(self.lost_because, RemoteProtocolError)

    @property
    def num_held(self) -> int:
        """Requests the back end has."""
        return sum(ring.num_held for ring in self.rings)

    @property
    def can_add_memory(self) -> bool:
        """Without stopping the rings."""
        return len(self._regions) < self._max_slots

    @property
    def can_replace_table(self) -> bool:
        """There is room for one more region in the table."""
        return len(self._regions) < wire.MAX_TABLE_REGIONS

    def tokens(self) -> list[_Token]:
        """Of every request without an answer."""
        return [token for ring in self.rings for token in ring.tokens()]

    # --- life ---

    async def serve(self, reap: Callable[[], None], take_config: Callable[[BlkConfig], None]) -> None:
        """Until the session is lost. `reap` is called when there may be answers; it may raise
        RemoteProtocolError.
        """
        self._is_served = True
        with self._life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guard, self._read_replies)
                nursery.start_soon(self._guard, self._watch_call, reap)
                if self._backend_sock is not None:
                    nursery.start_soon(self._guard, self._read_requests, take_config)
                for ring in self.rings:
                    ring.kick()  # a polling back end (SPDK) wants one to start a ring

    def lose(self, reason: Exception) -> None:
        """End the session, once. A broken protocol counts even after that."""
        if self.lost_because is not None:
            if isinstance(reason, RemoteProtocolError):
                self.lost_because = reason
        else:
            self.lost_because = reason
            self._life.cancel()
            self._news.set()
            self._close_sockets()

    async def has_died(self, within_s: float) -> bool:
        """Wait for the death of the back end's process."""
        with trio.move_on_after(within_s):
            if self._pid_fd is None:
                await trio.sleep_forever()
            else:
                await trio.lowlevel.wait_readable(self._pid_fd)
                return True
        return False

    def close(self) -> None:
        """Let go of everything. The back end must be done with our memory, or the memory must not be used again."""
        self._close_sockets()
        for ring in self.rings:
            ring.close()
        if self._own is not None:
            self._own.close()
        os.close(self._call_fd)
        if self._pid_fd is not None:
            os.close(self._pid_fd)

    def _close_sockets(self) -> None:
        self._sock.close()
        if self._backend_sock is not None:
            self._backend_sock.close()

    # --- memory ---

    async def add_memory(self, memory: DeviceMemory) -> None:
        """With `can_add_memory`. Raises OSError, RemoteProtocolError, as do all that ask."""
        await self._ask(Request.ADD_MEM_REG, wire.pack_region(_region(memory)), [memory.fd])
        self._know(memory)

    async def replace_table(self, memory: DeviceMemory) -> None:
        """With `can_replace_table` and nothing held by the back end.

        SET_MEM_TABLE makes the back end unmap what it has, so it must neither use a ring nor a buffer meanwhile:
        nothing is in flight, every ring is stopped first (GET_VRING_BASE is answered), and started from zero
        afterwards.
        """
        assert not self.num_held, "the caller waited for the rings to run dry"
        for index in range(len(self.rings)):
            payload = await self._ask(Request.GET_VRING_BASE, wire.pack_vring_state(index, 0))
            wire.parse_vring_state(payload, index)
        await self._give_table([*self._regions, memory])
        self._make_rings()
        await self._start_rings()

    def _know(self, memory: DeviceMemory) -> None:
        self._regions.append(memory)
        self.memory.add(memory)

    # --- handshake ---

    async def _shake_hands(self, memories: Sequence[DeviceMemory]) -> None:
        await self._ask(Request.SET_OWNER)
        offered = BlkFeature(await self._ask_u64(Request.GET_FEATURES))
        _refuse_unfit(offered)
        self.features = offered & _WANTED
        protocol = await self._negotiate_protocol()
        num_queues = await self._count_queues(protocol)
        await self._open_backend_channel(protocol)
        await self._ask(Request.SET_FEATURES, wire.pack_u64(self.features))
        self.config = await self._get_config()
        if ProtocolFeature.CONFIGURE_MEM_SLOTS in protocol:
            self._max_slots = await self._ask_u64(Request.GET_MAX_MEM_SLOTS)
        self._take_memory(num_queues)
        await self._give_memory(memories)
        await self._start_rings()

    async def _negotiate_protocol(self) -> ProtocolFeature:
        offered = ProtocolFeature(await self._ask_u64(Request.GET_PROTOCOL_FEATURES))
        if ProtocolFeature.CONFIG not in offered:
            raise RemoteProtocolError("features", "the back end gives no configuration (CONFIG)")
        chosen = offered & _PROTOCOL_WANTED
        await self._ask(Request.SET_PROTOCOL_FEATURES, wire.pack_u64(chosen))
        self._channel.acknowledges = ProtocolFeature.REPLY_ACK in chosen
        return chosen

    async def _count_queues(self, protocol: ProtocolFeature) -> int:
        if ProtocolFeature.MQ not in protocol:
            return 1
        offered = await self._ask_u64(Request.GET_QUEUE_NUM)
        return max(1, min(self._wishes.num_queues, offered, _MAX_QUEUES))

    async def _open_backend_channel(self, protocol: ProtocolFeature) -> None:
        if ProtocolFeature.BACKEND_REQ not in protocol:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._backend_sock = trio.socket.from_stdlib_socket(ours)
        with theirs:
            await self._ask(Request.SET_BACKEND_REQ_FD, b"", [theirs.fileno()])

    async def _get_config(self) -> BlkConfig:
        payload = await self._ask(Request.GET_CONFIG, wire.pack_config(CONFIG_BYTES))
        return BlkConfig.parse(wire.parse_config(payload, CONFIG_BYTES), self.features)

    def _take_memory(self, num_queues: int) -> None:
        """Room for the rings, then the bounce area."""
        wishes, limit = self._wishes, self.config.max_segments
        is_indirect = BlkFeature.INDIRECT in self.features
        most = wishes.max_segments if is_indirect else min(wishes.max_segments, wishes.queue_size - 2)
        self.max_segments = max(1, min(most, limit or most))
        self._layout = BlkRing.layout_for(wishes.queue_size, self.max_segments, is_indirect=is_indirect)
        self._ring_bytes = BlkRing.bytes_needed(self._layout)
        self._num_queues = num_queues
        start = -(-self._ring_bytes * num_queues // _PAGE) * _PAGE
        self._own = OwnMemory("vhost", start + wishes.bounce_bytes)
        chunk = min(BOUNCE_CHUNK_BYTES, self.config.max_segment_bytes or BOUNCE_CHUNK_BYTES)
        self.bounce = BouncePool(self._own.address + start, wishes.bounce_bytes, chunk)
        self._make_rings()

    def _make_rings(self) -> None:
        own = self._own
        assert own is not None, "memory was taken"
        for ring in self.rings:
            ring.close()
        own.view[: self._ring_bytes * self._num_queues] = bytes(self._ring_bytes * self._num_queues)
        self.rings = [
            BlkRing(
                own.view[i * self._ring_bytes : (i + 1) * self._ring_bytes],
                own.address + i * self._ring_bytes,
                self._layout,
                fence=self._wishes.fence,
                has_event_idx=BlkFeature.EVENT_IDX in self.features,
            )
            for i in range(self._num_queues)
        ]

    async def _give_memory(self, memories: Sequence[DeviceMemory]) -> None:
        """Our own and what is in the table's reach at once, the rest one by one where that is possible. What does
        not fit is reached by copies.
        """
        assert self._own is not None, "memory was taken"
        first = [self._own.as_device_memory, *memories][: wire.MAX_TABLE_REGIONS]
        if self._max_slots:
            first = first[: self._max_slots]
        await self._give_table(first)
        for memory in memories[len(first) - 1 :]:
            if self.can_add_memory:
                await self.add_memory(memory)

    async def _give_table(self, memories: Sequence[DeviceMemory]) -> None:
        table = wire.pack_table([_region(memory) for memory in memories])
        await self._ask(Request.SET_MEM_TABLE, table, [memory.fd for memory in memories])
        for memory in memories[len(self._regions) :]:
            self._know(memory)

    async def _start_rings(self) -> None:
        for index, ring in enumerate(self.rings):
            layout: QueueLayout = ring.layout
            at = ring.address
            await self._ask(Request.SET_VRING_NUM, wire.pack_vring_state(index, layout.size))
            await self._ask(Request.SET_VRING_BASE, wire.pack_vring_state(index, 0))
            places = wire.pack_vring_address(index, at, at + layout.avail, at + layout.used)
            await self._ask(Request.SET_VRING_ADDR, places)
            await self._ask(Request.SET_VRING_CALL, wire.pack_u64(index), [self._call_fd])
            await self._ask(Request.SET_VRING_KICK, wire.pack_u64(index), [ring.kick_fd])
            await self._ask(Request.SET_VRING_ENABLE, wire.pack_vring_state(index, 1))

    # --- asking ---

    async def _ask_u64(self, kind: Request) -> int:
        return wire.parse_u64(await self._ask(kind))

    async def _ask(self, kind: Request, payload: bytes = b"", fds: Sequence[int] = ()) -> bytes:
        """One request and its answer. Given up half-way (deadline, cancellation), the session is lost: the
        answer could not be told from the next one's.
        """
        async with self._asking:
            self._check_alive()
            try:
                with trio.fail_after(self._wishes.answer_s):
                    data = self._channel.request(kind, payload)
                    has_answer = self._channel.is_waiting
                    await self._send(data, fds)
                    return await self._answer() if has_answer else b""
            except BaseException as error:
                self.lose(error if isinstance(error, Exception) else OSError(f"{kind.name} was given up"))
                raise

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = await self._sock.sendmsg([data], rights)
        while sent < len(data):
            sent += await self._sock.send(data[sent:])

    async def _answer(self) -> bytes:
        while self._channel.is_waiting:
            if self._is_served:
                self._news = trio.Event()
                await self._news.wait()
                self._check_alive()
            else:
                await self._receive()
        return self._channel.take_reply()

    async def _receive(self) -> None:
        data = await self._sock.recv(_RECV_BYTES)
        if not data:
            raise ConnectionResetError("the back end closed the connection")
        self._channel.receive(data)
        self._news.set()

    def _check_alive(self) -> None:
        if self.lost_because is not None:
            raise ConnectionResetError(f"the session is over: {self.lost_because}")

    # --- tasks of a served session ---

    async def _guard(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await work(*args)
        except (OSError, RemoteProtocolError, trio.ClosedResourceError, trio.TooSlowError) as error:
            self.lose(error)

    async def _read_replies(self) -> None:
        while True:
            await self._receive()

    async def _read_requests(self, take_config: Callable[[BlkConfig], None]) -> None:
        """The back end may close this connection and go on."""
        assert self._backend_sock is not None, "started only where there is one"
        channel = BackEndChannel()
        while data := await self._backend_sock.recv(_RECV_BYTES):
            asked, answers = channel.receive(data)
            if answers:
                await self._backend_sock.send(answers)
            if asked:  # CONFIG_CHANGE is all there is
                take_config(await self._get_config())

    async def _watch_call(self, reap: Callable[[], None]) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._call_fd)
            try:
                os.eventfd_read(self._call_fd)
            except BlockingIOError:
                continue
            reap()


def _region(memory: DeviceMemory) -> MemoryRegion:
    return MemoryRegion(memory.address, memory.length)


def _refuse_unfit(offered: BlkFeature) -> None:
    if BlkFeature.READ_ONLY in offered:
        raise RemoteProtocolError("read_only", "the device is read-only: have it exported writable")
    if missing := _MANDATORY & ~offered:
        raise RemoteProtocolError("features", f"the back end does not offer {missing!r}")


def _peer_process(sock: trio.socket.SocketType) -> int | None:
    """A pidfd of the process at the other end, or None where it is not to be had or already dead."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
        try:
            fd = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            return None
    if fd < 0:
        return None
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os.close(fd)
        return None
    return fd
