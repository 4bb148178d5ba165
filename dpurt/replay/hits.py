"""The untimed prefix-hit rate: the statistic trace papers and other simulators publish, to check ours
against.

Requests are processed one after the other, each in no time: first the longest leading run of blocks in the
cache counts as hits, then all of the request's blocks are touched or inserted, head first. Belady passes over
blocks that never return. The rate is over all block references, or over those after a warm-up.
"""

from __future__ import annotations

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
    use = _user(requests, eviction, capacity)
    cached: set[int] = set()
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
        for block in blocks:
            use(block, cached)
    return HitRates(hits / max(1, references), hit_tokens / max(1, tokens))


def _user(requests: Sequence[Request], eviction: str, capacity: int) -> Callable[[int, set[int]], None]:
    """What a use of a block does to the cache."""
    if eviction == "ideal":
        return lambda block, cached: cached.add(block)
    if eviction != "belady":
        policy = make_policy(eviction, capacity)
        return lambda block, cached: _use(block, cached, policy, capacity, None)
    future = Future(requests)
    belady = Belady(future.next_use)

    def use(block: int, cached: set[int]) -> None:
        future.consumed(block)
        _use(block, cached, belady, capacity, future)

    return use


def _leading(blocks: Sequence[int], cached: set[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))


def _use(block: int, cached: set[int], policy: EvictionPolicy, capacity: int, future: Future | None) -> None:
    """Touch a cached block or insert it; with a `future`, only while it returns and before a block that
    returns later."""
    returns_at = future.next_use(block) if future else 0.0
    if block in cached:
        policy.touch((block,), 0.0)
        return
    if returns_at == float("inf"):
        return
    if len(cached) >= capacity:
        victim = policy.victim(0.0)
        assert victim is not None, "nothing is held between requests"
        if future and future.next_use(victim) <= returns_at:
            return
        policy.remove(victim, evicted=True)
        cached.discard(victim)
    policy.insert(block, 0.0)
    policy.unhold(block)
    policy.touch((block,), 0.0)
    cached.add(block)
