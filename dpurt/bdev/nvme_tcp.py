"""NVMe/TCP: the namespaces of any NVMe/TCP target as bdevs, from user space, without a kernel module.

Theory of operation. One connection per queue pair, one task that reads and one that writes it. Bytes go
straight from the socket into the caller's buffers: non-blocking scatter receives, with a wait only where
there is nothing to read. A command for an idle queue pair leaves at once (a turn of the loop less: 5.0 turns
a read became 4.0, SPDK, 1 MiB, depth 1), the others of one turn in one send. As we do the copy,
a closed socket touches no buffer any more: an association that is dropped frees them at once.

What the bytes mean is `dpurt.wire.nvme_tcp`; paths, retries and deadlines are `dpurt.bdev.nvme`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from dpurt.bdev import DeviceMemory
from dpurt.bdev.nvme import NvmeBdev, Pacing
from dpurt.bdev.nvme_association import QueueShape
from dpurt.bdev.nvme_opening import Address, find_subsystem, make_login
from dpurt.errors import RemoteProtocolError
from dpurt.wire.nvme_queue import Command, Completion
from dpurt.wire.nvme_tcp import ADMIN_IN_CAPSULE_BYTES, FES_OF_CODE, TcpQueue, term_request

__all__ = ["NvmeTcpBdev", "TcpAddress"]

TcpAddress = Address

_BYTES_PER_TURN = 8 << 20  # received or sent before the other tasks get their turn
_TURNS_BEFORE_WAIT = 5  # in the middle of data: its rest often comes sooner than epoll could be asked


class _Connection:
    """A `Connection` over one socket."""

    def __init__(
        self,
        sock: socket.socket,
        core: TcpQueue,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> None:
        self.greeted = trio.Event()
        self._sock = sock
        self._core = core
        self._deliver = deliver
        self._lost = lost
        self._is_open = True
        self._has_output = trio.Event()
        self._has_output.set()

    @property
    def room(self) -> int:
        return self._core.pair.room if self._is_open else 0

    def commands(self) -> Iterable[Command]:
        return self._core.pair.commands()

    def submit(self, command: Command) -> None:
        is_idle = not self._has_output.is_set() and not self._core.pair
        self._core.submit(command)
        if not is_idle or not self._send_at_once():
            self._has_output.set()

    def _send_at_once(self) -> bool:
        """Without the turn of the loop until the writer has its. False: it did not go out whole; the writer sees to it."""
        try:
            count = self._sock.sendmsg(self._core.unsent())
        except OSError:
            return False
        ended = self._core.sent(count)
        assert not ended, "a command just sent has no answer yet"
        return not self._core.has_output

    def close(self) -> list[Command]:
        if self._is_open:
            self._is_open = False
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
        return self._core.pair.take_all()

    async def read(self) -> None:
        """Serve what comes in, until closed."""
        await self._serve(self._read)

    async def write(self) -> None:
        """Send what there is to send, until closed."""
        await self._serve(self._write)

    async def _serve(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except RemoteProtocolError as error:
            self._say_why(error.code)
            self._lost(str(error))
        except OSError as error:
            if self._is_open:
                self._lost(f"connection lost: {error}")
        except trio.ClosedResourceError:
            await trio.lowlevel.checkpoint()

    async def _read(self) -> None:
        budget = _BYTES_PER_TURN
        turns = _TURNS_BEFORE_WAIT
        is_idle = False
        while self._is_open:
            windows = self._core.windows()
            if is_idle:  # nothing can be there: whom the last answer woke has the next command out the sooner
                await trio.lowlevel.wait_readable(self._sock)
                budget = _BYTES_PER_TURN
            try:
                count = _receive(self._sock, windows)
            except BlockingIOError:
                if turns and self._core.is_in_data:
                    turns -= 1
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self._sock)
                budget = _BYTES_PER_TURN
                continue
            turns = _TURNS_BEFORE_WAIT
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "closed by the target")
            self._hand_out(self._core.received(count))
            if not self.greeted.is_set() and self._core.is_ready:
                self.greeted.set()
            budget -= count
            is_idle = not self._core.pair
            if budget < 0:
                await trio.lowlevel.checkpoint()
                budget = _BYTES_PER_TURN

    def _hand_out(self, completions: list[Completion]) -> None:
        for completion in completions:
            self._deliver(completion)
        if not self._has_output.is_set() and self._core.has_output:
            self._has_output.set()

    async def _write(self) -> None:
        budget = _BYTES_PER_TURN
        while self._is_open:
            buffers = self._core.unsent()
            if not buffers:
                self._has_output = trio.Event()
                await self._has_output.wait()
                budget = _BYTES_PER_TURN
                continue
            try:
                count = self._sock.sendmsg(buffers)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)
                continue
            self._hand_out(self._core.sent(count))
            budget -= count
            if budget < 0:
                await trio.lowlevel.checkpoint()
                budget = _BYTES_PER_TURN

    def _say_why(self, code: str) -> None:
        """Tell the peer what it did wrong, if that can be said at once and between PDUs."""
        if code in FES_OF_CODE and self._is_open and not self._core.has_output:
            try:
                self._sock.send(term_request(code))
            except OSError:
                return  # it will see the close


def _receive(sock: socket.socket, windows: list[memoryview]) -> int:
    if len(windows) == 1:
        return sock.recv_into(windows[0])
    return sock.recvmsg_into(windows)[0]


class _TcpTransport:
    """A `Transport`."""

    kind = "nvme-tcp"

    def __init__(self, header_digest: bool, data_digest: bool) -> None:
        self._header_digest = header_digest
        self._data_digest = data_digest

    def runs(self, pieces: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        return [(sum(length for _, length in pieces), most)]

    async def add_memory(self, memory: DeviceMemory) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Nothing is kept."""

    async def connect(
        self,
        nursery: trio.Nursery,
        address: TcpAddress,
        shape: QueueShape,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> _Connection:
        sock = await _connect(address)
        core = TcpQueue(
            shape.size,
            in_capsule_bytes=shape.in_capsule_bytes if shape.queue_id else ADMIN_IN_CAPSULE_BYTES,
            header_digest=self._header_digest,
            data_digest=self._data_digest,
        )
        connection = _Connection(sock, core, deliver, lost)
        nursery.start_soon(connection.read)
        nursery.start_soon(connection.write)
        try:
            await connection.greeted.wait()
        except trio.Cancelled:
            connection.close()
            raise
        return connection


async def _connect(address: TcpAddress) -> socket.socket:
    """A connected non-blocking socket, to the first of the host's addresses that answers. Raises OSError."""
    try:
        found = await trio.socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{address[0]!r} is no host name") from error
    problem: OSError | None = None
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        try:
            await _connect_socket(sock, target)
            return sock
        except OSError as error:
            problem = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    assert problem is not None, "getaddrinfo finds something or raises"
    raise problem


async def _connect_socket(sock: socket.socket, target: object) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    code = sock.connect_ex(target)  # type: ignore[arg-type]
    if code == errno.EINPROGRESS:
        await trio.lowlevel.wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


class NvmeTcpBdev(NvmeBdev[TcpAddress]):
    """See `Bdev`. Make one with `await NvmeTcpBdev.open(...)`."""

    @classmethod
    async def open(
        cls,
        addresses: Sequence[TcpAddress],
        subnqn: str,
        *,
        nsid: int | None = None,
        name: str | None = None,
        hostnqn: str | None = None,
        header_digest: bool = False,
        data_digest: bool = False,
        num_queues: int = 1,
        queue_size: int = 128,
        keep_alive_s: float = 15.0,
        discovery: bool = False,
        sq_flow_control: bool = False,
        pacing: Pacing | None = None,
    ) -> NvmeTcpBdev:
        """Connect to a namespace of the subsystem, by all of the addresses (host, port). Returns when the first
        is up. With `discovery` they are those of discovery controllers, which are asked for the subsystem's.
        `nsid` may be left out if there is only one. `keep_alive_s` 0: none. Raises BdevError (status
        "unavailable" or "gone") or ConfigError.
        """
        login = make_login(addresses, subnqn, hostnqn, num_queues, queue_size, keep_alive_s, sq_flow_control)
        targets = [(host, port) for host, port in addresses]
        pace = pacing or Pacing()
        transport = _TcpTransport(header_digest, data_digest)
        if discovery:
            targets = await find_subsystem(targets, transport, login, pace, name or subnqn)
        bdev = cls(targets, transport, login, nsid=nsid, name=name, pacing=pace)
        await bdev._start()
        return bdev
