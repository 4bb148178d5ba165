"""What of the verbs fabric needs no RDMA device: cutting runs, messages, and saying that there is none."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dpurt.client import connect as client_of
from dpurt.errors import FabricError, NodeUnavailable, RdmaUnavailable
from dpurt.fabric import connect
from dpurt.fabric.verbs_control import Ask, Control, Done, Granted, Landing, LaneOffer, Run, proof
from dpurt.fabric.verbs_link import cut
from dpurt.fabric.verbs_moves import MAX_WORK_BYTES, aligned, length_of, merged, striped, with_immediate
from dpurt.rdma.device import find, why_off
from dpurt.rdma.queue_pair import Opcode, QueuePairAddress, Sge
from dpurt.testing.node import running, small_config, small_host, spaces_of
from dpurt.testing.node_steps import load, store

KEY = 0xC0FFEE11
LENGTHS = st.lists(st.integers(1, 3 * MAX_WORK_BYTES), min_size=1, max_size=6)


def runs_of(lengths: list[int], start: int) -> list[tuple[int, int]]:
    """Runs with gaps between them."""
    found = []
    for length in lengths:
        found.append((start, length))
        start += length + 4096
    return found


@given(lengths=LENGTHS, cuts=st.lists(st.integers(1, 100), max_size=5))
def test_works_cover_both_sides_exactly_and_in_order(lengths: list[int], cuts: list[int]) -> None:
    total = sum(lengths)
    edges = sorted({0, total, *(total * share // 101 for share in cuts)})
    theirs = [end - start for start, end in pairwise(edges)]
    local = [Sge(address, length, 1) for address, length in runs_of(lengths, 1000)]
    remote = [Run(address, length, KEY) for address, length in runs_of(theirs, 10**9)]
    works = aligned(Opcode.READ, local, remote)
    assert all(0 < work.local[0].length <= MAX_WORK_BYTES for work in works)
    assert merged_exactly([(w.local[0].address, w.local[0].length) for w in works]) == runs_of(lengths, 1000)
    assert merged_exactly([(w.remote_address, w.local[0].length) for w in works]) == runs_of(theirs, 10**9)


def test_neighbours_on_both_sides_are_one_work_up_to_its_most() -> None:
    small = 64 << 10
    local = [Sge(1000 + i * small, small, 1) for i in range(20)]
    remote = [Run(10**9 + i * small, small, KEY) for i in range(20)]
    works = aligned(Opcode.READ, local, remote)
    assert [length_of([work]) for work in works] == [MAX_WORK_BYTES, 4 * small]
    other_keys = [Run(run.address, run.length, KEY + i % 2) for i, run in enumerate(remote)]
    assert len(aligned(Opcode.READ, local, other_keys)) == 20, "a key opens its own range only"
    apart = [Sge(sge.address + 8 * i, sge.length, 1) for i, sge in enumerate(local)]
    assert len(aligned(Opcode.READ, apart, remote)) == 20


def merged_exactly(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for address, length in spans:
        if found and sum(found[-1]) == address:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((address, length))
    return found


@given(lengths=LENGTHS, step=st.sampled_from([4096, 256 << 10, 1 << 20, 3 << 20]))
def test_stripes_are_the_works_again_in_groups_of_one_size(lengths: list[int], step: int) -> None:
    local = [Sge(address, length, 1) for address, length in runs_of(lengths, 1000)]
    works = aligned(Opcode.READ, local, [Run(10**9, sum(lengths), KEY)])
    groups = striped(works, step)
    assert [length_of(group) for group in groups[:-1]] == [step] * (len(groups) - 1)
    again = [work for group in groups for work in group]
    assert merged_exactly([(w.local[0].address, w.local[0].length) for w in again]) == runs_of(lengths, 1000)
    assert merged_exactly([(w.remote_address, w.local[0].length) for w in again]) == [(10**9, sum(lengths))]


def test_only_the_last_work_tells_the_peer():
    works = aligned(Opcode.WRITE, [Sge(0, 3 * MAX_WORK_BYTES, 1)], [Run(0, 3 * MAX_WORK_BYTES, KEY)])
    told = with_immediate(works, 77)
    assert [work.opcode for work in told] == [Opcode.WRITE, Opcode.WRITE, Opcode.WRITE_IMMEDIATE]
    assert told[-1].immediate == 77


def test_small_pieces_of_a_buffer_become_one_registration_and_distant_ones_do_not():
    small = [(10_000 + 17 * i, 17) for i in range(1000)]
    assert merged(small) == [(10_000, 17_000)]
    assert merged([(1 << 20, 10), (0, 10)]) == [(0, 10), (1 << 20, 10)]
    assert merged([(0, 10), (0, 5000), (20, 5)]) == [(0, 5000)]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=5), data=st.data())
def test_a_cut_of_a_landing_is_the_bytes_asked_for(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    offset = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - offset))
    runs = [Run(address, size, KEY) for address, size in runs_of(lengths, 0)]
    everything = [run.address + i for run in runs for i in range(run.length)]
    got = [run.address + i for run in cut(runs, offset, length) for i in range(run.length)]
    assert got == everything[offset : offset + length]


def test_no_message_shows_a_key():
    runs = [Run(4096, 100, KEY)]
    for message in (
        runs,
        Granted(1, {0: runs}),
        Landing(1, 100, {"10.9.0.1": runs}),
        aligned(Opcode.READ, [Sge(0, 100, 1)], runs),
    ):
        assert str(KEY) not in repr(message)
        assert f"{KEY:x}" not in repr(message).lower()


def test_a_proof_is_of_every_word_of_it():
    address = QueuePairAddress(17, 5, "::ffff:10.9.0.1", 4096, 16)
    words = [b"t" * 32, "host", (b"a" * 16, b"b" * 16), 7, [LaneOffer("10.9.0.1", address)]]
    others = [
        b"T" * 32,
        "node",
        (b"a" * 16, b"c" * 16),
        8,
        [LaneOffer("10.9.0.1", QueuePairAddress(18, 5, "::ffff:10.9.0.1", 4096, 16))],
        [LaneOffer("10.9.0.2", address)],
        [LaneOffer("10.9.0.1", address)] * 2,
    ]
    proofs = {proof(*words)}
    for number, other in enumerate(others):
        at = min(number, 4)
        proofs.add(proof(*words[:at], other, *words[at + 1 :]))
    assert len(proofs) == 1 + len(others)


@dataclass
class Ends:
    one: Control
    other: Control


@pytest.fixture
async def ends():
    left, right = socket.socketpair()
    made = [Control(sock, name) for sock, name in ((left, "left"), (right, "right"))]
    yield Ends(*made)
    for control in made:
        control.close()


async def test_messages_arrive_in_order_also_when_the_socket_is_full(ends: Ends):
    asks = [Ask(number, "pull", [(1, 2, 3, 4)] * 500, [0]) for number in range(1, 200)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.one.flush)
        for ask in asks:
            ends.one.post(ask)
        assert [await ends.other.receive(trio.current_time() + 5) for _ in asks] == asks
        nursery.cancel_scope.cancel()


async def test_what_is_posted_soon_goes_out_in_one_send_and_after_what_cannot_wait(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
):
    sends: list[int] = []
    send = Control._send
    monkeypatch.setattr(Control, "_send", lambda self: (sends.append(len(self._unsent)), send(self)))
    soon = [Done(number, True) for number in range(1, 17)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.one.flush)
        for done in soon:
            ends.one.post(done, soon=True)
        ends.one.post(Done(99, True))
        assert [await ends.other.receive() for _ in range(17)] == [Done(99, True), *soon]
        nursery.cancel_scope.cancel()
    assert len(sends) == 2


async def test_what_was_to_be_sent_soon_is_not_lost_by_a_close(ends: Ends):
    ends.one.post(Done(1, True), soon=True)
    ends.one.close()
    assert await ends.other.receive() == Done(1, True)
    with pytest.raises(FabricError, match="closed"):
        await ends.other.receive()


async def test_a_peer_that_does_not_read_is_cut_off(ends: Ends):
    for number in range(100_000):
        ends.one.post(Ask(number, "pull", [(1, 2, 3, 4)] * 1000, [0]))
        if not ends.one.is_open:
            return
    raise AssertionError("everything was kept")


async def test_a_message_that_is_none_or_not_the_one_due_is_a_protocol_error(ends: Ends):
    ends.one.post(Done(1, True))
    with pytest.raises(FabricError, match="Done where Ask was due"):
        await ends.other.expect(Ask, trio.current_time() + 5)
    for data in (b"\xff\xff\xff\xff", b"\x02\x00\x00\x00ab"):
        left, right = socket.socketpair()
        with left:
            left.sendall(data)
            control = Control(right, "odd")
            with pytest.raises(FabricError, match="protocol"):
                await control.receive(trio.current_time() + 5)
            control.close()


# --- where there is none ---


@pytest.fixture
def no_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpurt.rdma.device._SYSFS", tmp_path / "infiniband")


@pytest.mark.usefixtures("no_rdma")
async def test_without_a_device_a_host_is_told_why_it_cannot_connect():
    assert "no RDMA device in" in why_off()
    with pytest.raises(RdmaUnavailable, match="RDMA device mlx5_0: no RDMA device in"):
        find("mlx5_0")
    where = {"host": "192.0.2.1", "port": 1}
    with pytest.raises(NodeUnavailable, match="verbs is off on this machine: no RDMA device"):
        await connect("verbs", where, 1, bytes(32), trio.current_time() + 5)


@pytest.mark.usefixtures("no_rdma")
async def test_without_a_device_the_node_starts_and_says_what_it_uses_instead(tmp_path: Path):
    config = small_config(tmp_path / "run", host=[small_host("host-a", fabrics=["verbs", "tcp"])])
    with trio.fail_after(20):
        async with running(config) as node:
            assert "no RDMA device" in node.stats()["fabrics_off"]["verbs"]  # type: ignore[index]
            endpoint, spaces = node.gateway.endpoint, spaces_of(config)
            async with client_of(endpoint, host="host-a", spaces=spaces) as client:
                session = await client.session(trio.current_time() + 5)
                assert session.fabric == "tcp"
                assert session.fabric_reason.startswith("verbs: no RDMA device")
                await store(client, "w", 1, 2)
                assert [block.status for block in await load(client, "r", 1, 2)] == ["ok", "ok"]
