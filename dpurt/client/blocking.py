"""The blocking client: the Trio client in a thread of its own, for engines that call from ordinary threads.

No call holds its caller longer than its budget (`timeout_s`, default that of the client) plus the time to switch threads:
the work is cancelled on the loop's side and `DeadlineExceeded` is raised here, whatever the node does.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import trio

from dpurt.client.trio_client import Client, LoadedBlock, connect
from dpurt.core.identity import Space
from dpurt.errors import DeadlineExceeded, NodeUnavailable
from dpurt.fabric import MemoryRegion
from dpurt.transport import CurveClient
from dpurt.wire import messages as m

T = TypeVar("T")


class BlockingClient:
    """As `Client`, with calls that block. Thread-safe. Use as a context manager, or call `close`."""

    def __init__(
        self,
        endpoint: str,
        *,
        host: str,
        spaces: Mapping[str, Space],
        fabrics: Sequence[str] = ("shm", "tcp"),
        timeout_s: float = 5.0,
        curve: CurveClient | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._endpoint = endpoint
        self._ready: Future[tuple[trio.lowlevel.TrioToken, trio.Nursery, Client, trio.Event]] = Future()
        settings = dict(host=host, spaces=spaces, fabrics=fabrics, timeout_s=timeout_s, curve=curve)
        self._thread = threading.Thread(
            target=self._main, args=(endpoint, settings), name="dpurt-client", daemon=True
        )
        self._thread.start()
        self._token, self._nursery, self._client, self._stop = self._ready.result(timeout=10)
        self._closed = False

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye to the node and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._token.run_sync_soon(self._stop.set)
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
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """See `Client.lookup`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.lookup(
                space, request, tokens, digests=digests, will_load=will_load, shard=shard, timeout_s=budget
            ),
        )

    def load(
        self,
        request: str,
        first: int,
        into: Sequence[memoryview],
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

    def store(
        self,
        space: str,
        request: str,
        tokens: bytes | memoryview | None,
        first: int,
        payloads: Sequence[memoryview | bytes],
        *,
        digests: Sequence[bytes] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> list[str]:
        """See `Client.store`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.store(
                space, request, tokens, first, payloads, digests=digests, shard=shard, timeout_s=budget
            ),
        )

    def load_pushed(
        self,
        request: str,
        first: int,
        landing: MemoryRegion,
        offsets: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> list[LoadedBlock]:
        """See `Client.load_pushed`."""
        return self._run(
            timeout_s,
            lambda budget: self._client.load_pushed(request, first, landing, offsets, timeout_s=budget),
        )

    def landing(self, size: int, timeout_s: float | None = None) -> MemoryRegion:
        """See `Client.landing`."""
        return self._run(timeout_s, lambda budget: self._client.landing(size, budget))

    def hint(self, hint: m.Hint) -> None:
        """See `Client.hint`. Returns at once."""
        self._token.run_sync_soon(self._nursery.start_soon, self._client.hint, hint)

    def finish(self, request: str, reason: str = "") -> None:
        """See `Client.finish`. Returns at once."""
        self.hint(m.Hint(request=request, kind="finish", reason=reason))

    def cancel(self, request: str, timeout_s: float | None = None) -> int:
        """See `Client.cancel`."""
        return self._run(timeout_s, lambda budget: self._client.cancel(request, budget))

    def stats(self, timeout_s: float | None = None) -> dict[str, object]:
        """See `Client.stats`."""
        return self._run(timeout_s, lambda _budget: self._client.stats())

    @property
    def is_connected(self) -> bool:
        """See `Client.is_connected`."""
        return self._client.is_connected

    # --- the two sides of a call ---

    def _run(self, timeout_s: float | None, call: Callable[[float], Awaitable[T]]) -> T:
        if self._closed or not self._thread.is_alive():
            raise NodeUnavailable(self._endpoint, "this client is closed")
        budget = self._timeout_s if timeout_s is None else timeout_s
        outcome: Future[T] = Future()
        scope = trio.CancelScope()
        self._token.run_sync_soon(self._nursery.start_soon, _deliver, outcome, scope, call, budget)
        try:
            return outcome.result(timeout=budget)
        except FutureTimeout:
            self._token.run_sync_soon(scope.cancel)
            raise DeadlineExceeded("blocking call", budget) from None

    def _main(self, endpoint: str, settings: dict[str, Any]) -> None:
        try:
            trio.run(self._serve, endpoint, settings)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self, endpoint: str, settings: dict[str, Any]) -> None:
        async with connect(endpoint, **settings) as client, trio.open_nursery() as nursery:
            stop = trio.Event()
            self._ready.set_result((trio.lowlevel.current_trio_token(), nursery, client, stop))
            await stop.wait()
            nursery.cancel_scope.cancel()


async def _deliver(
    outcome: Future[T], scope: trio.CancelScope, call: Callable[[float], Awaitable[T]], budget: float
) -> None:
    with scope:
        try:
            result = await call(budget)
        except trio.Cancelled:
            raise
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
