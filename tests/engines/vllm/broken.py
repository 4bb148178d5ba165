"""Connectors that do wrong on purpose, so that the tests are seen to be able to fail. Loaded by vLLM by module path."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from dpurt.engines.vllm.connector import DpurtConnector
from dpurt.engines.vllm.pages import Pages


class _Zeroes(Pages):
    """Nothing in the place of what was stored."""

    def scatter(self, ids: Sequence[int], payloads: Sequence[Any], part: int, start: int = 0) -> None:
        super().scatter(ids, [np.zeros_like(payload) for payload in payloads], part, start)


class _Swapped(Pages):
    """The blocks of the load before, for all but the first load. (Blocks of one prompt swapped among themselves would be no error:
    positions are in the keys, and attention does not ask in which order they lie.)
    """

    before: ClassVar[dict[int, list[Any]]] = {}

    def scatter(self, ids: Sequence[int], payloads: Sequence[Any], part: int, start: int = 0) -> None:
        mine = [payload.copy() for payload in payloads]
        super().scatter(ids, self.before.get(part, mine)[: len(ids)], part, start)
        self.before[part] = mine


class ZeroingConnector(DpurtConnector):
    def _pages_of(self, kv_caches: Any) -> Pages:
        pages = super()._pages_of(kv_caches)
        pages.__class__ = _Zeroes
        return pages


class SwappingConnector(DpurtConnector):
    def _pages_of(self, kv_caches: Any) -> Pages:
        pages = super()._pages_of(kv_caches)
        pages.__class__ = _Swapped
        return pages


class StoppingConnector(DpurtConnector):
    """Stops the node (SIGNAL to process NODE_PID) after it promised blocks and before they are loaded."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._get_connector_metadata().step.loads:
            os.kill(int(os.environ["NODE_PID"]), signal.Signals[os.environ["SIGNAL"]])
        super().start_load_kv(forward_context, **kwargs)
