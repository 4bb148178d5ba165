"""A qemu-storage-daemon as the peer of tests: a real vhost-user-blk back end, not of our making.

`objects` and `blockdevs` are its ``--object`` and ``--blockdev`` words; the node named `export` is what the socket
shows. Killed or stopped, it can be started again on the same paths. The daemon never outlives the `async with` block.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import trio

__all__ = ["QEMU_STORAGE_DAEMON", "QemuStorage", "file_node"]

QEMU_STORAGE_DAEMON = shutil.which("qemu-storage-daemon")
"""None where it is not installed (Debian package qemu-system-common)."""

_START_S = 10.0


def file_node(path: Path, name: str = "disk", *, is_direct: bool = False, can_discard: bool = True) -> str:
    """A ``--blockdev`` word for a file. `is_direct`: past the page cache, asynchronously."""
    options: dict[str, object] = {"cache.direct": is_direct, "locking": False}
    options |= {"aio": "native"} if is_direct else {}
    options |= {"discard": "unmap"} if can_discard else {}
    words = ",".join(f"{key}={_word(value)}" for key, value in options.items())
    return f"file,filename={path},node-name={name},{words}"


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


class QemuStorage:
    """One daemon with one export, at `self.path`."""

    def __init__(
        self,
        folder: Path,
        blockdevs: Sequence[str],
        *,
        export: str = "disk",
        num_queues: int = 1,
        is_writable: bool = True,
        objects: Sequence[str] = (),
    ) -> None:
        self.path = folder / "vhost.sock"
        self._qmp_path = folder / "qmp.sock"
        self._pid_path = folder / "pid"
        self._nodes = [word for each in objects for word in ("--object", each)]
        self._nodes += [word for each in blockdevs for word in ("--blockdev", each)]
        self._export = (
            f"type=vhost-user-blk,id=export,node-name={export},addr.type=unix,addr.path={self.path},"
            f"num-queues={num_queues},writable={_word(is_writable)}"
        )
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> QemuStorage:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        """Returns when it takes connections."""
        assert QEMU_STORAGE_DAEMON is not None, "asked for only where it is installed"
        for path in (self.path, self._qmp_path, self._pid_path):
            path.unlink(missing_ok=True)
        words = [QEMU_STORAGE_DAEMON, "--pidfile", str(self._pid_path), *self._nodes]
        words += ["--chardev", f"socket,id=qmp,path={self._qmp_path},server=on,wait=off"]
        words += ["--monitor", "chardev=qmp", "--export", self._export]
        self._process = process = _spawn(words)
        with trio.fail_after(_START_S):
            while not self._pid_path.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"qemu-storage-daemon ended with {process.returncode}")
                await trio.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def qmp(self, command: str, **arguments: object) -> Any:
        """One monitor command; what it returns."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_START_S)
            sock.connect(os.fspath(self._qmp_path))
            with sock.makefile("rw", encoding="utf-8") as stream:
                _answer(stream)
                _ask(stream, "qmp_capabilities", {})
                return _ask(stream, command, arguments)


def _spawn(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words)


def _ask(stream: Any, command: str, arguments: dict[str, object]) -> Any:
    stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
    stream.flush()
    while True:
        message = _answer(stream)
        if "error" in message:
            raise RuntimeError(f"{command}: {message['error']}")
        if "return" in message:
            return message["return"]


def _answer(stream: Any) -> dict[str, Any]:
    line = stream.readline()
    if not line:
        raise RuntimeError("the monitor closed the connection")
    message: dict[str, Any] = json.loads(line)
    return message
