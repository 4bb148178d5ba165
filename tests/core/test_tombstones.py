"""The bounded memory of losses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.tombstones import MAX_DETAIL, Tombstone, Tombstones


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=40))
def test_the_last_capacity_losses_are_remembered(capacity: int, losses: list[int]) -> None:
    stones = Tombstones(capacity)
    for now, number in enumerate(losses):
        stones.put(bytes([number]), "evicted", float(now))
    newest_first = list(dict.fromkeys(reversed(losses)))
    for number in range(10):
        died = len(losses) - 1 - losses[::-1].index(number) if number in newest_first[:capacity] else None
        assert stones.get(bytes([number])) == (
            None if died is None else Tombstone("evicted", float(died), "")
        )
    assert len(stones) == min(capacity, len(newest_first))


def test_the_last_of_two_losses_counts() -> None:
    stones = Tombstones(2)
    stones.put(b"k", "evicted", 1.0)
    stones.put(b"k", "checksum", 2.0, "bdev nvme0")
    assert stones.get(b"k") == ("checksum", 2.0, "bdev nvme0")
    assert len(stones) == 1


def test_a_block_that_is_back_has_no_tombstone() -> None:
    stones = Tombstones(2)
    stones.put(b"k", "lost", 1.0)
    stones.discard(b"k")
    stones.discard(b"k")
    assert stones.get(b"k") is None


def test_detail_is_cut_so_that_memory_is_bounded() -> None:
    stones = Tombstones(1)
    stones.put(b"k", "lost", 1.0, "x" * 10_000)
    stone = stones.get(b"k")
    assert stone is not None
    assert len(stone.detail) == MAX_DETAIL


def test_a_reason_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown reason 'gremlins'"):
        Tombstones(1).put(b"k", "gremlins", 0.0)


def test_no_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Tombstones(0)
