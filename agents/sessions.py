"""Sessions (one connected host) and scopes (one request of it): plain structures of the gateway.

A scope owns what a request holds: its leases (known to the staging agent by the scope's number), its reservations, and its
prefetches (known to the prefetch agent by the scope's sequence). Ending the scope ends them all, at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from dpurt.agents.spaces import SpaceState

NO_HANDLE = -1  # of a block that is not here


@dataclass(slots=True)
class Scope:
    """One request of one session. `handles` is the chain its prompt matched when last looked at."""

    number: int
    request: str
    state: SpaceState
    tokens: bytes | None
    digests: list[bytes] | None
    shard: int
    handles: NDArray[np.int64]
    opened_at: float
    used_at: float
    chained: bool = True  # else each of its digests stands alone, and `handles` has one for each, NO_HANDLE where it is not here
    prompt_bytes: int = 0
    priority: int = 0  # whose reads go first: the lower
    commits: set[trio.CancelScope] = field(default_factory=set)  # under way: they end with the scope

    @property
    def sequence(self) -> int:
        """The name the prefetch core knows it by."""
        return self.number

    def num_here(self, stop: int) -> int:
        """How many of its blocks before position `stop` were here: the prefetch core knows those only."""
        return int(np.count_nonzero(self.handles[:stop] != NO_HANDLE))

    @property
    def refs(self) -> list[int]:
        """Its chain's blocks that were here, as the other agents name them, in order."""
        return self.state.refs(self.handles[self.handles != NO_HANDLE].tolist(), self.shard)

    def is_continued_by(self, tokens: bytes | None, digests: list[bytes] | None, chained: bool) -> bool:
        """Is this prompt the scope's, or a longer or shorter form of it?"""
        if chained != self.chained:
            return False
        if tokens is not None and self.tokens is not None:
            shorter, longer = sorted((tokens, self.tokens), key=len)
            return longer.startswith(shorter)
        if digests is not None and self.digests is not None:
            return digests[: len(self.digests)] == self.digests[: len(digests)]
        return False

    def catch_up(self, handles: NDArray[np.int64]) -> list[int]:
        """What its prompt matches now, blocks stored meanwhile (by whomever) included; returns those that follow what it had."""
        if not self.chained:
            self.handles = handles
            return []
        known = len(self.handles)
        if len(handles) >= known:
            self.handles = handles
        more: list[int] = self.handles[known:].tolist()
        return more


@dataclass(slots=True)
class Served:
    """What the loads and stores of one host, or of one space, came to, in blocks and bytes. `blocks` == sum of the sources
    and misses.
    """

    lookups: int = 0
    blocks: int = 0
    staging: int = 0
    nvme: int = 0
    landing: int = 0  # found in the host's landing zone
    misses: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    stored: int = 0
    bytes_stored: int = 0
    not_stored: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """One host process, from its `hello` to its end."""

    number: int
    routing_id: bytes
    host: str
    fabric: str
    spaces: dict[str, SpaceState]
    served: Served
    last_seen: float
    key: str | None = None
    scopes: dict[str, Scope] = field(default_factory=dict)
    following: set[trio.CancelScope] = field(default_factory=set)  # waits for news of an index
    in_flight: int = 0
    prompt_bytes: int = 0
    ended: bool = False
