"""The verbs fabric, node side: hosts READ leased slots by RDMA; the node READs what they store, and WRITEs into their landings.

Theory of operation. A link is one control connection (TCP, `dpurt.fabric.verbs_control`) and some *lanes*: reliable-connected
queue pairs on one or several rails (NIC ports) of the node, each with a device of the host's. For a pull the host asks; the node
has the AccessCheck begin each range, opens exactly these ranges to this host's queue pairs and answers with keys; the host moves
the bytes without the node's CPU and says when it is done; the keys die, and only then does the AccessCheck's `end` come. So a
slot is never reused under a reader: a host that does not finish in its time finds its keys dead (its READ is refused by the
NIC), and a host that dies is seen by the end of its TCP connection.

Opening a range: a type-2 memory *window* per lease, bound to the host's queue pair, where the device has windows; regions then
give no remote access by themselves. Without windows hosts get the region's own key, and a host that overstays loses its
queue pair instead.

For a store the host says where its bytes are; the node has the AccessCheck begin each range, READs, and answers. So no host can
write the node's memory, with or without windows: the bytes may go straight into a staging slot (`Fabric.lands_stores`), which
nobody touches any more when the AccessCheck's `end` comes.

A push's last WRITE of each lane carries its number as immediate: what arrives in this order is in memory when the host sees the
number, and it answers; so `push` returns when the bytes can be read there.

A large transfer is striped over the lanes that are up; what a lane that breaks had under way goes to the others
(`dpurt.fabric.verbs_lanes`). A queue pair in error is replaced once its host asks for it (`Rejoin`), and used again when a WRITE
without bytes came through; what was granted on the old one ends with it.

The control connection may be opened through any of the rails; the kernel ends it when the way does not answer any more.

No encryption, as RDMA has none: for a trusted network. The bytes are checked by who reads them.

Leaves to others: the host side (`dpurt.fabric.verbs_host`), leases, CRCs.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import trio

from dpurt.errors import FabricError, QueuePairError, RdmaLimit, RdmaUnavailable
from dpurt.fabric import AccessCheck, Address, MemoryRegion
from dpurt.fabric.access import Entry
from dpurt.fabric.node_link import FabricBase, Greetings
from dpurt.fabric.verbs_control import Challenge, Control, Denied, Join, Welcome, proof
from dpurt.fabric.verbs_host import connect
from dpurt.fabric.verbs_link import VerbsLimits, VerbsLink
from dpurt.fabric.verbs_memory import ArenaMemory, NodeRail, RailStats
from dpurt.fabric.wire import accept, listener
from dpurt.rdma.device import RdmaDevice
from dpurt.rdma.endpoint import Adapter

__all__ = ["VerbsFabric", "VerbsLimits", "VerbsLink", "connect"]


class VerbsFabric(FabricBase[VerbsLink]):
    """The node side on some devices, its rails, best first. Control connections are taken at each one's address; port 0: any."""

    kind = "verbs"
    lands_stores = True

    def __init__(
        self,
        access: AccessCheck,
        devices: Sequence[RdmaDevice],
        *,
        port: int = 0,
        queue_pairs: int = 1,
        limits: VerbsLimits | None = None,
    ) -> None:
        """`queue_pairs`: lanes of a host on each rail."""
        self.limits = limits or VerbsLimits()
        super().__init__(access, self.limits.max_links)
        self.devices = list(devices)
        self._port = port
        self._queue_pairs = queue_pairs
        self._greetings = Greetings(self.limits.max_greeting, self.limits.hello_s)
        self._regions: dict[int, tuple[MemoryRegion, bool]] = {}
        self._rails: dict[str, NodeRail] = {}
        self.rails_off: dict[str, str] = {}  # those that could not be opened, and why

    @property
    def rails(self) -> Mapping[str, NodeRail]:
        """By address; empty unless serving."""
        return self._rails

    def rail_stats(self) -> dict[str, RailStats]:
        return {f"{rail.adapter.device.name} {name}": rail.stats for name, rail in self._rails.items()}

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        super().add_region(region, readers, writer)
        self._regions[region.region_id] = region, writer is not None
        for rail in self._rails.values():
            rail.memory.offer(region, is_inbound=writer is not None)

    def remove_region(self, region_id: int) -> None:
        super().remove_region(region_id)
        self._regions.pop(region_id, None)
        for rail in self._rails.values():
            rail.memory.withdraw(region_id)

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
        try:
            self._open_rails()
            await self._serve(task_status)
        finally:
            rails, self._rails = self._rails, {}
            for rail in rails.values():
                rail.adapter.close()

    def _open_rails(self) -> None:
        """One is enough."""
        for device in self.devices:
            try:
                self._open_rail(device)
            except (RdmaUnavailable, RdmaLimit) as error:
                self.rails_off[str(device)] = str(error)
                if device is self.devices[-1] and not self._rails:
                    raise

    def _open_rail(self, device: RdmaDevice) -> None:
        adapter = Adapter(device, max_chunk_bytes=self.limits.max_chunk_bytes)
        try:
            memory = ArenaMemory(adapter)
            for region, is_inbound in self._regions.values():
                memory.offer(region, is_inbound=is_inbound)
            memory.register_all()
        except BaseException:
            adapter.close()
            raise
        rail = NodeRail(adapter, memory, RailStats())
        self._rails[rail.name] = rail

    async def _serve(self, task_status: trio.TaskStatus[Address]) -> None:
        with contextlib.ExitStack() as stack:
            ports: list[int] = []
            listening = []
            for address in self._rails:
                port = ports[0] if ports else self._port
                listening.append(stack.enter_context(listener(address, port)))
                ports.append(listening[-1].getsockname()[1])
            async with trio.open_nursery() as nursery:
                for rail in self._rails.values():
                    await nursery.start(rail.adapter.run)
                for sock in listening:
                    nursery.start_soon(self._accept_from, sock, nursery)
                task_status.started(self._address(ports[0]))
                await trio.sleep_forever()

    def _address(self, port: int) -> Address:
        first, *_ = self._rails
        return {"host": first, "port": port, "rails": ",".join(self._rails), "queue_pairs": self._queue_pairs}

    async def _accept_from(self, listening: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            nursery.start_soon(self._serve_connection, await accept(listening))
            await trio.lowlevel.checkpoint()

    async def _serve_connection(self, sock: socket.socket) -> None:
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
            with self._greetings.one():
                return await self._hello(control)
            self._stats.errors += 1
        except (FabricError, QueuePairError):
            self._stats.errors += 1
        return None

    async def _hello(self, control: Control) -> VerbsLink | None:
        nonce = secrets.token_bytes(16)
        control.post(Challenge(nonce))
        join = await control.expect(Join, math.inf)  # see `Greetings`
        token = self._table.token_of(join.session)
        said = proof(token or bytes(16), "host", (nonce, join.nonce), join.session, join.lanes)
        if not secrets.compare_digest(said, join.proof) or token is None:
            self._deny(control, "denied", "the session or its token is wrong")
            return None
        if not self._has_room(join.session):
            self._deny(control, "busy", "the session has a link, or there are too many")
            return None
        control.peer = f"session {join.session}"
        unknown = {lane.rail for lane in join.lanes} - set(self._rails)
        if unknown:
            self._deny(control, "busy", f"no rail at {', '.join(sorted(unknown))}")
            return None
        link = VerbsLink(join.session, control, self)
        try:
            queue_pairs = link.join(join)
        except (RdmaLimit, QueuePairError) as error:
            self._deny(control, "busy", str(error))
            return None
        self._opened(link)  # and nothing is awaited until the caller's `finally` guards it
        addresses = [queue_pair.address for queue_pair in queue_pairs]
        mine = proof(token, "node", (nonce, join.nonce), join.session, addresses)
        control.post(Welcome(addresses, mine))
        return link

    def _deny(self, control: Control, code: str, why: str) -> None:
        self._stats.refused += 1
        control.post(Denied(code, why))
