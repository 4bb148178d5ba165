"""Rails of a topology on this machine: which are here, why others are not, and in which order they lead to a host."""

from __future__ import annotations

import pytest

from dpurt.core.rails import RailWish
from dpurt.errors import RdmaUnavailable
from dpurt.rdma import paths
from dpurt.rdma.device import DeviceLimits, RdmaDevice

LIMITS = DeviceLimits(1 << 40, 100, 100, 100, 1024, 1024, 1, 16, True, False)


def device(name: str, address: str, numa: int = -1, gbit: float = 0.0) -> RdmaDevice:
    return RdmaDevice(name, 1, 3, f"::ffff:{address}", address, 4096, LIMITS, numa, gbit * 1e9 / 8)


DEVICES = {
    "mlx5_0": device("mlx5_0", "10.0.0.1", 0, 100),
    "mlx5_1": device("mlx5_1", "10.0.1.1", 1, 100),
    "mlx5_2": device("mlx5_2", "10.0.2.1", 0, 25),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, address: str) -> RdmaDevice:
        for found in DEVICES.values():
            if name in ("", found.name) and address in ("", found.address):
                return found
        raise RdmaUnavailable(name or address, "no such device")

    monkeypatch.setattr(paths, "find", find)
    monkeypatch.setattr(paths, "memory_numa", lambda: 0)
    monkeypatch.setattr(paths, "distance", lambda one, other: 0 if one < 0 else 10 if one == other else 21)


WISHES = [
    RailWish("slow", device="mlx5_2"),
    RailWish("far", address="10.0.1.1", switch="leaf-2"),
    RailWish("near", device="mlx5_0", switch="leaf-1"),
    RailWish("gone", device="mlx5_9"),
]


def test_rails_that_are_here_and_why_others_are_not():
    rails, missing = paths.resolve(WISHES)
    assert [rail.name for rail in rails] == ["slow", "far", "near"]
    assert missing == {"gone": "RDMA device mlx5_9: no such device"}


def test_a_hosts_rails_are_those_that_lead_to_it_best_first_with_the_reason():
    rails, _ = paths.resolve(WISHES)
    names = lambda found: [path.rail.name for path in found]  # noqa: E731
    assert names(paths.paths_to(rails, (), "")) == ["near", "slow", "far"]
    assert names(paths.paths_to(rails, (), "leaf-2")) == ["far", "near", "slow"]
    assert names(paths.paths_to(rails, ("far", "slow"), "")) == ["slow", "far"]
    first, *_ = paths.paths_to(rails, (), "leaf-1")
    assert str(first) == (
        "near (mlx5_0 port 1, GID 3 (10.0.0.1), MTU 4096): on the host's switch leaf-1, on the memory's NUMA node, 100 Gb/s"
    )


def test_what_a_topology_says_of_a_rail_goes_before_what_the_kernel_says():
    [rail], _ = paths.resolve([RailWish("r", device="mlx5_1", numa=0, bandwidth_bytes_per_s=5)])
    assert (rail.facts.distance, rail.facts.bytes_per_s) == (10, 5.0)
