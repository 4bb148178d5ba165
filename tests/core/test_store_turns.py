"""Whose turn it is among a node's stores."""

from __future__ import annotations

from dpurt.core.store_turns import RETRY_S, StoreTurns


def test_batches_go_to_each_store_in_turn() -> None:
    turns = StoreTurns(3)
    firsts = [turns.to_write(0.0, lambda _: True)[0] for _ in range(6)]
    assert sorted(firsts[:3]) == sorted(firsts[3:]) == [0, 1, 2]


def test_a_store_without_room_comes_last_but_is_asked() -> None:
    turns = StoreTurns(3)
    for _ in range(3):
        assert turns.to_write(0.0, lambda number: number != 1)[-1] == 1


def test_a_store_that_is_down_is_left_alone_for_a_while() -> None:
    turns = StoreTurns(2)
    turns.set_down(0, now=1.0)
    assert turns.usable(1.0) == turns.to_write(1.0, lambda _: True) == turns.to_reclaim(1.0) == [1]
    assert turns.usable(1.0 + RETRY_S) == [0, 1]
    turns.set_down(1, now=1.0)
    assert turns.to_write(1.0, lambda _: True) == turns.to_reclaim(1.0) == []


def test_reclaims_go_round_only_as_segments_are_given_up() -> None:
    turns = StoreTurns(2)
    first = turns.to_reclaim(0.0)
    assert turns.to_reclaim(0.0) == first
    turns.reclaimed()
    assert turns.to_reclaim(0.0) == first[::-1]
