"""The flash tier: the block stores of all bdevs as one.

Theory of operation. Every bdev carries a block store of its own, whole without the others: devices may come, go and be
moved between restarts. An *extent* names a record's place node-wide: the store's number times `SPAN`, plus its offset on
the device. A batch of records goes to one store; which is for `dpurt.core.store_turns` to say.

A bdev that is down (`BdevError` ``unavailable``) takes no records for a while; what it holds is kept, since it may come
back: reads of it are misses meanwhile. When it is back, the first append looks whether its store is still there. If the
device came back blank (a target restarted with an empty medium) the store is *lost*: `on_lost` forgets what it held, and
a new store is made; somebody else's data is never overwritten, the bdev then stays unused.

Leaves records to `BlockStore`, whose turn it is to the storage agent, which blocks go to the reclaimer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog
import trio

from dpurt.agents.block_store import BlockStore, Reclaim, StoreFull, StoreLost
from dpurt.agents.segment_scan import Rebuilt, StoredRecord
from dpurt.core.record import RecordError, RecordLayout
from dpurt.core.segment_log import LastUse
from dpurt.core.store_turns import StoreTurns
from dpurt.errors import BdevError, BdevTimeout, ConfigError

log = structlog.get_logger()
SPAN = 1 << 48  # bytes of a device a store may use: 256 TiB
_DOWN = ("unavailable", "gone", "closed")


class FlashTier:
    """Block stores, numbered in the order given. Methods as of `BlockStore`, with extents for offsets."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        if not stores:
            raise ValueError("a flash tier needs a store")
        if any(store.capacity_bytes > SPAN for store in stores):
            raise ConfigError(
                "$.bdev", f"expected a capacity of at most {SPAN} bytes each: set capacity_bytes"
            )
        self.stores = tuple(stores)
        self.on_lost: Callable[[int, int], None] = lambda first, stop: None
        self._turns = StoreTurns(len(self.stores))
        self._repairing = trio.Lock()

    # --- restart ---

    async def rebuild(
        self,
        layouts: Mapping[bytes, RecordLayout],
        on_progress: Callable[[int, int, int], None] = lambda number, done, segments: None,
    ) -> Rebuilt:
        """Of all stores at once; records parents first. `on_progress(number of the store, segments done, of how many)`.
        Raises BdevError.
        """
        parts: dict[int, Rebuilt] = {}

        async def one(number: int) -> None:
            parts[number] = await self.stores[number].rebuild(layouts, partial(on_progress, number))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(len(self.stores)):
                nursery.start_soon(one, number)
        whole = Rebuilt(seconds=trio.current_time() - began)
        for number, part in parts.items():
            whole.records += [StoredRecord(number * SPAN + r.offset, r.header) for r in part.records]
            whole.torn += part.torn
            whole.dropped.update(part.dropped)
            whole.foreign_segments += part.foreign_segments
            whole.bytes_read += part.bytes_read
        whole.records.sort(key=lambda r: (r.header.position, r.offset))
        return whole

    @property
    def epochs(self) -> Mapping[str, int]:
        """Weights generation per space name: the newest any store knows, since a device may have missed a bump."""
        names = {name for store in self.stores for name in store.epochs}
        return {name: max(store.epochs.get(name, 0) for store in self.stores) for name in names}

    async def set_epoch(self, space: str, epoch: int) -> None:
        """Persist a space's epoch on every store. On return it survives a crash. Raises BdevError if one failed."""
        for number, store in enumerate(self.stores):
            try:
                await store.set_epoch(space, epoch)
            except StoreLost:
                await self._start_over(number)
                await store.set_epoch(space, epoch)

    @property
    def incarnation(self) -> int:
        """Grows with every start."""
        return max(store.incarnation for store in self.stores)

    async def aclose(self) -> None:
        """Seal and flush all that can be."""
        for store in self.stores:
            try:
                await store.aclose()
            except (BdevError, StoreLost) as error:  # its open segments will be verified at the next start
                log.warning("store_not_sealed", detail=str(error))

    # --- records ---

    async def append(
        self,
        layout: RecordLayout,
        images: Sequence[memoryview],
        names: Sequence[int],
        *,
        deadline: float,
        is_reappend: bool = False,
    ) -> list[int]:
        """Write packed record images to one store; their extents. `names` say whose they are, one a record (see
        `SpaceState.owner`). Raises StoreFull, BdevError, BdevTimeout.
        """
        failure: BdevError | None = None
        full: StoreFull | None = None
        for number in self._to_write(layout, len(images), is_reappend):
            try:
                offsets = await self._append_to(number, layout, images, names, deadline, is_reappend)
            except StoreFull as error:
                full = error
            except BdevTimeout:
                raise
            except BdevError as error:
                if error.status not in _DOWN:
                    raise
                self._set_down(number, error)
                failure = error
            else:
                return [number * SPAN + offset for offset in offsets]
        raise full or failure or self._all_down()

    async def _append_to(
        self,
        number: int,
        layout: RecordLayout,
        images: Sequence[memoryview],
        names: Sequence[int],
        deadline: float,
        is_reappend: bool,
    ) -> list[int]:
        store = self.stores[number]
        try:
            return await store.append(layout, images, names, deadline=deadline, is_reappend=is_reappend)
        except StoreLost:
            await self._start_over(number)
        return await store.append(layout, images, names, deadline=deadline, is_reappend=is_reappend)

    async def read(
        self, layout: RecordLayout, extent: int, image: memoryview, *, key: bytes, shard: int, deadline: float,
        parts_mask: int | None = None,
    ) -> None:  # fmt: skip
        """See `BlockStore.read`."""
        number, offset = divmod(extent, SPAN)
        await self.stores[number].read(
            layout, offset, image, key=key, shard=shard, deadline=deadline, parts_mask=parts_mask
        )

    async def read_run(
        self, layout: RecordLayout, extent: int, images: Sequence[memoryview], *, keys: Sequence[bytes], shard: int,
        deadline: float,
    ) -> list[RecordError | None]:  # fmt: skip
        """See `BlockStore.read_run`."""
        number, offset = divmod(extent, SPAN)
        return await self.stores[number].read_run(
            layout, offset, images, keys=keys, shard=shard, deadline=deadline
        )

    def forget(self, extent: int) -> bool:
        """The record is not wanted any more; False if it was not live."""
        number, offset = divmod(extent, SPAN)
        return self.stores[number].forget(offset)

    def rename(self, extent: int, name: int) -> None:
        """Say whose a record is that `rebuild` found: see `append`."""
        number, offset = divmod(extent, SPAN)
        self.stores[number].rename(offset, name)

    # --- room ---

    def room(self, layout: RecordLayout) -> int:
        """How many records one `append` takes before StoreFull."""
        return max(
            (self.stores[number].room(layout) for number in self._turns.usable(trio.current_time())),
            default=0,
        )

    def reclaim_one(self, last_use: LastUse) -> Reclaim | None:
        """Choose a segment of a usable store to reuse, each in turn; offsets are extents. See `BlockStore`."""
        for number in self._turns.to_reclaim(trio.current_time()):
            reclaim = self._reclaim_from(number, last_use)
            if reclaim is not None:
                return reclaim
        return None

    def _reclaim_from(self, number: int, last_use: LastUse) -> Reclaim | None:
        base = number * SPAN
        reclaim = self.stores[number].reclaim_one(last_use)
        if reclaim is None:
            return None
        return replace(reclaim, number=number, offsets=tuple(base + offset for offset in reclaim.offsets))

    def finish_reclaim(self, reclaim: Reclaim) -> int:
        """Forget what still lives in the segment and free it. The number forgotten."""
        self._turns.reclaimed()
        return self.stores[reclaim.number].finish_reclaim(reclaim)

    # --- inside ---

    def _to_write(self, layout: RecordLayout, count: int, is_reappend: bool) -> list[int]:
        def has_room(number: int) -> bool:
            return self.stores[number].room(layout, is_reappend=is_reappend) >= count

        return self._turns.to_write(trio.current_time(), has_room)

    def _set_down(self, number: int, error: BdevError) -> None:
        self._turns.set_down(number, trio.current_time())
        log.warning("bdev_down", bdev=error.bdev, detail=str(error))

    def _all_down(self) -> BdevError:
        return BdevError(
            self.stores[0].bdev_name, "write", 0, 0, "unavailable", "no bdev of this node answers"
        )

    async def _start_over(self, number: int) -> None:
        """The device is back without its store: forget what it held and make a new one, if it is blank."""
        async with self._repairing:
            store = self.stores[number]
            if not store.is_lost:
                return  # somebody else has just done it
            self.on_lost(number * SPAN, (number + 1) * SPAN)
            try:
                await store.start_over()
            except ConfigError as error:
                raise BdevError(store.bdev_name, "open", 0, 0, "unavailable", error.problem) from error
            log.warning(
                "store_lost", bdev=store.bdev_name, detail="the device came back blank; a new store is made"
            )
