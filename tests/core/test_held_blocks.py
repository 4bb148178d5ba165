"""What a rank holds: any changes, against a plain set of chains; prompts of any length, to the very block."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core import held_blocks
from dpurt.core.held_blocks import HeldBlocks, HostTier, Leading, PlainTokens

WIDTH = 8
held_blocks._FEW = 1  # so that the short chains here count as long
Chain = tuple[int, ...]
chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
tiers = st.sampled_from(HostTier)


def tokens(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(WIDTH, "little") for block in blocks)


def store(held: HeldBlocks, chain: Chain, first: int, tier: HostTier) -> None:
    """Blocks `first` and on of a chain; a hash is the chain itself, the root is None."""
    hashes = [chain[: i + 1] for i in range(first, len(chain))]
    held.store(chain[:first] or None, hashes, tokens(*chain[first:]), tier)


class Holding(RuleBasedStateMachine):
    """`told`: chains told with tokens since somebody held them last; without these no prompt leads to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldBlocks(WIDTH)
        self.truth: set[tuple[HostTier, Chain]] = set()
        self.told: set[Chain] = set()

    @rule(chain=chains, first=st.integers(0, 5), tier=tiers)
    def store(self, chain: Chain, first: int, tier: HostTier) -> None:
        first = min(first, len(chain) - 1)
        store(self.held, chain, first, tier)
        new = {chain[: i + 1] for i in range(first, len(chain))}
        self.truth |= {(tier, one) for one in new}
        self.told |= new

    @rule(chain=chains, tier=tiers)
    def store_one(self, chain: Chain, tier: HostTier) -> None:
        self.held.store_one(chain[:-1] or None, chain, tokens(chain[-1]), tier)
        self.truth.add((tier, chain))
        self.told.add(chain)

    @rule(chain=chains, tier=tiers)
    def note(self, chain: Chain, tier: HostTier) -> None:
        self.held.note(chain, tier)
        self.truth.add((tier, chain))

    @rule(chain=chains, tier=tiers)
    def remove(self, chain: Chain, tier: HostTier) -> None:
        self.held.remove([chain], tier)
        self.lose({(tier, chain)})

    @rule(chain=chains, count=st.integers(1, 6), is_last_first=st.booleans(), again=st.booleans(), tier=tiers)
    def remove_many(self, chain: Chain, count: int, is_last_first: bool, again: bool, tier: HostTier) -> None:
        gone = [chain[: i + 1] for i in range(len(chain))][-count:]
        self.held.remove((gone[::-1] if is_last_first else gone) * (1 + again), tier)
        self.lose({(tier, one) for one in gone})

    @rule(gone=st.lists(chains, min_size=2, max_size=5, unique=True), tier=tiers)
    def remove_scattered(self, gone: list[Chain], tier: HostTier) -> None:
        self.held.remove(gone, tier)
        self.lose({(tier, one) for one in gone})

    @rule(tier=tiers)
    def clear(self, tier: HostTier) -> None:
        self.held.clear(tier)
        self.lose({one for one in self.truth if one[0] is tier})

    def lose(self, gone: set[tuple[HostTier, Chain]]) -> None:
        self.truth -= gone
        self.told -= {chain for _, chain in gone if not any((tier, chain) in self.truth for tier in HostTier)}

    @rule(blocks=st.integers(0, 4))
    def read_ahead(self, blocks: int) -> None:
        self.held.read_ahead(blocks)

    @rule(chain=chains)
    def a_prompt_is_held_as_far_as_told(self, chain: Chain) -> None:
        """One noted after it went from amid others may lead on: its hash still stands for tokens told before."""
        parts = [chain[: i + 1] for i in range(len(chain))]
        hbm = [(HostTier.HBM, part) in self.truth for part in parts]
        both = [any((tier, part) in self.truth for tier in HostTier) for part in parts]
        found = self.held.leading(None, tokens(*chain))
        for count, held in zip(found, (hbm, both), strict=True):
            told = [one and part in self.told for one, part in zip(held, parts, strict=True)]
            assert [*told, False].index(False) <= count <= [*held, False].index(False)

    @invariant()
    def tiers_are_as_told(self) -> None:
        self.held.check_integrity()
        assert len(self.held) == len(self.truth)
        assert all(self.held.holds(chain, tier) for tier, chain in self.truth)


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_labelled_block_is_met_only_by_who_names_the_label() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, ["salted", "below"], tokens(1, 2), HostTier.HBM, b"salt")
    held.store(None, ["plain"], tokens(1), HostTier.HBM)
    assert held.leading(None, tokens(1, 2)) == Leading(1, 1)
    assert held.leading(None, tokens(1, 2), b"salt") == Leading(2, 2)
    assert held.leading(None, tokens(1, 2), b"other") == Leading(0, 0)


def test_roots_have_nothing_in_common() -> None:
    held = HeldBlocks(WIDTH)
    held.store("adapter", [1], tokens(1), HostTier.CPU)
    assert held.leading(None, tokens(1)) == Leading(0, 0)
    assert held.leading("adapter", tokens(1)) == Leading(0, 1)


