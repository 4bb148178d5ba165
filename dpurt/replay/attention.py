"""Replay of attention traces: what staging and prefetch are worth to sparse decode, policy against oracle.

A slot holds one layer's part of one cold block. Layers take their turns one after the other; at a layer's turn
its demand (the columns with most mass) is looked for in staging. What a policy fetches for a layer is issued
`lookahead` layers before its turn, with what is known then; across steps for the first layers.

Figures. Warm turns (the prompt's tail) fill staging and history and are not counted.

- `hit_rate`: demanded parts found in staging: `blocks`; `mass`, weighted by their attention; `tokens` and `bytes`
  equal `blocks`, parts being of one size. A prefetch in flight at its need is late, never a hit.
- A prefetch ends as exactly one of: `timely` (wanted at the very turn it was for, and there), `late` (wanted at
  it, in flight), `later` (wanted at a later turn, having stayed), `early` (evicted unused, wanted within `HORIZON`
  turns), `useless`, `cancelled` (not started when its turn had passed), `open` (unused at the end).
- `accuracy` = (timely + late) / issued: in the very step. `used_before_eviction` adds `later`.
- `coverage` = (timely + late) / (timely + late + demand misses). `reads` are per turn.
- `closed` = (hits - LRU's) / (oracle's - LRU's), in per cent: the oracle fetches what will be demanded, under the
  same budget, into LRU staging of the same capacity, plain accounting.

Accounting. *Plain*: fetches take no room until their turn. *Strict*: they do from issue, and the pool is never
exceeded; demanded parts that win no slot pass through to the host. Every object gives the plain figures, and
the strict ones under `strict`; a paced replay (with latencies) is strict only. A trace that was recorded with its times is
also replayed at that pace, under `recorded_pace`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpurt.core.attention_pool import AttentionPool, PoolBudget, Slots, pooled_budget
from dpurt.core.attention_tally import AttentionFates, Tally
from dpurt.errors import ConfigError
from dpurt.replay import attention_policies as foresights
from dpurt.replay.attention_policies import Foresight
from dpurt.replay.attention_timing import Pace, ReadPipe, recorded_pace
from dpurt.replay.attention_trace import AttentionTrace, read_attention


def _same_each_turn(budget: float) -> PoolBudget:
    """The baselines': so many fetches a turn, unspent ones are lost."""
    return PoolBudget(mean=budget, burst=math.ceil(budget), saved=math.ceil(budget))


