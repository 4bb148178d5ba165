"""Text to tokens and back: byte-level BPE as SmolLM2 has it, from the tables of its GGUF file.

Every digit is a word of its own; other text is cut into words as GPT-2 does it. Python's `re` has no ``\\p{L}``: letters
are here what is alphanumeric and no decimal digit, which differs for a few number-like characters only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from dpurt.engines.smollm2.gguf import GgufFile
from dpurt.errors import ConfigError

_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_DIGITS = re.compile(r"(\d)")
_SPECIAL = re.compile(r"(<\|[a-z_]+\|>)")
START, END = "<|im_start|>", "<|im_end|>"


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: chr(byte) for byte in printable},
        **{byte: chr(256 + i) for i, byte in enumerate(others)},
    }


_LETTER_OF = _byte_letters()
_BYTE_OF = {letter: byte for byte, letter in _LETTER_OF.items()}


class Tokenizer:
    """See the module's docstring."""

    def __init__(self, tokens: Sequence[str], merges: Iterable[str]) -> None:
        self._tokens = list(tokens)
        self._id_of = {token: i for i, token in enumerate(tokens)}
        self._rank_of = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self._word = lru_cache(65_536)(self._encode_word)

    @classmethod
    def of(cls, file: GgufFile) -> Tokenizer:
        """The one of a model file. Raises ConfigError if its tables are missing."""
        return cls(file.texts("tokenizer.ggml.tokens"), file.texts("tokenizer.ggml.merges"))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, in which special tokens (``<|im_start|>``) are recognised."""
        tokens: list[int] = []
        for piece in _SPECIAL.split(text):
            if piece in self._id_of and _SPECIAL.fullmatch(piece):
                tokens.append(self._id_of[piece])
                continue
            for segment in _DIGITS.split(piece):
                for word in _WORDS.findall(segment):
                    tokens += self._word(word)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 are replaced."""
        letters = "".join(self._tokens[token] for token in tokens)
        raw = b"".join(
            bytes([_BYTE_OF[letter]]) if letter in _BYTE_OF else letter.encode() for letter in letters
        )
        return raw.decode(errors="replace")

    def chat(self, message: str) -> list[int]:
        """A first turn of a conversation, up to where the assistant begins."""
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        return self.encode(f"{START}system\n{system}{END}\n{START}user\n{message}{END}\n{START}assistant\n")

    def _encode_word(self, word: str) -> tuple[int, ...]:
        parts = [_LETTER_OF[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._rank_of.get(pair, len(self._rank_of)) for pair in pairwise(parts)]
            best = min(ranks)
            if best == len(self._rank_of):
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        try:
            return tuple(self._id_of[part] for part in parts)
        except KeyError as error:
            raise ConfigError("tokenizer.ggml.tokens", f"no token {error.args[0]!r}") from error
