"""What the NVMe/TCP bdev makes of a target's failures: each fault has its outcome. The target is a fake."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.errors import BdevError, BdevTimeout, ConfigError
from dpurt.testing.fake_spdk.nvme_target import SUBSYSTEM, FakeNvmeTarget, Fault, Namespace

INF = math.inf
FAST = Pacing(connect_s=2.0, min_backoff_s=0.01, max_backoff_s=0.05, close_s=0.05)
READ, WRITE, FLUSH = 2, 1, 0
INACCESSIBLE, OPTIMIZED, NON_OPTIMIZED = 3, 1, 2
SIZE = 1 << 20


class Rig:
    """A target with a nursery to listen in, and devices on it."""

    def __init__(self, target: FakeNvmeTarget, nursery: trio.Nursery) -> None:
        self.target = target
        self.nursery = nursery
        self.bdevs = contextlib.AsyncExitStack()

    async def open(self, num_paths: int = 1, **params: object) -> NvmeTcpBdev:
        while len(self.target.ports) < num_paths:
            await self.target.listen(self.nursery)
        addresses = [("127.0.0.1", port) for port in self.target.ports[:num_paths]]
        given: dict[str, object] = {"subnqn": SUBSYSTEM, "pacing": FAST, **params}
        bdev = await NvmeTcpBdev.open(addresses, **given)  # type: ignore[arg-type]
        await self.bdevs.enter_async_context(contextlib.aclosing(bdev))
        with trio.fail_after(2):
            await becomes(bdev, "usable", len(bdev.path_states()))
        return bdev


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = in_s(10)  # a test that hangs fails
        image = bytearray(i // 4096 % 251 for i in range(SIZE))
        rig = Rig(FakeNvmeTarget({1: Namespace(SIZE, image=image)}, has_ana=True), nursery)
        async with rig.bdevs:
            yield rig
        nursery.cancel_scope.cancel()


async def becomes(bdev: NvmeTcpBdev, state: str, count: int = 1) -> None:
    """Wait until this many paths are so."""
    while True:
        if list(bdev.path_states().values()).count(state) == count:
            return
        await trio.sleep(0.002)


def in_s(seconds: float) -> float:
    return trio.current_time() + seconds


async def read(bdev: Bdev, block: int = 5, *, num_blocks: int = 1, within_s: float = 2.0) -> memoryview:
    into = aligned_buffer(num_blocks * 4096)
    await bdev.read_into(block * 4096, [into], in_s(within_s))
    return into


def content(block: int) -> bytes:
    return bytes([block % 251]) * 4096


# --- statuses ---


async def test_failed_read_is_tried_again_and_succeeds(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, count=2, status=(0, 0x06, False)))
    assert await read(bdev) == content(5)
    assert bdev.stats.errors == 0


async def test_read_that_keeps_failing_is_an_io_error_naming_the_status(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, count=4, status=(2, 0x81, False)))
    with pytest.raises(BdevError, match="unrecovered read error") as caught:
        await read(bdev)
    assert caught.value.status == "io_error"
    assert await read(bdev) == content(5), "the association is none the worse"


async def test_do_not_retry_is_obeyed(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, status=(0, 0x06, True)))
    with pytest.raises(BdevError, match="dnr"):
        await read(bdev)


async def test_one_failed_command_fails_the_operation_after_the_others_ended(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, status=(2, 0x81, True)))
    rig.target.faults.append(Fault(READ, delay_s=0.05))
    with pytest.raises(BdevError, match="unrecovered"):
        await read(bdev, 0, num_blocks=64)
    assert len(rig.target.commands) == 1, "the delayed one was waited for, and then was the only one to move"
    assert bdev.stats.in_flight == 0


async def test_full_device_is_no_space(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(WRITE, status=(0, 0x81, False)))
    with pytest.raises(BdevError) as caught:
        await bdev.write_from(0, [aligned_buffer(4096)], in_s(2))
    assert caught.value.status == "no_space"


async def test_corrupt_data_with_good_status_comes_through_for_the_checksum_to_see(rig: Rig) -> None:
    bdev = await rig.open(header_digest=True, data_digest=True)
    rig.target.faults.append(Fault(READ, corrupt_at=7))
    got = await read(bdev)
    assert [i for i in range(4096) if got[i] != content(5)[i]] == [7]


async def test_wrong_data_digest_is_tried_again(rig: Rig) -> None:
    bdev = await rig.open(data_digest=True)
    rig.target.faults.append(Fault(READ, bad_digest=True))
    assert await read(bdev) == content(5)
    assert len(rig.target.commands) == 2


# --- time ---


async def test_hung_read_times_out_frees_its_buffer_and_its_late_data_never_arrives(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, hang=True))
    into = aligned_buffer(4096)
    with pytest.raises(BdevTimeout) as caught:
        await bdev.read_into(5 * 4096, [into], in_s(0.05))
    with trio.fail_after(1):
        await caught.value.settled()
    assert (bdev.stats.timeouts, bdev.stats.abandoned, bdev.stats.in_flight) == (1, 0, 0)
    rig.target.release()
    await becomes(bdev, "usable")
    assert await read(bdev, 9) == content(9)
    assert not any(into), "the abandoned read's buffer is not touched"
    assert rig.target.num_connections == 4, "the whole association was replaced"


async def test_hung_read_takes_no_other_path_down(rig: Rig) -> None:
    bdev = await rig.open(2)
    rig.target.faults.append(Fault(READ, hang=True))
    with pytest.raises(BdevTimeout):
        await read(bdev, within_s=0.05)
    assert await read(bdev) == content(5), "at once, on the other path"
    assert bdev.stats.errors == 0


async def test_other_commands_on_a_dropped_association_go_on_elsewhere(rig: Rig) -> None:
    bdev = await rig.open(2)
    rig.target.faults.append(Fault(READ, count=2, hang=True))
    rig.target.faults.append(Fault(READ, count=2, delay_s=0.2))
    got = []

    async def patient(block: int) -> None:
        got.append(await read(bdev, block))

    async with trio.open_nursery() as nursery:
        for block in (1, 2):
            nursery.start_soon(patient, block)  # these two hang
        await trio.sleep(0.02)
        with pytest.raises(BdevTimeout):
            await read(bdev, within_s=0.05)
        rig.target.release()
    assert sorted(map(bytes, got)) == [content(1), content(2)]


async def test_delay_within_the_deadline_is_no_error(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, delay_s=0.05))
    assert await read(bdev) == content(5)


async def test_slow_command_does_not_hold_up_the_others(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, hang=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, bdev)
        await trio.sleep(0.01)
        assert await read(bdev, 6) == content(6)
        assert bdev.stats.in_flight == 1
        rig.target.release()


async def test_cancelled_read_is_given_up_for_good_at_its_deadline(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, hang=True))
    with trio.move_on_after(0.02):
        await read(bdev, within_s=0.1)
    assert bdev.stats.abandoned == 1
    assert bdev.path_states() == {str(("127.0.0.1", rig.target.ports[0])): "usable"}, "others go on till then"
    with trio.fail_after(1):
        await bdev.drain()
    assert bdev.stats.in_flight == 0


async def test_closing_does_not_wait_forever_for_a_hung_command(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(WRITE, hang=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect_unavailable, bdev)
        await trio.sleep(0.01)
        with trio.fail_after(1):
            await bdev.aclose()


async def _expect_unavailable(bdev: Bdev) -> None:
    with pytest.raises(BdevError) as caught:
        await bdev.write_from(0, [aligned_buffer(4096)], INF)
    assert caught.value.status == "unavailable"


async def test_keep_alives_hold_an_idle_association(rig: Rig) -> None:
    rig.target.style.min_keep_alive_s = 0.6
    await rig.open(keep_alive_s=0.6)
    await trio.sleep(1.5)
    assert rig.target.num_connections == 2


async def test_silently_expired_association_is_replaced(rig: Rig) -> None:
    """The target's timer ends much before our idea of it."""
    bdev = await rig.open(keep_alive_s=60.0)
    (controller,) = rig.target._controllers.values()
    controller.close()
    await becomes(bdev, "usable", 0)
    await becomes(bdev, "usable")
    assert await read(bdev) == content(5)


