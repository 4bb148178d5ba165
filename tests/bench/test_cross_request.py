"""The rows of `dpurt bench cross_request`: two conventions of *closed*, what is judged, and the table of leads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpurt.bench import cross_request
from dpurt.bench.cross_request import CASES, HINT_LEADS_S
from dpurt.bench.result import Figure
from dpurt.replay.at_match import AtMatch

FAST = next(case for case in CASES if case.gigabytes_per_s == 28.0)
FIRST = replace(FAST, gigabytes_per_s=cross_request.PUBLISHED_GB_PER_S)
YARDSTICK = AtMatch("oracle", reusable=1000, hits=900)
FOUND = {
    "lru": AtMatch("lru", reusable=1000, hits=500),
    "oracle": AtMatch("oracle", reusable=1000, hits=1000),
    "dpurt": AtMatch("dpurt", reusable=1000, hits=750),
}


def closed_rows(case: cross_request._Case, *, is_judged: bool = True) -> list[Figure]:
    rows = list(cross_request._rows(case, FOUND, YARDSTICK, is_judged=is_judged))
    assert [row.value for row in rows[:3]] == [50.0, 100.0, 75.0]
    assert {row.unit for row in rows[:3]} == {"% at match"}
    return rows[3:]


def lead_rows(ours: float, oracle: float = 1.0, *, is_judged: bool = True) -> list[Figure]:
    count = len(HINT_LEADS_S)
    return list(cross_request._lead_rows("chat", [ours] * count, [oracle] * count, is_judged=is_judged))


# --- closed ------------------------------------------------------------------------------------------------


def test_at_another_speed_closed_is_told_by_both_conventions():
    own, published = closed_rows(FAST)
    assert own.value == 50.0  # (75 - 50) / (100 - 50): the oracle of that speed
    assert published.value == 62.5  # (75 - 50) / (90 - 50): the oracle at the published speed
    assert "this bandwidth" in own.name
    assert "14 GB/s" in published.name


def test_only_the_published_convention_is_judged():
    own, published = closed_rows(FAST)
    assert (own.target, own.holds, own.peer_value) == (None, None, None)
    assert (published.target, published.holds) == (">= 60", True)
    assert (published.peer, published.peer_value) == ("information bound", FAST.bound)


def test_a_faster_device_can_close_more_than_all():
    found = FOUND | {"dpurt": AtMatch("dpurt", reusable=1000, hits=980)}
    *_, published = cross_request._rows(FAST, found, YARDSTICK, is_judged=True)
    assert published.value == 120.0


def test_at_the_published_speed_both_conventions_are_one_row():
    (row,) = closed_rows(FIRST)
    assert (row.value, row.target, row.holds) == (62.5, ">= 60", True)


@pytest.mark.parametrize(("hits", "holds"), [(740, True), (739, False)])
def test_a_target_is_held_to_the_share_and_not_to_its_rounding(hits: int, holds: bool):
    found = FOUND | {"dpurt": AtMatch("dpurt", reusable=1000, hits=hits)}
    *_, row = cross_request._rows(FIRST, found, YARDSTICK, is_judged=True)
    assert row.holds is holds


def test_slices_are_told_and_not_judged():
    for case in (FIRST, FAST):
        assert all(row.target is None and row.holds is None for row in closed_rows(case, is_judged=False))


# --- cells -------------------------------------------------------------------------------------------------


def test_the_yardstick_is_the_same_cases_oracle_at_the_published_speed():
    yardstick = cross_request._yardstick(FAST, None)
    assert yardstick == cross_request._cell(FIRST, "oracle", None)
    assert yardstick != cross_request._cell(FAST, "oracle", None)


def test_what_fetches_nothing_is_run_once_for_all_speeds():
    for policy in cross_request.ON_DEMAND:
        assert cross_request._cell(FAST, policy, None) == cross_request._cell(FIRST, policy, None)
    assert cross_request._cell(FAST, "dpurt", None) != cross_request._cell(FIRST, "dpurt", None)


# --- leads -------------------------------------------------------------------------------------------------


def test_timely_is_a_share_of_what_the_oracle_has_with_the_same_lead():
    count = len(HINT_LEADS_S)
    oracles = [0.4 + 0.1 * n for n in range(count)]
    rows = cross_request._lead_rows("chat", [0.38] * count, oracles, is_judged=True)
    assert [row.value for row in rows] == [round(100 * 0.38 / oracle, 1) for oracle in oracles]


def test_each_lead_has_its_row_and_only_hinted_ones_a_target():
    rows = lead_rows(0.96)
    assert [row.name for row in rows] == [
        f"chat at 5%, hinted {lead:g} s ahead: timely at need" for lead in HINT_LEADS_S
    ]
    assert [row.target for row in rows] == [None if lead == 0 else ">= 95" for lead in HINT_LEADS_S]
    assert all(row.holds for row in rows if row.target)


def test_a_share_under_the_target_fails_even_if_it_rounds_to_it():
    assert {row.holds for row in lead_rows(0.9499) if row.target} == {False}
    assert {row.value for row in lead_rows(0.9499)} == {95.0}


def test_leads_of_slices_are_not_judged():
    assert all(row.target is None and row.holds is None for row in lead_rows(0.5, is_judged=False))
