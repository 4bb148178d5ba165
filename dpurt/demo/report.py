"""The demo's report: text tables, one JSON object, and a picture of hits over time (SVG inside one HTML page)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dpurt.demo.host import Result
from dpurt.demo.plan import TRACE_BLOCK_BYTES, Plan
from dpurt.demo.run import OUTCOMES, Outcome

BUCKETS = 60
MIB = 1 << 20


def as_json(plan: Plan, outcomes: Sequence[Outcome], baseline: Outcome | None = None) -> dict[str, object]:
    """The stable fields others script against, for all runs together, and each run's own under `runs`. `lru`: the run on
    demand beside them, if there was one, which is in no sum; `compared`: it and the run of the same fabric.
    """
    runs = [_run_json(outcome) for outcome in outcomes]
    return {
        "requests": sum(int(run["requests"]) for run in runs),
        "verified_bytes": sum(int(run["verified_bytes"]) for run in runs),
        "wrong_bytes": sum(int(run["wrong_bytes"]) for run in runs),
        "hits": _summed([run["hits"] for run in runs]),
        "ledger": _summed([run["ledger"] for run in runs]),
        "scales": scales(plan),
        "runs": runs,
        "lru": None if baseline is None else _run_json(baseline),
        "compared": [] if baseline is None else [compared(each) for each in (baseline, outcomes[0])],
    }


def compared(outcome: Outcome) -> dict[str, Any]:
    """What a policy came to, as its hosts felt it: `from_dram` is of the blocks that were hits, `load_ms` of windows of blocks."""
    staging, nvme = sum(h.staging for h in outcome.hosts), sum(h.nvme for h in outcome.hosts)
    loads = [t for host in outcome.hosts for t in host.load_s]
    [bdev] = [each["io"] for each in outcome.stats["bdevs"].values()]
    return {
        "policy": outcome.policy, "fabric": outcome.fabric, "hits": staging + nvme, "waited_for_flash": nvme,
        "from_dram": staging / max(1, staging + nvme), "load_ms": _milliseconds(loads), "load_sum_s": round(sum(loads), 2),
        "device_bytes_read": bdev["bytes_read"],
    }  # fmt: skip


def comparison(baseline: Outcome, outcome: Outcome) -> str:
    """Both policies on the same requests, as a table."""
    rows = [
        f"{'policy':<8}{'hits':>9}{'from DRAM':>11}{'waited for flash':>18}{'loads p50':>12}{'p99':>11}{'read from flash':>17}"
    ]
    for row in (compared(baseline), compared(outcome)):
        rows.append(
            f"{row['policy']:<8}{row['hits']:>9,}{row['from_dram']:>11.1%}{row['waited_for_flash']:>18,}"
            f"{row['load_ms']['p50']:>9.1f} ms{row['load_ms']['p99']:>8.1f} ms{row['device_bytes_read'] / MIB:>13,.0f} MiB"
        )
    return "\n".join(rows)


def scales(plan: Plan) -> dict[str, object]:
    """What was made smaller, and how much."""
    return {
        "block_bytes": plan.block_bytes, "block_bytes_of_model": TRACE_BLOCK_BYTES,
        "bytes_scale": round(TRACE_BLOCK_BYTES / plan.block_bytes, 1), "time_scale": plan.speed,
        "distinct_blocks": plan.distinct_blocks, "block_references": plan.block_refs,
        "ideal_hit_blocks": plan.ideal_hits, "staging_blocks": plan.staging_blocks,
    }  # fmt: skip


def _run_json(outcome: Outcome) -> dict[str, Any]:
    hosts = outcome.hosts
    return {
        "fabric": outcome.fabric,
        "bdev": outcome.bdev,
        "requests": sum(h.requests for h in hosts),
        "verified_bytes": sum(h.verified_bytes for h in hosts),
        "wrong_bytes": sum(h.wrong_bytes for h in hosts),
        "hits": {
            "staging": sum(h.staging for h in hosts), "nvme": sum(h.nvme for h in hosts),
            "missed": sum(h.missed for h in hosts),
        },
        "hosts": {h.host: _host_json(h) for h in hosts},
        "ledger": ledger_of(outcome.stats),
        "drops": outcome.stats["index"]["drops"],
        "writes_lost": outcome.stats["intake"]["writes_lost"],
        "ledger_adds_up": ledger_adds_up(outcome.stats),
        "lookup_ms": lookup_ms(hosts),
        "bytes_by_path": bytes_by_path(outcome),
        "outside": asdict(outcome.outside),
        "device": asdict(outcome.device),
        "outside_agrees": {name: agrees for name, _, _, agrees in compare_outside(outcome)},
        "node_exit_code": outcome.exit_code,
        "wall_s": round(outcome.wall_s, 2),
        "crash": None if outcome.crash is None else asdict(outcome.crash),
    }  # fmt: skip


def _host_json(host: Result) -> dict[str, object]:
    return {
        "requests": host.requests, "blocks": host.blocks, "staging": host.staging, "nvme": host.nvme,
        "missed": host.missed, "stored": host.stored, "not_stored": host.not_stored, "not_ok": host.not_ok,
        "unreachable": host.unreachable, "checksum_errors": host.checksum_errors,
    }  # fmt: skip


def _summed(maps: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in maps:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total


def ledger_of(stats: Mapping[str, Any]) -> dict[str, int]:
    """planned, and every outcome."""
    total = stats["prefetch"].get("total", {})
    return {name: int(total.get(name, 0)) for name in ("planned", *OUTCOMES)}


def ledger_adds_up(stats: Mapping[str, Any]) -> bool:
    """planned == sum of the outcomes + open."""
    ledger = ledger_of(stats)
    return ledger["planned"] == sum(ledger[name] for name in OUTCOMES)


def lookup_ms(hosts: Sequence[Result]) -> dict[str, float]:
    """Lookup round trips as the hosts saw them."""
    return _milliseconds([t for host in hosts for t in host.lookup_s])


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    times = np.array(seconds) * 1000
    if not len(times):
        return {"n": 0, "p50": 0.0, "p99": 0.0}
    return {
        "n": len(times),
        "p50": round(float(np.percentile(times, 50)), 3),
        "p99": round(float(np.percentile(times, 99)), 3),
    }


def bytes_by_path(outcome: Outcome) -> dict[str, int]:
    """Where bytes moved: device and fabric as the node counts them, hosts as they count themselves."""
    [bdev] = [each["io"] for each in outcome.stats["bdevs"].values()]
    fabric = outcome.stats["fabrics"][outcome.fabric]
    return {
        "device_read": bdev["bytes_read"], "device_written": bdev["bytes_written"],
        "node_fabric_pulled": fabric["bytes_pulled"], "node_fabric_stored": fabric["bytes_stored"],
        "host_pulled": sum(h.bytes_pulled for h in outcome.hosts),
        "host_stored": sum(h.bytes_stored for h in outcome.hosts),
        "host_verified": sum(h.verified_bytes for h in outcome.hosts),
    }  # fmt: skip


def compare_outside(outcome: Outcome) -> list[tuple[str, int, int, bool]]:
    """(what, as the node says, as /proc says, whether they agree): device bytes within 1 % and 4 MiB (the two counts are not
    taken at one instant), memory within 10 %.
    """
    node, seen, device = outcome.stats["node"], outcome.outside, outcome.device
    return [
        ("resident bytes", node["rss_bytes"], seen.rss_bytes, _near(node["rss_bytes"], seen.rss_bytes, 0.1)),
        ("open files", node["open_fds"], seen.open_fds, abs(node["open_fds"] - seen.open_fds) <= 2),
        ("device bytes written while serving", device.node_written, device.kernel_written,
         _near(device.node_written, device.kernel_written, 0.01)),
        ("device bytes read while serving", device.node_read, device.kernel_read,
         _near(device.node_read, device.kernel_read, 0.01)),
    ]  # fmt: skip


def _near(a: float, b: float, share: float, slack: float = 4 * MIB) -> bool:
    return abs(a - b) <= slack + share * max(a, b)


def text(plan: Plan, outcome: Outcome) -> str:
    """The tables of one run."""
    rows = [
        f"{'host':<8}{'requests':>9}{'blocks':>9}{'staging':>9}{'nvme':>8}{'missed':>8}{'hit rate':>10}"
        f"{'from DRAM':>11}{'verified':>12}{'wrong':>7}"
    ]
    rows += [_host_row(h.host, [h]) for h in outcome.hosts] + [_host_row("all", outcome.hosts)]
    total = sum(h.staging + h.nvme for h in outcome.hosts)
    rows.append(
        f"  ideal for this trace: {plan.ideal_hits} blocks; reached {total / max(1, plan.ideal_hits):.1%} of it"
    )
    ledger = ledger_of(outcome.stats)
    parts = " + ".join(f"{name} {ledger[name]}" for name in OUTCOMES)
    rows.append(
        f"prefetch  planned {ledger['planned']} = {parts}"
        + ("" if ledger_adds_up(outcome.stats) else "  (DOES NOT ADD UP)")
    )
    lookups = lookup_ms(outcome.hosts)
    rows.append(f"lookup    p50 {lookups['p50']} ms, p99 {lookups['p99']} ms, n = {lookups['n']}")
    paths = bytes_by_path(outcome)
    rows.append("bytes     " + ", ".join(f"{name} {value / MIB:,.0f} MiB" for name, value in paths.items()))
    for name, inside, outside, agrees in compare_outside(outcome):
        verdict = "agree" if agrees else f"DIFFER by {abs(inside - outside):,}"
        rows.append(f"{'/proc':<10}{name}: node {inside:,}, kernel {outside:,}  {verdict}")
    if outcome.bdev != "file":
        rows.append(
            f"{'/proc':<10}the device's bytes are those of its own process; the node's read and receive calls brought in "
            f"{outcome.device.own_calls / MIB:,.0f} MiB while it served, of anything"
        )
    if outcome.crash is not None:
        rows += _crash_rows(outcome)
    return "\n".join(rows)


def _host_row(name: str, hosts: Sequence[Result]) -> str:
    blocks = sum(h.blocks for h in hosts)
    staging, nvme = sum(h.staging for h in hosts), sum(h.nvme for h in hosts)
    return (
        f"{name:<8}{sum(h.requests for h in hosts):>9,}{blocks:>9,}{staging:>9,}{nvme:>8,}"
        f"{sum(h.missed for h in hosts):>8,}{(staging + nvme) / max(1, blocks):>10.1%}"
        f"{staging / max(1, staging + nvme):>11.1%}"
        f"{sum(h.verified_bytes for h in hosts) / MIB:>8,.0f} MiB{sum(h.wrong_bytes for h in hosts):>7,}"
    )


def _crash_rows(outcome: Outcome) -> list[str]:
    crash = outcome.crash
    assert crash is not None
    rebuilt = crash.rebuilt
    if crash.victim == "bdev":
        return [
            f"crash     kill -9 of the device's process at {crash.killed_at_s:.1f} s, started again by "
            f"{crash.back_at_s:.1f} s; {crash.hits_between} blocks hit in between, from DRAM",
            f"          of {crash.hits_after} blocks hit afterwards {crash.hits_from_before} were stored before the crash",
        ]
    return [
        f"crash     kill -9 at {crash.killed_at_s:.1f} s, serving again at {crash.back_at_s:.1f} s "
        f"(process start {crash.start_s:.2f} s, of it rebuild {rebuilt['seconds']} s: {rebuilt['records']} records, "
        f"{rebuilt['torn']} torn, {rebuilt['orphans']} orphans)",
        f"          of {crash.hits_after} blocks hit afterwards {crash.hits_from_before} were stored before the crash",
    ]


# --- picture ---------------------------------------------------------------------------------------------------------

_COLOURS = {"staging": "#2a7f62", "nvme": "#e0a030", "missed": "#c8c8c8"}


def write_picture(
    path: Path, plan: Plan, outcomes: Sequence[Outcome], baseline: Outcome | None = None
) -> None:
    """One HTML page: both policies side by side, then for each run the share of blocks from staging, NVMe and missed, over time."""
    runs = list(outcomes) if baseline is None else [baseline, *outcomes]
    table = "" if baseline is None else _comparison_table(baseline, outcomes[0])
    charts = "\n".join(_chart(outcome) for outcome in runs)
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in scales(plan).items())
    path.write_text(
        "<!doctype html><meta charset=utf-8><title>dpurt demo: hits over time</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;color:#222}"
        "svg{width:100%;height:auto}text{font:12px system-ui}"
        "td,th{padding:.2em 1em;text-align:right;border-bottom:1px solid #ddd}</style>"
        f"<h1>Where blocks came from, over time</h1><p>{html.escape(facts)}</p>{table}{charts}",
        encoding="utf-8",
    )


def _comparison_table(baseline: Outcome, outcome: Outcome) -> str:
    head = ("policy", "hits", "from DRAM", "waited for flash", "loads p50", "loads p99", "read from flash")
    rows = [
        (
            row["policy"], f"{row['hits']:,}", f"{row['from_dram']:.1%}", f"{row['waited_for_flash']:,}",
            f"{row['load_ms']['p50']:.1f} ms", f"{row['load_ms']['p99']:.1f} ms", f"{row['device_bytes_read'] / MIB:,.0f} MiB",
        )
        for row in (compared(baseline), compared(outcome))
    ]  # fmt: skip
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    titles = "".join(f"<th>{title}</th>" for title in head)
    return (
        "<h2>dpurt against lru on the same requests</h2><p>Hits are blocks found on either tier; loads are of up to eight "
        "blocks, from request to bytes in the host's buffers; lru reads from flash on demand only.</p>"
        f"<table><tr>{titles}</tr>{cells}</table>"
    )


def _chart(outcome: Outcome) -> str:
    shares = timeline(outcome.hosts)
    width, height = 860, 220
    bars, step = [], width / BUCKETS
    for i in range(BUCKETS):
        y = float(height)
        for j, name in enumerate(_COLOURS):
            size = float(shares[i, j]) * height
            y -= size
            bars.append(
                f'<rect x="{i * step:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{size:.1f}" fill="{_COLOURS[name]}"/>'
            )
    legend = " ".join(f'<tspan fill="{colour}">&#9632;</tspan> {name} ' for name, colour in _COLOURS.items())
    end = max((t[0] for host in outcome.hosts for t in host.timeline), default=0.0)
    title = f"{outcome.fabric} fabric, {outcome.policy}" + (
        " with a crash in the middle" if outcome.crash else ""
    )
    return (
        f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {width} {height + 24}'>{''.join(bars)}"
        f"<text x='0' y='{height + 17}'>0 s</text><text x='{width - 40}' y='{height + 17}'>{end:.0f} s</text>"
        f"<text x='{width / 2 - 110}' y='{height + 17}'>{legend}</text></svg>"
    )


def timeline(hosts: Sequence[Result]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """(buckets, 3): shares of blocks from staging, nvme, missed, in each slice of the run's time."""
    rows = np.array([row for host in hosts for row in host.timeline], float).reshape(-1, 5)
    counts = np.zeros((BUCKETS, 3))
    if len(rows):
        bucket = np.minimum((rows[:, 0] / (rows[:, 0].max() + 1e-9) * BUCKETS).astype(int), BUCKETS - 1)
        np.add.at(counts, bucket, rows[:, 2:5])
    totals = counts.sum(axis=1, keepdims=True)
    shares: np.ndarray[tuple[int, int], np.dtype[np.float64]] = counts / np.maximum(totals, 1.0)
    return shares
