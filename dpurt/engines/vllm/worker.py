"""The worker's side: moves KV between the engine's memory and the node, in threads of its own, beside the forward passes.

Loads have threads, saves have one (in order: a block's parent goes first). The engine's thread only puts orders in, and takes
results out; it waits for bytes in two places, each with a limit: `wait_for_part` (loads that the running step reads) and an idle
step (a few milliseconds, so that an engine that only waits for us does not spin).

Who may touch a block's memory, and until when, is the whole danger here:

- A *load* writes into blocks that the engine has set aside, until it reports the request. Whoever stops waiting for one
  (`wait_for_part`, a request's end) *abandons* it first: under the job's lock, so no byte is written afterwards.
- A *save* reads blocks until it has copied them out (`read`); their request is held by the engine until that is reported. A
  preemption takes blocks away without asking: `preempt` abandons the request's saves under their locks before the engine
  goes on, and what was not fully copied out is never stored.

A block that was not loaded is reported by number, and every later one of its request with it: the engine computes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from dpurt.client import LoadedBlock
from dpurt.engines.vllm.fetcher import Fetcher, span_of
from dpurt.engines.vllm.link import Link, Stopwatch, until_room
from dpurt.engines.vllm.pages import Bytes, Pages
from dpurt.engines.vllm.plan import Ending, Order, Step
from dpurt.engines.vllm.settings import Settings
from dpurt.errors import DpurtError
from dpurt.wire import messages as m

LOAD_THREADS = 4
BATCH_BLOCKS = 64  # of one view: released as soon as they are copied
LAYER_WINDOWS = 4  # in which a load by layer asks for parts
IDLE_WAIT_S = 0.002
PAUSE_FACTOR, PAUSE_S = 2, 60.0
ARRIVAL_S = 0.02  # between looks for blocks that another engine is storing
_LOST = (DpurtError, OSError, ValueError, RuntimeError)


@dataclass(eq=False)
class _Job:
    """A load or a save under way. `lock` is held while the engine's memory is touched."""

    order: Order
    prefix: bytes
    fence: Callable[[], object] = bool  # waits until the engine has computed what is saved
    watch: Stopwatch = field(default_factory=Stopwatch)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_abandoned: bool = False
    parts_done: int = 0  # of a load by layer
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def abandon(self) -> None:
        """On return nobody touches the engine's memory for this job any more."""
        self.is_abandoned = True
        with self.lock:
            pass


@dataclass(frozen=True, slots=True)
class Results:
    """What happened since it was last asked: requests whose blocks were read, whose loads ended, blocks that failed."""

    read: set[str]
    loaded: set[str]
    failed_blocks: set[int]


