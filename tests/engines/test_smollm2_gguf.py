"""GGUF files and the tokenizer, on a file made here: no weights are needed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dpurt.engines.smollm2.gguf import GgufFile
from dpurt.engines.smollm2.tokenizer import Tokenizer
from dpurt.errors import ConfigError

WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    *(chr(c) for c in range(33, 127)),
    "\u0120",
    "\u010a",
    "\u00c3",
    "\u00a9",
    "he",
    "ll",
    "hell",
    "\u0120he",
]
MERGES = ["h e", "l l", "he ll", "\u0120 he"]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def texts(values: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(text(v) for v in values)


def gguf(tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> bytes:
    """A file; tensor dimensions have the contiguous one first, as on disk."""
    pairs = [
        pair("general.architecture", 8, text("llama")), pair("answer", 4, struct.pack("<I", 42)),
        pair("tokenizer.ggml.tokens", 9, texts(WORDS)), pair("tokenizer.ggml.merges", 9, texts(MERGES)),
    ]  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    offset, data = 0, b""
    for name, (kind, dims, raw) in tensors.items():
        head += (
            text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
        )
        data += raw + bytes(-len(raw) % 32)
        offset = len(data)
    return head + bytes(-len(head) % 32) + data


Q4_1 = struct.pack("<ee", 0.5, -1.0) + bytes(range(16))  # low nibbles 0..15, high ones 0
Q8_0 = struct.pack("<e", 0.25) + bytes(np.arange(-16, 16, dtype=np.int8))
TENSORS = {
    "plain": (0, (2, 3), np.arange(6, dtype="<f4").tobytes()),
    "four": (3, (32, 1), Q4_1),
    "eight": (8, (32, 1), Q8_0),
    "odd": (14, (32, 1), bytes(32)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(TENSORS))
    return file


def test_values_come_out_in_the_order_of_the_file(path: Path) -> None:
    file = GgufFile(path)
    assert file.number("answer") == 42
    assert file.tensor("plain", (3, 2)).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_quantised_tensors_are_scaled_back(path: Path) -> None:
    file = GgufFile(path)
    expected = [*(0.5 * (i % 16) - 1 for i in range(16)), *([-1.0] * 16)]
    assert file.tensor("four", (1, 32))[0].tolist() == expected
    assert file.tensor("eight", (1, 32))[0].tolist() == [0.25 * i for i in range(-16, 16)]


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [("none", (1,), "got none"), ("plain", (2, 3), r"got \[3, 2\]"), ("odd", (1, 32), "got 14")],
)
def test_a_tensor_that_is_not_as_expected_is_refused(
    path: Path, name: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        GgufFile(path).tensor(name, shape)


def test_a_file_cut_anywhere_is_a_config_error_that_names_it(path: Path) -> None:
    whole = path.read_bytes()
    for length in [*range(1, len(whole) - 200, 97), len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"m\.gguf"):
            read_all(path)


def read_all(path: Path) -> None:
    file = GgufFile(path)
    for name, (_, dims, _) in TENSORS.items():
        file.tensor(name, tuple(reversed(dims)))


def test_words_are_merged_by_rank_and_digits_stand_alone(path: Path) -> None:
    tokenizer = Tokenizer.of(GgufFile(path))
    words = [tokenizer.decode([token]) for token in tokenizer.encode("hello he 12")]
    assert words == ["hell", "o", " he", " ", "1", "2"]


@pytest.mark.parametrize(
    "said", ["hello he!", "a_b 3.14\n\n x", "caf\u00e9", "<|im_start|>he<|im_end|>", "it's  two"]
)
def test_text_comes_back_as_it_went_in(path: Path, said: str) -> None:
    tokenizer = Tokenizer.of(GgufFile(path))
    assert tokenizer.decode(tokenizer.encode(said)) == said


def test_special_tokens_are_one_token(path: Path) -> None:
    assert Tokenizer.of(GgufFile(path)).encode("<|im_start|>he")[0] == 0
