"""Routing replayed: real traces over eight modelled hosts, beside round robin and beside one big cache.

Question: does the router send requests to who holds their prefix, without sending all of them to one host, and how long does a
decision take? The decision is the node's own code (`HeldBlocks.leading`, then `Router.rank` and `book`) on prompts of real length,
made of tokens that stand for the trace's block ids; what hosts hold is entered as their engines' events would. Hosts are a
model: a cache of blocks, and a queue that computes what is not cached at a fixed rate, and tells of it in chunks of 8,192
tokens. *Reuse* is of leading cached blocks, as a share of what one cache for all hosts would give, which no routing can beat.
*Load* is what a host was given, in prompt tokens: its coefficient of variation (CV) over the hosts. Round robin sees the same
requests at the same times. Each trace is replayed several times, with the same decisions, each timed by the clock and in CPU
time. The target is for the p99 of them all. A machine with other work takes the core away for milliseconds: beside it stands the
p99 of what each decision took in the median, which has no such pauses in it.

Traces are the slices in `bench/traces`; whole ones are taken where the folder named in `DPURT_TRACES` has them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from dpurt.bench.result import BenchResult, Figure
from dpurt.core.routing import Estimate, Holding, Router
from dpurt.engines import KINDS
from dpurt.engines.kv_events import BlockRemoved, BlockStored
from dpurt.engines.residency import Engine, Residency
from dpurt.replay.trace import MOONCAKE_BLOCK_TOKENS, Request, read_mooncake

SUMMARY = "routing over eight modelled hosts: reuse, balance and the time of a decision, beside round robin"
SLICES = Path(__file__).parent / "traces"
TRACES = {
    "conversation": ("mooncake_conversation.jsonl.gz", "mooncake_conversation_1600.jsonl.gz"),
    "agent": ("weka_merged_512.jsonl.gz", "weka_merged_512_300.jsonl.gz"),
}
HOSTS = 8
PREFILL_TOKENS_PER_S = 8192.0
CPU_TOKENS_PER_S = 200_000.0
WIDTH = 4 * MOONCAKE_BLOCK_TOKENS
CHUNK_BLOCKS = 8_192 // MOONCAKE_BLOCK_TOKENS  # computed, and told, at once
PAUSE_S = 0.1  # between two arrivals: time for a node to read what it was told
TIMES = 5  # a trace is replayed, for the time of its decisions
SMALL_SHARE = 0.25  # of the trace's distinct blocks, in each host, where caches are bounded


@dataclass
class Outcome:
    """What became of a trace under one way of routing."""

    hits: int = 0
    given: list[int] = field(default_factory=lambda: [0] * HOSTS)  # prompt blocks by host
    chosen: list[int] = field(default_factory=list)  # hosts, by request
    ready_s: list[float] = field(default_factory=list)
    decisions_s: list[float] = field(default_factory=list)
    decisions_cpu_s: list[float] = field(default_factory=list)

    @property
    def load_cv(self) -> float:
        return statistics.pstdev(self.given) / statistics.mean(self.given)


class Fleet:
    """Eight hosts that keep what they computed, and their engines' events as a node takes them in."""

    def __init__(self, capacity: int | None) -> None:
        engine = Engine(dialect=KINDS["vllm"].dialect, block_tokens=MOONCAKE_BLOCK_TOKENS)
        self.known = [Residency(engine) for _ in range(HOSTS)]
        self._capacity = capacity
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(HOSTS)]  # by use

    def serve(self, host: int, request: Request, prompt: bytes) -> int:
        """The host computes the request, and then holds its prompt; how many leading blocks it had."""
        held = self._held[host]
        had = next((i for i, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        for at in range(had, len(request.blocks), CHUNK_BLOCKS):
            new: list[int | bytes] = list(request.blocks[at : at + CHUNK_BLOCKS])
            tokens = np.frombuffer(prompt[at * WIDTH : (at + len(new)) * WIDTH], np.int32).tolist()
            told, above = msgspec.Raw(msgspec.msgpack.encode(tokens)), request.blocks[at - 1] if at else None
            self.known[host].apply([BlockStored(new, above, told, MOONCAKE_BLOCK_TOKENS, medium="GPU")])
        for block in reversed(request.blocks):  # the first ones stay longest
            held[block] = None
            held.move_to_end(block)
        while self._capacity is not None and len(held) > self._capacity:
            self.known[host].apply([BlockRemoved([held.popitem(last=False)[0]], "GPU")])
        return had

    def pause(self) -> None:
        """No message comes for a while: a node reads ahead."""
        for known in self.known:
            while known.held.read_ahead(1 << 10):
                pass


def prompts(requests: Sequence[Request]) -> Callable[[Request], bytes]:
    """Token bytes for a request: each block id stands for a block of tokens of its own."""
    known: dict[int, bytes] = {}

    def tokens(request: Request) -> bytes:
        for block in request.blocks:
            if block not in known:
                known[block] = (block + 1).to_bytes(4, "little") * (WIDTH // 4)
        return b"".join([known[block] for block in request.blocks])

    return tokens


def replayed(requests: Sequence[Request], capacity: int | None, *, round_robin: bool) -> Outcome:
    """The whole trace, at its own times."""
    fleet, router, outcome, tokens = Fleet(capacity), Router(), Outcome(), prompts(requests)
    names = [f"host-{i}" for i in range(HOSTS)]
    for name in names:
        router.add(name, PREFILL_TOKENS_PER_S, CPU_TOKENS_PER_S)
    for turn, request in enumerate(requests):
        if turn and request.timestamp_s - requests[turn - 1].timestamp_s > PAUSE_S:
            fleet.pause()
        prompt, now = tokens(request), request.timestamp_s
        size = len(request.blocks) * MOONCAKE_BLOCK_TOKENS
        start, busy = time.perf_counter(), time.thread_time()
        ranked = _ranked(fleet, router, names, prompt, size, now)
        chosen = (
            next(one for one in ranked if one.engine == names[turn % HOSTS]) if round_robin else ranked[0]
        )
        router.book(chosen, size, now)
        outcome.decisions_cpu_s.append(time.thread_time() - busy)
        outcome.decisions_s.append(time.perf_counter() - start)
        host = names.index(chosen.engine)
        outcome.hits += fleet.serve(host, request, prompt)
        outcome.given[host] += len(request.blocks)
        outcome.chosen.append(host)
        outcome.ready_s.append(chosen.ready_s)
    return outcome


def _ranked(
    fleet: Fleet, router: Router, names: Sequence[str], prompt: bytes, size: int, now: float
) -> list[Estimate]:
    leading = [known.held.leading(None, prompt) for known in fleet.known]
    holdings = [
        Holding(name, one.hbm * MOONCAKE_BLOCK_TOKENS, one.both * MOONCAKE_BLOCK_TOKENS)
        for name, one in zip(names, leading, strict=True)
    ]
    return router.rank(size, holdings, now)


def one_big_cache(requests: Sequence[Request]) -> int:
    """Leading blocks that one cache without bounds would have had."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return hits


def _figures(name: str, requests: Sequence[Request]) -> list[Figure]:
    ideal = one_big_cache(requests)
    distinct = len({block for request in requests for block in request.blocks})
    again = [replayed(requests, None, round_robin=False) for _ in range(TIMES)]
    ours, theirs = again[0], replayed(requests, None, round_robin=True)
    assert all(one.chosen == ours.chosen for one in again), "the same requests are routed alike"
    small = int(distinct * SMALL_SHARE)
    bounded = [replayed(requests, small, round_robin=flag) for flag in (False, True)]
    wall = _medians([one.decisions_s for one in again])
    cpu = _medians([one.decisions_cpu_s for one in again])
    everything = [one for outcome in again for one in outcome.decisions_s]
    share = ours.hits / ideal
    peer = "round robin"
    return [
        Figure(
            name=f"{name}: reuse, of one big cache's", value=share, unit="", peer=peer, peer_value=theirs.hits / ideal,
            ratio=ours.hits / max(theirs.hits, 1), target=">= 0.95", holds=share >= 0.95,
        ),
        Figure(
            name=f"{name}: load, CV over hosts", value=ours.load_cv, unit="", peer=peer, peer_value=theirs.load_cv,
            target="< 0.3", holds=ours.load_cv < 0.3,
        ),
        Figure(
            name=f"{name}: a decision, p99", value=_p99_ms(everything), unit="ms", target="< 1 ms",
            holds=_p99_ms(everything) < 1,
        ),
        Figure(name=f"{name}: p99 of each one's median", value=_p99_ms(wall), unit="ms"),
        Figure(name=f"{name}: the same, CPU time", value=_p99_ms(cpu), unit="ms"),
        Figure(name=f"{name}: a decision, median", value=statistics.median(wall) * 1e3, unit="ms"),
        Figure(
            name=f"{name}: modelled time to first token, mean", value=statistics.mean(ours.ready_s), unit="s", peer=peer,
            peer_value=statistics.mean(theirs.ready_s), ratio=statistics.mean(theirs.ready_s) / statistics.mean(ours.ready_s),
        ),
        Figure(
            name=f"{name}: reuse, each cache {SMALL_SHARE:.0%} of the blocks", value=bounded[0].hits / ideal, unit="",
            peer=peer, peer_value=bounded[1].hits / ideal, ratio=bounded[0].hits / max(bounded[1].hits, 1),
        ),
        Figure(name=f"{name}: load CV, so bounded", value=bounded[0].load_cv, unit="", peer=peer, peer_value=bounded[1].load_cv),
    ]  # fmt: skip


def _medians(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each decision over all replays."""
    return [statistics.median(one) for one in zip(*times, strict=True)]


def _p99_ms(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98] * 1e3


def _trace(whole: str, part: str) -> Path:
    folder = os.environ.get("DPURT_TRACES")
    found = Path(folder) / whole if folder else SLICES / part
    return found if found.is_file() else SLICES / part


def run(quick: bool) -> BenchResult:
    """Both traces (quick: their first 200 requests), each `TIMES` times."""
    result = BenchResult(
        name="route",
        conditions={
            "hosts": f"{HOSTS}, modelled: a cache without bounds where not said otherwise, {PREFILL_TOKENS_PER_S:.0f} tokens/s",
            "block_tokens": MOONCAKE_BLOCK_TOKENS,
            "big_cache": "without bounds",
            "load": float(Path("/proc/loadavg").read_text().split()[0]),
        },
    )
    for name, files in TRACES.items():
        path = _trace(*files)
        requests = list(read_mooncake(path, limit=200 if quick else None))
        result.conditions[name] = f"{path.name}, {len(requests)} requests"
        result.figures += _figures(name, requests)
    return result
