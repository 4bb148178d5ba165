"""KV-cache events as inference engines publish them over ZeroMQ: frames in, typed events out, of every known dialect.

Theory of operation. A live message is ``[topic, sequence, payload]``, one from a replay socket has an empty frame first, and
older engines leave the topic out there. The payload is a msgpack array ``[ts, events, rank]``. Newer engines (vLLM from 0.24,
SGLang from 0.5.20) write an event as a map with a `type`, older ones as an array with the tag first; a batch is decoded whole
as one or the other, and only where that fails one by one: an event of an unknown type is skipped, one that lacks what it
must have is dropped, the others stay. Hashes are integers or bytes. Token ids are decoded when somebody asks (`tokens_of`).
What a message claims is never believed: nothing is allocated by a stated length, and whatever is wrong becomes a `Malformed`,
never an exception.

Left to others: what events mean, and whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

BlockHash: TypeAlias = int | bytes
Token = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Category = Literal["frame-count", "seq-length", "payload-decode", "batch-shape"]
END_SEQ = b"\xff" * 8
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


class BlockStored(Struct, tag_field="type", tag="BlockStored", gc=False):
    """Blocks now held in `medium`, each the parent of the next, below `parent_block_hash`.

    `token_ids` are left as they came, for most are never looked at: see `tokens_of`. Field order is that of the positional
    dialect.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Raw
    block_size: int | None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[Token]] | None = None
    cache_salt: str | None = None


class BlockRemoved(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks no longer held in `medium`."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, tag_field="type", tag="AllBlocksCleared"):
    """The engine's cache is empty."""


class _StoredRow(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedRow(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedRow(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class KvBatch(Struct):
    """One message. `skipped`: events of unknown type; `dropped`: known ones that were malformed."""

    seq: int
    ts: float
    dp_rank: int | None
    events: Sequence[KvEvent]
    topic: str = ""
    skipped: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class EndOfReplay:
    """The replay socket has sent all it has."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that cannot be read; its sequence number where that could."""

    category: Category
    seq: int | None = None


class _Maps(Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int | None


class _Rows(Struct, array_like=True):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    dp_rank: int | None


class _Any(Struct, array_like=True):
    ts: float
    events: list[Raw]
    dp_rank: int | None


class _MapTag(Struct):
    type: str


class _RowTag(Struct, array_like=True):
    type: str


_as_maps = msgspec.msgpack.Decoder(_Maps)
_as_rows = msgspec.msgpack.Decoder(_Rows)
_as_any = msgspec.msgpack.Decoder(_Any)
_event_forms: tuple[msgspec.msgpack.Decoder[KvEvent], ...] = (
    msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared),
    msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow),
)
_tags: tuple[msgspec.msgpack.Decoder[_MapTag | _RowTag], ...] = (
    msgspec.msgpack.Decoder(_MapTag),
    msgspec.msgpack.Decoder(_RowTag),
)


_tokens = msgspec.msgpack.Decoder(list[Token] | None)
_pairs = msgspec.msgpack.Decoder(list[tuple[Token, Token]])


def tokens_of(raw: Raw | bytes) -> list[int] | list[tuple[int, int]]:
    """Token ids of an event: pairs where the engine decodes speculatively with EAGLE, none where only hashes are told.

    ValueError for anything else.
    """
    try:
        return _tokens.decode(raw) or []
    except _FAULTS:
        pass
    try:
        return _pairs.decode(raw)
    except _FAULTS as error:
        raise ValueError(f"token_ids: {error}") from error


def decode_live(frames: Sequence[bytes]) -> KvBatch | Malformed:
    """A message of the PUB socket."""
    if len(frames) != 3:
        return Malformed("frame-count")
    return _decode(frames[0], frames[1], frames[2])


def decode_replay(frames: Sequence[bytes]) -> KvBatch | EndOfReplay | Malformed:
    """A message that a DEALER gets from the replay socket."""
    if len(frames) not in (3, 4) or frames[0]:
        return Malformed("frame-count")
    topic = frames[1] if len(frames) == 4 else b""
    if frames[-2] == END_SEQ:
        return EndOfReplay()
    return _decode(topic, frames[-2], frames[-1])


def _decode(topic: bytes, number: bytes, payload: bytes) -> KvBatch | Malformed:
    if len(number) != 8:
        return Malformed("seq-length")
    seq = int.from_bytes(number, "big")
    try:
        try:
            whole: _Maps | _Rows = _as_maps.decode(payload)
        except msgspec.ValidationError:
            whole = _as_rows.decode(payload)
    except _FAULTS:
        return _one_by_one(topic, seq, payload)
    return KvBatch(seq, whole.ts, whole.dp_rank, whole.events, topic.decode(errors="replace"))


def _one_by_one(topic: bytes, seq: int, payload: bytes) -> KvBatch | Malformed:
    try:
        raw = _as_any.decode(payload)
    except msgspec.ValidationError:
        return Malformed("batch-shape", seq)
    except _FAULTS:
        return Malformed("payload-decode", seq)
    events: list[KvEvent] = []
    batch = KvBatch(seq, raw.ts, raw.dp_rank, events, topic.decode(errors="replace"))
    for one in raw.events:
        event = _event(one)
        if event is not None:
            events.append(event)
        elif _is_known(one):
            batch.dropped += 1
        else:
            batch.skipped += 1
    return batch


def _event(raw: Raw) -> KvEvent | None:
    for form in _event_forms:
        try:
            return form.decode(raw)
        except _FAULTS:
            continue
    return None


def _is_known(raw: Raw) -> bool:
    """Is it of a known type, or so malformed that it has none?"""
    for form in _tags:
        try:
            return form.decode(raw).type in KNOWN
        except _FAULTS:
            continue
    return True
