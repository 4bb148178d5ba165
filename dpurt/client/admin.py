"""The operator's end of a node's admin socket: a Unix socket in its run directory, mode 0600, so only its user gets in."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import trio

from dpurt.errors import NodeUnavailable, RemoteProtocolError
from dpurt.transport import ZmqSocket, open_context
from dpurt.wire import messages as m

T = TypeVar("T", bound=m.Reply)
BUDGET_S = 10.0


def ask(run_path: Path, request: m.Request, kind: type[T], budget_s: float = BUDGET_S) -> T:
    """One question, one answer. Raises NodeUnavailable when no node runs there, RemoteProtocolError when it refuses."""
    return trio.run(_ask, run_path, request, kind, budget_s)


async def _ask(run_path: Path, request: m.Request, kind: type[T], budget_s: float) -> T:
    path = run_path / "admin.sock"
    if not path.exists():
        raise NodeUnavailable(str(path), "no such socket: is the node running, with this run_dir?")
    request.id = 1
    with open_context() as context, ZmqSocket(context, "DEALER") as socket:
        socket.connect(f"ipc://{path}")
        with trio.move_on_after(budget_s):
            await socket.send([m.encode(request)])
            return _expect((await socket.recv())[-1], kind)
    raise NodeUnavailable(str(path), f"no answer in {budget_s:.0f} s")


def _expect(frame: bytes, kind: type[T]) -> T:
    reply = m.decode_reply(frame)
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.ErrorReply):
        raise RemoteProtocolError(reply.code, reply.message)
    raise RemoteProtocolError("unexpected_reply", f"expected {kind.__name__}, got {type(reply).__name__}")
