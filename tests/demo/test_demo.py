"""`dpurt demo` for real, small: a node and two host processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_verifies_every_byte_and_its_books_balance(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "dpurt", "demo", "--requests", "40", "--fabric", "shm", "--block-bytes", "16 KiB",
        "--speed", "60", "--dir", str(tmp_path), "--picture", str(tmp_path / "hits.html"), "--json", "-",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["requests"] == 40
    assert got["wrong_bytes"] == 0
    assert got["verified_bytes"] > 0
    hits = got["hits"]
    assert hits["staging"] + hits["nvme"] + hits["missed"] == got["scales"]["block_references"]
    assert got["verified_bytes"] == (hits["staging"] + hits["nvme"]) * got["scales"]["block_bytes"]
    ledger = got["ledger"]
    assert ledger["planned"] == sum(value for name, value in ledger.items() if name != "planned")
    [run] = got["runs"]
    assert run["node_exit_code"] == 0
    assert all(host["unreachable"] == 0 for host in run["hosts"].values())
    assert (tmp_path / "hits.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hits.html"], "it cleans up behind itself"
