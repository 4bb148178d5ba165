"""A clock that runs faster: sleeps take so much less of the wall's time, and their order is kept."""

from __future__ import annotations

import time

import pytest
import trio

from dpurt import cli
from dpurt.runtime.paced_clock import PacedClock


def test_an_hour_passes_in_a_moment() -> None:
    async def main() -> float:
        began = trio.current_time()
        await trio.sleep(3600)
        return trio.current_time() - began

    began = time.perf_counter()
    slept = trio.run(main, clock=PacedClock(100_000))
    took = time.perf_counter() - began
    assert slept >= 3600
    assert 0.036 <= took < 2


def test_deadlines_are_on_the_same_clock() -> None:
    async def main() -> bool:
        with trio.move_on_after(5) as limit:
            await trio.sleep(50)
        return limit.cancelled_caught

    assert trio.run(main, clock=PacedClock(1000))


@pytest.mark.parametrize("pace", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pace_is_a_positive_number(pace: float) -> None:
    with pytest.raises(ValueError, match="pace must be > 0"):
        PacedClock(pace)


def test_serve_refuses_a_pace_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "laptop", "--pace", "0"]) == 2
    assert "--pace" in capsys.readouterr().err
