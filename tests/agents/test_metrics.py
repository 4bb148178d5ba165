"""The metrics page: what Prometheus parses, and nothing else on that port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from dpurt.agents.metrics import MetricsAgent, flatten
from dpurt.testing.node import running, small_config
from dpurt.transport.http import MAX_HEAD_BYTES

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
STATS: Mapping[str, object] = {
    "node": {"name": "n", "uptime_s": 1.5, "is_up": True},
    "hosts": {"gpu-a": {"blocks": 3, "misses": {"no_room": 1}}, "gpu-b": {"blocks": 4, "misses": {}}},
    "prefetch": {"accuracy": None, "predictors": {"hint": {"planned": 2, "open": 1}}},
    "placement": {"gpu-a": {"slots": 8, "ledger": {"planned": 5}}},
}


@asynccontextmanager
async def metrics_port(stats: Mapping[str, object] = STATS) -> AsyncIterator[int]:
    agent = MetricsAgent("127.0.0.1:0", lambda: stats)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        yield agent.port
        nursery.cancel_scope.cancel()


async def ask(port: int, request: bytes) -> tuple[bytes, bytes]:
    """(head, body)"""
    answer = b""
    with trio.fail_after(10):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            async for chunk in stream:
                answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def samples(page: bytes) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(page.decode())
    return {(s.name, s.labels.get("of", "")): s.value for family in families for s in family.samples}


async def test_the_page_has_every_number_with_names_as_labels() -> None:
    async with metrics_port() as port:
        head, body = await ask(port, GET)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert f"Content-Length: {len(body)}".encode() in head
    assert samples(body) == {
        ("dpurt_node_uptime_s", ""): 1.5,
        ("dpurt_node_is_up", ""): 1.0,
        ("dpurt_hosts_blocks_total", "gpu-a"): 3.0,
        ("dpurt_hosts_blocks_total", "gpu-b"): 4.0,
        ("dpurt_hosts_misses_no_room_total", "gpu-a"): 1.0,
        ("dpurt_prefetch_predictors_planned_total", "hint"): 2.0,
        ("dpurt_prefetch_predictors_open", "hint"): 1.0,
        ("dpurt_placement_ledger_planned_total", "gpu-a"): 5.0,
        ("dpurt_placement_slots", "gpu-a"): 8.0,
    }


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404"), (b"GET /metricsx HTTP/1.1", b"404"), (b"POST /metrics HTTP/1.1", b"404"),
        (b"nonsense", b"400"),
    ],
)  # fmt: skip
async def test_anything_else_is_not_found(request_line: bytes, status: bytes) -> None:
    async with metrics_port() as port:
        head, body = await ask(port, request_line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert not body or status == b"400", "a refusal says why, and nothing of the node"
    assert b"dpurt_" not in body


async def test_an_endless_request_and_a_vanishing_client_do_no_harm() -> None:
    async with metrics_port() as port:
        head, _ = await ask(port, b"GET /" + b"x" * MAX_HEAD_BYTES)
        assert head.startswith(b"HTTP/1.1 431")
        (await trio.open_tcp_stream("127.0.0.1", port)).socket.close()
        head, _ = await ask(port, GET)
        assert head.startswith(b"HTTP/1.1 200")


async def test_without_an_address_nothing_listens() -> None:
    agent = MetricsAgent("", dict)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        assert agent.port == 0
        nursery.cancel_scope.cancel()


def test_only_numbers_are_flattened() -> None:
    assert list(flatten({"a": {"b": 1, "c": "text", "d": None, "e": [1]}})) == [(("a", "b"), 1.0)]


async def test_a_whole_nodes_statistics_are_a_valid_page(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", metrics={"bind": "127.0.0.1:0"})
    async with running(config) as node:
        head, body = await ask(node.metrics.port, GET)
        assert head.startswith(b"HTTP/1.1 200")
        page = samples(body)
        assert page["dpurt_spaces_staging_total", "s"] == 64
        assert page["dpurt_node_incarnation", ""] == 1
        assert len(page) > 100
        assert b'of=""' not in body
        kinds = {family.name: family.type for family in text_string_to_metric_families(body.decode())}
        assert kinds["dpurt_gateway_messages"] == kinds["dpurt_bdevs_io_bytes_read"] == "counter"
        assert kinds["dpurt_gateway_sessions"] == kinds["dpurt_bdevs_io_in_flight"] == "gauge"
