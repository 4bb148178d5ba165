"""Real processes for the demo and the end-to-end tests: start a node, wait until it serves, look at it from outside, kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpurt.client.admin import ask
from dpurt.demo.interrupts import interrupts_held
from dpurt.errors import NodeUnavailable
from dpurt.wire import messages as m

START_S = 60.0


@dataclass(frozen=True, slots=True)
class Outside:
    """What the kernel says of a process: resident bytes, open files, bytes it had the block device read and write, and
    bytes its read and receive calls brought in.
    """

    rss_bytes: int
    open_fds: int
    device_bytes_read: int
    device_bytes_written: int
    bytes_by_calls: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes moved from and to the device, as the node and as the kernel count them (with `dpurt.demo.back_end`, that
    process's). `own_calls`: what the node's own read and recv calls brought in, of anything. The kernel also counts what reading
    the program took, and does not count reads of places in a file that were never written: compare differences between
    two moments of a node that serves.
    """

    node_read: int
    node_written: int
    kernel_read: int
    kernel_written: int
    own_calls: int

    def __sub__(self, other: DeviceBytes) -> DeviceBytes:
        return DeviceBytes(
            self.node_read - other.node_read,
            self.node_written - other.node_written,
            self.kernel_read - other.kernel_read,
            self.kernel_written - other.kernel_written,
            self.own_calls - other.own_calls,
        )


def device_bytes(stats: Mapping[str, Any], outside: Outside, owner: Outside | None = None) -> DeviceBytes:
    """The counts of one moment; `owner` is the process that has the device, if it is not the node."""
    [bdev] = [each["io"] for each in stats["bdevs"].values()]
    owner = owner or outside
    return DeviceBytes(
        bdev["bytes_read"], bdev["bytes_written"], owner.device_bytes_read, owner.device_bytes_written,
        outside.bytes_by_calls,
    )  # fmt: skip


def observe(pid: int) -> Outside:
    """Read /proc of a live process."""
    proc = Path(f"/proc/{pid}")
    io = dict(line.split(": ") for line in (proc / "io").read_text().splitlines())
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    return Outside(
        rss_bytes=int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        open_fds=len(os.listdir(proc / "fd")),
        device_bytes_read=int(io["read_bytes"]),
        device_bytes_written=int(io["write_bytes"]),
        bytes_by_calls=int(io["rchar"]),
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


class NodeProcess:
    """`dpurt serve` as a process of its own. Use as a context manager: it never outlives the block."""

    def __init__(self, topology: Path, run_path: Path, log: Path, options: Sequence[str] = ()) -> None:
        self._topology = topology
        self._run_path = run_path
        self._log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self.start_s = 0.0

    def __enter__(self) -> NodeProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until hosts may connect. Raises NodeUnavailable with the end of its log."""
        ready = self._log.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "dpurt",
            "serve",
            str(self._topology),
            "--ready-file",
            str(ready),
            *self._options,
        ]
        try:
            with self._log.open("ab") as out, interrupts_held():
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            self._wait_until(ready, began)
            self.start_s = time.monotonic() - began
            self.endpoint = ready.read_text()
        except BaseException:  # an interrupt too: nobody else would end it
            self.kill()
            raise

    def _wait_until(self, ready: Path, began: float) -> None:
        assert self._process is not None
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() - began > START_S:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise NodeUnavailable(str(self._topology), f"it did not come up; its log ends:\n{tail}")
            time.sleep(0.01)

    def stats(self) -> dict[str, object]:
        """The node's own statistics."""
        return ask(self._run_path, m.Stats(), m.StatsReply).stats

    def device_bytes(self, owner: Outside | None = None) -> DeviceBytes:
        """Its counts and the kernel's, now. See `device_bytes`."""
        return device_bytes(self.stats(), observe(self.pid), owner)

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, and wait for it to drain; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
