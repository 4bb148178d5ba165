"""The prefetch agent: owns the prefetch core (predictors, arbiter, ledger) and carries out what it decides.

Events come from the gateway, the intake and the staging agent by `observe`, which handles them at once: the core is pure and
cheap, and a demand that overtook the arrival it belongs to would be booked wrongly. Commands go to the staging agent in the
same step. This task only keeps the core's time. Prefetch is advice: when the core fails, the event is lost, the agent
counts it, and every request goes on by demand reads. Restart: the core's state is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import structlog
import trio

from dpurt.core.events import Event
from dpurt.core.prefetch import CancelFetch, Command, PrefetchCore
from dpurt.runtime.actor import Actor

from .staging import StagingAgent

log = structlog.get_logger()
PREFETCH_DEADLINE_S = 5.0
IDLE_S = 3600.0


class PrefetchAgent(Actor[None]):
    """Predicts, plans, and keeps the ledger."""

    name = "prefetch"

    def __init__(self, core: PrefetchCore | None, staging: StagingAgent) -> None:
        super().__init__(1)
        self.core = core
        self._staging = staging
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._wake = trio.Event()
        self._due = IDLE_S

    def observe(self, event: Event) -> None:
        """Something happened. Events that a command of ours causes are handled after it, in order."""
        if self.core is None:
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._carry_out(self.core.handle(self._events.popleft(), trio.current_time()))
        finally:
            self._is_handling = False
        self._reschedule()

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, CancelFetch):
                self._staging.cancel_prefetch(command.job)
            else:
                deadline = trio.current_time() + PREFETCH_DEADLINE_S
                self._staging.prefetch(command.block, command.parts_mask, command.job, deadline)

    def _reschedule(self) -> None:
        assert self.core is not None
        due = self.core.next_wakeup()
        if due is not None and due < self._due:
            self._due = due
            self._wake.set()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        if self.core is None:
            await trio.sleep_forever()
        while True:
            self._wake = trio.Event()
            due = self.core.next_wakeup()
            now = trio.current_time()
            self._due = now + IDLE_S if due is None else max(due, now + 0.001)
            with trio.move_on_at(self._due):
                await self._wake.wait()
                continue
            self._is_handling = True
            try:
                self._carry_out(self.core.tick(trio.current_time()))
            finally:
                self._is_handling = False
            while self._events:
                self.observe(self._events.popleft())
