"""The composition root: one DPU node from one Config.

`Node.run` opens the store, rebuilds the index from it, makes the arena, wires the agents, and keeps them running until it is
told to stop; then it drains: no new work, what is dirty reaches the device, everything is closed. There is no other global
state; two nodes in one process do not know of each other.

Order of start matters and is the order below: what is on flash is known before the first host can ask.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

import structlog
import trio

from dpurt.agents.block_store import BlockStore
from dpurt.agents.decode import DecodeAgent
from dpurt.agents.engines import EnginesAgent
from dpurt.agents.fabric import Access, FabricAgent
from dpurt.agents.flash import FlashTier
from dpurt.agents.gateway import GatewayAgent
from dpurt.agents.index import IndexAgent
from dpurt.agents.intake import Intake
from dpurt.agents.metrics import MetricsAgent
from dpurt.agents.placement import PlacementAgent
from dpurt.agents.prefetch import PrefetchAgent
from dpurt.agents.reclaim import Reclaimer
from dpurt.agents.recorder import RecorderAgent, Taps
from dpurt.agents.routing import RoutingAgent
from dpurt.agents.segment_scan import StoredRecord
from dpurt.agents.shadow import ShadowAgent, make_shadow
from dpurt.agents.spaces import MAX_NUMBER, Slab, SpaceState
from dpurt.agents.staging import StagingAgent
from dpurt.agents.storage import StorageAgent
from dpurt.bdev import Bdev, DeviceMemory
from dpurt.bdev.factory import open_bdev
from dpurt.bdev.file import FileBdev
from dpurt.bdev.paced import PacedBdev
from dpurt.bdev.spdk import SpdkBdev
from dpurt.config import BdevConfig, Config, FileBdevConfig, ModelledBdevConfig
from dpurt.core.device_model import DeviceProfile
from dpurt.core.endurance import DAY_S, WriteBudget
from dpurt.core.events import Event
from dpurt.core.eviction import Outlook, make_policy
from dpurt.core.index_feed import IndexFeed
from dpurt.core.ledger import LEAD_BOUNDS_S, Totals
from dpurt.core.prefetch_setup import PrefetchSetup, outlook_of
from dpurt.core.prefix_index import PrefixIndex
from dpurt.core.record import RecordLayout
from dpurt.core.return_model import Forest
from dpurt.core.shadow import Shadow
from dpurt.core.staging import StagingPool
from dpurt.errors import ConfigError
from dpurt.fabric import Fabric
from dpurt.fabric.region import MemfdRegion
from dpurt.fabric.shm import ShmFabric
from dpurt.fabric.tcp import TcpFabric
from dpurt.fabric.verbs import VerbsFabric
from dpurt.priors import digest_of, shipped_returns
from dpurt.rdma.paths import paths_to, resolve
from dpurt.runtime.actor import RestartPolicy, supervise
from dpurt.wire import messages as m
from dpurt.wire import recording

log = structlog.get_logger()
CLOSE_S = 10.0  # for the devices to end
NVME_LATENCY_S = 0.0001
LOAD_S = 0.01  # of a block by a host, at least, until one is measured
GIVE_S = 10.0  # for a device to map our memory
ADOPT = 1024  # records of a former life at a time
REBUILD_LOG_S = 5.0
SWEEP = 128  # blocks of an ended epoch at a time: the predictors hear of each
FOREIGN = (
    "these segments of the store are of spaces, or epochs of spaces, that this topology does not have; "
    "their room will be used again (was a field of a space changed?)"
)
VITAL = RestartPolicy()
ADVICE = RestartPolicy(is_vital=False)


class Node:
    """One node. `await node.run()`; the rest is for those who look in from outside."""

    def __init__(self, config: Config, *, may_format: bool = False, record_to: Path | None = None) -> None:
        """`may_format`: a device with somebody else's data becomes a store instead of being refused. `record_to`: a new file
        for a recording of the node's whole life.
        """
        self.config = config
        self._record_to = record_to
        self._may_format = may_format
        self.regions: list[MemfdRegion] = []
        self.started_at = 0.0
        self.rebuilt: dict[str, object] = {}
        self._numbers = 0
        self._stop = trio.Event()
        self.verbs: VerbsFabric | None = None
        self._paths: dict[str, list[tuple[str, str]]] = {}  # host: addresses of rails, best first, and why
        self._wall_offset = 0.0

    # --- life ---

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`. `task_status.started(endpoint)` once hosts may come. Raises ConfigError, BdevError."""
        self._wall_offset = time.time() - trio.current_time()
        self.config.node.make_run_dir()
        self.bdevs: list[Bdev] = []
        try:
            self.store = FlashTier([await self._open_store(spec) for spec in self.config.bdev])
            self._build()
            await self._give_memory()
            await self._rebuild()
            if self._record_to is not None:
                self.recorder.start(self._record_to)
            try:
                await self._serve(task_status)
            finally:
                (self.config.node.run_path / "admin.sock").unlink(missing_ok=True)
            await self.store.aclose()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                for bdev in self.bdevs:
                    await bdev.aclose()
            for region in self.regions:
                region.close()

    def stop(self) -> None:
        """Drain and end. Idempotent."""
        if hasattr(self, "gateway"):
            self.gateway.hosts.is_draining = True
        self._stop.set()

    async def _serve(self, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery() as nursery:
            for agent in self._agents:
                advisers = (
                    self.prefetch, self.placement, self.engines, self.metrics, self.recorder, self.shadow, self.routing,
                )  # fmt: skip
                policy = ADVICE if agent in advisers else VITAL
                await nursery.start(supervise, agent, policy)
            self.started_at = trio.current_time()
            log.info(
                "node_up", endpoint=self.gateway.endpoint, incarnation=self.store.incarnation, **self.rebuilt
            )
            task_status.started(self.gateway.endpoint)
            await self._stop.wait()
            with trio.move_on_after(self.config.node.drain_s) as patience:
                await self._drain()
            if patience.cancelled_caught:
                log.warning(
                    "node_not_drained", after_s=self.config.node.drain_s, requests=self._num_in_flight(),
                    blocks_not_written=sum(self.intake.dirty.values()),
                )  # fmt: skip
            nursery.cancel_scope.cancel()

    def _num_in_flight(self) -> int:
        return sum(session.in_flight for session in self.gateway.hosts.sessions.values())

    async def _drain(self) -> None:
        # a few agents' states, asked only while ending
        while not self.storage.is_quiet or self._num_in_flight():  # noqa: ASYNC110
            await trio.sleep(0.01)
        if self.recorder.recording is not None:
            try:
                await self.recorder.stop("node_ended")
            except ConfigError as error:  # its disk is full: no reason not to end well
                log.error("recording_failed", error=str(error))
        log.info("node_drained")

    def wall(self, now: float) -> float:
        """Wall-clock seconds of a Trio time."""
        return now + self._wall_offset

    # --- building ---

    async def _open_bdev(self, spec: BdevConfig) -> Bdev:
        params = spec.open_params(self.config)
        if isinstance(spec, FileBdevConfig) and not self._may_format:
            path = spec.full_path(self.config)
            if has_content(path):  # refuse somebody else's file before it is grown to the size of a store
                async with aclosing(await FileBdev.open(path)) as found:
                    await BlockStore.survey(found, deadline_s=spec.deadline_s)
        bdev = await open_bdev(spec.kind, **params)
        if isinstance(spec, FileBdevConfig) and spec.profile is not None:
            return PacedBdev(bdev, spec.profile.to_profile(spec.name, spec.queue_depth))
        return bdev

    async def _open_store(self, spec: BdevConfig) -> BlockStore:
        bdev = await self._open_bdev(spec)
        self.bdevs.append(bdev)
        return await BlockStore.open(
            bdev, capacity_bytes=min(spec.capacity(self.config), bdev.info.size_bytes),  # free space changes
            segment_bytes=int(spec.segment_bytes), clock=time.time, deadline_s=spec.deadline_s,
            format=self._may_format,
        )  # fmt: skip

    async def _give_memory(self) -> None:
        """Let devices that can move bytes to and from the arena by themselves do so."""
        for bdev in self.bdevs:
            for region in self.regions:
                memory = DeviceMemory(region.fd, region.address, region.size)
                await bdev.add_memory(memory, trio.current_time() + GIVE_S)

    def _build(self) -> None:
        config = self.config
        self.index = IndexAgent()
        self.storage = StorageAgent(
            self.store,
            workers=self._queue_depth,
            deadline_s=max(spec.deadline_s for spec in config.bdev),
            bytes_per_s=float(config.prefetch.bandwidth_bytes_per_s),
        )
        self.storage.budget = self._write_budget()
        self.staging = StagingAgent(self.index, self.storage)
        self.intake = Intake(self.index, self.storage, self.wall)
        access = Access(self.staging, self.intake)
        fabrics, off = self._fabrics(access)
        self.fabric = FabricAgent(
            fabrics, {host.name: host.fabrics for host in config.host}, off, self._paths
        )
        self.decode = DecodeAgent(self.index, self.storage)
        setup = self._prefetch_setup()
        predictors = setup.make_predictors(self._prior()) if config.prefetch.enabled else []
        self._make_spaces(outlook_of(predictors))
        core = setup.build(predictors, self.staging) if config.prefetch.enabled else None
        self.prefetch = PrefetchAgent(core, self.staging)
        if core is not None:
            self.staging.is_wanted = self.intake.is_wanted = core.is_wanted
        self.shadow = ShadowAgent(self._shadows())
        self.placement = PlacementAgent(config.placement, self.staging, self.fabric)
        self.placement.first_hop = self._observe_first_hop
        self.staging.observe = self._observe
        self.staging.housekeeping += [self.intake.expire, self._look_at_wear]
        self.reclaimer = Reclaimer(self.index, self.staging, self.storage)
        self.storage.reclaim = self.reclaimer.reclaim_one
        self.store.on_lost = self.reclaimer.lose
        geometries = {space.name: space.geometry.to_geometry() for space in config.space}
        self.engines = EnginesAgent(config.engine, geometries)
        self.routing = RoutingAgent(config.router.bind, self.engines, self.index, self.staging)
        self.gateway = GatewayAgent(
            config, self.store.incarnation, self.index, self.staging, self.intake, self.fabric, self.decode,
            self._observe_host, self.stats, self.placement, self.routing.route,
        )  # fmt: skip
        taps = Taps(self.index, self.staging, self.intake, self.prefetch, self.gateway, access)
        self.recorder = RecorderAgent(taps, self._recording_header)
        self.gateway.admin.on_record = self._record
        self.gateway.admin.on_drain = self.stop
        self.gateway.admin.on_epoch_bump = self.bump_epoch
        self.metrics = MetricsAgent(config.metrics.bind, self.stats)
        self._agents = [
            self.index, self.storage, self.staging, self.prefetch, self.placement, self.fabric, self.recorder, self.shadow,
            self.gateway, self.engines, self.routing,
            self.metrics,
        ]  # fmt: skip

    def _observe(self, event: Event) -> None:
        """Something happened, for both hops of prefetch."""
        self._observe_first_hop(event)
        self.placement.observe(event)

    def _observe_first_hop(self, event: Event) -> None:
        self.prefetch.observe(event)
        self.shadow.observe(event)

    def _fabrics(self, access: Access) -> tuple[dict[str, Fabric], dict[str, str]]:
        """The fabrics some host may use, and why some are not to be had on this machine."""
        wanted = {kind for host in self.config.host for kind in host.fabrics}
        fabrics: dict[str, Fabric] = {}
        off: dict[str, str] = {}
        if "shm" in wanted:
            fabrics["shm"] = ShmFabric(access, self.config.node.run_path / "shm.sock")
        if "tcp" in wanted:
            host, port = self.config.fabric.tcp_address()
            fabrics["tcp"] = TcpFabric(access, host=host, port=port)
        if "verbs" in wanted:
            verbs = self.config.fabric.verbs
            rails, missing = resolve(self.config.rails())
            for name, reason in missing.items():
                off[f"verbs rail {name}" if rails else "verbs"] = reason
            if rails:
                self.verbs = VerbsFabric(
                    access, [rail.device for rail in rails], port=verbs.port, queue_pairs=verbs.queue_pairs
                )
                fabrics["verbs"] = self.verbs
            self._paths = {
                host.name: [
                    (path.rail.device.address, path.reason)
                    for path in paths_to(rails, host.rails, host.switch)
                ]
                for host in self.config.host
            }
        return fabrics, off

    def _make_spaces(self, outlook: Outlook | None) -> None:
        """One region per trust domain, in it a slab per space."""
        config = self.config
        for number, (domain, shares) in enumerate(config.staging_plan().items()):
            layouts = {name: RecordLayout.of(config.to_space(name)) for name in shares}
            slots = {name: max(1, int(share) // layouts[name].record_bytes) for name, share in shares.items()}
            size = sum(slots[name] * layouts[name].record_bytes for name in shares)
            size += sum(config.space_named(name).decode_bytes for name in shares)
            region = MemfdRegion(number + 1, f"staging-{domain}", size)
            self.regions.append(region)
            self.fabric.offer(region)
            start = 0
            for name in shares:
                stride = layouts[name].record_bytes
                policy = make_policy(config.staging.eviction, slots[name], outlook)
                pool = StagingPool(slots[name], layouts[name].num_parts, policy)
                slab = Slab(len(self.staging.slabs), region, start, stride, pool)
                self.staging.slabs.append(slab)
                self._add_state(name, self.store.epochs.get(name, 0), slab)
                start += slots[name] * stride
                start += self._make_decode_staging(name, layouts[name].num_parts, region, start)

    def _make_decode_staging(self, name: str, num_parts: int, region: MemfdRegion, start: int) -> int:
        """A slab of part-sized slots, if the space has decode staging; the bytes it takes."""
        space = self.config.space_named(name)
        if space.decode is None:
            return 0
        stride = space.part_slot_bytes
        slots = space.decode_bytes // stride
        pool = StagingPool(slots, 1, make_policy("fifo", slots))
        slab = Slab(len(self.staging.slabs), region, start, stride, pool, holds_parts=True)
        self.staging.slabs.append(slab)
        self.decode.offer(name, slab, space.decode, num_parts)
        return space.decode_bytes

    def _observe_host(self, event: Event) -> None:
        """What the gateway has to tell."""
        self.decode.observe(event)
        self._observe(event)

    def _add_state(self, name: str, epoch: int, slab: Slab) -> SpaceState:
        if self._numbers > MAX_NUMBER:
            raise ConfigError(repr(name), f"this node has had {MAX_NUMBER:,} epochs; restart it")
        space = self.config.to_space(name).with_epoch(epoch)
        index = PrefixIndex(space.geometry.block_token_bytes, space.num_shards, IndexFeed())
        named = self.config.space_named(name)
        state = SpaceState(
            name, self._numbers, space, space.fingerprint(), RecordLayout.of(space), index, slab,
            named.ttl_s, named.block_recompute_s,
        )  # fmt: skip
        self._numbers += 1
        self.index.add(state)
        return state

    @property
    def _queue_depth(self) -> int:
        """Of all bdevs together."""
        return sum(spec.queue_depth for spec in self.config.bdev)

    def _write_budget(self) -> WriteBudget | None:
        """Of all bdevs together: batches go to each in turn."""
        rates = [
            spec.drive_writes_per_day * store.capacity_bytes
            for spec, store in zip(self.config.bdev, self.store.stores, strict=True)
            if spec.drive_writes_per_day is not None
        ]
        return WriteBudget(sum(rates), trio.current_time()) if rates else None

    def _look_at_wear(self, now: float) -> None:
        """With a budget: while an SPDK drive is past its rated life, only what is used again is written."""
        if self.storage.budget is not None:
            drives = [h for bdev in self.bdevs if isinstance(bdev, SpdkBdev) for h in bdev.health.values()]
            self.storage.budget.is_worn = any(drive.is_worn for drive in drives)

    def _prefetch_setup(self) -> PrefetchSetup:
        prefetch = self.config.prefetch
        return PrefetchSetup(
            predictors=prefetch.predictors,
            block_s=max(LOAD_S, max(self._record_sizes()) / prefetch.bandwidth_bytes_per_s),
            lookahead_blocks=prefetch.lookahead_blocks,
            bandwidth_bytes_per_s=float(prefetch.bandwidth_bytes_per_s),
            staging_bytes=int(self.config.staging.bytes * prefetch.staging_fraction),
            queue_depth=max(1, self._queue_depth - 2),
            min_probability=prefetch.min_probability,
        )

    def _shadows(self) -> dict[str, Shadow]:
        """Policies on trial, in pools like ours and on a model of our device."""
        slabs = [slab for slab in self.staging.slabs if not slab.holds_parts]
        return {
            spec.name: make_shadow(
                spec, self._prefetch_setup(), self._prior(), self.index, slabs, self._device_model()
            )
            for spec in self.config.prefetch.shadow
        }

    def _device_model(self) -> DeviceProfile:
        """What the first bdev is modelled on, else one of the rate prefetch counts on and an NVMe drive's latency."""
        modelled = next((spec for spec in self.config.bdev if isinstance(spec, ModelledBdevConfig)), None)
        rate = modelled.profile.read_bytes_per_s if modelled else self.config.prefetch.bandwidth_bytes_per_s
        latency_s = modelled.profile.read_latency_us / 1e6 if modelled else NVME_LATENCY_S
        return DeviceProfile(
            name="shadow", read_latency_s=latency_s, write_latency_s=latency_s, read_bytes_per_s=float(rate),
            write_bytes_per_s=float(rate), queue_depth=self._queue_depth,
        )  # fmt: skip

    def _prior(self) -> Forest | None:
        return shipped_returns() if self.config.prefetch.prior == "shipped" else None

    def _record_sizes(self) -> list[int]:
        """Of a block of each space, with its header."""
        return [RecordLayout.of(self.config.to_space(space.name)).record_bytes for space in self.config.space]

    # --- recording ---

    async def _record(self, path: str) -> m.RecordReply:
        """Begin a recording in a new file, or, with an empty path, end it."""
        if path and ("\0" in path or not Path(path).is_absolute()):
            raise ConfigError(repr(path), "cannot record there: expected an absolute path")
        found = self.recorder.start(Path(path)) if path else await self.recorder.stop("asked")
        tape = found.tape
        return m.RecordReply(
            id=0, path=str(found.path), lines=tape.num_lines, bytes=found.num_bytes, lost=tape.lost,
            is_fresh=found.is_fresh,
        )  # fmt: skip

    def _recording_header(self, is_fresh: bool) -> recording.Header:
        return recording.Header(
            started_at=trio.current_time(),
            wall=self.wall(trio.current_time()),
            is_fresh=is_fresh,
            eviction=self.config.staging.eviction,
            has_prefetch=self.config.prefetch.enabled,
            prior=digest_of(self._prior()),
            prefetch=recording.Prefetch(**asdict(self._prefetch_setup())),
            pools=tuple(
                recording.Pool(slots=slab.pool.num_slots, record_bytes=slab.stride)
                for slab in self.staging.slabs
            ),
            devices=tuple(_device_line(spec) for spec in self.config.bdev),
        )

    # --- restart and epochs ---

    async def _rebuild(self) -> None:
        layouts = {state.fingerprint: state.layout for state in self.index.spaces.values()}
        rebuilt = await self.store.rebuild(layouts, self._log_rebuild())
        if rebuilt.foreign_segments:
            log.warning("foreign_segments", count=rebuilt.foreign_segments, detail=FOREIGN)
        states = {state.fingerprint: state for state in self.index.spaces.values()}
        orphans = 0
        used = self._last_uses(rebuilt.records)
        for count, record in enumerate(rebuilt.records):
            if count % ADOPT == 0:
                await trio.lowlevel.checkpoint()
                if self._stop.is_set():
                    break
            orphans += not self._adopt(states[record.header.fingerprint], record, used[record.header.key])
        await self.index.expire(trio.current_time())
        self.rebuilt = {
            "records": len(rebuilt.records) - orphans, "orphans": orphans, "torn": rebuilt.torn,
            "seconds": round(rebuilt.seconds, 3), "bytes_read": rebuilt.bytes_read,
        }  # fmt: skip

    def _log_rebuild(self) -> Callable[[int, int, int], None]:
        next_at = [trio.current_time() + REBUILD_LOG_S]

        def on_progress(number: int, done: int, segments: int) -> None:
            if trio.current_time() > next_at[0]:
                next_at[0] = trio.current_time() + REBUILD_LOG_S
                log.info("rebuilding", bdev=self.bdevs[number].info.name, segments=done, of=segments)

        return on_progress

    def _last_uses(self, records: Sequence[StoredRecord]) -> dict[bytes, float]:
        """When each block was last used, as far as the device tells: it, or what follows it, was stored."""
        now = trio.current_time()
        used: dict[bytes, float] = {}
        for record in reversed(records):  # children first
            header = record.header
            at = max(used.get(header.key, -math.inf), min(now, header.stored_at - self._wall_offset))
            used[header.key] = at
            used[header.parent] = max(used.get(header.parent, at), at)
        return used

    def _adopt(self, state: SpaceState, record: StoredRecord, now: float) -> bool:
        """Put one record of a former life into the index; an orphan (its parent is lost) is forgotten."""
        header = record.header
        try:
            if header.tokens:
                ids = state.index.insert_after(header.parent, header.tokens, [header.key], now)
            else:
                ids = state.index.insert_keys(header.parent, [header.key], now)
            with self.index.pinned(state, ids):  # one that cannot be placed does not stay
                state.index.set_extent(int(ids[0]), header.shard, record.offset)
            self.store.rename(record.offset, state.owner(int(ids[0]), header.shard))
        except (KeyError, ValueError):
            self.store.forget(record.offset)
            return False
        if state.ttl_s:  # uses before the restart are forgotten
            state.index.set_expiry(ids, header.stored_at + state.ttl_s - self._wall_offset)
        return True

    async def bump_epoch(self, name: str) -> int:
        """Make every block of a space unreachable; the new epoch. Durable before it is answered."""
        old = self.index.spaces[name]
        epoch = old.space.epoch + 1
        await self.store.set_epoch(name, epoch)
        self._add_state(name, epoch, old.slab)
        self.placement.retire(old)
        log.info("epoch_bumped", space=name, epoch=epoch)
        await self._sweep(old)
        return epoch

    async def _sweep(self, old: SpaceState) -> None:
        """Give a retired epoch's slots and extents back, some at a time. Nobody can reach them any more."""
        table = old.index.table
        live = table.live()
        for at in range(0, len(live), SWEEP):
            ids = live[at : at + SWEEP]
            self.index.bury(old, ids)
            self.staging.let_go(old, old.index.handles(ids), table.where[ids, table.first_extent :])
            await trio.lowlevel.checkpoint()
            await self.prefetch.caught_up()  # it has to hear of all of them while they still have names
        self.index.forget_retired(old)

    # --- looking in ---

    def stats(self) -> dict[str, object]:
        """Every counter there is, as nested maps of plain values."""
        return {
            "node": self._node_stats(),
            "hosts": {name: asdict(served) for name, served in self.gateway.hosts.by_host.items()},
            "gateway": {
                "messages": self.gateway.messages, "denied": self.gateway.denied,
                "sessions": len(self.gateway.hosts.sessions),
                "scopes": sum(len(s.scopes) for s in self.gateway.hosts.sessions.values()),
                "errors": dict(self.gateway.errors), "sessions_ended": dict(self.gateway.hosts.ended),
            },
            "spaces": {name: self._space_stats(state) for name, state in self.index.spaces.items()},
            "index": {"drops": dict(self.index.drops), "tombstones": len(self.index.tombstones)},
            "intake": {
                "stored": self.intake.stored, "landed": self.intake.landed,
                "refused": dict(self.intake.refused), "reserved": self.intake.num_reserved,
                "dirty": sum(self.intake.dirty.values()), "expired": self.intake.expired,
                "writes_lost": self.intake.writes_lost,
            },
            "storage": {
                "reads": dict(self.storage.read_status), "backlog": self.storage.backlog,
                "write_failures": self.storage.write_failures, "rebuilt": self.rebuilt,
                "read_latency_ms": round(1000 * self.storage.latency_s(), 3),
            },
            "bdevs": {
                bdev.info.name: {
                    "kind": bdev.info.kind, "io": plain(bdev.stats), "store": plain(store.stats()), **spdk_stats(bdev),
                }
                for bdev, store in zip(self.bdevs, self.store.stores, strict=True)
            },
            "endurance": self._endurance_stats(),
            "fabrics": {kind: plain(fabric.stats) for kind, fabric in self.fabric.fabrics.items()},
            "fabrics_off": {**self.fabric.off, **(self.verbs.rails_off if self.verbs else {})},
            "rails": {
                name: plain(rail) for name, rail in (self.verbs.rail_stats() if self.verbs else {}).items()
            },
            "prefetch": self._prefetch_stats(),
            "recorder": self.recorder.status,
            "shadow": self.shadow.stats(),
            "decode": self.decode.stats(),
            "engines": self.engines.stats(),
            "placement": self.placement.stats(),
            "routing": {
                "questions": self.routing.questions,
                "ranks": self.routing.router.stats(trio.current_time()),
                "port": self.routing.port,
            },
            "agents": {agent.name: {"restarts": agent.restarts} for agent in self._agents},
        }  # fmt: skip

    def _node_stats(self) -> dict[str, object]:
        times = os.times()
        return {
            "name": self.config.node.name, "pid": os.getpid(), "incarnation": self.store.incarnation,
            "uptime_s": round(trio.current_time() - self.started_at, 3), **_from_proc(),
            "cpu_s": round(times.user + times.system, 3),
            "endpoint": self.gateway.endpoint, "metrics_port": self.metrics.port,
        }  # fmt: skip

    def _endurance_stats(self) -> dict[str, object]:
        """What flash was given, against what it gave back and against its budget, since the start."""
        stores = [store.stats() for store in self.store.stores]
        written, read = sum(s.bytes_appended for s in stores), sum(s.bytes_read for s in stores)
        capacity = sum(s.log.capacity_bytes for s in stores)
        days = max(trio.current_time() - self.started_at, 1.0) / DAY_S
        budget = self.storage.budget
        return {
            "bytes_written": written, "bytes_read": read, "written_per_read": round(written / read, 4) if read else 0.0,
            "drive_writes_per_day": round(written / capacity / days, 4),
            **({} if budget is None else plain(budget.stats())),
        }  # fmt: skip

    def _space_stats(self, state: SpaceState) -> dict[str, object]:
        served = self.gateway.hosts.by_space.get(state.name)
        return {
            "tenant": state.space.tenant, "epoch": state.space.epoch, "blocks": len(state.index), "record_bytes": state.layout.record_bytes,
            "recompute_ms_per_block": None if state.recompute_s is None else round(1000 * state.recompute_s, 3),
            "index": plain(state.index.stats()), "staging": plain(state.slab.pool.stats()),
            **({} if served is None else {"served": plain(served)}),
        }  # fmt: skip

    def _prefetch_stats(self) -> dict[str, object]:
        core = self.prefetch.core
        if core is None:
            return {"enabled": 0}
        stats = core.stats()
        return {
            "enabled": 1, "waiting": stats.waiting, "flying": stats.flying, "sequences": stats.sequences,
            "trust": dict(stats.trust), "total": totals(stats.total),
            "predictors": {name: totals(row) for name, row in stats.by_predictor.items()},
            "by_space": {name: totals(row) for name, row in stats.by_space.items()},
        }  # fmt: skip


def totals(row: Totals) -> dict[str, object]:
    """A row of the ledger, with what it amounts to."""
    leads = {f"lead_p{q}_s": _finite(row.lead_quantile_s(q / 100)) for q in (10, 50, 90)}
    return {**asdict(row), "accuracy": row.accuracy, "coverage": row.coverage, **leads}


def _finite(lead_s: float | None) -> float | None:
    """A lead beyond the histogram is shown as its last bound."""
    return None if lead_s is None else min(lead_s, LEAD_BOUNDS_S[-1])


def spdk_stats(bdev: Bdev) -> dict[str, object]:
    """What its SPDK target says of a bdev, if it has one."""
    if not isinstance(bdev, SpdkBdev):
        return {}
    return {
        "spdk": {
            "reconciled": bdev.reconciled, "trouble": bdev.trouble,
            "drives": {name: plain(health) for name, health in bdev.health.items()},
        }
    }  # fmt: skip


def _device_line(spec: BdevConfig) -> recording.Device:
    """What a recording says of a device: with its model, if it has one."""
    if not isinstance(spec, ModelledBdevConfig):
        return recording.Device(kind=spec.kind, queue_depth=spec.queue_depth)
    return recording.Device(
        kind=spec.kind,
        queue_depth=spec.queue_depth,
        read_latency_s=spec.profile.read_latency_us / 1e6,
        read_bytes_per_s=float(spec.profile.read_bytes_per_s),
    )


def _from_proc() -> dict[str, object]:
    """What the kernel says of this process; nothing where no descriptor is left to ask it with."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "open_fds": len(os.listdir("/proc/self/fd")) - 1,
        }
    except OSError:
        return {}


def has_content(path: Path) -> bool:
    """Whether there is a regular file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def plain(stats: object) -> dict[str, object]:
    """A statistics dataclass as a map of plain values."""
    return asdict(stats)  # type: ignore[call-overload, no-any-return]
