"""Which blocks one engine's rank holds in HBM and in CPU memory: told by hash, asked for by tokens.

Theory of operation. Engines tell of blocks by the thousand a second, and routers ask for a few prompts; so what is told is
only noted, and looked at when a question leads there. Blocks that were told together, or each below the last, are a
*segment*: their hashes, and their tokens as they were told (a `TokenCodec` can read them, later). A dict for each tier leads from a
hash to its segment, and says by that who is held; another from a hash to the segments that begin *below* it::

    held[HBM]   h0 h1 h2 h3 h4         below[root]   segment A: h0 h1 h2 h3     <- grows at its end
                 A  A  A  A  B         below[h1]     segment B: h4

A question walks from the root: the next block's tokens find a segment (those that were never asked for have their first
block read now), the rest of it is compared in one piece, and so on below the last equal block. Who has time to spare reads
long segments beforehand (`read_ahead`). A hash only leads to
tokens, which are compared exactly; none stands for them.

What is not held is not kept, but for blocks amid a segment: they stand there as *gone*, until they are told again or the segment
goes with its last held block. So a block stands in one segment at most, and one way leads to it. What is below a block that
went waits for it to be told again, for no prompt can have it without. Therefore the order in which blocks are told does not
matter: a child may come before its parent. A block that was told without tokens is held, but no prompt leads to it until it is
told with them.

A segment's first block may have a *label*, bytes that it has besides its tokens (a cache salt, an image): a question must name it.

Left to others: what a hash is, whose blocks these are, what was lost. Single-threaded.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby, repeat
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

_FEW = 8  # blocks whose tokens are read quickly enough when a question leads to them
_PIECE_BYTES = 65_536  # compared at once
_SHIFT, _MASK, _ONE = (
    (0, 32),
    0xFFFF_FFFF,
    (1, 1 << 32),
)  # a segment counts the blocks of each tier in one integer


class HostTier(enum.IntEnum):
    """A tier of a GPU host."""

    HBM = 0
    CPU = 1


class Leading(NamedTuple):
    """Leading blocks of a prompt in HBM, and in HBM or CPU memory."""

    hbm: int
    both: int


class TokenCodec(Protocol):
    """Reads tokens as they were told. Raises nothing: what has no tokens has bytes that no prompt has."""

    def first(self, told: bytes, count: int) -> bytes:
        """Token bytes of the first of `count` blocks."""

    def blocks(self, told: bytes, count: int) -> bytes:
        """Token bytes of all of them."""


class PlainTokens:
    """A `TokenCodec` for token bytes that are there."""

    def __init__(self, width: int) -> None:
        self._width = width

    def first(self, told: bytes, count: int) -> bytes:
        return told[: self._width]

    def blocks(self, told: bytes, count: int) -> bytes:
        return told


_Told: TypeAlias = bytes | tuple[bytes, int]  # of one block, which is what there is most of, or of so many


def _counted(told: _Told) -> tuple[bytes, int]:
    return told if isinstance(told, tuple) else (told, 1)


class _Segment:
    __slots__ = ("above", "content", "grows", "hashes", "held", "key", "label", "told")

    def __init__(self, above: Hashable, hashes: list[Hashable], told: list[_Told], label: bytes) -> None:
        self.above = above
        self.hashes = hashes
        self.content = bytearray()
        self.told = told  # not read yet, comes after `content`
        self.held = 0  # blocks held: `_ONE[tier]` for each
        self.grows = False  # its last block is one of `HeldBlocks._tips`
        self.label = label
        self.key = b""  # its name in `_Branches.known`, once it has one

    def count(self, tier: HostTier) -> int:
        """How many of its blocks are held there."""
        return self.held >> _SHIFT[tier] & _MASK

    def first(self, codec: TokenCodec, width: int) -> bytes:
        """Its first block's tokens."""
        return bytes(self.content[:width]) if self.content else codec.first(*_counted(self.told[0]))

    def read(self, codec: TokenCodec) -> bytearray:
        """Its blocks' tokens; at least as many as it has hashes."""
        for told in self.told:
            self.content += codec.blocks(*_counted(told))
        self.told.clear()
        return self.content

    def read_next(self, codec: TokenCodec) -> int:
        """Read what was told next; how many blocks that were."""
        told, count = _counted(self.told.pop(0))
        self.content += codec.blocks(told, count)
        return count


