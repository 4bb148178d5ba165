"""How well a predictor alone, without a cache, names what a layer will want: the share of its demand found, mean over layers.

A trace file has no masses under 2^-13, and in late layers part of the demand lies there: which blocks those were, and in what
order a predictor that saw them would name them, cannot be told. So beside the share (of the demanded blocks with a mass) there
is the least and the most it can have been with all masses known. Figures measured on masses before they were rounded lie between.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dpurt.core.attention import MASS_OF, NO_MASS
from dpurt.errors import ConfigError
from dpurt.replay import attention_policies as foresights
from dpurt.replay.attention_trace import AttentionTrace

Floats: TypeAlias = npt.NDArray[np.float64]
Pairs: TypeAlias = list[tuple[float, float]]

UNSEEN = float(MASS_OF[NO_MASS - 1])  # a block without a recorded mass had at most this


class SlowEwma(foresights.Ewma):
    """Of gain 0.05."""

    GAIN = 0.05


class FastEwma(foresights.Ewma):
    """Of gain 0.5."""

    GAIN = 0.5


PREDICTORS = {
    "previous_step": foresights.PreviousStep,
    "previous_layer": foresights.PreviousLayer,
    "ewma_0.05": SlowEwma,
    "ewma_0.5": FastEwma,
    "heavy_hitters": foresights.HeavyHitters,
    "snapkv": foresights.SnapKv,
    "next_block": foresights.NextBlock,
    "hint": foresights.HintedRanks,
}


class Share(NamedTuple):
    """Of the demand with a recorded mass; and the least and the most of all demand."""

    known: float
    least: float
    most: float


class Recall(NamedTuple):
    """Shares of the demand found: in blocks with as many guesses as demanded, and with twice as many. `mass`: what as many
    guesses as demanded have, of what the demand has (`most` may be over 1 by rounding)."""

    equal: Share
    twice: Share
    mass: Share


def recall(trace: AttentionTrace, name: str, lookahead: int = 1) -> Recall:
    """Over all scored steps, and the layers for which the predictor has anything to say.

    Raises ConfigError for an unknown predictor.
    """
    if name not in PREDICTORS:
        raise ConfigError("predictor", f"expected one of {', '.join(PREDICTORS)}, got {name!r}")
    predictor = PREDICTORS[name](trace, lookahead)
    sums = np.zeros((trace.layers, 3, 3, 2))  # equal, twice, mass; known, least, most; found, of
    for turn in range(trace.turns):
        for layer in range(trace.layers):
            table = predictor.table(turn, layer)
            if turn >= max(1, trace.warm_turns) and table.any():
                sums[layer] += _found(trace, turn, layer, table)
            predictor.values(turn, layer)
    found, of = sums[..., 0], sums[..., 1]
    is_judged = (of > 0).all(axis=(1, 2))
    if not is_judged.any():
        raise ConfigError("predictor", f"{name} has nothing to say on {trace.name}")
    shares = (found[is_judged] / of[is_judged]).mean(axis=0).tolist()
    return Recall(*(Share(*share) for share in shares))


def _found(trace: AttentionTrace, turn: int, layer: int, table: foresights.Floats) -> Floats:
    """(found, of) in blocks with as many guesses as demanded, with twice as many, in mass; each known, least, most."""
    order = np.argsort(-table, kind="stable")
    blocks, mass = _judged(trace, turn, layer, table, order[: trace.top])
    twice, _ = _judged(trace, turn, layer, table, order[: 2 * trace.top])
    return np.array([blocks, twice, mass])


def _judged(
    trace: AttentionTrace, turn: int, layer: int, table: foresights.Floats, guessed: npt.NDArray[np.intp]
) -> tuple[Pairs, Pairs]:
    """(found, of) of one turn in blocks and in mass; each known, least, most."""
    has_mass = trace.mass[turn, layer] > 0
    demand, mass = trace.demand[turn, layer][has_mass], trace.mass[turn, layer][has_mass]
    unseen = trace.top - len(demand)  # demanded, but nobody knows which
    scored = guessed[table[guessed] > 0]
    free = len(guessed) - len(scored)  # guesses that could be any block without a score
    by_order, sure = np.isin(demand, guessed), np.isin(demand, scored)
    lucky = np.flatnonzero(table[demand] <= 0)[:free]  # those of most mass
    hidden = min(unseen, free - len(lucky) + len(scored) - int(np.count_nonzero(sure)))
    masses, all_mass = trace.masses(turn, layer), float(mass.sum())
    held, luck = float(masses[scored].sum()), float(mass[lucky].sum())
    return (
        [
            (by_order.sum(), len(demand)),
            (sure.sum(), trace.top),
            (sure.sum() + len(lucky) + hidden, trace.top),
        ],
        [
            (float(masses[guessed].sum()), all_mass),
            (held, all_mass + unseen * UNSEEN),
            (held + luck + hidden * UNSEEN, all_mass + hidden * UNSEEN),
        ],
    )
