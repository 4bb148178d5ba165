"""GPU hosts for the live experiment: they behave as the replay's hosts do (`dpurt.replay.engine`), but on a real clock, over
ZeroMQ, with real bytes.

`hosts` of them prefill one request each, first come first served. A request uses its blocks in prefix order: one never stored is
computed (a pause of `compute_s`) and stored while the next is under way; one that was is loaded, alone, and every byte of it
compared. After the last block the output is decoded, which holds no host, and the request finishes with its stop reason.

They are a process of their own, ``python -m dpurt.bench.live_hosts JOB.json``; what they saw is written where the job says.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from dpurt.client import Client, connect
from dpurt.config import load_config
from dpurt.core.identity import ROOT_KEY, Space, chain_keys
from dpurt.demo.content import payload_of, tokens_of
from dpurt.replay.trace import Request
from dpurt.runtime.paced_clock import PacedClock

__all__ = ["Heard", "Job", "LiveHosts", "Pace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the hosts work, in real seconds."""

    hosts: int
    compute_s: float  # a block
    decode_step_s: float


@dataclass(slots=True)
class Heard:
    """What the hosts saw. `staged_load_s`: of each load that found its block in staging."""

    loaded: int = 0
    computed: int = 0
    not_ok: dict[str, int] = field(default_factory=dict)
    not_stored: dict[str, int] = field(default_factory=dict)
    wrong_bytes: int = 0
    checked_bytes: int = 0
    staged_load_s: list[float] = field(default_factory=list)
    late_s: float = 0.0  # the most an arrival was behind its time


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process has to do. Times are on its clock, which runs `speed` times faster."""

    topology: str
    endpoint: str
    host: str
    space: str
    speed: float
    patience_s: float
    pace: Pace
    requests: list[Request]
    result: str


class LiveHosts:
    """Plays requests whose times are real seconds from now. One client, as many tasks as requests run."""

    def __init__(self, client: Client, name: str, space: Space, pace: Pace) -> None:
        self._client = client
        self._name = name
        self._space = space
        self._pace = pace
        self._fingerprint = space.fingerprint()
        self._hosts = trio.CapacityLimiter(pace.hosts)
        self._stored: set[int] = set()
        self.heard = Heard()

    async def play(self, requests: Sequence[Request]) -> Heard:
        """All of them, to the end of the last one's prefill; decodes still under way are cut short."""
        began = trio.current_time()
        async with trio.open_nursery() as decoding:
            async with trio.open_nursery() as nursery:
                for number, request in enumerate(requests):
                    await trio.sleep_until(began + request.timestamp_s)
                    behind = trio.current_time() - began - request.timestamp_s
                    self.heard.late_s = max(self.heard.late_s, behind)
                    nursery.start_soon(self._serve, f"r{number}", request, decoding)
            decoding.cancel_scope.cancel()
        return self.heard

    async def _serve(self, name: str, request: Request, decoding: trio.Nursery) -> None:
        geometry = self._space.geometry
        tokens = tokens_of(request.blocks, geometry.block_tokens)
        await self._client.lookup(self._name, name, tokens)
        keys = chain_keys(self._fingerprint, ROOT_KEY, tokens, geometry.block_token_bytes)
        async with self._hosts, trio.open_nursery() as nursery:
            post, computed = trio.open_memory_channel[int](math.inf)
            nursery.start_soon(self._store_all, name, request, keys, computed)
            async with post:
                for at, block in enumerate(request.blocks):
                    if block not in self._stored or not await self._load(name, at, keys[at]):
                        await trio.sleep(self._pace.compute_s)
                        self.heard.computed += 1
                        post.send_nowait(at)
        decoding.start_soon(self._decode, name, request)

    async def _decode(self, name: str, request: Request) -> None:
        await trio.sleep(request.output_tokens * self._pace.decode_step_s)
        await self._client.finish(name, request.stop or "end_turn")

    async def _load(self, name: str, at: int, key: bytes) -> bool:
        size = self._space.geometry.payload_bytes
        buffer = memoryview(bytearray(size))
        asked = trio.current_time()
        [block] = await self._client.load(name, at, [buffer])
        if not block.is_ok:
            self.heard.not_ok[block.status] = self.heard.not_ok.get(block.status, 0) + 1
            return False
        if block.source == "staging":
            self.heard.staged_load_s.append(trio.current_time() - asked)
        self.heard.loaded += 1
        self.heard.checked_bytes += size
        self.heard.wrong_bytes += 0 if buffer == payload_of(key, size) else size
        return True

    async def _store_all(
        self, name: str, request: Request, keys: Sequence[bytes], computed: trio.MemoryReceiveChannel[int]
    ) -> None:
        """Blocks as they are computed, in order: a block's parent is there before it."""
        size = self._space.geometry.payload_bytes
        async for at in computed:
            [status] = await self._client.store(self._name, name, None, at, [payload_of(keys[at], size)])
            if status in ("stored", "exists"):
                self._stored.add(request.blocks[at])
            else:
                self.heard.not_stored[status] = self.heard.not_stored.get(status, 0) + 1


async def _main(job: Job) -> Heard:
    space = load_config(job.topology).to_space(job.space)
    async with connect(
        job.endpoint, host=job.host, spaces={job.space: space}, fabrics=["shm"], timeout_s=job.patience_s
    ) as client:
        return await LiveHosts(client, job.space, space, job.pace).play(job.requests)


if __name__ == "__main__":
    the_job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    heard = trio.run(_main, the_job, clock=PacedClock(the_job.speed))
    Path(the_job.result).write_bytes(msgspec.json.encode(heard))
