"""The connection manager's structs: sizes and places as in rdma_user_cm.h."""

from __future__ import annotations

import struct

from dpurt.wire import rdma_cm
from dpurt.wire.rdma_cm import CmEvent, QpAttributes


def test_requests_have_a_header_and_the_structs_of_the_abi() -> None:
    sizes = {
        rdma_cm.create_id(0): (0, 24, 4),
        rdma_cm.resolve_address(1, "10.9.0.1", 4420, 5000): (3, 64, 0),
        rdma_cm.resolve_route(1, 5000): (4, 8, 0),
        rdma_cm.connect(1, 17, b"", reads=1): (6, 288, 0),
        rdma_cm.accept(1): (8, 296, 0),
        rdma_cm.init_qp_attr(1, 2, 0): (11, 16, 144),
        rdma_cm.get_event(0): (12, 8, 336),
        rdma_cm.set_ack_timeout(1, 0): (14, 24, 0),
        rdma_cm.query_address(1, 0): (19, 16, 280),
    }
    for request, (command, body_bytes, answer_bytes) in sizes.items():
        assert struct.unpack_from("=IHH", request) == (command, body_bytes, answer_bytes)
        assert len(request) == 8 + body_bytes


def test_an_id_has_user_data_or_it_would_get_no_events() -> None:
    assert struct.unpack_from("=Q", rdma_cm.create_id(0), 8) != (0,)


def test_target_address_is_the_second_of_two_and_the_first_is_left_open() -> None:
    body = rdma_cm.resolve_address(9, "10.9.0.1", 4420, 5000)[8:]
    assert body[:28] == bytes(28)
    assert body[28:36] == struct.pack("=H", 2) + bytes([0x11, 0x44, 10, 9, 0, 1])
    assert body[56:] == struct.pack("=II", 9, 5000)


def test_connect_carries_private_data_and_how_many_reads_are_allowed() -> None:
    body = rdma_cm.connect(9, 17, b"hello", reads=16)[8:]
    assert struct.unpack_from("=II", body) == (17, 0)
    assert body[8:13] == b"hello"
    assert list(body[264:272]) == [5, 0, 16, 0, 0, 7, 7, 1]
    assert struct.unpack_from("=I", body, 272) == (9,)


def event(kind: int, status: int, private: bytes) -> bytes:
    head = struct.pack("=QIIi", 1, 9, kind, status) + bytes(8)
    return (head + private.ljust(256, b"\0") + bytes([len(private)])).ljust(336, b"\0")


def test_event_tells_what_happened_and_the_private_data() -> None:
    happened = CmEvent.decode(event(rdma_cm.REJECTED, 28, b"\0\0\6\0"))
    assert happened == CmEvent(rdma_cm.REJECTED, 28, b"\0\0\6\0")
    assert CmEvent.decode(event(rdma_cm.UNREACHABLE, -110, b"")).status == -110
    assert happened.name == "rejected"


def test_device_is_named_by_guid_and_the_address_that_leads_out() -> None:
    answer = bytes.fromhex("505400fffe123456 01 00 ffff 1000 1000") + struct.pack(
        "=HH4s", 2, 0, bytes([10, 9, 0, 2])
    )
    assert rdma_cm.decode_device(answer.ljust(280, b"\0")) == ("5054:00ff:fe12:3456", "10.9.0.2")


def test_queue_pair_attributes_come_from_their_places() -> None:
    answer = struct.pack("=10I", 0x1234, 2, 0, 5, 0, 0, 111, 222, 17, 7)
    answer += bytes(10) + b"\xff\xff" + bytes([10, 9, 0, 1])  # ::ffff:10.9.0.1
    answer += struct.pack("=IBBBxHBBBBBx", 3, 1, 64, 8, 0xC000, 2, 0, 0, 1, 1)
    answer += bytes(32) + bytes(20)
    answer += struct.pack("=HHBBBBBBBBBBB5x", 0, 0, 0, 0, 4, 16, 12, 1, 18, 7, 6, 0, 0)
    step = QpAttributes.decode(answer)
    assert (step.mask, step.state, step.path_mtu, step.rq_psn, step.sq_psn, step.dest_qp_num) == (
        0x1234, 2, 5, 111, 222, 17,
    )  # fmt: skip
    assert step.address.dgid == "0000:0000:0000:0000:0000:ffff:0a09:0001"
    assert (step.address.sgid_index, step.address.hop_limit, step.address.traffic_class) == (1, 64, 8)
    assert (step.address.is_global, step.address.port_num, step.address.dlid) == (1, 1, 0xC000)
    assert (step.max_rd_atomic, step.max_dest_rd_atomic, step.min_rnr_timer) == (4, 16, 12)
    assert (step.timeout, step.retry_count, step.rnr_retry) == (18, 7, 6)
