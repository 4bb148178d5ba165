"""The verbs fabric, node side: hosts READ leased slots and WRITE reservations by RDMA; the node WRITEs into their landings.

Theory of operation. A link is one control connection (TCP, `dpurt.fabric.verbs_control`) and one reliable-connected queue
pair. For a pull or a store the host asks; the node has the AccessCheck begin each range, opens exactly these ranges to this
host's queue pair and answers with keys; the host moves the bytes without the node's CPU and says when it is done; the keys
die, and only then does the AccessCheck's `end` come. So a slot is never reused under a reader: a host that does not finish in
its time finds its keys dead (its READ is refused by the NIC), and a host that dies is seen by the end of its TCP connection.

Opening a range: a type-2 memory *window* per lease, bound to the host's queue pair, where the device has windows; regions then
give no remote access by themselves. Without windows hosts get the region's own key, and a host that overstays loses its
queue pair instead.

A store's last WRITE carries its number as immediate: what arrives in this order is in memory when the node sees the number. A
push's does the same at the host, which answers; so `push` returns when the bytes can be read there.

A queue pair in error is replaced once its host asks for it (`Rejoin`); grants of the old one end with it.

No encryption, as RDMA has none: for a trusted network. The bytes are checked by who reads them.

Leaves to others: the host side (`dpurt.fabric.verbs_host`), leases, CRCs.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import trio

from dpurt.errors import FabricError, QueuePairError, RdmaLimit
from dpurt.fabric import AccessCheck, Address, MemoryRegion
from dpurt.fabric.access import Entry
from dpurt.fabric.node_link import FabricBase
from dpurt.fabric.verbs_control import Challenge, Control, Denied, Join, Welcome, proof
from dpurt.fabric.verbs_host import connect
from dpurt.fabric.verbs_link import VerbsLimits, VerbsLink
from dpurt.fabric.verbs_memory import ArenaMemory
from dpurt.fabric.wire import accept, listener
from dpurt.rdma.device import RdmaDevice
from dpurt.rdma.endpoint import Adapter

__all__ = ["VerbsFabric", "VerbsLimits", "VerbsLink", "connect"]


class VerbsFabric(FabricBase[VerbsLink]):
    """The node side on one device. The control connection listens on the device's own address; port 0: any."""

    kind = "verbs"

    def __init__(
        self, access: AccessCheck, device: RdmaDevice, *, port: int = 0, limits: VerbsLimits | None = None
    ) -> None:
        self.limits = limits or VerbsLimits()
        super().__init__(access, self.limits.max_links)
        self.device = device
        self._port = port
        self._greeting = 0
        self._regions: dict[int, tuple[MemoryRegion, bool]] = {}
        self.adapter: Adapter
        self.memory: ArenaMemory
        self._is_serving = False

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        super().add_region(region, readers, writer)
        self._regions[region.region_id] = region, writer is not None
        if self._is_serving:
            self.memory.offer(region, is_inbound=writer is not None)

    def remove_region(self, region_id: int) -> None:
        super().remove_region(region_id)
        self._regions.pop(region_id, None)
        if self._is_serving:
            self.memory.withdraw(region_id)

    def claim(
        self, session: int, op: str, entries: Sequence[Entry]
    ) -> AbstractContextManager[list[memoryview]]:
        """See `AccessTable.claim`."""
        return self._table.claim(session, op, entries)

    async def serve(
        self,
        on_link_closed: Callable[[int], None],
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `dpurt.fabric.Fabric`. Raises RdmaUnavailable, RdmaLimit when the arena cannot be registered."""
        self._on_link_closed = on_link_closed
        self.adapter = Adapter(self.device, max_chunk_bytes=self.limits.max_chunk_bytes)
        try:
            self.memory = ArenaMemory(self.adapter)
            for region, is_inbound in self._regions.values():
                self.memory.offer(region, is_inbound=is_inbound)
            self.memory.register_all()
            self._is_serving = True
            await self._serve(task_status)
        finally:
            self._is_serving = False
            self.adapter.close()

    async def _serve(self, task_status: trio.TaskStatus[Address]) -> None:
        with listener(self.device.address, self._port) as listening:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.adapter.run)
                host, port = listening.getsockname()[:2]
                task_status.started({"host": host, "port": port})
                while True:
                    self._accepted(await accept(listening), nursery)
                    await trio.lowlevel.checkpoint()

    def _accepted(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        if self._greeting >= self.limits.max_greeting:
            self._stats.refused += 1
            sock.close()
            return
        self._greeting += 1
        nursery.start_soon(self._serve_connection, sock)

    async def _serve_connection(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        control = Control(sock, "unknown host")
        link = None
        try:
            link = await self._greet(control)
            if link is not None:
                await link.serve()
        finally:
            control.close()
            if link is not None:
                self._gone(link)

    async def _greet(self, control: Control) -> VerbsLink | None:
        """The link to serve, if the host may have one."""
        try:
            return await self._hello(control, trio.current_time() + self.limits.hello_s)
        except (FabricError, QueuePairError):
            self._stats.errors += 1
        finally:
            self._greeting -= 1
        return None

    async def _hello(self, control: Control, deadline: float) -> VerbsLink | None:
        nonce = secrets.token_bytes(16)
        control.post(Challenge(nonce))
        join = await control.expect(Join, deadline)
        token = self._table.token_of(join.session)
        said = proof(token or bytes(16), "host", (nonce, join.nonce), join.session, join.queue_pair)
        if not secrets.compare_digest(said, join.proof) or token is None:
            self._deny(control, "denied", "the session or its token is wrong")
            return None
        if not self._has_room(join.session):
            self._deny(control, "busy", "the session has a link, or there are too many")
            return None
        control.peer = f"session {join.session}"
        link = VerbsLink(join.session, control, self)
        try:
            queue_pair = link.join(join)
        except RdmaLimit as limit:
            self._deny(control, "busy", str(limit))
            return None
        self._opened(link)  # and nothing is awaited until the caller's `finally` guards it
        mine = proof(token, "node", (nonce, join.nonce), join.session, queue_pair.address)
        control.post(Welcome(queue_pair.address, mine))
        return link

    def _deny(self, control: Control, code: str, why: str) -> None:
        self._stats.refused += 1
        control.post(Denied(code, why))
