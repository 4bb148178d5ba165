"""The driver's side of a virtio split virtqueue, over memory shared with a device that is not trusted.

Theory of operation. The queue lives in one buffer:

    descriptors (16 bytes each) | avail: flags idx ring[size] used_event | used: flags idx ring[size] avail_event
    | indirect tables, one for each descriptor

Every chain is framed: a readable piece before it and a writable one after it, whose places are those of its first
descriptor and never change (virtio-blk: request header and status). What lies between is packed by `pack_pieces`, with
links that fit any table, so that it can be kept and used again. A table is thus two descriptors that stay, the frame,
and behind them what one copy of bytes brings.

    table:  frame's first | frame's last | piece | piece | ...        first -> piece -> piece -> last

`add` writes a chain and its avail entry, which the device does not see yet; `publish` shows everything added since
by one store of avail.idx, and says whether the device wants a kick; `completions` yields what has come back. A
descriptor is in one of three places: free, in a chain added, or in a chain published. Only a published chain may
come back, and once: anything else in the used ring (an unknown id, one twice, more than were published) is a
`RemoteProtocolError`, after which the queue must not be used any more, since which buffers the device still holds
is only known for those that came back before. Which descriptors a chain has is kept here, never read back from the
shared memory; what the device writes over in it can only mislead the device.

Order. Three places need it, and no CPU gives all of them for nothing:
1. chains and avail entries before avail.idx (else the device reads a stale chain): store-store;
2. avail.idx before the look at avail_event or the no-notify flag, and used_event or the no-interrupt flag before
   the second look at used.idx (else both sides think the other is awake): store-load, needed on x86 too;
3. used.idx before the used entries and the data behind them (else we read what is not there yet): load-load.
The caller gives `fence`, a full one, which does for all. Indices are stored through a native 16-bit view, since
`struct` with a byte order stores byte by byte and the device must never see half of one.

Leaves to others: where the memory is, what the chains mean, kicks and waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dpurt.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["FRAME", "QueueLayout", "SplitQueue", "pack_pieces"]

FRAME = 2
"""Descriptors of a chain around its pieces."""

_Token = TypeVar("_Token")
_Piece = tuple[int, int]

_DESCRIPTOR = struct.Struct("<QIHH")  # address, length, flags, next
_NEXT, _WRITE, _INDIRECT = 1, 2, 4
_LAST = 1  # where a table has the frame's last
_NO_INTERRUPT = _NO_NOTIFY = 1
_WRAP = 0xFFFF
_LINE = 64  # what the two sides write lies on different cache lines


def pack_pieces(pieces: Sequence[_Piece], *, is_writable: bool) -> bytes:
    """(address, length) pieces, all for the device to write or all to read, as `SplitQueue.add` takes them."""
    flags = _NEXT | (_WRITE if is_writable else 0)
    last = FRAME + len(pieces) - 1
    return b"".join(
        _DESCRIPTOR.pack(address, length, flags, place + 1 if place < last else _LAST)
        for place, (address, length) in enumerate(pieces, FRAME)
    )


@dataclass(frozen=True, slots=True)
class QueueLayout:
    """Where the parts of a queue are in its buffer. `max_indirect` is how many descriptors a table has; 0 means chains of
    the ring's own descriptors.
    """

    size: int
    max_indirect: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 32768 or self.size.bit_count() != 1:
            raise LocalProtocolError("queue_size", f"must be a power of two from 1 to 32768, got {self.size}")

    @property
    def avail(self) -> int:
        return _DESCRIPTOR.size * self.size

    @property
    def used(self) -> int:
        return _aligned(self.avail + 6 + 2 * self.size)

    @property
    def indirect(self) -> int:
        return _aligned(self.used + 6 + 8 * self.size)

    @property
    def total(self) -> int:
        return _aligned(self.indirect + self.size * self.max_indirect * _DESCRIPTOR.size)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE


class SplitQueue(Generic[_Token]):
    """One virtqueue in zeroed `memory`, which the device knows at `address`. Not thread-safe.

    `frames[i]` is the (address, length) of what comes before and after the pieces of a chain that begins with i.
    """

    def __init__(
        self,
        memory: memoryview,
        address: int,
        layout: QueueLayout,
        frames: Sequence[tuple[_Piece, _Piece]],
        *,
        fence: Callable[[], None],
        has_event_idx: bool,
    ) -> None:
        size = layout.size
        self.layout = layout
        self.address = address
        self._memory = memory
        self._fence = fence
        self._has_event_idx = has_event_idx
        self._avail = memory[layout.avail : layout.avail + 6 + 2 * size].cast("H")
        self._used_head = memory[layout.used : layout.used + 4].cast("H")
        self._used_ring = memory[layout.used + 4 : layout.used + 4 + 8 * size].cast("I")
        event = layout.used + 4 + 8 * size
        self._avail_event = memory[event : event + 2].cast("H")
        self._frames = frames
        self._table_bytes = layout.max_indirect * _DESCRIPTOR.size
        self._free = list(range(size - 1, -1, -1))
        self._chains: dict[int, tuple[_Token, tuple[int, ...]]] = {}  # by head: published or only added
        self._added: list[int] = []  # heads not yet published
        self._avail_index = 0
        self._last_used = 0
        if self._table_bytes:
            self._lay_tables()

    @property
    def num_published(self) -> int:
        """Chains the device has."""
        return len(self._chains) - len(self._added)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_head(self) -> int:
        """The first descriptor of the chain that is added next, -1 if there is room for none."""
        return self._free[-1] if self._free else -1

    def tokens(self) -> list[_Token]:
        """Of every chain that has not come back, oldest first."""
        return [token for token, _ in self._chains.values()]

    def add(self, pieces: bytes, token: _Token) -> int:
        """Append a chain of what `pack_pieces` gave. Returns its first descriptor, whose frame is the device's only when
        the chain is published; -1 if there is no room for it now.
        """
        count = len(pieces) // _DESCRIPTOR.size + FRAME
        most = self.layout.max_indirect or self.layout.size
        if count > most:
            raise LocalProtocolError("chain_length", f"{count} descriptors, a chain has at most {most}")
        free = self._free
        if (1 if self._table_bytes else count) > len(free):
            return -1
        if self._table_bytes:
            chain: tuple[int, ...] = (free.pop(),)
            self._fill_table(chain[0], pieces)
        else:
            chain = tuple([free.pop() for _ in range(count)])
            self._write_direct(chain, pieces)
        head = chain[0]
        assert head not in self._chains, "a free descriptor is in no chain"
        self._avail[2 + (self._avail_index + len(self._added)) % self.layout.size] = head
        self._chains[head] = (token, chain)
        self._added.append(head)
        return head

    def publish(self) -> bool:
        """Let the device see what was added. True: kick it."""
        before = self._avail_index
        after = self._avail_index = (before + len(self._added)) & _WRAP
        self._added.clear()
        self._fence()  # 1
        self._avail[1] = after
        self._fence()  # 2
        if self._has_event_idx:
            return (after - self._avail_event[0] - 1) & _WRAP < (after - before) & _WRAP
        return not self._used_head[0] & _NO_NOTIFY

    def completions(self) -> Iterator[tuple[int, _Token]]:
        """Each chain that came back, as (first descriptor, token), its descriptors free again.

        After the last one the device is asked to signal the next. Raises RemoteProtocolError in the middle: what
        was yielded before is good.
        """
        self._quieten()
        while True:
            while count := self._num_returned():
                self._fence()  # 3
                for _ in range(count):
                    yield self._retire()
            self._ask_for_signal()
            self._fence()  # 2
            if not self._num_returned():
                return

    # --- inside ---

    def _lay_tables(self) -> None:
        """Each of the ring's descriptors leads to a table of its own, with its frame in it."""
        for head, (_, last) in enumerate(self._frames):
            at = self.layout.indirect + head * self._table_bytes
            _DESCRIPTOR.pack_into(self._memory, at + _LAST * _DESCRIPTOR.size, *last, _WRITE, 0)
            entry = (self.address + at, self._table_bytes, _INDIRECT, 0)
            _DESCRIPTOR.pack_into(self._memory, head * _DESCRIPTOR.size, *entry)

    def _fill_table(self, head: int, pieces: bytes) -> None:
        at = self.layout.indirect + head * self._table_bytes
        start = at + FRAME * _DESCRIPTOR.size
        self._memory[start : start + len(pieces)] = pieces
        link = FRAME if pieces else _LAST
        _DESCRIPTOR.pack_into(self._memory, at, *self._frames[head][0], _NEXT, link)

    def _write_direct(self, chain: tuple[int, ...], pieces: bytes) -> None:
        first, last = self._frames[chain[0]]
        between = [(address, length, flags) for address, length, flags, _ in _DESCRIPTOR.iter_unpack(pieces)]
        fields = [(*first, _NEXT), *between, (*last, _WRITE)]
        for place, following, field in zip(chain, (*chain[1:], 0), fields, strict=True):
            _DESCRIPTOR.pack_into(self._memory, place * _DESCRIPTOR.size, *field, following)

    def _num_returned(self) -> int:
        count = (self._used_head[1] - self._last_used) & _WRAP
        if count > self.num_published:
            raise RemoteProtocolError(
                "used_index", f"{count} chains came back, the device has {self.num_published}"
            )
        return count

    def _retire(self) -> tuple[int, _Token]:
        head = self._used_ring[self._last_used % self.layout.size * 2]
        if head not in self._chains or (self._added and head in self._added):
            raise RemoteProtocolError("used_id", f"chain {head} came back, which the device does not have")
        token, chain = self._chains.pop(head)
        self._free += chain
        self._last_used = (self._last_used + 1) & _WRAP
        return head, token

    def _quieten(self) -> None:
        """No signals while we look. With event_idx the last one asked for has been given, or is not yet due."""
        if not self._has_event_idx:
            self._avail[0] = _NO_INTERRUPT

    def _ask_for_signal(self) -> None:
        if self._has_event_idx:
            self._avail[2 + self.layout.size] = self._last_used
        else:
            self._avail[0] = 0
