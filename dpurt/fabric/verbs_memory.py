"""The arena's regions as the node's RDMA devices know them: registered once with each, for as long as they are offered or used.

Leaves to others: who may use them; windows (`dpurt.fabric.verbs_link`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from dpurt.fabric import MemoryRegion
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration, address_of

__all__ = ["ArenaMemory", "NodeRail", "RailStats"]


@dataclass(slots=True)
class _Offered:
    """A region and its registration, which ends with the last grant after the offer."""

    region: MemoryRegion
    is_inbound: bool
    registration: Registration | None = None
    users: int = 0
    is_offered: bool = True

    def release(self) -> None:
        if self.registration is not None and not self.users and not self.is_offered:
            self.registration.close()
            self.registration = None


@dataclass(slots=True)
class RailStats:
    """What happened on one rail of a node. `bytes_out`: pulled and pushed, `bytes_in`: stored."""

    lanes: int = 0  # up now
    breaks: int = 0
    rejoins: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class NodeRail:
    """One rail of the node: an opened device, and the arena as it knows it. Its name is its address."""

    adapter: Adapter
    memory: ArenaMemory
    stats: RailStats

    @property
    def name(self) -> str:
        return self.adapter.device.address


class ArenaMemory:
    """The arena's regions as the device knows them."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._offered: dict[int, _Offered] = {}

    def offer(self, region: MemoryRegion, *, is_inbound: bool) -> None:
        self._offered[region.region_id] = _Offered(region, is_inbound)

    def withdraw(self, region_id: int) -> None:
        found = self._offered.pop(region_id, None)
        if found is not None:
            found.is_offered = False
            found.release()

    def register_all(self) -> None:
        """Now, while nobody waits: pinning takes time. Raises RdmaLimit."""
        for offered in self._offered.values():
            self._registration(offered)

    def _registration(self, offered: _Offered) -> Registration:
        if offered.registration is None:
            view = offered.region.view
            offered.registration = self._adapter.register(address_of(view), len(view), self._access(offered))
        return offered.registration

    def _access(self, offered: _Offered) -> Access:
        """No more than is needed: with windows, nothing for anybody but through them; nobody else ever writes here."""
        if self._adapter.device.limits.has_windows:
            return Access.LOCAL_WRITE | Access.MW_BIND
        return Access.LOCAL_WRITE if offered.is_inbound else Access.LOCAL_WRITE | Access.REMOTE_READ

    @contextlib.contextmanager
    def using(self, region_ids: set[int]) -> Iterator[dict[int, Registration]]:
        """The registrations of regions, kept until the end of the block. Raises RdmaLimit."""
        used = [self._offered[region_id] for region_id in region_ids]
        for offered in used:
            offered.users += 1
        try:
            yield {offered.region.region_id: self._registration(offered) for offered in used}
        finally:
            for offered in used:
                offered.users -= 1
                offered.release()

    def known(self) -> list[Registration]:
        return [o.registration for o in self._offered.values() if o.registration is not None]
