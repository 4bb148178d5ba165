"""What a running target is doing: version, bdevs, exports, I/O counters, health, and how busy its reactors are.

A polled reactor burns its whole core, idle or not, so the core's load says nothing; busy ticks against all ticks between
two looks does. Whatever a target was built without is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from dpurt.bdev.spdk_apply import read_state
from dpurt.bdev.spdk_health import NvmeHealth, health_of
from dpurt.bdev.spdk_profile import TargetState
from dpurt.bdev.spdk_rpc import SpdkRpc
from dpurt.errors import RpcError

__all__ = ["BdevStatus", "TargetStatus", "read_health", "read_status", "utilisation"]


@dataclass(frozen=True, slots=True)
class BdevStatus:
    """One bdev: `name` is its alias where its own name is but a UUID, as a logical volume's is."""

    name: str
    kind: str
    size_bytes: int
    block_size: int
    exports: list[str]
    reads: int
    writes: int
    bytes_read: int
    bytes_written: int
    io_errors: int


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """`reactors` is busy share by core, 0 to 1; `health` by controller."""

    version: str
    bdevs: list[BdevStatus]
    reactors: dict[int, float]
    health: dict[str, NvmeHealth]


async def read_status(rpc: SpdkRpc, interval_s: float, deadline: float) -> TargetStatus:
    """Ask for everything; takes `interval_s`, for the reactors. Raises RpcError, TargetUnavailable and the like."""
    version = await rpc.call("spdk_get_version", deadline=deadline)
    before = await rpc.call("framework_get_reactors", deadline=deadline)
    state = await read_state(rpc, deadline)
    counters = await rpc.call("bdev_get_iostat", deadline=deadline)
    health = await read_health(rpc, deadline) if "bdev_nvme_get_controllers" in state.methods else {}
    await trio.sleep(interval_s)
    after = await rpc.call("framework_get_reactors", deadline=deadline)
    return TargetStatus(
        str(version.get("version")) if isinstance(version, Mapping) else "unknown",
        _bdevs(state, counters),
        utilisation(before, after),
        health,
    )


async def read_health(rpc: SpdkRpc, deadline: float) -> dict[str, NvmeHealth]:
    """Health of each NVMe controller; one that cannot tell (gone, or of another kind) is left out."""
    controllers = await rpc.call("bdev_nvme_get_controllers", deadline=deadline)
    found: dict[str, NvmeHealth] = {}
    for controller in controllers if isinstance(controllers, list) else []:
        name = str(controller["name"])
        try:
            answer = await rpc.call("bdev_nvme_get_controller_health_info", {"name": name}, deadline=deadline)
        except RpcError:
            continue
        found[name] = health_of(answer)
    return found


def utilisation(before: object, after: object) -> dict[int, float]:
    """Busy share of each reactor between two answers of `framework_get_reactors`."""
    earlier = _ticks(before)
    shares: dict[int, float] = {}
    for core, (busy, idle) in _ticks(after).items():
        busy_before, idle_before = earlier.get(core, (0, 0))
        passed = busy - busy_before + idle - idle_before
        shares[core] = (busy - busy_before) / passed if passed > 0 else 0.0
    return shares


def _ticks(answer: object) -> dict[int, tuple[int, int]]:
    reactors = answer.get("reactors", []) if isinstance(answer, Mapping) else []
    return {int(one["lcore"]): (int(one["busy"]), int(one["idle"])) for one in reactors}


def _bdevs(state: TargetState, counters: object) -> list[BdevStatus]:
    shown = counters.get("bdevs", []) if isinstance(counters, Mapping) else []
    by_name: dict[str, Any] = {str(one["name"]): one for one in shown}
    return [_bdev(bdev, by_name.get(str(bdev["name"]), {}), state) for bdev in state.bdevs]


def _bdev(bdev: Mapping[str, Any], counters: Mapping[str, Any], state: TargetState) -> BdevStatus:
    name = str(bdev["name"])
    errors = counters.get("io_error") or {}
    return BdevStatus(
        name=next(iter(bdev.get("aliases") or []), name) if name == bdev.get("uuid") else name,
        kind=str(bdev.get("product_name", "")),
        size_bytes=int(bdev["num_blocks"]) * int(bdev["block_size"]),
        block_size=int(bdev["block_size"]),
        exports=exports_of(name, state),
        reads=int(counters.get("num_read_ops", 0)),
        writes=int(counters.get("num_write_ops", 0)),
        bytes_read=int(counters.get("bytes_read", 0)),
        bytes_written=int(counters.get("bytes_written", 0)),
        io_errors=sum(value for value in errors.values() if isinstance(value, int)),
    )


def exports_of(name: str, state: TargetState) -> list[str]:
    """The ways to a bdev, as addresses a client can be given."""
    ways = [
        f"vhost {one.get('socket', one['ctrlr'])}"
        for one in state.vhost
        if one.get("backend_specific", {}).get("block", {}).get("bdev") == name
    ]
    for subsystem in state.subsystems:
        if any(space.get("bdev_name") == name for space in subsystem.get("namespaces", [])):
            places = [f"{at['traddr']}:{at['trsvcid']}" for at in subsystem.get("listen_addresses", [])]
            ways.append(f"nvmf {subsystem['nqn']} at {', '.join(places) or 'no address'}")
    return ways
