"""How a controller is brought up and asked about itself: conversations as pure state machines.

Each conversation is a generator: it yields a `Command` to send on the admin queue, or a `Pause`, is sent the
`Completion` (or None after a pause), and returns what it found out. It raises RemoteProtocolError with code
``"nvme_refused"`` where the controller says no and ``"nvme_data"`` where its answers make no sense. Whoever
drives it owns the connection and the deadline:

    connect admin -> CAP -> CC.EN -> CSTS.RDY -> identify -> features -> namespace, ANA -> connect I/O queues
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from dpurt.errors import RemoteProtocolError
from dpurt.wire import nvme
from dpurt.wire.nvme import DiscoveryEntry, IdentifyController, IdentifyNamespace
from dpurt.wire.nvme_queue import Command, Completion

__all__ = [
    "ADMIN_QUEUE_SIZE",
    "Controller",
    "Conversation",
    "Login",
    "Pause",
    "bring_up",
    "discover",
    "find_namespace",
    "read_ana_states",
    "read_changed_namespaces",
    "say",
]

ADMIN_QUEUE_SIZE = 32
_POLL_S = 0.02
_READY, _FATAL = 1, 2
_MAX_ANA_GROUPS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """Go on after this time."""

    seconds: float


Conversation = Generator[Command | Pause, Completion, T]


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are, which subsystem we want, and how much of it."""

    host_id: bytes
    host_nqn: str
    subsystem_nqn: str
    num_queues: int = 1
    queue_size: int = 128
    keep_alive_ms: int = 0
    sq_flow_control: bool = False

    def connect(self, queue_id: int, queue_size: int, controller_id: int) -> Command:
        return nvme.connect(
            queue_id,
            queue_size,
            host_id=self.host_id,
            host_nqn=self.host_nqn,
            subsystem_nqn=self.subsystem_nqn,
            controller_id=controller_id,
            keep_alive_ms=self.keep_alive_ms,
            attributes=0 if self.sq_flow_control else nvme.NO_SQ_FLOW_CONTROL,
        )


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller that is ready for I/O queues."""

    id: int
    identity: IdentifyController
    num_queues: int
    queue_size: int


def bring_up(login: Login) -> Conversation[Controller]:
    """From a fresh admin connection to a controller ready for its I/O queues."""
    connected = yield from say("connect", login.connect(0, ADMIN_QUEUE_SIZE, nvme.ANY_CONTROLLER))
    capabilities = (yield from say("CAP", nvme.property_get(nvme.CAP, is_wide=True))).result
    yield from _enable(capabilities)
    command = nvme.identify(nvme.CNS_CONTROLLER)
    yield from say("identify controller", command)
    page_bytes = 4096 << (capabilities >> 48 & 0xF)
    identity = IdentifyController.decode(command.data_in[0], page_bytes)
    if identity.is_discovery or login.subsystem_nqn == nvme.DISCOVERY_NQN:
        num_queues = 0
    else:
        num_queues = yield from _set_features(login, identity)
    return Controller(
        connected.result & 0xFFFF, identity, num_queues, _queue_size(login, capabilities, identity)
    )


def _queue_size(login: Login, capabilities: int, identity: IdentifyController) -> int:
    limits = [login.queue_size, (capabilities & 0xFFFF) + 1]
    if identity.max_commands:
        limits.append(identity.max_commands)
    return max(min(limits), 2)


def _enable(capabilities: int) -> Conversation[None]:
    """CC.EN, then wait for CSTS.RDY as long as the controller says it may take."""
    page_shift = capabilities >> 48 & 0xF
    configuration = 4 << 20 | 6 << 16 | page_shift << 7 | 1  # entries of 2^4 and 2^6 bytes
    yield from say("CC", nvme.property_set(nvme.CC, configuration))
    patience_s = (capabilities >> 24 & 0xFF) * 0.5
    while True:
        state = (yield from say("CSTS", nvme.property_get(nvme.CSTS))).result
        if state & _FATAL:
            raise RemoteProtocolError("nvme_refused", "the controller reports a fatal state")
        if state & _READY:
            return
        if patience_s <= 0:
            raise RemoteProtocolError("nvme_refused", "the controller is not ready in the time it gave")
        patience_s -= _POLL_S
        yield Pause(_POLL_S)


def _set_features(login: Login, identity: IdentifyController) -> Conversation[int]:
    """The number of I/O queues we get. Events a controller does not know are done without."""
    wanted = login.num_queues - 1
    command = nvme.set_features(nvme.FEATURE_NUM_QUEUES, wanted << 16 | wanted)
    granted = (yield from say("number of queues", command)).result
    yield nvme.set_features(nvme.FEATURE_ASYNC_EVENTS, nvme.EVENTS_NAMESPACE_AND_ANA)
    return min(login.num_queues, (granted & 0xFFFF) + 1, (granted >> 16 & 0xFFFF) + 1)


def find_namespace(nsid: int | None) -> Conversation[tuple[int, IdentifyNamespace] | None]:
    """The namespace, or the only one there is if none is named; None if it is not there (now)."""
    if nsid is None:
        active = yield from _active_namespaces()
        if len(active) > 1:
            raise RemoteProtocolError("nvme_refused", f"name one of the namespaces {active[:8]}")
        if not active:
            return None
        nsid = active[0]
    command = nvme.identify(nvme.CNS_NAMESPACE, nsid)
    completion = yield command
    if completion.status.bdev_status == "gone" or completion.status.is_for_path:
        return None  # Linux calls a disabled namespace an internal path error
    _expect_good("identify namespace", completion)
    namespace = IdentifyNamespace.decode(command.data_in[0])
    return (nsid, namespace) if namespace.num_blocks else None


def _active_namespaces() -> Conversation[list[int]]:
    command = nvme.identify(nvme.CNS_ACTIVE_NAMESPACES)
    yield from say("active namespaces", command)
    return nvme.decode_active_namespaces(command.data_in[0])


def read_ana_states(identity: IdentifyController) -> Conversation[dict[int, int]]:
    """State by ANA group; empty where the controller has none."""
    if not identity.has_ana:
        return {}
    length = nvme.ana_log_bytes(min(identity.num_ana_groups, _MAX_ANA_GROUPS))
    command = nvme.get_log_page(nvme.LOG_ANA, length, specific=nvme.ANA_GROUPS_ONLY)
    yield from say("ANA log", command)
    return nvme.decode_ana_states(command.data_in[0])


def read_changed_namespaces() -> Conversation[list[int]]:
    """What changed since it was last read; the event may come again after that."""
    command = nvme.get_log_page(nvme.LOG_CHANGED_NAMESPACES, 4096)
    yield from say("changed namespaces", command)
    return nvme.decode_active_namespaces(command.data_in[0])


def discover(login: Login) -> Conversation[list[DiscoveryEntry]]:
    """Bring up a discovery controller and read its log, again if it changed meanwhile."""
    yield from bring_up(login)
    while True:
        generation, count = yield from _discovery_header()
        entries: list[DiscoveryEntry] = []
        while len(entries) < count:
            entries += yield from _discovery_entries(len(entries), min(count - len(entries), 3))
        if (yield from _discovery_header()) == (generation, count):
            return entries


def _discovery_header() -> Conversation[tuple[int, int]]:
    command = nvme.get_log_page(nvme.LOG_DISCOVERY, nvme.DISCOVERY_ENTRY_BYTES)
    yield from say("discovery log", command)
    return nvme.decode_discovery_header(command.data_in[0])


def _discovery_entries(first: int, count: int) -> Conversation[list[DiscoveryEntry]]:
    size = nvme.DISCOVERY_ENTRY_BYTES
    command = nvme.get_log_page(nvme.LOG_DISCOVERY, count * size, offset=(first + 1) * size)
    yield from say("discovery log", command)
    return nvme.decode_discovery_entries(command.data_in[0])


def say(stage: str, command: Command) -> Conversation[Completion]:
    """One command that must succeed."""
    completion = yield command
    return _expect_good(stage, completion)


def _expect_good(stage: str, completion: Completion) -> Completion:
    if not completion.status.is_good:
        raise RemoteProtocolError("nvme_refused", f"{stage}: {completion.status}")
    return completion
