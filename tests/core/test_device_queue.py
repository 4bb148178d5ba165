"""The order of reads before a modelled device, and what demand may overtake; the table of profiles."""

import pytest

from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.core.device_queue import DeviceQueue, Read


def device(queue_depth=1, latency_s=0.0):
    profile = DeviceProfile(
        name="t",
        read_latency_s=latency_s,
        write_latency_s=0.0,
        read_bytes_per_s=100.0,
        write_bytes_per_s=100.0,
        queue_depth=queue_depth,
        jitter=0.0,
    )
    return DeviceQueue(profile, seed=1)


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
    submit(busy, demand(3))
    assert [done for done, _ in busy.start(10.0)] == [11.5, 12.0, 13.0]


def test_no_more_reads_start_than_the_device_has_places():
    busy = device(queue_depth=2)
    submit(busy, demand(1), demand(2), demand(3))
    (_, first), (_, second) = busy.start(0.0)
    assert busy.start(0.5) == []
    busy.complete(first)
    ((_, third),) = busy.start(1.0)
    assert [first.block, second.block, third.block] == [1, 2, 3]


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
        it = DeviceQueue(DEVICES["nvme"], seed)
        submit(it, *(demand(i) for i in range(10)))
        return [t for t, _ in it.start(0.0)]

    assert times(1) == times(1) != times(2)


@pytest.mark.parametrize("profile", DEVICES.values(), ids=lambda profile: profile.name)
def test_profiles_say_where_their_numbers_come_from_and_claims_are_labelled(profile):
    assert profile.source.startswith("vendor: ")
    assert DEVICES[profile.name] is profile
    assert "assumed" in profile.source


def test_the_table_has_the_devices_people_ask_for():
    assert DEVICES["pcie5_tlc"].read_bytes_per_s == 14e9
    assert DEVICES["xl_flash"].read_latency_s == pytest.approx(
        DEVICES["pcie5_tlc"].read_latency_s / 3, rel=0.02
    )
    assert {"fdp", "qlc", "nvme"} < DEVICES.keys()
