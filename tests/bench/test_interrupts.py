"""A benchmark that is ended leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE_S = 30.0
INTERRUPTED = 130


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def within(what: Callable[[], bool]) -> bool:
    limit = time.monotonic() + PATIENCE_S
    while not what() and time.monotonic() < limit:
        time.sleep(0.01)
    return what()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_interrupted_ends_its_node(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dpurt", "bench", "lookup", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        assert within(lambda: bool(children(bench.pid))), "it runs no node"
        nodes = children(bench.pid)
        bench.send_signal(number)
        assert bench.wait(PATIENCE_S) == INTERRUPTED
    assert not any(Path(f"/proc/{node}").exists() for node in nodes)
