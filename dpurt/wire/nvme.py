"""NVMe over Fabrics, what is the same on every transport: commands out, completions and data structures in.

Sans-I/O. The functions make `Command`s (submission entries without id and data pointer) and take apart what
the controller answers. Numbers are those of the NVM Express base, NVM command set and fabrics specifications.

    entry: 0 opcode | 1 flags | 2 id | 4 nsid or fabrics type | 24 data pointer (SGL) | 40 dwords 10 to 15

Beside this module: `nvme_status` (what to do about an error), `nvme_queue` (what is in flight),
`nvme_controller` (how a controller is brought up). Leaves the SGL and all framing to a transport (`nvme_tcp`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.errors import RemoteProtocolError
from dpurt.wire.nvme_queue import Command
from dpurt.wire.nvme_status import Status

__all__ = [
    "ANA_CHANGE",
    "ANA_NON_OPTIMIZED",
    "ANA_OPTIMIZED",
    "DISCOVERY_NQN",
    "AsyncEvent",
    "Cqe",
    "DiscoveryEntry",
    "IdentifyController",
    "IdentifyNamespace",
    "async_event_request",
    "connect",
    "deallocate",
    "decode_active_namespaces",
    "decode_ana_states",
    "decode_discovery_header",
    "decode_discovery_entries",
    "flush",
    "get_log_page",
    "identify",
    "keep_alive",
    "property_get",
    "property_set",
    "read",
    "set_features",
    "write",
    "write_zeroes",
]

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"

FLUSH, WRITE, READ, WRITE_ZEROES, DATASET_MANAGEMENT = 0x00, 0x01, 0x02, 0x08, 0x09
GET_LOG_PAGE, IDENTIFY, SET_FEATURES, ASYNC_EVENT, KEEP_ALIVE, FABRICS = 0x02, 0x06, 0x09, 0x0C, 0x18, 0x7F
PROPERTY_SET, CONNECT, PROPERTY_GET = 0x00, 0x01, 0x04

CAP, CC, CSTS = 0x00, 0x14, 0x1C  # property offsets
CNS_NAMESPACE, CNS_CONTROLLER, CNS_ACTIVE_NAMESPACES = 0, 1, 2
FEATURE_NUM_QUEUES, FEATURE_ASYNC_EVENTS = 0x07, 0x0B
LOG_CHANGED_NAMESPACES, LOG_ANA, LOG_DISCOVERY = 0x04, 0x0C, 0x70
ANA_GROUPS_ONLY = 1  # log-specific field: no lists of namespaces
ANA_OPTIMIZED, ANA_NON_OPTIMIZED, ANA_INACCESSIBLE, ANA_PERSISTENT_LOSS, ANA_CHANGE = 1, 2, 3, 4, 15
EVENTS_NAMESPACE_AND_ANA = 1 << 8 | 1 << 11
NO_SQ_FLOW_CONTROL = 4  # in the attributes of Connect
ANY_CONTROLLER = 0xFFFF
TRTYPE_RDMA, TRTYPE_TCP = 1, 3

IDENTIFY_BYTES = 4096
CONNECT_BYTES = 1024
DISCOVERY_ENTRY_BYTES = 1024
MAX_BLOCKS = 65536  # of one read or write
_SGL = 0x40  # flags: the data pointer is an SGL
_DEALLOCATE = 0x4  # dataset management attribute
_DEAC = 1 << 25  # write zeroes may deallocate
_MAX_NQN_BYTES = 223

_ENTRY = struct.Struct("<BBHI16x16xIIIIII")
_CONNECT = struct.Struct("<BBHB35xHHHBxI12x")
_PROPERTY = struct.Struct("<BBHB35xB3xIQ8x")
_CQE = struct.Struct("<QHHHH")


# --- commands ---


def _entry(opcode: int, nsid: int = 0, *dwords: int) -> bytearray:
    return bytearray(_ENTRY.pack(opcode, _SGL, 0, nsid, *dwords, *(0,) * (6 - len(dwords))))


def connect(
    queue_id: int,
    queue_size: int,
    *,
    host_id: bytes,
    host_nqn: str,
    subsystem_nqn: str,
    controller_id: int = ANY_CONTROLLER,
    keep_alive_ms: int = 0,
    attributes: int = NO_SQ_FLOW_CONTROL,
) -> Command:
    """The first command on each connection; queue 0 is the admin queue. Its result is the controller id."""
    sqe = _CONNECT.pack(
        FABRICS,
        _SGL,
        0,
        CONNECT,
        0,
        queue_id,
        queue_size - 1,
        attributes,
        keep_alive_ms if not queue_id else 0,
    )
    data = bytearray(CONNECT_BYTES)
    data[0:16] = host_id
    data[16:18] = controller_id.to_bytes(2, "little")
    for at, nqn in ((256, subsystem_nqn), (512, host_nqn)):
        name = nqn.encode()
        data[at : at + len(name)] = name
    return Command(bytearray(sqe), data_out=[memoryview(data)])


def is_nqn(name: str) -> bool:
    """Whether a controller would take it as a qualified name at all."""
    return name.startswith("nqn.") and len(name.encode()) <= _MAX_NQN_BYTES and "\0" not in name


def property_get(offset: int, *, is_wide: bool = False) -> Command:
    return Command(bytearray(_PROPERTY.pack(FABRICS, _SGL, 0, PROPERTY_GET, is_wide, offset, 0)))


def property_set(offset: int, value: int) -> Command:
    return Command(bytearray(_PROPERTY.pack(FABRICS, _SGL, 0, PROPERTY_SET, 0, offset, value)))


def identify(cns: int, nsid: int = 0) -> Command:
    return Command(_entry(IDENTIFY, nsid, cns), data_in=[memoryview(bytearray(IDENTIFY_BYTES))])


def get_log_page(page: int, length: int, *, offset: int = 0, specific: int = 0, nsid: int = 0) -> Command:
    """`length` is a multiple of 4. The event that pointed here is cleared."""
    count = length // 4 - 1
    sqe = _entry(
        GET_LOG_PAGE,
        nsid,
        page | specific << 8 | (count & 0xFFFF) << 16,
        count >> 16,
        offset & 0xFFFFFFFF,
        offset >> 32,
    )
    return Command(sqe, data_in=[memoryview(bytearray(length))])


def set_features(feature: int, value: int) -> Command:
    return Command(_entry(SET_FEATURES, 0, feature, value))


def async_event_request() -> Command:
    return Command(_entry(ASYNC_EVENT))


def keep_alive() -> Command:
    return Command(_entry(KEEP_ALIVE))


def read(nsid: int, block: int, num_blocks: int, buffers: Sequence[memoryview], tag: object) -> Command:
    return Command(_transfer(READ, nsid, block, num_blocks), data_in=buffers, tag=tag)


def write(nsid: int, block: int, num_blocks: int, buffers: Sequence[memoryview], tag: object) -> Command:
    return Command(_transfer(WRITE, nsid, block, num_blocks), data_out=buffers, tag=tag)


def write_zeroes(nsid: int, block: int, num_blocks: int, tag: object) -> Command:
    """The controller may deallocate the blocks for it."""
    return Command(_transfer(WRITE_ZEROES, nsid, block, num_blocks, _DEAC), tag=tag)


def flush(nsid: int, tag: object) -> Command:
    return Command(_entry(FLUSH, nsid), tag=tag)


def deallocate(nsid: int, block: int, num_blocks: int, tag: object) -> Command:
    """Dataset management with one range."""
    data = memoryview(struct.pack("<IIQ", 0, num_blocks, block))
    return Command(_entry(DATASET_MANAGEMENT, nsid, 0, _DEALLOCATE), data_out=[data], tag=tag)


def _transfer(opcode: int, nsid: int, block: int, num_blocks: int, flags: int = 0) -> bytearray:
    return _entry(opcode, nsid, block & 0xFFFFFFFF, block >> 32, num_blocks - 1 | flags)


# --- completions ---


@dataclass(frozen=True, slots=True)
class Cqe:
    """A completion entry."""

    result: int
    sq_head: int
    command_id: int
    status: Status

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Cqe:
        result, sq_head, _, command_id, status = _CQE.unpack(data)
        return cls(result, sq_head, command_id, Status.decode(status))


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """An event notice, from the result of an async event request."""

    type: int
    info: int
    log_page: int

    @classmethod
    def decode(cls, result: int) -> AsyncEvent:
        return cls(result & 7, result >> 8 & 0xFF, result >> 16 & 0xFF)

    @property
    def is_namespace_change(self) -> bool:
        return (self.type, self.info) == (2, 0)

    @property
    def is_ana_change(self) -> bool:
        return (self.type, self.info) == (2, 3)


# --- data structures ---


@dataclass(frozen=True, slots=True)
class IdentifyController:
    """What we use of it. `max_transfer_bytes` is None where there is no limit."""

    serial: str
    model: str
    controller_id: int
    max_transfer_bytes: int | None
    has_ana: bool
    ana_transition_s: int
    num_ana_groups: int
    crdt: tuple[int, int, int]
    keep_alive_unit_ms: int
    max_commands: int
    num_namespaces: int
    has_deallocate: bool
    has_write_zeroes: bool
    in_capsule_bytes: int
    is_discovery: bool

    @classmethod
    def decode(cls, data: memoryview, min_page_bytes: int = 4096) -> IdentifyController:
        """Raises RemoteProtocolError for what cannot be. `min_page_bytes` is that of the CAP property."""
        mdts = data[77]
        _require(mdts < 32, "identify controller", f"MDTS {mdts} is absurd")
        ioccsz, _, icdoff = struct.unpack_from("<IIH", data, 1792)
        _require(icdoff == 0, "identify controller", f"in-capsule data at offset {icdoff} is not supported")
        oncs = _u16(data, 520)
        return cls(
            serial=_text(data[4:24]),
            model=_text(data[24:64]),
            controller_id=_u16(data, 78),
            max_transfer_bytes=min_page_bytes << mdts if mdts else None,
            has_ana=bool(data[76] & 8),
            ana_transition_s=data[342],
            num_ana_groups=_u32(data, 348),
            crdt=struct.unpack_from("<HHH", data, 128),
            keep_alive_unit_ms=_u16(data, 320) * 100,
            max_commands=_u16(data, 514),
            num_namespaces=_u32(data, 516),
            has_deallocate=bool(oncs & 4),
            has_write_zeroes=bool(oncs & 8),
            in_capsule_bytes=max(ioccsz * 16 - 64, 0),
            is_discovery=data[111] == 2,
        )


@dataclass(frozen=True, slots=True)
class IdentifyNamespace:
    """What we use of it. All zero (no blocks): inactive. `identity` is its NGUID and EUI-64, maybe zero."""

    num_blocks: int
    block_size: int
    metadata_bytes: int
    ana_group: int
    optimal_blocks: int
    identity: bytes

    @classmethod
    def decode(cls, data: memoryview) -> IdentifyNamespace:
        """Raises RemoteProtocolError for what cannot be."""
        (num_blocks,) = struct.unpack_from("<Q", data, 0)
        formatted = data[26]
        index = formatted & 0xF | (formatted >> 1 & 0x30)
        metadata, shift = struct.unpack_from("<HB", data, 128 + 4 * index)
        _require(not num_blocks or 9 <= shift <= 31, "identify namespace", f"blocks of 2^{shift} bytes")
        return cls(num_blocks, 1 << shift, metadata, _u32(data, 92), _u16(data, 46), bytes(data[104:128]))

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.block_size


def decode_active_namespaces(data: memoryview) -> list[int]:
    """The NSIDs of a list (active or changed), ascending, up to the first zero."""
    found = []
    for (nsid,) in struct.iter_unpack("<I", data):
        if not nsid:
            break
        found.append(nsid)
    return found


def ana_log_bytes(num_groups: int) -> int:
    """How much to ask for, without lists of namespaces."""
    return 16 + 32 * num_groups


def decode_ana_states(data: memoryview) -> dict[int, int]:
    """State by ANA group. Raises RemoteProtocolError where the log is cut short."""
    num_groups = _u16(data, 8)
    at = 16
    states = {}
    for _ in range(num_groups):
        _require(at + 32 <= len(data), "ANA log", f"{num_groups} groups do not fit {len(data)} bytes")
        group, num_nsids = struct.unpack_from("<II", data, at)
        states[group] = data[at + 16] & 0xF
        at += 32 + 4 * num_nsids
    return states


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One way to one subsystem."""

    trtype: int
    subsystem_type: int
    address: str
    service: str
    subsystem_nqn: str


def decode_discovery_header(data: memoryview) -> tuple[int, int]:
    """(generation, number of entries)."""
    generation, count = struct.unpack_from("<QQ", data, 0)
    _require(count <= 4096, "discovery log", f"{count} entries are absurd")
    return generation, count


def decode_discovery_entries(data: memoryview) -> list[DiscoveryEntry]:
    """All entries in the part of the log after its header."""
    return [
        _discovery_entry(data[at : at + DISCOVERY_ENTRY_BYTES])
        for at in range(0, len(data), DISCOVERY_ENTRY_BYTES)
    ]


def _discovery_entry(data: memoryview) -> DiscoveryEntry:
    return DiscoveryEntry(data[0], data[2], _text(data[512:768]), _text(data[32:64]), _text(data[256:512]))


def _text(data: memoryview) -> str:
    return bytes(data).split(b"\0")[0].decode("utf-8", "replace").strip()


def _u16(data: memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _require(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise RemoteProtocolError("nvme_data", f"{where}: {problem}")
