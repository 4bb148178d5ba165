"""`DpurtConnector`: what vLLM loads by `kv_connector_module_path`. Translates its calls to `scheduler.Asker` and `worker.Mover`.

vLLM makes one object in the scheduler's process and one in each worker; with one worker both are in one process and share a client.
The geometry of the KV is only known once the workers have allocated it: they report it to the scheduler's side as handshake
metadata. Until then, and when the model's KV is of a kind we do not move, the connector takes no part, and says why.

A failed load is reported by block, so `kv_load_failure_policy` must be ``recompute``: with vLLM's default, ``fail``, a request whose
blocks got lost on the way would fail. The connector refuses to start with anything else.

Needs vLLM 0.32 or later. Single KV cache group, full attention; other models run without dpurt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from dpurt.core.identity import Geometry, Space
from dpurt.engines.store import Access
from dpurt.engines.vllm.counters import GAUGES, REASONS, add, flat
from dpurt.engines.vllm.link import Link, release, shared_link
from dpurt.engines.vllm.pages import Pages, UnsupportedLayout
from dpurt.engines.vllm.plan import Step
from dpurt.engines.vllm.scheduler import Asker
from dpurt.engines.vllm.settings import Settings, access_from, settings_from
from dpurt.engines.vllm.worker import Mover
from dpurt.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.dpurt")
HELP = {
    "requests": "Requests looked at", "skipped": "Requests that took no part", "lookups_late": "No answer in time",
    "lookup_s": "Time of lookups", "hit_tokens": "Tokens loaded instead of computed",
    "prompt_tokens": "Prompt tokens of ended requests", "blocks_loaded": "Blocks loaded",
    "blocks_from_flash": "Of these, not staged when asked for", "blocks_failed": "Blocks not loaded, computed",
    "bytes_loaded": "Bytes loaded", "load_s": "Time of loads", "blocks_saved": "Blocks stored",
    "blocks_not_saved": "Blocks not stored", "bytes_saved": "Bytes stored", "save_s": "Time of saves",
    "node_errors": "Calls of the node that failed", "longest_call_s": "Longest wait of the scheduler in one step",
    "is_up": "1 while the last word from the node was good",
}  # fmt: skip


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders on their way to the workers."""

    step: Step


@dataclass
class Layout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """How a worker's KV lies in memory."""

    geometry: Geometry


