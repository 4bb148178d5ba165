"""Engines' KV events: how fast they are taken in, and what is known afterwards, beside Dynamo's indexer process.

Both sides are processes that subscribe to a vLLM-shaped publisher over ZeroMQ and answer ``POST /query`` over HTTP: `dpurt serve`
with an ``[[engine]]``, and ``python -m dynamo.indexer``. *Ingest*: messages encoded beforehand are published as fast as the
socket takes them; the time ends when a query shows the last prompt. The streams are what a busy vLLM sends: prompts computed
in chunks, decode (a block each of many requests a message), evictions (an event a block, many a message), and a mix of them.
The two sides take turns, each with messages of its own, and a turn begins when neither process has anything left to do: what
one puts off must not cost the other. All kinds of streams come in each round, so that as much goes as comes and the cache
stays at 100 to 200 thousand blocks. The peer's threads may use all cores, ours is one.

*Known*: after random parent-first streams the peer's answers are the oracle for ours. Then streams that both meet in the
field: children before their parents, hashes as bytes, events of an unknown type.
"""

from __future__ import annotations

import gc
import http.client
import importlib.metadata
import importlib.util
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import zmq

from dpurt.bench.live_node import LiveNode, Shape, live_node, node_conditions
from dpurt.bench.result import BenchResult, Figure
from dpurt.client.admin import ask
from dpurt.demo.interrupts import interrupts_held
from dpurt.wire import messages as m

SUMMARY = "engines' KV events taken in, and what is known of them, beside Dynamo's indexer process"
PEER = "ai-dynamo-runtime"
BLOCK = 16
VOCABULARY = 128_000
PATIENCE_S = 60.0
RUNNING = 512  # requests that decode at the same time
CPUCLOCK_SCHED = 2  # in the number of a process's clock
REST_S = 0.03  # with next to no use of the CPU: a process is done
Prompt = list[int]
Event = dict[str, Any]


# --- what an engine says ---------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """A prompt with its blocks' hashes."""

    tokens: Prompt = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class Script:
    """Makes the events of one engine. Hashes look like vLLM's: any 64 bits."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokens = _endless(lambda: rng.integers(0, VOCABULARY, 1 << 16).tolist())
        self._hashes = _endless(lambda: rng.integers(0, 2**64, 1 << 12, dtype=np.uint64).tolist())

    def grow(self, chain: Chain, blocks: int, **fields: Any) -> Event:
        """Blocks more at the end of a chain."""
        tokens, hashes = list(islice(self._tokens, blocks * BLOCK)), list(islice(self._hashes, blocks))
        parent = chain.hashes[-1] if chain.hashes else None
        chain.tokens += tokens
        chain.hashes += hashes
        return {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * blocks,
            "group_idx": 0, "kv_cache_spec_kind": "full_attention", **fields,
        }  # fmt: skip

    @staticmethod
    def evict(chain: Chain) -> Event:
        """The last block goes."""
        del chain.tokens[-BLOCK:]
        return {"type": "BlockRemoved", "block_hashes": [chain.hashes.pop()], "medium": "GPU", "group_idx": 0}


def _endless(some: Callable[[], list[int]]) -> Iterator[int]:
    while True:
        yield from some()


@dataclass
class Stream:
    """Messages to publish, and the prompt that is known when all of them are."""

    batches: list[list[Event]]
    blocks: int
    last: Prompt


def prefill(script: Script, chains: list[Chain], size: int) -> Stream:
    """`size` new prompts of 2,048 tokens, each computed in one chunk."""
    batches = []
    for _ in range(size):
        chains.append(Chain())
        batches.append([script.grow(chains[-1], 128)])
    return _ending(script, batches, size * 128)


def decode(script: Script, chains: list[Chain], size: int) -> Stream:
    """`size` messages of 32 requests, of those that run, that filled a block each."""
    running = chains[-RUNNING:]
    turns = [[running[(i * 32 + j) % len(running)] for j in range(32)] for i in range(size)]
    batches = [[script.grow(chain, 1) for chain in turn] for turn in turns]
    return _ending(script, batches, size * 32)


def evictions(script: Script, chains: list[Chain], size: int) -> Stream:
    """`size` messages of 32 blocks that went in the order of vLLM's free queue: one old request after the other, last blocks first."""
    going = _ends_of(chains)
    batches = [[script.evict(next(going)) for _ in range(32)] for _ in range(size)]
    chains[:] = [chain for chain in chains if chain.hashes]
    return _ending(script, batches, size * 32)


