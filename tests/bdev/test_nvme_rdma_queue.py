"""One NVMe queue pair over RDMA, on a queue pair of the test: what is sent, where data goes, and what a controller cannot do
to us.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dpurt.bdev.buffers import address_of, aligned_buffer
from dpurt.bdev.nvme_rdma_memory import Memory
from dpurt.bdev.nvme_rdma_queue import RdmaConnection
from dpurt.errors import RemoteProtocolError
from dpurt.rdma.queue_pair import Received, Sge, Work
from dpurt.wire import nvme, rdma_cm
from dpurt.wire.nvme_queue import Command, Completion
from dpurt.wire.nvme_rdma import BOUNCE_BYTES
from dpurt.wire.rdma_cm import CmEvent

KEY = 0x77  # of added memory
SIZE = 8


@dataclass
class FakeRequest:
    local: Sge
    num_closed: int = 0

    def close(self) -> None:
        self.num_closed += 1


@dataclass
class FakeQp:
    """A queue pair that keeps what is posted."""

    number: int = 17
    failure: str = ""
    sends: list[Sge] = field(default_factory=list)
    receives: list[tuple[Sge, Callable[[Received], None]]] = field(default_factory=list)
    signalled: list[bool] = field(default_factory=list)
    send_room: int = 1000
    is_destroyed: bool = False

    def prepare(self) -> None: ...

    def post_send(self, chain: Sequence[Work], on_ended: Callable[[str], None]) -> None:
        self.sends += [work.local[0] for work in chain]

    def send_request(self, local: Sge) -> FakeRequest:
        return FakeRequest(local)

    def receive_request(self, local: Sge) -> FakeRequest:
        return FakeRequest(local)

    def repeat_send(
        self, request: FakeRequest, on_ended: Callable[[str], None], *, is_signalled: bool
    ) -> None:
        self.sends.append(request.local)
        self.signalled.append(is_signalled)

    def repeat_receive(self, request: FakeRequest, on_received: Callable[[Received], None]) -> None:
        self.receives.append((request.local, on_received))

    def destroy(self) -> None:
        self.is_destroyed = True


class FakeRegistration:
    def __init__(self, address: int, length: int) -> None:
        self._chunk = SimpleNamespace(address=address, lkey=1, rkey=2)

    def segments(self, address: int, length: int) -> Iterator[Any]:
        yield SimpleNamespace(chunk=self._chunk)

    def close(self) -> None: ...


class FakeAdapter:
    device = SimpleNamespace(limits=SimpleNamespace(max_rd_atomic=200))

    def __init__(self) -> None:
        self.qp = FakeQp()

    def register(self, address: int, length: int, access: int, owner: object = None) -> FakeRegistration:
        return FakeRegistration(address, length)

    def queue_pair(self, **depths: object) -> FakeQp:
        return self.qp


class FakeCm:
    def __init__(self, answer: CmEvent) -> None:
        self.answer = answer
        self.asked: tuple[int, bytes, int] | None = None
        self.is_closed = False

    async def connect(self, qp_num: int, private: bytes, reads: int) -> CmEvent:
        self.asked = qp_num, private, reads
        return self.answer

    def accept(self, queue_pair: object) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def accepted(entries: int = SIZE) -> CmEvent:
    return CmEvent(rdma_cm.CONNECT_RESPONSE, 0, struct.pack("<HH", 0, entries) + bytes(28))


class Rig:
    """A connection on fakes; `view` is added memory."""

    def __init__(self, answer: CmEvent | None = None, queue_id: int = 1) -> None:
        self.adapter = FakeAdapter()
        self.qp = self.adapter.qp
        self.cm = FakeCm(answer or accepted())
        self.memory = Memory()
        self.view = aligned_buffer(1 << 20)
        self.memory.layout.add(address_of(self.view), len(self.view), 1 << 30)
        self.done: list[Completion] = []
        self.problems: list[str] = []
        port = SimpleNamespace(adapter=self.adapter, key_of=lambda chunk: KEY)
        given: tuple[Any, ...] = (
            self.cm,
            port,
            self.memory,
            queue_id,
            SIZE,
            4096,
            self.done.append,
            self.lost,
        )
        self.connection = RdmaConnection(*given)

    def lost(self, problem: str) -> None:
        self.problems.append(problem)
        self.connection.close()

    def sqe(self, nth: int) -> bytes:
        """The nth submission entry sent."""
        return self.sent(nth)[:64]

    def sent(self, nth: int) -> bytes:
        sge = self.qp.sends[nth]
        capsules = self.connection._capsules
        at = sge.address - capsules.address
        return bytes(capsules.view[at : at + sge.length])

    def pointer(self, nth: int) -> tuple[int, int, int, int]:
        """(address, length, key, type) of the nth command's data."""
        address, low, key, kind = struct.unpack("<Q3sIB", self.sqe(nth)[24:40])
        return address, int.from_bytes(low, "little"), key, kind

    def answer(self, command_id: int, status: int = 0, *, length: int = 16) -> None:
        """The controller answers into the oldest receive."""
        place, on_received = self.qp.receives.pop(0)
        answers = self.connection._answers
        at = place.address - answers.address
        answers.view[at : at + 16] = struct.pack("<QHHHH", 0, 0, 1, command_id, status << 1)
        on_received(Received("success", length))


