"""How far a long command is: a bar on a terminal, a plain line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

BAR_CELLS = 30
BAR_EVERY_S = 0.1
LINE_EVERY_S = 5.0


class Progress:
    """`with Progress("replay", total) as progress: progress.update(done)`. `update` is cheap when it has
    nothing to show.
    """

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_tty = self._stream.isatty()
        self._began = clock()
        self._next = self._began + (0.0 if self._is_tty else LINE_EVERY_S)

    def update(self, done: int) -> None:
        """`done` of the total are done."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (BAR_EVERY_S if self._is_tty else LINE_EVERY_S)
        self._show(min(done, self._total), now)

    def _show(self, done: int, now: float) -> None:
        percent = f"{100 * done // self._total:3d} %"
        if not self._is_tty:
            print(f"{self._label}: {percent} after {now - self._began:.0f} s", file=self._stream, flush=True)
            return
        full = BAR_CELLS * done // self._total
        bar = "#" * full + "." * (BAR_CELLS - full)
        print(f"\r{self._label} [{bar}] {percent}", end="", file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_tty:  # leave no half bar behind
            width = len(self._label) + BAR_CELLS + 12
            print("\r" + " " * width + "\r", end="", file=self._stream, flush=True)
