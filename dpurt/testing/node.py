"""A node in this process, for tests: small, on memory or a file, with hosts ``host-a`` and ``host-b`` and space ``s``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from dpurt.bdev import Bdev
from dpurt.config import BdevConfig, Config, config_from
from dpurt.core.identity import Space
from dpurt.node import Node
from dpurt.testing.faulty_bdev import FaultyBdev

N = TypeVar("N", bound=Node)
BLOCK_TOKENS = 16
PART_BYTES = 4096


def small_config(run_dir: Path, **tables: Any) -> Config:
    """A topology for tests; `tables` replace whole top-level tables."""
    tree: dict[str, Any] = {
        "node": {"name": "test", "run_dir": str(run_dir)},
        "gateway": {"bind": "tcp://127.0.0.1:0", "session_timeout_s": 2.0},
        "staging": {"bytes": 64 * 5 * 4096},
        "bdev": [
            {
                "name": "m",
                "kind": "memory",
                "size_bytes": 64 << 20,
                "segment_bytes": 1 << 20,
                "queue_depth": 8,
            }
        ],
        "tenant": [{"name": "t", "salt": "sixteen bytes or more"}],
        "space": [small_space("s")],
        "host": [small_host("host-a"), small_host("host-b")],
    }
    return config_from({**tree, **tables})


def small_space(name: str, **fields: Any) -> dict[str, Any]:
    """A space of 16-token blocks with four parts of 4 KiB."""
    groups = [
        {"name": f"g{i}", "num_layers": 2, "num_kv_heads": 2, "head_size": 16, "part_bytes": PART_BYTES}
        for i in range(4)
    ]
    space = {
        "name": name, "model": "m", "revision": "r", "kv_dtype": "fp16", "tenant": "t",
        "geometry": {"block_tokens": BLOCK_TOKENS, "groups": groups},
    }  # fmt: skip
    return {**space, **fields}


def small_host(name: str, **fields: Any) -> dict[str, Any]:
    """A host of space ``s`` over shm or tcp."""
    return {
        "name": name,
        "spaces": ["s"],
        "fabrics": ["shm", "tcp"],
        "inbound_bytes": 16 * 5 * 4096,
        **fields,
    }


class FaultyNode(Node):
    """A node whose device fails on request: `faulty`, once it runs."""

    faulty: FaultyBdev

    async def _open_bdev(self, spec: BdevConfig) -> Bdev:
        self.faulty = FaultyBdev(await super()._open_bdev(spec))
        return self.faulty


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    """A node that serves inside the block, and is drained at its end."""
    async with serving(Node(config)) as node:
        yield node


@asynccontextmanager
async def serving(node: N) -> AsyncIterator[N]:
    """As `running`, for a node made before."""
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        try:
            yield node
        finally:
            node.stop()


def spaces_of(config: Config) -> Mapping[str, Space]:
    """What a host needs to say hello."""
    return {space.name: config.to_space(space.name) for space in config.space}
