"""The access table and the frames: pure."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.errors import NodeUnavailable, RemoteProtocolError
from dpurt.fabric import frames
from dpurt.fabric.access import AccessTable, Refused

SIZE = 100
U64 = st.integers(0, 2**64 - 1)


class Region:
    name, fd, size = "fake", -1, SIZE

    def __init__(self, region_id):
        self.region_id = region_id
        self.view = memoryview(bytearray(SIZE))


class Ledger:
    """Allows leases below 10; counts what is open."""

    def __init__(self):
        self.open = []

    def begin(self, *access):
        if access[-1] >= 10:
            return False
        self.open.append(access)
        return True

    def end(self, *access):
        self.open.remove(access)


def table():
    ledger = Ledger()
    made = AccessTable(ledger)
    made.add_region(Region(1), None, None)
    made.add_region(Region(2), frozenset({5}), 5)
    made.admit(5, b"5" * 16, [1, 2], [2])
    made.admit(6, b"6" * 16, [1, 2], [2])
    made.admit(7, b"7" * 16, [], [])
    return made, ledger


def test_reading_needs_the_grant_and_the_regions_consent_writing_needs_to_be_the_writer():
    made, _ = table()
    allowed = set()
    for session, op, region in product((5, 6, 7, 8), ("pull", "store"), (1, 2, 3)):
        with suppress(Refused), made.claim(session, op, [(region, 0, 1, 0)]):
            allowed.add((session, op, region))
    assert allowed == {(5, "pull", 1), (5, "pull", 2), (5, "store", 2), (6, "pull", 1)}


def test_a_region_without_a_writer_of_its_own_is_written_by_those_admitted_to_and_as_leases_allow():
    made, _ = table()
    made.admit(9, b"9" * 16, [1, 2], [1, 2])
    with made.claim(9, "store", [(1, 0, 1, 0)]):
        pass
    for session, region, lease in ((9, 1, 10), (9, 2, 0), (5, 1, 0)):
        with pytest.raises(Refused), made.claim(session, "store", [(region, 0, 1, lease)]):
            pass


@given(
    st.lists(
        st.tuples(st.integers(0, 2), U64 | st.integers(90, 101), U64 | st.integers(0, 11), st.integers(0, 11))
    )
)
def test_a_claim_is_all_or_nothing_and_always_ends(entries):
    made, ledger = table()
    good = [r in (1, 2) and o + n <= SIZE and lease < 10 for r, o, n, lease in entries]
    if all(good):
        with made.claim(5, "pull", entries) as views:
            assert [len(view) for view in views] == [entry[2] for entry in entries]
            assert len(ledger.open) == len(entries)
    else:
        with pytest.raises(Refused) as refusal, made.claim(5, "pull", entries):
            pass
        assert refusal.value.index == good.index(False)
    assert ledger.open == []


def test_a_claim_ends_when_its_transfer_fails():
    made, ledger = table()
    with pytest.raises(OSError, match="gone"), made.claim(5, "pull", [(1, 0, 1, 0)]):
        raise OSError("gone")
    assert ledger.open == []


def test_only_the_right_token_of_an_admitted_session_is_accepted():
    made, _ = table()
    assert made.authenticate(5, b"5" * 16)
    assert not made.authenticate(5, b"6" * 16)
    assert not made.authenticate(9, bytes(16))  # what an unknown session is compared with
    made.expel(5)
    assert not made.authenticate(5, b"5" * 16)


def test_a_region_is_offered_once_and_can_be_withdrawn():
    made, _ = table()
    with pytest.raises(ValueError, match="already"):
        made.add_region(Region(1), None, None)
    made.remove_region(1)
    made.remove_region(1)
    with pytest.raises(Refused), made.claim(5, "pull", [(1, 0, 1, 0)]):
        pass
    assert [region.region_id for region, _ in made.mappable(5)] == [2]


@given(st.sampled_from([1, 2, 3]), st.lists(st.tuples(U64, U64, st.integers(0, 1000), U64), max_size=5))
def test_a_request_survives_the_wire(op, entries):
    limits = frames.FrameLimits()
    data = frames.encode_request(op, entries)
    count = len(entries)
    assert frames.decode_header(data[:8], frozenset({op}), limits) == (op, count)
    assert frames.decode_entries(data[8:], limits) == (entries, sum(entry[2] for entry in entries))


@pytest.mark.parametrize(("op", "count"), [(3, 1), (0, 1), (2**32 - 1, 1), (1, 4097), (1, 2**32 - 1)])
def test_unknown_operations_and_oversize_counts_are_malformed(op, count):
    with pytest.raises(RemoteProtocolError, match="malformed"):
        frames.decode_header(frames.HEADER.pack(op, count), frozenset({1, 2}), frames.FrameLimits())


def test_oversize_totals_are_malformed():
    body = frames.ENTRY.pack(1, 0, 2**63, 0) * 2
    with pytest.raises(RemoteProtocolError, match="limit"):
        frames.decode_entries(body, frames.FrameLimits())


def test_each_hello_status_has_its_error():
    frames.check_welcome("x", True, frames.WELCOME)
    with pytest.raises(NodeUnavailable):
        frames.check_welcome("x", True, frames.BUSY)
    for status in (frames.DENIED, frames.MALFORMED, 99):
        with pytest.raises(RemoteProtocolError, match="denied"):
            frames.check_welcome("x", True, status)
    with pytest.raises(RemoteProtocolError, match="malformed"):
        frames.check_welcome("x", False, frames.WELCOME)
