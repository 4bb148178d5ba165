"""Time to first token on real vLLM: without a connector, with dpurt (nothing stored, staged, on flash), with vLLM's own CPU offload.

    python tests/engines/vllm/ttft.py [--pairs 7] [--tokens 2048]        in the environment of `tests/engines/run vllm`

All engines run side by side and take turns, prompt by prompt, so that a slow moment of the machine hits all of them; the table has
medians, and ratios of pairs. A prompt is computed by every engine once (the *none* rows) and asked for again after the engine's
own cache was emptied (the *hit* rows). For the row *flash* the node is restarted before each prompt: its staging is empty.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

from conftest import CACHE, Engine, Node, offload_config
from tokenizers import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    model = CACHE / "smollm2-135m"
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(model, Path(folder), prompts_of(model, options.pairs + 1, options.tokens))
    print_table(rows, options.pairs, options.tokens)


def prompts_of(model: Path, count: int, length: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(topics.topics[name] for name in sorted(topics.topics))).ids
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def measure(model: Path, folder: Path, prompts: Sequence[list[int]]) -> dict[str, list[float]]:
    """Seconds by row, one a prompt; the first prompt warms up and is left out."""
    node = Node(folder, size="4 GiB")
    node.start()
    rows: dict[str, list[float]] = {}
    configs = {
        "no connector": None,
        "dpurt": node.transfer_config(),
        "vLLM CPU offload": offload_config(1.5, []),
    }
    engines: dict[str, Engine] = {}
    try:
        for name, config in configs.items():
            settings = {"kv_transfer_config": config} if config else {}
            engines[name] = Engine(model, folder / f"{len(engines)}.log", {}, **settings)
        for prompt in prompts:
            turn(engines, node, prompt, rows)
    finally:
        for engine in engines.values():
            engine.close()
        node.end()
    return {name: seconds[1:] for name, seconds in rows.items()}


def turn(engines: dict[str, Engine], node: Node, prompt: list[int], rows: dict[str, list[float]]) -> None:
    """One prompt through all engines."""
    for name, engine in engines.items():
        rows.setdefault(f"{name}, none", []).append(first_token(engine, prompt, 0.0))
    for name in ("dpurt", "vLLM CPU offload"):
        rows.setdefault(f"{name}, hit in DRAM", []).append(first_token(engines[name], prompt, 0.9))
    node.empty_staging()
    engines["dpurt"].ask(do="sleep", seconds=1.0)  # it notices that the node went away
    engines["dpurt"].ask(do="connected")
    rows.setdefault("dpurt, hit on flash", []).append(first_token(engines["dpurt"], prompt, 0.9))


def first_token(engine: Engine, prompt: list[int], cached: float) -> float:
    """Seconds to one token, with the engine's own cache emptied; at least this share of the prompt must come from elsewhere."""
    engine.ask(do="reset")
    answer: dict[str, Any] = engine.ask(do="generate", prompts=[{"tokens": prompt}], max_tokens=1)
    [output] = answer["outputs"]
    assert (output["cached"] or 0) >= cached * len(prompt), (
        f"{output['cached']} of {len(prompt)} tokens were cached"
    )
    return float(answer["seconds"])


def print_table(rows: dict[str, list[float]], pairs: int, tokens: int) -> None:
    base = rows["no connector, none"]
    print(
        f"TTFT, SmolLM2-135M float32, prompts of {tokens} tokens, n = {pairs}, {platform.machine()}, shm fabric, file bdev"
    )
    print(f"{'':32}{'median':>10}{'min':>9}{'max':>9}   ratio to no connector (median of pairs)")
    for name, seconds in rows.items():
        ratio = median(s / b for s, b in zip(seconds, base, strict=True))
        print(f"{name:32}{median(seconds):9.3f}s{min(seconds):8.3f}s{max(seconds):8.3f}s{ratio:10.3f}")


if __name__ == "__main__":
    main()
