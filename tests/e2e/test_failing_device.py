"""A device that errs, hangs, lies, is slow, full or tiny, under a whole node: misses, never wrong bytes, never a leak."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.memory import MemoryBdev
from dpurt.client import Client, LoadedBlock, connect
from dpurt.config import BdevConfig, Config
from dpurt.core.record import CRCS_AT
from dpurt.demo.content import payload_of, tokens_of
from dpurt.node import Node
from dpurt.testing.faulty_bdev import Fault, FaultyBdev
from dpurt.testing.node import BLOCK_TOKENS, FaultyNode, serving, small_config, spaces_of
from dpurt.testing.node_steps import until
from dpurt.testing.raw_host import link_of, raw_host, write_reserved
from dpurt.wire import messages as m

PAYLOAD = 4 * 4096
RECORD = 5 * 4096
MANY = 1 << 30


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def prompt(*blocks: int) -> bytes:
    return tokens_of(blocks, BLOCK_TOKENS)


def config_of(tmp_path: Path, *, slots: int = 16, segments: int = 64, **bdev: Any) -> Config:
    """No prefetch, so that what a load finds is what the test left there."""
    device = {
        "name": "m", "kind": "memory", "size_bytes": (segments << 18) + (64 << 10), "segment_bytes": 1 << 18,
        "queue_depth": 8, "deadline_s": 5.0, **bdev,
    }  # fmt: skip
    return small_config(
        tmp_path / "run", staging={"bytes": slots * RECORD}, bdev=[device], prefetch={"enabled": False}
    )


class OnImage(FaultyNode):
    """A node on a memory device whose content outlives it."""

    def __init__(self, config: Config, image: memoryview) -> None:
        super().__init__(config)
        self._image = image

    async def _open_bdev(self, spec: BdevConfig) -> Bdev:
        self.faulty = FaultyBdev(MemoryBdev(image=self._image, queue_depth=8))
        return self.faulty


def image_for(config: Config) -> memoryview:
    size = config.bdev[0].size_bytes
    assert size is not None
    return aligned_buffer(size)


class Site:
    """A node, a client of it, and what was stored there."""

    def __init__(self, node: FaultyNode, client: Client) -> None:
        self.node = node
        self.client = client
        self.state = node.index.spaces["s"]
        self._names = itertools.count()

    def _new_name(self) -> str:
        return f"r{next(self._names)}"

    async def store(self, *blocks: int, first: int = 0) -> list[str]:
        """Blocks are named by numbers, which are also their content; the chain is the prompt."""
        name = self._new_name()
        payloads = [payload(block) for block in blocks[first:]]
        statuses = await self.client.store("s", name, prompt(*blocks), first, payloads)
        await self.client.cancel(name)
        return statuses

    async def load(self, *blocks: int, timeout_s: float = 5.0) -> list[str]:
        """Status by block, ``miss`` for what was not matched. What is ``ok`` was compared byte for byte."""
        name = self._new_name()
        found = await self.client.lookup("s", name, prompt(*blocks))
        into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
        loaded: list[LoadedBlock] = await self.client.load(name, 0, into, timeout_s=timeout_s) if into else []
        await self.client.cancel(name)
        for block, answer, got in zip(blocks, loaded, into, strict=False):
            assert not answer.is_ok or got == payload(block), "wrong bytes were served"
        return [answer.status for answer in loaded] + ["miss"] * (len(blocks) - len(loaded))

    async def written(self) -> None:
        """Until the device has everything."""
        with trio.fail_after(10):
            while sum(self.node.intake.dirty.values()):  # noqa: ASYNC110
                await trio.sleep(0.002)

    def handles(self, *blocks: int) -> list[int]:
        return list(map(int, self.state.index.handles(self.state.index.match(prompt(*blocks)))))

    def unstage(self, *blocks: int) -> None:
        """Take a chain's copies out of staging: from now on it is read from the device."""
        for handle in self.handles(*blocks):
            block_id = self.state.block_id(handle)
            if self.state.slot_of(block_id, 0) >= 0:
                self.state.slab.pool.drop(self.state.ref(handle, 0))
                assert not self.state.index.clear_slot(block_id, 0)

    def extents(self, *blocks: int) -> list[int]:
        return [self.state.extent_of(self.state.block_id(handle), 0) for handle in self.handles(*blocks)]

    async def store_on_flash(self, *blocks: int) -> None:
        """Store a chain, and leave it on the device alone."""
        statuses = await self.store(*blocks)
        assert set(statuses) <= {"stored", "exists"}
        await self.written()
        self.unstage(*blocks)

    def reads(self, status: str) -> int:
        return self.node.storage.read_status.get(status, 0)

    def assert_sound(self) -> None:
        assert not {agent.name: agent.restarts for agent in self.node._agents if agent.restarts}
        self.state.slab.pool.check_integrity()
        self.state.index.check_integrity()
        self.node.store.stores[0].check_integrity()


