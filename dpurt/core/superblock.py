"""The superblock: what a store must remember across restarts. Pure: bytes in, values out.

Two slots, A and B, share the metadata area; generation n goes to slot n mod 2, so a torn write leaves the one
before it. The body is JSON, for a human with `strings`; before it stand magic, CRC-32C and length.
"""

from __future__ import annotations

import struct

import msgspec
from crc32c import crc32c

from dpurt.core.record import align_up
from dpurt.core.segment_log import METADATA_BYTES

__all__ = ["SLOT_BYTES", "Superblock", "SuperblockError", "decode", "encode", "newest", "slot_offset"]

SLOT_BYTES = METADATA_BYTES // 2
_MAGIC = b"dpurtSB1"
_HEAD = struct.Struct("<8sII")  # magic, CRC of the rest of the slot's used bytes, body length


class SuperblockError(ValueError):
    """The slot is blank, torn, or something else's."""


class Superblock(msgspec.Struct, frozen=True, kw_only=True):
    """`store` is a random id in hex; `incarnation` counts opens, `generation` superblock writes; `epochs` is
    per space name.
    """

    store: str
    segment_bytes: int
    incarnation: int = 0
    generation: int = 0
    epochs: dict[str, int] = {}

    def opened(self) -> Superblock:
        """The next one, after one more open."""
        return self.changed(incarnation=self.incarnation + 1)

    def with_epoch(self, space: str, epoch: int) -> Superblock:
        return self.changed(epochs={**self.epochs, space: epoch})

    def changed(self, **fields: object) -> Superblock:
        return msgspec.structs.replace(self, generation=self.generation + 1, **fields)

    @property
    def store_tag(self) -> bytes:
        """The 8 bytes of the id that every segment and record carries."""
        return bytes.fromhex(self.store)[:8]


def slot_offset(generation: int) -> int:
    """Where a generation is written."""
    return generation % 2 * SLOT_BYTES


def encode(superblock: Superblock) -> bytes:
    """The slot's bytes, whole device blocks. Raises ValueError when there are too many epochs for a slot."""
    body = msgspec.json.encode(superblock)
    length = align_up(_HEAD.size + len(body))
    if length > SLOT_BYTES:
        raise ValueError(
            f"the superblock has {len(body)} bytes, at most {SLOT_BYTES - _HEAD.size} fit: too many spaces"
        )
    return (_HEAD.pack(_MAGIC, crc32c(body), len(body)) + body).ljust(length, b"\0")


def decode(slot: memoryview) -> Superblock:
    """Raises SuperblockError."""
    magic, crc, length = _HEAD.unpack_from(slot, 0)
    if magic != _MAGIC:
        raise SuperblockError("no superblock")
    body = slot[_HEAD.size : _HEAD.size + length]
    if len(body) != length or crc32c(body) != crc:
        raise SuperblockError("torn superblock")
    try:
        return msgspec.json.decode(body, type=Superblock)
    except msgspec.DecodeError as error:
        raise SuperblockError(f"unreadable superblock: {error}") from error


def newest(metadata: memoryview) -> Superblock | None:
    """The valid superblock of the highest generation in the metadata area."""
    found = []
    for offset in (0, SLOT_BYTES):
        try:
            found.append(decode(metadata[offset : offset + SLOT_BYTES]))
        except SuperblockError:
            continue
    return max(found, key=lambda each: each.generation, default=None)
