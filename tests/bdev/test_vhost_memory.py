"""What becomes of an operation's pieces on their way to a vhost-user ring."""

from __future__ import annotations

import struct

import pytest

from dpurt.bdev import DeviceMemory
from dpurt.bdev.vhost_memory import BOUNCE_CHUNK_BYTES, BouncePool, MemoryMap, Planner, TransferLimits

BASE, SIZE = 1 << 40, 1 << 20
BOUNCE = 1 << 41
KIB = 1 << 10


def planner(segment_bytes: int = 128 * KIB, total_bytes: int = SIZE) -> tuple[Planner, MemoryMap]:
    memory = MemoryMap()
    memory.add(DeviceMemory(-1, BASE, SIZE))
    bounce = BouncePool(BOUNCE, 2 * BOUNCE_CHUNK_BYTES, BOUNCE_CHUNK_BYTES)
    return Planner(TransferLimits(total_bytes, 126, segment_bytes), memory, bounce), memory


def segments(pieces: bytes) -> list[tuple[int, int]]:
    return [(address, length) for address, length, _, _ in struct.iter_unpack("<QIHH", pieces)]


def test_a_piece_is_cut_at_the_limit_of_a_segment() -> None:
    made, _ = planner()
    transfer = made.plan([(BASE, 300 * KIB)], is_read=True)
    cut = [(BASE, 128 * KIB), (BASE + 128 * KIB, 128 * KIB), (BASE + 256 * KIB, 44 * KIB)]
    assert (transfer.length, segments(transfer.pieces), transfer.bounced) == (300 * KIB, cut, None)


def test_a_request_takes_no_more_than_its_limit() -> None:
    made, _ = planner(total_bytes=128 * KIB)
    transfer = made.plan([(BASE, 100 * KIB), (BASE + 200 * KIB, 100 * KIB)], is_read=True)
    assert segments(transfer.pieces) == [(BASE, 100 * KIB), (BASE + 200 * KIB, 28 * KIB)]
    assert transfer.length == 128 * KIB


def test_a_slot_that_comes_again_is_not_packed_again_and_each_way_has_its_own() -> None:
    made, _ = planner()
    read = made.plan([(BASE, SIZE)], is_read=True)
    write = made.plan([(BASE, SIZE)], is_read=False)
    assert made.plan([(BASE, SIZE)], is_read=True) is read
    assert made.plan([(BASE, SIZE)], is_read=False) is write
    assert read.pieces != write.pieces
    assert made.plan([(BASE, SIZE // 2)], is_read=True).length == SIZE // 2


def test_what_goes_the_long_way_takes_chunks_each_time_and_waits_when_there_are_none() -> None:
    made, _ = planner()
    pieces = [(0x1000, BOUNCE_CHUNK_BYTES)]
    first, second, third = (made.plan(pieces, is_read=True) for _ in range(3))
    assert first.bounced is not None
    assert second.bounced is not None
    assert set(first.bounced.chunks).isdisjoint(second.bounced.chunks)
    assert (third.length, third.bounced) == (0, None)


def test_memory_added_later_is_reached_where_it_is() -> None:
    made, memory = planner()
    assert made.plan([(0x10000, 4096)], is_read=True).bounced is not None
    memory.add(DeviceMemory(-1, 0x10000, 4096))
    transfer = made.plan([(0x10000, 4096)], is_read=True)
    assert (segments(transfer.pieces), transfer.bounced) == ([(0x10000, 4096)], None)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpurt.bdev.vhost_memory._MAX_REMEMBERED", 2)
    made, _ = planner()
    for at in range(5):
        made.plan([(BASE + at * 4096, 4096)], is_read=True)
    assert len(made._remembered) <= 2
    assert segments(made.plan([(BASE, 4096)], is_read=True).pieces) == [(BASE, 4096)]
