"""One reliable-connected queue pair on Trio: `QueuePairCore` keeps the books, pyverbs has the queue pair.

`run` carries out a list of works in order, as many at a time as the send queue takes, and promises the one thing memory needs:
when it returns or raises, the device no longer touches the works' memory. A cancelled or late `run` posts no more and waits
for what is posted; if that does not end in `DRAIN_S` the queue pair is put into error, which flushes it, and if even the flush
does not come it is destroyed. A queue pair in error never comes back: the owner makes a new one.

Soft-RoCE lets a busy writer's acknowledge timer run out though all goes well, so that timer is a long one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from dpurt.errors import QueuePairError
from dpurt.rdma.binding import verbs
from dpurt.rdma.memory import Access, Chunk, Window
from dpurt.rdma.qp import FLUSHED, SUCCESS, Ended, QpState, QueuePairCore, is_receive

if TYPE_CHECKING:
    from dpurt.rdma.endpoint import Adapter

__all__ = ["Bind", "Opcode", "QueuePair", "QueuePairAddress", "Received", "Requests", "Sge", "Work"]

DRAIN_S = 5.0
FLUSH_S = 2.0
ACK_TIMEOUT = 18  # 4.096 us * 2**18: about a second
RETRIES = 7
RNR_TIMER = 12  # 0.64 ms
CHAIN = 16  # works posted by one call
_SERIAL_SHIFT = 48

STATUS = {
    0: SUCCESS, 1: "local_length", 2: "local_operation", 4: "local_protection", 5: FLUSHED, 6: "window_bind",
    7: "bad_response", 8: "local_access", 9: "remote_invalid_request", 10: "remote_access", 11: "remote_operation",
    12: "retries_exceeded", 13: "receiver_not_ready",
}  # fmt: skip
"""Work completion statuses in words."""


class Opcode(IntEnum):
    """What a work does (the numbers are those of verbs)."""

    WRITE = 0
    WRITE_IMMEDIATE = 1
    SEND = 2
    READ = 4


@dataclass(frozen=True, slots=True)
class Sge:
    """Local bytes of a work."""

    address: int
    length: int
    lkey: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Work:
    """One work request, with one piece of local bytes at most. `immediate` is a 32-bit number for WRITE_IMMEDIATE. Without local
    bytes nothing is moved, and no key is asked for: that it ends well says that the peer is there.
    """

    opcode: Opcode
    local: tuple[Sge, ...]
    remote_address: int = 0
    rkey: int = field(default=0, repr=False)
    immediate: int = 0


@dataclass(frozen=True, slots=True)
class Bind:
    """Open [address, +length) of `chunk` to this queue pair's peer through `window`, which gets its rkey by the post."""

    window: Window
    chunk: Chunk
    address: int
    length: int
    access: Access


class Received(NamedTuple):
    """A receive that is over."""

    status: str
    length: int = 0
    immediate: int = 0

    @property
    def is_ok(self) -> bool:
        return self.status == SUCCESS


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """What the peer needs to connect. Plain values; no secret."""

    number: int
    psn: int
    gid: str
    mtu: int
    max_reads: int

    def check(self) -> None:
        """Raises ValueError unless a peer could have this address."""
        ipaddress.IPv6Address(self.gid)
        if not 0 < self.number < 1 << 24 or not 0 <= self.psn < 1 << 24 or not 0 < self.max_reads < 256:
            raise ValueError("no queue pair has these numbers")
        if self.mtu not in (256, 512, 1024, 2048, 4096):
            raise ValueError(f"no path has an MTU of {self.mtu}")


@dataclass(slots=True, eq=False)
class _Run:
    """The posts of one `run`."""

    flying: int = 0
    status: str = SUCCESS
    settled: trio.Event = field(default_factory=trio.Event)

    def ended(self, status: str) -> None:
        self.flying -= 1
        if status != SUCCESS and self.status in (SUCCESS, FLUSHED):
            self.status = status
        if not self.flying:
            self.settled.set()
            self.settled = trio.Event()

    async def until_settled(self) -> None:
        while self.flying:
            await self.settled.wait()


