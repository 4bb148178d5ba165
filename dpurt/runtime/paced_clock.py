"""A Trio clock that runs faster than the wall clock, by a fixed factor.

For experiments: a node whose device is modelled, and hosts that only pretend to compute, live through an hour's trace in
minutes, while every constant of theirs (windows, deadlines, rates) keeps its meaning. What is real, bytes moved and
Python run, takes so much more of that time; say so beside the figures.
"""

from __future__ import annotations

import time

import trio

__all__ = ["PacedClock"]


class PacedClock(trio.abc.Clock):
    """`pace` seconds pass on it in one of the wall clock's."""

    def __init__(self, pace: float) -> None:
        if not 0 < pace < float("inf"):
            raise ValueError(f"pace must be > 0, got {pace}")
        self.pace = pace
        self._began = time.perf_counter()

    def start_clock(self) -> None:
        self._began = time.perf_counter()

    def current_time(self) -> float:
        return (time.perf_counter() - self._began) * self.pace

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return (deadline - self.current_time()) / self.pace
