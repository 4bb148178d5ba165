"""The demo's plan: which requests, how they are scaled, and the topology they run on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpurt.core.record import align_up
from dpurt.demo.host import PlannedRequest
from dpurt.replay.trace import Request

SPACE = "demo-70b"
HOSTS = ("gpu-a", "gpu-b")
GROUPS = 4
BLOCK_TOKENS = 512
SEGMENT_BYTES = 64 << 20
SEGMENT_RECORDS = 8  # at least
INBOUND_BLOCKS = 64
MIN_STAGING_BLOCKS = 64
TRACE_BLOCK_BYTES = 512 * 327_680  # Llama-3-70B, FP16: what one 512-token block really has


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be played, and on what."""

    requests: list[PlannedRequest]
    block_bytes: int
    distinct_blocks: int
    block_refs: int
    ideal_hits: int
    staging_blocks: int
    speed: float
    span_s: float

    @property
    def record_bytes(self) -> int:
        """A block with its header."""
        return align_up(4096) + align_up(self.block_bytes)

    @property
    def segment_bytes(self) -> int:
        """Large enough for a few blocks, however large they are."""
        return max(SEGMENT_BYTES, align_up(8192 + SEGMENT_RECORDS * self.record_bytes))

    @property
    def store_bytes(self) -> int:
        """Room for every distinct block on the bdev, with some to spare."""
        used = self.segment_bytes - self.record_bytes - 8192
        segments = -(-self.distinct_blocks * self.record_bytes // used) + 6
        return segments * self.segment_bytes + (64 << 10)

    @property
    def memory_bytes(self) -> int:
        """DRAM of the node: staging, and what hosts store through."""
        return self.staging_blocks * self.record_bytes + len(HOSTS) * self.inbound_bytes

    @property
    def inbound_bytes(self) -> int:
        """Of each host."""
        return INBOUND_BLOCKS * self.block_bytes


def make_plan(trace: Sequence[Request], *, block_bytes: int, staging_share: float, speed: float) -> Plan:
    """Scale a trace, its arrivals spread (see `spread`). Every request keeps its blocks but the last, which the trace's prompts
    fill only partly.
    """
    requests, seen, refs, ideal = [], set[int](), 0, 0
    times = spread([request.timestamp_s for request in trace])
    for number, (request, at_s) in enumerate(zip(trace, times, strict=True)):
        whole = len(request.blocks) - (request.input_tokens % BLOCK_TOKENS != 0)
        blocks = list(request.blocks[: max(1, whole)])
        requests.append(PlannedRequest(at_s / speed, number, blocks))
        ideal += next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        refs += len(blocks)
    return Plan(
        requests, block_bytes, len(seen), refs, ideal, max(MIN_STAGING_BLOCKS, int(len(seen) * staging_share)), speed,
        times[-1] / speed,
    )  # fmt: skip


def spread(times: Sequence[float]) -> list[float]:
    """Arrivals at one reading of the trace's clock, evenly over one step of it: the least time between two readings, so that a
    pause in the trace stays one.

    Mooncake's traces are rounded to 3 s: left so, ten requests at a time would come at once, and wait for one another.
    """
    readings = [(at_s, len(list(group))) for at_s, group in itertools.groupby(times)]
    step_s = min((later - at_s for (at_s, _), (later, _) in itertools.pairwise(readings)), default=0.0)
    return [at_s + i * step_s / count for at_s, count in readings for i in range(count)]


def topology_of(
    plan: Plan, directory: Path, fabric: str, policy: str, port: int, socket: Path | None = None
) -> str:
    """The demo node's topology, as TOML. `policy`: ``dpurt``, or ``lru``, which reads on demand. `socket`: of a vhost-user-blk
    back end, in the place of a file.
    """
    part = plan.block_bytes // GROUPS
    device = f'kind = "file"\npath = "{directory / "flash.img"}"\nsize_bytes = {plan.store_bytes}'
    if socket is not None:
        device = f'kind = "vhost-user"\npath = "{socket}"'
    groups = "\n".join(
        f'[[space.geometry.groups]]\nname = "layers-{20 * i}-{20 * i + 19}"\nnum_layers = 20\nnum_kv_heads = 8\n'
        f"head_size = 128\npart_bytes = {part}\n"
        for i in range(GROUPS)
    )
    hosts = "\n".join(
        f'[[host]]\nname = "{name}"\nspaces = ["{SPACE}"]\nfabrics = ["{fabric}"]\ninbound_bytes = {plan.inbound_bytes}\n'
        for name in HOSTS
    )
    return f"""\
# Made by `dpurt demo`: one node, two hosts. Block bytes are scaled down from {TRACE_BLOCK_BYTES}.
[node]
name = "demo"
run_dir = "{directory / "run"}"

[gateway]
bind = "tcp://127.0.0.1:{port}"

[staging]
bytes = {plan.staging_blocks * plan.record_bytes}
eviction = "{"predicted" if policy == "dpurt" else "lru"}"

[[bdev]]
name = "flash"
{device}
capacity_bytes = {plan.store_bytes}
segment_bytes = {plan.segment_bytes}
queue_depth = 16

[[tenant]]
name = "demo"
salt = "demo-salt-not-a-secret"

[[space]]
name = "{SPACE}"
model = "llama-3-70b (synthetic KV, scaled)"
revision = "demo"
kv_dtype = "fp16"
tenant = "demo"

[space.geometry]
block_tokens = {BLOCK_TOKENS}

{groups}
{hosts}
[prefetch]
enabled = {"true" if policy == "dpurt" else "false"}
"""
