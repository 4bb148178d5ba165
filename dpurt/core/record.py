"""The record: one block of one shard as it lies on a bdev, and, byte for byte the same, in a staging slot.

    |<------- header_bytes ------->|<---- payload_bytes ---->|pad|
    | fixed | part CRCs | tokens |0| part 0 | part 1 | ...   | 0 |
    |<------------------- record_bytes (multiple of 4096) ------->|

So one contiguous, aligned I/O moves it either way, and a device may DMA it. All sizes are constant within a
space. The header holds enough to rebuild the prefix tree exactly, and a CRC-32C of itself (all `header_bytes`
but magic and CRC) and of each part. `store` and `sequence` say which store and which use of a segment wrote
the record, so a stale record of a reused segment is told apart from a fresh one; the block store stamps them,
all else is packed when the slot is filled.

The padding after the payload is not covered by any CRC and never served. Numbers are little-endian. Nothing
here copies a payload.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from crc32c import crc32c

from dpurt.core.identity import KEY_BYTES, PartRun, Space, mask_runs
from dpurt.errors import DpurtError

__all__ = [
    "ALIGN",
    "CRCS_AT",
    "RecordError",
    "RecordHeader",
    "RecordLayout",
    "align_up",
    "bad_parts",
    "pack_header",
    "part_crcs",
    "stamp",
    "unpack_header",
    "verify_record",
]

ALIGN = 4096
VERSION = 1
_MAGIC = b"dpurtREC"
_CRC_AT = len(_MAGIC)
_COVERED_FROM = _CRC_AT + 4
# magic crc version flags | num_parts token_bytes shard position | store sequence stored_at expires_at payload_bytes | ...
_FIXED = struct.Struct("<8sIHH IIII 8sQddQ 32s16s16s")
CRCS_AT = _FIXED.size  # where the part CRCs start in a record
_STAMP = struct.Struct("<8sQ")
_STAMP_AT = struct.calcsize("<8sIHH IIII")
_CRC = struct.Struct("<I")


def align_up(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


class RecordError(DpurtError):
    """What was read is not the record that was wanted: a miss, never wrong bytes.

    `reason` is one of ``"blank"``, ``"magic"``, ``"version"``, ``"header_crc"``, ``"fingerprint"``,
    ``"shape"``, ``"stale"``, ``"key"``, ``"shard"``, ``"checksum"``, ``"expired"``.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"record refused: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where things lie in every record of one space. `part_offsets` are relative to the payload and end with
    its length. `gap`: see `of_part`.
    """

    fingerprint: bytes
    header_bytes: int
    payload_bytes: int
    record_bytes: int
    part_offsets: tuple[int, ...]
    max_token_bytes: int
    gap: int = 0
    num_parts: int = field(init=False)
    all_parts: int = field(init=False)  # the mask of every part

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_parts", len(self.part_offsets) - 1)
        object.__setattr__(self, "all_parts", (1 << self.num_parts) - 1)

    @classmethod
    def of(cls, space: Space) -> RecordLayout:
        geometry = space.geometry
        header = align_up(_FIXED.size + 4 * len(geometry.groups) + geometry.block_token_bytes)
        return cls(
            fingerprint=space.fingerprint(),
            header_bytes=header,
            payload_bytes=geometry.payload_bytes,
            record_bytes=header + align_up(geometry.payload_bytes),
            part_offsets=geometry.part_offsets,
            max_token_bytes=geometry.block_token_bytes,
        )

    def of_part(self, index: int) -> RecordLayout:
        """The layout of an image with the header and this one part only: the `gap` bytes of the record behind the
        header, up to the part, are left out. Other parts have no place in it.
        """
        start, stop = self.extent(PartRun(index, index + 1))
        gap = max(start, self.header_bytes) - self.header_bytes
        return replace(
            self,
            record_bytes=stop - gap,
            part_offsets=tuple(offset - gap for offset in self.part_offsets),
            gap=gap,
        )

    def payload(self, image: memoryview) -> memoryview:
        """The payload inside a record image."""
        return image[self.header_bytes : self.header_bytes + self.payload_bytes]

    def part(self, image: memoryview, index: int) -> memoryview:
        """One part inside a record image."""
        start, stop = self.part_offsets[index], self.part_offsets[index + 1]
        return image[self.header_bytes + start : self.header_bytes + stop]

    def extent(self, run: PartRun) -> tuple[int, int]:
        """[start, stop) of a run of parts in the record, widened to whole device blocks."""
        start = self.header_bytes + self.part_offsets[run.start]
        stop = self.header_bytes + self.part_offsets[run.stop]
        return start // ALIGN * ALIGN, align_up(stop)

    def extents(self, parts_mask: int) -> list[tuple[int, int]]:
        """What must be read for the header and some parts: the least aligned [start, stop) pieces of the image, merged
        where they touch in the record. The first starts at the record's start, the others `gap` bytes further in it.
        """
        if parts_mask == self.all_parts:
            return [(0, self.record_bytes)]
        merged = [(0, self.header_bytes)]
        for run in mask_runs(parts_mask):
            start, stop = self.extent(run)
            if start <= merged[-1][1] and (len(merged) > 1 or not self.gap):
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


class RecordHeader(NamedTuple):
    """What a record says of itself. `part_crcs` is an ``array("I")``; times are wall-clock seconds,
    `expires_at` 0 is never.

    `position` is the block's index in its chain, so a parent's is smaller. `tokens` is empty where only a
    digest is known.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    shard: int
    position: int
    part_crcs: array[int]
    stored_at: float
    expires_at: float = 0.0
    tokens: bytes = b""
    flags: int = 0
    store: bytes = bytes(8)
    sequence: int = 0


