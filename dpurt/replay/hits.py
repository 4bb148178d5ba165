"""The untimed prefix-hit rate: the statistic trace papers and other simulators publish, to check ours
against.

Requests are processed one after the other, each in no time: first the longest leading run of blocks in the cache counts
as hits; then all of the request's blocks are touched or inserted, and the cache is brought down to its capacity. Order
of touch and insertion is head first, for LFU tail first, so that of equally frequent blocks heads outlive tails. Belady
makes room block by block, head first, and passes over blocks that never return or return later than all it has. The
rate is over all block references, or over those after a warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpurt.core.eviction import Belady, EvictionPolicy, make_policy
from dpurt.replay.future import Future
from dpurt.replay.trace import Request


def capacity_blocks(requests: Sequence[Request], share: float) -> int:
    """Blocks that make `share` of the trace's distinct ones; at least 1."""
    return max(1, int(len({block for request in requests for block in request.blocks}) * share))


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hits over all block references, and the tokens of hit blocks over all prompt tokens."""

    blocks: float
    tokens: float


def untimed_hit_rate(requests: Sequence[Request], eviction: str, capacity: int) -> float:
    """Hits / references of a demand cache of `capacity` blocks under `eviction` (a policy's name, or
    ``"belady"``)."""
    return untimed_hit_rates(requests, eviction, capacity).blocks


def ideal_hit_rate(requests: Sequence[Request]) -> float:
    """The rate of a cache that keeps everything: the ceiling of all others."""
    return untimed_hit_rates(requests, "ideal", 1).blocks


def untimed_hit_rates(
    requests: Sequence[Request],
    eviction: str,
    capacity: int,
    *,
    warmup_share: float = 0.0,
    block_tokens: int = 512,
) -> HitRates:
    """Both rates, of the requests after the warm-up. `eviction` may also be ``"ideal"``: everything is kept."""
    cached: set[int] = set()
    use = _user(requests, eviction, capacity, cached)
    first_counted = int(len(requests) * warmup_share)
    hits = references = hit_tokens = tokens = 0
    for number, request in enumerate(requests):
        blocks = request.blocks
        if number >= first_counted:
            leading = _leading(blocks, cached)
            hits += leading
            references += len(blocks)
            hit_tokens += min(leading * block_tokens, request.input_tokens)
            tokens += min(len(blocks) * block_tokens, request.input_tokens)
        use(blocks)
    return HitRates(hits / max(1, references), hit_tokens / max(1, tokens))


def _user(
    requests: Sequence[Request], eviction: str, capacity: int, cached: set[int]
) -> Callable[[Sequence[int]], None]:
    """What a request's blocks do to the cache."""
    if eviction == "ideal":
        return cached.update
    if eviction == "belady":
        future = Future(requests)
        belady = Belady(future.next_use)
        return lambda blocks: _use_with_foresight(blocks, cached, belady, capacity, future)
    policy = make_policy(eviction, capacity)
    is_tail_first = eviction == "lfu"
    return lambda blocks: _use(blocks[::-1] if is_tail_first else blocks, cached, policy, capacity)


def _use(blocks: Sequence[int], cached: set[int], policy: EvictionPolicy, capacity: int) -> None:
    for block in blocks:
        if block not in cached:
            _insert(block, cached, policy)
        policy.touch((block,), 0.0)
    while len(cached) > capacity:
        _evict(cached, policy)


def _use_with_foresight(
    blocks: Sequence[int], cached: set[int], policy: Belady, capacity: int, future: Future
) -> None:
    for block in blocks:
        future.consumed(block)
        returns_at = future.next_use(block)
        if block in cached:
            policy.touch((block,), 0.0)
        elif returns_at != math.inf and _has_room(returns_at, cached, policy, capacity, future):
            _insert(block, cached, policy)


def _has_room(returns_at: float, cached: set[int], policy: Belady, capacity: int, future: Future) -> bool:
    """A free place, or one made by evicting a block that returns later."""
    if len(cached) < capacity:
        return True
    victim = policy.victim(0.0)
    assert victim is not None, "nothing is held between requests"
    if future.next_use(victim) <= returns_at:
        return False
    _evict(cached, policy)
    return True


def _insert(block: int, cached: set[int], policy: EvictionPolicy) -> None:
    policy.insert(block, 0.0)
    policy.unhold(block)
    cached.add(block)


def _evict(cached: set[int], policy: EvictionPolicy) -> None:
    victim = policy.victim(0.0)
    assert victim is not None, "nothing is held between requests"
    policy.remove(victim, evicted=True)
    cached.discard(victim)


def _leading(blocks: Sequence[int], cached: set[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
