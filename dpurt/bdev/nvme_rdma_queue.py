"""One NVMe queue pair on one RDMA queue pair: commands by SEND, answers by RECV, data by the controller itself.

Theory of operation. Each command id has a place for its capsule, and there are as many receives as commands can be in
flight; as the controller has as many, nobody ever waits for room in the network. A command's data is named by address
and key of registered memory, and the controller reads or writes it there; what is not registered takes a bounce slot,
and waits for one if all are taken. Small data of a write goes in the capsule. That a capsule was sent is asked for only now
and then, to know that there is room for more: its answer says it too.

`close` destroys the queue pair: when that returns, the device answers the controller's accesses no more, and the
buffers are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import trio

from dpurt.bdev.buffers import address_of
from dpurt.bdev.nvme_rdma_memory import Bounce, Memory, Port, Scratch, gather
from dpurt.errors import RemoteProtocolError
from dpurt.rdma.cm import CmId
from dpurt.rdma.memory import Access
from dpurt.rdma.qp import SUCCESS
from dpurt.rdma.queue_pair import Opcode, QueuePair, Received, Sge, Work
from dpurt.wire import rdma_cm
from dpurt.wire.nvme import Cqe
from dpurt.wire.nvme_queue import Command, Completion
from dpurt.wire.nvme_queue import QueuePair as CommandQueue
from dpurt.wire.nvme_rdma import (
    BOUNCE_BYTES,
    RESPONSE_BYTES,
    SQE_BYTES,
    decode_accept,
    decode_reject,
    encode_request,
    in_capsule_sgl,
    keyed_sgl,
    one_piece,
)

__all__ = ["RdmaConnection"]

_ADMIN_BOUNCE = 4, 256 << 10  # an admin command's data is one log page at most
_IO_BOUNCE = 32, BOUNCE_BYTES
_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
_REJECTED_BY_CONTROLLER = 28  # "consumer defined": the reason is in the private data
_MAX_READS = 128


class RdmaConnection:
    """A `Connection`; `connect` it once, then `watch` it."""

    def __init__(
        self,
        cm: CmId,
        port: Port,
        memory: Memory,
        queue_id: int,
        size: int,
        in_capsule_bytes: int,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> None:
        self._cm = cm
        self._port = port
        self._layout = memory.layout
        self._signal_every = max(1, size // 2)
        self._num_sent = 0
        self._queue_id = queue_id
        self._size = size
        self._in_capsule_bytes = in_capsule_bytes
        self._capsule_bytes = SQE_BYTES + in_capsule_bytes
        self._deliver = deliver
        self._lost = lost
        self._is_open = True
        self._commands = CommandQueue(size)
        self._bounced: dict[int, int] = {}  # slot by command id
        self._deferred: deque[tuple[int, Command]] = deque()
        self._closers: list[Callable[[], None]] = [cm.close]
        try:
            self._open(port)
        except BaseException:
            self.close()
            raise

    def _open(self, port: Port) -> None:
        adapter = port.adapter
        self._bounce = Bounce(adapter, *(_IO_BOUNCE if self._queue_id else _ADMIN_BOUNCE))
        self._closers.append(self._bounce.close)
        self._capsules = Scratch(adapter, self._size * self._capsule_bytes)
        self._closers.append(self._capsules.close)
        self._answers = Scratch(adapter, self._size * RESPONSE_BYTES)
        self._closers.append(self._answers.close)
        self._qp: QueuePair = adapter.queue_pair(
            send_depth=2 * self._size, receive_depth=self._size, access=_ACCESS
        )
        self._qp.on_failed = self._failed
        self._closers.append(self._qp.destroy)
        self._requests: list[Any] = []
        self._closers.insert(0, self._close_requests)  # the last
        for slot in range(self._size):
            self._requests.append(self._qp.receive_request(self._answer_place(slot)))
        self._receives = tuple(self._requests)
        self._receivers = tuple(partial(self._received, slot) for slot in range(self._size))
        self._bare_sends: dict[int, Any] = {}  # requests for capsules without data, by command id

    def _close_requests(self) -> None:
        for request in self._requests:
            request.close()

    async def connect(self) -> None:
        """Raises OSError, QueuePairError, or RemoteProtocolError with the controller's reason."""
        self._qp.prepare()
        for slot in range(self._size):
            self._receive(slot)
        reads = min(self._port.adapter.device.limits.max_rd_atomic, _MAX_READS)
        event = await self._cm.connect(self._qp.number, encode_request(self._queue_id, self._size), reads)
        if event.kind == rdma_cm.REJECTED:
            raise _rejection(event)
        entries = decode_accept(event.private)
        if entries < self._size:  # it can take no more at once than that
            self._commands = CommandQueue(entries)
        self._cm.accept(self._qp)

    @property
    def room(self) -> int:
        return min(self._commands.room, self._qp.send_room) if self._is_open else 0

    def commands(self) -> Iterable[Command]:
        return self._commands.commands()

    def submit(self, command: Command) -> None:
        command_id = self._commands.add(command)
        if not self._send(command_id, command):
            self._deferred.append((command_id, command))

    def close(self) -> list[Command]:
        if self._is_open:
            self._is_open = False
            while self._closers:
                self._closers.pop()()
        return self._commands.take_all()

    async def watch(self) -> None:
        """Return when the connection is over."""
        try:
            reason = await self._cm.wait_lost()
        except trio.ClosedResourceError:
            await trio.lowlevel.checkpoint()
        except OSError as error:
            self._failed(str(error))
        else:
            self._failed(reason)

    def _failed(self, reason: str = "") -> None:
        if self._is_open:
            self._lost(reason or f"connection lost: {self._qp.failure}")

    # --- sending ---

    def _send(self, command_id: int, command: Command) -> bool:
        """Whether it is on its way; else it has to wait for a bounce slot."""
        at = command_id * self._capsule_bytes
        in_capsule = 0
        if not command.length:
            pointer = keyed_sgl()
        elif command.data_out and command.length <= self._in_capsule_bytes:
            in_capsule = command.length
            pointer = in_capsule_sgl(in_capsule)
            gather(self._capsules.view, at + SQE_BYTES, command.data_out)
        elif (place := self._place(command_id, command)) is not None:
            pointer = keyed_sgl(*place)
        else:
            return False
        command.sqe[24:40] = pointer
        self._capsules.view[at : at + SQE_BYTES] = command.sqe
        if in_capsule:
            self._qp.post_send([Work(Opcode.SEND, (self._capsule(command_id, in_capsule),))], _ignore)
        else:
            self._num_sent += 1
            is_signalled = self._num_sent % self._signal_every == 0
            self._qp.repeat_send(self._bare_send(command_id), _ignore, is_signalled=is_signalled)
        return True

    def _bare_send(self, command_id: int) -> Any:
        request = self._bare_sends.get(command_id)
        if request is None:
            request = self._bare_sends[command_id] = self._qp.send_request(self._capsule(command_id, 0))
            self._requests.append(request)
        return request

    def _capsule(self, command_id: int, data_bytes: int) -> Sge:
        at = self._capsules.address + command_id * self._capsule_bytes
        return Sge(at, SQE_BYTES + data_bytes, self._capsules.lkey)

    def _place(self, command_id: int, command: Command) -> tuple[int, int, int] | None:
        """(address, length, key) of its data, in the caller's buffers or in a bounce slot; None: no slot is free."""
        buffers = command.data_in or command.data_out
        piece = one_piece([(address_of(buffer), len(buffer)) for buffer in buffers])
        if piece is not None and (chunk := self._layout.find(*piece)) is not None:
            return *piece, self._port.key_of(chunk)
        assert command.length <= self._bounce.slot_bytes, "commands are cut to what fits"
        slot = self._bounce.take()
        if slot is None:
            return None
        self._bounced[command_id] = slot
        if command.data_out:
            self._bounce.fill(slot, buffers)
        return self._bounce.address(slot), command.length, self._bounce.rkey

    # --- receiving ---

    def _receive(self, slot: int) -> None:
        self._qp.repeat_receive(self._receives[slot], self._receivers[slot])

    def _answer_place(self, slot: int) -> Sge:
        return Sge(self._answers.address + slot * RESPONSE_BYTES, RESPONSE_BYTES, self._answers.lkey)

    def _received(self, slot: int, received: Received) -> None:
        if not self._is_open or received.status != SUCCESS:
            return  # the queue pair's end is told apart
        try:
            self._answered(slot, received.length)
        except RemoteProtocolError as error:
            self._failed(str(error))

    def _answered(self, slot: int, length: int) -> None:
        if length != RESPONSE_BYTES:
            raise RemoteProtocolError("nvme_rdma_response", f"a response of {length} bytes")
        at = slot * RESPONSE_BYTES
        cqe = Cqe.decode(self._answers.view[at : at + RESPONSE_BYTES])
        self._receive(slot)
        command = self._commands.end(cqe.command_id)
        if (bounced := self._bounced.pop(cqe.command_id, None)) is not None:
            if command.data_in and cqe.status.is_good:
                self._bounce.empty(bounced, command.data_in)
            self._bounce.free(bounced)
        if self._deferred:
            self._send_deferred()
        self._deliver(Completion(command, cqe.status, cqe.result))

    def _send_deferred(self) -> None:
        while self._deferred and self._qp.send_room and self._send(*self._deferred[0]):
            self._deferred.popleft()


def _rejection(event: rdma_cm.CmEvent) -> Exception:
    if event.status == _REJECTED_BY_CONTROLLER:
        return RemoteProtocolError("nvme_rdma_rejected", decode_reject(event.private))
    return ConnectionRefusedError(f"rejected, reason {event.status}: nobody listens there, or it has no room")


def _ignore(status: str) -> None:
    """A send's end: its answer, or the queue pair's failure, says more."""
