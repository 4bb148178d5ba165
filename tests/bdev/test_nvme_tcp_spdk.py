"""The NVMe/TCP bdev on a real `spdk_tgt` (DPURT_SPDK_TGT names it): the contract, and each fault's outcome."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.errors import BdevError, BdevTimeout
from dpurt.testing.bdev_contract import check_bdev

pytestmark = pytest.mark.spdk

NQN = "nqn.2016-06.io.spdk:dpurt"
MIB = 1 << 20
FAST = Pacing(connect_s=5.0, min_backoff_s=0.02, max_backoff_s=0.2, close_s=0.2)


class Spdk:
    """A target process and its control socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: list[int] = []
        self._ids = itertools.count(1)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [os.environ["DPURT_SPDK_TGT"], "--no-huge", "-s", "1024", "-m", "0x1"]
        words += ["-r", str(self.folder / "rpc"), "-S", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        give_up = time.monotonic() + 30
        while True:
            try:
                self.call("spdk_get_version")
                return process
            except OSError:
                assert time.monotonic() < give_up, (self.folder / "log").read_text()
                time.sleep(0.05)

    def call(self, method: str, **params: object) -> Any:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method}
        with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as answers:
            sock.settimeout(20)
            sock.connect(str(self.folder / "rpc"))
            sock.sendall(json.dumps(request | ({"params": params} if params else {})).encode())
            answer = json.loads(answers.readline())
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def export(self, bdev: str, num_paths: int = 1, **transport: object) -> None:
        self.call("nvmf_create_transport", trtype="TCP", **transport)
        self.call("nvmf_create_subsystem", nqn=NQN, allow_any_host=True, ana_reporting=True)
        self.add_namespace(bdev)
        while len(self.ports) < num_paths:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports.append(free.getsockname()[1])
        for port in self.ports:
            self.call("nvmf_subsystem_add_listener", nqn=NQN, listen_address=listener(port))

    def add_namespace(self, bdev: str) -> None:
        self.call("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": bdev, "nsid": 1})

    def set_ana(self, port: int, state: str) -> None:
        address = listener(port)
        self.call("nvmf_subsystem_listener_set_ana_state", nqn=NQN, listen_address=address, ana_state=state)

    def malloc(self, mib: int = 16) -> str:
        name: str = self.call(
            "bdev_malloc_create", num_blocks=mib * MIB // 4096, block_size=4096, name="Malloc0"
        )
        return name

    def faulty(self) -> str:
        self.call("bdev_error_create", base_name=self.malloc())
        return "EE_Malloc0"

    def inject(self, error_type: str, num: int = 1, io_type: str = "read", **more: object) -> None:
        self.call(
            "bdev_error_inject_error",
            name="EE_Malloc0",
            io_type=io_type,
            error_type=error_type,
            num=num,
            **more,
        )

    def file(self, mib: int = 16) -> str:
        path = self.folder / "disk"
        if not path.exists():
            path.write_bytes(bytes(mib * MIB))
        name: str = self.call("bdev_aio_create", name="Aio0", filename=str(path), block_size=4096)
        return name

    def restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(30)


def listener(port: int) -> dict[str, str]:
    return {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}


@pytest.fixture
def spdk() -> Iterator[Spdk]:
    folder = Path(tempfile.mkdtemp(prefix="dpurt-"))
    target = Spdk(folder)
    yield target
    target.stop()
    shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def opened(spdk: Spdk, **params: object) -> AsyncIterator[NvmeTcpBdev]:
    addresses = [("127.0.0.1", port) for port in spdk.ports]
    given: dict[str, object] = {"subnqn": NQN, "pacing": FAST, **params}
    bdev = await NvmeTcpBdev.open(addresses, **given)  # type: ignore[arg-type]
    async with contextlib.aclosing(bdev):
        await becomes(bdev, "usable", len(bdev.path_states()))
        yield bdev


async def becomes(bdev: NvmeTcpBdev, state: str, count: int = 1) -> None:
    with trio.fail_after(20):
        while True:
            if list(bdev.path_states().values()).count(state) == count:
                return
            await trio.sleep(0.01)


def soon(seconds: float = 10.0) -> float:
    return trio.current_time() + seconds


