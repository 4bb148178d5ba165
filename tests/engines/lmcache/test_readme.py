"""The three lines of dpurt/engines/lmcache/README.md do what they say, with the space that the page gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server import Engine, Server, Shape, eventually

import dpurt.engines.lmcache

README = (Path(dpurt.engines.lmcache.__file__).parent / "README.md").read_text()
QWEN3 = Shape(chunk=256, layers=36, heads=8, head_size=128, dtype="bfloat16", blocks=64)


def code(language: str) -> str:
    found = re.search(f"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_three_lines_turn_it_on(
    tmp_path: Path, start_node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.cli.commands.bench.server_bench import helpers

    _, serve, launch = [line.partition("    #")[0] for line in code("").strip().splitlines()]
    assert serve == "dpurt serve node.toml"
    start_node(
        code("toml"), name="qwen3-8b", tenant="demo", staging="256 MiB", segment="160 MiB", size="1 GiB",
        inbound="80 MiB",
    )  # fmt: skip
    monkeypatch.setattr(helpers, "_MODEL_NAME", "Qwen/Qwen3-8B")
    # less host memory than the page's 20 GB, and free ports; in the folder of node.toml
    server = Server(tmp_path, [*shlex.split(launch)[1:], "--l1-size-gb", "0.4", "--no-l1-use-lazy"])
    try:
        server.wait_until_up()
        engine = Engine(server, num_chunks=2, shape=QWEN3)
        content = engine.content(1)
        engine.store(1)
        eventually(lambda: _adapter(server)["spaces"]["qwen3-8b"].get("stored", 0) == 2)
        server.clear_l1()
        assert engine.fetch(1) == 2
        assert engine.content(1) == content
        engine.close()
    finally:
        server.end()


def _adapter(server: Server) -> dict[str, Any]:
    [adapter] = server.get("/status")["storage_manager"]["l2_adapters"]
    return dict(adapter)
