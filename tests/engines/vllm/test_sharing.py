"""Two engine processes share what either computed, and a router that listens to both sends a prompt to who holds it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
LENGTH = 1024
RATE = 500  # tokens a second that the router takes an engine to compute


def events(port: int, replay: int) -> dict[str, Any]:
    """As `--kv-events-config`."""
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay}",
    }


def tables(ports: dict[str, tuple[int, int]]) -> str:
    return "".join(
        f"""
[[engine]]
name = "{name}"
kind = "vllm"
space = "smollm2"
events = ["tcp://127.0.0.1:{port}"]
replay = ["tcp://127.0.0.1:{replay}"]
prefill_tokens_per_s = {RATE}
"""
        for name, (port, replay) in ports.items()
    )


def held(node: Any, prompt: list[int], *arguments: str) -> dict[str, int]:
    """Leading tokens of a prompt in each engine's HBM, as its events say."""
    return {one["host"]: one.get("hbm_tokens", 0) for one in node.routes(prompt, *arguments)["candidates"]}


def until_held(node: Any, prompt: list[int], by: set[str], *arguments: str) -> None:
    deadline = time.monotonic() + 30
    while {name for name, tokens in held(node, prompt, *arguments).items() if tokens >= LENGTH} != by:
        assert time.monotonic() < deadline, (node.engines(), held(node, prompt, *arguments))
        time.sleep(0.2)


@pytest.fixture
def pair(make_node: Make, make_engine: Make, free_port: Callable[[], int]) -> Any:
    """A node that follows two engines, and these."""
    ports = {name: (free_port(), free_port()) for name in ("a", "b")}
    node = make_node(tables=tables(ports))
    config = node.transfer_config()
    engines = [
        make_engine(kv_transfer_config=config, kv_events_config=events(*ports[name])) for name in ports
    ]
    return node, *engines


def test_two_engines_share_and_the_router_prefers_the_holder_until_its_load_says_otherwise(
    pair: Any, text: list[int]
) -> None:
    node, a, b = pair
    prompt = {"tokens": text[:LENGTH]}
    [truth] = a.generate([prompt])
    until_held(node, text[:LENGTH], {"a"})
    asked = node.routes(text[:LENGTH])
    assert asked["best"] == "a"
    [elsewhere] = [one for one in asked["candidates"] if one["host"] == "b"]
    assert elsewhere.get("node_tokens", 0) >= 0.9 * LENGTH  # it could load what `a` stored
    [output] = b.generate([prompt])
    assert output["cached"] > 0.9 * LENGTH
    assert output["tokens"] == truth["tokens"]
    until_held(node, text[:LENGTH], {"a", "b"})
    b.ask(do="reset")
    b.generate(
        [{"tokens": text[40_000:40_064]}]
    )  # vLLM tells of a reset with the next step that has something to tell
    until_held(node, text[:LENGTH], {"a"})

    salted = {"tokens": text[5000 : 5000 + LENGTH], "salt": "of a tenant"}
    a.generate([salted])
    until_held(node, salted["tokens"], {"a"}, "--salt", "of a tenant")
    assert held(node, salted["tokens"]) == {"a": 0, "b": 0}
    question = [*salted["tokens"], *text[20_000 : 20_000 + LENGTH]]
    sent = [node.routes(question, "--salt", "of a tenant", "--book")["best"] for _ in range(12)]
    assert sent[:2] == ["a", "a"]  # which computes half as much, until more than that waits there
    assert "b" in sent
    for name, rank in node.engines().items():
        assert (rank["lost"], rank["dropped_events"], rank["is_partial"]) == (0, 0, 0), name
