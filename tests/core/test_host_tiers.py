"""Who holds which prefix: any changes, against a plain set of chains."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.host_tiers import Held, HostTier, HostTiers

WIDTH = 8
Chain = tuple[int, ...]
chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
instances = st.integers(0, 2)
tiers = st.sampled_from(HostTier)


def tokens(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(WIDTH, "little") for block in blocks)


class Holding(RuleBasedStateMachine):
    """`held` is the truth: (instance, tier, chain)."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = HostTiers()
        self.root = self.tiers.root("s")
        self.held: set[tuple[int, HostTier, Chain]] = set()
        self.handles: dict[Chain, int] = {}

    @rule(chain=chains, first=st.integers(0, 5), instance=instances, tier=tiers)
    def hold(self, chain: Chain, first: int, instance: int, tier: HostTier) -> None:
        ids = self.tiers.extend(self.root, tokens(*chain), WIDTH)
        assert len(ids) == len(chain)
        first = min(first, len(chain) - 1)
        self.tiers.hold(ids[first:], instance, tier)
        self.held |= {(instance, tier, chain[: i + 1]) for i in range(first, len(chain))}
        self.handles |= {chain[: i + 1]: name for i, name in enumerate(self.tiers.handles(ids))}

    @rule(chain=chains, instance=instances, tier=tiers)
    def release(self, chain: Chain, instance: int, tier: HostTier) -> None:
        handle = self.handles.get(chain)
        block = -1 if handle is None else self.tiers.resolve(handle)
        if block >= 0:
            self.tiers.release(block, instance, tier)
        self.held.discard((instance, tier, chain))

    @rule(instance=instances, tier=tiers)
    def clear(self, instance: int, tier: HostTier) -> None:
        self.tiers.clear(instance, tier)
        self.held = {one for one in self.held if one[:2] != (instance, tier)}

    @rule(chain=chains)
    def a_prompt_is_held_as_far_as_told(self, chain: Chain) -> None:
        found = self.tiers.held(self.root, tokens(*chain), WIDTH, 3)
        assert found.hbm == [self.leading(chain, i, (HostTier.HBM,)) for i in range(3)]
        assert found.any == [self.leading(chain, i, tuple(HostTier)) for i in range(3)]

    def leading(self, chain: Chain, instance: int, among: tuple[HostTier, ...]) -> int:
        for i in range(len(chain)):
            if not any((instance, tier, chain[: i + 1]) in self.held for tier in among):
                return i
        return len(chain)

    @invariant()
    def only_what_is_held_or_needed_is_kept(self) -> None:
        self.tiers.check_integrity()
        needed = {chain[: i + 1] for _, _, chain in self.held for i in range(len(chain))}
        assert len(self.tiers) == len(needed)


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_labelled_block_is_another_block_and_matches_no_plain_prompt() -> None:
    index = HostTiers()
    root = index.root("s")
    plain = index.extend(root, tokens(1, 2), WIDTH)
    index.hold(plain, 0, HostTier.HBM)
    salted = index.extend(root, tokens(1), WIDTH, b"label")
    below = index.extend(salted[0], tokens(2, 3), WIDTH)
    index.hold(salted + below, 1, HostTier.HBM)
    assert index.held(root, tokens(1, 2, 3), WIDTH, 2).hbm == [2, 0]
    assert index.held(root, tokens(1, 2, 3), WIDTH, 2, b"label").hbm == [0, 3]
    index.check_integrity()


def test_spaces_have_nothing_in_common() -> None:
    index = HostTiers()
    index.hold(index.extend(index.root("a"), tokens(1), WIDTH), 0, HostTier.CPU)
    assert index.held(index.root("b"), tokens(1), WIDTH, 1) == Held([0], [0])
    assert index.held(index.root("a"), tokens(1), WIDTH, 1) == Held([0], [1])


def test_a_long_prompt_that_differs_late_is_matched_to_the_very_block() -> None:
    index, long = HostTiers(), 40_000
    root = index.root("s")
    index.hold(index.extend(root, tokens(*range(long)), WIDTH), 63, HostTier.HBM)
    for at in (0, 1, 8_191, 8_192, long - 1):
        prompt = list(range(long))
        prompt[at] = long + 1
        assert index.held(root, tokens(*prompt), WIDTH, 64).hbm[63] == at


def test_a_long_chain_of_single_runs_is_forgotten_whole() -> None:
    index = HostTiers()
    ids = array("i", (index.root("s"),))
    for block in range(3000):
        ids.extend(index.extend(ids[-1], tokens(block), WIDTH, b"label"))
    index.hold(ids[-1:], 0, HostTier.HBM)
    index.release(ids[-1], 0, HostTier.HBM)
    assert len(index) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_a_part_of_a_block_is_no_block(count: int) -> None:
    index = HostTiers()
    assert len(index.extend(index.root("s"), tokens(*range(count)) + b"abc", WIDTH)) == count
