"""The kernel's RDMA connection manager: requests and answers of its character device (`rdma_user_cm.h`, ABI 4).

Sans-I/O. A request is a header and a struct, written to the device in one call; those with an answer carry the
address to put it at. Only what an active side needs: resolve an address and its route, connect with private data,
and learn how to set up the queue pair, which is made by the verbs library.

    create id -> resolve address -> resolve route -> (make the QP) -> connect -> response -> (QP to RTR, RTS) -> accept

Integers are in the machine's byte order, except where they come from the network.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

__all__ = [
    "ACK_TIMEOUT",
    "ADDR_BYTES",
    "EVENT_BYTES",
    "ID_BYTES",
    "QP_ATTR_BYTES",
    "CmEvent",
    "PathAddress",
    "QpAttributes",
    "accept",
    "connect",
    "create_id",
    "decode_device",
    "get_event",
    "init_qp_attr",
    "query_address",
    "resolve_address",
    "resolve_route",
    "set_ack_timeout",
]

ADDR_RESOLVED, ADDR_ERROR, ROUTE_RESOLVED, ROUTE_ERROR = 0, 1, 2, 3
CONNECT_RESPONSE, CONNECT_ERROR, UNREACHABLE, REJECTED, ESTABLISHED = 5, 6, 7, 8, 9
READY_TO_RECEIVE, READY_TO_SEND = 2, 3  # states of a queue pair
DISCONNECTED, DEVICE_REMOVAL, ADDR_CHANGE, TIMEWAIT_EXIT = 10, 11, 14, 15
EVENT_NAMES = {
    ADDR_ERROR: "the address cannot be resolved to an RDMA device",
    ROUTE_ERROR: "no route",
    CONNECT_ERROR: "connecting failed",
    UNREACHABLE: "nobody answers there",
    REJECTED: "rejected",
    DISCONNECTED: "closed by the target",
    DEVICE_REMOVAL: "the RDMA device was removed",
    ADDR_CHANGE: "the interface's address changed",
}

_CREATE_ID, _RESOLVE_IP, _RESOLVE_ROUTE, _CONNECT, _ACCEPT = 0, 3, 4, 6, 8
_INIT_QP_ATTR, _GET_EVENT, _SET_OPTION, _QUERY = 11, 12, 14, 19
_PORT_SPACE_TCP, _QP_TYPE_RC = 0x0106, 2
_OPTION_ID, _OPTION_ACK_TIMEOUT, _QUERY_ADDR = 0, 3, 0
_MAX_PRIVATE = 256
_TAG = 1  # an id's user data: without any it has no events
ACK_TIMEOUT = 18
"""4.096 us * 2^18, a second. Soft-RoCE sends again what is under way when a shorter one runs out on a busy link."""

_HEADER = struct.Struct("=IHH")
_CREATE = struct.Struct("=QQHB5x")
_RESOLVE = struct.Struct("=28s28sII")
_ROUTE = struct.Struct("=II")
_CONN = struct.Struct("=II256sBBBBBBBB")
_TAIL = struct.Struct("=IIII")  # id, reserved, ECE
_QP_ATTR_OF = struct.Struct("=QII")  # answer's address, id, option or state
_OPTION = struct.Struct("=QIIII")
_EVENT = struct.Struct("=QIIi")
_EVENT_PRIVATE = _EVENT.size + 8
_SOURCE_ADDRESS = 16 + 4  # in the answer to an address query
_AF_INET = 2
_ATTR = struct.Struct("=10I")
_AH = struct.Struct("=16sIBBBxHBBBBBx")
_ATTR_TAIL = struct.Struct("=HHBBBBBBBBBBB5x")

ID_BYTES = 4
ADDR_BYTES = 280
EVENT_BYTES = 336
QP_ATTR_BYTES = _ATTR.size + 2 * _AH.size + 20 + _ATTR_TAIL.size


def _request(command: int, body: bytes, answer_bytes: int = 0) -> bytes:
    return _HEADER.pack(command, len(body), answer_bytes) + body


def create_id(answer: int) -> bytes:
    """The answer is the id, 32 bits."""
    return _request(_CREATE_ID, _CREATE.pack(_TAG, answer, _PORT_SPACE_TCP, _QP_TYPE_RC), ID_BYTES)


def set_ack_timeout(cm_id: int, value_at: int) -> bytes:
    """The byte at `value_at` is how long an answer to a packet may take, to be told to the other side too."""
    return _request(_SET_OPTION, _OPTION.pack(value_at, cm_id, _OPTION_ID, _OPTION_ACK_TIMEOUT, 1))


def resolve_address(cm_id: int, host: str, port: int, timeout_ms: int) -> bytes:
    """To `host`, an IPv4 address, from whatever address of ours leads there."""
    return _request(_RESOLVE_IP, _RESOLVE.pack(b"", encode_address(host, port), cm_id, timeout_ms))


def encode_address(host: str, port: int) -> bytes:
    """An IPv4 socket address, as the kernel has it."""
    return struct.pack("=H", _AF_INET) + struct.pack("!H", port) + ipaddress.IPv4Address(host).packed


def resolve_route(cm_id: int, timeout_ms: int) -> bytes:
    return _request(_RESOLVE_ROUTE, _ROUTE.pack(cm_id, timeout_ms))


def query_address(cm_id: int, answer: int) -> bytes:
    return _request(_QUERY, _QP_ATTR_OF.pack(answer, cm_id, _QUERY_ADDR), ADDR_BYTES)


def decode_device(answer: bytes) -> tuple[str, str]:
    """(node GUID as sysfs writes it, our own address) of the device an address was resolved to."""
    digits = answer[:8].hex()
    own = ipaddress.IPv4Address(answer[_SOURCE_ADDRESS : _SOURCE_ADDRESS + 4])
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4)), str(own)


def connect(cm_id: int, qp_num: int, private: bytes, *, reads: int, retries: int = 7) -> bytes:
    """Ask for a connection. The target may have `reads` RDMA READs of our memory in flight."""
    return _request(_CONNECT, _conn(qp_num, private, reads, retries) + _TAIL.pack(cm_id, 0, 0, 0))


def accept(cm_id: int) -> bytes:
    """Say that the queue pair is ready, after the response came."""
    return _request(_ACCEPT, struct.pack("=Q", _TAG) + bytes(_CONN.size) + _TAIL.pack(cm_id, 0, 0, 0))


def _conn(qp_num: int, private: bytes, reads: int, retries: int) -> bytes:
    assert len(private) <= _MAX_PRIVATE
    return _CONN.pack(qp_num, 0, private, len(private), 0, reads, 0, 0, retries, retries, 1)


def init_qp_attr(cm_id: int, state: int, answer: int) -> bytes:
    """How to bring the queue pair to a state; see `QpAttributes`."""
    return _request(_INIT_QP_ATTR, _QP_ATTR_OF.pack(answer, cm_id, state), QP_ATTR_BYTES)


def get_event(answer: int) -> bytes:
    return _request(_GET_EVENT, struct.pack("=Q", answer), EVENT_BYTES)


@dataclass(frozen=True, slots=True)
class CmEvent:
    """Something happened to an id. `status` is a negative errno, or for REJECTED the reason."""

    kind: int
    status: int
    private: bytes

    @classmethod
    def decode(cls, answer: bytes) -> CmEvent:
        _, _, kind, status = _EVENT.unpack_from(answer)
        length = answer[_EVENT_PRIVATE + _MAX_PRIVATE]
        return cls(kind, status, answer[_EVENT_PRIVATE : _EVENT_PRIVATE + length])

    @property
    def name(self) -> str:
        return EVENT_NAMES.get(self.kind, f"event {self.kind}")


@dataclass(frozen=True, slots=True)
class PathAddress:
    """An address handle."""

    dgid: str
    flow_label: int
    sgid_index: int
    hop_limit: int
    traffic_class: int
    dlid: int
    sl: int
    src_path_bits: int
    static_rate: int
    is_global: int
    port_num: int


@dataclass(frozen=True, slots=True)
class QpAttributes:
    """What to set to bring a queue pair to its next state; `mask` says which of it."""

    mask: int
    state: int
    path_mtu: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    address: PathAddress
    pkey_index: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_count: int
    rnr_retry: int

    @classmethod
    def decode(cls, answer: bytes) -> QpAttributes:
        mask, state, _, mtu, _, _, rq_psn, sq_psn, dest, _ = _ATTR.unpack_from(answer)
        dgid, *path = _AH.unpack_from(answer, _ATTR.size)
        tail = _ATTR_TAIL.unpack_from(answer, QP_ATTR_BYTES - _ATTR_TAIL.size)
        pkey, _, _, _, rd_atomic, dest_rd_atomic, rnr_timer, port, timeout, retries, rnr_retries, _, _ = tail
        return cls(
            mask=mask,
            state=state,
            path_mtu=mtu,
            rq_psn=rq_psn,
            sq_psn=sq_psn,
            dest_qp_num=dest,
            address=PathAddress(_gid(dgid), *path),
            pkey_index=pkey,
            max_rd_atomic=rd_atomic,
            max_dest_rd_atomic=dest_rd_atomic,
            min_rnr_timer=rnr_timer,
            port_num=port,
            timeout=timeout,
            retry_count=retries,
            rnr_retry=rnr_retries,
        )


def _gid(raw: bytes) -> str:
    digits = raw.hex()
    return ":".join(digits[i : i + 4] for i in range(0, 32, 4))
