"""The node dies, freezes or is not there: requests finish as if it had never been, and the engine hardly waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
BUDGET_S = 0.2  # lookup_budget_ms, with room for a busy machine below
LOAD_S = 2.0
LENGTH = 512  # tokens of a prompt


def prompts_of(text: list[int]) -> list[dict[str, Any]]:
    return [{"tokens": text[i * 3000 : i * 3000 + LENGTH]} for i in range(2)]


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


@pytest.mark.parametrize(
    ("stop", "load"), [("SIGKILL", "async"), ("SIGSTOP", "async"), ("SIGSTOP", "layers")]
)
def test_a_node_that_stops_between_its_promise_and_the_load_costs_a_recompute(
    make_node: Make, make_engine: Make, text: list[int], stop: str, load: str
) -> None:
    prompts = prompts_of(text)
    node = make_node()
    with make_engine(kv_transfer_config=node.transfer_config()) as first:
        truth = first.generate(prompts)
    node.empty_staging()
    settings = {
        "load": load,
        "load_timeout_s": LOAD_S,
        "save_timeout_s": LOAD_S,
        "layer_wait_s": LOAD_S,
        "lookup_budget_ms": 200,
    }
    config = node.transfer_config(broken="StoppingConnector", **settings)
    with make_engine(env={"NODE_PID": str(node.pid), "SIGNAL": stop}, kv_transfer_config=config) as second:
        again = second.generate(prompts)
        later = second.generate([{"tokens": text[20_000 : 20_000 + LENGTH]}])
        counted = second.metrics()
        assert tokens_of(again) == tokens_of(truth)
        assert [output["finish"] for output in [*again, *later]] == ["length"] * 3
        assert counted["blocks_loaded"] < 2 * LENGTH // 32
        assert counted["longest_call_s"] < 2 * BUDGET_S
        assert counted["is_up"] == 0
        assert "dpurt: down" in second.log()


def test_an_engine_starts_without_a_node_and_uses_it_when_it_comes(
    make_node: Make, make_engine: Make, text: list[int]
) -> None:
    prompts = prompts_of(text)
    node = make_node(start=False)
    with make_engine(
        connected=False, kv_transfer_config=node.transfer_config(lookup_budget_ms=200)
    ) as engine:
        truth = engine.generate(prompts)
        assert engine.metrics()["is_up"] == 0
        assert truth[0]["transfer"]["dpurt"]["node"] == "down"
        node.start()
        engine.ask(do="reset")
        engine.ask(do="connected")
        engine.generate(prompts)  # stores
        engine.ask(do="reset")
        again = engine.generate(prompts)
        assert engine.metrics()["is_up"] == 1
    assert all(output["cached"] > 0.9 * LENGTH for output in again)
    assert tokens_of(again) == tokens_of(truth)
