"""Interrupts that wait until a new process is known to whoever ends it."""

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
