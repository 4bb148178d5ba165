"""The command: its outputs and its refusals."""

import argparse
import json

import pytest

from dpurt.replay.cli import add_arguments, run, scenario_of
from dpurt.replay.policies import POLICIES

from .conftest import SLICE


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(SLICE), "--limit", "40", *arguments])


def test_table_has_a_line_for_each_policy(capsys):
    assert run(parse("--policy", "none,lru,oracle")) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["policy", "none", "lru", "oracle"]
    assert captured.err == ""


def test_json_to_stdout_and_to_a_file_is_the_same_but_for_time(capsys, tmp_path):
    assert run(parse("--policy", "dpurt", "--json", "-")) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    target = tmp_path / "out.json"
    assert run(parse("--policy", "dpurt", "--json", str(target))) == 0
    (written,) = json.loads(target.read_text())
    for row in (shown, written):
        assert row.pop("wall_s") > 0
        assert row.pop("refs_per_s") > 0
    assert shown == written
    assert shown["conditions"]["device"]["bandwidth_bytes_per_s"] == 14e9
    assert shown["regret_to_oracle"] is None


def test_arguments_make_the_scenario():
    scenario = scenario_of(
        parse(
            "--staging", "0.1", "--device", "nvme", "--bandwidth", "2.5G", "--lookahead", "9", "--budget", "3"
        )
    )
    assert (scenario.staging_share, scenario.lookahead_blocks, scenario.prefetch_queue_depth) == (0.1, 9, 3)
    assert (scenario.device.name, scenario.device.bandwidth_bytes_per_s) == ("nvme", 2.5e9)


def test_default_is_every_policy():
    assert parse().policy.split(",") == list(POLICIES)


@pytest.mark.parametrize(
    "wrong",
    [["--staging", "0"], ["--staging", "2"], ["--bandwidth", "0"], ["--bandwidth", "fast"], ["--limit", "0"]],
)
def test_senseless_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        parse(*wrong)
    assert "expected" in capsys.readouterr().err


def test_an_unknown_policy_is_named_with_the_known_ones(capsys):
    assert run(parse("--policy", "lru,magic")) == 2
    error = capsys.readouterr().err
    assert "'magic'" in error
    assert "oracle" in error


def test_a_bad_trace_is_named_with_its_line(capsys, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    arguments = parse("--policy", "lru")
    arguments.file = bad
    assert run(arguments) == 2
    assert f"{bad}:1" in capsys.readouterr().err


def test_a_trace_without_requests_is_refused(capsys, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    arguments = parse("--policy", "lru")
    arguments.file = empty
    assert run(arguments) == 2
    assert "at least one request" in capsys.readouterr().err
