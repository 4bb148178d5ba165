"""Blocks by an engine's own digests, from a node: found, loaded, stored and deleted in batches.

No node is a normal state: what cannot be had is a miss, counted with its reason, and the log says once when the node comes, goes
or refuses. Nothing here raises for the node's sake. A call is started on the client's thread and gives an `Answer`; it ends
within its budget, and when it has ended nothing touches its buffers any more.

`find` opens a request scope at the node, so flash reads begin before the engine has made room; a `get` that begins with the same
digest loads from that scope, which ends with it. Scopes whose `get` never came end when `MAX_SCOPES` newer ones exist. Large
batches go in windows, so that they need neither the node's whole staging nor this host's whole inbound region at once.

State: ``unknown`` before the first answer, ``up``, ``down`` (no answer, or too late) or ``refused`` (the node will not have this
engine: field and both values are in the log). All of them are tried again; the client's back-off makes that cheap.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from dpurt.client import BlockingClient, Client, LoadedBlock
from dpurt.core.identity import Space
from dpurt.engines.store.settings import Access, HookSettings
from dpurt.errors import DeadlineExceeded, DpurtError, NodeUnavailable, RemoteProtocolError, SpaceMismatch

MAX_SCOPES = 64
WINDOW_BYTES = 32 << 20
MAX_WINDOW = 1024  # blocks
ALIGN = 4096  # of a cell of the inbound region
_STORED = frozenset({"stored", "exists", "in_flight"})  # in flight: another host is storing the same block
_REFUSALS = frozenset({"unknown_space", "unknown_host", "unauthorised", "protocol", "no_fabric"})
_FAILURES = (DpurtError, OSError, ValueError)

Room = Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds an engine's thread waits for its node, at most, by kind of call."""

    find_s: float = 0.5
    load_s: float = 10.0
    store_s: float = 10.0

    @classmethod
    def of(cls, settings: HookSettings) -> Budgets:
        """As the settings say."""
        return cls(settings.find_s, settings.load_s, settings.store_s)


class Answer:
    """What a call found, block by block. All that was not answered in time is False.

    Once it has ended, `is_whole` says whether the node answered at all, and `fresh` which blocks of a `put` were not there before.
    """

    def __init__(
        self, store: DigestStore, blocks: list[bool], future: Future[None], fresh: list[bool] | None = None
    ) -> None:
        self.fresh = fresh or []
        self.is_whole = False
        self._store = store
        self._blocks = blocks
        self._future = future
        self._is_noted = False

    def wait(self) -> list[bool]:
        """Block until the call has ended; within its budget."""
        if not self._is_noted:
            self._is_noted = True
            self.is_whole = self._store.note(self._future)
        return self._blocks

    def then(self, done: Callable[[list[bool]], None]) -> None:
        """Call `done` once the call has ended, on the client's thread: it must not block."""
        self._future.add_done_callback(lambda _: done(self.wait()))


@dataclass(frozen=True, slots=True)
class _Scope:
    request: str
    digests: tuple[bytes, ...]