def _ends_of(chains: list[Chain]) -> Iterator[Chain]:
    """Each chain as often as blocks of it may go."""
    for chain in chains:
        for _ in range(len(chain.hashes)):
            yield chain


def scattered(script: Script, chains: list[Chain], size: int) -> Stream:
    """The same of many requests in turn, a block of each."""
    full = [chain for chain in chains if len(chain.hashes) > 64]
    batches = [[script.evict(full[(i * 32 + j) % len(full)]) for j in range(32)] for i in range(size)]
    return _ending(script, batches, size * 32)


def mixed(script: Script, chains: list[Chain], size: int) -> Stream:
    """A full cache under load: in each message a new prompt's chunk, 16 requests that decode, and what had to go for them."""
    batches = []
    for i in range(size):
        older = (chains[at] for at in range(len(chains) - 101, -1, -1))
        full = list(islice((chain for chain in older if len(chain.hashes) > 8), 200))
        gone = [script.evict(full[(i * 7 + j) % len(full)]) for j in range(32)]
        decoded = [script.grow(chains[-1 - (i + j) % 100], 1) for j in range(16)]
        chains.append(Chain())
        batches.append([*gone, script.grow(chains[-1], 32), *decoded])
    return _ending(script, batches, size * 80)


def _ending(script: Script, batches: list[list[Event]], blocks: int) -> Stream:
    """With a short prompt at the end that tells, when it is known, that all was read."""
    last = Chain()
    batches.append([script.grow(last, 2)])
    return Stream(batches, blocks + 2, last.tokens)


# --- the two sides ---------------------------------------------------------------------------------------------------


