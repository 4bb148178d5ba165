"""An NVMe namespace over fabrics as a bdev, whatever the transport: splitting, paths, retries, deadlines.

Theory of operation. Each address is a *path*, kept connected by a task of its own with growing pauses between
tries; while connected it is an *association* (`nvme_association`). An operation is split into commands of at
most what the controller takes. Commands wait in `ready` until a queue pair of the best usable paths (ANA
optimized, else non-optimized) has room.

    operation -> commands -> ready -> in flight -> done            all done: the operation is answered
                               ^         |-> delayed (retry) -┐
                               └---------┴----- other path ---┘

- A status for the path sends a command back to ready: another path takes it, or it waits until its deadline
  for access to come back. A status that allows it is retried a few times. Anything else is the error.
- At a deadline, all associations that carry a command of the operation are dropped: only then is the
  controller known not to touch its buffers. What else was in flight there: reads go to another path; all
  else fails as "unavailable". A write is never sent twice over a lost connection: the first may still be
  carried out, after later writes of the same place.
- Without any association operations fail at once as "unavailable".

A namespace that was removed answers each command with an error of its own ("gone"); one that comes back goes
on. Its size is followed; another block size, or another identity on one of the paths, is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import trio

from dpurt.bdev import BdevInfo, DeviceMemory
from dpurt.bdev.nvme_association import Association, Connection, Transport
from dpurt.bdev.operation_queue import Operation, OperationQueue, QueuedBdev
from dpurt.errors import BdevError, RdmaLimit
from dpurt.wire import nvme
from dpurt.wire.nvme import IdentifyNamespace
from dpurt.wire.nvme_controller import Controller, Login
from dpurt.wire.nvme_queue import Command, Completion, piece_of, split_blocks, split_runs
from dpurt.wire.nvme_status import Action, Status

__all__ = ["NvmeBdev", "Pacing"]

_MAX_ATTEMPTS = 4
_RETRY_S = 0.01  # at least, times the attempts so far
_MAX_TRANSFER_BYTES = 4 << 20  # where the controller has no limit
_OPTIMAL_BYTES = 1 << 20
_MAX_RANGE_BLOCKS = 1 << 31  # of one deallocation

Address = TypeVar("Address")


@dataclass(frozen=True, slots=True)
class Pacing:
    """How long to wait for what."""

    connect_s: float = 10.0
    min_backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    close_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Work:
    """An operation and how many of its commands are not done; with an error those not sent yet never are."""

    operation: Operation
    left: int
    error: BdevError | None = None


class _Path(Generic[Address]):
    """One address, and the association there is or was last."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.association: Association[Address] | None = None
        self.problem = "not connected yet"
        self.has_tried = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()


