"""A block's bytes in the caller's memory: one buffer, or several that it is scattered over or gathered from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import crc32c
from numpy.typing import NDArray

from dpurt.fabric import Piece
from dpurt.wire import messages as m

__all__ = ["Payload", "Room", "Views", "part_crcs", "pieces_of", "raw_tokens", "room_for", "views_of"]

Room: TypeAlias = "memoryview | bytearray | NDArray[Any] | Sequence[memoryview]"
Payload: TypeAlias = "memoryview | bytes | NDArray[Any] | Sequence[memoryview]"
Views: TypeAlias = tuple[memoryview, ...]
_BYTES = frozenset("Bbc")
_INTEGERS = frozenset({order + kind for order in ("", "@", "=", "<") for kind in "iIlLqQ"})


def room_for(grant: m.Grant, room: Room) -> Views:
    """Where the bytes of a grant go. ValueError for a room that is too small or cannot be written."""
    views = views_of(room)
    if any(view.readonly for view in views):
        raise ValueError("a buffer to load into must be writable")
    size = sum([len(view) for view in views])
    if size < grant.length:
        raise ValueError(f"a buffer of {size} bytes for {grant.length} bytes of a block")
    return views if size == grant.length else _head(views, grant.length)


def views_of(buffers: Room | Payload) -> Views:
    """A block's buffers, in order, as bytes. ValueError for what is no contiguous buffer, nor a list of such."""
    several = buffers if isinstance(buffers, (list, tuple)) else (buffers,)
    try:
        views = [memoryview(one) for one in several]
    except (TypeError, BufferError) as error:
        raise ValueError(f"a block's buffer must be a buffer of bytes, or a list of such: {error}") from error
    if not all(view.c_contiguous for view in views):
        raise ValueError("a block's buffer must be contiguous")
    return tuple([view.cast("B") for view in views])


def raw_tokens(tokens: object, token_bytes: int) -> bytes:
    """Tokens as the protocol has them. ValueError unless they are bytes, or a buffer of integers, of `token_bytes` each: the
    wrong width would cut blocks elsewhere, and other prompts would match.
    """
    expected = (
        f"tokens must be bytes or a buffer of {8 * token_bytes}-bit integers (numpy's int{8 * token_bytes})"
    )
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{expected}, not {type(tokens).__name__}") from error
    columns = view.shape[1] if view.shape is not None and view.ndim == 2 else 1  # pairs are two
    width = view.itemsize * columns
    if view.format not in _BYTES and (width != token_bytes or view.format not in _INTEGERS):
        raise ValueError(f"{expected}, not items of format {view.format!r}")
    if view.nbytes % token_bytes:
        raise ValueError(f"{expected}: {view.nbytes} bytes are no multiple of {token_bytes}")
    return bytes(view)


def _head(views: Views, size: int) -> Views:
    """The first `size` bytes."""
    head = []
    for view in views:
        head.append(view[:size])
        size -= len(head[-1])
    return tuple(view for view in head if len(view))


def pieces_of(region: int, offset: int, lease: int, views: Views) -> Iterator[Piece]:
    """A block of a region from or to its buffers here."""
    for view in views:
        yield Piece(region, offset, lease, view)
        offset += len(view)


def part_crcs(payload: Views, part_bytes: Sequence[int]) -> list[int]:
    """CRC-32C of each part of a payload, wherever the cuts between its buffers are."""
    crcs, rest = [], iter(payload)
    view = memoryview(b"")
    for size in part_bytes:
        crc = 0
        while size:
            view = view if len(view) else next(rest)
            crc = crc32c.crc32c(view[:size], crc)
            size, view = size - len(view[:size]), view[size:]
        crcs.append(crc)
    return crcs
