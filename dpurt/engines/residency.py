"""What one publisher (an engine's rank) says it holds, entered into its `HeldBlocks`.

Events name blocks by the engine's own hash. It is good for this publisher only, and leads to tokens, never to bytes. Tokens
are taken as they came, and decoded when a question leads to them (`EventTokens`): most never are.

What cannot be said by plain tokens (a cache salt, an image) becomes a *label* of its block, so that no plain prompt matches it,
while its children still find it. Tokens wider than the space's, pairs of them, or no tokens at all where there should be some,
become bytes that no prompt has. A LoRA has a root of its own.

Left to others: order, loss and repeats of messages (`Publisher`). Single-threaded, pure.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from dpurt.core.held_blocks import HeldBlocks, HostTier
from dpurt.engines.kv_events import BlockHash, BlockRemoved, BlockStored, KvEvent, tokens_of

MAX_BLOCKS = 1 << 22  # of one publisher: no engine has so many
# A token of a message at most: an integer, or a pair, and its share of the array's head.
TOKEN_BYTES = 32
_WHOLE_PREFIX = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # kinds of cache groups
_PLAIN_KINDS = _WHOLE_PREFIX | {None}
_NO_EXTRAS = [None]


class Dialect(NamedTuple):
    """What an engine means. `media`: its words for tiers (None: told of, not of interest)."""

    media: Mapping[str | None, HostTier | None]
    cleared: tuple[HostTier, ...]  # by its AllBlocksCleared
    counted: frozenset[HostTier]  # where a hash told twice must be removed twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Whose events these are. `loras`: names of adapters whose blocks are of interest."""

    dialect: Dialect
    block_tokens: int
    token_bytes: int = 4
    loras: frozenset[str] = frozenset()


