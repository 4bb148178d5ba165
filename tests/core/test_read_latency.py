"""The measured read latency: what it follows, what it ignores, when it forgets; and the break-even with computing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.read_latency import HALF, STALE_S, ReadLatency, is_computing_cheaper

MB = 1_000_000


def measured(*reads, start=0.0):
    """An estimate after reads of (bytes, seconds), a millisecond apart."""
    latency = ReadLatency(1000.0 * MB, 0.0001)
    for i, (num_bytes, elapsed_s) in enumerate(reads):
        latency.observe(num_bytes, elapsed_s, start + i / 1000)
    return latency


def test_the_default_holds_until_a_read_was_measured():
    assert ReadLatency(1e9, 0.0001).value(5.0) == 0.0001


def test_the_first_read_counts():
    assert measured((MB, 0.201)).value(0.0) == pytest.approx(0.2)


def test_reads_of_different_sizes_tell_the_same_latency():
    assert measured((8 * MB, 0.018), (MB, 0.011)).value(0.0) == pytest.approx(0.01)


def test_waits_behind_other_reads_are_no_latency():
    burst = [(MB, 0.001 * place + 0.0005) for place in range(1, 9)]
    assert measured(*burst).value(0.0) == pytest.approx(0.0005)


def test_a_device_faster_than_counted_on_has_no_negative_latency():
    assert measured((MB, 0.0002)).value(0.0) == 0.0


def test_one_fast_read_brings_the_estimate_down():
    assert measured(*[(MB, 0.201)] * 40, (MB, 0.0012)).value(0.0) == pytest.approx(0.0002)


def test_a_window_of_slow_reads_brings_it_up_and_less_does_not():
    fast = [(MB, 0.0012)] * 40
    assert measured(*fast, *[(MB, 0.201)] * (HALF - 1)).value(0.0) == pytest.approx(0.0002)
    assert measured(*fast, *[(MB, 0.201)] * (2 * HALF)).value(0.0) == pytest.approx(0.2)


def test_what_nobody_confirms_is_forgotten():
    latency = measured((MB, 0.201))
    assert latency.value(STALE_S) == pytest.approx(0.2)
    assert latency.value(STALE_S + 0.1) == 0.0001
    latency.observe(MB, 0.051, STALE_S + 1)
    assert latency.value(STALE_S + 1) == pytest.approx(0.05)


def test_a_read_that_was_given_up_counts_for_as_long_as_it_was_waited_for():
    assert measured((0, 0.5)).value(0.0) == 0.5


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60))
def test_it_is_the_least_of_the_last_reads(elapsed):
    latency = measured(*[(0, one) for one in elapsed])
    recent = HALF + (len(elapsed) % HALF or 0)
    assert latency.value(0.0) == min(elapsed[-recent:])


@pytest.mark.parametrize(
    ("wait_s", "transfer_s", "run", "is_cheaper"),
    [
        (0.2, 0.001, 3, True),  # 150 ms of computing
        (0.2, 0.001, 5, False),  # 250 ms
        (0.0, 0.001, 1, False),  # there before its need
        (0.0, 0.06, 1000, True),  # the bytes alone take longer than computing them
    ],
)
def test_a_wait_pays_for_a_run_that_takes_longer_to_compute(wait_s, transfer_s, run, is_cheaper):
    assert is_computing_cheaper(wait_s, transfer_s, 0.05, run) is is_cheaper


@pytest.mark.parametrize(("rate", "default"), [(0.0, 0.0), (1.0, -1.0)])
def test_impossible_settings_are_refused(rate, default):
    with pytest.raises(ValueError, match="must be"):
        ReadLatency(rate, default)
