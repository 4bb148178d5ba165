"""Memory of an NVMe/RDMA bdev: what is registered with each RDMA device, and the bounce slots for all else.

Theory of operation. Added memory is registered whole, in chunks, once with each device a path uses, and stays so until
the bdev closes. Its keys are told to targets, so each bdev opens the device for itself, with a protection domain of its
own: a key is of no use on a connection to anybody else. Data outside goes by a bounce slot of its connection, with a copy.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import trio

from dpurt.bdev.buffers import address_of, aligned_buffer
from dpurt.rdma.device import find
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration
from dpurt.wire.nvme_rdma import Chunk, Layout

__all__ = ["Bounce", "Memory", "Port", "Scratch"]

CHUNK_BYTES = 1 << 30
_REMOTE = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
_SYSFS = Path("/sys/class/infiniband")


class Scratch:
    """Memory of our own, registered: zeroed, page-aligned."""

    def __init__(self, adapter: Adapter, length: int, access: Access = Access.LOCAL_WRITE) -> None:
        self.view = aligned_buffer(length)
        self.address = address_of(self.view)
        self._registration = adapter.register(self.address, length, access, self.view)
        [segment] = self._registration.segments(self.address, length)
        self.lkey, self.rkey = segment.chunk.lkey, segment.chunk.rkey

    def close(self) -> None:
        self._registration.close()


class Bounce:
    """Slots for the data of commands whose buffers are not registered."""

    def __init__(self, adapter: Adapter, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._memory = Scratch(adapter, num_slots * slot_bytes, _REMOTE)
        self._free = deque(range(num_slots))
        self.rkey = self._memory.rkey

    def take(self) -> int | None:
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def address(self, slot: int) -> int:
        return self._memory.address + slot * self.slot_bytes

    def fill(self, slot: int, buffers: Sequence[memoryview]) -> None:
        gather(self._memory.view, slot * self.slot_bytes, buffers)

    def empty(self, slot: int, buffers: Sequence[memoryview]) -> None:
        at = slot * self.slot_bytes
        for buffer in buffers:
            buffer[:] = self._memory.view[at : at + len(buffer)]
            at += len(buffer)

    def close(self) -> None:
        self._memory.close()


def gather(into: memoryview, at: int, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        into[at : at + len(buffer)] = buffer
        at += len(buffer)


class Port:
    """An RDMA device, opened for us alone, with what is registered there."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._regions: dict[Chunk, tuple[Registration, int]] = {}
        trio.lowlevel.spawn_system_task(adapter.run)

    def add(self, chunk: Chunk) -> None:
        """Unless it is there already. Raises RdmaLimit."""
        if chunk not in self._regions:
            start, length = chunk.start, chunk.end - chunk.start
            registration = self.adapter.register(start, length, _REMOTE)
            [segment] = registration.segments(start, length)
            self._regions[chunk] = registration, segment.chunk.rkey

    def remove(self, chunk: Chunk) -> None:
        if chunk in self._regions:
            self._regions.pop(chunk)[0].close()

    def key_of(self, chunk: Chunk) -> int:
        return self._regions[chunk][1]

    def close(self) -> None:
        """All queue pairs are gone."""
        for chunk in list(self._regions):
            self.remove(chunk)
        self.adapter.close()


class Memory:
    """All added memory, on all devices."""

    def __init__(self) -> None:
        self.layout = Layout()
        self._ports: dict[tuple[str, str], Port] = {}

    def port(self, guid: str, own_address: str) -> Port:
        """The device of this node GUID, with all memory registered. Raises OSError, RdmaUnavailable or RdmaLimit."""
        key = guid, own_address
        if key in self._ports and self._ports[key].adapter.failure:
            self._ports.pop(key).close()
        if key not in self._ports:
            port = Port(Adapter(find(_device_of(guid), own_address)))
            try:
                for chunk in self.layout.chunks:
                    port.add(chunk)
            except BaseException:
                port.close()
                raise
            self._ports[key] = port
        return self._ports[key]

    async def add(self, address: int, length: int) -> None:
        """Raises RdmaLimit; then nothing was added."""
        if self.layout.find(address, 1) is not None:
            await trio.lowlevel.checkpoint()
            return
        new = Layout().add(address, length, CHUNK_BYTES)
        try:
            for chunk in new:
                await trio.lowlevel.checkpoint()  # a GiB takes a while
                self._add_to_all(chunk)
            for chunk in new:  # a device may have come up meanwhile
                self._add_to_all(chunk)
        except BaseException:
            for port in self._ports.values():
                for chunk in new:
                    port.remove(chunk)
            raise
        self.layout.add(address, length, CHUNK_BYTES)

    def _add_to_all(self, chunk: Chunk) -> None:
        for port in self._ports.values():
            port.add(chunk)

    def close(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports.clear()


def _device_of(guid: str) -> str:
    for device in sorted(_SYSFS.glob("*")):
        if (device / "node_guid").read_text().strip() == guid:
            return device.name
    raise OSError(errno.ENODEV, f"no RDMA device has the node GUID {guid}")
