"""The shadow agent: runs other policies on the node's live events, without I/O, and counts beside them how the node itself did.

It is told everything the prefetch agent is told, in the same order, and hands it to each `Shadow` (dpurt.core.shadow). Its queue
is bounded: a node too busy for its shadows drops their events and counts them, and what shadows say is then a little off.

Restart: shadows and queue are kept. Failing too often, it gives up: nothing but its figures is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import trio

from dpurt.config.schema import ShadowConfig
from dpurt.core.device_model import DeviceProfile
from dpurt.core.events import Demanded, Event
from dpurt.core.eviction import make_policy
from dpurt.core.prefetch_setup import PrefetchSetup, outlook_of
from dpurt.core.return_model import Forest
from dpurt.core.shadow import Shadow, ShadowPool, ShadowStats
from dpurt.runtime.actor import Actor

from .index import IndexAgent
from .spaces import Slab, number_of

MAX_EVENTS = 1 << 16
BATCH = 64
IDLE_S = 3600.0
MIN_TICK_S = 0.005


class ShadowAgent(Actor[None]):
    """Policies on trial."""

    name = "shadow"

    def __init__(self, shadows: Mapping[str, Shadow]) -> None:
        super().__init__(1)
        self.shadows = dict(shadows)
        self.lost = 0
        self._live = {"staging": 0, "in_flight": 0, "nvme": 0, "gone": 0}
        self._events: deque[tuple[Event, float]] = deque()
        self._wake = trio.Event()

    def observe(self, event: Event) -> None:
        """Something happened. Handled when there is time."""
        if not self.shadows:
            return
        if len(self._events) >= MAX_EVENTS:
            self.lost += 1
            return
        self._events.append((event, trio.current_time()))
        self._wake.set()

    def give_up(self) -> None:
        """No more shadows."""
        self.shadows = {}
        self._events.clear()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        if not self.shadows:
            await trio.sleep_forever()
        while True:
            self._handle_some()
            if self._events:
                await trio.lowlevel.checkpoint()
                continue
            self._wake = trio.Event()
            with trio.move_on_at(self._due()):
                await self._wake.wait()
                continue
            for shadow in self.shadows.values():
                shadow.tick(trio.current_time())

    def _handle_some(self) -> None:
        for _ in range(min(BATCH, len(self._events))):
            event, when = self._events.popleft()
            if isinstance(event, Demanded):
                self._live[event.where] += 1
            for shadow in self.shadows.values():
                shadow.handle(event, when)

    def _due(self) -> float:
        now = trio.current_time()
        dues = [due for shadow in self.shadows.values() if (due := shadow.next_wakeup()) is not None]
        return max(min(dues), now + MIN_TICK_S) if dues else now + IDLE_S

    def stats(self) -> dict[str, object]:
        """How the node did, and how each shadow would have, on the same needs."""
        if not self.shadows:
            return {}
        return {
            "live": {"demanded": dict(self._live)},
            "lost_events": self.lost,
            "policies": {name: _plain(shadow.stats()) for name, shadow in self.shadows.items()},
        }


def make_shadow(
    spec: ShadowConfig, setup: PrefetchSetup, prior: Forest | None, index: IndexAgent, slabs: Sequence[Slab],
    device: DeviceProfile,
) -> Shadow:  # fmt: skip
    """A policy on trial in pools as large as these slabs'. `setup` is the node's own, but for the predictors."""
    setup = replace(setup, predictors=spec.predictors)
    predictors = setup.make_predictors(prior)
    outlook = outlook_of(predictors)
    place = {slab.number: at for at, slab in enumerate(slabs)}
    pools = [
        ShadowPool(slab.pool.num_slots, slab.stride, make_policy(spec.eviction, slab.pool.num_slots, outlook))
        for slab in slabs
    ]

    def pool_of(ref: int) -> int | None:
        state = index.by_number.get(number_of(ref))
        return None if state is None else place[state.slab.number]

    shadow = Shadow(pools, pool_of, device)
    shadow.core = setup.build(predictors, shadow) if predictors else None
    return shadow


def _plain(stats: ShadowStats) -> dict[str, object]:
    total = stats.ledger
    ledger = (
        {} if total is None else {**asdict(total), "accuracy": total.accuracy, "coverage": total.coverage}
    )
    return {
        "demanded": dict(stats.demanded), "bytes_read": stats.bytes_read, "no_room": stats.no_room, "total": ledger,
    }  # fmt: skip
