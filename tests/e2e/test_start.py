"""How a node starts and ends: what is on a device is found before it is touched, and no stale door is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dpurt.config import Config
from dpurt.errors import BdevError, ConfigError
from dpurt.node import Node
from dpurt.testing.node import running, serving, small_config

MIB = 1 << 20


def on_file(folder: Path, **fields: object) -> Config:
    bdev = {
        "name": "flash", "kind": "file", "path": str(folder / "kv.img"), "size_bytes": 16 * MIB, "segment_bytes": MIB,
        "queue_depth": 8,
    }  # fmt: skip
    return small_config(folder / "run", bdev=[{**bdev, **fields}])


@pytest.mark.parametrize("at", [0, 3 * MIB - 1])
async def test_somebody_elses_file_is_refused_and_not_even_grown(at: int, tmp_path: Path) -> None:
    content = bytearray(3 * MIB)
    content[at] = 1
    file = trio.Path(tmp_path / "kv.img")
    await file.write_bytes(content)
    with pytest.raises(ConfigError, match="serve --format"):
        await Node(on_file(tmp_path)).run()
    assert await file.read_bytes() == content


async def test_a_node_that_may_format_makes_a_store_of_it_and_keeps_a_store(tmp_path: Path) -> None:
    await trio.Path(tmp_path / "kv.img").write_bytes(b"x" * 3 * MIB)
    for life in (1, 2):
        async with serving(Node(on_file(tmp_path), may_format=True)) as node:
            assert node.store.incarnation == life
    async with running(on_file(tmp_path)) as node:
        assert node.store.incarnation == 3


async def test_a_missing_device_is_said_not_made(tmp_path: Path) -> None:
    with pytest.raises(BdevError, match="no block device"):
        await Node(on_file(tmp_path, path="/dev/null")).run()


async def test_a_file_follows_its_cap_when_the_free_space_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([8 * MIB + 5, 8 * MIB + 5, 9 * MIB])
    monkeypatch.setattr("dpurt.config.schema.safe_bytes", lambda path: next(free, 10 * MIB))
    async with running(on_file(tmp_path)):
        size = (await trio.Path(tmp_path / "kv.img").stat()).st_size
    assert 8 * MIB <= size < 9 * MIB


async def test_the_admin_socket_goes_with_its_node(tmp_path: Path) -> None:
    config = on_file(tmp_path)
    async with running(config):
        assert await trio.Path(config.node.run_path / "admin.sock").exists()
    assert not await trio.Path(config.node.run_path / "admin.sock").exists()


@pytest.mark.parametrize("page", ["metrics", "router"])
async def test_a_page_whose_port_is_taken_is_said_by_its_address(page: str, tmp_path: Path) -> None:
    [taken] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    bind = f"127.0.0.1:{taken.socket.getsockname()[1]}"
    said = pytest.RaisesExc(ConfigError, match=f"^{bind}: cannot bind: Address already in use$")
    with pytest.RaisesGroup(said, flatten_subgroups=True):
        await Node(small_config(tmp_path / "run", **{page: {"bind": bind}})).run()
    await taken.aclose()
