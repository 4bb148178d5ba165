"""What one publisher (an engine's rank) says it holds, entered into the shared `HostTiers`.

Theory of operation. Events name blocks by the engine's own hash. It is an alias, good for this publisher only: it leads to a
place in the tree of tokens, where the block was told with its tokens, and never to bytes. A hash whose place is not known is
in *limbo* with the tiers it was told for: it was told without tokens, or its parent is not known yet (a child may come
first). When its place becomes known, its tiers are entered there, and whatever waited for it follows.

So after any sequence of events each hash is in exactly the tiers the events add up to, placed or in limbo; an unplaced block
is not found by a prompt, which is the safe side. Limbo and what waits are bounded; what falls out is counted and forgotten.

What cannot be said by plain tokens (a cache salt, an image, tokens wider than the tree's, pairs) becomes a *label* of the
block (see `HostTiers`), so that no plain prompt matches it, while its children still find their parent.

Left to others: order, loss and repeats of messages (`Publisher`). Single-threaded, pure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from dpurt.core.host_tiers import HostTier, HostTiers
from dpurt.engines.kv_events import (
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
    PairedBlockStored,
)

MAX_LIMBO = 1 << 17  # blocks told for a tier whose place is not known
_SWEEP_AT = 1 << 14
_WHOLE_PREFIX = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # kinds of cache groups
_Stored = BlockStored | PairedBlockStored


class Dialect(NamedTuple):
    """What an engine means. `media`: its words for tiers (None: told of, not of interest)."""

    media: Mapping[str | None, HostTier | None]
    cleared: tuple[HostTier, ...]  # by its AllBlocksCleared
    counted: frozenset[HostTier]  # where a hash told twice must be removed twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Whose events these are. `roots`: the root of the tree for each LoRA name (None: the base model)."""

    instance: int
    dialect: Dialect
    roots: Mapping[str | None, int]
    block_tokens: int
    token_bytes: int = 4


class _Waiting(NamedTuple):
    """Blocks that wait for their parent's place."""

    hashes: Sequence[BlockHash]
    tokens: bytes
    labels: Sequence[bytes] | None


