"""One NVMe/TCP connection over a socket pair: when its commands leave."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dpurt.bdev.nvme_tcp import _Connection, _receive
from dpurt.wire import nvme
from dpurt.wire.nvme_tcp import TcpQueue

CAPSULE = 72
RESPONSE = struct.Struct("<BBBBIQHHHH")
IC_RESPONSE = struct.pack("<BBBBIHBBI112x", 1, 0, 128, 0, 128, 0, 0, 0, 131072)


@asynccontextmanager
async def greeted() -> AsyncIterator[tuple[_Connection, socket.socket, list[str]]]:
    """A connection that idles, the controller's end, and why the connection was lost."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    lost: list[str] = []
    connection = _Connection(ours, TcpQueue(8), lambda completion: None, lost.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.read)
        nursery.start_soon(connection.write)
        await wait_all_tasks_blocked()
        assert len(theirs.recv(1024)) == 128  # our greeting
        theirs.send(IC_RESPONSE)
        await connection.greeted.wait()
        await wait_all_tasks_blocked()
        yield connection, theirs, lost
        connection.close()
        nursery.cancel_scope.cancel()
    theirs.close()


async def test_a_command_for_an_idle_queue_leaves_before_the_loop_turns() -> None:
    async with greeted() as (connection, theirs, _):
        connection.submit(nvme.flush(1, None))
        assert len(theirs.recv(1024)) == CAPSULE


async def test_commands_beside_one_in_flight_leave_together_at_the_end_of_the_turn() -> None:
    async with greeted() as (connection, theirs, _):
        for _ in range(4):
            connection.submit(nvme.flush(1, None))
        assert len(theirs.recv(1024)) == CAPSULE
        with pytest.raises(BlockingIOError):
            theirs.recv(1024)
        await wait_all_tasks_blocked()
        assert len(theirs.recv(1024)) == 3 * CAPSULE


async def test_what_did_not_go_out_at_once_is_the_writers() -> None:
    async with greeted() as (connection, theirs, _):
        clogged = fill(connection._sock)
        connection.submit(nvme.flush(1, None))
        assert len(drained(theirs)) == clogged
        await wait_all_tasks_blocked()
        assert len(drained(theirs)) == CAPSULE


async def test_a_lost_connection_is_noticed_by_its_tasks_not_by_who_submits() -> None:
    async with greeted() as (connection, theirs, lost):
        theirs.close()
        connection.submit(nvme.flush(1, None))
        await wait_all_tasks_blocked()
        assert lost


async def test_after_the_last_answer_nobody_looks_for_more_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []

    def look(sock: socket.socket, windows: list[memoryview]) -> int:
        looks.append(len(windows))
        return _receive(sock, windows)

    monkeypatch.setattr("dpurt.bdev.nvme_tcp._receive", look)
    async with greeted() as (connection, theirs, lost):
        looks.clear()
        for command_id in range(3):
            connection.submit(nvme.flush(1, None))
            theirs.send(RESPONSE.pack(5, 0, 24, 0, 24, 0, 0, 0, command_id, 0))
            await wait_all_tasks_blocked()
        assert (looks, lost, connection.room) == ([1, 1, 1], [], 7)


async def test_what_comes_behind_the_last_answer_is_looked_at() -> None:
    async with greeted() as (connection, theirs, lost):
        connection.submit(nvme.flush(1, None))
        theirs.send(RESPONSE.pack(5, 0, 24, 0, 24, 0, 0, 0, 0, 0) + b"\xff" * 24)
        await wait_all_tasks_blocked()
        assert connection.room == 7
        assert lost


def fill(sock: socket.socket) -> int:
    """Until it takes no more; how many bytes that were."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            count += sock.send(bytes(1 << 12))
    return count


def drained(sock: socket.socket) -> bytes:
    """All that is there to read."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            data += sock.recv(1 << 16)
    return data
