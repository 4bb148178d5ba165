"""Chaining and grouping of block numbers."""

import hypothesis.strategies as st
from hypothesis import given

from dpurt.replay.blocks import Chain, group_ends, regroup

IDS = st.lists(st.integers(0, 4), max_size=12)


@given(requests=st.lists(IDS, max_size=6))
def test_chained_numbers_are_equal_exactly_where_prefixes_are(requests):
    chain = Chain()
    prefix_of = {}
    for ids in requests:
        numbers = chain.numbers(ids)
        assert len(set(numbers)) == len(numbers) == len(ids)
        for at, number in enumerate(numbers):
            assert prefix_of.setdefault(number, ids[: at + 1]) == ids[: at + 1]
    assert len(prefix_of) == len({tuple(p) for p in prefix_of.values()})


@given(runs=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=6), size=st.integers(1, 10))
def test_runs_group_as_the_blocks_they_stand_for(runs, size):
    blocks = [first + i for first, count in runs for i in range(count)]
    assert tuple(group_ends(runs, size)) == regroup(blocks, size)


@given(blocks=IDS, size=st.integers(1, 5))
def test_a_group_is_named_by_its_last_block(blocks, size):
    grouped = regroup(blocks, size)
    assert grouped == tuple(blocks[at : at + size][-1] for at in range(0, len(blocks), size))
