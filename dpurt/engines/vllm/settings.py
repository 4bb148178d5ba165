"""The connector's own settings: what `kv_connector_extra_config` may hold, checked, each error with its place.

Either `topology` names the node's TOML file (same machine, or a copy): endpoint, tenant, salt and keys come from it; or they
are given one by one. Model, dtype, layout, block size and TP/PP always come from the engine, so that the node can refuse what
does not fit. `model` and `revision` say under which name the weights are known to all engines, where their paths differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from dpurt.engines import store
from dpurt.engines.store.settings import Seconds

WHERE = "kv_connector_extra_config"
S = TypeVar("S", bound="NodeSettings")
Millis = Annotated[float, Meta(ge=0, le=60_000)]


class NodeSettings(store.NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which node, who we are to it, and under which name it knows our KV."""

    space: str
    model: str | None = None
    revision: str | None = None


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


def settings_from(extra: Mapping[str, Any], kind: type[S]) -> S:
    """Raises ConfigError that says where and what was expected."""
    return store.settings_from(WHERE, extra, kind)


def access_from(settings: NodeSettings) -> store.Access:
    """Raises ConfigError: no such file or space, nothing to say where the node is, a salt that cannot be had."""
    return store.access_from(WHERE, settings, settings.space)
