"""One policy over one trace on a virtual clock: a heap of events, the real prefetch core, modelled device,
staging and hosts.

The model. `hosts` GPU hosts prefill one request each, first come first served. A request uses its blocks in
prefix order:

- never stored: the host computes it (tokens / prefill rate); then it is stored and, room permitting, staged;
- in staging: the host loads it (bytes / link rate);
- on its way: the host waits for it, and what was a prefetch becomes a demand read;
- on the device only: a demand read, then the load. One block is asked for at a time.

After its last block the first token takes one decode step; the request finishes when its output is decoded,
which holds no host: at the time the trace recorded, if it did, else after one decode step a token. Blocks on
the device stay there for good. Blocks are all of one size, partial ones too.
Uses touch the eviction order when a request's prefill ends, tail first, so heads outlive tails; Belady's also
at each use. Writes cost reads nothing.

What ties exist are broken by the order of scheduling, and randomness (the device's latency tail) by the seed:
equal scenarios give equal results.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush

from dpurt.core.arbiter import Arbiter, Budget
from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.core.device_queue import DeviceQueue, Read
from dpurt.core.events import (
    Arrived,
    Consumed,
    Demanded,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    Owner,
    Staged,
    Stored,
    Where,
)
from dpurt.core.ledger import LEAD_BOUNDS_S, Ledger
from dpurt.core.predictor import Predictor
from dpurt.core.prefetch import CancelFetch, Fetch, PrefetchCore
from dpurt.replay.future import Future
from dpurt.replay.hits import capacity_blocks, untimed_hit_rates
from dpurt.replay.policies import Oracle, Policy, make_eviction, make_predictors
from dpurt.replay.report import Result, percentile, prefetch_figures
from dpurt.replay.slices import TimeSlice, TimeSlices
from dpurt.replay.staging import ReplayStaging
from dpurt.replay.trace import Request

OWNER = Owner("trace", "trace")
SOURCES = ("staging", "prefetched", "in_flight", "nvme", "recomputed")
HITS = SOURCES[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a replay depends on but trace and policy.

    The block is 512 tokens of a 70B GQA model in FP8 (160 KiB a token); the link is 200 Gb/s;
    `prefetch_share` is the part of staging that prefetch may hold unused; `hint_lead_s` how long before an engine has a
    request the router told of it: the trace's times are then those of the router. The first `warmup_share` of the requests
    runs like the rest but is not counted in rates and times; the ledger's figures and bytes read are of the whole.
    `as_node`: chains are touched, and predictors told what was stored, when a node does so: touched at arrival and finish,
    told block by block; not at the end of the prefill. `pauses_s`: what a host takes from having a block to asking for the next, and
    from its start to the first; one of these each time, by the seed, instead of the time the link takes.
    """

    staging_share: float = 0.05
    device: DeviceProfile = DEVICES["ai_ssd"]
    block_tokens: int = 512
    block_bytes: int = 512 * 160 * 1024
    hosts: int = 8
    prefill_tokens_per_s: float = 10_000.0
    link_bytes_per_s: float = 25e9
    decode_step_s: float = 0.03
    lookahead_blocks: int = 64  # as a node's
    prefetch_queue_depth: int = 4
    prefetch_share: float = 1.0
    hint_lead_s: float = 0.0
    min_probability: float = 0.02
    horizon_s: float = 120.0
    warmup_share: float = 0.0
    seed: int = 0
    as_node: bool = False
    pauses_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.staging_share <= 1 or not 0 <= self.prefetch_share <= 1:
            raise ValueError("staging_share must lie in (0, 1] and prefetch_share in [0, 1]")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share must lie in [0, 1), got {self.warmup_share}")
        if self.hint_lead_s < 0:
            raise ValueError(f"hint_lead_s must be >= 0, got {self.hint_lead_s}")
        if self.hosts < 1 or self.block_bytes < 1 or self.block_tokens < 1:
            raise ValueError("hosts, block_bytes and block_tokens must be >= 1")
        if min(self.prefill_tokens_per_s, self.link_bytes_per_s, self.decode_step_s) <= 0:
            raise ValueError("rates and decode_step_s must be > 0")


