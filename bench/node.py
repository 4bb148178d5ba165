"""The node's CPU time for control work: per block and per part, in batches of 64 blocks.

The node is `dpurt serve` in a process of its own on a memory bdev; a bare blocking DEALER sends it the messages, and the CPU
time of all its threads is read from /proc before and after. Three ways of a block:

- *staged load*: a load of 64 staged blocks and the release of its leases. No checksum is computed on this way.
- *flash load*: the same when none of the blocks is staged: 64 reads, then leases. Prefetch is off, so that each is a miss.
- *store*: reserve, commit and finish, with the write-behind to the bdev that follows. *On a full device* old segments are
  reclaimed at the same rate, and a tenth of the blocks written again: shown without a target.

Each is measured on several nodes, one after the other, of which the median counts; the conditions have them all.

Blocks have 4 KiB in 1 part or in 64, so both move the same bytes; what a part costs is the slope between the two. The time
of the checksums (and copies) a block needs is measured apart, with the same calls on the same sizes in this process, and
taken off; the conditions say how much it is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from dpurt.bench.live_node import BareHost, LiveNode, Shape, bare_host, live_node, node_conditions
from dpurt.bench.result import BenchResult, Figure
from dpurt.core.record import RecordLayout
from dpurt.demo.nodes import observe
from dpurt.wire import messages as m

SUMMARY = "the node's CPU time per block and per part, without checksums, in batches of 64"
BATCH = 64
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
PARTS = (1, 64)
BLOCK_TARGET_US, PART_TARGET_US = 50.0, 5.0
WARM_UP = 32
NODES = 3
_SETTLE_S = 0.2  # for writes that are behind


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a block through the node. `moved` counts what is not control work: (checksums of the header, of
    each part, copies of the record)."""

    name: str
    work: Callable[[BareHost, LiveNode, Shape], Iterator[None]]
    slots: int
    prefetch: bool
    flash_bytes: int
    moved: tuple[int, int, int]


def run(quick: bool) -> BenchResult:
    rounds = 60 if quick else 250
    conditions: dict[str, object] = {
        **node_conditions(),
        "batches": rounds,
        "nodes": NODES,
        "batch_blocks": BATCH,
    }
    result = BenchResult(name="node", conditions=conditions)
    for way in WAYS:
        result.figures += _figures(way, rounds, conditions)
    return result


