"""What a running target is doing: version, bdevs, exports, I/O counters, health, and how busy its reactors are.

A polled reactor burns its whole core, idle or not, so the core's load says nothing; busy ticks against all ticks between
two looks does. Whatever a target was built without is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import trio

from dpurt.bdev.spdk_apply import read_state
from dpurt.bdev.spdk_health import NvmeHealth, health_of
from dpurt.bdev.spdk_rpc import SpdkRpc
from dpurt.bdev.spdk_state import ShownBdev, TargetState, checked
from dpurt.errors import RpcError

__all__ = ["BdevStatus", "TargetStatus", "read_health", "read_status", "utilisation"]


class _Counters(TypedDict):
    name: str
    num_read_ops: NotRequired[int]
    num_write_ops: NotRequired[int]
    bytes_read: NotRequired[int]
    bytes_written: NotRequired[int]
    io_error: NotRequired[dict[str, int]]


class _IoStat(TypedDict):
    bdevs: list[_Counters]


class _Reactor(TypedDict):
    lcore: int
    busy: int
    idle: int


class _Reactors(TypedDict):
    reactors: list[_Reactor]


class _Controller(TypedDict):
    name: str


class _Version(TypedDict):
    version: str


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

    async def ask(method: str) -> object:
        return await rpc.call(method, deadline=deadline)

    version = checked("spdk_get_version", await ask("spdk_get_version"), _Version)
    before = await ask("framework_get_reactors")
    state = await read_state(rpc, deadline)
    counters = checked("bdev_get_iostat", await ask("bdev_get_iostat"), _IoStat)["bdevs"]
    health = await read_health(rpc, deadline) if "bdev_nvme_get_controllers" in state.methods else {}
    await trio.sleep(interval_s)
    after = await ask("framework_get_reactors")
    by_name = {one["name"]: one for one in counters}
    bdevs = [_bdev(bdev, by_name.get(bdev["name"], _Counters(name="")), state) for bdev in state.bdevs]
    return TargetStatus(version["version"], bdevs, utilisation(before, after), health)


async def read_health(rpc: SpdkRpc, deadline: float) -> dict[str, NvmeHealth]:
    """Health of each NVMe controller; one that cannot tell (gone, or of another kind) is left out."""
    answer = await rpc.call("bdev_nvme_get_controllers", deadline=deadline)
    found: dict[str, NvmeHealth] = {}
    for controller in checked("bdev_nvme_get_controllers", answer, list[_Controller]):
        params = {"name": controller["name"]}
        try:
            health = await rpc.call("bdev_nvme_get_controller_health_info", params, deadline=deadline)
        except RpcError:
            continue
        found[controller["name"]] = health_of(health)
    return found


def utilisation(before: object, after: object) -> dict[int, float]:
    """Busy share of each reactor between two answers of `framework_get_reactors`. Raises RemoteProtocolError."""
    earlier = _ticks(before)
    shares: dict[int, float] = {}
    for core, (busy, idle) in _ticks(after).items():
        busy_before, idle_before = earlier.get(core, (0, 0))
        passed = busy - busy_before + idle - idle_before
        shares[core] = (busy - busy_before) / passed if passed > 0 else 0.0
    return shares


def _ticks(answer: object) -> dict[int, tuple[int, int]]:
    reactors = checked("framework_get_reactors", answer, _Reactors)["reactors"]
    return {one["lcore"]: (one["busy"], one["idle"]) for one in reactors}


def _bdev(bdev: ShownBdev, counters: _Counters, state: TargetState) -> BdevStatus:
    name = bdev["name"]
    return BdevStatus(
        name=next(iter(bdev.get("aliases") or []), name) if name == bdev.get("uuid") else name,
        kind=bdev["product_name"],
        size_bytes=bdev["num_blocks"] * bdev["block_size"],
        block_size=bdev["block_size"],
        exports=exports_of(name, state),
        reads=counters.get("num_read_ops", 0),
        writes=counters.get("num_write_ops", 0),
        bytes_read=counters.get("bytes_read", 0),
        bytes_written=counters.get("bytes_written", 0),
        io_errors=sum(counters.get("io_error", {}).values()),
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
