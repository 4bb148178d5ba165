"""Arrival times alone, as a load shape for another trace: Azure's LLM inference traces.

Format: CSV, plain or gzip, with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``; times such as
``2023-11-16 18:17:03.9799600``, never falling. There are no blocks in it, so it cannot be replayed by itself.

As a shape: the i-th request (of a trace of sessions: the i-th session) starts at the i-th arrival; a shape that is too
short is repeated. Requests of one session then keep their order but not their gaps, unless sessions are what is
placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path

from dpurt.errors import ConfigError
from dpurt.replay.lines import read_lines
from dpurt.replay.trace import Request

__all__ = ["HEADER", "Shape", "read_arrivals", "reshaped"]

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
Shape = Sequence[float]  # seconds from the first arrival, never falling, not empty


def read_arrivals(path: Path) -> list[float]:
    """Seconds from the first arrival. ConfigError for a bad line or a file without arrivals."""
    times: list[float] = []
    began: datetime | None = None
    lines = read_lines(path)
    number, header = next(lines, (1, b""))
    if header.strip() != HEADER:
        raise ConfigError(f"{path}:{number}", f"expected the header {HEADER.decode()}")
    for number, line in lines:
        at = _time(f"{path}:{number}", line)
        began = began or at
        times.append((at - began).total_seconds())
        if times[-1] < times[max(0, len(times) - 2)]:
            raise ConfigError(f"{path}:{number}", "expected a TIMESTAMP not before the line above")
    if not times:
        raise ConfigError(str(path), "expected at least one arrival")
    return times


def _time(where: str, line: bytes) -> datetime:
    try:
        stamp, context, generated = line.decode("ascii").strip().split(",")
        if not (context.isdigit() and generated.isdigit()):
            raise ValueError("expected token counts")
        return datetime.fromisoformat(stamp)
    except ValueError as error:
        raise ConfigError(where, f"expected a time and two token counts: {error}") from error


def repeated(shape: Shape) -> Iterator[float]:
    """The shape over and over, a mean gap between its end and its start."""
    period = shape[-1] + shape[-1] / max(1, len(shape) - 1) if shape[-1] else 1.0
    for lap in count():
        yield from (lap * period + at for at in shape)


def reshaped(requests: Sequence[Request], shape: Shape) -> list[Request]:
    """The same requests, in their order, at the shape's times."""
    return [replace(r, timestamp_s=at) for r, at in zip(requests, repeated(shape), strict=False)]
