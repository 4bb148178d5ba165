"""Health and status: plain numbers out of answers that cannot be taken at their word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpurt.bdev.spdk_health import health_of
from dpurt.bdev.spdk_rpc import open_spdk_rpc
from dpurt.bdev.spdk_state import TargetState
from dpurt.bdev.spdk_status import exports_of, read_health, read_status, utilisation
from dpurt.errors import RemoteProtocolError
from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bdev.conftest import Live


@pytest.mark.parametrize(
    ("shown", "celsius"),
    [(35, 35), (0, 0), (2**64 - 10, -10), (2**64 - 273, None), (18446744073709551343, None), (65_262, None)],
)
def test_temperature_that_no_device_has_is_none(shown: int, celsius: int | None) -> None:
    assert health_of({"temperature_celsius": shown}).temperature_celsius == celsius


def test_data_units_are_bytes_whatever_their_size() -> None:
    health = health_of({"data_units_written": 2**100, "data_units_read": 1, "percentage_used": 130})
    assert (health.bytes_written, health.bytes_read) == (2**100 * 512_000, 512_000)
    assert health.percentage_used == 130
    assert health.temperature_celsius is None
    assert health.is_healthy


@pytest.mark.parametrize("bad", [{"critical_warning": 4}, {"media_errors": 1}])
def test_warning_or_media_error_is_not_healthy(bad: dict[str, int]) -> None:
    assert not health_of(bad).is_healthy


@pytest.mark.parametrize(
    "bad", [None, [], {"percentage_used": "3"}, {"percentage_used": -1}, {"media_errors": True}]
)
def test_answer_that_is_no_health_is_a_protocol_error(bad: object) -> None:
    with pytest.raises(RemoteProtocolError, match="bad_health"):
        health_of(bad)


def reactors(*ticks: tuple[int, int]) -> dict[str, Any]:
    return {
        "reactors": [{"lcore": core, "busy": busy, "idle": idle} for core, (busy, idle) in enumerate(ticks)]
    }


def test_utilisation_is_the_difference_between_two_looks() -> None:
    before, after = reactors((100, 900), (0, 0)), reactors((175, 925), (0, 0))
    assert utilisation(before, after) == {0: 0.75, 1: 0.0}
    assert utilisation(reactors(), reactors((1, 3))) == {0: 0.25}


@pytest.mark.parametrize("bad", [None, [], {"reactors": 3}, {"reactors": [{"lcore": "0"}]}])
def test_reactors_of_the_wrong_shape_are_a_protocol_error(bad: object) -> None:
    with pytest.raises(RemoteProtocolError, match="bad_answer: framework_get_reactors"):
        utilisation(bad, bad)


@pytest.mark.parametrize(
    "method", ["spdk_get_version", "rpc_get_methods", "bdev_get_bdevs", "bdev_get_iostat"]
)
async def test_answer_of_the_wrong_shape_is_a_protocol_error(tmp_path: Path, method: str) -> None:
    server = FakeRpcServer(FakeTarget(), tmp_path / "rpc.sock")
    server.faults.raw_answers[method] = b'{"jsonrpc":"2.0","id":%d,"result":[{"name":3}]}\n'
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(server.path) as rpc:
            with pytest.raises(RemoteProtocolError, match=f"bad_answer: {method}"):
                await read_status(rpc, 0, trio.current_time() + 5)
        nursery.cancel_scope.cancel()


def test_exports_are_shown_as_addresses() -> None:
    state = TargetState(
        vhost=[{"ctrlr": "c", "socket": "/run/c", "backend_specific": {"block": {"bdev": "M0"}}}],
        subsystems=[
            {"nqn": "n", "namespaces": [{"bdev_name": "M0"}], "listen_addresses": [{"traddr": "::1", "trsvcid": "1"}]},
            {"nqn": "discovery"},
        ],
    )  # fmt: skip
    assert exports_of("M0", state) == ["vhost /run/c", "nvmf n at ::1:1"]
    assert exports_of("M1", state) == []


async def test_status_names_bdevs_as_people_do(live: Live) -> None:
    await live.call("bdev_malloc_create", name="M0", num_blocks=4096, block_size=4096)
    await live.call("bdev_lvol_create_lvstore", bdev_name="M0", lvs_name="s", cluster_sz=1 << 20)
    await live.call("bdev_lvol_create", lvol_name="v", lvs_name="s", size_in_mib=4)
    status = await read_status(live.rpc, 0.05, trio.current_time() + 20)
    assert {bdev.name: bdev.size_bytes for bdev in status.bdevs} == {"M0": 16 << 20, "s/v": 4 << 20}
    assert set(status.reactors) == {0}
    assert all(0 <= share <= 1 for share in status.reactors.values())
    assert status.health == {}


async def test_health_of_each_controller_is_read(tmp_path: Path) -> None:
    server = FakeRpcServer(FakeTarget(), tmp_path / "rpc.sock")
    server.target.remote_controllers["0000:01:00.0"] = [1 << 20]
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(server.path) as rpc:
            deadline = trio.current_time() + 5
            attach = {"name": "N", "trtype": "PCIe", "traddr": "0000:01:00.0"}
            assert await rpc.call("bdev_nvme_attach_controller", attach, deadline=deadline) == ["Nn1"]
            health = await read_health(rpc, deadline)
        nursery.cancel_scope.cancel()
    assert health["N"].temperature_celsius is None
    assert health["N"].percentage_used == 3
    assert health["N"].bytes_written == 512_000_000_000
