"""What one engine process stored, a later one loads from the node's flash, and answers as if it had computed it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Make = Callable[..., Any]
CLOSE = 2e-3  # of a logprob: the same KV, summed in another order (a prompt in one piece, or its last tokens alone)


def prompts_of(text: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Prompts of these lengths, each from another place in the text."""
    return [{"tokens": list(text[i * 4500 : i * 4500 + n])} for i, n in enumerate(lengths)]


def differences(mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[str]:
    """Where tokens or top logprobs differ."""
    found = []
    for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one["tokens"] != other["tokens"]:
            found.append(f"prompt {i}: tokens {one['tokens']} / {other['tokens']}")
        for step, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            worst = max((abs(a[t] - b[t]) for t in a.keys() & b.keys()), default=math.inf)
            if worst > CLOSE or len(a.keys() & b.keys()) < min(len(a), len(b)) - 1:
                found.append(f"prompt {i} step {step}: logprobs differ by {worst}")
    return found


def test_what_was_stored_is_loaded_by_the_next_process(
    make_node: Make, make_engine: Make, text: list[int]
) -> None:
    prompts = prompts_of(text, [1024, 1500, 2048, 3000, 4096])
    with make_engine() as plain:
        truth = plain.generate(prompts)
    node = make_node()
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
    assert node.device_reads() - reads >= counted["bytes_loaded"]
    assert node.host()["nvme"] > 0


@pytest.mark.parametrize("broken", ["ZeroingConnector", "SwappingConnector"])
def test_kv_that_is_not_what_was_stored_is_seen(
    make_node: Make, make_engine: Make, text: list[int], broken: str
) -> None:
    prompts = prompts_of(text, [1024])
    node = make_node()
    with make_engine(kv_transfer_config=node.transfer_config()) as first:
        truth = first.generate(prompts)
    with make_engine(kv_transfer_config=node.transfer_config(broken=broken)) as second:
        again = second.generate(prompts)
    assert again[0]["cached"] > 0.9 * 1024
    assert differences(again, truth) != []
