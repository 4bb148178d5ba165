"""The lanes of one verbs link at one of its ends: queue pairs on rails, and transfers striped over them.

Theory of operation. `dpurt.core.rails` decides which lane carries what; here its decisions are carried out. A small transfer is
one chain of works on one lane. A large one is cut into stripes; each lane has `WORKERS` of them under way, so that its queue
pair never runs dry between two. A lane that breaks in the middle gives its stripes to the others; only when none is left the
transfer fails. A lane without progress for too long is put into error by `watch` (a NIC that lost its cable is silent), but
only when there are others: a single one is left to its own, longer timers.

When `carry` returns or raises, no lane's device touches the memory any more.

Leaves to others: making and connecting queue pairs, what is granted (`verbs_link`, `verbs_host`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from dpurt.core.rails import Lanes, LaneState, Stripes, stripe_bytes
from dpurt.errors import QueuePairError
from dpurt.fabric.verbs_moves import length_of, striped, with_immediate
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.queue_pair import Opcode, QueuePair, Work

__all__ = ["Lane", "LaneGroup"]

WORKERS = 2
WATCH_S = 0.5
UNKNOWN_BYTES_PER_S = 1e9


@dataclass(slots=True, eq=False)
class Lane:
    """One queue pair of the link; `rail` is the node's address on its rail."""

    index: int
    rail: str
    adapter: Adapter
    queue_pair: QueuePair | None = None

    @property
    def is_usable(self) -> bool:
        return self.queue_pair is not None and self.queue_pair.is_usable

    @property
    def name(self) -> str:
        return f"{self.rail}/{self.adapter.device.name}"


