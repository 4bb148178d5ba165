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
from dpurt.core.returns import LONGEST_WINDOW_S, Returns

__all__ = ["PREDICTORS", "make_predictor"]

PREDICTORS: dict[str, Callable[[int, Forest | None, float], Predictor]] = {
    "sliding_window": lambda lookahead, _prior, _window_s: SlidingWindow(lookahead_blocks=lookahead),
    "hint": lambda _lookahead, _prior, _window_s: Hints(),
    "attention_prev": lambda _lookahead, _prior, _window_s: AttentionPrevious(),
    "attention_ewma": lambda _lookahead, _prior, _window_s: AttentionEwma(),
    "attention": lambda _lookahead, _prior, _window_s: AttentionLearned(),
    "cross_request": lambda _lookahead, prior, window_s: Returns(prior, window_s),
}


def make_predictor(
    name: str, lookahead_blocks: int, prior: Forest | None = None, window_s: float = LONGEST_WINDOW_S
) -> Predictor:
    """A predictor by its name, with its usual settings. `prior`: what is known beforehand of conversations' returns;
    `window_s`: how far ahead these count in full. Raises KeyError for an unknown name."""
    return PREDICTORS[name](lookahead_blocks, prior, window_s)
