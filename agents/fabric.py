"""The fabric agent: runs the node's fabrics, says which one a host uses and why, and is their word on who may touch what.

Links are made with a token a `hello` reply carried; a pull needs a lease, a store a reservation. Restart: the fabrics'
listeners start anew, links are lost, and their sessions end with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import trio

from dpurt.errors import FabricError, RdmaLimit, RdmaUnavailable
from dpurt.fabric import Address, Fabric, MemoryRegion
from dpurt.runtime.actor import Actor

from .intake import Intake
from .staging import StagingAgent
from .tape import Tape

log = structlog.get_logger()
MAPS_MEMORY = frozenset({"shm"})  # fabrics whose hosts read the arena without asking


@dataclass(frozen=True, slots=True)
class Choice:
    """The fabric a host will use, where, and why this one."""

    kind: str
    address: Address
    reason: str


class Access:
    """The fabrics' `AccessCheck`: leases of the staging agent for pulls, reservations of the intake for stores."""

    def __init__(self, staging: StagingAgent, intake: Intake) -> None:
        self._staging = staging
        self._intake = intake
        self.tape: Tape | None = None
        self._begun: dict[
            tuple[str, int, int], tuple[float, int | None]
        ] = {}  # op, offset, lease -> when, block

    def begin(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> bool:
        """See `dpurt.fabric.AccessCheck`."""
        check = self._intake.begin_store if op == "store" else self._staging.begin_pull
        is_allowed = check(session, region_id, offset, length, lease)
        if is_allowed and self.tape is not None:
            block = None if op == "store" else self._staging.block_under(lease)
            self._begun[op, offset, lease] = (trio.current_time(), block)
        return is_allowed

    def end(self, session: int, op: str, region_id: int, offset: int, length: int, lease: int) -> None:
        """See `dpurt.fabric.AccessCheck`."""
        since, block = self._begun.pop((op, offset, lease), (None, None))
        if since is not None and self.tape is not None:
            self.tape.moved("store" if op == "store" else "pull", block, since, length, trio.current_time())
        if op == "store":
            self._intake.end_store(lease)
        else:
            self._staging.end_pull(lease)


class FabricAgent(Actor[None]):
    """Moves bytes to and from hosts."""

    name = "fabric"

    def __init__(
        self,
        fabrics: Mapping[str, Fabric],
        allowed: Mapping[str, Sequence[str]],
        off: Mapping[str, str] | None = None,
        paths: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        """`off`: fabrics that cannot be had on this machine, and why. `paths`: of each host, the addresses of the rails that
        lead to it, best first, and why.
        """
        super().__init__(1)
        self.fabrics = dict(fabrics)
        self.off = dict(off or {})
        self._allowed = allowed
        self._paths = dict(paths or {})
        self._addresses: dict[str, Address] = {}
        self._inbound: dict[int, int] = {}
        self.on_link_closed: Callable[[int], None] = lambda session: None
        self.push_errors = 0

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            for kind, fabric in list(self.fabrics.items()):
                try:
                    self._addresses[kind] = await nursery.start(fabric.serve, self._closed)
                except (RdmaUnavailable, RdmaLimit) as error:
                    del self.fabrics[kind]
                    self.off[kind] = str(error)
            for kind, reason in self.off.items():
                log.warning("fabric_off", kind=kind, reason=reason)
            task_status.started()

    def _closed(self, session: int) -> None:
        self.on_link_closed(session)

    def choose(self, host: str, wanted: Sequence[str]) -> Choice | None:
        """The first fabric of the topology's order for this host that the host can use and the node runs."""
        allowed = self._allowed.get(host, ())
        skipped: list[str] = []
        for kind in allowed:
            if kind in wanted and kind in self._addresses:
                why = f"first of the topology's {list(allowed)}" if not skipped else "; ".join(skipped)
                return self._by_rails(host, Choice(kind, self._addresses[kind], why))
            not_here = self.off.get(kind, "not served here")
            skipped.append(f"{kind}: " + ("the host cannot use it" if kind not in wanted else not_here))
        return None

    def _by_rails(self, host: str, choice: Choice) -> Choice:
        """For a fabric with rails: those that lead to this host, in its order."""
        served = str(choice.address.get("rails", "")).split(",")
        paths = [(rail, why) for rail, why in self._paths.get(host, ()) if rail in served]
        if not paths:
            return choice
        rails = ",".join(rail for rail, _ in paths)
        reasons = [f"rail {rail}: {why}" for rail, why in paths] if len(paths) > 1 else []
        address = {**choice.address, "host": paths[0][0], "rails": rails}
        return Choice(choice.kind, address, "; ".join([choice.reason, *reasons]))

    def offer(self, region: MemoryRegion) -> None:
        """A region of the arena, to be read by whoever is admitted to it."""
        for fabric in self.fabrics.values():
            fabric.add_region(region, None, None)

    def admit(
        self, kind: str, session: int, token: bytes, regions: Sequence[MemoryRegion], inbound: MemoryRegion
    ) -> None:
        """Let the bearer of `token` open a link."""
        fabric = self.fabrics[kind]
        fabric.add_region(inbound, frozenset(), session)
        self._inbound[session] = inbound.region_id
        readable = [region.region_id for region in regions]
        writable = [inbound.region_id, *(readable if fabric.lands_stores else ())]
        fabric.admit(session, token, readable, writable)

    def lands_stores(self, kind: str) -> bool:
        """See `Fabric.lands_stores`."""
        return self.fabrics[kind].lands_stores

    def may_still_read(self, kind: str, session: int) -> bool:
        """The host maps our memory and has not let go of it, though we may have cut it off already."""
        return kind in MAPS_MEMORY and self.fabrics[kind].is_linked(session)

    def expel(self, kind: str, session: int) -> None:
        """Close the session's link and forget its token."""
        self.fabrics[kind].expel(session)

    def forget(self, kind: str, session: int) -> None:
        """The session's inbound region is gone."""
        region = self._inbound.pop(session, None)
        if region is not None:
            self.fabrics[kind].remove_region(region)

    async def push(
        self, kind: str, session: int, pieces: Sequence[tuple[memoryview, int, int]], deadline: float
    ) -> str:
        """Write into the host's landing regions. Empty when done, else why not; the host then discards what came."""
        link = self.fabrics[kind].link(session)
        if link is None:
            self.push_errors += 1
            return "the host has no open link"
        try:
            await link.push(pieces, deadline)
        except FabricError as error:
            self.push_errors += 1
            log.warning("push_failed", session=session, detail=str(error))
            return str(error)
        return ""
