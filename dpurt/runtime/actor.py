"""The actor kernel: an agent is one task with a bounded inbox, kept alive by a supervisor.

Theory of operation. An `Actor` owns its structures. Others reach it in two ways: by *messages* into its inbox, for
whatever may wait (I/O, planning), and by its plain *methods*, for decisions that must be had at once. Both are safe
without locks, because everything runs on one Trio thread and a method contains no await: between two awaits nothing else
runs, and only the owner's code touches the structure. (A lookup answered through two mailboxes would cost four task
switches, more than the match itself.)

`supervise` starts `run`, and starts it again, with a growing pause, when it fails with an Exception; the inbox and the
object survive, so an agent's docstring says what a restart does to its state and to the message in hand. Past the limit
it raises `ActorCrashed`, which ends the node: better dead than half alive. Cancellation always passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
import trio

from dpurt.errors import ActorCrashed

M = TypeVar("M")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `max_restarts` failures in `within_s`; the pause doubles from `backoff_s`.

    Past the limit a vital actor ends the node; another gives up (`Actor.give_up`), and the node goes on without it.
    """

    max_restarts: int = 5
    within_s: float = 60.0
    backoff_s: float = 0.05
    is_vital: bool = True


class Actor(Generic[M]):
    """One duty. Override `handle` for a plain message loop, or `run` for anything else (call ``task_status.started``)."""

    name = "actor"

    def __init__(self, inbox_size: int = 1024) -> None:
        self._post, self.inbox = trio.open_memory_channel[M](inbox_size)
        self.told = 0
        self.refused = 0  # messages dropped because the inbox was full
        self.restarts = 0

    def tell(self, message: M) -> bool:
        """Put a message in the inbox without waiting. False (and counted) when it is full: advice may be lost."""
        try:
            self._post.send_nowait(message)
        except trio.WouldBlock:
            self.refused += 1
            return False
        self.told += 1
        return True

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Handle messages one by one, for ever."""
        task_status.started()
        async for message in self.inbox:
            await self.handle(message)

    def give_up(self) -> None:
        """It failed too often and will not be started again: let the others go on without it."""

    async def handle(self, message: M) -> None:
        """Do what one message asks."""
        raise NotImplementedError


async def supervise(
    actor: Actor[Any], policy: RestartPolicy, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Keep `actor` running. `task_status.started()` is passed on from its first start; a failing first start raises."""
    failures: list[float] = []
    with structlog.contextvars.bound_contextvars(agent=actor.name):
        first = task_status
        while True:
            starting = _Start(first)
            try:
                await actor.run(starting)
                return
            except Exception as error:
                if not starting.is_up and first is task_status:
                    raise
                first = trio.TASK_STATUS_IGNORED
                now = trio.current_time()
                failures = [t for t in failures if now - t < policy.within_s] + [now]
                log.error("agent_failed", failures=len(failures), error=repr(error), exc_info=error)
                if len(failures) > policy.max_restarts:
                    if policy.is_vital:
                        raise ActorCrashed(actor.name, len(failures) - 1) from error
                    log.error("agent_gave_up")
                    actor.give_up()
                    return
            actor.restarts += 1
            await trio.sleep(policy.backoff_s * 2 ** (len(failures) - 1))


class _Start(trio.TaskStatus[None]):
    """Passes `started` on to the caller of `supervise` once, and remembers it."""

    def __init__(self, outer: trio.TaskStatus[None]) -> None:
        self._outer = outer
        self.is_up = False

    def started(self, value: None = None) -> None:
        if not self.is_up:
            self.is_up = True
            self._outer.started()