# --- connections ---


async def test_target_killed_in_flight_fails_as_unavailable_then_works_again(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, hang=True))
    async with trio.open_nursery() as nursery:

        async def doomed() -> None:
            with pytest.raises(BdevError, match=r"closed by the target|reset by peer") as caught:
                await read(bdev)
            assert caught.value.status == "unavailable"

        nursery.start_soon(doomed)
        await trio.sleep(0.01)
        rig.target.drop_connections()
    with trio.fail_after(1):
        await becomes(bdev, "usable")
    assert await read(bdev) == content(5)


async def test_without_a_target_operations_fail_at_once_until_it_is_back(rig: Rig) -> None:
    bdev = await rig.open()
    port = rig.target.ports[0]
    await rig.target.stop_listening(port)
    rig.target.drop_connections()
    await becomes(bdev, "usable", 0)
    start = trio.current_time()
    for operation in (read(bdev), bdev.flush(INF), bdev.deallocate(0, 4096, INF)):
        with pytest.raises(BdevError) as caught:
            await operation
        assert caught.value.status == "unavailable"
    assert trio.current_time() - start < 0.5
    await rig.target.listen(rig.nursery, port)
    with trio.fail_after(2):
        await becomes(bdev, "usable")
    assert await read(bdev) == content(5)


