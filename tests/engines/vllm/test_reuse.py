"""What one engine process stored, a later one loads from the node's flash, and answers as if it had computed it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Make = Callable[..., Any]
Differences = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], list[str]]
NUM_PROMPTS = int(os.environ.get("DPURT_VLLM_PROMPTS", "5"))  # 100 take half an hour on two CPUs
BLOCK = 32
BLOCK_BYTES = 30 * 49152


def prompts_of(text: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Prompts of 1,024 to 4,096 tokens; five at a time begin alike, for 512 to 2,048 tokens."""
    prompts = []
    for i in range(count):
        length = (1024, 1500, 2048, 3000, 4096)[(i * 7 + i // 5) % 5]
        shared, own = i // 5 * 4000, 50_000 + i * 601
        half = min(length // 2, 2048)
        prompts.append({"tokens": [*text[shared : shared + half], *text[own : own + length - half]]})
    return prompts


def test_what_was_stored_is_loaded_by_the_next_process(
    make_node: Make, make_engine: Make, text: list[int], differences: Differences
) -> None:
    prompts = prompts_of(text, NUM_PROMPTS)
    with make_engine() as plain:
        truth = plain.generate(prompts)
    node = make_node(size=f"{1 + NUM_PROMPTS // 10} GiB")
    with make_engine(kv_transfer_config=node.transfer_config()) as first:
        assert differences(first.generate(prompts), truth) == []
    node.empty_staging()
    reads = node.device_reads()
    with make_engine(kv_transfer_config=node.transfer_config()) as second:
        again = second.generate(prompts)
        counted = second.metrics()
    assert differences(again, truth) == []
    for prompt, output in zip(prompts, again, strict=True):
        assert output["cached"] > 0.9 * len(prompt["tokens"])
    blocks = {tuple(p["tokens"][:end]) for p in prompts for end in range(BLOCK, len(p["tokens"]) + 1, BLOCK)}
    assert node.device_reads() - reads >= 0.95 * len(blocks) * BLOCK_BYTES
    assert counted["bytes_loaded"] >= 0.95 * len(blocks) * BLOCK_BYTES
    assert node.host()["nvme"] > 0


@pytest.mark.parametrize("broken", ["ZeroingConnector", "SwappingConnector"])
def test_kv_that_is_not_what_was_stored_is_seen(
    make_node: Make, make_engine: Make, text: list[int], differences: Differences, broken: str
) -> None:
    prompts = [{"tokens": text[:1024]}, {"tokens": text[5000:6024]}]
    node = make_node()
    with make_engine(kv_transfer_config=node.transfer_config()) as first:
        truth = first.generate(prompts)
    with make_engine(kv_transfer_config=node.transfer_config(broken=broken)) as second:
        second.generate(prompts[:1])
        [again] = second.generate(prompts[1:])
    assert again["cached"] > 0.9 * 1024
    assert differences([again], truth[1:]) != []


@pytest.mark.parametrize("settings", [{"load": "layers"}, {"fabrics": ["tcp"]}], ids=str)
def test_other_ways_of_loading_bring_the_same(
    make_node: Make, make_engine: Make, text: list[int], differences: Differences, settings: dict[str, Any]
) -> None:
    prompts = [{"tokens": text[:1024]}, {"tokens": text[:512] + text[9000:9500]}]
    node = make_node()
    with make_engine(kv_transfer_config=node.transfer_config()) as first:
        truth = first.generate(prompts)
    node.empty_staging()
    with make_engine(kv_transfer_config=node.transfer_config(**settings)) as second:
        again = second.generate(prompts)
        assert second.metrics()["blocks_loaded"] >= 0.9 * (1024 + 512) / BLOCK
    assert differences(again, truth) == []
    for prompt, output in zip(prompts, again, strict=True):
        assert output["cached"] > 0.9 * len(prompt["tokens"])
