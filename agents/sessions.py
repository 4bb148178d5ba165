"""Sessions (one connected host) and scopes (one request of it): plain structures of the gateway.

A scope owns what a request holds: its leases (known to the staging agent by the scope's number), its reservations, and its
prefetches (known to the prefetch agent by the scope's sequence). Ending the scope ends them all, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpurt.agents.spaces import SpaceState


@dataclass(slots=True)
class Scope:
    """One request of one session. `handles` is the chain its last lookup matched."""

    number: int
    request: str
    state: SpaceState
    tokens: bytes | None
    digests: list[bytes] | None
    shard: int
    handles: NDArray[np.int64]
    opened_at: float
    used_at: float

    @property
    def sequence(self) -> int:
        """The name the prefetch core knows it by."""
        return self.number

    def extend(self, stored: Sequence[tuple[int, int]]) -> None:
        """Blocks (position, handle) this scope stored: those that continue its chain can be loaded in it."""
        more: list[int] = []
        for position, handle in stored:
            if position == len(self.handles) + len(more):
                more.append(handle)
        if more:
            self.handles = np.concatenate([self.handles, np.array(more, np.int64)])


@dataclass(slots=True)
class HostCounters:
    """What one host's loads and stores came to, in blocks and bytes. `blocks` == sum of the sources and misses."""

    lookups: int = 0
    blocks: int = 0
    staging: int = 0
    nvme: int = 0
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
    counters: HostCounters
    last_seen: float
    scopes: dict[str, Scope] = field(default_factory=dict)
    in_flight: int = 0
    ended: bool = False
