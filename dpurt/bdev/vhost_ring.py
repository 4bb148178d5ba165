"""One virtio-blk queue in shared memory: requests in, their status out.

Each request has a slot for what virtio-blk puts around the data: its header, the range of a discard, and the byte the
device writes its status to. The slot is that of the first descriptor of its chain: free when that is.

    session memory, per ring:  [ queue (see dpurt.wire.virtqueue) | slots of 64 bytes ]

Each request is shown to the device at once, which begins sooner than if all requests of one turn of the loop waited
for the last; the kick, a system call, is made only if the device wants one, and one that is busy does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dpurt.wire import virtio_blk
from dpurt.wire.virtqueue import FRAME, QueueLayout, SplitQueue, pack_pieces

__all__ = ["BlkRing"]

_Token = TypeVar("_Token")
_SLOT_BYTES = 64
_RANGE_AT, _STATUS_AT = 16, 32


class BlkRing(Generic[_Token]):
    """A ring of `layout` in zeroed `memory`, which the device knows at `address`."""

    def __init__(
        self,
        memory: memoryview,
        address: int,
        layout: QueueLayout,
        *,
        fence: Callable[[], None],
        has_event_idx: bool,
    ) -> None:
        self.layout = layout
        self.address = address
        self.kick_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._slots = memory[layout.total : self.bytes_needed(layout)]
        self._slots_address = address + layout.total
        starts = range(self._slots_address, self._slots_address + layout.size * _SLOT_BYTES, _SLOT_BYTES)
        frames = [((at, virtio_blk.HEADER_BYTES), (at + _STATUS_AT, 1)) for at in starts]
        self._queue: SplitQueue[_Token] = SplitQueue(
            memory[: layout.total], address, layout, frames, fence=fence, has_event_idx=has_event_idx
        )

    @staticmethod
    def bytes_needed(layout: QueueLayout) -> int:
        return layout.total + layout.size * _SLOT_BYTES

    @staticmethod
    def layout_for(size: int, max_segments: int, *, is_indirect: bool) -> QueueLayout:
        return QueueLayout(size, max_segments + FRAME if is_indirect else 0)

    @property
    def num_held(self) -> int:
        """Requests the device has."""
        return self._queue.num_published

    def tokens(self) -> list[_Token]:
        """Of every request without an answer."""
        return self._queue.tokens()

    def move(self, kind: int, offset: int, pieces: bytes, token: _Token) -> bool:
        """A read, write or (without pieces) flush; see `pack_pieces`. False: no room now."""
        slot = self._queue.add(pieces, token)
        return slot >= 0 and self._show(slot, kind, offset)

    def deallocate(self, kind: int, offset: int, length: int, token: _Token) -> bool:
        """A discard or write-zeroes. False: no room now."""
        slot = self._queue.next_head
        if slot < 0:
            return False
        at = slot * _SLOT_BYTES + _RANGE_AT
        virtio_blk.pack_range(self._slots[at:], kind, offset, length)
        range_ = pack_pieces([(self._slots_address + at, virtio_blk.RANGE_BYTES)], is_writable=False)
        return self._queue.add(range_, token) >= 0 and self._show(slot, kind, 0)

    def kick(self) -> None:
        os.eventfd_write(self.kick_fd, 1)

    def answers(self) -> Iterator[tuple[_Token, int]]:
        """(token, status) of each request that came back. Raises RemoteProtocolError as `completions` does."""
        for slot, token in self._queue.completions():
            yield token, self._slots[slot * _SLOT_BYTES + _STATUS_AT]

    def close(self) -> None:
        os.close(self.kick_fd)

    # --- inside ---

    def _show(self, slot: int, kind: int, offset: int) -> bool:
        at = slot * _SLOT_BYTES
        virtio_blk.pack_header(self._slots, at, kind, offset)
        self._slots[at + _STATUS_AT] = virtio_blk.STATUS_NONE
        if self._queue.publish():
            self.kick()
        return True
