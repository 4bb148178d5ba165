"""The engines agent: follows inference engines' KV events and keeps what their hosts hold (`HeldBlocks`).

One task per engine finds its ranks (from the topology, or by asking the engine), one per rank receives, and one at a time per
rank replays. What to make of a message is `dpurt.engines.publisher.Publisher`'s to say. An engine that cannot be found is asked again,
less and less often; one that falls silent is warned of once.

Restart: cores are kept, sockets are new; each core is told that its way was interrupted and asks for what it missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog
import trio
import zmq

from dpurt.config import EngineConfig
from dpurt.core.identity import Geometry
from dpurt.core.routing import Holding
from dpurt.engines import KINDS
from dpurt.engines.publisher import Ask, Publisher
from dpurt.engines.residency import Engine, Residency
from dpurt.engines.sources import Source
from dpurt.errors import ConfigError, NodeUnavailable, RemoteProtocolError
from dpurt.runtime.actor import Actor
from dpurt.transport import SocketOptions, ZmqSocket, http, open_context

log = structlog.get_logger()
UNREAD_MESSAGES = 4096  # of one rank; what does not fit is lost, noticed and replayed
MAX_MESSAGE_BYTES = 16 << 20
AT_ONCE = 32  # messages of one rank before others get a turn
TICK_S = 1.0
DISCOVERY_S = 5.0
REPLAY_STALLED_S = 3.0
REPLAY_S = 120.0
QUIET_S = 0.02  # without a message of any engine: time to read ahead
READ_BLOCKS = 128  # of each engine before others get a turn
PAUSES_S = (1.0, 2.0, 5.0, 15.0)


@dataclass(slots=True)
class Rank:
    """One rank of one engine: an instance requests may be routed to."""

    name: str
    config: EngineConfig
    source: Source
    core: Publisher
    was_silent: bool = False
    asks: trio.MemorySendChannel[Ask] = field(init=False)

    def stats(self, now: float) -> dict[str, object]:
        """Its counters and state, plain."""
        core, stats, held = self.core, self.core.stats, self.core.residency.stats
        return {
            "messages": stats.messages, "events": stats.events, "gaps": stats.gaps, "replays": stats.replays,
            "replays_failed": stats.replays_failed, "replayed": stats.replayed, "repeats": stats.repeats,
            "generations": stats.generations, "lost": stats.lost, "skipped_events": stats.skipped_events,
            "dropped_events": stats.dropped_events, "malformed": dict(stats.malformed),
            "blocks_stored": held.stored, "blocks_removed": held.removed, "clears": held.cleared, "blocks_odd": held.odd,
            "blocks_passed_over": dict(held.passed_over), "blocks_held": len(core.residency.held),
            "is_silent": int(core.is_silent(now)), "is_partial": int(core.is_partial),
            "stale_s": -1.0 if core.confirmed_at is None else round(now - core.confirmed_at, 3),
        }  # fmt: skip


class EnginesAgent(Actor[None]):
    """What GPU hosts hold."""

    name = "engines"

    def __init__(self, engines: tuple[EngineConfig, ...], geometries: Mapping[str, Geometry]) -> None:
        super().__init__(1)
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.unfound: dict[str, str] = {}  # engines whose ranks are not known, and why
        self._engines = engines
        self._geometries = geometries
        self._heard = trio.Event()  # since tokens were last read ahead
        self._context: zmq.Context[zmq.Socket[bytes]]

    def stats(self) -> dict[str, object]:
        """By rank."""
        now = trio.current_time()
        return {
            "ranks": {rank.name: rank.stats(now) for rank in self.ranks.values()}, "unfound": dict(self.unfound),
        }  # fmt: skip

    def serving(self, space: str) -> list[Rank]:
        """The ranks a prompt of this space may go to."""
        return [
            rank
            for rank in self.ranks.values()
            if space == rank.config.space or space in rank.config.loras.values()
        ]

    @staticmethod
    def holdings(space: str, ranks: Sequence[Rank], tokens: bytes, label: bytes = b"") -> list[Holding]:
        """What each of these ranks holds of a prompt (whose first block has this label), in tokens."""
        found = []
        for rank in ranks:
            loras = [lora for lora, name in rank.config.loras.items() if name == space]
            root = None if space == rank.config.space else loras[0]
            size = rank.core.residency.engine.block_tokens
            leading = rank.core.residency.held.leading(root, tokens, label)
            found.append(Holding(rank.name, leading.hbm * size, leading.both * size))
        return found

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        with open_context() as self._context:
            async with trio.open_nursery() as nursery:
                for engine in self._engines:
                    nursery.start_soon(self._follow_engine, engine)
                nursery.start_soon(self._tick)
                nursery.start_soon(self._read_ahead)
                task_status.started()
                await trio.sleep_forever()

    # --- finding ranks ---

    async def _follow_engine(self, engine: EngineConfig) -> None:
        while True:
            sources = await self._sources(engine)
            try:
                async with trio.open_nursery() as nursery:
                    for source in sources:
                        nursery.start_soon(self._follow_rank, self._rank(engine, source, len(sources)))
            except* ConfigError as failed:  # an endpoint that cannot be had, of this engine only
                why = "; ".join(map(str, failed.exceptions))
                log.warning("engine_not_followed", engine=engine.name, why=why)
                self.unfound[engine.name] = why
            await trio.sleep(PAUSES_S[-1])

    async def _sources(self, engine: EngineConfig) -> list[Source]:
        if engine.discovery is None:
            replay = engine.replay or (None,) * len(engine.events)
            return [
                Source(rank=i, events=events, replay=back, topic=engine.topic)
                for i, (events, back) in enumerate(zip(engine.events, replay, strict=True))
            ]
        tries = 0
        while True:
            try:
                with trio.fail_after(DISCOVERY_S):
                    found = await self._discover(engine, engine.discovery)
                if found:
                    self.unfound.pop(engine.name, None)
                    return found
                why = "it publishes no KV events"
            except (NodeUnavailable, RemoteProtocolError, trio.TooSlowError) as error:
                why = str(error) or "no answer in time"
            if self.unfound.get(engine.name) != why:
                log.warning("engine_not_found", engine=engine.name, why=why)
            self.unfound[engine.name] = why
            await trio.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    @staticmethod
    async def _discover(engine: EngineConfig, address: str) -> list[Source]:
        kind = KINDS[engine.kind]
        body = await http.get(address.rstrip("/") + kind.discovery_path)
        return kind.sources(body, urlsplit(address).hostname or "")

    def _rank(self, engine: EngineConfig, source: Source, count: int) -> Rank:
        """A rank's state, kept over restarts."""
        known = self.ranks.get((engine.name, source.rank))
        if known is not None:
            known.source = source
            return known
        geometry = self._geometries[engine.space]
        mine = Engine(
            dialect=KINDS[engine.kind].dialect, loras=frozenset(engine.loras), token_bytes=geometry.token_bytes,
            block_tokens=engine.block_tokens or source.block_tokens or geometry.block_tokens,
        )  # fmt: skip
        core = Publisher(Residency(mine), has_replay=source.replay is not None, now=trio.current_time())
        name = engine.name if count == 1 else f"{engine.name}/{source.rank}"
        rank = Rank(name, engine, source, core)
        self.ranks[engine.name, source.rank] = rank
        return rank

    # --- following one ---

    async def _follow_rank(self, rank: Rank) -> None:
        options = SocketOptions(recv_hwm=UNREAD_MESSAGES, max_message_bytes=MAX_MESSAGE_BYTES, max_parts=8)
        rank.asks, asks = trio.open_memory_channel[Ask](1)  # a core asks for one replay at a time
        with ZmqSocket(self._context, "SUB", options) as socket:
            socket.watch_connections()
            socket.subscribe(rank.source.topic.encode())
            if rank.config.bind:
                socket.bind(rank.source.events)
            else:
                socket.connect(rank.source.events)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._replay, rank, asks)
                now = trio.current_time()
                if rank.core.is_replaying:  # in a former life of this agent
                    self._obey(rank, rank.core.replay_failed(now))
                self._obey(rank, rank.core.interrupted(now))
                while True:
                    self._receive(rank, socket, await socket.recv())

    def _receive(self, rank: Rank, socket: ZmqSocket, first: list[bytes]) -> None:
        """A message, and those that are here with it. If the way was interrupted among them, all of them have to wait."""
        self._heard.set()
        messages = [first, *socket.try_recv_many(AT_ONCE - 1)]
        now = trio.current_time()
        if socket.was_interrupted():
            self._obey(rank, rank.core.interrupted(now))
        for frames in messages:
            self._obey(rank, rank.core.live(frames, now))

    @staticmethod
    def _obey(rank: Rank, ask: Ask | None) -> None:
        if ask is not None:
            rank.asks.send_nowait(ask)

    async def _replay(self, rank: Rank, asks: trio.MemoryReceiveChannel[Ask]) -> None:
        async for ask in asks:
            next_ask: Ask | None = ask
            while next_ask is not None:
                next_ask = await self._replay_once(rank, next_ask)

    async def _replay_once(self, rank: Rank, ask: Ask) -> Ask | None:
        """One replay over a socket of its own, so that nothing of an earlier one comes with it; what to ask for next."""
        core, endpoint = rank.core, rank.source.replay
        assert endpoint is not None, "a core without a replay socket asks for none"
        options = SocketOptions(
            recv_hwm=UNREAD_MESSAGES,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_parts=8,
            queue_unconnected=False,
        )
        with ZmqSocket(self._context, "DEALER", options) as socket, trio.move_on_after(REPLAY_S):
            socket.connect(endpoint)
            with trio.move_on_after(REPLAY_STALLED_S) as stalled:
                await socket.send([b"", ask.start.to_bytes(8, "big")])
                while core.is_replaying:
                    frames = await socket.recv()
                    stalled.deadline = trio.current_time() + REPLAY_STALLED_S
                    next_ask = core.replayed(frames, trio.current_time())
                    self._heard.set()
                    if next_ask is not None or not core.is_replaying:
                        return next_ask
        return core.replay_failed(trio.current_time())

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            now = trio.current_time()
            for rank in self.ranks.values():
                self._obey(rank, rank.core.tick(now))
                self._watch(rank, now)

    async def _read_ahead(self) -> None:
        """When no messages come, read the tokens of what was told, a little at a time: then no question has to wait for that."""
        while True:
            await self._heard.wait()
            self._heard = trio.Event()
            is_more = True
            while is_more:
                if not self._is_quiet():
                    await trio.sleep(QUIET_S)
                    continue
                is_more = any(
                    [rank.core.residency.held.read_ahead(READ_BLOCKS) for rank in self.ranks.values()]
                )
                await trio.lowlevel.checkpoint()

    def _is_quiet(self) -> bool:
        now = trio.current_time()
        return all(now - rank.core.heard_at >= QUIET_S for rank in self.ranks.values())

    @staticmethod
    def _watch(rank: Rank, now: float) -> None:
        """Say once that an engine fell silent, and once that it is back."""
        is_silent = rank.core.is_silent(now)
        if is_silent != rank.was_silent:
            rank.was_silent = is_silent
            say = log.warning if is_silent else log.info
            say(
                "engine_silent" if is_silent else "engine_back", engine=rank.name, endpoint=rank.source.events
            )
