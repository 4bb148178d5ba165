"""Connecting a queue pair as a client of the RDMA connection manager, without blocking.

Theory of operation. The manager is a character device of the kernel: requests are written to it, events make it
readable. pyverbs wraps librdmacm without private data, which NVMe over RDMA needs, and blocks; so this speaks to the
device itself (`dpurt.wire.rdma_cm` has the structs). Each id has the device opened once more, for events of its own.

Leaves to its owner: the queue pair, made and prepared between `resolve` and `connect`; what the private data means.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

import trio

from dpurt.rdma.binding import verbs
from dpurt.rdma.qp import QpState
from dpurt.rdma.queue_pair import RNR_TIMER, QueuePair
from dpurt.wire import rdma_cm
from dpurt.wire.rdma_cm import CmEvent, QpAttributes

__all__ = ["CmId"]

_DEVICE = "/dev/infiniband/rdma_cm"
_RESOLVE_MS = 5000


class CmId:
    """One connection to be. Raises OSError where the kernel or the network says no."""

    def __init__(self) -> None:
        self._is_open = True
        self._answer = ctypes.create_string_buffer(rdma_cm.EVENT_BYTES)
        self._at = ctypes.addressof(self._answer)
        try:
            self._file = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(error.errno, f"{_DEVICE}: {error.strerror}; see modprobe rdma_ucm") from error
        try:
            self._write(rdma_cm.create_id(self._at))
            self._id = int.from_bytes(self._answer.raw[: rdma_cm.ID_BYTES], sys.byteorder)
        except BaseException:
            os.close(self._file)
            raise

    async def resolve(self, host: str, port: int) -> tuple[str, str]:
        """(node GUID, our own address) of the device that leads to this address."""
        self._answer[0] = bytes([rdma_cm.ACK_TIMEOUT])
        self._write(rdma_cm.set_ack_timeout(self._id, self._at))
        self._write(rdma_cm.resolve_address(self._id, host, port, _RESOLVE_MS))
        await self._expect(rdma_cm.ADDR_RESOLVED)
        self._write(rdma_cm.resolve_route(self._id, _RESOLVE_MS))
        await self._expect(rdma_cm.ROUTE_RESOLVED)
        return rdma_cm.decode_device(self._ask(rdma_cm.query_address(self._id, self._at), rdma_cm.ADDR_BYTES))

    def _attributes(self, state: int) -> QpAttributes:
        request = rdma_cm.init_qp_attr(self._id, state, self._at)
        return QpAttributes.decode(self._ask(request, rdma_cm.QP_ATTR_BYTES))

    async def connect(self, qp_num: int, private: bytes, reads: int) -> CmEvent:
        """Its answer, CONNECT_RESPONSE (to be accepted) or REJECTED, with the target's private data."""
        self._write(rdma_cm.connect(self._id, qp_num, private, reads=reads))
        return await self._expect(rdma_cm.CONNECT_RESPONSE, rdma_cm.REJECTED)

    def accept(self, queue_pair: QueuePair) -> None:
        """Bring the queue pair to RTS and tell the target. Raises QueuePairError too."""
        for state, number in ((QpState.RTR, rdma_cm.READY_TO_RECEIVE), (QpState.RTS, rdma_cm.READY_TO_SEND)):
            attributes = self._attributes(number)
            queue_pair.advance(state, _for_verbs(attributes), attributes.mask)
        self._write(rdma_cm.accept(self._id))

    async def wait_lost(self) -> str:
        """Return when the connection is over, with the reason."""
        while True:
            event = await self._next_event()
            if event.kind in rdma_cm.EVENT_NAMES:
                return event.name

    def close(self) -> None:
        """Tell the target, and forget the connection. Idempotent; wakes waiters with trio.ClosedResourceError."""
        if self._is_open:
            self._is_open = False
            trio.lowlevel.notify_closing(self._file)
            os.close(self._file)

    def _write(self, request: bytes) -> None:
        if not self._is_open:  # its number may be another file's by now
            raise trio.ClosedResourceError
        os.write(self._file, request)

    def _ask(self, request: bytes, answer_bytes: int) -> bytes:
        self._write(request)
        return self._answer.raw[:answer_bytes]

    async def _next_event(self) -> CmEvent:
        while True:
            try:
                return CmEvent.decode(self._ask(rdma_cm.get_event(self._at), rdma_cm.EVENT_BYTES))
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._file)

    async def _expect(self, *kinds: int) -> CmEvent:
        event = await self._next_event()
        if event.kind in kinds:
            return event
        code = -event.status if event.status < 0 else errno.ECONNREFUSED
        raise OSError(code, f"{event.name} ({os.strerror(code)})")


def _for_verbs(step: QpAttributes) -> Any:
    """As pyverbs takes it; the timers are ours, the kernel's are for another purpose."""
    v, at = verbs(), step.address
    made = v.QPAttr(qp_state=step.state)
    if at.is_global:
        route = v.GlobalRoute(
            dgid=v.GID(at.dgid), flow_label=at.flow_label, sgid_index=at.sgid_index,
            hop_limit=at.hop_limit, traffic_class=at.traffic_class,
        )  # fmt: skip
        made.ah_attr = v.AHAttr(
            gr=route, dlid=at.dlid, sl=at.sl, src_path_bits=at.src_path_bits, static_rate=at.static_rate,
            is_global=1, port_num=at.port_num,
        )  # fmt: skip
    made.path_mtu = step.path_mtu
    made.dest_qp_num, made.rq_psn, made.sq_psn = step.dest_qp_num, step.rq_psn, step.sq_psn
    made.max_rd_atomic, made.max_dest_rd_atomic = step.max_rd_atomic, step.max_dest_rd_atomic
    made.retry_cnt, made.rnr_retry = step.retry_count, step.rnr_retry
    made.min_rnr_timer, made.timeout = RNR_TIMER, max(step.timeout, rdma_cm.ACK_TIMEOUT)
    return made
