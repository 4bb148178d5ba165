"""Which blocks the engines of GPU hosts hold in HBM and in CPU memory, found by tokens: one structure for all of them.

Theory of operation. Engines tell of single blocks, thousands of times a second, so an update must cost about a microsecond,
and a match must not depend on how many blocks a prompt has. Blocks lie in *runs*, each the parent of the next, with their
token bytes in one piece, as in `TokenTree`, but a run is never reordered: it grows at its end, or a new run hangs off one of
its blocks. A match compares whole runs (memcmp) and changes runs through one dict, by (the next block's bytes, the block it
hangs off). No hash stands for tokens.

    run 0   [b0 b1 b2 b3 b4]        ids   3  4  5  6  9
                   |                hbm   a  a  a  a  .      a bit for each *instance* (an engine's rank)
    run 1          [c3 c4]          cpu   .  .  b  b  .

Columns are preallocated arrays, read and written one by one from Python, and in bulk through numpy views of the same
memory. A block's id is good while anybody holds it or a block below it; `version` tells an id's next life, so that who
kept (version, id) notices. A block nobody holds stays while there is one below it: it was evicted, its child was not.

Chains that start alike but are not alike (other LoRA: other space; a cache salt, an image in the prompt) are told apart by
the *root* they start from, and by a *label*, bytes that a block has besides its tokens. A labelled block starts a run.

Left to others: whose events these are, and what is lost of them (`dpurt.engines`); the node's own tiers (`PrefixIndex`):
they are exact and closed, these are hearsay and neither. Single-threaded.
"""

from __future__ import annotations

import enum
from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
MAX_INSTANCES = 64
_FIRST_CAPACITY = 1024
_FEW = 24  # blocks that are sooner marked one by one than through numpy
_PIECE_BYTES = 65_536  # of a run at a memcmp
_VERSION_SHIFT = 32
_ID_MASK = (1 << _VERSION_SHIFT) - 1


class HostTier(enum.IntEnum):
    """A tier of a GPU host."""

    HBM = 0
    CPU = 1


class Held(NamedTuple):
    """For each instance: leading blocks of a prompt in its HBM, and in its HBM or CPU memory."""

    hbm: list[int]
    any: list[int]


class _Run:
    __slots__ = ("ids", "key", "parent", "tokens", "width")

    def __init__(self, parent: int, key: bytes, width: int) -> None:
        self.parent = parent  # the block it hangs off; a root is negative
        self.key = key  # how it is found in `_starts`
        self.width = width  # token bytes of a block
        self.tokens = bytearray()
        self.ids = array("i")


