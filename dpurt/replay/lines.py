"""Lines of a trace file, plain or gzip, and JSON out of them. Strict: what is wrong is a ConfigError that names
file, line and what was expected."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from dpurt.errors import ConfigError

__all__ = ["MAX_ID", "MAX_LINE_BYTES", "Count", "Seconds", "first_line", "read_json_lines", "read_lines"]

MAX_LINE_BYTES = 8 << 20
MAX_ID = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
T = TypeVar("T")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of the lines that are not blank."""
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    problem = f"expected a line of at most {MAX_LINE_BYTES} bytes"
                    raise ConfigError(f"{path}:{number}", problem)
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise ConfigError(str(path), f"cannot read: {error.strerror}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}", f"expected a readable trace: {error}") from error


def first_line(path: Path) -> tuple[int, bytes]:
    """The first line that is not blank, with its number; ConfigError when there is none."""
    for numbered in read_lines(path):
        return numbered
    raise ConfigError(str(path), "expected at least one request, got an empty file")


def read_json_lines(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """(``file:line``, object) of each line, of the given msgspec type."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        try:
            yield where, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(where, str(error)) from error


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    """Gzip is told by its magic number, not by the name."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else path.open("rb")