class Side:
    """A publisher, and the process that follows it."""

    def __init__(self, publisher: zmq.Socket[bytes], port: int, model: str, pid: int) -> None:
        self._publisher, self._model, self._pid = publisher, model, pid
        self._seq = 0
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def frames(self, batches: Sequence[Sequence[Event]]) -> list[list[bytes]]:
        """Encoded and numbered."""
        encoder = msgspec.msgpack.Encoder()
        made = []
        for batch in batches:
            payload = encoder.encode([time.time(), list(batch), 0])
            made.append([b"", self._seq.to_bytes(8, "big"), payload])
            self._seq += 1
        return made

    def publish(self, frames: Sequence[Sequence[bytes]]) -> None:
        """As fast as the socket takes it, and with little else for the CPU to do."""
        send, more = self._publisher.send, int(zmq.SNDMORE)
        for topic, number, payload in frames:
            send(topic, more), send(number, more), send(payload)

    def known(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that the engine holds, as this side knows it."""
        body = json.dumps({"token_ids": prompt, "model_name": self._model})
        try:
            self._http.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = json.loads(self._http.getresponse().read())
        except (http.client.HTTPException, OSError):
            self._http.close()  # a server that closes after each answer
            return 0
        scores = [score for ranks in answer.get("scores", {}).values() for score in ranks.values()]
        return max(scores, default=0)

    def wait(self, prompt: Prompt) -> None:
        """Until all of the prompt is known."""
        start = time.perf_counter()
        while self.known(prompt) < len(prompt):
            if time.perf_counter() > start + PATIENCE_S:
                raise RuntimeError(
                    f"{self._model}: {self.known(prompt)} of {len(prompt)} tokens are known after {PATIENCE_S} s"
                )
            time.sleep(max(0.005, (time.perf_counter() - start) / 10))  # questions cost the one asked

    def join(self) -> None:
        """Until the subscription is made: the first messages of a PUB may go nowhere."""
        script, limit = Script(0), time.perf_counter() + PATIENCE_S
        while time.perf_counter() < limit:
            chain = Chain()
            self.publish(self.frames([[script.grow(chain, 1)]]))
            time.sleep(0.1)
            if self.known(chain.tokens) == BLOCK:
                return
        raise RuntimeError(f"{self._model}: nothing that is published arrives")

    def ingest(self, stream: Stream) -> tuple[float, float]:
        """Seconds a block until the whole stream is known: of wall time, and of the process's CPU time."""
        frames = self.frames(stream.batches)
        start, busy = time.perf_counter(), self._cpu_s()
        self.publish(frames)
        self.wait(stream.last)
        return (time.perf_counter() - start) / stream.blocks, (self._cpu_s() - busy) / stream.blocks

    def rest(self) -> None:
        """Until its process has nothing left to do but to wait."""
        busy, limit = -1.0, time.perf_counter() + PATIENCE_S
        while (now := self._cpu_s()) - busy > REST_S / 30 and time.perf_counter() < limit:
            busy = now
            time.sleep(REST_S)

    def _cpu_s(self) -> float:
        """Of all its threads, by the clock that Linux keeps of each process: ``/proc`` counts in hundredths of a second."""
        return time.clock_gettime((~self._pid << 3) | CPUCLOCK_SCHED)


@contextmanager
def _publisher() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    publisher.bind("tcp://127.0.0.1:0")
    try:
        yield publisher, publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        context.destroy(linger=0)


@contextmanager
def ours() -> Iterator[tuple[Side, LiveNode]]:
    """`dpurt serve`, following one engine."""
    shape = Shape("bench", BLOCK, 1, 4096, 64)
    with _publisher() as (publisher, endpoint):
        tables = f'[[engine]]\nname = "1"\nkind = "vllm"\nspace = "bench"\nevents = ["{endpoint}"]\n[router]\nbind = "127.0.0.1:0"\n'
        with live_node([shape], tables=tables, prefetch=False) as node:
            stats: Any = ask(node.config.node.run_path, m.Stats(), m.StatsReply).stats
            yield Side(publisher, stats["routing"]["port"], "bench", stats["node"]["pid"]), node


@contextmanager
def peers() -> Iterator[Side]:
    """Dynamo's indexer process, following one engine, with its default number of threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _publisher() as (publisher, endpoint), tempfile.TemporaryFile() as log:
        command = [
            sys.executable,
            "-m",
            "dynamo.indexer",
            "--port",
            str(port),
            "--block-size",
            str(BLOCK),
            "--workers",
            f"1={endpoint}",
        ]
        started: list[subprocess.Popen[bytes]] = []
        try:
            with interrupts_held():
                started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
            _until_listening(port)
            yield Side(publisher, port, "default", started[0].pid)
        finally:
            for process in started:  # it keeps nothing that it would have to save
                process.kill()
                process.wait()


def _until_listening(port: int) -> None:
    limit = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < limit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the peer's indexer did not start")


# --- ingest ----------------------------------------------------------------------------------------------------------

STREAMS: dict[str, tuple[Callable[[Script, list[Chain], int], Stream], int]] = {
    "prefill, 128 blocks an event": (prefill, 160),
    "decode, 32 events of a block a message": (decode, 400),
    "evictions, 32 events of a block a message": (evictions, 850),
    "evictions, 32 of as many requests a message": (scattered, 240),
    "mix of the three": (mixed, 200),
}


def _ingest(mine: Side, theirs: Side, rounds: int, size: int) -> list[Figure]:
    sides = (mine, theirs)
    scripts, chains = [Script(1), Script(1)], [list[Chain](), list[Chain]()]
    for i, side in enumerate(sides):
        side.ingest(prefill(scripts[i], chains[i], 800))  # a cache that is in use
    spent: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {
        name: ([], []) for name in STREAMS
    }
    with _no_collector():
        for turn in range(rounds):
            for name, (make, share) in STREAMS.items():
                for i in (0, 1) if turn % 2 else (1, 0):
                    stream = make(scripts[i], chains[i], size * share // 100)
                    for side in sides:
                        side.rest()
                    spent[name][i].append(sides[i].ingest(stream))
    return [
        figure
        for name in STREAMS
        for figure in (
            _beside(f"ingest, {name}", *spent[name], 0, ">= 1x"),
            _beside("  the same, CPU time", *spent[name], 1, None),
        )
    ]


@contextmanager
def _no_collector() -> Iterator[None]:
    """Streams are millions of objects and none in a cycle: looking for one takes longer than all else here."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _beside(
    name: str,
    ours: list[tuple[float, float]],
    theirs: list[tuple[float, float]],
    which: int,
    target: str | None,
) -> Figure:
    """Wall (0): the median pair; or CPU time (1): all rounds together."""
    mine, peer = ([one[which] for one in side] for side in (ours, theirs))
    if which:
        ratio = sum(peer) / max(sum(mine), 1e-9)
    else:
        ratio = statistics.median(b / a for a, b in zip(mine, peer, strict=True))
    middle = statistics.mean if which else statistics.median
    return Figure(
        name=name, value=middle(mine) * 1e6, unit="us/block", peer=PEER, peer_value=middle(peer) * 1e6, ratio=ratio,
        target=target, holds=None if target is None else ratio >= 1,
    )  # fmt: skip


