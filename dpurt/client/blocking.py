"""The blocking client: the Trio client in a thread of its own, for engines that call from ordinary threads.

No call holds its caller longer than its budget (`timeout_s`, default that of the client) plus the time to switch threads:
the work is cancelled on the loop's side and `DeadlineExceeded` is raised here, whatever the node does. The loop's side gets
a little less, so that in most cases it ends first and says why. Calls under way when the client is closed raise
`NodeUnavailable`. Hints are sent in the order they are given in.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from dpurt.client.buffers import Payload, Room
from dpurt.client.mirror import IndexMirror
from dpurt.client.trio_client import FOLLOW_S, Client, LoadedBlock, connect
from dpurt.core.identity import Space
from dpurt.errors import DeadlineExceeded, NodeUnavailable
from dpurt.fabric import MemoryRegion
from dpurt.transport import CurveClient
from dpurt.wire import messages as m

T = TypeVar("T")
MARGIN_S = 0.05  # of a call's budget, for switching threads; at most a fifth of it
MAX_HINTS = 1024  # waiting to be sent; more are dropped


class BlockingClient:
    """As `Client`, with calls that block. Thread-safe. Use as a context manager, or call `close`."""

    def __init__(
        self,
        endpoint: str,
        *,
        host: str,
        spaces: Mapping[str, Space],
        fabrics: Sequence[str] = ("shm", "verbs", "tcp"),
        timeout_s: float = 5.0,
        curve: CurveClient | None = None,
        epochs: Mapping[str, int] | None = None,
        memories: Sequence[memoryview] = (),
    ) -> None:
        self._timeout_s = timeout_s
        self._endpoint = endpoint
        self._ready: Future[_Loop] = Future()
        settings = dict(
            host=host, spaces=spaces, fabrics=fabrics, timeout_s=timeout_s, curve=curve, epochs=epochs,
            memories=memories,
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._main, args=(endpoint, settings), name="dpurt-client", daemon=True
        )
        self._thread.start()
        self._closed = False
        self._loop = self._ready.result(timeout=10)
        self._client = self._loop.client

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye to the node and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(trio.RunFinishedError):
                self._loop.token.run_sync_soon(self._loop.stop.set)
            self._thread.join(timeout=5)

    def lookup(
        self,
        space: str,
        request: str,
        tokens: bytes | memoryview | None = None,
        *,
        digests: Sequence[bytes] | None = None,
        will_load: bool = True,
        shard: int = 0,
        chained: bool = True,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """See `Client.lookup`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.lookup(
                space,
                request,
                tokens,
                digests=digests,
                will_load=will_load,
                shard=shard,
                chained=chained,
                priority=priority,
                timeout_s=budget,
            ),
        )

    def load(
        self,
        request: str,
        first: int,
        into: Sequence[Room],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """See `Client.load`. After `DeadlineExceeded` the buffers may still be written for a moment: do not reuse them."""
        return self._run(
            timeout_s,
            lambda budget: self._client.load(
                request, first, into, parts=parts, shard=shard, timeout_s=budget
            ),
        )

    def load_blocks(
        self,
        request: str,
        blocks: Sequence[int],
        into: Sequence[memoryview | bytearray],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """See `Client.load_blocks`; for the buffers, `load`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.load_blocks(
                request, blocks, into, parts=parts, shard=shard, timeout_s=budget
            ),
        )

    def store(
        self,
        space: str,
        request: str,
        tokens: bytes | memoryview | None,
        first: int,
        payloads: Sequence[Payload],
        *,
        digests: Sequence[bytes] | None = None,
        shard: int = 0,
        chained: bool = True,
        timeout_s: float | None = None,
    ) -> list[str]:
        """See `Client.store`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.store(
                space,
                request,
                tokens,
                first,
                payloads,
                digests=digests,
                shard=shard,
                chained=chained,
                timeout_s=budget,
            ),
        )

    def load_pushed(
        self,
        request: str,
        first: int,
        landing: MemoryRegion,
        offsets: Sequence[int],
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """See `Client.load_pushed`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.load_pushed(
                request, first, landing, offsets, parts=parts, shard=shard, timeout_s=budget
            ),
        )

    @contextmanager
    def view(
        self,
        request: str,
        first: int,
        count: int,
        *,
        parts: tuple[int, int] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[list[LoadedBlock]]:
        """See `Client.view`; the views are valid inside the ``with``, for as long as the client is open."""
        view = self._client.view(
            request, first, count, parts=parts, shard=shard, timeout_s=_inner(self._budget(timeout_s))
        )
        blocks = self._run(timeout_s, lambda _budget: view.__aenter__())
        try:
            yield blocks
        finally:
            self._run(timeout_s, lambda _budget: view.__aexit__(None, None, None))

    def landing(self, size: int, timeout_s: float | None = None) -> MemoryRegion:
        """See `Client.landing`."""
        return self._run(timeout_s, lambda budget: self._client.landing(size, budget))

    def landing_zone(self, space: str, slots: int, *, shard: int = 0, timeout_s: float | None = None) -> bool:
        """See `Client.landing_zone`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.landing_zone(space, slots, shard=shard, timeout_s=budget),
        )

    def hint(self, hint: m.Hint) -> None:
        """See `Client.hint`. Returns at once."""
        if not self._closed:
            with suppress(trio.RunFinishedError):
                self._loop.token.run_sync_soon(_offer, self._loop.hints, hint)

    def decode_step(
        self,
        request: str,
        step: int,
        group: int,
        touched: Sequence[int],
        *,
        masses: bytes = b"",
        ranked: Sequence[int] = (),
        ranked_group: int | None = None,
        need_s: float = 0.0,
        shard: int = 0,
    ) -> None:
        """See `Client.decode_step`. Returns when it is on its way, so that loads after it come after it."""
        self._run(
            None,
            lambda _budget: self._client.decode_step(
                request, step, group, touched, masses=masses, ranked=ranked, ranked_group=ranked_group, need_s=need_s,
                shard=shard,
            ),
        )  # fmt: skip

    def finish(self, request: str, reason: str = "") -> None:
        """See `Client.finish`. Returns at once, before it has left: a call right after may come before it, so let the next
        request have another name.
        """
        self.hint(m.Hint(request=request, kind="finish", reason=reason))

    def cancel(self, request: str, timeout_s: float | None = None) -> int:
        """See `Client.cancel`."""
        return self._run(timeout_s, lambda budget: self._client.cancel(request, budget))

    def delete(self, space: str, digests: Sequence[bytes], timeout_s: float | None = None) -> int:
        """See `Client.delete`."""
        return self._run(timeout_s, lambda budget: self._client.delete(space, digests, budget))

    def explain(
        self,
        space: str,
        tokens: bytes | None = None,
        *,
        digests: Sequence[bytes] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[m.Reason]:
        """See `Client.explain`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.explain(
                space, tokens, digests=digests, shard=shard, timeout_s=budget
            ),
        )

    def subscribe(
        self,
        space: str,
        cursor: bytes = b"",
        *,
        max_blocks: int = 1 << 13,
        wait_s: float = FOLLOW_S,
    ) -> m.IndexBatch:
        """See `Client.subscribe`."""
        return self._run(
            wait_s + MARGIN_S,
            lambda budget: self._client.subscribe(space, cursor, max_blocks=max_blocks, wait_s=budget),
        )

    def follow(self, space: str) -> IndexMirror:
        """A mirror of the node's index that this client keeps up to date. Returns at once; ask it from any thread."""
        if self._closed:
            raise NodeUnavailable(self._endpoint, "this client is closed")
        mirror = self._client.mirror(space)
        with suppress(trio.RunFinishedError):
            self._loop.token.run_sync_soon(self._loop.nursery.start_soon, self._client.follow, space, mirror)
        return mirror

    def route(
        self,
        space: str,
        tokens: bytes | memoryview,
        *,
        will_route: bool = True,
        cache_salt: str = "",
        queued_ms: Mapping[str, float] | None = None,
        among: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> m.RouteReply:
        """See `Client.route`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.route(
                space, tokens, will_route=will_route, cache_salt=cache_salt, queued_ms=queued_ms, among=among,
                timeout_s=budget,
            ),
        )  # fmt: skip

    def stats(self, timeout_s: float | None = None) -> dict[str, object]:
        """See `Client.stats`."""
        return self._run(timeout_s, lambda budget: self._client.stats(budget))

    @property
    def is_connected(self) -> bool:
        """See `Client.is_connected`."""
        return self._client.is_connected

    def submit(
        self, call: Callable[[Client, float], Awaitable[T]], timeout_s: float | None = None
    ) -> Future[T]:
        """Start `call(client, budget)` on the client's thread, and return at once.

        The future ends when the call has ended, so from then on nothing touches the buffers it was given. It raises
        what the call did, `DeadlineExceeded` once the budget is over, `NodeUnavailable` when this client is closed.
        """
        budget = self._budget(timeout_s)
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # it cannot be taken back
        try:
            if self._closed:
                raise trio.RunFinishedError
            self._loop.token.run_sync_soon(
                self._start, outcome, lambda inner: call(self._client, inner), budget
            )
        except trio.RunFinishedError:
            outcome.set_exception(NodeUnavailable(self._endpoint, "this client is closed"))
        return outcome

    # --- the two sides of a call ---

    def _budget(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _run(self, timeout_s: float | None, call: Callable[[float], Awaitable[T]]) -> T:
        if self._closed:
            raise NodeUnavailable(self._endpoint, "this client is closed")
        budget = self._budget(timeout_s)
        outcome: Future[T] = Future()
        try:
            self._loop.token.run_sync_soon(self._start, outcome, call, budget)
            return outcome.result(timeout=budget)
        except FutureTimeout:
            raise DeadlineExceeded("blocking call", budget) from None
        except trio.RunFinishedError:
            raise NodeUnavailable(self._endpoint, "this client is closed") from None

    def _start(self, outcome: Future[T], call: Callable[[float], Awaitable[T]], budget: float) -> None:
        """On the loop: begin a call, unless the loop is ending."""
        if self._loop.stop.is_set():
            outcome.set_exception(NodeUnavailable(self._endpoint, "this client is closed"))
        else:
            self._loop.nursery.start_soon(self._deliver, outcome, call, budget)

    async def _deliver(
        self, outcome: Future[T], call: Callable[[float], Awaitable[T]], budget: float
    ) -> None:
        try:
            with trio.fail_after(budget):
                outcome.set_result(await call(_inner(budget)))
        except trio.TooSlowError:
            outcome.set_exception(DeadlineExceeded("blocking call", budget))
        except Exception as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():
                outcome.set_exception(NodeUnavailable(self._endpoint, "this client is closed"))

    def _main(self, endpoint: str, settings: dict[str, Any]) -> None:
        try:
            trio.run(self._serve, endpoint, settings)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self, endpoint: str, settings: dict[str, Any]) -> None:
        offers, hints = trio.open_memory_channel[m.Hint](MAX_HINTS)
        async with connect(endpoint, **settings) as client, trio.open_nursery() as nursery:
            stop = trio.Event()
            nursery.start_soon(_send_hints, client, hints)
            self._ready.set_result(_Loop(trio.lowlevel.current_trio_token(), nursery, client, offers, stop))
            await stop.wait()
            nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class _Loop:
    """The client's thread, as its callers reach it."""

    token: trio.lowlevel.TrioToken
    nursery: trio.Nursery
    client: Client
    hints: trio.MemorySendChannel[m.Hint]
    stop: trio.Event


async def _send_hints(client: Client, hints: trio.MemoryReceiveChannel[m.Hint]) -> None:
    async for hint in hints:
        await client.hint(hint)


def _offer(hints: trio.MemorySendChannel[m.Hint], hint: m.Hint) -> None:
    with suppress(trio.WouldBlock):  # a hint is advice
        hints.send_nowait(hint)


def _inner(budget: float) -> float:
    """What the loop's side may take of a call's budget."""
    return budget - min(MARGIN_S, budget / 5)
