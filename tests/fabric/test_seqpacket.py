"""Messages over Unix sockets: what happens when both ends close at once."""

from __future__ import annotations

import socket

import trio
import trio.testing

from dpurt.fabric.seqpacket import Channel


async def test_a_channel_closed_between_waking_up_and_reading_is_at_its_end() -> None:
    for _ in range(30):  # which of two woken tasks runs first is chance
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, ends = Channel(ours), []

        async def watch(channel: Channel = channel, ends: list[tuple[bytes, int]] = ends) -> None:
            ends.append(await channel.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            theirs.close()
            await trio.lowlevel.checkpoint()
            channel.close()
        assert ends == [(b"", -1)]
