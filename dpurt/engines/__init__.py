"""The only place that knows an inference engine: its KV events, its words for tiers, where it says it publishes them.

`KINDS` is the table of engines; `kv_events` reads their messages, `Publisher` follows one stream of them, `Residency` enters
it into `HeldBlocks`. All sans-I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dpurt.engines import sglang_events, vllm_events
from dpurt.engines.residency import Dialect
from dpurt.engines.sources import Source


class Kind(NamedTuple):
    """`sources` reads the answer to a GET of `discovery_path`; see `vllm_events.sources`."""

    dialect: Dialect
    discovery_path: str
    sources: Callable[[bytes, str], list[Source]]


KINDS = {
    "vllm": Kind(vllm_events.DIALECT, vllm_events.DISCOVERY_PATH, vllm_events.sources),
    "sglang": Kind(sglang_events.DIALECT, sglang_events.DISCOVERY_PATH, sglang_events.sources),
}
