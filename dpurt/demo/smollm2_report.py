"""What the SmolLM2 example has to say, as JSON and as a table; every figure stands beside its context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dpurt.demo.smollm2 import Outcome, Plan, Work
from dpurt.demo.smollm2_node import SPARE_SLOTS, part_bytes, part_slot_bytes


def as_json(work: Work, plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All figures; the first outcome is the run in memory."""
    reference = outcomes[0]
    same = [o.tokens == reference.tokens and o.logits == reference.logits for o in outcomes]
    return {
        "identical": all(same),
        "conditions": _conditions(work, plan),
        "runs": [_run(outcome, plan.steps, is_same) for outcome, is_same in zip(outcomes, same, strict=True)],
    }


def _conditions(work: Work, plan: Plan) -> dict[str, Any]:
    shape, settings, device = work.model.shape, plan.settings, plan.device
    cold = settings.cold_blocks(len(work.tokens))
    return {
        "model": "SmolLM2-135M-Instruct Q4_1, in numpy", "layers": shape.layers,
        "context_tokens": [len(work.tokens), len(work.tokens) + plan.steps - 1], "steps": plan.steps,
        "block_tokens": settings.block_tokens, "sink_tokens": settings.sink_tokens, "window_tokens": settings.window_tokens,
        "cold_blocks": cold, "part_bytes": part_bytes(shape, settings.block_tokens), "demanded_per_turn": settings.top,
        "staging_share": plan.staging, "staging_slots": max(1, round(plan.staging * cold)) * shape.layers,
        "spare_slots": SPARE_SLOTS, "read_bytes": part_slot_bytes(shape, settings.block_tokens),
        "budget_per_turn": plan.budget, "history_ahead": plan.history_ahead, "device": asdict(device),
        "temperature": settings.temperature, "seed": settings.seed,
    }  # fmt: skip


def _run(outcome: Outcome, steps: int, is_same: bool) -> dict[str, Any]:
    row = {name: value for name, value in asdict(outcome).items() if name not in ("tokens", "logits")}
    return {
        **row,
        "tokens_per_s": steps / outcome.wall_s,
        "logits": outcome.logits.hex(),
        "identical": is_same,
    }


def as_text(result: Mapping[str, Any]) -> str:
    """Conditions, then a row a run."""
    about, runs = result["conditions"], result["runs"]
    device = about["device"]
    pace = f"{device['latency_us']:g} us, {device['bytes_per_s'] / 1e6:g} MB/s"
    low, high = about["context_tokens"]
    lines = [
        f"{about['model']}: context {low:,} to {high:,} tokens, {about['steps']} steps x {about['layers']} layers",
        f"  first {about['sink_tokens']} and last {about['window_tokens']} tokens at hand; {about['cold_blocks']} cold blocks of "
        f"{about['block_tokens']} tokens in dpurt, each layer attends to {about['demanded_per_turn']}",
        f"  staging {about['staging_share']:.0%} of the cold KV ({about['staging_slots']:,} slots, and {about['spare_slots']} to "
        f"pass through); device: {device['kind']}, {pace}",
        f"{'':<16}{'tokens/s':>9}{'hits':>8}{'late':>8}{'stalled':>9}{'stall':>12}{'replay says':>28}",
        f"{'':<16}{'':>9}{'':>8}{'':>8}{'turns':>9}{'ms a step':>12}{'hits':>10}{'late':>8}{'ms':>10}",
        *(_row(run) for run in runs),
        "tokens and logits: " + ("identical in all runs" if result["identical"] else "DIFFERENT"),
    ]
    return "\n".join(lines)


def _row(run: Mapping[str, Any]) -> str:
    head = f"{run['mode']:<16}{run['tokens_per_s']:>9.2f}"
    if not run["counts"]:
        return head
    said = run["predicted"]
    return (
        f"{head}{run['hits']:>8.1%}{run['late']:>8.2%}{run['stalled_turns']:>9.1%}{run['stall_ms_per_step']:>12.1f}"
        f"{said['hits']:>10.1%}{said['late']:>8.2%}{said['stall_ms_per_step']:>10.1f}"
    )
