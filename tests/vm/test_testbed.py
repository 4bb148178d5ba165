"""The test VM is what the other tests here take it for; its scripts do what they say."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm

ADDRESS, PORT = "127.0.0.1", "4420"
NVMET = Path("/sys/kernel/config/nvmet")
TESTBED = Path(__file__).parent / "testbed"
BLOCK = 1 << 20


def nqn() -> str:
    return os.environ["DPURT_VM_NQN"]


def drive() -> Path:
    return Path(os.environ["DPURT_VM_NVMET_DEVICE"])


def text(path: Path) -> str:
    return path.read_text().strip()


def namespaces(subsystem: str) -> list[Path]:
    return sorted((NVMET / "subsystems" / subsystem / "namespaces").iterdir())


def listener(service: str) -> Path:
    [port] = [port for port in (NVMET / "ports").iterdir() if text(port / "addr_trsvcid") == service]
    return port


def wait_for_block_device(subsystem: str) -> Path:
    """What the kernel's initiator made of a subsystem's first namespace."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for found in Path("/sys/class/nvme-subsystem").glob("*/subsysnqn"):
            disks = [Path("/dev", disk.name) for disk in found.parent.glob("nvme*n1")]
            if text(found) == subsystem and disks and disks[0].exists():
                return disks[0]
        time.sleep(0.05)
    raise TimeoutError(f"no block device for {subsystem}")


@pytest.fixture
def attached() -> Generator[Path, None, None]:
    subprocess.run(["modprobe", "nvme-tcp"], check=True)
    subprocess.run(["nvme", "connect", "-t", "tcp", "-a", ADDRESS, "-s", PORT, "-n", nqn()], check=True)
    yield wait_for_block_device(nqn())
    subprocess.run(["nvme", "disconnect", "-n", nqn()], check=True)


def test_pyverbs_sees_soft_roce_with_a_gid_for_its_ipv4_address():
    device = pytest.importorskip("pyverbs.device")
    with device.Context(name="rxe0") as context:
        gids = [entry.gid_str() for entry in context.query_gid_table(64)]
    assert "0000:0000:0000:0000:0000:ffff:0a09:0001" in gids


def test_soft_roce_carries_data_between_two_processes():
    pingpong = ["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "20", "-s", "65536", "-c"]
    with subprocess.Popen(pingpong, stdout=subprocess.PIPE, text=True) as server:
        try:
            wait_for_listener(18515)
            subprocess.run([*pingpong, "localhost"], check=True, timeout=30)
            assert server.wait(30) == 0
        finally:
            server.kill()


def wait_for_listener(port: int) -> None:
    """The server takes one connection only, so this looks for it and does not try it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        sockets = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        if f":{port:04X} " in sockets:
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


def test_nvmet_exports_one_namespace_on_the_drive_it_names():
    [namespace] = namespaces(nqn())  # no test may leave another
    assert text(namespace / "device_path") == str(drive())
    assert text(namespace / "enable") == "1"


def test_what_the_kernel_writes_through_the_target_is_on_the_drive(attached: Path):
    payload = os.urandom(BLOCK)
    with attached.open("r+b") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    with drive().open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, BLOCK, os.POSIX_FADV_DONTNEED)
        assert file.read(BLOCK) == payload


def test_nvmet_up_adds_nothing_that_is_there_already():
    before = namespaces(nqn()), sorted((NVMET / "ports").iterdir())
    subprocess.run([TESTBED / "nvmet-up", nqn(), drive(), ADDRESS, PORT], check=True)
    assert (namespaces(nqn()), sorted((NVMET / "ports").iterdir())) == before


def test_nvmet_up_exports_a_file_under_a_second_name(tmp_path: Path):
    name, image = "nqn.2026-11.test:file", tmp_path / "disk"
    image.write_bytes(bytes(BLOCK))
    subprocess.run([TESTBED / "nvmet-up", name, image, ADDRESS, PORT], check=True)
    try:
        [namespace] = namespaces(name)
        assert text(namespace / "device_path") == str(image)
        assert {link.name for link in (listener(PORT) / "subsystems").iterdir()} == {nqn(), name}
    finally:
        take_down(name)


def take_down(subsystem: str) -> None:
    (listener(PORT) / "subsystems" / subsystem).unlink()
    for namespace in namespaces(subsystem):
        (namespace / "enable").write_text("0")
        namespace.rmdir()
    (NVMET / "subsystems" / subsystem).rmdir()


def test_nvmet_ana_sets_the_state_of_the_listener_it_names():
    for state in ("inaccessible", "non-optimized", "optimized"):
        subprocess.run([TESTBED / "nvmet-ana", ADDRESS, PORT, state], check=True)
        assert text(listener(PORT) / "ana_groups/1/ana_state") == state


def test_nvmet_ana_refuses_an_address_nothing_listens_on():
    command = [TESTBED / "nvmet-ana", ADDRESS, "9", "optimized"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"nothing listens on {ADDRESS}:9" in done.stderr


def test_the_free_drive_is_not_the_exported_one():
    assert Path(os.environ["DPURT_VM_DRIVE"]).is_block_device()
    assert os.environ["DPURT_VM_DRIVE"] != str(drive())
