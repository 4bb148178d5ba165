"""Trace files: what is read, and that what is wrong is named with its line."""

import gzip
import json

import pytest

from dpurt.errors import ConfigError
from dpurt.replay import lines
from dpurt.replay.trace import Request, read_mooncake

GOOD = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 3]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_slice_has_the_whole_first_1600_requests(conversation):
    assert len(conversation) == 1600
    assert sum(len(r.blocks) for r in conversation) == 44_554
    assert len({block for r in conversation for block in r.blocks}) == 32_143
    assert conversation[0].input_tokens == 6758


def test_plain_and_gzip_files_read_the_same(tmp_path):
    plain = write(tmp_path, GOOD, "", GOOD | {"extra": 1})
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_mooncake(plain)) == list(read_mooncake(packed)) == [Request(1.5, 700, 5, (0, 3))] * 2


def test_limit_counts_requests_and_reads_no_further(tmp_path):
    path = write(tmp_path, GOOD, "", GOOD, "rubbish")
    assert len(list(read_mooncake(path, limit=2))) == 2


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("rubbish", "malformed"),
        ("[1]", "Expected `object`, got `array`"),
        ({"timestamp": 0}, "missing required field `input_length`"),
        (GOOD | {"hash_ids": [1, -1]}, "Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (GOOD | {"hash_ids": [1, True]}, "Expected `int`, got `bool` - at `$.hash_ids[1]`"),
        (GOOD | {"hash_ids": [1, 1.5]}, "Expected `int`, got `float` - at `$.hash_ids[1]`"),
        (GOOD | {"hash_ids": [2**63]}, "- at `$.hash_ids[0]`"),
        (GOOD | {"hash_ids": [4, 4]}, "expected distinct hash_ids"),
        (GOOD | {"input_length": "many"}, "Expected `int`, got `str` - at `$.input_length`"),
        (GOOD | {"timestamp": -1}, ">= 0.0 - at `$.timestamp`"),
        (GOOD | {"timestamp": 1499}, "expected a timestamp >= 1500, got 1499"),
        ('{"timestamp": NaN}', "malformed"),
        ('{"timestamp": 0, "hash_ids": ["\\ud800"]}', ""),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, bad, expected):
    path = write(tmp_path, GOOD, "", bad, GOOD)
    requests = read_mooncake(path)
    next(requests)
    with pytest.raises(ConfigError) as caught:
        list(requests)
    assert caught.value.where == f"{path}:3"
    assert expected in caught.value.problem


def test_bytes_that_are_no_utf8_are_a_bad_line(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(b'{"\xff": 1}\n')
    with pytest.raises(ConfigError, match=":1: "):
        list(read_mooncake(path))


def test_an_endless_line_is_refused_without_reading_it_all(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    path = write(tmp_path, GOOD, "x" * 1000)
    with pytest.raises(ConfigError, match=":2: expected a line of at most 100 bytes"):
        list(read_mooncake(path))


def test_a_torn_gzip_is_an_error_that_says_where(tmp_path):
    path = tmp_path / "torn.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 500)[:-20])
    with pytest.raises(ConfigError, match="expected a readable trace"):
        list(read_mooncake(path))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        list(read_mooncake(tmp_path / "none"))
