"""`DpurtStorage`: SGLang's third cache level (HiCache storage) in a dpurt node.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "dpurt", "module_path": "dpurt.engines.sglang.backend", "class_name": "DpurtStorage",
        "interface_v1": 1, "topology": "node.toml", "space": "my-model"}'

SGLang calls it from its own prefetch and backup threads, a batch of at most 128 pages a call. Pages move between SGLang's host
pool and the node without another copy in this process (`interface_v1`). Which pages are written, and when, is SGLang's write
policy: nothing is stored that it does not hand over. Of ranks that hold the same page (MLA) one writes.

Nothing raises into the engine: no node, a late node or one that refuses this engine are misses, told in SGLang's log and in
`state`. The identity is made of what the pool says; where the node's space differs, the refusal names the field and both values.
Hybrid models' extra pools (sliding window, Mamba, DSA: `batch_*_v2`) are not supported, and refused when they register.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from dpurt.engines.sglang.budget import LoadBudget
from dpurt.engines.sglang.identity import PoolFacts, Ranks, digests_of, space_of, topology_table
from dpurt.engines.sglang.pages import page_buffers
from dpurt.engines.store import Budgets, DigestStore, HookSettings, access_from, settings_from
from dpurt.engines.store.memory import memory_at
from dpurt.engines.store.settings import Seconds
from dpurt.errors import ConfigError, LocalProtocolError

WHERE = "--hicache-storage-backend-extra-config"
SGLANGS_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
MAX_BATCHES = 4096  # kept for SGLang's collector between two of its visits
log = logging.getLogger("sglang.dpurt")


class Settings(HookSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our keys of the extra config. `model` and `revision` say under which name all engines know the weights.

    The prefetch policy and its timeouts are SGLang's own settings, and read from there.
    """

    space: str
    model: str | None = None
    revision: str | None = None
    best_effort_s: Seconds = 1.0


class DpurtStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's storage backend."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        given = storage_config.extra_config or {}
        ours = {key: value for key, value in given.items() if key not in SGLANGS_OWN}
        self._settings = settings_from(WHERE, ours, Settings)
        self._access = access_from(WHERE, self._settings, self._settings.space)
        self._config = storage_config
        self._ranks = _ranks_of(storage_config)
        self._store: DigestStore | None = None
        self._pool: Any = None
        self._moved = _Moved()
        self._load_budget = _load_budget(self._settings)
        self._is_flat = False  # is a page's tensor its buffers, one after the other?

    # --- the pool ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool: from here on pages have a size and an identity. Says hello to the node, without waiting."""
        self.mem_pool_host = self._pool = mem_pool_host
        facts = _facts_of(mem_pool_host, self._config.is_mla_model)
        self._is_flat = len(facts.buffer_bytes) <= 2
        space = space_of(
            facts, self._ranks, model=self._model(), revision=self._revision(), tenant=self._access.tenant,
            salt=self._access.salt,
        )  # fmt: skip
        self.close()
        log.info("dpurt: this engine's space is:\n%s", topology_table(self._settings.space, space))
        self._store = DigestStore(
            self._access, self._settings.space, space, shard=self._ranks.shard,
            budgets=Budgets.of(self._settings), memories=_memories_of(mem_pool_host), log=log,
        )  # fmt: skip
        self._store.greet()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """An extra pool of a hybrid model. Raises ConfigError for all but the main one: the attach fails."""
        if str(host_pool_name) != "kv":
            raise ConfigError(WHERE, f"dpurt does not store {host_pool_name} pools of hybrid models yet")

    def _model(self) -> str:
        return self._settings.model or self._config.model_name or "unnamed"

    def _revision(self) -> str:
        if self._settings.revision is not None:
            return self._settings.revision
        config = self._access.config
        return "main" if config is None else config.to_space(self._settings.space).revision

    # --- pages in SGLang's host pool ---

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages the node has. It begins to stage them."""
        here = self._found(keys, will_load=True)
        return here.index(False) if False in here else len(here)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool; those that are False must not be used."""
        store = self._store
        if store is None or not keys:
            return [False] * len(keys)
        began = time.monotonic()
        tokens = len(keys) * self._pool.page_size
        loaded = store.get(
            digests_of(keys), self._buffers(keys, host_indices), self._load_budget.of(tokens)
        ).wait()
        self._moved.note("prefetch", sum(loaded), sum(loaded) * self._page_bytes, time.monotonic() - began)
        return loaded

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool. True also for those that are there already, or that another rank writes."""
        store = self._store
        if store is None or not keys:
            return [False] * len(keys)
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        began = time.monotonic()
        kept = store.put(digests_of(keys), self._buffers(keys, host_indices)).wait()
        self._moved.note("backup", sum(kept), sum(kept) * self._page_bytes, time.monotonic() - began)
        return kept

    def _buffers(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[list[memoryview]]:
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        return page_buffers(addresses, sizes, len(keys))

    @property
    def _page_bytes(self) -> int:
        return 0 if self._store is None else self._store.space.geometry.payload_bytes

    def _found(self, keys: Sequence[str], *, will_load: bool) -> list[bool]:
        if self._store is None or not keys:
            return [False] * len(keys)
        return self._store.find(digests_of(keys), will_load=will_load).wait()

    # --- pages in tensors: without `interface_v1`, and for tools ---
    #
    # Only where a page's tensor has the bytes in the order of its buffers: not with the layer-first layout.

    def exists(self, key: str) -> bool:
        """Is this page there?"""
        return self._found([key], will_load=False)[0]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """A page into `target_location`, which is also what comes back; None when it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages into tensors, one a page; None for each that is not there."""
        targets = list(target_locations or [])
        if self._tensor_store is None or len(targets) != len(keys) or any(one is None for one in targets):
            return [None] * len(keys)
        tokens = len(keys) * self._pool.page_size
        rooms = [[_bytes_of(target)] for target in targets]
        loaded = self._tensor_store.get(digests_of(keys), rooms, self._load_budget.of(tokens)).wait()
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page's tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages' tensors; were all of them kept?"""
        if not self._config.is_storage_writer:
            return True
        tensors = list(values or [])
        if self._tensor_store is None or len(tensors) != len(keys):
            return False
        payloads = [[_bytes_of(tensor.contiguous())] for tensor in tensors]
        return all(self._tensor_store.put(digests_of(keys), payloads).wait())

    @property
    def _tensor_store(self) -> DigestStore | None:
        return self._store if self._is_flat else None

    def delete(self, keys: Sequence[str]) -> bool:
        """These pages are not wanted any more, by any rank. Not a call of SGLang's: for tools and tests."""
        return self._store is not None and all(self._store.delete(digests_of(keys)).wait())

    def clear(self) -> None:
        """Raises LocalProtocolError, so that SGLang reports it as not done: a node's space belongs to all its engines."""
        raise LocalProtocolError(
            "unsupported",
            f"left to the operator, for all engines at once: dpurt epoch bump {self._settings.space}",
        )

    # --- looking in, and the end ---

    @property
    def state(self) -> str:
        """``unknown``, ``up``, ``down`` or ``refused``."""
        return "unknown" if self._store is None else self._store.state

    def counters(self) -> dict[str, object]:
        """What this rank asked for and got, and why not."""
        return {} if self._store is None else self._store.stats()

    def get_stats(self) -> Any:
        """Pages and bandwidth of each batch since the last call, for SGLang's own collector."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(**self._moved.take())

    def close(self) -> None:
        """Leave the node. SGLang calls it on detach."""
        if self._store is not None:
            self._store.close()
            self._store = None


class _Moved:
    """Batches moved since SGLang's collector came by last: pages, and GB/s. Bounded: without metrics nobody comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: dict[str, list[float]] = {}

    def note(self, what: str, pages: int, num_bytes: int, seconds: float) -> None:
        """One batch, if anything moved."""
        if pages:
            with self._lock:
                self._add(f"{what}_pgs", pages)
                self._add(f"{what}_bandwidth", num_bytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> dict[str, list[float]]:
        """All there is, once."""
        with self._lock:
            taken, self._lists = self._lists, {}
        return taken

    def _add(self, name: str, value: float) -> None:
        values = self._lists.setdefault(name, [])
        if len(values) < MAX_BATCHES:
            values.append(value)


def _ranks_of(config: HiCacheStorageConfig) -> Ranks:
    return Ranks(
        tp_rank=config.tp_rank, tp_size=config.tp_size, pp_rank=config.pp_rank, pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank, cp_size=config.attn_cp_size, is_replicated=config.is_mla_model,
    )  # fmt: skip


def _facts_of(pool: Any, is_mla: bool) -> PoolFacts:
    """One page's shape, as the pool tells it."""
    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    return PoolFacts(
        page_size=pool.page_size, layout=pool.layout, dtype=str(pool.dtype), num_layers=pool.layer_num,
        num_kv_heads=1 if is_mla else pool.head_num,
        head_size=pool.kv_cache_dim if is_mla else pool.head_dim,
        buffer_bytes=tuple(int(size) for size in sizes), is_mla=is_mla,
    )  # fmt: skip


def _memories_of(pool: Any) -> list[memoryview]:
    """The pool's buffers, for fabrics that register memory to do it once."""
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]
    return [memory_at(buffer.data_ptr(), buffer.nbytes) for buffer in buffers if buffer is not None]


def _load_budget(settings: Settings) -> LoadBudget:
    """SGLang's prefetch settings; its defaults outside an engine, where none are published."""
    own = LoadBudget(best_effort_s=settings.best_effort_s, limit_s=settings.load_s)
    from sglang.srt.runtime_context import get_memory

    try:
        memory = get_memory()
    except ValueError:  # nothing is published outside an engine
        return own
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    extra = memory.hicache_storage_backend_extra_config
    _, _, base_s, per_1024_s, _ = HybridCacheController.parse_storage_backend_extra_config(extra)
    return replace(
        own, policy=memory.hicache_storage_prefetch_policy, timeout_base_s=base_s,
        timeout_per_1024_tokens_s=per_1024_s,
    )  # fmt: skip


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A host tensor's bytes, in place."""
    if not tensor.is_contiguous():
        raise ValueError("a page's tensor must be contiguous")
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())
