"""NVMe/TCP, one queue pair on one connection: bytes in, completions out, no socket.

Sans-I/O, and no copy: `windows()` says where the next bytes belong, which for data is the caller's buffers;
after a receive into them `received(count)` takes note and returns the commands that ended. `submit(command)`
and what the controller's PDUs ask for add to `unsent()`, a list of buffers to send; `sent(count)` takes note.

Theory of operation. Every PDU begins with a header of 24 bytes (the answer to our greeting has 128), so the
windows are: the rest of a data PDU, padding and digest included, and the next header; one scattering receive
never reads beyond. A command ends by its response, or by data flagged SUCCESS, but not before the last byte
of its own data has been handed to the socket: only then are its buffers free.

    ICReq -> ICResp, then per command: capsule (data in it if it fits) ->
        read:  <- data ... <- response, or SUCCESS on the last data
        write: <- R2T, data -> ... <- response

The peer is not trusted. Whatever breaks the rules raises RemoteProtocolError, whose code says which
(`FES_OF_CODE`: what to tell the peer about it); the connection is then of no use. Good statuses are believed
only if every byte was moved. A wrong data digest fails its command only, as a transient transport error.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence

import crc32c

from dpurt.errors import RemoteProtocolError
from dpurt.wire.nvme import Cqe
from dpurt.wire.nvme_queue import Command, Completion, QueuePair, piece_of
from dpurt.wire.nvme_status import GOOD, TRANSIENT_TRANSPORT_ERROR, Status

__all__ = ["FES_OF_CODE", "MAX_WINDOWS", "TcpQueue", "term_request"]

ICREQ, ICRESP, H2C_TERM, C2H_TERM, CAPSULE, RESPONSE, H2C_DATA, C2H_DATA, R2T = 0, 1, 2, 3, 4, 5, 6, 7, 9
HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8  # flags
MAX_WINDOWS = 64  # buffers of one receive or send
ADMIN_IN_CAPSULE_BYTES = 8192

FES_OF_CODE = {
    "nvme_tcp_header": 1,
    "nvme_tcp_sequence": 2,
    "nvme_command_id": 2,
    "nvme_tcp_digest": 3,
    "nvme_tcp_range": 4,
    "nvme_tcp_limit": 5,
    "nvme_tcp_parameter": 6,
}
_FES_NAMES = {
    1: "invalid header field",
    2: "sequence error",
    3: "header digest error",
    4: "data out of range",
    5: "transfer limit exceeded",
    6: "unsupported parameter",
}

_COMMON = struct.Struct("<BBBBI")
_DATA = struct.Struct("<8xHHII4x")  # C2HData, H2CData and R2T: id, tag, offset, length
_IC = struct.Struct("<8xHBBI112x")
_CAPSULE_SGL = struct.Struct("<QI3xB")
_IN_CAPSULE, _TRANSPORT = 0x01, 0x5A
_IC_BYTES, _HEADER_BYTES, _CAPSULE_BYTES, _DIGEST_BYTES = 128, 24, 72, 4
_MAX_TERM_BYTES = 24 + 128
_MIN_MAXH2CDATA = 4096

Buffer = bytes | bytearray | memoryview


class _Transfer:
    """How far a command in flight is."""

    __slots__ = ("answer", "command", "has_last", "is_damaged", "moved", "unsent")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.moved = 0  # bytes of data received, or asked for by the controller
        self.unsent = 0  # buffers not handed to the socket yet
        self.has_last = False
        self.is_damaged = False
        self.answer: tuple[int, Status, int] | None = None  # came while buffers were unsent


class TcpQueue:
    """One queue pair. Submit only once `is_ready`, and only while `pair` has room."""

    def __init__(
        self,
        size: int,
        *,
        in_capsule_bytes: int = ADMIN_IN_CAPSULE_BYTES,
        header_digest: bool = False,
        data_digest: bool = False,
    ) -> None:
        self.pair = QueuePair(size)
        self.is_ready = False
        self._in_capsule_bytes = in_capsule_bytes
        self._wants_digests = int(header_digest) | int(data_digest) << 1
        self._has_header_digest = False
        self._has_data_digest = False
        self._alignment = 4  # of data in our PDUs
        self._max_data_bytes = 0
        self._transfers: dict[int, _Transfer] = {}
        self._done: list[Completion] = []
        self._problem: RemoteProtocolError | None = None
        self._out: deque[tuple[memoryview, _Transfer | None]] = deque()
        self._header = bytearray(_IC_BYTES)
        self._have = 0
        self._need = _HEADER_BYTES
        self._scratch = memoryview(bytearray(256 * 4 + _DIGEST_BYTES))
        self._body: deque[memoryview] = deque()
        self._data: list[memoryview] = []  # of the PDU being received
        self._data_flags = 0
        self._data_id = 0
        self._put(bytes(_COMMON.pack(ICREQ, 0, _IC_BYTES, 0, _IC_BYTES)) + _ic_request(self._wants_digests))

    # --- sending ---

    def submit(self, command: Command) -> None:
        """Put a command in flight."""
        assert self.is_ready, "the connection has been greeted"
        command_id = self.pair.add(command)
        transfer = self._transfers[command_id] = _Transfer(command)
        if command.data_out and command.length <= self._in_capsule_bytes:
            command.sqe[24:40] = _CAPSULE_SGL.pack(0, command.length, _IN_CAPSULE)
            transfer.moved = command.length
            self._put_pdu(CAPSULE, 0, bytes(command.sqe), command.data_out, transfer)
        else:
            command.sqe[24:40] = _CAPSULE_SGL.pack(0, command.length, _TRANSPORT)
            self._put_pdu(CAPSULE, 0, bytes(command.sqe), (), None)

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def unsent(self) -> list[memoryview]:
        """What to send next, at most `MAX_WINDOWS` buffers; empty if nothing."""
        return [buffer for buffer, _ in itertools.islice(self._out, MAX_WINDOWS)]

    def sent(self, count: int) -> list[Completion]:
        """The first `count` bytes were taken by the socket. Returns commands whose answer had come before."""
        while count:
            buffer, transfer = self._out[0]
            if count < len(buffer):
                self._out[0] = buffer[count:], transfer
                break
            count -= len(buffer)
            self._out.popleft()
            if transfer is not None:
                transfer.unsent -= 1
                if transfer.answer is not None and not transfer.unsent:
                    self._end(*transfer.answer)
        return self._take_done()

    def _put(self, data: Buffer, transfer: _Transfer | None = None) -> None:
        self._out.append((memoryview(data), transfer))
        if transfer is not None:
            transfer.unsent += 1

    def _put_pdu(
        self, kind: int, flags: int, rest: bytes, data: Sequence[memoryview], transfer: _Transfer | None
    ) -> None:
        """`rest` is the header after its common part."""
        header_bytes = _COMMON.size + len(rest)
        digest_bytes = _DIGEST_BYTES if self._has_header_digest else 0
        data_bytes = sum(map(len, data))
        data_at = 0
        flags |= HDGST if self._has_header_digest else 0
        total = header_bytes + digest_bytes
        if data_bytes:
            data_at = -(-total // self._alignment) * self._alignment
            total = data_at + data_bytes
            if self._has_data_digest:
                flags |= DDGST
                total += _DIGEST_BYTES
        header = _COMMON.pack(kind, flags, header_bytes, data_at, total) + rest
        if digest_bytes:
            header += _digest([header])
        self._put(header + bytes(max(data_at - len(header), 0)))
        for buffer in data:
            self._put(buffer, transfer)
        if flags & DDGST:
            self._put(_digest(data))

    def _send_data(self, command_id: int, transfer: _Transfer, tag: int, offset: int, length: int) -> None:
        """Answer an R2T, in PDUs the controller can take."""
        end = offset + length
        while offset < end:
            size = min(end - offset, self._max_data_bytes)
            flags = LAST if offset + size == end else 0
            rest = _DATA.pack(command_id, tag, offset, size)[8:]
            self._put_pdu(H2C_DATA, flags, rest, piece_of(transfer.command.data_out, offset, size), transfer)
            offset += size

    # --- receiving ---

    def windows(self) -> list[memoryview]:
        """Where the next bytes go, in order. Valid until the next call of `received`. Raises RemoteProtocolError
        for what came behind the commands that `received` returned last.
        """
        if self._problem is not None:
            raise self._problem
        windows = list(itertools.islice(self._body, MAX_WINDOWS - 1))
        if len(windows) == len(self._body):
            windows.append(memoryview(self._header)[self._have : self._need])
        return windows

    @property
    def is_in_data(self) -> bool:
        """In the middle of a data PDU: its next bytes are on their way."""
        return bool(self._body)

    def received(self, count: int) -> list[Completion]:
        """`count` > 0 bytes were put into the windows. Raises RemoteProtocolError."""
        try:
            count = self._fill_body(count)
            if count:
                self._have += count
                self._check_header()
        except RemoteProtocolError as problem:
            if not self._done:
                raise
            self._problem = problem  # a command that ended before must not be lost
        return self._take_done()

    def _fill_body(self, count: int) -> int:
        """How many bytes are left for the next header."""
        while count and self._body:
            window = self._body[0]
            if count < len(window):
                self._body[0] = window[count:]
                return 0
            count -= len(window)
            self._body.popleft()
            if not self._body:
                self._end_data()
        return count

    def _take_done(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def _check_header(self) -> None:
        kind, flags, header_bytes, data_at, total = _COMMON.unpack_from(self._header)
        if self._have < _COMMON.size:
            return
        self._need = self._header_size(kind, header_bytes, total)
        if self._have < self._need:
            return
        header = memoryview(self._header)
        if kind == C2H_TERM:
            _raise_terminated(header[: self._need])
        if self._has_header_digest and bytes(header[header_bytes : self._need]) != _digest(
            [header[:header_bytes]]
        ):
            raise RemoteProtocolError("nvme_tcp_digest", "header digest of a PDU is wrong")
        self._have = 0
        if kind == ICRESP:
            self._greeted()
        else:
            _HANDLERS[kind](self, flags, data_at, total)
        self._need = _HEADER_BYTES + self._header_digest_bytes

    @property
    def _header_digest_bytes(self) -> int:
        return _DIGEST_BYTES if self._has_header_digest else 0

    def _header_size(self, kind: int, header_bytes: int, total: int) -> int:
        """Bytes to wait for before the PDU can be looked at."""
        if kind == C2H_TERM:
            fits = _HEADER_BYTES == header_bytes <= total <= _MAX_TERM_BYTES
            _require(fits, "nvme_tcp_header", f"TermReq of {total} bytes")
            return _HEADER_BYTES
        if not self.is_ready:
            _require(kind == ICRESP, "nvme_tcp_sequence", f"PDU type {kind} before the greeting")
            _require(header_bytes == total == _IC_BYTES, "nvme_tcp_header", "size of the greeting")
            return _IC_BYTES
        _require(kind in _HANDLERS, "nvme_tcp_header", f"PDU type {kind} from a controller")
        _require(header_bytes == _HEADER_BYTES, "nvme_tcp_header", f"header of {header_bytes} bytes")
        return _HEADER_BYTES + self._header_digest_bytes

    def _greeted(self) -> None:
        version, alignment, digests, max_data = _IC.unpack_from(self._header)
        _require(version == 0, "nvme_tcp_parameter", f"PDU format version {version}")
        _require(alignment <= 31, "nvme_tcp_parameter", f"data alignment {alignment}")
        _require(not digests & ~3, "nvme_tcp_parameter", f"digests {digests:#x}")
        _require(
            digests == self._wants_digests,
            "nvme_tcp_parameter",
            f"digests {self._wants_digests:#x} were asked for, {digests:#x} agreed to",
        )
        _require(max_data >= _MIN_MAXH2CDATA, "nvme_tcp_parameter", f"MAXH2CDATA {max_data} is under 4096")
        self._alignment = (alignment + 1) * 4
        self._max_data_bytes = max_data & ~3
        self._has_header_digest = bool(digests & 1)
        self._has_data_digest = bool(digests & 2)
        self.is_ready = True

    def _check_common(self, flags: int, allowed: int) -> None:
        wanted = HDGST if self._has_header_digest else 0
        _require(flags & HDGST == wanted, "nvme_tcp_header", "header digest flag")
        _require(not flags & ~(allowed | HDGST), "nvme_tcp_header", f"flags {flags:#x}")

    def _without_data(self, flags: int, total: int) -> None:
        self._check_common(flags, 0)
        size = _HEADER_BYTES + self._header_digest_bytes
        _require(total == size, "nvme_tcp_header", f"{total} bytes in a PDU of {size}")

    def _transfer(self, command_id: int) -> _Transfer:
        transfer = self._transfers.get(command_id)
        if transfer is None or transfer.answer is not None:
            raise RemoteProtocolError("nvme_command_id", f"no command {command_id} is in flight")
        return transfer

    def _on_response(self, flags: int, data_at: int, total: int) -> None:
        self._without_data(flags, total)
        cqe = Cqe.decode(memoryview(self._header)[_COMMON.size : _HEADER_BYTES])
        transfer = self._transfer(cqe.command_id)
        if cqe.status.is_good:
            moved, length = transfer.moved, transfer.command.length
            _require(moved == length, "nvme_tcp_sequence", f"success after {moved} of {length} bytes")
        self._answered(cqe.command_id, cqe.status, cqe.result)

    def _on_r2t(self, flags: int, data_at: int, total: int) -> None:
        self._without_data(flags, total)
        command_id, tag, offset, length = _DATA.unpack_from(self._header)
        transfer = self._transfer(command_id)
        command = transfer.command
        _require(bool(command.data_out), "nvme_tcp_sequence", "R2T for a command that sends nothing")
        _require(not transfer.unsent, "nvme_tcp_limit", "a second R2T before the data of the first")
        _require(
            offset == transfer.moved and 0 < length <= command.length - offset,
            "nvme_tcp_range",
            f"R2T of {length} bytes at {offset}, {transfer.moved} of {command.length} are sent",
        )
        transfer.moved += length
        self._send_data(command_id, transfer, tag, offset, length)

    def _on_data(self, flags: int, data_at: int, total: int) -> None:
        self._check_common(flags, DDGST | LAST | SUCCESS)
        command_id, _, offset, length = _DATA.unpack_from(self._header)
        transfer = self._transfer(command_id)
        self._check_data_shape(flags, data_at, total, length)
        _require(
            offset == transfer.moved and 0 < length <= _room_for_data(transfer.command) - offset,
            "nvme_tcp_range",
            f"data of {length} bytes at {offset}, {transfer.moved} of {transfer.command.length} have come",
        )
        _require(not transfer.has_last, "nvme_tcp_sequence", "data after the last")
        _require(not flags & SUCCESS or bool(flags & LAST), "nvme_tcp_header", "SUCCESS without LAST")
        self._expect_data(flags, command_id, transfer, data_at, length)

    def _check_data_shape(self, flags: int, data_at: int, total: int, length: int) -> None:
        header = _HEADER_BYTES + self._header_digest_bytes
        _require(header <= data_at and data_at - header < 128, "nvme_tcp_header", f"data at {data_at}")
        digest = _DIGEST_BYTES if self._has_data_digest else 0
        _require(bool(flags & DDGST) == self._has_data_digest, "nvme_tcp_header", "data digest flag")
        _require(
            total == data_at + length + digest, "nvme_tcp_header", f"{total} bytes with {length} of data"
        )

    def _expect_data(
        self, flags: int, command_id: int, transfer: _Transfer, data_at: int, length: int
    ) -> None:
        padding = data_at - _HEADER_BYTES - self._header_digest_bytes
        self._data = piece_of(transfer.command.data_in, transfer.moved, length)
        self._data_flags, self._data_id = flags, command_id
        if padding:
            self._body.append(self._scratch[_DIGEST_BYTES : _DIGEST_BYTES + padding])
        self._body.extend(self._data)
        if flags & DDGST:
            self._body.append(self._scratch[:_DIGEST_BYTES])
        transfer.moved += length
        transfer.has_last = bool(flags & LAST)

    def _end_data(self) -> None:
        """All of a data PDU is there."""
        transfer, flags = self._transfers[self._data_id], self._data_flags
        if flags & DDGST and bytes(self._scratch[:_DIGEST_BYTES]) != _digest(self._data):
            transfer.is_damaged = True
        self._data = []
        if flags & SUCCESS:
            moved, length = transfer.moved, transfer.command.length
            _require(moved == length, "nvme_tcp_sequence", f"success after {moved} of {length} bytes")
            self._answered(self._data_id, GOOD, 0)

    def _answered(self, command_id: int, status: Status, result: int) -> None:
        transfer = self._transfers[command_id]
        if transfer.is_damaged and status.is_good:
            status = TRANSIENT_TRANSPORT_ERROR
        if transfer.unsent:
            transfer.answer = command_id, status, result
        else:
            self._end(command_id, status, result)

    def _end(self, command_id: int, status: Status, result: int) -> None:
        del self._transfers[command_id]
        self._done.append(Completion(self.pair.end(command_id), status, result))


_HANDLERS = {RESPONSE: TcpQueue._on_response, R2T: TcpQueue._on_r2t, C2H_DATA: TcpQueue._on_data}


def term_request(code: str) -> bytes:
    """The PDU that tells the peer why we close, for the code of a RemoteProtocolError."""
    return _COMMON.pack(H2C_TERM, 0, _HEADER_BYTES, 0, _HEADER_BYTES) + struct.pack(
        "<HI10x", FES_OF_CODE.get(code, 1), 0
    )


def _ic_request(digests: int) -> bytes:
    """Without alignment wishes, one R2T at a time."""
    return _IC.pack(0, 0, digests, 0)[8:]


def _room_for_data(command: Command) -> int:
    return command.length if command.data_in else 0


def _digest(buffers: Sequence[Buffer]) -> bytes:
    value = 0
    for buffer in buffers:
        value = crc32c.crc32c(buffer, value)
    return value.to_bytes(4, "little")


def _raise_terminated(pdu: memoryview) -> None:
    (fes,) = struct.unpack_from("<H", pdu, 8)
    reason = _FES_NAMES.get(fes, f"reason {fes}")
    raise RemoteProtocolError("nvme_tcp_terminated", f"the controller ended the connection: {reason}")


def _require(holds: bool, code: str, problem: str) -> None:
    if not holds:
        raise RemoteProtocolError(code, problem)
