"""The SGLang backend's pure parts: identity of a page, deadlines by prefetch policy, pages as buffers."""

from __future__ import annotations

import ctypes
import dataclasses
import tomllib

import pytest

from dpurt.config import config_from
from dpurt.core.identity import Space, check_same_space
from dpurt.engines.sglang.budget import LoadBudget, Policy
from dpurt.engines.sglang.identity import (
    PoolFacts,
    Ranks,
    UnsupportedPool,
    digests_of,
    space_of,
    topology_table,
)
from dpurt.engines.sglang.pages import page_buffers
from dpurt.errors import SpaceMismatch

FACTS = PoolFacts(
    page_size=16, layout="page_first", dtype="torch.bfloat16", num_layers=3, num_kv_heads=2, head_size=16,
    buffer_bytes=(3072, 3072),
)  # fmt: skip

REST_OF_A_TOPOLOGY = """
[node]
name = "n"
[staging]
bytes = "16 MiB"
[[bdev]]
name = "b"
kind = "memory"
size_bytes = "64 MiB"
segment_bytes = "1 MiB"
[[tenant]]
name = "t"
salt = "sixteen bytes or more"
[[host]]
name = "h"
spaces = ["main"]
fabrics = ["tcp"]
"""


def space(facts: PoolFacts = FACTS, ranks: Ranks | None = None, **names: str) -> Space:
    words = {"model": "m", "revision": "r", "tenant": "t", **names}
    return space_of(facts, ranks or Ranks(), salt=b"salt", **words)


# --- identity ---


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_size": 32}, "geometry.block_tokens"),
        ({"dtype": "torch.float16"}, "kv_dtype"),
        ({"layout": "page_first_direct"}, "geometry.groups[0].packing"),
        ({"num_layers": 4}, "geometry.groups[0].num_layers"),
        ({"num_kv_heads": 1}, "geometry.groups[0].num_kv_heads"),
        ({"head_size": 32}, "geometry.groups[0].head_size"),
        ({"buffer_bytes": (3072, 1536)}, "geometry.groups[1].part_bytes"),
        ({"buffer_bytes": (6144,)}, "geometry.num_groups"),
    ],
)
def test_every_fact_of_a_pool_is_part_of_the_identity(change: dict[str, object], field: str) -> None:
    mine, theirs = space(), space(dataclasses.replace(FACTS, **change))
    with pytest.raises(SpaceMismatch) as caught:
        check_same_space(mine, theirs, theirs.fingerprint())
    assert caught.value.field == field


def test_k_and_v_are_parts_and_a_layer_first_page_is_one() -> None:
    groups = space().geometry.groups
    assert [(g.name, g.part_bytes, g.packing) for g in groups] == [
        ("k", 3072, "sglang.mha.page_first.k"), ("v", 3072, "sglang.mha.page_first.v"),
    ]  # fmt: skip
    layers = dataclasses.replace(FACTS, layout="layer_first", buffer_bytes=(1024,) * 6)
    [group] = space(layers).geometry.groups
    assert (group.name, group.part_bytes) == ("kv", 6144)


def test_a_page_without_bytes_is_refused() -> None:
    with pytest.raises(UnsupportedPool, match="page_unified"):
        space(dataclasses.replace(FACTS, layout="page_unified", buffer_bytes=()))


def test_each_rank_has_a_shard_of_its_own() -> None:
    ranks = [
        Ranks(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, cp_rank=cp, cp_size=2)
        for pp in range(2)
        for cp in range(2)
        for tp in range(2)
    ]
    assert [rank.shard for rank in ranks] == list(range(8))
    whole = space(ranks=ranks[0])
    assert whole.num_shards == 8


def test_ranks_that_hold_the_same_pages_share_a_shard() -> None:
    ranks = [
        Ranks(tp_rank=tp, tp_size=4, pp_rank=pp, pp_size=2, is_replicated=True)
        for pp in range(2)
        for tp in range(4)
    ]
    assert [rank.shard for rank in ranks] == [0] * 4 + [1] * 4
    whole = space(ranks=ranks[0])
    assert (whole.tp_size, whole.pp_size) == (1, 2)


def test_the_table_to_paste_is_the_space() -> None:
    mine = space(ranks=Ranks(tp_size=2))
    tree = tomllib.loads(topology_table("main", mine) + REST_OF_A_TOPOLOGY)
    theirs = config_from(tree).to_space("main")
    check_same_space(theirs, dataclasses.replace(mine, salt=theirs.salt), theirs.fingerprint())


def test_page_hashes_are_taken_as_they_are_and_anything_else_is_hashed() -> None:
    page = "00ff" * 16
    digests = digests_of([page, page + ".mamba", page.upper(), ""])
    assert digests[0] == bytes.fromhex(page)
    assert len(set(digests)) == 4
    assert {len(digest) for digest in digests} == {32}


# --- deadlines ---


@pytest.mark.parametrize(
    ("policy", "expected"), [("timeout", 1.5), ("wait_complete", 10.0), ("best_effort", 0.7)]
)
def test_a_load_gets_the_time_the_policy_leaves_it(policy: Policy, expected: float) -> None:
    assert LoadBudget(policy=policy, best_effort_s=0.7).of(2048) == expected
    assert LoadBudget(policy=policy, best_effort_s=0.7, limit_s=0.2).of(2048) == 0.2


# --- pages ---


def test_pages_are_the_memory_itself() -> None:
    memory = (ctypes.c_uint8 * 64)(*range(64))
    base = ctypes.addressof(memory)
    first, second = page_buffers([base, base + 32, base + 8, base + 40], [8] * 4, 2)
    assert [bytes(view) for view in second] == [bytes(range(8, 16)), bytes(range(40, 48))]
    first[1][:] = b"x" * 8
    assert bytes(memory)[32:40] == b"x" * 8


@pytest.mark.parametrize(
    ("addresses", "sizes", "pages"), [([1, 2, 3], [8] * 3, 2), ([1], [8, 8], 1), ([], [], 0)]
)
def test_addresses_that_do_not_fall_on_pages_are_refused(
    addresses: list[int], sizes: list[int], pages: int
) -> None:
    with pytest.raises(ValueError, match="pages"):
        page_buffers(addresses, sizes, pages)
