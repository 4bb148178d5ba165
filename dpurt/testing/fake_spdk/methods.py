"""The RPC methods of the fake target: strict parameters, and the codes a real target answers with.

Each method is declared with its parameters (``*`` = required) and works on a `FakeTarget`. Codes and texts are those
measured on a real target, odd ones included: they are negative errno or JSON-RPC codes, as each method likes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from dpurt.testing.fake_spdk.state import (
    FakeBdev,
    FakeTarget,
    Fault,
    Listener,
    Lvstore,
    Namespace,
    Subsystem,
    VhostBlk,
)

__all__ = ["RpcFailure", "call"]

INVALID_PARAMS, INTERNAL, NO_METHOD = -32602, -32603, -32601
Params = Mapping[str, Any]


class RpcFailure(Exception):
    """An error answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class _Method:
    run: Callable[[FakeTarget, Params], object]
    params: dict[str, type]
    required: frozenset[str]
    bad_params: int


_METHODS: dict[str, _Method] = {}
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}


def _method(
    spec: str = "", bad_params: int = INTERNAL
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register a function under its own name; `spec` is ``"*name:str size:int"``."""
    words = [word.split(":") for word in spec.split()]

    def register(run: Callable[..., object]) -> Callable[..., object]:
        _METHODS[run.__name__] = _Method(
            run,
            {name.lstrip("*"): _TYPES[kind] for name, kind in words},
            frozenset(name[1:] for name, _ in words if name.startswith("*")),
            bad_params,
        )
        return run

    return register


async def call(target: FakeTarget, name: str, params: object) -> object:
    """Carry out one call. Raises RpcFailure."""
    method = _METHODS.get(name)
    if method is None:
        raise RpcFailure(NO_METHOD, "Method not found")
    if not target.initialized and name not in _BEFORE_INIT:
        raise RpcFailure(-1, "Method may only be called after framework is initialized")
    given = _checked(method, params)
    if name == "bdev_get_bdevs" and given.get("timeout"):
        return await _wait_for_bdev(target, given)
    return method.run(target, given)


_BEFORE_INIT = {"spdk_get_version", "framework_start_init", "rpc_get_methods", "framework_get_reactors"}


def _checked(method: _Method, params: object) -> Params:
    given = {} if params is None else params
    good = isinstance(given, dict) and set(given) <= set(method.params) and method.required <= set(given)
    if not good or not all(_fits(value, method.params[name]) for name, value in given.items()):  # type: ignore[attr-defined]
        raise RpcFailure(method.bad_params, "spdk_json_decode_object failed")
    return given  # type: ignore[return-value]


def _fits(value: object, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, kind)


async def _wait_for_bdev(target: FakeTarget, given: Params) -> object:
    with trio.move_on_after(given["timeout"] / 1000):
        await target.appeared(given["name"])
        return bdev_get_bdevs(target, {"name": given["name"]})
    raise RpcFailure(-errno.ETIMEDOUT, "Connection timed out")


def _bdev(target: FakeTarget, name: str) -> FakeBdev:
    found = target.find(name)
    if found is None:
        raise RpcFailure(-errno.ENODEV, "No such device")
    return found


def _added(target: FakeTarget, bdev: FakeBdev) -> str:
    if target.find(bdev.name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    return target.add(bdev).name


def _removed(target: FakeTarget, name: str) -> bool:
    target.remove(_bdev(target, name))
    return True


# --- the application ---


@_method()
def spdk_get_version(target: FakeTarget, params: Params) -> object:
    fields = {"major": 26, "minor": 9, "patch": 0, "suffix": "-fake"}
    return {"version": "SPDK v26.09-fake", "fields": fields}


@_method()
def rpc_get_methods(target: FakeTarget, params: Params) -> object:
    return sorted(_METHODS)


@_method()
def framework_start_init(target: FakeTarget, params: Params) -> object:
    target.initialized = True
    return True


@_method()
def framework_wait_init(target: FakeTarget, params: Params) -> object:
    return True


@_method()
def framework_get_reactors(target: FakeTarget, params: Params) -> object:
    target.ticks += 1000
    core = {"lcore": 0, "busy": target.ticks // 4, "idle": target.ticks - target.ticks // 4, "lw_threads": []}
    return {"tick_rate": 1_000_000, "pid": 1, "reactors": [core]}


@_method()
def thread_get_stats(target: FakeTarget, params: Params) -> object:
    return {"tick_rate": 1_000_000, "threads": [{"name": "app_thread", "id": 1, "busy": 1, "idle": 3}]}


@_method()
def iobuf_get_stats(target: FakeTarget, params: Params) -> object:
    pool = {"cache": 0, "main": 0, "retry": 0}
    return [{"module": "bdev", "small_pool": pool, "large_pool": pool}]


@_method()
def notify_get_types(target: FakeTarget, params: Params) -> object:
    return ["bdev_register", "bdev_unregister", "bdev_resize"]


@_method("id:int max:int")
def notify_get_notifications(target: FakeTarget, params: Params) -> object:
    first = params.get("id", 0)
    return target.notifications[first : first + params.get("max", len(target.notifications))]


# --- bdevs ---


@_method()
def bdev_wait_for_examine(target: FakeTarget, params: Params) -> object:
    return True


@_method("name:str timeout:int")
def bdev_get_bdevs(target: FakeTarget, params: Params) -> object:
    if "name" in params:
        return [_shown(_bdev(target, params["name"]))]
    return [_shown(bdev) for bdev in target.bdevs.values()]


_LIMITS = ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")


def _shown(bdev: FakeBdev) -> dict[str, object]:
    return {
        "name": bdev.name,
        "aliases": bdev.aliases,
        "product_name": bdev.product_name,
        "block_size": bdev.block_size,
        "num_blocks": bdev.size // bdev.block_size,
        "uuid": bdev.uuid,
        "assigned_rate_limits": {limit: bdev.limits.get(limit, 0) for limit in _LIMITS},
        "claimed": bool(bdev.claim),
        "zoned": False,
        "supported_io_types": {"read": True, "write": True, "unmap": True, "flush": True},
        "driver_specific": bdev.driver_specific,
    }


_COUNTERS = ("bytes_read", "num_read_ops", "bytes_written", "num_write_ops", "bytes_unmapped", "num_unmap_ops",
             "read_latency_ticks", "write_latency_ticks")  # fmt: skip


@_method("names:list per_channel:bool reset_mode:str")
def bdev_get_iostat(target: FakeTarget, params: Params) -> object:
    chosen = [_bdev(target, name) for name in params["names"]] if "names" in params else target.bdevs.values()
    shown = [
        {"name": bdev.name, **{name: bdev.counters.get(name, 0) for name in _COUNTERS}, "io_error": {}}
        for bdev in chosen
    ]
    return {"tick_rate": 1_000_000, "ticks": target.ticks, "bdevs": shown}


@_method("*name:str rw_ios_per_sec:int rw_mbytes_per_sec:int r_mbytes_per_sec:int w_mbytes_per_sec:int")
def bdev_set_qos_limit(target: FakeTarget, params: Params) -> object:
    bdev = _bdev(target, params["name"])
    wanted = {name: value for name, value in params.items() if name != "name"}
    if not wanted:
        raise RpcFailure(-errno.EINVAL, "No rate limits specified")
    if "rw_ios_per_sec" in wanted:
        wanted["rw_ios_per_sec"] = -(-wanted["rw_ios_per_sec"] // 1000) * 1000
    bdev.limits.update(wanted)
    return True


def _memory(target: FakeTarget, params: Params, product: str) -> object:
    if params["block_size"] % 512 or not params["block_size"] or not params["num_blocks"]:
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    size = params["num_blocks"] * params["block_size"]
    if target.memory_used() + size > target.memory_bytes:
        raise RpcFailure(-errno.ENOMEM, "Cannot allocate memory")
    name = params.get("name") or f"Malloc{len(target.bdevs)}"
    if target.find(name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    return _added(target, FakeBdev(name, params["block_size"], memoryview(bytearray(size)), product))


@_method("*num_blocks:int *block_size:int name:str uuid:str optimal_io_boundary:int physical_block_size:int")
def bdev_malloc_create(target: FakeTarget, params: Params) -> object:
    return _memory(target, params, "Malloc disk")


@_method("*name:str *num_blocks:int *block_size:int uuid:str physical_block_size:int")
def bdev_null_create(target: FakeTarget, params: Params) -> object:
    return _memory(target, params, "Null disk")


def _file(target: FakeTarget, params: Params, product: str, kind: str, missing: RpcFailure) -> object:
    path, block_size = Path(params["filename"]), params.get("block_size") or 512
    if not path.is_file():
        raise missing
    if block_size < 512:
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    data = path.read_bytes()
    image = memoryview(bytearray(data[: len(data) // block_size * block_size]))
    detail: dict[str, object] = {kind: {"filename": str(path)}}
    return _added(target, FakeBdev(params["name"], block_size, image, product, driver_specific=detail))


@_method("*name:str *filename:str block_size:int readonly:bool fallocate:bool uuid:str nowait:bool")
def bdev_aio_create(target: FakeTarget, params: Params) -> object:
    missing = RpcFailure(-errno.ENOENT, "No such file or directory")
    return _file(target, params, "AIO disk", "aio", missing)


@_method("*name:str *filename:str block_size:int uuid:str")
def bdev_uring_create(target: FakeTarget, params: Params) -> object:
    return _file(target, params, "URING bdev", "uring", RpcFailure(INTERNAL, "Unable to create URING bdev."))


def _delete(target: FakeTarget, params: Params) -> object:
    return _removed(target, params["name"])


for _kind in ("malloc", "null", "aio", "uring", "crypto", "delay", "error", "raid", "lvol"):
    _METHODS[f"bdev_{_kind}_delete"] = _Method(_delete, {"name": str}, frozenset({"name"}), INTERNAL)


def _over(target: FakeTarget, base: FakeBdev, name: str, product: str, detail: dict[str, object]) -> FakeBdev:
    """A bdev on top of another one, which it claims."""
    if target.find(name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    if base.claim:
        raise RpcFailure(-errno.EPERM, "Operation not permitted")
    base.claim = product
    return target.add(
        FakeBdev(name, base.block_size, base.image, product, bases=[base.name], driver_specific=detail)
    )


@_method("*base_bdev_name:str *name:str key_name:str")
def bdev_crypto_create(target: FakeTarget, params: Params) -> object:
    base = _bdev(target, params["base_bdev_name"])
    if params.get("key_name") not in target.keys:
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    return _over(target, base, params["name"], "crypto", {"crypto": dict(params)}).name


@_method("*cipher:str *name:str *key:str key2:str tweak_mode:str", INVALID_PARAMS)
def accel_crypto_key_create(target: FakeTarget, params: Params) -> object:
    if params["name"] in target.keys:
        raise RpcFailure(-errno.EEXIST, "File exists")
    if params["cipher"] == "AES_XTS" and params["key"] == params.get("key2", params["key"]):
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    target.keys[params["name"]] = dict(params)
    return True


@_method("*key_name:str", INVALID_PARAMS)
def accel_crypto_key_destroy(target: FakeTarget, params: Params) -> object:
    """The real one's fault kept: a key in use is destroyed all the same, and its user's name is freed memory."""
    if target.keys.pop(params["key_name"], None) is None:
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    target.destroyed_keys.add(params["key_name"])
    return True


@_method("key_name:str", INVALID_PARAMS)
def accel_crypto_keys_get(target: FakeTarget, params: Params) -> object:
    """Key material in clear, as from a real one."""
    return list(target.keys.values())


@_method("*name:str *path:str", INVALID_PARAMS)
def keyring_file_add_key(target: FakeTarget, params: Params) -> object:
    path = Path(params["path"])
    if not path.is_file():
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    if path.stat().st_mode & 0o777 != 0o600:
        raise RpcFailure(-errno.EPERM, "Operation not permitted")
    return True


@_method(
    "*name:str *raid_level:str *base_bdevs:list strip_size_kb:int uuid:str superblock:bool", INVALID_PARAMS
)
def bdev_raid_create(target: FakeTarget, params: Params) -> object:
    bases = [_bdev(target, name) for name in params["base_bdevs"]]
    if target.find(params["name"]) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    detail = {
        "strip_size_kb": params.get("strip_size_kb", 0),
        "raid_level": params["raid_level"],
        "state": "online",
        "base_bdevs_list": [{"name": base.name, "is_configured": True} for base in bases],
    }
    image = memoryview(bytearray(sum(base.size for base in bases)))
    block_size = bases[0].block_size
    for base in bases:
        base.claim = "raid"
    target.add(
        FakeBdev(
            params["name"], block_size, image, "Raid Volume",
            bases=[base.name for base in bases], driver_specific={"raid": detail},
        )
    )  # fmt: skip
    return True


_LATENCIES = ("avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency")


@_method(
    "*name:str *base_bdev_name:str *avg_read_latency:int *p99_read_latency:int *avg_write_latency:int "
    "*p99_write_latency:int uuid:str",
    INVALID_PARAMS,
)
def bdev_delay_create(target: FakeTarget, params: Params) -> object:
    if params["p99_read_latency"] < params["avg_read_latency"]:
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    base = _bdev(target, params["base_bdev_name"])
    made = _over(target, base, params["name"], "delay", {"delay": dict(params)})
    made.latency_us = {name: params[name] for name in _LATENCIES}
    return made.name


@_method("*delay_bdev_name:str *latency_type:str *latency_us:int", INVALID_PARAMS)
def bdev_delay_update_latency(target: FakeTarget, params: Params) -> object:
    bdev = target.find(params["delay_bdev_name"])
    if bdev is None:
        raise RpcFailure(INVALID_PARAMS, "The requested bdev does not exist.")
    name = f"{params['latency_type']}_latency"
    if name not in _LATENCIES:
        raise RpcFailure(INVALID_PARAMS, "Invalid latency type")
    bdev.latency_us[name] = params["latency_us"]
    bdev.driver_specific = {"delay": {**bdev.driver_specific["delay"], name: params["latency_us"]}}  # type: ignore[dict-item]
    return True


@_method("*base_name:str uuid:str")
def bdev_error_create(target: FakeTarget, params: Params) -> object:
    name = f"EE_{params['base_name']}"
    if target.find(name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    base = target.find(params["base_name"])
    if base is not None:  # a real one says true even when there is no base yet
        _over(target, base, name, "Error Injection Disk", {"error_disk": {"base_bdev": base.name}})
    return True


@_method(
    "*name:str *io_type:str *error_type:str num:int queue_depth:int nvme_sct:int nvme_sc:int corrupt_offset:int "
    "corrupt_value:int"
)
def bdev_error_inject_error(target: FakeTarget, params: Params) -> object:
    bdev = _bdev(target, params["name"])
    if params["io_type"] == "clear" or params.get("num") == 0:
        bdev.faults.clear()
        return True
    wanted = {name: value for name, value in params.items() if name not in {"name", "queue_depth"}}
    bdev.faults.append(Fault(**wanted))
    return True


@_method("*name:str")
def bdev_error_resume_pending(target: FakeTarget, params: Params) -> object:
    _bdev(target, params["name"]).resume_pending()
    return True


# --- logical volumes ---


@_method("*bdev_name:str *lvs_name:str cluster_sz:int clear_method:str")
def bdev_lvol_create_lvstore(target: FakeTarget, params: Params) -> object:
    base = _bdev(target, params["bdev_name"])
    if params["lvs_name"] in target.lvstores or base.claim:
        raise RpcFailure(INVALID_PARAMS, "File exists" if not base.claim else "Operation not permitted")
    base.claim = "lvol"
    store = Lvstore(params["lvs_name"], base.name, params.get("cluster_sz", 4 << 20))
    target.lvstores[store.name] = store
    return store.uuid


@_method("uuid:str lvs_name:str")
def bdev_lvol_get_lvstores(target: FakeTarget, params: Params) -> object:
    return [_store_shown(target, store) for store in target.lvstores.values()]


def _store_shown(target: FakeTarget, store: Lvstore) -> dict[str, object]:
    total = target.bdevs[store.base].size // store.cluster_size
    return {
        "uuid": store.uuid, "name": store.name, "base_bdev": store.base, "total_data_clusters": total,
        "free_clusters": total - store.used_clusters, "block_size": 4096, "cluster_size": store.cluster_size,
    }  # fmt: skip


@_method("*lvol_name:str *size_in_mib:int thin_provision:bool uuid:str lvs_name:str clear_method:str")
def bdev_lvol_create(target: FakeTarget, params: Params) -> object:
    store = target.lvstores.get(params.get("lvs_name", ""))
    if store is None:
        raise RpcFailure(-errno.ENODEV, "No such device")
    alias = f"{store.name}/{params['lvol_name']}"
    if target.find(alias) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    size = params["size_in_mib"] << 20
    base, start = target.bdevs[store.base], store.used_clusters * store.cluster_size
    if start + size > base.size:
        raise RpcFailure(INVALID_PARAMS, "No space left on device")
    store.used_clusters += -(-size // store.cluster_size)
    thin = bool(params.get("thin_provision"))
    detail = {"lvol": {"lvol_store_uuid": store.uuid, "base_bdev": base.name, "thin_provision": thin}}
    made = FakeBdev("", base.block_size, base.image[start : start + size], "Logical Volume", aliases=[alias],
                    bases=[base.name], driver_specific=detail)  # type: ignore[arg-type]  # fmt: skip
    made.name = made.uuid
    return target.add(made).name


# --- NVMe ---


@_method(
    "*name:str *trtype:str *traddr:str adrfam:str trsvcid:str subnqn:str hostnqn:str multipath:str hdgst:bool "
    "ddgst:bool ctrlr_loss_timeout_sec:int reconnect_delay_sec:int fast_io_fail_timeout_sec:int num_io_queues:int"
)
def bdev_nvme_attach_controller(target: FakeTarget, params: Params) -> object:
    """Only what a test put into `remote_controllers` by address can be attached."""
    if params["name"] in target.controllers:
        raise RpcFailure(-errno.EALREADY, "Operation already in progress")
    sizes = target.remote_controllers.get(params["traddr"])
    if sizes is None:
        raise RpcFailure(-errno.ENODEV if params["trtype"] == "PCIe" else -errno.EIO, "No such device")
    target.controllers[params["name"]] = dict(params)
    trid = {"trid": {"trtype": params["trtype"], "traddr": params["traddr"]}}
    made = []
    for number, size in enumerate(sizes):
        bdev = FakeBdev(
            f"{params['name']}n{number + 1}", 4096, memoryview(bytearray(size)), "NVMe disk",
            driver_specific={"nvme": [trid]},
        )  # fmt: skip
        made.append(target.add(bdev).name)
    return made


@_method("name:str")
def bdev_nvme_get_controllers(target: FakeTarget, params: Params) -> object:
    return [
        {"name": name, "ctrlrs": [{"state": "enabled", "trid": {k: given[k] for k in ("trtype", "traddr")}}]}
        for name, given in target.controllers.items()
    ]


@_method("*name:str")
def bdev_nvme_get_controller_health_info(target: FakeTarget, params: Params) -> object:
    if params["name"] not in target.controllers:
        raise RpcFailure(INTERNAL, "Device not found")
    return {
        "model_number": "FAKE", "serial_number": "1", "firmware_revision": "1",
        "traddr": target.controllers[params["name"]]["traddr"], "critical_warning": 0,
        "temperature_celsius": 2**64 - 273, "available_spare_percentage": 100,
        "available_spare_threshold_percentage": 10, "percentage_used": 3, "data_units_read": 2**70,
        "data_units_written": 1_000_000, "host_read_commands": 1, "host_write_commands": 2,
        "controller_busy_time": 0, "power_cycles": 1, "power_on_hours": 2, "unsafe_shutdowns": 0,
        "media_errors": 0, "num_err_log_entries": 0, "warning_temperature_time_minutes": 0,
        "critical_composite_temperature_time_minutes": 0,
    }  # fmt: skip


@_method("*name:str")
def bdev_nvme_detach_controller(target: FakeTarget, params: Params) -> object:
    if target.controllers.pop(params["name"], None) is None:
        raise RpcFailure(-errno.ENODEV, "No such device")
    for bdev in [bdev for name, bdev in target.bdevs.items() if name.startswith(f"{params['name']}n")]:
        target.remove(bdev)
    return True


# --- exports ---


@_method("*ctrlr:str *dev_name:str readonly:bool packed_ring:bool cpumask:str transport:str", INVALID_PARAMS)
def vhost_create_blk_controller(target: FakeTarget, params: Params) -> object:
    bdev = target.find(params["dev_name"])
    if bdev is None:
        raise RpcFailure(INVALID_PARAMS, "No such device")
    if params["ctrlr"] in target.vhost:
        raise RpcFailure(INVALID_PARAMS, "File exists")
    if bdev.claim:
        raise RpcFailure(INVALID_PARAMS, "Operation not permitted")
    target.vhost[params["ctrlr"]] = VhostBlk(params["ctrlr"], bdev, bool(params.get("readonly")))
    target.tell("vhost_created", params["ctrlr"])
    return True


@_method("name:str", INVALID_PARAMS)
def vhost_get_controllers(target: FakeTarget, params: Params) -> object:
    return [
        {
            "ctrlr": blk.ctrlr, "cpumask": "0x1", "socket": f"{target.vhost_dir}/{blk.ctrlr}", "sessions": [],
            "backend_specific": {"block": {"readonly": blk.readonly, "bdev": blk.bdev.name}},
        }
        for blk in target.vhost.values()
    ]  # fmt: skip


@_method("*ctrlr:str", INVALID_PARAMS)
def vhost_delete_controller(target: FakeTarget, params: Params) -> object:
    blk = target.vhost.pop(params["ctrlr"], None)
    if blk is None:
        raise RpcFailure(INVALID_PARAMS, "No such device")
    target.tell("vhost_deleted", params["ctrlr"])
    return True


@_method(
    "*trtype:str max_io_size:int max_queue_depth:int in_capsule_data_size:int c2h_success:bool zcopy:bool"
)
def nvmf_create_transport(target: FakeTarget, params: Params) -> object:
    if params["trtype"].upper() in target.transports:
        raise RpcFailure(INTERNAL, f"Transport type '{params['trtype']}' already exists")
    made = {"max_io_size": 131072, "max_queue_depth": 128, "in_capsule_data_size": 4096, **params}
    target.transports[params["trtype"].upper()] = {**made, "trtype": params["trtype"].upper()}
    return True


@_method("trtype:str")
def nvmf_get_transports(target: FakeTarget, params: Params) -> object:
    return list(target.transports.values())


@_method(
    "*nqn:str serial_number:str model_number:str max_namespaces:int allow_any_host:bool ana_reporting:bool"
)
def nvmf_create_subsystem(target: FakeTarget, params: Params) -> object:
    nqn = params["nqn"]
    if nqn in target.subsystems:
        raise RpcFailure(INTERNAL, f"Unable to create subsystem {nqn}")
    target.subsystems[nqn] = Subsystem(
        nqn,
        params.get("serial_number", "0" * 20),
        bool(params.get("allow_any_host")),
        bool(params.get("ana_reporting")),
        params.get("max_namespaces", 32),
    )
    return True


def _subsystem(target: FakeTarget, nqn: str) -> Subsystem:
    found = target.subsystems.get(nqn)
    if found is None:
        raise RpcFailure(INVALID_PARAMS, f"Subsystem with NQN '{nqn}' not found")
    return found


@_method("*nqn:str", INVALID_PARAMS)
def nvmf_delete_subsystem(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    for nsid in list(subsystem.namespaces):
        subsystem.namespaces.pop(nsid).bdev.claim = ""
    del target.subsystems[params["nqn"]]
    target.tell("subsystem_deleted", params["nqn"])
    return True


@_method("nqn:str", INVALID_PARAMS)
def nvmf_get_subsystems(target: FakeTarget, params: Params) -> object:
    return [
        {
            "nqn": one.nqn,
            "subtype": "NVMe",
            "listen_addresses": [listener.shown() for listener in one.listeners],
            "allow_any_host": one.allow_any_host,
            "hosts": [{"nqn": host} for host in one.hosts],
            "serial_number": one.serial_number,
            "max_namespaces": one.max_namespaces,
            "namespaces": [
                {
                    "nsid": space.nsid,
                    "bdev_name": space.bdev.name,
                    "name": space.bdev.name,
                    "uuid": space.bdev.uuid,
                }
                for space in one.namespaces.values()
            ],
        }
        for one in target.subsystems.values()
    ]


@_method("*nqn:str *namespace:dict", INVALID_PARAMS)
def nvmf_subsystem_add_ns(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    bdev = target.find(params["namespace"].get("bdev_name", ""))
    nsid = params["namespace"].get("nsid") or max(subsystem.namespaces, default=0) + 1
    if bdev is None or bdev.claim or nsid in subsystem.namespaces:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    bdev.claim = "nvmf"
    subsystem.namespaces[nsid] = Namespace(nsid, bdev)
    target.tell("namespace_added", params["nqn"])
    return nsid


@_method("*nqn:str *nsid:int", INVALID_PARAMS)
def nvmf_subsystem_remove_ns(target: FakeTarget, params: Params) -> object:
    space = _subsystem(target, params["nqn"]).namespaces.pop(params["nsid"], None)
    if space is None:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    space.bdev.claim = ""
    target.tell("namespace_removed", params["nqn"])
    return True


def _listener(params: Params) -> Listener:
    given = params["listen_address"]
    try:
        return Listener(
            given["trtype"].upper(), given.get("adrfam", "IPv4"), given["traddr"], given["trsvcid"]
        )
    except (KeyError, AttributeError) as error:
        raise RpcFailure(INVALID_PARAMS, "spdk_json_decode_object failed") from error


@_method("*nqn:str *listen_address:dict", INVALID_PARAMS)
def nvmf_subsystem_add_listener(target: FakeTarget, params: Params) -> object:
    listener = _listener(params)
    subsystem = _subsystem(target, params["nqn"])
    if listener.trtype not in target.transports or listener in subsystem.listeners:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    subsystem.listeners.append(listener)
    target.tell("listener_added", params["nqn"])
    return True


@_method("*nqn:str *listen_address:dict", INVALID_PARAMS)
def nvmf_subsystem_remove_listener(target: FakeTarget, params: Params) -> object:
    listener = _listener(params)
    subsystem = _subsystem(target, params["nqn"])
    if listener not in subsystem.listeners:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    subsystem.listeners.remove(listener)
    target.tell("listener_removed", params["nqn"])
    return True


@_method("*nqn:str *listen_address:dict *ana_state:str anagrpid:int", INVALID_PARAMS)
def nvmf_subsystem_listener_set_ana_state(target: FakeTarget, params: Params) -> object:
    wanted = _listener(params)
    for listener in _subsystem(target, params["nqn"]).listeners:
        if listener == wanted:
            listener.ana_state = params["ana_state"]
            target.tell("ana_changed", params["nqn"])
            return True
    raise RpcFailure(INVALID_PARAMS, "Invalid parameters")


@_method("*nqn:str *host:str", INVALID_PARAMS)
def nvmf_subsystem_add_host(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    if params["host"] not in subsystem.hosts:
        subsystem.hosts.append(params["host"])
    return True
