"""Request traces from files. Strict: a line that is not what it should be stops the replay and says where and
why.

Mooncake format: one JSON object a line, plain or gzip, with ``timestamp`` (ms from the start, never falling),
``input_length`` and ``output_length`` (tokens) and ``hash_ids`` (one integer >= 0 per prefix block, in prefix
order; equal ids mean the same block under the same whole prefix, so none repeats within a request). Other
fields are passed over.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import msgspec

from dpurt.errors import ConfigError

MAX_LINE_BYTES = 8 << 20
MAX_ID = 2**63 - 1

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, its tokens in and out, and its prefix blocks."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...]


def read_mooncake(path: Path, limit: int | None = None) -> Iterator[Request]:
    """The first `limit` requests of a Mooncake trace, in order.

    Raises ConfigError, from the iterator, for a file that cannot be read or a bad line (``file:line`` and
    what was expected).
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    last_ms = 0.0
    for number, line in _lines(path, limit):
        where = f"{path}:{number}"
        try:
            parsed = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(where, str(error)) from error
        if parsed.timestamp < last_ms:
            raise ConfigError(where, f"expected a timestamp >= {last_ms:g}, got {parsed.timestamp:g}")
        if len(set(parsed.hash_ids)) != len(parsed.hash_ids):
            raise ConfigError(where, "expected distinct hash_ids within a request")
        last_ms = parsed.timestamp
        yield Request(last_ms / 1000, parsed.input_length, parsed.output_length, parsed.hash_ids)


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """(line number, line) for the first `limit` lines that are not blank."""
    taken = number = 0
    try:
        with _open(path) as file:
            while limit is None or taken < limit:
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    problem = f"expected a line of at most {MAX_LINE_BYTES} bytes"
                    raise ConfigError(f"{path}:{number}", problem)
                if line.strip():
                    taken += 1
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}", f"expected a readable trace: {error}") from error


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    """Gzip is told by its magic number, not by the name."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else path.open("rb")
