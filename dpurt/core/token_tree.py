"""Longest known prefix of a token sequence: exact, at close to the speed of memory.

Theory of operation: a radix tree that does not cut an edge where another leaves it. A *strand* is a run of
blocks, each the parent of the next, with all their raw token bytes in one piece::

    strand A   [b0 b1 b2 b3 b4 b5 b6 ......... ]
                        |  |        |               B, C and D are strands too: each starts with the first
                        B  C        D               block that differs, below the last one that does not

A match compares the rest of the query with the rest of a strand, 64 KiB a memcmp (`bytes.startswith`),
however many others leave it on the way. Where they differ, the piece is narrowed down and numpy finds the
first difference; `_starts` maps (a first block's tokens, id of the block it hangs off) to the strand to go on
with. No hash stands for tokens, so no collision can make a match.

So the cost is a memcmp plus a few microseconds for each *change of strand*. `_lengthen` keeps those few: when
what was just added reaches clearly further below a block than the strand that goes on there, the two swap, so
the deepest way on from any block is (nearly) one strand, in whatever order branches came. A swap costs what
it moves, and the margin in `_reaches_further` makes it pay.

Positions count blocks from the root (`depth`). Block ids mean nothing here but for -1, the root. A strand's
tokens and ids are bytearrays: they grow and shrink at the end without a copy, and no view of them outlives a
call.

Left to others: records, keys, and who may go (`BlockTable`, `PrefixIndex`). Single-threaded.
"""

from __future__ import annotations

import numpy as np

from dpurt.core.key_map import I32

NOWHERE = -1
_PIECE_BYTES = 65_536  # of a strand at a memcmp: stays in the cache for a second look where it differs
_FINE_BYTES = 4_096  # small enough to let numpy look for the first difference
_ROOT = (-1).to_bytes(4, "little", signed=True)


class _Strand:
    __slots__ = ("ids", "number", "parent", "start", "tokens")

    def __init__(self, number: int, parent: int, start: int, tokens: bytearray, ids: bytearray) -> None:
        self.number = number
        self.parent = parent  # id of the block it hangs off, -1 for the root
        self.start = start  # depth of its first block
        self.tokens = tokens
        self.ids = ids  # int32 each

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // 4


