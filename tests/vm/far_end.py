"""The far machine of a pair: starts what the near one asks for. Standard library only.

One connection a request, which is a line of JSON: ``argv``, ``files`` (path: text, written first) and ``attach``. Attached,
the connection becomes the program's standard input and output, and its end is the program's; else the answer is a
line of JSON with ``code``, ``out`` and ``err`` when the program has ended. Usage: far_end.py ADDRESS PORT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def read_line(connection: socket.socket) -> bytes:
    """A byte at a time: what follows is the program's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise EOFError("no request")
        line += byte
    return line


def serve(connection: socket.socket) -> None:
    with connection:
        request = json.loads(read_line(connection))
        for path, text in request.get("files", {}).items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
            os.chmod(path, 0o600)
        if request.get("attach"):
            attach(connection, request["argv"])
        else:
            connection.sendall(json.dumps(capture(request["argv"])).encode() + b"\n")


def attach(connection: socket.socket, argv: list[str]) -> None:
    with subprocess.Popen(argv, stdin=connection, stdout=connection, start_new_session=True) as process:
        hang_up = select.poll()
        hang_up.register(connection, select.POLLRDHUP | select.POLLHUP)
        while process.poll() is None:
            if hang_up.poll(50):
                os.killpg(process.pid, signal.SIGKILL)
        connection.shutdown(socket.SHUT_RDWR)


def capture(argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def main(address: str, port: int) -> None:
    with socket.create_server((address, port)) as listening:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
