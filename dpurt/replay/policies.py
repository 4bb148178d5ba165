"""What a replay can compare: caches on demand, each predictor alone, all of them, and the oracle.

The oracle, first form. It knows every future use. Among the blocks that are on the device only, it fetches
the one used soonest, as long as staging has a free place or the block it would evict is used later; eviction
is Belady's. It lives on the same bandwidth, queue and demand-first rule as everyone. Greedy, so a strong
yardstick rather than a proven bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpurt.core.events import (
    NOBODY,
    Arrived,
    Consumed,
    Demanded,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    Staged,
    Stored,
)
from dpurt.core.eviction import Belady, EvictionPolicy, make_policy
from dpurt.core.predictor import Prediction, Predictor, SlidingWindow
from dpurt.core.returns import Returns
from dpurt.errors import ConfigError
from dpurt.priors import shipped_returns
from dpurt.replay.future import Future
from dpurt.replay.staging import ReplayStaging


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`eviction` None: nothing is kept, every block is recomputed. `predictors`: names, empty for demand only.
    `has_prior`: of conversations' returns it knows what the package ships, else only what it learns in the trace."""

    name: str
    summary: str
    eviction: str | None
    predictors: tuple[str, ...] = ()
    has_prior: bool = True

    @property
    def is_clairvoyant(self) -> bool:
        """Eviction knows the future."""
        return self.eviction == "belady"


_TABLE = (
    ("none", "no cache: every block is recomputed", None, ()),
    ("lru", "on demand, least recently used leaves", "lru", ()),
    ("fifo", "on demand, first in leaves first", "fifo", ()),
    ("lfu", "on demand, least often used leaves", "lfu", ()),
    ("s3fifo", "on demand, S3-FIFO", "s3fifo", ()),
    ("belady", "on demand, the one used furthest in the future leaves", "belady", ()),
    ("sliding_window", "read-ahead of arrived requests, LRU", "lru", ("sliding_window",)),
    (
        "cross_request",
        "predicted returns of conversations, eviction by them",
        "predicted",
        ("cross_request",),
    ),
    ("predicted", "on demand, the one least likely to be used soon leaves", "predicted", ("outlook",)),
    ("dpurt", "all predictors, eviction by them", "predicted", ("sliding_window", "cross_request")),
    ("dpurt_fresh", "the same, learning from nothing", "predicted", ("sliding_window", "cross_request")),
    ("oracle", "knows the future: nearest use first, Belady", "belady", ("oracle",)),
)
POLICIES = {
    name: Policy(
        name=name,
        summary=summary,
        eviction=eviction,
        predictors=predictors,
        has_prior=name != "dpurt_fresh",
    )
    for name, summary, eviction, predictors in _TABLE
}


def policies_named(names: str) -> list[Policy]:
    """Policies of a comma-separated list; ConfigError names one that does not exist."""
    chosen = []
    for name in names.split(","):
        if name not in POLICIES:
            raise ConfigError("--policy", f"expected one of {', '.join(POLICIES)}, got {name!r}")
        chosen.append(POLICIES[name])
    return chosen


def make_eviction(
    policy: Policy, capacity: int, future: Future | None, predictors: Sequence[Predictor]
) -> EvictionPolicy:
    """The eviction a policy runs with. `predictors` are the policy's: one of them may be the outlook."""
    assert policy.eviction is not None
    if policy.is_clairvoyant:
        assert future is not None, f"{policy.name} needs the future"
        return Belady(future.next_use)
    outlook = next((predictor for predictor in predictors if isinstance(predictor, Returns)), None)
    return make_policy(policy.eviction, capacity, outlook)


def make_predictors(policy: Policy, lookahead_blocks: int, block_s: float) -> list[Predictor]:
    """The predictors of a policy but the oracle's, which the engine makes around its own state."""
    made: list[Predictor] = []
    prior = shipped_returns() if policy.has_prior else None
    for name in policy.predictors:
        if name == "sliding_window":
            made.append(SlidingWindow(lookahead_blocks, block_s))
        elif name == "cross_request":
            made.append(Returns(prior))
        elif name == "outlook":
            made.append(Returns(prior, fetches=False))
    return made


class Oracle:
    """A Predictor that knows the future and the state of staging; see the module's docstring.

    The engine calls `absent` whenever a stored block is not in staging (any more), so the heap always holds
    the ones worth fetching. `may_plan` says whether the arbiter has room for another prediction: the oracle
    decides late.
    """

    name = "oracle"
    interests: frozenset[type[Event]] = frozenset(
        {Arrived, Consumed, Stored, Demanded, Staged, FetchFailed, Evicted, Finished}
    )
    BATCH = 8

    def __init__(
        self,
        future: Future,
        staging: ReplayStaging,
        where: Callable[[int, int | None], str],
        may_plan: Callable[[], bool],
    ) -> None:
        self._future = future
        self._staging = staging
        self._where = where
        self._may_plan = may_plan
        self._absent: list[tuple[float, int]] = []

    def absent(self, block: int) -> None:
        """`block` is stored and not in staging."""
        position = self._future.next_use(block)
        if position != math.inf:
            heapq.heappush(self._absent, (position, block))

    def observe(self, event: Event, now: float) -> None:
        """Events only wake the oracle; it reads the state itself."""

    def predict(self, now: float) -> list[Prediction]:
        predictions: list[Prediction] = []
        if not self._absent or not self._may_plan():
            return predictions
        places = self._staging.capacity - len(self._staging) - self._staging.reserved
        while len(predictions) < max(1, min(places, self.BATCH)):
            entry = self._next_absent()
            if entry is None or not self._is_worth_it(entry[0], now):
                break
            heapq.heappop(self._absent)
            need_by = max(now, self._future.arrival_s(entry[0]))
            predictions.append(Prediction(entry[1], None, need_by, 1.0, self.name, None, NOBODY))
        return predictions

    def next_wakeup(self) -> float | None:
        return None

    def _next_absent(self) -> tuple[float, int] | None:
        while self._absent:
            position, block = self._absent[0]
            if self._future.next_use(block) == position and self._where(block, None) == "nvme":
                return self._absent[0]
            heapq.heappop(self._absent)
        return None

    def _is_worth_it(self, position: float, now: float) -> bool:
        if self._staging.has_free:
            return True
        victim = self._staging.policy.victim(now)
        return victim is not None and self._future.next_use(victim) > position
