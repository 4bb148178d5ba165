"""Which way leads to an SPDK bdev: the first that there is and that can be used here."""

from __future__ import annotations

from typing import Any

import pytest

from dpurt.bdev import spdk
from dpurt.bdev.spdk import SpdkBdev, Way, nvmf_subsystem
from dpurt.bdev.spdk_state import TargetState
from dpurt.errors import BdevError

NQN = "nqn.2026-11.test:spdk"
TCP, RDMA = ("10.9.0.1", 4420), ("10.9.0.1", 4430)


def state(*, vhost: bool = False, rdma: bool = True, tcp: bool = True) -> TargetState:
    listeners = [("RDMA", RDMA)] * rdma + [("tcp", TCP)] * tcp
    shown: list[Any] = [
        {
            "nqn": NQN,
            "namespaces": [{"nsid": 3, "bdev_name": "Aio0"}],
            "listen_addresses": [
                {"trtype": word, "traddr": host, "trsvcid": str(port)} for word, (host, port) in listeners
            ],
        }
    ]
    shown_vhost: list[Any] = [{"socket": "/run/v", "backend_specific": {"block": {"bdev": "Aio0"}}}] * vhost
    bdevs: list[Any] = [{"name": "Aio0"}]
    return TargetState(bdevs=bdevs, vhost=shown_vhost, subsystems=shown)


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening tells what would be opened."""

    def opener(word: str) -> Any:
        async def open_it(*args: object, **params: object) -> Any:
            return word, args[0]

        return open_it

    for name, word in (("VhostUserBdev", "vhost"), ("NvmeRdmaBdev", "rdma"), ("NvmeTcpBdev", "tcp")):
        monkeypatch.setattr(getattr(spdk, name), "open", opener(word))
    monkeypatch.setattr(spdk, "why_off", lambda: "")


async def opened(target: TargetState, path: Way = "auto") -> Any:
    bdev = SpdkBdev("flash", "Aio0", None, {}, {})
    bdev._state = target
    return await bdev._open_way(path)


async def test_auto_takes_vhost_then_rdma_then_tcp() -> None:
    assert await opened(state(vhost=True)) == ("vhost", "/run/v")
    assert await opened(state()) == ("rdma", [RDMA])
    assert await opened(state(rdma=False)) == ("tcp", [TCP])


async def test_auto_passes_rdma_over_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spdk, "why_off", lambda: "no RDMA device")
    assert await opened(state()) == ("tcp", [TCP])
    assert await opened(state(), "nvme-rdma") == ("rdma", [RDMA]), "asked for by name: its own error says why"


async def test_named_way_is_taken_or_refused_by_name() -> None:
    assert await opened(state(vhost=True), "nvme-rdma") == ("rdma", [RDMA])
    assert await opened(state(vhost=True), "nvme-tcp") == ("tcp", [TCP])
    with pytest.raises(BdevError, match="not exported over nvme-rdma"):
        await opened(state(rdma=False), "nvme-rdma")


def test_subsystem_is_found_by_the_bdev_it_shows_and_the_transport() -> None:
    assert nvmf_subsystem("Aio0", state(), "RDMA") == (NQN, 3, [RDMA])
    assert nvmf_subsystem("Aio0", state(rdma=False), "RDMA") is None
    assert nvmf_subsystem("Other", state(), "RDMA") is None
