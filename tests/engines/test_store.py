"""`DigestStore`, what storage hooks share: batches by digest, never an exception, always within a budget."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from dpurt.config import Config
from dpurt.core.identity import Space
from dpurt.engines.store import (
    Access,
    Budgets,
    DigestStore,
    HookSettings,
    NodeSettings,
    access_from,
    settings_from,
)
from dpurt.engines.store import digest_store as module
from dpurt.errors import ConfigError
from dpurt.node import Node
from dpurt.testing.node import running, small_config, small_space, spaces_of
from dpurt.testing.node_steps import (
    PAYLOAD,
    assert_books_balance,
    empty_staging,
    file_bdev,
    payload,
    until,
)

T = TypeVar("T")
QUICK = Budgets(find_s=0.3, load_s=0.3, store_s=0.3)


def digests(*blocks: int) -> list[bytes]:
    return [block.to_bytes(32, "little") for block in blocks]


def rooms(count: int) -> list[list[memoryview]]:
    """Two buffers a block, as K and V lie apart."""
    return [[memoryview(bytearray(PAYLOAD // 2)) for _ in range(2)] for _ in range(count)]


def payloads(*blocks: int) -> list[list[memoryview]]:
    return [[view[: PAYLOAD // 2], view[PAYLOAD // 2 :]] for view in (memoryview(payload(b)) for b in blocks)]


def content(room: list[memoryview]) -> bytes:
    return b"".join(room)


async def ask(call: Callable[[], T]) -> T:
    """An engine's thread."""
    return await trio.to_thread.run_sync(call)


def access(endpoint: str, config: Config) -> Access:
    return Access(endpoint, "host-a", ("shm",), "t", config.to_space("s").salt, None, config)


def store_of(endpoint: str, config: Config, **options: Any) -> DigestStore:
    space = options.pop("space", None) or spaces_of(config)["s"]
    return DigestStore(access(endpoint, config), "s", space, **options)


@asynccontextmanager
async def node_and_store(
    tmp_path: Path, *, space: Callable[[Space], Space] = lambda space: space, **tables: Any
) -> AsyncIterator[tuple[Node, DigestStore]]:
    config = small_config(tmp_path / "run", **tables)
    async with running(config) as node:
        store = store_of(node.gateway.endpoint, config, space=space(spaces_of(config)["s"]))
        try:
            yield node, store
        finally:
            await ask(store.close)
        assert_books_balance(node)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scopes(node: Node) -> int:
    return sum(len(session.scopes) for session in node.gateway.hosts.sessions.values())


# --- batches ---


async def test_what_was_put_is_found_and_got_with_equal_bytes(tmp_path: Path) -> None:
    async with node_and_store(tmp_path) as (node, store):
        assert await ask(store.put(digests(1, 2), payloads(1, 2)).wait) == [True, True]
        await empty_staging(node)
        assert await ask(store.find(digests(0, 1, 2)).wait) == [False, True, True]
        into = rooms(3)
        assert await ask(store.get(digests(2, 7, 1), into).wait) == [True, False, True]
        assert [content(into[0]), content(into[2])] == [payload(2), payload(1)]
        counted = store.stats()
        assert (counted["state"], counted["loaded"], counted["stored"]) == ("up", 2, 2)
        assert counted["bytes_loaded"] == 2 * PAYLOAD


async def test_a_batch_larger_than_staging_and_inbound_goes_in_windows(tmp_path: Path) -> None:
    tables = {"staging": {"bytes": 24 * (PAYLOAD + 4096)}}
    async with node_and_store(tmp_path, **tables) as (node, store):
        blocks = range(100)
        assert all(await ask(store.put(digests(*blocks), payloads(*blocks)).wait))
        await empty_staging(node)
        into = rooms(100)
        store._window = lambda limit=16: min(limit, 16)  # type: ignore[method-assign]
        assert all(await ask(store.get(digests(*blocks), into).wait))
        assert [content(room) for room in into] == [payload(block) for block in blocks]


async def test_a_get_uses_the_scope_that_found_its_blocks_and_ends_it(tmp_path: Path) -> None:
    async with node_and_store(tmp_path) as (node, store):
        await ask(store.put(digests(1, 2, 3), payloads(1, 2, 3)).wait)
        await until(lambda: scopes(node) == 0)
        await ask(store.find(digests(1, 2, 3, 4)).wait)
        assert scopes(node) == 1
        lookups = node.gateway.hosts.by_host["host-a"].lookups
        assert await ask(store.get(digests(1, 2, 3), rooms(3)).wait) == [True] * 3
        assert node.gateway.hosts.by_host["host-a"].lookups == lookups
        await until(lambda: scopes(node) == 0)


async def test_scopes_whose_get_never_comes_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SCOPES", 2)
    async with node_and_store(tmp_path) as (node, store):
        await ask(store.put(digests(*range(6)), payloads(*range(6))).wait)
        for block in range(6):
            await ask(store.find(digests(block)).wait)
        await ask(store.find(digests(77)).wait)
        await until(lambda: scopes(node) == 2)