def part_crcs(layout: RecordLayout, payload: memoryview, parts: Iterable[int] | None = None) -> array[int]:
    """CRC-32C of each of `parts` (default: all), in that order."""
    offsets = layout.part_offsets
    chosen = range(layout.num_parts) if parts is None else parts
    return array("I", [crc32c(payload[offsets[i] : offsets[i + 1]]) for i in chosen])


def bad_parts(layout: RecordLayout, image: memoryview, header: RecordHeader, parts_mask: int) -> int:
    """Mask of those of the parts whose bytes do not fit the header's CRCs."""
    return _bad_parts(layout, image, header.part_crcs, parts_mask)


def _bad_parts(layout: RecordLayout, image: memoryview, crcs: Sequence[int], parts_mask: int) -> int:
    offsets, base = layout.part_offsets, layout.header_bytes
    bad = 0
    runs = mask_runs(parts_mask) if parts_mask != layout.all_parts else (PartRun(0, layout.num_parts),)
    for run in runs:
        for i in range(run.start, run.stop):
            if crc32c(image[base + offsets[i] : base + offsets[i + 1]]) != crcs[i]:
                bad |= 1 << i
    return bad


def pack_header(into: memoryview, layout: RecordLayout, header: RecordHeader) -> None:
    """Write the header into the first `header_bytes` of a record image, but for its CRC, which `stamp` adds: until then it
    is no record. Raises ValueError if it does not fit the layout.
    """
    _check_fits(layout, header)
    table = header.part_crcs.tobytes() + header.tokens
    _FIXED.pack_into(
        into, 0, _MAGIC, 0, VERSION, header.flags,
        layout.num_parts, len(header.tokens), header.shard, header.position,
        header.store, header.sequence, header.stored_at, header.expires_at, layout.payload_bytes,
        header.fingerprint, header.key, header.parent,
    )  # fmt: skip
    end = _FIXED.size + len(table)
    into[_FIXED.size : end] = table
    into[end : layout.header_bytes] = bytes(layout.header_bytes - end)


def stamp(into: memoryview, layout: RecordLayout, store: bytes, sequence: int) -> None:
    """Say which store and which use of a segment this packed record is written to, and make its header whole."""
    _STAMP.pack_into(into, _STAMP_AT, store, sequence)
    _CRC.pack_into(into, _CRC_AT, crc32c(into[_COVERED_FROM : layout.header_bytes]))