@asynccontextmanager
async def site(
    config: Config, image: memoryview | None = None, *, timeout_s: float = 60.0
) -> AsyncIterator[Site]:
    """Sound at its end, and nothing is held by anybody."""
    node = OnImage(config, image_for(config) if image is None else image)
    with trio.fail_after(timeout_s):
        async with serving(node):
            async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
                here = Site(node, client)
                yield here
                await here.written()
                here.assert_sound()
            await trio.sleep(0.05)
            pool = here.state.slab.pool.stats()
            assert (pool.leases, pool.filling, pool.quarantined, pool.pinned, pool.doomed) == (0, 0, 0, 0, 0)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["error", "short"])
async def test_a_read_error_is_told_and_the_next_read_serves_the_block(tmp_path: Path, kind: Any) -> None:
    async with site(config_of(tmp_path)) as here:
        await here.store_on_flash(1, 2, 3)
        here.node.faulty.inject(Fault(op="read", kind=kind))
        assert sorted(await here.load(1, 2, 3)) == ["error", "ok", "ok"]
        assert here.reads("error") == 1
        assert await here.load(1, 2, 3) == ["ok", "ok", "ok"]


async def test_a_block_that_cannot_be_read_twice_is_lost_and_can_be_stored_again(tmp_path: Path) -> None:
    """Kept, it would be a hole for ever: never served, and ``exists`` for who brings it."""
    async with site(config_of(tmp_path)) as here:
        await here.store_on_flash(1, 2, 3)
        bad = here.extents(1, 2, 3)[1]
        here.node.faulty.inject(Fault(op="read", kind="error", at=bad, count=MANY))
        assert await here.load(1, 2, 3) == ["ok", "error", "ok"]
        here.unstage(1, 2, 3)
        assert (await here.load(1, 2, 3))[:2] == ["ok", "error"]
        assert await here.load(1, 2, 3) == ["ok", "miss", "miss"], "and its child with it"
        reasons = await here.client.explain("s", prompt(1, 2, 3))
        assert [r.reason for r in reasons] == ["present", "error", "parent_lost"]
        here.node.faulty.clear()
        assert await here.store(1, 2, 3) == ["exists", "stored", "stored"]
        assert await here.load(1, 2, 3) == ["ok", "ok", "ok"]


async def test_blocks_that_could_not_be_written_are_served_from_staging_and_lost_with_it(
    tmp_path: Path,
) -> None:
    async with site(config_of(tmp_path)) as here:
        here.node.faulty.inject(Fault(op="write", kind="error", count=MANY))
        assert await here.store(1, 2, 3) == ["stored"] * 3
        await here.written()
        assert here.node.intake.writes_lost == 3
        assert await here.load(1, 2, 3) == ["ok"] * 3
        here.node.faulty.clear()
        for other in range(100, 200, 4):
            assert await here.store(*range(other, other + 4)) == ["stored"] * 4
        assert await here.load(1, 2, 3) == ["miss"] * 3
        assert (await here.client.explain("s", prompt(1)))[0].reason == "evicted"


async def test_a_child_that_reached_the_device_goes_with_a_parent_that_did_not(tmp_path: Path) -> None:
    async with site(config_of(tmp_path)) as here:
        here.node.faulty.inject(Fault(op="write", kind="error"))
        assert await here.store(1) == ["stored"]
        await here.written()
        assert await here.store(1, 2, 3) == ["exists", "stored", "stored"]
        await here.written()
        live = here.node.store.stores[0].stats().log.live_records
        for other in range(100, 200, 4):
            await here.store(*range(other, other + 4))
        assert await here.load(1, 2, 3) == ["miss"] * 3
        assert live == 2
        await here.written()
        assert here.node.store.stores[0].stats().log.live_records == len(here.state.index)