class _Branches:
    """The segments below one block: by label and first block, those that were never asked for apart."""

    __slots__ = ("known", "new")

    def __init__(self) -> None:
        self.new: dict[_Segment, None] = {}
        self.known: dict[bytes, list[_Segment]] = {}

    def find(self, key: bytes, codec: TokenCodec, width: int) -> Sequence[_Segment]:
        for segment in self.new:
            segment.key = segment.label + segment.first(codec, width)
            self.known.setdefault(segment.key, []).append(segment)
        self.new.clear()
        return self.known.get(key, ())

    def remove(self, segment: _Segment) -> bool:
        """Whether it was the last."""
        if not segment.key:
            del self.new[segment]
        elif len(self.known[segment.key]) > 1:
            self.known[segment.key].remove(segment)
        else:
            del self.known[segment.key]
        return not (self.new or self.known)

    def all(self) -> Iterable[_Segment]:
        yield from self.new
        for segments in self.known.values():
            yield from segments


class HeldBlocks:
    """The blocks of one rank; `width` is the bytes of a block's tokens. Roots and hashes are told apart by their types."""

    def __init__(self, width: int, codec: TokenCodec | None = None) -> None:
        self.width = width
        self._codec = codec or PlainTokens(width)
        hbm: dict[Hashable, _Segment | None] = {}
        cpu: dict[Hashable, _Segment | None] = {}
        self._held = (hbm, cpu)
        self._sides = (
            (hbm, cpu, _ONE[0]),
            (cpu, hbm, _ONE[1]),
        )  # of a tier: its own, the other's, what counts one
        self._gone: dict[Hashable, _Segment] = {}  # stand amid a segment, and are held in no tier
        self._tips: dict[
            Hashable, _Segment
        ] = {}  # what is told below one of these becomes part of the segment it ends
        self._below: dict[Hashable, _Branches] = {}
        self._unread: dict[_Segment, None] = {}  # told much at once, and not read

    def __len__(self) -> int:
        """Blocks held, each tier counted."""
        return len(self._held[0]) + len(self._held[1])

    def holds(self, block_hash: Hashable, tier: HostTier) -> bool:
        """Is this block held in that tier?"""
        return block_hash in self._held[tier]

    def leading(self, root: Hashable, tokens: bytes, label: bytes = b"") -> Leading:
        """How much of a prompt below `root` is held, in whole blocks. `label` is its first block's."""
        above, at, hbm, both, hbm_goes_on = root, 0, 0, 0, True
        stop = len(tokens) - len(tokens) % self.width
        while at < stop and (found := self._segment_at(above, tokens, at, stop, label)):
            segment, count = found
            in_hbm = self._leading_in(segment, count, (HostTier.HBM,)) if hbm_goes_on else 0
            in_both = count if in_hbm == count else self._leading_in(segment, count, tuple(HostTier))
            hbm, both, hbm_goes_on = hbm + in_hbm, both + in_both, hbm_goes_on and in_hbm == count
            if in_both < count:
                break
            above, at, label = segment.hashes[count - 1], at + count * self.width, b""
        return Leading(hbm, both)

    # --- changing ---

    def store(
        self, above: Hashable, hashes: Sequence[Hashable], told: bytes, tier: HostTier, label: bytes = b""
    ) -> None:
        """A chain of blocks is held. `told` are their tokens for the codec, `label` is the first one's. Telling again is harmless."""
        mine, other, one = self._sides[tier]
        grown = None if label else self._tips.get(above)
        segment = grown or _Segment(above, list(hashes), [(told, len(hashes))], label)
        if (
            (other and not other.keys().isdisjoint(hashes))
            or (self._gone and not self._gone.keys().isdisjoint(hashes))
            or not self._hold_new(hashes, segment, mine)
        ):
            self._store_each(above, hashes, told, tier, label)
            return
        if grown:
            del self._tips[above]
            segment.hashes += hashes
            segment.told.append((told, len(hashes)))
        else:
            self._begin(segment)
        segment.held += len(hashes) * one
        self._let_grow(segment)
        if len(hashes) > _FEW:
            self._unread[segment] = None

    @staticmethod
    def _hold_new(
        hashes: Sequence[Hashable], segment: _Segment, mine: dict[Hashable, _Segment | None]
    ) -> bool:
        """Enter blocks that stand nowhere else; False, and nothing changed, when one is held already. One look-up a block."""
        before = len(mine)
        found = list(map(mine.setdefault, hashes, repeat(segment)))
        if len(mine) == before + len(hashes):
            return True
        stood = set(segment.hashes) if segment.held else ()
        for block_hash, there in zip(hashes, found, strict=True):
            if there is segment and block_hash not in stood:
                mine.pop(block_hash, None)
        return False

    def store_one(self, above: Hashable, block_hash: Hashable, told: bytes, tier: HostTier) -> None:
        """As `store`, of a single block without a label: what is told most."""
        mine, other, one = self._sides[tier]
        tips, before = self._tips, len(mine)
        segment = tips.get(above)
        if (
            segment is None
            or block_hash in other
            or block_hash in self._gone
            or block_hash in self._below
            or not mine.setdefault(block_hash, segment)
            or len(mine) == before
        ):
            self.store(above, [block_hash], told, tier)
            return
        del tips[above]
        tips[block_hash] = segment
        segment.hashes.append(block_hash)
        segment.told.append(told)
        segment.held += one

    def read_ahead(self, max_blocks: int) -> bool:
        """Read tokens that no question led to yet, about so many blocks, so that one that does need not; whether more are left."""
        while self._unread and max_blocks > 0:
            segment = next(iter(self._unread))
            if segment.told:
                max_blocks -= segment.read_next(self._codec)
            if not segment.told:
                del self._unread[segment]
        return bool(self._unread)

    def _let_grow(self, segment: _Segment) -> None:
        """What comes below its last block becomes part of it, unless something is there already."""
        last = segment.hashes[-1]
        segment.grows = last not in self._below
        if segment.grows:
            self._tips[last] = segment

    def _let_stay(self, segment: _Segment) -> None:
        """It does not grow any more: its end goes, but its tokens may still be there."""
        if segment.grows:
            segment.grows = False
            del self._tips[segment.hashes[-1]]

    def note(self, block_hash: Hashable, tier: HostTier) -> None:
        """A block is held; nothing is said of its tokens."""
        mine = self._held[tier]
        if block_hash not in mine:
            segment = mine[block_hash] = self._standing(block_hash)
            if segment is not None:
                segment.held += _ONE[tier]

    def remove(self, hashes: Sequence[Hashable], tier: HostTier) -> None:
        """Blocks are no longer held; those that were not are passed over."""
        found = list(map(self._held[tier].pop, hashes, repeat(None)))
        if len(found) > 1 and found[0] is found[1]:
            self._lose_runs(hashes, found, tier)
        else:
            self._lose(hashes, found, tier)

    def _lose_runs(self, hashes: Sequence[Hashable], found: list[_Segment | None], tier: HostTier) -> None:
        """Segments lost blocks: many at a time, mostly from their ends and the last one first."""
        _, other, one = self._sides[tier]
        at = 0
        for segment, run in groupby(found):
            size = len(list(run))
            went, at = hashes[at : at + size], at + size
            if segment is None:
                continue
            left = segment.held - size * one
            if not left:
                self._end(segment)
            elif not other and segment.hashes[-size:] == went[::-1]:
                segment.held = left
                self._let_stay(segment)
                del segment.hashes[-size:]
            else:
                self._lose(went, repeat(segment, size), tier)

    def _lose(self, hashes: Sequence[Hashable], found: Iterable[_Segment | None], tier: HostTier) -> None:
        """Each of these segments lost a block."""
        _, other, one = self._sides[tier]
        for block_hash, segment in zip(hashes, found, strict=True):
            if segment is None:
                continue
            segment.held = left = segment.held - one
            if not left:
                self._end(segment)
            elif other and block_hash in other:
                continue
            elif (standing := segment.hashes)[-1] == block_hash:
                if segment.grows:
                    self._let_stay(segment)
                standing.pop()
            else:
                self._gone[block_hash] = segment

    def clear(self, tier: HostTier) -> None:
        """Nothing is held in that tier any more."""
        self._held[tier].clear()
        segments = [segment for branches in self._below.values() for segment in branches.all()]
        self._below, self._gone = {}, {}
        other = self._held[1 - tier]
        for segment in segments:
            segment.held -= segment.count(tier) * _ONE[tier]
            segment.key = b""
            if not segment.held:
                self._unread.pop(segment, None)
                self._let_stay(segment)
            else:
                self._below.setdefault(segment.above, _Branches()).new[segment] = None
                self._gone.update(
                    (block_hash, segment) for block_hash in segment.hashes if block_hash not in other
                )

    # --- inside ---

    def _segment_at(
        self, above: Hashable, tokens: bytes, at: int, stop: int, label: bytes
    ) -> tuple[_Segment, int] | None:
        """The segment below `above` with the next block of a prompt, and how many of its blocks are the prompt's."""
        branches = self._below.get(above)
        if branches is None:
            return None
        found = branches.find(label + tokens[at : at + self.width], self._codec, self.width)
        counts = [(segment, self._common(segment, tokens, at, stop)) for segment in found]
        if len(counts) > 1:  # the same tokens by other hashes: what is held counts
            return max(counts, key=self._worth)
        return counts[0] if counts else None

    def _worth(self, found: tuple[_Segment, int]) -> tuple[int, int]:
        """How much of a prompt a segment leads to: held blocks, then any."""
        return self._leading_in(*found, tuple(HostTier)), found[1]

    def _common(self, segment: _Segment, tokens: bytes, at: int, stop: int) -> int:
        """How many blocks of a segment, whose first is there, are at `tokens[at:stop]`."""
        size, equal = min(len(segment.hashes) * self.width, stop - at), self.width
        if size == equal:
            return 1
        content = segment.read(self._codec)
        with memoryview(content) as mine:
            while equal < size:
                piece = mine[equal : min(equal + _PIECE_BYTES, size)]
                if not tokens.startswith(piece, at + equal):
                    theirs = np.frombuffer(tokens, np.uint8, len(piece), at + equal)
                    equal += int((np.frombuffer(piece, np.uint8) != theirs).argmax())
                    break
                equal += len(piece)
        return equal // self.width

    def _leading_in(self, segment: _Segment, count: int, tiers: tuple[HostTier, ...]) -> int:
        """How many of a segment's first `count` blocks are held in one of the tiers."""
        if any(segment.count(tier) == len(segment.hashes) for tier in tiers):
            return count
        dicts = [self._held[tier] for tier in tiers]
        for i in range(count):
            if not any(segment.hashes[i] in held for held in dicts):
                return i
        return count

    def _begin(self, segment: _Segment) -> None:
        """It begins below a block, which ends where it is, then."""
        branches = self._below.get(segment.above)
        if branches is None:
            branches = self._below[segment.above] = _Branches()
        branches.new[segment] = None
        if (ending := self._tips.pop(segment.above, None)) is not None:
            ending.grows = False

    def _end(self, segment: _Segment) -> None:
        self._unread.pop(segment, None)
        self._let_stay(segment)
        if self._gone:
            for block_hash in segment.hashes:
                self._gone.pop(block_hash, None)
        if self._below[segment.above].remove(segment):
            del self._below[segment.above]

    def _standing(self, block_hash: Hashable) -> _Segment | None:
        """The segment that a block, not held in one tier, stands in; it is to be held, so it is not gone any more."""
        for held in self._held:
            if (segment := held.get(block_hash)) is not None:
                return segment
        return self._gone.pop(block_hash, None)

    def _store_each(
        self, above: Hashable, hashes: Sequence[Hashable], told: bytes, tier: HostTier, label: bytes
    ) -> None:
        """Some of the blocks stand already: each is held with the tokens it has, or gets these."""
        mine, other = self._held[tier], self._held[1 - tier]
        tokens = b""
        fresh: _Segment | None = None  # of the blocks just before, that stood nowhere
        for i, block_hash in enumerate(hashes):
            segment = self._standing(block_hash)
            if segment is not None:
                fresh = None
            else:
                tokens = tokens or self._codec.blocks(told, len(hashes))
                if fresh is None:
                    fresh = _Segment(above, [], [], b"" if i else label)
                    self._begin(fresh)
                segment = fresh
                segment.hashes.append(block_hash)
                segment.content += tokens[i * self.width : (i + 1) * self.width]
                mine.pop(block_hash, None)  # it may be held without tokens
                if block_hash in other:
                    other[block_hash] = segment
                    segment.held += _ONE[1 - tier]
            if block_hash not in mine:
                mine[block_hash] = segment
                segment.held += _ONE[tier]
            above = block_hash
        if fresh is not None:
            self._let_grow(fresh)

    def check_integrity(self) -> None:
        """AssertionError, with what is wrong, unless segments and tiers agree. Slow: for tests."""
        segments = [segment for branches in self._below.values() for segment in branches.all()]
        for above, branches in self._below.items():
            assert branches.new or branches.known, "an empty branch was kept"
            assert all(segment.above == above for segment in branches.all()), "a segment is at a wrong place"
        for tier in HostTier:
            told = [segment for segment in self._held[tier].values() if segment is not None]
            for segment in segments:
                assert segment.count(tier) == told.count(segment), f"{tier}: a segment miscounts its blocks"
            assert all(segment in segments for segment in told), (
                f"{tier}: a block is in a segment that is gone"
            )
            assert self._gone.keys().isdisjoint(self._held[tier]), f"{tier}: a block is held and gone"
            for block_hash, known in self._held[tier].items():
                assert known is None or block_hash in known.hashes, f"{tier}: a block is not in its segment"
        assert all(segment.held for segment in segments), "a segment that nobody holds was kept"
        standing = {block_hash: segment for segment in segments for block_hash in segment.hashes}
        assert len(standing) == sum(len(segment.hashes) for segment in segments), (
            "a block stands in two places"
        )
        assert all(standing[block_hash] is segment for block_hash, segment in self._gone.items()), (
            "a gone block is where it does not stand"
        )
        held = self._held[0].keys() | self._held[1].keys()
        assert standing.keys() <= held | self._gone.keys(), "a block that stands is neither held nor gone"
        assert set(self._unread) <= set(segments), "a segment that is gone is to be read"
        assert all(
            segment.grows == (self._tips.get(segment.hashes[-1]) is segment) for segment in segments
        ), "a segment does not know whether it grows"
        for last, segment in self._tips.items():
            assert segment in segments, "a segment that is gone would grow"
            assert segment.hashes[-1] == last, "a segment would grow amid"
            assert last not in self._below, "a segment would grow where another begins"
            tokens = len(segment.content) // self.width + sum(_counted(told)[1] for told in segment.told)
            assert tokens == len(segment.hashes), "a segment would grow past tokens of blocks that went"
