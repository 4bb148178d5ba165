"""The connector's own settings: what `kv_connector_extra_config` may hold, checked, each error with its place.

Either `topology` names the node's TOML file (same machine, or a copy): endpoint, tenant, salt and keys come from it; or they
are given one by one. Model, dtype, layout, block size and TP/PP always come from the engine, so that the node can refuse what
does not fit. `model` and `revision` say under which name the weights are known to all engines, where their paths differ.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dpurt import keys
from dpurt.config import load_config
from dpurt.errors import ConfigError
from dpurt.transport import CurveClient

S = TypeVar("S", bound="NodeSettings")
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Millis = Annotated[float, Meta(ge=0, le=60_000)]


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which node, who we are to it, and under which name it knows our KV."""

    space: str
    topology: str | None = None
    endpoint: str | None = None
    host: str = "localhost"
    tenant: str | None = None
    salt_file: str | None = None
    salt_env: str | None = None
    curve_pair: str | None = None  # this host's key pair, a file of `dpurt keys generate`
    curve_node: str | None = None  # the node's public key
    model: str | None = None
    revision: str | None = None
    fabrics: tuple[Literal["shm", "verbs", "tcp"], ...] = ("shm", "verbs", "tcp")


class Settings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the connector. Every wait of the engine for the node has its limit here."""

    load: Literal["async", "layers", "none"] = "async"
    save: Literal["all", "prompt", "none"] = "all"
    min_load_blocks: Annotated[int, Meta(ge=1)] = 1
    lookup_wait_ms: Millis = 5.0  # in a step, the scheduler stands still for answers no longer
    lookup_budget_ms: Millis = 200.0  # then a request goes on without
    load_timeout_s: Seconds = 10.0  # of all of a request's blocks; then they are computed
    layer_wait_s: Seconds = 2.0  # load "layers": all waits of one step together
    save_timeout_s: Seconds = 10.0  # of one batch of blocks
    save_buffer_bytes: Annotated[int, Meta(ge=1 << 16)] = 32 << 20  # KV read and not stored yet


class TierSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier's entry in `secondary_tiers`, without `type` and `module_path`."""

    load_timeout_s: Seconds = 5.0  # of one chunk
    store_timeout_s: Seconds = 5.0


@dataclass(frozen=True, slots=True)
class Access:
    """Where the node is and who we are to it."""

    endpoint: str
    tenant: str
    salt: bytes
    curve: CurveClient | None


def settings_from(extra: dict[str, Any], kind: type[S]) -> S:
    """Raises ConfigError that says where and what was expected."""
    try:
        return msgspec.convert(extra, kind)
    except msgspec.ValidationError as error:
        raise ConfigError("kv_connector_extra_config", str(error)) from error


def access_from(settings: NodeSettings) -> Access:
    """Raises ConfigError: no such file, nothing to say where the node is, a salt that cannot be had."""
    curve = _curve(settings)
    if settings.topology is not None:
        config = load_config(settings.topology)
        space = config.to_space(settings.space)
        return Access(settings.endpoint or config.gateway.bind, space.tenant, space.salt, curve)
    if settings.endpoint is None or settings.tenant is None:
        raise ConfigError("kv_connector_extra_config", "give `topology`, or `endpoint` and `tenant`")
    return Access(settings.endpoint, settings.tenant, _salt(settings), curve)


def _salt(settings: NodeSettings) -> bytes:
    if settings.salt_file is not None:
        return keys.read_secret(Path(settings.salt_file))
    if settings.salt_env is not None:
        salt = os.environb.get(settings.salt_env.encode())
        if not salt:
            raise ConfigError(
                "kv_connector_extra_config", f"environment variable {settings.salt_env} is not set"
            )
        return salt
    raise ConfigError("kv_connector_extra_config", "the tenant's salt: give `salt_file` or `salt_env`")


def _curve(settings: NodeSettings) -> CurveClient | None:
    if settings.curve_pair is None:
        return None
    if settings.curve_node is None:
        raise ConfigError(
            "kv_connector_extra_config", "`curve_pair` needs `curve_node`, the node's public key"
        )
    pair = keys.load_pair(Path(settings.curve_pair))
    return CurveClient(pair.public.encode(), pair.secret.encode(), settings.curve_node.encode())