async def test_thousands_of_waiting_operations_fail_together(rig: Rig) -> None:
    """Answered one by one, not each inside of the one before."""
    bdev = await rig.open(queue_size=2)
    rig.target.faults.append(Fault(READ, count=10_000, hang=True))
    refused = []

    async def ask() -> None:
        try:
            await read(bdev)
        except BdevError as error:
            refused.append(error.status)

    async with trio.open_nursery() as nursery:
        for _ in range(3000):
            nursery.start_soon(ask)
        await trio.sleep(0.05)
        await rig.target.stop_listening(rig.target.ports[0])
        rig.target.drop_connections()
    assert refused == ["unavailable"] * 3000


async def test_silent_target_is_given_up_at_the_connect_limit(rig: Rig) -> None:
    rig.target.is_silent = True
    with pytest.raises(BdevError, match=r"no answer in 0\.1 s while connecting") as caught:
        await rig.open(pacing=Pacing(connect_s=0.1))
    assert caught.value.status == "unavailable"


async def test_stopped_target_whose_kernel_accepts_is_given_up_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(BdevError, match="no answer"):
            await NvmeTcpBdev.open([server.getsockname()], SUBSYSTEM, pacing=Pacing(connect_s=0.1))


async def test_target_that_stops_answering_later_is_noticed_by_keep_alive(rig: Rig) -> None:
    bdev = await rig.open(keep_alive_s=0.1)
    rig.target.is_silent = True
    await becomes(bdev, "no answer to a keep-alive in 0.1 s")
    rig.target.is_silent = False


async def test_refused_connection_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(BdevError, match="Connection refused"):
        await NvmeTcpBdev.open([address], SUBSYSTEM, pacing=FAST)


async def test_unknown_subsystem_is_refused_with_the_status(rig: Rig) -> None:
    with pytest.raises(BdevError, match="connect: connect parameters invalid"):
        await rig.open(subnqn="nqn.2016-06.io.spdk:other")


async def test_queue_larger_than_the_controllers_is_cut(rig: Rig) -> None:
    bdev = await rig.open(queue_size=1024, num_queues=2)
    assert bdev.info.queue_depth == 2 * 127


async def test_transfer_beyond_the_targets_limit_ends_the_association_by_name(rig: Rig) -> None:
    bdev = await rig.open()
    rig.target.style.max_io_bytes = 8192  # not what it said
    with pytest.raises(BdevError, match="the controller ended the connection: transfer limit exceeded"):
        await read(bdev, num_blocks=4)
    await becomes(bdev, "usable")


async def test_operations_are_split_by_the_controllers_limit(rig: Rig) -> None:
    bdev = await rig.open()
    assert bdev.info.max_transfer_bytes == 131072
    got = await read(bdev, 1, num_blocks=80)  # 80 blocks, of which a command takes 32
    assert got == b"".join(map(content, range(1, 81)))
    assert rig.target.commands == [(READ, 1, 32), (READ, 33, 32), (READ, 65, 16)]


