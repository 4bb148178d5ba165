"""The test VM is what the other tests here take it for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm

ADDRESS, PORT = "127.0.0.1", "4420"
NVMET = Path("/sys/kernel/config/nvmet")
TESTBED = Path(__file__).parent / "testbed"


def nvmet_namespaces(nqn: str) -> list[Path]:
    return sorted((NVMET / "subsystems" / nqn / "namespaces").iterdir())


def ana_state() -> str:
    [port] = [p for p in (NVMET / "ports").iterdir() if (p / "addr_trsvcid").read_text().strip() == PORT]
    return (port / "ana_groups/1/ana_state").read_text().strip()


def test_soft_roce_is_up_and_has_a_gid_for_its_ipv4_address():
    pyverbs_device = pytest.importorskip("pyverbs.device")
    assert [device.name for device in pyverbs_device.get_device_list()] == [b"rxe0"]
    with pyverbs_device.Context(name="rxe0") as context:
        gids = [str(context.query_gid(1, index)) for index in range(2)]
    assert any(gid.endswith("ffff:0a09:0001") for gid in gids)


def test_nvmet_exports_one_namespace_on_the_drive_it_names():
    [namespace] = nvmet_namespaces(os.environ["DPURT_VM_NQN"])
    assert (namespace / "device_path").read_text().strip() == os.environ["DPURT_VM_NVMET_DEVICE"]
    assert (namespace / "enable").read_text().strip() == "1"


def test_nvmet_up_adds_nothing_when_all_is_there_already():
    nqn, device = os.environ["DPURT_VM_NQN"], os.environ["DPURT_VM_NVMET_DEVICE"]
    subprocess.run([TESTBED / "nvmet-up", nqn, device, ADDRESS, PORT], check=True)
    assert len(nvmet_namespaces(nqn)) == 1


def test_nvmet_ana_changes_the_state_of_the_listener_it_names():
    for state in ("inaccessible", "optimized"):
        subprocess.run([TESTBED / "nvmet-ana", ADDRESS, PORT, state], check=True)
        assert ana_state() == state


def test_nvmet_ana_refuses_an_address_nothing_listens_on():
    done = subprocess.run(
        [TESTBED / "nvmet-ana", ADDRESS, "4421", "optimized"], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert f"nothing listens on {ADDRESS}:4421" in done.stderr


def test_the_free_drive_is_not_the_exported_one():
    drives = {os.environ["DPURT_VM_DRIVE"], os.environ["DPURT_VM_NVMET_DEVICE"]}
    assert drives == {"/dev/nvme0n1", "/dev/nvme1n1"}