class DigestStore:
    """One shard of one space of a node. Thread-safe."""

    def __init__(
        self,
        access: Access,
        name: str,
        space: Space,
        *,
        shard: int = 0,
        budgets: Budgets | None = None,
        memories: Sequence[memoryview] = (),
        log: logging.Logger | None = None,
    ) -> None:
        self.name = name
        self.space = space
        self.state = "unknown"
        self.refusal = ""
        self.counts: Counter[str] = Counter()
        self._shard = shard
        self._budgets = budgets or Budgets()
        self._log = log or logging.getLogger("dpurt.engines")
        self._endpoint = access.endpoint
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()  # this and below: the client's thread only
        self._storing = trio.Lock()
        self._client = BlockingClient(
            access.endpoint, host=access.host, spaces={name: space}, fabrics=access.fabrics,
            timeout_s=self._budgets.load_s, curve=access.curve, memories=memories,
        )  # fmt: skip

    def close(self) -> None:
        """Say goodbye to the node. Later calls find nothing."""
        self._client.close()

    # --- calls ---

    def greet(self) -> None:
        """Say hello now, so that a refusal is told before the first request needs the node. Does not wait."""

        async def call(client: Client, budget: float) -> None:
            await client.session(trio.current_time() + budget)

        self._start(call, [], self._budgets.load_s).then(lambda _: None)

    def find(self, digests: Sequence[bytes], *, will_load: bool = True) -> Answer:
        """Which of these blocks are there? With `will_load` they are made ready for a `get` soon."""
        here = [False] * len(digests)
        return self._start(
            lambda client, budget: self._find(client, budget, tuple(digests), here, will_load),
            here,
            self._budgets.find_s,
        )

    def get(self, digests: Sequence[bytes], rooms: Sequence[Room], budget_s: float | None = None) -> Answer:
        """Load blocks, each into its buffers; those that were False may have been partly written."""
        here = [False] * len(digests)
        return self._start(
            lambda client, budget: self._get(client, budget, tuple(digests), rooms, here),
            here,
            budget_s or self._budgets.load_s,
        )

    def put(self, digests: Sequence[bytes], payloads: Sequence[Room]) -> Answer:
        """Store blocks. True also where the block is there already."""
        kept, fresh = [False] * len(digests), [False] * len(digests)
        return self._start(
            lambda client, budget: self._put(client, budget, tuple(digests), payloads, kept, fresh),
            kept,
            self._budgets.store_s,
            fresh,
        )

    def release(self, digests: Sequence[bytes]) -> None:
        """What a `find` made ready will not be got. Does not wait."""

        async def call(client: Client, budget: float) -> None:
            for digest in digests:
                scope = self._scopes.pop(digest, None)
                if scope is not None:
                    await client.finish(scope.request)

        self._client.submit(call, self._budgets.find_s)

    def delete(self, digests: Sequence[bytes]) -> Answer:
        """These blocks are not wanted any more. True where the node has heard of it."""
        heard = [False] * len(digests)

        async def call(client: Client, budget: float) -> None:
            self._count(deleted=await client.delete(self.name, digests, budget))
            heard[:] = [True] * len(heard)

        return self._start(call, heard, self._budgets.store_s)

    def stats(self) -> dict[str, object]:
        """Counters since the start, and the state."""
        with self._lock:
            return {"state": self.state, "refusal": self.refusal, "space": self.name, **self.counts}

    # --- on the client's thread ---

    async def _find(
        self, client: Client, budget: float, digests: tuple[bytes, ...], here: list[bool], will_load: bool
    ) -> None:
        if not digests:
            return
        request = self._new_request()
        async with _ended_if_late(client, request):
            found = await client.lookup(
                self.name, request, digests=digests, will_load=will_load, shard=self._shard, chained=False,
                timeout_s=budget,
            )  # fmt: skip
        here[:] = [found.is_present(i) for i in range(len(digests))]
        self._count(asked=len(digests), found=found.matched_blocks)
        if will_load and found.matched_blocks:
            await self._keep(client, _Scope(request, digests))
        elif will_load:
            await client.finish(request)

    async def _keep(self, client: Client, scope: _Scope) -> None:
        """Leave a scope open for the `get` to come."""
        old = [self._scopes.pop(scope.digests[0], None)]
        self._scopes[scope.digests[0]] = scope
        while len(self._scopes) > MAX_SCOPES:
            old.append(self._scopes.popitem(last=False)[1])
        for one in filter(None, old):
            await client.finish(one.request)

    async def _get(
        self,
        client: Client,
        budget: float,
        digests: tuple[bytes, ...],
        rooms: Sequence[Room],
        here: list[bool],
    ) -> None:
        deadline = trio.current_time() + budget
        scope = self._scopes.pop(digests[0], None) if digests else None
        if scope is not None and scope.digests[: len(digests)] == digests:
            try:
                await self._load(client, scope.request, rooms, here, deadline)
                return
            except (
                NodeUnavailable,
                RemoteProtocolError,
            ):  # the node has restarted since, or dropped the scope
                pass
        elif scope is not None:
            await client.finish(scope.request)
        request = self._new_request()
        async with _ended_if_late(client, request):
            await client.lookup(
                self.name, request, digests=digests, shard=self._shard, chained=False,
                timeout_s=deadline - trio.current_time(),
            )  # fmt: skip
        await self._load(client, request, rooms, here, deadline)

    async def _load(
        self, client: Client, request: str, rooms: Sequence[Room], here: list[bool], deadline: float
    ) -> None:
        """Load a scope's first blocks, window by window, and end it."""
        try:
            step = self._window()
            for first in range(0, len(rooms), step):
                loaded = await client.load(
                    request, first, rooms[first : first + step], shard=self._shard,
                    timeout_s=deadline - trio.current_time(),
                )  # fmt: skip
                self._note_loaded(loaded)
                here[first : first + len(loaded)] = [block.is_ok for block in loaded]
        finally:
            with trio.CancelScope(shield=True):
                await client.finish(request)

    async def _put(
        self,
        client: Client,
        budget: float,
        digests: tuple[bytes, ...],
        payloads: Sequence[Room],
        kept: list[bool],
        fresh: list[bool],
    ) -> None:
        deadline = trio.current_time() + budget
        request = self._new_request()
        async with self._storing:  # one at a time: each may use the whole inbound region
            step = self._window(await self._num_cells(client, deadline))
            try:
                for first in range(0, len(digests), step):
                    statuses = await client.store(
                        self.name, request, None, first, payloads[first : first + step], digests=digests,
                        shard=self._shard, chained=False, timeout_s=deadline - trio.current_time(),
                    )  # fmt: skip
                    self._note_stored(statuses)
                    kept[first : first + len(statuses)] = [status in _STORED for status in statuses]
                    fresh[first : first + len(statuses)] = [status == "stored" for status in statuses]
            finally:
                with trio.CancelScope(shield=True):
                    await client.finish(request)

    async def _num_cells(self, client: Client, deadline: float) -> int:
        """How many blocks this host's inbound region takes at once."""
        terms = await client.session(deadline)
        cell = -(-self.space.geometry.payload_bytes // ALIGN) * ALIGN
        return sum(region.size for region in terms.regions if region.access == "write") // cell

    def _window(self, limit: int = MAX_WINDOW) -> int:
        """Blocks to move at once."""
        return max(1, min(limit, MAX_WINDOW, WINDOW_BYTES // self.space.geometry.payload_bytes))

    def _new_request(self) -> str:
        return f"{os.getpid()}-{next(self._numbers)}"

    # --- counting and telling ---

    def _start(
        self, call: Callable[[Client, float], Awaitable[None]], blocks: list[bool], budget_s: float,
        fresh: list[bool] | None = None,
    ) -> Answer:  # fmt: skip
        return Answer(self, blocks, self._client.submit(call, budget_s), fresh)

    def note(self, future: Future[None]) -> bool:
        """Wait for a call, and take note of how it ended: well?"""
        try:
            future.result()
        except _FAILURES as error:
            self._failed(error)
            return False
        self._enter("up", "")
        return True

    def _note_loaded(self, loaded: Sequence[LoadedBlock]) -> None:
        self._count(
            bytes_loaded=sum(block.is_ok for block in loaded) * self.space.geometry.payload_bytes,
            **Counter("loaded" if block.is_ok else f"not_loaded_{block.status}" for block in loaded),
        )

    def _note_stored(self, statuses: Sequence[str]) -> None:
        self._count(
            bytes_stored=statuses.count("stored") * self.space.geometry.payload_bytes,
            **Counter(status if status in _STORED else f"not_stored_{status}" for status in statuses),
        )

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self.counts.update(numbers)

    def _failed(self, error: Exception) -> None:
        code = getattr(error, "code", "") or type(error).__name__
        self._count(**{f"failed_{code}": 1})
        if isinstance(error, SpaceMismatch) or (
            isinstance(error, RemoteProtocolError) and error.code in _REFUSALS
        ):
            self._enter("refused", str(error))
        elif isinstance(error, (NodeUnavailable, DeadlineExceeded)):
            self._enter("down", str(error))
        else:
            self._log.warning("dpurt: a call failed, the engine goes on without: %s", error)

    def _enter(self, state: str, why: str) -> None:
        refusal = why if state == "refused" else ""
        with self._lock:
            is_news = state != self.state or refusal != self.refusal
            self.state, self.refusal = state, refusal
        if not is_news:
            return
        if state == "refused":
            self._log.error("dpurt: refused, the engine goes on without: %s", why)
        elif state == "down":
            self._log.warning("dpurt: down, the engine goes on without and tries again: %s", why)
        else:
            self._log.info("dpurt: up, node %s, space %s", self._endpoint, self.name)


@asynccontextmanager
async def _ended_if_late(client: Client, request: str) -> AsyncIterator[None]:
    """A lookup whose answer does not come may have opened a scope all the same."""
    try:
        yield
    except BaseException:
        with trio.CancelScope(shield=True):
            await client.finish(request)
        raise
