"""LMCache's real multi-process server with dpurt as its L2, a real `dpurt serve` on a file. No GPU: KV tensors in CPU memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpurt.demo.nodes import NodeProcess

sys.path.insert(0, str(Path(__file__).parent))  # for `server`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # LMCache's, at import


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts a node for a space, its topology in ``node.toml``; it ends with the test."""
    from server import free_port, space_table, write_topology

    nodes: list[NodeProcess] = []

    def start(space: str | None = None, **options: str) -> NodeProcess:
        path = write_topology(tmp_path / "node.toml", space or space_table(), free_port(), **options)
        node = NodeProcess(path, tmp_path / "run", tmp_path / "node.log")
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.__exit__()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts an LMCache server with dpurt as L2; it ends with the test."""
    from server import Server, adapter_config, command_line

    servers: list[Server] = []

    def start(topology: Path | None = None, **params: Any) -> Server:
        adapter = adapter_config(topology or tmp_path / "node.toml", **params)
        server = Server(tmp_path, command_line(adapter))
        servers.append(server)
        server.wait_until_up()
        return server

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """Connects an engine to a server; it leaves with the test."""
    from server import Engine

    engines: list[Engine] = []

    def connect(server: Any, num_chunks: int = 6, tp_size: int = 1) -> Engine:
        engines.append(Engine(server, num_chunks, tp_size=tp_size))
        return engines[-1]

    yield connect
    for one in engines:
        one.close()
