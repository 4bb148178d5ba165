"""How the fake target's RPC methods are declared and looked up, and what they share.

Each method is declared with its parameters (``*`` = required) and works on a `FakeTarget`. Codes and texts are those
measured on a real target, odd ones included: they are negative errno or JSON-RPC codes, as each method likes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpurt.testing.fake_spdk.state import FakeBdev, FakeTarget

INVALID_PARAMS, INTERNAL, NO_METHOD = -32602, -32603, -32601
Params = Mapping[str, Any]


class RpcFailure(Exception):
    """An error answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Method:
    run: Callable[[FakeTarget, Params], object]
    params: dict[str, type]
    required: frozenset[str]
    bad_params: int


METHODS: dict[str, Method] = {}
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}


def method(
    spec: str = "", bad_params: int = INTERNAL
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register a function under its own name; `spec` is ``"*name:str size:int"``."""
    words = [word.split(":") for word in spec.split()]

    def register(run: Callable[..., object]) -> Callable[..., object]:
        METHODS[run.__name__] = Method(
            run,
            {name.lstrip("*"): _TYPES[kind] for name, kind in words},
            frozenset(name[1:] for name, _ in words if name.startswith("*")),
            bad_params,
        )
        return run

    return register


def bdev_named(target: FakeTarget, name: str) -> FakeBdev:
    found = target.find(name)
    if found is None:
        raise RpcFailure(-errno.ENODEV, "No such device")
    return found


def added(target: FakeTarget, bdev: FakeBdev) -> str:
    if target.find(bdev.name) is not None:
        raise RpcFailure(-errno.EEXIST, "File exists")
    return target.add(bdev).name


def removed(target: FakeTarget, name: str) -> bool:
    target.remove(bdev_named(target, name))
    return True
