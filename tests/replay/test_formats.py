"""Trace files of every known format: recognised by content, read strictly, what is wrong named with its line."""

import gzip
import json

import pytest

from dpurt.errors import ConfigError
from dpurt.replay.arrivals import read_arrivals
from dpurt.replay.formats import Reading, read_trace, recognise
from dpurt.replay.trace import read_mooncake
from dpurt.replay.weka import read_weka

from .conftest import TRACES

MOONCAKE = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 1.5,
    "input_length": 40,
    "output_length": 3,
    "type": "text",
    "turn": 1,
    "hash_ids": [5, 6, 7],
}
RAG_IDS = {"sys_prompt": [1], "passages_ids": [2, 3], "history": [], "web_search": [4], "user_input": [5]}
RAG = {"timestamp": "27", "input_length": 9, "output_length": 1, "hash_ids": RAG_IDS, "session_id": "s"}
CALL = {
    "t": 0.0,
    "agent": 0,
    "model": "m",
    "input_length": 1100,
    "output_length": 2,
    "stop": "tool_use",
    "api_time": 1.5,
    "think_time": None,
    "hash_runs": [[1, 17]],
}
WEKA = {"id": "a", "block_size": 64, "tool_tokens": 600, "system_tokens": 10, "requests": [CALL]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.5,1,2\n"


def write(tmp_path, *lines, name="trace"):
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "name"),
    [(MOONCAKE, "mooncake"), (BAILIAN, "qwen-bailian"), (RAG, "ragpulse"), (WEKA, "weka"), (AZURE, "azure")],
)
def test_a_format_is_told_by_content_plain_or_gzip(tmp_path, line, name):
    plain = write(tmp_path, "", line, name="misleading.npz")
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert recognise(plain) == recognise(packed) == name


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("PK\x03\x04", ":2: expected a line of a known trace format"),
        ("[1]", ":2: expected a line of a known trace format"),
        ({"prompt": "hello"}, ":2: expected a known trace format .*, got fields prompt"),
    ],
)
def test_an_unknown_format_is_named_with_the_known_ones(tmp_path, line, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        recognise(write(tmp_path, "", line))
    assert "mooncake, qwen-bailian, ragpulse, weka, dpurt-recording, azure" in str(caught.value)


@pytest.mark.parametrize(
    ("good", "change", "problem"),
    [
        (MOONCAKE, {"block_size": 64}, "expected block_size 512 as before, got 64"),
        (BAILIAN, {"timestamp": 1.0}, "expected a timestamp >= 1.5, got 1"),
        (BAILIAN, {"turn": 0}, "Expected `int` >= 1 - at `$.turn`"),
        (BAILIAN, {"hash_ids": [1, "2"]}, "at `$.hash_ids[1]`"),
        (BAILIAN, {"parent_chat_id": -2}, "at `$.parent_chat_id`"),
        (RAG, {"timestamp": "soon"}, "expected seconds in $.timestamp, got 'soon'"),
        (RAG, {"timestamp": "nan"}, "expected seconds in $.timestamp"),
        (RAG, {"timestamp": 26}, "expected a timestamp >= 27, got 26"),
        (RAG, {"hash_ids": RAG_IDS | {"tools": [1]}}, "unknown field `tools` - at `$.hash_ids`"),
        (RAG, {"hash_ids": {"sys_prompt": []}}, "missing required field `passages_ids`"),
        (WEKA, {"block_size": 100}, "expected a block_size that divides 512, got 100"),
        (WEKA, {"requests": [CALL | {"hash_runs": [[1, 0]]}]}, "at `$.requests[0].hash_runs[0][1]`"),
        (WEKA, {"requests": [CALL | {"t": -1}]}, "at `$.requests[0].t`"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, good, change, problem):
    path = write(tmp_path, good, "", good | change)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert caught.value.where == f"{path}:3"
    assert problem in caught.value.problem


def test_bailian_ids_are_as_they_are_and_chained_on_request(tmp_path):
    lines = (BAILIAN, BAILIAN | {"hash_ids": [6, 7]}, BAILIAN | {"hash_ids": [5, 6, 7, 5]})
    path = write(tmp_path, *lines)
    plain, chained = read_trace(path), read_trace(path, Reading(rechain=True))
    assert (plain.block_tokens, plain.is_chained, chained.is_chained) == (16, False, True)
    assert [r.blocks for r in plain.requests] == [(5, 6, 7), (6, 7), (5, 6, 7, 5)]
    assert [r.blocks for r in chained.requests] == [(0, 1, 2), (3, 4), (0, 1, 2, 5)]


def test_a_bailian_session_is_named_by_its_oldest_known_chat(tmp_path):
    chats = [(7, -1), (8, 7), (9, 8), (10, 3), (11, 10)]
    path = write(tmp_path, *(BAILIAN | {"chat_id": c, "parent_chat_id": p} for c, p in chats))
    assert [r.session for r in read_trace(path).requests] == ["7", "7", "7", "3", "3"]


def test_ragpulse_components_make_one_prompt_chained_by_default(tmp_path):
    other = RAG | {"hash_ids": RAG_IDS | {"passages_ids": [3, 2]}}
    path = write(tmp_path, RAG, other)
    assert [r.blocks for r in read_trace(path).requests] == [(0, 1, 2, 3, 4), (0, 5, 6, 7, 8)]
    raw = read_trace(path, Reading(rechain=False))
    assert [r.blocks for r in raw.requests] == [(1, 2, 3, 4, 5), (1, 3, 2, 4, 5)]
    assert not raw.is_chained


def test_blocks_are_grouped_by_their_last_id(tmp_path):
    path = write(tmp_path, MOONCAKE, MOONCAKE | {"hash_ids": [0, 1, 2, 3]})
    trace = read_trace(path, Reading(block_tokens=1024))
    assert trace.block_tokens == 1024
    assert [r.blocks for r in trace.requests] == [(1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("line", "how", "problem"),
    [
        (MOONCAKE, Reading(block_tokens=700), "a multiple of 512 tokens, got 700"),
        (BAILIAN, Reading(block_tokens=32, rechain=False), "expected chained ids"),
        (AZURE, Reading(), "arrivals only"),
    ],
)
def test_what_cannot_be_read_so_is_refused(tmp_path, line, how, problem):
    with pytest.raises(ConfigError, match=problem):
        read_trace(write(tmp_path, line), how)


def test_grouping_chains_content_ids_first(tmp_path):
    path = write(tmp_path, BAILIAN, BAILIAN | {"hash_ids": [9, 6, 7]})
    trace = read_trace(path, Reading(block_tokens=32))
    assert [r.blocks for r in trace.requests] == [(1, 2), (4, 5)]
    assert trace.is_chained


def test_sessions_share_their_tools_and_nothing_else(tmp_path):
    changed = CALL | {"t": 5.0, "hash_runs": [[100, 8], [9, 9]]}
    path = write(tmp_path, WEKA, WEKA | {"id": "b", "requests": [CALL, changed]}, WEKA | {"tool_tokens": 500})
    first, second, later, alone = read_weka(path, [0.0, 10.0, 100.0])
    assert [r.timestamp_s for r in (first, second, later, alone)] == [0.0, 10.0, 15.0, 100.0]
    assert first.blocks[0] == second.blocks[0]  # 17 blocks of 64 make two of 512 and a rest; one is tools
    assert not set(first.blocks[1:]) & set(second.blocks)
    assert later.blocks == (later.blocks[0], *second.blocks[1:]) != second.blocks
    assert not set(alone.blocks) & {*first.blocks, *second.blocks}
    assert (second.session, second.agent, second.stop, second.api_s) == ("b", 0, "tool_use", 1.5)


def test_requests_of_sessions_interleave_by_time_and_late_ones_are_left_out(tmp_path):
    times = [0.0, 50.0, 8000.0, 20.0]
    session = WEKA | {"requests": [CALL | {"t": t} for t in times]}
    path = write(tmp_path, session, session | {"id": "b"})
    requests = list(read_weka(path, [0.0, 30.0]))
    assert [(r.timestamp_s, r.session) for r in requests] == [
        (0, "a"), (20, "a"), (30, "b"), (50, "a"), (50, "b"), (80, "b")
    ]  # fmt: skip


def test_sessions_read_as_the_merged_trace_has_them():
    """The same 12 sessions at the same starts, merged by others: their blocks never tell apart what ours join."""
    merged = [r for r in read_mooncake(TRACES / "weka_merged_512_300.jsonl.gz")]
    starts = {}
    for request in merged:
        starts.setdefault(request.session, request.timestamp_s)
    ours: dict[str, list] = {}
    for request in read_weka(TRACES / "weka_sessions_12.jsonl.gz", list(starts.values())):
        ours.setdefault(request.session, []).append(request)
    assert list(ours) == list(starts)[:12]
    theirs_of, seen, compared = {}, dict.fromkeys(ours, 0), 0
    for request in merged:
        if request.session in ours:
            mine = ours[request.session][seen[request.session]]
            seen[request.session] += 1
            assert len(mine.blocks) == len(request.blocks)
            assert mine.timestamp_s == pytest.approx(request.timestamp_s, abs=0.001)
            assert mine.input_tokens == request.input_tokens
            for a, b in zip(mine.blocks, request.blocks, strict=True):
                assert theirs_of.setdefault(a, b) == b
            compared += 1
    assert compared > 100
    assert len(set(theirs_of.values())) >= 0.99 * len(theirs_of)


def test_session_starts_depend_on_the_seed_only():
    path = TRACES / "weka_sessions_12.jsonl.gz"
    one, same, other = (read_trace(path, Reading(seed=seed, limit=200)).requests for seed in (1, 1, 2))
    assert one == same
    assert [r.timestamp_s for r in one] != [r.timestamp_s for r in other]
    assert one == sorted(one, key=lambda r: r.timestamp_s)


def test_arrivals_are_seconds_from_the_first(tmp_path):
    assert read_arrivals(write(tmp_path, AZURE)) == [0.0, pytest.approx(1.52004)]
    times = read_arrivals(TRACES / "azure2023_code_500.csv.gz")
    assert (len(times), times[0], times[1]) == (500, 0.0, 0.052)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TIMESTAMP,ContextTokens\n", ":1: expected the header"),
        (AZURE.splitlines()[0] + "\n", "expected at least one arrival"),
        (AZURE + "yesterday,1,2\n", ":4: expected a time and two token counts"),
        (AZURE + "2023-11-16 18:17:06,1\n", ":4: expected a time and two token counts"),
        (AZURE + "2023-11-16 18:17:06,1,-2\n", ":4: expected a time and two token counts"),
        (AZURE + "2023-11-16 18:17:04,1,2\n", ":4: expected a TIMESTAMP not before"),
    ],
)
def test_bad_arrivals_are_named_with_their_line(tmp_path, text, problem):
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_arrivals(path)


def test_a_load_shape_moves_requests_and_is_repeated_when_too_short(tmp_path):
    trace = write(tmp_path, *(MOONCAKE | {"timestamp": 1000 * i} for i in range(5)))
    shape = tmp_path / "shape.csv"
    shape.write_text(AZURE.replace("05.5", "05.97996"))
    read = read_trace(trace, Reading(arrivals=str(shape)))
    assert [round(r.timestamp_s, 6) for r in read.requests] == [0, 2, 4, 6, 8]
    assert read.model == ("arrivals: shape.csv",)


def test_a_load_shape_of_sessions_places_their_starts(tmp_path):
    sessions = write(tmp_path, WEKA, WEKA | {"id": "b"}, name="sessions")
    shape = tmp_path / "shape.csv"
    shape.write_text(AZURE)
    read = read_trace(sessions, Reading(arrivals=str(shape)))
    assert [r.timestamp_s for r in read.requests] == [0.0, pytest.approx(1.52004)]
