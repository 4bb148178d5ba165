"""Block numbers made comparable: chained where they name content only, grouped where blocks are to be larger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Chain", "group_ends", "regroup"]


class Chain:
    """Numbers blocks by (the block before, its own id), so that equal numbers mean equal prefixes, and none
    repeats within a request."""

    _ROOT = -1

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def numbers(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The chained numbers of one request's ids, in prefix order."""
        numbers, parent, chained = self._numbers, self._ROOT, []
        for block in ids:
            parent = numbers.setdefault((parent, block), len(numbers))
            chained.append(parent)
        return tuple(chained)


def regroup(blocks: Sequence[int], size: int) -> tuple[int, ...]:
    """`size` chained blocks made one, named by the last of them; a partial group at the end stays one."""
    tail = blocks[-1:] if len(blocks) % size else ()
    return (*blocks[size - 1 :: size], *tail)


def group_ends(runs: Iterable[tuple[int, int]], size: int) -> Iterator[int]:
    """What `regroup` gives of the blocks that (first, count) runs stand for, without listing them all."""
    before = last = 0
    for first, count in runs:
        yield from (first + at for at in range(size - 1 - before % size, count, size))
        before += count
        last = first + count - 1
    if before % size:
        yield last
