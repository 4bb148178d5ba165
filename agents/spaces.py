"""One space at one epoch as the agents see it: identity, index, pool and where its slots lie. Data, not an actor.

Blocks have two names inside a node. The index's *handle* (generation and record id) is per space; a *ref* is node-wide and
names one shard of one block: ``((handle * num_shards + shard) << 18) | number``, with the number of its `SpaceState`.
A ref fits 63 bits (policies keep them in arrays, recordings in msgpack): of the handle's generation it has the low bits that
do, 13 with one shard. So a handle may be kept as long as one likes, a ref only by who hears of its block's drop.
Staging, storage and prefetch speak refs. A state's number is never reused, so a ref of a retired epoch finds nothing.
The flash tier keeps for each record its *owner*: a ref without the generation, which fits 63 bits; whether it still owns that
record is for its extent in the index to say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpurt.core.block_table import FIRST_SLOT
from dpurt.core.identity import Space
from dpurt.core.prefix_index import PrefixIndex
from dpurt.core.record import CRCS_AT, RecordLayout
from dpurt.core.staging import StagingPool
from dpurt.fabric.region import MemfdRegion

NUMBER_BITS = 18
MAX_NUMBER = (1 << NUMBER_BITS) - 1
_NUMBER_MASK = (1 << NUMBER_BITS) - 1


def number_of(ref: int) -> int:
    """The number of the space state a ref belongs to."""
    return ref & _NUMBER_MASK


def numbers_of(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """`number_of` for many."""
    return owners & _NUMBER_MASK


@dataclass(slots=True)
class Slab:
    """A space's share of its trust domain's region: `pool.num_slots` slots of `stride` bytes from `start`.

    One per space for the life of the node, and one more for its decode staging; they outlive epochs. Slots hold record
    images (header, then payload).
    """

    number: int
    region: MemfdRegion
    start: int
    stride: int
    pool: StagingPool
    holds_parts: bool = False  # decode staging: header and one part a slot

    def image(self, slot: int) -> memoryview:
        """The record image in a slot."""
        at = self.start + slot * self.stride
        return self.region.view[at : at + self.stride]

    def crcs(self, slot: int, start: int, stop: int) -> list[int]:
        """The CRC-32Cs of parts [start, stop) of the record in a slot, from its (verified) header."""
        at = self.start + slot * self.stride + CRCS_AT + 4 * start
        return list(struct.unpack_from(f"<{stop - start}I", self.region.view, at))


@dataclass(slots=True)
class SpaceState:
    """Everything about one space at one epoch."""

    name: str
    number: int
    space: Space
    fingerprint: bytes
    layout: RecordLayout
    index: PrefixIndex
    slab: Slab
    ttl_s: float
    recompute_s: float | None = None  # of a block by a host, if anybody said
    retired: bool = False
    num_shards: int = field(init=False)
    part_bytes: list[int] = field(init=False)
    _handle_mask: int = field(init=False)  # what of a handle is in a ref

    def __post_init__(self) -> None:
        self.num_shards = self.space.num_shards
        self._handle_mask = (1 << (63 - NUMBER_BITS - (self.num_shards - 1).bit_length())) - 1
        self.part_bytes = [group.part_bytes for group in self.space.geometry.groups]

    def ref(self, handle: int, shard: int) -> int:
        """The node-wide name of one shard of a block."""
        return (((handle & self._handle_mask) * self.num_shards + shard) << NUMBER_BITS) | self.number

    def refs(self, handles: Iterable[int], shard: int) -> list[int]:
        """`ref` for many handles (plain ints)."""
        step, first = self.num_shards << NUMBER_BITS, (shard << NUMBER_BITS) + self.number
        mask = self._handle_mask
        return [(handle & mask) * step + first for handle in handles]

    def handles_of(self, refs: Iterable[int]) -> list[int]:
        """The handles in refs of this state."""
        step = self.num_shards << NUMBER_BITS
        return [self._whole(ref // step) for ref in refs]

    def unref(self, ref: int) -> tuple[int, int]:
        """(handle, shard) of a ref of this state."""
        masked, shard = divmod(ref >> NUMBER_BITS, self.num_shards)
        return self._whole(masked), shard

    def _whole(self, masked: int) -> int:
        """The handle a ref was made of: the row's own, or, if that is another's by now, one that is nobody's."""
        block_id = masked & 0xFFFFFFFF
        if block_id >= self.index.table.high_water:  # of no block
            return masked
        handle = self.index.table.generation.item(block_id) << 32 | block_id
        return handle if handle & self._handle_mask == masked else masked

    def owner(self, handle: int, shard: int) -> int:
        """The owner of a record: row of the index, shard and number."""
        return self.ref(handle & 0xFFFFFFFF, shard)

    def rows_of(self, owners: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(ids, shards) of owners of this state."""
        return np.divmod(owners >> NUMBER_BITS, self.num_shards)

    def block_id(self, handle: int) -> int:
        """The index's id of a handle, -1 when that record is gone."""
        return -1 if self.retired else self.index.table.id_of(handle)

    def handle(self, block_id: int) -> int:
        """The handle of a live id."""
        return int(self.index.table.generation[block_id]) << 32 | block_id

    def known_handles(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """The handle of each id; -1 stays -1, and is no block's handle."""
        return np.where(ids >= 0, self.index.handles(ids), -1)

    def slot_of(self, block_id: int, shard: int) -> int:
        """The slot the index knows for a shard, -1 when there is none."""
        return self.index.table.where.item(block_id, FIRST_SLOT + shard)

    def extent_of(self, block_id: int, shard: int) -> int:
        """The shard's place on the bdev, -1 when there is none."""
        return self.index.table.where.item(block_id, self.index.table.first_extent + shard)

    def has_shard(self, block_id: int, shard: int) -> bool:
        """Is the shard on one of our tiers?"""
        return self.slot_of(block_id, shard) >= 0 or self.extent_of(block_id, shard) >= 0

    def may_place(self, block_id: int, shard: int) -> bool:
        """Is the block's parent on our tiers, so that this one may be (closure)?"""
        parent = self.index.table.parent.item(block_id)
        return parent < 0 or self.has_shard(parent, shard)

    def payload_at(self, slot: int, part_start: int = 0) -> int:
        """Offset in the region of a part of the payload in a slot."""
        at = self.slab.start + slot * self.slab.stride
        return at + self.layout.header_bytes + self.layout.part_offsets[part_start]

    def payload(self, slot: int) -> memoryview:
        """The payload in a slot."""
        at = self.payload_at(slot)
        return self.slab.region.view[at : at + self.layout.payload_bytes]
