"""The agents of one space without sockets: index, storage, staging, intake and reclaim over any bdev, on any clock.

For tests of the agents themselves. Blocks are named by small ints, as in `dpurt.testing.node_steps`; the hosts are sessions
1, 2, ... that write straight into their inbound regions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import crc32c
import trio

from dpurt.agents.block_store import BlockStore
from dpurt.agents.flash import FlashTier
from dpurt.agents.index import IndexAgent
from dpurt.agents.intake import Intake
from dpurt.agents.reclaim import Reclaimer
from dpurt.agents.spaces import Slab, SpaceState
from dpurt.agents.staging import Acquired, StagingAgent
from dpurt.agents.storage import StorageAgent
from dpurt.bdev import Bdev
from dpurt.core.events import Event
from dpurt.core.eviction import make_policy
from dpurt.core.identity import Geometry, LayerGroup, Space
from dpurt.core.index_feed import IndexFeed
from dpurt.core.prefix_index import PrefixIndex
from dpurt.core.record import RecordLayout
from dpurt.core.staging import StagingPool
from dpurt.fabric.region import MemfdRegion
from dpurt.testing.node import BLOCK_TOKENS, PART_BYTES
from dpurt.testing.node_steps import PAYLOAD, RECORD, assert_slots_agree, payload, push_out, tokens
from dpurt.wire import messages as m

SEGMENT = 8192 + 4 * RECORD  # two header blocks and four records
METADATA = 64 << 10


def capacity(segments: int) -> int:
    """Bytes of a store of so many segments, of four records each."""
    return METADATA + segments * SEGMENT


def small_space(num_shards: int = 1, epoch: int = 0) -> Space:
    """Four parts of 4 KiB a block, 16 tokens."""
    groups = tuple(
        LayerGroup(name=f"g{i}", num_layers=1, num_kv_heads=1, head_size=1, part_bytes=PART_BYTES)
        for i in range(4)
    )
    geometry = Geometry(block_tokens=BLOCK_TOKENS, groups=groups)
    return Space(
        model="m", revision="r", kv_dtype="fp16", geometry=geometry, tenant="t", tp_size=num_shards, epoch=epoch
    )  # fmt: skip


@dataclass(slots=True)
class Agents:
    """What `running_agents` runs. `events` is what the prefetch agent would have been told."""

    index: IndexAgent
    storage: StorageAgent
    staging: StagingAgent
    intake: Intake
    reclaimer: Reclaimer
    slab: Slab
    region: MemfdRegion
    ttl_s: float
    events: list[Event] = field(default_factory=list)
    inbound: dict[int, MemfdRegion] = field(default_factory=dict)

    @property
    def state(self) -> SpaceState:
        """The space at its present epoch."""
        return self.index.spaces["s"]

    @property
    def pool(self) -> StagingPool:
        """The space's slots."""
        return self.slab.pool

    def add_epoch(self, space: Space) -> SpaceState:
        """Take a space, or its next epoch, into service."""
        index = PrefixIndex(space.geometry.block_token_bytes, space.num_shards, IndexFeed())
        state = SpaceState(
            "s", len(self.index.by_number), space, space.fingerprint(), RecordLayout.of(space), index, self.slab,
            self.ttl_s,
        )  # fmt: skip
        self.index.add(state)
        return state

    # --- what hosts do ---

    def open_host(self, session: int, cells: int = 16, *, has_slots: bool = False) -> None:
        """A session with room for so many blocks, on a fabric that lands stores or not."""
        self.inbound[session] = self.intake.open_session(
            session, f"host-{session}", cells * PAYLOAD, [PAYLOAD], has_slots=has_slots
        )

    def reserve(
        self, *blocks: int, session: int = 1, owner: int = 1, first: int = 0, shard: int = 0
    ) -> list[m.Reservation]:
        """Reservations for the chain's blocks from `first` on."""
        prompt = tokens(*blocks)
        chain = self.index.chain(self.state, prompt, None, first, len(blocks) - first)
        assert chain is not None
        return self.intake.reserve(session, owner, self.state, chain, first, shard, prompt)

    def write(
        self, reservations: Sequence[m.Reservation], blocks: Sequence[int], session: int = 1
    ) -> list[m.CommitBlock]:
        """Write the blocks that got a reservation; the commit's list."""
        commits = []
        for room, block in zip(reservations, blocks, strict=True):
            if room.status == "reserved":
                body = payload(block)
                self.written_to(room, session)[:] = body
                crcs = [crc32c.crc32c(body[at : at + PART_BYTES]) for at in range(0, PAYLOAD, PART_BYTES)]
                commits.append(m.CommitBlock(reservation=room.reservation, crcs=crcs))
        return commits

    def written_to(self, room: m.Reservation, session: int = 1) -> memoryview:
        """Where the host's bytes go."""
        inbound = self.inbound[session]
        region = inbound if room.region == inbound.region_id else self.region
        return region.view[room.offset : room.offset + room.length]

    async def commit(
        self, commits: Sequence[m.CommitBlock], session: int = 1, timeout_s: float = 100.0
    ) -> list[str]:
        """`Intake.commit`."""
        return await self.intake.commit(session, commits, trio.current_time() + timeout_s)

    async def store(self, *blocks: int, session: int = 1, first: int = 0, shard: int = 0) -> list[str]:
        """A chain's blocks from `first` on, all the way into staging."""
        rooms = self.reserve(*blocks, session=session, first=first, shard=shard)
        return await self.commit(self.write(rooms, blocks[first:], session), session)

    async def store_to_flash(self, *blocks: int) -> None:
        """A chain on flash, and nothing of it in staging."""
        for first in range(0, len(blocks), 4):
            count = min(4, len(blocks) - first)
            assert await self.store(*blocks[: first + count], first=first) == ["stored"] * count
            await self.until_written()
        push_out(self.staging)

    async def until_written(self) -> None:
        """The device has all that was stored."""
        while not self.storage.is_quiet or any(self.intake.dirty.values()):  # noqa: ASYNC110
            await trio.sleep(0.001)

    # --- asking ---

    def handles(self, *blocks: int) -> list[int]:
        """Handles of a chain's known blocks."""
        handles: list[int] = self.state.index.handles(self.state.index.match(tokens(*blocks))).tolist()
        return handles

    def refs(self, *blocks: int, shard: int = 0) -> list[int]:
        """Refs of a chain's known blocks."""
        return self.state.refs(self.handles(*blocks), shard)

    async def acquire(
        self, *blocks: int, owner: int = 1, mask: int = 0b1111, timeout_s: float = 100.0, shard: int = 0
    ) -> list[Acquired]:
        """`StagingAgent.acquire` of a whole chain."""
        deadline = trio.current_time() + timeout_s
        return await self.staging.acquire(
            self.state, self.handles(*blocks), shard, mask, owner, owner, None, deadline
        )

    def holds(self, acquired: Acquired, block: int) -> bool:
        """Does the leased slot hold that block's bytes?"""
        return bytes(self.state.layout.payload(self.slab.image(acquired.slot))) == payload(block)

    def assert_nothing_held(self) -> None:
        """No slot is filling, leased, pinned or quarantined; no reservation stands; nothing flies."""
        stats = self.pool.stats()
        self.pool.check_integrity()
        self.state.index.check_integrity()
        assert_slots_agree(self.state)
        assert (stats.filling, stats.leases, stats.pinned, stats.quarantined, stats.doomed) == (0, 0, 0, 0, 0)
        assert (self.intake.num_reserved, self.staging.num_flights, sum(self.intake.dirty.values())) == (
            0,
            0,
            0,
        )
        assert self.storage.bytes_wanted == 0


