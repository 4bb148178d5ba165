"""A node that lives and dies many times on one file: ``python crash_lives.py FOLDER LIVES SEED``.

Each life is a forked child: it starts a node on the file, loads what earlier lives left there and compares every byte, then
stores and loads until it is killed: by itself in the middle of a device operation (which may be left half done), or by its
parent at any time. What it saw goes to an append-only journal, which survives it:

    +N     block N is on the device        -N     the node dropped block N, or its place on the device while staging has it
    {...}  what the life found at its start

Blocks are numbered as the nodes of binary trees, so a number says the whole chain. Prints one JSON object about all lives.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
import trio

from dpurt.agents.spaces import SpaceState
from dpurt.bdev import Bdev, BdevInfo, BdevStats, DeviceMemory
from dpurt.client import Client, connect
from dpurt.config import BdevConfig, Config
from dpurt.core.identity import ROOT_KEY, chain_keys
from dpurt.core.prefix_index import Dropped
from dpurt.demo.content import payload_of, tokens_of
from dpurt.node import Node
from dpurt.testing.node import BLOCK_TOKENS, serving, small_config, spaces_of

PAYLOAD = 4 * 4096
TREES, TREE_BLOCKS = 24, 63  # in all about twice what the file holds
SEGMENT = 1 << 18
FILE = 48 * SEGMENT + (64 << 10)
NEVER = -1
CHECKED = 24  # chains a life loads at its start


def chain_of(block: int) -> list[int]:
    """The block and its ancestors, root first. In tree t blocks are 64 t + 1 (the root) to 64 t + 63."""
    tree, at = divmod(block, 64)
    path = []
    while at:
        path.append(64 * tree + at)
        at //= 2
    return path[::-1]


def prompt(block: int) -> bytes:
    return tokens_of(chain_of(block), BLOCK_TOKENS)


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def config_of(folder: Path) -> Config:
    device = {
        "name": "f", "kind": "file", "path": str(folder / "flash.img"), "size_bytes": FILE, "segment_bytes": SEGMENT,
        "queue_depth": 8,
    }  # fmt: skip
    return small_config(folder / "run", bdev=[device], staging={"bytes": 48 * 5 * 4096})


# --- dying -----------------------------------------------------------------------------------------------------------


class DyingBdev:
    """Kills the process in its `last`-th operation (or write) from now, done by none, some or all of its bytes."""

    def __init__(self, inner: Bdev, path: Path, last: int, rng: random.Random) -> None:
        self._inner = inner
        self._path = path
        self._left = last
        self._only_writes = rng.random() < 0.7
        self._rng = rng

    @property
    def info(self) -> BdevInfo:
        return self._inner.info

    @property
    def stats(self) -> BdevStats:
        return self._inner.stats

    def _is_last(self, *, is_write: bool = False) -> bool:
        self._left -= is_write or not self._only_writes
        return self._left == 0

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        await self._inner.add_memory(memory, deadline)

    async def read_into(self, offset: int, buffers: Sequence[memoryview], deadline: float) -> None:
        if self._is_last():
            die()
        await self._inner.read_into(offset, buffers, deadline)

    async def write_from(
        self, offset: int, buffers: Sequence[memoryview], deadline: float, *, placement: int = 0
    ) -> None:
        if self._is_last(is_write=True):
            content = b"".join(buffers)
            part = self._rng.randrange(len(content)) // 512 * 512
            done = self._rng.choice([0, part, part, part, len(content)])
            with self._path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), content[:done], offset)
            die()
        await self._inner.write_from(offset, buffers, deadline, placement=placement)

    async def deallocate(self, offset: int, length: int, deadline: float) -> None:
        await self._inner.deallocate(offset, length, deadline)

    async def flush(self, deadline: float) -> None:
        if self._is_last():
            die()
        await self._inner.flush(deadline)

    async def drain(self) -> None:
        await self._inner.drain()

    async def aclose(self) -> None:
        await self._inner.aclose()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingNode(Node):
    def __init__(self, config: Config, path: Path, last: int, rng: random.Random) -> None:
        super().__init__(config)
        self._dying = path, last, rng

    async def _open_bdev(self, spec: BdevConfig) -> Bdev:
        return DyingBdev(await super()._open_bdev(spec), *self._dying)


# --- a life ----------------------------------------------------------------------------------------------------------


class Life:
    """One child's run."""

    def __init__(self, folder: Path, last: int, rng: random.Random) -> None:
        self._config = config_of(folder)
        self._journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._on_device = on_device(folder)
        self._rng = rng
        self._node = DyingNode(self._config, folder / "flash.img", last, rng)
        self._names = 0
        self._block_of = block_names(self._config)
        self.wrong = 0

    async def run(self, *, stay: bool) -> None:
        """Until death; without `stay`, only until everything was looked at."""
        fabrics = [self._rng.choice(["shm", "tcp"])]
        with trio.fail_after(30):
            async with serving(self._node) as node:
                node.index.on_dropped.append(self._note_dropped)
                self._note_places(node)
                spaces = spaces_of(self._config)
                async with connect(
                    node.gateway.endpoint, host="host-a", spaces=spaces, fabrics=fabrics
                ) as client:
                    await self._look_around(client, everything=not stay)
                    while stay:
                        await self._work(client)

    def _note(self, line: str) -> None:
        os.write(self._journal, line.encode() + b"\n")

    def _note_dropped(self, state: SpaceState, dropped: Dropped, reason: str) -> None:
        self._note("\n".join(f"-{self._block_of[key]}" for key in dropped.key_list()))

    def _note_places(self, node: Node) -> None:
        """Reclaim takes a staged block's place away, or gives it another."""
        index = node.index.spaces["s"].index
        clear, put = index.clear_extent, index.set_extent

        def clear_extent(block: int, shard: int) -> bool:
            self._note(f"-{self._block_of[index.key(block)]}")
            return clear(block, shard)

        def set_extent(block: int, shard: int, extent: int) -> None:
            put(block, shard, extent)
            self._note(f"+{self._block_of[index.key(block)]}")

        index.clear_extent, index.set_extent = clear_extent, set_extent  # type: ignore[method-assign]

    async def _look_around(self, client: Client, *, everything: bool) -> None:
        """Is what must be here here, and right?"""
        expected = sorted(b for b in self._on_device if self._on_device.issuperset(chain_of(b)))
        for orphan in self._on_device.difference(expected):  # the node forgot it at its start
            self._note(f"-{orphan}")
        sample = expected if everything else self._rng.sample(expected, min(CHECKED, len(expected)))
        index, log = self._node.index.spaces["s"].index, self._node.store.stores[0].stats().log
        found = {
            "expected": len(expected), "index": len(index), "rebuilt": self._node.rebuilt, "live": log.live_records,
            "usage": log.usage_bytes, "incarnation": self._node.store.incarnation,
        }  # fmt: skip
        index.check_integrity()
        self._node.store.stores[0].check_integrity()
        lost = [block for block in sample if await self._load(client, block) < len(chain_of(block))]
        self._note(json.dumps({**found, "checked": len(sample), "lost": lost, "wrong": self.wrong}))

    async def _load(self, client: Client, block: int) -> int:
        """Load a chain; how many of its blocks, from the root on, were served."""
        self._names += 1
        chain, name = chain_of(block), f"r{self._names}"
        found = await client.lookup("s", name, prompt(block))
        into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
        loaded = await client.load(name, 0, into) if into else []
        good = 0
        for number, answer, got in zip(chain, loaded, into, strict=False):
            if answer.is_ok and got != payload(number):
                self.wrong += 1
                self._note(json.dumps({"wrong": 1, "block": number}))
            good += answer.is_ok
        await client.cancel(name)
        return good

    async def _work(self, client: Client) -> None:
        """Store what is missing of some chain, and say so once the device has it."""
        block = 64 * self._rng.randrange(TREES) + self._rng.randint(1, TREE_BLOCKS)
        chain = chain_of(block)
        good = await self._load(client, block)
        if good < len(chain):
            await client.store(
                "s", f"w{self._names}", prompt(block), good, [payload(b) for b in chain[good:]]
            )
        while sum(self._node.intake.dirty.values()):  # noqa: ASYNC110
            await trio.sleep(0.0005)
        state = self._node.index.spaces["s"]
        ids = state.index.match(prompt(block)).tolist()
        written = [b for b, i in zip(chain, ids, strict=False) if state.extent_of(i, 0) >= 0]
        self._note("\n".join(f"+{b}" for b in written))
        await client.cancel(f"w{self._names}")


