"""Sweeps: the same figures whoever computes them, and no finished run computed twice."""

import gzip
import io
import json
from dataclasses import replace

import msgspec
import pytest

from dpurt.errors import ConfigError
from dpurt.replay import sweep as sweep_module
from dpurt.replay.engine import Scenario
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.sweep import Journal, sweep
from dpurt.replay.worker import Run, work

from .conftest import SLICE, TRACES

FIRST = Reading(limit=60)
RUNS = [Run(policy, Scenario(staging_share=s)) for s in (0.02, 0.2) for policy in ("lru", "dpurt", "oracle")]


@pytest.fixture(scope="module")
def trace():
    return read_trace(SLICE, FIRST)


def timeless(results):
    return [replace(result, wall_s=0.0, refs_per_s=0.0) for result in results]


def test_processes_and_order_change_no_figure(trace):
    here = sweep(trace, SLICE, FIRST, RUNS, jobs=1)
    there = sweep(trace, SLICE, FIRST, RUNS, jobs=2)
    assert timeless(here) == timeless(there)
    assert [result.policy for result in there] == ["lru", "dpurt", "oracle"] * 2
    rows = [msgspec.json.encode(timeless(results)) for results in (here, there)]
    assert rows[0] == rows[1]


def test_processes_and_journal_take_every_kind_of_reading(tmp_path):
    shape = tmp_path / "shape.csv"
    shape.write_bytes(gzip.decompress((TRACES / "azure2023_code_500.csv.gz").read_bytes()))
    reading = Reading(limit=20, rechain=True, block_tokens=1024, arrivals=str(shape), seed=3)
    moved = read_trace(SLICE, reading)
    with Journal(tmp_path / "journal", SLICE, reading) as journal:
        there = sweep(moved, SLICE, reading, RUNS[:2], 2, journal)
    assert timeless(there) == timeless(sweep(moved, SLICE, reading, RUNS[:2], 1))
    with Journal(tmp_path / "journal", SLICE, reading) as journal:
        assert journal.get(RUNS[0]) == there[0]
    shape.write_text("".join(shape.read_text().splitlines(keepends=True)[:-1]))
    with Journal(tmp_path / "journal", SLICE, reading) as journal:
        assert journal.get(RUNS[0]) is None


def test_a_wrong_trace_in_a_process_is_the_sweeps_error(trace, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1"):
        sweep(trace, bad, FIRST, RUNS, jobs=2)


def kept(path, trace, runs):
    with Journal(path, SLICE, FIRST) as journal:
        return sweep(trace, SLICE, FIRST, runs, 1, journal)


def known(path, run, reading=FIRST):
    with Journal(path, SLICE, reading) as journal:
        return journal.get(run)


def test_finished_runs_are_not_repeated(trace, tmp_path, monkeypatch):
    path = tmp_path / "journal"
    first = kept(path, trace, RUNS[:4])
    replayed = []
    real = sweep_module.replay
    monkeypatch.setattr(
        sweep_module, "replay", lambda r, p, s, done: replayed.append(p.name) or real(r, p, s, done)
    )
    everything = kept(path, trace, RUNS)
    assert replayed == ["dpurt", "oracle"]
    assert everything[:4] == first
    assert len(path.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("reading", "run"),
    [
        (Reading(limit=61), RUNS[0]),
        (FIRST, RUNS[1]),
        (FIRST, Run("lru", Scenario(staging_share=0.02, seed=1))),
    ],
)
def test_another_run_is_another_run(trace, tmp_path, reading, run):
    path = tmp_path / "journal"
    kept(path, trace, RUNS[:1])
    assert known(path, RUNS[0]) is not None
    assert known(path, run, reading) is None


def test_a_torn_last_line_is_dropped_and_the_journal_goes_on(trace, tmp_path):
    path = tmp_path / "journal"
    kept(path, trace, RUNS[:2])
    path.write_bytes(path.read_bytes()[:-20])
    assert known(path, RUNS[0]) is not None
    assert known(path, RUNS[1]) is None
    kept(path, trace, RUNS[:2])
    assert known(path, RUNS[1]) is not None


def test_a_file_that_is_no_journal_is_refused_untouched(tmp_path):
    path = tmp_path / "notes"
    path.write_text("dear diary\n")
    with pytest.raises(ConfigError, match=r"notes:1: expected a finished run"):
        Journal(path, SLICE, FIRST)
    assert path.read_text() == "dear diary\n"


@pytest.mark.parametrize("text", [b"precious", b'{"a": 1}', b"\xff\x00" * 50])
def test_a_file_without_a_line_is_no_torn_journal(tmp_path, text):
    path = tmp_path / "mine"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="expected a journal"):
        Journal(path, SLICE, FIRST)
    assert path.read_bytes() == text


def test_results_depend_on_the_shipped_prior_and_on_what_reads_recordings():
    names = {path.name for path in sweep_module._sources()}
    assert {"returns.npz", "recording.py", "prefetch.py", "engine.py"} <= names


def test_a_worker_tells_how_far_it_is_and_its_result():
    tasks = io.StringIO(
        json.dumps({"file": str(SLICE), "reading": {"limit": 60}})
        + "\n"
        + msgspec.json.encode(RUNS[0]).decode()
        + "\n"
    )
    answers = io.StringIO()
    work(tasks, answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [line["arrived"] for line in lines[:-1]] == list(range(1, 61))
    assert lines[-1]["result"]["policy"] == "lru"
