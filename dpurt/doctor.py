"""What this machine can do for dpurt, what is off and why, and which limits are near their end.

Each probe asks one question of the machine and gives a `Finding`: ``ok``, ``off`` (a feature is not there;
dpurt runs without it, and `advice` says what would switch it on) or ``warn`` (it will hurt). A probe tries
the thing itself where it can (a direct write, an io_uring call) instead of trusting a version. Nothing is
changed: scratch files are removed. `examine(config)` adds what a topology needs of this machine. Whether the
topology is right in itself is `dpurt.config`'s.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import crc32c
import trio
import zmq

from dpurt.agents.block_store import BlockStore
from dpurt.bdev.file import FileBdev
from dpurt.config import (
    BdevConfig,
    Config,
    FileBdevConfig,
    HostConfig,
    MemoryBdevConfig,
    ModelledBdevConfig,
    NvmeRdmaBdevConfig,
    NvmeTcpBdevConfig,
    SpdkBdevConfig,
    VhostUserBdevConfig,
    rules,
)  # fmt: skip
from dpurt.config.schema import names_device
from dpurt.errors import BdevError, ConfigError
from dpurt.rdma.binding import missing
from dpurt.rdma.device import RdmaDevice, discover, is_up, memlock_bytes, why_off
from dpurt.rdma.paths import Rail, paths_to, resolve

__all__ = ["Finding", "choose_fabric", "examine", "probe"]

State = Literal["ok", "off", "warn"]
PACKAGES = ("trio", "pyzmq", "msgspec", "numpy", "crc32c", "structlog", "prometheus_client")
WANTED_FILES = 4096
NEAR_LIMIT = 0.8
PAGE = 4096
PROBE_S = 2.0
IO_URING_SETUP = 425  # the same number on every architecture
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one probe."""

    name: str
    state: State
    detail: str
    advice: str = ""


def probe() -> list[Finding]:
    """Ask everything that does not depend on a topology."""
    return [check() for check in MACHINE]


def examine(config: Config) -> list[Finding]:
    """What this topology needs of this machine."""
    memory = memory_bytes()
    is_up = runs_here(config)
    return [
        *_staging_fits(config, memory[1]),
        _run_folder(config),
        *_addresses(config, is_up=is_up),
        *_disks(config),
        *([] if is_up else _contents(config)),
        *_rails(config),
        *(_host_fabric(config, host) for host in config.host),
        *_salts(config),
        *_keys(config),
    ]


# --- software ---


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def packages() -> Finding:
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return Finding("packages", "ok", ", ".join(versions))


def checksums() -> Finding:
    if crc32c.hardware_based:
        return Finding("crc32c", "ok", "computed by the CPU's instruction")
    return Finding("crc32c", "warn", "computed in software: checksums will cost much CPU time")


def curve() -> Finding:
    libzmq = f"libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return Finding("curve", "ok", f"{libzmq} encrypts and authenticates")
    return Finding("curve", "off", f"{libzmq} was built without CURVE", "install a pyzmq wheel that has it")


def rdma_devices() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def rdma() -> Finding:
    if reason := why_off():
        return Finding("rdma", "off", f"{reason}: hosts use shm or tcp")
    return Finding("rdma", "ok", "; ".join(map(_rdma_device, discover())))


def _rdma_device(device: RdmaDevice) -> str:
    limits = device.limits
    windows = f"{limits.max_mw:,} type-2 windows" if limits.has_windows else "no type-2 windows"
    return (
        f"{device}: {limits.max_mr:,} regions of at most {limits.max_mr_bytes:,} bytes, {windows}, "
        f"{limits.max_qp:,} queue pairs of {limits.max_qp_wr:,} requests"
    )


def spdk() -> Finding:
    target = os.environ.get("DPURT_SPDK_TGT") or shutil.which("spdk_tgt")
    if target is not None:
        return Finding("spdk", "ok", f"{target}; dpurt spdk up starts it, or attaches to one that runs")
    detail = "no spdk_tgt in PATH or DPURT_SPDK_TGT; one that runs is reached by its RPC socket (dpurt spdk status --rpc PATH)"
    return Finding("spdk", "off", detail)


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


# --- machine ---


def cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count()
    return Finding("cores", "ok" if usable > 1 else "warn", f"{usable} usable of {present}")


def memory_bytes() -> tuple[int, int]:
    """(total, available)."""
    facts = _meminfo()
    return facts["MemTotal"] * 1024, facts["MemAvailable"] * 1024


