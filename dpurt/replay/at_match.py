"""Hits at match with a device's bandwidth and no queueing: how well a policy foresees, apart from how fast hosts are.

Theory of operation. Requests take no time here. When one arrives, its reusable run (blocks stored before, up to the first
that was not) is looked up: those in staging are hits *at match*, the others are demand reads, which are there at once but
use up the device's bandwidth. Then all its blocks are touched or inserted, tail first, so that heads outlive tails. It
ends when the trace says so, or after `DECODE_STEP_S` a token. At each `TICK_S` the bandwidth demand reads left over goes
to prefetch, in the order the policy predicts; none is saved up, and what demand took in excess is paid back first. The
policies are the node's own cores: `dpurt.core.returns` and the eviction that asks it.

The oracle knows every use: it fetches the absent block used soonest as long as the resident one used last is used later.
Greedy, a strong yardstick rather than a bound. Belady evicts like it and fetches nothing.

`dpurt.replay.engine` has the times: hosts that queue, reads that take time, prefetches that come late.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dpurt.core.events import NOBODY, Arrived, Consumed, Finished, Staged, Stored
from dpurt.core.eviction import Belady, EvictionPolicy, Lru, Predicted
from dpurt.core.return_model import Forest
from dpurt.core.returns import Returns
from dpurt.replay.future import Future
from dpurt.replay.trace import Request

__all__ = ["POLICIES", "AtMatch", "at_match", "closed_percent"]

TICK_S = 0.5
DECODE_STEP_S = 0.03
CERTAIN_MARGIN = 1.5  # the arbiter's hysteresis
POLICIES = ("lru", "belady", "oracle", "predicted", "dpurt", "dpurt_fresh")


@dataclass(slots=True)
class AtMatch:
    """Block references of reusable runs, how many were hits, and reads: for demand, and for prefetch."""

    policy: str
    reusable: int = 0
    hits: int = 0
    demand_reads: int = 0
    prefetched: int = 0

    @property
    def rate(self) -> float:
        """Hits over reusable references."""
        return self.hits / self.reusable if self.reusable else 0.0


def closed_percent(ours: AtMatch, lru: AtMatch, oracle: AtMatch) -> float:
    """How far `ours` is on the way from LRU to the oracle."""
    way = oracle.rate - lru.rate
    return 100 * (ours.rate - lru.rate) / way if way else 0.0


def at_match(
    requests: Sequence[Request], policy: str, capacity: int, blocks_per_s: float, prior: Forest | None = None
) -> AtMatch:
    """Run one of `POLICIES`. `prior` is for ``dpurt`` and ``predicted``."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    if policy in ("belady", "oracle"):
        foresight = _Foresight(Future(requests), fetches=policy == "oracle")
        staging = _Staging(capacity, foresight.policy, foresight.is_worth_it, foresight.absent)
        return _Run(requests, AtMatch(policy), staging, foresight, blocks_per_s).to_end()
    if policy == "lru":
        return _Run(
            requests, AtMatch(policy), _Staging(capacity, Lru(capacity)), _Guess(), blocks_per_s
        ).to_end()
    returns = Returns(None if policy == "dpurt_fresh" else prior, fetches=policy != "predicted")
    staging = _Staging(capacity, Predicted(capacity, returns))
    return _Run(requests, AtMatch(policy), staging, _Returning(returns), blocks_per_s).to_end()


def _always(block: int, victim: int) -> bool:
    return True


def _nobody(block: int) -> None:
    pass


class _Staging:
    """At most `capacity` blocks; who leaves is the policy's choice, who may come `admit`'s."""

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        admit: Callable[[int, int], bool] = _always,
        on_absent: Callable[[int], None] = _nobody,
    ) -> None:
        self.capacity = capacity
        self.policy = policy
        self.resident: set[int] = set()
        self._admit = admit
        self._on_absent = on_absent

    @property
    def has_free(self) -> bool:
        return len(self.resident) < self.capacity

    def put(self, block: int, now: float) -> bool:
        """False: not worth its victim."""
        if not self.has_free:
            victim = self.policy.victim(now)
            assert victim is not None, "nothing is held"
            if not self._admit(block, victim):
                self._on_absent(block)
                return False
            self.policy.remove(victim, evicted=True)
            self.resident.discard(victim)
            self._on_absent(victim)
        self.resident.add(block)
        self.policy.insert(block, now)
        self.policy.unhold(block)
        return True


class _Guess:
    """What a policy learns from the trace, and what it wants fetched. This one learns and wants nothing."""

    def arrived(self, number: int, request: Request, matched: int, now: float) -> None:
        """A request came; it has read what it matched and stored the rest by the end of this call."""

    def finished(self, number: int, stop: str, now: float) -> None:
        """It ended."""

    def wanted(self, staging: _Staging, now: float) -> Iterable[int]:
        """Blocks to fetch now, the best first. Asked for one at a time, each after the one before was fetched."""
        return ()


