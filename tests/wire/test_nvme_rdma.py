"""NVMe over RDMA on bytes: vectors from the specification; data is cut where registered memory is, and no byte is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.errors import RemoteProtocolError
from dpurt.wire.nvme_queue import split_runs
from dpurt.wire.nvme_rdma import (
    BOUNCE_BYTES,
    Layout,
    decode_accept,
    decode_reject,
    encode_request,
    in_capsule_sgl,
    keyed_sgl,
    one_piece,
)

BLOCK = 4096
MIB = 1 << 20
MOST = MIB


# --- connection data ---


def test_request_names_the_queue_and_both_sizes() -> None:
    assert encode_request(3, 128) == bytes.fromhex("0000 0300 8000 7f00") + bytes(24)
    assert len(encode_request(0, 32)) == 32


def test_accept_tells_how_much_the_controller_receives() -> None:
    assert decode_accept(bytes.fromhex("0000 8000") + bytes(28)) == 128


@pytest.mark.parametrize("data", [b"", b"\0\0\1", bytes.fromhex("01008000"), bytes.fromhex("00000100")])
def test_accept_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="nvme_rdma_accept"):
        decode_accept(data)


def test_rejection_is_told_in_words() -> None:
    assert decode_reject(bytes.fromhex("0000 0600")) == "no resources"
    assert decode_reject(bytes.fromhex("0000 6300")) == "status 99"
    assert decode_reject(b"") == "no reason given"


# --- data pointers ---


def test_keyed_pointer_holds_address_length_and_key() -> None:
    assert keyed_sgl(0x1122334455667788, 0x100000, 0xAABBCCDD) == bytes.fromhex(
        "8877665544332211 000010 ddccbbaa 40"
    )


def test_command_without_data_has_an_empty_keyed_pointer() -> None:
    assert keyed_sgl() == bytes(15) + b"\x40"


def test_in_capsule_pointer_is_an_offset_of_zero() -> None:
    assert in_capsule_sgl(4096) == bytes(8) + bytes.fromhex("00100000 000000 01")


# --- where data is cut ---


def layout(*regions: tuple[int, int], chunk: int = 1 << 30) -> Layout:
    made = Layout()
    for address, length in regions:
        made.add(address, length, chunk)
    return made


def test_memory_in_one_chunk_is_one_run_of_any_length() -> None:
    assert layout((0, 8 * MIB)).runs([(MIB, 4 * MIB)], MOST) == [(4 * MIB, MOST)]


def test_pieces_that_follow_each_other_are_one_run() -> None:
    pieces = [(0, BLOCK), (BLOCK, 2 * BLOCK), (3 * BLOCK, BLOCK)]
    assert layout((0, MIB)).runs(pieces, MOST) == [(4 * BLOCK, MOST)]


def test_a_gap_or_another_region_begins_a_run() -> None:
    two = layout((0, MIB), (MIB, MIB))
    assert two.runs([(0, BLOCK), (2 * BLOCK, BLOCK)], MOST) == [(BLOCK, MOST), (BLOCK, MOST)]
    assert two.runs([(0, MIB), (MIB, MIB)], MOST) == [(MIB, MOST), (MIB, MOST)]


def test_pieces_outside_are_one_run_of_small_commands_wherever_they_are() -> None:
    pieces = [(5 * MIB, BLOCK), (9 * MIB, BLOCK), (0, BLOCK)]
    assert layout((0, MIB)).runs(pieces, MOST) == [(2 * BLOCK, BOUNCE_BYTES), (BLOCK, MOST)]


def test_controllers_limit_below_a_bounce_slot_holds_for_both() -> None:
    assert layout().runs([(0, MIB)], 8192) == [(MIB, 8192)]


def test_piece_over_a_chunks_end_is_cut_there() -> None:
    chunked = layout((0, 4 * MIB), chunk=MIB)
    assert chunked.runs([(BLOCK, MIB)], MOST) == [(MIB - BLOCK, MOST), (BLOCK, MOST)]


def test_piece_over_a_chunks_end_in_the_middle_of_a_block_takes_a_copy() -> None:
    chunked = layout((0, 4 * MIB), chunk=MIB)
    assert chunked.runs([(MIB - BLOCK - 1, 2 * BLOCK)], MOST) == [(2 * BLOCK, BOUNCE_BYTES)]


def test_piece_over_the_end_of_all_memory_is_outside_from_there() -> None:
    assert layout((0, MIB)).runs([(MIB - BLOCK, 2 * BLOCK)], MOST) == [(BLOCK, MOST), (BLOCK, BOUNCE_BYTES)]


def test_empty_pieces_are_no_runs() -> None:
    assert layout().runs([], MOST) == []


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 4), st.sampled_from([0, 512])), max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4, unique_by=lambda pair: pair[0]),
    st.sampled_from([BLOCK, 3 * BLOCK, MIB]),
)
def test_each_command_of_a_run_finds_its_memory(
    places: list[tuple[int, int, int]], regions: list[tuple[int, int]], chunk: int
) -> None:
    """Against a walk over bytes: commands cover the data, and each of a registered run is in one chunk."""
    made = layout(*((i * 8 * BLOCK, length * BLOCK) for i, length in regions), chunk=chunk)
    pieces = [(at * 2 * BLOCK + askew, length * BLOCK) for at, length, askew in places]
    blocks = [address + i for address, length in pieces for i in range(0, length, BLOCK)]
    runs = made.runs(pieces, MOST)
    spans = split_runs(7, BLOCK, runs)
    assert list(itertools.chain(*(range(at, at + n) for at, n in spans))) == list(range(7, 7 + len(blocks)))
    mosts = [most for length, most in runs for _ in range(length // BLOCK)]
    for at, n in spans:
        first, last = blocks[at - 7], blocks[at - 7 + n - 1]
        if mosts[at - 7] == MOST:
            assert last - first == (n - 1) * BLOCK, "one piece of memory"
            assert made.find(first, n * BLOCK) is not None
        else:
            assert n * BLOCK <= BOUNCE_BYTES


def test_pieces_are_one_only_if_they_follow_each_other() -> None:
    assert one_piece([(0, 4), (4, 4), (8, 1)]) == (0, 9)
    assert one_piece([(0, 4), (5, 4)]) is None
    assert one_piece([(3, 4)]) == (3, 4)
