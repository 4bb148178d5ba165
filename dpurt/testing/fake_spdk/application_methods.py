"""RPC methods of the fake target itself: version, life, reactors, buffers, notifications."""

from __future__ import annotations

from dpurt.testing.fake_spdk.declare import METHODS, Params, method
from dpurt.testing.fake_spdk.state import FakeTarget


@method()
def spdk_get_version(target: FakeTarget, params: Params) -> object:
    fields = {"major": 26, "minor": 9, "patch": 0, "suffix": "-fake"}
    return {"version": "SPDK v26.09-fake", "fields": fields}


@method()
def rpc_get_methods(target: FakeTarget, params: Params) -> object:
    return sorted(METHODS)


@method()
def framework_start_init(target: FakeTarget, params: Params) -> object:
    target.initialized = True
    return True


@method()
def framework_wait_init(target: FakeTarget, params: Params) -> object:
    return True


@method()
def framework_get_reactors(target: FakeTarget, params: Params) -> object:
    target.ticks += 1000
    core = {"lcore": 0, "busy": target.ticks // 4, "idle": target.ticks - target.ticks // 4, "lw_threads": []}
    return {"tick_rate": 1_000_000, "pid": 1, "reactors": [core]}


@method()
def thread_get_stats(target: FakeTarget, params: Params) -> object:
    return {"tick_rate": 1_000_000, "threads": [{"name": "app_thread", "id": 1, "busy": 1, "idle": 3}]}


@method()
def iobuf_get_stats(target: FakeTarget, params: Params) -> object:
    pool = {"cache": 0, "main": 0, "retry": 0}
    return [{"module": "bdev", "small_pool": pool, "large_pool": pool}]


@method()
def notify_get_types(target: FakeTarget, params: Params) -> object:
    return ["bdev_register", "bdev_unregister", "bdev_resize"]


@method("id:int max:int")
def notify_get_notifications(target: FakeTarget, params: Params) -> object:
    first = params.get("id", 0)
    return target.notifications[first : first + params.get("max", len(target.notifications))]
