"""Several device operations at once, with the errors of all of them told as one.

Leaves what the operations are to the caller. If any timed out, the one error raised is a `BdevTimeout` whose
`settled` waits for all that did, so the caller quarantines once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from dpurt.errors import BdevError, BdevTimeout

__all__ = ["raise_as_one", "run_batch"]


async def run_batch(operations: Sequence[Callable[[], Awaitable[None]]]) -> list[BdevError]:
    """Run all of them to their end, whatever the others do; the errors, in order of occurrence."""
    errors: list[BdevError] = []

    async def attempt(operation: Callable[[], Awaitable[None]]) -> None:
        try:
            await operation()
        except BdevError as error:
            errors.append(error)

    if len(operations) == 1:
        await attempt(operations[0])
        return errors
    async with trio.open_nursery() as nursery:
        for operation in operations:
            nursery.start_soon(attempt, operation)
    return errors


def raise_as_one(errors: Sequence[BdevError]) -> None:
    """Raise the worst of the errors, if any."""
    timeouts = [error for error in errors if isinstance(error, BdevTimeout)]
    if len(timeouts) > 1:
        first = timeouts[0]

        async def all_settled() -> None:
            for timeout in timeouts:
                await timeout.settled()

        raise BdevTimeout(first.bdev, first.op, first.offset, first.length, all_settled) from first
    for error in timeouts or errors:
        raise error
