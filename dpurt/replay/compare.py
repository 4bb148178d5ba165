"""Two reports of `dpurt replay` side by side: what changed, and whether it is one thing.

Runs are paired by policy and by the conditions that a sweep varies. Two runs that differ in other conditions are
compared all the same, and the conditions are named: a comparison that changes more than one thing proves little. The
difference of the hit rates comes with a 95 % interval from the runs' time slices, pair by pair, where both saw the same
requests; one that holds 0 says the slices do not agree on which is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.report import Result
from dpurt.replay.slices import difference_interval

__all__ = ["COMPARED", "Pair", "as_json", "as_text", "pairs", "read_report"]

COMPARED = (
    "at_match",
    "accuracy",
    "coverage",
    "bytes_read_per_useful_byte",
    "stall_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "timely",
    "late",
    "early",
    "useless",
)
_SWEPT = (
    "staging_share",
    "device.name",
    "device.read_bytes_per_s",
    "lookahead_blocks",
    "prefetch_queue_depth",
    "seed",
)

Values = dict[str, float | None]


def read_report(path: Path) -> list[Result]:
    """What `dpurt replay --json` wrote. ConfigError for something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Result])
    except OSError as error:
        raise ConfigError(str(path), f"cannot read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"expected a report of dpurt replay --json: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One policy's run in both reports; `b` or `a` is None where the other report has no such run."""

    policy: str
    a: Result | None
    b: Result | None

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Conditions that differ, by their path."""
        if self.a is None or self.b is None:
            return {}
        left, right = _flat(self.a.conditions), _flat(self.b.conditions)
        names = sorted(left.keys() | right.keys())
        return {n: (left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)}

    @property
    def difference_interval(self) -> list[float] | None:
        """Of the hit rates, b - a; see the module's docstring. None without two runs of the same requests."""
        if self.a is None or self.b is None:
            return None
        return difference_interval(self.b.hits_by_slice, self.a.hits_by_slice)


def values(result: Result) -> Values:
    """The figures of a run that are compared."""
    rates: Values = {f"hit_rate.{unit}": rate for unit, rate in result.hit_rate.items()}
    return rates | {name: getattr(result, name) for name in COMPARED}


def pairs(a: Sequence[Result], b: Sequence[Result]) -> list[Pair]:
    """Runs of both reports, paired: exactly where the swept conditions agree, else in order within the policy."""
    left, right = list(a), list(b)
    found = []
    for is_same in (_is_same_point, _is_same_policy):
        for one in list(left):
            other = next((r for r in right if is_same(one, r)), None)
            if other is not None:
                left.remove(one)
                right.remove(other)
                found.append(Pair(policy=one.policy, a=one, b=other))
    alone = [Pair(policy=r.policy, a=r, b=None) for r in left]
    return found + alone + [Pair(policy=r.policy, a=None, b=r) for r in right]


def _is_same_policy(a: Result, b: Result) -> bool:
    return a.policy == b.policy


def _is_same_point(a: Result, b: Result) -> bool:
    left, right = _flat(a.conditions), _flat(b.conditions)
    return a.policy == b.policy and all(left.get(name) == right.get(name) for name in _SWEPT)


def _flat(conditions: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in conditions.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def as_json(found: Sequence[Pair]) -> list[dict[str, object]]:
    """A row a pair: figures of both and their difference b - a."""
    return [
        {
            "policy": pair.policy,
            "in": [name for name, side in (("a", pair.a), ("b", pair.b)) if side is not None],
            "conditions_changed": {name: list(two) for name, two in pair.changed.items()},
            "hit_rate_difference_95": pair.difference_interval,
            "figures": {name: {"a": a, "b": b, "difference": d} for name, a, b, d in differences(pair)},
        }
        for pair in found
    ]


def differences(pair: Pair) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    """(figure, a, b, b - a) of each figure either side has."""
    left = values(pair.a) if pair.a is not None else {}
    right = values(pair.b) if pair.b is not None else {}
    for name in left | right:
        a, b = left.get(name), right.get(name)
        yield name, a, b, None if a is None or b is None else b - a


def as_text(found: Sequence[Pair]) -> str:
    """For people: a table a pair, only figures that differ; then what else was changed."""
    return "\n".join(line for pair in found for line in _lines(pair))


def _lines(pair: Pair) -> Iterator[str]:
    if pair.a is None or pair.b is None:
        yield f"{pair.policy}: only in {'b' if pair.a is None else 'a'}"
        return
    moved = [row for row in differences(pair) if row[3] != 0 and (row[1], row[2]) != (None, None)]
    if not moved:
        yield f"{pair.policy}: equal"
    else:
        yield f"{pair.policy + f': {len(moved)} figures differ':<30} {'a':>12} {'b':>12} {'b - a':>12}"
    yield from (
        f"  {name:<28} {_shown(a):>12} {_shown(b):>12} {_shown(d, '+'):>12}" for name, a, b, d in moved
    )
    if moved and pair.difference_interval is not None:
        low, high = pair.difference_interval
        yield f"  hit_rate.blocks differs by {low:+.4f} to {high:+.4f} (95 %, by time slices)"
    yield from (f"  changed: {name}: {a} -> {b}" for name, (a, b) in pair.changed.items())


def _shown(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return format(value, f"{sign},d" if isinstance(value, int) else f"{sign},.4f")
