"""One process of a sweep: `python -m dpurt.replay.worker`, told what to do on stdin, answering on stdout.

JSON lines. First what to read (`Task`), then a `Run` a line until the end of input. Answers, a line each:
``{"arrived": n}`` now and then while a run goes on, then its ``{"result": {...}}``; ``{"error": text}`` if the trace is wrong.
The trace is read again in each process: nothing but text passes between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.engine import Scenario, replay
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.policies import POLICIES
from dpurt.replay.report import Result

__all__ = ["Answer", "Run", "Task", "every", "work"]

TELLS_PER_RUN = 50


class Task(msgspec.Struct, frozen=True):
    """The trace of all runs."""

    file: str
    reading: Reading


class Run(msgspec.Struct, frozen=True):
    """One policy in one scenario."""

    policy: str
    scenario: Scenario


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of them is set."""

    arrived: int | None = None
    result: Result | None = None
    error: str | None = None


def work(tasks: TextIO, answers: TextIO) -> None:
    """Answer every run; see the module's docstring."""

    def tell(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()

    task = msgspec.json.decode(tasks.readline(), type=Task)
    try:
        trace = read_trace(Path(task.file), task.reading)
    except ConfigError as error:
        tell(Answer(error=str(error)))
        return
    step = max(1, len(trace.requests) // TELLS_PER_RUN)
    arrived = every(step, lambda done: tell(Answer(arrived=done)))
    for line in tasks:
        run = msgspec.json.decode(line, type=Run)
        tell(Answer(result=replay(trace.requests, POLICIES[run.policy], run.scenario, arrived)))


def every(step: int, tell: Callable[[int], None]) -> Callable[[int], None]:
    """`tell` at each `step`-th number only."""

    def counted(done: int) -> None:
        if done % step == 0:
            tell(done)

    return counted


if __name__ == "__main__":
    work(sys.stdin, sys.stdout)
