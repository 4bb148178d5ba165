"""Starts and stops an `spdk_tgt` of our own, and says what a machine lacks for one.

Theory of operation. The target is started detached (it outlives the command), its log and a pid file in the run folder. The
pid file names the process by pid *and* start time, so that a pid used again is never signalled. A target that ends while
it starts is explained from the last lines of its log. A target that somebody else started is never stopped here.

SPDK needs huge pages for devices on PCIe; without such a device it runs from ordinary memory (`--no-huge`), in
a pool whose size is fixed.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from dpurt.bdev.spdk_rpc import open_spdk_rpc
from dpurt.errors import DeadlineExceeded, DpurtError, TargetUnavailable

__all__ = ["Lack", "OwnTarget", "TargetFailed", "has_huge_pages", "lacks", "start_target"]

NO_HUGE_MIB = 1024
_FIXES = {
    r"hugepage|huge pages": "run `sudo sysctl vm.nr_hugepages=1024` and "
    "`sudo mount -t hugetlbfs nodev /dev/hugepages`",
    r"Cannot create lock on core|claim.* CPU core": "another SPDK program has that core; give another --cpumask",
    r"in use|already exists": "another target uses that socket; attach to it with --rpc, or stop it",
    r"Permission denied|Operation not permitted": "its user may not use what the log names",
    r"[Cc]annot allocate memory|Unable to create|out of memory": "it needs more memory than it was given",
}


class TargetFailed(DpurtError):
    """An spdk_tgt ended while it started, or did not start."""

    def __init__(self, binary: str, why: str, fix: str = "") -> None:
        super().__init__(f"{binary}: {why}" + (f"; to fix it: {fix}" if fix else ""))
        self.binary = binary
        self.why = why
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is missing on this machine, and the command that helps."""

    what: str
    fix: str


class _PidFile(msgspec.Struct):
    pid: int
    started: int  # clock ticks since boot, as /proc says


@dataclass(frozen=True, slots=True)
class OwnTarget:
    """Where a target of ours lives. `run_dir` is private to the user."""

    run_dir: Path

    @property
    def pid_path(self) -> Path:
        return self.run_dir / "spdk_tgt.pid"

    @property
    def log_path(self) -> Path:
        return self.run_dir / "spdk_tgt.log"

    def pid(self) -> int | None:
        """The pid of the target we started, while it lives."""
        try:
            noted = msgspec.json.decode(self.pid_path.read_bytes(), type=_PidFile)
        except (OSError, msgspec.DecodeError):
            return None
        return noted.pid if start_time(noted.pid) == noted.started else None

    def note(self, pid: int) -> None:
        """Remember a process as ours."""
        started = start_time(pid)
        if started is not None:
            self.pid_path.write_bytes(msgspec.json.encode(_PidFile(pid, started)))

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM and wait; whether there was one to stop. Raises TargetFailed if it does not end."""
        pid = self.pid()
        if pid is None:
            self.pid_path.unlink(missing_ok=True)
            return False
        await _terminate(pid, grace_s)
        self.pid_path.unlink(missing_ok=True)
        return True

    async def kill(self) -> None:
        """SIGKILL and wait, for a target whose disks hold nothing of worth. Idempotent."""
        pid = self.pid()
        if pid is not None:
            await _signal(pid, signal.SIGKILL)
        self.pid_path.unlink(missing_ok=True)


async def _terminate(pid: int, grace_s: float) -> None:
    try:
        with trio.fail_after(grace_s):
            await _signal(pid, signal.SIGTERM)
    except (PermissionError, trio.TooSlowError) as error:
        why = "may not be signalled by this user" if isinstance(error, PermissionError) else "does not end"
        raise TargetFailed(
            f"process {pid}", why, f"`kill -9 {pid}` loses what is not on its disks"
        ) from error


async def _signal(pid: int, number: signal.Signals) -> None:
    """And wait for its end. Through a pidfd, so that no other process can be meant."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
        await trio.lowlevel.wait_readable(descriptor)
        with suppress(ChildProcessError):  # its parent may be another process
            _ended(pid)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def has_huge_pages(root: Path = Path("/")) -> bool:
    """Whether there are free huge pages and a place they can be had from."""
    return not list(_huge_page_lacks(root))


def lacks(binary: str | None, pci: list[str], root: Path = Path("/")) -> list[Lack]:
    """What is missing to start `binary` for a profile with these PCI devices. `root` is for tests."""
    found = [_binary_lack(binary)] if _binary_lack(binary) else []
    if pci:
        found += _huge_page_lacks(root)
        found += _vfio_lacks(pci, root)
    return [lack for lack in found if lack is not None]