def _figures(way: Way, rounds: int, conditions: dict[str, object]) -> list[Figure]:
    control_us = []
    for parts in PARTS:
        shape = Shape("s", BLOCK_TOKENS, parts, BLOCK_BYTES // parts, way.slots)
        measured = [_measure(way, shape, rounds) for _ in range(NODES)]
        all_in = [spent_us for spent_us, _ in measured]
        taken_off = _moving_us(measured[0][1], way.moved)
        conditions[f"{way.name}, {parts} parts"] = (
            f"{', '.join(f'{us:.1f}' for us in all_in)} us a block all in, {taken_off:.1f} us of it checksums and copies"
        )
        control_us.append(statistics.median(all_in) - taken_off)
    part_us = (control_us[1] - control_us[0]) / (PARTS[1] - PARTS[0])
    return [
        _figure(f"{way.name}: a block of one part", control_us[0], None if way is FULL else BLOCK_TARGET_US),
        _figure(f"{way.name}: each further part", part_us, None if way is FULL else PART_TARGET_US),
    ]


def _figure(name: str, value: float, limit: float | None) -> Figure:
    if limit is None:
        return Figure(name=name, value=value, unit="us")
    return Figure(name=name, value=value, unit="us", target=f"<= {limit:g} us", holds=value <= limit)


def _measure(way: Way, shape: Shape, rounds: int) -> tuple[float, RecordLayout]:
    """The node's CPU time per block, in microseconds."""
    with (
        live_node([shape], prefetch=way.prefetch, flash_bytes=way.flash_bytes) as node,
        bare_host(node) as host,
    ):
        batches = way.work(host, node, shape)
        for _ in itertools.islice(batches, WARM_UP):
            pass
        time.sleep(_SETTLE_S)
        before = observe(node.process.pid).cpu_s
        for _ in itertools.islice(batches, rounds):
            pass
        time.sleep(_SETTLE_S)
        spent_s = observe(node.process.pid).cpu_s - before
        return spent_s / rounds / BATCH * 1e6, RecordLayout.of(node.spaces()[shape.name])


# --- the ways ---


def _prompt(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 128_000, BATCH * BLOCK_TOKENS, dtype=np.int32).tobytes()


def _look_up(host: BareHost, shape: Shape, request: str, tokens: bytes) -> None:
    reply = host.ask(m.Lookup(id=2, space=shape.name, request=request, tokens=tokens))
    assert isinstance(reply, m.LookupReply), reply
    if reply.matched_blocks != BATCH:
        raise RuntimeError(f"{request} is not all there: {reply}")


def _load(host: BareHost, request: str, source: str) -> None:
    reply = host.ask(m.Load(id=3, request=request, first=0, count=BATCH))
    assert isinstance(reply, m.LoadReply), reply
    if any(grant.status != "ok" or grant.source != source for grant in reply.blocks):
        raise RuntimeError(f"{request}: not all from {source}: {reply.blocks}")
    host.tell(m.Release(leases=[grant.lease for grant in reply.blocks]))


def _staged_load(host: BareHost, node: LiveNode, shape: Shape) -> Iterator[None]:
    """The same prompt over and over."""
    node.store(shape.name, _prompt(0))
    _look_up(host, shape, "a", _prompt(0))
    while True:
        _load(host, "a", "staging")
        yield


def _flash_load(host: BareHost, node: LiveNode, shape: Shape) -> Iterator[None]:
    """More prompts in turn than staging has room for."""
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        node.store(shape.name, _prompt(i))
        time.sleep(_SETTLE_S)
        _look_up(host, shape, name, _prompt(i))
    for name in itertools.cycle(names):
        _load(host, name, "nvme")
        yield


def _store(host: BareHost, node: LiveNode, shape: Shape) -> Iterator[None]:
    """A new prompt each time. Nobody writes to the inbound region, so what is stored is zeroes."""
    crcs = [crc32c(bytes(shape.part_bytes))] * shape.num_parts
    for i in itertools.count():
        request = f"s{i}"
        reply = host.ask(
            m.Reserve(id=4, space=shape.name, request=request, first=0, count=BATCH, tokens=_prompt(i))
        )
        assert isinstance(reply, m.ReserveReply), reply
        blocks = [m.CommitBlock(reservation=one.reservation, crcs=crcs) for one in reply.blocks]
        done = host.ask(m.Commit(id=5, request=request, blocks=blocks))
        assert isinstance(done, m.CommitReply), done
        if any(status != "stored" for status in done.statuses):
            raise RuntimeError(f"{request} was not stored: {done.statuses}")
        host.tell(m.Hint(request=request, kind="finish"))
        yield


FULL = Way("store on a full device", _store, 4 * BATCH, True, 128 << 20, (1, 1, 2))
WAYS = (
    Way("staged load", _staged_load, 2 * BATCH, True, 256 << 20, (0, 0, 0)),
    Way("flash load", _flash_load, 2 * BATCH, False, 256 << 20, (1, 1, 1)),
    Way("store", _store, 4 * BATCH, True, 512 << 20, (1, 1, 2)),
    FULL,
)


# --- what is taken off ---


def _moving_us(layout: RecordLayout, moved: tuple[int, int, int]) -> float:
    """Time of the checksums and copies of one block."""
    headers, parts, copies = moved
    record, other = memoryview(bytearray(layout.record_bytes)), bytearray(layout.record_bytes)
    header, payload = record[: layout.header_bytes], layout.payload(record)
    pieces = [payload[a:b] for a, b in itertools.pairwise(layout.part_offsets)]

    def once() -> None:
        for _ in range(headers):
            crc32c(header)
        for _ in range(parts):
            for piece in pieces:
                crc32c(piece)
        for _ in range(copies):
            other[:] = record

    rounds = 2000
    once()
    start = time.perf_counter()
    for _ in range(rounds):
        once()
    return (time.perf_counter() - start) / rounds * 1e6