def memory() -> Finding:
    total, available = memory_bytes()
    return Finding("memory", "ok", f"{available / GIB:.1f} GiB available of {total / GIB:.1f}")


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def huge_pages() -> Finding:
    facts = _meminfo()
    total, free, size = facts["HugePages_Total"], facts["HugePages_Free"], facts["Hugepagesize"]
    if total == 0:
        return Finding(
            "huge pages", "off", "none reserved: SPDK on PCIe devices needs them, files do not",
            "sysctl vm.nr_hugepages=N",
        )  # fmt: skip
    return Finding("huge pages", "ok", f"{free} free of {total}, {size} KiB each")


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "unlimited")
    if not rdma_devices():
        return Finding("memlock", "ok", f"{soft >> 20} MiB; only RDMA would need more")
    return Finding(
        "memlock", "warn", f"{soft >> 20} MiB: registering staging for RDMA will fail beyond it",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
    )  # fmt: skip


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    near = soft != resource.RLIM_INFINITY and (soft < WANTED_FILES or used > NEAR_LIMIT * soft)
    detail = f"{used} open, limit {soft} (hard {hard})"
    return Finding(
        "open files", "warn" if near else "ok", detail, f"ulimit -n {WANTED_FILES}" if near else ""
    )


def shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("dpurt-doctor"))
    except OSError as error:
        return Finding("memfd", "warn", f"cannot be made: {error.strerror}: no arena, no shm fabric")
    return Finding("memfd", "ok", "the arena and the shm fabric can be had")


def dev_shm() -> Finding:
    try:
        disk = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "off", "not there; dpurt uses memfds and does not need it")
    near = disk.used > NEAR_LIMIT * disk.total
    return Finding(
        "/dev/shm", "warn" if near else "ok", f"{disk.free / GIB:.1f} GiB free of {disk.total / GIB:.1f}"
    )


def io_uring() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(IO_URING_SETUP, 0, None)  # zero entries: EINVAL where io_uring works, nothing is made
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.EFAULT):
        return Finding("io_uring", "ok", "the kernel offers it; dpurt's file bdev uses Linux AIO")
    reasons = {errno.ENOSYS: "the kernel has none", errno.EPERM: "forbidden here (sysctl or seccomp)"}
    return Finding("io_uring", "off", reasons.get(code, os.strerror(code)) + "; the file bdev uses Linux AIO")


def nvme_devices() -> Finding:
    devices = sorted(str(path) for path in Path("/dev").glob("nvme*n*") if path.is_block_device())
    if not devices:
        return Finding("nvme", "off", "no NVMe namespace here: a file on any disk works too")
    return Finding("nvme", "ok", ", ".join(devices))


def direct_io(folder: Path) -> Finding:
    """Write one page past the page cache in this folder."""
    try:
        _write_direct(folder)
    except OSError as error:
        return Finding(
            "direct I/O", "warn", f"not in {folder} ({error.strerror}): reads go through the page cache",
            "put the bdev on a disk file system",
        )  # fmt: skip
    return Finding("direct I/O", "ok", f"works in {folder}")


