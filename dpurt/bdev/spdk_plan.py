"""From what a target holds to what a profile wants: the calls that are missing. Pure.

Theory of operation. `plan` compares a profile with a target's state and gives calls, in order; a target that already is as
wanted gives none. Nothing is ever deleted: what exists with other properties is *refused*, by name, as making it
anew would lose data or cut off its users. What can be changed live (rate limits, delays) is changed. Objects that the
profile does not name are left alone. A plan holds for the state it was made from: disks bring logical volumes
of their own when they appear, so `spdk_apply` plans again after each call.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dpurt.bdev.spdk_methods import KINDS, Kind
from dpurt.bdev.spdk_profile import Entry, Export, Key, KeyMaterial, Profile, Qos
from dpurt.bdev.spdk_state import TargetState
from dpurt.errors import without_secrets

__all__ = ["Call", "Plan", "plan"]

DEFAULT_MAX_IO_BYTES = 2 << 20  # small PDUs cost the initiator CPU; a target with default buffers takes 2 MiB

Json = Mapping[str, Any]


@dataclass(frozen=True, repr=False, slots=True)
class Call:
    """One call to make. Its repr and `shown` hold no secret."""

    method: str
    params: Json

    def shown(self) -> dict[str, object]:
        return {"method": self.method, "params": without_secrets(self.params)}

    def __repr__(self) -> str:
        return f"{self.method} {without_secrets(self.params)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Calls in order, and by name what is refused (then nothing should be called) and what is as wanted."""

    calls: list[Call] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def plan(profile: Profile, state: TargetState, keys: Mapping[str, KeyMaterial]) -> Plan:
    """What to call so that `state` becomes what the profile says. `keys` are those of the profile, by name."""
    made = Plan()
    there = {str(bdev["name"]) for bdev in state.bdevs} | {str(store["name"]) for store in state.lvstores}
    for key in profile.keys:
        _plan_key(made, key, keys[key.name], state)
    for entry in profile.bdevs:
        _plan_entry(made, entry, state, there)
        there.add(entry.name)
    for qos in profile.qos:
        _plan_qos(made, qos, state, there)
    for export in profile.exports:
        if _is_there(export.bdev, state, there, made, f"the export of {export.bdev}"):
            _plan_export(made, export, state)
    if state.methods:
        made.refused.extend(_unknown_methods(made.calls, state.methods))
    return made


def _unknown_methods(calls: Iterable[Call], known: frozenset[str]) -> list[str]:
    missing = dict.fromkeys(call.method for call in calls if call.method not in known)
    return [f"{name}: this target was built without it, or is not initialised" for name in missing]


def _is_there(name: str, state: TargetState, there: set[str], made: Plan, user: str) -> bool:
    if name in there or state.find(name) is not None:
        return True
    made.refused.append(
        f"{user} needs {name}, which neither the target nor an earlier entry of the profile has"
    )
    return False


def _plan_key(made: Plan, key: Key, material: KeyMaterial, state: TargetState) -> None:
    present = state.keys.get(key.name)
    if present is None:
        params = {"cipher": key.cipher, "name": key.name, "key": material.key}
        made.calls.append(
            Call("accel_crypto_key_create", {**params, "key2": material.key2} if material.key2 else params)
        )
    elif present != material.fingerprint:
        made.refused.append(f"key {key.name}: the target has another key of this name")
    else:
        made.kept.append(f"key {key.name}")


def _plan_entry(made: Plan, entry: Entry, state: TargetState, there: set[str]) -> None:
    kind = KINDS[entry.method]
    for base in (base for param in kind.bases for base in _as_list(entry.params[param])):
        if not _is_there(base, state, there, made, entry.name):
            return
    differences = _differences(entry, kind, state)
    if differences is None:
        made.calls.append(Call(entry.method, entry.params))
        return
    fixed = [text for param, text in differences if param not in kind.live]
    if fixed:
        made.refused.append(
            f"{entry.name} exists with {', '.join(fixed)}; making it anew would lose its data or cut off its users"
        )
        return
    made.calls.extend(_live_change(entry, param) for param, _ in differences)
    if not differences:
        made.kept.append(entry.name)


def _live_change(entry: Entry, param: str) -> Call:
    """A delay's latency, the one thing that can be changed under a running bdev."""
    changed = {
        "delay_bdev_name": entry.name,
        "latency_type": param.removesuffix("_latency"),
        "latency_us": entry.params[param],
    }
    return Call("bdev_delay_update_latency", changed)


