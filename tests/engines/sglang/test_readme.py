"""The three lines of dpurt/engines/sglang/README.md do what they say: SGLang's own parser takes them, its factory makes the backend,
its host pool's pages go to a node with the space that the page gives."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pools import Shape, indices, keys, mha_pool, page

import dpurt.engines.sglang
from dpurt.demo.nodes import NodeProcess

README = (Path(dpurt.engines.sglang.__file__).parent / "README.md").read_text()


def code(language: str) -> str:
    found = re.search(f"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_three_lines_turn_it_on(
    tmp_path: Path, start_node: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

    _, serve, launch = [line.partition("    #")[0] for line in code("").strip().splitlines()]
    assert serve == "dpurt serve node.toml"
    node = start_node(
        code("toml"), name="qwen3-8b", staging="256 MiB", segment="64 MiB", size="512 MiB", tenant="demo"
    )
    assert node.endpoint
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(launch)[3:])
    assert given.enable_hierarchical_cache
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(
        given.hicache_storage_backend_extra_config
    )
    monkeypatch.chdir(tmp_path)  # where node.toml is
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=given.model_path, extra_config=extra,
    )  # fmt: skip
    pool = qwen3_pool(given.page_size, given.hicache_mem_layout)
    backend: Any = StorageBackendFactory.create_backend(given.hicache_storage_backend, config, pool)
    backend.register_mem_pool_host(pool)
    try:
        stored = [page(pool, number) for number in (0, 1)]
        assert backend.batch_set_v1(keys(2), indices(0, 1, page_size=given.page_size)) == [True, True], (
            backend.counters()
        )
        assert backend.state == "up"
        assert backend.batch_exists(keys(2)) == 2
        assert backend.batch_get_v1(keys(2), indices(2, 3, page_size=given.page_size)) == [True, True]
        assert [page(pool, number) for number in (2, 3)] == stored
    finally:
        backend.close()


def qwen3_pool(page_size: int, layout: str) -> Any:
    """A host pool of the README's model."""
    return mha_pool(layout, shape=Shape(page_size, layers=36, heads=8, head_size=128, tokens=4 * page_size))
