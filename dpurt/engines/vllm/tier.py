"""`DpurtTier`: the node as a secondary tier below vLLM's own CPU offloading (`OffloadingConnector`, `TieringOffloadingSpec`).

vLLM moves KV between the device and its CPU region by itself; a tier moves chunks between that region and somewhere else, here the
node. Chunks are named by vLLM's own chained digest (full, not the 64 bits of events), so equal names mean equal tokens, salts
and adapters; model, dtype, layout and number of workers are in our space. Each chunk is stored as a chain of its own: vLLM asks
for prefixes in order and names no parents.

All calls come from the scheduler, under its lock, and none waits: a lookup is answered from a mirror of the node's index that
the client's thread keeps current (RETRY until it is, a miss while the node is away), loads and stores are handed to threads.
A chunk that the mirror promised and the node did not bring is a miss for `DISTRUST_S`, so nobody asks in circles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from dpurt.core.identity import Geometry, LayerGroup, Space
from dpurt.engines.vllm.fetcher import Fetcher
from dpurt.engines.vllm.link import Link, Stopwatch, release, shared_link
from dpurt.engines.vllm.settings import TierSettings, access_from, settings_from
from dpurt.errors import DpurtError

THREADS = 4
DISTRUST_S = 5.0
_LOST = (DpurtError, OSError, ValueError, RuntimeError)
Row = NDArray[np.uint8]


class DpurtTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. `own` is the tier's entry in the configuration, `TierSettings`."""

    medium = Medium.STORAGE
    tolerates_off_thread_polling = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **own: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = settings_from(own, TierSettings)
        access = access_from(self._settings)
        space = space_of(
            offloading_spec.config, self._settings, access.tenant, access.salt, self.block_size_bytes
        )
        self._link: Link = shared_link(self._settings, access, space)
        self._mirror = self._link.client.follow(self._settings.space)
        self._fetcher = Fetcher(self._link, space.geometry)
        self._rows: Row = np.asarray(primary_kv_view).view(np.uint8)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dpurt-tier")
        self._lock = threading.Lock()
        self._finished: list[JobResult] = []
        self._pending: set[Future[None]] = set()
        self._distrusted: dict[bytes, float] = {}

    # --- the scheduler's calls ---

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if self._distrusted and self._distrusted.get(key, 0.0) > time.monotonic():
            return LookupResult.MISS
        held = self._mirror.holds_digest(key)
        return LookupResult.RETRY if held is None else LookupResult.HIT if held else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self._pending or self._finished)

    def drain_jobs(self) -> None:
        wait(list(self._pending))

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        release(self._link)

    # --- jobs ---

    def _submit(self, job: TransferJob, move: Callable[[str, bytes, Row], int]) -> None:
        """One task for the whole job; the chunks' order is the request's."""
        done = self._pool.submit(self._run, job, move)
        self._pending.add(done)
        done.add_done_callback(lambda future: self._ended(future, job))

    def _run(self, job: TransferJob, move: Callable[[str, bytes, Row], int]) -> None:
        watch, good, moved = Stopwatch(), [], 0
        for i, (key, chunk) in enumerate(zip(job.keys, job.chunk_ids, strict=True)):
            try:
                num_bytes = move(f"tier-{id(self):x}-{job.job_id}-{i}", bytes(key), self._rows[int(chunk)])
            except _LOST as error:
                self._link.failed(error)
                continue
            if num_bytes >= 0:
                good.append(key)
                moved += num_bytes
        self._report(job, good, moved, watch.s)

    def _report(self, job: TransferJob, good: Collection[Any], moved: int, seconds: float) -> None:
        if job.is_promotion:
            until = time.monotonic() + DISTRUST_S
            self._distrusted = {k: t for k, t in self._distrusted.items() if t > time.monotonic()}
            self._distrusted |= {bytes(key): until for key in job.keys if key not in good}
        result = JobResult(
            job_id=job.job_id, success=len(good) == len(job.keys), successful_keys=list(good) if job.is_promotion else None,
            transfer_time=seconds, transfer_bytes=moved,
        )  # fmt: skip
        with self._lock:
            self._finished.append(result)

    def _ended(self, future: Future[None], job: TransferJob) -> None:
        """A job that was cancelled, or broke down, has its result too."""
        if future.cancelled() or future.exception() is not None:
            self._report(job, [], 0, 0.0)
        self._pending.discard(future)

    def _store(self, name: str, key: bytes, row: Row) -> int:
        """Bytes stored: 0 when the node has them; negative when it could not take them."""
        if self._mirror.holds_digest(key):
            return 0
        if not self._link.is_worth_a_try():
            return -1
        budget = self._link.patience(self._settings.store_timeout_s)
        with self._link.guarded():
            [status] = self._link.client.store(
                self._settings.space, name, None, 0, [row.data], digests=[key], timeout_s=budget
            )
        self._link.client.finish(name)
        return {"stored": row.nbytes, "exists": 0, "in_flight": 0}.get(status, -1)

    def _load(self, name: str, key: bytes, row: Row) -> int:
        budget = self._link.patience(self._settings.load_timeout_s)
        with self._link.guarded():
            found = self._link.client.lookup(self._settings.space, name, digests=[key], timeout_s=budget)
        if not found.matched_blocks:
            self._link.client.finish(name)
            return -1
        try:
            with self._fetcher.blocks(name, 0, 1, parts=None, shard=0, timeout_s=budget) as [block]:
                if not block.is_ok or block.data is None:
                    return -1
                row[:] = np.frombuffer(block.data, np.uint8)
                return row.nbytes
        finally:
            self._link.client.finish(name)


def space_of(config: Any, settings: TierSettings, tenant: str, salt: bytes, chunk_bytes: int) -> Space:
    """A chunk's identity: opaque bytes, laid out by vLLM for so many layers and workers."""
    parallel, cache = config.parallel, config.cache
    workers = 1 if parallel.is_parallelism_agnostic else parallel.world_size
    group = LayerGroup(
        name="chunk", num_layers=sum(len(group.layer_names) for group in config.groups), num_kv_heads=1, head_size=1,
        part_bytes=chunk_bytes, packing=f"vllm-chunk:{config.kv_cache_layout or 'default'}:{workers}",
    )  # fmt: skip
    tokens = config.groups[0].tokens_per_block * cache.blocks_per_chunk
    return Space(
        model=settings.model or config.model.name, revision=settings.revision or "main",
        kv_dtype=str(config.model.dtype).removeprefix("torch."),
        geometry=Geometry(block_tokens=tokens, groups=(group,)), tenant=tenant, salt=salt,
    )  # fmt: skip