async def test_a_probe_and_a_miss_leave_no_scope(tmp_path: Path) -> None:
    async with node_and_store(tmp_path) as (node, store):
        await ask(store.put(digests(1), payloads(1)).wait)
        assert await ask(store.find(digests(1), will_load=False).wait) == [True]
        assert await ask(store.find(digests(2)).wait) == [False]
        assert await ask(store.find([]).wait) == []
        await until(lambda: scopes(node) == 0)


async def test_deleted_blocks_are_misses(tmp_path: Path) -> None:
    async with node_and_store(tmp_path) as (_, store):
        await ask(store.put(digests(1, 2), payloads(1, 2)).wait)
        assert await ask(store.delete(digests(1, 9)).wait) == [True, True]
        assert store.stats()["deleted"] == 1
        assert await ask(store.find(digests(1, 2)).wait) == [False, True]


async def test_an_answer_can_be_taken_by_a_callback(tmp_path: Path) -> None:
    async with node_and_store(tmp_path) as (_, store):
        seen: list[list[bool]] = []
        store.put(digests(1), payloads(1)).then(seen.append)
        await until(lambda: seen == [[True]])


# --- when all is not well ---


async def test_without_a_node_everything_is_a_miss_within_its_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(tmp_path / "run")
    store = store_of(f"tcp://127.0.0.1:{free_port()}", config, budgets=QUICK)
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "dpurt.engines"):
        assert await ask(store.find(digests(1)).wait) == [False]
        assert await ask(store.get(digests(1), rooms(1)).wait) == [False]
        assert await ask(store.put(digests(1), payloads(1)).wait) == [False]
        assert await ask(store.delete(digests(1)).wait) == [False]
    assert time.monotonic() - began < 3
    assert store.state == "down"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    await ask(store.close)
    assert await ask(store.find(digests(1)).wait) == [False]


async def test_a_node_that_restarts_is_used_again_and_has_what_was_stored(tmp_path: Path) -> None:
    gateway = {"bind": f"tcp://127.0.0.1:{free_port()}", "session_timeout_s": 2.0}
    config = small_config(tmp_path / "run", gateway=gateway, **file_bdev(tmp_path / "disk"))
    store = store_of(config.gateway.bind, config)
    async with running(config):
        await ask(store.put(digests(1, 2), payloads(1, 2)).wait)
        assert await ask(store.find(digests(1, 2)).wait) == [True, True]
    async with running(config):
        into = rooms(2)
        assert await ask(store.get(digests(1, 2), into).wait) == [True, True]
        assert [content(room) for room in into] == [payload(1), payload(2)]
        await ask(store.close)


async def test_a_refusal_names_the_field_and_both_values_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def other(space: Space) -> Space:
        return replace(space, kv_dtype="fp8")

    with caplog.at_level(logging.INFO, "dpurt.engines"):
        async with node_and_store(tmp_path, space=other) as (_, store):
            store.greet()
            await until(lambda: store.state == "refused")
            assert await ask(store.find(digests(1)).wait) == [False]
            assert "'kv_dtype' differs: node has 'fp16', host has 'fp8'" in store.refusal
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert store.refusal in caplog.text


async def test_ranks_that_store_their_shards_make_a_block_whole(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", space=[small_space("s", tp_size=2)])
    async with running(config) as node:
        ranks = [store_of(node.gateway.endpoint, config, shard=shard) for shard in (0, 1)]
        await ask(ranks[0].put(digests(1), payloads(10)).wait)
        assert await ask(ranks[0].find(digests(1), will_load=False).wait) == [False]
        await ask(ranks[1].put(digests(1), payloads(11)).wait)
        for shard, rank in enumerate(ranks):
            into = rooms(1)
            assert await ask(rank.get(digests(1), into).wait) == [True]
            assert content(into[0]) == payload(10 + shard)
            await ask(rank.close)


# --- settings ---


def test_settings_say_where_they_are_wrong() -> None:
    with pytest.raises(ConfigError, match=r"--extra: .*\$\.load_s"):
        settings_from("--extra", {"load_s": -1}, HookSettings)
    with pytest.raises(ConfigError, match=r"--extra: .*`typo`"):
        settings_from("--extra", {"typo": 1}, NodeSettings)


def test_access_comes_from_a_topology_or_from_single_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = access_from("-", NodeSettings(topology="laptop"), "llama-3.2-1b")
    assert (found.endpoint, found.tenant) == ("tcp://127.0.0.1:7571", "demo")
    with pytest.raises(ConfigError, match=r"no space 'other' in laptop, which has: llama-3.2-1b"):
        access_from("-", NodeSettings(topology="laptop"), "other")
    with pytest.raises(ConfigError, match="give `topology`, or `endpoint` and `tenant`"):
        access_from("-", NodeSettings(endpoint="tcp://127.0.0.1:1"), "s")
    single = NodeSettings(endpoint="tcp://127.0.0.1:1", tenant="t", salt_env="DPURT_TEST_SALT")
    with pytest.raises(ConfigError, match="DPURT_TEST_SALT is not set"):
        access_from("-", single, "s")
    monkeypatch.setenv("DPURT_TEST_SALT", "sixteen bytes or more")
    assert access_from("-", single, "s").salt == b"sixteen bytes or more"
    with pytest.raises(ConfigError, match="`salt_file` or `salt_env`"):
        access_from("-", NodeSettings(endpoint="tcp://127.0.0.1:1", tenant="t"), "s")
