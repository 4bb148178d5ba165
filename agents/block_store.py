"""The block store: records on one bdev, in a log of segments. Used by the storage agent; not an actor itself.

Theory of operation. `dpurt.core.segment_log` decides where a record goes, `dpurt.core.record` what it looks
like, this module moves the bytes: a segment's header before its first record, adjacent records in one write,
a seal once all records of a full segment are written and flushed. Reads verify everything they return.

Crash safety. Nothing on the device is ever updated in place but the superblock (two slots) and a free
segment. An append counts once it has returned; a crash loses at most appends that had not. `rebuild` trusts
the records of sealed segments by their header (each read verifies the payload anyway) and verifies the
payload of all others. After a power loss, records of the segments that were open may be gone too: they are
never half there.

Holds. Every operation holds its segment, and one that timed out goes on holding it until the device has
answered, so a late write never lands in a segment that was given to others.

All methods belong to one Trio thread and may run concurrently. `append` is shielded from cancellation and the
caller of `read` shields it (there is one scope a worker then, not one a read), since the device uses the caller's
buffers; the deadline bounds them. After a `BdevTimeout` the
caller quarantines the buffers until `settled()`. What is hot, which blocks are orphans and what a miss means
is left to the index; whose turn it is, to the caller.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import trio
from numpy.typing import NDArray

from dpurt.agents.device_batch import raise_as_one, run_batch
from dpurt.agents.segment_scan import Rebuilt, SegmentScan
from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer, total_bytes
from dpurt.core import superblock as sb
from dpurt.core.record import RecordError, RecordLayout, stamp, verify_record
from dpurt.core.segment_log import (
    HEADER_BLOCK,
    METADATA_BYTES,
    LastUse,
    Placement,
    SegmentHeader,
    SegmentLog,
    SegmentLogStats,
)
from dpurt.core.superblock import Superblock
from dpurt.errors import BdevError, BdevTimeout, ConfigError, DpurtError, LocalProtocolError

__all__ = ["BlockStore", "Reclaim", "StoreFull", "StoreLost", "StoreStats"]

_BLANK_CHECK_BYTES = (
    1 << 20
)  # covers the super blocks and labels of every common file system and volume manager
_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10
_MAX_RUN_BYTES = 4 << 20


class StoreFull(DpurtError):
    """No room for these records before a segment is reclaimed. Nothing was written; `room` records would have
    fitted.
    """

    def __init__(self, wanted: int, room: int) -> None:
        super().__init__(f"no room for {wanted} records, {room} fit: reclaim a segment first")
        self.wanted = wanted
        self.room = room


class StoreLost(DpurtError):
    """The device was lost and came back without this store on it: everything it held is gone. Nothing was written."""

    def __init__(self, bdev: str) -> None:
        super().__init__(f"bdev {bdev} came back without the store it had")
        self.bdev = bdev


@dataclass(frozen=True, slots=True)
class Reclaim:
    """A segment about to be reused. The caller drops or re-appends what lives at `offsets`, then calls
    `finish_reclaim`.

    `reappend_bytes` is how much may be re-appended within the write amplification budget; `number` is of the store
    among others (see `dpurt.agents.flash`).
    """

    segment: int
    fingerprint: bytes
    record_bytes: int
    offsets: tuple[int, ...]
    names: NDArray[np.int64]
    reappend_bytes: int
    store: bytes
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A snapshot. `refused` counts reads by RecordError reason."""

    store: str
    incarnation: int
    log: SegmentLogStats
    reads: int
    bytes_read: int
    appends: int
    bytes_appended: int
    seal_failures: int
    refused: Mapping[str, int]


