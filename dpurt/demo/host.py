"""One GPU-host process of the demo: plays its share of a trace against a node and checks every byte it gets.

Each request is a task that starts at its (scaled) arrival time: look the prompt up, load the matched blocks in windows while
"computing", store what was missing, finish. Run as ``python -m dpurt.demo.host JOB.json``; the result is written as JSON
to the file the job names, whole or not at all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from dpurt.client import Client, LoadedBlock, connect
from dpurt.config import load_config
from dpurt.core.identity import ROOT_KEY, Space, chain_keys
from dpurt.demo.content import payload_of, tokens_of
from dpurt.errors import DeadlineExceeded, FabricError, NodeUnavailable, RemoteProtocolError
from dpurt.transport import CurveClient

WINDOW_BLOCKS = 8
STORE_BLOCKS = 16
STORES = 3  # batches under way at once: what the inbound region has room for
SWITCH_S = (
    0.0002  # a thread at work gives way to the loop after this: Python's 5 ms would be most of what is timed
)
UNREACHABLE = (NodeUnavailable, DeadlineExceeded, FabricError, RemoteProtocolError)


class PlannedRequest(msgspec.Struct, array_like=True):
    """One request of the trace: seconds after the start (already scaled), its number, and its blocks."""

    at_s: float
    number: int
    blocks: list[int]


class Job(msgspec.Struct, kw_only=True):
    """What this process has to do."""

    topology: str
    endpoint: str
    host: str
    space: str
    fabric: str
    start_at: float  # wall clock, the same for all hosts
    result: str
    requests: list[PlannedRequest]
    max_running: int = 64
    timeout_s: float = 10.0
    curve: tuple[str, str, str] | None = None  # our public and secret key, the node's public one


class Result(msgspec.Struct, kw_only=True):
    """What came of it. `timeline`: per request (end, s; blocks; from staging; from nvme; missed)."""

    host: str
    pid: int = 0
    requests: int = 0
    failed_requests: int = 0
    blocks: int = 0
    staging: int = 0
    nvme: int = 0
    missed: int = 0
    not_ok: dict[str, int] = {}
    stored: int = 0
    not_stored: dict[str, int] = {}
    verified_bytes: int = 0
    wrong_bytes: int = 0
    unreachable: int = 0
    lookup_s: list[float] = []
    load_s: list[float] = []  # of each window of blocks, until its bytes were in the host's buffers
    timeline: list[tuple[float, int, int, int, int]] = []
    checksum_errors: int = 0
    bytes_pulled: int = 0
    bytes_stored: int = 0
    hits: list[tuple[float, int]] = []  # (s, trace block) of each verified block
    stores: list[tuple[float, int]] = []


class Player:
    """Plays the requests of one job."""

    def __init__(self, job: Job, space: Space, client: Client) -> None:
        self._job = job
        self._space = space
        self._client = client
        self._fingerprint = space.fingerprint()
        self._payload_bytes = space.geometry.payload_bytes
        self._limit = trio.CapacityLimiter(job.max_running)
        self._storing = trio.CapacityLimiter(STORES)
        self.result = Result(host=job.host, pid=os.getpid())

    async def play(self) -> None:
        """All requests, each at its time."""
        start = trio.current_time() + self._job.start_at - time.time()
        async with trio.open_nursery() as nursery:
            for request in self._job.requests:
                await trio.sleep_until(start + request.at_s)
                nursery.start_soon(self._limited, request, start)

    async def _limited(self, request: PlannedRequest, start: float) -> None:
        async with self._limit:
            await self._serve(request, start)

    async def _serve(self, request: PlannedRequest, start: float) -> None:
        result, name = self.result, f"r{request.number}"
        geometry = self._space.geometry
        tokens = tokens_of(request.blocks, geometry.block_tokens)
        keys = chain_keys(self._fingerprint, ROOT_KEY, tokens, geometry.block_token_bytes)
        staging = nvme = 0
        good = 0
        try:
            began = time.perf_counter()
            found = await self._client.lookup(self._job.space, name, tokens)
            result.lookup_s.append(time.perf_counter() - began)
            for first in range(0, found.matched_blocks, WINDOW_BLOCKS):
                loaded = await self._load(name, first, min(WINDOW_BLOCKS, found.matched_blocks - first))
                window = keys[first : first + len(loaded)]
                verdicts = await trio.to_thread.run_sync(self._compare, loaded, window)
                for i, (block, is_right) in enumerate(zip(loaded, verdicts, strict=True)):
                    if self._count(block, is_right) and good == first + i:
                        good += 1
                        result.hits.append((trio.current_time() - start, request.blocks[first + i]))
                        staging += block.source == "staging"
                        nvme += block.source == "nvme"
                if good < first + len(loaded):
                    break  # an engine recomputes from the first missing block on
            await self._store(request, start, name, tokens, keys, good)
            await self._client.finish(name, "end_turn")
        except UNREACHABLE:
            result.unreachable += 1
        missed = len(keys) - staging - nvme
        result.requests += 1
        result.blocks += len(keys)
        result.staging += staging
        result.nvme += nvme
        result.missed += missed
        result.timeline.append((trio.current_time() - start, len(keys), staging, nvme, missed))

    async def _load(self, name: str, first: int, count: int) -> list[LoadedBlock]:
        buffers = [memoryview(bytearray(self._payload_bytes)) for _ in range(count)]
        began = time.perf_counter()
        loaded = await self._client.load(name, first, buffers)
        self.result.load_s.append(time.perf_counter() - began)
        return loaded

    def _compare(self, blocks: Sequence[LoadedBlock], keys: Sequence[bytes]) -> list[bool]:
        """Every byte of every block against its identity. In a thread: the loop has lookups to time."""
        return [
            block.data is not None and block.data.tobytes() == payload_of(key, self._payload_bytes)
            for block, key in zip(blocks, keys, strict=True)
        ]

    def _make(self, keys: Sequence[bytes]) -> list[bytes]:
        return [payload_of(key, self._payload_bytes) for key in keys]

    def _count(self, block: LoadedBlock, is_right: bool) -> bool:
        if not block.is_ok:
            self.result.not_ok[block.status] = self.result.not_ok.get(block.status, 0) + 1
            return False
        if is_right:
            self.result.verified_bytes += self._payload_bytes
            return True
        self.result.wrong_bytes += self._payload_bytes
        return False

    async def _store(
        self, request: PlannedRequest, start: float, name: str, tokens: bytes, keys: list[bytes], first: int
    ) -> None:
        for at in range(first, len(keys), STORE_BLOCKS):
            async with self._storing:
                payloads = await trio.to_thread.run_sync(self._make, keys[at : at + STORE_BLOCKS])
                statuses = await self._client.store(self._job.space, name, tokens, at, payloads)
            for i, status in enumerate(statuses):
                if status == "stored":
                    self.result.stored += 1
                    self.result.stores.append((trio.current_time() - start, request.blocks[at + i]))
                else:
                    self.result.not_stored[status] = self.result.not_stored.get(status, 0) + 1


async def main(job: Job) -> Result:
    """Play one job."""
    space = load_config(job.topology).to_space(job.space)
    curve = None if job.curve is None else CurveClient(*job.curve)
    async with connect(
        job.endpoint,
        host=job.host,
        spaces={job.space: space},
        fabrics=[job.fabric],
        timeout_s=job.timeout_s,
        curve=curve,
    ) as client:
        player = Player(job, space, client)
        await player.play()
        player.result.checksum_errors = client.checksum_errors
        player.result.bytes_pulled = client.bytes_pulled
        player.result.bytes_stored = client.bytes_stored
    return player.result


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    the_job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    outcome = trio.run(main, the_job)
    scratch = Path(the_job.result + ".part")
    scratch.write_bytes(msgspec.json.encode(outcome))
    scratch.rename(the_job.result)
