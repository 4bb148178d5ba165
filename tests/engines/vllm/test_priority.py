"""The priority of a request, given in vLLM's words or in ours, is what the node is told when it looks the prompt up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from dpurt.wire import messages as m

Make = Callable[..., Any]
GREETING_BYTES = 64  # of ZMTP 3, before its frames


class Tap:
    """Stands between an engine and its node, and keeps what the engine sends."""

    def __init__(self, port: int) -> None:
        self._node = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sent: list[bytearray] = []  # by connection
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def lookups(self) -> list[m.Lookup]:
        """In the order in which they were sent."""
        found = []
        for frame in (frame for sent in self._sent for frame in frames(bytes(sent[GREETING_BYTES:]))):
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                found.append(msgspec.msgpack.decode(frame, type=m.Lookup))
        return found

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                engine, _ = self._listener.accept()
                node = socket.create_connection(("127.0.0.1", self._node))
                self._sent.append(bytearray())
                for source, sink, kept in ((engine, node, self._sent[-1]), (node, engine, bytearray())):
                    threading.Thread(target=_pass_on, args=(source, sink, kept), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            kept += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def frames(stream: bytes) -> Iterator[bytes]:
    """The bodies of ZMTP frames: a byte of flags, a length of one byte or eight, the body."""
    at = 0
    while at + 9 < len(stream):
        width = 8 if stream[at] & 2 else 1
        size, at = int.from_bytes(stream[at + 1 : at + 1 + width], "big"), at + 1 + width
        yield stream[at : at + size]
        at += size


@pytest.fixture
def tap(make_node: Make) -> Iterator[tuple[Tap, Any]]:
    node = make_node()
    between = Tap(node.port)
    yield between, node
    between.close()


def test_a_request_is_looked_up_with_its_own_priority_or_the_hinted_one(
    tap: tuple[Tap, Any], make_engine: Make, text: list[int]
) -> None:
    between, node = tap
    config = node.transfer_config(endpoint=f"tcp://127.0.0.1:{between.port}")
    prompts = [
        {"tokens": text[:128]},
        {"tokens": text[200:328], "priority": 3},
        {"tokens": text[400:528], "params": {"dpurt": {"priority": -7}}},
        {"tokens": text[600:728], "priority": 3, "params": {"dpurt": {"priority": 12}}},
    ]
    with make_engine(kv_transfer_config=config, scheduling_policy="priority") as engine:
        for prompt in prompts:
            engine.generate([prompt], max_tokens=1)
    assert [lookup.priority for lookup in between.lookups()] == [0, 3, -7, 12]