class TokenTree:
    """Blocks by their tokens. `depth` arguments are those of the block named beside them."""

    def __init__(self, block_token_bytes: int) -> None:
        if block_token_bytes < 1:
            raise ValueError(f"block_token_bytes must be >= 1, got {block_token_bytes}")
        self.block_token_bytes = block_token_bytes
        self._starts: dict[bytes, _Strand] = {}
        self._strands: list[_Strand | None] = []
        self._unused: list[int] = []
        self._place: I32 = np.full(1024, NOWHERE, np.int32)  # number of the strand a block is in, by block id
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        return 0 <= block < len(self._place) and bool(self._place[block] != NOWHERE)

    @property
    def num_strands(self) -> int:
        """How many pieces the tokens lie in."""
        return len(self._strands) - len(self._unused)

    def among(self, ids: I32) -> I32:
        """Those of `ids` that the tree holds."""
        inside: I32 = ids[ids < len(self._place)]
        held: I32 = inside[self._place[inside] != NOWHERE]
        return held

    # --- finding: none of these mutates anything ---

    def match(self, tokens: bytes, after: int = -1, depth: int = -1) -> I32:
        """Ids of the longest known run of whole blocks of `tokens` below block `after` (the root by default).

        The array is the caller's own, and read-only.
        """
        width = self.block_token_bytes
        stop = len(tokens) - len(tokens) % width
        starts, at = self._starts, 0
        found: list[bytearray] = []
        strand: _Strand | None = None
        inside, last = 0, _ROOT
        if after >= 0:
            strand, inside = self._strand_of(after), depth + 1
            last = after.to_bytes(4, "little")
        while at < stop:
            if strand is not None and inside < strand.end:
                count = self._common(strand, inside, tokens, at, stop)
                if count:
                    first = inside - strand.start
                    found.append(strand.ids[4 * first : 4 * (first + count)])
                    last = bytes(found[-1][-4:])
                    at += count * width
            strand = starts.get(tokens[at : at + width] + last)
            if strand is None:
                break
            inside = strand.start
        return np.frombuffer(b"".join(found), np.int32)

    def tokens_of(self, block: int, depth: int) -> bytes:
        """The tokens of one block. KeyError when the tree does not hold it."""
        strand, width = self._strand_of(block), self.block_token_bytes
        at = (depth - strand.start) * width
        return bytes(strand.tokens[at : at + width])

    def chain(self, block: int, depth: int) -> I32:
        """Ids from a first block down to `block`, it included. KeyError when the tree does not hold it."""
        pieces: list[bytearray] = []
        while block >= 0:
            strand = self._strand_of(block)
            pieces.append(strand.ids[: 4 * (depth + 1 - strand.start)])
            block, depth = strand.parent, strand.start - 1
        return np.frombuffer(b"".join(reversed(pieces)), np.int32)

    def _strand_of(self, block: int) -> _Strand:
        strand = self._strands[int(self._place[block])] if block in self else None
        if strand is None:
            raise KeyError(f"no tokens are known for block {block}")
        return strand

    def _common(self, strand: _Strand, inside: int, tokens: bytes, at: int, stop: int) -> int:
        """How many blocks from depth `inside` of the strand on equal those at `tokens[at:stop]`."""
        width, step, equal = self.block_token_bytes, _PIECE_BYTES, 0
        skipped = (inside - strand.start) * width
        with memoryview(strand.tokens) as whole, whole[skipped : skipped + stop - at] as rest:
            while equal < len(rest):
                piece = rest[equal : equal + step]
                if tokens.startswith(piece, at + equal):
                    equal += len(piece)
                elif step > _FINE_BYTES:
                    step //= 4
                else:
                    equal += _first_difference(piece, tokens, at + equal)
                    break
        return equal // width

    # --- changing ---

    def extend(self, parent: int, depth: int, tokens: bytes, ids: I32) -> None:
        """Hang new blocks, one below the other, under block `parent` (-1: under the root, with depth -1).

        `tokens` are theirs, whole; the first of them must differ from every block that is already there.
        """
        self._make_room(int(ids.max()) + 1)
        self._num_blocks += len(ids)
        strand = self._strand_of(parent) if parent >= 0 else None
        if strand is not None and depth + 1 == strand.end:
            strand.tokens += tokens
            strand.ids += ids.tobytes()
            self._place[ids] = strand.number
        else:
            strand = self._new_strand(parent, depth + 1, bytearray(tokens), bytearray(ids.tobytes()))
        self._lengthen(strand)

    def remove(self, ids: I32) -> None:
        """Take blocks out. `ids` (unique, all in the tree) must hold every block below each of them."""
        numbers, counts = np.unique(self._place[ids], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            strand = self._strands[number]
            assert strand is not None, f"block in unused strand {number}"
            left = len(strand.ids) // 4 - count
            if left:  # what goes is always a strand's tail, for all below is in `ids`
                del strand.ids[4 * left :], strand.tokens[self.block_token_bytes * left :]
            else:
                self._unhook(strand)
        self._place[ids] = NOWHERE
        self._num_blocks -= len(ids)

    def _new_strand(self, parent: int, start: int, tokens: bytearray, ids: bytearray) -> _Strand:
        number = self._unused.pop() if self._unused else len(self._strands)
        strand = _Strand(number, parent, start, tokens, ids)
        if number == len(self._strands):
            self._strands.append(strand)
        else:
            self._strands[number] = strand
        self._starts[self._start_key(strand)] = strand
        self._settle(strand)
        return strand

    def _unhook(self, strand: _Strand) -> None:
        """Forget a whole strand. Its blocks' places are left to the caller."""
        del self._starts[self._start_key(strand)]
        self._release(strand)

    def _lengthen(self, strand: _Strand) -> None:
        """After `strand` grew at its end: on the way up, let the longer way on be the strand."""
        end = strand.end
        while strand.parent >= 0:
            above = self._strand_of(strand.parent)
            if _reaches_further(end - strand.start, above.end - strand.start):
                self._swap(above, strand)
            strand = above

    def _swap(self, above: _Strand, below: _Strand) -> None:
        """Let `above` go on with the blocks of `below`, which hangs off it; `below` gets what went on there."""
        width, cut = self.block_token_bytes, below.start - above.start
        tokens, ids = above.tokens[cut * width :], above.ids[4 * cut :]
        del self._starts[self._start_key(below)]
        above.tokens[cut * width :] = below.tokens
        above.ids[4 * cut :] = below.ids
        self._settle(above, cut)
        below.tokens, below.ids = tokens, ids
        if ids:
            self._starts[self._start_key(below)] = below
            self._settle(below)
        else:
            self._release(below)

    def _release(self, strand: _Strand) -> None:
        self._strands[strand.number] = None
        self._unused.append(strand.number)

    def _settle(self, strand: _Strand, first: int = 0) -> None:
        """Note that the strand's blocks, from its `first`, are in it."""
        self._place[np.frombuffer(strand.ids[4 * first :], np.int32)] = strand.number

    def _start_key(self, strand: _Strand) -> bytes:
        parent = strand.parent.to_bytes(4, "little", signed=True)
        return bytes(strand.tokens[: self.block_token_bytes]) + parent

    def _make_room(self, capacity: int) -> None:
        if capacity <= len(self._place):
            return
        bigger = np.full(max(capacity, 2 * len(self._place)), NOWHERE, np.int32)
        bigger[: len(self._place)] = self._place
        self._place = bigger

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and ids held, without what Python adds for each strand."""
        return self._num_blocks * (self.block_token_bytes + 4) + int(self._place.nbytes)

    def check_integrity(self) -> None:
        """AssertionError, with what is wrong, unless each block is in one strand and each strand is found."""
        strands = [s for s in self._strands if s is not None]
        assert len(strands) == len(self._starts) == self.num_strands, "a strand is lost or found twice"
        assert sum(len(s.ids) // 4 for s in strands) == self._num_blocks, "block count is wrong"
        assert np.count_nonzero(self._place != NOWHERE) == self._num_blocks, "a place is left over"
        for strand in strands:
            self._check_strand(strand)

    def _check_strand(self, strand: _Strand) -> None:
        ids = np.frombuffer(bytes(strand.ids), np.int32)
        assert len(ids) > 0, f"strand {strand.number} is empty"
        assert len(strand.tokens) == len(ids) * self.block_token_bytes, f"tokens of strand {strand.number}"
        assert (self._place[ids] == strand.number).all(), (
            f"a block of strand {strand.number} is placed elsewhere"
        )
        assert self._starts.get(self._start_key(strand)) is strand, f"strand {strand.number} cannot be found"
        if strand.parent >= 0:
            above = self._strand_of(strand.parent)
            at = 4 * (strand.start - above.start)
            assert 0 < at <= len(above.ids), f"strand {strand.number} leaves outside strand {above.number}"
            hangs_off = int.from_bytes(above.ids[at - 4 : at], "little")
            assert hangs_off == strand.parent, f"strand {strand.number} hangs off a wrong block"
        else:
            assert strand.start == 0, f"strand {strand.number} starts at the root with depth {strand.start}"


def _first_difference(piece: memoryview, tokens: bytes, at: int) -> int:
    """Offset of the first byte of `piece` that is not the one at `tokens[at:]`; there is one."""
    mine = np.frombuffer(piece, np.uint8)
    return int((mine != np.frombuffer(tokens, np.uint8, len(mine), at)).argmax())


def _reaches_further(new: int, old: int) -> bool:
    """Whether `new` blocks below a block are worth a swap for the `old` ones: a quarter more, so that rivals growing
    in turn do not swap at each step."""
    return 4 * new > 5 * old
