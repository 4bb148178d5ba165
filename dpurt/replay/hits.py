"""The untimed prefix-hit rate: the statistic trace papers and other simulators publish, to check ours
against.

Requests are processed one after the other, each in no time: first the longest leading run of blocks in the
cache counts as hits, then all of the request's blocks are touched or inserted, head first. Belady passes over
blocks that never return. The rate is over all block references.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpurt.core.eviction import Belady, EvictionPolicy, make_policy
from dpurt.replay.future import Future
from dpurt.replay.trace import Request


def capacity_blocks(requests: Sequence[Request], share: float) -> int:
    """Blocks that make `share` of the trace's distinct ones; at least 1."""
    return max(1, int(len({block for request in requests for block in request.blocks}) * share))


def untimed_hit_rate(requests: Sequence[Request], eviction: str, capacity: int) -> float:
    """Hits / references of a demand cache of `capacity` blocks under `eviction` (a policy's name, or
    ``"belady"``)."""
    future = Future(requests)
    policy: EvictionPolicy = (
        Belady(future.next_use) if eviction == "belady" else make_policy(eviction, capacity)
    )
    cached: set[int] = set()
    hits = references = 0
    for request in requests:
        references += len(request.blocks)
        hits += _leading(request.blocks, cached)
        for block in request.blocks:
            future.consumed(block)
            _use(block, cached, policy, capacity, future if eviction == "belady" else None)
    return hits / references if references else 0.0


def ideal_hit_rate(requests: Sequence[Request]) -> float:
    """The rate of a cache that keeps everything: the ceiling of all others."""
    seen: set[int] = set()
    hits = references = 0
    for request in requests:
        references += len(request.blocks)
        hits += _leading(request.blocks, seen)
        seen.update(request.blocks)
    return hits / references if references else 0.0


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
