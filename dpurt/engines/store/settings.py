"""How an adapter is told where its node is: a few keys of the engine's own JSON configuration, checked.

Either `topology` names the node's TOML file (the same machine's, or a copy), and endpoint, tenant and salt come from it; or
they are given one by one. Errors say where and what was expected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dpurt import keys
from dpurt.config import Config, load_config
from dpurt.errors import ConfigError
from dpurt.transport import CurveClient

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys every adapter takes: where its node is, and who we are to it."""

    topology: str | None = None
    endpoint: str | None = None
    host: str = "localhost"
    tenant: str | None = None
    salt_file: str | None = None
    salt_env: str | None = None
    curve_pair: str | None = None  # this host's key pair, a file of `dpurt keys generate`
    curve_node: str | None = None  # the node's public key
    fabrics: tuple[Literal["shm", "verbs", "tcp"], ...] = ("shm", "verbs", "tcp")


class HookSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of a storage hook. The budgets are all an engine's thread ever waits for its node."""

    find_s: Seconds = 0.5
    load_s: Seconds = 10.0
    store_s: Seconds = 10.0


@dataclass(frozen=True, slots=True)
class Access:
    """Where the node is, and who we are to it. `config` is the topology it was read from, if any."""

    endpoint: str
    host: str
    fabrics: tuple[str, ...]
    tenant: str
    salt: bytes
    curve: CurveClient | None
    config: Config | None


S = TypeVar("S", bound=NodeSettings)


def settings_from(where: str, given: Mapping[str, Any], kind: type[S]) -> S:
    """The settings in `given`; raises ConfigError, which says where (`where` is the engine's name for them)."""
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(where, str(error)) from error


def access_from(where: str, settings: NodeSettings, space: str) -> Access:
    """Raises ConfigError: no such file or space, nothing to say where the node is, a salt that cannot be had."""
    curve = _curve(where, settings)
    if settings.topology is not None:
        config = load_config(settings.topology)
        if all(one.name != space for one in config.space):
            names = ", ".join(one.name for one in config.space)
            raise ConfigError(where, f"no space {space!r} in {settings.topology}, which has: {names}")
        known = config.to_space(space)
        endpoint = settings.endpoint or config.gateway.bind
        return Access(endpoint, settings.host, settings.fabrics, known.tenant, known.salt, curve, config)
    if settings.endpoint is None or settings.tenant is None:
        raise ConfigError(where, "give `topology`, or `endpoint` and `tenant`")
    salt = _salt(where, settings)
    return Access(settings.endpoint, settings.host, settings.fabrics, settings.tenant, salt, curve, None)


def _salt(where: str, settings: NodeSettings) -> bytes:
    if settings.salt_file is not None:
        return keys.read_secret(Path(settings.salt_file))
    if settings.salt_env is None:
        raise ConfigError(where, "the tenant's salt: give `salt_file` or `salt_env`")
    salt = os.environb.get(settings.salt_env.encode())
    if not salt:
        raise ConfigError(where, f"environment variable {settings.salt_env} is not set")
    return salt


def _curve(where: str, settings: NodeSettings) -> CurveClient | None:
    if settings.curve_pair is None:
        return None
    if settings.curve_node is None:
        raise ConfigError(where, "`curve_pair` needs `curve_node`, the node's public key")
    pair = keys.load_pair(Path(settings.curve_pair))
    return CurveClient(pair.public, pair.secret, settings.curve_node)