@pytest.mark.parametrize(
    "reply",
    [
        b"\xff" * 24,
        b"\x05\x00\x18\x00\x18\x00\x00\x00" + bytes(8) + b"\x00\x00\x00\x00\x77\x77\x00\x00",
        b"\x05\x00\x18\x00\x18\x00\x00\x00" + bytes(8) + b"\x00\x00\x00\x00<id>\x00\x00",
        b"\x07\x04\x18\x18\x18\x00\x01\x00<id>\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00" + bytes(4),
        b"\x09\x00\x18\x00\x18\x00\x00\x00<id>\x01\x00\x00\x00\x00\x00\x00\x10\x00\x00" + bytes(4),
    ],
    ids=["garbage", "unknown id", "success without data", "too much data", "R2T for a read"],
)
async def test_peer_that_breaks_the_rules_costs_the_association(rig: Rig, reply: bytes) -> None:
    bdev = await rig.open()
    rig.target.faults.append(Fault(READ, reply=reply))
    with pytest.raises(BdevError) as caught:
        await read(bdev)
    assert caught.value.status == "unavailable"
    await becomes(bdev, "usable")
    assert await read(bdev) == content(5)


@pytest.mark.parametrize("seed", range(12))
async def test_server_that_talks_nonsense_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    greeting = struct.pack("<BBBBIHBBI112x", 1, 0, 128, 0, 128, 0, 0, 0, 131072)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all((greeting if seed % 2 else b"") + rng.randbytes(rng.choice([10, 500])))
        await trio.sleep(rng.choice([0, 10]))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        with pytest.raises(BdevError) as caught:
            await NvmeTcpBdev.open([listener.socket.getsockname()], SUBSYSTEM, pacing=Pacing(connect_s=0.2))
        assert caught.value.status == "unavailable"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "é..x"])
async def test_name_that_leads_nowhere_is_unavailable(host: str) -> None:
    with pytest.raises(BdevError) as caught:
        await NvmeTcpBdev.open([(host, 4420)], SUBSYSTEM, pacing=FAST)
    assert caught.value.status == "unavailable"


# --- namespaces ---


async def test_removed_namespace_is_gone_and_works_once_it_is_back(rig: Rig) -> None:
    bdev = await rig.open()
    namespace = await rig.target.remove_namespace(1)
    with pytest.raises(BdevError) as caught:
        await read(bdev)
    assert caught.value.status == "gone"
    await rig.target.add_namespace(1, namespace)
    assert await read(bdev) == content(5)
    assert rig.target.num_connections == 2, "on the same association"


