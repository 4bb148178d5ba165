"""Sparse decode against a live node: hints, part-sized staging, loads of scattered blocks, what is prefetched and what is not.

The space has four layer groups, 24 blocks are on the device, and a sequence may stage 32 of its 96 parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.client import BlockingClient, Client, LoadedBlock
from dpurt.errors import ConfigError, RemoteProtocolError
from dpurt.node import Node
from dpurt.testing.faulty_bdev import Fault
from dpurt.testing.node import PART_BYTES, FaultyNode, serving, small_config, small_space, spaces_of
from dpurt.testing.node_steps import (
    assert_books_balance,
    buffers,
    empty_staging,
    host,
    node_and_host,
    payload,
    statuses,
    store,
    tokens,
    until,
)
from dpurt.wire import messages as m

BLOCKS = tuple(range(1, 25))
GROUPS = 4
PART_SLOT = PART_BYTES + 4096
SHARE = 32


def decode_table(**fields: Any) -> dict[str, Any]:
    return {"staging_bytes": SHARE * PART_SLOT, "spare_slots": 16, "max_blocks": 64, **fields}


@asynccontextmanager
async def decoding(tmp_path: Path, fabric: str = "shm", **decode: Any) -> AsyncIterator[tuple[Node, Client]]:
    """A node with decode staging, the blocks stored and on the device only, request ``r`` looked up."""
    space = small_space("s", decode=decode_table(**decode))
    async with node_and_host(tmp_path, fabric, space=[space], prefetch={"enabled": False}) as (node, client):
        await store_all(client)
        await empty_staging(node)
        assert (await client.lookup("s", "r", tokens(*BLOCKS))).matched_blocks == len(BLOCKS)
        yield node, client


async def store_all(client: Client) -> None:
    """In batches that the host's inbound region holds."""
    for first in range(0, len(BLOCKS), 8):
        some = [payload(block) for block in BLOCKS[first : first + 8]]
        assert await client.store("s", "r", tokens(*BLOCKS), first, some) == ["stored"] * len(some)


def part(block: int, group: int) -> bytes:
    return payload(BLOCKS[block])[group * PART_BYTES : (group + 1) * PART_BYTES]


async def take(client: Client, blocks: Sequence[int], group: int) -> list[LoadedBlock]:
    """Load parts; those that are ok have the right bytes."""
    loaded = await client.load_blocks("r", blocks, buffers(len(blocks), PART_BYTES), parts=(group, group + 1))
    for one, block in zip(loaded, blocks, strict=True):
        assert not one.is_ok or (one.data is not None and bytes(one.data) == part(block, group))
    return loaded


async def step(client: Client, number: int, group: int, blocks: Sequence[int], **more: Any) -> list[str]:
    """One group's turn as an engine has it; where each block came from."""
    await client.decode_step("r", number, group, blocks, **more)
    loaded = await take(client, blocks, group)
    assert statuses(loaded) == ["ok"] * len(blocks)
    return [one.source for one in loaded]


def counts(node: Node) -> dict[str, Any]:
    found = node.decode.stats()["s"]
    assert isinstance(found, dict)
    return found


def assert_adds_up(node: Node) -> None:
    c = counts(node)
    ended = c["timely"] + c["late"] + c["later"] + c["early"] + c["useless"] + c["cancelled"] + c["open"]
    assert c["issued"] == ended
    for sequence in node.decode._sequences.values():
        sequence.staging.pool.check_integrity()


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_scattered_parts_come_with_the_right_bytes_and_are_staged_for_the_next_step(
    tmp_path: Path, fabric: str
) -> None:
    async with decoding(tmp_path, fabric, prefetch_per_turn=0) as (node, client):
        assert await step(client, 0, 2, [17, 3, 9]) == ["nvme"] * 3
        assert await step(client, 1, 2, [9, 3, 20]) == ["staging", "staging", "nvme"]
        assert await step(client, 1, 3, [9, 3]) == ["nvme"] * 2, "another group's parts are others"
        assert counts(node)["demanded"] == 8
        assert counts(node)["hits"] == 2
        assert_adds_up(node)


