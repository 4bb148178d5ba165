"""Proves of a recording that it holds no token, prompt, name or request id, without knowing what those were.

Two independent looks. The strict reader accepts numbers, and words of closed lists, and nothing else; here every number that names
something must name what a line before has introduced, so a list of token ids in the place of a list of blocks is found: no
block of that name exists. And the raw text is scanned for its strings, whatever the reader thought of them: each is a word
of the format, a 16-digit hash, or a mask of parts.

A block's hash is of its key under a secret that the file does not hold (`dpurt.agents.tape`): a dictionary of likely prompts
gives nothing without it. That the hashes are keyed cannot be seen in one file; two recordings of one node show it (`tests`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from dpurt.config.schema import AnyBdevConfig, Predictor
from dpurt.core.eviction import POLICIES
from dpurt.errors import ConfigError
from dpurt.replay.lines import read_lines
from dpurt.replay.recording import Recording, read_recording
from dpurt.wire import recording as r

__all__ = ["lint"]

DEVICE_KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyBdevConfig))
SLACK_S = 10.0  # a line may be noted somewhat after its time: a turn of the node's loop, by its own clock
_STRING = re.compile(rb'"([^"]*)"')
_HASH = re.compile(rb"[0-9a-f]{16}")
_MASK = re.compile(rb"[0-9a-f]{1,32}")


def lint(path: Path) -> list[str]:
    """What is wrong, a line each; empty for a clean recording."""
    try:
        recording = read_recording(path)
    except ConfigError as error:
        return [str(error)]
    names = _Names(recording)
    return [*_header_problems(recording), *names.problems(), *_strings(path)]


def _header_problems(recording: Recording) -> Iterator[str]:
    header = recording.header
    where = f"{recording.path}:1"
    known = set(get_args(Predictor))
    unknown = [name for name in header.prefetch.predictors if name not in known]
    if unknown:
        yield f"{where}: expected known predictors, got {', '.join(unknown)}"
    if header.eviction not in POLICIES:
        yield f"{where}: expected a known eviction policy, got {header.eviction!r}"
    yield from (
        f"{where}: expected a known kind of device, got {device.kind!r}"
        for device in header.devices
        if device.kind not in DEVICE_KINDS
    )


@dataclass(slots=True)
class _Names:
    """Whether whatever is named was introduced before."""

    recording: Recording
    spaces: dict[int, r.Space] = field(default_factory=dict)
    blocks: dict[int, r.Block] = field(default_factory=dict)
    jobs: set[int] = field(default_factory=set)

    def problems(self) -> Iterator[str]:
        last = self.recording.header.started_at
        for index, line in enumerate(self.recording.lines):
            for problem in self._look_at(line):
                yield f"{self.recording.where(index)}: {problem}"
            now = getattr(line, "now", last)
            if now < last - SLACK_S:
                yield f"{self.recording.where(index)}: expected a time >= {last}, got {now}"
            last = max(last, now)

    def _look_at(self, line: r.Line) -> Iterator[str]:
        if isinstance(line, r.Space):
            yield from self._space(line)
        elif isinstance(line, r.Block):
            yield from self._block(line)
        else:
            yield from (
                f"block {block} was not introduced" for block in _blocks(line) if block not in self.blocks
            )
            yield from self._others(line)

    def _space(self, line: r.Space) -> Iterator[str]:
        if line.number in self.spaces:
            yield f"space {line.number} is introduced twice"
        if line.pool >= len(self.recording.header.pools):
            yield f"pool {line.pool} is not in the header"
        self.spaces[line.number] = line

    def _block(self, line: r.Block) -> Iterator[str]:
        if line.ref in self.blocks:
            yield f"block {line.ref} is introduced twice"
        if line.space not in self.spaces:
            yield f"space {line.space} was not introduced"
        else:
            yield from self._mask(line.staged, self.spaces[line.space])
        self.blocks[line.ref] = line

    def _mask(self, word: str | None, space: r.Space | None) -> Iterator[str]:
        if word is not None and space is not None and int(word, 16) >> len(space.parts):
            yield f"parts {word} of a block that has {len(space.parts)}"

    def _others(self, line: r.Line) -> Iterator[str]:
        if isinstance(line, r.PolicyLine) and line.pool >= len(self.recording.header.pools):
            yield f"pool {line.pool} is not in the header"
        match line:
            case r.ArrivedLine() if line.space not in self.spaces and not self.recording.lost:
                yield f"space {line.space} was not introduced"
            case r.Fetched():
                self.jobs.add(line.job)
                yield from self._mask(line.parts, self._space_of(line.block))
                yield from self._predictor(line)
            case r.DemandedLine():
                yield from self._mask(line.parts, self._space_of(line.block))
            case r.StagedLine() | r.FailedLine() | r.Cancelled() if (
                self._is_complete and line.job not in self.jobs
            ):
                yield f"job {line.job} was not fetched before"
            case _:
                pass

    def _predictor(self, line: r.Fetched) -> Iterator[str]:
        prefetch = self.recording.header.prefetch
        if line.predictor >= len(prefetch.predictors):
            yield f"predictor {line.predictor} is not in the header"

    def _space_of(self, block: int) -> r.Space | None:
        introduced = self.blocks.get(block)
        return None if introduced is None else self.spaces.get(introduced.space)

    @property
    def _is_complete(self) -> bool:
        return self.recording.header.is_fresh and not self.recording.lost


def _blocks(line: r.Line) -> Iterator[int]:
    """Every block a line names."""
    match line:
        case r.ArrivedLine(blocks=blocks) | r.StoredLine(blocks=blocks) | r.Touch(blocks=blocks):
            yield from blocks
        case r.StepLine():
            yield from line.touched
            for hint in line.ranked:
                yield from hint.blocks
        case _:
            block = getattr(line, "block", None)
            if block is not None:
                yield block


def _strings(path: Path) -> Iterator[str]:
    """Strings in the raw text that are none of the format's."""
    known = _vocabulary()
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if number > 1 and not line.endswith(b"\n"):
            return  # torn
        if b"\\" in line or not line.isascii():
            yield f"{where}: expected plain ASCII without escapes"
        yield from (
            f"{where}: {string.decode('ascii', 'replace')!r} is no word of the format"
            for string in _STRING.findall(line)
            if string not in known and not _HASH.fullmatch(string) and not _MASK.fullmatch(string)
        )


def _vocabulary() -> frozenset[bytes]:
    tags = [kind.__struct_config__.tag for kind in (*get_args(r.Line), r.RankedLine)]
    fields = [name for kind in (r.Header, r.Prefetch, r.Pool, r.Device) for name in kind.__struct_fields__]
    lists = [get_args(closed) for closed in (r.Where, r.Status, r.Failure, r.Why, r.Op)]
    words = [*tags, *fields, *r.REASONS, *r.NUMBERS, *(word for each in lists for word in each)]
    return frozenset(
        str(word).encode() for word in (*words, *POLICIES, *get_args(Predictor), *DEVICE_KINDS, r.FORMAT)
    )
