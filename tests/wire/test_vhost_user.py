"""The vhost-user codec and the virtio-blk configuration: exact bytes out, strict about what comes in."""

from __future__ import annotations

import random
import struct

import pytest

from dpurt.errors import LocalProtocolError, RemoteProtocolError
from dpurt.wire import vhost_user as wire
from dpurt.wire.vhost_user import BackEndChannel, BackEndRequest, FrontEndChannel, MemoryRegion, Request
from dpurt.wire.virtio_blk import CONFIG_BYTES, BlkConfig, BlkFeature

U64 = struct.Struct("<Q")


def message(request: int, flags: int, payload: bytes = b"") -> bytes:
    return struct.pack("<III", request, flags, len(payload)) + payload


def asked(kind: Request, *, acknowledges: bool = False) -> FrontEndChannel:
    channel = FrontEndChannel()
    channel.acknowledges = acknowledges
    channel.request(kind)
    return channel


# --- front end ---


def test_a_request_is_header_then_payload() -> None:
    sent = FrontEndChannel().request(Request.SET_FEATURES, wire.pack_u64(5))
    assert sent == bytes.fromhex("02000000 01000000 08000000 0500000000000000")


def test_a_reply_is_taken_in_any_cut() -> None:
    reply = message(1, 5, U64.pack(77))
    for cut in range(len(reply)):
        channel = asked(Request.GET_FEATURES)
        channel.receive(reply[:cut])
        assert channel.is_waiting
        channel.receive(reply[cut:])
        assert not channel.is_waiting
        assert wire.parse_u64(channel.take_reply()) == 77


def test_a_request_without_reply_is_acknowledged_where_that_was_negotiated() -> None:
    channel = FrontEndChannel()
    channel.request(Request.SET_OWNER)
    assert not channel.is_waiting
    channel.acknowledges = True
    assert channel.request(Request.SET_OWNER)[4] == 1 | 8, "need_reply"
    assert channel.is_waiting
    channel.receive(message(3, 5, U64.pack(0)))
    assert channel.take_reply() == b""


def test_a_refusal_is_a_remote_error_naming_the_request() -> None:
    channel = asked(Request.ADD_MEM_REG, acknowledges=True)
    with pytest.raises(RemoteProtocolError, match="refused ADD_MEM_REG: code 22"):
        channel.receive(message(37, 5, U64.pack(22)))


