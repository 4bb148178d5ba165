"""The split virtqueue against a device that behaves, and one that does not."""

from __future__ import annotations

import random
import struct

import pytest

from dpurt.errors import LocalProtocolError, RemoteProtocolError
from dpurt.wire.virtqueue import QueueLayout, SplitQueue, pack_pieces

ADDRESS = 0x7F00_0000_0000
NEXT, WRITE, INDIRECT = 1, 2, 4


class Device:
    """A device that is no part of the code under test: it reads the shared memory as the specification says."""

    def __init__(self, memory: bytearray, layout: QueueLayout) -> None:
        self.memory = memory
        self.layout = layout
        self.seen = 0
        self.done = 0

    def take(self) -> list[int]:
        """Heads that are new in the avail ring."""
        index = self._u16(self.layout.avail + 2)
        heads = []
        while self.seen != index:
            heads.append(self._u16(self.layout.avail + 4 + self.seen % self.layout.size * 2))
            self.seen = (self.seen + 1) & 0xFFFF
        return heads

    def chain(self, head: int) -> list[tuple[int, int, bool]]:
        base, at, found = 0, head, []
        while True:
            address, length, flags, following = struct.unpack_from("<QIHH", self.memory, base + at * 16)
            if flags & INDIRECT:
                base, at = address - ADDRESS, 0
                continue
            found.append((address, length, bool(flags & WRITE)))
            if not flags & NEXT:
                return found
            at = following

    def finish(self, head: int) -> None:
        at = self.layout.used + 4 + self.done % self.layout.size * 8
        struct.pack_into("<I", self.memory, at, head)
        self.jump(1)

    def jump(self, count: int) -> None:
        self.done = (self.done + count) & 0xFFFF
        struct.pack_into("<H", self.memory, self.layout.used + 2, self.done)

    def ask_for_kick_after(self, index: int) -> None:
        struct.pack_into("<H", self.memory, self.layout.used + 4 + 8 * self.layout.size, index & 0xFFFF)

    def set_no_notify(self, flag: int) -> None:
        struct.pack_into("<H", self.memory, self.layout.used, flag)

    @property
    def signal_after(self) -> int:
        return self._u16(self.layout.avail + 4 + 2 * self.layout.size)

    @property
    def no_interrupt(self) -> int:
        return self._u16(self.layout.avail)

    def _u16(self, at: int) -> int:
        value: int = struct.unpack_from("<H", self.memory, at)[0]
        return value


def frames(size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((0x1000 + i, 16), (0x2000 + i, 1)) for i in range(size)]


def make(
    size: int = 8, max_indirect: int = 4, *, has_event_idx: bool = False
) -> tuple[SplitQueue[object], Device]:
    layout = QueueLayout(size, max_indirect)
    memory = bytearray(layout.total)
    queue: SplitQueue[object] = SplitQueue(
        memoryview(memory), ADDRESS, layout, frames(size), fence=lambda: None, has_event_idx=has_event_idx
    )
    return queue, Device(memory, layout)


def framed(head: int, *pieces: tuple[int, int, bool]) -> list[tuple[int, int, bool]]:
    """A chain as the device sees it."""
    (first, last) = frames(head + 1)[head]
    return [(*first, False), *pieces, (*last, True)]


def test_the_device_sees_nothing_before_it_is_published() -> None:
    queue, device = make()
    head = queue.add(pack_pieces([(0x3000, 512)], is_writable=True), "a")
    assert device.take() == []
    queue.publish()
    assert device.take() == [head]
    assert device.chain(head) == framed(head, (0x3000, 512, True))


@pytest.mark.parametrize("max_indirect", [0, 4])
def test_a_chain_is_what_was_added_in_its_frame_direct_or_indirect(max_indirect: int) -> None:
    queue, device = make(8, max_indirect)
    read = queue.add(pack_pieces([(3, 4), (5, 6)], is_writable=True), "read")
    write = queue.add(pack_pieces([(7, 8)], is_writable=False), "write")
    queue.publish()
    assert device.take() == [read, write]
    assert device.chain(read) == framed(read, (3, 4, True), (5, 6, True))
    assert device.chain(write) == framed(write, (7, 8, False))
    assert queue.num_free == (1 if max_indirect == 0 else 6)


