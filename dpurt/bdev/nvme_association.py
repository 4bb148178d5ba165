"""An association: one controller on one path, with its admin connection and its I/O connections.

Transport-free: a `Transport` opens connections, one queue pair each; the conversations of
`dpurt.wire.nvme_controller` say what to do with them. An association is opened once, lives until `drop`, which
closes all its connections and hands back what was in flight, and is then replaced by a new one. While it
lives it keeps the controller awake (keep-alive), waits for its events, and knows the namespace and its
asymmetric access (ANA) state.

Leaves to its owner: which commands to send, what to do with those handed back, when to connect again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import trio

from dpurt.bdev import DeviceMemory
from dpurt.errors import RemoteProtocolError
from dpurt.wire import nvme
from dpurt.wire.nvme import AsyncEvent, IdentifyNamespace
from dpurt.wire.nvme_controller import (
    ADMIN_QUEUE_SIZE,
    Controller,
    Conversation,
    Login,
    Pause,
    bring_up,
    find_namespace,
    read_ana_states,
    read_changed_namespaces,
)
from dpurt.wire.nvme_queue import Command, Completion

__all__ = ["Association", "Connection", "Owner", "QueueShape", "Transport", "converse", "converse_alone"]

_ANA_SETTLE_S = 0.02
_ANA_POLL_S = 1.0
_USABLE = (nvme.ANA_OPTIMIZED, nvme.ANA_NON_OPTIMIZED)
_LOG_BYTES = 512  # of a log read only to clear its event

Address = TypeVar("Address")
Target = TypeVar("Target", contravariant=True)
T = TypeVar("T")


class Connection(Protocol):
    """One connected queue pair. Completions go to the `deliver` it was made with."""

    @property
    def room(self) -> int:
        """How many commands more it can take."""
        ...

    def commands(self) -> Iterable[Command]:
        """What is in flight."""
        ...

    def submit(self, command: Command) -> None:
        """Put a command in flight; there is room."""
        ...

    def close(self) -> list[Command]:
        """Close at once. Returns what was in flight; nobody touches its buffers any more. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class QueueShape:
    """A queue pair to be connected; 0 is the admin queue. What fits in a capsule is known for the others only."""

    queue_id: int
    size: int
    in_capsule_bytes: int = 0


_ADMIN_QUEUE = QueueShape(0, ADMIN_QUEUE_SIZE)


