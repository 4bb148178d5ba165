"""A GPU host on another machine, for the fabric contract: its endpoints are there, and are driven from here.

`python -m dpurt.testing.far_endpoint ADDRESS PORT` serves; `dial(where)` gives a `connect` whose endpoints live in that
process. Theory of operation: one TCP connection an operation. A request is a line of JSON and the bytes of its pieces; so is
the answer. Closing the sending half in the middle cancels the operation over there, and its answer is waited for. What an
`Endpoint` does at once (`landing`, `stats`) blocks this process for one round trip: for tests only, without authentication.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio

from dpurt.errors import DpurtError, FabricError, NodeUnavailable, RemoteAccessError, RemoteProtocolError
from dpurt.fabric import Address, Endpoint, FabricStats, MemoryRegion, Piece, connect

__all__ = ["FarEndpoint", "FarRegion", "dial"]

Where = tuple[str, int]
Dial = Callable[[str, Address, int, bytes, float], Awaitable[Endpoint]]
_PATIENCE_S = 60.0


# --- the wire ---


def _frame(head: Mapping[str, Any], data: bytes = b"") -> bytes:
    return json.dumps({**head, "size": len(data)}).encode() + b"\n" + data


class _Frames:
    """Cuts what arrives into heads and bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: dict[str, Any] | None = None

    def feed(self, data: bytes | bytearray) -> tuple[dict[str, Any], bytes] | None:
        """One frame, once it is whole."""
        self._buffer += data
        if self._head is None and b"\n" in self._buffer:
            line, _, rest = self._buffer.partition(b"\n")
            self._head, self._buffer = json.loads(line), bytearray(rest)
        if self._head is None or len(self._buffer) < self._head["size"]:
            return None
        return self._head, bytes(self._buffer)


async def _receive(stream: trio.SocketStream) -> tuple[dict[str, Any], bytes]:
    frames = _Frames()
    async for data in stream:
        if whole := frames.feed(data):
            return whole
    raise DpurtError("the far end went away in the middle of a frame")


# --- this side ---


def dial(where: Where) -> Dial:
    """As `dpurt.fabric.connect`, for endpoints over there."""

    async def far_connect(
        kind: str, address: Address, session: int, token: bytes, deadline: float
    ) -> Endpoint:
        request = {
            "op": "open",
            "kind": kind,
            "address": dict(address),
            "session": session,
            "token": token.hex(),
        }
        head, _ = await _ask(where, request | {"seconds": deadline - trio.current_time()})
        return FarEndpoint(kind, where, head["endpoint"])

    return far_connect


