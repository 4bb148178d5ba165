"""How often the loop comes round while something runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


async def turns_while(work: Callable[[], Awaitable[None]]) -> int:
    """How often the loop came round while `work` ran."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await trio.lowlevel.checkpoint()
        before = turns
        await work()
        nursery.cancel_scope.cancel()
    return turns - before