class _Returning(_Guess):
    """Ours."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns

    def arrived(self, number: int, request: Request, matched: int, now: float) -> None:
        self._returns.observe(Arrived(number, NOBODY, request.blocks[:matched]), now)
        self._returns.observe(Consumed(number, 0, matched), now)
        self._returns.observe(Stored(number, request.blocks[matched:]), now)

    def finished(self, number: int, stop: str, now: float) -> None:
        self._returns.observe(Finished(number, stop), now)

    def wanted(self, staging: _Staging, now: float) -> Iterable[int]:
        for job, prediction in enumerate(self._returns.predict(now)):
            price = 0.0 if staging.has_free else staging.policy.price(now)
            assert prediction.worth is not None, "returns say what they are worth"
            if prediction.worth <= CERTAIN_MARGIN * price:
                return
            yield prediction.block
            self._returns.observe(Staged(prediction.block, job), now)


class _Foresight(_Guess):
    """Every future use. A block that is not resident (any more) is told by `absent`."""

    def __init__(self, future: Future, *, fetches: bool) -> None:
        self.policy = Belady(future.next_use)
        self._future = future
        self._fetches = fetches
        self._absent: list[tuple[float, int]] = []

    def is_worth_it(self, block: int, victim: int) -> bool:
        """Is it used before its victim is?"""
        return self._future.next_use(block) < self._future.next_use(victim)

    def absent(self, block: int) -> None:
        """A stored block left, or did not come."""
        position = self._future.next_use(block)
        if self._fetches and position != math.inf:
            heapq.heappush(self._absent, (position, block))

    def arrived(self, number: int, request: Request, matched: int, now: float) -> None:
        for block in request.blocks:
            self._future.consumed(block)

    def wanted(self, staging: _Staging, now: float) -> Iterable[int]:
        while self._absent:
            position, block = heapq.heappop(self._absent)
            if block in staging.resident or self._future.next_use(block) != position:
                continue
            victim = None if staging.has_free else staging.policy.victim(now)
            if victim is not None and not self.is_worth_it(block, victim):
                heapq.heappush(self._absent, (position, block))
                return
            yield block


class _Run:
    """One policy over the trace."""

    def __init__(
        self,
        requests: Sequence[Request],
        result: AtMatch,
        staging: _Staging,
        guess: _Guess,
        blocks_per_s: float,
    ) -> None:
        self._requests = requests
        self._result = result
        self._staging = staging
        self._guess = guess
        self._per_tick = blocks_per_s * TICK_S
        self._owed = 0.0  # blocks demand read in this tick, or in excess before
        self._stored: set[int] = set()
        self._ends: list[tuple[float, int]] = []
        self._tick_at = 0.0

    def to_end(self) -> AtMatch:
        """All requests."""
        for number, request in enumerate(self._requests):
            self._until(request.timestamp_s)
            self._arrive(number, request, request.timestamp_s)
        return self._result

    def _until(self, now: float) -> None:
        """Ends and ticks up to `now`, in order."""
        while True:
            end = self._ends[0][0] if self._ends else math.inf
            if min(end, self._tick_at) > now:
                return
            if end < self._tick_at:
                _, number = heapq.heappop(self._ends)
                self._guess.finished(number, self._requests[number].stop, end)
            else:
                self._tick(self._tick_at)
                self._tick_at += TICK_S

    def _tick(self, now: float) -> None:
        left = self._per_tick - self._owed
        self._owed = max(0.0, -left)
        if left < 1:
            return
        for block in self._guess.wanted(self._staging, now):
            self._staging.put(block, now)
            self._result.prefetched += 1
            left -= 1
            if left < 1:
                return

    def _arrive(self, number: int, request: Request, now: float) -> None:
        blocks, stored, staging = request.blocks, self._stored, self._staging
        matched = next((i for i, block in enumerate(blocks) if block not in stored), len(blocks))
        absent = [block for block in blocks[:matched] if block not in staging.resident]
        self._result.reusable += matched
        self._result.hits += matched - len(absent)
        self._result.demand_reads += len(absent)
        self._owed += len(absent)
        self._guess.arrived(number, request, matched, now)
        stored.update(blocks)
        for block in reversed(blocks):
            if block not in staging.resident:
                staging.put(block, now)
        staging.policy.touch(reversed(blocks), now)
        api_s = request.output_tokens * DECODE_STEP_S if request.api_s is None else request.api_s
        heapq.heappush(self._ends, (now + api_s, number))