class Transport(Protocol[Target]):
    """How queue pairs are connected, and which memory they can use at once. `lost(problem)` is called once, unless
    closed before.
    """

    kind: str

    def runs(self, pieces: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        """Where an operation on these pieces of memory, (address, length), has to be cut into commands: (length of
        the run, most bytes of a command in it), in order. `most` is the controller's limit.
        """
        ...

    async def add_memory(self, memory: DeviceMemory) -> None:
        """Buffers to come are in it. Raises OSError or DpurtError."""
        ...

    def close(self) -> None:
        """All connections are closed; forget the memory."""
        ...

    async def connect(
        self,
        nursery: trio.Nursery,
        address: Target,
        shape: QueueShape,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> Connection:
        """Open a connection served by tasks in the nursery. Raises OSError or RemoteProtocolError."""
        ...


class Owner(Protocol[Address]):
    """Who uses the association."""

    def completed(self, association: Association[Address], completion: Completion) -> None: ...

    def state_changed(self, association: Association[Address]) -> None:
        """Its namespace or ANA state may have."""
        ...

    def dropped(self, association: Association[Address], commands: list[Command]) -> None:
        """It is over; these are the I/O commands that were in flight."""
        ...


@dataclass(slots=True)
class _Question:
    """The tag of a command somebody waits for."""

    answered: trio.Event
    completion: Completion | None = None


class Association(Generic[Address]):
    """See the module. `run` is its whole life; `is_joined` from when I/O is possible until it is dropped."""

    def __init__(
        self,
        address: Address,
        transport: Transport[Address],
        login: Login,
        nsid: int | None,
        owner: Owner[Address],
    ) -> None:
        self.address = address
        self.io: list[Connection] = []
        self.controller: Controller | None = None
        self.nsid = nsid
        self.namespace: IdentifyNamespace | None = None
        self.is_joined = False
        self.problem: str | None = None
        self.stage = "connecting"
        self._transport = transport
        self._login = login
        self._owner = owner
        self._admin: Connection | None = None
        self._scope = trio.CancelScope()
        self._ana_states: dict[int, int] = {}
        self._ana_doubt = trio.Event()

    @property
    def ana_state(self) -> int:
        if self.namespace is None or not self._ana_states:
            return nvme.ANA_OPTIMIZED
        return self._ana_states.get(self.namespace.ana_group, nvme.ANA_OPTIMIZED)

    @property
    def is_usable(self) -> bool:
        return self.is_joined and self.namespace is not None and self.ana_state in _USABLE

    def carries(self, tag: object) -> bool:
        """Whether a command of this tag is in flight."""
        return any(command.tag is tag for connection in self.io for command in connection.commands())

    async def run(self, connect_s: float) -> None:
        """Connect, call the owner, serve until dropped. Returns with `problem` set; raises nothing."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._open(nursery, connect_s)
                    nursery.start_soon(self._guarded, self._keep_alive)
                    nursery.start_soon(self._guarded, self._watch_events)
                    nursery.start_soon(self._guarded, self._watch_ana)
        finally:
            self.drop("closed")
            self._close_connections()  # one that came up while it was dropped

    def drop(self, problem: str) -> None:
        """Close everything now. The first reason given stays."""
        if self.problem is not None:
            return
        self.problem = problem
        self._scope.cancel()
        commands = self._close_connections()
        was_joined, self.is_joined = self.is_joined, False
        if was_joined:
            self._owner.dropped(self, commands)

    def _close_connections(self) -> list[Command]:
        """The I/O commands that were in flight."""
        if self._admin is not None:
            self._admin.close()
        return [command for connection in self.io for command in connection.close()]

    def doubt_ana(self) -> None:
        """A command was refused for its path: not usable until the log says so. Only with ANA."""
        assert self.namespace is not None
        self._ana_states[self.namespace.ana_group] = nvme.ANA_CHANGE
        self._ana_doubt.set()

    @property
    def has_ana(self) -> bool:
        return self.controller is not None and self.controller.identity.has_ana and self.namespace is not None

    # --- opening ---

    async def _open(self, nursery: trio.Nursery, connect_s: float) -> None:
        with trio.move_on_after(connect_s) as limit:
            await self._guarded(self._connect, nursery)
        if limit.cancelled_caught:
            self.drop(f"no answer in {connect_s:g} s while {self.stage}")
        if self.problem is None:
            self.is_joined = True
            self._owner.state_changed(self)
        else:
            await trio.lowlevel.checkpoint()

    async def _connect(self, nursery: trio.Nursery) -> None:
        self._admin = await self._transport.connect(
            nursery, self.address, _ADMIN_QUEUE, self._deliver, self.drop
        )
        self.stage = "bringing up the controller"
        controller = self.controller = await self._converse(bring_up(self._login))
        await self._look_up_namespace()
        self._ana_states = await self._converse(read_ana_states(controller.identity))
        for queue_id in range(1, controller.num_queues + 1):
            self.stage = f"connecting I/O queue {queue_id}"
            await self._connect_io(nursery, queue_id, controller)

    async def _connect_io(self, nursery: trio.Nursery, queue_id: int, controller: Controller) -> None:
        shape = QueueShape(queue_id, controller.queue_size, controller.identity.in_capsule_bytes)
        connection = await self._transport.connect(nursery, self.address, shape, self._deliver, self.drop)
        self.io.append(connection)
        completion = await _ask(connection, self._login.connect(queue_id, shape.size, controller.id))
        if not completion.status.is_good:
            raise RemoteProtocolError("nvme_refused", f"connect of queue {queue_id}: {completion.status}")

    async def _look_up_namespace(self) -> None:
        found = await self._converse(find_namespace(self.nsid))
        if found is None:
            self.namespace = None
        else:
            self.nsid, self.namespace = found

    # --- serving ---

    async def _guarded(self, serve: Callable[..., Awaitable[None]], *args: object) -> None:
        """Whatever goes wrong with the peer ends the association."""
        try:
            await serve(*args)
        except (RemoteProtocolError, OSError) as error:
            self.drop(str(error))

    async def _keep_alive(self) -> None:
        timeout_s = self._login.keep_alive_ms / 1000
        while timeout_s:
            await trio.sleep(timeout_s / 2)
            with trio.move_on_after(timeout_s) as limit:
                await self._ask(nvme.keep_alive())
            if limit.cancelled_caught:
                self.drop(f"no answer to a keep-alive in {timeout_s:g} s")

    async def _watch_events(self) -> None:
        while True:
            completion = await self._ask(nvme.async_event_request())
            if not completion.status.is_good:
                return  # a controller without events
            await self._handle(AsyncEvent.decode(completion.result))

    async def _handle(self, event: AsyncEvent) -> None:
        if event.is_namespace_change:
            await self._converse(read_changed_namespaces())
            await self._look_up_namespace()
            self._owner.state_changed(self)
        elif event.is_ana_change:
            self._ana_doubt.set()
        else:
            await self._ask(nvme.get_log_page(event.log_page, _LOG_BYTES))

    async def _watch_ana(self) -> None:
        if not self.has_ana:
            return
        assert self.controller is not None
        while True:
            await self._ana_doubt.wait()
            self._ana_doubt = trio.Event()
            await trio.sleep(_ANA_SETTLE_S)
            self._ana_states = await self._converse(read_ana_states(self.controller.identity))
            self._owner.state_changed(self)
            if not self.is_usable:  # an event may be lost, or never sent
                with trio.move_on_after(_ANA_POLL_S):
                    await self._ana_doubt.wait()
                self._ana_doubt.set()

    # --- asking ---

    async def _converse(self, conversation: Conversation[T]) -> T:
        assert self._admin is not None
        return await converse(self._admin, conversation)

    async def _ask(self, command: Command) -> Completion:
        assert self._admin is not None
        return await _ask(self._admin, command)

    def _deliver(self, completion: Completion) -> None:
        if not _answer_question(completion):
            self._owner.completed(self, completion)


async def converse(connection: Connection, conversation: Conversation[T]) -> T:
    """Carry a conversation out on an admin queue. Raises RemoteProtocolError."""
    try:
        step = next(conversation)
        while True:
            if isinstance(step, Pause):
                await trio.sleep(step.seconds)
                step = next(conversation)
            else:
                step = conversation.send(await _ask(connection, step))
    except StopIteration as end:
        result: T = end.value
        return result


async def converse_alone(
    address: Address, transport: Transport[Address], conversation: Conversation[T], patience_s: float
) -> T:
    """Carry a conversation out on an admin connection of its own. Raises OSError or RemoteProtocolError."""
    results: list[T] = []
    problems: list[Exception] = []
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + patience_s

        def lost(problem: str) -> None:
            problems.append(RemoteProtocolError("nvme_connection", problem))
            nursery.cancel_scope.cancel()

        try:
            connection = await transport.connect(nursery, address, _ADMIN_QUEUE, _deliver_answer, lost)
            try:
                results.append(await converse(connection, conversation))
            finally:
                connection.close()
        except (OSError, RemoteProtocolError) as error:
            problems.append(error)
        nursery.cancel_scope.cancel()
    if not results:
        raise (problems or [RemoteProtocolError("nvme_connection", f"no answer in {patience_s:g} s")])[0]
    return results[0]


async def _ask(connection: Connection, command: Command) -> Completion:
    question = command.tag = _Question(trio.Event())
    connection.submit(command)
    await question.answered.wait()
    assert question.completion is not None
    return question.completion


def _answer_question(completion: Completion) -> bool:
    """Whether somebody waited for it."""
    question = completion.command.tag
    if not isinstance(question, _Question):
        return False
    question.completion = completion
    question.answered.set()
    return True


def _deliver_answer(completion: Completion) -> None:
    is_answer = _answer_question(completion)
    assert is_answer, "only questions are asked here"