@dataclass(slots=True)
class ResidencyStats:
    """Counters. `passed_over`: blocks that are not ours to know, by reason."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    placed_late: int = 0
    forgotten: int = 0  # out of limbo, for want of room
    passed_over: dict[str, int] = field(default_factory=dict)

    def pass_over(self, reason: str, blocks: int) -> None:
        """Count blocks that are not entered."""
        self.passed_over[reason] = self.passed_over.get(reason, 0) + blocks


class Residency:
    """The aliases of one publisher."""

    def __init__(self, engine: Engine, tiers: HostTiers) -> None:
        self.engine = engine
        self.stats = ResidencyStats()
        self._tiers = tiers
        self._width = engine.block_tokens * engine.token_bytes
        self._code = "i" if engine.token_bytes == 4 else "q"
        self._alias: dict[BlockHash, int] = {}  # hash -> handle
        self._limbo: dict[BlockHash, set[HostTier]] = {}
        self._waiting: dict[BlockHash, dict[BlockHash, _Waiting]] = {}  # by parent, then by last block
        self._num_waiting = 0
        self._repeats: dict[tuple[BlockHash, HostTier], int] = {}
        self._windowed: set[int] = set()  # cache groups that do not keep whole prefixes
        self._sweep_at = _SWEEP_AT

    @property
    def in_limbo(self) -> int:
        """Hashes whose place is not known."""
        return len(self._limbo)

    def holds(self, block_hash: BlockHash, tier: HostTier) -> bool:
        """Is the block placed, and held in that tier?"""
        block = self._place(block_hash)
        return block >= 0 and self._tiers.is_held(block, self.engine.instance, tier)

    # --- events ---

    def apply(self, event: KvEvent) -> None:
        """Enter one event."""
        if isinstance(event, BlockStored | PairedBlockStored):
            self._stored(event)
        elif isinstance(event, BlockRemoved):
            self._removed(event)
        else:
            self.stats.cleared += 1
            for tier in self.engine.dialect.cleared:
                self._clear(tier)

    def reset(self) -> None:
        """Nothing is known of this publisher any more."""
        for tier in HostTier:
            self._tiers.clear(self.engine.instance, tier)
        self._alias.clear()
        self._limbo.clear()
        self._waiting.clear()
        self._num_waiting = 0
        self._repeats.clear()
        self._windowed.clear()

    def _stored(self, event: _Stored) -> None:
        hashes = event.block_hashes
        tier = self._tier(event.medium, len(hashes))
        if tier is None or self._is_windowed(event, len(hashes)):
            return
        self.stats.stored += len(hashes)
        if self._is_simple_growth(event, tier):
            return
        if not event.token_ids:
            for block_hash in hashes:
                self._note(block_hash, tier)
            return
        if event.block_size != self.engine.block_tokens:
            self.stats.pass_over("block_size", len(hashes))
        elif not hashes or len(event.token_ids) != len(hashes) * self.engine.block_tokens:
            self.stats.pass_over("token_count", len(hashes))
        elif event.lora_name not in self.engine.roots:
            self.stats.pass_over("lora", len(hashes))
        else:
            self._place_or_wait(event, tier)

    def _is_simple_growth(self, event: _Stored, tier: HostTier) -> bool:
        """Plain blocks below one that nothing is below: enter them quickly. Most of all events are these."""
        parent = self._alias.get(event.parent_block_hash)  # type: ignore[arg-type]
        extras = event.extra_keys
        if (
            parent is None
            or (extras is not None and any(extras))
            or event.block_size != self.engine.block_tokens
        ):
            return False
        if self._limbo or self._waiting or tier in self.engine.dialect.counted:
            return False
        ids: Any = event.token_ids
        try:
            tokens = array(self._code, ids).tobytes()
        except (OverflowError, TypeError):
            return False
        hashes = event.block_hashes
        handles = self._tiers.append(parent, tokens, len(hashes), self.engine.instance, tier)
        if handles is None:
            return False
        self._alias.update(zip(hashes, handles, strict=True))
        if len(self._alias) > self._sweep_at:
            self._sweep()
        return True

    def _place_or_wait(self, event: _Stored, tier: HostTier) -> None:
        parent_hash, hashes = event.parent_block_hash, event.block_hashes
        tokens, labels = self._content(event)
        if parent_hash is None:
            parent = self.engine.roots[event.lora_name]
        else:
            parent = self._place(parent_hash)
            if parent < 0:
                self._wait(parent_hash, _Waiting(hashes, tokens, labels), tier)
                return
        self._enter(parent, _Waiting(hashes, tokens, labels), tier)

    def _enter(self, parent: int, chain: _Waiting, tier: HostTier) -> None:
        """Give blocks their place below `parent`, held in `tier` and whatever was in limbo; then those that waited for them."""
        ids = self._extend(parent, chain)
        if tier in self.engine.dialect.counted:
            self._count_repeats(chain.hashes, ids, tier)
        self._tiers.hold(ids, self.engine.instance, tier)
        self._name(chain.hashes, ids)
        if self._limbo or self._waiting:
            self._settle(chain.hashes, ids)
        if len(self._alias) > self._sweep_at:
            self._sweep()

    def _name(self, hashes: Sequence[BlockHash], ids: array[int]) -> None:
        self._alias.update(zip(hashes, self._tiers.handles(ids), strict=True))

    def _settle(self, hashes: Sequence[BlockHash], ids: array[int]) -> None:
        """These blocks have a place now: they leave limbo, and so does, level by level, what waited for them."""
        todo = self._leave_limbo(hashes, ids)
        while todo:
            parent, chain = todo.pop()
            self.stats.placed_late += len(chain.hashes)
            below = self._extend(parent, chain)
            self._name(chain.hashes, below)
            todo += self._leave_limbo(chain.hashes, below)
            self._tiers.drop_if_unheld(below[-1])
            self._tiers.unpin(parent)

    def _leave_limbo(self, hashes: Sequence[BlockHash], ids: array[int]) -> list[tuple[int, _Waiting]]:
        """Enter these blocks' tiers; (parent, blocks) of what waited for them, the parents pinned."""
        waited: list[tuple[int, _Waiting]] = []
        for block_hash, block in zip(hashes, ids, strict=True):
            for tier in self._limbo.pop(block_hash, ()):
                self._tiers.hold(array("i", (block,)), self.engine.instance, tier)
            for chain in self._waiting.pop(block_hash, {}).values():
                self._num_waiting -= 1
                self._tiers.pin(block)
                waited.append((block, chain))
        return waited

    def _extend(self, parent: int, chain: _Waiting) -> array[int]:
        if chain.labels is None:
            return self._tiers.extend(parent, chain.tokens, self._width)
        ids = array("i")
        for i, label in enumerate(chain.labels):
            tokens = chain.tokens[i * self._width : (i + 1) * self._width]
            ids.extend(self._tiers.extend(ids[-1] if ids else parent, tokens, self._width, label))
        return ids

    def _note(self, block_hash: BlockHash, tier: HostTier) -> None:
        """A hash is also in that tier, wherever its place is."""
        block = self._place(block_hash)
        if block < 0:
            self._into_limbo(block_hash, tier)
            return
        ids = array("i", (block,))
        if tier in self.engine.dialect.counted:
            self._count_repeats((block_hash,), ids, tier)
        self._tiers.hold(ids, self.engine.instance, tier)

    def _wait(self, parent_hash: BlockHash, chain: _Waiting, tier: HostTier) -> None:
        for block_hash in chain.hashes:
            self._note(block_hash, tier)
        siblings = self._waiting.setdefault(parent_hash, {})
        self._num_waiting += chain.hashes[-1] not in siblings
        siblings[chain.hashes[-1]] = chain
        if self._num_waiting > MAX_LIMBO:
            oldest = self._waiting.pop(next(iter(self._waiting)))
            self._num_waiting -= len(oldest)
            self.stats.forgotten += len(oldest)

    def _into_limbo(self, block_hash: BlockHash, tier: HostTier) -> None:
        tiers = self._limbo.setdefault(block_hash, set())
        if tier in tiers and tier in self.engine.dialect.counted:
            self._repeat(block_hash, tier)
        tiers.add(tier)
        if len(self._limbo) > MAX_LIMBO:
            del self._limbo[next(iter(self._limbo))]
            self.stats.forgotten += 1

    def _removed(self, event: BlockRemoved) -> None:
        hashes = event.block_hashes
        tier = self._tier(event.medium, len(hashes))
        if tier is None:
            return
        if event.group_idx in self._windowed:
            self.stats.pass_over("group", len(hashes))
            return
        self.stats.removed += len(hashes)
        for block_hash in hashes:
            if self._repeats and self._forget_repeat(block_hash, tier):
                continue
            block = self._place(block_hash)
            if block < 0:
                if block_hash in self._limbo:
                    self._leave_tier(block_hash, tier)
            elif self._tiers.release(block, self.engine.instance, tier):
                del self._alias[block_hash]

    def _leave_tier(self, block_hash: BlockHash, tier: HostTier) -> None:
        tiers = self._limbo[block_hash]
        tiers.discard(tier)
        if not tiers:
            del self._limbo[block_hash]

    def _clear(self, tier: HostTier) -> None:
        self._tiers.clear(self.engine.instance, tier)
        for block_hash in [block_hash for block_hash, tiers in self._limbo.items() if tier in tiers]:
            self._leave_tier(block_hash, tier)
        for key in [key for key in self._repeats if key[1] is tier]:
            del self._repeats[key]

    # --- a hash told twice ---

    def _count_repeats(self, hashes: Sequence[BlockHash], ids: array[int], tier: HostTier) -> None:
        for block_hash, block in zip(hashes, ids, strict=True):
            if self._tiers.is_held(block, self.engine.instance, tier):
                self._repeat(block_hash, tier)

    def _repeat(self, block_hash: BlockHash, tier: HostTier) -> None:
        self._repeats[block_hash, tier] = self._repeats.get((block_hash, tier), 0) + 1

    def _forget_repeat(self, block_hash: BlockHash, tier: HostTier) -> bool:
        left = self._repeats.get((block_hash, tier), 0)
        if left > 1:
            self._repeats[block_hash, tier] = left - 1
        elif left:
            del self._repeats[block_hash, tier]
        return left > 0

    # --- what events mean ---

    def _place(self, block_hash: BlockHash) -> int:
        handle = self._alias.get(block_hash)
        return -1 if handle is None else self._tiers.resolve(handle)

    def _tier(self, medium: str | None, blocks: int) -> HostTier | None:
        tier = self.engine.dialect.media.get(medium)
        if tier is None:
            self.stats.pass_over("medium", blocks)
        return tier

    def _is_windowed(self, event: _Stored, blocks: int) -> bool:
        if event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in _WHOLE_PREFIX:
            return False
        if event.group_idx is not None:
            self._windowed.add(event.group_idx)
        self.stats.pass_over("group", blocks)
        return True

    def _content(self, event: _Stored) -> tuple[bytes, Sequence[bytes] | None]:
        """The blocks' token bytes, and their labels if one has any."""
        extras = event.extra_keys if event.extra_keys is not None and any(event.extra_keys) else None
        salt = event.cache_salt if event.parent_block_hash is None else None
        ids: Any = event.token_ids
        try:
            tokens = array(self._code, ids).tobytes()
        except (OverflowError, TypeError):  # wide tokens, or pairs
            return self._odd_content(event, extras, salt)
        if extras is None and not salt:
            return tokens, None
        return tokens, [
            label_of(self._extras_at(event, extras, salt, i)) for i in range(len(event.block_hashes))
        ]

    def _odd_content(
        self, event: _Stored, extras: list[list[object] | None] | None, salt: str | None
    ) -> tuple[bytes, Sequence[bytes]]:
        """Blocks whose tokens the tree cannot hold: no tokens, and a label made from them."""
        assert event.token_ids is not None
        step = self.engine.block_tokens
        labels = [
            label_of([event.token_ids[i * step : (i + 1) * step], *self._extras_at(event, extras, salt, i)])
            for i in range(len(event.block_hashes))
        ]
        return bytes(self._width * len(labels)), labels

    @staticmethod
    def _extras_at(
        event: _Stored, extras: list[list[object] | None] | None, salt: str | None, at: int
    ) -> list[object]:
        """What a block has besides its tokens and the LoRA, which has a root of its own."""
        own = (extras[at] if extras is not None and at < len(extras) else None) or []
        found = [extra for extra in own if extra != event.lora_name]
        return [salt, *found] if salt and at == 0 and salt not in found else found

    def _sweep(self) -> None:
        """Let go of the aliases of blocks that are no more."""
        resolve = self._tiers.resolve
        self._alias = {name: handle for name, handle in self._alias.items() if resolve(handle) >= 0}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._alias))


def label_of(extras: Sequence[object]) -> bytes:
    """The label of a block that has these besides its tokens; none without."""
    if not extras:
        return b""
    return hashlib.blake2b(msgspec.msgpack.encode(extras), digest_size=16, person=b"dpurt.label").digest()
