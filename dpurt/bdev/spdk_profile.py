"""What an SPDK target should hold, declared in a profile, and the calls that bring a target there. Pure.

A profile (JSON, see the folder spdk/) lists bdevs in the order of their making, each by the target's own method and
parameters, then keys, rate limits and exports. ``${VAR}`` in a text, or ``"${VAR:int}"`` as a whole value, is replaced by
what `--set` gave or by the profile's own default; there is no other source, and nothing unknown or unused is let pass.

Theory of operation. `plan` compares a profile with a target's state and gives calls, in order; a target that already is as
wanted gives none. Nothing is ever deleted: what exists with other properties is *refused*, by name, as making it
anew would lose data or cut off its users. What can be changed live (rate limits, delays) is changed. Objects that the
profile does not name are left alone. A plan holds for the state it was made from: disks bring logical volumes
of their own when they appear, so `spdk_apply` plans again after each new bdev.

Crypto keys come from files of mode 0600 (`KeyMaterial`, read by `spdk_apply`) and are never shown.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from dpurt.errors import ConfigError, without_secrets

__all__ = ["Call", "Export", "Key", "KeyMaterial", "Plan", "Profile", "TargetState", "parse_profile", "plan"]

DEFAULT_MAX_IO_BYTES = 2 << 20  # small PDUs cost the initiator CPU; a target with default buffers takes 2 MiB

Json = Mapping[str, Any]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Limit = Annotated[int, msgspec.Meta(ge=0)] | None
_VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(:int)?\}")


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, by keyword, nothing unknown."""


class Key(Table, frozen=True, kw_only=True):
    """A crypto key: `file` holds one or two lines of hex, mode 0600."""

    name: Name
    file: Name
    cipher: Literal["AES_XTS", "AES_CBC"] = "AES_XTS"


class Entry(Table, frozen=True, kw_only=True):
    """One bdev (or logical volume store, which has a name too)."""

    name: Name
    method: str
    params: dict[str, Any] = {}


class Qos(Table, frozen=True, kw_only=True):
    """Limits of one bdev; 0 lifts, absent leaves alone. Binary megabytes; operations are rounded up to 1000s."""

    bdev: Name
    rw_ios_per_sec: Limit = None
    rw_mbytes_per_sec: Limit = None
    r_mbytes_per_sec: Limit = None
    w_mbytes_per_sec: Limit = None


class Export(Table, frozen=True, kw_only=True):
    """One way to a bdev. vhost needs `controller`; nvmf-tcp needs `nqn`, and `hosts` unless it is on loopback."""

    via: Literal["vhost", "nvmf-tcp"]
    bdev: Name
    controller: str = ""
    nqn: str = ""
    address: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4420
    hosts: list[str] = []
    max_io_bytes: Annotated[int, msgspec.Meta(ge=4096)] | None = None


class Profile(Table, frozen=True, kw_only=True):
    """A whole profile, with its variables replaced."""

    about: str
    variables: dict[str, str | None] = {}
    keys: list[Key] = []
    bdevs: list[Entry] = []
    qos: list[Qos] = []
    exports: list[Export] = []

    @property
    def needs_pci(self) -> list[str]:
        """PCI addresses of the devices it takes over."""
        attached = [entry.params for entry in self.bdevs if entry.method == "bdev_nvme_attach_controller"]
        return [str(params["traddr"]) for params in attached if str(params["trtype"]).upper() == "PCIE"]