def read(buffers: Sequence[memoryview], num_blocks: int = 1) -> Command:
    return nvme.read(1, 0, num_blocks, buffers, None)


def write(buffers: Sequence[memoryview], num_blocks: int = 1) -> Command:
    return nvme.write(1, 0, num_blocks, buffers, None)


async def connected(answer: CmEvent | None = None) -> Rig:
    rig = Rig(answer)
    await rig.connection.connect()
    return rig


async def test_receives_are_there_before_the_controller_may_send() -> None:
    rig = await connected()
    assert len(rig.qp.receives) == SIZE
    assert rig.cm.asked is not None
    assert rig.cm.asked == (17, bytes.fromhex("0000 0100 0800 0700") + bytes(24), 128)


async def test_controller_that_receives_less_is_given_less_at_once() -> None:
    assert (await connected()).connection.room == SIZE - 1
    assert (await connected(accepted(4))).connection.room == 3


async def test_only_some_capsules_report_that_they_were_sent_and_room_never_runs_out() -> None:
    rig = await connected()
    for command_id in [*range(SIZE - 1), *range(SIZE - 1)]:
        rig.connection.submit(read([rig.view[:512]]))
        rig.answer(command_id)
    every = SIZE // 2
    assert rig.qp.signalled == [(nth + 1) % every == 0 for nth in range(2 * (SIZE - 1))]
    assert every + SIZE - 1 <= 2 * SIZE, "sends not reported, and commands in flight, fit in the send queue"


async def test_rejection_by_the_controller_is_told_in_its_words() -> None:
    rig = Rig(CmEvent(rdma_cm.REJECTED, 28, bytes.fromhex("00000600") + bytes(28)))
    with pytest.raises(RemoteProtocolError, match="no resources"):
        await rig.connection.connect()
    rig = Rig(CmEvent(rdma_cm.REJECTED, 8, bytes(148)))
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        await rig.connection.connect()


async def test_data_in_added_memory_is_named_where_it_is() -> None:
    rig = await connected()
    rig.connection.submit(read([rig.view[8192:12288], rig.view[12288:20480]], 3))
    assert rig.pointer(0) == (address_of(rig.view) + 8192, 12288, KEY, 0x40)
    rig.connection.submit(write([rig.view[: 1 << 20]], 256))
    assert rig.pointer(1) == (address_of(rig.view), 1 << 20, KEY, 0x40)


async def test_read_outside_is_copied_out_once_answered_well() -> None:
    rig = await connected()
    into = [aligned_buffer(4096), rig.view[:4096]]
    rig.connection.submit(read(into, 2))
    address, length, key, _ = rig.pointer(0)
    assert (length, key) == (8192, 2)
    bounce = rig.connection._bounce._memory
    at = address - bounce.address
    bounce.view[at : at + 8192] = b"\x11" * 4096 + b"\x22" * 4096
    rig.answer(0)
    assert into[0] == b"\x11" * 4096
    assert into[1] == b"\x22" * 4096
    assert rig.done[0].status.is_good


