"""Staging for one sequence's sparse decode: capacity and prefetch budget, pooled over layer groups. Pure.

Theory of operation. A slot holds one (group, column): one layer group's part of one cold block. Before a
group's turn `plan` says what to fetch for it, given a probability per column; at the turn `demand` says what
was there; after it `settle` takes a value per column (how likely it is wanted again) and evicts the least
valuable until the capacity is kept. What a group demanded may be dropped at once, if others are worth more: a
demanded part that is not kept passes from the device to its host without a slot.

*Pooled*, all groups compete for one capacity: groups with a wide steady set take it from groups whose set is
narrow. Otherwise each group has its equal share. The budget is a purse: `mean` fetches are paid in before each
plan, unspent ones are saved up to `saved`, and one plan spends at most `burst`.

*In flight* are fetches from `plan` until their group's turn; nothing evicts them. They occupy the pool from
the moment of issue, and a fetch must be likelier than the victim it displaces is valuable, by `margin`: so that
prefetch never throws out what it will want next. `counts_in_flight=False` is the kinder accounting of
prototypes, under which fetches in flight take no room; it is for comparison only.

Leaves to others: where probabilities and values come from (`dpurt.core.attention`), when fetches land.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Columns = npt.NDArray[np.intp]
Slots = npt.NDArray[np.intp]  # group * width + column

NOTHING: Slots = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBudget:
    """What prefetch may spend; see the module's docstring. `threshold`: what is less likely is not fetched."""

    mean: float
    burst: int
    saved: float
    threshold: float = 0.0
    margin: float = -np.inf

    def __post_init__(self) -> None:
        if self.mean < 0 or self.burst < 0 or self.saved < self.mean:
            raise ValueError("mean and burst must be >= 0, and saved >= mean")


SAVED_TURNS = 120


def pooled_budget(mean: float) -> PoolBudget:
    """So many fetches a turn on average, up to two and a half times as many at once; the usual settings."""
    saved = SAVED_TURNS * mean
    return PoolBudget(mean=mean, burst=int(2.5 * mean), saved=saved, threshold=0.02, margin=0.3)


class AttentionPool:
    """See the module's docstring. One owner; `width` bounds the columns."""

    def __init__(
        self,
        capacity: int,
        groups: int,
        width: int,
        budget: PoolBudget,
        *,
        pooled: bool = True,
        counts_in_flight: bool = True,
    ) -> None:
        if groups < 1 or width < 1 or capacity < groups:
            raise ValueError("groups and width must be >= 1 and capacity at least one slot a group")
        self.capacity = capacity
        self.width = width
        self.budget = budget
        self._share = capacity if pooled else capacity // groups
        self._pooled = pooled
        self._counts_in_flight = counts_in_flight
        self._purse = 0.0
        self._resident = np.zeros((groups, width), np.bool_)
        self._flying = np.zeros((groups, width), np.bool_)
        self._value = np.zeros((groups, width), np.float64)
        self._held = np.zeros(groups, np.int64)
        self._aloft = np.zeros(groups, np.int64)

    def __len__(self) -> int:
        """Slots in use, fetches in flight included."""
        return int(self._held.sum())

    @property
    def num_flying(self) -> int:
        """Fetches planned whose group's turn has not come."""
        return int(self._aloft.sum())

    def resident(self, group: int) -> npt.NDArray[np.bool_]:
        """Per column: has a slot, or is being fetched into one. A view, valid until the next call."""
        row: npt.NDArray[np.bool_] = self._resident[group]
        return row

    def plan(self, group: int, probability: Floats) -> tuple[Columns, Slots]:
        """What to fetch for the group's next turn, likeliest first, and the slots evicted for it."""
        budget = self.budget
        self._purse = min(self._purse + budget.mean, budget.saved)
        wanted = self._candidates(group, probability, min(int(self._purse), budget.burst))
        wanted, victims = self._worth_it(group, wanted, probability[wanted])
        evicted = self._evict(victims) if self._counts_in_flight else NOTHING
        self._purse -= len(wanted)
        self._resident[group, wanted] = True
        self._flying[group, wanted] = True
        self._held[group] += len(wanted)
        self._aloft[group] += len(wanted)
        return wanted, evicted

    def demand(self, group: int, columns: Columns) -> npt.NDArray[np.bool_]:
        """The group's turn: which of the distinct columns were there. All of them are resident until `settle`."""
        hits: npt.NDArray[np.bool_] = self._resident[group, columns]
        self._resident[group, columns] = True
        self._held[group] += len(columns) - np.count_nonzero(hits)
        if self._aloft[group]:
            self._flying[group] = False
            self._aloft[group] = 0
        return hits

    def settle(self, group: int, value: Floats) -> Slots:
        """Value the group's columns and evict, the least valuable first, until the capacity is kept."""
        self._value[group, : len(value)] = value
        scope = slice(None) if self._pooled else slice(group, group + 1)
        excess = int(self._held[scope].sum()) - self._share
        if not self._counts_in_flight:
            excess -= int(self._aloft[scope].sum())
        return self._evict(self._cheapest(group, excess)) if excess > 0 else NOTHING

    def drop(self, slots: Slots) -> None:
        """Free resident slots that are not in flight: what they were to hold never came."""
        self._evict(slots)

    def check_integrity(self) -> None:
        """Counters agree with the maps, and between turns the capacity is kept."""
        assert (self._resident.sum(axis=1) == self._held).all()
        assert (self._flying.sum(axis=1) == self._aloft).all()
        assert not (self._flying & ~self._resident).any()
        settled = self._held if self._counts_in_flight else self._held - self._aloft
        assert settled.sum() <= self.capacity
        assert self._pooled or (settled <= self._share).all()

    def _candidates(self, group: int, probability: Floats, limit: int) -> Columns:
        if limit == 0:
            return NOTHING
        likely = np.flatnonzero(
            ~self._resident[group, : len(probability)] & (probability > self.budget.threshold)
        )
        order = np.argsort(-probability[likely], kind="stable")
        return likely[order[:limit]]

    def _worth_it(self, group: int, wanted: Columns, probability: Floats) -> tuple[Columns, Slots]:
        """As many of the wanted, from the first, as find room or a victim worth less; and those victims."""
        scope = slice(None) if self._pooled else slice(group, group + 1)
        room = max(0, self._share - int(self._held[scope].sum()))
        if room >= len(wanted):
            return wanted, NOTHING
        victims = self._cheapest(group, len(wanted) - room)
        against = probability[room : room + len(victims)]
        is_better = against > self.budget.margin * self._value.reshape(-1)[victims]
        swaps = len(victims) if is_better.all() else int(np.argmin(is_better))
        return wanted[: room + swaps], victims[:swaps]

    def _cheapest(self, group: int, count: int) -> Slots:
        """Up to `count` slots of least value, the least first, that may go: of all groups, or of this one."""
        offset = 0 if self._pooled else group * self.width
        scope = slice(None) if self._pooled else group
        free_to_go = self._resident[scope] & ~self._flying[scope]
        slots = np.flatnonzero(free_to_go) + offset
        value = self._value.reshape(-1)[slots]
        if count < len(slots):
            least = np.argpartition(value, count - 1)[:count]
            slots, value = slots[least], value[least]
        return slots[np.argsort(value, kind="stable")]

    def _evict(self, slots: Slots) -> Slots:
        self._resident.reshape(-1)[slots] = False
        np.subtract.at(self._held, slots // self.width, 1)
        return slots