class DpurtStats(KVConnectorStats):  # type: ignore[misc]
    """`counters.Counters` as vLLM carries them."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return flat(self.data)

    def is_empty(self) -> bool:
        return not self.data


class DpurtMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus: ``vllm:dpurt_*``, one counter a field, with a `reason` label where there are reasons."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, text in HELP.items():
            labels = [*labelnames, "reason"] if name in REASONS else list(labelnames)
            kind = self._gauge_cls if name in GAUGES or name == "longest_call_s" else self._counter_cls
            self._metrics[name] = kind(name=f"vllm:dpurt_{name}", documentation=text, labelnames=labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        own = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name]
            if name in REASONS:
                for reason, count in value.items():
                    metric.labels(*own, reason).inc(count)
            elif name in GAUGES or name == "longest_call_s":
                metric.labels(*own).set(value)
            else:
                metric.labels(*own).inc(value)


class DpurtConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_transfer_config",
                'set "kv_load_failure_policy": "recompute": a lost block must not fail a request',
            )
        self._settings: Settings = _for_role(
            settings_from(dict(transfer.kv_connector_extra_config), Settings), transfer
        )
        self._access: Access = access_from(self._settings)
        self._link: Link | None = None
        self._asker: Asker | None = None
        self._mover: Mover | None = None
        self._pages: Pages | None = None
        self._part_of: dict[str, int] = {}
        self._failed_blocks: set[int] = set()
        self._requests: dict[str, Any] = {}
        self._why_not = _why_not(kv_cache_config, vllm_config.parallel_config)
        if self._why_not:
            log.warning("dpurt: takes no part: %s", self._why_not)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._why_not:
            return
        try:
            self._pages = self._pages_of(kv_caches)
        except UnsupportedLayout as error:
            self._why_not = str(error)
            log.warning("dpurt: takes no part: %s", error)
            return
        self._part_of = self._pages.part_of
        self._link = self._open_link(self._pages.geometry, "worker")
        self._mover = Mover(self._link, self._settings, self._pages, self._shard())

    def _pages_of(self, kv_caches: dict[str, torch.Tensor]) -> Pages:
        config = self._kv_cache_config
        spec = config.kv_cache_groups[0].kv_cache_spec
        heads = {name: (spec.num_kv_heads, spec.head_size) for name in kv_caches}
        windows: dict[str, int | None] = dict.fromkeys(kv_caches)
        return Pages(kv_caches, config.num_blocks, heads, windows, spec.block_size)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Layout(self._pages.geometry) if self._pages is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._mover is not None:
            self._mover.preempt(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._mover is not None:
            self._mover.start_loads(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._mover is not None:
            self._mover.wait_for_part(self._part_of.get(layer_name, 0))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step's blocks are read when it ends, beside the next one."""

    def wait_for_save(self) -> None:
        if self._mover is not None:
            self._mover.start_saves(self._get_connector_metadata().step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._mover is None:
            return None, None
        results = self._mover.take_results(is_idle=self._get_connector_metadata().step.is_idle)
        self._failed_blocks = results.failed_blocks
        return results.read or None, results.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # --- scheduler ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        geometries = [layout.geometry for layout in metadata.values() if isinstance(layout, Layout)]
        if not geometries or any(other != geometries[0] for other in geometries):
            log.warning("dpurt: takes no part: the workers' KV differs, or is of an unknown kind")
            return
        self._link = self._open_link(geometries[0], "scheduler")
        self._asker = Asker(self._link, self._settings, geometries[0].block_tokens)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def on_new_request(self, request: Any) -> None:
        if self._asker is not None:
            self._requests[request.request_id] = request
            self._asker.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._asker.loadable(request, num_computed_tokens) if self._asker is not None else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._asker is not None:
            self._asker.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self._asker is None:
            return {}
        staged, flash = self._asker.hit_sources(request, num_external_tokens)
        sources = {CacheHitSource.HOST: staged, CacheHitSource.DISK: flash}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._asker is None:
            return Orders(Step())
        blocks = scheduler_output.kv_connector_block_state
        for request, computed in self._computed_before(scheduler_output):
            scheduled = scheduler_output.num_scheduled_tokens[request.request_id]
            self._asker.computes(request, blocks.get_block_ids(request.request_id)[0], computed + scheduled)
        preempted = sorted(scheduler_output.preempted_req_ids or ())
        is_idle = not scheduler_output.total_num_scheduled_tokens
        return Orders(self._asker.take_step(preempted, is_idle=is_idle))

    def _computed_before(self, scheduler_output: Any) -> Iterable[tuple[Any, int]]:
        """(request, tokens computed before this step) of those scheduled in it."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [(self._requests[name], count) for name, count in computed.items() if name in self._requests]

    def update_connector_output(self, connector_output: Any) -> None:
        if self._asker is not None:
            loaded = sorted(connector_output.finished_recving or ())
            self._asker.moved(loaded, connector_output.invalid_block_ids or set())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return self._asker.ended(request) if self._asker is not None else (False, None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        if self._asker is not None:
            self._asker.forget_all()
            log.warning(
                "dpurt: cache reset: this engine shares nothing stored before any more. "
                "If the weights changed, run `dpurt epoch bump %s` so that no other engine does",
                self._settings.space,
            )
        return True

    # --- both ---

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data = self._link.tally.take() if self._link is not None else None
        return DpurtStats(data=data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return DpurtStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return DpurtMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layers"

    def shutdown(self) -> None:
        if self._mover is not None:
            self._mover.close()
        if self._asker is not None:
            self._asker.close()
        if self._link is not None:
            release(self._link)
        self._mover = self._asker = self._link = None

    def _open_link(self, geometry: Geometry, role: str) -> Link:
        link = shared_link(self._settings, self._access, self._space(geometry))
        link.roles.add(role)
        return link

    def _space(self, geometry: Geometry) -> Space:
        """This engine's identity. The tenant's secret and the names of the weights are the operator's to say."""
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        return Space(
            model=self._settings.model or model.model,
            revision=self._settings.revision or model.revision or "main",
            kv_dtype=_kv_dtype(self._vllm_config), geometry=geometry, tenant=self._access.tenant,
            salt=self._access.salt, tp_size=parallel.tensor_parallel_size, pp_size=parallel.pipeline_parallel_size,
        )  # fmt: skip

    def _shard(self) -> int:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tensor = get_tp_group()
        return int(get_pp_group().rank_in_group * tensor.world_size + tensor.rank_in_group)


def _for_role(settings: Settings, transfer: Any) -> Settings:
    """A producer loads nothing, a consumer saves nothing."""
    if not transfer.is_kv_consumer:
        return msgspec.structs.replace(settings, load="none")
    return settings if transfer.is_kv_producer else msgspec.structs.replace(settings, save="none")


def _kv_dtype(vllm_config: Any) -> str:
    """As it is in memory, e.g. ``bfloat16``, ``fp8_e4m3``."""
    named = vllm_config.cache_config.cache_dtype
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if named == "auto" else str(named)


def _why_not(kv_cache_config: Any, parallel: Any) -> str:
    """Why this model's KV is not moved; empty when it is."""
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism; a block's tokens are spread over ranks, which is not handled"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"{len(groups)} KV cache groups; only models with one are moved"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, (FullAttentionSpec, MLAAttentionSpec)):
        return f"KV of kind {type(spec).__name__}; only full attention is moved"
    return ""