async def test_failed_read_outside_leaves_the_buffers_alone() -> None:
    rig = await connected()
    into = aligned_buffer(4096)
    rig.connection.submit(read([into]))
    bounce = rig.connection._bounce._memory
    bounce.view[:] = b"\x11" * len(bounce.view)
    rig.answer(0, status=6)
    assert not any(into)


async def test_small_write_travels_in_its_capsule() -> None:
    rig = await connected()
    data = aligned_buffer(4096)
    data[:] = b"\x33" * 4096
    rig.connection.submit(write([data]))
    assert rig.pointer(0) == (0, 4096, 0, 0x01)
    assert rig.sent(0)[64:] == data


async def test_command_without_data_points_nowhere() -> None:
    rig = await connected()
    rig.connection.submit(nvme.flush(1, None))
    assert rig.pointer(0) == (0, 0, 0, 0x40)


async def test_commands_wait_for_a_bounce_slot_in_order_and_others_pass_them() -> None:
    rig = await connected()
    while (rig.connection._bounce.take()) is not None:
        pass
    rig.connection._bounce.free(5)
    for _ in range(3):
        rig.connection.submit(read([aligned_buffer(BOUNCE_BYTES)], 16))
    rig.connection.submit(read([rig.view[:4096]]))
    assert [struct.unpack_from("<H", rig.sqe(i), 2)[0] for i in range(2)] == [0, 3]
    rig.answer(0)
    rig.answer(1)
    assert [struct.unpack_from("<H", rig.sqe(i), 2)[0] for i in range(4)] == [0, 3, 1, 2]


async def test_waiting_commands_do_not_run_over_the_send_queue() -> None:
    rig = await connected()
    while (rig.connection._bounce.take()) is not None:
        pass
    rig.connection.submit(read([aligned_buffer(4096)]))
    rig.connection.submit(read([rig.view[:4096]]))
    rig.connection.submit(read([rig.view[:4096]]))
    rig.connection._bounce.free(5)
    rig.qp.send_room = 0
    rig.answer(1)
    assert len(rig.qp.sends) == 2
    rig.qp.send_room = 1
    rig.answer(2)
    assert len(rig.qp.sends) == 3


async def test_each_answer_gives_its_receive_back() -> None:
    rig = await connected()
    for _ in range(50):
        rig.connection.submit(nvme.flush(1, None))
        rig.answer(struct.unpack_from("<H", rig.sqe(-1), 2)[0])
        assert len(rig.qp.receives) == SIZE
    assert len(rig.done) == 50


@pytest.mark.parametrize(("command_id", "length"), [(0, 15), (0, 64), (3, 16), (999, 16)])
async def test_answer_that_makes_no_sense_ends_the_connection(command_id: int, length: int) -> None:
    rig = await connected()
    command = read([rig.view[:4096]])
    rig.connection.submit(command)
    rig.answer(command_id, length=length)
    assert len(rig.problems) == 1
    assert rig.qp.is_destroyed
    assert rig.cm.is_closed
    assert not rig.done


async def test_close_hands_back_what_was_in_flight_and_waiting_and_nothing_comes_after() -> None:
    rig = await connected()
    while (rig.connection._bounce.take()) is not None:
        pass
    commands = [read([rig.view[:4096]]), read([aligned_buffer(4096)])]
    for command in commands:
        rig.connection.submit(command)
    assert rig.connection.close() == commands
    assert rig.qp.is_destroyed
    assert {request.num_closed for request in rig.connection._requests} == {1}, "twice would be the end of us"
    rig.answer(0)
    assert (rig.done, rig.problems, rig.connection.room) == ([], [], 0)
    assert rig.connection.close() == []


async def test_failed_queue_pair_is_told_once() -> None:
    rig = await connected()
    rig.qp.failure = "retries_exceeded"
    rig.connection._failed()
    rig.connection._failed()
    assert rig.problems == ["connection lost: retries_exceeded"]