class NvmeBdev(QueuedBdev, Generic[Address]):
    """See `Bdev`. Subclasses give the transport and `open`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        transport: Transport[Address],
        login: Login,
        *,
        nsid: int | None,
        name: str | None,
        pacing: Pacing,
    ) -> None:
        self._transport = transport
        self._login = login
        self._nsid = nsid
        self._pacing = pacing
        self._paths = [_Path(address) for address in addresses]
        self._associations: list[Association[Address]] = []
        self._lanes: list[Connection] = []
        self._ready: deque[Command] = deque()
        self._delayed: set[Command] = set()
        self._works: dict[Operation, _Work] = {}
        self._joined = trio.Event()
        self._identity: bytes | None = None
        self._max_blocks = 1
        self._is_closed = False
        label = name or login.subsystem_nqn
        self.info = BdevInfo(label, transport.kind, 0, 512, 1, _MAX_TRANSFER_BYTES, _OPTIMAL_BYTES, 1)
        self._queue = OperationQueue(self.info, self._launch, self._expired)

    def path_states(self) -> dict[str, str]:
        """For people: each path's address and how it is."""
        return {str(path.address): _describe(path) for path in self._paths}

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        try:
            await self._transport.add_memory(memory)
        except (OSError, RdmaLimit) as error:
            raise BdevError(
                self.info.name, "add_memory", 0, memory.length, "unavailable", str(error)
            ) from error

    async def aclose(self) -> None:
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        self._queue.close()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(self._pacing.close_s):
                await self.drain()
            for path in self._paths:
                path.scope.cancel()
            for path in self._paths:
                await path.ended.wait()
            await self.drain()
            self._transport.close()

    # --- connecting ---

    async def _start(self) -> None:
        """Connect; return with the first path up. Raises BdevError if none comes up at the first try."""
        for path in self._paths:
            trio.lowlevel.spawn_system_task(self._keep_connected, path)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._all_have_tried, nursery.cancel_scope)
                await self._joined.wait()
                nursery.cancel_scope.cancel()
            if not self._joined.is_set():
                raise BdevError(self.info.name, "open", 0, 0, self._open_status(), self._why_down())
        except BaseException:
            await self.aclose()
            raise

    async def _all_have_tried(self, scope: trio.CancelScope) -> None:
        for path in self._paths:
            await path.has_tried.wait()
        scope.cancel()

    async def _keep_connected(self, path: _Path[Address]) -> None:
        backoff_s = self._pacing.min_backoff_s
        with path.scope:
            while True:
                association = Association(path.address, self._transport, self._login, self._nsid, self)
                path.association = association
                start = trio.current_time()
                await association.run(self._pacing.connect_s)
                path.problem = association.problem or ""
                path.has_tried.set()
                if trio.current_time() - start > self._pacing.max_backoff_s:
                    backoff_s = self._pacing.min_backoff_s
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._pacing.max_backoff_s)
        path.ended.set()

    def state_changed(self, association: Association[Address]) -> None:
        """An association came up, or its namespace or access changed."""
        was_away = self._joined.is_set() and self._is_gone()
        problem = self._adopt(association)
        if problem is not None:
            association.drop(problem)
            return
        if association not in self._associations:
            self._associations.append(association)
            self._joined.set()
        self.stats.reconnects += was_away and not self._is_gone()
        self._choose_lanes()

    def _adopt(self, association: Association[Address]) -> str | None:
        """Follow what the association says of the namespace; or why it cannot be used."""
        namespace, controller = association.namespace, association.controller
        assert controller is not None
        if not association.io:
            return "the controller grants no I/O queues"
        if namespace is None:
            return None if self._joined.is_set() else "there is no such namespace (gone)"
        problem = self._mismatch(association, namespace)
        if problem is None:
            self._nsid, self._identity = association.nsid, namespace.identity
            self._describe_device(controller, namespace)
        return problem

    def _mismatch(self, association: Association[Address], namespace: IdentifyNamespace) -> str | None:
        if namespace.metadata_bytes:
            return f"blocks with {namespace.metadata_bytes} bytes of metadata are not supported"
        if namespace.block_size > 4096:
            return f"blocks of {namespace.block_size} bytes are not supported, slots are aligned to 4096"
        if self._joined.is_set() and namespace.block_size != self.info.block_size:
            return f"the block size was {self.info.block_size} and is {namespace.block_size}"
        others = [other for other in self._associations if other is not association]
        if others and namespace.identity != self._identity:
            return "leads to another namespace than the other paths"
        return None

    def _describe_device(self, controller: Controller, namespace: IdentifyNamespace) -> None:
        identity, block = controller.identity, namespace.block_size
        most = min(identity.max_transfer_bytes or _MAX_TRANSFER_BYTES, nvme.MAX_BLOCKS * block)
        if self._joined.is_set():  # the smallest of all paths
            most = min(most, self.info.max_transfer_bytes)
        self._max_blocks = most // block
        self.info = replace(
            self.info,
            size_bytes=namespace.size_bytes,
            block_size=block,
            max_transfer_bytes=most,
            optimal_io_bytes=namespace.optimal_blocks * block or min(_OPTIMAL_BYTES, most),
            queue_depth=controller.num_queues * (controller.queue_size - 1),
            detail=self._detail(controller),
        )
        self._queue.replace_info(self.info)

    def _detail(self, controller: Controller) -> dict[str, str]:
        return {
            "paths": ", ".join(str(path.address) for path in self._paths),
            "subsystem": self._login.subsystem_nqn,
            "nsid": str(self._nsid),
            "model": controller.identity.model,
            "serial": controller.identity.serial,
            "queues": f"{controller.num_queues} x {controller.queue_size}",
        }

    def _choose_lanes(self) -> None:
        """The queue pairs of the best paths take new commands; if the namespace is gone from all, it is for
        the controllers to say so."""
        usable = [association for association in self._associations if association.is_usable]
        best = [a for a in usable if a.ana_state == nvme.ANA_OPTIMIZED] or usable
        if self._is_gone():
            best = self._associations
        self._lanes = [connection for association in best for connection in association.io]
        self._pump()

    def _is_gone(self) -> bool:
        """On no path is there a namespace, or there is no path."""
        return all(association.namespace is None for association in self._associations)

    def _why_down(self) -> str:
        return "; ".join(f"{path.address}: {_describe(path)}" for path in self._paths)

    def _open_status(self) -> str:
        return "gone" if all("(gone)" in path.problem for path in self._paths) else "unavailable"

    # --- commands ---

    def _launch(self, operation: Operation) -> None:
        if not self._associations:
            self._queue.answer(operation, self._queue.failure(operation, "unavailable", self._why_down()))
            return
        work = _Work(operation, 0)
        commands = self._commands(work)
        if not commands:
            self._queue.answer(operation)
            return
        work.left = len(commands)
        self._works[operation] = work
        self._ready.extend(commands)
        self._pump()

    def _commands(self, work: _Work) -> list[Command]:
        operation, nsid = work.operation, self._nsid
        assert nsid is not None
        if operation.kind == "flush":
            return [nvme.flush(nsid, work)]
        block = self.info.block_size
        first, count = operation.offset // block, operation.length // block
        if operation.kind == "deallocate":
            return self._deallocations(nsid, first, count, work)
        make = nvme.read if operation.kind == "read" else nvme.write
        runs = self._transport.runs(operation.pieces, self._max_blocks * block)
        return [
            make(nsid, at, n, piece_of(operation.buffers, (at - first) * block, n * block), work)
            for at, n in split_runs(first, block, runs)
        ]

    def _deallocations(self, nsid: int, first: int, count: int, work: _Work) -> list[Command]:
        """By the best means all controllers have; none is fine too."""
        identities = [a.controller.identity for a in self._associations if a.controller is not None]
        if all(identity.has_deallocate for identity in identities):
            make, most = nvme.deallocate, _MAX_RANGE_BLOCKS
        elif all(identity.has_write_zeroes for identity in identities):
            make, most = nvme.write_zeroes, nvme.MAX_BLOCKS
        else:
            return []
        return [make(nsid, at, n, work) for at, n in split_blocks(first, count, most)]

    def _pump(self) -> None:
        """Submit what is ready while there is room."""
        while self._ready and self._lanes:
            lane = max(self._lanes, key=_room) if len(self._lanes) > 1 else self._lanes[0]
            if not lane.room:
                return
            command = self._ready.popleft()
            work = _work_of(command)
            if work.error is None:
                lane.submit(command)
            else:
                self._one_done(work)

    def completed(self, association: Association[Address], completion: Completion) -> None:
        """A command ended."""
        command, status = completion.command, completion.status
        work = _work_of(command)
        if status.is_good or work.error is not None:
            self._one_done(work)
        elif status.is_for_path and self._is_gone():
            self._fail(work, "gone", str(status))
        elif status.action is Action.OTHER_PATH and association.has_ana:
            self._ready.append(command)
            association.doubt_ana()
            self._choose_lanes()
        elif status.action is not Action.FAIL and command.attempts < _MAX_ATTEMPTS:
            self._delay(command, status, association)
        else:
            self._fail(work, status.bdev_status, str(status))
        self._pump()

    def _delay(self, command: Command, status: Status, association: Association[Address]) -> None:
        assert association.controller is not None
        delay_s = status.retry_delay_s(association.controller.identity.crdt)
        self._delayed.add(command)
        trio.lowlevel.spawn_system_task(self._retry, command, max(delay_s, _RETRY_S * command.attempts))

    async def _retry(self, command: Command, delay_s: float) -> None:
        await trio.sleep(delay_s)
        if command in self._delayed:
            self._delayed.remove(command)
            self._ready.append(command)
            self._pump()

    def _fail(self, work: _Work, status: str, detail: str) -> None:
        """One of its commands ended for good, badly."""
        if work.error is None:
            work.error = self._queue.failure(work.operation, status, detail)
        self._one_done(work)

    def _one_done(self, work: _Work) -> None:
        work.left -= 1
        if not work.left:
            del self._works[work.operation]
            self._queue.answer(work.operation, work.error)

    # --- giving up ---

    def _expired(self, operation: Operation) -> None:
        """Nobody waits for it any more; free its buffers."""
        work = self._works[operation]
        if work.error is None:
            work.error = self._queue.failure(operation, "unavailable", "its deadline passed")
        for association in [a for a in self._associations if a.carries(work)]:
            association.drop(f"a {operation.kind} had no answer by its deadline")
        self._withdraw([command for command in self._unsent() if command.tag is work])

    def dropped(self, association: Association[Address], commands: list[Command]) -> None:
        """An association is over, with these commands in flight."""
        if association in self._associations:
            self._associations.remove(association)
        why = association.problem or ""
        for command in commands:
            work = _work_of(command)
            if self._associations and command.opcode == nvme.READ and work.error is None:
                self._ready.append(command)
            else:
                self._fail(work, "unavailable", f"{association.address}: {why}")
        self._choose_lanes()
        if not self._associations:
            self._withdraw(self._unsent())

    def _unsent(self) -> list[Command]:
        return [*self._ready, *self._delayed]

    def _withdraw(self, commands: list[Command]) -> None:
        """These are not to be sent, they fail instead."""
        withdrawn = set(commands)
        self._delayed -= withdrawn
        self._ready = deque(command for command in self._ready if command not in withdrawn)
        for command in commands:
            self._fail(_work_of(command), "unavailable", "no path is left")


def _work_of(command: Command) -> _Work:
    work = command.tag
    assert isinstance(work, _Work)
    return work


def _room(lane: Connection) -> int:
    return lane.room


def _describe(path: _Path[Address]) -> str:
    association = path.association
    if association is not None and association.is_joined:
        if association.namespace is None:
            return "the namespace is gone"
        return "usable" if association.is_usable else f"ANA state {association.ana_state}"
    return path.problem