def test_two_requests_at_once_are_our_fault() -> None:
    with pytest.raises(LocalProtocolError, match="GET_FEATURES has no answer"):
        asked(Request.GET_FEATURES).request(Request.SET_OWNER)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (message(1, 4, U64.pack(0)), "version"),
        (message(1, 6, U64.pack(0)), "version"),
        (message(1, 1, U64.pack(0)), "reply"),
        (message(2, 5, U64.pack(0)), "reply"),
        (struct.pack("<III", 1, 5, 4097), "size"),
        (message(1, 5, U64.pack(0)) * 2, "unasked"),
    ],
)
def test_what_is_no_answer_is_a_remote_error(data: bytes, problem: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        asked(Request.GET_FEATURES).receive(data)
    assert caught.value.code == problem


def test_random_bytes_raise_only_remote_errors() -> None:
    rng = random.Random(1)
    kinds = list(Request)
    for _ in range(20_000):
        channel = asked(rng.choice(kinds), acknowledges=True)
        start = message(rng.choice(kinds), 5, rng.randbytes(rng.choice([0, 8, 12, 72])))
        data = bytearray(start)
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            channel.receive(bytes(data))
            if not channel.is_waiting:
                wire.parse_u64(channel.take_reply())
        except RemoteProtocolError:
            continue


# --- payloads ---


def test_regions_and_rings_are_laid_out_as_the_specification_says() -> None:
    region = MemoryRegion(0x7000, 0x1000)
    entry = struct.pack("<QQQQ", 0x7000, 0x1000, 0x7000, 0)
    assert wire.pack_table([region, region]) == struct.pack("<II", 2, 0) + entry * 2
    assert wire.pack_region(region) == bytes(8) + entry
    assert wire.pack_vring_state(1, 128) == struct.pack("<II", 1, 128)
    assert wire.pack_vring_address(1, 10, 20, 30) == struct.pack("<IIQQQQ", 1, 0, 10, 30, 20, 0)


@pytest.mark.parametrize("count", [0, 9])
def test_a_table_has_one_to_eight_regions(count: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"{count} regions"):
        wire.pack_table([MemoryRegion(0, 1)] * count)


def test_an_answer_about_another_ring_is_a_remote_error() -> None:
    assert wire.parse_vring_state(struct.pack("<II", 3, 9), 3) == 9
    with pytest.raises(RemoteProtocolError, match="ring 2"):
        wire.parse_vring_state(struct.pack("<II", 2, 9), 3)
    with pytest.raises(RemoteProtocolError, match="7 bytes"):
        wire.parse_vring_state(bytes(7), 3)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (struct.pack("<III", 0, 60, 0) + bytes(59), "config"),
        (struct.pack("<III", 0, 59, 0) + bytes(59), "config"),
        (struct.pack("<III", 4, 60, 0) + bytes(60), "config"),
        (struct.pack("<III", 0, 0, 0), "config_refused"),
        (bytes(11), "size"),
    ],
)
def test_a_configuration_is_whole_or_a_remote_error(payload: bytes, problem: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        wire.parse_config(payload, 60)
    assert caught.value.code == problem


# --- back end's requests ---


def test_a_config_change_is_seen_and_answered_where_asked() -> None:
    channel = BackEndChannel()
    assert channel.receive(message(2, 1)) == ([BackEndRequest.CONFIG_CHANGE], b"")
    known, answer = channel.receive(message(2, 1 | 8))
    assert (known, answer) == ([BackEndRequest.CONFIG_CHANGE], message(2, 5, U64.pack(0)))


def test_an_unknown_request_is_refused_and_nothing_else() -> None:
    channel = BackEndChannel()
    assert channel.receive(message(99, 1)) == ([], b"")
    assert channel.receive(message(99, 9)) == ([], message(99, 5, U64.pack(1)))


def test_a_back_end_that_answers_on_its_own_channel_is_wrong() -> None:
    with pytest.raises(RemoteProtocolError, match="answers nothing"):
        BackEndChannel().receive(message(2, 5))


# --- virtio-blk configuration ---


def config(**fields: int) -> bytes:
    values = {
        "capacity": 2048,
        "size_max": 0,
        "seg_max": 126,
        "blk_size": 512,
        "queues": 2,
        "discard": 8,
        "zeroes": 8,
    }
    values |= fields
    head = struct.pack("<QII4xI", *(values[key] for key in ("capacity", "size_max", "seg_max", "blk_size")))
    tail = struct.pack("<HIIIIIB3x", values["queues"], values["discard"], 1, 1, values["zeroes"], 1, 1)
    return head + bytes(10) + tail


ALL = BlkFeature(sum(BlkFeature))


def test_a_configuration_is_read() -> None:
    assert len(config()) == CONFIG_BYTES
    got = BlkConfig.parse(config(), ALL)
    assert (got.size_bytes, got.block_size, got.max_segments, got.num_queues) == (1 << 20, 512, 126, 2)
    assert (got.max_segment_bytes, got.max_discard_bytes, got.max_zeroes_bytes) == (0, 4096, 4096)


def test_fields_without_their_feature_are_not_believed() -> None:
    got = BlkConfig.parse(config(size_max=4096, blk_size=4096), BlkFeature.VERSION_1)
    assert (got.block_size, got.max_segment_bytes, got.max_segments, got.num_queues) == (512, 0, 1, 1)
    assert (got.max_discard_bytes, got.max_zeroes_bytes) == (0, 0)


@pytest.mark.parametrize(
    "fields",
    [{"blk_size": 0}, {"blk_size": 1000}, {"blk_size": 8192}, {"capacity": 2**63}, {"size_max": 100}],
)
def test_an_impossible_configuration_is_a_remote_error(fields: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="config"):
        BlkConfig.parse(config(**fields), ALL)
