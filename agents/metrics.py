"""The metrics agent: Prometheus text on loopback HTTP. Reads snapshots, owns nothing else.

Restart: the listener starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dpurt.runtime.actor import Actor

log = structlog.get_logger()
MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class StatsCollector(Collector):
    """Every number in the node's nested statistics, as ``dpurt_path_to_it``; names of spaces, hosts ... become a label.

    What only grows in a node's life is a counter, and ends in ``_total``.
    """

    def __init__(self, stats: Callable[[], Mapping[str, object]]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # asked for at registration, when the node is not up yet

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for path, value in flatten(self._stats()):
            name, label = _metric_name(path)
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if only_grows(path) else GaugeMetricFamily
                text = f"dpurt {'.'.join(path)}"
                family = families[name] = kind(name, text, labels=["of"] if label else [])
            family.add_metric([label] if label else [], value)
        yield from families.values()


# tables all of whose numbers only grow, but for those named
GROWING: dict[str, frozenset[str]] = {
    "hosts": frozenset(),
    "gateway": frozenset({"sessions", "scopes"}),
    "intake": frozenset({"reserved", "dirty"}),
    "io": frozenset({"in_flight", "abandoned"}),
    "fabrics": frozenset({"links"}),
    "agents": frozenset(),
    "ranks": frozenset({"blocks_held", "is_silent", "is_partial", "stale_s"}),
    "drops": frozenset(),
    "reads": frozenset(),
}


def only_grows(path: Sequence[str]) -> bool:
    """Is this a counter for certain? The others are gauges, which Prometheus takes anything from."""
    return any(word in GROWING and path[-1] not in GROWING[word] for word in path[:-1])


LABELLED = frozenset(
    {"hosts", "spaces", "fabrics", "predictors", "bdevs", "drives", "decode", "ranks", "policies"}
)  # their keys are names, not fields


def flatten(
    stats: Mapping[str, object], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) of each number in nested maps."""
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, str(key)))
        elif isinstance(value, (int, float)):
            yield (*path, str(key)), float(value)


def _metric_name(path: tuple[str, ...]) -> tuple[str, str]:
    label, words = "", []
    for before, word in zip(("", *path), path, strict=False):
        if before in LABELLED:
            label = word
        else:
            words.append(word)
    name = "dpurt_" + "_".join(words)
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name), label


class MetricsAgent(Actor[None]):
    """Telemetry."""

    name = "metrics"

    def __init__(self, bind: str, stats: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(1)
        self._bind = bind
        self.port = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatsCollector(stats))

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        if not self._bind:
            task_status.started()
            await trio.sleep_forever()
        host, _, port = self._bind.rpartition(":")
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._answer, listeners)

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            with trio.move_on_after(REQUEST_S):
                try:
                    head = await _request_head(stream)
                    await stream.send_all(self._page() if head.startswith(b"GET /metrics ") else _NOT_FOUND)
                except trio.BrokenResourceError:
                    return

    def _page(self) -> bytes:
        text = generate_latest(self._registry)
        return _PAGE % (len(text), text)


async def _request_head(stream: trio.SocketStream) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MAX_REQUEST_BYTES:
        more = await stream.receive_some(4096)
        if not more:
            break
        head += more
    return head
