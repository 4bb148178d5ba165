"""SPDK's own Python client as an oracle: on the same target both clients get the same, results and refusals.

It is blocking, so it works in a thread; it is thrown away after each error, as it cannot be trusted afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpurt.errors import RpcError

if TYPE_CHECKING:
    from tests.bdev.conftest import Live

pytest.importorskip("spdk.rpc.client", reason="the PyPI package spdk is not installed (extra: spdk)")

from spdk.rpc.client import JSONRPCClient, JSONRPCException

MALLOC = {"name": "M0", "num_blocks": 512, "block_size": 4096}


def ask(path: Path, method: str, params: Mapping[str, Any] | None) -> object:
    """What the oracle gets: the result, or ("error", code, message)."""
    client = JSONRPCClient(str(path), timeout=10)
    try:
        return client.call(method, dict(params) if params else None)
    except JSONRPCException as error:
        answer = json.loads(error.message.partition("response:\n")[2])
        return ("error", answer["code"], answer["message"])
    finally:
        client.close()


async def ours(live: Live, method: str, params: Mapping[str, Any] | None) -> object:
    try:
        return await live.rpc.call(method, params, deadline=trio.current_time() + 10)
    except RpcError as error:
        return ("error", error.code, error.message)


async def theirs(live: Live, method: str, params: Mapping[str, Any] | None = None) -> object:
    return await trio.to_thread.run_sync(partial(ask, live.path, method, params))


async def prepare(live: Live) -> None:
    await live.call("bdev_malloc_create", **MALLOC)
    await live.call("nvmf_create_transport", trtype="TCP")
    await live.call("nvmf_create_subsystem", nqn="nqn.2026-11.io.dpurt:a", allow_any_host=True)
    await live.call("nvmf_subsystem_add_ns", nqn="nqn.2026-11.io.dpurt:a", namespace={"bdev_name": "M0"})


SAME = [
    ("spdk_get_version", None),
    ("bdev_get_bdevs", None),
    ("bdev_get_bdevs", {"name": "M0"}),
    ("bdev_lvol_get_lvstores", None),
    ("vhost_get_controllers", None),
    ("nvmf_get_subsystems", None),
    ("nvmf_get_transports", None),
    ("notify_get_types", None),
    ("bdev_nvme_get_controllers", None),
]
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    ("bdev_get_bdevs", {"name": "nope"}, -19),
    ("bdev_get_bdevs", {"name": "nope", "timeout": 20}, -110),
    ("bdev_get_iostat", {"names": ["nope"]}, -19),
    ("bdev_malloc_delete", {"name": "nope"}, -19),
    ("bdev_set_qos_limit", {"name": "nope", "rw_ios_per_sec": 1000}, -19),
    ("bdev_malloc_create", MALLOC, -17),
    ("bdev_malloc_create", {**MALLOC, "name": "M1", "num_blocks": 1 << 30}, -12),
    ("bdev_malloc_create", {**MALLOC, "name": "M1", "block_size": 1000}, -22),
    ("bdev_aio_create", {"name": "A", "filename": "/nonexistent/a", "block_size": 4096}, -2),
    ("bdev_uring_create", {"name": "U", "filename": "/nonexistent/u", "block_size": 4096}, -32603),
    ("nvmf_create_transport", {"trtype": "TCP"}, -32603),
    ("nvmf_create_subsystem", {"nqn": "nqn.2026-11.io.dpurt:a"}, -32603),
    ("nvmf_subsystem_add_ns", {"nqn": "nqn.2026-11.io.dpurt:x", "namespace": {"bdev_name": "M0"}}, -32602),
    ("nvmf_subsystem_add_ns", {"nqn": "nqn.2026-11.io.dpurt:a", "namespace": {"bdev_name": "nope"}}, -32602),
    ("vhost_create_blk_controller", {"ctrlr": "c", "dev_name": "M0"}, -32602),
    (
        "bdev_delay_update_latency",
        {"delay_bdev_name": "nope", "latency_type": "avg_read", "latency_us": 1},
        -32602,
    ),
    ("bdev_nvme_get_controller_health_info", {"name": "nope"}, -32603),
    ("no_such_method", {}, -32601),
]


async def test_both_clients_get_the_same_results(live: Live) -> None:
    await prepare(live)
    for method, params in SAME:
        assert await ours(live, method, params) == await theirs(live, method, params), method


async def test_both_clients_get_the_same_refusals_and_the_codes_we_know(live: Live) -> None:
    await prepare(live)
    for method, params, code in REFUSED:
        mine = await ours(live, method, params)
        assert mine == await theirs(live, method, params), method
        assert isinstance(mine, tuple), method
        assert mine[1] == code, (method, mine)


async def test_what_one_client_changes_the_other_sees(live: Live) -> None:
    assert await theirs(live, "bdev_malloc_create", MALLOC) == "M0"
    assert await ours(live, "bdev_get_bdevs", {"name": "M0"}) == await theirs(
        live, "bdev_get_bdevs", {"name": "M0"}
    )
    assert await ours(live, "bdev_malloc_delete", {"name": "M0"}) is True
    assert await theirs(live, "bdev_get_bdevs", {"name": "M0"}) == ("error", -19, "No such device")


@pytest.mark.parametrize("params", [{"nam": "x"}, {"name": 1}, {"names": ["x"]}])
async def test_wrong_parameters_are_refused_by_fake_and_real_target(
    live: Live, params: dict[str, Any]
) -> None:
    mine = await ours(live, "bdev_get_bdevs", params)
    assert mine == await theirs(live, "bdev_get_bdevs", params)
    assert isinstance(mine, tuple)
    assert mine[1] in {-32602, -32603}
    assert mine[2] == "spdk_json_decode_object failed"
