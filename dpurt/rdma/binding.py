"""pyverbs, imported when it is first needed: most machines have none, and the import takes a while.

`verbs()` gives its names; `missing()` says why there is none. pyverbs leaks the element list of every work request that is not
closed by hand (its `__dealloc` is not `__dealloc__`), and making one takes longer than posting it. Hence those of `dpurt.rdma` are
made once and used again and again.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

from dpurt.errors import RdmaUnavailable

__all__ = ["missing", "verbs"]

_NAMES = {
    "addr": ("GID", "AHAttr", "GlobalRoute"),
    "cq": ("CQ", "CompChannel"),
    "device": ("Context", "get_device_list"),
    "mr": ("DmaBufMR", "MR", "MW", "MWBindInfo"),
    "pd": ("PD",),
    "pyverbs_error": ("PyverbsError", "PyverbsRDMAError"),
    "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
    "wr": ("SGE", "RecvWR", "SendWR"),
}


@functools.cache
def _load() -> SimpleNamespace | str:
    names: dict[str, Any] = {}
    try:
        names["enums"] = importlib.import_module("pyverbs.enums")
        for module, wanted in _NAMES.items():
            found = importlib.import_module(f"pyverbs.{module}")
            names |= {name: getattr(found, name) for name in wanted}
    except (ImportError, AttributeError) as error:
        return f"pyverbs cannot be used ({error}): install python3-pyverbs, or dpurt[rdma]"
    return SimpleNamespace(**names)


def missing() -> str:
    """Why pyverbs cannot be used; empty when it can."""
    found = _load()
    return found if isinstance(found, str) else ""


def verbs() -> Any:
    """Everything of pyverbs that is used, in one place. Raises RdmaUnavailable."""
    found = _load()
    if isinstance(found, str):
        raise RdmaUnavailable("", found)
    return found
