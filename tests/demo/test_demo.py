"""`dpurt demo` for real, small: a node and two host processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpurt import cli
from dpurt.commands import demo


@pytest.mark.parametrize(
    "words",
    [
        ["--block-bytes", "foo"], ["--speed", "nan"], ["--speed", "inf"], ["--staging", "nan"], ["--requests", "0"],
        ["--dir", "/nonexistent"], ["--picture", "/nonexistent/p.html"], ["--json", "/nonexistent/x"],
        ["--picture", "/"], ["--trace", "/nonexistent"], ["--requests", "3", "--block-bytes", "16 TiB"],
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "play", lambda *args, **kwargs: pytest.fail("it ran"))
    assert cli.main(["demo", *words]) == 2


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a short name: below it are Unix sockets, whose paths have at most 107 bytes."""
    return tmp_path_factory.mktemp("demo")


@pytest.mark.slow
def test_sigterm_ends_the_demo_with_its_processes_and_folder(folder: Path) -> None:
    command = [
        sys.executable, "-m", "dpurt", "demo", "--requests", "40", "--fabric", "shm", "--block-bytes", "16 KiB",
        "--dir", str(folder), "--picture", str(folder / "hits.html"), "--json", "-",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not list(folder.glob("*/shm/node.ready")):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == cli.INTERRUPTED, said
    assert list(folder.iterdir()) == []
    mine = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mentions(path, str(folder))]
    assert mine == []


def mentions(cmdline: Path, word: str) -> bool:
    try:
        return word.encode() in cmdline.read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_the_demo_verifies_every_byte_and_its_books_balance(folder: Path) -> None:
    command = [
        sys.executable, "-m", "dpurt", "demo", "--requests", "40", "--fabric", "shm", "--block-bytes", "16 KiB",
        "--speed", "12", "--dir", str(folder), "--picture", str(folder / "hits.html"), "--json", "-",
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
    assert [row["policy"] for row in got["compared"]] == ["lru", "dpurt"]
    assert got["compared"][0]["hits"] > 0
    [run] = got["runs"]
    assert run["node_exit_code"] == 0
    assert all(host["unreachable"] == 0 for host in run["hosts"].values())
    assert (folder / "hits.html").exists()
    assert [path.name for path in folder.iterdir()] == ["hits.html"], "it cleans up behind itself"
