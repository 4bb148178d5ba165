"""Prefill on one engine, decode on another: blocks are loaded while the prompt is still being computed."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def test_a_decoder_takes_blocks_over_as_the_prefiller_stores_them(
    make_node: Make, make_engine: Make, text: list[int]
) -> None:
    prompt = {"tokens": text[:1600]}
    node = make_node()
    produce = {**node.transfer_config(), "kv_role": "kv_producer"}
    consume = {**node.transfer_config(), "kv_role": "kv_consumer"}
    with (
        make_engine(kv_transfer_config=produce, max_num_batched_tokens=256) as prefiller,
        make_engine(kv_transfer_config=consume) as decoder,
    ):
        prefiller.tell(do="generate", prompts=[prompt], max_tokens=1)
        expecting = {**prompt, "params": {"dpurt": {"expect_ms": 120_000}}}
        decoder.tell(do="generate", prompts=[expecting], max_tokens=8)
        while not node.host().get("bytes_loaded"):
            time.sleep(0.05)
        is_done, _, _ = select.select([prefiller.answers], [], [], 0)
        [first] = prefiller.answer()["outputs"]
        [output] = decoder.answer()["outputs"]
        [alone] = prefiller.generate([prompt])  # computed or cached by itself
    assert not is_done, "nothing was loaded before the whole prompt was computed"
    assert output["cached"] > 0.9 * 1600
    assert output["tokens"] == alone["tokens"]
    assert first["tokens"] == alone["tokens"][:1]


def test_a_prompt_that_never_comes_is_computed(make_node: Make, make_engine: Make, text: list[int]) -> None:
    prompt = {"tokens": text[:256]}
    with make_engine(kv_transfer_config=make_node().transfer_config()) as engine:
        [alone] = engine.generate([{**prompt, "salt": "another"}])
        [output] = engine.generate([{**prompt, "params": {"dpurt": {"expect_ms": 500}}}])
    assert output["tokens"] == alone["tokens"]
