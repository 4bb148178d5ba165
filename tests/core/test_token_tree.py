"""Exact longest match, against a set of token strings, in whatever order blocks come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.token_tree import TokenTree

WIDTH = 4
Chain = tuple[int, ...]
symbols = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


def tokens(chain: Chain) -> bytes:
    """A block's first bytes agree with every other's: only its last one tells."""
    return b"".join(bytes([9, 9, 9, symbol]) for symbol in chain)


class TreeMachine(RuleBasedStateMachine):
    """The model: the id of every known chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TokenTree(WIDTH)
        self.ids: dict[Chain, int] = {}
        self.spare = list(range(400, 0, -1))

    def expected(self, chain: Chain) -> list[int]:
        found = []
        for n in range(1, len(chain) + 1):
            if chain[:n] not in self.ids:
                break
            found.append(self.ids[chain[:n]])
        return found

    @rule(chain=symbols)
    def add(self, chain: Chain) -> None:
        known = self.expected(chain)
        new = [self.spare.pop() for _ in chain[len(known) :]]
        if not new:
            return
        self.tree.extend(
            known[-1] if known else -1, len(known) - 1, tokens(chain[len(known) :]), np.array(new, np.int32)
        )
        self.ids |= {chain[: len(known) + i + 1]: block for i, block in enumerate(new)}

    @rule(chain=symbols)
    def remove_below(self, chain: Chain) -> None:
        gone = [c for c in self.ids if c[: len(chain)] == chain]
        self.tree.remove(np.array([self.ids[c] for c in gone], np.int32))
        self.spare += [self.ids.pop(c) for c in gone]

    @rule(chain=symbols, tail=st.binary(max_size=WIDTH - 1))
    def match_whole_blocks_only(self, chain: Chain, tail: bytes) -> None:
        assert self.tree.match(tokens(chain) + tail).tolist() == self.expected(chain)

    @rule(chain=symbols, cut=st.integers(0, 6))
    def match_from_a_block_on(self, chain: Chain, cut: int) -> None:
        known = self.expected(chain)
        if cut < len(known):
            rest = self.tree.match(tokens(chain[cut + 1 :]), known[cut], cut)
            assert rest.tolist() == known[cut + 1 :]

    @invariant()
    def every_block_is_where_the_model_has_it(self) -> None:
        self.tree.check_integrity()
        assert len(self.tree) == len(self.ids)
        for chain, block in self.ids.items():
            assert self.tree.tokens_of(block, len(chain) - 1) == tokens(chain[-1:])
            assert self.tree.chain(block, len(chain) - 1).tolist() == self.expected(chain)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("differs_at", [0, 1, 1022, 1023, 1024, 1025, 1279, 1280, 2047, 2048, 2999])
@pytest.mark.parametrize("byte", [0, 63])
def test_the_first_difference_in_a_long_strand_is_found_to_the_block(differs_at: int, byte: int) -> None:
    tree = TokenTree(64)
    known = np.random.default_rng(5).bytes(3000 * 64)
    tree.extend(-1, -1, known, np.arange(3000, dtype=np.int32))
    query = bytearray(known)
    query[differs_at * 64 + byte] ^= 1
    assert len(tree.match(bytes(query))) == differs_at
    assert len(tree.match(known)) == 3000


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=20, max_size=20), st.integers(1, 20))
def test_any_block_width_works(data: bytes, width: int) -> None:
    tree = TokenTree(width)
    count = len(data) // width
    tree.extend(-1, -1, data[: count * width], np.arange(count, dtype=np.int32))
    assert tree.match(data).tolist() == list(range(count))


def test_a_conversation_stays_in_few_strands_whatever_branches_it_leaves_behind() -> None:
    """Each turn leaves two abandoned answers, which arrive before the turn that goes on."""
    rng = np.random.default_rng(7)
    tree, next_id = TokenTree(16), 0

    def grow(parent: int, depth: int, blocks: int) -> int:
        nonlocal next_id
        tree.extend(
            parent, depth, rng.bytes(16 * blocks), np.arange(next_id, next_id + blocks, dtype=np.int32)
        )
        next_id += blocks
        return next_id - 1

    tip, depth = -1, -1
    for _ in range(300):
        tip, depth = grow(tip, depth, 5), depth + 5
        for _ in range(2):
            grow(tip, depth, 20)
    path = tree.chain(tip, depth)
    assert len(path) == 1500
    assert len(np.unique(tree._place[path])) <= 8
    tree.check_integrity()


def test_growing_block_by_block_keeps_one_strand() -> None:
    tree = TokenTree(WIDTH)
    for n in range(500):
        tree.extend(n - 1, n - 1, tokens((n % 3,)), np.array([n], np.int32))
    assert tree.num_strands == 1


def test_rivals_growing_in_turn_do_not_swap_at_every_step() -> None:
    tree, swaps = TokenTree(WIDTH), 0
    swap = tree._swap

    def counted(above: object, below: object) -> None:
        nonlocal swaps
        swaps += 1
        swap(above, below)  # type: ignore[arg-type]

    tree._swap = counted  # type: ignore[method-assign,assignment]
    tree.extend(-1, -1, tokens((2,)), np.array([0], np.int32))
    tips = [0, 0]
    for n in range(1000):
        rival = n % 2
        tree.extend(tips[rival], n // 2, tokens((rival,)), np.array([n + 1], np.int32))
        tips[rival] = n + 1
    assert swaps <= 2
    assert tree.num_strands == 2


def test_nothing_is_known_of_an_empty_tree_or_query() -> None:
    tree = TokenTree(WIDTH)
    assert tree.match(tokens((1, 2))).tolist() == []
    tree.extend(-1, -1, tokens((1,)), np.array([0], np.int32))
    assert tree.match(b"").tolist() == []
    assert tree.match(b"\x09\x09").tolist() == []


def test_tokens_of_a_block_the_tree_does_not_hold_are_a_key_error() -> None:
    with pytest.raises(KeyError, match="no tokens are known for block 3"):
        TokenTree(WIDTH).tokens_of(3, 0)


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block_token_bytes"):
        TokenTree(0)
