"""`DpurtL2Adapter`: the L2 of LMCache's multi-process server in a dpurt node.

    --l2-adapter '{"type": "plugin", "module_path": "dpurt.engines.lmcache.adapter", "class_name": "DpurtL2Adapter",
                   "adapter_params": {"topology": "node.toml", "spaces": ["my-model"]}, "shared": true}'

LMCache's store and prefetch controllers submit tasks and wait for three event descriptors; here a task is a batch of calls on
the node clients' threads, so nothing blocks and every task ends within its budget, found or not. Objects move between LMCache's
L1 memory and the node without another copy in this process.

*Lookup and lock* opens a request scope at the node, so flash reads begin while LMCache reserves L1 memory; *load* reads from it and
*unlock* ends it. It is no promise: what the node drops in between is a miss at the load, as LMCache's contract allows. The node
evicts by itself, so the adapter declares no capacity; usage is what this server stored and has not seen gone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from msgspec import Meta

from dpurt.engines.lmcache.identity import Layout, Spaces, digest_of
from dpurt.engines.lmcache.tasks import Finished, Gathered
from dpurt.engines.store import Answer, Budgets, DigestStore, HookSettings, access_from, settings_from
from dpurt.engines.store.memory import memory_at
from dpurt.errors import ConfigError, SpaceMismatch

WHERE = "adapter_params"
log = logging.getLogger("lmcache.dpurt")


class Settings(HookSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `adapter_params` may hold. `spaces` are names in the topology: all that LMCache's models need."""

    spaces: Annotated[tuple[str, ...], Meta(min_length=1)]


class DpurtL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """One LMCache server's L2. Thread-safe."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        settings = settings_from(WHERE, config, Settings)
        if settings.topology is None:
            raise ConfigError(WHERE, "give `topology`: it says what the spaces hold")
        memories = [] if l1_memory_desc is None else [_l1_memory(l1_memory_desc)]
        self._stores = {name: _store_of(settings, name, memories) for name in settings.spaces}
        self._spaces = Spaces({name: store.space for name, store in self._stores.items()})
        self._numbers = itertools.count(1)
        self._stored: Finished[L2StoreResult] = Finished()
        self._looked_up: Finished[Bitmap] = Finished()
        self._loaded: Finished[Bitmap] = Finished()
        self._lock = threading.Lock()
        self._known: dict[ObjectKey, int] = {}  # stored by this server, and their bytes
        self._mismatches: Counter[str] = Counter()
        for store in self._stores.values():
            store.greet()

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    # --- store ---

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See the base class. The task fails when one of its objects is not kept."""
        task = next(self._numbers)
        batches = self._batches(keys, [_layout_of(one) for one in objects])
        fresh = [False] * len(keys)

        def done(kept: list[bool]) -> None:
            new = [i for i, is_new in enumerate(fresh) if is_new]
            sizes = [objects[i].get_size() for i in new]
            try:
                self._note_stored([keys[i] for i in new], sizes)
            finally:  # whatever a listener does: LMCache waits for this
                self._stored.put(task, L2StoreResult(all(kept), sum(sizes)))

        def put(store: DigestStore, positions: list[int], digests: list[bytes]) -> Answer:
            return store.put(digests, [[_bytes_of(objects[i])] for i in positions])

        def took(answer: Answer, positions: list[int]) -> None:
            for position, is_new in zip(positions, answer.fresh, strict=True):
                fresh[position] = is_new

        self._spread(batches, keys, put, done, took)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    # --- lookup and lock ---

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """See the base class."""
        task = next(self._numbers)
        layouts = {group: _layout_of_group(desc) for group, desc in group_layout_descs.items()}
        batches = self._batches(keys, [layouts.get(key.object_group_id) for key in keys])

        missed: set[int] = set()  # of which a node said so; one that is away has lost nothing

        def took(answer: Answer, positions: list[int]) -> None:
            if answer.is_whole:
                missed.update(positions)

        def done(here: list[bool]) -> None:
            try:
                self._note_gone([keys[i] for i in sorted(missed) if not here[i]])
            finally:
                self._looked_up.put(task, _bitmap(here))

        self._spread(batches, keys, lambda store, _, digests: store.find(digests), done, took)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """What a lookup made ready will not be loaded, or has been."""
        for name, positions in self._batches(keys, [None] * len(keys)).items():
            self._stores[name].release([_digest(keys[i]) for i in positions])

    # --- load ---

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See the base class."""
        task = next(self._numbers)
        batches = self._batches(keys, [_layout_of(one) for one in objects])

        def done(loaded: list[bool]) -> None:
            self._loaded.put(task, _bitmap(loaded))
            self._notify_keys_accessed([key for key, is_good in zip(keys, loaded, strict=True) if is_good])

        def get(store: DigestStore, positions: list[int], digests: list[bytes]) -> Answer:
            return store.get(digests, [[_bytes_of(objects[i])] for i in positions])

        self._spread(batches, keys, get, done)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    # --- the rest ---

    def delete(self, keys: list[ObjectKey]) -> None:
        """These objects are not wanted any more, by any server. Waits, within the budget of a store."""
        batches = self._batches(keys, [None] * len(keys))
        answers = [
            (positions, self._stores[name].delete([_digest(keys[i]) for i in positions]))
            for name, positions in batches.items()
        ]
        heard = {i for positions, answer in answers if all(answer.wait()) for i in positions}
        self._note_gone([keys[i] for i in sorted(heard)])

    def report_status(self) -> dict[str, Any]:
        """The node's state and our counters, by space. Healthy unless a node refuses us, or is known to be down."""
        nodes = {name: store.stats() for name, store in self._stores.items()}
        is_healthy = all(node["state"] in ("up", "unknown") for node in nodes.values())
        return {
            "is_healthy": is_healthy, "type": type(self).__name__, "spaces": nodes,
            "mismatches": dict(self._mismatches), "bytes_used": self.get_usage().total_bytes_used,
        }  # fmt: skip

    def close(self) -> None:
        """Leave the nodes. Tasks under way end first, as they can."""
        for store in self._stores.values():
            store.close()
        for finished in (self._stored, self._looked_up, self._loaded):
            finished.close()

    # --- inside ---

    def _batches(self, keys: Sequence[ObjectKey], layouts: Sequence[Layout | None]) -> dict[str, list[int]]:
        """Positions of the keys for each space; keys that fit none are left out, counted and told once."""
        chosen: dict[tuple[str, Layout | None], list[str]] = {}
        batches: dict[str, list[int]] = {}
        for position, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            kind = key.model_name, layout
            if kind not in chosen:
                chosen[kind] = self._names_for(*kind)
            for name in chosen[kind]:
                batches.setdefault(name, []).append(position)
        return batches

    def _names_for(self, model: str, layout: Layout | None) -> list[str]:
        """The spaces an object may be in: all of its model where its size is not known."""
        if layout is None:
            return self._spaces.of_model(model)
        try:
            return [self._spaces.choose(model, layout)]
        except SpaceMismatch as error:
            with self._lock:
                self._mismatches[error.field] += 1
                is_news = self._mismatches[error.field] == 1
            if is_news:
                log.error("dpurt: objects of model %r are not cached: %s", model, error)
            return []

    def _spread(
        self,
        batches: Mapping[str, list[int]],
        keys: Sequence[ObjectKey],
        call: Callable[[DigestStore, list[int], list[bytes]], Answer],
        done: Callable[[list[bool]], None],
        took: Callable[[Answer, list[int]], None] = lambda answer, positions: None,
    ) -> None:
        """Call each space's store for its keys; `done` gets all answers."""
        gathered = Gathered(len(keys), len(batches), done)
        for name, positions in batches.items():
            answer = call(self._stores[name], positions, [_digest(keys[i]) for i in positions])

            def ended(blocks: list[bool], answer: Answer = answer, positions: list[int] = positions) -> None:
                took(answer, positions)
                gathered.add(positions, blocks)

            answer.then(ended)

    def _note_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        if keys:
            with self._lock:
                self._known.update(zip(keys, sizes, strict=True))
            self._notify_keys_stored(keys, sizes)

    def _note_gone(self, keys: Sequence[ObjectKey]) -> None:
        """The node has these no longer: deleted, or evicted by itself."""
        with self._lock:
            gone = {key: size for key in keys if (size := self._known.pop(key, None)) is not None}
        if gone:
            self._notify_keys_deleted(list(gone), list(gone.values()))