@pytest.mark.parametrize("max_indirect", [0, 4])
def test_a_table_used_again_has_nothing_left_of_its_last_chain(max_indirect: int) -> None:
    queue, device = make(4, max_indirect)
    seen = []
    for pieces in ([(3, 4), (5, 6)], [], [(7, 8)]):
        head = queue.add(pack_pieces(pieces, is_writable=True), None)
        queue.publish()
        assert device.take() == [head]
        seen.append(device.chain(head) == framed(head, *((*piece, True) for piece in pieces)))
        device.finish(head)
        assert list(queue.completions()) == [(head, None)]
    assert seen == [True, True, True]


def test_a_full_queue_takes_no_chain_and_takes_one_again_after_a_completion() -> None:
    queue, device = make(4, 0)
    assert queue.add(b"", "a") >= 0
    second = queue.add(b"", "b")
    assert (queue.add(b"", "c"), queue.next_head) == (-1, -1)
    queue.publish()
    device.finish(device.take()[1])
    assert list(queue.completions()) == [(second, "b")]
    assert queue.add(b"", "c") >= 0
    assert queue.tokens() == ["a", "c"]


@pytest.mark.parametrize("max_indirect", [0, 4])
def test_a_chain_longer_than_the_ring_or_the_table_is_refused(max_indirect: int) -> None:
    queue, _ = make(4, max_indirect)
    with pytest.raises(LocalProtocolError, match="5 descriptors"):
        queue.add(pack_pieces([(1, 1)] * 3, is_writable=True), "a")
    with pytest.raises(LocalProtocolError, match="power of two"):
        QueueLayout(6)


# --- notifications ---


def test_a_kick_is_wanted_unless_the_device_set_no_notify() -> None:
    queue, device = make()
    queue.add(b"", "a")
    assert queue.publish()
    device.set_no_notify(1)
    queue.add(b"", "b")
    assert not queue.publish()


def test_with_event_idx_a_kick_is_wanted_when_the_asked_index_is_passed() -> None:
    queue, device = make(has_event_idx=True)
    device.ask_for_kick_after(1)
    wanted = []
    for _ in range(4):
        queue.add(b"", None)
        wanted.append(queue.publish())
    assert wanted == [False, True, False, False]


def test_with_event_idx_a_batch_that_passes_the_index_wants_one_kick() -> None:
    queue, device = make(has_event_idx=True)
    device.ask_for_kick_after(2)
    for _ in range(5):
        queue.add(b"", None)
    assert queue.publish()


def test_signals_are_asked_for_again_after_the_last_completion() -> None:
    queue, device = make(has_event_idx=True)
    for i in range(3):
        queue.add(b"", i)
    queue.publish()
    for head in device.take():
        device.finish(head)
    assert len(list(queue.completions())) == 3
    assert device.signal_after == 3


def test_no_interrupts_while_looking_and_again_afterwards() -> None:
    queue, device = make()
    queue.add(b"", "a")
    queue.publish()
    device.finish(device.take()[0])
    walk = queue.completions()
    next(walk)
    assert device.no_interrupt == 1
    assert list(walk) == []
    assert device.no_interrupt == 0


def test_a_completion_between_the_last_look_and_the_request_for_a_signal_is_not_missed() -> None:
    layout = QueueLayout(8, 2)
    memory = bytearray(layout.total)
    device = Device(memory, layout)
    late: list[int] = []

    def fence() -> None:
        if late and device.no_interrupt == 0:
            device.finish(late.pop())

    queue: SplitQueue[str] = SplitQueue(
        memoryview(memory), ADDRESS, layout, frames(8), fence=fence, has_event_idx=False
    )
    queue.add(b"", "a")
    queue.publish()
    late += device.take()
    assert [token for _, token in queue.completions()] == ["a"]


# --- a device that lies ---


def in_flight(count: int = 3) -> tuple[SplitQueue[object], Device, list[int]]:
    queue, device = make()
    for i in range(count):
        queue.add(b"", i)
    queue.publish()
    return queue, device, device.take()


