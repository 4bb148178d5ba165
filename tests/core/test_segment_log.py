"""The segment log against a naive model, and its single rules."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpurt.core.segment_log import (
    FIRST_RECORD,
    HEADER_BLOCK,
    METADATA_BYTES,
    WINDOW,
    HeaderError,
    SegmentHeader,
    SegmentLog,
)

STORE = b"storetag"
RECORD = 8192
SEGMENT = FIRST_RECORD + 4 * RECORD  # four slots
A, B = b"a" * 32, b"b" * 32


def make_log(segments: int = 5) -> SegmentLog:
    return SegmentLog(
        capacity_bytes=METADATA_BYTES + segments * SEGMENT,
        segment_bytes=SEGMENT,
        store=STORE,
        first_sequence=1 << 32,
    )


def fill(log: SegmentLog, count: int, fingerprint: bytes = A) -> list[int]:
    """Named in the order of their places from 0 on, in a log that had none freed."""
    placed = []
    for _ in range(count):
        placed.append(log.place(fingerprint, RECORD, names=[log.stats().accepted_bytes // RECORD]))
    assert all(p is not None for p in placed)
    return [p.offset for p in placed if p is not None]


def coldest_first(names: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return names.astype(np.float64)


# --- rules ---


def test_records_lie_side_by_side_behind_the_header_and_the_seal() -> None:
    log = make_log()
    placed = [log.place(A, RECORD) for _ in range(5)]
    assert [p.offset - METADATA_BYTES for p in placed if p] == [
        FIRST_RECORD,
        FIRST_RECORD + RECORD,
        FIRST_RECORD + 2 * RECORD,
        FIRST_RECORD + 3 * RECORD,
        SEGMENT + FIRST_RECORD,
    ]
    assert [bool(p and p.opens) for p in placed] == [True, False, False, False, True]
    assert [bool(p and p.seals) for p in placed] == [False, False, False, True, False]


def test_spaces_and_groups_never_share_a_segment() -> None:
    log = make_log()
    placed = [log.place(A, RECORD), log.place(B, RECORD), log.place(A, RECORD, group=1), log.place(A, RECORD)]
    assert [p.segment for p in placed if p] == [0, 1, 2, 0]


def test_the_last_free_segment_is_kept_for_reappends() -> None:
    log = make_log(3)
    fill(log, 8)
    assert log.room(A, RECORD) == 0
    assert log.place(A, RECORD) is None
    assert log.room(A, RECORD, is_reappend=True) == 4
    assert log.place(A, RECORD, is_reappend=True) is not None


def test_a_full_segment_is_free_once_all_of_it_is_dead() -> None:
    log = make_log()
    offsets = fill(log, 4)
    for offset in offsets:
        assert log.stats().free_segments == 4
        assert log.forget(offset)
    assert log.stats().free_segments == 5
    assert not log.forget(offsets[0]), "forgetting twice is a no-op"


def test_an_open_segment_without_live_records_goes_on() -> None:
    log = make_log()
    [offset] = fill(log, 1)
    log.forget(offset)
    placed = log.place(A, RECORD)
    assert placed is not None
    assert placed.segment == 0


def test_a_held_segment_is_no_victim_and_not_reused() -> None:
    log = make_log()
    offsets = fill(log, 4)
    log.hold(0)
    assert log.victim(coldest_first) is None
    for offset in offsets:
        log.forget(offset)
    assert log.stats().free_segments == 4
    log.unhold(0)
    assert log.stats().free_segments == 5


def test_a_reused_segment_has_a_new_sequence() -> None:
    log = make_log(3)
    fill(log, 8)
    before = [log.header_of(0), log.header_of(1)]
    log.reclaim(0)
    log.reclaim(1)
    fill(log, 8)
    sequences = [h.sequence for h in [*before, *(log.header_of(i) for i in range(3))] if h is not None]
    assert len(set(sequences)) == 4


def test_victim_is_the_coldest() -> None:
    log = make_log()
    fill(log, 12)
    use = {0: 5.0, 1: 1.0, 2: 9.0}
    assert log.victim(lambda names: np.array([use[name // 4] for name in names.tolist()])) == 1


def test_among_equally_cold_the_victim_has_the_fewest_live_bytes() -> None:
    log = make_log()
    offsets = fill(log, 12)
    log.forget(offsets[5])
    assert log.victim(lambda names: np.zeros(len(names))) == 1


def test_many_cold_records_outweigh_one_hot() -> None:
    log = make_log()
    offsets = fill(log, 8)
    for offset in offsets[:3]:
        log.forget(offset)
    assert log.victim(coldest_first) == 0


def test_an_open_segment_is_reclaimed_only_when_no_full_one_is_left() -> None:
    log = make_log(3)
    fill(log, 1, A)
    fill(log, 4, B)
    assert log.victim(lambda names: -names.astype(np.float64)) == 1
    log.reclaim(1)
    assert log.victim(coldest_first) == 0
    assert log.reclaim(0) == 1
    assert log.stats().free_segments == 3
    assert log.stats().open_segments == 0


def test_victim_asks_for_the_use_of_a_bounded_sample() -> None:
    log = make_log(200)
    fill(log, 4 * 190)
    asked: list[int] = []

    def last_use(names: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        asked.extend(names.tolist())
        return names.astype(np.float64)

    assert log.victim(last_use) == 0
    assert len(asked) <= 32 * 4


def test_every_segment_of_a_large_device_comes_to_be_compared() -> None:
    log = make_log(3 * WINDOW)
    fill(log, 4 * (3 * WINDOW - 8))
    for at in (100, WINDOW + 500, 3 * WINDOW - 20):
        for offset in log.live_offsets(at)[:3]:
            log.forget(offset)
    found = [log.victim(lambda names: np.zeros(len(names))) for _ in range(4)]
    assert found == [100, WINDOW + 500, 3 * WINDOW - 20, 100], "of a window each time"


def test_records_keep_their_names_until_forgotten() -> None:
    log = make_log()
    log.place(A, RECORD, names=[70, 71, 72])
    offsets = log.live_offsets(0)
    log.forget(offsets[1])
    log.rename(offsets[2], 1 << 62)
    assert log.live_names(0).tolist() == [70, 1 << 62]


def test_reappends_are_budgeted_to_a_tenth_with_the_headers_and_seals_still_to_come() -> None:
    log = make_log(50)
    assert log.reappend_budget() == 0
    fill(log, 100)
    log.add_overhead(HEADER_BLOCK)
    to_come = HEADER_BLOCK * (2 * len(log.open_segments()) + 4)
    assert log.reappend_budget() == 100 * RECORD // 10 - HEADER_BLOCK - to_come
    while log.reappend_budget() >= RECORD:
        log.place(A, RECORD, is_reappend=True)
    log.add_overhead(to_come)
    assert 1.08 < log.stats().write_amplification <= 1.1


def test_usage_counts_whole_segments_and_metadata() -> None:
    log = make_log(5)
    assert log.stats().usage_bytes == METADATA_BYTES
    fill(log, 5)
    stats = log.stats()
    assert stats.usage_bytes == METADATA_BYTES + 2 * SEGMENT <= stats.capacity_bytes
    assert (stats.live_records, stats.live_bytes) == (5, 5 * RECORD)


def test_adopted_segments_take_no_more_and_keep_sequences_rising() -> None:
    log = make_log()
    header = SegmentHeader(STORE, 7 << 40, A, RECORD)
    log.adopt(2, header, [1, 3])
    assert log.live_offsets(2) == [log.offset_of(2, 1, RECORD), log.offset_of(2, 3, RECORD)]
    placed = log.place(A, RECORD)
    assert placed is not None
    assert placed.segment != 2
    assert placed.sequence > 7 << 40
    log.check_integrity()


@pytest.mark.parametrize("segments", [0, 1, 2])
def test_too_small_a_capacity_is_refused_with_the_needed_one(segments: int) -> None:
    with pytest.raises(ValueError, match=str(METADATA_BYTES + 3 * SEGMENT)):
        make_log(segments)


def test_a_record_larger_than_a_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        make_log().place(A, SEGMENT)


def test_segment_header_round_trip_and_seal_are_told_apart() -> None:
    block = memoryview(bytearray(b"\xff" * HEADER_BLOCK))
    header = SegmentHeader(STORE, 5, A, RECORD, 3)
    header.pack_into(block)
    assert SegmentHeader.unpack(block) == header
    with pytest.raises(HeaderError):
        SegmentHeader.unpack(block, is_seal=True)
    for at in (0, 9, 13, 30, 80, 4095):
        block[at] ^= 4
        with pytest.raises(HeaderError):
            SegmentHeader.unpack(block)
        block[at] ^= 4


# --- against a model ---


class SegmentLogMachine(RuleBasedStateMachine):
    """The model: a dict of live records, and per segment what was ever told about it."""

    def __init__(self) -> None:
        super().__init__()
        self.log = make_log(5)
        self.live: dict[int, tuple[bytes, int]] = {}
        self.names = itertools.count(1 << 40)
        self.name_of: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.holds: dict[int, int] = dict.fromkeys(range(5), 0)
        self.sequences: set[int] = set()
        self.accepted = 0

    def of_segment(self, segment: int) -> list[int]:
        return sorted(o for o in self.live if self.log.segment_of(o) == segment)

    @rule(fingerprint=st.sampled_from([A, B]), group=st.integers(0, 1), is_reappend=st.booleans())
    def place(self, fingerprint: bytes, group: int, is_reappend: bool) -> None:
        room = self.log.room(fingerprint, RECORD, group, is_reappend=is_reappend)
        name = next(self.names)
        placed = self.log.place(fingerprint, RECORD, group, names=[name], is_reappend=is_reappend)
        assert (placed is None) == (room == 0)
        if placed is None:
            return
        assert placed.offset not in self.live
        if placed.opens is not None:
            assert placed.sequence not in self.sequences
            assert not self.of_segment(placed.segment)
            assert not self.holds[placed.segment]
            self.sequences.add(placed.sequence)
            self.used[placed.segment] = 0
        self.used[placed.segment] += 1
        assert placed.seals == (self.used[placed.segment] == 4)
        self.live[placed.offset] = (fingerprint, group)
        self.name_of[placed.offset] = name
        streams = {self.live[o] for o in self.of_segment(placed.segment)}
        assert streams == {(fingerprint, group)}, "one stream per segment"
        self.accepted += 0 if is_reappend else RECORD

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        assert self.log.forget(offset)
        del self.live[offset]

    @rule(offset=st.integers(0, METADATA_BYTES + 6 * SEGMENT))
    def forget_anything(self, offset: int) -> None:
        assert self.log.forget(offset) == (self.live.pop(offset, None) is not None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        segment = self.log.segment_of(data.draw(st.sampled_from(sorted(self.live))))
        self.log.hold(segment)
        self.holds[segment] += 1

    @rule(segment=st.integers(0, 4))
    def unhold(self, segment: int) -> None:
        if self.holds[segment]:
            self.log.unhold(segment)
            self.holds[segment] -= 1

    @rule(hot=st.integers(0, 4))
    def reclaim(self, hot: int) -> None:
        segment_of = {self.name_of[offset]: self.log.segment_of(offset) for offset in self.live}
        victim = self.log.victim(
            lambda names: np.array([segment_of[x] == hot for x in names.tolist()], float)
        )
        full = [s for s, n in self.used.items() if n == 4 and self.log.header_of(s) and not self.holds[s]]
        if victim is None:
            assert not full
            return
        assert not self.holds[victim]
        if full:
            assert victim in full
        if len(full) == 2 and hot in full and len({len(self.of_segment(s)) for s in full}) == 1:
            assert victim != hot
        assert self.log.live_offsets(victim) == self.of_segment(victim)
        assert self.log.live_names(victim).tolist() == [self.name_of[o] for o in self.of_segment(victim)]
        assert self.log.reclaim(victim) == len(self.of_segment(victim))
        assert self.log.header_of(victim) is None
        for offset in self.of_segment(victim):
            del self.live[offset]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.log.check_integrity()
        stats = self.log.stats()
        assert stats.live_records == len(self.live)
        assert stats.accepted_bytes == self.accepted
        assert stats.usage_bytes <= stats.capacity_bytes
        assert all(self.log.is_live(offset) for offset in self.live)


TestSegmentLog = SegmentLogMachine.TestCase
TestSegmentLog.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- several at once ---


def test_records_placed_together_lie_side_by_side_and_no_further_than_their_segment() -> None:
    one, other = make_log(), make_log()
    room = one.slots_for(RECORD)
    placed = one.place(A, RECORD, names=range(room + 3))
    assert placed is not None
    assert (placed.records, placed.seals) == (room, True)
    singly = [other.place(A, RECORD) for _ in range(room)]
    assert [one.is_live(each.offset) for each in singly if each is not None] == [True] * room
    assert (one.stats().live_bytes, one.stats().accepted_bytes) == (
        other.stats().live_bytes,
        other.stats().accepted_bytes,
    )
    one.check_integrity()


def test_one_hold_keeps_a_segment_for_all_records_of_a_run_and_says_which_are_live() -> None:
    log = make_log()
    placed = log.place(A, RECORD, names=range(log.slots_for(RECORD)))
    assert placed is not None
    first = placed.offset
    assert log.hold_run(first, 2, 2 * RECORD) is None, "records of another size are no longer there"
    log.forget(first + RECORD)
    held = log.hold_run(first, 3, RECORD)
    assert held is not None
    assert (held.segment, held.sequence, list(held.are_live)) == (placed.segment, placed.sequence, [1, 0, 1])
    log.reclaim(placed.segment)
    assert log.header_of(placed.segment) is not None, "held"
    log.unhold(held.segment)
    assert log.header_of(placed.segment) is None
    assert log.hold_run(first, 3, RECORD) is None
