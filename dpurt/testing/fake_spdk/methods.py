"""The RPC methods of the fake target: strict parameters, and the codes a real target answers with.

They are declared (`declare`) where what they are about is faked: the target itself (`application_methods`), its bdevs
(`bdev_methods`), controllers it attaches (`nvme_methods`), and who may have its bdevs (`export_methods`).
"""

from __future__ import annotations

import errno

import trio

from dpurt.testing.fake_spdk import application_methods, bdev_methods, export_methods, nvme_methods
from dpurt.testing.fake_spdk.declare import METHODS, NO_METHOD, Method, Params, RpcFailure
from dpurt.testing.fake_spdk.state import FakeTarget

__all__ = ["RpcFailure", "call"]

_DECLARED_IN = (application_methods, bdev_methods, nvme_methods, export_methods)  # on import


async def call(target: FakeTarget, name: str, params: object) -> object:
    """Carry out one call. Raises RpcFailure."""
    method = METHODS.get(name)
    if method is None:
        raise RpcFailure(NO_METHOD, "Method not found")
    if not target.initialized and name not in _BEFORE_INIT:
        raise RpcFailure(-1, "Method may only be called after framework is initialized")
    given = _checked(method, params)
    if name == "bdev_get_bdevs" and given.get("timeout"):
        return await _wait_for_bdev(target, given)
    return method.run(target, given)


_BEFORE_INIT = {"spdk_get_version", "framework_start_init", "rpc_get_methods", "framework_get_reactors"}


def _checked(method: Method, params: object) -> Params:
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
        return bdev_methods.bdev_get_bdevs(target, {"name": given["name"]})
    raise RpcFailure(-errno.ETIMEDOUT, "Connection timed out")