@pytest.mark.parametrize("head", [7, 8, 0xFFFF, 0xFFFFFFFF])
def test_an_unknown_id_is_a_protocol_error(head: int) -> None:
    queue, device, heads = in_flight()
    assert head not in heads
    device.finish(head)
    with pytest.raises(RemoteProtocolError, match="used_id"):
        list(queue.completions())
    assert queue.num_published == 3


def test_an_id_twice_is_a_protocol_error_and_the_first_time_counts() -> None:
    queue, device, heads = in_flight()
    device.finish(heads[1])
    device.finish(heads[1])
    walk = queue.completions()
    assert next(walk) == (heads[1], 1)
    with pytest.raises(RemoteProtocolError, match="used_id"):
        next(walk)
    assert queue.tokens() == [0, 2]


@pytest.mark.parametrize("count", [4, 9, 0x8000, 0xFFFF])
def test_an_index_that_jumps_too_far_is_a_protocol_error(count: int) -> None:
    queue, device, _ = in_flight()
    device.jump(count)
    with pytest.raises(RemoteProtocolError, match="used_index"):
        list(queue.completions())


def test_a_chain_added_but_not_published_cannot_come_back() -> None:
    queue, device, heads = in_flight(2)
    queue.add(b"", "unseen")
    assert heads == [0, 1]
    device.finish(2)
    with pytest.raises(RemoteProtocolError, match="used_id"):
        list(queue.completions())


def test_a_device_that_rewrites_descriptors_confuses_nobody() -> None:
    queue, device = make(4)
    queue.add(b"", "a")
    queue.publish()
    (head,) = device.take()
    device.memory[:64] = b"\xff" * 64
    device.finish(head)
    assert [token for _, token in queue.completions()] == ["a"]
    assert queue.num_free == 4


def test_random_used_rings_raise_only_protocol_errors() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        queue, device, heads = in_flight(rng.randint(1, 8))
        at = device.layout.used
        device.memory[at : at + 70] = rng.randbytes(70)
        device.memory[at + 2 : at + 4] = bytes([rng.randint(0, 9), 0])
        came_back: list[object] = []
        try:
            came_back += [token for _, token in queue.completions()]
        except RemoteProtocolError:
            pass
        assert len(came_back) == len(set(came_back)) <= len(heads)
        assert queue.num_published >= len(heads) - device.layout.size


# --- a million completions ---


def descriptors(device: Device, head: int) -> list[int]:
    """The ring's own descriptors that the device holds with a chain."""
    found = [head]
    while True:
        _, _, flags, following = struct.unpack_from("<QIHH", device.memory, found[-1] * 16)
        if flags & INDIRECT or not flags & NEXT:
            return found
        found.append(following)


@pytest.mark.parametrize(
    ("size", "max_indirect", "has_event_idx", "total"),
    [(256, 4, True, 500_000), (256, 0, False, 400_000), (8, 0, True, 60_000), (1, 3, False, 40_000)],
)
def test_completions_in_random_order_reuse_nothing_early_and_lose_nothing(
    size: int, max_indirect: int, has_event_idx: bool, total: int
) -> None:
    """A million in all. The model: what the device holds, and which tokens have come back."""
    rng = random.Random(size)
    queue, device = make(size, max_indirect, has_event_idx=has_event_idx)
    held: dict[int, tuple[int, list[int]]] = {}
    is_held = bytearray(size)
    has_returned = bytearray(total)
    asked = 0
    page = pack_pieces([(0, 4096)], is_writable=True)
    while asked < total or held:
        first = asked
        while asked < total and queue.add(page, asked) >= 0:
            asked += 1
        queue.publish()
        for token, head in zip(range(first, asked), device.take(), strict=True):
            taken = descriptors(device, head)
            assert not any(is_held[i] for i in taken), "a descriptor the device holds was used again"
            for i in taken:
                is_held[i] = 1
            held[head] = (token, taken)
        for head in rng.sample(list(held), rng.randint(1, len(held))):
            device.finish(head)
            for i in held[head][1]:
                is_held[i] = 0
        for came_back, token in queue.completions():
            assert isinstance(token, int)
            assert held.pop(came_back)[0] == token, "the token is the one that went with the chain"
            has_returned[token] += 1
    assert has_returned == bytes([1]) * total, "each came back once"
    assert (queue.num_published, queue.num_free) == (0, size)
