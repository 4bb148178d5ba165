"""SGLang's real `StorageBackendFactory`, host pools and cache controller drive `DpurtStorage` on a real node."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import (
    HEADS,
    PAGE,
    device_pool,
    fill,
    indices,
    keys,
    mha_pool,
    mla_pool,
    mla_table,
    page,
    space_table,
)

from dpurt.demo.nodes import NodeProcess

StartNode = Callable[..., NodeProcess]
PATIENT = {"find_s": 10, "load_s": 30, "store_s": 30}  # for machines that do much else
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


def extra_config(tmp_path: Path, **ours: Any) -> dict[str, Any]:
    return {
        "backend_name": "dpurt", "module_path": "dpurt.engines.sglang.backend", "class_name": "DpurtStorage",
        "interface_v1": 1, "topology": str(tmp_path / "node.toml"), "space": "tiny", **PATIENT, **ours,
    }  # fmt: skip


def storage_config(tmp_path: Path, *, is_mla: bool = False, ours: Any = None, **ranks: int) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        **ranks,
    }
    return HiCacheStorageConfig(
        **given, is_mla_model=is_mla, enable_storage_metrics=True, is_page_first_layout=True, model_name="tiny",
        extra_config=extra_config(tmp_path, **(ours or {})),
    )  # fmt: skip


@contextmanager
def backend(config: Any, pool: Any) -> Iterator[Any]:
    """Made, told of its pool and ended as SGLang does it, under the policy ``wait_complete``."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(**published("wait_complete", "{}")):
        made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    try:
        yield made
    finally:
        made.close()


def published(policy: str, extra: str) -> dict[str, str]:
    """What an engine's process tells all its parts."""
    return {
        "device": "cpu",
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_backend_extra_config": extra,
    }


