"""The RPC methods that a profile may use to make bdevs: their parameters, and where those show in a target's answers.

A table, in the target's own names. A parameter that does not show (a file's `fallocate`) cannot be compared, and
is taken to be as wanted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "Kind"]

Json = Mapping[str, Any]


def _named(name: str, params: Json) -> bool:
    return bool(params.get("name") == name)


@dataclass(frozen=True, slots=True)
class Kind:
    """A method: its parameters, which of them show where in `bdev_get_bdevs`, and which name other bdevs."""

    required: frozenset[str]
    optional: frozenset[str]
    product: str
    shows: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    makes: Callable[[str, Json], bool] = _named
    live: frozenset[str] = frozenset()


def _kind(required: str, optional: str, product: str, **more: Any) -> Kind:
    return Kind(frozenset(required.split()), frozenset(optional.split()), product, **more)


_SIZES = {"num_blocks": "num_blocks", "block_size": "block_size"}
_LATENCIES = ("avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency")

KINDS: dict[str, Kind] = {
    "bdev_malloc_create": _kind(
        "name num_blocks block_size", "uuid optimal_io_boundary physical_block_size numa_id", "Malloc disk",
        shows={**_SIZES, "uuid": "uuid"},
    ),
    "bdev_null_create": _kind(
        "name num_blocks block_size", "uuid physical_block_size", "Null disk", shows={**_SIZES, "uuid": "uuid"}
    ),
    "bdev_aio_create": _kind(
        "name filename", "block_size readonly fallocate uuid nowait", "AIO disk",
        shows={
            "filename": "driver_specific.aio.filename", "block_size": "block_size", "uuid": "uuid",
            "readonly": "driver_specific.aio.readonly",
        },
    ),
    "bdev_uring_create": _kind(
        "name filename", "block_size uuid", "URING bdev",
        shows={"filename": "driver_specific.uring.filename", "block_size": "block_size", "uuid": "uuid"},
    ),
    "bdev_nvme_attach_controller": _kind(
        "name trtype traddr",
        "adrfam trsvcid subnqn hostnqn multipath hdgst ddgst ctrlr_loss_timeout_sec reconnect_delay_sec "
        "fast_io_fail_timeout_sec num_io_queues",
        "NVMe",
        shows={
            name: f"driver_specific.nvme.0.trid.{name}" for name in ("trtype", "traddr", "trsvcid", "subnqn")
        },
        makes=lambda name, params: re.fullmatch(re.escape(str(params["name"])) + r"n[1-9]\d*", name) is not None,
    ),
    "bdev_lvol_create_lvstore": _kind(
        "bdev_name lvs_name", "cluster_sz clear_method", "", bases=("bdev_name",),
        makes=lambda name, params: bool(params["lvs_name"] == name),
    ),
    "bdev_lvol_create": _kind(
        "lvol_name lvs_name size_in_mib", "thin_provision clear_method", "Logical Volume",
        shows={"thin_provision": "driver_specific.lvol.thin_provision"}, bases=("lvs_name",),
        makes=lambda name, params: name == f"{params['lvs_name']}/{params['lvol_name']}",
    ),
    "bdev_crypto_create": _kind(
        "name base_bdev_name key_name", "", "crypto",
        shows={name: f"driver_specific.crypto.{name}" for name in ("base_bdev_name", "key_name")},
        bases=("base_bdev_name",),
    ),
    "bdev_raid_create": _kind(
        "name raid_level base_bdevs", "strip_size_kb uuid superblock", "Raid Volume",
        shows={
            "raid_level": "driver_specific.raid.raid_level", "strip_size_kb": "driver_specific.raid.strip_size_kb",
            "base_bdevs": "driver_specific.raid.base_bdevs_list.*.name", "uuid": "uuid",
        },
        bases=("base_bdevs",),
    ),
    "bdev_delay_create": _kind(
        f"name base_bdev_name {' '.join(_LATENCIES)}", "uuid", "delay",
        shows={name: f"driver_specific.delay.{name}" for name in ("base_bdev_name", *_LATENCIES)},
        bases=("base_bdev_name",), live=frozenset(_LATENCIES),
    ),
    "bdev_error_create": _kind(
        "base_name", "uuid", "Error", shows={"base_name": "driver_specific.error_disk.base_bdev"},
        bases=("base_name",), makes=lambda name, params: name == f"EE_{params['base_name']}",
    ),
}  # fmt: skip
