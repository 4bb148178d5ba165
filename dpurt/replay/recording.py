"""Recordings of a node (`dpurt record`), read strictly: what is wrong is a ConfigError that names file, line and what was expected.

A recording whose writer was killed ends in the middle of a line, or without an `End`: what is whole is read, and `is_whole` says
so. Where the writer was too slow, lines are missing and `lost` counts them: rates are then of what is there, and decisions
cannot be replayed.

`requests_of` makes a trace of one, for the engine: a request is an arrival with the blocks it matched and those stored for it
later; blocks of its prompt that were never stored are blocks nobody else has. `scenario_of` is the node the recording was
made of, in the engine's terms: its staging, its device as the completed reads measured it, its hosts and their pace as
they were seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import msgspec

from dpurt.core.device_model import DeviceProfile
from dpurt.core.ledger import Ledger
from dpurt.errors import ConfigError
from dpurt.replay.engine import Scenario
from dpurt.replay.lines import read_lines
from dpurt.replay.report import percentile
from dpurt.replay.trace import Request
from dpurt.wire import recording as r

__all__ = ["Recording", "is_recording", "read_recording", "requests_of", "scenario_of"]

BASE = Scenario()
QUANTILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A file's header and lines. `where` names line `i` of `lines` for messages."""

    path: Path
    header: r.Header
    lines: list[r.Line]
    is_whole: bool
    lost: int

    def where(self, index: int) -> str:
        """``file:line`` of a line."""
        return f"{self.path}:{index + 2}"

    def spaces(self) -> dict[int, r.Space]:
        """By number."""
        return {line.number: line for line in self.lines if isinstance(line, r.Space)}


def is_recording(head: dict[str, object]) -> bool:
    """Is this a recording's first line?"""
    return head.get("format") == r.FORMAT


def read_recording(path: Path) -> Recording:
    """The whole file. ConfigError for a bad line, unless it is the last one and torn."""
    numbered = read_lines(path)
    number, first = next(numbered, (1, b""))
    try:
        header = r.decode_header(first)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}:{number}", f"expected a recording's header: {error}") from error
    lines = list(_lines_of(path, numbered))
    lost = sum(line.lines for line in lines if isinstance(line, r.Loss))
    is_whole = bool(lines) and isinstance(lines[-1], r.End)
    return Recording(path=path, header=header, lines=lines, is_whole=is_whole, lost=lost)


