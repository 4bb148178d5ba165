"""The only place that knows an inference engine: its KV events, its words for tiers, where it says it publishes them.

`KINDS` is the table of engines; `kv_events` reads their messages, `Publisher` follows one stream of them, `Residency` enters
it into `HeldBlocks`. All sans-I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dpurt.engines import sglang, vllm
from dpurt.engines.residency import Dialect
from dpurt.engines.sources import Source


class Kind(NamedTuple):
    """`sources` reads the answer to a GET of `discovery_path`; see `vllm.sources`."""

    dialect: Dialect
    discovery_path: str
    sources: Callable[[bytes, str], list[Source]]


KINDS = {
    "vllm": Kind(vllm.DIALECT, vllm.DISCOVERY_PATH, vllm.sources),
    "sglang": Kind(sglang.DIALECT, sglang.DISCOVERY_PATH, sglang.sources),
}
