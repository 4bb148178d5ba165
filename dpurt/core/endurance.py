"""How many bytes flash may be given a day, and who gets what is left: the endurance budget.

Theory of operation. Flash wears by what is written, and most KV blocks are written once and never read (facts from users
of KV caches). The budget is a bucket: it fills at the allowed rate, up to `BURST_S` of it, and every byte the host writes
is taken out. While more than `NEWCOMERS` of the bucket is left, every block is written. Below, only blocks that somebody
asked for again, and at zero none. What is not written stays in DRAM as long as it is used there, and is offered again when
it is.

Host bytes only: what the drive writes by itself on top only its own log tells. Left to others: which block is offered
(`dpurt.agents.intake`), what a worn drive reports (`WriteBudget.is_worn` is set from its SMART log).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DAY_S", "EnduranceStats", "WriteBudget"]

DAY_S = 86_400.0
BURST_S = 3_600.0
NEWCOMERS = 0.5  # of the bucket, below which only blocks asked for again are written


@dataclass(frozen=True, slots=True, kw_only=True)
class EnduranceStats:
    """A snapshot. `left_bytes` may be negative after re-appends; refused blocks are counted each time they are."""

    bytes_per_day: float
    left_bytes: float
    spent_bytes: int
    admitted: int
    admitted_again: int
    refused: int
    is_worn: bool


class WriteBudget:
    """`bytes_per_day`: drive writes a day times the capacity. A new one is full, so a restart costs an hour's bytes at most."""

    def __init__(self, bytes_per_day: float, now: float) -> None:
        if bytes_per_day <= 0:
            raise ValueError(f"a budget of {bytes_per_day} bytes a day writes nothing")
        self.bytes_per_day = bytes_per_day
        self.is_worn = False  # the drive says so: newcomers are not written any more
        self._burst = bytes_per_day / DAY_S * BURST_S
        self._left = self._burst
        self._filled_at = now
        self._spent = self._admitted = self._again = self._refused = 0

    def admit(self, num_bytes: int, now: float, *, is_again: bool) -> bool:
        """May a block of so many bytes be written now? If so they are spent. `is_again`: it was used since it was stored."""
        self._fill(now)
        keep = 0.0 if is_again else self._burst * NEWCOMERS
        if self._left - num_bytes < keep or (self.is_worn and not is_again):
            self._refused += 1
            return False
        self.charge(num_bytes)
        self._admitted += 1
        self._again += is_again
        return True

    def charge(self, num_bytes: int) -> None:
        """So many bytes are written in any case (a segment's header, a record that is carried on)."""
        self._left -= num_bytes
        self._spent += num_bytes

    def stats(self) -> EnduranceStats:
        """A snapshot."""
        return EnduranceStats(
            bytes_per_day=self.bytes_per_day,
            left_bytes=self._left,
            spent_bytes=self._spent,
            admitted=self._admitted,
            admitted_again=self._again,
            refused=self._refused,
            is_worn=self.is_worn,
        )

    def _fill(self, now: float) -> None:
        earned = (now - self._filled_at) * self.bytes_per_day / DAY_S
        self._left = min(self._burst, self._left + earned)
        self._filled_at = now
