"""RPC methods on the fake target's bdevs: malloc, files, layers over others (crypto, raid, delay, error), logical volumes."""

from __future__ import annotations

import errno
from pathlib import Path

from dpurt.testing.fake_spdk.declare import (
    INTERNAL,
    INVALID_PARAMS,
    METHODS,
    Method,
    Params,
    RpcFailure,
    added,
    bdev_named,
    method,
    removed,
)
from dpurt.testing.fake_spdk.state import FakeBdev, FakeTarget, Fault, Lvstore


@method()
def bdev_wait_for_examine(target: FakeTarget, params: Params) -> object:
    return True


@method("name:str timeout:int")
def bdev_get_bdevs(target: FakeTarget, params: Params) -> object:
    if "name" in params:
        return [_shown(bdev_named(target, params["name"]))]
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


@method("names:list per_channel:bool reset_mode:str")
def bdev_get_iostat(target: FakeTarget, params: Params) -> object:
    chosen = (
        [bdev_named(target, name) for name in params["names"]] if "names" in params else target.bdevs.values()
    )
    shown = [
        {"name": bdev.name, **{name: bdev.counters.get(name, 0) for name in _COUNTERS}, "io_error": {}}
        for bdev in chosen
    ]
    return {"tick_rate": 1_000_000, "ticks": target.ticks, "bdevs": shown}


@method("*name:str rw_ios_per_sec:int rw_mbytes_per_sec:int r_mbytes_per_sec:int w_mbytes_per_sec:int")
def bdev_set_qos_limit(target: FakeTarget, params: Params) -> object:
    bdev = bdev_named(target, params["name"])
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
    return added(target, FakeBdev(name, params["block_size"], memoryview(bytearray(size)), product))


@method("*num_blocks:int *block_size:int name:str uuid:str optimal_io_boundary:int physical_block_size:int")
def bdev_malloc_create(target: FakeTarget, params: Params) -> object:
    return _memory(target, params, "Malloc disk")


@method("*name:str *num_blocks:int *block_size:int uuid:str physical_block_size:int")
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
    return added(target, FakeBdev(params["name"], block_size, image, product, driver_specific=detail))


@method("*name:str *filename:str block_size:int readonly:bool fallocate:bool uuid:str nowait:bool")
def bdev_aio_create(target: FakeTarget, params: Params) -> object:
    missing = RpcFailure(-errno.ENOENT, "No such file or directory")
    return _file(target, params, "AIO disk", "aio", missing)


@method("*name:str *filename:str block_size:int uuid:str")
def bdev_uring_create(target: FakeTarget, params: Params) -> object:
    return _file(target, params, "URING bdev", "uring", RpcFailure(INTERNAL, "Unable to create URING bdev."))


def _delete(target: FakeTarget, params: Params) -> object:
    return removed(target, params["name"])


for _kind in ("malloc", "null", "aio", "uring", "crypto", "delay", "error", "raid", "lvol"):
    METHODS[f"bdev_{_kind}_delete"] = Method(_delete, {"name": str}, frozenset({"name"}), INTERNAL)


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


@method("*base_bdev_name:str *name:str key_name:str")
def bdev_crypto_create(target: FakeTarget, params: Params) -> object:
    base = bdev_named(target, params["base_bdev_name"])
    if params.get("key_name") not in target.keys:
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    return _over(target, base, params["name"], "crypto", {"crypto": dict(params)}).name


@method("*cipher:str *name:str *key:str key2:str tweak_mode:str", INVALID_PARAMS)
def accel_crypto_key_create(target: FakeTarget, params: Params) -> object:
    if params["name"] in target.keys:
        raise RpcFailure(-errno.EEXIST, "File exists")
    if params["cipher"] == "AES_XTS" and params["key"] == params.get("key2", params["key"]):
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    target.keys[params["name"]] = dict(params)
    return True


@method("*key_name:str", INVALID_PARAMS)
def accel_crypto_key_destroy(target: FakeTarget, params: Params) -> object:
    """The real one's fault kept: a key in use is destroyed all the same, and its user's name is freed memory."""
    if target.keys.pop(params["key_name"], None) is None:
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    target.destroyed_keys.add(params["key_name"])
    return True