# --- hangs -----------------------------------------------------------------------------------------------------------


async def test_a_hung_reads_slot_is_quarantined_and_its_late_bytes_reach_no_other_block(
    tmp_path: Path,
) -> None:
    async with site(config_of(tmp_path, deadline_s=0.3)) as here:
        await here.store_on_flash(1, 2)
        here.node.faulty.inject(Fault(op="read", kind="hang"))
        assert (await here.load(1, 2, timeout_s=0.2))[0] == "late"
        pool = here.state.slab.pool
        await until(lambda: pool.stats().quarantined == 1)
        for other in range(100, 180, 4):  # every slot is used again but that one
            assert await here.store(*range(other, other + 4)) == ["stored"] * 4
        assert pool.stats().quarantined == 1
        held = sorted(range(176, 180))
        here.node.faulty.resume()
        await trio.sleep(0.05)
        assert pool.stats().quarantined == 0
        assert await here.load(*held) == ["ok"] * 4
        assert await here.load(1, 2) == ["ok"] * 2


async def check_given_up(here: Site, chain: tuple[int, ...]) -> None:
    assert set(await here.load(*chain, timeout_s=1.0)) <= {"late", "no_room", "miss", "error"}


async def test_when_every_read_hangs_loads_end_in_time_and_staging_is_not_used_up(tmp_path: Path) -> None:
    async with site(config_of(tmp_path, deadline_s=0.2)) as here:
        chains = [(10 * i, 10 * i + 1) for i in range(1, 13)]
        for chain in chains:
            await here.store_on_flash(*chain)
        here.node.faulty.inject(Fault(op="read", kind="hang", count=MANY))
        async with trio.open_nursery() as nursery:
            for chain in chains:
                nursery.start_soon(check_given_up, here, chain)
        here.node.faulty.clear()
        here.node.faulty.resume()
        await trio.sleep(0.5)
        for chain in chains:
            assert await here.load(*chain) == ["ok", "ok"]


async def test_a_hung_write_holds_its_slots_and_stops_neither_loads_nor_other_stores(tmp_path: Path) -> None:
    async with site(config_of(tmp_path, deadline_s=0.2)) as here:
        await here.store_on_flash(1, 2)
        here.node.faulty.inject(Fault(op="write", kind="hang"))
        assert await here.store(5, 6) == ["stored"] * 2
        await trio.sleep(0.4)
        assert await here.load(5, 6) == ["ok"] * 2
        assert await here.load(1, 2) == ["ok"] * 2
        assert await here.store(8, 9) == ["stored"] * 2
        for other in range(100, 160, 4):
            assert await here.store(*range(other, other + 4)) == ["stored"] * 4
        assert await here.load(5, 6) == ["ok"] * 2, "pinned while the device reads its slots"
        here.node.faulty.resume()
        await here.written()
        assert here.node.intake.writes_lost == 0, "tried once more"


# --- lies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["read", "write"])
async def test_bytes_changed_under_a_good_status_are_a_counted_miss_with_a_reason(
    tmp_path: Path, op: Any
) -> None:
    async with site(config_of(tmp_path)) as here:
        if op == "write":
            here.node.faulty.inject(Fault(op="write", kind="corrupt", at=(64 << 10) + 8192 + RECORD + 9000))
        await here.store_on_flash(1, 2, 3)
        bad = here.extents(1, 2, 3)[1]
        if op == "read":
            here.node.faulty.inject(Fault(op="read", kind="corrupt", at=bad + 9000))
        assert (await here.load(1, 2, 3))[:2] == ["ok", "checksum"]
        assert here.reads("checksum") == 1
        assert here.node.store.stores[0].stats().refused == {"checksum": 1}
        assert await here.load(1, 2, 3) == ["ok", "miss", "miss"]
        reasons = await here.client.explain("s", prompt(1, 2, 3))
        assert [r.reason for r in reasons] == ["present", "checksum", "parent_lost"]


