"""A node in this process and real clients over real sockets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import trio

from dpurt.client import connect
from dpurt.core.identity import Space
from dpurt.demo.content import payload_of, tokens_of
from dpurt.node import Node
from dpurt.testing.node import BLOCK_TOKENS, running, small_config, spaces_of

PAYLOAD = 4 * 4096


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAYLOAD)) for _ in range(count)]


@pytest.fixture(params=["shm", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_what_one_host_stores_another_loads(tmp_path: Path, fabric: str) -> None:
    config = small_config(tmp_path / "run")
    tokens = tokens_of(range(5), BLOCK_TOKENS)
    with trio.fail_after(20):
        async with running(config) as node:
            spaces = spaces_of(config)
            async with connect(node.gateway.endpoint, host="host-a", spaces=spaces, fabrics=[fabric]) as a:
                assert (await a.lookup("s", "r1", tokens)).matched_blocks == 0
                stored = await a.store("s", "r1", tokens, 0, [payload(i) for i in range(5)])
                assert stored == ["stored"] * 5
            async with connect(node.gateway.endpoint, host="host-b", spaces=spaces, fabrics=[fabric]) as b:
                found = await b.lookup("s", "r2", tokens + tokens_of([99], BLOCK_TOKENS))
                assert (found.matched_blocks, found.matched_tokens) == (5, 80)
                into = buffers(5)
                loaded = await b.load("r2", 0, into)
                assert [block.status for block in loaded] == ["ok"] * 5
                assert [bytes(view) for view in into] == [payload(i) for i in range(5)]
                assert await b.store("s", "r2", tokens, 0, [payload(i) for i in range(5)]) == ["exists"] * 5
