"""One virtio-blk queue in shared memory: requests in, their status out.

Each request has a slot for what virtio-blk puts around the data: its header, the range of a discard, and the byte the
device writes its status to. The slot is that of the first descriptor of its chain: free when that is.

    session memory, per ring:  [ queue (see dpurt.wire.virtqueue) | slots of 64 bytes ]

Each request is shown to the device at once, which begins sooner than if all requests of one turn of the loop waited
for the last; the kick, a system call, is made only if the device wants one, and one that is busy does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from dpurt.wire import virtio_blk
from dpurt.wire.virtqueue import QueueLayout, SplitQueue

__all__ = ["BlkRing"]

_Token = TypeVar("_Token")
_SLOT_BYTES = 64
_RANGE_AT, _STATUS_AT = 16, 32
_EXTRA = 2  # descriptors around the data


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
        self._around = [((at, virtio_blk.HEADER_BYTES), (at + _STATUS_AT, 1)) for at in starts]
        self._queue: SplitQueue[tuple[int, _Token]] = SplitQueue(
            memory[: layout.total], address, layout, fence=fence, has_event_idx=has_event_idx
        )

    @staticmethod
    def bytes_needed(layout: QueueLayout) -> int:
        return layout.total + layout.size * _SLOT_BYTES

    @staticmethod
    def layout_for(size: int, max_segments: int, *, is_indirect: bool) -> QueueLayout:
        return QueueLayout(size, max_segments + _EXTRA if is_indirect else 0)

    @property
    def num_held(self) -> int:
        """Requests the device has."""
        return self._queue.num_published

    def tokens(self) -> list[_Token]:
        """Of every request without an answer."""
        return [token for _, token in self._queue.tokens()]

    def move(self, kind: int, offset: int, segments: Sequence[tuple[int, int]], token: _Token) -> bool:
        """A read, write or (without segments) flush. False: no room now."""
        slot = self._queue.next_head
        if slot < 0:
            return False
        header, status = self._prepare(slot, kind, offset)
        if kind == virtio_blk.READ:
            is_added = self._queue.add((header,), (*segments, status), (slot, token))
        else:
            is_added = self._queue.add((header, *segments), (status,), (slot, token))
        return is_added and self._show()

    def deallocate(self, kind: int, offset: int, length: int, token: _Token) -> bool:
        """A discard or write-zeroes. False: no room now."""
        slot = self._queue.next_head
        if slot < 0:
            return False
        header, status = self._prepare(slot, kind, 0)
        at = slot * _SLOT_BYTES + _RANGE_AT
        virtio_blk.pack_range(self._slots[at:], kind, offset, length)
        range_ = (self._slots_address + at, virtio_blk.RANGE_BYTES)
        return self._queue.add((header, range_), (status,), (slot, token)) and self._show()

    def kick(self) -> None:
        os.eventfd_write(self.kick_fd, 1)

    def answers(self) -> Iterator[tuple[_Token, int]]:
        """(token, status) of each request that came back. Raises RemoteProtocolError as `completions` does."""
        for (slot, token), _ in self._queue.completions():
            yield token, self._slots[slot * _SLOT_BYTES + _STATUS_AT]

    def close(self) -> None:
        os.close(self.kick_fd)

    # --- inside ---

    def _prepare(self, slot: int, kind: int, offset: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where the slot's header and status are, (address, length)."""
        at = slot * _SLOT_BYTES
        virtio_blk.pack_header(self._slots, at, kind, offset)
        self._slots[at + _STATUS_AT] = virtio_blk.STATUS_NONE
        return self._around[slot]

    def _show(self) -> bool:
        if self._queue.publish():
            self.kick()
        return True
