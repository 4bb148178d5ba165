"""What a fake SPDK target holds, shared by its RPC server and its data paths.

Theory of operation. A `FakeTarget` is a registry of `FakeBdev`s by name, alias and UUID, and of the exports on them.
Bdevs stacked on another one (crypto, delay, error, raid0 of one, lvol) share its bytes: `image` is a memoryview
into the bottom bdev's bytearray. A bdev holds one claim at most, like a real one: a namespace or an upper bdev
takes it, vhost needs it free and takes none (so vhost first and a namespace second goes through). `watchers` hear
of each change by name, so that a data path can end sessions whose bdev went away. `restart` is what a new process
is: everything gone.

Data paths ask `take_fault(io_type)` before each I/O and apply `latency_us`; nothing here does I/O by itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import trio

__all__ = [
    "FakeBdev",
    "FakeTarget",
    "Fault",
    "IoType",
    "Listener",
    "Lvstore",
    "Namespace",
    "Subsystem",
    "VhostBlk",
]

IoType = Literal["read", "write", "flush", "unmap"]


@dataclass(slots=True)
class Fault:
    """An injected error, as `bdev_error_inject_error` takes it; `num` I/Os are left to fail."""

    io_type: str
    error_type: str
    num: int = 1
    nvme_sct: int = 0
    nvme_sc: int = 0
    corrupt_offset: int = 0
    corrupt_value: int = 0


@dataclass(eq=False, slots=True)
class FakeBdev:
    """One block device in memory."""

    name: str
    block_size: int
    image: memoryview
    product_name: str = "Malloc disk"
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    aliases: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    driver_specific: dict[str, object] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    claim: str = ""
    faults: list[Fault] = field(default_factory=list)
    latency_us: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    pending: list[Callable[[], None]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.image)

    def count(self, what: str, amount: int = 1) -> None:
        """Data paths count here what `bdev_get_iostat` shows: ``bytes_read``, ``num_read_ops`` and the like."""
        self.counters[what] = self.counters.get(what, 0) + amount

    def take_fault(self, io_type: IoType) -> Fault | None:
        """The fault this I/O meets, if any; uses it up."""
        for fault in self.faults:
            if fault.io_type in {io_type, "all"}:
                fault.num -= 1
                if fault.num <= 0:
                    self.faults.remove(fault)
                return fault
        return None

    def resume_pending(self) -> None:
        """Let the I/Os go that a ``pending`` fault holds; a data path put their completions into `pending`."""
        waiting, self.pending = self.pending, []
        for complete in waiting:
            complete()


@dataclass(eq=False, slots=True)
class Lvstore:
    name: str
    base: str
    cluster_size: int
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    used_clusters: int = 0


@dataclass(eq=False, slots=True)
class VhostBlk:
    ctrlr: str
    bdev: FakeBdev
    readonly: bool = False


@dataclass(eq=False, slots=True)
class Namespace:
    nsid: int
    bdev: FakeBdev


@dataclass(slots=True)
class Listener:
    trtype: str
    adrfam: str
    traddr: str
    trsvcid: str
    ana_state: str = field(default="optimized", compare=False)

    def shown(self) -> dict[str, str]:
        return {
            "trtype": self.trtype, "adrfam": self.adrfam, "traddr": self.traddr, "trsvcid": self.trsvcid,
        }  # fmt: skip


@dataclass(eq=False, slots=True)
class Subsystem:
    nqn: str
    serial_number: str
    allow_any_host: bool
    ana_reporting: bool = False
    max_namespaces: int = 32
    hosts: list[str] = field(default_factory=list)
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)


class FakeTarget:
    """The whole state of one target process. Plain data; the methods keep names and claims consistent."""

    def __init__(self, memory_bytes: int = 512 << 20, vhost_dir: str = "/var/tmp") -> None:
        self.memory_bytes = memory_bytes
        self.vhost_dir = vhost_dir
        self.watchers: list[Callable[[str, str], None]] = []
        self.initialized = True
        self._clear()

    def _clear(self) -> None:
        self.bdevs: dict[str, FakeBdev] = {}
        self.lvstores: dict[str, Lvstore] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.destroyed_keys: set[str] = set()
        self.controllers: dict[str, dict[str, object]] = {}
        self.remote_controllers: dict[str, list[int]] = {}
        self.vhost: dict[str, VhostBlk] = {}
        self.transports: dict[str, dict[str, object]] = {}
        self.subsystems: dict[str, Subsystem] = {}
        self.notifications: list[dict[str, object]] = []
        self.ticks = 0

    def restart(self) -> None:
        """A new process in the place of the old one: it knows nothing."""
        names = list(self.bdevs)
        self._clear()
        for name in names:
            self.tell("bdev_unregister", name)

    def find(self, name: str) -> FakeBdev | None:
        """A bdev by name, alias or UUID."""
        found = self.bdevs.get(name)
        if found is not None:
            return found
        return next((bdev for bdev in self.bdevs.values() if name == bdev.uuid or name in bdev.aliases), None)

    def add(self, bdev: FakeBdev) -> FakeBdev:
        """Register a bdev. KeyError if the name is taken."""
        if self.find(bdev.name) is not None:
            raise KeyError(bdev.name)
        self.bdevs[bdev.name] = bdev
        self.notify("bdev_register", bdev.name)
        return bdev

    def add_memory(self, name: str, size: int, block_size: int = 4096) -> FakeBdev:
        """A bdev of zeroes; what tests of data paths start from."""
        return self.add(FakeBdev(name, block_size, memoryview(bytearray(size))))

    def remove(self, bdev: FakeBdev) -> None:
        """Unregister a bdev, with all that is stacked on it and its exports."""
        for upper in [other for other in self.bdevs.values() if bdev.name in other.bases]:
            self.remove(upper)
        self.bdevs.pop(bdev.name, None)
        for subsystem in self.subsystems.values():
            gone = [nsid for nsid, space in subsystem.namespaces.items() if space.bdev is bdev]
            for nsid in gone:
                del subsystem.namespaces[nsid]
        self.notify("bdev_unregister", bdev.name)

    async def appeared(self, name: str) -> None:
        """Return when there is a bdev of this name."""
        changed = trio.Event()

        def look(what: str, which: str) -> None:
            if what == "bdev_register" and self.find(name) is not None:
                changed.set()

        self.watchers.append(look)
        try:
            if self.find(name) is None:
                await changed.wait()
        finally:
            self.watchers.remove(look)

    def notify(self, what: str, name: str) -> None:
        """Remember the event for `notify_get_notifications` and tell the watchers."""
        self.notifications.append({"type": what, "ctx": name, "id": len(self.notifications)})
        self.tell(what, name)

    def tell(self, what: str, name: str) -> None:
        """Tell the watchers of a change: ``vhost_created``, ``namespace_removed``, ``ana_changed`` and the like."""
        for watcher in list(self.watchers):
            watcher(what, name)

    def memory_used(self) -> int:
        return sum(bdev.size for bdev in self.bdevs.values() if bdev.product_name == "Malloc disk")