def _binary_lack(binary: str | None) -> Lack | None:
    if binary is None:
        return Lack("no spdk_tgt is named", "give --target PATH or set DPURT_SPDK_TGT")
    if not Path(binary).is_file():
        return Lack(f"there is no file {binary}", "build SPDK; the program is build/bin/spdk_tgt")
    if not os.access(binary, os.X_OK):
        return Lack(f"{binary} may not be run", f"chmod +x {binary}")
    return None


def _huge_page_lacks(root: Path) -> list[Lack]:
    found = []
    if _number(root / "proc/meminfo", r"HugePages_Free:\s+(\d+)") == 0:
        found.append(Lack("no free huge pages (vm.nr_hugepages)", "sudo sysctl vm.nr_hugepages=1024"))
    mounts = _text(root / "proc/mounts")
    if not re.search(r"^\S+ \S+ hugetlbfs ", mounts, re.MULTILINE):
        fix = "sudo mkdir -p /dev/hugepages && sudo mount -t hugetlbfs nodev /dev/hugepages"
        found.append(Lack("hugetlbfs is not mounted", fix))
    return found


def _vfio_lacks(pci: list[str], root: Path) -> list[Lack]:
    found = []
    if not (root / "dev/vfio/vfio").exists():
        found.append(Lack("no /dev/vfio/vfio", "sudo modprobe vfio-pci, with the IOMMU on in the firmware"))
    elif not os.access(root / "dev/vfio/vfio", os.R_OK | os.W_OK):
        found.append(
            Lack("/dev/vfio/vfio may not be opened", "run the target as root, or grant its user the group")
        )
    for address in pci:
        driver = root / "sys/bus/pci/devices" / address / "driver"
        name = driver.resolve().name if driver.exists() else "none"
        if not driver.parent.exists():
            found.append(Lack(f"there is no PCI device {address}", "see `lspci -D | grep -i nvme`"))
        elif name not in {"vfio-pci", "uio_pci_generic"}:
            fix = f"sudo PCI_ALLOWED={address} scripts/setup.sh, from SPDK; nothing may be mounted from it"
            found.append(Lack(f"device {address} has the driver {name}, not vfio-pci", fix))
    return found


def _number(path: Path, pattern: str) -> int:
    match = re.search(pattern, _text(path))
    return int(match[1]) if match else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


async def start_target(
    own: OwnTarget, binary: str, rpc_path: Path, *, cpumask: str, use_huge: bool, budget_s: float
) -> int:
    """Start `binary` detached, wait until it is initialised; its pid. Raises TargetFailed, with the reason."""
    memory = [] if use_huge else ["--no-huge", "-s", str(NO_HUGE_MIB)]
    pid = _spawn(own, [binary, "-r", str(rpc_path), "-S", str(own.run_dir), "-m", cpumask, *memory])
    own.note(pid)
    await _until_ready(own, binary, pid, rpc_path, budget_s)
    return pid


def _spawn(own: OwnTarget, words: list[str]) -> int:
    """In a session of its own, so that no signal to our terminal reaches it; it outlives us."""
    log = os.open(own.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    try:
        return os.posix_spawn(words[0], words, os.environ, file_actions=actions, setsid=True)
    except OSError as error:
        raise TargetFailed(words[0], f"cannot be run: {error.strerror}") from error
    finally:
        os.close(log)


async def _until_ready(own: OwnTarget, binary: str, pid: int, rpc_path: Path, budget_s: float) -> None:
    deadline = trio.current_time() + budget_s
    status = None
    async with open_spdk_rpc(rpc_path) as rpc:
        while status is None and trio.current_time() < deadline:
            try:
                await rpc.call("framework_wait_init", deadline=min(deadline, trio.current_time() + 1.0))
                if rpc.peer_pid == pid:  # else another target has the socket, and ours will end over that
                    return
            except (TargetUnavailable, DeadlineExceeded):
                pass
            await trio.sleep(0.05)
            status = _ended(pid)
    if status is None:
        await own.stop(10.0)
        raise TargetFailed(binary, f"did not answer within {budget_s:.0f} s, see {own.log_path}")
    own.pid_path.unlink(missing_ok=True)
    why, fix = explained(_text(own.log_path))
    raise TargetFailed(binary, f"ended at once with status {status}: {why} (log: {own.log_path})", fix)


def _ended(pid: int) -> int | None:
    """The exit status of a child that ended (and its remains are gone); None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def explained(log: str) -> tuple[str, str]:
    """The last complaint in a target's log, and what helps against it if we know."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    complaints = [line for line in lines if re.search(r"ERROR|EAL: (?!Detected)|rror|annot|ailed", line)]
    fix = next(
        (fix for pattern, fix in _FIXES.items() for line in complaints if re.search(pattern, line)), ""
    )
    return (" / ".join(complaints[-2:]) or (lines[-1] if lines else "it said nothing")), fix
