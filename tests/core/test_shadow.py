"""A policy on trial: it has what its own decisions brought, from a model of the device, and its books balance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.device_model import DeviceProfile
from dpurt.core.events import (
    Arrived,
    Consumed,
    Demanded,
    Dropped,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    Owner,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.eviction import make_policy
from dpurt.core.prefetch_setup import PrefetchSetup
from dpurt.core.shadow import Shadow, ShadowPool

OWNER = Owner("s", "t")
DEVICE = DeviceProfile(
    name="d", read_latency_s=0.001, write_latency_s=0.001, read_bytes_per_s=1e6, write_bytes_per_s=1e6,
    queue_depth=4, jitter=0.0,
)  # fmt: skip
BLOCK_BYTES = 10_000  # 10 ms


def shadow_of(slots: int = 4, predictors: Sequence[str] = (), eviction: str = "lru") -> Shadow:
    shadow = Shadow([ShadowPool(slots, BLOCK_BYTES, make_policy(eviction, slots))], lambda block: 0, DEVICE)
    if predictors:
        setup = PrefetchSetup(
            predictors=tuple(predictors), block_s=0.1, lookahead_blocks=4, bandwidth_bytes_per_s=1e6,
            staging_bytes=slots * BLOCK_BYTES, queue_depth=2, min_probability=0.05,
        )  # fmt: skip
        shadow.core = setup.build(setup.make_predictors(None), shadow)
    return shadow


def tell(shadow: Shadow, *events: tuple[float, Event]) -> None:
    for now, event in events:
        shadow.handle(event, now)


def life(shadow: Shadow, sequence: int, blocks: tuple[int, ...], start: float, pause: float = 0.1) -> None:
    """A request that loads what it matched, block by block."""
    shadow.handle(Arrived(sequence, OWNER, blocks), start)
    for at, block in enumerate(blocks):
        now = start + pause * (at + 1)
        tell(shadow, (now, Consumed(sequence, at, 1)), (now, Demanded(block, sequence, "nvme")))
    shadow.handle(Finished(sequence, "end_turn"), start + pause * (len(blocks) + 2))


def test_on_demand_a_block_is_there_the_second_time() -> None:
    shadow = shadow_of()
    life(shadow, 1, (1, 2), 0.0)
    life(shadow, 2, (1, 2), 1.0)
    stats = shadow.stats()
    assert stats.demanded == {"staging": 2, "in_flight": 0, "nvme": 2, "gone": 0}
    assert stats.bytes_read == 2 * BLOCK_BYTES
    assert stats.ledger is None


def test_what_the_node_had_is_not_asked() -> None:
    shadow = shadow_of()
    tell(shadow, (0.0, Arrived(1, OWNER, (1,))), (0.1, Demanded(1, 1, "staging")))
    assert shadow.stats().demanded["nvme"] == 1


def test_a_read_takes_the_devices_time_and_waiting_is_not_a_hit() -> None:
    shadow = shadow_of()
    tell(
        shadow, (0.0, Arrived(1, OWNER, (1,))), (0.0, Demanded(1, 1, "nvme")), (0.005, Demanded(1, 1, "nvme")),
        (0.012, Demanded(1, 1, "nvme")),
    )  # fmt: skip
    assert shadow.stats().demanded == {"staging": 1, "in_flight": 1, "nvme": 1, "gone": 0}


def test_what_was_stored_is_in_staging_until_others_need_the_room() -> None:
    shadow = shadow_of(slots=2)
    tell(
        shadow,
        (0.0, Arrived(1, OWNER, ())),
        (0.1, Stored(1, (1,))),
        (0.2, Stored(1, (2,))),
        (0.3, Stored(1, (3,))),
    )
    assert [shadow.where(block, None) for block in (1, 2, 3)] == ["nvme", "staging", "staging"]


def test_read_ahead_makes_hits_and_the_ledger_says_so() -> None:
    ours, plain = shadow_of(8, ["sliding_window"]), shadow_of(8)
    for shadow in (ours, plain):
        life(shadow, 1, (1, 2, 3, 4), 0.0)
    assert plain.stats().demanded["staging"] == 0
    assert ours.stats().demanded["staging"] == 4
    ledger = ours.stats().ledger
    assert ledger is not None
    assert (ledger.timely, ledger.late, ledger.open) == (4, 0, 0)


def test_a_dropped_block_is_gone() -> None:
    shadow = shadow_of()
    tell(shadow, (0.0, Arrived(1, OWNER, (1, 2))), (0.1, Demanded(1, 1, "nvme")), (0.2, Dropped(1)))
    assert shadow.where(1, None) == "gone"
    tell(shadow, (0.3, Demanded(1, 1, "gone")))
    assert shadow.stats().demanded["gone"] == 1


def test_a_prefetch_of_a_block_dropped_meanwhile_fails() -> None:
    shadow = shadow_of(4, ["sliding_window"])
    tell(shadow, (0.0, Arrived(1, OWNER, (1,))), (0.001, Dropped(1)))
    shadow.tick(1.0)
    ledger = shadow.stats().ledger
    assert ledger is not None
    assert ledger.failed == 1
    assert ledger.planned == ledger.settled + ledger.open


def test_a_cancelled_sequence_gives_its_prefetches_back() -> None:
    shadow = shadow_of(8, ["sliding_window"])
    tell(shadow, (0.0, Arrived(1, OWNER, tuple(range(8)))), (0.0001, SequenceGone(1)))
    shadow.tick(5.0)
    ledger = shadow.stats().ledger
    assert ledger is not None
    assert ledger.cancelled > 0
    assert shadow.demand_backlog_bytes() == 0
    assert shadow.next_wakeup() is None or shadow.next_wakeup() > 5.0  # type: ignore[operator]


def test_the_nodes_own_reads_are_none_of_its_business() -> None:
    shadow = shadow_of(4, ["sliding_window"])
    tell(shadow, (0.0, Staged(1, 77)), (0.1, FetchFailed(78, "no_room")), (0.2, Evicted(1)))
    assert shadow.stats().demanded == {"staging": 0, "in_flight": 0, "nvme": 0, "gone": 0}


@pytest.mark.parametrize("eviction", ["lru", "predicted"])
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 0.05), st.integers(0, 11)), max_size=60
    )
)
def test_its_books_balance_whatever_happens(eviction: str, steps: list[tuple[int, int, float, int]]) -> None:
    shadow = shadow_of(3, ["sliding_window", "cross_request"], eviction)
    now, demanded = 0.0, 0
    for sequence, kind, pause, block in steps:
        now += pause
        blocks = tuple(range(block, min(block + 4, 12)))
        event: Event = (
            Arrived(sequence, OWNER, blocks), Demanded(block, sequence, "nvme"), Stored(sequence, (block,)),
            Finished(sequence), Dropped(block), Consumed(sequence, 0, 1),
        )[kind]  # fmt: skip
        demanded += kind == 1
        shadow.handle(event, now)
        due = shadow.next_wakeup()
        if due is not None and due <= now:
            shadow.tick(now)
    shadow.tick(now + 1.0)
    stats = shadow.stats()
    assert sum(stats.demanded.values()) == demanded
    assert shadow.core is not None
    shadow.core.ledger.check_integrity()
    for pool in shadow._pools:
        pool.check_integrity()
    assert not shadow._reads or shadow.next_wakeup() is not None
