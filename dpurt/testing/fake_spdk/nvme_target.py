"""A fake NVMe/TCP target, for fault tests: it behaves as a measured `spdk_tgt` does, or as the Linux kernel's.

It shares no code with `dpurt.wire.nvme*`: one side's misreading of the specification must not be the other's.
What it reproduces of SPDK: read data in one PDU; success in the data PDU's flag, and no response, if SQ flow
control was disabled on the *admin* Connect; one R2T for a whole write; C2HTermReq (FES 5) and close for a
transfer beyond MDTS or too much in-capsule data; 127 queue pairs granted, whatever is asked; SQSIZE over 127
refused; both sockets closed without a word when the keep-alive timer ends, which I/O does not reset; a
command that hangs hangs alone; a removed namespace answers 0/0x0b with DNR. `Style.kernel()` is the other:
several R2Ts, 16 KiB in capsules, no MDTS, success flag by the queue's own Connect.

    async with trio.open_nursery() as nursery:
        target = FakeNvmeTarget({1: Namespace(16 << 20)})
        port = await target.listen(nursery)

Faults are asked for by attributes and methods, and hold until taken back.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import crc32c
import trio

__all__ = ["SUBSYSTEM", "FakeNvmeTarget", "Fault", "Namespace", "Style"]

SUBSYSTEM = "nqn.2016-06.io.spdk:cnode1"
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"

INVALID_FIELD = (0, 0x02, False)
INVALID_NAMESPACE = (0, 0x0B, True)
PAST_END = (0, 0x80, False)
IO_ERROR = (0, 0x06, False)
INACCESSIBLE = (3, 0x02, False)
BAD_CONNECT = (1, 0x82, False)
GOOD = (0, 0, False)

Status = tuple[int, int, bool]


@dataclass
class Style:
    """What differs between targets."""

    max_io_bytes: int | None = 131072
    in_capsule_bytes: int = 4096
    c2h_bytes: int | None = None  # of one data PDU; None: all
    r2t_bytes: int | None = None  # of one R2T; None: all
    max_h2c_bytes: int = 131072
    alignment: int = 0  # CPDA
    padding: int = 0  # before our data
    success_by_admin_connect: bool = True
    min_keep_alive_s: float = 10.0
    max_queue: int = 128
    has_deallocate: bool = True

    @classmethod
    def kernel(cls) -> Style:
        return cls(
            max_io_bytes=None,
            in_capsule_bytes=16384,
            r2t_bytes=16384,
            c2h_bytes=65536,
            max_h2c_bytes=0x400000,
            success_by_admin_connect=False,
            max_queue=1024,
        )


@dataclass
class Namespace:
    """A namespace in memory."""

    size_bytes: int
    block_size: int = 4096
    group: int = 1
    nguid: bytes = b"dpurt-namespace0"
    image: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.image = self.image or bytearray(self.size_bytes)


@dataclass
class Fault:
    """What to do to the next `count` commands of an opcode (2 read, 1 write, 0 flush, 9 deallocate)."""

    opcode: int
    count: int = 1
    status: Status | None = None
    hang: bool = False
    delay_s: float = 0.0
    corrupt_at: int | None = None  # XOR of one byte, with good status and right digests
    bad_digest: bool = False  # a wrong data digest
    reply: bytes | None = None  # these raw bytes instead of an answer


class FakeNvmeTarget:
    """One subsystem and a discovery service on any number of ports."""

    def __init__(
        self, namespaces: dict[int, Namespace], *, style: Style | None = None, has_ana: bool = False
    ) -> None:
        self.namespaces = namespaces
        self.style = style or Style()
        self.has_ana = has_ana
        self.ana_states: dict[int, int] = {}  # by port, 1 (optimized) where not given
        self.faults: list[Fault] = []
        self.ports: list[int] = []
        self.commands: list[tuple[int, int, int]] = []  # opcode, first block, blocks of each I/O command
        self.num_connections = 0
        self.is_silent = False  # accept, and never answer anything
        self._controllers: dict[int, _Controller] = {}
        self._ids = itertools.count(1)
        self._released = trio.Event()
        self._listeners: dict[int, trio.SocketListener] = {}

    async def listen(self, nursery: trio.Nursery, port: int = 0) -> int:
        listener = (await trio.open_tcp_listeners(port, host="127.0.0.1"))[0]
        number: int = listener.socket.getsockname()[1]
        self.ports.append(number)
        self._listeners[number] = listener
        nursery.start_soon(self._accept, listener, number)
        return number

    async def _accept(self, listener: trio.SocketListener, port: int) -> None:
        async with listener, trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await listener.accept()
                except trio.ClosedResourceError:
                    return
                nursery.start_soon(_Connection(self, stream, port).run)

    async def stop_listening(self, port: int) -> None:
        await self._listeners.pop(port).aclose()

    # --- faults ---

    def release(self) -> None:
        """All commands that hang go on, now and late."""
        self._released.set()
        self._released = trio.Event()

    def drop_connections(self) -> None:
        for controller in list(self._controllers.values()):
            controller.close()

    async def remove_namespace(self, nsid: int) -> Namespace:
        namespace = self.namespaces.pop(nsid)
        await self._announce(nsid)
        return namespace

    async def add_namespace(self, nsid: int, namespace: Namespace) -> None:
        self.namespaces[nsid] = namespace
        await self._announce(nsid)

    async def set_ana_state(self, port: int, state: int) -> None:
        self.ana_states[port] = state
        for controller in list(self._controllers.values()):
            if controller.port == port:
                await controller.notify(0x0C, 3)

    async def _announce(self, nsid: int) -> None:
        for controller in list(self._controllers.values()):
            controller.changed.append(nsid)
            await controller.notify(0x04, 0)

    def fault_for(self, opcode: int) -> Fault | None:
        for fault in self.faults:
            if fault.opcode == opcode:
                fault.count -= 1
                if not fault.count:
                    self.faults.remove(fault)
                return fault
        return None

    async def hang(self) -> None:
        await self._released.wait()


class _Controller:
    def __init__(self, target: FakeNvmeTarget, number: int, port: int, nqn: bytes) -> None:
        self.target = target
        self.number = number
        self.port = port
        self.is_discovery = nqn.decode() == DISCOVERY
        self.connections: list[_Connection] = []
        self.flow_control_off = False
        self.is_enabled = False
        self.keep_alive_s = 0.0
        self.last_keep_alive = trio.current_time()
        self.changed: list[int] = []
        self.event_ids: list[int] = []
        self.pending_events: list[tuple[int, int]] = []

    def close(self) -> None:
        self.target._controllers.pop(self.number, None)
        for connection in self.connections:
            connection.scope.cancel()

    async def notify(self, page: int, info: int) -> None:
        if not self.event_ids:
            self.pending_events.append((page, info))
            return
        result = 2 | info << 8 | page << 16
        await self.connections[0].respond(self.event_ids.pop(), GOOD, result)

    async def watch_keep_alive(self) -> None:
        while self.keep_alive_s:
            await trio.sleep_until(self.last_keep_alive + self.keep_alive_s)
            if trio.current_time() >= self.last_keep_alive + self.keep_alive_s:
                self.close()
                return


class _Fatal(Exception):
    def __init__(self, fes: int) -> None:
        self.fes = fes


class _Connection:
    def __init__(self, target: FakeNvmeTarget, stream: trio.SocketStream, port: int) -> None:
        self.target = target
        self.style = target.style
        self.stream = stream
        self.port = port
        self.scope = trio.CancelScope()
        self.lock = trio.StrictFIFOLock()
        self.header_digest = self.data_digest = False
        self.controller: _Controller | None = None
        self.queue_id = 0
        self.flow_control_off = False
        self.collecting: dict[int, tuple[bytearray, trio.Event, list[int]]] = {}
        self.tags = itertools.count(1)

    async def run(self) -> None:
        self.target.num_connections += 1
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    await self._serve()
                    nursery.cancel_scope.cancel()
        finally:
            if self.controller is not None:
                self.controller.close()
            await trio.aclose_forcefully(self.stream)

    async def _serve(self) -> None:
        try:
            if not self.target.is_silent:
                await self._greet()
            while True:
                await self._one_pdu()
        except _Fatal as fatal:
            await self._send(struct.pack("<BBBBIHI10x", 3, 0, 24, 0, 24, fatal.fes, 0))
        except (trio.BrokenResourceError, trio.EndOfChannel, EOFError):
            return

    # --- bytes ---

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = await self.stream.receive_some(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        if self.target.is_silent:
            await trio.sleep_forever()
        return bytes(data)

    async def _send(self, data: bytes) -> None:
        async with self.lock:
            try:
                await self.stream.send_all(data)
            except trio.BrokenResourceError:
                self.scope.cancel()

    def _crc(self, data: bytes) -> bytes:
        return struct.pack("<I", crc32c.crc32c(data))

    async def _greet(self) -> None:
        pdu = await self._exactly(128)
        if pdu[0] != 0 or pdu[2] != 128:
            raise _Fatal(1)
        self.header_digest, self.data_digest = bool(pdu[11] & 1), bool(pdu[11] & 2)
        style = self.style
        await self._send(
            struct.pack("<BBBBIHBBI112x", 1, 0, 128, 0, 128, 0, style.alignment, pdu[11], style.max_h2c_bytes)
        )

    async def _one_pdu(self) -> None:
        head = await self._exactly(8)
        kind, flags, header_size, data_at, size = struct.unpack("<BBBBI", head)
        expected = {4: 72, 6: 24}.get(kind)
        if kind == 2:
            raise EOFError
        if header_size != expected or size > (1 << 24):
            raise _Fatal(1)
        head += await self._exactly(header_size - 8)
        at = header_size
        if self.header_digest:
            if await self._exactly(4) != self._crc(head):
                raise _Fatal(3)
            at += 4
        data = b""
        if data_at:
            if data_at % ((self.style.alignment + 1) * 4):
                raise _Fatal(1)
            await self._exactly(data_at - at) if data_at > at else None
            trailer = 4 if flags & 2 else 0
            if self.data_digest != bool(trailer):
                raise _Fatal(1)
            data = await self._exactly(size - data_at - trailer)
            if trailer and await self._exactly(4) != self._crc(data):
                raise _Fatal(3)
        if kind == 4:
            self._capsule(head[8:], data)
        else:
            self._data(head, data, bool(flags & 4))

    def _data(self, head: bytes, data: bytes, is_last: bool) -> None:
        command_id, tag, offset, length = struct.unpack_from("<HHII", head, 8)
        if tag not in self.collecting or length != len(data) or length > self.style.max_h2c_bytes:
            raise _Fatal(4)
        buffer, event, progress = self.collecting[tag]
        if offset != progress[0] or command_id != progress[2]:
            raise _Fatal(4)
        buffer[offset : offset + length] = data
        progress[0] += length
        if is_last != (progress[0] == progress[1]):
            raise _Fatal(1)
        if is_last:
            event.set()

    async def respond(self, command_id: int, status: Status, result: int = 0) -> None:
        sct, sc, dnr = status
        word = sc << 1 | sct << 9 | dnr << 15
        head = 0xFFFF if self.flow_control_off else 0
        body = struct.pack("<QHHHH", result, head, self.queue_id, command_id, word)
        await self._send(self._pdu(5, 0, body))

    def _pdu(self, kind: int, flags: int, body: bytes, data: bytes = b"", bad_digest: bool = False) -> bytes:
        extra = 4 if self.header_digest else 0
        size = 24 + extra
        data_at = size + self.style.padding if data else 0
        total = data_at + len(data) + (4 if self.data_digest else 0) if data else size
        flags |= (1 if extra else 0) | (2 if data and self.data_digest else 0)
        out = struct.pack("<BBBBI", kind, flags, 24, data_at, total) + body
        if extra:
            out += self._crc(out)
        if data:
            out += bytes(self.style.padding) + data
            if self.data_digest:
                out += self._crc(data + b"!" if bad_digest else data)
        return out

    async def _send_read(self, command_id: int, data: bytes, bad_digest: bool = False) -> None:
        step = self.style.c2h_bytes or max(len(data), 1)
        is_success = self._success_flag()
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            is_last = at + step >= len(data)
            flags = (4 | (8 if is_success else 0)) if is_last else 0
            body = struct.pack("<HHII4x", command_id, 0, at, len(piece))
            await self._send(self._pdu(7, flags, body, piece, bad_digest))
        if not is_success or not data:
            await self.respond(command_id, GOOD)

    def _success_flag(self) -> bool:
        if self.style.success_by_admin_connect:
            return self.controller is not None and self.controller.flow_control_off
        return self.flow_control_off

    async def _collect(self, command_id: int, length: int) -> bytes:
        """The data of a write, by R2T."""
        whole = bytearray(length)
        step = self.style.r2t_bytes or length
        for at in range(0, length, step):
            size = min(step, length - at)
            tag = next(self.tags) & 0xFFFF
            event = trio.Event()
            self.collecting[tag] = whole, event, [at, at + size, command_id]
            await self._send(self._pdu(9, 0, struct.pack("<HHII4x", command_id, tag, at, size)))
            await event.wait()
            del self.collecting[tag]
        return bytes(whole)

    # --- commands ---

    def _capsule(self, sqe: bytes, data: bytes) -> None:
        length, descriptor = struct.unpack_from("<I", sqe, 32)[0], sqe[39]
        limit = self.style.in_capsule_bytes if self.queue_id else 8192
        if len(data) > max(limit, 1024 if sqe[0] == 0x7F else 0):
            raise _Fatal(5)
        if data and (descriptor != 0x01 or length != len(data)):
            raise _Fatal(1)
        if self.style.max_io_bytes is not None and length > self.style.max_io_bytes:
            raise _Fatal(5)
        self.nursery.start_soon(self._carry_out, sqe, data)

    async def _carry_out(self, sqe: bytes, data: bytes) -> None:
        if sqe[0] == 0x7F:
            await self._fabrics(sqe, data)
        elif self.controller is None:
            await self.respond(_id(sqe), (0, 0x0C, True))
        elif self.queue_id:
            await self._io(sqe, data)
        else:
            await _ADMIN.get(sqe[0], _Connection._unknown)(self, sqe)

    async def _unknown(self, sqe: bytes) -> None:
        await self.respond(_id(sqe), (0, 0x01, True))

    async def _fabrics(self, sqe: bytes, data: bytes) -> None:
        kind = sqe[4]
        if kind == 1:
            await self._connect(sqe, data)
        elif self.controller is None:
            await self.respond(_id(sqe), (0, 0x0C, True))
        elif kind == 0:
            offset, value = struct.unpack_from("<IQ", sqe, 44)
            self.controller.is_enabled = bool(value & 1) if offset == 0x14 else self.controller.is_enabled
            await self.respond(_id(sqe), GOOD)
        else:
            (offset,) = struct.unpack_from("<I", sqe, 44)
            values = {
                0x00: 0x8000020_1E01007F & ~0xFFFF | self.style.max_queue - 1,
                0x08: 0x20000,
                0x14: int(self.controller.is_enabled),
                0x1C: int(self.controller.is_enabled),
            }
            await self.respond(_id(sqe), GOOD, values.get(offset, 0))

    async def _connect(self, sqe: bytes, data: bytes) -> None:
        queue_id, sq_size = struct.unpack_from("<HH", sqe, 42)
        attributes = sqe[46]
        (keep_alive_ms,) = struct.unpack_from("<I", sqe, 48)
        nqn = data[256:512].split(b"\0")[0]
        (number,) = struct.unpack_from("<H", data, 16)
        if nqn.decode() not in (SUBSYSTEM, DISCOVERY):
            await self.respond(_id(sqe), BAD_CONNECT, 0x10100)
        elif sq_size > self.style.max_queue - 1 or sq_size < 1:
            await self.respond(_id(sqe), BAD_CONNECT, 0x2C)
        elif queue_id:
            await self._connect_io(sqe, queue_id, number, attributes)
        else:
            await self._connect_admin(sqe, nqn, attributes, keep_alive_ms)

    async def _connect_admin(self, sqe: bytes, nqn: bytes, attributes: int, keep_alive_ms: int) -> None:
        controller = _Controller(self.target, next(self.target._ids), self.port, nqn)
        self.target._controllers[controller.number] = self.controller = controller
        controller.connections.append(self)
        controller.flow_control_off = self.flow_control_off = bool(attributes & 4)
        if keep_alive_ms:
            controller.keep_alive_s = max(keep_alive_ms / 1000, self.style.min_keep_alive_s)
            self.nursery.start_soon(controller.watch_keep_alive)
        await self.respond(_id(sqe), GOOD, controller.number)

    async def _connect_io(self, sqe: bytes, queue_id: int, number: int, attributes: int) -> None:
        controller = self.target._controllers.get(number)
        if controller is None or not controller.is_enabled:
            await self.respond(_id(sqe), BAD_CONNECT, 0x10010)
            return
        self.controller = controller
        controller.connections.append(self)
        self.queue_id = queue_id
        self.flow_control_off = bool(attributes & 4)
        await self.respond(_id(sqe), GOOD, number)

    async def _identify(self, sqe: bytes) -> None:
        cns, (nsid,) = sqe[40], struct.unpack_from("<I", sqe, 4)
        if cns == 1:
            await self._send_read(_id(sqe), self._identify_controller())
        elif cns == 2:
            listed = sorted(self.target.namespaces)
            await self._send_read(_id(sqe), struct.pack(f"<{len(listed)}I", *listed).ljust(4096, b"\0"))
        elif cns == 0:
            await self._send_read(_id(sqe), _identify_namespace(self.target.namespaces.get(nsid)))
        else:
            await self.respond(_id(sqe), INVALID_FIELD)

    def _identify_controller(self) -> bytes:
        assert self.controller is not None
        page, limit = bytearray(4096), self.style.max_io_bytes
        page[4:24] = b"DPURT0".ljust(20)
        page[24:64] = b"SPDK bdev Controller".ljust(40)
        page[76] = 0x0B if self.target.has_ana else 0x03
        page[77] = 0 if limit is None else (limit // 4096).bit_length() - 1
        struct.pack_into("<H", page, 78, self.controller.number)
        page[111] = 2 if self.controller.is_discovery else 1
        page[259] = 3
        struct.pack_into("<H", page, 320, 100)
        page[342], page[343] = 10, 0x47
        struct.pack_into("<II", page, 344, 8, 8)
        struct.pack_into(
            "<BBHIH", page, 512, 0x66, 0x44, 128, 32, 0x0C if self.style.has_deallocate else 0x08
        )
        page[525] = 5
        struct.pack_into("<II", page, 1792, (64 + self.style.in_capsule_bytes) // 16, 1)
        return bytes(page)

    async def _log_page(self, sqe: bytes) -> None:
        assert self.controller is not None
        page, (low, high) = sqe[40], struct.unpack_from("<HH", sqe, 42)
        (offset,) = struct.unpack_from("<Q", sqe, 48)
        length = ((low | high << 16) + 1) * 4
        content = {0x04: self._changed, 0x0C: self._ana_log, 0x70: self._discovery_log}.get(page)
        if content is None:
            await self.respond(_id(sqe), (1, 0x09, True))
        else:
            await self._send_read(_id(sqe), content()[offset : offset + length].ljust(length, b"\0"))

    def _changed(self) -> bytes:
        assert self.controller is not None
        listed, self.controller.changed = self.controller.changed, []
        return struct.pack(f"<{len(listed)}I", *listed)

    def _ana_log(self) -> bytes:
        state = self.target.ana_states.get(self.port, 1)
        groups = sorted({namespace.group for namespace in self.target.namespaces.values()})
        log = struct.pack("<QH6x", 1, len(groups))
        for group in groups:
            log += struct.pack("<IIQB15x", group, 0, 1, state)
        return log

    def _discovery_log(self) -> bytes:
        log = bytearray(struct.pack("<QQH", 7, len(self.target.ports), 0).ljust(1024, b"\0"))
        for port in self.target.ports:
            entry = bytearray(1024)
            entry[0:3] = bytes([3, 1, 2])
            entry[32 : 32 + len(str(port))] = str(port).encode()
            entry[256 : 256 + len(SUBSYSTEM)] = SUBSYSTEM.encode()
            entry[512:521] = b"127.0.0.1"
            log += entry
        return bytes(log)

    async def _set_features(self, sqe: bytes) -> None:
        result = 0x7E007E if sqe[40] == 0x07 else 0
        await self.respond(_id(sqe), GOOD, result)

    async def _async_event(self, sqe: bytes) -> None:
        assert self.controller is not None
        self.controller.event_ids.append(_id(sqe))
        if self.controller.pending_events:
            await self.controller.notify(*self.controller.pending_events.pop(0))

    async def _keep_alive(self, sqe: bytes) -> None:
        assert self.controller is not None
        self.controller.last_keep_alive = trio.current_time()
        await self.respond(_id(sqe), GOOD)

    async def _abort(self, sqe: bytes) -> None:
        await self.respond(_id(sqe), GOOD, 1)  # not aborted

    # --- I/O ---

    async def _io(self, sqe: bytes, data: bytes) -> None:
        opcode = sqe[0]
        fault = self.target.fault_for(opcode)
        if fault is not None and fault.hang:
            await self.target.hang()
        if fault is not None and fault.delay_s:
            await trio.sleep(fault.delay_s)
        if fault is not None and fault.reply is not None:
            await self._send(fault.reply.replace(b"<id>", struct.pack("<H", _id(sqe))))
            return
        status = fault.status if fault is not None and fault.status else self._io_status(sqe)
        if status != GOOD:
            await self.respond(_id(sqe), status)
        elif opcode == 2:
            await self._read(sqe, fault)
        else:
            await self._change(sqe, data)

    def _io_status(self, sqe: bytes) -> Status:
        (nsid,) = struct.unpack_from("<I", sqe, 4)
        first, count = struct.unpack_from("<QH", sqe, 40)
        namespace = self.target.namespaces.get(nsid)
        self.target.commands.append((sqe[0], first, count + 1))
        if self.target.ana_states.get(self.port, 1) not in (1, 2):
            return INACCESSIBLE
        if namespace is None:
            return INVALID_NAMESPACE
        if sqe[0] in (1, 2, 8) and (first + count + 1) * namespace.block_size > len(namespace.image):
            return PAST_END
        return GOOD

    async def _read(self, sqe: bytes, fault: Fault | None) -> None:
        namespace, span = self._span(sqe)
        data = bytearray(namespace.image[span])
        if fault is not None and fault.corrupt_at is not None:
            data[fault.corrupt_at] ^= 0x5A
        await self._send_read(_id(sqe), bytes(data), fault is not None and fault.bad_digest)

    async def _change(self, sqe: bytes, data: bytes) -> None:
        namespace, span = self._span(sqe)
        if sqe[0] == 1:
            length = span.stop - span.start
            namespace.image[span] = data or await self._collect(_id(sqe), length)
        elif sqe[0] == 8:
            namespace.image[span] = bytes(span.stop - span.start)
        elif sqe[0] == 9:
            _, num_blocks, first = struct.unpack("<IIQ", data)
            start, size = first * namespace.block_size, num_blocks * namespace.block_size
            namespace.image[start : start + size] = bytes(size)
        await self.respond(_id(sqe), GOOD)

    def _span(self, sqe: bytes) -> tuple[Namespace, slice]:
        namespace = self.target.namespaces[struct.unpack_from("<I", sqe, 4)[0]]
        first, count = struct.unpack_from("<QH", sqe, 40)
        start = first * namespace.block_size
        return namespace, slice(start, start + (count + 1) * namespace.block_size)


_ADMIN: dict[int, Callable[[_Connection, bytes], Awaitable[None]]] = {
    0x02: _Connection._log_page,
    0x06: _Connection._identify,
    0x08: _Connection._abort,
    0x09: _Connection._set_features,
    0x0C: _Connection._async_event,
    0x18: _Connection._keep_alive,
}


def _id(sqe: bytes) -> int:
    return sqe[2] | sqe[3] << 8


def _identify_namespace(namespace: Namespace | None) -> bytes:
    page = bytearray(4096)
    if namespace is not None:
        blocks = len(namespace.image) // namespace.block_size
        struct.pack_into("<QQQ", page, 0, blocks, blocks, blocks)
        struct.pack_into("<I", page, 92, namespace.group)
        page[104:120] = namespace.nguid
        page[130] = namespace.block_size.bit_length() - 1
    return bytes(page)