def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def on_device(node: NodeProcess) -> int:
    """Records the node has written."""
    stats: Any = node.stats()
    return sum(bdev["store"]["appends"] for bdev in stats["bdevs"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_set_exists_get_delete_with_a_restart_in_between(
    tmp_path: Path, start_node: StartNode, layout: str
) -> None:
    node = start_node(space_table(layout))
    pool, prompt = mha_pool(layout), keys(5)
    with backend(storage_config(tmp_path), pool) as store:
        assert store.batch_exists(prompt) == 0
        stored = [page(pool, number) for number in (3, 1, 4, 7, 2)]
        assert store.batch_set_v1(prompt, indices(3, 1, 4, 7, 2)) == [True] * 5
        assert store.batch_exists([*prompt, "ab" * 32]) == 5
        node.terminate()
        node.start()
        fill(pool, seed=2)
        assert store.batch_exists(prompt) == 5
        assert store.batch_get_v1(prompt, indices(10, 20, 30, 11, 12)) == [True] * 5
        assert [page(pool, number) for number in (10, 20, 30, 11, 12)] == stored
        assert store.delete(prompt[1:2])
        assert [store.exists(key) for key in prompt] == [True, False, True, True, True]
        assert store.batch_exists(prompt) == 1
        assert store.batch_get_v1(prompt[:3], indices(10, 11, 12)) == [True, False, True]
        assert store.counters()["not_loaded_miss"] == 1


def test_a_process_that_starts_later_has_what_another_stored(tmp_path: Path, start_node: StartNode) -> None:
    start_node()
    prompt = keys(3)
    with backend(storage_config(tmp_path), first := mha_pool()) as store:
        store.batch_set_v1(prompt, indices(0, 1, 2))
    second = mha_pool()
    fill(second, seed=9)
    with backend(storage_config(tmp_path), second) as store:
        assert store.batch_get_v1(prompt, indices(5, 6, 7)) == [True] * 3
    assert [page(second, n) for n in (5, 6, 7)] == [page(first, n) for n in (0, 1, 2)]


def test_the_tensor_calls_see_the_same_pages(tmp_path: Path, start_node: StartNode) -> None:
    start_node()
    pool, prompt = mha_pool(), keys(3)
    with backend(storage_config(tmp_path), pool) as store:
        assert store.set(prompt[0], pool.get_data_page(0))
        assert store.batch_set(prompt[1:], [pool.get_data_page(PAGE), pool.get_data_page(2 * PAGE)])
        assert store.batch_get_v1(prompt, indices(8, 9, 10)) == [True] * 3
        assert [page(pool, n) for n in (8, 9, 10)] == [page(pool, n) for n in (0, 1, 2)]
        target = pool.get_dummy_flat_data_page()
        assert store.get(prompt[2], target) is target
        assert bytes(target.view(torch.uint8).numpy()) == page(pool, 2)
        assert store.batch_get(["cd" * 32], [target]) == [None]
        assert store.get(prompt[0]) is None


def test_each_tensor_parallel_rank_has_its_own_pages(tmp_path: Path, start_node: StartNode) -> None:
    start_node(space_table(tp_size=2))
    prompt, pools = keys(2), [mha_pool(), mha_pool()]
    fill(pools[1], seed=5)
    configs = [storage_config(tmp_path, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    with backend(configs[0], pools[0]) as one, backend(configs[1], pools[1]) as two:
        one.batch_set_v1(prompt, indices(0, 1))
        assert one.batch_exists(prompt) == 0  # of no use without the other rank's half
        two.batch_set_v1(prompt, indices(0, 1))
        for rank, pool in ((one, pools[0]), (two, pools[1])):
            expected = [page(pool, 0), page(pool, 1)]
            fill(pool, seed=7)
            assert rank.batch_exists(prompt) == 2
            assert rank.batch_get_v1(prompt, indices(4, 5)) == [True, True]
            assert [page(pool, 4), page(pool, 5)] == expected


def test_of_ranks_with_the_same_latent_pages_one_writes_and_all_read(
    tmp_path: Path, start_node: StartNode
) -> None:
    start_node(mla_table(width=40))
    prompt, pools = keys(2), [mla_pool(), mla_pool()]
    fill(pools[1], seed=5)
    configs = [storage_config(tmp_path, is_mla=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    with backend(configs[0], pools[0]) as writer, backend(configs[1], pools[1]) as reader:
        assert reader.batch_set_v1(prompt, indices(0, 1)) == [True, True]
        assert reader.batch_exists(prompt) == 0
        assert writer.batch_set_v1(prompt, indices(0, 1)) == [True, True]
        assert reader.batch_exists(prompt) == 2
        assert reader.batch_get_v1(prompt, indices(6, 7)) == [True, True]
        assert [page(pools[1], 6), page(pools[1], 7)] == [page(pools[0], 0), page(pools[0], 1)]


@pytest.mark.parametrize(
    ("space", "field", "node_has", "host_has"),
    [
        (space_table(dtype="float16"), "kv_dtype", "float16", "bfloat16"),
        (space_table("layer_first"), "geometry.num_groups", 1, 2),
        (space_table("page_head"), "geometry.groups[0].packing", "sglang.mha.page_head.k", "sglang.mha.page_first.k"),
        (space_table(tp_size=2), "tp_size", 2, 1),
        (space_table(head_size=32), "geometry.groups[0].head_size", 32, 16),
        (space_table().replace('"r1"', '"r2"'), "revision", "r2", "r1"),
        (space_table().replace('model = "tiny"', 'model = "other"'), "model", "other", "tiny"),
    ],
)  # fmt: skip
def test_a_node_with_another_idea_of_the_pages_refuses_and_names_the_field(
    tmp_path: Path,
    start_node: StartNode,
    caplog: pytest.LogCaptureFixture,
    space: str,
    field: str,
    node_has: object,
    host_has: object,
) -> None:
    start_node(space)
    with caplog.at_level(logging.INFO, "sglang.dpurt"):
        with backend(storage_config(tmp_path, ours={"revision": "r1"}), mha_pool()) as store:
            eventually(lambda: store.state == "refused")
            assert store.batch_set_v1(keys(1), indices(0)) == [False]
            assert store.batch_exists(keys(1)) == 0
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == [
        f"dpurt: refused, the engine goes on without: space field {field!r} differs: "
        f"node has {str(node_has)!r}, host has {str(host_has)!r}"
    ]


def test_a_dead_node_is_misses_within_the_budget_and_hits_again_when_it_is_back(
    tmp_path: Path, start_node: StartNode
) -> None:
    node = start_node()
    pool, prompt = mha_pool(), keys(4)
    ours = {"find_s": 0.3, "load_s": 0.5, "store_s": 0.5}
    with backend(storage_config(tmp_path, ours=ours), pool) as store:
        assert store.batch_set_v1(prompt, indices(0, 1, 2, 3)) == [True] * 4
        eventually(lambda: on_device(node) == 4)
        node.kill()
        began = time.monotonic()
        assert store.batch_exists(prompt) == 0
        assert store.batch_get_v1(prompt, indices(5, 6, 7, 8)) == [False] * 4
        assert store.batch_set_v1(prompt, indices(0, 1, 2, 3)) == [False] * 4
        assert time.monotonic() - began < 6  # the budgets are 0.3, 0.5 and 0.5 s
        assert store.state == "down"
        node.start()
        eventually(lambda: store.batch_exists(prompt) == 4)
        assert store.state == "up"
        assert store.batch_get_v1(prompt, indices(5, 6, 7, 8)) == [True] * 4
        assert [page(pool, n) for n in (5, 6, 7, 8)] == [page(pool, n) for n in (0, 1, 2, 3)]


def test_an_engine_starts_without_a_node_and_finds_it_later(tmp_path: Path, start_node: StartNode) -> None:
    node = start_node()
    node.kill()
    pool = mha_pool()
    with backend(
        storage_config(tmp_path, ours={"find_s": 0.2, "store_s": 0.2, "load_s": 0.2}), pool
    ) as store:
        assert store.batch_exists(keys(2)) == 0
        node.start()
        eventually(lambda: store.batch_set_v1(keys(2), indices(0, 1)) == [True, True])


def test_batches_are_told_to_sglangs_collector(tmp_path: Path, start_node: StartNode) -> None:
    start_node()
    pool, prompt = mha_pool(), keys(3)
    with backend(storage_config(tmp_path), pool) as store:
        store.batch_set_v1(prompt, indices(0, 1, 2))
        store.batch_get_v1(prompt, indices(4, 5, 6))
        metrics = store.get_stats()
        assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([3], [3])
        assert metrics.prefetch_bandwidth[0] > 0
        assert store.get_stats().backup_pgs == []


def test_clearing_is_reported_as_not_done(tmp_path: Path, start_node: StartNode) -> None:
    start_node()
    with backend(storage_config(tmp_path), mha_pool()) as store:
        store.batch_set_v1(keys(1), indices(0))
        with pytest.raises(Exception, match="dpurt epoch bump tiny"):
            store.clear()
        assert store.batch_exists(keys(1)) == 1


def test_pools_of_hybrid_models_fail_the_attach(tmp_path: Path, start_node: StartNode) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    start_node()
    with backend(storage_config(tmp_path), pool := mha_pool()) as store:
        store.register_mem_host_pool_v2(pool, PoolName.KV)
        with pytest.raises(Exception, match="does not store mamba pools"):
            store.register_mem_host_pool_v2(pool, PoolName.MAMBA)


# --- under SGLang's cache controller: its threads, its batches, its policies ---


@pytest.fixture(scope="module")
def process_group() -> Iterator[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@contextmanager
def controller(tmp_path: Path, group: Any, pool: Any, device: Any, policy: str, **ours: Any) -> Iterator[Any]:
    """SGLang's cache controller with dpurt attached, as `--hicache-storage-*` on its command line would."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_context, get_parallel

    class Allocator:
        def get_kvcache(self) -> Any:
            return device

    text = json.dumps({**extra_config(tmp_path), "prefetch_threshold": 1, **ours})
    ranks = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    with get_context().override_server_args(**published(policy, text)), get_parallel().override(**ranks):
        made = HiCacheController(
            Allocator(),
            pool,
            PAGE,
            group,
            threading.Event(),
            io_backend="direct",
            write_policy="write_through",
        )
        extra, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
        made.attach_storage_backend(
            "dynamic", prefetch_threshold=threshold, model_name="tiny", storage_backend_extra_config=extra
        )
        try:
            yield made
        finally:
            made.detach_storage_backend()


@pytest.mark.parametrize("policy", ["timeout", "wait_complete", "best_effort"])
def test_the_cache_controller_backs_up_and_prefetches(
    tmp_path: Path, start_node: StartNode, process_group: Any, policy: str
) -> None:
    node = start_node()
    device = device_pool()
    pool = mha_pool(device=device)
    tokens = list(range(40 * PAGE))
    expected = [page(pool, number) for number in range(40)]
    with controller(
        tmp_path,
        process_group,
        pool,
        device,
        policy,
        prefetch_timeout_base=20,
        prefetch_timeout_per_ki_token=0.5,
        best_effort_s=15,
    ) as made:
        limit = {"timeout": 20.25, "wait_complete": 30.0, "best_effort": 15.0}[policy]
        assert made.storage_backend._load_budget.of(512) == limit
        from sglang.srt.mem_cache.utils import get_hash_str

        hashes = get_hash_str(tokens, None, page_size=PAGE)
        made.write_storage(indices(*range(40)), tokens, hashes)
        assert made.ack_backup_queue.get(timeout=20).completed_tokens == len(tokens)
        node.terminate()
        node.start()
        fill(pool, seed=3)
        made.prefetch("r1", tokens + [7] * PAGE)
        operation = made.prefetch_hit_queue.get(timeout=20)
        assert operation.storage_hit_count == len(tokens)
        operation.host_indices = indices(*range(50, 90))
        made.prefetch_buffer.put(operation)
        acks = []
        while not acks or not acks[-1].completed_req:
            acks.append(made.ack_prefetch_queue.get(timeout=20))
        assert max(ack.completed_tokens or 0 for ack in acks) == len(tokens)
        assert [page(pool, number) for number in range(50, 90)] == expected
        assert HEADS == pool.head_num
