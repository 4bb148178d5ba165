"""Who may touch what: the node's table of regions and sessions, shared by every fabric.

A pure core: no sockets, no clock. A session may read a region when `admit` granted it *and* the region's
`readers` allow it; it may write a region only when `admit` said so, and no other is that region's `writer`.
Bounds come next, and the AccessCheck (leases) last, so that it only ever sees ranges that exist. `claim` is
the one way in: it begins every range of a request or none, and ends each exactly once, however the transfer
ends."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dpurt.fabric import AccessCheck, MemoryRegion

__all__ = ["AccessTable", "Entry", "Grant", "Refused"]

MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 64

Entry = tuple[int, int, int, int]
"""(region id, offset, length, lease): one range of a request, as it is on the wire."""


class Refused(Exception):
    """Entry `index` of a request is not allowed. Becomes a RemoteAccessError at the peer; the link stays."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"entry {index}: {reason}")
        self.index = index
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Grant:
    """What a session was admitted to."""

    token: bytes
    regions: frozenset[int]
    writable: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Offer:
    region: MemoryRegion
    readers: frozenset[int] | None
    writer: int | None


class AccessTable:
    """Regions offered and sessions admitted. Used from one task's thread only."""

    def __init__(self, check: AccessCheck) -> None:
        self._check = check
        self._offers: dict[int, _Offer] = {}
        self._grants: dict[int, Grant] = {}

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        if region.region_id in self._offers:
            raise ValueError(f"region {region.region_id} is offered already")
        self._offers[region.region_id] = _Offer(region, readers, writer)

    def remove_region(self, region_id: int) -> None:
        """Later accesses are refused; transfers in flight go on. Unknown ids are ignored."""
        self._offers.pop(region_id, None)

    def admit(self, session: int, token: bytes, regions: Sequence[int], writable: Sequence[int]) -> None:
        if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
            raise ValueError(
                f"a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes, this one has {len(token)}"
            )
        if session in self._grants:
            raise ValueError(f"session {session} is admitted already")
        self._grants[session] = Grant(bytes(token), frozenset(regions), frozenset(writable))

    def expel(self, session: int) -> None:
        self._grants.pop(session, None)

    def authenticate(self, session: int, token: bytes) -> bool:
        """Constant-time: an unknown session costs what a wrong token costs."""
        grant = self._grants.get(session)
        expected = grant.token if grant else bytes(MIN_TOKEN_BYTES)
        return hmac.compare_digest(expected, token) and grant is not None

    def token_of(self, session: int) -> bytes | None:
        """The session's secret, for fabrics that have it proved instead of sent."""
        grant = self._grants.get(session)
        return grant.token if grant else None

    def mappable(self, session: int) -> list[tuple[MemoryRegion, bool]]:
        """(region, writable) for each region the session may map, for fabrics that hand out descriptors."""
        offers = self._offers.values()
        return [
            (offer.region, writes)
            for offer in offers
            if (writes := self._may_write(session, offer)) or self._may_read(session, offer)
        ]

    @contextmanager
    def claim(self, session: int, op: str, entries: Sequence[Entry]) -> Iterator[list[memoryview]]:
        """Begin every entry and give their bytes; on exit end every entry. Raises Refused, with none
        begun."""
        begun: list[Entry] = []
        try:
            views = []
            for index, entry in enumerate(entries):
                views.append(self._begin(index, session, op, entry))
                begun.append(entry)
            yield views
        finally:
            for entry in begun:
                self._check.end(session, op, *entry)

    def _begin(self, index: int, session: int, op: str, entry: Entry) -> memoryview:
        region_id, offset, length, _lease = entry
        offer = self._offers.get(region_id)
        allowed = self._may_write if op == "store" else self._may_read
        if offer is None or not allowed(session, offer):
            raise Refused(index, f"session {session} may not {op} region {region_id}")
        if not within(offset, length, offer.region.size):
            raise Refused(index, f"[{offset}, +{length}) is outside region {region_id}")
        view = offer.region.view[offset : offset + length]
        if not self._check.begin(session, op, *entry):
            raise Refused(index, f"no lease for {op} of region {region_id}")
        return view

    def _may_read(self, session: int, offer: _Offer) -> bool:
        grant = self._grants.get(session)
        if grant is None or offer.region.region_id not in grant.regions:
            return False
        return offer.readers is None or session in offer.readers

    def _may_write(self, session: int, offer: _Offer) -> bool:
        grant = self._grants.get(session)
        if grant is None or offer.region.region_id not in grant.writable:
            return False
        return offer.writer is None or offer.writer == session


def within(offset: int, length: int, size: int) -> bool:
    """Does [offset, offset + length) lie in [0, size)? An empty range may lie at the very end."""
    return offset >= 0 and length >= 0 and offset + length <= size
