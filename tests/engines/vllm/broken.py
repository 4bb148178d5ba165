"""Connectors that do wrong on purpose, so that the tests are seen to be able to fail. Loaded by vLLM by module path."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpurt.engines.vllm.connector import DpurtConnector
from dpurt.engines.vllm.pages import Pages


class _OtherBytes(Pages):
    """Bytes that are not those that were stored."""

    @staticmethod
    def change(payloads: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def scatter(self, ids: Sequence[int], payloads: Sequence[Any], part: int, start: int = 0) -> None:
        super().scatter(ids, self.change(payloads), part, start)


class _Zeroes(_OtherBytes):
    @staticmethod
    def change(payloads: Sequence[Any]) -> list[Any]:
        return [np.zeros_like(payload) for payload in payloads]


class _Swapped(_OtherBytes):
    @staticmethod
    def change(payloads: Sequence[Any]) -> list[Any]:
        return [*payloads[1::-1], *payloads[2:]]  # only the first two blocks of a batch


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
