"""LMCache's real MP server drives `DpurtL2Adapter` on a real node; LMCache's own client plays the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server import OBJECT_BYTES, SPACE, eventually, space_table, write_topology

from dpurt.config import load_config
from dpurt.demo.nodes import NodeProcess

Start = Callable[..., Any]


def l2(server: Any) -> dict[str, Any]:
    [adapter] = server.get("/status")["storage_manager"]["l2_adapters"]
    return dict(adapter)


def counters(server: Any) -> dict[str, Any]:
    return dict(l2(server)["spaces"][SPACE])


def stored(server: Any, count: int) -> None:
    eventually(lambda: counters(server).get("stored", 0) == count)


def on_device(node: NodeProcess, count: int) -> None:
    def written() -> int:
        stats: Any = node.stats()
        return sum(bdev["store"]["appends"] for bdev in stats["bdevs"].values())

    eventually(lambda: written() >= count)


def test_store_lookup_retrieve_delete_with_both_restarted_in_between(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    node = start_node()
    server = start_server()
    worker = engine(server)
    content = worker.content(1)
    assert worker.fetch(2) == 0
    worker.store(1)
    stored(server, 6)
    assert l2(server)["bytes_used"] == 6 * OBJECT_BYTES
    server.end()
    node.terminate()
    node.start()
    server = start_server()
    worker = engine(server)
    assert worker.fetch(1) == 6
    assert worker.content(1) == content
    assert counters(server)["bytes_loaded"] == 6 * OBJECT_BYTES
    keys = worker.keys(1)
    assert server.delete(keys[3:4])["deleted"] == 1
    server.clear_l1()
    assert worker.fetch(1) == 3
    assert worker.content(1)[:3] == content[:3]


def test_two_servers_share_what_one_stored(start_node: Start, start_server: Start, engine: Start) -> None:
    start_node()
    one, two = start_server(), start_server()
    first, second = engine(one), engine(two)
    content = first.content(7)
    first.store(7)
    stored(one, 6)
    assert second.fetch(7) == 6
    assert second.content(7) == content
    assert counters(two)["loaded"] == 6


def test_each_tensor_parallel_rank_has_its_own_objects(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    start_node()
    server = start_server()
    workers = engine(server, num_chunks=3, tp_size=2)
    content = workers.content(1)
    assert len(set(content)) == 6
    workers.store(1)
    stored(server, 6)
    server.clear_l1()
    assert workers.fetch(1) == 3
    assert workers.content(1) == content


def test_what_the_server_stores_again_after_losing_it_is_there_already(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    start_node()
    server = start_server()
    worker = engine(server)
    worker.store(1)
    stored(server, 6)
    server.clear_l1()
    worker.store(1)
    eventually(lambda: counters(server).get("exists", 0) == 6)
    assert counters(server)["stored"] == 6


def test_a_dead_node_is_misses_and_hits_again_when_it_is_back(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    node = start_node()
    server = start_server(find_s=0.5, load_s=1, store_s=1)
    worker = engine(server)
    content = worker.content(1)
    worker.store(1)
    stored(server, 6)
    on_device(node, 6)
    server.clear_l1()
    node.kill()
    began = time.monotonic()
    assert worker.fetch(1) == 0
    assert time.monotonic() - began < 8  # the budget is 0.5 s
    worker.store(5)  # stays in L1
    assert worker.fetch(5) == 6
    assert counters(server)["state"] == "down"
    assert l2(server)["bytes_used"] == 6 * OBJECT_BYTES  # a node that is away has lost nothing
    assert not l2(server)["is_healthy"]
    node.start()
    server.clear_l1()
    eventually(lambda: _fetched(server, worker, 1) == 6)
    assert worker.content(1) == content
    assert l2(server)["is_healthy"]


def _fetched(server: Any, worker: Any, sequence: int) -> int:
    server.clear_l1()
    return int(worker.fetch(sequence))


def test_a_server_starts_without_a_node_and_finds_it_later(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    node = start_node()
    node.kill()
    server = start_server(find_s=0.3, load_s=0.5, store_s=0.5)
    worker = engine(server)
    assert worker.fetch(1) == 0
    node.start()

    def store_reaches_it() -> bool:
        server.clear_l1()
        worker.store(1)
        return bool(counters(server).get("stored", 0) + counters(server).get("exists", 0))

    eventually(store_reaches_it)


def test_a_node_with_another_idea_of_the_objects_refuses_and_names_the_field(
    tmp_path: Path, start_node: Start, start_server: Start, engine: Start
) -> None:
    start_node(space_table().replace('"r1"', '"r2"'))
    port = int(load_config(tmp_path / "node.toml").gateway.bind.rpartition(":")[2])
    server = start_server(write_topology(tmp_path / "host.toml", space_table(), port))
    worker = engine(server)
    worker.store(1)
    server.clear_l1()
    assert worker.fetch(1) == 0
    found = counters(server)
    assert found["state"] == "refused"
    assert found["refusal"] == "space field 'revision' differs: node has 'r2', host has 'r1'"
    assert not l2(server)["is_healthy"]
    assert found["refusal"] in server.log.read_text()


def test_objects_that_do_not_fit_the_space_are_not_cached_and_the_field_is_named(
    start_node: Start, start_server: Start, engine: Start
) -> None:
    start_node(space_table(dtype="bfloat16"))
    server = start_server()
    worker = engine(server)
    worker.store(1)
    eventually(lambda: l2(server)["mismatches"])
    server.clear_l1()
    assert worker.fetch(1) == 0
    assert list(l2(server)["mismatches"]) == ["kv_dtype"]
    told = "space field 'kv_dtype' differs: node has 'bfloat16', host has 'float16'"
    assert told in server.log.read_text()


def test_the_adapter_answers_for_usage_and_its_descriptors_are_distinct(
    tmp_path: Path, start_node: Start
) -> None:
    from dpurt.engines.lmcache.adapter import DpurtL2Adapter

    start_node()
    adapter = DpurtL2Adapter({"topology": str(tmp_path / "node.toml"), "spaces": [SPACE]})
    try:
        fds = {
            adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()
        }  # fmt: skip
        assert len(fds) == 3
        assert not adapter.supports_global_eviction  # the node evicts by itself
        assert adapter.get_usage().total_bytes_used == 0
        assert adapter.query_load_result(99) is None
        assert adapter.pop_completed_store_tasks() == {}
    finally:
        adapter.close()
        adapter.close()
