"""The demo's plan: what is scaled, what is counted, and a topology that is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpurt.config import load_config
from dpurt.core.record import RecordLayout
from dpurt.demo.content import payload_of, tokens_of
from dpurt.demo.plan import BLOCK_TOKENS, GROUPS, HOSTS, SEGMENT_BYTES, SPACE, Plan, make_plan, topology_of
from dpurt.replay.trace import Request

BLOCK_BYTES = 64 << 10


def request(at_s: float, *blocks: int, tokens: int | None = None) -> Request:
    count = BLOCK_TOKENS * len(blocks) if tokens is None else tokens
    return Request(timestamp_s=at_s, input_tokens=count, output_tokens=1, blocks=tuple(blocks))


def plan_of(*trace: Request, speed: float = 1.0, block_bytes: int = BLOCK_BYTES) -> Plan:
    return make_plan(list(trace), block_bytes=block_bytes, staging_share=0.5, speed=speed)


def test_time_is_divided_by_the_speed() -> None:
    plan = plan_of(request(0, 1), request(12, 2), request(60, 3), speed=12)
    assert [one.at_s for one in plan.requests] == [0, 1, 5]
    assert plan.span_s == 5


def test_requests_at_one_reading_of_the_trace_clock_come_one_after_the_other() -> None:
    plan = plan_of(*(request(at_s, 1) for at_s in (0, 0, 0, 3, 6, 6)))
    assert [one.at_s for one in plan.requests] == [0, 1, 2, 3, 6, 7.5]
    assert plan.span_s == 7.5


def test_a_pause_in_the_trace_stays_one() -> None:
    plan = plan_of(*(request(at_s, 1) for at_s in (0, 3, 3, 63)))
    assert [one.at_s for one in plan.requests] == [0, 3, 4.5, 63]


def test_a_last_block_that_is_not_full_is_left_out_unless_it_is_the_only_one() -> None:
    plan = plan_of(
        request(0, 1, 2, tokens=2 * BLOCK_TOKENS), request(1, 1, 3, tokens=BLOCK_TOKENS + 1), request(2, 9, tokens=7)
    )  # fmt: skip
    assert [one.blocks for one in plan.requests] == [[1, 2], [1], [9]]


def test_ideal_hits_are_leading_blocks_seen_before() -> None:
    plan = plan_of(request(0, 1, 2), request(1, 1, 2, 3), request(2, 1, 9, 2), request(3, 1, 2, 3))
    assert (plan.block_refs, plan.distinct_blocks, plan.ideal_hits) == (11, 4, 0 + 2 + 1 + 3)


@pytest.mark.parametrize("blocks", [1, 100, 5000])
def test_the_store_holds_every_distinct_block(blocks: int) -> None:
    plan = plan_of(request(0, *range(blocks)))
    record = 4096 + BLOCK_BYTES
    assert plan.store_bytes // SEGMENT_BYTES * ((SEGMENT_BYTES - 8192) // record) >= blocks
    assert plan.staging_blocks == max(64, blocks // 2)


@pytest.mark.parametrize("block_bytes", [16 << 10, 60 << 20, 100 << 20, 1 << 30])
def test_blocks_of_any_size_fit_their_segments(block_bytes: int, tmp_path: Path) -> None:
    plan = plan_of(request(0, *range(10)), block_bytes=block_bytes)
    assert plan.store_bytes >= 6 * plan.segment_bytes
    assert plan.segment_bytes >= 8 * block_bytes
    path = tmp_path / "topology.toml"
    path.write_text(topology_of(plan, tmp_path, "tcp", "lru", 7571))
    assert load_config(path).bdev[0].segment_bytes == plan.segment_bytes
    assert plan.memory_bytes > (64 + 2 * 64) * block_bytes


def test_the_topology_is_valid_and_says_what_the_plan_says(tmp_path: Path) -> None:
    plan = plan_of(request(0, *range(10)))
    path = tmp_path / "topology.toml"
    path.write_text(topology_of(plan, tmp_path, "tcp", "lru", 7571))
    config = load_config(path)
    space = config.to_space(SPACE)
    assert space.geometry.payload_bytes == BLOCK_BYTES
    assert len(space.geometry.groups) == GROUPS
    assert config.staging.bytes == plan.staging_blocks * RecordLayout.of(space).record_bytes
    assert [(host.name, host.fabrics) for host in config.host] == [(name, ("tcp",)) for name in HOSTS]
    assert not config.prefetch.enabled
    assert config.bdev[0].capacity(config) == plan.store_bytes


def test_content_is_a_function_of_identity_alone() -> None:
    assert payload_of(b"k" * 16, 100) == payload_of(b"k" * 16, 200)[:100]
    assert payload_of(b"k" * 16, 100) != payload_of(b"l" * 16, 100)
    assert tokens_of([1, 2], 4)[16:] == tokens_of([2], 4)
    assert len(tokens_of([1, 2], 4)) == 32
