"""The block store: round trips, refusals, crashes at any point, reclaim, and what a failing device does to
it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.agents.block_store import BlockStore, StoreFull
from dpurt.agents.segment_scan import Rebuilt
from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.memory import MemoryBdev
from dpurt.core.identity import Geometry, LayerGroup, Space
from dpurt.core.record import RecordError, RecordHeader, RecordLayout, pack_header, part_crcs, unpack_header
from dpurt.core.segment_log import FIRST_RECORD, METADATA_BYTES
from dpurt.errors import BdevError, BdevTimeout, ConfigError, LocalProtocolError
from dpurt.testing.faulty_bdev import Fault, FaultyBdev

INF = float("inf")
SEGMENT = FIRST_RECORD + 4 * 16384
CAPACITY = METADATA_BYTES + 6 * SEGMENT
NOW = 1_000_000.0


def make_space(tenant: str = "t", parts: Sequence[int] = (5000, 3000, 4000)) -> Space:
    groups = tuple(
        LayerGroup(name=f"g{i}", num_layers=1, num_kv_heads=1, head_size=1, part_bytes=n)
        for i, n in enumerate(parts)
    )
    geometry = Geometry(block_tokens=4, groups=groups)
    return Space(model="m", revision="r", kv_dtype="bf16", geometry=geometry, tenant=tenant)


LAYOUT = RecordLayout.of(make_space())
OTHER = RecordLayout.of(make_space("other", (4096,)))
LAYOUTS = {LAYOUT.fingerprint: LAYOUT, OTHER.fingerprint: OTHER}
assert LAYOUT.record_bytes == 16384


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def image_of(number: int, layout: RecordLayout = LAYOUT, expires_at: float = 0.0) -> memoryview:
    image = aligned_buffer(layout.record_bytes)
    payload = layout.payload(image)
    payload[:] = random.Random(number).randbytes(len(payload))
    header = RecordHeader(
        key=key_of(number),
        parent=key_of(number - 1) if number else bytes(16),
        fingerprint=layout.fingerprint,
        shard=0,
        position=number,
        part_crcs=part_crcs(layout, payload),
        stored_at=NOW,
        expires_at=expires_at,
        tokens=number.to_bytes(16, "little"),
    )
    pack_header(image, layout, header)
    return image


async def open_store(
    bdev: Bdev, layouts: Mapping[bytes, RecordLayout] = LAYOUTS, now: float = NOW
) -> tuple[BlockStore, Rebuilt]:
    store = await BlockStore.open(bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: now)
    return store, await store.rebuild(layouts)


async def new_store() -> tuple[MemoryBdev, BlockStore]:
    bdev = MemoryBdev(CAPACITY)
    return bdev, (await open_store(bdev))[0]


async def put(store: BlockStore, *numbers: int, layout: RecordLayout = LAYOUT) -> list[int]:
    return await store.append(layout, [image_of(n, layout) for n in numbers], numbers, deadline=INF)


async def assert_holds(store: BlockStore, number: int, offset: int, layout: RecordLayout = LAYOUT) -> None:
    into = aligned_buffer(layout.record_bytes)
    await store.read(layout, offset, into, key=key_of(number), shard=0, deadline=INF)
    header = unpack_header(into, layout)
    assert header.key == key_of(number)
    assert header.tokens == number.to_bytes(16, "little")
    assert layout.payload(into) == layout.payload(image_of(number, layout))


async def refusal(store: BlockStore, offset: int, number: int, **kwargs: int) -> str:
    into = aligned_buffer(LAYOUT.record_bytes)
    shard = kwargs.pop("shard", 0)
    with pytest.raises(RecordError) as caught:
        await store.read(LAYOUT, offset, into, key=key_of(number), shard=shard, deadline=INF, **kwargs)
    return caught.value.reason


def coldest_first(names: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return names.astype(np.float64)


# --- opening ---


async def test_blank_device_becomes_a_store_and_opens_again() -> None:
    bdev, store = await new_store()
    assert store.incarnation == 1
    again, rebuilt = await open_store(bdev)
    assert again.incarnation == 2
    assert again.stats().store == store.stats().store
    assert rebuilt.records == []


@pytest.mark.parametrize("at", [0, 1080, 32768, METADATA_BYTES + 64, (1 << 20) - 1, 1 << 20, (2 << 20) - 1])
async def test_a_device_with_somebody_elses_data_is_refused_and_left_alone(at: int) -> None:
    bdev = MemoryBdev(2 << 20)
    bdev.image[at] = 0x53
    before = bytes(bdev.image)
    with pytest.raises(ConfigError, match=r"not a dpurt store.*serve --format"):
        await BlockStore.open(bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW)
    assert bdev.image == before
    await BlockStore.open(
        bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW, format=True
    )
    assert at >= METADATA_BYTES or bdev.image[at] != 0x53 or at in (0, 32768)


@pytest.mark.parametrize("size", [64 << 20, (64 << 20) + 12288])
async def test_foreign_data_is_looked_for_at_64_places_and_the_end(size: int) -> None:
    bdev = MemoryBdev(size)
    stride = size // 64 // 4096 * 4096
    for at in ((1 << 20) + 17 * stride, (1 << 20) + 62 * stride + 65535, size - 1):
        bdev.image[at] = 1
        with pytest.raises(ConfigError, match="left untouched"):
            await BlockStore.survey(bdev)
        bdev.image[at] = 0
    await BlockStore.survey(bdev)
    assert bdev.stats.bytes_read < 5 * (6 << 20)
    assert bdev.stats.writes == 0


async def test_a_survey_knows_a_store() -> None:
    bdev, store = await new_store()
    await put(store, 1)
    await BlockStore.survey(bdev)


async def test_format_does_not_erase_a_store() -> None:
    bdev, store = await new_store()
    [offset] = await put(store, 1)
    again = await BlockStore.open(
        bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW, format=True
    )
    await again.rebuild(LAYOUTS)
    await assert_holds(again, 1, offset)


async def test_capacity_and_segment_size_are_checked_with_both_values() -> None:
    bdev, _ = await new_store()
    with pytest.raises(ConfigError, match=f"{CAPACITY + 4096} exceeds the {CAPACITY} bytes"):
        await BlockStore.open(bdev, capacity_bytes=CAPACITY + 4096, segment_bytes=SEGMENT, clock=lambda: NOW)
    with pytest.raises(ConfigError, match=f"made with {SEGMENT}, not {2 * SEGMENT}"):
        await BlockStore.open(bdev, capacity_bytes=CAPACITY, segment_bytes=2 * SEGMENT, clock=lambda: NOW)
    with pytest.raises(ConfigError, match="at least 3 are needed"):
        await BlockStore.open(
            bdev, capacity_bytes=METADATA_BYTES + SEGMENT, segment_bytes=SEGMENT, clock=lambda: NOW
        )


async def test_use_before_rebuild_is_refused() -> None:
    store = await BlockStore.open(
        MemoryBdev(CAPACITY), capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW
    )
    with pytest.raises(LocalProtocolError, match="rebuild"):
        await put(store, 1)
    await store.rebuild({})
    with pytest.raises(LocalProtocolError, match="once"):
        await store.rebuild({})


async def test_a_device_that_lies_is_noticed_at_open() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    bdev.inject(Fault(op="write", kind="corrupt", at=32768 + 100, count=2))  # the wipe, then the superblock
    with pytest.raises(BdevError, match="probe"):
        await open_store(bdev)


async def test_epochs_survive_and_a_torn_superblock_leaves_the_one_before() -> None:
    bdev, store = await new_store()
    await store.set_epoch("llama", 4)
    await store.set_epoch("llama", 5)  # generation 3, slot B
    again, _ = await open_store(MemoryBdev(image=bdev.image))  # generation 4, slot A
    assert again.epochs == {"llama": 5}
    bdev.image[20] ^= 1
    third, _ = await open_store(bdev)
    assert third.epochs == {"llama": 5}
    bdev.image[20] ^= 1
    bdev.image[32768 + 20] ^= 1
    bdev.image[20] ^= 2
    with pytest.raises(ConfigError, match="damaged"):
        await open_store(bdev)


# --- records ---


async def test_what_is_appended_is_read_back() -> None:
    _, store = await new_store()
    offsets = await put(store, *range(6))
    for number, offset in enumerate(offsets):
        await assert_holds(store, number, offset)
    stats = store.stats()
    assert (stats.appends, stats.reads, stats.bytes_read) == (6, 6, 6 * LAYOUT.record_bytes)
    assert (stats.log.live_records, stats.log.live_bytes) == (6, 6 * LAYOUT.record_bytes)


async def test_adjacent_records_are_one_write() -> None:
    bdev, store = await new_store()
    before = bdev.stats.writes
    await put(store, 0, 1, 2)
    assert bdev.stats.writes - before == 2, "the segment header, and the three records"


async def test_parts_are_read_without_the_rest() -> None:
    _, store = await new_store()
    [offset] = await put(store, 1)
    into = aligned_buffer(LAYOUT.record_bytes)
    await store.read(LAYOUT, offset, into, key=key_of(1), shard=0, deadline=INF, parts_mask=0b100)
    original = image_of(1)
    assert LAYOUT.part(into, 2) == LAYOUT.part(original, 2)
    assert not any(into[4096 : 4096 + 4096]), "the blocks that hold only part 0 were not read"
    assert store.stats().bytes_read < LAYOUT.record_bytes


async def test_a_read_wants_the_right_block() -> None:
    _bdev, store = await new_store()
    [one, two] = await put(store, 1, 2)
    assert await refusal(store, one, 2) == "key"
    assert await refusal(store, two, 2, shard=1) == "shard"
    assert await refusal(store, two + 4096, 2) == "stale"
    store.forget(one)
    assert await refusal(store, one, 1) == "stale"
    assert store.stats().refused == {"key": 1, "shard": 1, "stale": 2}


async def test_a_write_the_device_lost_is_refused_though_the_key_fits() -> None:
    bdev, store = await new_store()
    offsets = await put(store, *range(4))
    span = slice(offsets[0], offsets[0] + LAYOUT.record_bytes)
    before = bytes(bdev.image[span])
    current: list[int] = offsets
    for _ in range(6):  # once round the device, back to the first segment
        for offset in current:
            store.forget(offset)
        current = await put(store, 0, 1, 2, 3)
    assert current == offsets
    bdev.image[span] = before
    assert await refusal(store, offsets[0], 0) == "stale"


async def test_a_corrupt_part_is_refused_and_the_others_still_served() -> None:
    bdev, store = await new_store()
    [offset] = await put(store, 1)
    bdev.image[offset + LAYOUT.header_bytes + 6000] ^= 1  # part 1
    assert await refusal(store, offset, 1) == "checksum"
    assert await refusal(store, offset, 1, parts_mask=0b010) == "checksum"
    await store.read(
        LAYOUT,
        offset,
        aligned_buffer(LAYOUT.record_bytes),
        key=key_of(1),
        shard=0,
        deadline=INF,
        parts_mask=0b101,
    )


async def test_an_expired_record_is_refused_and_not_rebuilt() -> None:
    bdev, store = await new_store()
    [offset] = await store.append(LAYOUT, [image_of(1, expires_at=NOW + 10)], [1], deadline=INF)
    await assert_holds(store, 1, offset)
    _, rebuilt = await open_store(bdev, now=NOW + 11)
    assert rebuilt.records == []
    assert rebuilt.dropped == {"expired": 1}


async def test_a_full_store_says_how_many_would_fit_and_writes_nothing() -> None:
    bdev, store = await new_store()
    await put(store, *range(18))
    before = bdev.stats.writes
    with pytest.raises(StoreFull) as caught:
        await put(store, 18, 19, 20)
    assert (caught.value.wanted, caught.value.room) == (3, 2)
    assert store.room(LAYOUT) == 2
    assert bdev.stats.writes == before
    await put(store, 18, 19)


async def test_footprint_never_exceeds_the_capacity() -> None:
    _bdev, store = await new_store()
    number = 0
    for _ in range(200):
        while store.room(LAYOUT) < 1:
            reclaim = store.reclaim_one(coldest_first)
            assert reclaim is not None
            store.finish_reclaim(reclaim)
        await put(store, number)
        number += 1
        assert store.stats().log.usage_bytes <= CAPACITY
    assert store.stats().log.write_amplification < 1.15, "headers and seals of 64 KiB segments, no re-appends"
    store.check_integrity()


# --- reclaim ---


async def test_hot_records_move_before_their_segment_is_reused() -> None:
    _, store = await new_store()
    offsets = await put(store, *range(20))
    reclaim = store.reclaim_one(lambda names: -names.astype(np.float64))
    assert reclaim is not None
    assert reclaim.offsets == tuple(offsets[16:20])
    assert reclaim.names.tolist() == [16, 17, 18, 19]
    assert reclaim.fingerprint == LAYOUT.fingerprint
    image = aligned_buffer(LAYOUT.record_bytes)
    await store.read(LAYOUT, offsets[17], image, key=key_of(17), shard=0, deadline=INF)
    [moved] = await store.append(LAYOUT, [image], [17], deadline=INF, is_reappend=True)
    store.forget(offsets[17])
    assert store.finish_reclaim(reclaim) == 3
    await assert_holds(store, 17, moved)
    assert await refusal(store, offsets[16], 16) == "stale"
    store.check_integrity()


async def test_a_segment_being_reclaimed_is_not_chosen_twice_nor_reused_under_a_read() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    offsets = await put(store, *range(4))
    first = store.reclaim_one(coldest_first)
    assert first is not None
    assert store.reclaim_one(coldest_first) is None
    bdev.inject(Fault(op="read", kind="hang"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(assert_holds, store, 0, offsets[0])
        await trio.testing.wait_all_tasks_blocked()
        store.finish_reclaim(first)
        assert store.stats().log.free_segments == 5, "the read still holds it"
        bdev.resume()
    assert store.stats().log.free_segments == 6


async def test_a_batch_over_two_segments_is_not_reclaimed_before_its_caller_knows_of_it() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    await put(store, *range(2))
    places: list[int] = []

    async def append() -> None:
        places.extend(await put(store, *range(2, 6)))

    async with trio.open_nursery() as nursery:
        bdev.inject(Fault(op="write", kind="hang", at=METADATA_BYTES + SEGMENT))
        nursery.start_soon(append)
        await trio.testing.wait_all_tasks_blocked()
        reclaim = store.reclaim_one(coldest_first)
        assert reclaim is None, "the first segment is full, but half of the batch is not written"
        bdev.resume()
    assert len(places) == 4
    assert store.reclaim_one(coldest_first) is not None


async def test_restart_keeps_the_later_copy_of_a_moved_record() -> None:
    bdev, store = await new_store()
    [old, *_] = await put(store, *range(5))
    image = aligned_buffer(LAYOUT.record_bytes)
    await store.read(LAYOUT, old, image, key=key_of(0), shard=0, deadline=INF)
    [new] = await store.append(LAYOUT, [image], [0], deadline=INF, is_reappend=True)
    _, rebuilt = await open_store(bdev)
    assert [r.offset for r in rebuilt.records if r.header.key == key_of(0)] == [new]
    assert rebuilt.dropped == {"duplicate": 1}


# --- restart ---


async def test_restart_rebuilds_index_and_usage_parents_first() -> None:
    bdev, store = await new_store()
    offsets = await put(store, 5, 3, 4, 0, 1, 2)
    others = await put(store, 0, 1, layout=OTHER)
    before = store.stats().log
    await store.aclose()
    seen: list[tuple[int, int]] = []
    again = await BlockStore.open(bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW)
    rebuilt = await again.rebuild(LAYOUTS, lambda done, total: seen.append((done, total)))
    assert [r.header.position for r in rebuilt.records] == [0, 0, 1, 1, 2, 3, 4, 5]
    assert {r.offset for r in rebuilt.records} == {*offsets, *others}
    assert rebuilt.torn == 0
    assert not rebuilt.dropped
    assert seen == [(1, 3), (2, 3), (3, 3)]
    after = again.stats().log
    assert (after.live_records, after.live_bytes) == (before.live_records, before.live_bytes)
    assert after.usage_bytes == before.usage_bytes
    for record in rebuilt.records:
        layout = LAYOUTS[record.header.fingerprint]
        await assert_holds(again, record.header.position, record.offset, layout)


async def test_sealed_segments_are_trusted_by_header_others_are_verified() -> None:
    bdev, store = await new_store()
    offsets = await put(store, *range(6))  # one full, sealed; two records in an open one
    for offset in (offsets[1], offsets[5]):
        bdev.image[offset + LAYOUT.header_bytes] ^= 1
    again, rebuilt = await open_store(bdev)
    assert rebuilt.torn == 1
    assert {r.header.position for r in rebuilt.records} == {0, 1, 2, 3, 4}
    assert await refusal(again, offsets[1], 1) == "checksum"
    _, third = await open_store(bdev)
    assert third.torn == 0, "the torn record was scrubbed and its segment sealed"
    assert {r.header.position for r in third.records} == {0, 1, 2, 3, 4}


async def test_segments_of_spaces_no_longer_known_are_free() -> None:
    bdev, store = await new_store()
    await put(store, *range(8))
    await put(store, 0, layout=OTHER)
    again, rebuilt = await open_store(bdev, {OTHER.fingerprint: OTHER})
    assert len(rebuilt.records) == 1
    assert rebuilt.foreign_segments == 2
    assert again.stats().log.free_segments == 5
    await put(again, *range(8))


async def test_records_of_an_older_store_on_the_device_are_ignored() -> None:
    bdev, store = await new_store()
    await put(store, *range(8))
    bdev.image[:METADATA_BYTES] = bytes(METADATA_BYTES)
    fresh = await BlockStore.open(
        bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW, format=True
    )
    assert (await fresh.rebuild(LAYOUTS)).records == []
    [offset] = await put(fresh, 100)
    _, rebuilt = await open_store(bdev)
    assert [(r.offset, r.header.position) for r in rebuilt.records] == [(offset, 100)]


async def test_unreadable_places_lose_their_records_not_the_restart() -> None:
    memory, store = await new_store()
    offsets = await put(store, *range(8))
    bdev = FaultyBdev(memory)
    store = await BlockStore.open(bdev, capacity_bytes=CAPACITY, segment_bytes=SEGMENT, clock=lambda: NOW)
    bdev.inject(Fault(op="read", kind="error", at=offsets[0] - FIRST_RECORD))
    rebuilt = await store.rebuild(LAYOUTS)
    assert rebuilt.dropped == {"unreadable": 1}
    assert {r.header.position for r in rebuilt.records} == {4, 5, 6, 7}


# --- a failing device ---


async def test_a_failed_append_leaves_nothing_behind_and_later_ones_work() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    await put(store, 0)
    for kind in ("error", "short"):
        bdev.inject(Fault(op="write", kind=kind))
        with pytest.raises(BdevError):
            await put(store, 1)
    assert store.stats().log.live_records == 1
    offsets = await put(store, 1, 2)
    await assert_holds(store, 2, offsets[1])
    store.check_integrity()


async def test_a_segment_with_a_failed_write_is_never_sealed() -> None:
    memory = MemoryBdev(CAPACITY)
    bdev = FaultyBdev(memory)
    store, _ = await open_store(bdev)
    await put(store, 0)
    bdev.inject(Fault(op="write", kind="short"))
    with pytest.raises(BdevError):
        await put(store, 1)
    await put(store, 2, 3)
    _, rebuilt = await open_store(memory)
    assert rebuilt.torn == 1
    assert {r.header.position for r in rebuilt.records} == {0, 2, 3}


async def test_a_segment_whose_header_cannot_be_written_is_given_up() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    bdev.inject(Fault(op="write", kind="error"))
    failures = []

    async def try_put(number: int) -> None:
        try:
            await put(store, number)
        except BdevError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(try_put, 0)
        nursery.start_soon(try_put, 1)
    assert len(failures) == 2, "the second waited for the same header"
    assert store.stats().log.free_segments == 6
    [offset] = await put(store, 2)
    await assert_holds(store, 2, offset)
    store.check_integrity()


async def test_a_read_that_times_out_keeps_its_segment_until_settled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    [offset] = await put(store, 1)
    into = aligned_buffer(LAYOUT.record_bytes)
    bdev.inject(Fault(op="read", kind="hang"))
    with pytest.raises(BdevTimeout) as caught:
        await store.read(LAYOUT, offset, into, key=key_of(1), shard=0, deadline=trio.current_time() + 1)
    assert store.reclaim_one(coldest_first) is None, "held"
    bdev.resume()
    await caught.value.settled()
    await trio.testing.wait_all_tasks_blocked()
    assert any(into), "the late write really came"
    assert store.reclaim_one(coldest_first) is not None


async def test_a_run_of_records_is_one_read_and_each_is_judged_by_itself() -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    offsets = await put(store, 0, 1, 2, 3)
    store.forget(offsets[1])
    bdev.inject(Fault(op="read", kind="corrupt", at=offsets[2] + LAYOUT.header_bytes))
    images = [aligned_buffer(LAYOUT.record_bytes) for _ in offsets]
    before = bdev.stats.reads
    keys = [key_of(0), key_of(1), key_of(2), key_of(7)]
    refused = await store.read_run(LAYOUT, offsets[0], images, keys=keys, shard=0, deadline=INF)
    assert [error and error.reason for error in refused] == [None, "stale", "checksum", "key"]
    assert bdev.stats.reads == before + 1
    assert LAYOUT.payload(images[0]) == LAYOUT.payload(image_of(0))
    assert store.reclaim_one(coldest_first) is not None, "nothing is held"


async def test_a_run_that_times_out_keeps_its_segment_until_settled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    offsets = await put(store, 0, 1)
    bdev.inject(Fault(op="read", kind="hang"))
    images = [aligned_buffer(LAYOUT.record_bytes) for _ in offsets]
    with pytest.raises(BdevTimeout) as caught:
        await store.read_run(
            LAYOUT, offsets[0], images, keys=[key_of(0), key_of(1)], shard=0, deadline=trio.current_time() + 1
        )
    assert store.reclaim_one(coldest_first) is None, "held"
    bdev.resume()
    await caught.value.settled()
    await trio.testing.wait_all_tasks_blocked()
    assert store.reclaim_one(coldest_first) is not None


async def test_partial_reads_that_time_out_settle_as_one(autojump_clock: trio.testing.MockClock) -> None:
    layout = RecordLayout.of(make_space("wide", [4096] * 4))
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev, {layout.fingerprint: layout})
    [offset] = await put(store, 1, layout=layout)
    bdev.inject(Fault(op="read", kind="hang", count=2))
    into = aligned_buffer(layout.record_bytes)
    with pytest.raises(BdevTimeout) as caught:
        await store.read(
            layout, offset, into, key=key_of(1), shard=0, deadline=trio.current_time() + 1, parts_mask=0b1010
        )
    with trio.move_on_after(5) as too_early:
        await caught.value.settled()
    assert too_early.cancelled_caught
    bdev.resume()
    await caught.value.settled()
    assert bdev.stats.abandoned == 0


async def test_a_late_write_cannot_land_in_a_segment_given_to_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bdev = FaultyBdev(MemoryBdev(CAPACITY))
    store, _ = await open_store(bdev)
    await put(store, 0, 1, 2)
    bdev.inject(Fault(op="write", kind="hang", at=METADATA_BYTES + FIRST_RECORD + 3 * LAYOUT.record_bytes))
    with pytest.raises(BdevTimeout):
        await store.append(LAYOUT, [image_of(3)], [3], deadline=trio.current_time() + 1)
    assert store.reclaim_one(coldest_first) is None
    for offset in (METADATA_BYTES + FIRST_RECORD + i * LAYOUT.record_bytes for i in range(3)):
        store.forget(offset)
    assert store.stats().log.free_segments == 5
    bdev.resume()
    await trio.testing.wait_all_tasks_blocked()
    assert store.stats().log.free_segments == 6


async def test_a_failed_seal_only_costs_verification() -> None:
    memory = MemoryBdev(CAPACITY)
    bdev = FaultyBdev(memory)
    store, _ = await open_store(bdev)
    bdev.inject(Fault(op="flush", kind="error"))
    await put(store, *range(4))
    assert store.stats().seal_failures == 1
    _, rebuilt = await open_store(memory)
    assert len(rebuilt.records) == 4


# --- crashes ---


@dataclass
class CrashableBdev(MemoryBdev):
    """Remembers writes since the last flush, so that a crash can lose or tear any of them (in 512-byte
    sectors).
    """

    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(CAPACITY)
        self.durable = bytearray(CAPACITY)
        self.power_off_after: int | None = None

    async def write_from(
        self, offset: int, buffers: Sequence[memoryview], deadline: float, *, placement: int = 0
    ) -> None:
        if self.power_off_after is not None:
            self.power_off_after -= 1
            if self.power_off_after < 0:
                self.pending.append((offset, b"".join(buffers)))
                raise BdevError(self.info.name, "write", offset, 0, "io_error", "power off")
        await super().write_from(offset, buffers, deadline)
        self.pending.append((offset, b"".join(buffers)))

    async def flush(self, deadline: float) -> None:
        await super().flush(deadline)
        for offset, data in self.pending:
            self.durable[offset : offset + len(data)] = data
        self.pending.clear()

    def after_kill(self, rng: random.Random) -> MemoryBdev:
        """The process died: finished writes are all there, the last one may be torn."""
        image = bytearray(self.image)
        if self.power_off_after is not None and self.power_off_after < 0:
            offset, data = self.pending[-1]
            keep = rng.randrange(len(data) // 512 + 1) * 512
            image[offset : offset + keep] = data[:keep]
        return _device(image)

    def after_power_loss(self, rng: random.Random) -> MemoryBdev:
        """Of what was not flushed any sectors may be lost."""
        image = bytearray(self.durable)
        for offset, data in self.pending:
            for at in range(0, len(data), 512):
                if rng.random() < 0.7:
                    image[offset + at : offset + at + 512] = data[at : at + 512]
        return _device(image)


def _device(image: bytearray) -> MemoryBdev:
    aligned = aligned_buffer(len(image))
    aligned[:] = image
    return MemoryBdev(image=aligned)


async def _work_until_power_off(store: BlockStore, rng: random.Random) -> dict[int, int]:
    """Random appends, reclaims and forgets; the offsets of the blocks that were acknowledged and not given
    up.
    """
    kept: dict[int, int] = {}
    number = 0
    for _ in range(40):
        count = rng.randint(1, 3)
        while store.room(LAYOUT) < count:
            reclaim = store.reclaim_one(coldest_first)
            assert reclaim is not None
            kept = {n: o for n, o in kept.items() if o not in reclaim.offsets}
            store.finish_reclaim(reclaim)
        numbers = range(number, number + count)
        number += count
        try:
            offsets = await put(store, *numbers)
        except BdevError:
            return kept
        kept.update(zip(numbers, offsets, strict=True))
        if rng.random() < 0.1:
            await store.flush()
    return kept


async def _why_refused(store: BlockStore, number: int, offset: int) -> str | None:
    try:
        await assert_holds(store, number, offset)
    except RecordError as error:
        return error.reason
    return None


async def _crash_and_check(seed: int, power_off_after: int, *, is_power_loss: bool) -> None:
    rng = random.Random(seed)
    bdev = CrashableBdev()
    store, _ = await open_store(bdev)
    await bdev.flush(INF)
    bdev.power_off_after = power_off_after
    kept = await _work_until_power_off(store, rng)
    device = bdev.after_power_loss(rng) if is_power_loss else bdev.after_kill(rng)
    again, rebuilt = await open_store(device)
    again.check_integrity()
    found = {r.header.position: r.offset for r in rebuilt.records}
    if not is_power_loss:
        assert found.items() >= kept.items(), "every acknowledged append survives a kill"
    for number, offset in found.items():
        reason = await _why_refused(again, number, offset)
        assert reason is None or (reason == "checksum" and (is_power_loss or number not in kept))
    if again.room(LAYOUT):
        await put(again, 1000)
    _, third = await open_store(device)
    assert third.torn == 0, "a restart leaves no torn record behind"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_kill_loses_at_most_unfinished_appends(seed: int, power_off_after: int) -> None:
    async def main() -> None:
        await _crash_and_check(seed, power_off_after, is_power_loss=False)

    trio.run(main)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_power_loss_never_gives_wrong_bytes(seed: int, power_off_after: int) -> None:
    async def main() -> None:
        await _crash_and_check(seed, power_off_after, is_power_loss=True)

    trio.run(main)


@pytest.mark.parametrize("slot", [0, 1])
async def test_a_damaged_superblock_never_brings_an_epoch_back(slot: int) -> None:
    bdev, store = await new_store()
    await store.set_epoch("llama", 4)
    bdev.image[slot * 32768 + 20] ^= 1
    again, _ = await open_store(MemoryBdev(image=bdev.image))
    assert again.epochs == {"llama": 4}
