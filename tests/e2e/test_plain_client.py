"""A client without dpurt: what the protocol's description promises to other languages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from dpurt.testing.node import running, small_config, small_host, small_space

PLAIN = Path(__file__).with_name("plain_client.py")
TABLES = {
    "space": [
        small_space(
            "s",
            geometry={
                "block_tokens": 4,
                "groups": [
                    {"name": "g", "num_layers": 1, "num_kv_heads": 1, "head_size": 8, "part_bytes": 8192}
                ],
            },
        )
    ],
    "host": [small_host("plain")],
}


def test_a_client_fits_in_sixty_lines_of_pyzmq_and_msgpack() -> None:
    source = PLAIN.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 60
    imported = {
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported - sys.stdlib_module_names == {"zmq", "msgpack"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(source)))


@pytest.mark.slow
async def test_a_plain_client_stores_a_block_and_loads_it_back(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with running(small_config(tmp_path / "run", **TABLES)) as node:
            command = [sys.executable, str(PLAIN), node.gateway.endpoint]
            done = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=tmp_path
            )
            assert done.returncode == 0, done.stdout
            assert done.stdout == b"the block came back, byte for byte\n"
            counters = node.gateway.hosts.by_host["plain"]
            assert (counters.stored, counters.staging, counters.bytes_loaded) == (1, 1, 8192)
            assert node.staging.slabs[0].pool.stats().leases == 0
