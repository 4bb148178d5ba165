"""The memory fabric: node and host in one process. A fake with honest semantics, for tests and the demo.

It asks the AccessCheck for every pull and store, as tcp does, and can give views, as shm does. Every
operation lets other tasks run once while its ranges are claimed, so that a test can cancel, expel or close in
the middle. Nothing is copied unless all of it is."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import trio

from dpurt.errors import FabricError, NodeUnavailable, RemoteAccessError, RemoteProtocolError
from dpurt.fabric import AccessCheck, Address, FabricStats, MemoryRegion, Piece
from dpurt.fabric.access import Entry, Refused, within
from dpurt.fabric.node_link import FabricBase
from dpurt.fabric.region import MemfdRegion, next_landing_id

__all__ = ["MemoryEndpoint", "MemoryFabric", "MemoryLink", "connect"]

_serving: weakref.WeakValueDictionary[str, MemoryFabric] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class MemoryLink:
    """Both ends share this one object: closing it closes both."""

    def __init__(self, session: int, stats: FabricStats, on_gone: Callable[[MemoryLink], None]) -> None:
        self.session = session
        self.close_reason: str | None = None
        self.landings: dict[int, MemfdRegion] = {}
        self.host_stats = FabricStats(links=1)
        self._stats = stats
        self._on_gone = on_gone
        self._busy = 0
        self._is_gone = False

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        total = sum(len(source) for source, _, _ in pieces)
        targets = [self._landing(*piece) for piece in pieces]
        await self.pause("push", deadline)
        for (source, _, _), target in zip(pieces, targets, strict=True):
            target[:] = source
        self._stats.count("push", total)
        self.host_stats.count("push", total)

    def close(self, reason: str = "closed by the node") -> None:
        if self.close_reason is None:
            self.close_reason = reason
            self.host_stats.links = 0
        self._report_if_gone()

    def enter(self) -> None:
        """A transfer starts; the link is not reported as closed before `leave`."""
        self._busy += 1

    def leave(self) -> None:
        self._busy -= 1
        self._report_if_gone()

    async def pause(self, stage: str, deadline: float) -> None:
        """Where a real fabric would wait for bytes."""
        with trio.CancelScope(deadline=deadline) as scope:
            self.check_open(stage)
            await trio.lowlevel.checkpoint()
        self.check_open(stage)
        if scope.cancelled_caught:
            raise FabricError(f"session {self.session}", stage, "timed_out")

    def check_open(self, stage: str) -> None:
        if self.close_reason is not None:
            raise FabricError(f"session {self.session}", stage, "closed", 0, self.close_reason)

    def _landing(self, source: memoryview, region_id: int, offset: int) -> memoryview:
        self.check_open("push")
        region = self.landings.get(region_id)
        if region is None or not within(offset, len(source), region.size):
            raise RemoteAccessError(f"session {self.session}", "push", f"no landing {region_id} at {offset}")
        return region.view[offset : offset + len(source)]

    def _report_if_gone(self) -> None:
        if self.close_reason is not None and not self._busy and not self._is_gone:
            self._is_gone = True
            self._on_gone(self)


class MemoryFabric(FabricBase[MemoryLink]):
    """The node side."""

    kind = "memory"
    lands_stores = True

    def __init__(self, access: AccessCheck, *, max_links: int = 256) -> None:
        super().__init__(access, max_links)

    async def serve(
        self,
        on_link_closed: Callable[[int], None],
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self._on_link_closed = on_link_closed
        name = f"memory-{next(_numbers)}"
        _serving[name] = self
        try:
            task_status.started({"name": name})
            await trio.sleep_forever()
        finally:
            del _serving[name]
            for link in list(self._links.values()):
                link.close("the node stopped serving")

    def open(self, session: int, token: bytes) -> MemoryEndpoint:
        """What a hello does on the other fabrics."""
        if not self._table.authenticate(session, token):
            self._stats.refused += 1
            raise RemoteProtocolError("denied", "wrong session or token")
        if not self._has_room(session):
            self._stats.refused += 1
            raise NodeUnavailable("memory", "the session has a link already, or the node has no room for one")
        link = MemoryLink(session, self._stats, self._gone)
        self._opened(link)
        return MemoryEndpoint(self, link)

    async def transfer(self, link: MemoryLink, op: str, pieces: Sequence[Piece], deadline: float) -> None:
        """Claim, let others run, copy, release."""
        link.check_open(op)
        entries: list[Entry] = [(p.region_id, p.offset, len(p.local), p.lease) for p in pieces]
        link.enter()
        try:
            with self._table.claim(link.session, op, entries) as views:
                await link.pause(op, deadline)
                for piece, view in zip(pieces, views, strict=True):
                    target, source = (piece.local, view) if op == "pull" else (view, piece.local)
                    target[:] = source
        except Refused as refusal:
            self._stats.refused += 1
            raise RemoteAccessError(f"session {link.session}", op, str(refusal)) from refusal
        finally:
            link.leave()
        for stats in (self._stats, link.host_stats):
            stats.count(op, sum(entry[2] for entry in entries))

    def look(self, link: MemoryLink, region_id: int, offset: int, length: int) -> memoryview:
        """A view, allowed by the table but, as with shm, not by a lease."""
        link.check_open("view")
        for region, _ in self._table.mappable(link.session):
            if region.region_id == region_id and within(offset, length, region.size):
                return region.view[offset : offset + length].toreadonly()
        self._stats.refused += 1
        raise RemoteAccessError(
            f"session {link.session}", "view", f"region {region_id} [{offset}, +{length})"
        )


class MemoryEndpoint:
    """The host side."""

    kind = "memory"

    def __init__(self, fabric: MemoryFabric, link: MemoryLink) -> None:
        self._fabric = fabric
        self._link = link

    @property
    def stats(self) -> FabricStats:
        return self._link.host_stats

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        await self._fabric.transfer(self._link, "pull", pieces, deadline)

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        await self._fabric.transfer(self._link, "store", pieces, deadline)

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        return self._fabric.look(self._link, region_id, offset, length)

    def keep(self, memory: memoryview) -> None:
        """See `Endpoint.keep`: no memory is registered here."""

    def landing(self, size: int) -> MemoryRegion:
        self._link.check_open("landing")
        region_id = next_landing_id()
        region = MemfdRegion(region_id, f"landing {region_id}", size, huge_pages=False)
        self._link.landings[region_id] = region
        return region

    async def aclose(self) -> None:
        self._link.close("closed by the host")
        for region in self._link.landings.values():
            region.close()
        await trio.lowlevel.checkpoint()


async def connect(address: Address, session: int, token: bytes, deadline: float) -> MemoryEndpoint:
    """Find the fabric serving at that name in this process."""
    await trio.lowlevel.checkpoint()
    fabric = _serving.get(str(address["name"]))
    if fabric is None:
        raise NodeUnavailable(f"memory:{address['name']}", "nobody serves there")
    return fabric.open(session, token)