def _lines_of(path: Path, numbered: Iterator[tuple[int, bytes]]) -> Iterator[r.Line]:
    ended = 0
    for number, line in numbered:
        where = f"{path}:{number}"
        if ended:
            raise ConfigError(where, f"expected nothing after the end in line {ended}")
        try:
            decoded = r.decode_line(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not line.endswith(b"\n"):
                return  # torn: the writer was killed
            raise ConfigError(where, str(error)) from error
        if isinstance(decoded, r.End):
            ended = number
        yield decoded


# --- as a trace -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """One request as far as it was recorded."""

    heard: float
    prompt_blocks: int
    prompt_tokens: int
    blocks: list[int]
    prefilled_at: float
    finished_at: float | None = None
    reason: str = ""


@dataclass(slots=True)
class _Requests:
    by_sequence: dict[int, _Seen] = field(default_factory=dict)

    def take(self, line: r.Line) -> None:
        match line:
            case r.ArrivedLine():
                self._arrived(line)
            case r.StoredLine(now, sequence, blocks) if sequence in self.by_sequence:
                seen = self.by_sequence[sequence]
                known = set(seen.blocks)
                seen.blocks += [block for block in blocks if block not in known]
                seen.prefilled_at = now
            case r.DemandedLine(now, _, sequence) if sequence in self.by_sequence:
                self.by_sequence[sequence].prefilled_at = now
            case r.FinishedLine(now, sequence) | r.GoneLine(now, sequence) if sequence in self.by_sequence:
                seen = self.by_sequence[sequence]
                seen.finished_at = now
                seen.reason = line.reason if isinstance(line, r.FinishedLine) else ""
            case _:
                pass

    def _arrived(self, line: r.ArrivedLine) -> None:
        """An arrival hint may be followed by a lookup of the same request, which may match more."""
        seen = self.by_sequence.get(line.sequence)
        if seen is None:
            self.by_sequence[line.sequence] = _Seen(
                line.heard, line.prompt_blocks, line.prompt_tokens, list(line.blocks), line.heard
            )
        elif len(line.blocks) > len(seen.blocks):
            seen.blocks = list(line.blocks)


def requests_of(recording: Recording, decode_step_s: float = BASE.decode_step_s) -> list[Request]:
    """The requests, in order of arrival, from time 0. Output tokens are the time from prefill to finish, in decode steps."""
    seen = _Requests()
    for line in recording.lines:
        seen.take(line)
    inert = iter(range(-1, -(1 << 62), -1))
    start = min((one.heard for one in seen.by_sequence.values()), default=0.0)
    tokens = _block_tokens(recording)
    return [
        _request(one, start, tokens, decode_step_s, inert)
        for one in sorted(seen.by_sequence.values(), key=lambda one: one.heard)
    ]


def _request(
    seen: _Seen, start: float, block_tokens: int, decode_step_s: float, inert: Iterator[int]
) -> Request:
    unknown = max(0, seen.prompt_blocks - len(seen.blocks))
    blocks = (*seen.blocks, *(next(inert) for _ in range(unknown)))
    decoding = max(0.0, (seen.finished_at or seen.prefilled_at) - seen.prefilled_at)
    return Request(
        timestamp_s=seen.heard - start,
        input_tokens=seen.prompt_tokens or len(blocks) * block_tokens,
        output_tokens=round(decoding / decode_step_s),
        blocks=blocks,
        stop=seen.reason,
        api_s=None if seen.finished_at is None else seen.finished_at - seen.heard,
    )


def _block_tokens(recording: Recording) -> int:
    """ConfigError when spaces differ: the engine knows blocks of one size."""
    sizes = {(space.block_tokens, space.record_bytes) for space in recording.spaces().values()}
    if len(sizes) > 1:
        raise ConfigError(
            str(recording.path), f"expected spaces with blocks of one size, got {sorted(sizes)}"
        )
    return next(iter(sizes), (1, 1))[0]


# --- as a scenario ----------------------------------------------------------------------------------------------------


def scenario_of(recording: Recording, base: Scenario = BASE) -> Scenario:
    """The recorded node, see the module's docstring. What the recording does not say stays as in `base`."""
    spaces = list(recording.spaces().values())
    requests = requests_of(recording)
    distinct = len({block for request in requests for block in request.blocks})
    slots = sum(pool.slots for pool in recording.header.pools)
    scenario = replace(
        base,
        hosts=_hosts(recording),
        prefill_tokens_per_s=_prefill_rate(recording) or base.prefill_tokens_per_s,
        staging_share=min(1.0, (slots + 0.5) / max(1, distinct)),
        block_tokens=_block_tokens(recording),
        block_bytes=spaces[0].record_bytes if spaces else base.block_bytes,
        device=measured_device(recording, base.device),
        pauses_s=_quantiles(list(host_pauses(recording.lines))),
        horizon_s=Ledger().horizon_s,
        as_node=True,
    )
    prefetch = recording.header.prefetch
    staging = sum(pool.slots * pool.record_bytes for pool in recording.header.pools)
    return replace(
        scenario,
        lookahead_blocks=prefetch.lookahead_blocks,
        prefetch_queue_depth=prefetch.queue_depth,
        prefetch_share=min(1.0, prefetch.staging_bytes / staging),
        min_probability=prefetch.min_probability,
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """The distribution in a few numbers; none without values."""
    return tuple(percentile(values, (i + 0.5) / QUANTILES) for i in range(QUANTILES)) if values else ()


def host_pauses(lines: Sequence[r.Line]) -> Iterator[float]:
    """What hosts took from having a block to asking for the next one."""
    waiting: dict[int, list[int]] = {}  # by block, sequences
    had_at: dict[int, float] = {}  # by sequence
    for line in lines:
        match line:
            case r.DemandedLine(now, block, sequence, where):
                since = had_at.pop(sequence, None)
                if since is not None and since < now:  # else: of the same load
                    yield now - since
                if where == "staging":
                    had_at[sequence] = now
                else:
                    waiting.setdefault(block, []).append(sequence)
            case r.Completed(now, block):
                had_at.update(dict.fromkeys(waiting.pop(block, ()), now))
            case r.StoredLine(_, sequence) | r.FinishedLine(_, sequence) | r.GoneLine(_, sequence):
                had_at.pop(sequence, None)
            case _:
                pass


def _hosts(recording: Recording) -> int:
    """The most requests seen in prefill at once."""
    seen = _Requests()
    for line in recording.lines:
        seen.take(line)
    requests = seen.by_sequence.values()
    edges = sorted(edge for one in requests for edge in ((one.heard, 1), (one.prefilled_at, -1)))
    return max(1, max(accumulate(change for _, change in edges), default=1))


def _prefill_rate(recording: Recording) -> float | None:
    """Tokens a second at which hosts computed: from one store of a request to the next, when it loaded nothing in between."""
    stored_at: dict[int, float] = {}
    blocks, seconds = 0, 0.0
    for line in recording.lines:
        if isinstance(line, r.StoredLine):
            since = stored_at.get(line.sequence)
            if since is not None:
                blocks += len(line.blocks)
                seconds += line.now - since
            stored_at[line.sequence] = line.now
        elif isinstance(line, r.DemandedLine):
            stored_at.pop(line.sequence, None)
    return blocks * _block_tokens(recording) / seconds if seconds else None


def measured_device(recording: Recording, base: DeviceProfile) -> DeviceProfile:
    """The device as it was seen: bandwidth as it is modelled or as the node was told, latency from the reads' completions."""
    header = recording.header
    device = header.devices[0]
    rate = device.read_bytes_per_s or header.prefetch.bandwidth_bytes_per_s
    latencies = list(read_latencies(recording.lines, rate))
    return replace(
        base,
        name="recorded",
        read_bytes_per_s=rate,
        read_latency_s=percentile(latencies, 0.5) if latencies else base.read_latency_s,
        queue_depth=sum(each.queue_depth for each in header.devices),
        tail_probability=0.0,
        source=f"the recording {recording.path.name}",
    )


def read_latencies(lines: Sequence[r.Line], bytes_per_s: float) -> Iterator[float]:
    """Of reads that had the device to themselves: time from the node's decision to its answer, less the transfer."""
    queued: dict[int, r.Queued] = {}
    alone: set[int] = set()
    for line in lines:
        if isinstance(line, r.Queued):
            if not queued:
                alone.add(line.block)
            queued[line.block] = line
        elif isinstance(line, r.Completed):
            read = queued.pop(line.block, None)
            if read is not None and line.status == "ok" and line.block in alone:
                yield max(0.0, line.now - read.now - read.num_bytes / bytes_per_s)
            alone.discard(line.block)