def flip_positions(rng: random.Random) -> list[int]:
    """Byte positions in a record: every field of the header, the CRC table, the tokens, each part's ends, and samples."""
    fields = [0, 7, 8, 11, 12, 14, 16, 20, 24, 28, 32, 39, 40, 48, 56, 64, 72, 103, 104, 119, 120, 135]
    table = [CRCS_AT, CRCS_AT + 5, CRCS_AT + 15]
    tokens = [CRCS_AT + 16, CRCS_AT + 16 + 63]
    parts = [4096 * part + at for part in range(1, 5) for at in (0, 4095)]
    samples = [rng.randrange(CRCS_AT + 80, 4096) for _ in range(10)] + [
        rng.randrange(RECORD) for _ in range(40)
    ]
    return [*fields, *table, *tokens, *parts, 4095, *samples]


async def test_a_flipped_byte_anywhere_in_a_record_is_a_counted_miss_and_the_block_can_be_stored_again(
    tmp_path: Path,
) -> None:
    rng = random.Random(3)
    config = config_of(tmp_path)
    image = image_for(config)
    async with site(config, image) as here:
        await here.store_on_flash(1, 2, 3, 4)
        for number, position in enumerate(flip_positions(rng), 1):
            image[here.extents(1, 2, 3, 4)[1] + position] ^= 1 << rng.randrange(8)
            assert (await here.load(1, 2, 3, 4))[:2] == ["ok", "checksum"], position
            assert here.reads("checksum") == number
            assert await here.load(1, 2, 3, 4) == ["ok", "miss", "miss", "miss"], "the descendants go too"
            assert await here.store(1, 2, 3, 4) == ["exists", "stored", "stored", "stored"]
            await here.written()
            here.unstage(1, 2, 3, 4)
            assert await here.load(1, 2, 3, 4) == ["ok"] * 4
            here.unstage(1, 2, 3, 4)
        assert sum(here.node.store.stores[0].stats().refused.values()) == number
        assert here.node.index.drops["checksum"] == 3 * number


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_byte_flipped_while_the_node_was_down_is_never_served(
    tmp_path: Path, is_sealed: bool
) -> None:
    """Found by the scan (then block and descendants are gone) or by the first read."""
    rng = random.Random(4)
    config = config_of(tmp_path)
    clean = image_for(config)
    async with site(config, clean) as here:
        await here.store_on_flash(1, 2, 3, 4)
        record = here.extents(1, 2, 3, 4)[1]
        crashed = clean.tobytes()
    for position in flip_positions(rng)[::6]:
        image = aligned_buffer(len(clean))
        image[:] = clean if is_sealed else crashed
        image[record + position] ^= 1 << rng.randrange(8)
        async with site(config, image) as here:
            first = await here.load(1, 2, 3, 4)
            assert first[0] == "ok"
            assert first[1] in ("checksum", "miss")
            assert await here.load(1, 2, 3, 4) == ["ok", "miss", "miss", "miss"]
            assert await here.store(1, 2, 3, 4) == ["exists", "stored", "stored", "stored"]


# --- full, tiny, slow ------------------------------------------------------------------------------------------------


async def churn(here: Site, requests: int, universe: int, seed: int) -> int:
    """Chains with common heads, far more of them than fit: looked up, loaded, compared, and stored where they miss."""
    rng = random.Random(seed)
    served = 0
    for _ in range(requests):
        root = 1000 * int(universe * rng.random() ** 2)
        chain = [root, *(root + 10 * level + rng.randrange(2) for level in range(1, rng.randint(2, 8)))]
        statuses = await here.load(*chain)
        assert set(statuses) <= {"ok", "miss", "no_room"}
        good = next((i for i, status in enumerate(statuses) if status != "ok"), len(chain))
        served += good
        stored = await here.store(*chain, first=good) if good < len(chain) else []
        assert set(stored) <= {"stored", "exists", "in_flight", "no_room", "orphan"}, stored
    return served


def write_amplification(node: Node) -> float:
    log = node.store.stores[0].stats().log
    return (log.accepted_bytes + log.reappended_bytes + log.overhead_bytes) / log.accepted_bytes