def _l1_memory(desc: L1MemoryDesc) -> memoryview:
    """LMCache's L1 (of one that still grows, what it has pinned), for fabrics that register memory to do it once."""
    return memory_at(
        desc.ptr, desc.size if desc.stable_registration_size is None else desc.stable_registration_size
    )


def _store_of(settings: Settings, name: str, memories: Sequence[memoryview]) -> DigestStore:
    access = access_from(WHERE, settings, name)
    assert access.config is not None
    space = access.config.to_space(name)
    if space.num_shards > 1:
        raise ConfigError(
            WHERE, f"space {name!r} has {space.num_shards} shards: LMCache's ranks are in its keys"
        )
    return DigestStore(access, name, space, budgets=Budgets.of(settings), memories=memories, log=log)


def _digest(key: ObjectKey) -> bytes:
    return digest_of(key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)


def _layout_of(one: MemoryObj) -> Layout:
    return Layout(one.get_size(), _dtype_name(one.get_dtype()))


def _layout_of_group(desc: MemoryLayoutDesc) -> Layout | None:
    """None where LMCache does not say: the description is advice, and may be empty."""
    if not desc.shapes:
        return None
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)]
    return Layout(sum(sizes), _dtype_name(desc.dtypes[0]))


def _dtype_name(dtype: object) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _bytes_of(one: MemoryObj) -> memoryview:
    """The object's bytes in L1, in place."""
    return memoryview(one.byte_array).cast("B")


def _bitmap(blocks: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(blocks))
    for position, is_set in enumerate(blocks):
        if is_set:
            bitmap.set(position)
    return bitmap
