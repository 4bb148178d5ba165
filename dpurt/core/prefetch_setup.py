"""How a node's prefetch core is put together from its settings. One place, so that the live node, its shadow and the replay of
a recording run the same objects. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpurt.core.arbiter import Arbiter, Budget, StagingView
from dpurt.core.ledger import Ledger
from dpurt.core.predictor import make_predictor
from dpurt.core.prefetch import PrefetchCore

__all__ = ["PrefetchSetup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSetup:
    """Which predictors run, and the budget they compete for. Bytes are of staging, all pools together."""

    predictors: tuple[str, ...]
    lookahead_blocks: int
    bandwidth_bytes_per_s: float
    staging_bytes: int
    queue_depth: int
    min_probability: float

    def build(self, view: StagingView) -> PrefetchCore:
        """A new core that has seen nothing."""
        budget = Budget(
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            staging_bytes=self.staging_bytes,
            queue_depth=self.queue_depth,
            min_probability=self.min_probability,
        )
        predictors = [make_predictor(name, self.lookahead_blocks) for name in self.predictors]
        return PrefetchCore(predictors, Arbiter(budget), Ledger(), view)