async def read(bdev: Bdev, offset: int = 0, length: int = 4096, within_s: float = 10.0) -> memoryview:
    buffer = aligned_buffer(length)
    await bdev.read_into(offset, [buffer], soon(within_s))
    return buffer


async def fill(bdev: Bdev, length: int = MIB) -> memoryview:
    data = aligned_buffer(length)
    data[:] = random.Random(5).randbytes(length)
    await bdev.write_from(0, [data], soon())
    return data


@pytest.mark.parametrize(
    ("transport", "params"),
    [
        ({}, {}),
        ({"max_io_size": 2 * MIB}, {"num_queues": 4, "queue_size": 32}),
        ({}, {"header_digest": True, "data_digest": True}),
        ({"c2h_success": False}, {"sq_flow_control": True}),
    ],
    ids=["default", "2MiB", "digests", "flow-control"],
)
async def test_nvme_tcp_on_spdk_keeps_the_contract(
    spdk: Spdk, transport: dict[str, object], params: dict[str, object]
) -> None:
    spdk.export(spdk.malloc(), **transport)
    address = ("127.0.0.1", spdk.ports[0])

    async def make() -> Bdev:
        return await NvmeTcpBdev.open([address], NQN, **params)  # type: ignore[arg-type]

    async def reopen(bdev: Bdev) -> Bdev:
        return await make()

    await check_bdev(make, reopen=reopen)


async def test_discovery(spdk: Spdk) -> None:
    spdk.export(spdk.malloc(), 2)
    for port in spdk.ports:
        where = listener(port)
        spdk.call(
            "nvmf_subsystem_add_listener", nqn="nqn.2014-08.org.nvmexpress.discovery", listen_address=where
        )
    async with opened(spdk, discovery=True) as bdev:
        assert len(bdev.path_states()) == 2
        assert bdev.info.detail["model"] == "SPDK bdev Controller"


async def test_failing_reads_are_tried_again(spdk: Spdk) -> None:
    spdk.export(spdk.faulty())
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.inject("failure", 2)
        assert await read(bdev) == data[:4096]
        spdk.inject("failure", 4)
        with pytest.raises(BdevError, match="internal error") as caught:
            await read(bdev)
        assert caught.value.status == "io_error"


async def test_corrupt_data_comes_with_good_status(spdk: Spdk) -> None:
    spdk.export(spdk.faulty())
    async with opened(spdk, data_digest=True) as bdev:
        data = await fill(bdev)
        spdk.inject("corrupt_data", corrupt_offset=9, corrupt_value=255)
        got = await read(bdev)
        assert [i for i in range(4096) if got[i] != data[i]] == [9]


async def test_hung_read_costs_the_association_and_its_late_data_is_never_seen(spdk: Spdk) -> None:
    spdk.export(spdk.faulty())
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.inject("pending")
        into = aligned_buffer(4096)
        with pytest.raises(BdevTimeout) as caught:
            await bdev.read_into(0, [into], soon(0.3))
        with trio.fail_after(1):
            await caught.value.settled()
        await becomes(bdev, "usable")
        assert await read(bdev, 4096) == data[4096:8192]
        spdk.call("bdev_error_resume_pending", name="EE_Malloc0")
        assert await read(bdev, 8192) == data[8192:12288]
        assert not any(into)


async def test_slow_reads_within_and_beyond_the_deadline(spdk: Spdk) -> None:
    latencies = {"avg_read_latency": 200_000, "p99_read_latency": 200_000}
    base = spdk.malloc()
    spdk.call(
        "bdev_delay_create",
        base_bdev_name=base,
        name="D0",
        avg_write_latency=0,
        p99_write_latency=0,
        **latencies,
    )
    spdk.export("D0")
    async with opened(spdk) as bdev:
        start = trio.current_time()
        await read(bdev)
        assert trio.current_time() - start >= 0.2
        with pytest.raises(BdevTimeout):
            await read(bdev, within_s=0.1)
        await becomes(bdev, "usable")


async def test_removed_namespace_is_gone_until_it_is_back(spdk: Spdk) -> None:
    name = spdk.malloc()
    spdk.export(name)
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.call("nvmf_subsystem_remove_ns", nqn=NQN, nsid=1)
        with pytest.raises(BdevError) as caught:
            await read(bdev)
        assert caught.value.status == "gone"
        spdk.add_namespace(name)
        assert await read(bdev) == data[:4096]


