"""The storage agent: owns the flash tier and decides what its devices do next.

Workers, as many as the device's queue is deep, take jobs in this order: demand reads (those of the lowest priority number first,
within one as they came), writes, prefetch reads; writes and prefetch may never hold all workers, so a demand read waits for one
operation at most. A read a request starts to wait for is *promoted* from the prefetch queue. Blocks that lie side by side on the
device (as those stored together do) are one operation, see `dpurt.core.read_queue`. Jobs are not cancelled with their requester
once started; they end by completion or by their deadline, and say so through `done`.

A worker that reads is shielded, since the device uses the slot of the job in hand: a cancelled agent tells its workers to
end after that job, which its deadline bounds. (One scope for a worker's life: one for each read cost a tenth of the read.)

Restart: queues and store are kept; a job in hand at the crash ends as ``error``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
import trio

from dpurt.agents.block_store import StoreFull
from dpurt.agents.flash import SPAN, FlashTier
from dpurt.core.endurance import WriteBudget
from dpurt.core.read_latency import ReadLatency
from dpurt.core.read_queue import ReadQueue
from dpurt.core.record import RecordError, RecordLayout
from dpurt.core.store_turns import RETRY_S
from dpurt.errors import BdevError, BdevTimeout
from dpurt.runtime.actor import Actor

from .spaces import SpaceState

log = structlog.get_logger()
WRITE_BATCH = 64  # blocks, at most
WRITE_BATCH_BYTES = 4 << 20
FIRST_RATE = 1e9  # bytes a second, until measured
FIRST_LATENCY_S = 0.0002
_STATUS = {"key": "stale", "shard": "stale", "stale": "stale", "expired": "expired"}  # all else is a checksum
End = tuple[str, Callable[[], Awaitable[None]] | None]  # of a read, see `ReadJob`
_OK: End = ("ok", None)
_FAILED: End = ("error", None)


@dataclass(slots=True, eq=False)
class ReadJob:
    """Fill parts of a slot's image from the record at `extent`. `done(jobs, ends)` tells of several at once, in the order
    they were queued; of each exactly once.

    An end is (status, settled). `status`: ``ok`` | ``checksum`` | ``stale`` | ``error`` | ``down`` (the device does not
    answer, but may again) | ``late`` (deadline) | ``cancelled``. With ``late`` the device
    may still write the slot until ``await settled()`` returns.
    """

    state: SpaceState
    ref: int
    key: bytes
    shard: int
    slot: int
    extent: int
    parts_mask: int
    deadline: float
    is_demand: bool
    done: Callable[[Sequence[ReadJob], Sequence[End]], None]
    priority: int = 0  # of a demand read
    waits: bool = True  # False: begun, or taken back
    began: float | None = None  # when the device was given it
    layout: RecordLayout | None = (
        None  # of `image`: where the bytes go, if not into a slot of the space's own slab
    )
    image: memoryview | None = None

    def destination(self) -> memoryview:
        """Where the bytes go."""
        return self.image or self.state.slab.image(self.slot)

    @property
    def record_bytes(self) -> int:
        """Of the image it fills."""
        return (self.layout or self.state.layout).record_bytes

    @property
    def is_whole(self) -> bool:
        """Is all of a record read, into a slot of its space?"""
        return self.image is None and self.parts_mask == self.state.layout.all_parts

    def goes_on(self, last: ReadJob) -> bool:
        """Does a whole record lie on the device right behind another of its space?"""
        return (
            self.extent == last.extent + last.record_bytes
            and self.state is last.state
            and self.shard == last.shard
            and self.is_whole
            and last.is_whole
            and self.done == last.done
        )


@dataclass(slots=True, eq=False)
class WriteJob:
    """Append the record image in a slot. `done(jobs, places)` tells of several at once, in the order they were queued:
    where each lies, or None when it could not be written.
    """

    state: SpaceState
    handle: int
    shard: int
    slot: int
    done: Callable[[Sequence[WriteJob], Sequence[int | None]], None]
    timed_out: bool = False


class StorageAgent(Actor[None]):
    """The flash tier."""

    name = "storage"

    def __init__(
        self, store: FlashTier, *, workers: int, deadline_s: float, bytes_per_s: float = FIRST_RATE
    ) -> None:
        """`bytes_per_s`: what prefetch counts on; a read's time beyond that is the devices' latency."""
        super().__init__(1)
        self.store = store
        self.deadline_s = deadline_s
        self._workers = max(3, workers)
        self._demand: dict[int, ReadQueue[ReadJob]] = {}  # by priority
        self._prefetch: ReadQueue[ReadJob] = ReadQueue()
        self._writes: deque[WriteJob] = deque()
        self.budget: WriteBudget | None = None  # of flash's endurance; None: everything is written
        self._idle = trio.lowlevel.ParkingLot()
        self._writing = 0
        self._prefetching = 0
        self._reading = 0
        self._reclaiming = trio.Lock()
        self._rate = FIRST_RATE
        self._bytes_per_s = bytes_per_s
        self._latencies = [ReadLatency(bytes_per_s, FIRST_LATENCY_S) for _ in store.stores]
        self._is_ending = False
        self.reclaim: Callable[[], Awaitable[None]] | None = None
        self.reclaims = 0
        self.read_status: dict[str, int] = {}
        self.write_failures = 0
        self.bytes_wanted = 0  # of demand reads queued or running

    # --- asking for work ---

    def read(self, jobs: Sequence[ReadJob]) -> None:
        """Queue reads, all for one demand or none. Those that lie side by side go together."""
        if not jobs:
            return
        if jobs[0].is_demand:
            self.bytes_wanted += sum(job.record_bytes for job in jobs)
            self._queue_demand(jobs)
        else:
            self._wake_workers(self._prefetch.push(jobs))

    def _queue_demand(self, jobs: Sequence[ReadJob]) -> None:
        self._wake_workers(self._demand.setdefault(jobs[0].priority, ReadQueue()).push(jobs))

    def promote(self, job: ReadJob, priority: int = 0) -> None:
        """Somebody waits for this read now, who may be in more of a hurry than those before."""
        if not job.is_demand:
            job.is_demand, job.priority = True, priority
            self.bytes_wanted += job.record_bytes
        elif priority < job.priority:
            job.priority = priority
        else:
            return
        if job.waits:  # its former place is passed over later
            self._queue_demand([job])

    def cancel(self, job: ReadJob) -> bool:
        """Take a read back that has not started. False: too late."""
        if not job.waits:
            return False
        job.waits = False
        self._finish([job], [("cancelled", None)])
        return True

    def write(self, jobs: Sequence[WriteJob]) -> None:
        """Queue writes. Those queued in one go share workers, a batch each."""
        if jobs:
            self._writes.extend(jobs)
            self._wake_workers(-(-len(jobs) // _batch_size(jobs[0].state)))

    def _wake_workers(self, count: int) -> None:
        if self._idle:
            self._idle.unpark(count=count)

    @property
    def backlog(self) -> int:
        """Jobs waiting."""
        return sum(map(len, self._demand.values())) + len(self._writes) + len(self._prefetch)

    @property
    def is_quiet(self) -> bool:
        """Nothing queued, nothing running."""
        return not self.backlog and not (self._reading or self._writing or self._prefetching)

    # --- doing it ---

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        self._reading = self._writing = self._prefetching = 0
        self._is_ending = False
        async with trio.open_nursery() as nursery:
            for _ in range(self._workers):
                nursery.start_soon(self._work)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._end_workers()

    def _end_workers(self) -> None:
        self._is_ending = True
        self._idle.unpark_all()

    async def _work(self) -> None:
        with trio.CancelScope(shield=True) as scope:
            await self._work_shielded(scope)

    async def _work_shielded(self, scope: trio.CancelScope) -> None:
        while not self._is_ending:
            if read := self._next_demand():
                self._reading += 1
                try:
                    await self._do_read(read)
                finally:
                    self._reading -= 1
            elif self._writes and self._writing < max(1, self._workers // 2):
                scope.shield = (
                    False  # a write waits for a reclaim, perhaps; the store shields the device's part
                )
                await self._write_some()
                scope.shield = True
            elif self._prefetching < self._workers - 2 and (read := self._prefetch.pop()):
                self._prefetching += 1
                try:
                    await self._do_read(read)
                finally:
                    self._prefetching -= 1
            else:
                await self._idle.park()

    def _next_demand(self) -> list[ReadJob]:
        while self._demand:
            first = min(self._demand)
            if run := self._demand[first].pop():
                return run
            del self._demand[first]
        return []

    async def _do_read(self, run: Sequence[ReadJob]) -> None:
        ends: Sequence[End] = [_FAILED] * len(run)
        try:
            ends = await self._read(run)
        finally:
            self._finish(run, ends)

    async def _read(self, run: Sequence[ReadJob]) -> list[End]:
        began = trio.current_time()
        for job in run:
            job.began = began
        try:
            refused = await self._ask_store(run, began)
        except BdevTimeout as error:
            self._note_latency(run, began)
            return [("late", error.settled)] * len(run)
        except BdevError as error:
            if error.status == "unavailable":
                return [("down", None)] * len(run)
            if len(run) > 1:  # it is one of them, perhaps
                return [(await self._read([job]))[0] for job in run]
            log.warning("read_failed", extent=run[0].extent, detail=str(error))
            return [_FAILED]
        self._measure(run, began)
        return [
            _OK if refusal is None else _refused(job, refusal)
            for job, refusal in zip(run, refused, strict=True)
        ]

    async def _ask_store(self, run: Sequence[ReadJob], began: float) -> Sequence[RecordError | None]:
        first, images = run[0], [job.destination() for job in run]
        # a host's patience is no device's excuse
        deadline = min(min([job.deadline for job in run]), began + self.deadline_s)
        if len(run) > 1:
            return await self.store.read_run(
                first.state.layout, first.extent, images, keys=[job.key for job in run], shard=first.shard,
                deadline=deadline,
            )  # fmt: skip
        try:
            await self.store.read(
                first.layout or first.state.layout, first.extent, images[0],
                key=first.key, shard=first.shard, parts_mask=first.parts_mask, deadline=deadline,
            )  # fmt: skip
        except RecordError as error:
            return [error]
        return [None]

    def _finish(self, run: Sequence[ReadJob], ends: Sequence[End]) -> None:
        for job, (status, _) in zip(run, ends, strict=True):
            self.read_status[status] = self.read_status.get(status, 0) + 1
            if job.is_demand:
                self.bytes_wanted -= job.record_bytes
        run[0].done(run, ends)

    async def _write_some(self) -> None:
        batch = [self._writes.popleft()]
        room = self.store.room(batch[0].state.layout)  # without any: one, a reclaim makes room
        most = min(_batch_size(batch[0].state), room)
        while self._writes and len(batch) < most and _go_together(batch[0], self._writes[0]):
            batch.append(self._writes.popleft())
        self._writing += 1
        try:
            await self._write(batch)
        finally:
            self._writing -= 1

    async def _write(self, batch: Sequence[WriteJob]) -> None:
        offsets: Sequence[int | None] = [None] * len(batch)
        try:
            offsets = await self._append(batch)
        except BdevError as error:
            if await self._may_try_again(batch, error):
                self._writes.extendleft(reversed(batch))
                batch = ()
            else:
                self.write_failures += len(batch)
                log.warning("write_failed", blocks=len(batch), detail=str(error))
        finally:
            if batch:
                batch[0].done(batch, offsets)

    async def _may_try_again(self, batch: Sequence[WriteJob], error: BdevError) -> bool:
        """Wait until the device is done with the slots, or worth another try. A device that is away may be so for as long
        as it likes: dirty slots are kept, stores wait for room. A device that is slow gets one more try.
        """
        if error.status == "unavailable":
            await trio.sleep(RETRY_S)
            return True
        if not isinstance(error, BdevTimeout):
            return False
        await error.settled()  # the device may still read the slots
        is_first = not any(job.timed_out for job in batch)
        for job in batch:
            job.timed_out = True
        return is_first

    async def _append(self, batch: Sequence[WriteJob]) -> Sequence[int]:
        layout = batch[0].state.layout
        images = [job.state.slab.image(job.slot) for job in batch]
        owners = [job.state.owner(job.handle, job.shard) for job in batch]
        while True:
            try:
                return await self.store.append(
                    layout, images, owners, deadline=trio.current_time() + self.deadline_s
                )
            except StoreFull:
                await self._make_room()

    async def _make_room(self) -> None:
        """Reclaim one segment; one reclaim at a time, and none when another writer's has just made room."""
        before = self.reclaims
        async with self._reclaiming:
            if self.reclaims == before:
                assert self.reclaim is not None
                await self.reclaim()
                self.reclaims += 1

    # --- rate ---

    def _note_latency(self, run: Sequence[ReadJob], began: float) -> float:
        """How long the read took."""
        now, size = trio.current_time(), len(run) * run[0].record_bytes
        elapsed = max(now - began, 1e-6)
        self._latencies[run[0].extent // SPAN].observe(size, elapsed, now)
        return elapsed

    def _measure(self, run: Sequence[ReadJob], began: float) -> None:
        elapsed = self._note_latency(run, began)
        rate = len(run) * run[0].record_bytes / elapsed * max(1, self._reading + self._prefetching)
        self._rate += 0.05 * (rate - self._rate)

    def latency_s(self) -> float:
        """What a read takes beyond its bytes' time; the slowest device's, since chains are spread over all."""
        now = trio.current_time()
        return max(latency.value(now) for latency in self._latencies)

    def read_s(self, num_bytes: int) -> float:
        """Time of one read on idle devices."""
        return self.latency_s() + num_bytes / self._bytes_per_s

    def estimate_s(self, num_bytes: int) -> float:
        """Until so many more bytes are read, behind what is wanted already, at the rate lately seen."""
        return max((self.bytes_wanted + num_bytes) / self._rate, self.read_s(num_bytes)) if num_bytes else 0.0


def _refused(job: ReadJob, refusal: RecordError) -> End:
    log.warning("record_refused", reason=refusal.reason, extent=job.extent, key=job.key.hex())
    return (_STATUS.get(refusal.reason, "checksum"), None)


def _batch_size(state: SpaceState) -> int:
    """How many records one device write carries."""
    return max(1, min(WRITE_BATCH, WRITE_BATCH_BYTES // state.layout.record_bytes))


def _go_together(one: WriteJob, other: WriteJob) -> bool:
    return one.state is other.state and one.done == other.done