@dataclass(slots=True)
class ResidencyStats:
    """Counters. `passed_over`: blocks that are not ours to know, by reason; `odd`: blocks no plain prompt can have."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    odd: int = 0
    passed_over: dict[str, int] = field(default_factory=dict)

    def pass_over(self, reason: str, blocks: int) -> None:
        """Count blocks that are not entered."""
        self.passed_over[reason] = self.passed_over.get(reason, 0) + blocks


class EventTokens:
    """A `TokenCodec` for tokens as an event brings them."""

    def __init__(self, engine: Engine, stats: ResidencyStats) -> None:
        self._block_tokens = engine.block_tokens
        self._width = engine.block_tokens * engine.token_bytes
        self._code = "i" if engine.token_bytes == 4 else "q"
        self._stats = stats

    def first(self, told: bytes, count: int) -> bytes:
        """Reads no more than the first block of a plain array."""
        return self.blocks(first_of(told, self._block_tokens) if count > 1 else told, 1)

    def blocks(self, told: bytes, count: int) -> bytes:
        try:
            tokens: Any = tokens_of(told)
            packed = struct.pack(f"{len(tokens)}{self._code}", *tokens)  # a third of what `array` takes
        except (ValueError, struct.error):
            packed = b""
        if len(packed) == count * self._width:
            return packed
        self._stats.odd += count
        return b"\xff" * (count * self._width)


class Residency:
    """What one publisher holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = ResidencyStats()
        self._codec = EventTokens(engine, self.stats)
        dialect = engine.dialect
        self._plain_media = {
            word: tier for word, tier in dialect.media.items() if tier not in dialect.counted
        }
        self._new_held()
        self._repeats: dict[tuple[BlockHash, HostTier], int] = {}
        self._windowed: set[int] = set()  # cache groups that do not keep whole prefixes

    def _new_held(self) -> None:
        self.held = HeldBlocks(self.engine.block_tokens * self.engine.token_bytes, self._codec)

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Enter a message's events, in order."""
        runs: Iterable[tuple[type, Iterator[Any]]] = groupby(events, type)
        for kind, run in runs:
            if issubclass(kind, BlockStored):
                self._store_run(run)
            elif issubclass(kind, BlockRemoved):
                self._remove_run(run)
            else:
                for _ in run:
                    self._cleared()

    def reset(self) -> None:
        """Nothing is known of this publisher any more."""
        self._new_held()
        self._repeats.clear()
        self._windowed.clear()

    def _store_run(self, run: Iterable[BlockStored]) -> None:
        """Most events of a busy engine are of one block that is said by its tokens: these take the short way."""
        media, block_tokens, short, store_one = (
            self._plain_media, self.engine.block_tokens, 0, self.held.store_one,
        )  # fmt: skip
        longest = block_tokens * TOKEN_BYTES
        if len(self.held) > MAX_BLOCKS:
            media = {}
        for event in run:
            hashes = event.block_hashes
            if (
                len(hashes) == 1
                and (tier := media.get(event.medium)) is not None
                and event.lora_name is event.cache_salt is None
                and event.kv_cache_spec_kind in _PLAIN_KINDS
                and ((extras := event.extra_keys) is None or extras == _NO_EXTRAS)
                and event.block_size == block_tokens
                and 1 < len(told := bytes(event.token_ids)) <= longest
            ):
                store_one(event.parent_block_hash, hashes[0], told, tier)
                short += 1
            else:
                self._stored(event)
        self.stats.stored += short

    def _stored(self, event: BlockStored) -> None:
        hashes, engine = event.block_hashes, self.engine
        tier = engine.dialect.media.get(event.medium)
        kind, lora = event.kv_cache_spec_kind, event.lora_name
        if tier is None:
            self.stats.pass_over("medium", len(hashes))
        elif kind is not None and kind not in _WHOLE_PREFIX:
            self.stats.pass_over("group", len(hashes))
            if event.group_idx is not None:
                self._windowed.add(event.group_idx)
        elif lora is not None and lora not in engine.loras:
            self.stats.pass_over("lora", len(hashes))
        elif len(self.held) > MAX_BLOCKS:
            self.stats.pass_over("too_many", len(hashes))
        elif hashes:
            self.stats.stored += len(hashes)
            if tier in engine.dialect.counted:
                self._count_repeats(hashes, tier)
            self._enter(event, hashes, tier)

    def _enter(self, event: BlockStored, hashes: list[BlockHash], tier: HostTier) -> None:
        told, extras = bytes(event.token_ids), event.extra_keys
        if len(told) == 1:  # nil, or an empty array
            for block_hash in hashes:
                self.held.note(block_hash, tier)
        elif event.block_size != self.engine.block_tokens:
            self.stats.pass_over("block_size", len(hashes))
        elif len(told) > len(hashes) * event.block_size * TOKEN_BYTES:
            self.stats.pass_over("too_long", len(hashes))
        else:
            above = event.lora_name if event.parent_block_hash is None else event.parent_block_hash
            if event.cache_salt or (extras is not None and any(extras)):
                self._store_labelled(event, above, told, tier)
            else:
                self.held.store(above, hashes, told, tier)

    def _store_labelled(
        self, event: BlockStored, above: BlockHash | str | None, told: bytes, tier: HostTier
    ) -> None:
        """Blocks some of which have more than tokens: one by one."""
        hashes, size = event.block_hashes, self.engine.block_tokens
        try:
            tokens = tokens_of(told)
        except ValueError:
            tokens = []  # so odd that no prompt has them
        for i, block_hash in enumerate(hashes):
            one = msgspec.msgpack.encode(tokens[i * size : (i + 1) * size])
            self.held.store(above, [block_hash], one, tier, label_of(_extras_at(event, i)))
            above = block_hash

    def _remove_run(self, run: Iterable[BlockRemoved]) -> None:
        """Evictions come one by one, many in a row: they are entered together."""
        by_group = bool(self._windowed)  # else it does not matter of which group they are
        hashes: list[BlockHash] = []
        medium = group = None
        for event in run:
            if event.medium != medium or (by_group and event.group_idx != group):
                self._remove(hashes, medium, group)
                hashes, medium, group = [], event.medium, event.group_idx if by_group else None
            hashes += event.block_hashes
        self._remove(hashes, medium, group)

    def _remove(self, hashes: list[BlockHash], medium: str | None, group: int | None) -> None:
        if not hashes:
            return
        tier = self.engine.dialect.media.get(medium)
        if tier is None:
            self.stats.pass_over("medium", len(hashes))
        elif group in self._windowed:
            self.stats.pass_over("group", len(hashes))
        else:
            self.stats.removed += len(hashes)
            if self._repeats:
                hashes = [block_hash for block_hash in hashes if not self._forget_repeat(block_hash, tier)]
            self.held.remove(hashes, tier)

    def _cleared(self) -> None:
        self.stats.cleared += 1
        for tier in self.engine.dialect.cleared:
            self._clear(tier)

    def _clear(self, tier: HostTier) -> None:
        self.held.clear(tier)
        for key in [key for key in self._repeats if key[1] is tier]:
            del self._repeats[key]

    # --- a hash told twice ---

    def _count_repeats(self, hashes: Sequence[BlockHash], tier: HostTier) -> None:
        for block_hash in hashes:
            if self.held.holds(block_hash, tier):
                self._repeats[block_hash, tier] = self._repeats.get((block_hash, tier), 0) + 1

    def _forget_repeat(self, block_hash: BlockHash, tier: HostTier) -> bool:
        left = self._repeats.get((block_hash, tier), 0)
        if left > 1:
            self._repeats[block_hash, tier] = left - 1
        elif left:
            del self._repeats[block_hash, tier]
        return left > 0


def _extras_at(event: BlockStored, at: int) -> list[object]:
    """What a block has besides its tokens and the LoRA, which has a root of its own."""
    extras = event.extra_keys
    own = (extras[at] if extras is not None and at < len(extras) else None) or []
    found = [extra for extra in own if extra != event.lora_name]
    salt = event.cache_salt if at == 0 and event.parent_block_hash is None else None
    return [salt, *found] if salt and salt not in found else found


_TOO_DEEP = itertools.count()


def label_of(extras: Sequence[object]) -> bytes:
    """The label of a block that has these besides its tokens; none without."""
    if not extras:
        return b""
    try:
        told = msgspec.msgpack.encode(extras)
    except RecursionError:  # nested too deeply to be told apart: like no other
        told = b"too deep %d" % next(_TOO_DEEP)
    return hashlib.blake2b(told, digest_size=16, person=b"dpurt.label").digest()


# bytes of a msgpack integer by its first byte; what is none is left to the decoder
_SIZES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, **dict.fromkeys(range(0x80), 1)}


def first_of(raw: bytes, count: int) -> bytes:
    """An array of the first `count` of a msgpack array of non-negative integers; the array as it is where it is none."""
    start = at = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    for _ in range(count):
        size = _SIZES.get(raw[at]) if at < len(raw) else None
        if size is None:
            return raw
        at += size
    return b"\xdd" + count.to_bytes(4, "big") + raw[start:at]