async def test_a_full_device_is_reclaimed_within_the_write_budget_and_prefixes_stay_whole(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, slots=32, segments=16)
    async with site(config) as here:
        async with trio.open_nursery() as nursery:
            served = [0]

            async def one(seed: int) -> None:
                served[0] += await churn(here, 250, 200, seed)

            for seed in range(4):
                nursery.start_soon(one, seed)
        await here.written()
        log = here.node.store.stores[0].stats().log
        assert log.reclaimed_segments > 10
        assert log.usage_bytes <= log.capacity_bytes <= config.bdev[0].capacity(config)
        assert served[0] > 100
        assert write_amplification(here.node) <= 1.1
        here.assert_sound()
        assert log.live_records <= len(here.state.index), (
            "no record lives on the device that nobody can reach"
        )


async def test_the_smallest_device_a_topology_allows_goes_on_storing(tmp_path: Path) -> None:
    """Four segments of four records: a batch of writes is larger than all the room there ever is."""
    segment = 96 << 10
    config = config_of(tmp_path, slots=64, size_bytes=4 * segment, segment_bytes=segment)
    async with site(config) as here:
        for start in range(100, 400, 20):
            assert set(await here.store(*range(start, start + 20))) <= {"stored", "orphan", "no_room"}
        await here.written()
        assert here.node.store.stores[0].stats().log.reclaimed_segments > 5
        assert await here.store(1, 2) == ["stored", "stored"]
        await here.written()
        assert await here.load(1, 2) == ["ok", "ok"]


async def test_on_a_slow_device_stores_wait_and_nothing_is_lost(tmp_path: Path) -> None:
    async with site(config_of(tmp_path)) as here:
        here.node.faulty.inject(Fault(op="write", kind="delay", delay_s=0.03, count=MANY))
        here.node.faulty.inject(Fault(op="read", kind="delay", delay_s=0.03, count=MANY))
        chains = [tuple(range(100 * i, 100 * i + 6)) for i in range(1, 9)]
        for chain in chains:
            assert await here.store(*chain) == ["stored"] * 6
            assert sum(here.node.intake.dirty.values()) <= 8
        await here.written()
        for chain in chains:
            assert await here.load(*chain) == ["ok"] * 6


async def test_a_patient_host_does_not_lengthen_the_devices_deadline(tmp_path: Path) -> None:
    async with site(config_of(tmp_path, deadline_s=0.2)) as here:
        await here.store_on_flash(1, 2)
        here.node.faulty.inject(Fault(op="read", kind="hang"))
        with trio.fail_after(2):
            assert (await here.load(1, 2, timeout_s=60.0))[0] == "late"
        here.node.faulty.resume()


@pytest.mark.parametrize("end", ["cancelled", "gone"])
async def test_a_commit_that_waits_for_a_hung_device_ends_with_its_request(tmp_path: Path, end: str) -> None:
    """Else its reservations would keep others from storing these blocks for as long as its deadline says."""
    async with site(config_of(tmp_path, slots=8)) as here:
        here.node.faulty.inject(Fault(op="write", kind="hang", count=MANY))
        assert await here.store(1, 2, 3, 4) == ["stored"] * 4, "half of staging waits for the device"
        async with raw_host(here.node.gateway.endpoint) as raw:
            link = await link_of(await raw.hello(here.node.config, "host-b"))
            reply = await raw.ask(m.Reserve(space="s", request="w", first=0, count=1, tokens=prompt(9)))
            assert isinstance(reply, m.ReserveReply)
            blocks = await write_reserved(link, reply.blocks, [payload(9)], [4096] * 4)
            await raw.send(m.encode(m.Commit(id=77, request="w", blocks=blocks, deadline_ms=3_600_000)))
            await trio.sleep(0.1)
            assert here.node.intake.num_reserved == 1
            if end == "cancelled":
                await raw.ask(m.Cancel(request="w"))
            else:
                await link.aclose()
            await trio.sleep(0.1)
            assert here.node.intake.num_reserved == 0
            await link.aclose()
        here.node.faulty.clear()
        here.node.faulty.resume()
        await here.written()
        assert await here.store(9) == ["stored"]