def test_a_long_prompt_that_differs_late_is_matched_to_the_very_block() -> None:
    held, long = HeldBlocks(WIDTH), 40_000
    held.store(None, list(range(long)), tokens(*range(long)), HostTier.HBM)
    for at in (0, 1, 8_191, 8_192, long - 1):
        prompt = list(range(long))
        prompt[at] = long + 1
        assert held.leading(None, tokens(*prompt)).hbm == at


def test_tokens_are_not_read_before_a_prompt_leads_to_them() -> None:
    reads: list[str] = []

    class Watched(PlainTokens):
        def first(self, told: bytes, count: int) -> bytes:
            reads.append("first")
            return super().first(told, count)

        def blocks(self, told: bytes, count: int) -> bytes:
            reads.append("blocks")
            return super().blocks(told, count)

    held = HeldBlocks(WIDTH, Watched(WIDTH))
    held.store(None, [1, 2, 3], tokens(1, 2, 3), HostTier.HBM)
    held.store(3, [4, 5], tokens(4, 5), HostTier.HBM)
    assert reads == []
    held.leading(None, tokens(9))
    assert reads == ["first"]
    assert held.leading(None, tokens(1, 2, 3, 4, 6)) == Leading(4, 4)
    held.leading(None, tokens(1, 2, 3, 4, 5))
    assert reads == ["first", "blocks", "blocks"]


def test_what_was_told_in_large_pieces_is_read_ahead_a_little_at_a_time() -> None:
    held = HeldBlocks(WIDTH)
    for at in range(0, 40, 10):
        held.store(
            at - 1 if at else None, list(range(at, at + 10)), tokens(*range(at, at + 10)), HostTier.HBM
        )
    assert held.read_ahead(15)
    assert not held.read_ahead(20)
    assert held.leading(None, tokens(*range(40))) == Leading(40, 40)
    held.store(39, [40], tokens(40), HostTier.HBM)
    assert not held.read_ahead(1)
    held.store(None, list(range(100, 120)), tokens(*range(100, 120)), HostTier.HBM)
    held.remove(list(range(100, 120)), HostTier.HBM)
    assert not held.read_ahead(0)


def test_a_part_of_a_block_is_no_block() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, [1], tokens(1), HostTier.HBM)
    assert held.leading(None, tokens(1)[:-1]) == Leading(0, 0)
    assert held.leading(None, tokens(1) + b"abc") == Leading(1, 1)


def test_a_block_that_went_from_amid_others_leads_on_once_it_is_noted_again() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, [1, 2, 3], tokens(1, 2, 3), HostTier.HBM)
    held.remove([2], HostTier.HBM)
    assert held.leading(None, tokens(1, 2, 3)) == Leading(1, 1)
    held.note(2, HostTier.CPU)
    assert held.leading(None, tokens(1, 2, 3)) == Leading(1, 3)


def test_an_end_that_goes_in_one_piece_leaves_a_beginning_that_does_not_grow() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, [1, 2, 3, 4, 5], tokens(1, 2, 3, 4, 5), HostTier.HBM)
    held.remove([5, 4, 3], HostTier.HBM)
    held.store_one(2, 7, tokens(7), HostTier.HBM)
    held.check_integrity()
    assert held.leading(None, tokens(1, 2, 3)) == Leading(2, 2)
    assert held.leading(None, tokens(1, 2, 7)) == Leading(3, 3)
    held.remove([7, 2, 1], HostTier.HBM)
    assert (len(held), held._below, held._tips) == (0, {}, {})


def test_a_chain_of_which_something_is_held_already_leaves_the_rest_as_it_was() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, [1, 2, 3], tokens(1, 2, 3), HostTier.HBM)
    held.store(3, [4, 2, 5], tokens(4, 2, 5), HostTier.HBM)
    held.check_integrity()
    assert held.leading(None, tokens(1, 2, 3, 4)) == Leading(4, 4)
    assert len(held) == 5


def test_single_blocks_below_each_other_become_one_segment_unless_another_begins_there() -> None:
    held = HeldBlocks(WIDTH)
    for block in range(1, 6):
        held.store_one(block - 1 or None, block, tokens(block), HostTier.HBM)
    assert len(held._below) == 1
    held.store_one(5, 7, tokens(7), HostTier.HBM)
    held.remove([7], HostTier.HBM)  # its tokens are still there: what comes next is no part of that
    held.store_one(5, 8, tokens(8), HostTier.HBM)
    held.store_one(5, 9, tokens(9), HostTier.HBM)
    held.check_integrity()
    for last in (8, 9):
        assert held.leading(None, tokens(1, 2, 3, 4, 5, last)) == Leading(6, 6)


def test_of_the_same_tokens_by_two_hashes_those_that_are_held_count() -> None:
    held = HeldBlocks(WIDTH)
    held.store(None, [1, 2, 3], tokens(1, 2, 3), HostTier.HBM)
    held.store(None, [11, 12], tokens(1, 2), HostTier.HBM)
    held.remove([2], HostTier.HBM)
    assert held.leading(None, tokens(1, 2, 3)) == Leading(2, 2)
    held.remove([12], HostTier.HBM)
    assert held.leading(None, tokens(1, 2, 3)) == Leading(1, 1)
    held.note(2, HostTier.CPU)
    assert held.leading(None, tokens(1, 2, 3)) == Leading(1, 3)
