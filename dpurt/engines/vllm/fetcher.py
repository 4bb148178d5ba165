"""Loaded blocks as memory, whatever the fabric: views of the node's own where it has them, else copies in buffers made for them.

A buffer is never used twice: after a call that ran out of time the fabric may write into it for a moment more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dpurt.client import LoadedBlock
from dpurt.core.identity import Geometry
from dpurt.engines.vllm.link import Link
from dpurt.errors import LocalProtocolError

Parts = tuple[int, int]


def span_of(geometry: Geometry, parts: Parts | None) -> Parts:
    """[start, stop) in the payload of a run of parts; None is all of them."""
    offsets = geometry.part_offsets
    return (offsets[parts[0]], offsets[parts[1]]) if parts else (0, offsets[-1])


class Fetcher:
    """Loads over one link. Thread-safe."""

    def __init__(self, link: Link, geometry: Geometry) -> None:
        self._link = link
        self._geometry = geometry
        self._has_views = True

    @contextmanager
    def blocks(
        self, request: str, first: int, count: int, *, parts: Parts | None, shard: int, timeout_s: float
    ) -> Iterator[Sequence[LoadedBlock]]:
        """Blocks of a looked-up request; their memory is valid inside the ``with``. Raises what the client raises."""
        with ExitStack() as stack:
            with self._link.guarded():
                blocks = self._viewed(stack, request, first, count, parts, shard, timeout_s)
                if blocks is None:
                    blocks = self._copied(request, first, count, parts, shard, timeout_s)
            yield blocks

    def _viewed(
        self, stack: ExitStack, request: str, first: int, count: int, parts: Parts | None, shard: int,
        timeout_s: float,
    ) -> list[LoadedBlock] | None:  # fmt: skip
        if not self._has_views:
            return None
        view = self._link.client.view(request, first, count, parts=parts, shard=shard, timeout_s=timeout_s)
        try:
            return stack.enter_context(view)
        except LocalProtocolError as error:
            if error.code != "no_views":
                raise
            self._has_views = (
                False  # and will have none: the fabric is the session's, another may come with the next
            )
            return None

    def _copied(
        self, request: str, first: int, count: int, parts: Parts | None, shard: int, timeout_s: float
    ) -> list[LoadedBlock]:
        start, stop = span_of(self._geometry, parts)
        into = [memoryview(bytearray(stop - start)) for _ in range(count)]
        return self._link.client.load(request, first, into, parts=parts, shard=shard, timeout_s=timeout_s)
