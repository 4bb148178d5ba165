"""Brings a running SPDK target to a profile, and says what was done.

Theory of operation. `read_state` asks the target what it holds; `plan` (pure) says what is missing; `apply` makes one call
and looks again, until nothing is missing. Looking again after each new bdev is what keeps data safe: a disk that comes
back brings its logical volumes with it, and a plan made before would format them. It is idempotent, so it may
be run on every connection (`SpdkRpc`'s `on_connected`), which is how a tier survives a restart of its target.

Key files must be private (mode 0600); what they hold goes to the target and nowhere else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from dpurt.bdev.spdk_plan import Call, Plan, plan
from dpurt.bdev.spdk_profile import KeyMaterial, Profile, parse_profile
from dpurt.bdev.spdk_rpc import SpdkRpc
from dpurt.bdev.spdk_state import (
    ShownBdev,
    ShownKey,
    ShownStore,
    ShownSubsystem,
    ShownTransport,
    ShownVhost,
    TargetState,
    checked,
)
from dpurt.errors import ConfigError, DpurtError, RpcError

__all__ = ["ProfileRefused", "apply", "load_keys", "load_profile", "look", "read_state"]

MAX_PROFILE_BYTES = 1 << 20
MAX_KEY_BYTES = 4096

_Shown = TypeVar("_Shown")


class ProfileRefused(DpurtError):
    """The target holds something that is not as the profile says and cannot be changed without loss."""

    def __init__(self, refused: list[str]) -> None:
        super().__init__("the profile cannot be applied without loss: " + "; ".join(refused))
        self.refused = refused


def load_profile(path: Path, settings: Mapping[str, str]) -> Profile:
    """Read and check a profile. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("$", f"cannot read: {error.strerror}", str(path)) from error
    if len(text) > MAX_PROFILE_BYTES:
        raise ConfigError("$", f"over {MAX_PROFILE_BYTES} bytes", str(path))
    return parse_profile(text, settings, str(path))


def load_keys(profile: Profile, base: Path) -> dict[str, KeyMaterial]:
    """The profile's keys by name; relative files are looked for in `base`. Raises ConfigError."""
    return {key.name: _read_key(base / key.file, key.cipher == "AES_XTS") for key in profile.keys}


def _read_key(path: Path, needs_two: bool) -> KeyMaterial:
    lines = _private_text(path).split()
    if len(lines) not in (1, 2) or not all(re.fullmatch(r"([0-9a-fA-F]{2})+", line) for line in lines):
        raise ConfigError(str(path), "expected one or two lines of hex digits, the key and the second key")
    if needs_two and (len(lines) != 2 or lines[0].lower() == lines[1].lower()):
        raise ConfigError(str(path), "AES_XTS needs two lines, two different keys")
    return KeyMaterial(*lines)


def _private_text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(str(path), f"cannot read the key: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(str(path), "a key must be in a plain file")
        if status.st_mode & 0o177 or status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(str(path), "others may read this key, or own it: run chmod 600 on it")
        return file.read(MAX_KEY_BYTES).decode("ascii", "replace")


async def read_state(rpc: SpdkRpc, deadline: float) -> TargetState:
    """Ask the target for all that `plan` looks at. Key material is reduced to fingerprints at once."""
    names = await rpc.call("rpc_get_methods", deadline=deadline)
    methods = frozenset(checked("rpc_get_methods", names, list[str]))

    async def listed(method: str, shape: type[_Shown]) -> list[_Shown]:
        if method not in methods:
            return []
        return checked(method, await rpc.call(method, deadline=deadline), list[shape])  # type: ignore[valid-type]

    return TargetState(
        bdevs=await listed("bdev_get_bdevs", ShownBdev),
        lvstores=await listed("bdev_lvol_get_lvstores", ShownStore),
        vhost=await listed("vhost_get_controllers", ShownVhost),
        transports=await listed("nvmf_get_transports", ShownTransport),
        subsystems=await listed("nvmf_get_subsystems", ShownSubsystem),
        keys={
            key["name"]: KeyMaterial(key["key"], key.get("key2", "")).fingerprint
            for key in await listed("accel_crypto_keys_get", ShownKey)
        },
        methods=methods,
    )


async def apply(
    rpc: SpdkRpc,
    profile: Profile,
    keys: Mapping[str, KeyMaterial],
    deadline: float,
    report: Callable[[Call], None] = lambda call: None,
) -> list[Call]:
    """Make the calls that are missing; `report` hears of each when it is done.

    Raises ProfileRefused before anything is changed, and in the unlikely case that it shows only later; RpcError for
    the call that the target refused. What was done stays, and a next run goes on from there.
    """
    made: list[Call] = []
    planned = await look(rpc, profile, keys, deadline)
    while planned.calls:
        call = planned.calls[0]
        if call in made:
            raise RpcError(call.method, 0, "the target said yes and did not do it", call.params)
        await _make(rpc, call, deadline)
        made.append(call)
        report(call)
        planned = await look(rpc, profile, keys, deadline)
    return made


async def look(rpc: SpdkRpc, profile: Profile, keys: Mapping[str, KeyMaterial], deadline: float) -> Plan:
    """The plan as of now. Raises ProfileRefused."""
    planned = plan(profile, await read_state(rpc, deadline), keys)
    if planned.refused:
        raise ProfileRefused(planned.refused)
    return planned


async def _make(rpc: SpdkRpc, call: Call, deadline: float) -> None:
    result = await rpc.call(call.method, call.params, deadline=deadline)
    if call.method == "bdev_nvme_attach_controller" and not result:
        # success without a bdev: the namespaces' UUIDs are in that process already
        raise RpcError(call.method, 0, "attached, but no bdev came of it", call.params)
    if call.method.startswith("bdev_"):
        await rpc.call("bdev_wait_for_examine", deadline=deadline)
