"""Which lane carries what: striping transfers over several rails by their speed and health. A pure core, no clock.

A *rail* is a NIC port with its way to the peer; a *lane* is one queue pair on one rail, the unit of both decisions here.

`Lanes` is what one end of a link knows of its lanes as long as it lives. Each is ``down`` (broken, or not connected yet) or
``up``. Its speed is bytes over busy seconds, old ones fading, begun with a guess (the port's rate), to which that of an unused
one returns. A lane that breaks again
and again is brought back ever later; one transfer that ends well forgets that.

`Stripes` is one transfer, cut into stripes of about equal size. Nobody shares them out beforehand: a lane that has room
*takes* the next one, so a fast lane takes more and a slow one less, whatever the guesses were. Only near the end a guess is
needed: a lane is refused a stripe that the others would have done before it. What a broken lane had under way goes back,
first in the queue, to be done again by another: it does no harm to move the same bytes twice.

Leaves to others: queue pairs, moving bytes, waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "MIN_STRIPE_BYTES",
    "LaneState",
    "Lanes",
    "RailFacts",
    "RailWish",
    "Stripes",
    "order",
    "stripe_bytes",
]

MIN_STRIPE_BYTES = 256 << 10
MAX_STRIPE_BYTES = 1 << 20
STRIPES_PER_LANE = 4
GUESS_BYTES = 1 << 20  # what the first guess of a speed weighs
MEMORY_BYTES = 64 << 20  # of moved bytes that speeds are taken from: beyond, old ones fade
FADE_S = 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
PATIENCE_S, PATIENCE = (
    4.0,
    8.0,
)  # a lane without progress for so long, and so many times what it should take, has stalled


# --- which rails lead to a host, best first ---


class RailWish(NamedTuple):
    """What a topology says of a rail; empty or None: not said."""

    name: str
    device: str = ""
    address: str = ""
    switch: str = ""
    numa: int | None = None
    bandwidth_bytes_per_s: int | None = None


class RailFacts(NamedTuple):
    """What a path is chosen by. `distance` of its NUMA node to the memory (10: the same); 0: not known."""

    name: str
    switch: str = ""
    distance: int = 0
    bytes_per_s: float = 0.0


def order(rails: Sequence[RailFacts], host_switch: str = "") -> list[tuple[RailFacts, str]]:
    """The rails in the order they should be used, each with the reason for its place."""
    ranked = sorted(
        rails,
        key=lambda rail: (
            not _same_switch(rail, host_switch),
            rail.distance,
            -rail.bytes_per_s,
            rails.index(rail),
        ),
    )
    return [(rail, _reason(rail, host_switch)) for rail in ranked]


def _same_switch(rail: RailFacts, host_switch: str) -> bool:
    return bool(host_switch) and rail.switch == host_switch


def _reason(rail: RailFacts, host_switch: str) -> str:
    reasons = []
    if host_switch:
        where = f"the host's switch {host_switch}" if rail.switch == host_switch else "another switch"
        reasons.append(f"on {where}")
    if rail.distance:
        reasons.append(
            "on the memory's NUMA node" if rail.distance <= 10 else f"NUMA distance {rail.distance}"
        )
    if rail.bytes_per_s:
        reasons.append(f"{rail.bytes_per_s * 8 / 1e9:g} Gb/s")
    return ", ".join(reasons) or "in the topology's order"


# --- the lanes of a link ---


@dataclass(slots=True)
class LaneState:
    """One lane, as its link's end knows it. `failures` are those in a row; `carried` bytes that ended well."""

    name: str
    guess: float
    is_up: bool = False
    failures: int = 0
    breaks: int = 0  # ever
    last_failure: str = ""
    retry_at: float = 0.0
    carried: int = 0
    flying: int = 0  # bytes under way
    progress_at: float = 0.0
    moved: float = 0.0
    busy_s: float = 0.0
    faded_at: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """How fast it was lately."""
        return (GUESS_BYTES + self.moved) / (GUESS_BYTES / self.guess + self.busy_s)


