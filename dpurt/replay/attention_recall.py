"""How well a predictor alone, without a cache, names what a layer will want: the share of its demand found.

Only demanded blocks with any recorded mass count: the others are ties, see `dpurt.replay.attention_trace`. Published
figures from masses before they were rounded are 1 to 3 points higher.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpurt.errors import ConfigError
from dpurt.replay import attention_policies as foresights
from dpurt.replay.attention_trace import AttentionTrace

PREDICTORS = {
    "previous_step": foresights.PreviousStep,
    "previous_layer": foresights.PreviousLayer,
    "ewma": foresights.Ewma,
    "heavy_hitters": foresights.HeavyHitters,
    "snapkv": foresights.SnapKv,
    "next_block": foresights.NextBlock,
    "hint": foresights.HintedRanks,
}


class Recall(NamedTuple):
    """Shares of the demand found: in blocks with as many guesses as demanded, with twice as many, and in mass."""

    equal: float
    twice: float
    mass: float


def recall(trace: AttentionTrace, name: str, lookahead: int = 1) -> Recall:
    """Over all scored steps, and the layers for which the predictor has anything to say.

    Raises ConfigError for an unknown predictor.
    """
    if name not in PREDICTORS:
        raise ConfigError("predictor", f"expected one of {', '.join(PREDICTORS)}, got {name!r}")
    predictor = PREDICTORS[name](trace, lookahead)
    found = np.zeros(5)  # equal, twice, mass found, mass, blocks
    for turn in range(trace.turns):
        for layer in range(trace.layers):
            table = predictor.table(turn, layer)
            if turn >= max(1, trace.warm_turns) and table.any():
                found += _found(trace, turn, layer, table)
            predictor.values(turn, layer)
    equal, twice, mass, all_mass, blocks = found
    if not blocks:
        raise ConfigError("predictor", f"{name} has nothing to say on {trace.name}")
    return Recall(equal / blocks, twice / blocks, mass / all_mass)


def _found(trace: AttentionTrace, turn: int, layer: int, table: foresights.Floats) -> tuple[float, ...]:
    order = np.argsort(-table, kind="stable")
    has_mass = trace.mass[turn, layer] > 0
    demand, mass = trace.demand[turn, layer][has_mass], trace.mass[turn, layer][has_mass]
    first = np.isin(demand, order[: trace.top])
    twice = np.isin(demand, order[: 2 * trace.top])
    sums = (first.sum(), twice.sum(), mass[first].sum(), mass.sum(), len(demand))
    return tuple(float(value) for value in sums)
