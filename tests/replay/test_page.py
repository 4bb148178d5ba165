"""The HTML page: self-contained, well-formed, with every figure and its definition."""

import re
from xml.etree import ElementTree

import pytest

from dpurt.cli import main
from dpurt.replay.page import DEFINITIONS
from dpurt.replay.svg import bars, lines

from .conftest import SLICE


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    arguments = [
        "replay",
        str(SLICE),
        "--limit",
        "300",
        "--jobs",
        "1",
        "--json",
        str(path.with_suffix(".json")),
    ]
    sweep = ["--policy", "lru,belady,dpurt,oracle", "--staging", "0.02,0.1", "--bandwidth", "7G,14G"]
    assert main([*arguments, *sweep, "--html", str(path)]) == 0
    return path.read_text()


def test_nothing_is_loaded_and_nothing_runs(page):
    assert not re.search(r"https?://|src=|<script|@import|url\(", page.replace("http-equiv", ""))


def test_every_chart_is_well_formed_and_there(page):
    charts = re.findall(r"<svg.*?</svg>", page)
    for chart in charts:
        ElementTree.fromstring(chart)
    assert len(charts) == 2 * (4 + 2 * 2)  # per device four curves, and two histograms for each size
    titles = " ".join(re.findall(r'aria-label="([^"]*)"', page))
    for part in ("hit rate", "regret", "at match", "rate, %", "waited for up to", "ready before use"):
        assert part in titles


def test_each_figure_is_defined_with_its_denominator(page):
    assert all(f"<dt>{term}</dt>" in page for term, _ in DEFINITIONS)
    assert page.count(" over ") > 10
    for condition in ("staging_share", "device.source", "writes", "trace.format"):
        assert f"<td>{condition}</td>" in page


def test_each_policy_keeps_one_colour(page):
    for at, policy in enumerate(("lru", "belady", "dpurt", "oracle")):
        assert f'<i class="c{at}"></i>{policy}' in page
        marks = re.findall(rf'<circle class="(c\d)"[^>]*><title>{policy},', page)
        assert set(marks) == {f"c{at}"}


def test_names_from_outside_cannot_become_markup(tmp_path):
    path = tmp_path / "a<b>&.jsonl"
    path.write_bytes(SLICE.read_bytes())
    out = tmp_path / "page.html"
    arguments = ["--limit", "30", "--policy", "lru", "--json", str(tmp_path / "j"), "--html", str(out)]
    assert main(["replay", str(path), *arguments]) == 0
    assert "a&lt;b&gt;&amp;.jsonl" in out.read_text()
    assert "<b>" not in out.read_text()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    assert main(["replay", str(SLICE), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_lines_place_equal_ratios_at_equal_distances():
    chart = lines(
        {"a": [(0.01, 1.0), (0.1, 2.0), (1.0, 4.0)]}, {"a": 0}, x_label="x", y_label="y", x_text=str
    )
    xs = [float(c.get("cx")) for c in ElementTree.fromstring(chart).iter("circle")]
    ys = [float(c.get("cy")) for c in ElementTree.fromstring(chart).iter("circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.2)


def test_bars_are_as_high_as_their_values():
    chart = bars([("p", {"a": 1.0, "b": 4.0}), ("q", {"a": 0.0})], {"a": 0, "b": 1}, x_label="x", y_label="y")
    heights = [float(r.get("height")) for r in ElementTree.fromstring(chart).iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.2)
    assert heights[2] == 0


@pytest.mark.parametrize("points", [[(0.1, 0.0)], [(0.1, -3.0), (0.2, -3.0)]])
def test_flat_and_single_points_are_drawn(points):
    ElementTree.fromstring(lines({"a": points}, {"a": 0}, x_label="x", y_label="y", x_text=str))


def test_nothing_to_draw_is_nothing():
    assert lines({}, {}, x_label="x", y_label="y", x_text=str) == ""
    assert bars([], {}, x_label="x", y_label="y") == ""
