"""Recordings of a node: every line of the file as one page of typed JSON arrays. Sans-I/O.

A recording is a text file. Its first line is a `Header` (a map), every other line one array that begins with the name of its
kind. Lines are in the order in which things happened. Written in order and whole lines at a time, so what a killed node
leaves is good up to its last newline.

Three sorts of lines:

- what the cores were told and what they heard when they asked (`Told`, `Tick`; answers of the tiers, `Answer`; calls of an eviction
  policy, `PolicyLine`), and what they decided (`Fetched`, `Cancelled`, `Victim`, `Price`). Who feeds the same cores with
  the former gets the latter again;
- what devices and hosts did: `Queued`, `Wanted`, `Completed`, `Taken`, `Written`, `Moved`, `Released`;
- about the file: `Block` and `Space` introduce a name before its first use, `Loss` says that lines are missing here, `End`
  that no more follow.

Privacy. There is no field a token, a prompt, a request id or the name of a model, tenant or host could be put in: fields are
numbers, marks of closed lists of words, and 16-digit hashes of block keys under a secret that is made for the file and
forgotten. `dpurt record --lint` proves it of a file.

Times are seconds of the node's clock, exact (a float's shortest form), for a replay computes with them as the node did; the
header says what wall-clock time one of them was. Blocks are named by the node's own handles, which say nothing outside.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dpurt.core.events import (
    Arrived,
    Consumed,
    DecodeStep,
    Demanded,
    Dropped,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    LatencyMeasured,
    Owner,
    Paused,
    Ranked,
    Resumed,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.ledger import Totals
from dpurt.core.prefetch import Fetch

__all__ = [
    "FORMAT",
    "VERSION",
    "Header",
    "Line",
    "decode_header",
    "decode_line",
    "encode",
    "event_of",
    "told",
]

FORMAT = "dpurt-recording"
VERSION = 1
MAX_REF = 2**63 - 1
REASONS = (
    "", "end_turn", "tool_use", "tool_calls", "stop", "stop_sequence", "length", "max_tokens", "abort", "other",
)  # fmt: skip

OUTCOMES = ("planned", "refused", "cancelled", "failed", "timely", "late", "early", "useless", "open")

Ref = Annotated[int, Meta(ge=0)]
Refs = tuple[Ref, ...]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Mask = Annotated[str, Meta(pattern="^[0-9a-f]{1,32}$")]  # of parts, hexadecimal: up to 128 bits
Word = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,31}$")]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Reason = Literal[
    "", "end_turn", "tool_use", "tool_calls", "stop", "stop_sequence", "length", "max_tokens", "abort", "other"
]  # fmt: skip
Where = Literal["staging", "in_flight", "nvme", "gone"]
Status = Literal["ok", "checksum", "stale", "error", "down", "late", "cancelled", "expired"]
Asked = Literal["bytes", "backlog", "free"]
NUMBERS = ("bytes", "backlog", "free")
Op = Literal["pull", "push", "store"]
Why = Literal["asked", "node_ended", "full"]
Failure = Literal[
    "ok", "checksum", "stale", "error", "down", "late", "cancelled", "expired", "gone", "in_flight", "no_room"
]  # fmt: skip


class Prefetch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the prefetch core was put together (`dpurt.core.prefetch_setup`)."""

    predictors: tuple[Word, ...]
    block_s: float
    lookahead_blocks: Count
    bandwidth_bytes_per_s: float
    staging_bytes: Count
    queue_depth: Count
    min_probability: float


class Pool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A staging pool."""

    slots: Count
    record_bytes: Count


class Device(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bdev: its kind, and, where it is modelled, its model."""

    kind: Annotated[str, Meta(pattern="^[a-z][a-z_-]{0,31}$")]
    queue_depth: Count
    read_latency_s: float | None = None
    read_bytes_per_s: float | None = None


