"""The operator's end of a node's admin socket: a Unix socket in its run directory, mode 0600, so only its user gets in."""

from __future__ import annotations

import socket
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
    _knock(path)
    request.id = 1
    with open_context() as context, ZmqSocket(context, "DEALER") as door:
        door.connect(f"ipc://{path}")
        with trio.move_on_after(budget_s):
            await door.send([m.encode(request)])
            return _expect((await door.recv())[-1], kind)
    raise NodeUnavailable(str(path), f"no answer in {budget_s:.0f} s")


def _knock(path: Path) -> None:
    """Raises NodeUnavailable at once when nobody listens: ZeroMQ would wait for somebody to come."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(path))
    except FileNotFoundError:
        why = "no such socket: is the node running, with this run_dir?"
        raise NodeUnavailable(str(path), why) from None
    except ConnectionRefusedError:
        raise NodeUnavailable(str(path), "nobody listens there: the node has ended") from None
    except OSError as error:
        raise NodeUnavailable(str(path), error.strerror or str(error)) from error


def _expect(frame: bytes, kind: type[T]) -> T:
    reply = m.decode_reply(frame)
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.ErrorReply):
        raise RemoteProtocolError(reply.code, reply.message)
    raise RemoteProtocolError("unexpected_reply", f"expected {kind.__name__}, got {type(reply).__name__}")
