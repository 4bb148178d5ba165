"""A replay's results as one self-contained HTML page: charts, tables, and beside each figure what it means and what it
is divided by.

Charts over staging size show the scenarios that differ in nothing else; a sweep over other things makes a section for
each combination. Policies keep their colour over the whole page.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence

from dpurt.core.ledger import LEAD_BOUNDS_S
from dpurt.replay.report import Result
from dpurt.replay.svg import NUM_COLOURS, bars, lines

__all__ = ["as_page"]

Group = Sequence[Result]
Figure = Callable[[Result], float | None]
Counts = Callable[[Result], Sequence[int]]

DEFINITIONS = (
    ("hit rate", "blocks found in staging when their host asked for them, over all block references of counted requests "
     "(recomputed ones included, so no policy changes its own denominator)"),
    ("ceiling", "references whose block had been stored before, over all block references"),
    ("at match", "blocks in staging when their request arrived, over the blocks of reusable leading runs: stored then, up "
     "to the first that was not"),
    ("regret", "the oracle's hit rate minus this one's, in points. The oracle knows every future use, evicts like Belady "
     "and has the same bandwidth, queue and staging; it is greedy, a strong yardstick and not a proven bound"),
    ("timely, late, early, useless", "issued prefetches by outcome: ready before need; in flight at need; evicted before "
     "their use came; never wanted within the horizon"),
    ("accuracy", "(timely + late) over issued prefetches that have settled"),
    ("coverage", "(timely + late) over (timely + late + demand misses)"),
    ("read / useful", "bytes read from the device over bytes of reads that some host used"),
    ("bandwidth", "bytes read from the device over what it could have read from the first arrival to the last"),
    ("stall", "time hosts waited for blocks that were stored, summed over blocks; loads over the link not counted"),
    ("TTFT", "from a request's arrival to its first token, modelled: queueing, waits, loads, prefill of the rest, one "
     "decode step"),
    ("lead, wait", "how long timely prefetches lay ready before their use; how long hosts waited for late ones"),
    ("95 %", "interval of the hit rate from 20 time slices: how much another hour of such traffic might differ. It does "
     "not say whether two policies differ on this trace: they see the same requests"),
)  # fmt: skip

_STYLE = """
:root{--fg:#1d2530;--dim:#667080;--bg:#fff;--line:#dde2e8;
--c0:#2364aa;--c1:#d1495b;--c2:#2a9d6f;--c3:#e09f3e;--c4:#7b4fa3;--c5:#00879e;--c6:#8d6e53;--c7:#5c677d}
@media(prefers-color-scheme:dark){:root{--fg:#e6eaf0;--dim:#98a3b3;--bg:#14181f;--line:#2c343f;
--c0:#6aa7ee;--c1:#f07f8e;--c2:#5fd0a0;--c3:#f2bd6b;--c4:#b58be0;--c5:#4fc3d9;--c6:#c7a385;--c7:#a3aec0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em}h3{font-size:1em;margin:1.5em 0 .3em}
svg{width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:var(--dim)}.grid{stroke:var(--line)}
polyline{fill:none;stroke-width:2}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2em .7em;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
dt{font-weight:600}dd{margin:0 0 .5em 1.5em;color:var(--dim)}.key{margin-right:1.2em;white-space:nowrap}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}.note{color:var(--dim)}
"""


def as_page(groups: Sequence[Group]) -> str:
    """The page of all scenarios; each group is one scenario's results, one per policy."""
    first = groups[0][0]
    names = list(dict.fromkeys(result.policy for group in groups for result in group))
    colours = {name: at for at, name in enumerate(names)}
    body = [f"<h1>Prefetch policies on {_safe(_trace(first)['file'])}</h1>", _about(first)]
    for title, family in _families(groups):
        body.append(f"<h2>{_safe(title)}</h2>")
        body += _section(family, colours)
    body += ["<h2>What the figures mean</h2>", _definitions(), "<h2>Conditions</h2>", _conditions(first)]
    head = f"<meta charset=utf-8><title>dpurt replay</title><style>{_STYLE}{_colour_classes()}</style>"
    view = '<meta name=viewport content="width=device-width,initial-scale=1">'
    return f"<!doctype html><html lang=en><head>{head}{view}</head><body>{''.join(body)}</body></html>\n"


def _colour_classes() -> str:
    return "".join(
        f"polyline.c{n}{{stroke:var(--c{n})}}circle.c{n},rect.c{n}{{fill:var(--c{n})}}i.c{n}{{background:var(--c{n})}}"
        for n in range(NUM_COLOURS)
    )


def _trace(result: Result) -> Mapping[str, object]:
    trace = result.conditions["trace"]
    assert isinstance(trace, Mapping)
    return trace


def _about(first: Result) -> str:
    conditions, trace = first.conditions, _trace(first)
    modelled = trace["modelled"]
    assert isinstance(modelled, list)
    made = f" Not recorded but modelled: {'; '.join(modelled)}." if modelled else ""
    text = (
        f"{conditions['requests']:,} requests in {conditions['span_s']:,.0f} s, format {trace['format']}, blocks of "
        f"{conditions['block_tokens']} tokens and {conditions['block_bytes']:,} bytes, {conditions['hosts']} hosts. "
        f"Warm-up not counted: {conditions['warmup_share']:.0%} of the requests.{made}"
    )
    return f"<p>{_safe(text)}</p>"


def _families(groups: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Scenarios that differ in staging only, with a title of what they have in common."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(_title(group[0]), []).append(group)
    yield from families.items()


def _device(result: Result) -> Mapping[str, object]:
    device = result.conditions["device"]
    assert isinstance(device, Mapping)
    return device


def _title(result: Result) -> str:
    c, device = result.conditions, _device(result)
    rate = _float(device["read_bytes_per_s"]) / 1e9
    return (
        f"{device['name']} at {rate:g} GB/s, look-ahead {c['lookahead_blocks']}, budget {c['prefetch_queue_depth']}, "
        f"seed {c['seed']}"
    )


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _staging(group: Group) -> float:
    return _float(group[0].conditions["staging_share"])


def _section(family: Sequence[Group], colours: Mapping[str, int]) -> Iterator[str]:
    family = sorted(family, key=_staging)
    yield f'<p class="note">{_safe("Device: " + str(_device(family[0][0])["source"]))}</p>'
    yield _keys(colours)
    yield "<h3>Hit rate over staging size</h3>"
    yield _over_staging(family, colours, "hit rate, % of references", lambda r: 100 * r.hit_rate["blocks"])
    ceiling = 100 * max(result.reusable for group in family for result in group)
    yield f'<p class="note">Ceiling: {ceiling:.1f} % of the references are to blocks stored before.</p>'
    yield "<h3>At match over staging size</h3>"
    yield _over_staging(family, colours, "at match, % of reusable", lambda r: 100 * r.at_match)
    if any(result.regret_to_oracle for result in family[0]):
        yield "<h3>Regret to the oracle over staging size</h3>"
        yield _over_staging(family, colours, "regret, points", _regret)
    yield "<h3>Bandwidth used over staging size</h3>"
    yield _over_staging(family, colours, "of the device's rate, %", _bandwidth)
    for group in family:
        yield from _point(group, colours)


def _regret(result: Result) -> float | None:
    return None if result.regret_to_oracle is None else 100 * result.regret_to_oracle["hit_rate_blocks"]


def _bandwidth(result: Result) -> float | None:
    could = _float(result.conditions["span_s"]) * _float(_device(result)["read_bytes_per_s"])
    return 100 * result.bytes_read / could if could else None


def _over_staging(family: Sequence[Group], colours: Mapping[str, int], y_label: str, figure: Figure) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for group in family:
        for result in group:
            value = figure(result)
            if value is not None:
                series.setdefault(result.policy, []).append((_staging(group), value))
    return lines(
        series,
        colours,
        x_label="staging, % of distinct blocks",
        y_label=y_label,
        x_text=lambda x: f"{100 * x:g} %",
    )


def _point(group: Group, colours: Mapping[str, int]) -> Iterator[str]:
    conditions = group[0].conditions
    yield f"<h3>Staging {100 * _staging(group):g} % ({conditions['capacity_blocks']:,} blocks)</h3>"
    yield _table(group)
    prefetching = [result for result in group if result.issued]
    if prefetching:
        leads = _histogram(prefetching, lambda r: r.leads)
        waits = _histogram(prefetching, lambda r: r.waits)
        yield "<h3>Lead of timely prefetches</h3>"
        yield bars(leads, colours, x_label="ready before use for up to", y_label="prefetches")
        yield "<h3>Lateness: wait for late prefetches</h3>"
        yield bars(waits, colours, x_label="waited for up to", y_label="waits")


def _histogram(results: Sequence[Result], counts: Counts) -> list[tuple[str, dict[str, float]]]:
    labels = [_seconds(bound) for bound in LEAD_BOUNDS_S] + ["longer"]
    return [(label, {r.policy: float(counts(r)[at]) for r in results}) for at, label in enumerate(labels)]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _table(group: Group) -> str:
    head = (
        "policy", "hit %", "95 %", "at match %", "timely", "late", "early", "useless", "accuracy", "coverage",
        "read / useful", "stall s", "TTFT p50 s", "TTFT p99 s", "regret",
    )  # fmt: skip
    rows = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in _cells(r))}</tr>" for r in group)
    titles = "".join(f"<th>{_safe(title)}</th>" for title in head)
    return f'<div class="scroll"><table><tr>{titles}</tr>{rows}</table></div>'


def _cells(r: Result) -> list[str]:
    interval = r.confidence.get("hit_rate_blocks")
    spread = f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}" if isinstance(interval, list) else "-"
    counts = (r.timely, r.late, r.early, r.useless)
    return [
        r.policy,
        f"{100 * r.hit_rate['blocks']:.1f}",
        spread,
        f"{100 * r.at_match:.1f}",
        *(f"{count:,}" if r.planned else "-" for count in counts),
        _number(r.accuracy, 2),
        _number(r.coverage, 2),
        _number(r.bytes_read_per_useful_byte, 2),
        f"{r.stall_s:,.1f}",
        f"{r.ttft_p50_s:,.2f}",
        f"{r.ttft_p99_s:,.2f}",
        _number(_regret(r), 1),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _keys(colours: Mapping[str, int]) -> str:
    keys = (
        f'<span class="key"><i class="c{at % NUM_COLOURS}"></i>{_safe(name)}</span>'
        for name, at in colours.items()
    )
    return f"<p>{''.join(keys)}</p>"


def _definitions() -> str:
    return f"<dl>{''.join(f'<dt>{_safe(t)}</dt><dd>{_safe(d)}</dd>' for t, d in DEFINITIONS)}</dl>"


def _conditions(first: Result) -> str:
    shown = {k: v for k, v in first.conditions.items() if k not in ("summary", "eviction", "predictors")}
    rows = "".join(f"<tr><td>{_safe(k)}</td><td>{_safe(str(v))}</td></tr>" for k, v in _flat(shown))
    note = '<p class="note">Of the first scenario; the others differ in what their headings name.</p>'
    return f'{note}<div class="scroll"><table>{rows}</table></div>'


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)
