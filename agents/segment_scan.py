"""Finding the records on a device after a restart.

Theory of operation. All segment headers are read first. Then the records of each segment of a known space are
visited at the segment's fixed stride by a few workers, each with its own scratch memory: only the headers in
a sealed segment with large records, else whole chunks. In segments that were not sealed the payload CRCs are
verified, and the headers of torn records are zeroed, after which the segment may be sealed. Where a block was
stored twice the later one counts.

A part of the device that cannot be read loses its records, not the restart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.core.record import ALIGN, RecordError, RecordHeader, RecordLayout, bad_parts, unpack_header
from dpurt.core.segment_log import FIRST_RECORD, HEADER_BLOCK, HeaderError, SegmentHeader, SegmentLog
from dpurt.errors import BdevError, BdevTimeout

__all__ = ["Rebuilt", "SegmentScan", "StoredRecord"]

_WORKERS = 16
_CHUNK_BYTES = 1 << 20
_SMALL_RECORD_BYTES = 64 << 10  # below this, reading records whole is cheaper than one operation per header
_UNUSED = (
    "blank",
    "magic",
    "version",
    "fingerprint",
    "stale",
)  # what an earlier use of the segment left: no loss
_TORN = ("header_crc", "checksum")

_Job = TypeVar("_Job")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record found on the device."""

    offset: int
    header: RecordHeader


