"""Loads that are handed out in the order an engine needs them, while later ones are on their way.

`InOrder` iterates over a list of requests: the next one's answer comes as soon as it is there, and up to `ahead` behind it have been
asked for meanwhile. What one of them raises is raised when its turn comes.

Leaves to others: what a request is (`dpurt.client.Client.loading`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

__all__ = ["InOrder"]

Q = TypeVar("Q")
A = TypeVar("A")


class InOrder(Generic[Q, A]):
    """An async iterator of (request, answer). Its requests run in `nursery`, which the caller cancels when it has enough."""

    def __init__(
        self, nursery: trio.Nursery, ask: Callable[[Q], Awaitable[A]], requests: Sequence[Q], ahead: int
    ) -> None:
        if ahead < 0:
            raise ValueError(f"ahead must be >= 0, got {ahead}")
        self._nursery = nursery
        self._ask = ask
        self._requests = list(requests)
        self._ahead = ahead
        self._started = 0
        self._taken = 0
        self._ended = [trio.Event() for _ in self._requests]
        self._answers: dict[int, A | Exception] = {}

    def __aiter__(self) -> InOrder[Q, A]:
        return self

    async def __anext__(self) -> tuple[Q, A]:
        if self._taken == len(self._requests):
            raise StopAsyncIteration
        number = self._taken
        await self._start_up_to(number + 1 + self._ahead)
        await self._ended[number].wait()
        answer = self._answers[number]
        if isinstance(answer, Exception):
            raise answer
        del self._answers[number]
        self._taken += 1
        await self._start_up_to(self._taken + self._ahead)
        return self._requests[number], answer

    async def _start_up_to(self, count: int) -> None:
        while self._started < min(count, len(self._requests)):
            self._nursery.start_soon(self._fetch, self._started)
            self._started += 1
            await trio.lowlevel.checkpoint()  # or those started at one moment would run in any order

    async def _fetch(self, number: int) -> None:
        try:
            self._answers[number] = await self._ask(self._requests[number])
        except Exception as error:
            self._answers[number] = error
        self._ended[number].set()
