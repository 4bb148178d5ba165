"""Recordings as files: read strictly, readable to where a killed writer left them, as a trace, as a scenario, and linted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpurt import cli
from dpurt.core.device_profiles import DEVICES
from dpurt.errors import ConfigError
from dpurt.replay.decisions import verify
from dpurt.replay.formats import Reading, read_trace, recognise
from dpurt.replay.lint import lint
from dpurt.replay.recorded import figures_of, hint_to_read_s
from dpurt.replay.recording import read_recording, requests_of, scenario_of
from dpurt.wire import recording as r

HEADER = r.Header(
    started_at=100.0, wall=1.7e9, is_fresh=True, eviction="lru", has_prefetch=True, prior="",
    prefetch=r.Prefetch(
        predictors=("sliding_window",), block_s=0.01, lookahead_blocks=8, bandwidth_bytes_per_s=1e6, staging_bytes=30_000,
        queue_depth=2, min_probability=0.05,
    ),
    pools=(r.Pool(slots=3, record_bytes=20_000),),
    devices=(r.Device(kind="modelled", queue_depth=4, read_latency_s=0.001, read_bytes_per_s=2e6),),
)  # fmt: skip
A, B, C, D = 1, 2, 3, 4
NAMES: list[r.Line] = [
    r.Space(0, 0, 16, 20_000, (8192, 8192)),
    r.Block(A, "0" * 16, 0, True, "0"),
    r.Block(B, "1" * 16, 0, True, "3"),
    r.Block(C, "2" * 16, 0, False, "0"),
    r.Block(D, "3" * 16, 0, False, "0"),
]
LINES: list[r.Line] = [
    *NAMES,
    r.ArrivedLine(101.0, 100.999, 7, 0, (A, B), None, 5, 80),
    r.Fetched(0, A, None, 101.0, 0),
    r.Queued(101.001, A, 20_000, 0),
    r.DemandedLine(101.002, A, 7, "in_flight", None),
    r.DemandedLine(101.002, B, 7, "staging", "3"),
    r.Completed(101.014, A, 101.0015, "ok"),
    r.StagedLine(101.0141, A, 0),
    r.Taken(101.514, C),
    r.StoredLine(101.514, 7, (C,)),
    r.Written(101.52, C, True),
    r.StoredLine(102.014, 7, (D,)),
    r.FinishedLine(103.014, 7, "end_turn"),
    r.End(103.1, "asked", 0, None),
]


def write(path: Path, lines: Sequence[r.Line] = LINES, header: r.Header = HEADER) -> Path:
    path.write_bytes(b"".join(r.encode(line) + b"\n" for line in (header, *lines)))
    return path


def test_a_recording_is_told_by_its_first_line_and_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "misleading.csv")
    assert recognise(path) == "dpurt-recording"
    recording = read_recording(path)
    assert (recording.header, recording.lines, recording.is_whole, recording.lost) == (HEADER, LINES, True, 0)


def test_what_a_killed_writer_left_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole").read_bytes()
    for size in range(len(r.encode(HEADER)) + 1, len(whole), 13):
        torn = tmp_path / "torn"
        torn.write_bytes(whole[:size])
        recording = read_recording(torn)
        assert recording.lines == LINES[: len(recording.lines)]
        assert len(recording.lines) >= whole[:size].count(b"\n") - 1
        assert not recording.is_whole or size == len(whole) - 1
        assert lint(torn) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'["tick",1.0]\n', ":1"),
        (r.encode(HEADER) + b'\n["tick",1.0]\n["tick"]\n["tick",2.0]\n', ":3"),
        (r.encode(HEADER) + b'\n["end",1.0,"asked",0,null]\n["tick",2.0]\n', ":3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: bytes, where: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=where):
        read_recording(path)


def test_a_request_has_what_it_matched_what_was_stored_for_it_and_blocks_nobody_has(tmp_path: Path) -> None:
    [request] = requests_of(read_recording(write(tmp_path / "r")), decode_step_s=0.1)
    assert request.blocks[:4] == (A, B, C, D)
    assert len(request.blocks) == 5, "the prompt has a block that was never stored"
    assert request.blocks[4] < 0
    assert (request.timestamp_s, request.input_tokens, request.stop) == (0.0, 80, "end_turn")
    assert request.output_tokens == 10, "a second from the last store to the finish, in decode steps"


def test_the_engine_takes_a_recording_as_a_trace(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "r", LINES[:-1]), Reading(limit=1))
    assert (trace.format, trace.block_tokens, len(trace.requests)) == ("dpurt-recording", 16, 1)
    assert any("killed" in note for note in trace.model)


def test_the_scenario_is_the_recorded_node(tmp_path: Path) -> None:
    scenario = scenario_of(read_recording(write(tmp_path / "r")))
    assert int(5 * scenario.staging_share) == 3, "three slots for five distinct blocks"
    assert (scenario.block_tokens, scenario.block_bytes, scenario.lookahead_blocks) == (16, 20_000, 8)
    assert scenario.prefetch_queue_depth == 2
    assert scenario.prefetch_share == 0.5
    assert (scenario.device.read_bytes_per_s, scenario.device.queue_depth) == (2e6, 4)
    assert scenario.device.read_latency_s == pytest.approx(0.003), (
        "13 ms from queue to end, 10 of them transfer"
    )
    assert scenario.prefill_tokens_per_s == pytest.approx(32), "half a second from one store to the next"
    assert scenario.hosts == 1


def test_replay_models_the_recorded_node_and_arguments_change_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "r")
    assert cli.main(["replay", str(path), "--policy", "lru", "--json", "-"]) == 0
    own = capsys.readouterr().out
    assert '"name": "recorded"' in own
    assert cli.main(["replay", str(path), "--policy", "lru", "--device", "ai_ssd", "--json", "-"]) == 0
    other = capsys.readouterr().out
    assert f'"name": "{DEVICES["ai_ssd"].name}"' in other
    assert '"lookahead_blocks": 8' in own
    assert '"lookahead_blocks": 8' in other


@pytest.mark.parametrize("option", [["--model", "llama-3-70b"], ["--precision", "fp8"], ["--hint-lead", "1"]])
def test_what_a_recording_knows_itself_cannot_be_said_otherwise(
    tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(write(tmp_path / "r")), *option]) == 2
    assert f"{option[0]}: a recording has its own" in capsys.readouterr().err


def test_figures_are_of_all_references_of_the_prompts(tmp_path: Path) -> None:
    recorded = figures_of(read_recording(write(tmp_path / "r")))
    assert (recorded.references, recorded.staging, recorded.in_flight, recorded.recomputed) == (5, 1, 1, 3)
    assert recorded.share(recorded.staging) == 0.2


def test_hint_to_read_is_from_hearing_to_the_devices_start() -> None:
    assert list(hint_to_read_s(LINES)) == [pytest.approx(0.0025)]


# --- lint


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (r.StoredLine(104.0, 7, (A, 50256, 11, 262)), "block 50256 was not introduced"),
        (r.Touch(0, (15496, 11, 995), 104.0), "block 15496 was not introduced"),
        (r.StepLine(104.0, 104.0, 7, 0, 0, (A,), (r.RankedLine(0, (99,), 1.0),), None), "block 99"),
        (r.Hold(5, A), "pool 5"),
        (r.DemandedLine(104.0, A, 7, "nvme", "ff"), "parts ff of a block that has 2"),
        (r.Fetched(9, A, None, 104.0, 3), "predictor 3"),
        (r.StagedLine(104.0, A, 77), "job 77"),
        (r.Tick(3.0), "expected a time >="),
        (r.Block(A, "3" * 16, 0, True, "0"), "introduced twice"),
    ],
)
def test_lint_finds_what_names_nothing(tmp_path: Path, line: r.Line, problem: str) -> None:
    assert lint(write(tmp_path / "clean")) == []
    found = lint(write(tmp_path / "r", [*LINES[:-1], line]))
    assert any(problem in each for each in found), found


def test_lint_scans_the_raw_text_for_strings_the_reader_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "r", [])
    head = path.read_bytes().replace(b'"sliding_window"', b'"my_customers_name"')
    path.write_bytes(head)
    found = lint(path)
    assert any("my_customers_name" in each and "no word" in each for each in found)
    assert any("known predictors" in each for each in found)


def test_lint_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = write(tmp_path / "clean")
    dirty = write(tmp_path / "dirty", [*LINES[:-1], r.Touch(0, (12, 13), 104.0)])
    assert cli.main(["record", str(clean), "--lint"]) == 0
    assert "clean" in capsys.readouterr().out
    assert cli.main(["record", str(dirty), "--lint"]) == 1
    assert "was not introduced" in capsys.readouterr().out


# --- decisions


def test_decisions_of_a_node_that_ran_before_are_not_compared(tmp_path: Path) -> None:
    header = r.decode_header(r.encode(HEADER).replace(b'"is_fresh":true', b'"is_fresh":false'))
    with pytest.raises(ConfigError, match="serve --record"):
        verify(read_recording(write(tmp_path / "r", LINES, header)))


def test_decisions_made_with_another_prior_are_not_compared(tmp_path: Path) -> None:
    header = r.decode_header(r.encode(HEADER).replace(b'"prior":""', b'"prior":"0123456789abcdef"'))
    with pytest.raises(ConfigError, match="prior"):
        verify(read_recording(write(tmp_path / "r", LINES, header)))


def test_decisions_are_not_compared_after_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 lost lines"):
        verify(read_recording(write(tmp_path / "r", [*NAMES, r.Loss(3), *LINES[5:]])))


def test_a_decision_the_core_does_not_make_is_a_difference(tmp_path: Path) -> None:
    verdict = verify(read_recording(write(tmp_path / "r")))
    assert not verdict.is_equal
    assert ":7" in verdict.difference, "the made-up recording has no answers the core asks for"
