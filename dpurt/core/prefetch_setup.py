"""How a node's prefetch is put together from its settings. One place, so that the live node and the replay of a recording run
the same objects. Pure.

A predictor that is also an `Outlook` is the one eviction asks; pools and core share it, so predictors are made first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.core.arbiter import Arbiter, Budget, StagingView
from dpurt.core.eviction import Outlook
from dpurt.core.ledger import Ledger
from dpurt.core.predictor import Predictor, SlidingWindow
from dpurt.core.predictors import make_predictor
from dpurt.core.prefetch import PrefetchCore
from dpurt.core.return_model import Forest
from dpurt.core.returns import Returns

__all__ = ["PrefetchSetup", "outlook_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSetup:
    """Which predictors run, and the budget they compete for. Bytes are of staging, all pools together; `block_s` is the time a
    load takes per block until one is measured.
    """

    predictors: tuple[str, ...]
    block_s: float
    lookahead_blocks: int
    bandwidth_bytes_per_s: float
    staging_bytes: int
    queue_depth: int
    min_probability: float

    def make_predictors(self, prior: Forest | None) -> list[Predictor]:
        """New ones that have seen nothing, but know the prior."""
        return [self._make(name, prior) for name in self.predictors]

    def _make(self, name: str, prior: Forest | None) -> Predictor:
        if name == SlidingWindow.name:
            return SlidingWindow(self.lookahead_blocks, self.block_s)
        return make_predictor(name, self.lookahead_blocks, prior)

    def build(self, predictors: Sequence[Predictor], view: StagingView) -> PrefetchCore:
        """A new core around them."""
        budget = Budget(
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            staging_bytes=self.staging_bytes,
            queue_depth=self.queue_depth,
            min_probability=self.min_probability,
        )
        return PrefetchCore(predictors, Arbiter(budget), Ledger(), view)


def outlook_of(predictors: Sequence[Predictor]) -> Outlook | None:
    """The one of them that knows when blocks are wanted next, if any does."""
    return next((predictor for predictor in predictors if isinstance(predictor, Returns)), None)
