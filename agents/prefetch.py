"""The prefetch agent: owns the prefetch core (predictors, arbiter, ledger) and carries out what it decides.

Everybody tells it what happened with `observe`, which only queues: the core never acts in the middle of somebody else's step,
so it cannot take the slot a demand is about to lease. Its task handles the events in order, in batches, carries out the
commands, and keeps the core's time. The queue needs no bound of its own: its producers run on the same loop, and what one
turn of the loop can produce is bounded by the messages' limits.

Prefetch is advice: if the core fails, the event in hand is lost and every request goes on by demand reads. Restart: the core's
state and the queue are kept. Failing too often, it gives up: the node goes on without prefetch.

A `tape`, where there is one, notes what the core is told and decides; without a core it notes the events all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import structlog
import trio

from dpurt.core.events import Event, LatencyMeasured
from dpurt.core.prefetch import CancelFetch, Command, PrefetchCore
from dpurt.runtime.actor import Actor

from .staging import StagingAgent
from .tape import Tape

log = structlog.get_logger()
PREFETCH_DEADLINE_S = 5.0
IDLE_S = 3600.0
MIN_TICK_S = 0.002
BATCH = 128


class PrefetchAgent(Actor[None]):
    """Predicts, plans, and keeps the ledger."""

    name = "prefetch"

    def __init__(self, core: PrefetchCore | None, staging: StagingAgent) -> None:
        super().__init__(1)
        self.core = core
        self._staging = staging
        self.tape: Tape | None = None
        self.events_seen = 0  # of requests, not of the device
        self._events: deque[tuple[Event, float]] = deque()  # with when they came, for the tape
        self._handled = 0
        self._wake = trio.Event()

    def observe(self, event: Event) -> None:
        """Something happened. Handled soon, in order."""
        self.events_seen += not isinstance(event, LatencyMeasured)
        if self.core is not None:
            heard = 0.0 if self.tape is None else trio.current_time()
            self._events.append((event, heard))
            if len(self._events) == 1:
                self._wake.set()
        elif self.tape is not None:
            now = trio.current_time()
            self.tape.told(event, now, now)

    async def caught_up(self) -> None:
        """Return when what it has been told so far is handled."""
        goal = self._handled + len(self._events)
        while self.core is not None and self._handled < goal:  # noqa: ASYNC110 - rare, and for milliseconds
            await trio.sleep(0.001)

    def give_up(self) -> None:
        """No more prefetch."""
        self.core = None
        self._events.clear()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while (core := self.core) is not None:
            self._handle_some(core)
            if self._events:
                await trio.lowlevel.checkpoint()
                continue
            self._wake = trio.Event()
            with trio.move_on_at(self._due(core)):
                await self._wake.wait()
                continue
            if self.core is core:
                self._tick(core)
        await trio.sleep_forever()

    def _handle_some(self, core: PrefetchCore) -> None:
        now = trio.current_time()
        for _ in range(min(BATCH, len(self._events))):
            event, heard = self._events.popleft()
            self._handled += 1
            if self.tape is not None:
                self.tape.told(event, now, heard or now)
            if (commands := core.handle(event, now)) or self.tape is not None:
                self._carry_out(commands)

    def _tick(self, core: PrefetchCore) -> None:
        now = trio.current_time()
        if self.tape is not None:
            self.tape.ticked(now)
        self._carry_out(core.tick(now))

    @staticmethod
    def _due(core: PrefetchCore) -> float:
        now, due = trio.current_time(), core.next_wakeup()
        return now + IDLE_S if due is None else max(due, now + MIN_TICK_S)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        if self.tape is not None:
            self.tape.decided(commands)
        for command in commands:
            if isinstance(command, CancelFetch):
                self._staging.cancel_prefetch(command.job)
            else:
                deadline = trio.current_time() + PREFETCH_DEADLINE_S
                self._staging.prefetch(command.block, command.parts_mask, command.job, deadline)