@dataclass(slots=True)
class _Counters:
    reads: int = 0
    bytes_read: int = 0
    appends: int = 0
    bytes_appended: int = 0
    seal_failures: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Writing:
    """A segment that takes records: is its header on the device, and which writes are under way?"""

    header: SegmentHeader
    has_header: trio.Event = field(default_factory=trio.Event)
    runs: int = 0
    is_full: bool = False
    is_headless: bool = False  # writing the header failed
    header_failure: str = "io_error"  # and the status of those who waited for it
    has_failed: bool = False  # any write failed: it must not be sealed


@dataclass(slots=True)
class _Run:
    """Records that lie side by side in one segment: one device write."""

    segment: int
    offset: int
    opens: SegmentHeader | None
    writing: _Writing
    images: Sequence[memoryview]


class BlockStore:
    """Make one with `await BlockStore.open(...)`, then `await store.rebuild(...)`, then use it. The bdev
    stays the caller's.
    """

    def __init__(
        self,
        bdev: Bdev,
        superblock: Superblock,
        log: SegmentLog,
        clock: Callable[[], float],
        deadline_s: float,
    ) -> None:
        self._bdev = bdev
        self._superblock = superblock
        self._log = log
        self._clock = clock
        self._deadline_s = deadline_s
        self._tag = superblock.store_tag
        self._writing: dict[int, _Writing] = {}
        self._counters = _Counters()
        self._superblock_lock = trio.Lock()
        self._is_rebuilt = False
        self._reconnects = bdev.stats.reconnects  # when the store was last seen on the device
        self._recognising = trio.Lock()
        self._appending = 0
        self._drained = trio.lowlevel.ParkingLot()
        self.is_lost = False
        self._successor = ""  # being made on a device that lost this store: a try may have got half-way

    @classmethod
    async def open(
        cls,
        bdev: Bdev,
        *,
        capacity_bytes: int,
        segment_bytes: int = 64 << 20,
        clock: Callable[[], float],
        deadline_s: float = 10.0,
        format: bool = False,
    ) -> BlockStore:
        """Load the store on the device, or make one on a blank device; its superblock is written and read
        back.

        A device with anything else where `survey` looks is refused, unless `format` says that it may be
        overwritten (an existing store is loaded even then). `clock` gives wall-clock seconds. Raises
        ConfigError or BdevError.
        """
        if capacity_bytes > bdev.info.size_bytes:
            problem = f"{capacity_bytes} exceeds the {bdev.info.size_bytes} bytes of bdev {bdev.info.name}"
            raise ConfigError("$.store.capacity_bytes", problem)
        found = await _find_superblock(bdev, deadline_s, may_overwrite=format)
        superblock = (found or Superblock(store=secrets.token_hex(16), segment_bytes=segment_bytes)).opened()
        if superblock.segment_bytes != segment_bytes:
            problem = f"the store on bdev {bdev.info.name} was made with {superblock.segment_bytes}, not {segment_bytes}"
            raise ConfigError("$.store.segment_bytes", problem)
        log = _make_log(superblock, capacity_bytes)
        store = cls(bdev, superblock, log, clock, deadline_s)
        await store._write_superblock(superblock)
        return store

    @staticmethod
    async def survey(bdev: Bdev, *, deadline_s: float = 10.0) -> None:
        """ConfigError when the device holds anything but a store. Looks at its first MiB, its end, and 64 KiB at
        each of 64 places in between; reads only.
        """
        if await _read_superblock(bdev, deadline_s) is None:
            await _check_blank(bdev, deadline_s)

    # --- restart ---

    async def rebuild(
        self,
        layouts: Mapping[bytes, RecordLayout],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Rebuilt:
        """Scan the device for the records of these spaces and count them as live again. Once, before any
        append or read.

        Records of other spaces are gone: their segments are free. `on_progress(segments done, segments in
        all)`.
        """
        if self._is_rebuilt:
            raise LocalProtocolError("already_rebuilt", "rebuild is called once, right after open")
        scan = SegmentScan(self._bdev, self._log, layouts, self._clock(), self._deadline_s)
        rebuilt = await scan.run(on_progress)
        for segment in scan.adopt():
            await self._seal(segment)
        self._is_rebuilt = True
        return rebuilt

    # --- records ---

    async def append(
        self,
        layout: RecordLayout,
        images: Sequence[memoryview],
        names: Sequence[int],
        *,
        deadline: float,
        group: int = 0,
        is_reappend: bool = False,
    ) -> list[int]:
        """Write packed record images; their offsets. All or nothing. Stamps the images' headers.

        `names` are the caller's, one a record: a reclaim tells them. `group` is the placement group (like lifetime
        and tenant together). Raises StoreFull, BdevError, BdevTimeout, StoreLost.
        """
        self._check_ready()
        await self._recognise()
        self._appending += 1
        try:
            return await self._append(layout, images, names, deadline, group, is_reappend)
        finally:
            self._appending -= 1
            if not self._appending and self._drained:
                self._drained.unpark_all()

    async def _append(
        self,
        layout: RecordLayout,
        images: Sequence[memoryview],
        names: Sequence[int],
        deadline: float,
        group: int,
        is_reappend: bool,
    ) -> list[int]:
        room = self._log.room(layout.fingerprint, layout.record_bytes, group, is_reappend=is_reappend)
        if room < len(images):
            raise StoreFull(len(images), room)
        runs = self._place(layout, images, names, group, is_reappend)
        with self._holding([run.segment for run in runs]):  # until the caller knows of the records
            with trio.CancelScope(shield=True):
                errors = await run_batch([partial(self._write_run, run, deadline) for run in runs])
            step = layout.record_bytes
            offsets = [run.offset + i * step for run in runs for i in range(len(run.images))]
            if errors:
                for offset in offsets:
                    self._log.forget(offset)
                raise_as_one(errors)
        self._counters.appends += len(images)
        self._counters.bytes_appended += len(images) * layout.record_bytes
        return offsets

    async def read(
        self,
        layout: RecordLayout,
        offset: int,
        image: memoryview,
        *,
        key: bytes,
        shard: int,
        deadline: float,
        parts_mask: int | None = None,
    ) -> None:
        """Read a record, or its header and some parts, into a record image, and verify what was read.

        Not to be cancelled: the caller shields it. Raises RecordError when it is not the block wanted or its bytes
        are not those stored (then nothing in `image` may be used), BdevError, or BdevTimeout (then `image` is in use
        until `settled()`).
        """
        self._check_ready()
        mask = layout.all_parts if parts_mask is None else parts_mask
        try:
            sequence = await self._read(layout, offset, image, mask, deadline)
            verify_record(image, layout, mask, self._tag, sequence, key, shard, self._clock())
        except RecordError as error:
            self._counters.refused[error.reason] += 1
            raise
        self._counters.reads += 1

    async def read_run(
        self,
        layout: RecordLayout,
        offset: int,
        images: Sequence[memoryview],
        *,
        keys: Sequence[bytes],
        shard: int,
        deadline: float,
    ) -> list[RecordError | None]:
        """Read whole records that lie side by side, in one operation; for each why it is refused, or None. As `read` else."""
        self._check_ready()
        log = self._log  # the one that has the hold: `start_over` makes another
        held = log.hold_run(offset, len(images), layout.record_bytes)
        if held is None:
            return [self._nothing_there() for _ in images]
        try:
            await self._bdev.read_into(offset, images, deadline)
        except BdevTimeout as timeout:
            _unhold_when_settled(log, held.segment, timeout)
            raise
        except BaseException:
            log.unhold(held.segment)
            raise
        log.unhold(held.segment)
        self._counters.bytes_read += len(images) * layout.record_bytes
        now = self._clock()
        return [
            self._refusal(layout, image, held.sequence, key, shard, now) if is_live else self._nothing_there()
            for image, is_live, key in zip(images, held.are_live, keys, strict=True)
        ]

    def _refusal(
        self, layout: RecordLayout, image: memoryview, sequence: int, key: bytes, shard: int, now: float
    ) -> RecordError | None:
        """What is wrong with a record that was read."""
        try:
            verify_record(image, layout, layout.all_parts, self._tag, sequence, key, shard, now)
        except RecordError as error:
            self._counters.refused[error.reason] += 1
            return error
        self._counters.reads += 1
        return None

    def _nothing_there(self) -> RecordError:
        self._counters.refused["stale"] += 1
        return RecordError("stale", "no live record was there")

    def forget(self, offset: int) -> bool:
        """The record is not wanted any more; False if it was not live. Its segment is free once all of it is
        dead.
        """
        return self._log.forget(offset)

    def rename(self, offset: int, name: int) -> None:
        """Name a record that `rebuild` found."""
        self._log.rename(offset, name)

    # --- reclaim ---

    def room(self, layout: RecordLayout, group: int = 0, *, is_reappend: bool = False) -> int:
        """How many records `append` takes before StoreFull."""
        return self._log.room(layout.fingerprint, layout.record_bytes, group, is_reappend=is_reappend)

    def reclaim_one(self, last_use: LastUse) -> Reclaim | None:
        """Choose a segment to reuse; None when none can be (all free, or operations under way in each).

        `last_use` maps an array of records' names to an array of times. The segment stays readable until
        `finish_reclaim`.
        """
        segment = self._log.victim(last_use)
        if segment is None:
            return None
        header = self._log.header_of(segment)
        assert header is not None, "a victim is in use"
        self._log.hold(segment)
        self._log.close(segment)
        self._writing.pop(segment, None)
        return Reclaim(
            segment, header.fingerprint, header.record_bytes, tuple(self._log.live_offsets(segment)),
            self._log.live_names(segment), self._log.reappend_budget(), self._tag,
        )  # fmt: skip

    def finish_reclaim(self, reclaim: Reclaim) -> int:
        """Forget what still lives in the segment and free it (once reads under way end). The number
        forgotten.
        """
        if reclaim.store != self._tag:
            return 0  # it went with its store
        forgotten = self._log.reclaim(reclaim.segment)
        self._log.unhold(reclaim.segment)
        return forgotten

    # --- the store as a whole ---

    @property
    def bdev_name(self) -> str:
        """The device's name."""
        return self._bdev.info.name

    @property
    def capacity_bytes(self) -> int:
        """The most the store may use of the device."""
        return self._log.capacity_bytes

    @property
    def segment_bytes(self) -> int:
        return self._log.segment_bytes

    async def start_over(self) -> None:
        """After `StoreLost`: make a new store on the blank device, with the old one's epochs. Raises ConfigError when it
        is not blank, BdevError.
        """
        assert self.is_lost, "a store that is there is not thrown away"
        while self._appending:  # to the device that is gone: they fail, each by its deadline
            await self._drained.park()
        found = await _find_superblock(self._bdev, self._deadline_s, may_overwrite=False)
        if found is not None and found.store != self._successor:
            raise ConfigError("$.store", f"bdev {self.bdev_name} holds another store now: {found.store}")
        old = self._superblock
        self._successor = self._successor or secrets.token_hex(16)
        fresh = Superblock(
            store=self._successor,
            segment_bytes=old.segment_bytes,
            incarnation=old.incarnation,
            epochs=old.epochs,
        )
        await self._write_superblock(fresh)
        self._log = _make_log(fresh, self._log.capacity_bytes)
        self._tag = fresh.store_tag
        self._writing.clear()
        self.is_lost, self._successor = False, ""

    async def _recognise(self) -> None:
        """If the device was away: is this store still on it? Raises StoreLost."""
        if not self.is_lost and self._bdev.stats.reconnects == self._reconnects:
            return
        async with self._recognising:
            reconnects = self._bdev.stats.reconnects
            if not self.is_lost and reconnects != self._reconnects:
                found = await _read_superblock(self._bdev, self._deadline_s)
                self.is_lost = found is None or found.store != self._superblock.store
                self._reconnects = reconnects
        if self.is_lost:
            raise StoreLost(self.bdev_name)

    @property
    def epochs(self) -> Mapping[str, int]:
        """Weights generation per space name, as persisted."""
        return self._superblock.epochs

    @property
    def incarnation(self) -> int:
        """How often the store has been opened."""
        return self._superblock.incarnation

    async def set_epoch(self, space: str, epoch: int) -> None:
        """Persist a space's epoch. On return it survives a crash, and the loss of either slot of the superblock: the other
        must not bring the blocks of old weights back. Raises BdevError, StoreLost.
        """
        await self._recognise()
        with trio.CancelScope(shield=True):
            async with self._superblock_lock:
                await self._write_superblock(self._superblock.with_epoch(space, epoch))
                await self._write_superblock(self._superblock.changed())

    async def flush(self) -> None:
        """Return when every append that has returned survives a power loss."""
        await self._bdev.flush(self._soon())

    async def seal(self) -> None:
        """Close and seal the open segments, so that a restart need not verify their payloads."""
        for segment in self._log.open_segments():
            if self._writing[segment].runs or self._writing[segment].has_failed:
                continue
            del self._writing[segment]
            self._log.hold(segment)
            self._log.close(segment)
            await self._seal(segment)
            self._log.unhold(segment)

    async def aclose(self) -> None:
        """Seal and flush. The bdev stays open: it is the caller's. No append may be under way. Raises BdevError, StoreLost."""
        with trio.CancelScope(shield=True):
            await self._recognise()
            await self.seal()
            await self.flush()

    def stats(self) -> StoreStats:
        """A snapshot."""
        counters = self._counters
        return StoreStats(
            store=self._superblock.store,
            incarnation=self.incarnation,
            log=self._log.stats(),
            reads=counters.reads,
            bytes_read=counters.bytes_read,
            appends=counters.appends,
            bytes_appended=counters.bytes_appended,
            seal_failures=counters.seal_failures,
            refused=dict(counters.refused),
        )

    def check_integrity(self) -> None:
        """Assert the log's invariants."""
        self._log.check_integrity()

    # --- inside: writing ---

    def _soon(self) -> float:
        return trio.current_time() + self._deadline_s

    def _check_ready(self) -> None:
        if not self._is_rebuilt:
            raise LocalProtocolError("not_rebuilt", "call rebuild before append or read")

    def _place(
        self,
        layout: RecordLayout,
        images: Sequence[memoryview],
        names: Sequence[int],
        group: int,
        is_reappend: bool,
    ) -> list[_Run]:
        """Give records their places, stamp them, and hold the segments."""
        runs: list[_Run] = []
        placed, step = 0, layout.record_bytes
        while placed < len(images):
            most = min(len(images) - placed, max(1, _MAX_RUN_BYTES // step))
            placement = self._log.place(
                layout.fingerprint, step, group, names=names[placed : placed + most], is_reappend=is_reappend
            )
            assert placement is not None, "room was checked"
            stop = placed + placement.records
            runs.append(self._start_run(placement, [image[:step] for image in images[placed:stop]]))
            for image in images[placed:stop]:
                stamp(image, layout, self._tag, placement.sequence)
            placed = stop
        return runs

    def _start_run(self, placement: Placement, images: Sequence[memoryview]) -> _Run:
        if placement.opens is not None:
            self._writing[placement.segment] = _Writing(placement.opens)
        writing = self._writing[placement.segment]
        writing.runs += 1
        writing.is_full |= placement.seals
        self._log.hold(placement.segment)
        return _Run(placement.segment, placement.offset, placement.opens, writing, images)

    async def _write_run(self, run: _Run, deadline: float) -> None:
        writing = run.writing
        with self._giving_back(run.segment):
            try:
                await self._ensure_header(run, deadline)
                group = writing.header.group
                await self._write(run.offset, run.images, deadline, group)
            except BdevError:
                writing.has_failed = True
                raise
            finally:
                writing.runs -= 1
                is_over = not writing.runs and (writing.is_full or writing.is_headless)
                if is_over:
                    del self._writing[run.segment]
            if is_over and not writing.has_failed:
                await self._seal(run.segment)

    async def _write(
        self, offset: int, buffers: Sequence[memoryview], deadline: float, group: int = 0
    ) -> None:
        """Every write of the store: never to a device that was away and has not been looked at since."""
        if self._bdev.stats.reconnects != self._reconnects:
            length = total_bytes(buffers)
            raise BdevError(self.bdev_name, "write", offset, length, "unavailable", "the device was away")
        await self._bdev.write_from(offset, buffers, deadline, placement=group)

    async def _ensure_header(self, run: _Run, deadline: float) -> None:
        """The run that opens the segment writes its header; the others wait for that."""
        writing = run.writing
        if run.opens is None:
            await writing.has_header.wait()
            if writing.is_headless:
                why = "the header of its segment could not be written"
                status = writing.header_failure
                raise BdevError(
                    self._bdev.info.name, "write", run.offset, total_bytes(run.images), status, why
                )
            return
        try:
            await self._write_segment_block(run.segment, run.opens, deadline)
        except BdevError as error:
            writing.is_headless = True
            if error.status == "unavailable":
                writing.header_failure = error.status
            self._log.close(run.segment)
            raise
        finally:
            writing.has_header.set()

    async def _write_segment_block(
        self, segment: int, header: SegmentHeader, deadline: float, *, is_seal: bool = False
    ) -> None:
        block = aligned_buffer(HEADER_BLOCK)
        header.pack_into(block, is_seal=is_seal)
        offset = self._log.start_of(segment) + (HEADER_BLOCK if is_seal else 0)
        await self._write(offset, [block], deadline, header.group)
        self._log.add_overhead(HEADER_BLOCK)

    async def _seal(self, segment: int) -> None:
        """Everything in the segment is written: say so on the device. Failing is harmless, a restart then
        verifies more.
        """
        header = self._log.header_of(segment)
        if header is None:
            return
        self._log.hold(segment)
        try:
            with self._giving_back(segment):
                await self._bdev.flush(self._soon())
                await self._write_segment_block(segment, header, self._soon(), is_seal=True)
        except BdevError:
            self._counters.seal_failures += 1

    async def _write_superblock(self, superblock: Superblock) -> None:
        """Write the next superblock, flush, read it back. It is in force only if all of that worked."""
        content = sb.encode(superblock)
        offset = sb.slot_offset(superblock.generation)
        written, back = aligned_buffer(len(content)), aligned_buffer(len(content))
        written[:] = content
        await self._write(offset, [written], self._soon())
        await self._bdev.flush(self._soon())
        await self._bdev.read_into(offset, [back], self._soon())
        if back != written:
            raise BdevError(
                self._bdev.info.name,
                "probe",
                offset,
                len(content),
                "io_error",
                "what was written reads back differently",
            )
        self._log.add_overhead(len(content))
        self._superblock = superblock

    # --- inside: reading ---

    async def _read(
        self, layout: RecordLayout, offset: int, image: memoryview, mask: int, deadline: float
    ) -> int:
        """Fill the image; the sequence number of the segment it came from."""
        log = self._log  # the one that has the hold: `start_over` makes another
        held = log.hold_live(offset)
        if held is None:
            raise RecordError("stale", f"no live record at {offset}")
        segment, sequence = held
        try:
            if mask == layout.all_parts:
                await self._bdev.read_into(offset, (image,), deadline)
                self._counters.bytes_read += layout.record_bytes
            else:
                await self._read_extents(layout, mask, offset, image, deadline)
        except BdevTimeout as timeout:
            _unhold_when_settled(log, segment, timeout)
            raise
        except BaseException:
            log.unhold(segment)
            raise
        log.unhold(segment)
        return sequence

    async def _read_extents(
        self, layout: RecordLayout, mask: int, offset: int, image: memoryview, deadline: float
    ) -> None:
        extents = layout.extents(mask)
        reads = [
            partial(
                self._bdev.read_into, offset + start + layout.gap * (start > 0), [image[start:stop]], deadline
            )
            for start, stop in extents
        ]
        raise_as_one(await run_batch(reads))
        self._counters.bytes_read += sum(stop - start for start, stop in extents)

    # --- inside: holds ---

    @contextmanager
    def _holding(self, segments: Sequence[int]) -> Iterator[None]:
        log = self._log
        for segment in segments:
            log.hold(segment)
        try:
            yield
        finally:
            for segment in segments:
                log.unhold(segment)

    @contextmanager
    def _giving_back(self, segment: int) -> Iterator[None]:
        """Give a hold back at the end or, where the device may still be at it, once it has settled."""
        log = self._log  # the one that has the hold: `start_over` makes another
        try:
            yield
        except BdevTimeout as timeout:
            _unhold_when_settled(log, segment, timeout)
            raise
        except BaseException:
            log.unhold(segment)
            raise
        log.unhold(segment)


def _unhold_when_settled(log: SegmentLog, segment: int, timeout: BdevTimeout) -> None:
    async def settle() -> None:
        await timeout.settled()
        log.unhold(segment)

    trio.lowlevel.spawn_system_task(settle)


def _make_log(superblock: Superblock, capacity_bytes: int) -> SegmentLog:
    try:
        return SegmentLog(
            capacity_bytes=capacity_bytes,
            segment_bytes=superblock.segment_bytes,
            store=superblock.store_tag,
            first_sequence=superblock.incarnation << 32,
        )
    except ValueError as error:
        raise ConfigError("$.store", str(error)) from error


async def _find_superblock(bdev: Bdev, deadline_s: float, *, may_overwrite: bool) -> Superblock | None:
    """The store's superblock, or None on a device that is blank or may be overwritten."""
    found = await _read_superblock(bdev, deadline_s)
    if found is None:
        if not may_overwrite:
            await _check_blank(bdev, deadline_s)
        await bdev.write_from(0, [aligned_buffer(METADATA_BYTES)], trio.current_time() + deadline_s)
    return found


async def _read_superblock(bdev: Bdev, deadline_s: float) -> Superblock | None:
    if bdev.info.size_bytes < METADATA_BYTES:
        return None
    head = aligned_buffer(METADATA_BYTES)
    await bdev.read_into(0, [head], trio.current_time() + deadline_s)
    return sb.newest(head)


async def _check_blank(bdev: Bdev, deadline_s: float) -> None:
    for offset, length in _places_to_look(bdev.info.size_bytes):
        sample = aligned_buffer(length)
        await bdev.read_into(offset, [sample], trio.current_time() + deadline_s)
        if sample != bytes(length):
            raise ConfigError(
                "$.store",
                f"bdev {bdev.info.name} holds data at {offset:,} that is not a dpurt store's (or both superblocks of one "
                "are damaged); it is left untouched. If nobody needs it, `dpurt serve --format` makes a store of it",
            )


def _places_to_look(size: int) -> list[tuple[int, int]]:
    """(offset, length) of the head, of samples spread over the rest, and of the end."""
    if size <= _BLANK_CHECK_BYTES:
        return [(0, size)]
    stride = max(_SAMPLE_BYTES, size // _SAMPLES // HEADER_BLOCK * HEADER_BLOCK)
    starts = [
        *range(_BLANK_CHECK_BYTES, size - _SAMPLE_BYTES, stride),
        max(_BLANK_CHECK_BYTES, size - _SAMPLE_BYTES),
    ]
    return [(0, _BLANK_CHECK_BYTES), *((start, min(_SAMPLE_BYTES, size - start)) for start in starts)]
