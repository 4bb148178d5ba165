"""Tasks whose ends LMCache's controllers wait for on an event descriptor: results by task, and the signal that there are some."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Finished(Generic[T]):
    """Results of one kind of task, each taken once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """Readable while there may be results that nobody has looked at; LMCache reads it empty."""
        return self._fd

    def put(self, task: int, result: T) -> None:
        """A task has ended."""
        with self._lock:
            if not self._is_closed:
                self._results[task] = result
                os.eventfd_write(self._fd, 1)

    def take(self, task: int) -> T | None:
        """A task's result, once; None when it has not ended."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """All results, once."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Later results are dropped. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                with suppress(OSError):
                    os.close(self._fd)


class Gathered:
    """The answers of several stores to one task, put together; `done` is called with all of them, once."""

    def __init__(self, size: int, parts: int, done: Callable[[list[bool]], None]) -> None:
        self._lock = threading.Lock()
        self._blocks = [False] * size
        self._missing = parts
        self._done = done
        if not parts:
            done(self._blocks)

    def add(self, positions: Sequence[int], answers: Sequence[bool]) -> None:
        """One store's answers, for the blocks at these positions of the task. Where two stores answer, either will do."""
        with self._lock:
            for position, answer in zip(positions, answers, strict=True):
                self._blocks[position] |= answer
            self._missing -= 1
            is_over = not self._missing
        if is_over:
            self._done(self._blocks)