class KeyMaterial:
    """The hex texts of a key. Compared by fingerprint, shown as nothing."""

    def __init__(self, key: str, key2: str = "") -> None:
        self.key = key.lower()
        self.key2 = key2.lower()

    @property
    def fingerprint(self) -> bytes:
        return hashlib.sha256(f"{self.key}:{self.key2}".encode()).digest()

    def __repr__(self) -> str:
        return "KeyMaterial(<secret>)"


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


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a target holds, as its own answers say it. `methods` are those it was built with; empty if unknown."""

    bdevs: Sequence[Json] = ()
    lvstores: Sequence[Json] = ()
    vhost: Sequence[Json] = ()
    transports: Sequence[Json] = ()
    subsystems: Sequence[Json] = ()
    keys: Mapping[str, bytes] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()

    def find(self, name: str) -> Json | None:
        """A bdev by name, alias or UUID."""
        for bdev in self.bdevs:
            if name in (bdev["name"], bdev.get("uuid"), *bdev.get("aliases", ())):
                return bdev
        return None


# --- reading a profile ---


def parse_profile(text: bytes | str, settings: Mapping[str, str], file: str = "") -> Profile:
    """The profile with its variables replaced. Raises ConfigError."""
    try:
        raw = msgspec.json.decode(text)
        if not isinstance(raw, dict):
            raise ConfigError("$", "expected an object", file)
        declared = msgspec.convert(raw.get("variables", {}), dict[str, str | None])
        values = _values(declared, settings, file)
        filled = {
            name: part if name == "variables" else _replaced(part, values, f"$.{name}", file)
            for name, part in raw.items()
        }
        profile = msgspec.convert(filled, Profile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError("$", str(error), file) from error
    for where, problem in _problems(profile):
        raise ConfigError(where, problem, file)
    return profile


def _values(declared: Mapping[str, str | None], settings: Mapping[str, str], file: str) -> dict[str, str]:
    unknown = sorted(set(settings) - set(declared))
    if unknown:
        known = ", ".join(declared) or "none"
        raise ConfigError("--set", f"{unknown[0]} is no variable of this profile; it has: {known}", file)
    values = {**declared, **settings}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ConfigError("$.variables", f"no value for {missing[0]}: give --set {missing[0]}=...", file)
    return {name: str(value) for name, value in values.items()}


def _replaced(part: object, values: Mapping[str, str], where: str, file: str) -> object:
    if isinstance(part, dict):
        return {name: _replaced(value, values, f"{where}.{name}", file) for name, value in part.items()}
    if isinstance(part, list):
        return [_replaced(value, values, f"{where}[{number}]", file) for number, value in enumerate(part)]
    return _replaced_text(part, values, where, file) if isinstance(part, str) else part


def _replaced_text(text: str, values: Mapping[str, str], where: str, file: str) -> str | int:
    whole = _VARIABLE.fullmatch(text)
    for match in _VARIABLE.finditer(text):
        if match[1] not in values:
            raise ConfigError(where, f"${{{match[1]}}} is not among the profile's variables", file)
        if match[2] and not whole:
            raise ConfigError(where, f"${{{match[1]}:int}} must be the whole value", file)
    if "${" in _VARIABLE.sub("", text):
        raise ConfigError(where, f"{text!r}: a variable is written ${{NAME}} or ${{NAME:int}}", file)
    if whole is None or not whole[2]:
        return _VARIABLE.sub(lambda match: values[match[1]], text)
    value = values[whole[1]]
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ConfigError(where, f"{whole[1]} must be a whole number, got {value!r}", file)
    return int(value)


def _problems(profile: Profile) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for number, entry in enumerate(profile.bdevs):
        where = f"$.bdevs[{number}]"
        if entry.name in seen:
            yield where, f"the name {entry.name!r} is used twice"
        seen.add(entry.name)
        for problem in _entry_problems(entry):
            yield where, problem
    exported: set[str] = set()
    for number, export in enumerate(profile.exports):
        if export.bdev in exported:
            yield (
                f"$.exports[{number}]",
                f"{export.bdev} is exported twice; a bdev has one exporter at a time",
            )
        exported.add(export.bdev)
        for problem in _export_problems(export):
            yield f"$.exports[{number}]", problem


def _entry_problems(entry: Entry) -> Iterator[str]:
    kind = _KINDS.get(entry.method)
    if kind is None:
        yield f"method {entry.method!r} is not one a profile may use; it may use: {', '.join(_KINDS)}"
        return
    unknown = sorted(set(entry.params) - kind.required - kind.optional)
    missing = sorted(kind.required - set(entry.params))
    if unknown:
        yield f"{entry.method} has no parameter {unknown[0]!r}"
    if missing:
        yield f"{entry.method} needs the parameter {missing[0]!r}"
    elif not kind.makes(entry.name, entry.params):
        yield f"{entry.method} with these parameters does not make {entry.name!r}"


def _export_problems(export: Export) -> Iterator[str]:
    if export.via == "vhost":
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", export.controller) or export.controller[0] == ".":
            yield "vhost needs a controller, a plain file name"
        return
    if not re.fullmatch(r"nqn\.\d{4}-\d\d\.[^\s]{1,200}", export.nqn):
        yield f"nvmf-tcp needs an nqn like nqn.2026-11.io.example:disk, got {export.nqn!r}"
    try:
        address = ipaddress.ip_address(export.address)
    except ValueError:
        yield f"address must be an IP address, got {export.address!r}"
        return
    if address.is_unspecified:
        yield f"address {export.address} is every interface; name one"
    elif not address.is_loopback and not export.hosts:
        yield f"address {export.address} is not loopback: list the NQNs of the allowed hosts"


# --- what the methods make, and how that shows in a target's answers ---


def _named(name: str, params: Json) -> bool:
    return bool(params.get("name") == name)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A method: its parameters, which of them show where in `bdev_get_bdevs`, and which name other bdevs."""

    required: frozenset[str]
    optional: frozenset[str]
    product: str
    shows: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    makes: Callable[[str, Json], bool] = _named
    live: frozenset[str] = frozenset()


def _kind(required: str, optional: str, product: str, **more: Any) -> _Kind:
    return _Kind(frozenset(required.split()), frozenset(optional.split()), product, **more)


_SIZES = {"num_blocks": "num_blocks", "block_size": "block_size"}
_LATENCIES = ("avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency")

_KINDS: dict[str, _Kind] = {
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


# --- planning ---


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
    kind = _KINDS[entry.method]
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


def _differences(entry: Entry, kind: _Kind, state: TargetState) -> list[tuple[str, str]] | None:
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


def _shown_differences(
    entry: Entry, kind: _Kind, bdev: Json, state: TargetState
) -> Iterator[tuple[str, str]]:
    for param, path in kind.shows.items():
        actual = _at(bdev, path)
        if param in entry.params and actual is not None:
            wanted = entry.params[param]
            if not _is_same(param, wanted, actual, kind, state):
                yield param, f"{param} {actual!r} instead of {wanted!r}"


def _is_same(param: str, wanted: object, actual: object, kind: _Kind, state: TargetState) -> bool:
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