class Lanes:
    """See the module's docstring. `guesses`: bytes a second of each lane, at first."""

    def __init__(self, names: Sequence[str], guesses: Sequence[float]) -> None:
        if not names or len(names) != len(guesses) or min(guesses) <= 0:
            raise ValueError("a link has at least one lane, and a positive guess of each one's speed")
        self.states = [LaneState(name, guess) for name, guess in zip(names, guesses, strict=True)]

    # --- health ---

    def up(self, lane: int) -> None:
        """It is connected, and bytes were seen to pass."""
        self.states[lane].is_up = True

    def broke(self, lane: int, reason: str, now: float) -> float:
        """It is down; when it may be brought back. What it had under way is the transfers' to take back."""
        state = self.states[lane]
        if state.is_up or not state.failures:
            state.breaks += 1
        state.is_up = False
        state.last_failure = reason
        state.flying = 0
        pause = 0.0 if not state.failures else min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (state.failures - 1))
        state.failures += 1
        state.retry_at = now + pause
        return state.retry_at

    def is_up(self, lane: int) -> bool:
        return self.states[lane].is_up

    def any_up(self) -> bool:
        return any(state.is_up for state in self.states)

    def stalled(self, now: float) -> list[int]:
        """Lanes that should be given up: up, with bytes under way, and without progress for too long."""
        return [
            lane
            for lane, state in enumerate(self.states)
            if state.is_up and state.flying and now - state.progress_at > self.patience_s(lane)
        ]

    def patience_s(self, lane: int) -> float:
        state = self.states[lane]
        return PATIENCE_S + PATIENCE * state.flying / state.bytes_per_s

    # --- choice ---

    def choose(self, num_bytes: int) -> list[int]:
        """The lanes for a transfer of that size, the one that would end it first in front. Empty: none is up.

        A small transfer gets one lane; a large one all that could carry a stripe of it in no more time than the fastest
        needs for the whole.
        """
        ranked = sorted((lane for lane in range(len(self.states)) if self.is_up(lane)), key=self._end_s)
        if not ranked or num_bytes < 2 * MIN_STRIPE_BYTES:
            return ranked[:1]
        fastest = max(self.states[lane].bytes_per_s for lane in ranked)
        return [
            lane for lane in ranked if self.states[lane].bytes_per_s * num_bytes >= fastest * MIN_STRIPE_BYTES
        ]

    def _end_s(self, lane: int) -> float:
        """When a stripe given to it now would be done. Ties go to the earlier lane."""
        state = self.states[lane]
        return (state.flying + MIN_STRIPE_BYTES) / state.bytes_per_s

    def fade(self, now: float) -> None:
        """What was learnt of a lane that is not used is believed less and less, so that a slow one is tried again."""
        for state in self.states:
            last = max(state.progress_at, state.faded_at)
            if not state.flying and now - last > FADE_S:
                state.moved /= 2
                state.busy_s /= 2
                state.faded_at = now

    # --- speed ---

    def began(self, lane: int, num_bytes: int, now: float) -> None:
        """Bytes are under way on it."""
        state = self.states[lane]
        if not state.flying:
            state.progress_at = now
        state.flying += num_bytes

    def ended(self, lane: int, num_bytes: int, now: float) -> None:
        """Bytes that were under way have arrived."""
        state = self.states[lane]
        if not state.is_up:
            return  # of before it broke
        state.busy_s += max(0.0, now - state.progress_at)
        state.moved += num_bytes
        state.carried += num_bytes
        state.flying = max(0, state.flying - num_bytes)
        state.progress_at = now
        state.failures = 0
        if state.moved > MEMORY_BYTES:
            state.moved /= 2
            state.busy_s /= 2

    def dropped(self, lane: int, num_bytes: int) -> None:
        """Bytes that were under way will not arrive, and that is not the lane's fault (cancelled, late)."""
        state = self.states[lane]
        state.flying = max(0, state.flying - num_bytes)


# --- one transfer ---


def stripe_bytes(num_bytes: int, num_lanes: int) -> int:
    """How large stripes should be: a few a lane, whole pages."""
    fair = num_bytes // max(1, STRIPES_PER_LANE * num_lanes)
    return max(MIN_STRIPE_BYTES, min(MAX_STRIPE_BYTES, fair // 4096 * 4096))


@dataclass(slots=True)
class Stripes:
    """The stripes of one transfer over some lanes of a link. `sizes` in bytes; stripes go by their number."""

    lanes: Lanes
    used: Sequence[int]
    sizes: Sequence[int]
    _waiting: deque[int] = field(init=False)
    _flying: dict[int, list[int]] = field(init=False)
    _done: set[int] = field(default_factory=set, init=False)
    carried_by: dict[int, int] = field(default_factory=dict, init=False)  # lane: bytes of this transfer

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self.sizes)))
        self._flying = {lane: [] for lane in self.used}

    def take(self, lane: int, now: float) -> int | None:
        """The stripe this lane should carry next; None: nothing for it, at least not now."""
        if lane not in self._flying or not self._waiting or not self.lanes.is_up(lane):
            return None
        if self._others_end_s(lane) < self._end_s(lane, self.sizes[self._waiting[0]]):
            return None
        stripe = self._waiting.popleft()
        self._flying[lane].append(stripe)
        self.lanes.began(lane, self.sizes[stripe], now)
        return stripe

    def done(self, lane: int, stripe: int, now: float) -> None:
        """A stripe has arrived. Passed over when it was taken back before."""
        if stripe in self._flying.get(lane, ()):
            self._flying[lane].remove(stripe)
            self._done.add(stripe)
            self.carried_by[lane] = self.carried_by.get(lane, 0) + self.sizes[stripe]
            self.lanes.ended(lane, self.sizes[stripe], now)

    def lost(self, lane: int) -> None:
        """The lane broke: what it had goes back, and it gets nothing more of this transfer. Idempotent."""
        self._waiting.extendleft(reversed(self._flying.pop(lane, [])))

    def abandon(self) -> None:
        """The transfer is over, done or not: no lane has anything of it under way any more."""
        for lane, stripes in self._flying.items():
            self.lanes.dropped(lane, sum(self.sizes[stripe] for stripe in stripes))
        self._flying.clear()

    @property
    def is_over(self) -> bool:
        """Everything has arrived."""
        return len(self._done) == len(self.sizes)

    @property
    def is_stuck(self) -> bool:
        """Something has not arrived, and no lane is left for it."""
        return not self.is_over and not any(self.lanes.is_up(lane) for lane in self._flying)

    def _end_s(self, lane: int, more: int) -> float:
        state = self.lanes.states[lane]
        return (state.flying + more) / state.bytes_per_s

    def _others_end_s(self, lane: int) -> float:
        """When the others would be done with all that waits, at the earliest; infinite when there are none."""
        others = [other for other in self._flying if other != lane and self.lanes.is_up(other)]
        if not others:
            return float("inf")
        first = self.sizes[self._waiting[0]]
        soonest = min(self._end_s(other, first) for other in others)
        states = [self.lanes.states[other] for other in others]
        waiting = sum(self.sizes[stripe] for stripe in self._waiting)
        together = (waiting + sum(s.flying for s in states)) / sum(s.bytes_per_s for s in states)
        return max(soonest, together)
