"""Requests as the replay sees them, and Mooncake's trace format; the other formats are in modules of their
own (see `dpurt.replay.formats`).

Mooncake format: one JSON object a line, plain or gzip, with ``timestamp`` (ms from the start, never falling),
``input_length`` and ``output_length`` (tokens) and ``hash_ids`` (one integer >= 0 per prefix block, in prefix
order; equal ids mean the same block under the same whole prefix, so none repeats within a request). Optional
are ``session_id``, ``block_size`` (tokens of a block, 512 without; the same in the whole file), ``stop`` (why the
response ended) and ``api_time`` (s, how long it took). Other fields are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.lines import Count, Seconds, read_json_lines

__all__ = ["MOONCAKE_BLOCK_TOKENS", "Request", "Trace", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, its tokens in and out, and its prefix blocks.

    `session` names its conversation, `agent` the thread in it (0: the main one). `stop` and `api_s` are known to a
    server when the response is complete: why it ended (``tool_use``, ``end_turn``) and how long it took.
    """

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str = ""
    agent: int = 0
    stop: str = ""
    api_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A file's requests, ordered by time. `is_chained`: equal blocks stand under equal prefixes. `model` says what
    in it is a model of ours, not a recording."""

    file: str
    format: str
    block_tokens: int
    is_chained: bool
    requests: list[Request]
    model: tuple[str, ...] = ()


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the file."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...]
    session_id: str | int = ""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = MOONCAKE_BLOCK_TOKENS
    stop: str = ""
    api_time: Seconds | None = None


def read_mooncake(path: Path, limit: int | None = None) -> Iterator[Request]:
    """The first `limit` requests of a Mooncake trace, in order.

    Raises ConfigError, from the iterator, for a file that cannot be read or a bad line (``file:line`` and
    what was expected).
    """
    last_ms = 0.0
    block_size = None
    for where, line in islice(read_json_lines(path, MooncakeLine), limit):
        if line.timestamp < last_ms:
            raise ConfigError(where, f"expected a timestamp >= {last_ms:g}, got {line.timestamp:g}")
        if len(set(line.hash_ids)) != len(line.hash_ids):
            raise ConfigError(where, "expected distinct hash_ids within a request")
        if line.block_size != (block_size := block_size or line.block_size):
            raise ConfigError(where, f"expected block_size {block_size} as before, got {line.block_size}")
        last_ms = line.timestamp
        yield Request(
            last_ms / 1000,
            line.input_length,
            line.output_length,
            line.hash_ids,
            str(line.session_id),
            stop=line.stop,
            api_s=line.api_time,
        )
