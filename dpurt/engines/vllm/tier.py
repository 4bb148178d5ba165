"""`DpurtTier`: the node as a secondary tier below vLLM's own CPU offloading (`OffloadingConnector`, `TieringOffloadingSpec`).

vLLM moves KV between the device and its CPU region by itself; a tier moves chunks between that region and somewhere else, here the
node. Chunks are named by vLLM's own chained digest (full, not the 64 bits of events), so equal names mean equal tokens, salts
and adapters; model, dtype, layout and number of workers are in our space. Chunks stand alone at the node (``chained`` false): vLLM
names no parents, and asks for prefixes in order by itself.

All calls come from the scheduler, under its lock, and none waits: a lookup is answered from a mirror of the node's index that
the client's thread keeps current (RETRY until it is, a miss while the node is away), loads and stores are handed to threads.
A chunk that the mirror promised and the node did not bring is a miss for `DISTRUST_S`, so nobody asks in circles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from dpurt.core.identity import Geometry, LayerGroup, Space
from dpurt.engines.vllm.fetcher import Fetcher
from dpurt.engines.vllm.link import Link, Stopwatch, release, shared_link, until_room
from dpurt.engines.vllm.settings import TierSettings, access_from, settings_from
from dpurt.errors import DpurtError

THREADS = 4
DISTRUST_S = 5.0
BATCH_BYTES = 32 << 20  # of chunks in one store or load
_LOST = (DpurtError, OSError, ValueError, RuntimeError)
_KEPT = frozenset({"stored", "exists", "in_flight"})
Keys = list[bytes]
Rows = list[NDArray[np.uint8]]


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
        self._rows: NDArray[np.uint8] = np.asarray(primary_kv_view).view(np.uint8)
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
        self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps the region next
        release(self._link)

    # --- jobs ---

    def _submit(self, job: TransferJob, move: Callable[[str, Keys, Rows], list[bytes]]) -> None:
        done = self._pool.submit(self._run, job, move)
        self._pending.add(done)
        done.add_done_callback(lambda future: self._ended(future, job))

    def _run(self, job: TransferJob, move: Callable[[str, Keys, Rows], list[bytes]]) -> None:
        """All of a job, a batch at a time, under one request id at the node."""
        watch, name, good = Stopwatch(), f"tier-{id(self):x}-{job.job_id}", set[bytes]()
        keys = [bytes(key) for key in job.keys]
        rows = [self._rows[int(chunk)] for chunk in job.chunk_ids]
        try:
            if self._link.is_up:
                good.update(move(name, keys, rows))
        except _LOST as error:
            self._link.failed(error)
        finally:
            self._link.client.finish(name)
        self._report(job, good, watch.s)

    def _report(self, job: TransferJob, good: Set[bytes], seconds: float) -> None:
        if job.is_promotion:
            now = time.monotonic()
            self._distrusted = {key: until for key, until in self._distrusted.items() if until > now}
            self._distrusted |= {bytes(key): now + DISTRUST_S for key in job.keys if bytes(key) not in good}
        result = JobResult(
            job_id=job.job_id, success=len(good) == len(job.keys),
            successful_keys=[key for key in job.keys if bytes(key) in good] if job.is_promotion else None,
            transfer_time=seconds, transfer_bytes=len(good) * self.block_size_bytes,
        )  # fmt: skip
        with self._lock:
            self._finished.append(result)

    def _ended(self, future: Future[None], job: TransferJob) -> None:
        """A job that was cancelled, or broke down, has its result too."""
        if future.cancelled() or future.exception() is not None:
            self._report(job, set(), 0.0)
        self._pending.discard(future)

    def _batches(self, count: int) -> Iterator[slice]:
        size = max(1, BATCH_BYTES // self.block_size_bytes)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def _store(self, name: str, keys: Keys, rows: Rows) -> list[bytes]:
        """Those keys the node has afterwards."""
        new = [i for i, key in enumerate(keys) if not self._mirror.holds_digest(key)]
        wanted, stored = [keys[i] for i in new], list(set(keys) - {keys[i] for i in new})
        for part in self._batches(len(new)):
            payloads = [rows[i].data for i in new[part]]
            statuses = self._store_batch(name, wanted, part.start, payloads)
            stored += [key for key, status in zip(wanted[part], statuses, strict=True) if status in _KEPT]
        return stored

    def _store_batch(self, name: str, keys: Keys, first: int, payloads: Sequence[memoryview]) -> list[str]:
        def attempt(left: float) -> list[str]:
            with self._link.guarded():
                return self._link.client.store(
                    self._settings.space,
                    name,
                    None,
                    first,
                    payloads,
                    digests=keys,
                    chained=False,
                    timeout_s=left,
                )

        return until_room(attempt, self._settings.store_timeout_s)

    def _load(self, name: str, keys: Keys, rows: Rows) -> list[bytes]:
        """Those keys whose bytes are in their rows afterwards."""
        budget, good = self._settings.load_timeout_s, list[bytes]()
        with self._link.guarded():
            self._link.client.lookup(
                self._settings.space, name, digests=keys, chained=False, timeout_s=budget
            )
        for part in self._batches(len(keys)):
            with self._fetcher.blocks(
                name, part.start, part.stop - part.start, parts=None, shard=0, timeout_s=budget
            ) as blocks:
                for key, row, block in zip(keys[part], rows[part], blocks, strict=True):
                    if block.is_ok and block.data is not None:
                        row[:] = np.frombuffer(block.data, np.uint8)
                        good.append(key)
        return good


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
