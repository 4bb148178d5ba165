"""RPC methods of the fake target as an NVMe host: controllers it attaches, and their health."""

from __future__ import annotations

import errno

from dpurt.testing.fake_spdk.declare import INTERNAL, Params, RpcFailure, method
from dpurt.testing.fake_spdk.state import FakeBdev, FakeTarget


@method(
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


@method("name:str")
def bdev_nvme_get_controllers(target: FakeTarget, params: Params) -> object:
    return [
        {"name": name, "ctrlrs": [{"state": "enabled", "trid": {k: given[k] for k in ("trtype", "traddr")}}]}
        for name, given in target.controllers.items()
    ]


@method("*name:str")
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


@method("*name:str")
def bdev_nvme_detach_controller(target: FakeTarget, params: Params) -> object:
    if target.controllers.pop(params["name"], None) is None:
        raise RpcFailure(-errno.ENODEV, "No such device")
    for bdev in [bdev for name, bdev in target.bdevs.items() if name.startswith(f"{params['name']}n")]:
        target.remove(bdev)
    return True