async def _ask(where: Where, request: Mapping[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
    async with await trio.open_tcp_stream(*where) as stream:
        await stream.send_all(_frame(request, data))
        try:
            answer = await _receive(stream)
        except trio.Cancelled:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _PATIENCE_S):
                await stream.send_eof()
                await _receive(stream)
            raise
    _raise_error(answer[0])
    return answer


def _ask_now(where: Where, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    frames = _Frames()
    with socket.create_connection(where, _PATIENCE_S) as sock:
        sock.sendall(_frame(request))
        while data := sock.recv(1 << 20):
            if whole := frames.feed(data):
                _raise_error(whole[0])
                return whole
    raise DpurtError("the far end went away in the middle of a frame")


def _raise_error(head: Mapping[str, Any]) -> None:
    match head.get("error"):
        case None:
            return
        case {"kind": "RemoteAccessError", "peer": peer, "stage": stage, "text": text}:
            raise RemoteAccessError(peer, stage, text)
        case {"kind": "FabricError", "peer": peer, "stage": stage, "status": status, "text": text}:
            raise FabricError(peer, stage, status, 0, text)
        case {"kind": "NodeUnavailable", "endpoint": endpoint, "why": why}:
            raise NodeUnavailable(endpoint, why)
        case {"kind": "RemoteProtocolError", "code": code, "message": message}:
            raise RemoteProtocolError(code, message)
        case other:
            raise DpurtError(f"over there: {other}")


@dataclass(frozen=True, slots=True)
class FarRegion:
    """A landing over there. `view` is what it holds at the moment, fetched."""

    region_id: int
    size: int
    where: Where
    endpoint: int
    name: str = "far landing"
    fd: int = -1

    @property
    def view(self) -> memoryview:
        request = {"op": "peek", "endpoint": self.endpoint, "region": self.region_id}
        return memoryview(_ask_now(self.where, request)[1])


class FarEndpoint:
    """An endpoint over there."""

    def __init__(self, kind: str, where: Where, number: int) -> None:
        self.kind = kind
        self._where = where
        self._number = number

    @property
    def stats(self) -> FabricStats:
        return FabricStats(**_ask_now(self._where, self._request("stats"))[0]["stats"])

    async def pull(self, pieces: Sequence[Piece], deadline: float) -> None:
        data = await self._move("pull", pieces, deadline)
        at = 0
        for piece in pieces:
            piece.local[:] = data[at : at + len(piece.local)]
            at += len(piece.local)

    async def store(self, pieces: Sequence[Piece], deadline: float) -> None:
        await self._move("store", pieces, deadline, b"".join(piece.local for piece in pieces))

    def view(self, region_id: int, offset: int, length: int) -> memoryview | None:
        return None

    def keep(self, memory: memoryview) -> None:
        """Nothing to keep: this memory is here, the far end's own is registered for each call."""

    def landing(self, size: int) -> MemoryRegion:
        head, _ = _ask_now(self._where, self._request("landing") | {"bytes": size})
        return FarRegion(head["region"], head["bytes"], self._where, self._number)

    async def aclose(self) -> None:
        await _ask(self._where, self._request("close"))

    def _request(self, op: str) -> dict[str, Any]:
        return {"op": op, "endpoint": self._number}

    async def _move(self, op: str, pieces: Sequence[Piece], deadline: float, data: bytes = b"") -> bytes:
        named = [(p.region_id, p.offset, p.lease, len(p.local)) for p in pieces]
        request = self._request(op) | {"pieces": named, "seconds": deadline - trio.current_time()}
        _, got = await _ask(self._where, request, data)
        return got


# --- the other side ---


class _Server:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._endpoints: dict[int, Endpoint] = {}
        self._landings: dict[int, MemoryRegion] = {}

    async def serve(self, stream: trio.SocketStream) -> None:
        """One operation, cancelled when the asking side ends its half."""
        async with stream, trio.open_nursery() as nursery:
            try:
                head, data = await _receive(stream)
            except (DpurtError, trio.BrokenResourceError):
                return
            answer = _frame({"cancelled": True})
            with trio.CancelScope() as scope:
                nursery.start_soon(_cancel_at_end, stream, scope)
                answer = await self._obey(head, data)
            with trio.CancelScope(shield=True), trio.move_on_after(_PATIENCE_S):
                await _send(stream, answer)
            nursery.cancel_scope.cancel()

    async def _obey(self, head: Mapping[str, Any], data: bytes) -> bytes:
        try:
            answer: bytes = await getattr(self, f"_{head['op']}")(head, data)
        except DpurtError as error:
            return _frame({"error": _described(error)})
        return answer

    async def _open(self, head: Mapping[str, Any], data: bytes) -> bytes:
        token, deadline = bytes.fromhex(head["token"]), trio.current_time() + head["seconds"]
        endpoint = await connect(head["kind"], head["address"], head["session"], token, deadline)
        number = next(self._numbers)
        self._endpoints[number] = endpoint
        return _frame({"endpoint": number})

    async def _pull(self, head: Mapping[str, Any], data: bytes) -> bytes:
        pieces = [Piece(r, offset, lease, memoryview(bytearray(n))) for r, offset, lease, n in head["pieces"]]
        await self._endpoints[head["endpoint"]].pull(pieces, trio.current_time() + head["seconds"])
        return _frame({}, b"".join(piece.local for piece in pieces))

    async def _store(self, head: Mapping[str, Any], data: bytes) -> bytes:
        pieces, left = [], memoryview(bytearray(data))
        for region, offset, lease, length in head["pieces"]:
            pieces.append(Piece(region, offset, lease, left[:length]))
            left = left[length:]
        await self._endpoints[head["endpoint"]].store(pieces, trio.current_time() + head["seconds"])
        return _frame({})

    async def _landing(self, head: Mapping[str, Any], data: bytes) -> bytes:
        region = self._endpoints[head["endpoint"]].landing(head["bytes"])
        self._landings[region.region_id] = region
        return _frame({"region": region.region_id, "bytes": region.size})

    async def _peek(self, head: Mapping[str, Any], data: bytes) -> bytes:
        return _frame({}, bytes(self._landings[head["region"]].view))

    async def _stats(self, head: Mapping[str, Any], data: bytes) -> bytes:
        return _frame({"stats": asdict(self._endpoints[head["endpoint"]].stats)})

    async def _close(self, head: Mapping[str, Any], data: bytes) -> bytes:
        await self._endpoints[head["endpoint"]].aclose()
        return _frame({})


def _described(error: DpurtError) -> dict[str, Any]:
    return {"kind": type(error).__name__, "text": str(error), **vars(error)}


async def _cancel_at_end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    try:
        await stream.receive_some(1)
    except trio.BrokenResourceError:
        pass
    scope.cancel()


async def _send(stream: trio.SocketStream, answer: bytes) -> None:
    try:
        await stream.send_all(answer)
    except trio.BrokenResourceError:
        pass


async def main(address: str, port: int) -> None:
    """Until killed."""
    await trio.serve_tcp(_Server().serve, port, host=address)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
