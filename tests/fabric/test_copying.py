"""Copies hold the loop for a few MiB at a time, over however many calls."""

from __future__ import annotations

import math
import random

import trio

from dpurt.fabric.copying import Copier

from .turns import turns_while

MIB = 1 << 20


def pairs_of(*lengths):
    sources = [random.Random(number).randbytes(length) for number, length in enumerate(lengths)]
    return [(memoryview(source), memoryview(bytearray(len(source)))) for source in sources]


async def test_every_byte_arrives_whatever_the_lengths():
    pairs = pairs_of(0, 1, 3 * MIB, 9 * MIB + 5, 4 * MIB, 2 * MIB)
    assert await Copier().copy(pairs, math.inf)
    for source, target in pairs:
        assert source == target


async def test_many_small_copies_take_a_turn_every_four_mib():
    copier, pairs = Copier(), pairs_of(MIB // 4)

    async def copy():
        for _ in range(96):
            await copier.copy(pairs, math.inf)

    assert 4 <= await turns_while(copy) <= 7  # 24 MiB, and Trio may run the counter first or last


async def test_one_large_copy_takes_a_turn_every_four_mib():
    pairs = pairs_of(17 * MIB)
    assert 4 <= await turns_while(lambda: Copier().copy(pairs, math.inf)) <= 7


async def test_a_passed_deadline_is_seen_before_the_first_byte_and_at_a_turn():
    pairs = pairs_of(MIB)
    assert not await Copier().copy(pairs, trio.current_time() - 1)
    assert not any(pairs[0][1])
    pairs = pairs_of(8 * MIB)
    assert not await Copier().copy(pairs * 1000, trio.current_time() + 0.001)


async def test_a_cancelled_copy_ends_at_a_turn():
    pairs = pairs_of(MIB)
    with trio.move_on_after(0.001) as scope:
        await Copier().copy(pairs * 100_000, math.inf)
    assert scope.cancelled_caught
