"""A benchmark that is ended leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

PATIENCE_S = 30.0
INTERRUPTED = 130


def nodes_of(pid: int) -> list[int]:
    """Its children that are nodes; others come and go."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError):
            if b"\0serve\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def is_running(pid: int) -> bool:
    """Nobody may have asked for its end yet, though it has ended."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def hear_interrupts() -> None:
    """Who was started in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def within(what: Callable[[], bool]) -> bool:
    limit = time.monotonic() + PATIENCE_S
    while not what() and time.monotonic() < limit:
        time.sleep(0.01)
    return what()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_interrupted_ends_its_node(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dpurt", "bench", "lookup", "--quick"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts
    ) as bench:
        assert within(lambda: bool(nodes_of(bench.pid))), "it runs no node"
        nodes = nodes_of(bench.pid)
        bench.send_signal(number)
        assert bench.wait(PATIENCE_S) == INTERRUPTED
    assert not any(is_running(node) for node in nodes)