def _write_direct(folder: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=".dpurt-doctor-", dir=folder)
    os.close(handle)
    try:
        handle = os.open(name, os.O_WRONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.write(handle, page)
        finally:
            os.close(handle)
    finally:
        os.unlink(name)


MACHINE: tuple[Callable[[], Finding], ...] = (
    python,
    packages,
    checksums,
    curve,
    cores,
    memory,
    locked_memory,
    open_files,
    huge_pages,
    shared_memory,
    dev_shm,
    io_uring,
    nvme_devices,
    rdma,
    spdk,
)


# --- a topology on this machine ---


def _staging_fits(config: Config, available: int) -> Iterator[Finding]:
    needed = config.staging.bytes + sum(host.inbound_bytes for host in config.host)
    needed += sum(space.decode_bytes for space in config.space)
    detail = f"{needed / GIB:.2f} GiB for staging, decode staging and inbound regions, {available / GIB:.2f} GiB available"
    yield Finding("staging", "ok" if needed < NEAR_LIMIT * available else "warn", detail)
    if config.envelope is not None and config.envelope.model:
        yield Finding("envelope", "ok", f"a model, not this machine: {config.envelope.source}")


def _disks(config: Config) -> Iterator[Finding]:
    for bdev in config.bdev:
        name = f"bdev {bdev.name}"
        try:
            capacity = bdev.capacity(config)
        except (ConfigError, OSError) as error:
            yield Finding(name, "warn", str(error))
            continue
        if isinstance(bdev, FileBdevConfig):
            path = bdev.full_path(config)
            if names_device(path):
                yield _device(name, path, capacity)
            else:
                yield from _disk(name, path, capacity, config.node.run_path)
        elif isinstance(bdev, (MemoryBdevConfig, ModelledBdevConfig)):
            yield Finding(name, "ok", f"{capacity / GIB:.2f} GiB of memory")
        else:
            yield from _remote(name, bdev, config)


def runs_here(config: Config) -> bool:
    """Does a node of this topology run on this machine?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(config.node.run_path / "admin.sock"))
        except OSError:
            return False
    return True


def _run_folder(config: Config) -> Finding:
    path = config.node.run_path
    if not path.exists():
        folder = existing(path)
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return Finding("run folder", "ok", f"{path}: will be made")
        return Finding("run folder", "warn", f"{path} cannot be made in {folder}", "set [node] run_dir")
    try:
        config.node.check_run_dir()
    except ConfigError as error:
        return Finding("run folder", "warn", error.problem)
    return Finding("run folder", "ok", str(path))


def _addresses(config: Config, *, is_up: bool) -> Iterator[Finding]:
    """Can the node listen where it is to?"""
    if is_up:
        yield Finding("addresses", "ok", f"a node runs with {config.node.run_path}, and has them")
        return
    binds = {
        "gateway.bind": config.gateway.bind, "fabric.tcp_bind": config.fabric.tcp_bind,
        "metrics.bind": config.metrics.bind, "router.bind": config.router.bind,
    }  # fmt: skip
    for name, bind in binds.items():
        url = urlsplit(bind if "://" in bind else f"tcp://{bind}")
        if url.scheme == "tcp" and url.hostname and url.port is not None:
            yield _address(name, url.hostname, url.port)


def _address(name: str, host: str, port: int) -> Finding:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return Finding(
            name, "warn", f"cannot listen at {host}:{port}: {error.strerror}", f"set {name} to another"
        )
    return Finding(
        name, "ok", f"can listen at {host}:{port}" if port else f"can listen at a free port of {host}"
    )


def _contents(config: Config) -> Iterator[Finding]:
    """Do files and devices hold nothing but a store, or nothing?"""
    for bdev in config.bdev:
        if not isinstance(bdev, FileBdevConfig):
            continue
        path = bdev.full_path(config)
        try:
            if path.stat().st_size or path.is_block_device():
                trio.run(_survey, path)
        except FileNotFoundError:
            continue
        except (OSError, BdevError) as error:
            yield Finding(f"data of {bdev.name}", "warn", f"{path} cannot be used: {error}")
        except ConfigError as error:
            advice = "name another, or let dpurt serve --format overwrite it"
            yield Finding(f"data of {bdev.name}", "warn", error.problem, advice)
        else:
            yield Finding(f"data of {bdev.name}", "ok", f"{path} holds a store, or nothing")


async def _survey(path: Path) -> None:
    async with aclosing(await FileBdev.open(path)) as found:
        await BlockStore.survey(found, deadline_s=PROBE_S)


def _remote(name: str, bdev: BdevConfig, config: Config) -> Iterator[Finding]:
    """Is there anybody where the device should be? Connecting tells; a socket file alone does not."""
    if isinstance(bdev, NvmeTcpBdevConfig):
        for host, port in (rules.split_address(address, "addresses") for address in bdev.addresses):
            yield _answering(f"{name} at {host}:{port}", (host, port))
    elif isinstance(bdev, NvmeRdmaBdevConfig):
        reason = missing() or why_off()
        yield Finding(name, "warn" if reason else "ok", reason or "RDMA can be used here")
    elif isinstance(bdev, VhostUserBdevConfig):
        path = config.node.run_path / bdev.path
        yield _answering(f"{name} at {path}", path)
    elif isinstance(bdev, SpdkBdevConfig):
        path = config.node.run_path / bdev.rpc
        yield _answering(f"{name}: SPDK target at {path}", path)


def _answering(what: str, address: tuple[str, int] | Path) -> Finding:
    try:
        if isinstance(address, tuple):
            socket.create_connection(address, PROBE_S).close()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(PROBE_S)
                probe.connect(str(address))
    except OSError as error:
        return Finding(
            what,
            "warn",
            f"nobody takes connections there: {error}",
            "start a target there (SPDK: dpurt spdk up PROFILE --rpc PATH)",
        )
    return Finding(what, "ok", "takes connections")


def _device(name: str, path: Path, capacity: int) -> Finding:
    if not path.is_block_device():
        return Finding(name, "warn", f"{path}: no block device")
    size = device_bytes(path)
    detail = f"{path}: a block device, cap {capacity / GIB:.2f} GiB of its {size / GIB:.2f}"
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding(
            name, "warn", f"{detail}; it may not be read and written", "give the node's user access"
        )
    return Finding(name, "ok" if capacity <= size else "warn", detail)


def device_bytes(path: Path) -> int:
    """The size of a block device; needs no right to open it."""
    number = path.stat().st_rdev
    sectors = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/size").read_text()
    return int(sectors) * 512  # always this unit


def _disk(name: str, path: Path, capacity: int, run_path: Path) -> Iterator[Finding]:
    if not path.parent.exists() and path.parent != run_path:  # the node makes its run folder, no other
        yield Finding(name, "warn", f"there is no folder {path.parent}", f"mkdir -p {path.parent}")
    folder = existing(path.parent)
    free = shutil.disk_usage(folder).free + (path.stat().st_blocks * 512 if path.exists() else 0)
    detail = f"{path}: cap {capacity / GIB:.2f} GiB, {free / GIB:.2f} GiB free for it"
    yield Finding(name, "ok" if capacity <= free else "warn", detail)
    yield direct_io(folder)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _host_fabric(config: Config, host: HostConfig) -> Finding:
    kind, reason = choose_fabric(config, host)
    return Finding(f"host {host.name}", "ok" if kind else "warn", f"{kind or 'no fabric'}: {reason}")


def choose_fabric(config: Config, host: HostConfig) -> tuple[str | None, str]:
    """The fabric a host will get from this node if it can use all its topology names, and why."""
    skipped: list[str] = []
    for kind in host.fabrics:
        can_be_had, reason = _fabric(config, host, kind)
        if can_be_had:
            return kind, "; ".join([*skipped, f"first usable of {', '.join(host.fabrics)}", reason])
        skipped.append(reason)
    return None, "; ".join(skipped)


def _fabric(config: Config, host: HostConfig, kind: str) -> tuple[bool, str]:
    """Whether a fabric can be had here, and its place or what is missing."""
    if kind == "tcp":
        return True, f"listens at {config.fabric.tcp_bind}"
    if kind == "shm":
        if shared_memory().state != "ok":
            return False, "shm needs memfds"
        return True, "no copy, for a host on this machine (elsewhere: the next one)"
    rails, missing = resolve(config.rails())
    paths = paths_to(rails, host.rails, host.switch)
    if not paths:
        return False, f"verbs is off: {'; '.join(missing.values()) or 'none of its rails is here'}"
    return True, "RDMA by " + "; then ".join(map(str, paths))


def _rails(config: Config) -> Iterator[Finding]:
    """Each rail some host may use: its device, port, GID, MTU, place and limits."""
    if not any("verbs" in host.fabrics for host in config.host):
        return
    rails, missing = resolve(config.rails())
    for rail in rails:
        yield _rail(rail)
    if config.rail:  # else it is in the hosts' lines
        for name, reason in missing.items():
            yield Finding(f"rail {name}", "warn", reason, "hosts use the other rails, or the next fabric")


def _rail(rail: Rail) -> Finding:
    device, limits, memlock = rail.device, rail.device.limits, memlock_bytes()
    detail = (
        f"{device}, GID {device.gid}, {_place(rail)}; max_mr {limits.max_mr:,} of {limits.max_mr_bytes:,} bytes, "
        f"max_qp {limits.max_qp:,}, max_mw {limits.max_mw if limits.has_windows else 0:,}, "
        f"memlock {'unlimited' if memlock is None else f'{memlock:,} bytes'}"
    )
    if not is_up(device):
        return Finding(f"rail {rail.name}", "warn", f"its port is down; {detail}", "check cable and switch")
    return Finding(f"rail {rail.name}", "ok", detail)


def _place(rail: Rail) -> str:
    numa = "NUMA node not known" if rail.device.numa < 0 else f"NUMA node {rail.device.numa}"
    speed = f"{rail.facts.bytes_per_s * 8 / 1e9:g} Gb/s" if rail.facts.bytes_per_s else "speed not known"
    return ", ".join([numa, speed, *([f"switch {rail.facts.switch}"] if rail.facts.switch else [])])


def _keys(config: Config) -> Iterator[Finding]:
    curve = config.gateway.curve
    if curve is None:
        return
    try:
        curve.secret_key()
        known = len(config.authorized_keys())
    except ConfigError as error:
        yield Finding("CURVE keys", "warn", str(error), "dpurt keys generate STEM makes a pair")
        return
    yield Finding(
        "CURVE keys", "ok" if known else "warn", f"the secret key can be read; {known} clients are known"
    )


def _salts(config: Config) -> Iterator[Finding]:
    for tenant in config.tenant:
        try:
            tenant.load_salt()
        except ConfigError as error:
            yield Finding(f"tenant {tenant.name}", "warn", str(error), "dpurt keys salt FILE makes one")
        else:
            yield Finding(f"tenant {tenant.name}", "ok", "its salt can be read")
