"""Which RDMA device, port and GID to use, and what the device allows.

RoCE v2 addresses a peer by a GID; the one to use is that of the interface's IPv4 address (``::ffff:a.b.c.d``), which every
router and every Soft-RoCE understands. `discover` lists each active port that has one; `find` picks by device name, by
address, or the only one. Which is which is never guessed: two that fit are an error that names both.

Leaves to others: InfiniBand proper (addressed by LID) and IPv6, which nothing here was tried on; opening the device.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpurt.errors import RdmaUnavailable
from dpurt.rdma.binding import missing, verbs

__all__ = ["DeviceLimits", "RdmaDevice", "discover", "find", "is_up", "memlock_bytes", "why_off"]

_SYSFS = Path("/sys/class/infiniband")
_GIDS = 256
_MW_TYPE_2A, _MW_TYPE_2B = 1 << 23, 1 << 24
_SOFT_ROCE = 0xFFFFFF  # its vendor id


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device says it can do. `max_mr_bytes` is of one registration; `has_windows`: type-2 memory windows;
    `is_software`: this machine's CPUs do its work (Soft-RoCE).
    """

    max_mr_bytes: int
    max_mr: int
    max_mw: int
    max_qp: int
    max_qp_wr: int
    max_cqe: int
    max_sge: int
    max_rd_atomic: int
    has_windows: bool
    is_software: bool


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One port of one device, and the GID its IPv4 `address` gives it. `mtu` in bytes. `numa` -1 and `bytes_per_s` 0: the
    kernel does not say.
    """

    name: str
    port: int
    gid_index: int
    gid: str
    address: str
    mtu: int
    limits: DeviceLimits
    numa: int = field(default=-1, compare=False)
    bytes_per_s: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.name} port {self.port}, GID {self.gid_index} ({self.address}), MTU {self.mtu}"


def why_off() -> str:
    """Why RDMA cannot be used on this machine; empty when it can."""
    if not any(_SYSFS.glob("*")):
        return f"no RDMA device in {_SYSFS}"
    if problem := missing():
        return problem
    try:
        return "" if discover() else "no RDMA port is up and has an IPv4 address (RoCE v2)"
    except RdmaUnavailable as error:
        return str(error)


def is_up(device: RdmaDevice) -> bool:
    """Whether its port is active at this moment, as far as the kernel says."""
    try:
        return "ACTIVE" in (_SYSFS / device.name / "ports" / str(device.port) / "state").read_text()
    except OSError:
        return False


def memlock_bytes() -> int | None:
    """How much memory this process may have registered (RLIMIT_MEMLOCK); None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def discover() -> list[RdmaDevice]:
    """Every active port with an IPv4 GID. Raises RdmaUnavailable without pyverbs, or when a device cannot be opened."""
    v = verbs()
    try:
        names = sorted(device.name.decode() for device in v.get_device_list())
        return [found for name in names for found in _ports(v, name)]
    except v.PyverbsError as error:
        raise RdmaUnavailable("", f"the devices cannot be asked: {error}") from error


def find(name: str = "", address: str = "") -> RdmaDevice:
    """The one device that is called `name` and has `address`, whichever are given. Raises RdmaUnavailable."""
    if reason := why_off():
        raise RdmaUnavailable(name or address, reason)
    everything = discover()
    fitting = [d for d in everything if name in ("", d.name) and address in ("", d.address)]
    if len(fitting) == 1:
        return fitting[0]
    raise RdmaUnavailable(name or address, _not_one(fitting, everything))


def _not_one(fitting: Sequence[RdmaDevice], everything: Sequence[RdmaDevice]) -> str:
    if fitting:
        return f"more than one fits, name a device or an address: {'; '.join(map(str, fitting))}"
    return f"no such device; there is {'; '.join(map(str, everything))}"


def _ports(v: Any, name: str) -> list[RdmaDevice]:
    found = []
    with v.Context(name=name) as context:
        attributes = context.query_device()
        limits = _limits(attributes)
        for entry in context.query_gid_table(_GIDS):
            address = _ipv4(entry.gid_str())
            if not address or entry.gid_type != v.enums.IBV_GID_TYPE_ROCE_V2:
                continue
            port = context.query_port(entry.port_num)
            if port.state == v.enums.IBV_PORT_ACTIVE:
                mtu = 128 << port.active_mtu
                where = name, entry.port_num, entry.gid_index, entry.gid_str()
                place = _numa(name), _bytes_per_s(name, entry.port_num)
                found.append(RdmaDevice(*where, address, mtu, limits, *place))
    return found


def _numa(name: str) -> int:
    try:
        return int((_SYSFS / name / "device" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _bytes_per_s(name: str, port: int) -> float:
    """Of a port, from words such as ``100 Gb/sec (4X EDR)``."""
    try:
        return float((_SYSFS / name / "ports" / str(port) / "rate").read_text().split()[0]) * 1e9 / 8
    except (OSError, ValueError, IndexError):
        return 0.0


def _ipv4(gid: str) -> str:
    """The address a GID stands for; empty if it is not of an IPv4 one."""
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    return str(mapped) if mapped else ""


def _limits(attributes: Any) -> DeviceLimits:
    return DeviceLimits(
        max_mr_bytes=attributes.max_mr_size,
        max_mr=attributes.max_mr,
        max_mw=attributes.max_mw,
        max_qp=attributes.max_qp,
        max_qp_wr=attributes.max_qp_wr,
        max_cqe=attributes.max_cqe,
        max_sge=attributes.max_sge,
        max_rd_atomic=max(1, min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom)),
        has_windows=bool(attributes.device_cap_flags & (_MW_TYPE_2A | _MW_TYPE_2B)),
        is_software=attributes.vendor_id == _SOFT_ROCE,
    )
