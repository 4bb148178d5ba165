"""Opens a bdev by the name of its kind: `await open_bdev("file", path=..., size_bytes=...)`.

The parameters are those of each backend's own constructor; a wrong one is a ConfigError naming what is
allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from dpurt.bdev import Bdev
from dpurt.bdev.file import FileBdev
from dpurt.bdev.memory import MemoryBdev
from dpurt.bdev.modelled import ModelledBdev
from dpurt.bdev.nvme_rdma import NvmeRdmaBdev
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.bdev.spdk import SpdkBdev
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.errors import ConfigError

__all__ = ["open_bdev"]

_KINDS: dict[str, Callable[..., Bdev | Awaitable[Bdev]]] = {
    "file": FileBdev.open,
    "memory": MemoryBdev,
    "modelled": ModelledBdev,
    "nvme-rdma": NvmeRdmaBdev.open,
    "nvme-tcp": NvmeTcpBdev.open,
    "spdk": SpdkBdev.open,
    "vhost-user": VhostUserBdev.open,
}


async def open_bdev(kind: str, **params: object) -> Bdev:
    """Open the device. Raises ConfigError (unknown kind or parameter) or BdevError (the device itself)."""
    make = _KINDS.get(kind)
    if make is None:
        raise ConfigError("$.bdev.kind", f"unknown kind {kind!r}; known: {', '.join(_KINDS)}")
    try:
        inspect.signature(make).bind(**params)
    except TypeError as error:
        allowed = ", ".join(inspect.signature(make).parameters)
        raise ConfigError("$.bdev", f"kind {kind!r}: {error}; parameters: {allowed}") from error
    made = make(**params)
    return await made if isinstance(made, Awaitable) else made
