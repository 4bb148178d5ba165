"""RAGPulse, a question-answering service's requests by component: one JSON object a line, plain or gzip.

``timestamp`` (s, as text or number, never falling), ``input_length``, ``output_length``, ``session_id`` and ``hash_ids``, a map
from component to ids. A prompt is its components in the order of `RagPulseIds`. Ids name content of up to 512
tokens wherever it stands, so the same passage at another place has the same id: chained, they make an ordinary
prefix cache (the default); as they are, a cache that can use a passage anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.lines import Count, read_json_lines
from dpurt.replay.trace import Request

__all__ = ["BLOCK_TOKENS", "read_ragpulse"]

BLOCK_TOKENS = 512
_MAX_S = 1e12

_Ids = tuple[Count, ...]


class RagPulseIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The components, in the order of the prompt."""

    sys_prompt: _Ids
    passages_ids: _Ids
    history: _Ids
    web_search: _Ids
    user_input: _Ids


class RagPulseLine(msgspec.Struct, frozen=True):
    """A line of the file."""

    timestamp: str | float
    input_length: Count
    output_length: Count
    hash_ids: RagPulseIds
    session_id: str


def read_ragpulse(path: Path) -> Iterator[Request]:
    """The requests in order, ids as they are. Raises ConfigError from the iterator."""
    last = 0.0
    for where, line in read_json_lines(path, RagPulseLine):
        at = _seconds(where, line.timestamp)
        if at < last:
            raise ConfigError(where, f"expected a timestamp >= {last:g}, got {at:g}")
        last = at
        ids = line.hash_ids
        blocks = ids.sys_prompt + ids.passages_ids + ids.history + ids.web_search + ids.user_input
        yield Request(at, line.input_length, line.output_length, blocks, line.session_id)


def _seconds(where: str, timestamp: str | float) -> float:
    try:
        at = float(timestamp)
    except ValueError:
        at = -1.0
    if not 0 <= at <= _MAX_S:
        raise ConfigError(where, f"expected seconds in $.timestamp, got {timestamp!r}")
    return at
