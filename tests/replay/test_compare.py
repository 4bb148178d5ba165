"""`dpurt compare`: what is paired, what differs, and what is no report."""

import json

import pytest

from dpurt.cli import main

from .conftest import SLICE


def report(path, *arguments):
    assert main(["replay", str(SLICE), "--limit", "150", "--jobs", "1", "--json", str(path), *arguments]) == 0
    return str(path)


def compared(capsys, a, b):
    assert main(["compare", a, b, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_report_equals_itself(tmp_path, capsys):
    a = report(tmp_path / "a", "--policy", "lru,dpurt")
    rows = compared(capsys, a, a)
    assert [row["policy"] for row in rows] == ["lru", "dpurt"]
    assert all(row["conditions_changed"] == {} for row in rows)
    assert all(row["hit_rate_difference_95"] == [0, 0] for row in rows)
    assert {figure["difference"] for row in rows for figure in row["figures"].values()} <= {0, None}
    assert main(["compare", a, a]) == 0
    assert capsys.readouterr().out == "lru: equal\ndpurt: equal\n"


def test_what_changed_is_named_with_its_effect(tmp_path, capsys):
    a = report(tmp_path / "a", "--policy", "lru", "--staging", "0.01")
    b = report(tmp_path / "b", "--policy", "lru", "--staging", "0.3")
    (row,) = compared(capsys, a, b)
    assert row["conditions_changed"].keys() == {"staging_share", "capacity_blocks"}
    figure = row["figures"]["hit_rate.blocks"]
    assert figure["difference"] == figure["b"] - figure["a"] > 0
    low, high = row["hit_rate_difference_95"]
    assert low < figure["difference"] < high
    assert main(["compare", a, b]) == 0
    text = capsys.readouterr().out
    assert "  changed: staging_share: 0.01 -> 0.3" in text
    assert "hit_rate.blocks differs by " in text


def test_runs_of_other_requests_have_no_common_interval(tmp_path, capsys):
    a = report(tmp_path / "a", "--policy", "lru")
    b = report(tmp_path / "b", "--policy", "lru", "--warmup", "0.5")
    (row,) = compared(capsys, a, b)
    assert row["hit_rate_difference_95"] is None


def test_points_of_a_sweep_are_paired_whatever_their_order(tmp_path, capsys):
    a = report(tmp_path / "a", "--policy", "lru", "--staging", "0.01,0.3")
    b = report(tmp_path / "b", "--policy", "lru,fifo", "--staging", "0.3,0.01")
    rows = compared(capsys, a, b)
    assert [(row["policy"], row["in"]) for row in rows] == [
        ("lru", ["a", "b"]), ("lru", ["a", "b"]), ("fifo", ["b"]), ("fifo", ["b"])
    ]  # fmt: skip
    assert all(row["figures"]["hit_rate.blocks"]["difference"] == 0 for row in rows[:2])
    assert main(["compare", a, b]) == 0
    assert capsys.readouterr().out.endswith("fifo: only in b\n" * 2)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[{}]"])
def test_a_file_that_is_no_report_is_named(tmp_path, capsys, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    assert "expected a report of dpurt replay --json" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "none"), "x"]) == 2
    assert "cannot read" in capsys.readouterr().err