class Mover:
    """One worker's loads and saves. Public methods are for the engine's thread only."""

    def __init__(self, link: Link, settings: Settings, pages: Pages, shard: int) -> None:
        self._link = link
        self._pages = pages
        self._shard = shard
        self._settings = settings
        self._prefixes: dict[str, bytearray] = {}
        self._loaders = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="dpurt-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="dpurt-save")
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._saving: dict[str, list[_Job]] = {}  # not read yet
        self._loading: dict[str, _Job] = {}
        self._step_loads: list[_Job] = []
        self._held: dict[str, Ending] = {}
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._no_save: set[str] = set()  # requests whose chain broke at the node
        self._paused: dict[str, float] = {}
        self._layer_waits_until = 0.0
        payload = pages.geometry.payload_bytes
        self._batch = max(1, min(BATCH_BLOCKS, self._settings.save_buffer_bytes // payload))
        self._buffer = np.empty((self._batch, payload), np.uint8)  # the saver's
        self._fetcher = Fetcher(link, pages.geometry)

    # --- the engine's thread ---

    def preempt(self, step: Step) -> None:
        """Before anything of this step runs: the engine may overwrite these requests' blocks."""
        for request in step.preempted:
            with self._lock:
                jobs = list(self._saving.get(request, ()))
            for job in jobs:
                job.abandon()

    def start_loads(self, step: Step) -> None:
        """Begin the step's loads."""
        self._layer_waits_until = time.monotonic() + self._settings.layer_wait_s
        for order in step.loads:
            job = _Job(order, self._prefix(order))
            if order.by_layer:
                self._step_loads.append(job)
                self._loaders.submit(self._load_by_layer, job)
            else:
                with self._lock:
                    self._loading[order.request] = job
                self._loaders.submit(self._load, job)

    def wait_for_part(self, part: int) -> None:
        """Until this step's loads have brought this part, or the step's time for waiting is over."""
        for job in self._step_loads:
            with job.arrived:
                job.arrived.wait_for(
                    lambda job=job: job.parts_done > part or job.is_abandoned,  # type: ignore[misc]
                    timeout=max(0.0, self._layer_waits_until - time.monotonic()),
                )
                is_late = job.parts_done <= part
            if is_late and not job.is_abandoned:
                job.abandon()
                self._fail(job, 0, ["late"])

    def start_saves(self, step: Step) -> None:
        """The step's KV is computed: begin its saves, and end what is over."""
        self._step_loads.clear()
        fence = self._pages.fence() if step.saves else bool
        for order in step.saves:
            job = _Job(order, self._prefix(order), fence)
            with self._lock:
                self._saving.setdefault(order.request, []).append(job)
            self._saver.submit(self._save, job)
        for ending in step.endings:
            self._end(ending)

    def take_results(self, *, is_idle: bool) -> Results:
        """What the engine must know. An idle step waits a moment for something to tell."""
        with self._moved:
            if is_idle and not self._has_news() and (self._loading or self._saving):
                self._moved.wait(IDLE_WAIT_S)
            read = {r for r in self._held if r not in self._saving}
            endings = [self._held.pop(r) for r in read]
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        for ending in endings:
            self._say_end(ending)
        return Results(read, loaded, failed)

    def close(self) -> None:
        """Stop: saves have `save_timeout_s` to end, then they are abandoned, as loads are at once."""
        with suppress(FutureTimeout):
            self._saver.submit(bool).result(timeout=self._settings.save_timeout_s)
        with self._lock:
            jobs = [*self._loading.values(), *(job for jobs in self._saving.values() for job in jobs)]
        for job in jobs:
            job.abandon()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._saver.shutdown(wait=False, cancel_futures=True)

    def _has_news(self) -> bool:
        return bool(self._loaded or self._failed or any(r not in self._saving for r in self._held))

    def _prefix(self, order: Order) -> bytes:
        """All tokens of a request up to the end of an order's blocks."""
        known = self._prefixes.setdefault(order.request, bytearray())
        known += order.more_tokens
        return bytes(known)

    def _end(self, ending: Ending) -> None:
        with self._lock:
            self._prefixes.pop(ending.request, None)
            job = self._loading.get(ending.request)
            if ending.held:
                self._held[ending.request] = ending
        if job is not None:
            job.abandon()
        if not ending.held:
            self._say_end(ending)

    def _say_end(self, ending: Ending) -> None:
        """After the saves of the request, which are still on their way: the scope must outlive them."""
        self._saver.submit(self._hint_end, ending)

    def _hint_end(self, ending: Ending) -> None:
        request = ending.request
        self._no_save.discard(request)
        self._forget_paused()
        if ending.pause_ms is None:
            self._link.client.finish(request, ending.reason)
            return
        self._paused[request] = time.monotonic() + PAUSE_FACTOR * ending.pause_ms / 1000 + PAUSE_S
        hint = m.Hint(request=request, kind="pause", expected_ms=ending.pause_ms, reason=ending.reason)
        self._link.client.hint(hint)

    def _forget_paused(self) -> None:
        """Who did not come back in twice the time that was announced will not: the node's scope ends."""
        now = time.monotonic()
        for request in [request for request, until in self._paused.items() if until < now]:
            del self._paused[request]
            self._link.client.finish(request, "did not return")

    # --- loads, in their threads ---

    def _load(self, job: _Job) -> None:
        watch, done = Stopwatch(), 0
        try:
            if self._open_scope(job):
                done = self._load_blocks(job, watch)
        except _LOST as error:
            self._link.failed(error)
        finally:
            self._link.tally.count(load_s=watch.s)
            if done < len(job.order.ids):
                self._fail(job, done, [])
            with self._moved:
                self._loading.pop(job.order.request, None)
                self._loaded.add(job.order.request)
                self._moved.notify_all()

    def _open_scope(self, job: _Job) -> bool:
        """The scheduler's lookup opened it when it used the same client."""
        if "scheduler" in self._link.roles:
            return True
        found = self._link.client.lookup(
            self._settings.space, job.order.request, job.prefix,
            shard=self._shard, priority=job.order.priority, timeout_s=1.0,
        )  # fmt: skip
        return found.matched_blocks > job.order.first or job.order.expect_ms > 0

    def _load_blocks(self, job: _Job, watch: Stopwatch) -> int:
        """How many of the order's blocks are in place, from its first on."""
        order, done, expected_s = job.order, 0, job.order.expect_ms / 1000
        while done < len(order.ids) and not job.is_abandoned:
            ids = order.ids[done : done + BATCH_BLOCKS]
            left = self._settings.load_timeout_s + expected_s - watch.s
            good, why = self._fetch(job, order.first + done, ids, None, left) if left > 0 else (0, "timeout")
            done += good
            if why == "miss" and watch.s < expected_s:
                time.sleep(ARRIVAL_S)
            elif why:
                self._link.tally.why("blocks_failed", [why])
                break
        return done

    def _fetch(
        self, job: _Job, first: int, ids: Sequence[int], parts: tuple[int, int] | None, left: float
    ) -> tuple[int, str]:
        """Blocks from `first` on (or some parts of them) into the engine's blocks `ids`.

        How many are good, from the first; and why the next one is not.
        """
        with self._fetcher.blocks(
            job.order.request, first, len(ids), parts=parts, shard=self._shard, timeout_s=left
        ) as blocks:
            return self._place(job, ids, blocks, parts)

    def _span(self, parts: tuple[int, int] | None) -> tuple[int, int]:
        return span_of(self._pages.geometry, parts)

    def _place(
        self, job: _Job, ids: Sequence[int], blocks: Sequence[LoadedBlock], parts: tuple[int, int] | None
    ) -> tuple[int, str]:
        """Copy what arrived into the engine's memory, up to the first block that did not."""
        good = next((i for i, block in enumerate(blocks) if not block.is_ok), len(blocks))
        payloads: list[Bytes] = [np.frombuffer(block.data, np.uint8) for block in blocks[:good] if block.data]
        start, stop = self._span(parts)
        first, last = parts or (0, len(self._pages.geometry.groups))
        for part in range(first, last):
            with job.lock:
                if job.is_abandoned:
                    return 0, "abandoned"
                self._pages.scatter(ids[:good], payloads, part, start)
            self._part_arrived(job, part, good == len(ids))
        self._count_loads(blocks[:good], good * (stop - start), first == 0)
        return good, blocks[good].status if good < len(blocks) else ""

    def _part_arrived(self, job: _Job, part: int, whole: bool) -> None:
        if job.order.by_layer and whole:
            with job.arrived:
                job.parts_done = part + 1
                job.arrived.notify_all()

    def _count_loads(self, blocks: Sequence[LoadedBlock], num_bytes: int, counts: bool) -> None:
        if counts:
            flash = sum(block.source == "nvme" for block in blocks)
            self._link.tally.count(blocks_loaded=len(blocks), blocks_from_flash=flash)
        self._link.tally.count(bytes_loaded=num_bytes)

    def _load_by_layer(self, job: _Job) -> None:
        """Parts in the order the model reads them, a few windows of them; all blocks of a window at once."""
        watch, order, num_parts = Stopwatch(), job.order, len(self._pages.geometry.groups)
        is_good = False
        try:
            is_good = self._open_scope(job)
            step = -(-num_parts // LAYER_WINDOWS)
            for start in range(0, num_parts, step):
                left = self._settings.layer_wait_s - watch.s
                window = (start, min(start + step, num_parts))
                is_good = (
                    is_good and left > 0 and self._fetch(job, order.first, order.ids, window, left)[1] == ""
                )
                if not is_good:
                    break
        except _LOST as error:
            is_good = False
            self._link.failed(error)
        finally:
            self._link.tally.count(load_s=watch.s)
            if not is_good and not job.is_abandoned:
                self._fail(job, 0, [])
                with job.arrived:
                    job.is_abandoned = True
                    job.arrived.notify_all()

    def _fail(self, job: _Job, done: int, reasons: Sequence[str]) -> None:
        self._link.tally.why("blocks_failed", reasons)
        with self._lock:
            self._failed.update(job.order.ids[done:])

    # --- saves, in their thread ---

    def _save(self, job: _Job) -> None:
        watch, order = Stopwatch(), job.order
        try:
            for at in range(0, len(order.ids), self._batch):
                ids = order.ids[at : at + self._batch]
                if not self._may_save(job) or not self._read(job, ids):
                    break
                if at + self._batch >= len(order.ids):
                    self._read_all(job)
                if not self._store(job, order.first + at, len(ids)):
                    self._no_save.add(order.request)
        except _LOST as error:
            self._no_save.add(order.request)  # what follows would be without its parent
            self._link.failed(error)
        finally:
            self._read_all(job)
            self._link.tally.count(save_s=watch.s)

    def _may_save(self, job: _Job) -> bool:
        """Is it worth a try? Blocks wait for their save at most `save_timeout_s`, and not at all while the node is down."""
        if job.order.request in self._no_save:
            return False
        why = "" if self._link.is_up else "down"
        if job.watch.s > self._settings.save_timeout_s:
            why = "late"
        if why:
            self._no_save.add(job.order.request)
            self._link.tally.why("blocks_not_saved", [why] * len(job.order.ids))
        return not why

    def _read(self, job: _Job, ids: Sequence[int]) -> bool:
        """Copy blocks out of the engine's memory; False when they are not the request's any more."""
        with job.lock:
            if job.is_abandoned:
                self._link.tally.why("blocks_not_saved", ["preempted"])
                self._no_save.add(job.order.request)
                return False
            job.fence()
            self._pages.gather(ids, self._buffer)
            return True

    def _read_all(self, job: _Job) -> None:
        """The engine may have the job's blocks back."""
        with self._moved:
            jobs = self._saving.get(job.order.request)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._saving[job.order.request]
                self._moved.notify_all()

    def _store(self, job: _Job, first: int, count: int) -> bool:
        """Store what was read; False when later blocks of the request would have no parent."""
        statuses = until_room(
            lambda left: self._try_store(job, first, count, left), self._settings.save_timeout_s
        )
        lost = [s for s in statuses if s not in ("stored", "exists", "in_flight")]
        self._link.tally.why("blocks_not_saved", lost)
        return not lost

    def _try_store(self, job: _Job, first: int, count: int, left: float) -> list[str]:
        payloads = [self._buffer[i].data for i in range(count)]
        with self._link.guarded():
            statuses = self._link.client.store(
                self._settings.space, job.order.request, job.prefix, first, payloads,
                shard=self._shard, timeout_s=left,
            )  # fmt: skip
        stored = statuses.count("stored")
        self._link.tally.count(blocks_saved=stored, bytes_saved=stored * self._buffer.shape[1])
        return statuses
