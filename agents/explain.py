"""Why blocks of a prompt are here or are not: what the index knows of each, and of those on flash whether to compute them is sooner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dpurt.wire import messages as m

from .index import IndexAgent
from .spaces import SpaceState
from .staging import StagingAgent

__all__ = ["explain"]


async def explain(
    index: IndexAgent, staging: StagingAgent, state: SpaceState, request: m.Explain, others: Sequence[SpaceState]
) -> list[m.Reason]:  # fmt: skip
    """A reason for each whole block. `others`: spaces whose blocks the asker may hear of."""
    reasons = await index.explain(state, request.tokens, request.digests, request.shard, others)
    here = list(itertools.takewhile(lambda reason: reason.reason == "present", reasons))
    unstaged = [reason for reason in here if "staging" not in reason.tiers]
    if unstaged:
        note = staging.break_even(state, len(here) - unstaged[0].block)
        for reason in unstaged:
            reason.detail += note
    return reasons