class QueuePair:
    """Made by `Adapter.queue_pair`; then `prepare`, and `connect` or what a connection manager does (`dpurt.rdma.cm`)."""

    def __init__(
        self, adapter: Adapter, handle: Any, serial: int, send_depth: int, receive_depth: int, access: Access
    ) -> None:
        self._adapter = adapter
        self._handle = handle
        self._access = access
        self._serial = serial << _SERIAL_SHIFT
        self._core = QueuePairCore(send_depth, receive_depth)
        self._room = trio.lowlevel.ParkingLot()
        self._quiet = trio.lowlevel.ParkingLot()
        self.number: int = handle.qp_num
        self.psn = random.SystemRandom().randrange(1 << 24)
        self.peer = "nobody"
        self.failure = ""  # the first thing that went wrong
        self.on_failed: Callable[[], None] = lambda: None

    # --- connection ---

    @property
    def address(self) -> QueuePairAddress:
        device = self._adapter.device
        return QueuePairAddress(self.number, self.psn, device.gid, device.mtu, device.limits.max_rd_atomic)

    @property
    def is_usable(self) -> bool:
        return self._core.is_usable

    @property
    def depth(self) -> int:
        """Completions it can have under way."""
        return self._core.send_depth + self._core.receive_depth

    def prepare(self) -> None:
        """RESET -> INIT: receives may be posted, so that the peer finds them from its first message on."""
        v = verbs()
        attr = v.QPAttr(port_num=self._adapter.device.port)
        attr.qp_access_flags = int(self._access)
        self._guard(lambda: self._handle.to_init(attr))
        self._core.advance(QpState.INIT)

    def connect(self, peer: QueuePairAddress) -> None:
        """INIT -> RTR -> RTS. Raises QueuePairError when the peer's address cannot be used."""
        try:
            peer.check()
        except ValueError as error:
            raise QueuePairError(self.peer, "refused", str(error)) from error
        self.peer = f"{peer.gid} QP {peer.number}"
        attr = self._connection(peer)
        self._guard(lambda: self._handle.to_rts(attr))  # takes each step, INIT to INIT among them
        self._core.advance(QpState.RTR)
        self._core.advance(QpState.RTS)

    def advance(self, state: QpState, attributes: Any, mask: int) -> None:
        """INIT -> RTR or RTR -> RTS, as a connection manager has worked it out. Raises QueuePairError."""
        self._guard(lambda: self._handle.modify(attributes, mask))
        self._core.advance(state)

    def _connection(self, peer: QueuePairAddress) -> Any:
        v, device = verbs(), self._adapter.device
        route = v.GlobalRoute(dgid=v.GID(peer.gid), hop_limit=64, sgid_index=device.gid_index)
        attr = v.QPAttr(port_num=device.port)
        attr.qp_access_flags = int(self._access)
        attr.ah_attr = v.AHAttr(port_num=device.port, is_global=1, gr=route)
        attr.path_mtu = (min(peer.mtu, device.mtu) // 128).bit_length() - 1
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer.number, peer.psn, self.psn
        reads = min(peer.max_reads, device.limits.max_rd_atomic)
        attr.max_rd_atomic = attr.max_dest_rd_atomic = reads
        attr.min_rnr_timer, attr.timeout = RNR_TIMER, ACK_TIMEOUT
        attr.retry_cnt = attr.rnr_retry = RETRIES
        return attr

    def _guard(self, change: Callable[[], object]) -> None:
        try:
            change()
        except verbs().PyverbsError as error:
            self.fail(str(error))
            raise QueuePairError(self.peer, "refused", str(error)) from error

    # --- sends ---

    async def run(self, works: Sequence[Work | Bind], deadline: float) -> None:
        """Carry out works in order. Raises QueuePairError; then some may have been carried out, in order."""
        run = _Run()
        await trio.lowlevel.checkpoint_if_cancelled()
        if 0 < len(works) <= min(self._core.room, CHAIN) and trio.current_time() < deadline:
            self._post_chain(run, works)
            self._adapter.look()
            works = ()
        is_done = not works and not run.flying
        if not is_done:
            is_done = await self._run(run, works, deadline)
        if run.status != SUCCESS:
            raise QueuePairError(self.peer, run.status, self.failure)
        if not is_done:
            raise QueuePairError(self.peer, "timed_out")

    async def _run(self, run: _Run, works: Sequence[Work | Bind], deadline: float) -> bool:
        """Whether it ended in time."""
        try:
            with trio.CancelScope(deadline=deadline):
                await trio.lowlevel.checkpoint_if_cancelled()
                await self._post_all(run, works)
                self._adapter.look()
                await run.until_settled()
                return True
        finally:
            if run.flying:
                await self._abandon(run)
        return False

    async def _post_all(self, run: _Run, works: Sequence[Work | Bind]) -> None:
        at = 0
        while at < len(works) and run.status == SUCCESS:
            if not self._core.is_usable:
                run.status = FLUSHED if run.status == SUCCESS else run.status
                return
            room = min(self._core.room, CHAIN)
            if not room:
                await self._room.park()
                continue
            chain = works[at : at + room]
            self._post_chain(run, chain)
            at += len(chain)

    def _post_chain(self, run: _Run, chain: Sequence[Work | Bind]) -> None:
        run.flying += 1
        self.post_send(chain, run.ended)
        self._adapter.expect()

    def post_send(self, chain: Sequence[Work | Bind], on_ended: Callable[[str], None]) -> None:
        """Post a chain that fits (`send_room`); `on_ended(status)` is called once, from the completion task."""
        ids = self._core.post_send(on_ended, len(chain))
        try:
            self._handle.post_send(self._adapter.requests.fill(chain, ids, self._serial))
        except verbs().PyverbsError as error:
            self.give_up(f"posting: {error}")

    @property
    def send_room(self) -> int:
        return self._core.room

    async def _abandon(self, run: _Run) -> None:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(DRAIN_S):
                await run.until_settled()
            if run.flying:
                await self._end(f"{run.flying} posts did not end within {DRAIN_S:.0f} s")

    # --- receives ---

    def post_receive(self, local: Sge, on_received: Callable[[Received], None]) -> None:
        """Post one receive. Ignored when the queue pair is in error: `on_received` is told ``flushed`` at once."""
        request = self.receive_request(local)
        try:
            self.repeat_receive(request, on_received)
        finally:
            request.close()

    # --- requests that are made once and posted again and again ---

    def send_request(self, local: Sge) -> Any:
        """For `repeat_send`; to be closed once. (Making one costs more than posting it.)"""
        return _request(verbs().SendWR, local, opcode=int(Opcode.SEND))

    def receive_request(self, local: Sge) -> Any:
        """For `repeat_receive`; to be closed once."""
        return _request(verbs().RecvWR, local)

    def repeat_send(
        self, request: Any, on_ended: Callable[[str], None], *, is_signalled: bool = True
    ) -> None:
        """As `post_send` of this one SEND. The request may be posted again while it is under way. When it is not signalled,
        its end is told, and its room free, with that of a later send that is, or when it fails.
        """
        [wr_id] = self._core.post_send(on_ended, 1)
        request.wr_id = wr_id | self._serial
        request.send_flags = verbs().enums.IBV_SEND_SIGNALED if is_signalled else 0
        try:
            self._handle.post_send(request)
        except verbs().PyverbsError as error:
            self.give_up(f"posting: {error}")

    def repeat_receive(self, request: Any, on_received: Callable[[Received], None]) -> None:
        """As `post_receive`."""
        if self._core.state is QpState.ERR:
            on_received(Received(FLUSHED))
            return
        request.wr_id = self._core.post_receive(on_received) | self._serial
        try:
            self._handle.post_recv(request)
        except verbs().PyverbsError as error:
            self.give_up(f"posting a receive: {error}")

    # --- completions ---

    def completed(self, wc: Any) -> None:
        """The completion task has one of ours."""
        wr_id = wc.wr_id ^ self._serial
        if wr_id >> _SERIAL_SHIFT:
            return  # of a queue pair that had our number before
        status = STATUS.get(wc.status, f"status_{wc.status}")
        was_usable = self._core.is_usable
        if status not in (SUCCESS, FLUSHED):
            self.failure = self.failure or status
        if is_receive(wr_id):
            self._received(wc, wr_id, status)
        else:
            self._tell(self._core.send_completed(wr_id, status))
        if was_usable and not self._core.is_usable:
            self._failed()
        self._wake()

    def _received(self, wc: Any, wr_id: int, status: str) -> None:
        ended = self._core.receive_completed(wr_id, status)
        arrived = (
            Received(status, wc.byte_len, socket.ntohl(wc.imm_data)) if ended.is_ok else Received(status)
        )
        assert callable(ended.owner)
        ended.owner(arrived)

    def _tell(self, ended: Sequence[Ended]) -> None:
        for end in ended:
            assert callable(end.owner)
            end.owner(end.status)

    def _wake(self) -> None:
        if self._room:
            self._room.unpark_all()
        if self._quiet and not self._core.num_sending and not self._core.num_receiving:
            self._quiet.unpark_all()

    # --- the end ---

    def fail(self, reason: str) -> None:
        """Put the queue pair into error: everything posted is flushed by the device. Idempotent."""
        self.failure = self.failure or reason
        if self._core.state is QpState.ERR or self._handle is None:
            return
        self._core.advance(QpState.ERR)
        self._to_error()
        self._failed()
        self._wake()

    def give_up(self, reason: str) -> None:
        """What the books hold will not all be reported (a post was refused, the device is gone): only the end will do."""
        self.failure = self.failure or reason
        self.destroy()
        self.on_failed()

    def _failed(self) -> None:
        self._to_error()
        self.on_failed()

    def _to_error(self) -> None:
        v = verbs()
        if self._handle is None:
            return
        attr = v.QPAttr(qp_state=v.enums.IBV_QPS_ERR)
        with contextlib.suppress(v.PyverbsError):  # from RESET there is no way, and nothing to flush either
            self._handle.modify(attr, v.enums.IBV_QP_STATE)

    async def aclose(self, reason: str = "closed") -> None:
        """Flush and destroy. Idempotent. Never cancelled half-way; takes at most `FLUSH_S`."""
        with trio.CancelScope(shield=True):
            await self._end(reason)

    async def _end(self, reason: str) -> None:
        self.fail(reason)
        with trio.move_on_after(FLUSH_S):
            while self._handle is not None and (self._core.num_sending or self._core.num_receiving):
                await self._quiet.park()
        self.destroy()

    def destroy(self) -> None:
        """At once, flushed or not. After it the device touches nothing for this queue pair."""
        if self._handle is None:
            return
        self._adapter.discard(self)
        handle, self._handle = self._handle, None
        handle.close()
        sends, receives = self._core.flush()
        self._tell(sends)
        for end in receives:
            assert callable(end.owner)
            end.owner(Received(FLUSHED))
        self._wake()


def _request(make: Callable[..., Any], local: Sge, **params: object) -> Any:
    element = verbs().SGE(local.address, local.length, local.lkey)
    try:
        return make(num_sge=1, sg=[element], **params)
    finally:
        element.close()


class Requests:
    """A chain of pyverbs work requests, made once and filled in for each post: making one costs more than posting it.

    Each points to the next and to an element of its own, for good; a chain of n is the last n of them.
    """

    def __init__(self) -> None:
        v = verbs()
        self._signalled = v.enums.IBV_SEND_SIGNALED
        self._bind = v.enums.IBV_WR_BIND_MW
        self._elements = [v.SGE(0, 0, 0) for _ in range(CHAIN)]
        self._requests = [v.SendWR(opcode=self._bind) for _ in range(CHAIN)]
        for request, element in zip(self._requests, self._elements, strict=True):
            request.sg_list = element
        for request, following in pairwise(self._requests):
            request.next_wr = following

    def fill(self, works: Sequence[Work | Bind], ids: Sequence[int], serial: int) -> Any:
        """The first of the chain, whose last is signalled. Valid until the next `fill`: a post copies it."""
        assert 0 < len(works) <= CHAIN, "longer ones are posted in parts"
        start = CHAIN - len(works)
        for at, (work, wr_id) in enumerate(zip(works, ids, strict=True), start):
            request = self._requests[at]
            request.wr_id = wr_id | serial
            request.send_flags = 0
            if isinstance(work, Bind):
                self._fill_bind(request, work)
            else:
                self._fill_move(request, self._elements[at], work)
        self._requests[-1].send_flags = self._signalled
        return self._requests[start]

    @staticmethod
    def _fill_move(request: Any, element: Any, work: Work) -> None:
        request.opcode = int(work.opcode)
        assert len(work.local) <= 1, "a request has one element"
        request.num_sge = len(work.local)
        for sge in work.local:
            element.addr, element.length, element.lkey = sge.address, sge.length, sge.lkey
        request.imm_data = socket.htonl(work.immediate)
        if work.opcode is not Opcode.SEND:
            request.set_wr_rdma(work.rkey, work.remote_address)

    def _fill_bind(self, request: Any, work: Bind) -> None:
        request.opcode = self._bind
        request.num_sge = request.imm_data = 0  # Soft-RoCE refuses any other
        info = verbs().MWBindInfo(work.chunk.handle, work.address, work.length, int(work.access))
        request.set_bind_wr(work.window.handle, info)
        work.window.rkey = request.rkey
