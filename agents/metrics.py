"""The metrics agent: Prometheus text on loopback HTTP. Reads snapshots, owns nothing else.

Restart: the listener starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dpurt.runtime.actor import Actor
from dpurt.transport import http
from dpurt.transport.http import HttpAnswer, HttpRequest

_NOT_FOUND = HttpAnswer(404, b"", "text/plain")


class StatsCollector(Collector):
    """Every number in the node's nested statistics, as ``dpurt_path_to_it``; names of what is in `LABELLED` become the
    label `of`, of nested ones the last.

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


_LEDGER = frozenset({"open", "accuracy", "coverage", "lead_p10_s", "lead_p50_s", "lead_p90_s"})
# tables all of whose numbers only grow, but for those named
GROWING: dict[str, frozenset[str]] = {
    "hosts": frozenset(),
    "gateway": frozenset({"sessions", "scopes"}),
    "intake": frozenset({"reserved", "dirty"}),
    "io": frozenset({"in_flight", "abandoned"}),
    "fabrics": frozenset({"links"}),
    "agents": frozenset(),
    "ranks": frozenset({"blocks_held", "is_silent", "is_partial", "stale_s"}),
    "served": frozenset(),
    **dict.fromkeys(("total", "predictors", "by_space", "ledger"), _LEDGER),
    "drops": frozenset(),
    "reads": frozenset(),
}


def only_grows(path: Sequence[str]) -> bool:
    """Is this a counter for certain? The others are gauges, which Prometheus takes anything from."""
    return any(word in GROWING and path[-1] not in GROWING[word] for word in path[:-1])


LABELLED = frozenset(
    {
        "hosts",
        "spaces",
        "fabrics",
        "predictors",
        "by_space",
        "trust",
        "placement",
        "rails",
        "bdevs",
        "drives",
        "decode",
        "ranks",
        "policies",
    }
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
        listeners = await http.listen(self._bind)
        self.port = http.port_of(listeners)
        task_status.started()
        await http.serve(listeners, self._answer, max_bytes=0)

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        if (request.method, request.path) != ("GET", "/metrics"):
            return _NOT_FOUND
        return HttpAnswer(200, generate_latest(self._registry), "text/plain; version=0.0.4")