@contextmanager
def _arena(num_slots: int, policy: str) -> Iterator[tuple[MemfdRegion, Slab]]:
    region = MemfdRegion(1, "staging-test", num_slots * RECORD)
    try:
        yield region, Slab(0, region, 0, RECORD, StagingPool(num_slots, 4, make_policy(policy, num_slots)))
    finally:
        region.close()


@asynccontextmanager
async def running_agents(
    bdev: Bdev,
    *,
    num_slots: int = 16,
    num_shards: int = 1,
    workers: int = 4,
    deadline_s: float = 10.0,
    ttl_s: float = 0.0,
    eviction: str = "lru",
    has_slots: bool = False,
) -> AsyncIterator[Agents]:
    """The agents over this bdev, as large as it is, in segments of four records; hosts 1 and 2 are there, on a fabric that lands
    stores or not.
    """
    store = await BlockStore.open(
        bdev, capacity_bytes=bdev.info.size_bytes, segment_bytes=SEGMENT, clock=trio.current_time, deadline_s=deadline_s
    )  # fmt: skip
    with _arena(num_slots, eviction) as (region, slab):
        index = IndexAgent(1024)
        storage = StorageAgent(FlashTier([store]), workers=workers, deadline_s=deadline_s)
        staging = StagingAgent(index, storage)
        intake = Intake(index, storage, lambda now: now)
        reclaimer = Reclaimer(index, staging, storage)
        storage.reclaim = reclaimer.reclaim_one
        staging.slabs.append(slab)
        agents = Agents(index, storage, staging, intake, reclaimer, slab, region, ttl_s)
        staging.observe = agents.events.append
        state = agents.add_epoch(small_space(num_shards))
        await store.rebuild({state.fingerprint: state.layout})
        for session in (1, 2):
            agents.open_host(session, has_slots=has_slots)
            staging.open_scope(session, session)
        async with trio.open_nursery() as nursery:
            for actor in (index, storage, staging):
                await nursery.start(actor.run)
            yield agents
            nursery.cancel_scope.cancel()
        for session in (1, 2):
            intake.close_session(session)