@dataclass(slots=True)
class _Transfer:
    """A striped transfer: of each lane all its groups of works."""

    stripes: Stripes
    groups: Mapping[int, Sequence[Sequence[Work]]]
    deadline: float
    failure: QueuePairError | None = None  # of the whole
    last_loss: QueuePairError | None = None  # of a lane
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def goes_on(self) -> bool:
        return self.failure is None and not self.stripes.is_over and not self.stripes.is_stuck

    def change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class LaneGroup:
    """See the module's docstring. `on_broken(lane)` is called once for each queue pair that breaks."""

    def __init__(self, lanes: Sequence[Lane], on_broken: Callable[[Lane], None]) -> None:
        self.lanes = list(lanes)
        guesses = [lane.adapter.device.bytes_per_s or UNKNOWN_BYTES_PER_S for lane in lanes]
        self.policy = Lanes([lane.name for lane in lanes], guesses)
        self._on_broken = on_broken
        self._busy = trio.Event()

    @property
    def states(self) -> list[LaneState]:
        return self.policy.states

    def take(self, lane: Lane, queue_pair: QueuePair) -> None:
        """`queue_pair` is the lane's from now on; it is not up yet."""
        lane.queue_pair = queue_pair
        queue_pair.on_failed = functools.partial(self._broke, lane, queue_pair)

    def up(self, lane: Lane) -> None:
        """Bytes were seen to pass."""
        if lane.is_usable:
            self.policy.up(lane.index)

    def choose(self, num_bytes: int) -> list[Lane]:
        """The lanes for a transfer of this size. Raises QueuePairError when none is up."""
        self.policy.fade(trio.current_time())
        chosen = [self.lanes[index] for index in self.policy.choose(num_bytes)]
        if not chosen:
            raise QueuePairError("the peer", "closed", "no lane is up")
        return chosen

    def _broke(self, lane: Lane, queue_pair: QueuePair) -> None:
        queue_pair.on_failed = lambda: None
        if lane.queue_pair is queue_pair:
            self.policy.broke(lane.index, queue_pair.failure, trio.current_time())
            self._on_broken(lane)

    # --- transfers ---

    async def carry(
        self, works: Mapping[int, Sequence[Work]], number: int | None, deadline: float
    ) -> dict[int, int]:
        """Carry out a transfer; `works` has, for each lane it may use, all of it. Bytes by lane. Raises QueuePairError.

        `number` is told to the peer, as immediate, behind the bytes of each lane that carried any."""
        if len(works) > 1:
            return await self._carry_striped(works, number, deadline)
        [(index, whole)] = works.items()
        total = length_of(whole)
        told = whole if number is None else with_immediate(whole, number)
        self._begin(index, total)
        try:
            await self._run(index, told, deadline)
        except BaseException:
            self.policy.dropped(index, total)
            raise
        self.policy.ended(index, total, trio.current_time())
        return {index: total}

    async def _run(self, index: int, works: Sequence[Work], deadline: float) -> None:
        queue_pair = self.lanes[index].queue_pair
        if queue_pair is None:
            raise QueuePairError("the peer", "closed", "the lane is not connected")
        await queue_pair.run(works, deadline)

    def _begin(self, index: int, num_bytes: int) -> None:
        self.policy.began(index, num_bytes, trio.current_time())
        self._busy.set()

    async def _carry_striped(
        self, works: Mapping[int, Sequence[Work]], number: int | None, deadline: float
    ) -> dict[int, int]:
        total = length_of(next(iter(works.values())))
        step = stripe_bytes(total, len(works))
        groups = {index: striped(whole, step) for index, whole in works.items()}
        sizes = [min(step, total - at) for at in range(0, total, step)]
        transfer = _Transfer(Stripes(self.policy, list(works), sizes), groups, deadline)
        try:
            async with trio.open_nursery() as nursery:
                for index in works:
                    for _ in range(WORKERS):
                        nursery.start_soon(self._work, transfer, index)
        finally:
            transfer.stripes.abandon()
        if transfer.failure is not None:
            raise transfer.failure
        if not transfer.stripes.is_over:
            why = "" if transfer.last_loss is None else str(transfer.last_loss)
            raise QueuePairError("the peer", "closed", f"every lane broke; the last: {why}")
        if number is not None:
            await self._tell(transfer.stripes.carried_by, number, deadline)
        return transfer.stripes.carried_by

    async def _work(self, transfer: _Transfer, index: int) -> None:
        """Carry stripes on one lane, one after the other, as long as there are some for it."""
        stripes = transfer.stripes
        while transfer.goes_on and self.policy.is_up(index):
            stripe = stripes.take(index, trio.current_time())
            if stripe is None:
                await transfer.changed.wait()
                continue
            self._busy.set()
            try:
                await self._run(index, transfer.groups[index][stripe], transfer.deadline)
            except QueuePairError as error:
                self._lose(transfer, index, error)
                return
            stripes.done(index, stripe, trio.current_time())
            transfer.change()

    @staticmethod
    def _lose(transfer: _Transfer, index: int, error: QueuePairError) -> None:
        if error.status == "timed_out":
            transfer.failure = error
        else:
            transfer.last_loss = error
            transfer.stripes.lost(index)
        transfer.change()

    async def _tell(self, carried: Mapping[int, int], number: int, deadline: float) -> None:
        """Behind what each lane carried: it arrives in that order."""
        failures: list[QueuePairError] = []

        async def tell(index: int) -> None:
            try:
                await self._run(
                    index, [Work(Opcode.WRITE_IMMEDIATE, (), immediate=number & 0xFFFFFFFF)], deadline
                )
            except QueuePairError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for index in carried:
                nursery.start_soon(tell, index)
        if failures:
            raise failures[0]

    # --- the background ---

    async def watch(self) -> None:
        """Put lanes that make no progress into error. Costs nothing while nothing is under way."""
        while len(self.lanes) > 1:
            await self._busy.wait()
            began = trio.current_time()
            await trio.sleep(WATCH_S)
            if trio.current_time() - began > 2 * WATCH_S:
                continue  # it was this process that made no progress: what has arrived may not be looked at yet
            for index in self.policy.stalled(trio.current_time()):
                queue_pair = self.lanes[index].queue_pair
                if queue_pair is not None:
                    queue_pair.fail(f"no progress for {self.policy.patience_s(index):.1f} s")
            if not any(state.flying for state in self.policy.states):
                self._busy = trio.Event()
