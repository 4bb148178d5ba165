"""Which rails this node has, and in which order they lead to a host: the topology's wishes against this machine's devices.

A rail is a port of a NIC. What the topology does not say of it (NUMA node, speed) is asked of the kernel. The distance that
counts is from the NIC to the memory it reads and writes: that is on the NUMA node this process is bound to, if it is bound to
one. The order is `dpurt.core.rails`'s.

Leaves to others: opening devices; what a host's own devices are (it finds out by itself, by its routes).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpurt.core.rails import RailFacts, RailWish, order
from dpurt.errors import RdmaUnavailable
from dpurt.rdma.device import RdmaDevice, find

__all__ = ["HostPath", "Rail", "memory_numa", "paths_to", "resolve"]

_NODES = Path("/sys/devices/system/node")
LOCAL_DISTANCE = 10


@dataclass(frozen=True, slots=True)
class Rail:
    """A rail that this machine has."""

    name: str
    device: RdmaDevice
    facts: RailFacts


@dataclass(frozen=True, slots=True)
class HostPath:
    """One rail as a way to one host, and why it has its place."""

    rail: Rail
    reason: str

    def __str__(self) -> str:
        return f"{self.rail.name} ({self.rail.device}): {self.reason}"


def resolve(wishes: Iterable[RailWish]) -> tuple[list[Rail], dict[str, str]]:
    """The rails that are to be had here, and why others are not."""
    found: list[Rail] = []
    missing: dict[str, str] = {}
    memory = memory_numa()
    for wish in wishes:
        try:
            device = find(wish.device, wish.address)
        except RdmaUnavailable as error:
            missing[wish.name] = str(error)
        else:
            found.append(Rail(wish.name, device, _facts(wish, device, memory)))
    return found, missing


def _facts(wish: RailWish, device: RdmaDevice, memory: int) -> RailFacts:
    numa = device.numa if wish.numa is None else wish.numa
    speed = wish.bandwidth_bytes_per_s or device.bytes_per_s
    return RailFacts(wish.name, wish.switch, distance(numa, memory), float(speed))


def paths_to(rails: Sequence[Rail], names: Sequence[str], host_switch: str) -> list[HostPath]:
    """The rails that lead to a host (`names`; none named: all), best first."""
    by_name = {rail.name: rail for rail in rails if not names or rail.name in names}
    ranked = order([rail.facts for rail in by_name.values()], host_switch)
    return [HostPath(by_name[facts.name], reason) for facts, reason in ranked]


def memory_numa() -> int:
    """The one NUMA node this process is bound to; -1 when it may run on several."""
    nodes = {_node_of(cpu) for cpu in os.sched_getaffinity(0)}
    return nodes.pop() if len(nodes) == 1 else -1


def _node_of(cpu: int) -> int:
    entries = Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return next((int(entry.name.removeprefix("node")) for entry in entries), 0)


def distance(one: int, other: int) -> int:
    """Between two NUMA nodes, as the firmware says (10: the same); 0 when it is not known."""
    if one < 0 or other < 0:
        return 0
    if one == other:
        return LOCAL_DISTANCE
    online = sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*"))
    try:
        row = (_NODES / f"node{one}" / "distance").read_text().split()
        return int(row[online.index(other)])
    except (OSError, ValueError, IndexError):
        return 0
