"""Alibaba's qwen-bailian usage traces: one JSON object a line, plain or gzip.

``chat_id``, ``parent_chat_id`` (-1: none), ``timestamp`` (s from the start, never falling), ``input_length``,
``output_length``, ``type``, ``turn`` (from 1) and ``hash_ids``, one integer per block of 16 tokens. The ids name a block's
content, not its prefix: 0.17 % (A) and 1.42 % (B) of the hits they give are not prefix hits, by the publisher's own
count. Chain them where that matters. A request's session is the oldest known ancestor's `chat_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.lines import MAX_ID, Count, Seconds, read_json_lines
from dpurt.replay.trace import Request

__all__ = ["BLOCK_TOKENS", "read_bailian"]

BLOCK_TOKENS = 16

_Chat = Annotated[int, msgspec.Meta(ge=-1, le=MAX_ID)]


class BailianLine(msgspec.Struct, frozen=True):
    """A line of the file."""

    chat_id: Count
    parent_chat_id: _Chat
    timestamp: Seconds
    input_length: Count
    output_length: Count
    type: str
    turn: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    hash_ids: tuple[Count, ...]


def read_bailian(path: Path) -> Iterator[Request]:
    """The requests in order, ids as they are. Raises ConfigError from the iterator."""
    last = 0.0
    roots: dict[int, int] = {}
    for where, line in read_json_lines(path, BailianLine):
        if line.timestamp < last:
            raise ConfigError(where, f"expected a timestamp >= {last:g}, got {line.timestamp:g}")
        last = line.timestamp
        parent = line.parent_chat_id
        root = roots[line.chat_id] = line.chat_id if parent < 0 else roots.get(parent, parent)
        yield Request(last, line.input_length, line.output_length, line.hash_ids, str(root))
