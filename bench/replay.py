"""How fast `dpurt replay` is: block references replayed a second of wall time, per policy, on a real trace.

Each policy runs the whole replay (virtual clock, modelled device, real prefetch core) `RUNS` times, in turn with the
others, so that a slow moment of the machine is not one policy's; the figure is the median. There is no peer: no other
tool replays a prefetcher with a bandwidth model. The trace is the whole conversation trace where the folder named in
`DPURT_TRACES` has it, else the slice in this repository, which asks less of a prefetcher.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from dpurt.bench.result import BenchResult, Figure
from dpurt.replay.engine import Scenario, replay
from dpurt.replay.policies import POLICIES
from dpurt.replay.trace import read_mooncake

SUMMARY = "replay speed per policy, in block references a second"

FOLDER, WHOLE = "DPURT_TRACES", "mooncake_conversation.jsonl.gz"
SLICE = Path(__file__).parent / "traces" / "mooncake_conversation_1600.jsonl.gz"
TARGET_REFS_PER_S = 20_000
RUNS = 3


def run(quick: bool) -> BenchResult:
    """Measure every policy; `quick` replays the first 400 requests of the slice, once."""
    folder = os.environ.get(FOLDER)
    whole = Path(folder) / WHOLE if folder and not quick else SLICE
    trace = whole if whole.is_file() else SLICE
    requests = list(read_mooncake(trace, limit=400 if quick else None))
    scenario = Scenario()
    result = BenchResult(
        name="replay",
        conditions={
            "trace": trace.name,
            "requests": len(requests),
            "block_references": sum(len(request.blocks) for request in requests),
            "staging_share": scenario.staging_share,
            "device": scenario.device.name,
            "seed": scenario.seed,
            "runs": 1 if quick else RUNS,
        },
    )
    speeds: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(1 if quick else RUNS):
        for name, policy in POLICIES.items():
            speeds[name].append(replay(requests, policy, scenario).refs_per_s)
    for name, found in speeds.items():
        speed = statistics.median(found)
        result.figures.append(
            Figure(
                name=name,
                value=round(speed),
                unit="block references/s",
                target=f">= {TARGET_REFS_PER_S} block references a second",
                holds=speed >= TARGET_REFS_PER_S,
            )
        )
    return result
