"""The engine's way to its node: one client a process, shared by the connector's two sides where both live in it.

No node is a normal state. Every call ends within its budget; what it raised is counted and, when the state changed, said once
in the log: ``up``, ``down`` (no answer, or too late: the engine computes everything) or ``refused`` (the node will not have this
engine: the field and both values are named).

While the link is not up nobody asks the node (`is_up`), so no request waits for it. A thread of the link's own says hello until it
is back: opening a session may take longer (mapping or registering the node's memory) than any request can wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from dpurt.client import BlockingClient
from dpurt.core.identity import LayerGroup, Space
from dpurt.engines.store import Access
from dpurt.engines.vllm.counters import Tally
from dpurt.engines.vllm.settings import NodeSettings
from dpurt.errors import DeadlineExceeded, DpurtError, NodeUnavailable, RemoteProtocolError, SpaceMismatch

T = TypeVar("T")
log = logging.getLogger("vllm.dpurt")  # vLLM's handlers print it
_REFUSALS = frozenset({"unknown_space", "unknown_host", "unauthorised", "protocol", "no_fabric"})
RETRY_S = 1.0
HELLO_S = 10.0
ROOM_S = 0.05
_CALL_FAILED = (DpurtError, OSError, ValueError)


class Link:
    """One process's client, with its state. Thread-safe."""

    def __init__(self, settings: NodeSettings, access: Access, space: Space) -> None:
        self.settings = settings
        self.space = space
        self._endpoint = access.endpoint
        self.tally = Tally()
        self.roles: set[str] = set()
        self.users = 0
        self.refusal = ""
        self._state = "unknown"
        self._lock = threading.Lock()
        self.client = BlockingClient(
            access.endpoint, host=settings.host, spaces={settings.space: space}, fabrics=settings.fabrics,
            timeout_s=1.0, curve=access.curve,
        )  # fmt: skip
        self._is_closed = False
        self._wake = threading.Event()
        self._greeter = threading.Thread(target=self._greet, name="dpurt-hello", daemon=True)
        self._greeter.start()

    def close(self) -> None:
        """No more calls."""
        self._is_closed = True
        self._wake.set()
        self.client.close()
        self._greeter.join(timeout=1)

    def _greet(self) -> None:
        """Say hello whenever the link is not up, before any request wants something."""
        while not self._is_closed:
            if self._state != "up":
                self.call(lambda client: client.stats(timeout_s=HELLO_S))
            self._wake.wait(None if self._state == "up" else RETRY_S)
            self._wake.clear()

    @property
    def state(self) -> str:
        """``unknown`` before the first call, ``up``, ``down`` or ``refused``."""
        return self._state

    @property
    def is_up(self) -> bool:
        """Is asking worth its time? Also before anything is known."""
        return self._state in ("up", "unknown")

    def call(self, do: Callable[[BlockingClient], T]) -> T | None:
        """What the node answers; None, counted and told, when it does not within the call's budget."""
        try:
            answer = do(self.client)
        except _CALL_FAILED as error:
            self.failed(error)
            return None
        self._enter("up", "")
        return answer

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """For calls that are context managers themselves: errors are noted, and go on."""
        try:
            yield
        except _CALL_FAILED as error:
            self.failed(error)
            raise
        self._enter("up", "")

    def failed(self, error: Exception) -> None:
        """A call raised this: count it and enter the state it means."""
        self.tally.why("node_errors", [code_of(error)])
        if isinstance(error, SpaceMismatch):
            self._enter("refused", str(error))
        elif isinstance(error, RemoteProtocolError) and error.code in _REFUSALS:
            self._enter("refused", str(error))
        elif isinstance(error, (NodeUnavailable, DeadlineExceeded)):
            self._enter("down", str(error))

    def _enter(self, state: str, why: str) -> None:
        with self._lock:
            refusal = why if state == "refused" else ""
            changed = (state, refusal) != (self._state, self.refusal)
            self._state, self.refusal = state, refusal
        if not changed or self._is_closed:
            return
        self._wake.set()
        self.tally.count(is_up=int(state == "up"))
        if state == "refused":
            wanted = space_table(self.settings.space, self.space)
            log.error("dpurt: refused, the engine goes on without: %s\nThis engine is:\n%s", why, wanted)
        elif state == "down":
            log.warning("dpurt: down, the engine goes on without and tries again: %s", why)
        else:
            log.info("dpurt: up, node %s, space %s", self._endpoint, self.settings.space)


def until_room(attempt: Callable[[float], list[str]], budget_s: float) -> list[str]:
    """Statuses of a store that gets its remaining time, tried again while the node has no room and there is time."""
    watch = Stopwatch()
    statuses = attempt(budget_s)
    while "no_room" in statuses and budget_s - watch.s > ROOM_S:
        time.sleep(ROOM_S)
        statuses = attempt(max(ROOM_S, budget_s - watch.s))
    return statuses


def code_of(error: Exception) -> str:
    """A word for the counters."""
    if isinstance(error, SpaceMismatch):
        return f"mismatch_{error.field}"
    return getattr(error, "code", None) or type(error).__name__


def space_table(name: str, space: Space) -> str:
    """The `[[space]]` table a topology needs for this engine, to paste. The salt is the tenant's and stays out."""
    lines = [
        "[[space]]",
        *_rows(name=name, model=space.model, revision=space.revision, kv_dtype=space.kv_dtype),
    ]
    lines += _rows(tenant=space.tenant)
    if space.num_shards > 1:
        lines += _rows(tp_size=space.tp_size, pp_size=space.pp_size)
    lines += ["[space.geometry]", *_rows(block_tokens=space.geometry.block_tokens)]
    for name, count, group in _alike(space.geometry.groups):
        lines += ["[[space.geometry.groups]]", *_rows(name=name, num_layers=group.num_layers)]
        lines += _rows(
            num_kv_heads=group.num_kv_heads, head_size=group.head_size, part_bytes=group.part_bytes
        )
        lines += _rows(packing=group.packing)
        lines += _rows(count=count) if count > 1 else []
        lines += _rows(window_tokens=group.window_tokens) if group.window_tokens is not None else []
    return "\n".join(lines)


def _alike(groups: Sequence[LayerGroup]) -> list[tuple[str, int, LayerGroup]]:
    """(name, count, first) of the geometry's groups, as one entry where all but their numbers is equal."""
    first = groups[0]
    stem = first.name.removesuffix(".0")
    if len(groups) > 1 and list(groups) == [replace(first, name=f"{stem}.{i}") for i in range(len(groups))]:
        return [(stem, len(groups), first)]
    return [(group.name, 1, group) for group in groups]


def _rows(**values: str | int) -> list[str]:
    return [
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in values.items()
    ]


_links: dict[tuple[object, ...], Link] = {}
_links_lock = threading.Lock()


def shared_link(settings: NodeSettings, access: Access, space: Space) -> Link:
    """This process's link for these settings; give it back with `release`."""
    key = (settings, access.endpoint, space.fingerprint())
    with _links_lock:
        link = _links.get(key)
        if link is None:
            link = _links[key] = Link(settings, access, space)
        link.users += 1
        return link


def release(link: Link) -> None:
    """The last user closes the client."""
    with _links_lock:
        link.users -= 1
        if link.users:
            return
        for key in [key for key, value in _links.items() if value is link]:
            del _links[key]
    link.close()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self._began