async def test_blocks_ranked_for_a_group_ahead_are_there_at_its_turn(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        found = []
        for number in range(20):  # it learns what a ranking is worth
            ranked = [(7 * number + i) % 24 for i in range(3)]
            await step(client, number, 0, [1, 2], ranked=ranked, ranked_group=1)
            await until(lambda: node.storage.is_quiet)
            found.append(await step(client, number, 1, ranked))
        assert found[5:] == [["staging"] * 3] * 15
        assert counts(node)["timely"] > 20
        assert_adds_up(node)


async def test_history_alone_brings_back_what_a_group_always_wants(tmp_path: Path) -> None:
    async with decoding(tmp_path, staging_bytes=GROUPS * 3 * PART_SLOT) as (node, client):
        found: list[str] = []
        for number in range(30):
            for group in range(GROUPS):
                blocks = [4 * group, 4 * group + 1, (7 * number + group) % 24]
                sources = await step(client, number, group, list(dict.fromkeys(blocks)))
                found += sources[:2] if number >= 10 else []
        assert found.count("staging") > 0.9 * len(found)
        assert_adds_up(node)


async def test_the_share_is_kept_whatever_is_touched(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        for number in range(6):
            for group in range(GROUPS):
                blocks = [(5 * number + group + i) % 24 for i in range(12)]
                await step(client, number, group, blocks, masses=bytes(range(12)))
        [sequence] = node.decode._sequences.values()
        await until(lambda: node.storage.is_quiet)
        assert len(sequence.staging.pool) <= SHARE
        mapped = sum(
            sequence.pool.find(sequence.key(slot)) is not None
            for slot in range(GROUPS * sequence.staging.width)
        )
        assert mapped <= SHARE + len(sequence.leaving)
        assert counts(node)["no_room"] == 0
        assert_adds_up(node)


async def test_a_load_without_a_hint_is_a_turn_of_its_own(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        await client.decode_step("r", 0, 0, [1])
        assert statuses(await take(client, [6, 2], 1)) == ["ok", "ok"]
        assert statuses(await take(client, [2, 6], 1)) == ["ok", "ok"]
        assert counts(node)["hits"] >= 1
        assert_adds_up(node)


async def test_a_prefetch_nobody_wants_and_that_waits_is_not_read(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        await step(client, 0, 0, [1])
        [sequence] = node.decode._sequences.values()
        before = dict(node.storage.read_status)
        plan = sequence.staging.plan(1, [])  # planned, and never given to the device
        assert len(plan.fetch) > 2
        await client.decode_step("r", 0, 1, [plan.fetch[0] % 64])
        await take(client, [plan.fetch[0] % 64], 1)
        assert counts(node)["cancelled"] == len(plan.fetch) - 1
        assert counts(node)["late"] == 1
        assert node.storage.read_status["ok"] <= before["ok"] + 1 + 10, "the wanted one, and the next plan's"
        assert_adds_up(node)


async def test_the_end_of_a_request_frees_its_share_for_the_next(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        await step(client, 0, 0, [1, 2, 3])
        await client.lookup("s", "other", tokens(*BLOCKS))
        await client.decode_step("other", 0, 0, [1])
        await client.stats()
        assert counts(node)["unserved"] == 1
        assert await client.cancel("r") == 0
        assert counts(node)["free"] == counts(node)["slots"]
        assert counts(node)["sequences"] == 0
        await client.decode_step("other", 0, 0, [5])
        await client.stats()
        assert counts(node)["sequences"] == 1
        assert counts(node)["demanded"] == 4, "of both sequences"


async def test_a_block_stored_during_the_decode_can_be_touched_at_once(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (_, client):
        await step(client, 0, 0, [1])
        longer = tokens(*BLOCKS, 77)
        assert await client.store("s", "r", longer, len(BLOCKS), [payload(77)]) == ["stored"]
        await client.decode_step("r", 1, 1, [len(BLOCKS)])
        [loaded] = await client.load_blocks("r", [len(BLOCKS)], buffers(1, PART_BYTES), parts=(1, 2))
        assert loaded.data is not None
        assert bytes(loaded.data) == payload(77)[PART_BYTES : 2 * PART_BYTES]


async def test_a_lost_block_is_a_miss_not_old_bytes(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, client):
        await step(client, 0, 0, [3, 20])
        state = node.index.spaces["s"]
        block_id = int(state.index.match(tokens(*BLOCKS))[20])
        node.index.drop(state, block_id, "checksum", trio.current_time())
        await client.decode_step("r", 1, 0, [3, 20])
        assert statuses(await take(client, [3, 20], 0)) == ["ok", "miss"]
        assert_adds_up(node)


async def test_a_read_that_fails_is_an_error_this_time_and_tried_again_the_next(tmp_path: Path) -> None:
    space = small_space("s", decode=decode_table(prefetch_per_turn=0))
    config = small_config(tmp_path / "run", space=[space], prefetch={"enabled": False})
    with trio.fail_after(20):
        async with serving(FaultyNode(config)) as node, host(node, config) as client:
            await store_all(client)
            await empty_staging(node)
            await client.lookup("s", "r", tokens(*BLOCKS))
            node.faulty.inject(Fault(op="read", kind="error", count=2))
            assert statuses(await take(client, [3], 2)) == ["error"]
            node.faulty.inject(Fault(op="read", kind="corrupt", count=2, at=None))
            assert statuses(await take(client, [5], 2)) == ["checksum"]
            node.faulty.clear()
            assert await step(client, 2, 2, [3, 4]) == ["nvme"] * 2
            assert_adds_up(node)
            assert_books_balance(node)


async def test_a_device_that_hangs_costs_the_load_its_deadline_and_keeps_its_slot(tmp_path: Path) -> None:
    space = small_space("s", decode=decode_table(prefetch_per_turn=0))
    config = small_config(tmp_path / "run", space=[space], prefetch={"enabled": False})
    with trio.fail_after(20):
        async with serving(FaultyNode(config)) as node, host(node, config) as client:
            await store_all(client)
            await empty_staging(node)
            await client.lookup("s", "r", tokens(*BLOCKS))
            node.faulty.inject(Fault(op="read", kind="hang", count=2))
            await client.decode_step("r", 0, 0, [3])
            [late] = await client.load_blocks("r", [3], buffers(1, PART_BYTES), parts=(0, 1), timeout_s=0.2)
            assert late.status == "late"
            assert await client.cancel("r") == 0
            assert counts(node)["free"] == counts(node)["slots"] - 1, "the device may still write it"
            node.faulty.resume()
            await until(lambda: counts(node)["free"] == counts(node)["slots"])


async def test_whole_blocks_and_spaces_without_decode_staging_go_the_ordinary_way(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (_, client):
        await step(client, 0, 0, [1])
        into = buffers(3)
        loaded = await client.load_blocks("r", [20, 1, 8], into)
        assert [bytes(one.data or b"") for one in loaded] == [payload(BLOCKS[i]) for i in (20, 1, 8)]
    async with node_and_host(tmp_path / "plain") as (_, client):
        await store(client, "r", *BLOCKS[:6])
        loaded = await client.load_blocks("r", [5, 0, 9], buffers(3, PART_BYTES), parts=(2, 3))
        assert statuses(loaded) == ["ok", "ok", "miss"]
        assert loaded[0].data is not None
        assert bytes(loaded[0].data) == part(5, 2)


async def test_a_hint_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (_, client):
        for wrong in (
            {"touched": [1], "masses": b"\0\1"},
            {"group": GROUPS},
            {"ranked": [1], "ranked_group": GROUPS},
            {"touched": [1], "shard": 1},
        ):
            hint = m.Hint(request="r", kind="decode", **wrong)  # type: ignore[arg-type]
            with pytest.raises(RemoteProtocolError, match="malformed"):
                await client._talk.call(hint, m.Ok)


async def test_without_decode_staging_the_attention_predictor_prefetches_ranked_parts(tmp_path: Path) -> None:
    prefetch = {"predictors": ["attention"]}
    async with node_and_host(tmp_path, prefetch=prefetch) as (node, client):
        await store_all(client)
        await client.lookup("s", "r", tokens(*BLOCKS))
        await empty_staging(node)
        for number in range(3):
            await client.decode_step("r", number, 0, [1, 2], ranked=[7, 11], ranked_group=1, need_s=0.05)
        refs = node.index.spaces["s"].refs(
            next(iter(node.gateway.hosts.sessions.values())).scopes["r"].handles[[7, 11]].tolist(), 0
        )
        await until(lambda: all(node.staging.where(ref, 1 << 1) == "staging" for ref in refs))
        assert node.prefetch.core is not None
        assert "attention" in node.prefetch.core.ledger.predictors()


async def test_the_blocking_client_keeps_hints_before_their_loads(tmp_path: Path) -> None:
    async with decoding(tmp_path) as (node, _):
        config = node.config

        def decode() -> None:
            with BlockingClient(node.gateway.endpoint, host="host-b", spaces=spaces_of(config)) as client:
                client.lookup("s", "b", tokens(*BLOCKS))
                for number in range(10):
                    into = [bytearray(PART_BYTES) for _ in range(3)]
                    client.decode_step("b", number, 0, [4, 9, 14])
                    client.load_blocks("b", [4, 9, 14], into, parts=(0, 1))

        await trio.to_thread.run_sync(decode)
        assert counts(node)["demanded"] == 30, "no load came before its hint, to be a turn of its own"


def test_decode_staging_too_small_for_its_groups_is_refused(tmp_path: Path) -> None:
    space = small_space("s", decode=decode_table(staging_bytes=3 * PART_SLOT))
    with pytest.raises(ConfigError, match=r"decode\.staging_bytes"):
        small_config(tmp_path, space=[space])


async def test_a_load_of_another_rank_gets_that_ranks_parts_or_none(tmp_path: Path) -> None:
    space = small_space("s", tp_size=2, decode=decode_table())
    async with node_and_host(tmp_path, "tcp", space=[space], prefetch={"enabled": False}) as (_, client):
        prompt = tokens(1, 2, 3)
        kv = [[payload(10 * shard + block) for block in (1, 2, 3)] for shard in (0, 1)]
        for shard in (0, 1):
            stored = await client.store("s", f"w{shard}", prompt, 0, kv[shard], shard=shard)
            assert stored == ["stored"] * 3

        async def check(shard: int, group: int) -> None:
            into = buffers(2, PART_BYTES)
            loaded = await client.load_blocks("r", [1, 2], into, parts=(group, group + 1), shard=shard)
            assert statuses(loaded) == ["ok", "ok"]
            cut = slice(group * PART_BYTES, (group + 1) * PART_BYTES)
            assert [bytes(one) for one in into] == [kv[shard][1][cut], kv[shard][2][cut]]

        await client.lookup("s", "r", prompt)
        await client.decode_step("r", 1, 0, [1, 2])
        await check(0, 0)
        await check(1, 0)
        await client.lookup("s", "r", prompt, shard=1)
        await check(1, 0)
        await client.decode_step("r", 2, 0, [1, 2], shard=1)
        await check(1, 0)
        await check(1, 2)
        await client.lookup("s", "r", prompt)
        await client.decode_step("r", 3, 0, [1, 2])
        await check(0, 0)


async def test_a_request_looked_up_by_a_shorter_form_of_its_prompt_decodes_on(tmp_path: Path) -> None:
    async with decoding(tmp_path, prefetch_per_turn=0) as (node, client):
        await step(client, 0, 1, [1, 13])
        assert (await client.lookup("s", "r", tokens(*BLOCKS[:8]))).matched_blocks == 8
        assert await step(client, 1, 2, [2, 20]) == ["nvme", "nvme"]
        assert await step(client, 2, 1, [2, 13]) == ["nvme", "staging"]
        assert node.gateway.restarts == 0
        state = node.index.spaces["s"]
        block_id = int(node.index.match(state, tokens(*BLOCKS), None)[13])
        node.index.drop(state, block_id, "checksum", trio.current_time())
        assert statuses(await take(client, [2, 13], 1)) == ["ok", "miss"], (
            "what is dropped leaves, in the index or not"
        )
        assert_adds_up(node)
