"""The operators' door: an ``ipc`` socket in the node's run directory that nobody but its user may open.

What it answers is what the commands of `dpurt` ask of a live node. The node says what its own part in that is (`on_drain`,
`on_record`, `on_epoch_bump`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from dpurt.errors import BdevError, ConfigError, RemoteProtocolError
from dpurt.transport import ZmqSocket
from dpurt.wire import messages as m

from .explain import explain
from .hosts import Hosts, Refusal
from .index import IndexAgent
from .spaces import SpaceState
from .staging import StagingAgent

__all__ = ["AdminDoor"]


class AdminDoor:
    """See above."""

    def __init__(
        self, run_path: Path, index: IndexAgent, staging: StagingAgent, hosts: Hosts,
        route: Callable[[SpaceState, m.Route], m.RouteReply], node_stats: Callable[[], dict[str, object]],
    ) -> None:  # fmt: skip
        self._path = run_path / "admin.sock"
        self._index = index
        self._staging = staging
        self._hosts = hosts
        self._route = route
        self._node_stats = node_stats
        self.on_drain: Callable[[], None]
        self.on_record: Callable[[str], Awaitable[m.RecordReply]]
        self.on_epoch_bump: Callable[[str], Awaitable[int]]

    def bind(self, socket: ZmqSocket) -> None:
        """Have the socket listen where the commands look for it."""
        self._path.unlink(missing_ok=True)
        old = os.umask(0o177)  # never open to others, not even for a moment
        try:
            socket.bind(f"ipc://{self._path}")
        finally:
            os.umask(old)

    async def serve(self, socket: ZmqSocket) -> None:
        """Answer, one after the other, until cancelled."""
        while True:
            frames = await socket.recv()
            reply = await self._answer(frames[-1])
            try:
                socket.try_send([frames[0], m.encode(reply)])
            except trio.BrokenResourceError:
                continue

    async def _answer(self, frame: bytes) -> m.Reply:
        try:
            request = m.decode_admin(frame)
            return await self._carry_out(request)
        except RemoteProtocolError as error:
            return m.ErrorReply(id=m.request_id(frame), code=error.code, message=error.message)
        except Refusal as refusal:
            return m.ErrorReply(id=request.id, code=refusal.code, message=refusal.message)
        except BdevError as error:
            return m.ErrorReply(id=request.id, code="device", message=str(error))
        except ConfigError as error:
            return m.ErrorReply(id=request.id, code="cannot", message=str(error))

    async def _carry_out(self, request: m.AdminRequest) -> m.Reply:
        if isinstance(request, m.Stats):
            return m.StatsReply(id=request.id, stats=self._node_stats())
        if isinstance(request, m.Ping):
            return m.Ok(id=request.id)
        if isinstance(request, m.Drain):
            self.on_drain()
            return m.Ok(id=request.id)
        if isinstance(request, m.Record):
            reply = await self.on_record(request.path)
            reply.id = request.id
            return reply
        state = self._index.spaces.get(request.space)
        if state is None:
            raise Refusal("unknown_space", f"no space {request.space!r}: {', '.join(self._index.spaces)}")
        if isinstance(request, m.Route):
            return self._route(state, request)
        if isinstance(request, m.EpochBump):
            return m.Ok(id=request.id, count=await self.on_epoch_bump(request.space))
        self._hosts.check_shard(state, request.shard)
        others = [s for s in self._index.spaces.values() if s is not state]
        return m.ExplainReply(
            id=request.id, blocks=await explain(self._index, self._staging, state, request, others)
        )
