"""The endurance budget: what is admitted, over any time, and who comes first when it is short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.endurance import BURST_S, DAY_S, NEWCOMERS, WriteBudget

RATE = 1000.0 * DAY_S  # 1,000 bytes a second
BURST = 1000.0 * BURST_S


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.integers(1, 2_000_000), st.booleans()), min_size=1, max_size=60)
)
def test_over_any_time_no_more_is_admitted_than_the_rate_gives_and_one_bucket(
    offers: list[tuple[float, int, bool]],
) -> None:
    budget = WriteBudget(RATE, 0.0)
    writes: list[tuple[float, int]] = []
    now = 0.0
    for pause, num_bytes, is_again in offers:
        now += pause
        if budget.admit(num_bytes, now, is_again=is_again):
            writes.append((now, num_bytes))
    for i, (began, _) in enumerate(writes):
        for j in range(i, len(writes)):
            total = sum(size for _, size in writes[i : j + 1])
            assert total <= BURST + (writes[j][0] - began) * 1000 + 1e-3
    assert budget.stats().spent_bytes == sum(size for _, size in writes)
    assert budget.stats().refused == len(offers) - len(writes)


def test_newcomers_leave_half_of_the_bucket_to_blocks_used_again() -> None:
    budget = WriteBudget(RATE, 0.0)
    piece = int(BURST / 100)
    new = sum(budget.admit(piece, 0.0, is_again=False) for _ in range(100))
    again = sum(budget.admit(piece, 0.0, is_again=True) for _ in range(100))
    assert (new, again) == (round(100 * (1 - NEWCOMERS)), round(100 * NEWCOMERS))
    assert not budget.admit(piece, 0.0, is_again=True)
    assert budget.admit(piece, BURST_S / 50, is_again=True), "it fills again"


def test_a_worn_drive_gets_only_what_is_used_again() -> None:
    budget = WriteBudget(RATE, 0.0)
    budget.is_worn = True
    assert not budget.admit(1, 0.0, is_again=False)
    assert budget.admit(1, 0.0, is_again=True)


def test_what_is_carried_on_counts_and_may_overdraw() -> None:
    budget = WriteBudget(RATE, 0.0)
    budget.charge(int(BURST) + 5000)
    assert budget.stats().left_bytes == -5000
    assert not budget.admit(1, 5.0, is_again=True)
    assert budget.admit(1, 5.1, is_again=True)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes a day writes nothing"):
        WriteBudget(0, 0.0)
