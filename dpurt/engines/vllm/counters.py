"""What the connector counted in an interval: plain numbers that travel, add up, and become Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from threading import Lock
from typing import Any

Reasons = dict[str, int]


@dataclass(slots=True)
class Counters:
    """One interval. Every request that was looked at is in `requests`; one that was not is in `skipped`, with the reason."""

    requests: int = 0
    skipped: Reasons = field(default_factory=dict)
    lookups_late: int = 0  # no answer within the budget: went on without
    lookup_s: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    blocks_loaded: int = 0
    blocks_from_flash: int = 0
    blocks_failed: Reasons = field(default_factory=dict)
    bytes_loaded: int = 0
    load_s: float = 0.0
    blocks_saved: int = 0
    blocks_not_saved: Reasons = field(default_factory=dict)
    bytes_saved: int = 0
    save_s: float = 0.0
    node_errors: Reasons = field(default_factory=dict)
    longest_call_s: float = 0.0  # of those the engine waited for
    is_up: int = 0  # a gauge: the last word


MAXIMA = frozenset({"longest_call_s"})
REASONS = frozenset({"skipped", "blocks_failed", "blocks_not_saved", "node_errors"})
GAUGES = frozenset({"is_up"})


def add(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two intervals, or two processes, as one; of gauges the second's. Keys that either lacks count as nothing."""
    out = dict(total)
    for name, value in more.items():
        if name in REASONS:
            out[name] = _added_reasons(out.get(name, {}), value)
        elif name in MAXIMA:
            out[name] = max(out.get(name, 0.0), value)
        elif name in GAUGES:
            out[name] = value
        else:
            out[name] = out.get(name, 0) + value
    return out


def _added_reasons(total: Reasons, more: Reasons) -> Reasons:
    return {
        key: total.get(key, 0) + more.get(key, 0) for key in (*total, *(k for k in more if k not in total))
    }


def flat(data: Mapping[str, Any]) -> dict[str, int | float]:
    """Without nesting, for a log line; what is zero is left out."""
    out: dict[str, int | float] = {}
    for name, value in data.items():
        if name in REASONS:
            out |= {f"{name}.{reason}": count for reason, count in value.items()}
        elif value:
            out[name] = round(value, 4) if isinstance(value, float) else value
    return out


class Tally:
    """The current interval of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now = Counters()
        self._is_dirty = False

    def count(self, **amounts: float) -> None:
        """Add to plain counters; maxima and gauges keep the larger or last value."""
        with self._lock:
            self._is_dirty = True
            for name, amount in amounts.items():
                old = getattr(self._now, name)
                new = max(old, amount) if name in MAXIMA else amount if name in GAUGES else old + amount
                setattr(self._now, name, new)

    def why(self, name: str, reasons: Iterable[str]) -> None:
        """Count reasons."""
        with self._lock:
            self._is_dirty = True
            table: Reasons = getattr(self._now, name)
            for reason in reasons:
                table[reason] = table.get(reason, 0) + 1

    def take(self) -> dict[str, Any] | None:
        """The interval so far, and begin the next; None when nothing happened."""
        with self._lock:
            if not self._is_dirty:
                return None
            done, self._now, self._is_dirty = self._now, Counters(is_up=self._now.is_up), False
            return asdict(done)


COUNTED = tuple(f.name for f in fields(Counters))