def _as_list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _differences(entry: Entry, kind: Kind, state: TargetState) -> list[tuple[str, str]] | None:
    """(parameter, what the target has) of each difference; None if there is no such object."""
    if entry.method == "bdev_lvol_create_lvstore":
        return _store_differences(entry, state)
    bdev = state.find(entry.name)
    if bdev is None:
        return None
    if not str(bdev.get("product_name", "")).startswith(kind.product):
        return [("method", f"the kind {bdev.get('product_name')!r}")]
    found = list(_shown_differences(entry, kind, bdev, state))
    if entry.method == "bdev_lvol_create" and not _is_lvol_size(entry, bdev, state):
        found.append(("size_in_mib", f"{_bytes(bdev) >> 20} MiB"))
    return found


def _shown_differences(entry: Entry, kind: Kind, bdev: Json, state: TargetState) -> Iterator[tuple[str, str]]:
    for param, path in kind.shows.items():
        actual = _at(bdev, path)
        if param in entry.params and actual is not None:
            wanted = entry.params[param]
            if not _is_same(param, wanted, actual, kind, state):
                yield param, f"{param} {actual!r} instead of {wanted!r}"


def _is_same(param: str, wanted: object, actual: object, kind: Kind, state: TargetState) -> bool:
    if param in kind.live and isinstance(wanted, int) and isinstance(actual, int):
        return abs(wanted - actual) <= max(1, wanted // 200)  # the target keeps ticks, and rounds
    if param in kind.bases:
        return [_canonical(name, state) for name in _as_list(wanted)] == [
            _canonical(name, state) for name in _as_list(actual)
        ]
    if isinstance(wanted, str) and isinstance(actual, str):
        return wanted.lower() == actual.lower() if param in {"trtype", "traddr", "uuid"} else wanted == actual
    return wanted == actual


def _canonical(name: str, state: TargetState) -> str:
    """A bdev's own name where an alias may be given: a logical volume's is its UUID."""
    found = state.find(name)
    return name if found is None else str(found["name"])


def _store_differences(entry: Entry, state: TargetState) -> list[tuple[str, str]] | None:
    for store in state.lvstores:
        if store["name"] == entry.name:
            base, cluster = entry.params["bdev_name"], entry.params.get("cluster_sz")
            found = []
            if _canonical(base, state) != store["base_bdev"]:
                found.append(("bdev_name", f"bdev_name {store['base_bdev']!r} instead of {base!r}"))
            if cluster is not None and cluster != store["cluster_size"]:
                found.append(("cluster_sz", f"cluster_sz {store['cluster_size']} instead of {cluster}"))
            return found
    return None


def _bytes(bdev: Json) -> int:
    return int(bdev["num_blocks"]) * int(bdev["block_size"])


def _is_lvol_size(entry: Entry, bdev: Json, state: TargetState) -> bool:
    """Sizes are rounded up to whole clusters."""
    cluster = next(
        (int(store["cluster_size"]) for store in state.lvstores if store["name"] == entry.params["lvs_name"]),
        1,
    )
    wanted = int(entry.params["size_in_mib"]) << 20
    return _bytes(bdev) == -(-wanted // cluster) * cluster


def _plan_qos(made: Plan, qos: Qos, state: TargetState, there: set[str]) -> None:
    wanted = {name: value for name, value in msgspec.structs.asdict(qos).items() if name != "bdev"}
    if not _is_there(qos.bdev, state, there, made, f"the limit of {qos.bdev}"):
        return
    bdev = state.find(qos.bdev)
    present = bdev.get("assigned_rate_limits", {}) if bdev is not None else {}
    changed = {
        name: value
        for name, value in wanted.items()
        if value is not None and _as_set(name, value) != present.get(name, 0)
    }
    if changed:
        made.calls.append(Call("bdev_set_qos_limit", {"name": qos.bdev, **changed}))
    else:
        made.kept.append(f"limits of {qos.bdev}")


def _as_set(name: str, value: int) -> int:
    return -(-value // 1000) * 1000 if name == "rw_ios_per_sec" else value


def _plan_export(made: Plan, export: Export, state: TargetState) -> None:
    before = len(made.calls) + len(made.refused)
    label = f"export of {export.bdev} over {export.via}"
    (_plan_vhost if export.via == "vhost" else _plan_nvmf)(made, export, state)
    if len(made.calls) + len(made.refused) == before:
        made.kept.append(label)


def _refuse_taken(made: Plan, export: Export, state: TargetState) -> bool:
    """One exporter at a time: a target lets vhost and NVMe-oF write the same bdev if vhost came first."""
    bdev = state.find(export.bdev)
    if bdev is None:
        return False
    name = str(bdev["name"])
    over = [f"vhost controller {one['ctrlr']}" for one in state.vhost if _vhost_bdev(one) == name]
    if not over and bdev.get("claimed"):
        over = [str(bdev.get("claim_type", "another export or bdev"))]
    if over:
        made.refused.append(
            f"{export.bdev} is taken by {over[0]}, it cannot be exported over {export.via} too"
        )
    return bool(over)


def _vhost_bdev(controller: Json) -> object:
    return _at(controller, "backend_specific.block.bdev")


def _plan_vhost(made: Plan, export: Export, state: TargetState) -> None:
    for controller in state.vhost:
        if controller["ctrlr"] == export.controller:
            exported = _vhost_bdev(controller)
            if exported != _canonical(export.bdev, state):
                made.refused.append(f"vhost controller {export.controller} exists and exports {exported}")
            return
    if not _refuse_taken(made, export, state):
        params = {"ctrlr": export.controller, "dev_name": export.bdev}
        made.calls.append(Call("vhost_create_blk_controller", params))


def _plan_nvmf(made: Plan, export: Export, state: TargetState) -> None:
    subsystem = next((one for one in state.subsystems if one["nqn"] == export.nqn), None)
    spaces = subsystem.get("namespaces", []) if subsystem is not None else []
    has_space = any(space.get("bdev_name") == _canonical(export.bdev, state) for space in spaces)
    if not has_space and _refuse_taken(made, export, state):
        return
    _plan_transport(made, export, state)
    _plan_subsystem(made, export, subsystem)
    if not has_space:
        params = {"nqn": export.nqn, "namespace": {"bdev_name": export.bdev}}
        made.calls.append(Call("nvmf_subsystem_add_ns", params))
    _plan_listener(made, export, subsystem)


def _plan_transport(made: Plan, export: Export, state: TargetState) -> None:
    present = next((one for one in state.transports if one["trtype"] == "TCP"), None)
    wanted = export.max_io_bytes
    if present is None:
        call = Call("nvmf_create_transport", {"trtype": "TCP", "max_io_size": wanted or DEFAULT_MAX_IO_BYTES})
        if not any(other.method == call.method for other in made.calls):
            made.calls.append(call)
    elif wanted is not None and present.get("max_io_size") != wanted:
        made.refused.append(
            f"the TCP transport exists with max_io_size {present.get('max_io_size')} instead of {wanted}, "
            "which is fixed for its life"
        )


def _plan_subsystem(made: Plan, export: Export, present: Json | None) -> None:
    is_open = not export.hosts
    if present is None:
        if not any(call.params.get("nqn") == export.nqn for call in made.calls):
            made.calls.append(
                Call(
                    "nvmf_create_subsystem",
                    {"nqn": export.nqn, "allow_any_host": is_open, "ana_reporting": True},
                )
            )
    elif bool(present.get("allow_any_host")) != is_open:
        made.refused.append(f"{export.nqn} exists with allow_any_host {present.get('allow_any_host')}")
    known = {host["nqn"] for host in present.get("hosts", [])} if present is not None else set()
    for host in export.hosts:
        if host not in known:
            made.calls.append(Call("nvmf_subsystem_add_host", {"nqn": export.nqn, "host": host}))


def _plan_listener(made: Plan, export: Export, present: Json | None) -> None:
    family = "IPv6" if ipaddress.ip_address(export.address).version == 6 else "IPv4"
    wanted = {"trtype": "TCP", "adrfam": family, "traddr": export.address, "trsvcid": str(export.port)}
    listeners = present.get("listen_addresses", []) if present is not None else []
    call = Call("nvmf_subsystem_add_listener", {"nqn": export.nqn, "listen_address": wanted})
    if not any(_is_listener(one, wanted) for one in listeners) and call not in made.calls:
        made.calls.append(call)


def _is_listener(shown: Json, wanted: Json) -> bool:
    return all(str(shown.get(name, "")).lower() == str(value).lower() for name, value in wanted.items())


def _at(tree: object, path: str) -> object:
    """What is at a path such as ``a.0.b`` or ``a.*.b``; None if nothing is."""
    step, _, rest = path.partition(".")
    if step == "*":
        return [_at(item, rest) for item in tree] if isinstance(tree, list) else None
    if isinstance(tree, list):
        found = tree[int(step)] if step.isdigit() and int(step) < len(tree) else None
    else:
        found = tree.get(step) if isinstance(tree, Mapping) else None
    return _at(found, rest) if rest and found is not None else found
