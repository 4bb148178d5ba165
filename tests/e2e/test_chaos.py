"""Everything at once, at random: hosts that come and go, spaces, shards, parts, digests, faults, epochs, a full device."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.client import Client, LoadedBlock, connect
from dpurt.config import Config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.errors import DpurtError
from dpurt.testing.faulty_bdev import Fault
from dpurt.testing.node import (
    BLOCK_TOKENS,
    FaultyNode,
    serving,
    small_config,
    small_host,
    small_space,
    spaces_of,
)
from dpurt.testing.raw_host import raw_host
from dpurt.wire import messages as m

SEEDS = [int(seed) for seed in os.environ.get("DPURT_CHAOS_SEEDS", "1,2").split(",")]
SHARED = 0.2  # of the requests: under a name another task may use
SECONDS = float(os.environ.get("DPURT_CHAOS_SECONDS", "3"))
PARTS = 4
PAYLOAD = PARTS * 4096
SPACES = ("s", "ranks", "digests")


def chaos_config(tmp_path: Path) -> Config:
    names = list(SPACES)
    return small_config(
        tmp_path / "run",
        gateway={"bind": "tcp://127.0.0.1:0", "session_timeout_s": 0.6},
        staging={"bytes": 3 * 16 * 5 * 4096, "lease_s": 0.2},
        bdev=[
            {
                "name": "m", "kind": "memory", "size_bytes": 20 << 18, "segment_bytes": 1 << 18, "queue_depth": 6,
                "deadline_s": 0.2,
            }
        ],
        space=[
            small_space("s"), small_space("ranks", model="m2", tp_size=2), small_space("digests", model="m3", ttl_s=2.0),
        ],
        host=[small_host(name, spaces=names) for name in ("host-a", "host-b")],
    )  # fmt: skip


def content(space: str, shard: int, chain: Sequence[int]) -> bytes:
    """What the last block of a chain must hold."""
    name = f"{space} {shard} {list(chain)}".encode()
    return payload_of(hashlib.blake2b(name, digest_size=16).digest(), PAYLOAD)


class Guest:
    """One client's random requests. Whatever is served must be right; any refusal is fine.

    Now and then two tasks take the same name, which hosts must not do. Mostly one is refused; but where one's request has just
    ended, a load by that name is of the other's prompt (in the shard the load names). So under a shared name a block is right
    if it is of a prompt that was given under it, and no such name is used for a view, which the other task's end would end.
    """

    def __init__(self, client: Client, name: str, rng: random.Random) -> None:
        self._client = client
        self._name = name
        self._rng = rng
        self.served = self.refused = self._number = 0
        self._prompts: dict[str, list[tuple[str, int, list[int]]]] = {}

    async def run(self) -> None:
        while True:
            self._number += 1
            is_shared = self._rng.random() < SHARED
            name = f"shared-{self._number // 8}" if is_shared else str(self._number)
            try:
                await self._request(f"{self._name}-{name}", is_shared)
            except DpurtError:
                self.refused += 1
                await trio.sleep(0.01)

    async def _request(self, name: str, is_shared: bool) -> None:
        rng = self._rng
        space = rng.choice(SPACES)
        shard = rng.randrange(2) if space == "ranks" else 0
        chain = [rng.randrange(12), *(rng.randrange(2) for _ in range(rng.randrange(9)))]
        self._prompts.setdefault(name, []).append((space, shard, chain))
        prompt = self._prompt(space, chain)
        with trio.move_on_after(rng.choice([0.005, 0.05, 1.0, 1.0, 1.0])):
            found = await self._client.lookup(space, name, **prompt, shard=shard)
            if rng.random() < 0.1:
                await self._client.lookup(space, name, **self._prompt(space, [99, 1]), shard=shard)
            if rng.random() < 0.3:
                await self._hint(name, found.matched_blocks)
            if found.matched_blocks:
                kinds = (
                    ["load", "push"] if is_shared or not name.startswith("shm") else ["load", "push", "view"]
                )
                await self._load(name, space, shard, chain, found.matched_blocks, rng.choice(kinds))
            await self._store(name, space, shard, chain, prompt, found.matched_blocks)
        if rng.random() < 0.5:
            await self._client.finish(name, "end_turn")
        elif rng.random() < 0.8:
            await self._client.cancel(name, timeout_s=1.0)  # else it stays open

    @staticmethod
    def _prompt(space: str, chain: Sequence[int]) -> dict[str, Any]:
        if space != "digests":
            ids = [hash_of(chain[: i + 1]) for i in range(len(chain))]
            return {"tokens": tokens_of(ids, BLOCK_TOKENS)}
        return {
            "tokens": None,
            "digests": [hash_of(chain[: i + 1]).to_bytes(8, "big") for i in range(len(chain))],
        }

    async def _hint(self, name: str, matched: int) -> None:
        rng = self._rng
        kind: Any = rng.choice(["pause", "resume", "decode"])
        touched = [rng.randrange(matched + 2) for _ in range(3)]
        await self._client.hint(
            m.Hint(
                request=name, kind=kind, expected_ms=rng.choice([None, 0, 50]), group=rng.randrange(PARTS),
                touched=touched, ranked=touched[:2], step=rng.randrange(5), need_ms=rng.randrange(50),
            )
        )  # fmt: skip

    async def _load(
        self, name: str, space: str, shard: int, chain: Sequence[int], matched: int, how: str
    ) -> None:
        rng = self._rng
        first = rng.randrange(matched)
        count = rng.randint(1, matched - first)
        start = rng.randrange(PARTS)
        parts = (start, rng.randint(start + 1, PARTS)) if rng.random() < 0.4 else None
        fields: dict[str, Any] = {"parts": parts, "shard": shard, "timeout_s": rng.choice([0.02, 1.0])}
        if how == "view":
            async with self._client.view(name, first, count, **fields) as blocks:
                await trio.sleep(rng.choice([0, 0.01]))
                self._check(name, space, shard, chain, first, parts, blocks, how)
        elif how == "push":
            region = await self._client.landing(count * PAYLOAD, timeout_s=1.0)
            offsets = [i * PAYLOAD for i in range(count)]
            blocks = await self._client.load_pushed(name, first, region, offsets, **fields)
            self._check(name, space, shard, chain, first, parts, blocks, how)
        else:
            into = [memoryview(bytearray(PAYLOAD)) for _ in range(count)]
            blocks = await self._client.load(name, first, into, **fields)
            self._check(name, space, shard, chain, first, parts, blocks, how)

    def _check(
        self, name: str, space: str, shard: int, chain: Sequence[int], first: int, parts: tuple[int, int] | None,
        blocks: Sequence[LoadedBlock], how: str,
    ) -> None:  # fmt: skip
        start, stop = parts or (0, PARTS)
        for i, block in enumerate(blocks):
            if block.is_ok:
                assert block.data is not None
                at = first + i
                asked = [(s, c[: at + 1]) for s, _, c in self._prompts[name] if len(c) > at]
                assert (space, list(chain[: at + 1])) in asked
                right = {content(s, shard, c)[4096 * start : 4096 * stop] for s, c in asked}
                assert bytes(block.data) in right, (
                    f"wrong bytes: {how} of {name}, block {at}, {self._prompts[name]}"
                )
                self.served += 1

    async def _store(
        self, name: str, space: str, shard: int, chain: Sequence[int], prompt: dict[str, Any], first: int
    ) -> None:
        payloads = [content(space, shard, chain[: i + 1]) for i in range(first, len(chain))]
        tokens = prompt["tokens"]
        await self._client.store(
            space, name, tokens, first, payloads, digests=prompt.get("digests"), shard=shard
        )


def hash_of(chain: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(chain)).encode(), digest_size=4).digest(), "big") >> 12


async def come_and_go(node: FaultyNode, number: int, rng: random.Random, guests: list[Guest]) -> None:
    """A host that connects for a while, again and again."""
    while True:
        fabric = rng.choice(["shm", "tcp"])
        host = f"host-{'ab'[number % 2]}"
        with suppress(DpurtError):
            async with connect(
                node.gateway.endpoint,
                host=host,
                spaces=spaces_of(node.config),
                fabrics=[fabric],
                timeout_s=1.0,
            ) as client:
                guest = Guest(client, f"{fabric}-{number}-{len(guests)}", rng)
                guests.append(guest)
                with trio.move_on_after(rng.choice([0.3, 1.0, 3.0])):
                    async with trio.open_nursery() as nursery:
                        for _ in range(3):
                            nursery.start_soon(guest.run)


async def break_things(node: FaultyNode, rng: random.Random) -> None:
    """Device faults of all kinds, never for long; and epochs that change."""
    while True:
        await trio.sleep(rng.uniform(0.02, 0.2))
        kind: Any = rng.choice(["delay", "error", "hang", "corrupt", "short"])
        op: Any = rng.choice(["read", "read", "write"])
        node.faulty.inject(Fault(op=op, kind=kind, count=rng.randint(1, 3), delay_s=0.05))
        if rng.random() < 0.5:
            node.faulty.resume()
        if rng.random() < 0.05:
            async with raw_host(f"ipc://{node.config.node.run_path / 'admin.sock'}") as raw:
                await raw.ask(m.EpochBump(space=rng.choice(SPACES)))


async def until_idle(node: FaultyNode) -> None:
    """Everybody has left: nothing is held, waiting or under way."""
    with trio.fail_after(10):
        while True:
            node.faulty.clear()
            node.faulty.resume()
            pools = [slab.pool.stats() for slab in node.staging.slabs]
            busy = sum(
                p.leases + p.quarantined + p.filling + p.doomed + p.pinned + p.transfers for p in pools
            )
            busy += len(node.gateway.hosts._by_number) + node.intake.num_reserved + node.staging.num_flights
            if not busy and node.storage.is_quiet and not sum(node.intake.dirty.values()):
                return
            await trio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_at_once_nothing_wrong_is_served_and_nothing_is_left_behind(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    guests: list[Guest] = []
    with trio.fail_after(SECONDS + 30):
        async with serving(FaultyNode(chaos_config(tmp_path))) as node:
            with trio.move_on_after(SECONDS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(break_things, node, rng)
                    for number in range(4):
                        nursery.start_soon(come_and_go, node, number, random.Random(rng.random()), guests)
            await until_idle(node)
            assert not {agent.name: agent.restarts for agent in node._agents if agent.restarts}
            for slab in node.staging.slabs:
                slab.pool.check_integrity()
            for state in node.index.spaces.values():
                state.index.check_integrity()
            node.store.stores[0].check_integrity()
            core = node.prefetch.core
            assert core is not None
            core.ledger.check_integrity()
    assert sum(guest.served for guest in guests) > 10  # it did happen
