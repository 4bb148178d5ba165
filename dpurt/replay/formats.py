"""Traces from files of any known format, told apart by their content, never by their name.

===============  =====================================================================================
format           the first line
===============  =====================================================================================
mooncake         an object with ``timestamp`` and a list ``hash_ids``
qwen-bailian     the same, with ``chat_id``
ragpulse         an object with ``timestamp`` and a map ``hash_ids``
weka             an object with ``requests``: a coding-agent session
dpurt-recording  an object with ``format``: a recording of a node (`dpurt record`)
azure            ``TIMESTAMP,ContextTokens,GeneratedTokens``: arrivals only, a load shape for another trace
===============  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec

from dpurt.errors import ConfigError
from dpurt.replay import bailian, ragpulse, weka
from dpurt.replay.arrivals import HEADER, Shape, read_arrivals, repeated, reshaped
from dpurt.replay.blocks import Chain, regroup
from dpurt.replay.lines import first_line
from dpurt.replay.recording import is_recording, read_recording, requests_of
from dpurt.replay.trace import MooncakeLine, Request, Trace, read_mooncake

__all__ = ["FORMATS", "UNFINISHED", "Reading", "read_trace", "recognise"]

FORMATS = ("mooncake", "qwen-bailian", "ragpulse", "weka", "dpurt-recording", "azure")
UNFINISHED = "the recording's writer was killed: its end is missing"
_CHAINED = {"mooncake", "weka", "dpurt-recording"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a trace. `rechain` None: as the format needs it for a prefix cache. `block_tokens` None: the
    format's own. `arrivals`: path of a file whose arrivals are the load shape; text, as readings pass between
    processes. `sessions`: path of a file of coding-agent sessions that says how this trace's responses ended.
    `seed` is for what a format leaves open."""

    limit: int | None = None
    rechain: bool | None = None
    block_tokens: int | None = None
    arrivals: str | None = None
    sessions: str | None = None
    seed: int = 0


def recognise(path: Path) -> str:
    """The format's name, one of `FORMATS`. ConfigError for none of them."""
    number, line = first_line(path)
    if line.strip() == HEADER:
        return "azure"
    where = f"{path}:{number}"
    try:
        head = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"expected a line of a known trace format ({_known()}): {error}") from error
    return _format_of(where, head)


def _format_of(where: str, head: dict[str, object]) -> str:
    if is_recording(head):
        return "dpurt-recording"
    if "requests" in head:
        return "weka"
    if isinstance(head.get("hash_ids"), dict):
        return "ragpulse"
    if "chat_id" in head:
        return "qwen-bailian"
    if "hash_ids" in head or "timestamp" in head:
        return "mooncake"
    raise ConfigError(where, f"expected a known trace format ({_known()}), got fields {', '.join(head)}")


def _known() -> str:
    return ", ".join(FORMATS)


def read_trace(path: Path, how: Reading = Reading()) -> Trace:
    """The trace in a file, of whatever format. ConfigError names file, line and what was expected."""
    name = recognise(path)
    if name == "azure":
        raise ConfigError(str(path), "holds arrivals only; give it as the load shape of another trace")
    shape = None if how.arrivals is None else read_arrivals(Path(how.arrivals))
    if name == "dpurt-recording":
        trace = _recorded(path, how)
    else:
        trace = _weka(path, how, shape) if name == "weka" else _requests(path, name, how, shape)
    if not trace.requests:
        raise ConfigError(str(path), "expected at least one request")
    return trace


def _recorded(path: Path, how: Reading) -> Trace:
    recording = read_recording(path)
    requests = requests_of(recording)
    notes: tuple[str, ...] = () if recording.is_whole else (UNFINISHED,)
    if recording.lost:
        notes += (f"{recording.lost} lines of the recording are missing",)
    return Trace(
        file=path.name,
        format="dpurt-recording",
        block_tokens=next((space.block_tokens for space in recording.spaces().values()), 1),
        is_chained=True,
        requests=requests[: how.limit],
        model=("decoding: the time from prefill to finish", *notes),
    )


def _weka(path: Path, how: Reading, shape: Shape | None) -> Trace:
    starts = weka.poisson_starts(how.seed) if shape is None else repeated(shape)
    block_tokens = how.block_tokens or weka.BLOCK_TOKENS
    requests = weka.read_weka(path, starts, block_tokens)
    when = Path(how.arrivals).name if how.arrivals else f"Poisson, one in {weka.SESSION_GAP_S:g} s"
    return Trace(
        file=path.name,
        format="weka",
        block_tokens=block_tokens,
        is_chained=True,
        requests=list(islice(requests, how.limit)),
        model=(
            f"session starts: {when}",
            f"each session's first {weka.SESSION_S:g} s",
            "sessions with equal tools share their blocks",
        ),
    )


def _requests(path: Path, name: str, how: Reading, shape: Shape | None) -> Trace:
    own_tokens, read = _reader(path, name)
    is_chained = name in _CHAINED
    wants_chain = (name == "ragpulse" or how.block_tokens is not None) if how.rechain is None else how.rechain
    requests = list(islice(read(), how.limit))
    if how.sessions is not None:
        requests = weka.joined(requests, Path(how.sessions))
    if wants_chain and not is_chained:
        requests, is_chained = _chained(requests), True
    if how.block_tokens not in (None, own_tokens):
        requests = _regrouped(path, requests, own_tokens, how.block_tokens or own_tokens, is_chained)
    if shape is not None:
        requests = reshaped(requests, shape)
    return Trace(
        file=path.name,
        format=name,
        block_tokens=how.block_tokens or own_tokens,
        is_chained=is_chained,
        requests=requests,
        model=(f"arrivals: {Path(how.arrivals).name}",) if how.arrivals else (),
    )


def _reader(path: Path, name: str) -> tuple[int, Callable[[], Iterator[Request]]]:
    """Tokens of a block in the file, and what reads it."""
    if name == "qwen-bailian":
        return bailian.BLOCK_TOKENS, lambda: bailian.read_bailian(path)
    if name == "ragpulse":
        return ragpulse.BLOCK_TOKENS, lambda: ragpulse.read_ragpulse(path)
    return _mooncake_block_tokens(path), lambda: read_mooncake(path)


def _mooncake_block_tokens(path: Path) -> int:
    number, line = first_line(path)
    try:
        return msgspec.json.decode(line, type=MooncakeLine).block_size
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}:{number}", str(error)) from error


def _chained(requests: list[Request]) -> list[Request]:
    chain = Chain()
    return [replace(request, blocks=chain.numbers(request.blocks)) for request in requests]


def _regrouped(path: Path, requests: list[Request], own: int, wanted: int, is_chained: bool) -> list[Request]:
    if wanted % own:
        raise ConfigError(str(path), f"expected blocks of a multiple of {own} tokens, got {wanted}")
    if not is_chained:
        raise ConfigError(str(path), "expected chained ids to make larger blocks of; chain them")
    return [replace(request, blocks=regroup(request.blocks, wanted // own)) for request in requests]