class HostTiers:
    """Blocks by tokens, and who holds them. Handles are ``version << 32 | id``. All blocks below a root have one `width`."""

    def __init__(self) -> None:
        self._starts: dict[bytes, _Run] = {}
        self._roots: dict[str, int] = {}
        self._run: list[_Run | None] = []
        self._branches: dict[int, int] = {}  # runs that hang off a block, and pins, where there are any
        self._free: list[int] = []
        self._high_water = 0
        self._capacity = 0
        self._hbm, self._cpu = array("Q"), array("Q")  # a bit for each instance
        self._at, self._version = array("i"), array("i")
        self._grow(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return self._high_water - len(self._free)

    def root(self, name: str) -> int:
        """Where chains of this name start."""
        return self._roots.setdefault(name, -1 - len(self._roots))

    # --- finding: none of these mutates anything ---

    def held(self, root: int, tokens: bytes, width: int, count: int, label: bytes = b"") -> Held:
        """What each of the instances 0 .. `count` - 1 holds of a prompt, in leading whole blocks of `width` bytes."""
        ids = np.frombuffer(self.match(root, tokens, width, label), np.int32)
        hbm = self._views[HostTier.HBM][ids]
        both = hbm | self._views[HostTier.CPU][ids]
        return Held(_leading(hbm, count), _leading(both, count))

    def match(self, parent: int, tokens: bytes, width: int, label: bytes = b"") -> array[int]:
        """Ids of the longest known chain below `parent` that `tokens` starts with, held or not."""
        return self._walk(parent, tokens, width, label)[0]

    def resolve(self, handle: int) -> int:
        """The id of a handle, -1 when that block has gone."""
        block = handle & _ID_MASK
        return block if self._version[block] == handle >> _VERSION_SHIFT else -1

    def is_held(self, block: int, instance: int, tier: HostTier) -> bool:
        """Does the instance hold this block in that tier?"""
        return bool(self._columns[tier][block] >> instance & 1)

    def _walk(self, parent: int, tokens: bytes, width: int, label: bytes) -> tuple[array[int], int]:
        """Known blocks below `parent` along `tokens`, and the last of them (or `parent`)."""
        found, at, stop = array("i"), 0, len(tokens) - len(tokens) % width
        while at < stop:
            if parent >= 0 and not label:
                run, inside = self._run[parent], self._at[parent] + 1
                assert run is not None, "a block without a run"
                if inside < len(run.ids):
                    count = _common(run.tokens, inside * width, tokens, at, stop) // width
                    found.extend(run.ids[inside : inside + count])
                    at += count * width
                    if count:
                        parent = found[-1]
                        continue
            branch = self._starts.get(_key(tokens[at : at + width], parent, label))
            if branch is None:
                break
            parent, label = branch.ids[0], b""
            found.append(parent)
            at += width
        return found, parent

    # --- changing ---

    def extend(self, parent: int, tokens: bytes, width: int, label: bytes = b"") -> array[int]:
        """Make the blocks of `tokens` known below `parent` (a block or a root); their ids. `label` is the first one's.

        New ones are held by nobody: `hold` them, or call `drop_if_unheld`, before the next change.
        """
        found, last = self._walk(parent, tokens, width, label)
        known = len(found)
        new = len(tokens) // width - known
        if new:
            fresh = self._take(new)
            self._append(
                last, tokens[known * width : (known + new) * width], width, fresh, b"" if known else label
            )
            found.extend(fresh)
        return found

    def hold(self, ids: array[int], instance: int, tier: HostTier) -> None:
        """The instance holds these blocks in that tier. Saying it again changes nothing."""
        bit = 1 << instance
        if len(ids) > _FEW:
            self._views[tier][np.frombuffer(ids, np.int32)] |= np.uint64(bit)
            return
        column = self._columns[tier]
        for block in ids:
            column[block] |= bit

    def append(
        self, handle: int, tokens: bytes, count: int, instance: int, tier: HostTier
    ) -> list[int] | None:
        """`extend` below a block that nothing is below yet, and `hold`, in one: what decoding engines tell all the time.

        The new blocks' handles; None, and nothing was changed, where it is not as simple as that.
        """
        parent = handle & _ID_MASK
        run = self._run[parent]
        if run is None or self._version[parent] != handle >> _VERSION_SHIFT or parent in self._branches:
            return None
        if run.ids[-1] != parent or len(tokens) != count * run.width:
            return None
        ids = self._take(count)
        self._lengthen(run, tokens, ids)
        bit, column, version = 1 << instance, self._columns[tier], self._version
        for block in ids:
            column[block] = bit
        return [version[block] << _VERSION_SHIFT | block for block in ids]

    def release(self, block: int, instance: int, tier: HostTier) -> bool:
        """The instance no longer holds the block in that tier. What nobody holds, nor needs as a parent, is forgotten.

        True when this block was.
        """
        hbm, cpu = self._hbm, self._cpu
        self._columns[tier][block] &= ~(1 << instance)
        if hbm[block] or cpu[block] or block in self._branches:
            return False
        run = self._run[block]
        assert run is not None, "a block without a run"
        ids = run.ids
        if ids[-1] != block:
            return False
        if len(ids) > 1 and (hbm[ids[-2]] or cpu[ids[-2]]):  # only this one goes: by far the commonest case
            self._forget_last(run)
        else:
            self._trim(run)
        return True

    def clear(self, instance: int, tier: HostTier) -> None:
        """The instance holds nothing in that tier."""
        self._views[tier][: self._high_water] &= ~np.uint64(1 << instance)
        for run in list(self._starts.values()):
            self._trim(run)

    def drop_if_unheld(self, block: int) -> None:
        """Forget a block that nobody holds and that is the last of its run, and whatever only it kept."""
        run = self._run[block]
        if run is not None and run.ids[-1] == block:
            self._trim(run)

    def pin(self, block: int) -> None:
        """Keep a block, held or not, until as many `unpin`."""
        self._branches[block] = self._branches.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Undo one `pin`; what turns out to be of no use is forgotten."""
        if self._unpin(block):
            self.drop_if_unheld(block)

    def handles(self, ids: array[int]) -> list[int]:
        """Names to keep across changes."""
        version = self._version
        return [version[block] << _VERSION_SHIFT | block for block in ids]

    # --- inside ---

    def _append(self, parent: int, tokens: bytes, width: int, ids: list[int], label: bytes) -> None:
        """Put new blocks below `parent`: at the end of its run where that is possible, else in a run of their own."""
        run = self._run[parent] if parent >= 0 else None
        if run is None or label or run.ids[-1] != parent:
            run = _Run(parent, _key(tokens[:width], parent, label), width)
            self._starts[run.key] = run
            if parent >= 0:
                self.pin(parent)
        self._lengthen(run, tokens, ids)

    def _lengthen(self, run: _Run, tokens: bytes, ids: list[int]) -> None:
        at, places, runs = self._at, len(run.ids), self._run
        run.tokens += tokens
        run.ids.extend(ids)
        for place, block in enumerate(ids, places):
            at[block] = place
            runs[block] = run

    def _trim(self, run: _Run) -> None:
        """Forget the blocks at the end of a run that nobody holds; go on with the run it hung off if none is left."""
        while self._shorten(run) and not run.ids:
            del self._starts[run.key]
            if run.parent < 0 or not self._unpin(run.parent):
                return
            above = self._run[run.parent]
            assert above is not None, "a run hung off nothing"
            run = above

    def _shorten(self, run: _Run) -> bool:
        """Forget what is of no use at the end of a run; whether there was something."""
        hbm, cpu, branches, ids = self._hbm, self._cpu, self._branches, run.ids
        before = len(ids)
        while ids and not (hbm[ids[-1]] or cpu[ids[-1]] or ids[-1] in branches):
            self._forget_last(run)
        return len(ids) < before

    def _forget_last(self, run: _Run) -> None:
        block = run.ids.pop()
        del run.tokens[-run.width :]
        self._version[block] += 1
        self._run[block] = None
        self._free.append(block)

    def _unpin(self, block: int) -> bool:
        """Whether that was the last."""
        self._branches[block] -= 1
        if self._branches[block]:
            return False
        del self._branches[block]
        return True

    def _take(self, count: int) -> list[int]:
        if count == 1 and self._free:
            return [self._free.pop()]
        reused = min(count, len(self._free))
        ids = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        fresh = count - reused
        if self._high_water + fresh > self._capacity:
            self._grow(max(2 * self._capacity, self._high_water + fresh))
        ids.extend(range(self._high_water, self._high_water + fresh))
        self._high_water += fresh
        return ids

    def _grow(self, capacity: int) -> None:
        more = capacity - self._capacity
        self._hbm = self._hbm + array("Q", bytes(8 * more))  # a copy: numpy's view forbids to resize
        self._cpu = self._cpu + array("Q", bytes(8 * more))
        self._columns = (self._hbm, self._cpu)
        self._views: tuple[U64, U64] = (
            np.frombuffer(self._hbm, np.uint64),
            np.frombuffer(self._cpu, np.uint64),
        )
        self._at.extend(array("i", bytes(4 * more)))
        self._version.extend(array("i", bytes(4 * more)))
        self._run.extend([None] * more)
        self._capacity = capacity

    def check_integrity(self) -> None:
        """AssertionError, with what is wrong, unless each block is in one run, and each run is found and of use. Slow."""
        seen: set[int] = set()
        branches: dict[int, int] = {}
        for key, run in self._starts.items():
            assert run.key == key, "a run is found under another's name"
            assert len(run.ids) * run.width == len(run.tokens), "a run's tokens are not its blocks'"
            assert run.ids, "an empty run was kept"
            assert not seen & set(run.ids), "a block is in two runs"
            seen.update(run.ids)
            for at, block in enumerate(run.ids):
                assert self._run[block] is run, f"block {block} is placed elsewhere"
                assert self._at[block] == at, f"block {block} is placed at {self._at[block]}"
            if run.parent >= 0:
                branches[run.parent] = branches.get(run.parent, 0) + 1
        assert branches == self._branches, "branch counts are wrong"
        assert set(branches) <= seen, "a run hangs off nothing"
        assert len(seen) == len(self), "a block is lost"
        for run in self._starts.values():
            last = run.ids[-1]
            assert self._hbm[last] or self._cpu[last] or last in branches, f"block {last} is of no use"


def _key(block: bytes, parent: int, label: bytes) -> bytes:
    return block + parent.to_bytes(4, "little", signed=True) + label


def _common(mine: bytearray, inside: int, tokens: bytes, at: int, stop: int) -> int:
    """How many bytes of a run from `inside` on equal those at `tokens[at:stop]`."""
    equal = 0
    with memoryview(mine) as whole, whole[inside : inside + stop - at] as rest:
        while equal < len(rest):
            piece = rest[equal : equal + _PIECE_BYTES]
            if not tokens.startswith(piece, at + equal):
                theirs = np.frombuffer(tokens, np.uint8, len(piece), at + equal)
                return equal + int((np.frombuffer(piece, np.uint8) != theirs).argmax())
            equal += len(piece)
    return equal


def _leading(masks: U64, count: int) -> list[int]:
    """For each instance's bit, how many leading masks have it."""
    lengths = [0] * count
    if not len(masks):
        return lengths
    kept = np.bitwise_and.accumulate(masks)
    shrinks = np.flatnonzero(kept[1:] != kept[:-1]).tolist()  # at most once for each instance
    for end in [*shrinks, len(kept) - 1]:
        mask = int(kept[end])
        for instance in range(count):
            if mask >> instance & 1:
                lengths[instance] = end + 1
    return lengths
