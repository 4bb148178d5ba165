"""Prefetch on a live node against its replay: `lru` and `dpurt` on the same requests, and what the replay of each recording says.

A node process (`dpurt serve --record --pace`) on a `modelled` bdev: memory that answers at a stated bandwidth and latency. Hosts
over ZeroMQ, with real bytes (`dpurt.bench.live_hosts`). All clocks run so many times faster than the wall's, and an agent
trace's blocks have fewer bytes, the same for both policies. Then each recording

- is replayed (`dpurt replay RECORDING`): the engine's model of that node predicts hits and lateness;
- is fed back (`dpurt replay RECORDING --verify`): the same cores, told the recorded completions, must decide as they did;
- is replayed under the other policy: what the node would have done with it, before it is tried.

Hits and lateness (a block found on its way when it was needed) are shares of all block references, differences in points. What is
predicted is a node with the CPU it needs: where arrivals came late because the machine was busy with something else, a
difference is no verdict (`arrivals_late_s`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from dpurt.bench.live_hosts import Heard, Job, Pace
from dpurt.bench.result import BenchResult, Figure
from dpurt.demo.nodes import NodeProcess
from dpurt.errors import DpurtError
from dpurt.replay.decisions import Verdict, verify
from dpurt.replay.engine import Scenario, replay
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.policies import POLICIES
from dpurt.replay.recorded import Recorded, figures_of, hint_to_read_s
from dpurt.replay.recording import Recording, read_recording, requests_of, scenario_of
from dpurt.replay.report import Result, percentile
from dpurt.replay.trace import Request

SUMMARY = (
    "prefetch on a live node with a throttled device, lru against dpurt, beside the replay of its recordings"
)
TRACE = "weka_sessions_12.jsonl.gz"
TRACE_BLOCK_TOKENS = 2048
WITHIN_POINTS = 2.0
SEEDS = 5  # of the replays' device and hosts
STALL_S = 0.5  # an arrival so late means a machine with other things to do: a difference proves nothing then
COMPARED = ("hits", "in flight at need")  # shares of all references; of used prefetches there are too few
PATIENCE_S = 300.0  # of all parties, on their clock
SPACE, HOST = "live", "live-host"
NODE_BLOCK_TOKENS = 16  # tokens are made up from block ids, so a few a block will do
POLICY_TABLES = {
    "lru": ('eviction = "lru"', "enabled = false"),
    "dpurt": ('eviction = "predicted"', "enabled = true"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One experiment. Rates and times are of the traced system; `speed` is the pace of all clocks, `block_bytes` stands for its
    blocks.
    """

    span_s: float = 400.0
    speed: float = 4.0
    staging_share: float = 0.2
    kv_bytes_per_token: int = 160 << 10  # Llama-3-70B, FP8
    device_bytes_per_s: float = 3.5e9
    device_latency_s: float = 0.001
    queue_depth: int = 6
    block_bytes: int = 128 << 10
    hosts: int = 8
    prefill_tokens_per_s: float = 10_000.0
    decode_step_s: float = 0.03

    @property
    def record_bytes(self) -> int:
        """A block with its header."""
        return 4096 + self.block_bytes

    @property
    def live_bytes_per_s(self) -> int:
        """The device's rate in scaled bytes."""
        block_s = TRACE_BLOCK_TOKENS * self.kv_bytes_per_token / self.device_bytes_per_s
        return int(self.record_bytes / block_s)

    @property
    def pace(self) -> Pace:
        """The hosts'."""
        compute_s = TRACE_BLOCK_TOKENS / self.prefill_tokens_per_s
        return Pace(hosts=self.hosts, compute_s=compute_s, decode_step_s=self.decode_step_s)

    def requests(self) -> list[Request]:
        """Of the trace, from time 0."""
        with resources.as_file(resources.files("dpurt.bench") / "traces" / TRACE) as path:
            trace = read_trace(path, Reading(block_tokens=TRACE_BLOCK_TOKENS))
        start = trace.requests[0].timestamp_s
        return [
            replace(request, timestamp_s=request.timestamp_s - start)
            for request in trace.requests
            if request.timestamp_s - start < self.span_s
        ]


