"""These tests need two machines (tests/vm/run --pair). They run in the near one; `far` starts programs in the other.

Outside a pair they are not collected.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio

FAR = ("10.9.9.2", 7700)
IN_PAIR = os.environ.get("DPURT_VM_PAIR") == "1"
collect_ignore_glob = [] if IN_PAIR else ["test_*.py"]


@dataclass(slots=True)
class FarProcess:
    """A program over there; the connection is its standard input and output, and its life."""

    stdin: trio.SocketStream
    stdout: trio.SocketStream

    def kill(self) -> None:
        self.stdin.socket.close()

    async def wait(self) -> int:
        await trio.lowlevel.checkpoint()
        return 0


class Far:
    """The other machine."""

    async def launch(self, command: Sequence[str]) -> FarProcess:
        stream = await trio.open_tcp_stream(*FAR)
        await stream.send_all(json.dumps({"argv": list(command), "attach": True}).encode() + b"\n")
        return FarProcess(stream, stream)

    @contextmanager
    def running(self, *command: str, port: tuple[str, int]) -> Iterator[None]:
        """A program there that listens at `port`, for the block."""
        with socket.create_connection(FAR, 60) as sock:
            sock.sendall(json.dumps({"argv": command, "attach": True}).encode() + b"\n")
            _wait_for(port)
            yield

    def run(
        self, *command: str, files: Mapping[str, str] | None = None, is_checked: bool = True
    ) -> dict[str, Any]:
        """Run a program there to its end: ``code``, ``out``, ``err``. `files` are written before."""
        with socket.create_connection(FAR, 300) as sock, sock.makefile("rwb") as file:
            file.write(json.dumps({"argv": command, "files": dict(files or {})}).encode() + b"\n")
            file.flush()
            done: dict[str, Any] = json.loads(file.readline())
        assert not is_checked or done["code"] == 0, f"{command} in the far machine: {done}"
        return done


def _wait_for(port: tuple[str, int]) -> None:
    limit = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(port, 5).close()
            return
        except OSError:
            assert time.monotonic() < limit, f"nobody came to listen at {port}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def far() -> Far:
    return Far()