async def test_resize_is_followed(spdk: Spdk) -> None:
    spdk.export(spdk.file())
    async with opened(spdk) as bdev:
        os.truncate(spdk.folder / "disk", 24 * MIB)
        spdk.call("bdev_aio_rescan", name="Aio0")
        with trio.fail_after(10):
            while bdev.info.size_bytes != 24 * MIB:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert not any(await read(bdev, 24 * MIB - 4096))


async def test_inaccessible_path_is_left_and_taken_up_again(spdk: Spdk) -> None:
    spdk.export(spdk.malloc(), 2)
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.set_ana(spdk.ports[0], "inaccessible")
        assert await read(bdev, 0, MIB) == data
        await becomes(bdev, "ANA state 3")
        spdk.set_ana(spdk.ports[1], "inaccessible")
        with pytest.raises(BdevTimeout):
            await read(bdev, within_s=0.3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, bdev)
            await trio.sleep(0.1)
            spdk.set_ana(spdk.ports[1], "non_optimized")
        assert await read(bdev, 0, MIB) == data
        assert bdev.stats.errors == 0


async def test_removed_listener_leaves_the_other_path(spdk: Spdk) -> None:
    spdk.export(spdk.malloc(), 2)
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.call("nvmf_subsystem_remove_listener", nqn=NQN, listen_address=listener(spdk.ports[0]))
        for _ in range(5):
            assert await read(bdev, 0, MIB) == data
        await becomes(bdev, "usable")
        assert bdev.stats.errors == 0


async def test_stopped_target_times_out_and_comes_back(spdk: Spdk) -> None:
    spdk.export(spdk.malloc())
    async with opened(spdk, pacing=Pacing(connect_s=0.3, min_backoff_s=0.02, max_backoff_s=0.1)) as bdev:
        data = await fill(bdev)
        spdk.process.send_signal(signal.SIGSTOP)
        with pytest.raises(BdevTimeout):
            await read(bdev, within_s=0.2)
        for _ in range(3):
            with pytest.raises(BdevError) as caught:
                await read(bdev)
            assert caught.value.status == "unavailable", "at once"
        await trio.sleep(0.5)
        assert "no answer in 0.3 s" in next(iter(bdev.path_states().values()))
        spdk.process.send_signal(signal.SIGCONT)
        await becomes(bdev, "usable")
        assert await read(bdev, 0, MIB) == data


async def test_killed_target_under_load_is_unavailable_then_serves_the_same_bytes(spdk: Spdk) -> None:
    spdk.export(spdk.file())
    outcomes: set[str] = set()

    async def load(bdev: Bdev, data: memoryview) -> None:
        while True:
            try:
                assert await read(bdev, 0, MIB) == data
                outcomes.add("good")
            except BdevError as error:
                outcomes.add(error.status)
            await trio.sleep(0.005)

    async with opened(spdk) as bdev:
        data = await fill(bdev)
        await bdev.flush(soon())
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(load, bdev, data)
            await trio.sleep(0.2)
            await trio.to_thread.run_sync(spdk.restart)
            assert outcomes == {"good", "unavailable"}
            spdk.export(spdk.file())
            await becomes(bdev, "usable")
            outcomes.clear()
            await trio.sleep(0.2)
            assert "good" in outcomes
            nursery.cancel_scope.cancel()


async def test_throttle_slows_and_breaks_nothing(spdk: Spdk) -> None:
    name = spdk.malloc()
    spdk.export(name)
    async with opened(spdk) as bdev:
        data = await fill(bdev)
        spdk.call("bdev_set_qos_limit", name=name, rw_mbytes_per_sec=4)
        start = trio.current_time()
        for _ in range(4):
            assert await read(bdev, 0, MIB) == data
        assert trio.current_time() - start > 0.5


async def test_keep_alives_outlast_the_targets_timer(spdk: Spdk) -> None:
    """10 s, which I/O does not reset."""
    spdk.export(spdk.malloc())
    async with opened(spdk, keep_alive_s=8.0) as bdev:
        start = trio.current_time()
        while trio.current_time() < start + 12:
            await read(bdev)
            await trio.sleep(0.5)
        assert bdev.stats.errors == 0
        qpairs = spdk.call("nvmf_subsystem_get_controllers", nqn=NQN)
        assert [controller["cntlid"] for controller in qpairs] == [1]
