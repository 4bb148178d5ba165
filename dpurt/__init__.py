"""dpurt: an offload runtime for LLM KV caches. The names below are public; everything else may change.

They are loaded on first use, so that ``import dpurt`` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpurt.client import BlockingClient as BlockingClient
    from dpurt.client import Client as Client
    from dpurt.client import LoadedBlock as LoadedBlock
    from dpurt.client import connect as connect
    from dpurt.config import Config as Config
    from dpurt.config import load_config as load_config
    from dpurt.core.identity import Geometry as Geometry
    from dpurt.core.identity import LayerGroup as LayerGroup
    from dpurt.core.identity import Space as Space
    from dpurt.node import Node as Node

_HOME = {
    "BlockingClient": "dpurt.client", "Client": "dpurt.client", "LoadedBlock": "dpurt.client", "connect": "dpurt.client",
    "Config": "dpurt.config", "load_config": "dpurt.config",
    "Geometry": "dpurt.core.identity", "LayerGroup": "dpurt.core.identity", "Space": "dpurt.core.identity",
    "Node": "dpurt.node",
}  # fmt: skip
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dpurt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
