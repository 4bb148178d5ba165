"""Records, ids, handles and the key map, against dicts."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.block_table import FREE, NONE, BlockTable, key_words
from dpurt.core.key_map import KeyMap


def a_key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def a_chain(table: BlockTable, parent: int, numbers: list[int], now: float = 0.0) -> list[int]:
    return table.add_chain(parent, key_words([a_key(n) for n in numbers]), now).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 300), min_size=1)), max_size=12),
    st.integers(0, 2),
)
def test_key_map_answers_as_a_dict_would(steps: list[tuple[bool, set[int]]], shape: int) -> None:
    make = (a_key, lambda n: bytes(8) + n.to_bytes(8, "big"), lambda n: n.to_bytes(8, "little") + bytes(8))[
        shape
    ]
    keys = key_words([make(n) for n in range(301)])
    mapped: set[int] = set()
    under_test = KeyMap()
    for adds, numbers in steps:
        chosen = numbers - mapped if adds else numbers & mapped
        (under_test.add if adds else under_test.remove)(np.array(sorted(chosen), np.int32), keys)
        mapped = mapped | chosen if adds else mapped - chosen
        expected = [n if n in mapped else -1 for n in range(301)]
        assert under_test.find_many(keys, keys).tolist() == expected
        assert [under_test.find(make(n), keys) for n in range(0, 301, 7)] == expected[::7]
        assert len(under_test) == len(mapped)


def test_key_map_stays_small_when_keys_come_and_go() -> None:
    keys = key_words([a_key(n) for n in range(100)])
    ids = np.arange(100, dtype=np.int32)
    churned = KeyMap()
    for _ in range(200):
        churned.add(ids, keys)
        churned.remove(ids, keys)
    assert len(churned) == 0
    assert churned.nbytes <= 4 * 1024


def test_a_key_of_another_length_is_refused_on_the_way_in_and_unknown_on_lookup() -> None:
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        key_words([b"abc"])
    assert BlockTable().find(b"abc") == NONE


def test_a_chain_links_each_block_to_the_one_before() -> None:
    table = BlockTable()
    first, second, third = a_chain(table, NONE, [1, 2, 3])
    (other,) = a_chain(table, second, [4])
    assert table.parent[[first, second, third, other]].tolist() == [NONE, first, second, second]
    assert table.depth[[first, second, third, other]].tolist() == [0, 1, 2, 2]
    assert table.key(third) == a_key(3)
    table.check_integrity()


def test_subtree_lists_parents_before_children() -> None:
    table = BlockTable()
    top, middle, leaf = a_chain(table, NONE, [1, 2, 3])
    (side,) = a_chain(table, top, [4])
    members = array("i")
    table.subtree(top, members)
    assert set(members) == {top, middle, leaf, side}
    assert members[0] == top
    assert members.index(middle) < members.index(leaf)


def test_closed_part_leaves_out_what_has_a_descendant_outside() -> None:
    table = BlockTable()
    top, middle, leaf = a_chain(table, NONE, [1, 2, 3])
    (side,) = a_chain(table, top, [4])
    closed = table.closed_part(np.array([top, middle, leaf], np.int32))
    assert set(closed.tolist()) == {middle, leaf}
    assert set(table.closed_part(np.array([top, middle, leaf, side], np.int32)).tolist()) == {
        top,
        middle,
        leaf,
        side,
    }
    assert table.closed_part(np.array([top, middle], np.int32)).tolist() == []


@pytest.mark.parametrize("gone", [4, 5, 6])
def test_a_removed_sibling_leaves_the_others_listed(gone: int) -> None:
    table = BlockTable()
    (top,) = a_chain(table, NONE, [1])
    for number in (4, 5, 6):
        a_chain(table, top, [number])
    table.remove(np.array([table.find(a_key(gone))], np.int32))
    table.check_integrity()
    assert table.num_children[top] == 2


def test_a_handle_is_stale_once_its_record_went_even_when_the_id_is_used_again() -> None:
    table = BlockTable()
    (block,) = a_chain(table, NONE, [1])
    handle = table.handles(np.array([block], np.int32))
    assert table.resolve(handle).tolist() == [table.id_of(int(handle[0]))] == [block]
    table.remove(np.array([block], np.int32))
    assert table.resolve(handle).tolist() == [table.id_of(int(handle[0]))] == [NONE]
    assert a_chain(table, NONE, [2]) == [block]
    assert table.resolve(handle).tolist() == [table.id_of(int(handle[0]))] == [NONE]
    again = table.handles(np.array([block], np.int32))
    assert table.resolve(again).tolist() == [table.id_of(int(again[0]))] == [block]


def test_a_handle_never_given_out_resolves_to_nothing() -> None:
    never = [0, 7 << 32 | 3, 2**31]
    assert BlockTable().resolve(np.array(never, np.int64)).tolist() == [NONE] * 3
    assert [BlockTable().id_of(handle) for handle in never] == [NONE] * 3


def test_a_reused_id_starts_clean() -> None:
    table = BlockTable(num_shards=2)
    (block,) = a_chain(table, NONE, [1], now=5.0)
    table.where[block] = 3
    table.uses[block] = table.pins[block] = 9
    table.expires[block] = 1.0
    table.remove(np.array([block], np.int32))
    assert table.parent[block] == FREE
    a_chain(table, NONE, [2], now=6.0)
    assert table.where[block].tolist() == [-1, -1, -1, -1]
    assert (table.uses[block], table.pins[block], table.expires[block]) == (0, 0, np.inf)
    assert table.last_use[block] == 6.0


def test_growing_keeps_every_record() -> None:
    table = BlockTable()
    numbers = list(range(5000))
    ids = a_chain(table, NONE, numbers[:700]) + a_chain(table, NONE, numbers[700:])
    assert table.find_many(key_words([a_key(n) for n in numbers])).tolist() == ids
    assert len(table) == 5000
    table.check_integrity()


def test_a_chain_takes_neighbouring_ids_even_when_they_are_reused() -> None:
    table = BlockTable()
    ids = a_chain(table, NONE, list(range(50)))
    table.remove(np.array(ids, np.int32))
    assert a_chain(table, NONE, list(range(100, 150))) == ids


def test_a_table_without_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards"):
        BlockTable(0)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("depth", "depth"),
        ("num_children", "child"),
        ("next_sibling", "sibling|child list|lists"),
        ("mark", "marks"),
    ],
)
def test_check_integrity_notices_a_spoilt_column(column: str, message: str) -> None:
    table = BlockTable()
    ids = a_chain(table, NONE, [1, 2, 3])
    a_chain(table, ids[0], [4])
    getattr(table, column)[ids[1]] = 1
    getattr(table, column)[ids[1]] += 1
    if column == "next_sibling":
        getattr(table, column)[ids[1]] = ids[0]
    with pytest.raises(AssertionError, match=message):
        table.check_integrity()