def _lean_budget(budget: float) -> PoolBudget:
    """The same purse, spent on what is likelier only."""
    return replace(pooled_budget(budget), threshold=0.12, margin=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPolicy:
    """`pooled`: one capacity for all layers."""

    name: str
    summary: str
    foresight: Callable[[AttentionTrace, int], Foresight]
    pooled: bool = False
    budget: Callable[[float], PoolBudget] = _same_each_turn


_TABLE = (
    AttentionPolicy(name="lru", summary="on demand, LRU, each layer its share", foresight=foresights.Lru),
    AttentionPolicy(name="lfu", summary="on demand, least often demanded leaves", foresight=foresights.Lfu),
    AttentionPolicy(
        name="belady", summary="on demand, furthest next use leaves", foresight=foresights.Belady
    ),
    AttentionPolicy(name="previous_step", summary="mass of the last step", foresight=foresights.PreviousStep),
    AttentionPolicy(
        name="previous_layer", summary="mass of the layer before", foresight=foresights.PreviousLayer
    ),
    AttentionPolicy(name="ewma", summary="decayed mass", foresight=foresights.Ewma),
    AttentionPolicy(name="heavy_hitters", summary="all mass so far (H2O)", foresight=foresights.HeavyHitters),
    AttentionPolicy(name="snapkv", summary="mass at the prompt's tail", foresight=foresights.SnapKv),
    AttentionPolicy(name="next_block", summary="blocks behind decayed mass", foresight=foresights.NextBlock),
    AttentionPolicy(name="hint", summary="the engine's hints as they come", foresight=foresights.HintedRanks),
    AttentionPolicy(
        name="lru_pool",
        summary="on demand, one LRU for all layers",
        foresight=foresights.LruPool,
        pooled=True,
    ),
    AttentionPolicy(
        name="dpurt",
        summary="ours: learned, pooled",
        foresight=foresights.Learned,
        pooled=True,
        budget=pooled_budget,
    ),
    AttentionPolicy(
        name="dpurt_lean",
        summary="ours, fewer reads",
        foresight=foresights.Learned,
        pooled=True,
        budget=_lean_budget,
    ),
    AttentionPolicy(
        name="dpurt_no_hints",
        summary="ours, deaf to hints",
        foresight=foresights.LearnedWithoutHints,
        pooled=True,
        budget=pooled_budget,
    ),
    AttentionPolicy(
        name="dpurt_evict",
        summary="ours, on demand only",
        foresight=foresights.LearnedWithoutHints,
        pooled=True,
        budget=lambda _: pooled_budget(0),
    ),
    AttentionPolicy(name="oracle", summary="what will be demanded", foresight=foresights.Oracle),
)
POLICIES = {policy.name: policy for policy in _TABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionScenario:
    """`capacity`: staging as a share of the cold blocks at the first step; `budget`: fetches a layer's turn, on
    average; `lookahead`: layers between issue and turn."""

    capacity: float = 0.1
    budget: float = 4
    lookahead: int = 1
    seed: int = 0
    strict: bool = False
    pace: Pace | None = None

    def __post_init__(self) -> None:
        if not 0 < self.capacity <= 1 or self.budget < 0 or self.lookahead < 1:
            raise ValueError("capacity must lie in (0, 1], budget be >= 0 and lookahead >= 1")


class _Replay:
    """One policy over one trace."""

    def __init__(self, trace: AttentionTrace, policy: AttentionPolicy, scenario: AttentionScenario) -> None:
        self.trace = trace
        self.tally = Tally(layer_hits=[0] * trace.layers)
        self._scenario = scenario
        self._foresight = policy.foresight(trace, scenario.lookahead)
        self._width = int(trace.columns[-1])
        self.pool = AttentionPool(
            max(1, round(scenario.capacity * trace.first_columns)) * trace.layers,
            trace.layers,
            self._width,
            policy.budget(scenario.budget),
            pooled=policy.pooled,
            counts_in_flight=scenario.strict or scenario.pace is not None,
        )
        self._fates = AttentionFates(self.tally, trace.layers * self._width)
        self._pipe = None if scenario.pace is None else ReadPipe(scenario.pace, scenario.seed)
        self._fetched: list[Slots] = [np.empty(0, np.intp)] * trace.layers
        self._clock = 0.0
        self._stall_s = 0.0

    def run(self, progress: Callable[[int], None] | None = None) -> Tally:
        """The whole trace."""
        ahead = self._scenario.lookahead
        end = self.trace.turns * self.trace.layers
        for place in range(-ahead, end):
            if place >= 0:
                self._enter(place)
                self._turn(*divmod(place, self.trace.layers))
                if progress is not None and (place + 1) % self.trace.layers == 0:
                    progress((place + 1) // self.trace.layers)
            if place + ahead < end:
                self._issue(*divmod(place + ahead, self.trace.layers))
            self._pass_layer(place)
        self._fates.finish()
        self.tally.clock_s = self._clock
        return self.tally

    def _enter(self, place: int) -> None:
        turn, layer = divmod(place, self.trace.layers)
        if self._pipe is not None and layer == 0:
            self._pipe.enter_step(turn - self.trace.warm_turns)

    def _pass_layer(self, place: int) -> None:
        if self._scenario.pace is not None:
            turn, layer = divmod(place, self.trace.layers)
            turn_s = self._scenario.pace.turn_s(turn - self.trace.warm_turns, layer)
            self._clock += turn_s + self._stall_s
            self._stall_s = 0.0

    def _issue(self, turn: int, layer: int) -> None:
        scores = self._foresight.scores(turn, layer)
        if scores is None or turn < self.trace.warm_turns:
            return
        columns, evicted = self.pool.plan(layer, scores)
        self._foresight.fetched(turn, layer, columns)
        self._fates.evicted(evicted, turn)
        slots = columns + layer * self._width
        self._fates.issued(slots, turn)
        self._fetched[layer] = slots
        if self._pipe is not None:
            self._pipe.prefetch(slots.tolist(), self._clock)

    def _turn(self, turn: int, layer: int) -> None:
        demand = self.trace.demand[turn, layer]
        slots = demand + layer * self._width
        there = self.pool.demand(layer, demand)
        late = self._wait(slots, there) if self._pipe is not None else np.zeros(len(demand), np.bool_)
        if turn >= self.trace.warm_turns:
            self._count(turn, layer, there & ~late, there)
        self._fates.demanded(slots, turn, late)
        if self._pipe is not None:
            self._cancel_unstarted(self._pipe, layer)
        evicted = self.pool.settle(layer, self._foresight.values(turn, layer))
        self._fates.evicted(evicted, turn)

    def _count(
        self, turn: int, layer: int, hits: npt.NDArray[np.bool_], there: npt.NDArray[np.bool_]
    ) -> None:
        tally, mass = self.tally, self.trace.mass[turn, layer]
        num_hits = int(np.count_nonzero(hits))
        tally.demanded += len(hits)
        tally.hits += num_hits
        tally.layer_hits[layer] += num_hits
        tally.mass += float(mass.sum())
        tally.hit_mass += float(mass[hits].sum())
        tally.misses += len(hits) - int(np.count_nonzero(there))
        tally.stall_s += self._stall_s

    def _wait(self, slots: Slots, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Read what is missing; which of those there are still in flight. Sets the stall."""
        assert self._pipe is not None
        pipe, now = self._pipe, self._clock
        late = np.zeros(len(slots), np.bool_)
        promoted, done = [], now
        for i in np.flatnonzero(there):
            lands = pipe.landing(int(slots[i]), now)
            if lands is None:
                promoted.append(int(slots[i]))
            elif lands > now:
                done = max(done, lands)
            late[i] = lands is None or lands > now
        done = max(done, pipe.demand(promoted + slots[~there].tolist(), now))
        self._stall_s = done - now
        return late

    def _cancel_unstarted(self, pipe: ReadPipe, layer: int) -> None:
        """A prefetch nobody wanted at its turn and which has not started is not read at all."""
        withdrawn = [slot for slot in self._fetched[layer].tolist() if pipe.withdraw(slot)]
        self._fetched[layer] = self._fetched[layer][:0]
        for slot in withdrawn:
            self._fates.cancelled(slot)
        if withdrawn:
            self.pool.drop(np.array(withdrawn, np.intp))


def replay_attention(
    trace: AttentionTrace,
    policy: AttentionPolicy,
    scenario: AttentionScenario,
    progress: Callable[[int], None] | None = None,
) -> Tally:
    """One policy over one trace, deterministic by the scenario's seed."""
    return _Replay(trace, policy, scenario).run(progress)


# --- results ------------------------------------------------------------------------------------------------


class _Both(NamedTuple):
    """A policy's tally under either accounting; `strict` is None for a paced replay, which is strict itself. `recorded`: at
    the pace of the recording, if it has one and no other was asked for."""

    policy: AttentionPolicy
    tally: Tally
    strict: Tally | None
    recorded: Tally | None
    wall_s: float


def run_attention(
    path: Path,
    policies: Sequence[str],
    capacity: float,
    budget: float,
    lookahead: int,
    seed: int = 0,
    *,
    pace: Pace | None = None,
    steps: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> list[dict[str, object]]:
    """Replay a trace under each named policy: one plain dict each, for JSON; see the module's docstring.

    `closed_percent` and `regret_to_oracle` are None unless `lru` and `oracle` are among the policies. Raises
    ConfigError for a bad file, an unknown policy or a scenario that makes no sense.
    """
    chosen = _policies_named(policies)
    try:
        scenario = AttentionScenario(
            capacity=capacity, budget=budget, lookahead=lookahead, seed=seed, pace=pace
        )
    except ValueError as error:
        raise ConfigError("scenario", str(error)) from error
    trace = read_attention(path, steps)
    if lookahead > trace.layers:
        raise ConfigError("lookahead", f"expected at most the trace's {trace.layers} layers, got {lookahead}")
    done = [_replay_both(trace, policy, scenario, progress) for policy in chosen]
    return [_as_json(trace, scenario, one, done) for one in done]


def _policies_named(names: Iterable[str]) -> list[AttentionPolicy]:
    for name in names:
        if name not in POLICIES:
            raise ConfigError("policy", f"expected one of {', '.join(POLICIES)}, got {name!r}")
    return [POLICIES[name] for name in names]


def _replay_both(
    trace: AttentionTrace,
    policy: AttentionPolicy,
    scenario: AttentionScenario,
    progress: Callable[[str, int], None] | None,
) -> _Both:
    def show(turn: int) -> None:
        if progress is not None:
            progress(policy.name, turn)

    start = time.perf_counter()
    tally = replay_attention(trace, policy, scenario, show)
    wall_s = time.perf_counter() - start
    strict = None
    if scenario.pace is None:
        strict = replay_attention(trace, policy, replace(scenario, strict=True))
    pace = recorded_pace(trace) if scenario.pace is None else None
    recorded = None if pace is None else replay_attention(trace, policy, replace(scenario, pace=pace))
    return _Both(policy, tally, strict, recorded, wall_s)


def _as_json(
    trace: AttentionTrace, scenario: AttentionScenario, one: _Both, all_: Sequence[_Both]
) -> dict[str, object]:
    by_name = {other.policy.name: other.tally for other in all_}
    lru, oracle = by_name.get("lru"), by_name.get("oracle")
    turns = trace.steps * trace.layers
    tally = one.tally
    figures = _figures(tally, turns)
    strict = None if one.strict is None else _figures(one.strict, turns)
    for row, counts in ((figures, tally), (strict, one.strict)):
        if row is not None and counts is not None:
            row["closed_percent"] = closed_percent(counts, lru, oracle)
    return {
        "policy": one.policy.name,
        **figures,
        "strict": strict,
        "recorded_pace": None if one.recorded is None else _figures(one.recorded, turns),
        "at_match": None,
        "ttft_p50_s": None,
        "ttft_p99_s": None,
        "regret_to_oracle": None if oracle is None else _share(oracle.hits - tally.hits, tally.demanded),
        "hit_rate_by_layer": [round(hits / (trace.steps * trace.top), 6) for hits in tally.layer_hits],
        "wall_s": one.wall_s,
        "refs_per_s": trace.turns * trace.layers * trace.top / one.wall_s,
        "conditions": _conditions(trace, scenario) | {"purse": _purse(one.policy.budget(scenario.budget))},
    }


def _purse(budget: PoolBudget) -> dict[str, float | None]:
    return {
        "mean": budget.mean,
        "burst": budget.burst,
        "saved": budget.saved,
        "threshold": budget.threshold,
        "margin": None if math.isinf(budget.margin) else budget.margin,
    }


def closed_percent(tally: Tally, lru: Tally | None, oracle: Tally | None) -> float | None:
    """(hits - LRU's) / (oracle's - LRU's), in per cent; None without both, or where they are equal."""
    if lru is None or oracle is None or oracle.hits == lru.hits:
        return None
    return round(100 * (tally.hits - lru.hits) / (oracle.hits - lru.hits), 3)


def _figures(tally: Tally, turns: int) -> dict[str, object]:
    used = tally.timely + tally.late
    blocks = _share(tally.hits, tally.demanded)
    reads = tally.issued - tally.cancelled + tally.misses
    return {
        "hit_rate": {
            "blocks": blocks,
            "tokens": blocks,
            "bytes": blocks,
            "mass": _share(tally.hit_mass, tally.mass),
        },
        "issued": tally.issued,
        "timely": tally.timely,
        "late": tally.late,
        "later": tally.later,
        "early": tally.early,
        "useless": tally.useless,
        "cancelled": tally.cancelled,
        "open": tally.open,
        "demand_misses": tally.misses,
        "accuracy": _share(used, tally.issued),
        "used_before_eviction": _share(used + tally.later, tally.issued),
        "coverage": _share(used, used + tally.misses),
        "prefetches_per_turn": round(tally.issued / turns, 6),
        "reads_per_turn": round(reads / turns, 6),
        "bytes_read_per_useful_byte": _share(reads, tally.misses + used + tally.later),
        "stall_s": round(tally.stall_s, 9),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 9) if whole else None


def _conditions(trace: AttentionTrace, scenario: AttentionScenario) -> dict[str, object]:
    pace = scenario.pace
    return {
        "trace": trace.name,
        "model": trace.model,
        "context_tokens": list(trace.context_tokens),
        "block_tokens": trace.block_tokens,
        "layers": trace.layers,
        "steps": trace.steps,
        "warm_turns": trace.warm_turns,
        "cold_blocks": trace.first_columns,
        "demanded_per_turn": trace.top,
        "capacity": scenario.capacity,
        "budget_per_turn": scenario.budget,
        "lookahead_layers": scenario.lookahead,
        "has_hints": scenario.lookahead in trace.lookaheads,
        "seed": scenario.seed,
        "pace": None
        if pace is None
        else {
            "step_s": pace.step_s,
            "layers_per_step": pace.layers_per_step,
            "block_bytes": pace.block_bytes,
            "hint_to_read_s": pace.hint_to_read_s,
            "device": pace.device.name,
            "bandwidth_bytes_per_s": pace.device.read_bytes_per_s,
            "latency_s": pace.device.read_latency_s,
            "source": pace.device.source,
        },
    }
