"""The modelled device: time, order, and what demand may overtake."""

import pytest

from dpurt.replay.device import DEVICES, DeviceProfile, ModelledDevice, Read


def device(queue_depth=1, latency_s=0.0):
    profile = DeviceProfile(
        name="t", bandwidth_bytes_per_s=100.0, latency_s=latency_s, queue_depth=queue_depth, source="test"
    )
    return ModelledDevice(profile, seed=1)


def prefetch(block):
    return Read(block, 100, job=block, is_demand=False)


def demand(block):
    return Read(block, 100, job=None, is_demand=True)


def submit(device, *reads):
    for read in reads:
        device.submit(read)


def test_transfers_follow_each_other_and_latencies_overlap():
    busy = device(queue_depth=4, latency_s=0.5)
    submit(busy, demand(1), demand(2))
    (first, _), (second, _) = busy.start(10.0)
    assert first >= 11.5
    assert 12.5 <= second < first + 4.0


def test_demand_goes_before_prefetch_that_has_not_started():
    one = device()
    submit(one, prefetch(1), prefetch(2), demand(3))
    order = []
    now = 0.0
    while started := one.start(now):
        ((now, read),) = started
        one.complete(read)
        order.append(read.block)
    assert order == [3, 1, 2]
    assert one.bytes_read == 300


def test_promotion_moves_a_waiting_prefetch_forward_and_counts_as_demand():
    one = device()
    last = prefetch(2)
    submit(one, prefetch(1), last)
    one.promote(last)
    one.promote(last)
    assert one.demand_backlog_bytes == 100
    ((_, read),) = one.start(0.0)
    assert read is last
    one.complete(last)
    assert one.demand_backlog_bytes == 0


def test_only_an_unstarted_prefetch_can_be_cancelled():
    one = device()
    started, waiting, wanted = prefetch(1), prefetch(2), prefetch(3)
    submit(one, started, waiting, wanted)
    one.start(0.0)
    one.promote(wanted)
    assert [one.cancel(r) for r in (started, waiting, wanted)] == [False, True, False]


def test_equal_seeds_give_equal_latencies():
    def times(seed):
        it = ModelledDevice(DEVICES["nvme"], seed)
        submit(it, *(demand(i) for i in range(10)))
        return [t for t, _ in it.start(0.0)]

    assert times(1) == times(1) != times(2)


@pytest.mark.parametrize("profile", DEVICES.values(), ids=str)
def test_profiles_say_where_their_numbers_come_from(profile):
    assert profile.source
