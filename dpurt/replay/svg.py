"""Two kinds of chart as SVG text: lines over a logarithmic axis, and bars. No scripts, no links, no fonts.

Colours are CSS classes (``c0`` to ``c7``), so that the page around decides them, in light and in dark. Every mark carries
a ``<title>``, which browsers show on hover.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

__all__ = ["NUM_COLOURS", "bars", "lines"]

NUM_COLOURS = 8
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 44

HEADROOM = 1.05
MAX_LABELS = 11  # of bars; more would overlap

Point = tuple[float, float]


def lines(
    series: Mapping[str, Sequence[Point]],
    colours: Mapping[str, int],
    *,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
) -> str:
    """A line with dots per name, x > 0 on a logarithmic axis. Points are drawn in the order of x."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        return ""
    low, high = min([0.0, *ys]), HEADROOM * max([1e-9, *ys])
    place_x, place_y = _log_place(xs), _place(low, high)
    parts = [_y_axis(low, high, place_y, y_label)]
    parts += [_text(place_x(x), HEIGHT - BOTTOM + 16, x_text(x), "middle") for x in xs]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    for name, points in series.items():
        colour = f"c{colours[name] % NUM_COLOURS}"
        placed = [(place_x(x), place_y(y), x, y) for x, y in sorted(points)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in placed)
        parts.append(f'<polyline class="{colour}" points="{path}"/>')
        parts += [
            f'<circle class="{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.5">'
            f"<title>{_safe(name)}, {_safe(x_text(x))}: {y:.2f}</title></circle>"
            for px, py, x, y in placed
        ]
    return _svg(parts, f"{y_label} over {x_label}")


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, int], *, x_label: str, y_label: str
) -> str:
    """A group of bars per row, one per name, in the rows' order; heights from 0."""
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    if not rows or not names:
        return ""
    high = HEADROOM * max((value for _, values in rows for value in values.values()), default=0.0) or 1.0
    place_y = _place(0.0, high)
    group = (WIDTH - LEFT - RIGHT) / len(rows)
    every = -(-len(rows) // MAX_LABELS)
    width = group * 0.8 / len(names)
    parts = [_y_axis(0.0, high, place_y, y_label)]
    for at, (label, values) in enumerate(rows):
        x = LEFT + at * group + group * 0.1
        if at % every == 0:
            parts.append(_text(x + group * 0.4, HEIGHT - BOTTOM + 16, label, "middle"))
        for name, value in values.items():
            y = place_y(value)
            parts.append(
                f'<rect class="c{colours[name] % NUM_COLOURS}" x="{x + names.index(name) * width:.1f}" y="{y:.1f}" '
                f'width="{width * 0.92:.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
                f"<title>{_safe(name)}, {_safe(label)}: {value:,.6g}</title></rect>"
            )
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    return _svg(parts, f"{y_label} by {x_label}")


def _svg(parts: Sequence[str], title: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_safe(title)}"'
    return f"<svg {size}>{''.join(parts)}</svg>"


def _log_place(xs: Sequence[float]) -> Callable[[float], float]:
    first, width = math.log(xs[0]), math.log(xs[-1] / xs[0]) or 1.0
    margin = 24
    span = WIDTH - LEFT - RIGHT - 2 * margin
    return lambda x: LEFT + margin + span * (math.log(x) - first) / width


def _place(low: float, high: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda y: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / span


def _y_axis(low: float, high: float, place: Callable[[float], float], label: str) -> str:
    parts = []
    for tick in _ticks(low, high):
        y = place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {turned}>{_safe(label)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    raw = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
