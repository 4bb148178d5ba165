"""Interrupts of a command that runs processes: none of these outlives it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside the block take effect at its end. One that hits between a fork and the assignment of its
    process object would leave a process that nobody ends. The new process does not inherit it, as it would a blocked signal.
    """
    if threading.current_thread() is not threading.main_thread():  # signals do not interrupt it
        yield
        return
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in INTERRUPTS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is an interrupt inside the block: whatever ends its processes at one ends them."""
    interrupts: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except Exception:
        if interrupts:  # it hit in the middle of something that then failed, perhaps inside Trio
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
