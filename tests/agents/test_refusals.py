"""The log of refused peers: few lines, nothing of theirs that could pass for ours."""

from __future__ import annotations

import structlog
import trio
from trio.testing import MockClock

from dpurt.agents.refusals import LINES_PER_S, RefusalLog


async def test_a_flood_is_a_few_lines_a_second_and_the_next_counts_the_rest(
    autojump_clock: MockClock,
) -> None:
    refusals = RefusalLog()
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            refusals.warn("hello_refused", host="h")
        assert len(logs) == LINES_PER_S
        await trio.sleep(1.0)
        refusals.warn("hello_refused", host="h")
        refusals.warn("hello_refused", host="h")
    assert [line["not_logged"] for line in logs[LINES_PER_S:]] == [100 - LINES_PER_S, 0]


async def test_what_a_peer_wrote_is_escaped() -> None:
    with structlog.testing.capture_logs() as logs:
        RefusalLog().warn("hello_refused", host="a\n\x1b[2Jb")
    assert logs[0]["host"] == "a\\n\\x1b[2Jb"
