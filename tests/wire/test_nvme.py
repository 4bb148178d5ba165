"""The NVMe core: bytes as the specification has them, statuses, ids, conversations."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.errors import RemoteProtocolError
from dpurt.wire import nvme
from dpurt.wire.nvme import AsyncEvent, Cqe, IdentifyController, IdentifyNamespace
from dpurt.wire.nvme_controller import (
    Conversation,
    Login,
    Pause,
    bring_up,
    discover,
    find_namespace,
    read_ana_states,
)
from dpurt.wire.nvme_queue import Command, Completion, QueuePair, piece_of, split_blocks
from dpurt.wire.nvme_status import GOOD, Action, Status

LOGIN = Login(
    host_id=bytes(range(16)),
    host_nqn="nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001",
    subsystem_nqn="nqn.2016-06.io.spdk:cnode1",
    num_queues=4,
    queue_size=256,
    keep_alive_ms=15000,
)
CAP = 0x8000020_1E01007F  # of a real spdk_tgt: 128 entries, 15 s

# --- entries ---


def test_read_entry_bytes() -> None:
    command = nvme.read(1, 0x1_0000_0002, 32, [memoryview(bytearray(131072))], None)
    expected = "02400000 01000000" + "00" * 32 + "02000000 01000000 1f000000 00000000 00000000 00000000"
    assert bytes(command.sqe) == bytes.fromhex(expected)
    assert command.length == 131072


def test_connect_entry_and_data_bytes() -> None:
    command = LOGIN.connect(0, 32, nvme.ANY_CONTROLLER)
    expected = "7f400000 01" + "00" * 35 + "0000 0000 1f00 04 00 983a0000" + "00" * 12
    assert bytes(command.sqe) == bytes.fromhex(expected)
    data = bytes(command.data_out[0])
    assert len(data) == 1024
    assert data[:18] == bytes(range(16)) + b"\xff\xff"
    assert data[256:512].rstrip(b"\0") == LOGIN.subsystem_nqn.encode()
    assert data[512:768].rstrip(b"\0") == LOGIN.host_nqn.encode()
    assert not any(data[18:256])
    assert not any(data[768:])


def test_io_connect_has_no_keep_alive_and_names_the_controller() -> None:
    command = LOGIN.connect(3, 128, 0x1234)
    assert bytes(command.sqe[40:52]) == bytes.fromhex("0000 0300 7f00 04 00 00000000")
    assert bytes(command.data_out[0][16:18]) == b"\x34\x12"


def test_property_entries() -> None:
    get, set_ = nvme.property_get(nvme.CAP, is_wide=True), nvme.property_set(nvme.CC, 0x460001)
    assert bytes(get.sqe[:5]) == b"\x7f\x40\0\0\x04"
    assert bytes(get.sqe[40:56]) == bytes.fromhex("01000000 00000000 0000000000000000")
    assert bytes(set_.sqe[:5]) == b"\x7f\x40\0\0\x00"
    assert bytes(set_.sqe[40:56]) == bytes.fromhex("00000000 14000000 0100460000000000")


def test_log_page_entry_counts_dwords_from_zero_and_carries_the_offset() -> None:
    sqe = nvme.get_log_page(0x0C, 1 << 20, offset=0x2_0000_0004, specific=1).sqe
    assert bytes(sqe[40:56]) == bytes.fromhex("0c01ffff 03000000 04000000 02000000")


def test_deallocate_is_dataset_management_with_one_range() -> None:
    command = nvme.deallocate(7, 5, 9, None)
    assert command.opcode == 9
    assert bytes(command.sqe[40:48]) == bytes.fromhex("00000000 04000000")
    assert bytes(command.data_out[0]) == struct.pack("<IIQ", 0, 9, 5)


def test_write_zeroes_may_deallocate() -> None:
    assert bytes(nvme.write_zeroes(1, 0, 65536, None).sqe[48:52]) == bytes.fromhex("ffff0002")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("nqn.2016-06.io.spdk:cnode1", True), ("disk", False), ("nqn." + "x" * 220, False), ("nqn.a\0b", False)],
)
def test_qualified_names(name: str, is_one: bool) -> None:
    assert nvme.is_nqn(name) is is_one


# --- completions and statuses ---


def test_completion_bytes() -> None:
    cqe = Cqe.decode(bytes.fromhex("7e007e00 00000000 0500 0000 1100 1680"))
    assert cqe == Cqe(0x7E007E, 5, 17, Status(0, 0x0B, dnr=True))


@pytest.mark.parametrize(
    ("status", "action", "word"),
    [
        (Status(), Action.ACCEPT, "io_error"),
        (Status(0, 0x06), Action.RETRY, "io_error"),
        (Status(0, 0x06, dnr=True), Action.FAIL, "io_error"),
        (Status(0, 0x0B, dnr=True), Action.FAIL, "gone"),
        (Status(0, 0x80), Action.FAIL, "out_of_range"),
        (Status(0, 0x81), Action.FAIL, "no_space"),
        (Status(2, 0x81), Action.RETRY, "io_error"),
        (Status(3, 0x02), Action.OTHER_PATH, "unavailable"),
        (Status(3, 0x01, dnr=True), Action.OTHER_PATH, "unavailable"),
    ],
)
def test_what_a_status_leads_to(status: Status, action: Action, word: str) -> None:
    assert (status.action, status.bdev_status) == (action, word)


def test_retry_delay_is_the_controllers_wish() -> None:
    assert Status(0, 0x06).retry_delay_s((1, 2, 3)) == 0
    assert Status(0, 0x06, crd=2).retry_delay_s((1, 25, 3)) == 2.5


@given(st.integers(0, 0xFFFF))
def test_every_status_word_has_a_name_and_an_action(word: int) -> None:
    status = Status.decode(word)
    assert status.is_good == (not word & 0x0FFE)
    assert str(status)
    assert status.action in Action


def test_event_of_a_real_target() -> None:
    event = AsyncEvent.decode(0x40002)
    assert event == AsyncEvent(2, 0, 4)
    assert event.is_namespace_change
    assert AsyncEvent.decode(0x0C0302).is_ana_change


# --- queue pairs ---


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(2, 9))
def test_queue_pair_never_holds_more_than_size_minus_one_and_ids_are_unique(
    moves: list[int], size: int
) -> None:
    pair, held = QueuePair(size), {}
    for move in moves:
        if move > 9 and pair.room:
            command = Command(bytearray(64))
            identifier = pair.add(command)
            assert identifier not in held
            assert command.sqe[2:4] == identifier.to_bytes(2, "little")
            held[identifier] = command
        elif held:
            identifier = sorted(held)[move % len(held)]
            assert pair.end(identifier) is held.pop(identifier)
        assert len(pair) == len(held) == size - 1 - pair.room


def test_unknown_and_ended_ids_are_the_peers_fault() -> None:
    pair = QueuePair(4)
    identifier = pair.add(Command(bytearray(64)))
    pair.end(identifier)
    with pytest.raises(RemoteProtocolError, match="no command 0"):
        pair.end(identifier)
    assert pair.add(Command(bytearray(64))) != identifier, "ids rest before they are used again"


@given(st.integers(0, 1 << 40), st.integers(1, 5000), st.integers(1, 700))
def test_split_covers_the_range_in_order(first: int, count: int, most: int) -> None:
    pieces = split_blocks(first, count, most)
    at = first
    for start, length in pieces:
        assert start == at
        assert 0 < length <= most
        at += length
    assert at == first + count


@given(st.lists(st.integers(0, 9), min_size=1), st.data())
def test_piece_of_a_scatter_list(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(256))[: sum(sizes) % 256] or b"x"
    buffers, at = [], 0
    for size in sizes:
        buffers.append(memoryview(whole[at : at + size]))
        at += size
    whole = b"".join(buffers)
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    pieces = piece_of(buffers, start, length) if length else []
    assert b"".join(pieces) == whole[start : start + length]


# --- data structures ---


@given(st.integers(0, 1 << 32))
def test_any_identify_data_is_decoded_or_refused(seed: int) -> None:
    data = memoryview(random.Random(seed).randbytes(4096))
    for decode in (IdentifyController.decode, IdentifyNamespace.decode):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@given(st.binary(min_size=16, max_size=600))
def test_any_ana_log_is_decoded_or_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        nvme.decode_ana_states(memoryview(data))


def test_ana_log_with_and_without_namespace_lists() -> None:
    log = struct.pack("<QH6x", 9, 2)
    log += struct.pack("<IIQB15xII", 1, 2, 9, 1, 1, 2) + struct.pack("<IIQB15x", 2, 0, 9, 3)
    assert nvme.decode_ana_states(memoryview(log)) == {1: 1, 2: 3}


def test_nsid_list_ends_at_the_first_zero() -> None:
    assert nvme.decode_active_namespaces(memoryview(struct.pack("<4I", 1, 5, 0, 9))) == [1, 5]


def identify_controller(**fields: int) -> bytes:
    page = bytearray(4096)
    page[4:24], page[24:64] = b"SN1".ljust(20), b"Model".ljust(40)
    page[77] = fields.get("mdts", 5)
    page[76] = 8 if fields.get("ana") else 0
    page[111] = fields.get("kind", 1)
    struct.pack_into("<H", page, 514, fields.get("max_commands", 128))
    struct.pack_into("<I", page, 348, fields.get("groups", 4))
    struct.pack_into("<IIH", page, 1792, 260, 1, fields.get("icdoff", 0))
    return bytes(page)


def identify_namespace(num_blocks: int = 1000, shift: int = 12) -> bytes:
    page = bytearray(4096)
    struct.pack_into("<Q", page, 0, num_blocks)
    page[130] = shift
    return bytes(page)


def test_identify_controller_of_a_real_target() -> None:
    identity = IdentifyController.decode(memoryview(identify_controller()))
    assert (identity.serial, identity.model) == ("SN1", "Model")
    assert identity.max_transfer_bytes == 131072
    assert identity.in_capsule_bytes == 4096
    no_limit = IdentifyController.decode(memoryview(identify_controller(mdts=0)))
    assert no_limit.max_transfer_bytes is None
    with pytest.raises(RemoteProtocolError, match="MDTS 40"):
        IdentifyController.decode(memoryview(identify_controller(mdts=40)))


def test_identify_namespace_formats() -> None:
    namespace = IdentifyNamespace.decode(memoryview(identify_namespace(1000, 9)))
    assert (namespace.size_bytes, namespace.block_size) == (512_000, 512)
    with pytest.raises(RemoteProtocolError, match=r"2\^3"):
        IdentifyNamespace.decode(memoryview(identify_namespace(1000, 3)))


# --- conversations ---

Answer = tuple[int, bytes] | Status
Script = Callable[[Command], Answer]
T = TypeVar("T")


def hold(conversation: Conversation[T], script: Script) -> tuple[T, list[Command | Pause]]:
    """Play the controller by a script; what was said."""
    said: list[Command | Pause] = []
    completion: Completion | None = None
    while True:
        try:
            step = conversation.send(completion) if completion else next(conversation)
        except StopIteration as end:
            return end.value, said
        said.append(step)
        completion = None if isinstance(step, Pause) else answer(step, script)


def answer(command: Command, script: Script) -> Completion:
    said = script(command)
    if isinstance(said, Status):
        return Completion(command, said)
    result, data = said
    if data:
        into = command.data_in[0]
        into[:] = data[: len(into)].ljust(len(into), b"\0")
    return Completion(command, GOOD, result)


class Target:
    """Answers as an honest controller does; tests replace single answers by (opcode, fabrics type or CNS)."""

    def __init__(self, **replaced: Answer) -> None:
        self.replaced = replaced
        self.not_ready_polls = 0

    def __call__(self, command: Command) -> Answer:
        name = self.name(command)
        if name == "csts" and self.not_ready_polls:
            self.not_ready_polls -= 1
            return 0, b""
        honest: dict[str, Answer] = {
            "connect": (0x42, b""),
            "cap": (CAP, b""),
            "cc": (0, b""),
            "csts": (1, b""),
            "identify1": (0, identify_controller()),
            "identify2": (0, struct.pack("<2I", 3, 0)),
            "identify0": (0, identify_namespace()),
            "features7": (0x7E007E, b""),
            "features11": (0, b""),
            "log12": (0, struct.pack("<QH6xIIQB15x", 1, 1, 1, 0, 1, 2)),
        }
        return self.replaced.get(name, honest[name])

    def name(self, command: Command) -> str:
        sqe = command.sqe
        if sqe[0] == nvme.FABRICS and sqe[4] == nvme.CONNECT:
            return "connect"
        if sqe[0] == nvme.FABRICS:
            return {nvme.CAP: "cap", nvme.CC: "cc", nvme.CSTS: "csts"}[sqe[44]]
        return {nvme.IDENTIFY: "identify", nvme.SET_FEATURES: "features", nvme.GET_LOG_PAGE: "log"}[
            sqe[0]
        ] + str(sqe[40])


def test_controller_is_brought_up_in_order() -> None:
    target = Target()
    target.not_ready_polls = 2
    controller, said = hold(bring_up(LOGIN), target)
    assert [target.name(step) if isinstance(step, Command) else "pause" for step in said] == [
        "connect", "cap", "cc", "csts", "pause", "csts", "pause", "csts", "identify1", "features7", "features11",
    ]  # fmt: skip
    assert (controller.id, controller.num_queues) == (0x42, 4)
    assert controller.queue_size == 128, "asked for 256, MQES allows 128"


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [
        ({"connect": Status(1, 0x82, dnr=True)}, "connect: connect parameters invalid"),
        ({"csts": (2, b"")}, "fatal state"),
        ({"csts": (0, b"")}, "not ready in the time"),
        ({"identify1": (0, identify_controller(icdoff=1))}, "in-capsule data at offset"),
        ({"features7": Status(0, 2)}, "number of queues: invalid field"),
    ],
)
def test_bring_up_names_what_went_wrong(replaced: dict[str, Answer], problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        hold(bring_up(LOGIN), Target(**replaced))


def test_fewer_queues_and_smaller_ones_are_taken_as_granted() -> None:
    target = Target(features7=(0x0001_0002, b""), identify1=(0, identify_controller(max_commands=64)))
    controller, _ = hold(bring_up(LOGIN), target)
    assert (controller.num_queues, controller.queue_size) == (2, 64)


def test_events_a_controller_does_not_know_are_done_without() -> None:
    controller, _ = hold(bring_up(LOGIN), Target(features11=Status(0, 2, dnr=True)))
    assert controller.num_queues == 4


def test_the_only_namespace_is_found() -> None:
    found, _ = hold(find_namespace(None), Target())
    assert found is not None
    assert found[0] == 3


@pytest.mark.parametrize(
    "said", [Status(0, 0x0B, dnr=True), Status(3, 0x00), (0, bytes(4096))], ids=["refused", "path", "zeroes"]
)
def test_a_namespace_that_is_not_there_is_none(said: Answer) -> None:
    found, _ = hold(find_namespace(1), Target(identify0=said))
    assert found is None


def test_ana_states_are_asked_for_only_where_there_are_any() -> None:
    with_ana = IdentifyController.decode(memoryview(identify_controller(ana=1)))
    without = IdentifyController.decode(memoryview(identify_controller()))
    assert hold(read_ana_states(with_ana), Target())[0] == {1: 2}
    assert hold(read_ana_states(without), Target()) == ({}, [])


def test_discovery_log_that_changes_while_it_is_read_is_read_again() -> None:
    generations = iter([1, 2, 2, 2])

    def script(command: Command) -> Answer:
        if command.opcode != nvme.GET_LOG_PAGE:
            return Target()(command)
        if command.length == 1024 and not command.sqe[48] and not command.sqe[49]:
            return 0, struct.pack("<QQ", next(generations), 1)
        entry = bytearray(1024)
        entry[0], entry[2], entry[32:36], entry[256:261], entry[512:521] = (
            3,
            2,
            b"4420",
            b"nqn.x",
            b"127.0.0.1",
        )
        return 0, bytes(entry)

    entries, _ = hold(discover(LOGIN), script)
    assert entries == [nvme.DiscoveryEntry(3, 2, "127.0.0.1", "4420", "nqn.x")]
    assert next(generations, None) is None