class Header(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line. `is_fresh`: the node had done nothing before, so decisions can be replayed from here. `prefetch` holds
    where `has_prefetch`, or would; `prior` is the digest of what its predictors knew beforehand.
    """

    format: Literal["dpurt-recording"] = "dpurt-recording"
    version: Literal[1] = 1
    started_at: float
    wall: float
    is_fresh: bool
    eviction: Word
    has_prefetch: bool
    prior: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
    prefetch: Prefetch
    pools: tuple[Pool, ...]
    devices: tuple[Device, ...]


class _Line(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


# --- names ------------------------------------------------------------------------------------------------------------


class Space(_Line, frozen=True, tag="space"):
    """A space at one epoch: its number, its pool, tokens of a block, bytes of a record, each part's bytes, and how long a host
    takes to compute a block, where the topology says so.
    """

    number: Count
    pool: Count
    block_tokens: Count
    record_bytes: Count
    parts: tuple[Count, ...]
    recompute_s: float | None = None


class Block(_Line, frozen=True, tag="block"):
    """A block, as it was before the next line: its keyed hash, its space, on flash or not, its parts in staging."""

    ref: Ref
    hash: Hash
    space: Count
    is_on_flash: bool
    staged: Mask


# --- what the cores were told -----------------------------------------------------------------------------------------


class ArrivedLine(_Line, frozen=True, tag="arrived"):
    """`prompt_blocks` and `prompt_tokens` are of the whole prompt; 0 where the host gave digests only."""

    now: float
    heard: float
    sequence: Count
    space: Count
    blocks: Refs
    expected_start: float | None
    prompt_blocks: Count
    prompt_tokens: Count


class ConsumedLine(_Line, frozen=True, tag="consumed"):
    now: float
    sequence: Count
    first: Count
    count: Count


class StoredLine(_Line, frozen=True, tag="stored"):
    now: float
    sequence: Count
    blocks: Refs


class PausedLine(_Line, frozen=True, tag="paused"):
    now: float
    sequence: Count
    expected_s: float | None
    reason: Reason


class ResumedLine(_Line, frozen=True, tag="resumed"):
    now: float
    sequence: Count


class FinishedLine(_Line, frozen=True, tag="finished"):
    now: float
    sequence: Count
    reason: Reason


class GoneLine(_Line, frozen=True, tag="gone"):
    now: float
    sequence: Count


class RankedLine(_Line, frozen=True, tag="ranked"):
    group: Count
    blocks: Refs
    need_by: float


class StepLine(_Line, frozen=True, tag="step"):
    now: float
    heard: float
    sequence: Count
    step: Count
    group: Count
    touched: Refs
    ranked: tuple[RankedLine, ...]
    masses: tuple[float, ...] | None


class DemandedLine(_Line, frozen=True, tag="demanded"):
    now: float
    block: Ref
    sequence: Count
    where: Where
    parts: Mask | None


class StagedLine(_Line, frozen=True, tag="staged"):
    now: float
    block: Ref
    job: Count


class FailedLine(_Line, frozen=True, tag="failed"):
    now: float
    job: Count
    reason: Failure


class EvictedLine(_Line, frozen=True, tag="evicted"):
    now: float
    block: Ref


class DroppedLine(_Line, frozen=True, tag="dropped"):
    now: float
    block: Ref


class LatencyLine(_Line, frozen=True, tag="latency"):
    """What reads of the device take beyond their bytes' time, as lately measured."""

    now: float
    latency_s: float


Told: TypeAlias = (
    ArrivedLine
    | ConsumedLine
    | StoredLine
    | PausedLine
    | ResumedLine
    | FinishedLine
    | GoneLine
    | StepLine
    | DemandedLine
    | StagedLine
    | FailedLine
    | EvictedLine
    | DroppedLine
    | LatencyLine
)


class Tick(_Line, frozen=True, tag="tick"):
    """The core was told the time."""

    now: float


class Whereabouts(_Line, frozen=True, tag="where"):
    """The core asked where a block was."""

    block: Ref
    where: Where


class Number(_Line, frozen=True, tag="number"):
    """The core asked for a number: bytes of (parts of) a block, of demand reads waiting, or free in staging."""

    what: Asked
    value: Count


class Priced(_Line, frozen=True, tag="priced"):
    """The core asked what the block that would leave for this one is worth."""

    block: Ref
    worth: float


Answer: TypeAlias = Whereabouts | Number | Priced


# --- what they decided ------------------------------------------------------------------------------------------------


class Fetched(_Line, frozen=True, tag="fetch"):
    """Of the event or tick before. `predictor` is a place in the header's list."""

    job: Count
    block: Ref
    parts: Mask | None
    need_by: float
    predictor: Count


class Cancelled(_Line, frozen=True, tag="cancel"):
    job: Count


# --- eviction policies, by pool ---------------------------------------------------------------------------------------


class Insert(_Line, frozen=True, tag="insert"):
    pool: Count
    block: Ref
    now: float


class Touch(_Line, frozen=True, tag="touch"):
    """In the order given to the policy: the last one is the most recent."""

    pool: Count
    blocks: Refs
    now: float


class Hold(_Line, frozen=True, tag="hold"):
    pool: Count
    block: Ref


class Unhold(_Line, frozen=True, tag="unhold"):
    pool: Count
    block: Ref


class Victim(_Line, frozen=True, tag="victim"):
    """The policy was asked whom to evict, and answered."""

    pool: Count
    now: float
    block: Ref | None
    may_protect: bool


class Price(_Line, frozen=True, tag="price"):
    """The policy was asked what its next victim is worth, and answered."""

    pool: Count
    now: float
    worth: float


class Remove(_Line, frozen=True, tag="remove"):
    pool: Count
    block: Ref
    is_evicted: bool


PolicyLine: TypeAlias = Insert | Touch | Hold | Unhold | Victim | Price | Remove


# --- devices and hosts ------------------------------------------------------------------------------------------------


class Queued(_Line, frozen=True, tag="queued"):
    """A read was given to the device's queue: a job's, or a demand read (`job` None)."""

    now: float
    block: Ref
    num_bytes: Count
    job: Count | None


class Wanted(_Line, frozen=True, tag="wanted"):
    """Somebody waits for a queued prefetch now."""

    now: float
    block: Ref


class Completed(_Line, frozen=True, tag="completed"):
    """The read ended; the device began it at `began` (None: it never did)."""

    now: float
    block: Ref
    began: float | None
    status: Status


class Taken(_Line, frozen=True, tag="taken"):
    """A block a host stored is in staging."""

    now: float
    block: Ref


class Written(_Line, frozen=True, tag="written"):
    """The device has it, too (or never will)."""

    now: float
    block: Ref
    is_ok: bool


class Moved(_Line, frozen=True, tag="moved"):
    """Bytes went over a link: a host pulled (part of) a block, the node pushed some, or a host wrote one it will commit. Hosts
    that map the node's memory move theirs unseen; `Released` is then the end of it.
    """

    now: float
    op: Op
    block: Ref | None
    began: float
    num_bytes: Count


class Released(_Line, frozen=True, tag="released"):
    """A host gave back its right to read the block."""

    now: float
    block: Ref


# --- about the file ---------------------------------------------------------------------------------------------------


class Loss(_Line, frozen=True, tag="loss"):
    """So many lines are missing here: the writer was too slow."""

    lines: Annotated[int, Meta(ge=1)]


class End(_Line, frozen=True, tag="end"):
    """The recording ended in good order; `lost` lines are missing in all. `ledger`: the core's, by `OUTCOMES`; None without one."""

    now: float
    why: Why
    lost: Count
    ledger: tuple[Count, ...] | None


Line: TypeAlias = (
    Space | Block | Told | Tick | Answer | Fetched | Cancelled | PolicyLine | Queued | Wanted | Completed | Taken | Moved | Released
    | Written | Loss | End
)  # fmt: skip

encode = msgspec.json.Encoder().encode
_headers = msgspec.json.Decoder(Header)
_lines: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def decode_header(line: bytes) -> Header:
    """Raises msgspec.DecodeError, which says where and what was expected."""
    return _headers.decode(line)


def decode_line(line: bytes) -> Line:
    """Raises msgspec.DecodeError, which says where and what was expected."""
    return _lines.decode(line)


def reason_word(reason: str) -> Reason:
    """A reason from the closed list. An engine may say anything, so what is not in it is ``other``."""
    return reason if reason in REASONS else "other"  # type: ignore[return-value]


def mask_word(mask: int | None) -> str | None:
    """A mask of parts as it is written."""
    return None if mask is None else f"{mask:x}"


def mask_of(word: str | None) -> int | None:
    """A mask of parts from its written form."""
    return None if word is None else int(word, 16)


def told(event: Event, now: float, heard: float, space: int, prompt: tuple[int, int]) -> Told:
    """The line of an event. `space` and `prompt` (blocks, tokens) are of an arrival."""
    match event:
        case Demanded(block, sequence, where, parts):
            return DemandedLine(now, block, sequence, where, mask_word(parts))
        case Consumed(sequence, first, count):
            return ConsumedLine(now, sequence, first, count)
        case Arrived(sequence, _, blocks, expected_start):
            return ArrivedLine(now, heard, sequence, space, blocks, expected_start, *prompt)
        case Stored(sequence, blocks):
            return StoredLine(now, sequence, blocks)
        case Staged(block, job):
            return StagedLine(now, block, job)
        case FetchFailed(job, reason):
            return FailedLine(now, job, reason)  # type: ignore[arg-type]
        case Evicted(block):
            return EvictedLine(now, block)
        case Dropped(block):
            return DroppedLine(now, block)
        case DecodeStep():
            return _step_line(event, now, heard)
        case _:
            return _told_of_life(event, now)


def _told_of_life(event: Event, now: float) -> Told:
    match event:
        case Paused(sequence, expected_s, reason):
            return PausedLine(now, sequence, expected_s, reason_word(reason))
        case Finished(sequence, reason):
            return FinishedLine(now, sequence, reason_word(reason))
        case Resumed(sequence):
            return ResumedLine(now, sequence)
        case SequenceGone(sequence):
            return GoneLine(now, sequence)
        case LatencyMeasured(latency_s):
            return LatencyLine(now, latency_s)
        case _:
            raise AssertionError(f"no line for {type(event).__name__}")


def _step_line(event: DecodeStep, now: float, heard: float) -> StepLine:
    ranked = tuple(RankedLine(hint.group, hint.blocks, hint.need_by) for hint in event.ranked)
    return StepLine(now, heard, event.sequence, event.step, event.group, event.touched, ranked, event.masses)


def event_of(line: Told) -> Event:
    """The event a line was made of; an arrival's owner is named by the number of its space."""
    match line:
        case DemandedLine(_, block, sequence, where, parts):
            return Demanded(block, sequence, where, mask_of(parts))
        case ConsumedLine(_, sequence, first, count):
            return Consumed(sequence, first, count)
        case ArrivedLine(_, _, sequence, space, blocks, expected_start):
            return Arrived(sequence, Owner(str(space), ""), blocks, expected_start)
        case StoredLine(_, sequence, blocks):
            return Stored(sequence, blocks)
        case StagedLine(_, block, job):
            return Staged(block, job)
        case FailedLine(_, job, reason):
            return FetchFailed(job, reason)
        case EvictedLine(_, block):
            return Evicted(block)
        case DroppedLine(_, block):
            return Dropped(block)
        case _:
            return _event_of_life(line)


def _event_of_life(line: Told) -> Event:
    match line:
        case PausedLine(_, sequence, expected_s, reason):
            return Paused(sequence, expected_s, reason)
        case FinishedLine(_, sequence, reason):
            return Finished(sequence, reason)
        case ResumedLine(_, sequence):
            return Resumed(sequence)
        case GoneLine(_, sequence):
            return SequenceGone(sequence)
        case LatencyLine(_, latency_s):
            return LatencyMeasured(latency_s)
        case StepLine(_, _, sequence, step, group, touched, ranked, masses):
            hints = tuple(Ranked(hint.group, hint.blocks, hint.need_by) for hint in ranked)
            return DecodeStep(sequence, step, group, touched, hints, masses)
        case _:
            raise AssertionError(f"no event in {type(line).__name__}")


def outcomes(totals: Totals) -> tuple[int, ...]:
    """A ledger as `End` has it."""
    return tuple(getattr(totals, name) for name in OUTCOMES)


def fetched(command: Fetch, predictors: tuple[str, ...]) -> Fetched:
    """The line of a fetch."""
    predictor = predictors.index(command.predictor)
    return Fetched(command.job, command.block, mask_word(command.parts_mask), command.need_by, predictor)
