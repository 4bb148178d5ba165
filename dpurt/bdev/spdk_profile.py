"""What an SPDK target should hold, declared in a profile. Pure.

A profile (JSON, see the folder spdk/) lists bdevs in the order of their making, each by the target's own method and
parameters, then keys, rate limits and exports. ``${VAR}`` in a text, or ``"${VAR:int}"`` as a whole value, is replaced by
what `--set` gave or by the profile's own default; there is no other source, and nothing unknown or unused is let pass.

Crypto keys come from files of mode 0600 (`KeyMaterial`, read by `spdk_apply`) and are never shown.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from dpurt.bdev.spdk_methods import KINDS
from dpurt.errors import ConfigError

__all__ = ["Entry", "Export", "Key", "KeyMaterial", "Profile", "Qos", "parse_profile"]

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
    kind = KINDS.get(entry.method)
    if kind is None:
        yield f"method {entry.method!r} is not one a profile may use; it may use: {', '.join(KINDS)}"
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
