"""The flash tier: several bdevs as one, one of them down, one that came back blank, one that came back as another's."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

from dpurt.agents import flash
from dpurt.agents.block_store import BlockStore, StoreFull
from dpurt.agents.flash import SPAN, FlashTier
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.memory import MemoryBdev
from dpurt.config import FileBdevConfig, load_config, ready_topologies
from dpurt.core.identity import ROOT_KEY
from dpurt.core.record import RecordHeader, RecordLayout, pack_header, part_crcs
from dpurt.core.segment_log import FIRST_RECORD, METADATA_BYTES
from dpurt.core.store_turns import RETRY_S
from dpurt.errors import BdevError, ConfigError
from dpurt.testing.agents import capacity, running_agents, small_space
from dpurt.testing.faulty_bdev import Fault, FaultyBdev

LAYOUT = RecordLayout.of(small_space(1))
SEGMENT = FIRST_RECORD + 4 * LAYOUT.record_bytes
INF = float("inf")


class AwayBdev(FaultyBdev):
    """A device that can go away and come back, with its content or another."""

    def go_away(self) -> None:
        for op in ("read", "write", "flush"):
            self.inject(Fault(op=op, kind="error", status="unavailable", count=1_000_000))  # type: ignore[arg-type]

    def come_back(self, *, blank: bool = False) -> None:
        self.clear()
        self.stats.reconnects += 1
        if blank:
            assert isinstance(self.inner, MemoryBdev)
            self.inner.image[:] = bytes(len(self.inner.image))


def device(segments: int = 6) -> AwayBdev:
    return AwayBdev(MemoryBdev(METADATA_BYTES + segments * SEGMENT))


async def store_on(bdev: AwayBdev) -> BlockStore:
    size = bdev.info.size_bytes
    return await BlockStore.open(
        bdev, capacity_bytes=size, segment_bytes=SEGMENT, clock=time.time, deadline_s=1
    )


async def tier_on(*bdevs: AwayBdev) -> FlashTier:
    tier = FlashTier([await store_on(bdev) for bdev in bdevs])
    await tier.rebuild({LAYOUT.fingerprint: LAYOUT})
    return tier


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def image_of(number: int) -> memoryview:
    image = aligned_buffer(LAYOUT.record_bytes)
    payload = LAYOUT.payload(image)
    payload[:] = bytes([number % 256]) * len(payload)
    header = RecordHeader(
        key=key_of(number), parent=ROOT_KEY, fingerprint=LAYOUT.fingerprint, shard=0, position=number,
        part_crcs=part_crcs(LAYOUT, payload), stored_at=1.0,
    )  # fmt: skip
    pack_header(image, LAYOUT, header)
    return image


async def put(tier: FlashTier, *numbers: int) -> list[int]:
    return await tier.append(LAYOUT, [image_of(n) for n in numbers], numbers, deadline=INF)


async def assert_holds(tier: FlashTier, number: int, extent: int) -> None:
    into = aligned_buffer(LAYOUT.record_bytes)
    await tier.read(LAYOUT, extent, into, key=key_of(number), shard=0, deadline=INF)
    assert LAYOUT.payload(into) == LAYOUT.payload(image_of(number))


def stores_of(extents: list[int]) -> list[int]:
    return [extent // SPAN for extent in extents]


async def test_batches_are_spread_over_the_stores_and_read_back() -> None:
    tier = await tier_on(device(), device(), device())
    extents = [extent for number in range(0, 12, 2) for extent in await put(tier, number, number + 1)]
    assert sorted(stores_of(extents)) == [0] * 4 + [1] * 4 + [2] * 4
    for number, extent in enumerate(extents):
        await assert_holds(tier, number, extent)


async def test_a_restart_finds_the_records_of_all_stores_parents_first() -> None:
    bdevs = device(), device()
    tier = await tier_on(*bdevs)
    placed = {number: (await put(tier, number))[0] for number in (3, 0, 2, 1)}
    await tier.aclose()
    again = FlashTier([await store_on(bdev) for bdev in bdevs])
    rebuilt = await again.rebuild({LAYOUT.fingerprint: LAYOUT})
    assert [r.header.position for r in rebuilt.records] == [0, 1, 2, 3]
    assert {r.header.position: r.offset for r in rebuilt.records} == placed
    assert again.incarnation == tier.incarnation + 1


async def test_a_batch_goes_where_there_is_room_and_is_refused_where_there_is_none() -> None:
    tier = await tier_on(device(4), device(8))
    room = [store.room(LAYOUT) for store in tier.stores]
    assert room[0] < room[1] == tier.room(LAYOUT)
    extents = await put(tier, *range(room[1]))
    assert set(stores_of(extents)) == {1}
    assert set(stores_of(await put(tier, *range(room[0])))) == {0}
    with pytest.raises(StoreFull):
        await put(tier, 1)


async def test_while_a_bdev_is_down_the_others_take_the_writes_and_what_it_holds_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    away, other = device(), device()
    tier = await tier_on(away, other)
    [first], [second] = await put(tier, 1), await put(tier, 2)
    on_away = {1: first, 2: second}[1 if first < SPAN else 2]
    away.go_away()
    assert set(stores_of([e for n in range(3, 9) for e in await put(tier, n)])) == {1}
    with pytest.raises(BdevError) as caught:
        await assert_holds(tier, 1 if first < SPAN else 2, on_away)
    assert caught.value.status == "unavailable"
    away.come_back()
    await trio.sleep(RETRY_S)
    await assert_holds(tier, 1 if first < SPAN else 2, on_away)
    assert 0 in stores_of([e for n in range(9, 13) for e in await put(tier, n)])


async def test_with_every_bdev_down_an_append_says_so(autojump_clock: trio.testing.MockClock) -> None:
    bdev = device()
    tier = await tier_on(bdev)
    bdev.go_away()
    for _ in range(2):
        with pytest.raises(BdevError) as caught:
            await put(tier, 1)
        assert caught.value.status == "unavailable"


async def test_a_device_that_comes_back_blank_gets_a_new_store_and_the_old_one_is_reported_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = device()
    tier = await tier_on(bdev)
    lost: list[tuple[int, int]] = []
    tier.on_lost = lambda first, stop: lost.append((first, stop))
    await tier.set_epoch("s", 7)
    old_name = tier.stores[0].stats().store
    [old] = await put(tier, 1)
    bdev.go_away()
    bdev.come_back(blank=True)
    [new] = await put(tier, 2)
    assert lost == [(0, SPAN)]
    await assert_holds(tier, 2, new)
    assert old == new, "the log began anew"
    assert tier.stores[0].stats().store != old_name
    assert tier.epochs == {"s": 7}
    tier.stores[0].check_integrity()
    again = FlashTier([await store_on(bdev)])
    rebuilt = await again.rebuild({LAYOUT.fingerprint: LAYOUT})
    assert [r.header.key for r in rebuilt.records] == [key_of(2)]


async def test_a_new_store_on_a_blank_device_that_was_not_finished_is_ours_at_the_next_try(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = device()
    tier = await tier_on(bdev)
    await put(tier, 1)
    bdev.go_away()
    bdev.come_back(blank=True)
    bdev.inject(Fault(op="flush", kind="error"))
    with pytest.raises(BdevError):
        await put(tier, 2)
    await trio.sleep(RETRY_S)
    [new] = await put(tier, 2)
    await assert_holds(tier, 2, new)
    bdev.go_away()
    bdev.come_back(blank=True)
    [newer] = await put(tier, 3)
    await assert_holds(tier, 3, newer)


async def test_closing_does_not_seal_segments_on_a_device_that_came_back_as_somebody_elses() -> None:
    bdev = device()
    tier = await tier_on(bdev)
    await put(tier, 1)
    bdev.inner.image[:] = b"x" * len(bdev.inner.image)  # type: ignore[attr-defined]
    bdev.come_back()
    await tier.aclose()
    assert bdev.inner.image == b"x" * len(bdev.inner.image)  # type: ignore[attr-defined]


async def test_a_write_under_way_when_the_device_comes_back_does_not_reach_it_unrecognised() -> None:
    bdev = device()
    tier = await tier_on(bdev)
    bdev.inject(Fault(op="write", kind="hang"))  # the header of the first segment
    outcome: list[str] = []

    async def write() -> None:
        with pytest.raises(BdevError) as caught:
            await tier.append(LAYOUT, [image_of(1)], [1], deadline=INF)
        outcome.append(caught.value.status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        bdev.stats.reconnects += 1
        before = bytes(bdev.inner.image)  # type: ignore[attr-defined]
        bdev.resume()
    assert outcome == ["unavailable"]
    header = METADATA_BYTES + 4096
    assert bdev.inner.image[header:] == before[header:], "no record after the header"  # type: ignore[attr-defined]


async def test_an_epoch_bumped_while_a_device_came_back_blank_is_on_the_new_store() -> None:
    bdev = device()
    tier = await tier_on(bdev)
    bdev.come_back(blank=True)
    await tier.set_epoch("s", 4)
    assert (await tier_on(bdev)).epochs == {"s": 4}


@pytest.mark.parametrize("what", ["store", "data"])
async def test_a_device_that_comes_back_as_somebody_elses_is_never_written(
    what: str, autojump_clock: trio.testing.MockClock
) -> None:
    bdev, stranger = device(), device()
    tier = await tier_on(bdev)
    await put(tier, 1)
    if what == "store":
        await put(await tier_on(stranger), 5)
    else:
        stranger.inner.image[: 1 << 16] = b"x" * (1 << 16)  # type: ignore[attr-defined]
    bdev.inner.image[:] = stranger.inner.image  # type: ignore[attr-defined]
    bdev.go_away()
    bdev.come_back()
    for attempt in (put(tier, 2), put(tier, 2), tier.set_epoch("s", 3)):
        with pytest.raises(BdevError) as caught:
            await attempt
        assert caught.value.status == "unavailable"
        await trio.sleep(RETRY_S)
    await tier.aclose()
    assert bdev.inner.image == stranger.inner.image  # type: ignore[attr-defined]


async def test_the_newest_epoch_any_store_knows_counts() -> None:
    first, second = device(), device()
    tier = await tier_on(first, second)
    await tier.set_epoch("s", 1)
    await tier.stores[1].set_epoch("s", 2)
    assert (await tier_on(first, second)).epochs == {"s": 2}


async def test_what_only_a_lost_store_held_is_dropped_with_its_descendants_and_staged_blocks_stay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = AwayBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev, num_slots=4) as agents:
        agents.storage.store.on_lost = agents.reclaimer.lose
        await agents.store_to_flash(0, 1, 2)
        await agents.store(50)
        await agents.until_written()
        state = agents.state
        bdev.go_away()
        bdev.come_back(blank=True)
        await agents.store(60)
        await agents.until_written()
        assert agents.index.drops == {"device_lost": 3}
        [staged] = [state.block_id(handle) for handle in agents.handles(50)]
        assert state.extent_of(staged, 0) < 0 <= state.slot_of(staged, 0)


async def test_what_is_stored_while_the_device_is_away_reaches_it_when_it_is_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = AwayBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev) as agents:
        bdev.go_away()
        assert await agents.store(0, 1, 2) == ["stored"] * 3
        await trio.sleep(10)
        assert sum(agents.intake.dirty.values()) == 3, "pinned in staging"
        bdev.come_back()
        await agents.until_written()
        assert agents.intake.writes_lost == 0
        assert agents.storage.store.stores[0].stats().appends == 3


async def test_a_read_of_a_device_that_is_away_is_a_miss_that_loses_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = AwayBdev(MemoryBdev(capacity(8)))
    async with running_agents(bdev) as agents:
        await agents.store_to_flash(0, 1)
        bdev.go_away()
        for _ in range(3):
            assert [one.status for one in await agents.acquire(0, 1)] == ["error"] * 2
        bdev.come_back()
        assert [one.status for one in await agents.acquire(0, 1)] == ["ok"] * 2
        assert agents.index.drops == {}
        agents.staging.drop_leases(await agents.acquire(0, 1))


async def test_a_device_too_large_to_tell_its_places_from_the_next_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = await tier_on(device(), device())
    for name in ready_topologies():
        assert all(
            (bdev.size_bytes or 0) <= SPAN
            for bdev in load_config(name).bdev
            if isinstance(bdev, FileBdevConfig)
        )
    monkeypatch.setattr(flash, "SPAN", SEGMENT)
    with pytest.raises(ConfigError, match=r"\$.bdev: expected a capacity of at most"):
        FlashTier(tier.stores)