async def test_resize_is_followed(rig: Rig) -> None:
    bdev = await rig.open()
    namespace = await rig.target.remove_namespace(1)
    await rig.target.add_namespace(1, Namespace(0, image=namespace.image + bytes(4096)))
    with trio.fail_after(1):
        while bdev.info.size_bytes == SIZE:  # noqa: ASYNC110
            await trio.sleep(0.002)
    assert await read(bdev, SIZE // 4096) == bytes(4096)


async def test_other_block_size_is_refused(rig: Rig) -> None:
    bdev = await rig.open()
    await rig.target.remove_namespace(1)
    await rig.target.add_namespace(1, Namespace(SIZE, block_size=512))
    await becomes(bdev, "the block size was 4096 and is 512")
    with pytest.raises(BdevError, match="block size"):
        await read(bdev)


async def test_namespace_that_is_not_there_is_gone_when_opened(rig: Rig) -> None:
    with pytest.raises(BdevError) as caught:
        await rig.open(nsid=2)
    assert caught.value.status == "gone"


async def test_one_of_several_namespaces_must_be_named(rig: Rig) -> None:
    rig.target.namespaces[3] = Namespace(SIZE * 2)
    with pytest.raises(BdevError, match=r"name one of the namespaces \[1, 3\]"):
        await rig.open()
    assert (await rig.open(nsid=3)).info.size_bytes == 2 * SIZE


async def test_discovery_gives_all_paths(rig: Rig) -> None:
    for _ in range(5):
        await rig.target.listen(rig.nursery)
    bdev = await rig.open(1, discovery=True, name="found")
    assert len(bdev.path_states()) == 5
    with pytest.raises(BdevError, match="knows no TCP address"):
        await rig.open(1, discovery=True, subnqn="nqn.2016-06.io.spdk:other")


# --- paths ---


async def test_read_goes_down_the_other_path_when_access_is_lost(rig: Rig) -> None:
    bdev = await rig.open(2)
    rig.target.ana_states[rig.target.ports[0]] = INACCESSIBLE  # without an event
    assert await read(bdev, 0, num_blocks=250) == b"".join(map(content, range(250)))  # on both, at first
    await becomes(bdev, "ANA state 3")
    assert bdev.stats.errors == 0
    await rig.target.set_ana_state(rig.target.ports[0], NON_OPTIMIZED)
    await becomes(bdev, "usable", 2)


async def test_optimized_paths_are_preferred(rig: Rig) -> None:
    for _ in range(2):
        await rig.target.listen(rig.nursery)
    rig.target.ana_states[rig.target.ports[0]] = NON_OPTIMIZED
    bdev = await rig.open(2)
    rig.target.ana_states[rig.target.ports[1]] = OPTIMIZED
    assert [bdev._lanes[0]] == bdev._lanes
    await rig.target.set_ana_state(rig.target.ports[1], INACCESSIBLE)
    assert await read(bdev) == content(5)


async def test_without_access_on_any_path_reads_wait_for_it_to_come_back(rig: Rig) -> None:
    bdev = await rig.open(2)
    for port in rig.target.ports:
        await rig.target.set_ana_state(port, INACCESSIBLE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, bdev)
        await trio.sleep(0.05)
        assert bdev.stats.in_flight == 1
        await rig.target.set_ana_state(rig.target.ports[1], OPTIMIZED)
    assert bdev.stats.reads == 1


async def test_without_access_until_the_deadline_reads_time_out_and_keep_the_association(rig: Rig) -> None:
    bdev = await rig.open()
    await rig.target.set_ana_state(rig.target.ports[0], INACCESSIBLE)
    with pytest.raises(BdevTimeout) as caught:
        await read(bdev, within_s=0.05)
    await caught.value.settled()
    assert rig.target.num_connections == 2


async def test_lost_path_sends_reads_down_the_other_but_no_write_twice(rig: Rig) -> None:
    for _ in range(2):
        await rig.target.listen(rig.nursery)
    first, second = rig.target.ports
    rig.target.ana_states[second] = NON_OPTIMIZED  # so that all goes down the first
    bdev = await rig.open(2)
    rig.target.faults += [Fault(WRITE, hang=True), Fault(READ, hang=True)]
    got: list[bytes] = []

    async def write() -> None:
        with pytest.raises(BdevError) as caught:
            await bdev.write_from(0, [aligned_buffer(4096)], in_s(2))
        assert caught.value.status == "unavailable"

    async def read_on() -> None:
        got.append(bytes(await read(bdev)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        nursery.start_soon(read_on)
        await trio.sleep(0.02)
        for controller in list(rig.target._controllers.values()):
            if controller.port == first:
                controller.close()
    assert got == [content(5)]
    assert WRITE not in [opcode for opcode, _, _ in rig.target.commands]


async def test_path_to_another_namespace_is_refused(rig: Rig) -> None:
    other = FakeNvmeTarget({1: Namespace(SIZE, nguid=b"dpurt-namespace1")})
    port = await other.listen(rig.nursery)
    await rig.target.listen(rig.nursery)
    bdev = await NvmeTcpBdev.open(
        [("127.0.0.1", rig.target.ports[0]), ("127.0.0.1", port)], SUBSYSTEM, pacing=FAST
    )
    async with contextlib.aclosing(bdev):
        await becomes(bdev, "leads to another namespace than the other paths")
        assert list(bdev.path_states().values()).count("usable") == 1


# --- parameters ---


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"subnqn": "disk"}, "subnqn"),
        ({"hostnqn": "me"}, "hostnqn"),
        ({"num_queues": 0}, "num_queues"),
        ({"queue_size": 1}, "queue_size"),
        ({"keep_alive_s": -1.0}, "keep_alive_s"),
        ({"addresses": []}, "addresses"),
        ({"addresses": [("127.0.0.1", 0)]}, "addresses"),
        ({"addresses": ["127.0.0.1:4420"]}, "addresses"),
    ],
)
async def test_wrong_parameters_are_named(params: dict[str, object], where: str) -> None:
    given: dict[str, object] = {"addresses": [("127.0.0.1", 4420)], "subnqn": SUBSYSTEM, **params}
    with pytest.raises(ConfigError, match=where):
        await NvmeTcpBdev.open(**given)  # type: ignore[arg-type]