@dataclass(slots=True)
class _Turn:
    """One request on its way through a host. `time_slice` None: it belongs to the warm-up."""

    number: int
    request: Request
    matched: int
    time_slice: TimeSlice | None
    cursor: int = 0
    started_at: float = 0.0
    asked_at: float = 0.0


@dataclass(slots=True)
class _Counts:
    """What a run adds up."""

    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    references: int = 0
    reusable_at_match: int = 0
    at_match: int = 0
    leading_at_match: int = 0
    no_room: int = 0
    stall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=lambda: [0] * (len(LEAD_BOUNDS_S) + 1))


def replay(
    requests: Sequence[Request],
    policy: Policy,
    scenario: Scenario,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Run `policy` over the requests. `progress` is called with the number of requests arrived so far."""
    started = time.perf_counter()
    run = _Run(requests, policy, scenario)
    run.to_end(progress)
    wall_s = time.perf_counter() - started
    return run.result(wall_s)


class _Run:
    """The state of one replay; see the module's docstring for the model. It is the core's StagingView,
    too."""

    def __init__(self, requests: Sequence[Request], policy: Policy, scenario: Scenario) -> None:
        self.requests = requests
        self.policy = policy
        self.scenario = scenario
        self.capacity = capacity_blocks(requests, scenario.staging_share)
        self.counts = _Counts()
        self.slices = TimeSlices([r.timestamp_s for r in requests], scenario.warmup_share)
        self.device = DeviceQueue(scenario.device, scenario.seed)
        self.core: PrefetchCore | None = None
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], object]] = []
        self._scheduled = 0
        self._tick_at: float | None = None
        self._outbox: deque[Event] = deque()
        self._free_hosts = scenario.hosts
        self._queue: deque[_Turn] = deque()
        self._open_turns = 0
        self._service_s = 1.0
        self._stored: set[int] = set()
        self._reads: dict[int, Read] = {}  # by block: queued or in service
        self._read_of_job: dict[int, Read] = {}
        self._read_past: set[int] = set()  # blocks being read for which staging had no place
        self._asking: dict[int, list[_Turn]] = {}
        self._useful_reads = 0  # reads some host waited for, and prefetches used
        self._load_s = scenario.block_bytes / scenario.link_bytes_per_s
        self._random = random.Random(scenario.seed)
        self._recompute_s = scenario.block_tokens / scenario.prefill_tokens_per_s
        self._future = Future(requests) if policy.is_clairvoyant else None
        self._predictors = self._make_predictors()
        self._oracle: Oracle | None = None
        self._resident: Container[int] = ()
        if policy.eviction is not None:
            self._make_staging()
        if policy.predictors:
            self._make_core()

    # --- set-up

    def _make_predictors(self) -> list[Predictor]:
        scenario = self.scenario
        block_s = max(self._load_s, scenario.block_bytes / scenario.device.read_bytes_per_s)
        return make_predictors(self.policy, scenario.lookahead_blocks, block_s)

    def _make_staging(self) -> None:
        eviction = make_eviction(self.policy, self.capacity, self._future, self._predictors)
        future = self._future
        admit = (lambda b, v: future.next_use(b) < future.next_use(v)) if future else None
        self.staging = ReplayStaging(self.capacity, eviction, self._evicted, admit)
        self._resident = self.staging.resident

    def _make_core(self) -> None:
        scenario = self.scenario
        device = scenario.device
        budget = Budget(
            bandwidth_bytes_per_s=device.read_bytes_per_s,
            staging_bytes=int(self.capacity * scenario.prefetch_share) * scenario.block_bytes,
            queue_depth=scenario.prefetch_queue_depth,
            latency_s=device.read_latency_s,
            min_probability=scenario.min_probability,
        )
        arbiter = Arbiter(budget)
        predictors = self._predictors
        if self._future is not None:
            self._oracle = Oracle(self._future, self.staging, self.where, lambda: not arbiter.num_waiting)
            predictors.append(self._oracle)
        self.core = PrefetchCore(predictors, arbiter, Ledger(scenario.horizon_s), self)
        if not self.policy.is_clairvoyant:
            self.staging.protects = self.core.is_wanted

    # --- StagingView

    def where(self, block: int, parts_mask: int | None) -> Where:
        if block in self._resident:
            return "staging"
        if block in self._reads:
            return "in_flight"
        return "nvme" if block in self._stored else "gone"

    def record_bytes(self, block: int, parts_mask: int | None) -> int:
        return self.scenario.block_bytes

    def recompute_s(self, block: int) -> float | None:
        return self._recompute_s

    def demand_backlog_bytes(self) -> int:
        return self.device.demand_backlog_bytes

    def free_bytes(self) -> int:
        return self.staging.available * self.scenario.block_bytes

    def price(self, block: int, now: float) -> float:
        return self.staging.price(now)

    # --- the loop

    def to_end(self, progress: Callable[[int], None] | None) -> None:
        """Run until the last request has finished."""
        for number, request in enumerate(self.requests):
            self._run_until(request.timestamp_s)
            self._now = request.timestamp_s
            self._arrive(number, request)
            self._settle_core()
            if progress is not None:
                progress(number + 1)
        self._run_until(float("inf"))
        if self.core is not None:
            self.core.ledger.check_integrity()

    def _run_until(self, end: float) -> None:
        """All events before `end`; past the last arrival (end is infinite) only while a request is open."""
        heap, settle = self._heap, self._settle_core
        is_last = end == float("inf")
        while heap and heap[0][0] < end and (self._open_turns or not is_last):
            self._now, _, action, argument = heappop(heap)
            action(argument)
            settle()

    def _at(self, when: float, action: Callable[..., None], argument: object) -> None:
        self._scheduled += 1
        heappush(self._heap, (when, self._scheduled, action, argument))

    def _settle_core(self) -> None:
        """Tell the core what its commands, or a demand read, caused: never from inside those, where room is half made.
        Then see to it that it is woken in time."""
        core, outbox, now = self.core, self._outbox, self._now
        if core is None:
            return
        while outbox:
            commands = core.handle(outbox.popleft(), now)
            if commands:
                self._obey(commands)
        set_for = self._tick_at
        if set_for is not None and set_for <= now:
            return  # no tick can come before that
        wakeup = core.next_wakeup()
        if wakeup is not None and (set_for is None or wakeup < set_for):
            self._tick_at = max(wakeup, now)
            self._at(self._tick_at, self._tick, self._tick_at)

    def _tell(self, event: Event) -> None:
        """An event for the core, if there is one."""
        if self.core is not None:
            commands = self.core.handle(event, self._now)
            if commands:
                self._obey(commands)

    def _tick(self, when: float) -> None:
        if when != self._tick_at:
            return  # an earlier one was set since
        self._tick_at = None
        assert self.core is not None
        self._obey(self.core.tick(self._now))

    def _obey(self, commands: Sequence[Fetch | CancelFetch]) -> None:
        for command in commands:
            if isinstance(command, Fetch):
                self._fetch(command)
            else:
                self._cancel(command.job)
        self._start_reads()

    # --- requests

    def _arrive(self, number: int, request: Request) -> None:
        matched = self._match(request.blocks)
        turn = _Turn(number, request, matched, self.slices.of(number))
        self._count_match(turn)
        self._open_turns += 1
        lead_s = self.scenario.hint_lead_s
        ahead = 1 + len(self._queue) - self._free_hosts
        expected_start = self._now + lead_s + max(0, ahead) * self._service_s / self.scenario.hosts
        if self.scenario.as_node:
            self._touch(request.blocks[:matched])
        self._tell(Arrived(number, OWNER, request.blocks[:matched], expected_start))
        if lead_s:
            self._at(self._now + lead_s, self._enqueue, turn)
        else:
            self._enqueue(turn)

    def _enqueue(self, turn: _Turn) -> None:
        self._queue.append(turn)
        self._next_turn()

    def _count_match(self, turn: _Turn) -> None:
        if turn.time_slice is None:
            return
        blocks, counts = turn.request.blocks, self.counts
        counts.references += len(blocks)
        turn.time_slice.references += len(blocks)
        if turn.matched:
            present = sum(block in self._resident for block in blocks[: turn.matched])
            counts.reusable_at_match += turn.matched
            counts.at_match += present
            turn.time_slice.reusable += turn.matched
            turn.time_slice.at_match += present
            counts.leading_at_match += self.staging.leading(blocks)

    def _match(self, blocks: Sequence[int]) -> int:
        if self.policy.eviction is None:
            return 0
        return next((i for i, block in enumerate(blocks) if block not in self._stored), len(blocks))

    def _next_turn(self) -> None:
        while self._free_hosts and self._queue:
            self._free_hosts -= 1
            turn = self._queue.popleft()
            turn.started_at = self._now
            start = self._now + (self._pause() if self.scenario.pauses_s else 0.0)
            self._at(start, self._ask, turn)

    def _ask(self, turn: _Turn) -> None:
        """The host asks for the block at the cursor."""
        if turn.cursor == len(turn.request.blocks):
            self._prefilled(turn)
            return
        block = turn.request.blocks[turn.cursor]
        turn.asked_at = self._now
        self._used(block)
        if self.policy.eviction is None or block not in self._stored:
            tokens = self._count("recomputed", turn)
            self._at(self._now + tokens / self.scenario.prefill_tokens_per_s, self._computed, turn)
            return
        self._grown(turn)
        where = self.where(block, None)
        self._serve(turn, block, where)  # before the core may evict for a prefetch
        self._tell(Consumed(turn.number, turn.cursor, 1))
        self._tell(Demanded(block, turn.number, where))

    def _serve(self, turn: _Turn, block: int, where: Where) -> None:
        if where == "staging":
            is_first_use = self.staging.use(block)
            self._useful_reads += is_first_use
            self._count("prefetched" if is_first_use else "staging", turn)
            self._load(turn, block)
            return
        self._count(where, turn)
        self._asking.setdefault(block, []).append(turn)
        if where == "in_flight":
            self.device.promote(self._reads[block])
        else:
            self._read(Read(block, self.scenario.block_bytes, None, is_demand=True))
        self._start_reads()

    def _load(self, turn: _Turn, block: int) -> None:
        if turn.time_slice is not None:
            self.counts.stall_s += self._now - turn.asked_at
        if block in self.staging:
            self.staging.hold(block)
            self._at(self._now + self._pause(), self._loaded, turn)
        else:
            self._at(self._now + self._pause(), self._next_block, turn)  # read past a full staging

    def _pause(self) -> float:
        pauses = self.scenario.pauses_s
        return self._random.choice(pauses) if pauses else self._load_s

    def _loaded(self, turn: _Turn) -> None:
        self.staging.unhold(turn.request.blocks[turn.cursor])
        self._next_block(turn)

    def _computed(self, turn: _Turn) -> None:
        block = turn.request.blocks[turn.cursor]
        if self.policy.eviction is not None and block not in self._stored:
            self._stored.add(block)
            self._keep_computed(block)
            self._grown(turn)
        self._next_block(turn)

    def _grown(self, turn: _Turn) -> None:
        """The block at the cursor, which is stored, is the chain's from now on, if it was not."""
        if self.scenario.as_node and turn.cursor >= turn.matched:
            self._tell(Stored(turn.number, turn.request.blocks[turn.cursor : turn.cursor + 1]))

    def _touch(self, blocks: Sequence[int]) -> None:
        """Tail first."""
        if self.policy.eviction is not None:
            self.staging.policy.touch(reversed(blocks), self._now)

    def _keep_computed(self, block: int) -> None:
        if self.staging.reserve(block, self._now):
            self.staging.land(block, self._now, by_prefetch=False)
        else:
            self._not_kept(block)

    def _next_block(self, turn: _Turn) -> None:
        turn.cursor += 1
        self._ask(turn)

    def _used(self, block: int) -> None:
        """From now on a clairvoyant policy looks at the block's use after this one."""
        if self._future is not None:
            self._future.consumed(block)
            self.staging.policy.touch((block,), self._now)

    def _prefilled(self, turn: _Turn) -> None:
        first_token_at = self._now + self.scenario.decode_step_s
        if turn.time_slice is not None:
            self.counts.ttft_s.append(first_token_at - turn.request.timestamp_s)
        if not self.scenario.as_node:
            self._touch(turn.request.blocks)
            self._tell(Stored(turn.number, turn.request.blocks[turn.matched :]))
        self._at(self._end_of_decode(turn.request), self._finished, turn)
        self._service_s += 0.1 * (self._now - turn.started_at - self._service_s)
        self._free_hosts += 1
        self._next_turn()

    def _end_of_decode(self, request: Request) -> float:
        """As the trace recorded it, if it did: what comes next in it came after that."""
        if request.api_s is not None:
            return max(self._now, request.timestamp_s + request.api_s)
        return self._now + request.output_tokens * self.scenario.decode_step_s

    def _finished(self, turn: _Turn) -> None:
        self._open_turns -= 1
        if self.scenario.as_node:
            self._touch(turn.request.blocks)
        self._tell(Finished(turn.number, turn.request.stop))

    def _tokens(self, turn: _Turn) -> int:
        whole = self.scenario.block_tokens
        left = turn.request.input_tokens - turn.cursor * whole
        return whole if left >= whole else max(1, left)

    def _count(self, source: str, turn: _Turn) -> int:
        """The block at the cursor comes from there. Its tokens."""
        tokens = self._tokens(turn)
        if turn.time_slice is not None:
            if source in HITS:
                turn.time_slice.hits += 1
            self.counts.blocks[source] += 1
            self.counts.tokens[source] += tokens
        return tokens

    # --- reads

    def _fetch(self, command: Fetch) -> None:
        block, job = command.block, command.job
        if not self.staging.reserve(block, self._now):
            self._outbox.append(FetchFailed(job, "no_room"))
            self._not_kept(block)
            return
        read = Read(block, self.scenario.block_bytes, job, is_demand=False)
        self._reads[block] = self._read_of_job[job] = read
        self.device.submit(read)

    def _read(self, read: Read) -> None:
        """A demand read. Without room the host gets the bytes all the same and staging keeps nothing."""
        if not self.staging.reserve(read.block, self._now):
            self._read_past.add(read.block)
        self._reads[read.block] = read
        self.device.submit(read)

    def _cancel(self, job: int) -> None:
        read = self._read_of_job.get(job)
        if read is not None and self.device.cancel(read):
            self._end_read(read)
            self.staging.unreserve()
            self._outbox.append(FetchFailed(job, "cancelled"))

    def _start_reads(self) -> None:
        for done_at, read in self.device.start(self._now):
            self._at(done_at, self._read_done, read)

    def _end_read(self, read: Read) -> None:
        del self._reads[read.block]
        if read.job is not None:
            del self._read_of_job[read.job]

    def _read_done(self, read: Read) -> None:
        block, job = read.block, read.job
        self.device.complete(read)
        self._end_read(read)
        askers = self._asking.pop(block, None)
        if block in self._read_past:
            self._read_past.discard(block)
            self._not_kept(block)
        else:
            self.staging.land(block, self._now, by_prefetch=job is not None and not askers)
        if askers:
            self._serve_askers(askers, read)
        if job is not None:
            self._tell(Staged(block, job))
        self._start_reads()

    def _serve_askers(self, askers: Sequence[_Turn], read: Read) -> None:
        """Hosts waited for this read; if it was a prefetch, that is how late it was."""
        self._useful_reads += 1
        for turn in askers:
            self._load(turn, read.block)
            if read.job is not None:
                self.counts.waits[bisect_left(LEAD_BOUNDS_S, self._now - turn.asked_at)] += 1

    def _evicted(self, block: int) -> None:
        if self._oracle is not None:
            self._oracle.absent(block)
        if self.core is not None and self.core.heeds_eviction(block):
            self._outbox.append(Evicted(block))

    def _not_kept(self, block: int) -> None:
        """A stored block had no room in staging, or was not worth its victim."""
        self.counts.no_room += 1
        if self._oracle is not None:
            self._oracle.absent(block)

    # --- the result

    def result(self, wall_s: float) -> Result:
        """What was measured."""
        counts = self.counts
        references = max(1, counts.references)
        tokens = max(1, sum(counts.tokens.values()))
        hits = counts.blocks["staging"] + counts.blocks["prefetched"]
        token_hits = counts.tokens["staging"] + counts.tokens["prefetched"]
        return Result(
            policy=self.policy.name,
            # every block has the same bytes, so the rate in bytes is that in blocks
            hit_rate={"blocks": hits / references, "tokens": token_hits / tokens, "bytes": hits / references},
            at_match=counts.at_match / max(1, counts.reusable_at_match),
            leading_at_match=counts.leading_at_match / references,
            confidence=self.slices.confidence(),
            hits_by_slice=self.slices.hits(),
            reusable=1 - counts.blocks["recomputed"] / references,
            sources=dict(counts.blocks),
            untimed_prefix_hit_rate=self._untimed(self.policy.eviction),
            untimed_ideal_hit_rate=self._untimed("ideal"),
            bytes_read=self.device.bytes_read,
            no_room=counts.no_room,
            stall_s=counts.stall_s,
            ttft_p50_s=percentile(counts.ttft_s, 0.5),
            ttft_p99_s=percentile(counts.ttft_s, 0.99),
            wall_s=wall_s,
            refs_per_s=sum(len(request.blocks) for request in self.requests) / wall_s,
            conditions=self._conditions(),
            bytes_read_per_useful_byte=self._read_per_useful(),
            waits=counts.waits,
            **prefetch_figures(self.core),
        )

    def _untimed(self, eviction: str | None) -> float | None:
        if eviction is None or self.policy.eviction is None or self.policy.predictors:
            return None
        share = self.scenario.warmup_share
        return untimed_hit_rates(self.requests, eviction, self.capacity, warmup_share=share).blocks

    def _read_per_useful(self) -> float | None:
        """Reads some host used: those of demand, and prefetches used for the first time."""
        useful = self._useful_reads * self.scenario.block_bytes
        return self.device.bytes_read / useful if useful else None

    def _conditions(self) -> dict[str, object]:
        return {
            "requests": len(self.requests),
            "span_s": self.requests[-1].timestamp_s - self.requests[0].timestamp_s if self.requests else 0.0,
            "capacity_blocks": self.capacity,
            **asdict(self.scenario),
            "pauses_s": list(self.scenario.pauses_s),  # as it comes back from JSON
            "summary": self.policy.summary,
            "eviction": self.policy.eviction,
            "predictors": list(self.policy.predictors),
            "touch_order": f"tail first, {'at arrival and finish' if self.scenario.as_node else 'when a prefill ends'}",
            "reads_asked_ahead_per_request": 0,
            "writes": "not charged",
        }
