"""The NVMe/RDMA bdev where there is no RDMA: it says so, and what to do."""

from __future__ import annotations

import pytest

from dpurt.bdev import nvme_rdma
from dpurt.bdev.factory import open_bdev
from dpurt.errors import BdevError, ConfigError

SUBSYSTEM = "nqn.2026-11.test:rdma"
ADDRESSES = [("10.9.0.1", 4420)]


async def refusal() -> BdevError:
    with pytest.raises(BdevError) as caught:
        await open_bdev("nvme-rdma", addresses=ADDRESSES, subnqn=SUBSYSTEM)
    assert caught.value.status == "unavailable"
    return caught.value


async def test_without_pyverbs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_rdma, "missing", lambda: "pyverbs cannot be used: install python3-pyverbs")
    assert "install python3-pyverbs" in str(await refusal())


async def test_without_a_device_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_rdma, "missing", lambda: "")
    monkeypatch.setattr(nvme_rdma, "why_off", lambda: "no RDMA device in /sys/class/infiniband")
    assert "no RDMA device" in str(await refusal())


async def test_wrong_parameters_are_found_before_any_device_is() -> None:
    with pytest.raises(ConfigError, match=r"\$\.bdev\.subnqn"):
        await open_bdev("nvme-rdma", addresses=ADDRESSES, subnqn="somewhere")
    with pytest.raises(ConfigError, match="name at least one"):
        await open_bdev("nvme-rdma", addresses=[], subnqn=SUBSYSTEM)
