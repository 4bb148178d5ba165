"""Runs the demo: for each fabric a node process and two host processes, then what the hosts saw, what the node says, and what
the kernel says, side by side."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dpurt.demo.back_end import BackEnd, back_end
from dpurt.demo.host import Job, PlannedRequest, Result
from dpurt.demo.interrupts import interrupts_held
from dpurt.demo.nodes import DeviceBytes, NodeProcess, Outside, device_bytes, observe
from dpurt.demo.plan import HOSTS, SPACE, Plan, topology_of
from dpurt.errors import DpurtError

HOST_GRACE_S = 120.0
HEAD_START_S = 2.0
DEVICE_AWAY_S = 3.0
OUTCOMES = ("timely", "late", "early", "useless", "cancelled", "failed", "refused", "open")


@dataclass(frozen=True, slots=True)
class Crash:
    """What a kill -9 in the middle came to, of the node or of the process that has its device (`victim`).
    `hits_from_before`: verified blocks after it that were stored before it.
    """

    victim: str
    killed_at_s: float
    back_at_s: float
    start_s: float
    rebuilt: Mapping[str, Any]
    hits_from_before: int
    hits_after: int
    hits_between: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run over one fabric. `device`: what was moved while node and device (the last ones, with a crash) served."""

    fabric: str
    bdev: str
    hosts: list[Result]
    stats: Mapping[str, Any]
    outside: Outside
    device: DeviceBytes
    exit_code: int
    wall_s: float
    crash: Crash | None
    policy: str = "dpurt"


@dataclass(frozen=True, slots=True)
class Way:
    """How to play: over which fabric, on what kind of device, with which policy (``dpurt``, ``lru``), and what to kill in the
    middle.
    """

    fabric: str
    bdev: str = "file"
    policy: str = "dpurt"
    victim: str | None = None  # "node" or "bdev"


def play(plan: Plan, way: Way, directory: Path, *, progress: Callable[[float], None]) -> Outcome:
    """One run. Raises DpurtError when a process does not do its part."""
    directory.mkdir(parents=True)
    if way.bdev == "file":
        return _play(plan, way, directory, None, progress)
    with back_end(directory / "flash.img", plan.store_bytes, directory / "back-end.log") as daemon:
        return _play(plan, way, directory, daemon, progress)


def _play(
    plan: Plan, way: Way, directory: Path, daemon: BackEnd | None, progress: Callable[[float], None]
) -> Outcome:
    topology = directory / "topology.toml"
    socket_path = None if daemon is None else daemon.socket
    text = topology_of(plan, directory, way.fabric, way.policy, _free_port(), socket_path)
    topology.write_text(text)
    fabric = way.fabric
    began = time.monotonic()
    with NodeProcess(topology, directory / "run", directory / "node.log") as node:
        before = node.device_bytes(_seen(daemon))
        start_at = time.time() + HEAD_START_S
        hosts: list[tuple[subprocess.Popen[bytes], Path]] = []
        try:
            for i in range(len(HOSTS)):
                with interrupts_held():
                    hosts.append(_start_host(plan, i, topology, node.endpoint, fabric, start_at, directory))
            crashed = None
            if way.victim is not None:
                crashed = _crash(plan, node, daemon if way.victim == "bdev" else None, start_at)
                before = node.device_bytes(_seen(daemon))
            _wait(hosts, plan, start_at, progress)
        finally:
            for process, _ in hosts:
                process.kill()
                process.wait()
        results = [msgspec.json.decode(path.read_bytes(), type=Result) for _, path in hosts]
        stats, outside, owner = node.stats(), observe(node.pid), _seen(daemon)
        exit_code = node.terminate()
    (directory / "flash.img").unlink()
    found = None if crashed is None else _crash_outcome(way, crashed, results, stats, node.start_s)
    moved = device_bytes(stats, outside, owner) - before
    return Outcome(
        fabric,
        way.bdev,
        results,
        stats,
        outside,
        moved,
        exit_code,
        time.monotonic() - began,
        found,
        way.policy,
    )


def _seen(daemon: BackEnd | None) -> Outside | None:
    return None if daemon is None else observe(daemon.pid)


def _start_host(
    plan: Plan, index: int, topology: Path, endpoint: str, fabric: str, start_at: float, directory: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    """One host process, with every other request of the trace."""
    mine: list[PlannedRequest] = plan.requests[index :: len(HOSTS)]
    result = directory / f"{HOSTS[index]}.result.json"
    job = Job(
        topology=str(topology), endpoint=endpoint, host=HOSTS[index], space=SPACE, fabric=fabric, start_at=start_at,
        result=str(result), requests=mine,
    )  # fmt: skip
    path = directory / f"{HOSTS[index]}.job.json"
    path.write_bytes(msgspec.json.encode(job))
    with (directory / f"{HOSTS[index]}.log").open("wb") as log:
        command = [sys.executable, "-m", "dpurt.demo.host", str(path)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return process, result


def _crash(plan: Plan, node: NodeProcess, daemon: BackEnd | None, start_at: float) -> tuple[float, float]:
    """kill -9 in the middle of the trace, and start again: a node at once, a device after a while without. (killed,
    back) in seconds after the start.
    """
    time.sleep(max(0.0, start_at + plan.span_s / 2 - time.time()))
    killed = time.time() - start_at
    if daemon is None:
        node.kill()
        node.start()
    else:
        daemon.kill()
        time.sleep(DEVICE_AWAY_S)
        daemon.start()
    return killed, time.time() - start_at


def _wait(
    hosts: Sequence[tuple[subprocess.Popen[bytes], Path]],
    plan: Plan,
    start_at: float,
    progress: Callable[[float], None],
) -> None:
    limit = start_at + plan.span_s + HOST_GRACE_S
    while any(process.poll() is None for process, _ in hosts):
        if time.time() > limit:
            raise DpurtError(f"the hosts did not end {HOST_GRACE_S:.0f} s after the trace")
        progress(min(1.0, max(0.0, (time.time() - start_at) / max(plan.span_s, 0.1))))
        time.sleep(0.1)
    for process, path in hosts:
        if process.returncode:
            log = path.with_name(path.name.replace(".result.json", ".log"))
            raise DpurtError(
                f"a host process failed ({process.returncode}):\n{log.read_text(errors='replace')[-2000:]}"
            )


def _crash_outcome(
    way: Way,
    crashed: tuple[float, float],
    results: Sequence[Result],
    stats: Mapping[str, Any],
    start_s: float,
) -> Crash:
    killed, back = crashed
    stored: dict[int, float] = {}
    for at, block in (store for result in results for store in result.stores):
        stored[block] = min(at, stored.get(block, at))
    after = [(at, block) for result in results for at, block in result.hits if at > back]
    before = sum(stored.get(block, killed) < killed for _, block in after)
    between = sum(killed < at <= back for result in results for at, _ in result.hits)
    rebuilt = stats["storage"]["rebuilt"]
    return Crash(way.victim or "", killed, back, start_s, rebuilt, before, len(after), between)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
