"""Fabrics: how block bytes move between a node and a GPU host.

Implementations: `memory` (tests), `shm` (same machine: the host maps the arena), `tcp` (anywhere), `verbs` (RDMA).
`dpurt.testing.fabric_contract.check_fabric` is the contract as a test suite.

Two sides. The **node** side (`Fabric`) owns the arena's regions and decides who may touch what. The **host**
side (`Endpoint`) pulls leased ranges, stores into reserved ones, and offers *landing* buffers the
node may push into. Control (leases, reservations, descriptors) travels on the ZeroMQ channel; a fabric link
is opened with the secret `token` that came in the authenticated `hello` reply. Only bytes move here.

Deadlines are absolute times of `trio.current_time()`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import trio

__all__ = [
    "AccessCheck",
    "Address",
    "Endpoint",
    "Fabric",
    "FabricStats",
    "Link",
    "MemoryRegion",
    "Piece",
    "connect",
]

Address = Mapping[str, str | int]
"""How a host reaches a fabric; plain values that travel in a `hello` reply."""


@runtime_checkable
class MemoryRegion(Protocol):
    """A contiguous, page-aligned, shareable piece of memory. `dpurt.fabric.region.MemfdRegion` is the
    arena's.

    `fd` is a memfd where the memory has one, else -1. Device memory (dma-buf) would implement the same.
    """

    @property
    def region_id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The whole region, writable, format ``"B"``."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous run of bytes to move: `length` bytes at `offset` of a region, from or to `local`.

    `lease` is the node's number of the lease (pull) or reservation (store) that allows it.
    """

    region_id: int
    offset: int
    lease: int
    local: memoryview


@dataclass(slots=True)
class FabricStats:
    """Plain counters of one side of a fabric: one per call or request, bytes of those that ended well.

    A node sees pulls and stores only where it takes part in them: not over shm, where the host copies by
    itself."""

    links: int = 0  # open now
    pulls: int = 0
    bytes_pulled: int = 0
    stores: int = 0
    bytes_stored: int = 0
    pushes: int = 0
    bytes_pushed: int = 0
    refused: int = 0  # accesses and hellos that were well-formed and not allowed
    errors: int = 0  # malformed frames, peers too slow, connections that broke in the middle

    def count(self, op: str, num_bytes: int) -> None:
        """One `op` (pull, store, push) of `num_bytes` ended well."""
        if op == "pull":
            self.pulls += 1
            self.bytes_pulled += num_bytes
        elif op == "store":
            self.stores += 1
            self.bytes_stored += num_bytes
        else:
            self.pushes += 1
            self.bytes_pushed += num_bytes


class AccessCheck(Protocol):
    """The node's word on each remote access. Synchronous, on the node's Trio thread.

    `begin` returns True when session `session` may access that range under that lease now, and then the range
    stays untouched by others until `end` is called exactly once with the same arguments (transfer done,
    failed or abandoned)."""

    def begin(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> bool: ...

    def end(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> None: ...


@runtime_checkable
class Link(Protocol):
    """The node's end of one host's connection."""

    @property
    def session(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def close_reason(self) -> str | None:
        """Why the link is no longer open; None while it is."""
        ...

    async def push(self, pieces: Sequence[tuple[memoryview, int, int]], deadline: float) -> None:
        """Copy each (source, landing region id, landing offset) into the host's memory, in order.

        On return the bytes are in the host's memory. Raises FabricError (bytes done; the host discards)
        otherwise."""
        ...

    def close(self, reason: str = "closed by the node") -> None:
        """Cut the host off. Transfers in flight fail; their `AccessCheck.end` is still called, and
        `on_link_closed` after."""
        ...


@runtime_checkable
class Fabric(Protocol):
    """The node side. One instance per fabric kind; a supervised task runs `serve`."""

    kind: str
    lands_stores: bool
    """Whether the node itself puts a store's bytes where they go, and only while the AccessCheck says so: then they may go into
    memory others read. Not where the host maps what it writes (shm)."""

    @property
    def stats(self) -> FabricStats: ...

    def add_region(self, region: MemoryRegion, readers: frozenset[int] | None, writer: int | None) -> None:
        """Offer a region. `readers`: session numbers that may map or read it (None: decided by AccessCheck
        alone); `writer`: the one session that may write it (an inbound region), or None (whoever was admitted to
        write it, and the AccessCheck lets)."""
        ...

    def remove_region(self, region_id: int) -> None:
        """Stop offering a region (an inbound one whose host is gone). Transfers in flight go on; later ones
        are refused."""
        ...

    def admit(self, session: int, token: bytes, regions: Sequence[int], writable: Sequence[int]) -> None:
        """Let the bearer of `token` open a link as `session`, to read `regions` and write `writable` region
        ids.

        A token is a secret of 16 to 64 bytes. It opens one link at a time, until `expel`. Over shm a link
        maps what is granted and offered when it opens. ValueError: the session is admitted already, or the
        token's length."""
        ...

    def expel(self, session: int) -> None:
        """Forget the session's token and close its link."""
        ...

    def link(self, session: int) -> Link | None:
        """The open link of a session."""
        ...

    def is_linked(self, session: int) -> bool:
        """The session has a link, open or cut off, whose end was not reported yet: its host may still touch our memory."""
        ...

    async def serve(
        self,
        on_link_closed: Callable[[int], None],
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept links until cancelled; `task_status.started(address)` gives the address map that `hello`
        replies carry (plain strings and ints). `on_link_closed(session)` is called, on the Trio thread, once
        the session's process provably no longer reads or writes the node's memory through this link (EOF
        seen, transfers ended). Cancelling `serve` closes every link and reports those of which that can be
        said: a host that maps the memory (shm) may still do so, and is not reported."""
        ...


@runtime_checkable
class Endpoint(Protocol):
    """The host side: one open link to a node, made by `connect`. All calls on the Trio thread that made
    it."""

    kind: str

    @property
    def stats(self) -> FabricStats: ...

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        """Copy each piece's remote range into `piece.local`. All or an error; on error no local byte may be
        used."""
        ...

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        """Copy each `piece.local` into the node's memory, where it reserved room. All or an error."""
        ...

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        """A read-only view of the node's memory without a copy, or None where the fabric cannot (tcp). Valid
        only while the caller holds the lease; the memory is the node's. Raises RemoteAccessError as `pull`
        would."""
        ...

    def keep(self, memory: memoryview) -> None:
        """Register memory of this host for the life of the link: pulls into it and stores from it then cost no registration of
        their own. Writable memory that outlives the link. Nothing to do where the fabric registers none. Raises RdmaLimit."""
        ...

    def landing(self, size: int) -> MemoryRegion:
        """Make and offer a landing region the node may push into. Synchronous; usable in a control message at
        once.

        The endpoint owns it: it is closed with it. No two landings of a process have the same region id."""
        ...

    async def aclose(self) -> None:
        """Close the link. Idempotent. Over shm the node is told once the last `view` is dropped."""
        ...


async def connect(kind: str, address: Address, session: int, token: bytes, deadline: float) -> Endpoint:
    """Open a link to a node's fabric of that kind, at the address its `hello` reply gave.

    Raises NodeUnavailable (nobody there in time, or no room), RemoteProtocolError ``"denied"`` (session or
    token)."""
    if kind not in ("memory", "shm", "tcp", "verbs"):
        raise ValueError(f"no fabric of kind {kind!r}")
    module = importlib.import_module(f"dpurt.fabric.{kind}")  # they import this one
    endpoint: Endpoint = await module.connect(address, session, token, deadline)
    return endpoint
