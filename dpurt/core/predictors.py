"""The predictors by name."""

from __future__ import annotations

from collections.abc import Callable

from dpurt.core.predictor import (
    AttentionEwma,
    AttentionLearned,
    AttentionPrevious,
    Hints,
    Predictor,
    SlidingWindow,
)
from dpurt.core.return_model import Forest
from dpurt.core.returns import Returns

__all__ = ["PREDICTORS", "make_predictor"]

PREDICTORS: dict[str, Callable[[int, Forest | None], Predictor]] = {
    "sliding_window": lambda lookahead, _prior: SlidingWindow(lookahead_blocks=lookahead),
    "hint": lambda _lookahead, _prior: Hints(),
    "attention_prev": lambda _lookahead, _prior: AttentionPrevious(),
    "attention_ewma": lambda _lookahead, _prior: AttentionEwma(),
    "attention": lambda _lookahead, _prior: AttentionLearned(),
    "cross_request": lambda _lookahead, prior: Returns(prior),
}


def make_predictor(name: str, lookahead_blocks: int, prior: Forest | None = None) -> Predictor:
    """A predictor by its name, with its usual settings. `prior`: what is known beforehand of conversations' returns.
    Raises KeyError for an unknown name."""
    return PREDICTORS[name](lookahead_blocks, prior)