QUICK = Setup(span_s=150.0, speed=6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One policy's run: its recording, what its node and hosts counted, and the decisions fed back."""

    policy: str
    recording: Recording
    recorded: Recorded
    heard: Heard
    ledger: dict[str, Any]
    verdict: Verdict

    def shares(self) -> dict[str, float]:
        """What is compared, in percent."""
        recorded, ledger = self.recorded, self.ledger
        return _shares(
            recorded.share(recorded.staging),
            recorded.share(recorded.in_flight),
            ledger.get("timely", 0),
            ledger.get("late", 0),
        )


def run(quick: bool) -> BenchResult:
    """Both policies, then the replays."""
    return compare(QUICK if quick else Setup())


def compare(setup: Setup) -> BenchResult:
    """The experiment."""
    requests = setup.requests()
    with tempfile.TemporaryDirectory(prefix="dpurt-live-") as name:
        lives = play_all(requests, setup, Path(name))
    result = BenchResult(name="live", conditions=_conditions(setup, requests, lives))
    for live in lives:
        result.figures += _figures(live, setup)
    result.figures += _gains(lives, setup)
    return result


# --- the live run -----------------------------------------------------------------------------------------------------


def play_all(requests: Sequence[Request], setup: Setup, folder: Path) -> list[Live]:
    """Every policy on a node of its own, at the same time: what else the machine does hits them alike."""
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(play, policy, requests, setup, folder / policy) for policy in POLICY_TABLES]
        return [run.result() for run in runs]


def play(policy: str, requests: Sequence[Request], setup: Setup, folder: Path) -> Live:
    """One policy on a node of its own, in a new folder; the recording stays there."""
    folder.mkdir()
    topology, record = folder / "live.toml", folder / "node.recording"
    topology.write_text(_topology(policy, requests, setup, folder))
    options = ["--record", str(record), "--pace", str(setup.speed)]
    with NodeProcess(topology, folder / "run", folder / "node.log", options) as node:
        heard = drive(topology, node.endpoint, requests, setup)
        stats: dict[str, Any] = node.stats()
        node.terminate()
    recording = read_recording(record)
    return Live(
        policy=policy,
        recording=recording,
        recorded=figures_of(recording),
        heard=heard,
        ledger=stats["prefetch"].get("total", {}),
        verdict=verify(recording),
    )