def block_names(config: Config) -> dict[bytes, int]:
    """Block key -> number."""
    fingerprint = config.to_space("s").fingerprint()
    return {
        chain_keys(fingerprint, ROOT_KEY, prompt(block), 4 * BLOCK_TOKENS)[-1]: block
        for tree in range(TREES)
        for block in range(64 * tree + 1, 64 * tree + 1 + TREE_BLOCKS)
    }


def entries(folder: Path) -> list[str]:
    """The journal's whole lines; the last one may be cut off by death."""
    try:
        return [line for line in (folder / "journal").read_text().split("\n")[:-1] if line]
    except FileNotFoundError:
        return []


def on_device(folder: Path) -> set[int]:
    """Blocks that were on the device and not dropped when the last life ended."""
    blocks: set[int] = set()
    for line in entries(folder):
        if line.startswith("+"):
            blocks.add(int(line[1:]))
        elif line.startswith("-"):
            blocks.discard(int(line[1:]))
    return blocks


# --- all lives -------------------------------------------------------------------------------------------------------


def live(folder: Path, last: int, rng: random.Random, *, stay: bool) -> NoReturn:
    """The child: one life. It ends by death, or (without `stay`) by itself once all was looked at."""
    code = 1
    try:
        trio.run(partial(Life(folder, last, rng).run, stay=stay))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def one_life(folder: Path, number: int, seed: int) -> int:
    """Odd ones are killed by us, even ones in a device operation. Their exit code."""
    rng = random.Random(seed * 1000 + number)
    by_us = number % 2 == 1
    last = NEVER if by_us else rng.randint(1, 60)
    child = os.fork()
    if child == 0:
        live(folder, last, rng, stay=True)
    if by_us:
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def last_life(folder: Path, seed: int) -> int:
    """Everything that must be there is looked at."""
    child = os.fork()
    if child == 0:
        live(folder, NEVER, random.Random(seed), stay=False)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, lives: int, seed: int) -> dict[str, object]:
    codes = [one_life(folder, number, seed) for number in range(lives)]
    codes.append(last_life(folder, seed))
    lines = entries(folder)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {
        "killed": codes.count(-signal.SIGKILL),
        "last": codes[-1],
        "written": sum(line.startswith("+") for line in lines),
        "dropped": sum(line.startswith("-") for line in lines),
        "looks": [look for look in found if "incarnation" in look],
        "wrong": [look for look in found if look.get("wrong")],
    }


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