def unpack_header(view: memoryview, layout: RecordLayout) -> RecordHeader:
    """Decode and check a header of the layout's space. Raises RecordError; never trusts a length it has not
    checked.
    """
    fields = _FIXED.unpack_from(view, 0)
    _check_intact(view, layout, fields)
    _check_shape(layout, fields)
    _, _, _, flags, num_parts, token_bytes, shard, position, store, sequence = fields[:10]
    stored_at, expires_at, _, fingerprint, key, parent = fields[10:]
    tokens_at = _FIXED.size + 4 * num_parts
    return RecordHeader(
        key=key,
        parent=parent,
        fingerprint=fingerprint,
        shard=shard,
        position=position,
        part_crcs=array("I", bytes(view[_FIXED.size : tokens_at])),
        stored_at=stored_at,
        expires_at=expires_at,
        tokens=bytes(view[tokens_at : tokens_at + token_bytes]),
        flags=flags,
        store=store,
        sequence=sequence,
    )


def verify_record(
    view: memoryview,
    layout: RecordLayout,
    parts_mask: int,
    store: bytes,
    sequence: int,
    key: bytes,
    shard: int,
    now: float,
) -> None:
    """Check that a record image is the one wanted, written in this use of its segment, and that the bytes of these
    parts are those stored: what `unpack_header` and `bad_parts` find out, without the header as an object. Raises
    RecordError.
    """
    fields = _FIXED.unpack_from(view, 0)
    _check_intact(view, layout, fields)
    _check_shape(layout, fields)
    if fields[9] != sequence or fields[8] != store:
        raise RecordError("stale", f"sequence {fields[9]}, the segment has {sequence}")
    if bad := _bad_parts(layout, view, _crcs_of(view, layout), parts_mask):
        raise RecordError("checksum", f"parts {bad:#x}")
    if fields[14] != key:
        raise RecordError("key", f"found {fields[14].hex()}, wanted {key.hex()}")
    if fields[6] != shard:
        raise RecordError("shard", f"found {fields[6]}, wanted {shard}")
    if 0 < fields[11] <= now:
        raise RecordError("expired")


def _crcs_of(view: memoryview, layout: RecordLayout) -> Sequence[int]:
    """The part table of an intact record; a fraction of the cost of an array."""
    return view[CRCS_AT : CRCS_AT + 4 * layout.num_parts].cast("I")


def _check_fits(layout: RecordLayout, header: RecordHeader) -> None:
    if header.fingerprint != layout.fingerprint:
        raise ValueError("the header's fingerprint is not the layout's")
    if len(header.key) != KEY_BYTES or len(header.parent) != KEY_BYTES or len(header.store) != 8:
        raise ValueError(f"keys have {KEY_BYTES} bytes and a store id 8")
    if len(header.part_crcs) != layout.num_parts:
        raise ValueError(f"the layout has {layout.num_parts} parts, the header {len(header.part_crcs)} CRCs")
    if len(header.tokens) > layout.max_token_bytes:
        raise ValueError(f"at most {layout.max_token_bytes} token bytes, got {len(header.tokens)}")


def _check_intact(view: memoryview, layout: RecordLayout, fields: tuple[object, ...]) -> None:
    if fields[0] != _MAGIC:
        raise RecordError("magic" if any(view[: _FIXED.size]) else "blank")
    if fields[2] != VERSION:
        raise RecordError("version", f"version {fields[2]}, this program reads {VERSION}")
    if fields[13] != layout.fingerprint:  # before the CRC: another space's header may have another length
        raise RecordError("fingerprint", "the record is of another space")
    if fields[1] != crc32c(view[_COVERED_FROM : layout.header_bytes]):
        raise RecordError("header_crc")


def _check_shape(layout: RecordLayout, fields: tuple[Any, ...]) -> None:
    if fields[4] != layout.num_parts or fields[12] != layout.payload_bytes:
        raise RecordError("shape", f"{fields[4]} parts and {fields[12]} bytes")
    if fields[5] > layout.max_token_bytes:
        raise RecordError("shape", f"{fields[5]} token bytes")