def drive(topology: Path, endpoint: str, requests: Sequence[Request], setup: Setup) -> Heard:
    """The hosts, as a process of their own. DpurtError with the end of what it said when it fails."""
    job_path, result = topology.with_name("hosts.json"), topology.with_name("heard.json")
    job = Job(
        topology=str(topology), endpoint=endpoint, host=HOST, space=SPACE, speed=setup.speed, patience_s=PATIENCE_S,
        pace=setup.pace, requests=list(requests), result=str(result),
    )  # fmt: skip
    job_path.write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "dpurt.bench.live_hosts", str(job_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DpurtError(f"the hosts failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return msgspec.json.decode(result.read_bytes(), type=Heard)


def _topology(policy: str, requests: Sequence[Request], setup: Setup, folder: Path) -> str:
    distinct = len({block for request in requests for block in request.blocks})
    segment = 8 << 20
    size = (distinct * setup.record_bytes // (segment - 2 * setup.record_bytes) + 8) * segment
    eviction, prefetch = POLICY_TABLES[policy]
    return f"""\
[node]
name = "live"
run_dir = "{folder / "run"}"
[gateway]
bind = "tcp://127.0.0.1:0"
session_timeout_s = {PATIENCE_S}
[staging]
bytes = {max(16, int(distinct * setup.staging_share)) * setup.record_bytes}
{eviction}
[[bdev]]
name = "throttled"
kind = "modelled"
size_bytes = {size + (64 << 10)}
segment_bytes = {segment}
queue_depth = {setup.queue_depth}
deadline_s = {PATIENCE_S}
[bdev.profile]
read_latency_us = {round(setup.device_latency_s * 1e6)}
write_latency_us = 0
read_bytes_per_s = {setup.live_bytes_per_s}
write_bytes_per_s = {10**11}
[[tenant]]
name = "live"
salt = "a salt that protects nothing"
[[space]]
name = "{SPACE}"
model = "synthetic"
revision = "1"
kv_dtype = "fp8"
tenant = "live"
[space.geometry]
block_tokens = {NODE_BLOCK_TOKENS}
[[space.geometry.groups]]
name = "all"
num_layers = 1
num_kv_heads = 1
head_size = 8
part_bytes = {setup.block_bytes}
[[host]]
name = "{HOST}"
spaces = ["{SPACE}"]
fabrics = ["shm"]
inbound_bytes = {64 * setup.block_bytes}
[prefetch]
{prefetch}
bandwidth_bytes_per_s = {setup.live_bytes_per_s}
"""


# --- beside the replay ------------------------------------------------------------------------------------------------


def predict(live: Live, policy: str, setup: Setup) -> dict[str, float]:
    """What replays of a recording say of a policy, a mean over seeds. What it says of node and hosts is all they know."""
    pace = setup.pace
    base = Scenario(decode_step_s=pace.decode_step_s, device=NO_TAIL)
    scenario = scenario_of(live.recording, base)
    requests = requests_of(live.recording, pace.decode_step_s)
    runs = [
        _predicted(replay(requests, POLICIES[policy], replace(scenario, seed=seed))) for seed in range(SEEDS)
    ]
    return {name: fmean(run[name] for run in runs) for name in runs[0]}


NO_TAIL = replace(Scenario().device, jitter=0.1, tail_probability=0.0)


def _figures(live: Live, setup: Setup) -> list[Figure]:
    measured, predicted = live.shares(), predict(live, live.policy, setup)
    figures = [_beside(live, name, measured[name], predicted[name]) for name in measured if name in predicted]
    decisions = sum(live.verdict.decisions.values())
    return [
        *figures,
        Figure(
            name=f"{live.policy}: decisions fed back, equal",
            value=decisions,
            unit="decisions" if live.verdict.is_equal else live.verdict.difference,
            target="every one",
            holds=live.verdict.is_equal and decisions > 0,
        ),
        Figure(
            name=f"{live.policy}: wrong bytes of {live.heard.checked_bytes:,}",
            value=live.heard.wrong_bytes,
            unit="bytes",
            target="0",
            holds=not live.heard.wrong_bytes and live.heard.checked_bytes > 0,
        ),
    ]


def _beside(live: Live, name: str, measured: float, predicted: float) -> Figure:
    is_near = abs(measured - predicted) <= WITHIN_POINTS
    return Figure(
        name=f"{live.policy}: {name}",
        value=measured,
        unit="%",
        peer="replay of its recording",
        peer_value=predicted,
        target=f"within {WITHIN_POINTS:g} points" if name in COMPARED else None,
        holds=None if not is_near and live.heard.late_s > STALL_S else is_near,
    )


def _gains(lives: Sequence[Live], setup: Setup) -> list[Figure]:
    """What `dpurt` is worth over `lru`, live, and as predicted from the recording made without it."""
    lru, dpurt = lives
    gained = dpurt.shares()["hits"] - lru.shares()["hits"]
    before, after = (predict(lru, policy, setup)["hits"] for policy in ("lru", "dpurt"))
    latencies = list(hint_to_read_s(dpurt.recording.lines))
    return [
        Figure(
            name="dpurt over lru: hits",
            value=gained,
            unit="points",
            peer="replay of lru's recording under both",
            peer_value=after - before,
            target="> 0",
            holds=gained > 0,
        ),
        Figure(
            name="hint to read, p50",
            value=percentile(latencies, 0.5) / setup.speed * 1e6,
            unit="us of wall time",
        ),
        Figure(
            name="hint to read, p99",
            value=percentile(latencies, 0.99) / setup.speed * 1e6,
            unit="us of wall time",
        ),
    ]


def _predicted(result: Result) -> dict[str, float]:
    references = max(1, sum(result.sources.values()))
    in_flight = result.sources["in_flight"] / references
    return _shares(result.hit_rate["blocks"], in_flight, result.timely, result.late)


def _shares(hits: float, in_flight: float, timely: int, late: int) -> dict[str, float]:
    shares = {"hits": 100 * hits, "in flight at need": 100 * in_flight}
    if timely + late:
        shares["late of used prefetches"] = 100 * late / (timely + late)
    return shares


def _conditions(setup: Setup, requests: Sequence[Request], lives: Sequence[Live]) -> dict[str, object]:
    return {
        "trace": f"{TRACE}, first {setup.span_s:g} s, blocks of {TRACE_BLOCK_TOKENS} tokens",
        "requests": len(requests),
        "references": sum(len(request.blocks) for request in requests),
        "distinct_blocks": len({block for request in requests for block in request.blocks}),
        "staging_slots": lives[0].recording.header.pools[0].slots,
        "time_scale": setup.speed,
        "bytes_scale": TRACE_BLOCK_TOKENS * setup.kv_bytes_per_token / setup.block_bytes,
        "device": f"modelled bdev, {setup.device_bytes_per_s:g} B/s and {setup.device_latency_s:g} s",
        "device_bytes_per_s_scaled": setup.live_bytes_per_s,
        "hosts": setup.hosts,
        "ledger": {live.policy: live.ledger for live in lives},
        "sources": {live.policy: asdict(live.recorded) for live in lives},
        "hosts_saw": {live.policy: _seen(live.heard) for live in lives},
        "lines_lost": sum(live.recording.lost for live in lives),
    }  # fmt: skip


def _seen(heard: Heard) -> dict[str, object]:
    return {
        "loaded": heard.loaded, "computed": heard.computed, "not_ok": heard.not_ok, "not_stored": heard.not_stored,
        "arrivals_late_s": round(heard.late_s, 4), "staged_load_ms": round(1e3 * percentile(heard.staged_load_s, 0.5), 3),
    }  # fmt: skip
