"""The command: its outputs and its refusals."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from dpurt.cli import main
from dpurt.errors import ConfigError
from dpurt.replay.arguments import add_arguments, scenarios_of
from dpurt.replay.cli import run
from dpurt.replay.formats import read_trace
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
    assert shown["conditions"]["device"]["read_bytes_per_s"] == 14e9
    assert shown["regret_to_oracle"] is None


def test_a_page_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    page = tmp_path / "out.html"
    monkeypatch.setattr("pathlib.Path.write_text", no_space)
    assert main(["replay", str(SLICE), "--limit", "40", "--policy", "lru", "--html", str(page)]) == 2
    assert f"{page}: cannot write: No space left on device" in capsys.readouterr().err


def test_arguments_make_the_scenario():
    args = parse(
        "--staging", "0.1", "--device", "nvme", "--bandwidth", "2.5G", "--lookahead", "9", "--budget", "3"
    )
    (scenario,) = scenarios_of(args, read_trace(SLICE))
    assert (scenario.staging_share, scenario.lookahead_blocks, scenario.prefetch_queue_depth) == (0.1, 9, 3)
    assert (scenario.device.name, scenario.device.read_bytes_per_s) == ("nvme", 2.5e9)
    assert (scenario.block_tokens, scenario.block_bytes) == (512, 512 * 160 * 1024)


def test_default_is_every_policy(capsys):
    assert main(["replay", str(SLICE), "--limit", "20", "--json", "-"]) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == list(POLICIES)


@pytest.mark.parametrize(
    "wrong",
    [["--staging", "0"], ["--staging", "2"], ["--bandwidth", "0"], ["--bandwidth", "fast"], ["--limit", "0"]],
)
def test_senseless_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        parse(*wrong)
    assert "expected" in capsys.readouterr().err


def test_lists_make_all_combinations_devices_outermost():
    args = parse("--staging", "0.1,0.2", "--device", "nvme,qlc", "--bandwidth", "1G,2G", "--seed", "5")
    scenarios = scenarios_of(args, read_trace(SLICE))
    points = [(s.device.name, s.device.read_bytes_per_s / 1e9, s.staging_share) for s in scenarios]
    assert points[:3] == [("nvme", 1, 0.1), ("nvme", 1, 0.2), ("nvme", 2, 0.1)]
    assert len(points) == len(set(points)) == 8
    assert {s.seed for s in scenarios} == {5}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "lru,magic"], "'magic'"),
        (["--device", "floppy"], "expected one of ai_ssd"),
        (["--json", "/nowhere/at/all"], "cannot write"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        run(parse(*arguments))


def test_a_bad_trace_is_named_with_its_line_and_exit_code_two(capsys, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    assert main(["replay", str(bad), "--policy", "lru"]) == 2
    assert f"{bad}:1" in capsys.readouterr().err


def test_a_trace_without_requests_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    arguments = parse("--policy", "lru")
    arguments.file = empty
    with pytest.raises(ConfigError, match="at least one request"):
        run(arguments)


INTERFACE = {
    "policy", "hit_rate", "at_match", "timely", "late", "early", "useless", "accuracy", "coverage",
    "bytes_read_per_useful_byte", "stall_s", "ttft_p50_s", "ttft_p99_s", "regret_to_oracle", "wall_s",
    "refs_per_s", "conditions",
}  # fmt: skip


def test_the_fields_others_script_against_stay(capsys):
    assert run(parse("--policy", "lru,dpurt,oracle", "--staging", "0.02,0.2", "--json", "-")) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["lru", "dpurt", "oracle"] * 2
    assert [row["conditions"]["staging_share"] for row in rows] == [0.02] * 3 + [0.2] * 3
    for row in rows:
        assert row.keys() >= INTERFACE
        assert row["hit_rate"].keys() >= {"blocks", "tokens", "bytes"}
        assert row["regret_to_oracle"].keys() == {"hit_rate_blocks", "stall_s"}
        assert row["conditions"]["trace"]["format"] == "mooncake"
    assert [row["regret_to_oracle"]["stall_s"] for row in rows if row["policy"] == "oracle"] == [0, 0]


def test_equal_arguments_give_equal_bytes_but_for_wall_time(capsys):
    def text():
        assert run(parse("--policy", "lru,dpurt,oracle", "--seed", "3", "--json", "-")) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if '"wall_s"' not in line and '"refs_per_s"' not in line]

    assert text() == text()


def test_neither_hash_seed_nor_processes_change_a_byte():
    texts = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "dpurt",
            "replay",
            str(SLICE),
            "--limit",
            "60",
            "--jobs",
            seed,
            "--json",
            "-",
        ]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        texts.append(
            [
                line
                for line in done.stdout.splitlines()
                if b'"wall_s"' not in line and b'"refs_per_s"' not in line
            ]
        )
    assert texts[0] == texts[1]
