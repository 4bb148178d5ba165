"""What is special to shm: descriptors, hostile landings, views that outlive an endpoint, the socket's
place."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import socket
import struct
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from dpurt.errors import ConfigError, FabricError, NodeUnavailable
from dpurt.fabric import copying
from dpurt.fabric.shm import ShmFabric, ShmLimits
from dpurt.testing.fabric_contract import ALICE, BOB, SHARED, FabricTraits, piece, serving, soon, token_of

TRAITS = FabricTraits(checks_leases=False, has_views=True, crosses_processes=True)
HELLO = struct.pack("<4sHHQ", b"DPS1", 0, 32, ALICE) + token_of(ALICE)


@pytest.fixture
def path():
    with TemporaryDirectory(prefix="dpurt-") as directory:
        yield Path(directory, "fabric")


@asynccontextmanager
async def shm_rig(path, **limits):
    async with serving(lambda access: ShmFabric(access, path, limits=ShmLimits(**limits)), TRAITS) as rig:
        with trio.fail_after(20):
            yield rig


def dial(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    sock.setblocking(False)
    return sock


async def receive(sock):
    await trio.lowlevel.wait_readable(sock)
    message, fds, _, _ = socket.recv_fds(sock, 100, 2)
    for fd in fds:
        os.close(fd)
    return message


async def welcome(path):
    """A raw client, past its hello."""
    sock = dial(path)
    sock.send(HELLO)
    magic, status, count = struct.unpack("<4sII", await receive(sock))
    assert (magic, status) == (b"DPS1", 0)
    for _ in range(count):
        assert len(await receive(sock)) == 20
    return sock


def memfd(size, *, seal=True):
    fd = os.memfd_create("landing", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def offer(sock, fd, size, number=1):
    socket.send_fds(sock, [struct.pack("<4sIQQ", b"LAND", 0, number, size)], [fd])
    os.close(fd)


async def test_the_socket_is_private_and_gone_after(path):
    async with shm_rig(path):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_a_directory_others_may_enter_is_refused(path):
    path.parent.chmod(0o755)
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True, allow_unwrapped=True):
        async with shm_rig(path):
            pass


async def test_a_dead_nodes_socket_is_replaced_a_live_ones_is_not(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    async with shm_rig(path) as rig:
        await (await rig.open()).aclose()
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConfigError, match="another node"), flatten_subgroups=True, allow_unwrapped=True
        ):
            async with shm_rig(path):
                pass


async def test_a_landing_the_host_could_shrink_cuts_it_off(path):
    async with shm_rig(path) as rig:
        sock = await welcome(path)
        link = rig.link()
        offer(sock, memfd(4096, seal=False), 4096)
        assert await receive(sock) == b""  # the node's end of file
        assert "shrinking" in link.close_reason
        assert rig.fabric.stats.errors == 1
        assert rig.closed == []  # the host may still map: only its own end of file counts
        sock.close()
        await rig.until_closed(ALICE)


async def test_a_landing_larger_than_its_memfd_or_no_memfd_cuts_the_host_off(path):
    async with shm_rig(path) as rig:
        for fd in (memfd(4096), os.open("/dev/zero", os.O_RDWR)):
            sock = await welcome(path)
            offer(sock, fd, 8192)
            assert await receive(sock) == b""
            sock.close()
            await rig.until_closed(ALICE)
            rig.closed.clear()
        assert rig.fabric.stats.errors == 2


async def test_landings_are_bounded(path):
    async with shm_rig(path, max_landings=2, max_landing_bytes=3 * 4096) as rig:
        host = await rig.open()
        host.landing(4096)
        second = host.landing(8192)
        await rig.link().push([(rig.regions[SHARED].view[:1], second.region_id, 0)], soon())
        link = rig.link()
        host.landing(4096)
        await rig.until_closed(ALICE)
        assert "limit" in link.close_reason
        with pytest.raises(FabricError, match="closed"):
            host.landing(4096)
        await host.aclose()


async def test_random_messages_never_hurt_the_node_and_leak_no_descriptor(path):
    rng = random.Random(2)
    async with shm_rig(path) as rig:
        gc.collect()  # what earlier tests left to it
        before = len(os.listdir("/proc/self/fd"))
        for number in range(60):
            sock = await welcome(path) if number % 2 else dial(path)
            noise = (HELLO if number % 4 == 0 else b"")[: rng.randrange(30)] + rng.randbytes(
                rng.randrange(1, 120)
            )
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(rng.randrange(4))]
            socket.send_fds(sock, [noise], fds)
            for fd in fds:
                os.close(fd)
            if number % 2 == 0:
                assert struct.unpack("<4sII", await receive(sock))[1] != 0
            assert await receive(sock) == b""
            sock.close()
            if number % 2:
                await rig.until_closed(ALICE)
                rig.closed.clear()
        assert rig.fabric.stats.errors + rig.fabric.stats.refused == 60
        assert len(os.listdir("/proc/self/fd")) == before
        await (await rig.open()).aclose()


async def test_a_hello_that_does_not_come_costs_its_time_and_no_more(path):
    async with shm_rig(path, hello_s=0.05) as rig:
        sock = dial(path)
        assert struct.unpack("<4sII", await receive(sock))[1] == 3
        assert rig.fabric.stats.errors == 1
        sock.close()


async def test_links_beyond_the_limit_are_told_there_is_no_room(path):
    async with shm_rig(path, max_links=1) as rig:
        host = await rig.open(ALICE)
        with pytest.raises(NodeUnavailable, match="no room"):
            await rig.open(BOB)
        await host.aclose()


async def test_an_endpoint_closed_with_views_held_ends_its_link_when_the_last_is_dropped(path):
    async with shm_rig(path) as rig:
        host = await rig.open()
        views = [host.view(SHARED, offset, 100) for offset in (0, 50)]
        await host.aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert rig.closed == []
        assert views.pop() == rig.bytes(SHARED, 50, 100)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert rig.closed == []
        views.clear()
        await rig.until_closed(ALICE)


async def test_a_host_that_is_cut_off_is_not_gone_before_it_lets_go(path):
    async with shm_rig(path) as rig:
        sock = await welcome(path)
        rig.link().close()
        assert rig.fabric.link(ALICE) is None
        for _ in range(3):
            sock.send(b"still here")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert rig.closed == []
        with pytest.raises(NodeUnavailable):
            await rig.open()
        sock.close()
        await rig.until_closed(ALICE)


async def test_a_push_waits_for_a_landing_that_its_control_message_overtook(path):
    async with shm_rig(path) as rig:
        sock = await welcome(path)
        fd = memfd(4096)
        kept = os.dup(fd)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.link().push, [(rig.regions[SHARED].view[:9], 1, 7)], soon())
            await trio.testing.wait_all_tasks_blocked()
            offer(sock, fd, 4096)
        assert os.pread(kept, 9, 7) == rig.bytes(SHARED, 0, 9)
        os.close(kept)
        sock.close()


async def test_others_have_their_turn_during_a_large_pull_and_a_cancelled_one_stops_there(path, monkeypatch):
    monkeypatch.setattr(copying, "_TURN_BYTES", 1 << 20)
    async with shm_rig(path) as rig:
        host = await rig.open()
        got = piece(SHARED, 0, 5 << 20)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.pull, [got], soon())
                await trio.lowlevel.checkpoint()
                scope.cancel()
        assert scope.cancelled_caught
        assert host.stats.pulls == 0
        assert got.local[-1:] == b"\0"
        await host.pull([got], soon())
        assert got.local == rig.bytes(SHARED, 0, 5 << 20)
        await host.aclose()
