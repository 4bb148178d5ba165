"""The node's part of the SmolLM2 example: its topology, and a `ColdKv` that keeps cold KV in it.

A block's parts are the model's layers, so a layer's turn loads one part of each block it attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio

from dpurt.client import Client
from dpurt.engines.smollm2.decode import Ask, SparseSettings
from dpurt.engines.smollm2.model import Halves, Shape
from dpurt.errors import DpurtError

HOST, SPACE, REQUEST = "engine", "smollm2", "decode"
SPARE_SLOTS = 64
RECORD_SLOTS = 16  # of whole blocks, on their way to the device
BATCH = 16  # blocks a store
PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that answers no faster than this. `kind`: ``paced``, a file read with O_DIRECT; ``modelled``, memory; ``file``,
    a file as fast as it is."""

    kind: str
    latency_us: float
    bytes_per_s: int

    def read_s(self, num_bytes: int) -> float:
        """One read, when the device has nothing else to do."""
        return self.latency_us / 1e6 + num_bytes / self.bytes_per_s

    def as_toml(self, path: Path, size: int) -> str:
        """Its `[[bdev]]` table, without the name."""
        profile = (
            f"profile = {{ read_latency_us = {self.latency_us}, write_latency_us = 0, read_bytes_per_s = {self.bytes_per_s}, "
            f'write_bytes_per_s = {1 << 30}, jitter = 0.0, source = "chosen for the example" }}'
        )
        table = (
            f"size_bytes = {size}\ncapacity_bytes = {size}\nsegment_bytes = {size // 16}\nqueue_depth = 32\n"
        )
        if self.kind == "modelled":
            return f'kind = "modelled"\n{table}{profile}\n'
        return f'kind = "file"\npath = "{path}"\n{table}' + (f"{profile}\n" if self.kind == "paced" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the decode may stage and prefetch: slots of one layer's part, prefetches a turn, layers history looks ahead."""

    slots: int
    prefetch_per_turn: float
    history_ahead: int


def part_bytes(shape: Shape, block_tokens: int) -> int:
    """One layer's KV of a block, in float16."""
    return 2 * block_tokens * shape.kv_heads * shape.head_size * 2


def part_slot_bytes(shape: Shape, block_tokens: int) -> int:
    """What one part takes in decode staging, and what reading it moves: the record's header and the part."""
    return 4096 + -(-part_bytes(shape, block_tokens) // 4096) * 4096


def topology_of(
    shape: Shape, settings: SparseSettings, blocks: int, device: Device, budget: Budget, directory: Path
) -> str:
    """A node for so many cold blocks, as TOML."""
    part = part_bytes(shape, settings.block_tokens)
    record = 8192 + shape.layers * part
    store = max(64 << 20, -(-2 * blocks * record // (1 << 20)) * (1 << 20))
    groups = "\n".join(
        f'[[space.geometry.groups]]\nname = "layer-{layer}"\nnum_layers = 1\nnum_kv_heads = {shape.kv_heads}\n'
        f"head_size = {shape.head_size}\npart_bytes = {part}\n"
        for layer in range(shape.layers)
    )
    return f"""\
# Made by `dpurt smollm2`.
[node]
name = "smollm2"
run_dir = "{directory / "run"}"
log_level = "warning"

[gateway]
bind = "tcp://127.0.0.1:0"

[staging]
bytes = {RECORD_SLOTS * record}

[[bdev]]
name = "flash"
{device.as_toml(directory / "flash.img", store)}
[[tenant]]
name = "example"
salt = "example-salt-not-a-secret"

[[space]]
name = "{SPACE}"
model = "SmolLM2-135M-Instruct"
revision = "Q4_1"
kv_dtype = "fp16"
tenant = "example"

[space.decode]
staging_bytes = {budget.slots * part_slot_bytes(shape, settings.block_tokens)}
max_blocks = {blocks}
prefetch_per_turn = {budget.prefetch_per_turn}
lookahead_groups = {budget.history_ahead}
spare_slots = {SPARE_SLOTS}

[space.geometry]
block_tokens = {settings.block_tokens}

{groups}
[[host]]
name = "{HOST}"
spaces = ["{SPACE}"]
fabrics = ["shm", "tcp"]
inbound_bytes = {2 * BATCH * record}

[prefetch]
enabled = false
"""


@dataclass(slots=True)
class Found:
    """Of one turn: how many of its blocks were staged."""

    asked: int
    staged: int


class ReadTotals(NamedTuple):
    """How many parts a node has read so far, how long that took them, and the sum of the squares of that; how many plans
    it has made, and how long after their hints.
    """

    number: int
    seconds: float
    squares: float
    plans: int
    plan_seconds: float


@dataclass(slots=True)
class NodeKv:
    """Cold KV in a node. `found` has one entry a turn, `reads` one a `look`."""

    client: Client
    shape: Shape
    settings: SparseSettings
    found: list[Found] = field(default_factory=list)
    reads: list[ReadTotals] = field(default_factory=list)
    _room: Halves = field(init=False)

    def __post_init__(self) -> None:
        shape, settings = self.shape, self.settings
        self._room = np.empty(
            (settings.top, 2, settings.block_tokens, shape.kv_heads, shape.head_size), np.float16
        )

    async def put(self, tokens: Sequence[int], first: int, kv: Halves) -> None:
        """Raises DpurtError when the node does not take it."""
        shape, size = self.shape, self.settings.block_tokens
        blocks = kv.reshape(shape.layers, 2, -1, size, shape.kv_heads, shape.head_size)
        raw = np.array(tokens, np.dtype("<i4")).tobytes()
        for start in range(0, blocks.shape[2], BATCH):
            some = range(start, min(start + BATCH, blocks.shape[2]))
            payloads = [np.ascontiguousarray(blocks[:, :, block]).tobytes() for block in some]
            await self._store(raw, first + start, payloads)

    async def _store(self, tokens: bytes, first: int, payloads: list[bytes]) -> None:
        deadline = trio.current_time() + PATIENCE_S
        while True:
            statuses = await self.client.store(SPACE, REQUEST, tokens, first, payloads, timeout_s=PATIENCE_S)
            bad = set(statuses) - {"stored", "exists"}
            if not bad:
                return
            if bad != {"no_room"} or trio.current_time() > deadline:
                raise DpurtError(f"the node did not store blocks {first} and on: {', '.join(sorted(bad))}")
            await trio.sleep(0.02)

    async def get(self, ask: Ask) -> Halves:
        """Raises DpurtError when a block does not come."""
        await self.client.decode_step(
            REQUEST, ask.step, ask.layer, ask.blocks, masses=ask.codes,
            ranked=ask.ranked, ranked_group=ask.ranked_layer,
        )  # fmt: skip
        into = [memoryview(part).cast("B") for part in self._room[: len(ask.blocks)]]
        loaded = await self.client.load_blocks(
            REQUEST, ask.blocks, into, parts=(ask.layer, ask.layer + 1), timeout_s=PATIENCE_S
        )
        bad = [
            f"block {block}: {one.status} {one.reason}"
            for block, one in zip(ask.blocks, loaded, strict=True)
            if not one.is_ok
        ]
        if bad:
            raise DpurtError(f"step {ask.step}, layer {ask.layer}: {'; '.join(bad)}")
        self.found.append(Found(len(loaded), sum(one.source == "staging" for one in loaded)))
        kv: Halves = self._room[: len(ask.blocks)].transpose(1, 0, 2, 3, 4)
        return kv.reshape(2, -1, self.shape.kv_heads, self.shape.head_size)

    async def look(self) -> None:
        """Note how many parts the node has read, and how long they took."""
        stats: Any = await self.client.stats()
        own = stats["decode"][SPACE]
        self.reads.append(
            ReadTotals(own["reads"], own["read_s"], own["read_s_squares"], own["plans"], own["plan_s"])
        )

    async def settle(self) -> None:
        """Wait until the device has all that was put."""
        with trio.fail_after(PATIENCE_S):
            while (await self.client.stats())["intake"]["dirty"]:  # type: ignore[index]  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)
