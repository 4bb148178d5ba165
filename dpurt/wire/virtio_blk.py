"""virtio-blk: feature bits, the configuration space, request headers. What the bytes mean, not how they travel."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from dpurt.errors import RemoteProtocolError

__all__ = ["CONFIG_BYTES", "SECTOR", "BlkConfig", "BlkFeature", "pack_header", "pack_range"]

SECTOR = 512
READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES = 0, 1, 4, 11, 13
STATUS_OK, STATUS_IO_ERROR, STATUS_UNSUPPORTED = 0, 1, 2
STATUS_NONE = 0xFF
"""What we put where the device writes its status: still there, it wrote none."""

_CONFIG = struct.Struct("<QII4xI8x2xHIIIIIB3x")
_HEADER = struct.Struct("<IIQ")
_RANGE = struct.Struct("<QII")
CONFIG_BYTES = _CONFIG.size
HEADER_BYTES = _HEADER.size
RANGE_BYTES = _RANGE.size
_UNMAP = 1
_MAX_BLOCK = 4096
_MAX_SECTORS = 1 << 54  # offsets stay within 63 bits


class BlkFeature(IntFlag):
    """Feature bits of the device and of the ring that we know."""

    SIZE_MAX = 1 << 1
    SEG_MAX = 1 << 2
    READ_ONLY = 1 << 5
    BLK_SIZE = 1 << 6
    FLUSH = 1 << 9
    MQ = 1 << 12
    DISCARD = 1 << 13
    WRITE_ZEROES = 1 << 14
    INDIRECT = 1 << 28
    EVENT_IDX = 1 << 29
    PROTOCOL_FEATURES = 1 << 30
    VERSION_1 = 1 << 32


@dataclass(frozen=True, slots=True)
class BlkConfig:
    """The configuration space, with the fields whose feature is missing at their defaults (0: no limit)."""

    size_bytes: int
    block_size: int
    max_segment_bytes: int
    max_segments: int
    num_queues: int
    max_discard_bytes: int
    max_zeroes_bytes: int

    @classmethod
    def parse(cls, data: bytes, features: BlkFeature) -> BlkConfig:
        """Raises RemoteProtocolError for what no device can mean."""
        if len(data) < CONFIG_BYTES:
            raise RemoteProtocolError("config", f"{len(data)} bytes, expected {CONFIG_BYTES}")
        fields = _CONFIG.unpack_from(data)
        capacity, size_max, seg_max, blk_size, queues, discard, _, _, zeroes, _, may_unmap = fields
        block = blk_size if BlkFeature.BLK_SIZE in features else SECTOR
        if block.bit_count() != 1 or not SECTOR <= block <= _MAX_BLOCK:
            raise RemoteProtocolError("config", f"block size {block}, expected a power of two, 512 to 4096")
        if capacity > _MAX_SECTORS:
            raise RemoteProtocolError("config", f"capacity of {capacity} sectors")
        if BlkFeature.SIZE_MAX in features and 0 < size_max < block:
            raise RemoteProtocolError("config", f"segments of {size_max} bytes, blocks of {block}")
        return cls(
            size_bytes=capacity * SECTOR // block * block,
            block_size=block,
            max_segment_bytes=size_max // block * block if BlkFeature.SIZE_MAX in features else 0,
            max_segments=seg_max if BlkFeature.SEG_MAX in features else 1,
            num_queues=queues if BlkFeature.MQ in features else 1,
            max_discard_bytes=discard * SECTOR // block * block if BlkFeature.DISCARD in features else 0,
            max_zeroes_bytes=zeroes * SECTOR // block * block
            if BlkFeature.WRITE_ZEROES in features and may_unmap
            else 0,
        )


def pack_header(into: memoryview, at: int, kind: int, offset: int) -> None:
    """Write a request's header at `at`; `offset` in bytes, 0 for a flush, a discard or zeroes."""
    _HEADER.pack_into(into, at, kind, 0, offset // SECTOR)


def pack_range(into: memoryview, kind: int, offset: int, length: int) -> None:
    """Write the payload of a discard or write-zeroes request."""
    _RANGE.pack_into(into, 0, offset // SECTOR, length // SECTOR, _UNMAP if kind == WRITE_ZEROES else 0)
