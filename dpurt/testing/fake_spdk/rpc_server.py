"""Serves a `FakeTarget` on a Unix socket the way a real target does, its bad habits included.

Theory of operation. Requests are JSON values one after another, split by Python's own `json` (nothing is shared with the
client's codec, so a mistake there cannot hide here). Each request of a connection runs in a task of its own; answers go
out as they are ready, in reverse order within one received piece with `reorder`. One connection is one task; beyond
`max_connections` the rest stay in the kernel's backlog, connected and never served.

What can be turned on, all in `RpcFaults`: slow methods, reordering, a hang of the whole process (SIGSTOP: it
connects, reads nothing, answers nothing), raw bytes instead of a method's answer. Always there: garbage closes
without an answer, a request over 256 KiB resets, a crypto bdev whose key was destroyed makes `bdev_get_bdevs` an
unterminated string. `restart()` drops every connection and all state.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import trio

from dpurt.testing.fake_spdk.methods import RpcFailure, call
from dpurt.testing.fake_spdk.state import FakeTarget

__all__ = ["FakeRpcServer", "RpcFaults"]

MAX_REQUEST_BYTES = 256 * 1024
PIECE = 64 * 1024
_LITERALS = ("true", "false", "null")


@dataclass(slots=True)
class RpcFaults:
    """What goes wrong from now on."""

    slow_s: dict[str, float] = field(default_factory=dict)
    reorder: bool = False
    raw_answers: dict[str, bytes] = field(default_factory=dict)


class FakeRpcServer:
    """`await nursery.start(server.run)` listens; cancel the nursery to kill it (the socket file stays, as after
    SIGKILL).
    """

    def __init__(self, target: FakeTarget, path: str | Path, max_connections: int = 64) -> None:
        self.target = target
        self.path = Path(path)
        self.faults = RpcFaults()
        self.requests: list[str] = []  # methods, in the order they came
        self._asked = trio.Condition()
        self._seats = trio.Semaphore(max_connections)
        self._running = trio.Event()
        self._running.set()
        self._open: set[trio.SocketStream] = set()

    def hang(self) -> None:
        """As SIGSTOP does."""
        self._running = trio.Event()

    def resume(self) -> None:
        """As SIGCONT does."""
        self._running.set()

    async def restart(self) -> None:
        """Killed and started again at once: connections reset, state gone."""
        self.target.restart()
        await self.drop_connections()

    async def asked(self, count: int) -> None:
        """Return when this many requests have come."""
        async with self._asked:
            while len(self.requests) < count:
                await self._asked.wait()

    async def drop_connections(self) -> None:
        for stream in list(self._open):
            await trio.aclose_forcefully(stream)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.path.unlink(missing_ok=True)
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            await listener.bind(os.fspath(self.path))
            listener.listen(512)
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await self._seats.acquire()
                    await self._running.wait()
                    accepted, _ = await listener.accept()
                    nursery.start_soon(self._serve, trio.SocketStream(accepted))

    async def _serve(self, stream: trio.SocketStream) -> None:
        self._open.add(stream)
        try:
            await _Connection(self, stream).run()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client's or `drop_connections`' doing: a target shrugs
        finally:
            self._open.discard(stream)
            self._seats.release()
            await trio.aclose_forcefully(stream)

    async def answer(self, request: object) -> bytes:
        """The bytes of one answer; empty for none. Waits as long as the method takes."""
        await self._running.wait()
        if isinstance(request, list):
            parts = [part for part in [await self.answer(one) for one in request] if part]
            return b"[" + b",".join(part.rstrip(b"\n") for part in parts) + b"]\n" if parts else b""
        if not isinstance(request, dict) or not _is_proper(request):
            return _encoded({"id": None, "error": {"code": -32600, "message": "Invalid request"}})
        return await self._carried_out(request)

    async def _carried_out(self, request: dict[str, object]) -> bytes:
        method = str(request["method"])
        async with self._asked:
            self.requests.append(method)
            self._asked.notify_all()
        await trio.sleep(self.faults.slow_s.get(method, 0))
        await self._running.wait()
        if method in self.faults.raw_answers:
            return self.faults.raw_answers[method].replace(b"%d", str(request["id"]).encode())
        try:
            body: dict[str, object] = {"result": await call(self.target, method, request.get("params"))}
        except RpcFailure as error:
            body = {"error": {"code": error.code, "message": error.message}}
        if "id" not in request:
            return b""
        return self._with_freed_names(_encoded({"id": request["id"], **body}))

    def _with_freed_names(self, answer: bytes) -> bytes:
        """A destroyed key's name is freed memory: bytes that may end no string."""
        for name in self.target.destroyed_keys:
            answer = re.sub(rb'"key_name":"%s"' % re.escape(name).encode(), rb'"key_name":"\\u00', answer)
        return answer


def _is_proper(request: dict[str, object]) -> bool:
    id_is_good = isinstance(request.get("id"), int | str | None)
    return request.get("jsonrpc") == "2.0" and isinstance(request.get("method"), str) and id_is_good


def _encoded(body: dict[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **body}, separators=(",", ":")).encode() + b"\n"


class _Connection:
    """One client. Ends at EOF, at garbage, or at a request too large."""

    def __init__(self, server: FakeRpcServer, stream: trio.SocketStream) -> None:
        self._server = server
        self._stream = stream
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._writing = trio.Lock()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                data = await self._stream.receive_some(PIECE)
                await self._server._running.wait()
                try:
                    requests = list(self._requests(data))
                except ValueError:
                    data = b""
                if not data or len(self._text) > MAX_REQUEST_BYTES:
                    nursery.cancel_scope.cancel()
                    return
                nursery.start_soon(self._answer_all, requests)

    def _requests(self, data: bytes) -> Iterator[object]:
        """The requests that are whole. ValueError for what can never be one."""
        self._text += self._decoder.decode(data)
        while self._text.strip():
            self._text = self._text.lstrip()
            if self._text[0] not in "{[":
                raise ValueError("garbage")
            try:
                request, end = json.JSONDecoder().raw_decode(self._text)
            except json.JSONDecodeError as error:
                if _may_go_on(error, self._text):
                    return
                raise
            self._text = self._text[end:]
            yield request

    async def _answer_all(self, requests: list[object]) -> None:
        if self._server.faults.reorder:
            answers = [await self._server.answer(request) for request in requests]
            for answer in reversed(answers):
                await self._send(answer)
            return
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(self._answer_one, request)

    async def _answer_one(self, request: object) -> None:
        await self._send(await self._server.answer(request))

    async def _send(self, answer: bytes) -> None:
        if answer:
            async with self._writing:
                await self._stream.send_all(answer)


def _may_go_on(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more bytes could make this JSON."""
    rest = text[error.pos :]
    is_cut_word = any(word.startswith(rest) for word in _LITERALS) or rest == "-"
    is_cut_escape = "\\u" in rest[:3] and len(rest) < 7
    return error.msg.startswith("Unterminated string") or not rest.strip() or is_cut_word or is_cut_escape
