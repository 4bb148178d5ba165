"""Whatever makes KV not interchangeable keeps it apart, or has the node refuse the engine by the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Generator, randn

Make = Callable[..., Any]


def cached(engine: Any, **prompt: Any) -> int:
    """Tokens of the prompt that came from the node: the engine's own cache is emptied before."""
    engine.ask(do="reset")
    [output] = engine.generate([prompt])
    return int(output["cached"])


def test_a_salt_keeps_prompts_apart(make_node: Make, make_engine: Make, text: list[int]) -> None:
    prompt = {"tokens": text[:256]}
    with make_engine(kv_transfer_config=make_node().transfer_config()) as engine:
        assert cached(engine, **prompt, salt="a") == 0
        assert cached(engine, **prompt, salt="b") == 0
        assert cached(engine, **prompt) == 0
        assert cached(engine, **prompt, salt="a") > 200
        assert cached(engine, **prompt) > 200


def test_an_adapter_keeps_prompts_apart_by_name_and_by_content(
    make_node: Make, make_engine: Make, text: list[int], tmp_path: Path
) -> None:
    one, other = adapter(tmp_path / "one", seed=1), adapter(tmp_path / "other", seed=2)
    prompt = {"tokens": text[:256]}
    node = make_node()
    config = node.transfer_config()
    with make_engine(kv_transfer_config=config, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        assert cached(engine, **prompt, lora={"name": "x", "id": 1, "path": str(one)}) == 0
        assert cached(engine, **prompt, lora={"name": "y", "id": 2, "path": str(other)}) == 0
        assert cached(engine, **prompt) == 0
        assert cached(engine, **prompt, lora={"name": "x", "id": 1, "path": str(one)}) > 200
    adapter(one, seed=3)  # the same name and place, other weights
    with make_engine(kv_transfer_config=config, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        assert cached(engine, **prompt, lora={"name": "x", "id": 1, "path": str(one)}) == 0
        assert cached(engine, **prompt, lora={"name": "y", "id": 2, "path": str(other)}) > 200


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of random weights, small enough to change little and large enough to change KV."""
    folder.mkdir(exist_ok=True)
    random = Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        stem = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{stem}.lora_A.weight"] = randn(8, 576, generator=random) * 0.1
        tensors[f"{stem}.lora_B.weight"] = randn(192, 8, generator=random) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("field", "space", "engine"),
    [
        ("model", {"model": "another"}, {}),
        ("revision", {"revision": "2"}, {}),
        ("kv_dtype", {}, {"dtype": "bfloat16"}),
        ("geometry.block_tokens", {}, {"block_size": 64}),
        ("tp_size", {"tp_size": 2}, {}),
    ],
)
def test_a_difference_is_refused_by_name_and_the_engine_goes_on(
    make_node: Make,
    make_engine: Make,
    text: list[int],
    field: str,
    space: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    node = make_node(**space)
    with make_engine(
        kv_transfer_config=node.transfer_config(), connected=False, load_format="dummy", **engine
    ) as running:
        running.ask(do="sleep", seconds=3)
        [output] = running.generate([{"tokens": text[:256]}])
        assert output["finish"] == "length"
        assert output["cached"] == 0
        counted = running.metrics()
        assert f"space field '{field}' differs" in running.log()
        assert "[[space]]" in running.log()
    assert counted.get(f'node_errors{{"reason": "mismatch_{field}"}}', 0) >= 1
    assert node.host().get("stored", 0) == 0
