"""Tensor parallelism: each rank, a process of its own, moves its own shard, and a match is what all ranks have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[..., Any]
LENGTH = 1024
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARD_BYTES = 2 * 32 * 64 * 4  # of a layer of a block: K and V, 32 tokens, one of the two heads


def tiny(folder: Path) -> Path:
    """A model whose two heads two ranks can share; vLLM makes up its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def sharded_node(make_node: Make, **space: Any) -> Any:
    """A node whose space is this model's, cut in two."""
    node = make_node(start=False, tp_size=2, **space)
    text = node.topology.read_text()
    for was, now in (
        ("count = 30", "count = 2"), ("num_kv_heads = 3", "num_kv_heads = 1"), ("(1.3)", "(1.1)"),
        ("part_bytes = 49152", f"part_bytes = {SHARD_BYTES}"),
    ):  # fmt: skip
        assert was in text
        text = text.replace(was, now)
    node.topology.write_text(text)
    node.start()
    return node


def test_two_ranks_store_their_shards_and_load_them_in_the_next_process(
    make_node: Make, make_engine: Make, tmp_path: Path
) -> None:
    node = sharded_node(make_node)
    settings = {
        "model": str(tiny(tmp_path / "tiny")), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048,
        "kv_transfer_config": node.transfer_config(),
    }  # fmt: skip
    prompt = {"tokens": [i * 7 % 500 for i in range(LENGTH)]}
    with make_engine(tensor_parallel_size=2, **settings) as first:
        [truth] = first.generate([prompt])
        first.generate([{"tokens": prompt["tokens"][:40]}])  # the next step, which frees what was held
    node.empty_staging()
    before = node.host().get("bytes_loaded", 0)
    with make_engine(tensor_parallel_size=2, **settings) as second:
        [again] = second.generate([prompt])
    assert again["cached"] > 0.9 * LENGTH
    assert again["tokens"] == truth["tokens"]
    assert node.host()["bytes_loaded"] - before >= 2 * again["cached"] // 32 * 2 * SHARD_BYTES
    with make_engine(connected=False, **settings) as alone:  # the same model on one rank: another space
        alone.ask(do="sleep", seconds=3)
        [output] = alone.generate([prompt])
        assert output["cached"] == 0
        assert "differs" in alone.log()
