"""How long a read of the device takes beyond the time its bytes need: measured. And when computing beats reading. Pure.

Theory of operation. What a read took, less its bytes at the rate the device is counted on for, is its latency; the estimate is
the least of the last reads (half a window to a whole one), since anything above that is a read's wait for other reads, which
those who plan count by themselves. So it falls with the first fast read and rises when a window of slow ones has passed. One
that no read has confirmed for `STALE_S` is forgotten: a device that nothing is read from because it was slow once gets another
try.

Break-even. A host that lacks a block may compute it; from the first block that is missing on, it must compute all that follow.
So what is compared with the wait for a block is the time to compute the whole *run*: this block and those that the request
still wants after it. A long prefix is worth a slow device's latency, a short one is not. A block which is there before it is
needed costs no wait, however slow its device is. And where the bytes alone take longer than computing them, no length helps.
"""

from __future__ import annotations

__all__ = ["ReadLatency", "is_computing_cheaper"]

HALF = 8  # reads of half a window
STALE_S = 30.0
_NEVER = float("-inf")
_NONE = float("inf")


class ReadLatency:
    """See the module's docstring. `default_s` holds until something is measured."""

    __slots__ = ("_before", "_bytes_per_s", "_count", "_default_s", "_least", "_measured_at")

    def __init__(self, bytes_per_s: float, default_s: float) -> None:
        if bytes_per_s <= 0 or default_s < 0:
            raise ValueError("bytes_per_s must be > 0 and default_s >= 0")
        self._bytes_per_s = bytes_per_s
        self._default_s = default_s
        self._least = self._before = _NONE  # of this half of the window, and of the one before
        self._count = 0
        self._measured_at = _NEVER

    def observe(self, num_bytes: int, elapsed_s: float, now: float) -> None:
        """A read ended, or was given up after so long."""
        if now - self._measured_at > STALE_S:
            self._least = self._before = _NONE
            self._count = 0
        self._measured_at = now
        latency_s = elapsed_s - num_bytes / self._bytes_per_s
        if latency_s < self._least:
            self._least = latency_s
        self._count += 1
        if self._count == HALF:
            self._before, self._least = self._least, _NONE
            self._count = 0

    def value(self, now: float) -> float:
        """Seconds, >= 0."""
        if now - self._measured_at > STALE_S:
            return self._default_s
        return max(0.0, min(self._least, self._before))


def is_computing_cheaper(wait_s: float, transfer_s: float, recompute_s: float, run_blocks: int) -> bool:
    """Should a host compute rather than wait? `recompute_s` and `transfer_s` are of one block, `wait_s` is for the first of a
    run of `run_blocks`.
    """
    return transfer_s > recompute_s or wait_s > recompute_s * run_blocks
