"""SGLang's prefetch policies as deadlines of our loads.

SGLang fetches a prefix from storage in batches of pages while the request waits in its queue, and decides by policy when it
stops waiting. A load that arrives later is thrown away, so its deadline at the node is what the policy leaves it, and the node
reads in that order:

- ``timeout`` (SGLang's default): base + per-1024-tokens, as SGLang itself counts;
- ``wait_complete``: the request waits for all of it, so only our own limit (`load_s`) ends it;
- ``best_effort``: the request goes on with what has landed when the scheduler picks it. Nobody knows when that is; a load gets
  `best_effort_s` at most, so that it does not hold host memory for a request that went on long ago.

Our own limit always holds too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBudget:
    """How long a batch of pages may take."""

    policy: Policy = "timeout"
    timeout_base_s: float = 1.0
    timeout_per_1024_tokens_s: float = 0.25
    best_effort_s: float = 1.0
    limit_s: float = 10.0

    def of(self, num_tokens: int) -> float:
        """Seconds for a batch of so many tokens."""
        return min(self.limit_s, self._by_policy(num_tokens))

    def _by_policy(self, num_tokens: int) -> float:
        if self.policy == "wait_complete":
            return self.limit_s
        if self.policy == "best_effort":
            return self.best_effort_s
        return self.timeout_base_s + self.timeout_per_1024_tokens_s * num_tokens / 1024
