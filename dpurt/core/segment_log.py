"""Where records go on a bdev: a log of fixed-size segments, reclaimed whole. Pure: decides, never writes.

    |<- 64 KiB ->|<----------- segment_bytes ----------->|<- ...
    | superblock | header | seal | rec | rec | ... | rest | next segment
                 | 4 KiB  | 4 KiB|<-- fixed stride ->|

A segment belongs to one *stream* (space, placement group), so its records have one size, and a torn record
never stops a scan.

    free --place--> open --last slot placed--> full --reclaimed, or its last record dead, and no holds--> free

A record is live from `place` until `forget`, under the *name* its owner gave it (any integer), so that whose records a
segment holds needs no search. `hold` keeps a segment from being reused while an operation
touches it, reads and writes alike. A use of a segment has its own `sequence`, never used before by this
store, so records of an earlier use are recognised.

Reclaim drops records, it does not compact: KV is ephemeral. A few hot ones may be re-appended within the
write amplification budget; for them one free segment is kept in reserve. The victim is the segment whose live
records are worth least, each weighing its size times the rank of its last use; only the `SAMPLE` that were filled
first and the `SAMPLE` emptiest of `WINDOW` more, the next ones each time, are compared, so the cost does not grow with the device.

Device I/O, record checksums and time are left to `dpurt.agents.block_store`.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

__all__ = [
    "FIRST_RECORD",
    "METADATA_BYTES",
    "HeaderError",
    "Placement",
    "SegmentHeader",
    "SegmentLog",
    "SegmentLogStats",
]

METADATA_BYTES = 64 << 10
HEADER_BLOCK = 4096
FIRST_RECORD = 2 * HEADER_BLOCK
MIN_SEGMENTS = 3
MAX_WRITE_AMPLIFICATION = 1.1
SAMPLE = 16
WINDOW = 1024
_RESERVE = 1
_MAGIC = b"dpurtSEG"
_HEADER = struct.Struct(
    "<8sI4s 8sQ 32s QI"
)  # magic crc kind | store sequence | fingerprint | record_bytes group
_COVERED_FROM = 12

LastUse = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]  # of the records of these names
Stream = tuple[bytes, int]


class HeaderError(ValueError):
    """A segment header or seal is blank, torn, or another store's."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment's header says; the seal block repeats it once all its records are written."""

    store: bytes
    sequence: int
    fingerprint: bytes
    record_bytes: int
    group: int = 0

    def pack_into(self, block: memoryview, *, is_seal: bool = False) -> None:
        """Fill one 4096-byte block."""
        kind = b"seal" if is_seal else b"head"
        _HEADER.pack_into(
            block,
            0,
            _MAGIC,
            0,
            kind,
            self.store,
            self.sequence,
            self.fingerprint,
            self.record_bytes,
            self.group,
        )
        block[_HEADER.size : HEADER_BLOCK] = bytes(HEADER_BLOCK - _HEADER.size)
        struct.pack_into("<I", block, len(_MAGIC), crc32c(block[_COVERED_FROM:HEADER_BLOCK]))

    @classmethod
    def unpack(cls, block: memoryview, *, is_seal: bool = False) -> SegmentHeader:
        """Decode a header (or seal) block. Raises HeaderError."""
        magic, crc, kind, *fields = _HEADER.unpack_from(block, 0)
        if magic != _MAGIC or kind != (b"seal" if is_seal else b"head"):
            raise HeaderError("no segment header")
        if crc != crc32c(block[_COVERED_FROM:HEADER_BLOCK]):
            raise HeaderError("torn segment header")
        return cls(*fields)


class Placement(NamedTuple):
    """Where so many `records` go, side by side from `offset` on. `opens`: write this segment header first; `seals`: no slot
    is left in the segment after them.
    """

    offset: int
    segment: int
    sequence: int
    opens: SegmentHeader | None = None
    seals: bool = False
    records: int = 1


class HeldRun(NamedTuple):
    """Records side by side in a segment that is held once for all: which of them are live, 1 or 0 each."""

    segment: int
    sequence: int
    are_live: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLogStats:
    """A snapshot. Bytes are whole records (payload, header, padding) unless said otherwise.

    `usage_bytes` is what is taken of the device: metadata and whole segments that are not free.
    """

    capacity_bytes: int
    usage_bytes: int
    segments: int
    free_segments: int
    open_segments: int
    live_records: int
    live_bytes: int
    accepted_bytes: int
    reappended_bytes: int
    overhead_bytes: int
    reclaimed_segments: int
    reclaimed_records: int

    @property
    def write_amplification(self) -> float:
        """Host bytes written per byte accepted; 1.0 before the first."""
        if not self.accepted_bytes:
            return 1.0
        return (self.accepted_bytes + self.reappended_bytes + self.overhead_bytes) / self.accepted_bytes


class _State(enum.Enum):
    FREE = 0
    OPEN = 1
    FULL = 2


class _Segment:
    __slots__ = ("cursor", "header", "holds", "is_live", "live", "names", "state")

    def __init__(self) -> None:
        self.state = _State.FREE
        self.holds = 0
        self.header: SegmentHeader | None = None
        self.cursor = 0
        self.live = 0
        self.is_live = bytearray()
        self.names = array("q")

    def use(self, header: SegmentHeader, slots: int) -> None:
        self.state, self.header = _State.OPEN, header
        self.cursor = self.live = 0
        self.is_live = bytearray(slots)
        self.names = array("q", bytes(8 * slots))

    def free(self) -> None:
        self.state, self.header, self.cursor = _State.FREE, None, 0
        self.is_live, self.names = bytearray(), array("q")

    def live_slots(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(np.frombuffer(self.is_live, np.uint8))

    def live_names(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.names, np.int64)[self.live_slots()]

    @property
    def stream(self) -> Stream:
        assert self.header is not None
        return self.header.fingerprint, self.header.group

    @property
    def record_bytes(self) -> int:
        return self.header.record_bytes if self.header is not None else 0

    @property
    def live_bytes(self) -> int:
        return self.live * self.record_bytes


class SegmentLog:
    """The segments of one store. `first_sequence` must exceed every sequence the store ever used."""

    def __init__(self, *, capacity_bytes: int, segment_bytes: int, store: bytes, first_sequence: int) -> None:
        count = (capacity_bytes - METADATA_BYTES) // segment_bytes
        if segment_bytes % HEADER_BLOCK or segment_bytes <= FIRST_RECORD:
            raise ValueError(f"segment_bytes must be a multiple of {HEADER_BLOCK} above {FIRST_RECORD}")
        if count < MIN_SEGMENTS:
            needed = METADATA_BYTES + MIN_SEGMENTS * segment_bytes
            raise ValueError(
                f"capacity_bytes {capacity_bytes} holds {max(count, 0)} segments of {segment_bytes} bytes; "
                f"at least {MIN_SEGMENTS} are needed: raise it to {needed} or make segments smaller"
            )
        self.store = store
        self.segment_bytes = segment_bytes
        self.capacity_bytes = METADATA_BYTES + count * segment_bytes
        self._segments = [_Segment() for _ in range(count)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._full: OrderedDict[int, None] = OrderedDict()  # the first filled first
        self._open: dict[Stream, int] = {}
        self._window = 0
        self._live_records = self._live_bytes = 0
        self._next_sequence = first_sequence
        self._accepted = self._reappended = self._overhead = 0
        self._reclaimed_segments = self._reclaimed_records = 0

    # --- queries ---

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def segment_of(self, offset: int) -> int:
        """The segment that holds a byte of the device."""
        return (offset - METADATA_BYTES) // self.segment_bytes

    def start_of(self, segment: int) -> int:
        """Device offset of a segment's header."""
        return METADATA_BYTES + segment * self.segment_bytes

    def slots_for(self, record_bytes: int) -> int:
        """How many records of a size one segment holds."""
        return (self.segment_bytes - FIRST_RECORD) // record_bytes

    def offset_of(self, segment: int, slot: int, record_bytes: int) -> int:
        """Device offset of a record slot."""
        return self.start_of(segment) + FIRST_RECORD + slot * record_bytes

    def header_of(self, segment: int) -> SegmentHeader | None:
        """What the segment is used for now; None when it is free."""
        return self._segments[segment].header

    def is_live(self, offset: int) -> bool:
        """Whether a record was placed here and not forgotten."""
        located = self._locate(offset)
        return located is not None and bool(located[0].is_live[located[1]])

    def live_offsets(self, segment: int) -> list[int]:
        """Offsets of the segment's live records, ascending."""
        found = self._segments[segment]
        first = self.offset_of(segment, 0, found.record_bytes)
        return [first + slot * found.record_bytes for slot in found.live_slots().tolist()]

    def live_names(self, segment: int) -> npt.NDArray[np.int64]:
        """Their names, in the same order."""
        return self._segments[segment].live_names()

    def open_segments(self) -> list[int]:
        """Segments that still take records."""
        return sorted(self._open.values())

    def room(
        self, fingerprint: bytes, record_bytes: int, group: int = 0, *, is_reappend: bool = False
    ) -> int:
        """How many records `place` takes before reclaim is needed."""
        segment = self._open.get((fingerprint, group))
        slots = self.slots_for(record_bytes)
        left = 0 if segment is None else slots - self._segments[segment].cursor
        return left + max(0, len(self._free) - (0 if is_reappend else _RESERVE)) * slots

    def reappend_budget(self) -> int:
        """Bytes that may be re-appended now without passing `MAX_WRITE_AMPLIFICATION`, headers and seals to come included:
        two blocks for each open segment, two for one the records may open, two for seals under way.
        """
        allowed = int(self._accepted * (MAX_WRITE_AMPLIFICATION - 1.0))
        to_come = HEADER_BLOCK * (2 * len(self._open) + 4)
        return max(0, allowed - self._reappended - self._overhead - to_come)

    # --- placing and forgetting ---

    def place(
        self,
        fingerprint: bytes,
        record_bytes: int,
        group: int = 0,
        *,
        names: Sequence[int] = (0,),
        is_reappend: bool = False,
    ) -> Placement | None:
        """Take slots for records of these names, as many of them as lie side by side; None when a segment must be
        reclaimed first.
        """
        if self.slots_for(record_bytes) < 1:
            raise ValueError(
                f"a record of {record_bytes} bytes does not fit a segment of {self.segment_bytes}"
            )
        opens = None
        index = self._open.get((fingerprint, group))
        if index is None:
            if len(self._free) <= (0 if is_reappend else _RESERVE):
                return None
            index, _ = self._free.popitem(last=False)
            opens = self._open_segment(index, fingerprint, record_bytes, group)
        segment = self._segments[index]
        if segment.record_bytes != record_bytes:
            raise ValueError(f"records of this space have {segment.record_bytes} bytes, not {record_bytes}")
        slot = segment.cursor
        count = min(len(names), len(segment.is_live) - slot)
        segment.cursor += count
        segment.is_live[slot : slot + count] = b"\1" * count
        segment.names[slot : slot + count] = array("q", names[:count])
        self._count_live(segment, count)
        self._account(count * record_bytes, is_reappend)
        seals = segment.cursor == len(segment.is_live)
        if seals:
            self._close(index)
        assert segment.header is not None
        return Placement(
            self.offset_of(index, slot, record_bytes), index, segment.header.sequence, opens, seals, count
        )

    def forget(self, offset: int) -> bool:
        """The record is not wanted any more. False if it was not live. A full segment without live records is
        free at once.
        """
        located = self._locate(offset)
        if located is None or not located[0].is_live[located[1]]:
            return False
        segment, slot = located
        segment.is_live[slot] = 0
        self._count_live(segment, -1)
        self._free_if_dead(self.segment_of(offset))
        return True

    def close(self, segment: int) -> None:
        """Take no more records into an open segment."""
        if self._segments[segment].state is _State.OPEN:
            self._close(segment)
            self._free_if_dead(segment)

    def hold_live(self, offset: int) -> tuple[int, int] | None:
        """`hold` for a read of a live record: (segment, its sequence number), or None when there is no such record."""
        located = self._locate(offset)
        if located is None or not located[0].is_live[located[1]]:
            return None
        segment = located[0]
        segment.holds += 1
        assert segment.header is not None, "a segment with live records is in use"
        return self.segment_of(offset), segment.header.sequence

    def hold_run(self, offset: int, count: int, record_bytes: int) -> HeldRun | None:
        """`hold` for a read of so many records side by side; None when none of them is live, and nothing held."""
        located = self._locate(offset)
        if located is None or located[0].record_bytes != record_bytes:
            return None
        segment, slot = located
        are_live = bytes(segment.is_live[slot : slot + count]).ljust(count, b"\0")
        if 1 not in are_live:
            return None
        segment.holds += 1
        assert segment.header is not None, "a segment with live records is in use"
        return HeldRun(self.segment_of(offset), segment.header.sequence, are_live)

    def hold(self, segment: int) -> None:
        """An operation touches the segment."""
        self._segments[segment].holds += 1

    def unhold(self, segment: int) -> None:
        """The operation is over, the device done with it."""
        assert self._segments[segment].holds > 0, "a hold is given back once"
        self._segments[segment].holds -= 1
        self._free_if_dead(segment)

    def add_overhead(self, length: int) -> None:
        """Account bytes written that hold no record."""
        self._overhead += length

    # --- reclaim ---

    def victim(self, last_use: LastUse) -> int | None:
        """The segment whose loss costs least; None when all are free or held. Open ones only when no full one
        is left.
        """
        candidates = self._full_candidates() or self._without_holds(self.open_segments())
        if not candidates:
            return None
        names = [self.live_names(i) for i in candidates]
        weights = _recency_ranks(last_use(np.concatenate(names)))
        starts = np.cumsum([0, *map(len, names)])
        costs = [
            (float(weights[a:b].sum()) * self._segments[i].record_bytes, self._sequence(i), i)
            for i, a, b in zip(candidates, starts, starts[1:], strict=False)
        ]
        return min(costs)[2]

    def reclaim(self, segment: int) -> int:
        """Forget every live record of the segment; it is free once no hold is left. The number forgotten."""
        self.close(segment)
        offsets = self.live_offsets(segment)
        self._reclaimed_segments += 1
        self._reclaimed_records += len(offsets)
        for offset in offsets:
            self.forget(offset)
        return len(offsets)

    # --- restart ---

    def adopt(self, segment: int, header: SegmentHeader, slots: Sequence[int]) -> None:
        """After a scan, those with the lowest sequence first: the segment holds these live records, whose names are still to
        be told. It takes no more.
        """
        assert self._segments[segment].state is _State.FREE, "a segment is adopted once"
        self._next_sequence = max(self._next_sequence, header.sequence + 1)
        if not slots:
            return
        del self._free[segment]
        self._full[segment] = None
        adopted = self._segments[segment]
        adopted.use(header, self.slots_for(header.record_bytes))
        adopted.state = _State.FULL
        adopted.cursor = len(adopted.is_live)
        for slot in slots:
            adopted.is_live[slot] = 1
        self._count_live(adopted, len(slots))

    def rename(self, offset: int, name: int) -> None:
        """Name a live record."""
        located = self._locate(offset)
        assert located is not None, "a live record has a place"
        located[0].names[located[1]] = name

    # --- telling ---

    def stats(self) -> SegmentLogStats:
        """A snapshot."""
        return SegmentLogStats(
            capacity_bytes=self.capacity_bytes,
            usage_bytes=self.capacity_bytes - len(self._free) * self.segment_bytes,
            segments=len(self._segments),
            free_segments=len(self._free),
            open_segments=len(self._open),
            live_records=self._live_records,
            live_bytes=self._live_bytes,
            accepted_bytes=self._accepted,
            reappended_bytes=self._reappended,
            overhead_bytes=self._overhead,
            reclaimed_segments=self._reclaimed_segments,
            reclaimed_records=self._reclaimed_records,
        )

    def check_integrity(self) -> None:
        """Assert the invariants; for tests and idle times."""
        free = {i for i, s in enumerate(self._segments) if s.state is _State.FREE}
        assert sorted(free) == sorted(self._free), "the free list is the free segments, each once"
        opened = {i for i, s in enumerate(self._segments) if s.state is _State.OPEN}
        assert opened == set(self._open.values()), "one open segment per stream"
        assert set(self._full) == set(range(len(self._segments))) - free - opened
        assert self._live_records == sum(s.live for s in self._segments)
        assert self._live_bytes == sum(s.live_bytes for s in self._segments)
        for segment in self._segments:
            assert segment.live == sum(segment.is_live), "the live count is the live slots"
            assert not any(segment.is_live[segment.cursor :]), "nothing lives beyond the cursor"
            assert (segment.state is _State.FREE) == (segment.header is None)
            is_idle_and_dead = segment.state is _State.FULL and not segment.live and not segment.holds
            assert not is_idle_and_dead, "a wholly dead full segment is free"
        sequences = [s.header.sequence for s in self._segments if s.header is not None]
        assert len(set(sequences)) == len(sequences), "a sequence is used once"

    # --- inside ---

    def _locate(self, offset: int) -> tuple[_Segment, int] | None:
        index = self.segment_of(offset)
        if not 0 <= index < len(self._segments) or not self._segments[index].record_bytes:
            return None
        segment = self._segments[index]
        slot, rest = divmod(offset - self.start_of(index) - FIRST_RECORD, segment.record_bytes)
        return (segment, slot) if not rest and 0 <= slot < len(segment.is_live) else None

    def _open_segment(self, index: int, fingerprint: bytes, record_bytes: int, group: int) -> SegmentHeader:
        header = SegmentHeader(self.store, self._next_sequence, fingerprint, record_bytes, group)
        self._next_sequence += 1
        self._segments[index].use(header, self.slots_for(record_bytes))
        self._open[fingerprint, group] = index
        return header

    def _close(self, index: int) -> None:
        segment = self._segments[index]
        del self._open[segment.stream]
        segment.state = _State.FULL
        self._full[index] = None

    def _count_live(self, segment: _Segment, change: int) -> None:
        segment.live += change
        self._live_records += change
        self._live_bytes += change * segment.record_bytes

    def _account(self, num_bytes: int, is_reappend: bool) -> None:
        if is_reappend:
            self._reappended += num_bytes
        else:
            self._accepted += num_bytes

    def _free_if_dead(self, index: int) -> None:
        segment = self._segments[index]
        if segment.state is _State.FULL and not segment.live and not segment.holds:
            segment.free()
            del self._full[index]
            self._free[index] = None  # the longest-free is reused first: wear is spread

    def _full_candidates(self) -> list[int]:
        if len(self._full) <= 2 * SAMPLE:
            return self._without_holds(self._full)
        oldest = islice((i for i in self._full if not self._segments[i].holds), SAMPLE)
        emptiest = nsmallest(SAMPLE, self._next_window(), key=lambda i: self._segments[i].live_bytes)
        return sorted({*oldest, *emptiest})

    def _next_window(self) -> list[int]:
        """Those to be reclaimed among the next segments of the device, round and round."""
        count = min(WINDOW, len(self._segments))
        window = [(self._window + i) % len(self._segments) for i in range(count)]
        self._window = (self._window + count) % len(self._segments)
        return self._without_holds(i for i in window if self._segments[i].state is _State.FULL)

    def _without_holds(self, segments: Iterable[int]) -> list[int]:
        return [i for i in segments if not self._segments[i].holds]

    def _sequence(self, index: int) -> int:
        header = self._segments[index].header
        assert header is not None
        return header.sequence


def _recency_ranks(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 for the coldest, up to the number of distinct times for the hottest."""
    _, ranks = np.unique(times, return_inverse=True)
    return ranks.astype(np.float64) + 1.0
