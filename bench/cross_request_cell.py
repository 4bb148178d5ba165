"""One figure of `bench.cross_request` in a process of its own: `python -m dpurt.bench.cross_request_cell CELL`, answered
on stdout, both JSON. So the table uses all cores, and nothing but text passes between processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dpurt.core.kv_models import KV_MODELS
from dpurt.errors import ConfigError
from dpurt.priors import shipped_returns
from dpurt.progress import Progress
from dpurt.replay.at_match import AtMatch, at_match
from dpurt.replay.formats import Reading, read_trace
from dpurt.replay.hits import capacity_blocks

__all__ = ["BLOCK_BYTES", "Cell", "answers"]

BLOCK_BYTES = 512 * KV_MODELS["llama-3-70b"].at_precision("fp8").bytes_per_token


class Cell(msgspec.Struct, frozen=True):
    """A policy on a trace; `staging` is a share of the trace's distinct blocks."""

    file: str
    sessions: str | None
    policy: str
    staging: float
    gigabytes_per_s: float


def answers(cells: Sequence[Cell]) -> dict[Cell, AtMatch]:
    """What each comes to, on as many processes as there are cores. Shows how far it is."""
    with Progress("at match", len(cells)) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        found: dict[Cell, AtMatch] = {}
        for cell, answer in pool.map(_asked, cells):
            found[cell] = answer
            progress.update(len(found))
    return found


def _asked(cell: Cell) -> tuple[Cell, AtMatch]:
    command = [sys.executable, "-m", "dpurt.bench.cross_request_cell", msgspec.json.encode(cell).decode()]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ConfigError(cell.file, f"the process of {cell.policy} ended with code {done.returncode}")
    return cell, msgspec.json.decode(done.stdout, type=AtMatch)


def computed(cell: Cell) -> AtMatch:
    """The figure, in this process."""
    requests = read_trace(Path(cell.file), Reading(sessions=cell.sessions)).requests
    capacity = capacity_blocks(requests, cell.staging)
    return at_match(
        requests, cell.policy, capacity, cell.gigabytes_per_s * 1e9 / BLOCK_BYTES, shipped_returns()
    )


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=Cell)
    sys.stdout.write(msgspec.json.encode(computed(asked)).decode())
