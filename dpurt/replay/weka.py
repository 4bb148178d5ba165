"""Coding-agent sessions as captured at WEKA, put on one clock: one JSON object a session a line, plain or gzip.

A session has ``id``, ``block_size``, ``tool_tokens``, ``system_tokens`` and ``requests``, each with ``t`` (s from the
session's start), ``agent`` (0: the main thread), ``model``, ``input_length``, ``output_length``, ``stop``, ``api_time``,
``think_time`` (s or null) and ``hash_runs``, (first id, count) pairs. Ids are chained, local to the session, one per full block.

Two things are *our model*, not recorded: when sessions start (a Poisson process, or a load shape) and what they
share: sessions with the same `tool_tokens` and model have the blocks of their tools in common. Of each session the first
`SESSION_S` are kept. Sessions start in the file's order and are read as they start, so a limit reads no more of the file than it needs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay.blocks import group_ends
from dpurt.replay.lines import Count, Seconds, read_json_lines
from dpurt.replay.trace import Request

__all__ = [
    "BLOCK_TOKENS",
    "SESSION_GAP_S",
    "SESSION_S",
    "WekaSession",
    "joined",
    "poisson_starts",
    "read_weka",
]

BLOCK_TOKENS = 512  # of the requests we give: the file's smaller blocks are grouped
SESSION_GAP_S = 30.0
SESSION_S = 7200.0  # of each session: they last for days, mostly idle

K = TypeVar("K")
_Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class WekaRequest(msgspec.Struct, frozen=True):
    """One request of a session."""

    t: Seconds
    agent: Count
    model: str
    input_length: Count
    output_length: Count
    stop: str
    api_time: Seconds | None
    think_time: float | None
    hash_runs: tuple[tuple[Count, _Length], ...]


class WekaSession(msgspec.Struct, frozen=True):
    """A line of the file."""

    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    tool_tokens: Count
    system_tokens: Count
    requests: tuple[WekaRequest, ...]


def poisson_starts(seed: int) -> Iterator[float]:
    """The first session at 0, the others a mean `SESSION_GAP_S` apart, without end."""
    rng = random.Random(seed)
    gaps = (rng.expovariate(1 / SESSION_GAP_S) for _ in repeat(None))
    return accumulate(gaps, initial=0.0)


def read_weka(
    path: Path, starts: Iterable[float], block_tokens: int = BLOCK_TOKENS, session_s: float = SESSION_S
) -> Iterator[Request]:
    """The requests of all sessions in order of time, of each its first `session_s` seconds. Raises ConfigError from
    the iterator."""
    numbering = _Numbering()
    waiting: list[tuple[float, int, Request]] = []
    serial = 0
    for start, (where, session) in zip(starts, read_json_lines(path, WekaSession), strict=False):
        while waiting and waiting[0][0] < start:
            yield heapq.heappop(waiting)[2]
        for request in _placed(where, session, start, block_tokens, session_s, numbering):
            serial += 1
            heapq.heappush(waiting, (request.timestamp_s, serial, request))
    while waiting:
        yield heapq.heappop(waiting)[2]


def joined(requests: Sequence[Request], path: Path) -> list[Request]:
    """The requests with the stop reasons, times and threads that a file of sessions has of them: the k-th of a session
    there is the k-th here. ConfigError when a session is not in the file, or does not fit."""
    wanted = {request.session for request in requests}
    recorded: dict[str, Iterator[WekaRequest]] = {}
    for _, session in read_json_lines(path, WekaSession):
        if session.id in wanted:
            recorded[session.id] = iter(sorted(session.requests, key=lambda request: request.t))
    return [_joined(request, recorded, path) for request in requests]


def _joined(request: Request, recorded: dict[str, Iterator[WekaRequest]], path: Path) -> Request:
    same = next(recorded.get(request.session, iter(())), None)
    if same is None or same.input_length != request.input_tokens:
        what = f"session {request.session!r} with a request of {request.input_tokens} tokens"
        raise ConfigError(str(path), f"expected {what} at {request.timestamp_s:g} s of the trace")
    return replace(request, agent=same.agent, stop=same.stop, api_s=same.api_time)


def _placed(
    where: str, session: WekaSession, start: float, block_tokens: int, session_s: float, numbering: _Numbering
) -> Iterator[Request]:
    if block_tokens % session.block_size:
        raise ConfigError(
            where, f"expected a block_size that divides {block_tokens}, got {session.block_size}"
        )
    group = block_tokens // session.block_size
    names = numbering.shared_names(session, block_tokens, group)
    for request in session.requests:
        if request.t < session_s:
            ids = group_ends(request.hash_runs, group)
            yield Request(
                start + request.t,
                request.input_length,
                request.output_length,
                tuple(numbering.name(names, block) for block in ids),
                session.id,
                request.agent,
                request.stop,
                request.api_time,
            )


class _Numbering:
    """Numbers for all sessions' blocks; see the module's docstring for what is shared."""

    def __init__(self) -> None:
        self._next = 0
        self._tools: dict[tuple[int, str, int], int] = {}

    def shared_names(self, session: WekaSession, block_tokens: int, group: int) -> dict[int, int]:
        """Session's own id -> number of its tools' blocks: those its first request begins with."""
        names: dict[int, int] = {}
        if session.requests:
            first = session.requests[0]
            num_shared = session.tool_tokens // block_tokens
            for position, block in zip(range(num_shared), group_ends(first.hash_runs, group), strict=False):
                names[block] = self.name(self._tools, (session.tool_tokens, first.model, position))
        return names

    def name(self, names: dict[K, int], key: K) -> int:
        """The number of `key` among `names`, a new one if need be."""
        number = names.get(key)
        if number is None:
            number = names[key] = self._next
            self._next += 1
        return number