@method("key_name:str", INVALID_PARAMS)
def accel_crypto_keys_get(target: FakeTarget, params: Params) -> object:
    """Key material in clear, as from a real one."""
    return list(target.keys.values())


@method("*name:str *path:str", INVALID_PARAMS)
def keyring_file_add_key(target: FakeTarget, params: Params) -> object:
    path = Path(params["path"])
    if not path.is_file():
        raise RpcFailure(-errno.ENOENT, "No such file or directory")
    if path.stat().st_mode & 0o777 != 0o600:
        raise RpcFailure(-errno.EPERM, "Operation not permitted")
    return True


@method(
    "*name:str *raid_level:str *base_bdevs:list strip_size_kb:int uuid:str superblock:bool", INVALID_PARAMS
)
def bdev_raid_create(target: FakeTarget, params: Params) -> object:
    bases = [bdev_named(target, name) for name in params["base_bdevs"]]
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


@method(
    "*name:str *base_bdev_name:str *avg_read_latency:int *p99_read_latency:int *avg_write_latency:int "
    "*p99_write_latency:int uuid:str",
    INVALID_PARAMS,
)
def bdev_delay_create(target: FakeTarget, params: Params) -> object:
    if params["p99_read_latency"] < params["avg_read_latency"]:
        raise RpcFailure(-errno.EINVAL, "Invalid argument")
    base = bdev_named(target, params["base_bdev_name"])
    made = _over(target, base, params["name"], "delay", {"delay": dict(params)})
    made.latency_us = {name: params[name] for name in _LATENCIES}
    return made.name


@method("*delay_bdev_name:str *latency_type:str *latency_us:int", INVALID_PARAMS)
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


@method("*base_name:str uuid:str")
def bdev_error_create(target: FakeTarget, params: Params) -> object:
    name = f"EE_{params['base_name']}"
    if target.find(name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    base = target.find(params["base_name"])
    if base is not None:  # a real one says true even when there is no base yet
        _over(target, base, name, "Error Injection Disk", {"error_disk": {"base_bdev": base.name}})
    return True


@method(
    "*name:str *io_type:str *error_type:str num:int queue_depth:int nvme_sct:int nvme_sc:int corrupt_offset:int "
    "corrupt_value:int"
)
def bdev_error_inject_error(target: FakeTarget, params: Params) -> object:
    bdev = bdev_named(target, params["name"])
    if params["io_type"] == "clear" or params.get("num") == 0:
        bdev.faults.clear()
        return True
    wanted = {name: value for name, value in params.items() if name not in {"name", "queue_depth"}}
    bdev.faults.append(Fault(**wanted))
    return True


@method("*name:str")
def bdev_error_resume_pending(target: FakeTarget, params: Params) -> object:
    bdev_named(target, params["name"]).resume_pending()
    return True


# --- logical volumes ---


@method("*bdev_name:str *lvs_name:str cluster_sz:int clear_method:str")
def bdev_lvol_create_lvstore(target: FakeTarget, params: Params) -> object:
    base = bdev_named(target, params["bdev_name"])
    if params["lvs_name"] in target.lvstores or base.claim:
        raise RpcFailure(INVALID_PARAMS, "File exists" if not base.claim else "Operation not permitted")
    base.claim = "lvol"
    store = Lvstore(params["lvs_name"], base.name, params.get("cluster_sz", 4 << 20))
    target.lvstores[store.name] = store
    return store.uuid


@method("uuid:str lvs_name:str")
def bdev_lvol_get_lvstores(target: FakeTarget, params: Params) -> object:
    return [_store_shown(target, store) for store in target.lvstores.values()]


def _store_shown(target: FakeTarget, store: Lvstore) -> dict[str, object]:
    total = target.bdevs[store.base].size // store.cluster_size
    return {
        "uuid": store.uuid, "name": store.name, "base_bdev": store.base, "total_data_clusters": total,
        "free_clusters": total - store.used_clusters, "block_size": 4096, "cluster_size": store.cluster_size,
    }  # fmt: skip


@method("*lvol_name:str *size_in_mib:int thin_provision:bool uuid:str lvs_name:str clear_method:str")
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
