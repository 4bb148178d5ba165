"""What every fabric's node side has in common: regions, admissions, the set of links, and reporting their
end.

Each kind adds how a host connects and how bytes move. `on_link_closed` is called exactly once per link that
was opened, by `_gone`, when the kind says that the host can no longer touch the node's memory through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio

from dpurt.fabric import AccessCheck, FabricStats, Link, MemoryRegion
from dpurt.fabric.access import AccessTable

__all__ = ["FabricBase", "Greetings"]


L = TypeVar("L", bound=Link)


class Greetings:
    """Connections that have not said who they are yet, at most `most` and each for `seconds`. One more ends the oldest: a
    crowd that says nothing keeps nobody out, as whoever has something to say has said it long before."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._waiting: dict[trio.CancelScope, None] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """Cancelled within when the connection's time is up, or its place another's."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel()
        with trio.move_on_after(self._seconds) as scope:
            self._waiting[scope] = None
            try:
                yield
            finally:
                self._waiting.pop(scope, None)


class FabricBase(Generic[L]):
    """The Fabric surface without `serve`. `_links` holds each link until it is *gone*, so a session has one
    at most."""

    def __init__(self, access: AccessCheck, max_links: int) -> None:
        self._table = AccessTable(access)
        self._links: dict[int, L] = {}
        self._max_links = max_links
        self._stats = FabricStats()
        self._on_link_closed: Callable[[int], None] | None = None

    @property
    def stats(self) -> FabricStats:
        return self._stats

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        self._table.add_region(region, readers, writer)

    def remove_region(self, region_id: int) -> None:
        self._table.remove_region(region_id)

    def admit(self, session: int, token: bytes, regions: Sequence[int], writable: Sequence[int]) -> None:
        self._table.admit(session, token, regions, writable)

    def expel(self, session: int) -> None:
        self._table.expel(session)
        link = self._links.get(session)
        if link is not None:
            link.close("expelled")

    def link(self, session: int) -> L | None:
        link = self._links.get(session)
        return link if link is not None and link.is_open else None

    def is_linked(self, session: int) -> bool:
        return session in self._links

    def _has_room(self, session: int) -> bool:
        return session not in self._links and len(self._links) < self._max_links

    def _opened(self, link: L) -> None:
        self._links[link.session] = link
        self._stats.links += 1

    def _gone(self, link: L, *, report: bool = True) -> None:
        del self._links[link.session]
        self._stats.links -= 1
        if report and self._on_link_closed is not None:
            self._on_link_closed(link.session)
