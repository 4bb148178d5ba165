"""The connector's bookkeeping: what is ordered to be loaded and saved, checked on cases and against a naive model."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dpurt.engines.vllm.plan import Book, Ending, Order, loadable_tokens

BT = 4  # tokens a block


def tokens(count: int, start: int = 0) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in range(start, start + count))


def test_a_load_leaves_the_last_token_to_the_step_that_uses_it() -> None:
    assert loadable_tokens(3, 0, 12, BT, whole=False) == 8
    assert loadable_tokens(3, 0, 13, BT, whole=False) == 12
    assert loadable_tokens(3, 0, 12, BT, whole=True) == 12


def test_a_load_begins_behind_what_the_engine_has() -> None:
    assert loadable_tokens(3, 8, 40, BT, whole=True) == 4
    assert loadable_tokens(3, 12, 40, BT, whole=True) == 0
    assert loadable_tokens(3, 20, 40, BT, whole=True) == 0


def test_a_load_names_the_blocks_behind_the_local_hit() -> None:
    book = Book(BT)
    book.open("r", tokens(14))
    book.has("r", 4, 3)
    book.allocated("r", [9, 8, 7], 8, by_layer=False)
    assert book.take_step(is_idle=True).loads == [Order("r", 1, (8, 7), tokens(12))]


def test_a_block_is_saved_by_the_step_that_completes_it_and_once() -> None:
    book = Book(BT)
    book.open("r", tokens(10))
    book.computes("r", [5, 6, 7], 6)
    book.computes("r", [5, 6, 7], 10)
    book.computes("r", [5, 6, 7], 10)
    saves = book.take_step(is_idle=False).saves
    assert saves == [Order("r", 0, (5,), tokens(4)), Order("r", 1, (6,), tokens(4, 4))]


def test_a_token_that_is_not_known_yet_is_not_saved() -> None:
    book = Book(BT)
    book.open("r", tokens(7))
    book.computes("r", [1, 2], 9)  # two drafts among them
    assert [save.ids for save in book.take_step(is_idle=False).saves] == [(1,)]
    book.extend("r", tokens(1, 7))
    book.computes("r", [1, 2], 8)
    assert [save.ids for save in book.take_step(is_idle=False).saves] == [(2,)]


def test_what_the_node_has_is_not_saved_again_and_what_it_lost_is() -> None:
    book = Book(BT)
    book.open("r", tokens(16))
    book.has("r", 12, 1)  # the engine has three blocks, the node the first of them
    book.computes("r", [1, 2, 3, 4], 16)
    assert [(save.first, save.ids) for save in book.take_step(is_idle=False).saves] == [(1, (2, 3, 4))]


def test_blocks_whose_load_failed_are_saved_when_they_were_computed() -> None:
    book = Book(BT)
    book.open("r", tokens(16))
    book.has("r", 0, 4)
    book.allocated("r", [1, 2, 3, 4], 16, by_layer=False)
    assert book.failed({3, 4}) == ["r"]
    assert book.failed({3, 4}) == []
    book.loaded("r")
    book.computes("r", [1, 2, 3, 4], 16)
    assert [(save.first, save.ids) for save in book.take_step(is_idle=False).saves] == [(2, (3, 4))]


def test_a_request_with_saves_is_held_and_one_that_is_loading_is_not() -> None:
    book = Book(BT)
    book.open("saves", tokens(8))
    book.computes("saves", [1, 2], 8)
    book.open("loads", tokens(8))
    book.has("loads", 0, 2)
    book.allocated("loads", [3, 4], 8, by_layer=False)
    assert book.end("saves", "end_turn")
    assert not book.end("loads", "end_turn")
    assert not book.end("unknown", "end_turn")
    endings = book.take_step(is_idle=False).endings
    assert endings == [Ending("saves", "end_turn", True), Ending("loads", "end_turn", False)]


def test_only_the_prompt_is_saved_when_that_is_asked_for() -> None:
    book = Book(BT, save="prompt")
    book.open("r", tokens(5))
    book.extend("r", tokens(7, 5))
    book.computes("r", [1, 2, 3], 12)
    assert [save.ids for save in book.take_step(is_idle=False).saves] == [(1,)]


class Engine(RuleBasedStateMachine):
    """An engine with one request a time each, whose every step's orders are checked against what was computed."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(BT)
        self.count = 0
        self.known: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.saved: dict[str, list[int]] = {}
        self.sent: dict[str, bytes] = {}

    @rule(target=requests, prompt=st.integers(1, 30), matched=st.integers(0, 9), local=st.integers(0, 9))
    def arrive(self, prompt: int, matched: int, local: int) -> str:
        name, self.count = f"r{self.count}", self.count + 1
        self.known[name], self.saved[name], self.sent[name] = prompt, [], b""
        matched, local = min(matched, prompt // BT), min(local, prompt // BT)
        self.book.open(name, tokens(prompt))
        self.book.has(name, local * BT, matched)
        load = loadable_tokens(matched, local * BT, prompt, BT, whole=True)
        self.book.allocated(name, self.ids(name), load, by_layer=False)
        self.book.loaded(name)
        self.computed[name] = local * BT + load
        self.have = max(matched, 0)
        self.saved[name] = list(range(matched))
        return name

    def ids(self, name: str) -> list[int]:
        """Block i of request n is block 1000 n + i of the engine."""
        return [1000 * int(name[1:]) + i for i in range(-(-self.known[name] // BT))]

    @rule(name=requests, new=st.integers(0, 9), drafts=st.integers(0, 3))
    def step(self, name: str, new: int, drafts: int) -> None:
        after = min(self.known[name], self.computed[name] + new)
        self.computed[name] = after
        self.book.computes(name, self.ids(name), after + (drafts if after == self.known[name] else 0))
        self.take()

    @rule(name=requests, more=st.integers(1, 6))
    def sample(self, name: str, more: int) -> None:
        self.book.extend(name, tokens(more, self.known[name]))
        self.known[name] += more

    @rule(target=requests, name=consumes(requests))
    def end(self, name: str) -> object:
        self.book.end(name, "end_turn")
        assert [e.request for e in self.take()] == [name]
        del self.known[name]
        return multiple()

    def take(self) -> list[Ending]:
        step = self.book.take_step(is_idle=False)
        for order in [*step.loads, *step.saves]:
            self.sent[order.request] += order.more_tokens
            assert len(self.sent[order.request]) >= 4 * BT * (order.first + len(order.ids))
        for save in step.saves:
            assert list(save.ids) == [
                1000 * int(save.request[1:]) + save.first + i for i in range(len(save.ids))
            ]
            blocks = list(range(save.first, save.first + len(save.ids)))
            assert blocks[-1] < self.known[save.request] // BT
            assert (blocks[-1] + 1) * BT <= self.computed[save.request] or self.known[
                save.request
            ] == self.computed[save.request]
            self.saved[save.request] += blocks
        return step.endings

    @invariant()
    def every_complete_block_was_saved_once_in_order(self) -> None:
        for name in self.known:
            assert self.saved[name] == list(range(len(self.saved[name])))

    @invariant()
    def tokens_travelled_once_and_unchanged(self) -> None:
        for name in self.known:
            assert tokens(self.known[name]).startswith(self.sent[name])


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
