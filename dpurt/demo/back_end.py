"""The demo's device when that is not a file of the node's own: a qemu-storage-daemon that shows a file over
vhost-user-blk, past the page cache. It writes what the node reads straight into the node's staging memory.

Leaves the demo to decide when it is killed and started again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpurt.demo.interrupts import interrupts_held
from dpurt.errors import ConfigError, DpurtError

PROGRAM = "qemu-storage-daemon"
START_S = 20.0
SOCKET = "vhost.sock"


def check_installed() -> None:
    """ConfigError where there is no such program."""
    if shutil.which(PROGRAM) is None:
        raise ConfigError(
            "--bdev", f"vhost-user needs {PROGRAM} (Debian and Ubuntu: apt-get install qemu-system-common)"
        )


class BackEnd:
    """One daemon for one image file. See `back_end`."""

    def __init__(self, image: Path, log: Path) -> None:
        self._image = image
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = image.with_name(SOCKET)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it takes connections. Raises DpurtError with the end of its log."""
        pid_file = self.socket.with_suffix(".pid")
        for path in (pid_file, self.socket):
            path.unlink(missing_ok=True)
        export = f"type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={self.socket},writable=on"
        file = f"driver=file,filename={self._image},node-name=disk,cache.direct=on,aio=native,discard=unmap"
        command = [PROGRAM, "--blockdev", file, "--export", export, "--pidfile", str(pid_file)]
        with self._log.open("ab") as out, interrupts_held():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        limit = time.monotonic() + START_S
        while not pid_file.exists():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise DpurtError(f"{PROGRAM} did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, and wait. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def back_end(image: Path, size_bytes: int, log: Path) -> Iterator[BackEnd]:
    """A running daemon over a new file of that size; it never outlives the block."""
    with image.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    daemon = BackEnd(image, log)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
