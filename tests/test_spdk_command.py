"""`dpurt spdk`: up is idempotent and says what it does, what is missing and how to fix it; no traceback, no secret."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpurt import cli
from dpurt.bdev.spdk_process import OwnTarget, explained, has_huge_pages, lacks, start_time
from dpurt.testing.spdk_profiles import KEY, KEY2, key_file

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for sockets; private, as the command wants it."""
    path = Path(tempfile.mkdtemp(prefix="dpurt-"))
    yield path
    cli.main(["spdk", "down", "--run-dir", str(path)])
    shutil.rmtree(path)


@pytest.fixture(params=["fake", pytest.param("spdk", marks=pytest.mark.spdk)])
def binary(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A target to start: the fake as a process, or the real one."""
    return os.environ["DPURT_SPDK_TGT"] if request.param == "spdk" else fake_binary(tmp_path)


def fake_binary(folder: Path) -> str:
    python = f"exec {shlex.quote(sys.executable)} -m dpurt.testing.fake_spdk"
    return script(folder, f'{python} "$@"')


def script(folder: Path, body: str) -> str:
    path = folder / "spdk_tgt"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def spdk(action: str, run_dir: Path, *words: str) -> int:
    return cli.main(["spdk", action, *words, "--run-dir", str(run_dir)])


# --- from nothing to a target and back ---


def test_up_starts_applies_and_is_idempotent_and_down_ends_it(
    binary: str, run_dir: Path, capsys: Capture
) -> None:
    assert spdk("up", run_dir, "malloc", "--target", binary, "--set", "BLOCKS=2048") == 0
    first = capsys.readouterr().out
    assert "started spdk_tgt, pid" in first
    assert "called bdev_malloc_create {'name': 'Malloc0', 'num_blocks': 2048, 'block_size': 4096}" in first
    assert "called vhost_create_blk_controller" in first
    pid = OwnTarget(run_dir).pid()
    assert pid is not None
    assert stat.S_IMODE(OwnTarget(run_dir).log_path.stat().st_mode) == 0o600

    assert spdk("up", run_dir, "malloc", "--target", binary, "--set", "BLOCKS=2048") == 0
    again = capsys.readouterr().out
    assert "attached to" in again
    assert "called" not in again
    assert "as wanted: Malloc0" in again

    assert spdk("status", run_dir, "--interval", "0.05") == 0
    status = capsys.readouterr().out
    assert "Malloc0: Malloc disk, 8 MiB of 4096 B" in status
    assert f"vhost {run_dir}/Malloc0" in status
    assert "core 0 " in status

    assert spdk("down", run_dir) == 0
    assert f"stopped spdk_tgt, pid {pid}" in capsys.readouterr().out
    assert start_time(pid) is None
    assert spdk("down", run_dir) == 0
    assert "no target of ours" in capsys.readouterr().out


def test_difference_is_refused_in_one_line_and_changes_nothing(
    binary: str, run_dir: Path, capsys: Capture
) -> None:
    assert spdk("up", run_dir, "malloc", "--target", binary, "--set", "BLOCKS=2048") == 0
    capsys.readouterr()
    assert spdk("up", run_dir, "malloc", "--set", "BLOCKS=1024") == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "dpurt: error: the profile cannot be applied without loss: Malloc0 exists with num_blocks"
    )
    assert error.count("\n") == 1
    assert spdk("up", run_dir, "malloc", "--dry-run", "--set", "BLOCKS=2048", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["planned"] == []


def test_json_of_up_and_status(tmp_path: Path, run_dir: Path, capsys: Capture) -> None:
    assert spdk("up", run_dir, "malloc", "--target", fake_binary(tmp_path), "--json", "-") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [call["method"] for call in shown["called"]] == [
        "bdev_malloc_create",
        "vhost_create_blk_controller",
    ]
    assert spdk("status", run_dir, "--interval", "0", "--json", "-") == 0
    status = json.loads(capsys.readouterr().out)
    assert status["version"] == "SPDK v26.09-fake"
    assert [bdev["name"] for bdev in status["bdevs"]] == ["Malloc0"]


def test_dry_run_starts_nothing_and_shows_every_call(tmp_path: Path, run_dir: Path, capsys: Capture) -> None:
    assert spdk("up", run_dir, "error", "--dry-run", "--target", fake_binary(tmp_path)) == 0
    out = capsys.readouterr().out
    assert [line.split()[2] for line in out.splitlines() if line.startswith("would call")] == [
        "bdev_malloc_create", "bdev_error_create", "vhost_create_blk_controller",
    ]  # fmt: skip
    assert OwnTarget(run_dir).pid() is None
    assert list(run_dir.iterdir()) == []


def test_dry_run_of_what_no_target_could_do_is_refused(
    tmp_path: Path, run_dir: Path, capsys: Capture
) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(
        json.dumps({"about": "a limit of nothing", "qos": [{"bdev": "X", "rw_ios_per_sec": 1}]})
    )
    assert spdk("up", run_dir, str(profile), "--dry-run") == 1
    assert "the limit of X needs X" in capsys.readouterr().err


def test_keys_are_shown_nowhere(tmp_path: Path, run_dir: Path, capsys: Capture) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(1 << 20))
    chosen = [
        "--set",
        f"FILE={disk}",
        "--set",
        f"KEY_FILE={key_file(tmp_path)}",
        "--target",
        fake_binary(tmp_path),
    ]
    for extra in (["--dry-run"], ["--dry-run", "--json", "-"], ["--json", "-"], []):
        assert spdk("up", run_dir, "crypto", *chosen, *extra) == 0
    shown = capsys.readouterr()
    assert "<secret>" in shown.out
    for text in (shown.out, shown.err, OwnTarget(run_dir).log_path.read_text()):
        assert KEY not in text
        assert KEY2 not in text


# --- what can be wrong ---


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nonesuch"], "no such profile; ready ones: aio, crypto"),
        (["malloc", "--set", "BLOCKS"], "expected VAR=VALUE"),
        (["malloc", "--set", "BLOCKS=1", "--set", "BLOCKS=2"], "each variable once"),
        (["malloc", "--set", "BLOCKS=many"], "must be a whole number"),
        (["malloc", "--set", "SIZE=1"], "is no variable of this profile"),
        (["aio"], "no value for FILE: give --set FILE="),
    ],
)
def test_wrong_command_line_is_exit_code_2(
    words: list[str], problem: str, run_dir: Path, capsys: Capture
) -> None:
    assert spdk("up", run_dir, *words, "--dry-run") == 2
    assert problem in capsys.readouterr().err


def test_no_target_and_no_binary_says_what_to_give(
    run_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPURT_SPDK_TGT", raising=False)
    assert spdk("up", run_dir, "malloc") == 1
    error = capsys.readouterr().err
    assert "there is no such socket" in error
    assert "give --target PATH or set DPURT_SPDK_TGT" in error
    assert spdk("status", run_dir) == 1
    assert "unavailable: there is no such socket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said", "fix"),
    [
        ('echo "EAL: Cannot get hugepage information."; exit 1', "Cannot get hugepage information", "vm.nr_hugepages"),
        ('echo "app.c: ERROR: Cannot create lock on core 0"; exit 1', "lock on core 0", "another --cpumask"),
        ("exit 3", "it said nothing", ""),
    ],
)  # fmt: skip
def test_target_that_ends_at_once_is_explained_from_its_log(
    tmp_path: Path, run_dir: Path, capsys: Capture, body: str, said: str, fix: str
) -> None:
    assert spdk("up", run_dir, "malloc", "--target", script(tmp_path, body)) == 1
    error = capsys.readouterr().err
    assert "ended at once" in error
    assert said in error
    assert fix in error
    assert OwnTarget(run_dir).pid() is None


def test_binary_that_is_missing_or_no_program_is_named(
    tmp_path: Path, run_dir: Path, capsys: Capture
) -> None:
    assert spdk("up", run_dir, "malloc", "--target", str(tmp_path / "gone")) == 1
    assert "there is no file" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    assert spdk("up", run_dir, "malloc", "--target", str(text)) == 1
    assert "cannot be run: Exec format error" in capsys.readouterr().err


def test_target_that_another_started_is_used_but_not_stopped(
    tmp_path: Path, run_dir: Path, capsys: Capture
) -> None:
    path = run_dir / "other.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "dpurt.testing.fake_spdk", "-r", str(path), "-S", str(run_dir)]
    )
    try:
        while not path.exists():
            assert process.poll() is None
        assert spdk("up", run_dir, "malloc", "--rpc", str(path)) == 0
        assert spdk("down", run_dir, "--rpc", str(path)) == 1
        assert "dpurt did not start it" in capsys.readouterr().err
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_pid_that_was_used_again_is_never_signalled(run_dir: Path) -> None:
    own = OwnTarget(run_dir)
    own.pid_path.write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert own.pid() is None
    assert spdk("down", run_dir) == 0
    own.note(os.getpid())
    assert own.pid() == os.getpid()
    own.pid_path.unlink()


def test_run_folder_that_others_can_write_is_refused(tmp_path: Path, capsys: Capture) -> None:
    open_dir = tmp_path / "open"
    open_dir.mkdir()
    open_dir.chmod(0o777)
    assert spdk("status", open_dir) == 2
    assert "others can write to it" in capsys.readouterr().err


# --- what a machine lacks ---


def machine(root: Path, *, free: int = 8, mounted: bool = True, driver: str | None = "vfio-pci") -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"HugePages_Total: 8\nHugePages_Free:     {free}\n")
    (root / "proc/mounts").write_text(
        "nodev /dev/hugepages hugetlbfs rw 0 0\n" if mounted else "none / ext4 rw 0 0\n"
    )
    (root / "dev/vfio").mkdir(parents=True)
    (root / "dev/vfio/vfio").touch()
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    if driver:
        (root / "sys/drivers" / driver).mkdir(parents=True)
        (device / "driver").symlink_to(root / "sys/drivers" / driver)
    return root


def test_machine_with_everything_lacks_nothing(tmp_path: Path) -> None:
    assert lacks("/bin/sh", ["0000:01:00.0"], machine(tmp_path / "m")) == []
    assert has_huge_pages(tmp_path / "m")


def test_each_lack_is_named_with_its_fix(tmp_path: Path) -> None:
    root = machine(tmp_path / "m", free=0, mounted=False, driver="nvme")
    (root / "dev/vfio/vfio").unlink()
    found = {lack.what: lack.fix for lack in lacks("/bin/sh", ["0000:01:00.0", "0000:02:00.0"], root)}
    assert list(found) == [
        "no free huge pages (vm.nr_hugepages)",
        "hugetlbfs is not mounted",
        "no /dev/vfio/vfio",
        "device 0000:01:00.0 has the driver nvme, not vfio-pci",
        "there is no PCI device 0000:02:00.0",
    ]
    assert "sysctl vm.nr_hugepages" in found["no free huge pages (vm.nr_hugepages)"]
    assert all(found.values())
    assert not has_huge_pages(root)


def test_profile_without_pci_needs_neither_huge_pages_nor_vfio(tmp_path: Path) -> None:
    assert lacks("/bin/sh", [], tmp_path) == []


def test_known_complaints_are_explained_and_others_quoted() -> None:
    assert explained("a\nEAL: Detected 2\nlisten: ERROR: address in use\n")[1].startswith("another target")
    assert explained("one\nlast words\n") == ("last words", "")
