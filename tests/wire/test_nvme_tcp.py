"""NVMe/TCP on bytes: vectors from the specification, any cut of the stream, and peers that break the rules."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterable

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.errors import RemoteProtocolError
from dpurt.wire import nvme
from dpurt.wire.nvme_queue import Command, Completion
from dpurt.wire.nvme_status import GOOD, Status
from dpurt.wire.nvme_tcp import TcpQueue, term_request

LAST, SUCCESS = 4, 8
BLOCK = 4096


def ic_response(digests: int = 0, alignment: int = 0, max_data: int = 131072) -> bytes:
    return struct.pack("<BBBBIHBBI112x", 1, 0, 128, 0, 128, 0, alignment, digests, max_data)


def pdu(
    kind: int, flags: int, body: bytes, data: bytes = b"", *, digests: int = 0, padding: int = 0
) -> bytes:
    """A PDU from a controller."""
    extra = 4 if digests & 1 else 0
    data_at = 24 + extra + padding if data else 0
    total = data_at + len(data) + (4 if digests & 2 else 0) if data else 24 + extra
    flags |= (digests & 1) | (digests & 2 if data else 0)
    head = struct.pack("<BBBBI", kind, flags, 24, data_at, total) + body
    out = (
        head
        + (struct.pack("<I", crc32c.crc32c(head)) if extra else b"")
        + bytes(padding if data else 0)
        + data
    )
    return out + (struct.pack("<I", crc32c.crc32c(data)) if data and digests & 2 else b"")


def data_body(command_id: int, offset: int, length: int, tag: int = 0) -> bytes:
    return struct.pack("<HHII4x", command_id, tag, offset, length)


def response(command_id: int, status: int = 0, result: int = 0, digests: int = 0) -> bytes:
    return pdu(5, 0, struct.pack("<QHHHH", result, 0, 1, command_id, status << 1), digests=digests)


def feed(
    queue: TcpQueue, data: bytes, cuts: Iterable[int] = (), into: list[Completion] | None = None
) -> list[Completion]:
    """Receive bytes as a socket would: into the windows, never more than they hold; `cuts` limit each receive."""
    done: list[Completion] = [] if into is None else into
    limits = iter(cuts)
    while data:
        windows = queue.windows()
        assert windows, "there is always a place for more"
        count = min(len(data), sum(map(len, windows)), next(limits, 1 << 30))
        left = data[:count]
        for window in windows:
            size = min(len(window), len(left))
            window[:size] = left[:size]
            left = left[size:]
        done += queue.received(count)
        data = data[count:]
    return done


def take(queue: TcpQueue, limit: int = 1 << 30) -> bytes:
    """Everything there is to send, at most `limit` bytes a time."""
    out = b""
    while buffers := queue.unsent():
        piece = b"".join(buffers)[:limit]
        assert not queue.sent(len(piece))
        out += piece
    return out


def greeted(size: int = 8, digests: int = 0, alignment: int = 0, **params: int) -> TcpQueue:
    queue = TcpQueue(size, header_digest=bool(digests & 1), data_digest=bool(digests & 2), **params)
    take(queue)
    feed(queue, ic_response(digests, alignment))
    assert queue.is_ready
    return queue


def a_read(num_blocks: int = 2) -> tuple[Command, memoryview]:
    buffer = memoryview(bytearray(num_blocks * BLOCK))
    return nvme.read(1, 0, num_blocks, [buffer], None), buffer


def a_write(data: bytes) -> Command:
    return nvme.write(1, 0, len(data) // BLOCK, [memoryview(data)], None)


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def submit(queue: TcpQueue, command: Command) -> int:
    queue.submit(command)
    return int.from_bytes(command.sqe[2:4], "little")


# --- our bytes ---


def test_greeting_bytes() -> None:
    assert take(TcpQueue(8)) == bytes.fromhex("0000800080000000") + bytes(120)
    assert take(TcpQueue(8, header_digest=True, data_digest=True))[8:16] == bytes.fromhex("0000000300000000")


def test_read_capsule_bytes() -> None:
    queue = greeted()
    queue.submit(a_read()[0])
    capsule = take(queue)
    assert capsule[:8] == bytes.fromhex("0400480048000000")
    assert capsule[8:16] == bytes.fromhex("0240000001000000")
    assert capsule[32:48] == bytes.fromhex("0000000000000000 00200000 000000 5a")
    assert len(capsule) == 72


def test_write_that_fits_goes_in_the_capsule() -> None:
    queue = greeted(in_capsule_bytes=BLOCK)
    data = noise(BLOCK)
    queue.submit(a_write(data))
    out = take(queue)
    assert out[:8] == struct.pack("<BBBBI", 4, 0, 72, 72, 72 + BLOCK)
    assert out[32:48] == bytes.fromhex("0000000000000000 00100000 000000 01")
    assert out[72:] == data


def test_data_is_aligned_as_the_controller_wishes_and_digests_cover_it() -> None:
    queue = greeted(in_capsule_bytes=BLOCK, digests=3, alignment=31)
    data = noise(BLOCK)
    queue.submit(a_write(data))
    out = take(queue)
    assert out[:8] == struct.pack("<BBBBI", 4, 3, 72, 128, 128 + BLOCK + 4)
    assert out[72:76] == struct.pack("<I", crc32c.crc32c(out[:72]))
    assert not any(out[76:128])
    assert out[128:-4] == data
    assert out[-4:] == struct.pack("<I", crc32c.crc32c(data))


def test_r2t_is_answered_in_pdus_the_controller_can_take() -> None:
    queue = greeted(in_capsule_bytes=0)
    queue._max_data_bytes = 8192
    data = noise(5 * BLOCK)
    command_id = submit(queue, a_write(data))
    take(queue)
    assert not feed(queue, pdu(9, 0, data_body(command_id, 0, 5 * BLOCK, tag=0x77)))
    out = take(queue, 1000)
    for offset, size, flags in ((0, 8192, 0), (8192, 8192, 0), (16384, 4096, LAST)):
        head = struct.pack("<BBBBI", 6, flags, 24, 24, 24 + size)
        assert out[:24] == head + data_body(command_id, offset, size, tag=0x77)
        assert out[24 : 24 + size] == data[offset : offset + size]
        out = out[24 + size :]
    assert not out
    assert [done.status for done in feed(queue, response(command_id))] == [GOOD]


def test_term_request_bytes() -> None:
    assert term_request("nvme_tcp_digest") == bytes.fromhex("0200180018000000 0300 00000000") + bytes(10)


# --- commands ---


def test_read_ends_by_the_success_flag() -> None:
    queue = greeted()
    command, buffer = a_read()
    command_id = submit(queue, command)
    data = noise(len(buffer))
    (done,) = feed(queue, pdu(7, LAST | SUCCESS, data_body(command_id, 0, len(data)), data))
    assert done == Completion(command, GOOD, 0)
    assert buffer == data
    assert queue.pair.room == 7


def test_read_without_the_flag_ends_by_its_response() -> None:
    queue = greeted()
    command, buffer = a_read()
    command_id = submit(queue, command)
    data = noise(len(buffer))
    assert not feed(queue, pdu(7, LAST, data_body(command_id, 0, len(data)), data))
    (done,) = feed(queue, response(command_id))
    assert done.status == GOOD


def test_failed_read_may_have_moved_some_data() -> None:
    queue = greeted()
    command_id = submit(queue, a_read()[0])
    feed(queue, pdu(7, 0, data_body(command_id, 0, BLOCK), bytes(BLOCK)))
    (done,) = feed(queue, response(command_id, 0x281))
    assert done.status == Status(2, 0x81)


def test_wrong_data_digest_fails_the_command_only() -> None:
    queue = greeted(digests=3)
    command, buffer = a_read()
    command_id = submit(queue, command)
    damaged = bytearray(pdu(7, LAST | SUCCESS, data_body(command_id, 0, 8192), bytes(8192), digests=3))
    damaged[100] ^= 1
    (done,) = feed(queue, bytes(damaged))
    assert str(done.status) == "transient transport error, sct 0 sc 0x22"
    command_id = submit(queue, command)
    (done,) = feed(queue, pdu(7, LAST | SUCCESS, data_body(command_id, 0, 8192), bytes(8192), digests=3))
    assert done.status == GOOD
    assert not any(buffer)


def test_write_refused_before_its_data_left_ends_only_when_it_has() -> None:
    """Else its buffer would be reused while it still waits to be sent."""
    queue = greeted(in_capsule_bytes=0)
    command_id = submit(queue, a_write(bytes(2 * BLOCK)))
    take(queue)
    feed(queue, pdu(9, 0, data_body(command_id, 0, 2 * BLOCK)))
    assert feed(queue, response(command_id, 0x06)) == []
    assert queue.sent(24 + BLOCK) == []
    (done,) = queue.sent(BLOCK)
    assert done.status == Status(0, 0x06)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([0, 1, 2, 3]))
def test_any_mix_of_commands_in_any_cuts_moves_every_byte(data: st.DataObject, digests: int) -> None:
    """Against an honest controller that answers in random order, in random pieces, with or without SUCCESS."""
    queue = greeted(8, digests, in_capsule_bytes=BLOCK)
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    disk = noise(64 * BLOCK, 7)
    reads: dict[int, tuple[memoryview, int, int]] = {}
    stream, ended = b"", []
    for _ in range(data.draw(st.integers(1, 7))):
        first, count = rng.randrange(32), rng.randrange(1, 16)
        buffer = memoryview(bytearray(count * BLOCK))
        cut = rng.randrange(count + 1) * BLOCK
        command = nvme.read(
            1, first, count, [buffer[:cut], buffer[cut:]] if cut % len(buffer) else [buffer], None
        )
        reads[submit(queue, command)] = buffer, first, count
    take(queue, rng.randrange(1, 200))
    parts: list[list[bytes]] = [
        honest_read(command_id, disk[first * BLOCK : (first + count) * BLOCK], rng, digests)
        for command_id, (_, first, count) in reads.items()
    ]
    while parts:
        chosen = rng.choice(parts)
        stream += chosen.pop(0)
        if not chosen:
            parts.remove(chosen)
    ended = feed(queue, stream, (rng.randrange(1, 9000) for _ in range(1 << 20)))
    assert len(ended) == len(reads)
    assert all(done.status == GOOD for done in ended)
    for buffer, first, count in reads.values():
        assert buffer == disk[first * BLOCK : (first + count) * BLOCK]


def honest_read(command_id: int, data: bytes, rng: random.Random, digests: int) -> list[bytes]:
    step = rng.randrange(1, len(data) + 1)
    has_flag = rng.random() < 0.5
    pdus = []
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        flags = 0
        if at + step >= len(data):
            flags = LAST | (SUCCESS if has_flag else 0)
        body = data_body(command_id, at, len(piece))
        pdus.append(pdu(7, flags, body, piece, digests=digests, padding=rng.choice([0, 4, 60])))
    return pdus if has_flag else [*pdus, response(command_id, digests=digests)]


# --- peers that break the rules ---

R, W = 0, 1  # ids of the read and the write in flight below


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\xff" * 24, "nvme_tcp_header"),
        (pdu(6, 0, data_body(R, 0, 4)), "nvme_tcp_header"),
        (ic_response()[:24], "nvme_tcp_header"),
        (struct.pack("<BBBBI16x", 5, 0, 20, 0, 24), "nvme_tcp_header"),
        (struct.pack("<BBBBI16x", 5, 0, 24, 0, 28), "nvme_tcp_header"),
        (pdu(5, 1, bytes(16)), "nvme_tcp_header"),
        (response(5), "nvme_command_id"),
        (response(R), "nvme_tcp_sequence"),
        (response(W), "nvme_tcp_sequence"),
        (pdu(7, 0, data_body(9, 0, 4), b"data"), "nvme_command_id"),
        (pdu(7, 0, data_body(R, 4, 4), b"data"), "nvme_tcp_range"),
        (pdu(7, 0, data_body(R, 0, 8196), bytes(8196)), "nvme_tcp_range"),
        (pdu(7, 0, data_body(R, 0, 0)), "nvme_tcp_header"),
        (pdu(7, 0, data_body(W, 0, 4), b"data"), "nvme_tcp_range"),
        (pdu(7, 0, data_body(R, 0, 8), b"data"), "nvme_tcp_header"),
        (pdu(7, LAST | SUCCESS, data_body(R, 0, 4), b"data"), "nvme_tcp_sequence"),
        (pdu(7, SUCCESS, data_body(R, 0, 8192), bytes(8192)), "nvme_tcp_header"),
        (
            pdu(7, LAST, data_body(R, 0, 4), b"data") + pdu(7, 0, data_body(R, 4, 4), b"data"),
            "nvme_tcp_sequence",
        ),
        (pdu(7, 2, data_body(R, 0, 4), b"data"), "nvme_tcp_header"),
        (pdu(9, 0, data_body(R, 0, 4)), "nvme_tcp_sequence"),
        (pdu(9, 0, data_body(W, 0, 0)), "nvme_tcp_range"),
        (pdu(9, 0, data_body(W, 4, 4)), "nvme_tcp_range"),
        (pdu(9, 0, data_body(W, 0, 8196)), "nvme_tcp_range"),
        (pdu(9, 0, data_body(W, 0, 4)) + pdu(9, 0, data_body(W, 4, 4)), "nvme_tcp_limit"),
        (pdu(3, 0, struct.pack("<HI10x", 5, 0)), "nvme_tcp_terminated"),
        (struct.pack("<BBBBI16x", 3, 0, 24, 0, 4000), "nvme_tcp_header"),
    ],
)
def test_broken_rule_has_its_code(sent: bytes, code: str) -> None:
    queue = greeted(in_capsule_bytes=0)
    assert (submit(queue, a_read()[0]), submit(queue, a_write(bytes(2 * BLOCK)))) == (R, W)
    take(queue)
    with pytest.raises(RemoteProtocolError) as caught:
        feed(queue, sent)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (response(0), "nvme_tcp_sequence"),
        (ic_response(digests=1), "nvme_tcp_parameter"),
        (ic_response(alignment=32), "nvme_tcp_parameter"),
        (ic_response(max_data=4092), "nvme_tcp_parameter"),
        (struct.pack("<BBBBIHBBI112x", 1, 0, 128, 0, 128, 1, 0, 0, 8192), "nvme_tcp_parameter"),
        (struct.pack("<BBBBI120x", 1, 0, 128, 0, 132), "nvme_tcp_header"),
    ],
)
def test_broken_greeting_has_its_code(sent: bytes, code: str) -> None:
    queue = TcpQueue(8)
    with pytest.raises(RemoteProtocolError) as caught:
        feed(queue, sent)
    assert caught.value.code == code
    assert not queue.is_ready


def test_wrong_header_digest_is_fatal() -> None:
    queue = greeted(digests=1)
    submit(queue, a_read()[0])
    sent = bytearray(response(R, 0x06, digests=1))
    sent[9] ^= 1
    with pytest.raises(RemoteProtocolError) as caught:
        feed(queue, bytes(sent))
    assert caught.value.code == "nvme_tcp_digest"


def test_command_that_ended_just_before_a_broken_rule_is_not_lost() -> None:
    queue = greeted()
    command, buffer = a_read()
    command_id = submit(queue, command)
    data = noise(len(buffer))
    done: list[Completion] = []
    sent = pdu(7, LAST | SUCCESS, data_body(command_id, 0, len(data)), data)
    feed(queue, sent + b"\xff" * 24, into=done)
    with pytest.raises(RemoteProtocolError, match="PDU type 255"):
        queue.windows()
    assert [completion.status for completion in done] == [GOOD]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([0, 3]))
def test_random_bytes_never_crash_nor_touch_memory_that_is_not_theirs(sent: bytes, digests: int) -> None:
    queue = greeted(digests=digests, in_capsule_bytes=0)
    around = bytearray(b"." * 3 * BLOCK)
    queue.submit(nvme.read(1, 0, 1, [memoryview(around)[BLOCK : 2 * BLOCK]], None))
    with contextlib.suppress(RemoteProtocolError):
        feed(queue, sent)
    assert around[:BLOCK] == around[2 * BLOCK :] == b"." * BLOCK


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([0, 3]))
def test_mutated_answers_end_in_completions_or_a_protocol_error(data: st.DataObject, digests: int) -> None:
    queue = greeted(digests=digests, in_capsule_bytes=0)
    submit(queue, a_read()[0])
    submit(queue, a_write(bytes(2 * BLOCK)))
    take(queue)
    sent = bytearray(
        pdu(7, LAST, data_body(R, 0, 8192), bytes(8192), digests=digests)
        + response(R, digests=digests)
        + pdu(9, 0, data_body(W, 0, 8192), digests=digests)
        + response(W, 6, digests=digests)
    )
    heads = [*range(32), *range(8200, len(sent))]
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.sampled_from(heads))] = data.draw(st.integers(0, 255))
    done: list[Completion] = []
    with contextlib.suppress(RemoteProtocolError):
        feed(queue, bytes(sent), into=done)
        take_loosely(queue, done)
    assert len(done) + len(queue.pair) == 2, "no command is lost"


def take_loosely(queue: TcpQueue, done: list[Completion]) -> None:
    while buffers := queue.unsent():
        done += queue.sent(sum(map(len, buffers)))
