"""The client's half of JSON-RPC 2.0 as an SPDK target speaks it. Sans-I/O: bytes in, answers out.

Theory of operation. `request` gives the bytes of a call and remembers its id; `receive` takes whatever arrived and
gives the answers that became complete. Every answer is one line, so framing never depends on the JSON being
right: a target is known to send unterminated strings (a crypto key destroyed while in use), and a reader that
waits for the closing quote waits for ever. Answers come in any order and are matched by id.

A call given up on (`forget`) leaves its answer in the stream; when that comes it is dropped by its id, and
everybody else's answers are still their own.

What cannot be made sense of is a `RemoteProtocolError`: a line that is not JSON or no answer, an error without an
id, an id never used, a line beyond the cap. It makes the connection unusable: nobody can tell whose answer that
was, so the owner closes it and every call in flight fails. The message names what could be read: which call,
where in the line, after which object.

Left to others: sockets, deadlines, reconnecting (`dpurt.bdev.spdk_rpc`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from dpurt.errors import LocalProtocolError, RemoteProtocolError, RpcError

__all__ = ["Answer", "JsonRpcConnection", "MAX_ANSWER_BYTES", "MAX_REQUEST_BYTES"]

MAX_REQUEST_BYTES = 256 * 1024  # a target resets the connection beyond this
MAX_ANSWER_BYTES = 32 * 1024 * 1024  # a target's own cap

_ID = re.compile(rb'^\s*\{"jsonrpc":\s*"2\.0",\s*"id":\s*(\d{1,18})\b')
_NAME = re.compile(rb'"name":\s*"([\x20\x21\x23-\x5b\x5d-\x7e]{1,255})"')


class _Error(msgspec.Struct):
    code: int
    message: str = ""


class _Envelope(msgspec.Struct):
    id: int | str | None = None
    jsonrpc: Literal["2.0"] = "2.0"
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of call `id`: its result, or the error it was answered with."""

    id: int
    method: str
    result: object = None
    error: RpcError | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    params: Mapping[str, object] | None


class JsonRpcConnection:
    """The state of one connection. Not to be used again once `receive` or `receive_end` has raised."""

    def __init__(
        self, max_request_bytes: int = MAX_REQUEST_BYTES, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_answer_bytes = max_answer_bytes
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer known to hold no newline
        self._broken: RemoteProtocolError | None = None
        self.late_answers = 0

    @property
    def in_flight(self) -> dict[int, str]:
        """The calls without an answer yet: id to method."""
        return {call_id: call.method for call_id, call in self._calls.items()}

    def request(self, method: str, params: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """The id and the bytes of a call. LocalProtocolError if it cannot be sent; then it is not in flight."""
        call_id = self._last_id + 1
        data = self._encoded(method, call_id, params)
        self._last_id = call_id
        self._calls[call_id] = _Call(method, params)
        return call_id, data

    def _encoded(self, method: str, call_id: int, params: Mapping[str, object] | None) -> bytes:
        body: dict[str, object] = {"jsonrpc": "2.0", "method": method, "id": call_id}
        if params:
            body["params"] = params
        try:
            data = msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise LocalProtocolError("bad_params", f"{method}: parameters are not JSON: {error}") from error
        if len(data) > self._max_request_bytes:
            message = f"{method}: {len(data)} bytes, a target takes {self._max_request_bytes}"
            raise LocalProtocolError("request_too_large", message)
        return data

    def forget(self, call_id: int) -> None:
        """Nobody waits for this call any more; its answer will be dropped. Idempotent."""
        self._calls.pop(call_id, None)

    def receive(self, data: bytes) -> list[Answer]:
        """The answers that `data` completed. Raises RemoteProtocolError, and again on every later call.

        Good answers that came before a bad line in the same `data` are lost with the connection.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._answers(data)
        except RemoteProtocolError as error:
            self._broken = error
            self._buffer.clear()
            raise

    def receive_end(self) -> None:
        """The peer closed. RemoteProtocolError if that was in the middle of an answer."""
        if self._buffer.strip():
            head = self._described(bytes(self._buffer))
            raise RemoteProtocolError("cut_short", f"connection closed inside an answer{head}")

    def _answers(self, data: bytes) -> list[Answer]:
        self._buffer += data
        lines: list[bytes] = []
        start = 0
        end = self._buffer.find(b"\n", self._searched)
        while end >= 0:
            lines.append(bytes(self._buffer[start:end]))
            start = end + 1
            end = self._buffer.find(b"\n", start)
        del self._buffer[:start]
        self._searched = len(self._buffer)
        longest = max(len(self._buffer), *(len(line) for line in lines), 0)
        if longest > self._max_answer_bytes:
            message = f"over {self._max_answer_bytes} bytes{self._described(bytes(self._buffer[:256]))}"
            raise RemoteProtocolError("answer_too_large", message)
        found = [self._answer(line) for line in lines if line.strip()]
        return [answer for answer in found if answer is not None]

    def _answer(self, line: bytes) -> Answer | None:
        """One line; None for an answer that nobody waits for any more."""
        envelope = self._envelope(line)
        call_id = envelope.id
        if call_id is None and envelope.error is not None:
            message = f"an error for no call: {envelope.error.message} ({envelope.error.code})"
            raise RemoteProtocolError("unattributed_error", message)
        if not isinstance(call_id, int) or not 0 < call_id <= self._last_id:
            raise RemoteProtocolError("unknown_id", f"an answer to call {call_id!r}, which was never made")
        call = self._calls.get(call_id)
        if call is None:
            self.late_answers += 1
            return None
        answer = self._outcome(call_id, call, envelope, line)
        del self._calls[call_id]
        return answer

    def _envelope(self, line: bytes) -> _Envelope:
        try:
            return msgspec.json.decode(line, type=_Envelope)
        except msgspec.ValidationError as error:
            message = f"a line is no JSON-RPC answer{self._described(line)}: {error}"
            raise RemoteProtocolError("invalid_answer", message) from error
        except (ValueError, RecursionError) as error:
            raise self._invalid_json(line, error) from error

    def _outcome(self, call_id: int, call: _Call, envelope: _Envelope, line: bytes) -> Answer:
        if envelope.error is not None:
            failed = RpcError(call.method, envelope.error.code, envelope.error.message, call.params)
            return Answer(call_id, call.method, error=failed)
        if isinstance(envelope.result, msgspec.UnsetType):
            message = f"neither result nor error in the answer to {call.method}"
            raise RemoteProtocolError("invalid_answer", message)
        try:
            return Answer(call_id, call.method, msgspec.json.decode(envelope.result))
        except (ValueError, RecursionError) as error:
            raise self._invalid_json(line, error) from error

    def _invalid_json(self, line: bytes, error: Exception) -> RemoteProtocolError:
        where = self._described(line)
        return RemoteProtocolError("invalid_json", f"a line of {len(line)} bytes is not JSON{where}: {error}")

    def _described(self, line: bytes) -> str:
        """What can be read of a bad line: whose answer it is, and the last object named in it.

        Nothing else of it is shown: it may hold a piece of the target's memory.
        """
        match = _ID.match(line)
        if match is None:
            waiting = sorted({call.method for call in self._calls.values()})
            return f" (waiting for {', '.join(waiting)})" if waiting else ""
        call_id = int(match[1])
        call = self._calls.get(call_id)
        names = _NAME.findall(line)
        after = f", last object named {names[-1].decode()!r}" if names else ""
        return f" (answer {call_id} to {call.method if call else 'a call given up on'}{after})"