# --- what is known ---------------------------------------------------------------------------------------------------


def _oracle(mine: Side, theirs: Side, steps: int) -> Figure:
    """Random stores and evictions, parents first, the same for both; then every prompt, and parts and mixtures of them."""
    script, rng, chains, batches = Script(7), random.Random(7), [Chain()], list[list[Event]]()
    for _ in range(steps):
        chain = rng.choice(chains)
        if rng.random() < 0.3 and len(chain.hashes) > 1:
            batches.append([script.evict(chain)])
        elif rng.random() < 0.4:
            branch = Chain(chain.tokens[:], chain.hashes[:])
            chains.append(branch)
            batches.append([script.grow(branch, rng.randint(1, 4))])
        else:
            batches.append([script.grow(chain, rng.randint(1, 3))])
    last = Chain()
    batches.append([script.grow(last, 2)])
    for side in (mine, theirs):
        side.publish(side.frames(batches))
        side.wait(last.tokens)
    asked = [chain.tokens for chain in chains if chain.tokens]
    asked += [prompt[: rng.randint(1, len(prompt))] + [1] * BLOCK for prompt in asked]
    differ = sum(mine.known(prompt) != theirs.known(prompt) for prompt in asked)
    return Figure(
        name=f"prompts answered unlike the oracle, of {len(asked)}", value=differ, unit="prompts", peer=PEER,
        target="0", holds=differ == 0,
    )  # fmt: skip


def _in_the_field(mine: Side, theirs: Side) -> list[Figure]:
    """Streams that are not parent-first, or not of the peer's kind: blocks known of 64."""
    figures = []
    for name, make in (
        ("children before parents", _child_first),
        ("hashes as bytes", _byte_hashes),
        ("an unknown event in each message", _unknown),
    ):
        known = []
        for side in (mine, theirs):
            script, chain = Script(hash(name) % 1000), Chain()
            side.publish(side.frames(make(script, chain)))
            end = Chain()
            side.publish(side.frames([[script.grow(end, 1)]]))
            side.wait(end.tokens)
            known.append(side.known(chain.tokens) // BLOCK)
        figures.append(
            Figure(
                name=f"{name}, blocks known of 64", value=known[0], unit="blocks", peer=PEER, peer_value=known[1],
                target="64", holds=known[0] == 64,
            )
        )  # fmt: skip
    return figures


def _child_first(script: Script, chain: Chain) -> list[list[Event]]:
    events = [script.grow(chain, 4) for _ in range(16)]
    return [list(reversed(events))]


def _byte_hashes(script: Script, chain: Chain) -> list[list[Event]]:
    def wide(number: int | None) -> bytes | None:
        return None if number is None else number.to_bytes(32, "big")

    batches = []
    for _ in range(16):
        event = script.grow(chain, 4)
        event["block_hashes"] = [wide(one) for one in event["block_hashes"]]
        event["parent_block_hash"] = wide(event["parent_block_hash"])
        batches.append([event])
    return batches


def _unknown(script: Script, chain: Chain) -> list[list[Event]]:
    return [[{"type": "BlockTouched", "block_hashes": [1]}, script.grow(chain, 4)] for _ in range(16)]


def run(quick: bool) -> BenchResult:
    """Streams of some 20 to 70 thousand blocks, 25 rounds (quick: a fifth, 3 rounds)."""
    rounds, size = (3, 50) if quick else (25, 250)
    has_peer = importlib.util.find_spec("dynamo") is not None
    conditions: dict[str, object] = {
        **node_conditions(),
        "peer": f"{PEER} {importlib.metadata.version(PEER)}, python -m dynamo.indexer, default threads"
        if has_peer
        else "missing",
        "rounds": rounds,
        "ends": "when POST /query shows the last prompt whole; asked each time a tenth more has passed",
    }
    if not has_peer:
        missing = Figure(name="ingest", value="not run", unit="us/block", peer=PEER, target=">= 1x")
        return BenchResult(name="events", conditions=conditions, figures=[missing])
    with ours() as (mine, node), peers() as theirs:
        mine.join()
        theirs.join()
        figures = _ingest(mine, theirs, rounds, size)
        figures.append(_oracle(mine, theirs, 200 if quick else 1500))
        figures += _in_the_field(mine, theirs)
        stats: Any = ask(node.config.node.run_path, m.Stats(), m.StatsReply).stats
        conditions["lost_messages"] = stats["engines"]["ranks"]["1"]["lost"]
    return BenchResult(name="events", conditions=conditions, figures=figures)
