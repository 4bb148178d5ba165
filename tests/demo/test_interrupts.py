"""An interrupt between a fork and its bookkeeping."""

from __future__ import annotations

import signal
import threading

import pytest

from dpurt.demo.interrupts import interrupts_held


class Interrupted(Exception):
    pass


def interrupt(_number: int, _frame: object) -> None:
    raise Interrupted


def start_interrupted(number: signal.Signals, known: list[str]) -> None:
    with interrupts_held():
        signal.raise_signal(number)
        known.append("the process")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_inside_takes_effect_at_the_end(number: signal.Signals) -> None:
    before = signal.signal(number, interrupt)
    known: list[str] = []
    try:
        with pytest.raises(Interrupted):
            start_interrupted(number, known)
        assert known == ["the process"]
        with pytest.raises(Interrupted):  # the handler is the caller's again
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_a_thread_that_no_signal_interrupts_may_use_it() -> None:
    ended = []

    def work() -> None:
        with interrupts_held():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]