@dataclass(slots=True, kw_only=True)
class Rebuilt:
    """What a restart found. `records` are parents first (by position in their chain); `dropped` counts lost
    ones by reason.

    ``"torn"`` is also `torn`; ``"unreadable"`` counts failed device reads, one each; `foreign_segments` are
    those of spaces not asked for (an old epoch, a removed space): they are free now, and their records were
    not visited.
    """

    records: list[StoredRecord] = field(default_factory=list)
    torn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    foreign_segments: int = 0
    seconds: float = 0.0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    index: int
    header: SegmentHeader
    layout: RecordLayout
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Slots [first, first + count) of a segment; `length` bytes are read from the first on."""

    segment: _Segment
    first: int
    count: int
    length: int


class SegmentScan:
    """One scan of one device: `run`, then `adopt`."""

    def __init__(
        self,
        bdev: Bdev,
        log: SegmentLog,
        layouts: Mapping[bytes, RecordLayout],
        wall_now: float,
        deadline_s: float,
    ) -> None:
        self._bdev = bdev
        self._log = log
        self._layouts = layouts
        self._wall_now = wall_now
        self._deadline_s = deadline_s
        self._segments: list[_Segment] = []
        self._torn: list[tuple[_Segment, int]] = []
        self._unscrubbed: set[int] = set()
        self._found: dict[tuple[bytes, bytes, int], StoredRecord] = {}
        self._rebuilt = Rebuilt()

    async def run(self, on_progress: Callable[[int, int], None] | None = None) -> Rebuilt:
        """Read the device and zero the headers of torn records. Leaves the log and every valid record alone."""
        start = trio.current_time()
        await self._work(self._read_segment_header, iter(range(self._log.num_segments)), FIRST_RECORD)
        scratch_bytes = max([_CHUNK_BYTES, *(s.header.record_bytes for s in self._segments)])
        await self._work(self._read_chunk, self._chunks(on_progress), scratch_bytes)
        await self._work(self._scrub, iter(self._torn), ALIGN)
        self._rebuilt.records = sorted(self._found.values(), key=lambda r: (r.header.position, r.offset))
        self._rebuilt.torn = self._rebuilt.dropped["torn"]
        self._rebuilt.seconds = trio.current_time() - start
        return self._rebuilt

    def adopt(self) -> list[int]:
        """Tell the log what was found. The segments, until now unsealed, that may be sealed."""
        slots: dict[int, list[int]] = defaultdict(list)
        for record in self._rebuilt.records:
            index = self._log.segment_of(record.offset)
            into_records = record.offset - self._log.start_of(index) - FIRST_RECORD
            slots[index].append(into_records // self._layouts[record.header.fingerprint].record_bytes)
        for segment in sorted(self._segments, key=lambda s: s.header.sequence):
            self._log.adopt(segment.index, segment.header, slots[segment.index])
        verified = [s.index for s in self._segments if not s.is_sealed and slots[s.index]]
        return [index for index in verified if index not in self._unscrubbed]

    # --- inside ---

    async def _work(
        self, visit: Callable[[_Job, memoryview], Awaitable[None]], jobs: Iterator[_Job], scratch_bytes: int
    ) -> None:
        async def worker() -> None:
            scratch = aligned_buffer(scratch_bytes)
            for job in jobs:
                try:
                    await visit(job, scratch)
                except BdevError as error:
                    self._rebuilt.dropped["unreadable"] += 1
                    if isinstance(error, BdevTimeout):  # the device may still write into the old one
                        scratch = aligned_buffer(scratch_bytes)

        async with trio.open_nursery() as nursery:
            for _ in range(_WORKERS):
                nursery.start_soon(worker)

    async def _read(self, offset: int, into: memoryview) -> None:
        await self._bdev.read_into(offset, [into], trio.current_time() + self._deadline_s)
        self._rebuilt.bytes_read += len(into)

    async def _read_segment_header(self, index: int, scratch: memoryview) -> None:
        await self._read(self._log.start_of(index), scratch)
        try:
            header = SegmentHeader.unpack(scratch)
        except HeaderError:
            return
        if header.store != self._log.store:
            return
        layout = self._layouts.get(header.fingerprint)
        if layout is None or layout.record_bytes != header.record_bytes:
            self._rebuilt.foreign_segments += 1
            return
        self._segments.append(_Segment(index, header, layout, _is_sealed(header, scratch[HEADER_BLOCK:])))

    def _chunks(self, on_progress: Callable[[int, int], None] | None) -> Iterator[_Chunk]:
        for done, segment in enumerate(self._segments):
            yield from self._chunks_of(segment)
            if on_progress is not None:
                on_progress(done + 1, len(self._segments))

    def _chunks_of(self, segment: _Segment) -> Iterator[_Chunk]:
        stride = segment.header.record_bytes
        slots = self._log.slots_for(stride)
        reads_whole = not segment.is_sealed or stride <= _SMALL_RECORD_BYTES
        step = max(1, _CHUNK_BYTES // stride) if reads_whole else 1
        for first in range(0, slots, step):
            count = min(step, slots - first)
            yield _Chunk(
                segment, first, count, count * stride if reads_whole else segment.layout.header_bytes
            )

    async def _read_chunk(self, chunk: _Chunk, scratch: memoryview) -> None:
        segment, stride = chunk.segment, chunk.segment.header.record_bytes
        await self._read(self._log.offset_of(segment.index, chunk.first, stride), scratch[: chunk.length])
        for i in range(chunk.count):
            offset = self._log.offset_of(segment.index, chunk.first + i, stride)
            self._examine(segment, offset, scratch[i * stride : (i + 1) * stride])

    def _examine(self, segment: _Segment, offset: int, image: memoryview) -> None:
        try:
            header = unpack_header(image, segment.layout)
            self._check(segment, header, image)
        except RecordError as error:
            reason = "torn" if error.reason in _TORN else error.reason
            if reason not in _UNUSED:
                self._rebuilt.dropped[reason] += 1
            if reason == "torn":
                self._torn.append((segment, offset))
            return
        self._keep(StoredRecord(offset, header))

    def _check(self, segment: _Segment, header: RecordHeader, image: memoryview) -> None:
        if (header.store, header.sequence) != (segment.header.store, segment.header.sequence):
            raise RecordError("stale")
        if 0 < header.expires_at <= self._wall_now:
            raise RecordError("expired")
        if not segment.is_sealed and bad_parts(segment.layout, image, header, segment.layout.all_parts):
            raise RecordError("checksum")

    def _keep(self, record: StoredRecord) -> None:
        header = record.header
        identity = header.fingerprint, header.key, header.shard
        other = self._found.get(identity)
        if other is not None:
            self._rebuilt.dropped["duplicate"] += 1
        if other is None or (other.header.sequence, other.offset) < (header.sequence, record.offset):
            self._found[identity] = record

    async def _scrub(self, torn: tuple[_Segment, int], zeros: memoryview) -> None:
        segment, offset = torn
        self._unscrubbed.add(segment.index)
        await self._bdev.write_from(offset, [zeros], trio.current_time() + self._deadline_s)
        self._unscrubbed.discard(segment.index)


def _is_sealed(header: SegmentHeader, block: memoryview) -> bool:
    try:
        return SegmentHeader.unpack(block, is_seal=True) == header
    except HeaderError:
        return False
