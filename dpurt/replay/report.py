"""Results of replays, side by side: as a table, and as plain dicts for JSON.

Definitions, once. All rates are over *all* block references, recomputed ones included, so that no policy
changes its own denominator; `reusable` is the share of references whose block was stored before, the ceiling
of every rate here.

- `hit_rate`: found in staging when its host asked for it, in blocks, tokens and bytes; `sources` says where
  each reference was served from (staging: kept; prefetched: first use of a timely prefetch; in_flight; nvme;
  recomputed) and adds up to all.
- `at_match`: of the reusable leading run of a request (blocks stored when it arrived, up to the first that was
  not), the share in staging at its arrival, over all requests; any present block of the run counts, as the device
  supplies the rest. `leading_at_match`: leading run in staging at arrival, over *all* references.
- `confidence`: 95 % intervals from time slices, see `dpurt.replay.slices`; `hits_by_slice`: (hits, references) of each.
- `untimed_prefix_hit_rate`, `untimed_ideal_hit_rate`: for demand-only policies, the statistic others publish for the same
  eviction and size, and its ceiling; see `dpurt.replay.hits`.
- timely, late, early, useless, accuracy, coverage: see `dpurt.core.ledger`.
- `leads`, `waits`: counts by `dpurt.core.ledger.LEAD_BOUNDS_S` of how long timely prefetches lay ready before use, and
  of how long hosts waited for late ones; the last count is of all longer times.
- `bytes_read_per_useful_byte`: bytes read from the device / bytes of reads some host used.
- `stall_s`: time hosts waited for blocks that were stored, summed over blocks; loads over the link not
  counted.
- `regret_to_oracle`: the oracle's hit rate in blocks minus this one's, and this one's stall minus the
  oracle's; None without an oracle in the same run.
- `refs_per_s`: block references replayed a second of wall time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from dpurt.core.ledger import Totals
from dpurt.core.prefetch import PrefetchCore


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy's outcome; see the module's docstring. `conditions` holds every parameter."""

    policy: str
    hit_rate: Mapping[str, float]
    at_match: float
    leading_at_match: float
    confidence: Mapping[str, list[float] | int | None]
    hits_by_slice: Sequence[tuple[int, int]]
    reusable: float
    sources: Mapping[str, int]
    untimed_prefix_hit_rate: float | None
    untimed_ideal_hit_rate: float | None
    planned: int
    issued: int
    timely: int
    late: int
    early: int
    useless: int
    cancelled: int
    failed: int
    open: int
    refused: Mapping[str, int]
    demand_misses: int
    accuracy: float | None
    coverage: float | None
    lead_p50_s: float | None
    leads: Sequence[int]
    waits: Sequence[int]
    by_predictor: Mapping[str, Mapping[str, float | int | None]]
    bytes_read: int
    bytes_read_per_useful_byte: float | None
    no_room: int
    stall_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    wall_s: float
    refs_per_s: float
    conditions: Mapping[str, object]
    regret_to_oracle: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, object]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


class PrefetchFigures(TypedDict):
    """The fields of a Result that come from the core's ledger."""

    planned: int
    issued: int
    timely: int
    late: int
    early: int
    useless: int
    cancelled: int
    failed: int
    open: int
    refused: dict[str, int]
    demand_misses: int
    accuracy: float | None
    coverage: float | None
    lead_p50_s: float | None
    leads: list[int]
    by_predictor: dict[str, dict[str, float | int | None]]


def prefetch_figures(core: PrefetchCore | None) -> PrefetchFigures:
    """What the ledger of a core says; all zero without one."""
    total = core.ledger.totals() if core is not None else Totals()
    names = core.ledger.predictors() if core is not None else []
    return PrefetchFigures(
        planned=total.planned,
        issued=total.issued,
        timely=total.timely,
        late=total.late,
        early=total.early,
        useless=total.useless,
        cancelled=total.cancelled,
        failed=total.failed,
        open=total.open,
        refused=_refusals(total),
        demand_misses=total.demand_misses,
        accuracy=total.accuracy,
        coverage=total.coverage if core is not None else None,
        lead_p50_s=total.lead_quantile_s(0.5),
        leads=list(total.leads),
        by_predictor={name: _row(core, name) for name in names} if core is not None else {},
    )


def _row(core: PrefetchCore, name: str) -> dict[str, float | int | None]:
    row = core.ledger.totals(predictor=name)
    figures: dict[str, float | int | None] = {
        key: getattr(row, key)
        for key in ("planned", "issued", "timely", "late", "early", "useless", "refused")
    }
    return figures | {"accuracy": row.accuracy, "trust": core.arbiter.trust(name)}


def _refusals(total: Totals) -> dict[str, int]:
    prefix = "refused:"
    return {
        reason.removeprefix(prefix): count
        for reason, count in sorted(total.reasons.items())
        if reason.startswith(prefix)
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value at or above the share `q` of them; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def with_regret(results: Sequence[Result]) -> list[Result]:
    """The same results of one scenario, with their regret to the oracle among them, if there is one."""
    oracle = next((r for r in results if r.policy == "oracle"), None)
    return list(results) if oracle is None else [_regretting(r, oracle) for r in results]


def _regretting(result: Result, oracle: Result) -> Result:
    regret = {
        "hit_rate_blocks": oracle.hit_rate["blocks"] - result.hit_rate["blocks"],
        "stall_s": result.stall_s - oracle.stall_s,
    }
    return replace(result, regret_to_oracle=regret)


_COLUMNS = (
    ("policy", 15),
    ("hit %", 6),
    ("at match %", 10),
    ("timely", 7),
    ("late", 6),
    ("early", 6),
    ("useless", 7),
    ("accuracy", 8),
    ("coverage", 8),
    ("read/useful", 11),
    ("stall s", 8),
    ("TTFT p50 s", 10),
    ("TTFT p99 s", 10),
    ("regret pt", 9),
    ("refs/s", 8),
)


def as_table(results: Sequence[Result]) -> str:
    """A text table, one line a policy."""
    lines = [" ".join(title.rjust(width) for title, width in _COLUMNS)]
    for result in results:
        cells = zip(_cells(result), _COLUMNS, strict=True)
        lines.append(" ".join(cell.rjust(width) for cell, (_, width) in cells))
    return "\n".join(lines)


def _cells(r: Result) -> list[str]:
    regret = None if r.regret_to_oracle is None else r.regret_to_oracle["hit_rate_blocks"] * 100
    counts = (r.timely, r.late, r.early, r.useless)
    return [
        r.policy,
        f"{r.hit_rate['blocks'] * 100:.1f}",
        f"{r.at_match * 100:.1f}",
        *(str(count) if r.planned else "-" for count in counts),
        _number(r.accuracy, 2),
        _number(r.coverage, 2),
        _number(r.bytes_read_per_useful_byte, 2),
        f"{r.stall_s:.1f}",
        f"{r.ttft_p50_s:.2f}",
        f"{r.ttft_p99_s:.2f}",
        _number(regret, 1),
        f"{r.refs_per_s:.0f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
