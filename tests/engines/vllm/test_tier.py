"""The node below vLLM's own CPU offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def test_chunks_come_back_through_the_host_region_of_a_later_process(
    make_node: Make, make_engine: Make, text: list[int], differences: Callable[..., list[str]]
) -> None:
    prompts = [{"tokens": text[i * 4500 : i * 4500 + n]} for i, n in enumerate([512, 700])]
    with make_engine() as plain:
        truth = plain.generate(prompts)
    node = make_node(tier=True)
    with make_engine(kv_transfer_config=node.tier_config()) as first:
        assert differences(first.generate(prompts), truth) == []
        first.ask(do="settle")
    node.empty_staging()
    with make_engine(kv_transfer_config=node.tier_config()) as second:
        again = second.generate(prompts)
    assert differences(again, truth) == []
    for prompt, output in zip(prompts, again, strict=True):
        assert output["cached"] > 0.9 * len(prompt["tokens"])
    assert node.host()["nvme"] > 0
