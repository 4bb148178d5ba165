"""Which engine gets a request: what it holds, what waits there, what the rest costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.routing import RECOMPUTE_WEIGHT, Holding, NodeHolding, Router

NAMES = ("a", "b", "c")


def router(**rates: float) -> Router:
    made = Router()
    for name in NAMES:
        made.add(name, rates.get("prefill", 1000.0), rates.get("cpu", 100_000.0))
    return made


def holdings(*cached: int, hbm: tuple[int, ...] | None = None) -> list[Holding]:
    return [Holding(name, h, c) for name, h, c in zip(NAMES, hbm or cached, cached, strict=False)]


def best(made: Router, prompt: int, *cached: int, now: float = 0.0, **options: object) -> str:
    return made.rank(prompt, holdings(*cached), now, **options)[0].engine  # type: ignore[arg-type]


def test_the_holder_is_preferred_until_its_load_outweighs_what_it_holds() -> None:
    made, sent = router(), list[str]()
    for _ in range(30):
        ranked = made.rank(1000, holdings(0, 800, 0), 0.0)
        made.book(ranked[0], 1000, 0.0)
        sent.append(ranked[0].engine)
    first_other = next(i for i, name in enumerate(sent) if name != "b")
    saved = 0.8 * RECOMPUTE_WEIGHT  # seconds that "b" is better by, when nothing waits
    assert first_other == pytest.approx(saved / 0.2, abs=1)  # each booking there computes 0.2 s
    assert set(sent) == {"a", "b", "c"}


def test_a_prompt_nobody_knows_goes_to_who_was_given_least_lately() -> None:
    made = router()
    for _ in range(9):
        made.book(made.rank(1000, holdings(0, 0, 0), 0.0)[0], 1000, 0.0)
    assert [row["booked"] for row in made.stats(0.0).values()] == [3, 3, 3]


def test_who_may_be_gone_is_named_last_whatever_it_holds() -> None:
    made = router()
    ranked = made.rank(1000, holdings(100, 900, 0), 0.0, last={"b"})
    assert [one.engine for one in ranked] == ["a", "c", "b"]
    assert best(made, 1000, 0, 900, 0, last=set(NAMES)) == "b"


def test_what_was_booked_drains_with_time() -> None:
    made = router()
    made.book(made.rank(1000, holdings(1, 0, 0), 0.0)[0], 1000, 0.0)
    assert made.rank(1000, holdings(1, 0, 0), 0.5)[-1].wait_s == pytest.approx(0.499)
    assert made.stats(2.0)["a"]["wait_s"] == 0.0


def test_the_callers_word_on_what_waits_is_taken_for_ours() -> None:
    made = router()
    assert best(made, 1000, 900, 0, 0) == "a"
    assert best(made, 1000, 900, 0, 0, queued_s={"a": 60.0}) == "b"


def test_a_prefix_in_cpu_memory_is_fetched_and_one_in_hbm_is_not() -> None:
    ranked = router().rank(1000, holdings(800, 800, 0, hbm=(800, 300, 0)), 0.0)
    assert [(one.engine, one.fetch_s) for one in ranked[:2]] == [("a", 0.0), ("b", 0.005)]


def test_what_the_node_has_makes_engines_alike_if_it_comes_sooner_than_it_is_computed() -> None:
    made = router()
    near = made.rank(1000, holdings(0, 0, 0), 0.0, NodeHolding(800, 0.1))
    assert {(one.used_tokens, one.fetch_s) for one in near} == {(800, 0.1)}
    far = made.rank(1000, holdings(0, 0, 0), 0.0, NodeHolding(800, 0.9))
    assert {(one.used_tokens, one.fetch_s) for one in far} == {(0, 0.0)}


@given(
    prompt=st.integers(1, 5000),
    cached=st.lists(st.integers(0, 5000), min_size=3, max_size=3),
    node=st.tuples(st.integers(0, 5000), st.floats(0, 10)),
)
def test_estimates_add_up_and_are_in_order(prompt: int, cached: list[int], node: tuple[int, float]) -> None:
    ranked = router().rank(prompt, holdings(*(min(c, prompt) for c in cached)), 0.0, NodeHolding(*node))
    assert len(ranked) == 3
    for one in ranked:
        assert one.ready_s == one.wait_s + one.fetch_s + one.compute_s
        assert 0 <= one.used_tokens <= prompt
        assert one.compute_s == pytest.approx((prompt - one.used_tokens) / 1000)
    costs = [one.wait_s + one.fetch_s + RECOMPUTE_WEIGHT * one.compute_s for one in ranked]
    assert costs == sorted(costs)
