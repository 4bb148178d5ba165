"""Staging of one sequence's sparse decode: what its turns find, what is read for them, what leaves. Pure.

Theory of operation. A *turn* is one layer group's part in one decode step: `turn` says which blocks it touches. A slot
(group * width + column) holds one group's part of one cold block; columns are positions in the sequence's chain. What
the group is likely to want at its next turn is said by `dpurt.core.attention`, from the turns so far and the engine's
ranking, if there is one; what that may cost, and what leaves for it, by `dpurt.core.attention_pool`. The replay of
recorded attention drives the same two in the same order.

The caller moves the bytes. It tells how far the read of a slot is (`Progress`) when asked, and carries out what comes
back: `Turn` and `Plan`. What a turn teaches is left for `settle`, which takes most of the time and nobody waits for;
it must come before anything else that changes the sequence. A slot of ours without bytes (`absent`: its read failed,
or its block is gone) counts as late.

Leaves to others: where bytes lie, who may read them, when a slot's memory may be reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dpurt.core.attention import MASS_OF, AttentionModel, AttentionSequence, Columns, Floats
from dpurt.core.attention_pool import AttentionPool, PoolBudget, Slots
from dpurt.core.attention_tally import AttentionFates, Tally

Progress: TypeAlias = Literal["landed", "flying", "waiting", "absent"]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn asks for: `read` these now, `hasten` prefetches that wait to start, `withdraw` others that do (if
    they still can be). `hits` were there."""

    touched: list[int]
    hits: list[int]
    read: list[int]
    hasten: list[int]
    withdraw: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Let `evicted` go, then read `fetch` behind all demand reads, likeliest first."""

    fetch: list[int]
    evicted: list[int]


class DecodeStaging:
    """See the module's docstring. One owner. `width` bounds the columns, `ahead` is the usual distance of a plan."""

    def __init__(
        self, model: AttentionModel, capacity: int, width: int, budget: PoolBudget, ahead: int
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be >= 1, got {ahead}")
        self.groups = model.groups
        self.width = width
        self.ahead = ahead
        self.tally = Tally(layer_hits=[0] * model.groups)
        self.pool = AttentionPool(capacity, model.groups, width, budget)
        self._sequence = AttentionSequence(model, 0)
        self._fates = AttentionFates(self.tally, model.groups * width)
        self._turns = [0] * model.groups
        self._planned: list[list[int]] = [[] for _ in range(model.groups)]
        self._unsettled: tuple[int, Columns, Floats | None] | None = None

    @property
    def columns(self) -> int:
        """Columns known so far."""
        return self._sequence.history.columns

    def extend(self, columns: int) -> None:
        """The chain has so many blocks now; those beyond `width` are not staged here."""
        self._sequence.extend(min(columns, self.width))

    def slots(self, group: int, columns: Sequence[int]) -> list[int]:
        """The slots of a group's columns."""
        return [group * self.width + column for column in columns]

    def turn(
        self, group: int, columns: Sequence[int], codes: bytes, progress: Callable[[int], Progress]
    ) -> Turn:
        """A step touches these distinct, known columns in this group; `codes` are their mass codes, or empty. `settle` next."""
        assert self._unsettled is None, "a turn is settled before the next"
        wanted = np.array(columns, np.intp)
        slots = wanted + group * self.width
        there = self.pool.demand(group, wanted)
        states = [
            progress(slot) if is_there else "absent" for slot, is_there in zip(slots, there, strict=True)
        ]
        landed = np.array([state == "landed" for state in states], np.bool_)
        masses = MASS_OF[np.frombuffer(codes, np.uint8)] if codes else None
        self._count(group, landed, there, masses)
        self._fates.demanded(slots, self._turns[group], there & ~landed)
        withdraw = self._withdraw(group, slots, progress)
        self._unsettled = group, wanted, masses
        touched = slots.tolist()
        by_state = {
            state: [s for s, was in zip(touched, states, strict=True) if was == state] for state in _STATES
        }
        return Turn(touched, by_state["landed"], by_state["absent"], by_state["waiting"], withdraw)

    def settle(self) -> list[int]:
        """Learn from the turn just taken; the slots that go, touched ones perhaps among them."""
        assert self._unsettled is not None, "there was no turn"
        (group, wanted, masses), self._unsettled = self._unsettled, None
        evicted = self.pool.settle(group, self._sequence.demanded(group, wanted, masses))
        self._fates.evicted(evicted, self._turns[group])
        self._turns[group] += 1
        slots: list[int] = evicted.tolist()
        return slots

    def plan(self, group: int, ranked: Sequence[int]) -> Plan:
        """Plan for the group's next turn; `ranked` are known columns the engine expects, best first, or none."""
        assert self._unsettled is None, "a turn is settled before the next plan"
        if ranked:
            self._sequence.hint(group, np.array(ranked, np.intp))
        columns, evicted = self.pool.plan(group, self._sequence.now(group))
        self._fates.evicted(evicted, self._turns[group])
        slots = columns + group * self.width
        self._fates.issued(slots, self._turns[group])
        fetch = slots.tolist()
        self._planned[group] += fetch
        return Plan(fetch, evicted.tolist())

    def stats(self) -> dict[str, int]:
        """issued = timely + late + later + early + useless + cancelled + open; demanded = hits + others."""
        unused, gone = self._fates.pending()
        tally = {name: count for name, count in asdict(self.tally).items() if isinstance(count, int)}
        return {**tally, "useless": self.tally.useless + gone, "open": unused}

    def _count(self, group: int, landed: Bools, there: Bools, masses: Floats | None) -> None:
        tally = self.tally
        num_hits = int(np.count_nonzero(landed))
        tally.demanded += len(landed)
        tally.hits += num_hits
        tally.layer_hits[group] += num_hits
        tally.misses += len(there) - int(np.count_nonzero(there))
        if masses is not None:
            tally.mass += float(masses.sum())
            tally.hit_mass += float(masses[landed].sum())

    def _withdraw(self, group: int, wanted: Slots, progress: Callable[[int], Progress]) -> list[int]:
        """Prefetches for this turn that it did not want and that have not started are not read at all."""
        planned, self._planned[group] = self._planned[group], []
        still = set(planned) - set(wanted.tolist())
        withdrawn = [slot for slot in planned if slot in still and progress(slot) in ("waiting", "absent")]
        for slot in withdrawn:
            self._fates.cancelled(slot)
        if withdrawn:
            self.pool.drop(np.array(withdrawn, np.intp))
        return withdrawn


_STATES: tuple[Progress, ...] = ("landed", "flying", "waiting", "absent")
