"""The command line: exit codes, no tracebacks for what can go wrong, JSON, and what each helper command
promises.
"""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import dpurt
from dpurt import cli, doctor, keys
from dpurt.bench.result import BenchResult, Figure
from dpurt.client import admin
from dpurt.commands import bench
from dpurt.commands import doctor as doctor_command
from dpurt.config import load_config
from dpurt.errors import BdevError, ConfigError, NodeUnavailable
from dpurt.progress import Progress

ROOT = Path(dpurt.__file__).parent.parent
Capture = pytest.CaptureFixture[str]


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command whose run raises `error`."""

    def run(args: object) -> int:
        raise error

    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli, "available", lambda: {"boom": ("boom", "fails")})
    monkeypatch.setitem(sys.modules, "boom", module)
    return cli.main(["boom"])


# --- the frame ---


def test_foreseen_error_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert fails_with(NodeUnavailable("tcp://x", "down"), monkeypatch) == 1
    assert capsys.readouterr().err == "dpurt: error: node at tcp://x unavailable: down\n"


def test_config_error_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert fails_with(ConfigError("$.x", "is wrong", "f.toml"), monkeypatch) == 2
    assert capsys.readouterr().err == "dpurt: error: f.toml: $.x: is wrong\n"


def test_interrupt_is_exit_code_130_also_from_inside_a_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch) == 130
    group = BaseExceptionGroup("nursery", [KeyboardInterrupt(), NodeUnavailable("x", "y")])
    assert fails_with(group, monkeypatch) == 130


def test_group_of_foreseen_errors_is_a_line_each(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    inner = ExceptionGroup("inner", [BdevError("flash", "read", 0, 4096, "io_error")])
    assert fails_with(ExceptionGroup("outer", [inner, NodeUnavailable("x", "y")]), monkeypatch) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        fails_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ExceptionGroup):
        fails_with(ExceptionGroup("nursery", [ZeroDivisionError(), NodeUnavailable("x", "y")]), monkeypatch)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["check"], ["check", "laptop", "--nonsense"]])
def test_wrong_command_line_is_exit_code_2(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: dpurt" in capsys.readouterr().err


def test_only_commands_that_exist_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "ghost", ("dpurt.commands.ghost", "not written"))
    assert "ghost" not in cli.available()
    assert {"check", "doctor", "keys", "bench"} <= set(cli.available())


@pytest.mark.parametrize("name", sorted(cli.available()))
def test_every_listed_command_has_help(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: dpurt {name}" in capsys.readouterr().out


def test_help_imports_no_command(tmp_path: Path) -> None:
    code = "import sys; from dpurt import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted(m for m in sys.modules if m.split('.')[0] in ('trio', 'zmq', 'numpy', 'msgspec')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_printed(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dpurt {cli.version()}\n"


# --- check ---


def test_check_of_a_ready_topology_is_right(capsys: Capture) -> None:
    assert cli.main(["check", "laptop"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("laptop: right\n")
    assert "warning: the salt of tenant 'demo'" in out


def test_check_json_goes_to_a_file_or_to_stdout(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["check", "laptop", "--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["check", "laptop", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out.json").read_text())
    assert cli.main(["check", "laptop", "--json", str(tmp_path / "no" / "out.json")]) == 2


def test_check_of_a_wrong_topology_is_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[staging]\nbytes = 0\n")
    assert cli.main(["check", str(wrong)]) == 2
    assert capsys.readouterr().err == (f"dpurt: error: {wrong}: $.staging.bytes: expected int >= 1, got 0\n")


# --- keys ---


def test_generated_keys_are_private_and_belong_together(tmp_path: Path, capsys: Capture) -> None:
    stem = tmp_path / "node"
    assert cli.main(["keys", "generate", str(stem)]) == 0
    secret = stem.with_suffix(".secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in capsys.readouterr().out
    assert cli.main(["keys", "public", str(secret)]) == 0
    assert capsys.readouterr().out == stem.with_suffix(".pub").read_text()
    assert keys.load_authorized(tmp_path) == {keys.load_pair(secret).public: "node"}


def test_a_full_disk_leaves_no_half_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for command, owner, name in (("generate", Path, "write_text"), ("salt", keys.os, "fdopen")):
        with monkeypatch.context() as full:
            full.setattr(owner, name, no_space)
            assert cli.main(["keys", command, str(tmp_path / "node")]) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    assert cli.main(["keys", "generate", str(tmp_path / "node")]) == 0
    before = (tmp_path / "node.secret").read_text()
    assert cli.main(["keys", "generate", str(tmp_path / "node")]) == 2
    assert (tmp_path / "node.secret").read_text() == before
    assert cli.main(["keys", "salt", str(tmp_path / "node.secret")]) == 2
    assert cli.main(["keys", "salt", str(tmp_path / "absent" / "salt")]) == 2


def test_secret_that_others_can_read_is_refused(tmp_path: Path, capsys: Capture) -> None:
    keys.save(keys.generate(), tmp_path / "node")
    (tmp_path / "node.secret").chmod(0o644)
    assert cli.main(["keys", "public", str(tmp_path / "node.secret")]) == 2
    assert "0644" in capsys.readouterr().err


def test_key_file_with_anything_but_a_key_is_refused(tmp_path: Path) -> None:
    keys.write_secret(tmp_path / "k.secret", "too short")
    with pytest.raises(ConfigError, match="one Z85 key"):
        keys.load_pair(tmp_path / "k.secret")
    (tmp_path / "k.pub").write_text("~" * 41)
    with pytest.raises(ConfigError, match="one Z85 key"):
        keys.load_authorized(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        keys.load_authorized(tmp_path / "absent")


def test_salt_file_is_private_and_long_enough(tmp_path: Path) -> None:
    assert cli.main(["keys", "salt", str(tmp_path / "salt")]) == 0
    assert len(keys.read_secret(tmp_path / "salt")) == 2 * keys.SALT_BYTES
    assert keys.generate_salt() != keys.generate_salt()


@pytest.mark.parametrize("stem", ["/", "", "."])
def test_a_folder_is_no_name_for_keys(stem: str) -> None:
    assert cli.main(["keys", "generate", stem]) == 2


# --- a running node ---


def write_topology(folder: Path) -> str:
    text = (ROOT / "topology" / "laptop.toml").read_text()
    text = text.replace('"2 GiB"', '"128 MiB"').replace("[node]", f'[node]\nrun_dir = "{folder / "run"}"')
    (folder / "node.toml").write_text(text)
    return str(folder / "node.toml")


def test_a_socket_nobody_listens_at_is_noticed_at_once(tmp_path: Path, capsys: Capture) -> None:
    topology = write_topology(tmp_path)
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "run" / "admin.sock"))
    began = time.monotonic()
    assert cli.main(["stats", topology]) == 1
    assert "the node has ended" in capsys.readouterr().err
    assert time.monotonic() - began < admin.BUDGET_S / 2


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{}", b"[1099511627776]", b"[-1]", b'["a"]'])
def test_wrong_token_files_are_one_line_and_exit_code_2(
    content: bytes | None, tmp_path: Path, capsys: Capture
) -> None:
    tokens = tmp_path / "ids.json"
    if content is not None:
        tokens.write_bytes(content)
    assert cli.main(["explain", "llama-3.2-1b", "--tokens", str(tokens)]) == 2
    assert cli.main(["explain", "llama-3.2-1b", "--tokens", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("words", [["explain", "ghost", "--digest", "00"], ["epoch", "bump", "ghost"]])
def test_an_unknown_space_is_exit_code_2_and_lists_the_known(words: list[str], capsys: Capture) -> None:
    assert cli.main(words) == 2
    assert "known: llama-3.2-1b" in capsys.readouterr().err


def test_serve_refuses_what_it_cannot_do_before_it_starts(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["serve", "laptop", "--ready-file", str(tmp_path / "no" / "ready")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "laptop", "--log-level", "bogus"])
    assert caught.value.code == 2


def test_a_json_log_has_nothing_else_in_it(tmp_path: Path) -> None:
    topology = Path(write_topology(tmp_path))
    topology.write_text(topology.read_text().replace("tcp://127.0.0.1:7571", "tcp://127.0.0.1:0"))
    ready = tmp_path / "ready"
    words = [sys.executable, "-m", "dpurt", "serve", str(topology), "--log-json", "--ready-file", str(ready)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as node:
        while not ready.exists() and node.poll() is None:
            time.sleep(0.02)
        node.terminate()
        _, log = node.communicate(timeout=30)
    assert node.returncode == 0, log
    assert "node_up" in {json.loads(line)["event"] for line in log.splitlines()}
    assert not (tmp_path / "run" / "admin.sock").exists()


# --- doctor ---


def test_doctor_examines_machine_and_topology(capsys: Capture) -> None:
    assert cli.main(["doctor", "laptop"]) == 0
    out = capsys.readouterr().out
    for name in ("python", "crc32c", "memlock", "io_uring", "bdev flash", "host localhost", "tenant demo"):
        assert f"] {name} " in out


def test_doctor_json_has_a_state_for_each_probe(capsys: Capture) -> None:
    assert cli.main(["doctor", "--json", "-"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["state"] for finding in findings} <= {"ok", "off", "warn"}
    assert len({finding["name"] for finding in findings}) == len(findings) == len(doctor.MACHINE) + 1


def test_doctor_is_strict_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "probe", lambda: [doctor.Finding("x", "warn", "bad", "do this")])
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--strict"]) == 1


def test_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    doctor.direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_when_a_disk_cannot_hold_the_cap(tmp_path: Path) -> None:
    finding, *_ = doctor._disk("bdev x", tmp_path / "kv.img", 1 << 60, tmp_path)
    assert finding.state == "warn"


def test_doctor_misses_the_folder_of_a_file_but_not_the_one_the_node_makes(tmp_path: Path) -> None:
    file = tmp_path / "no" / "kv.img"
    assert "there is no folder" in next(doctor._disk("bdev x", file, 4096, tmp_path)).detail
    assert all(f.state == "ok" for f in doctor._disk("bdev x", file, 4096, file.parent))


def test_doctor_compares_the_cap_with_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._device("bdev x", Path("/dev/dpurt-absent0n1"), 4096).state == "warn"
    monkeypatch.setattr(Path, "is_block_device", lambda self: True)
    monkeypatch.setattr(doctor, "device_bytes", lambda path: 1 << 30)
    (tmp_path / "disk").touch()
    assert doctor._device("bdev x", tmp_path / "disk", 1 << 30).state == "ok"
    assert doctor._device("bdev x", tmp_path / "disk", (1 << 30) + 1).state == "warn"


def findings_of(topology: Path) -> dict[str, tuple[str, str]]:
    return {f.name: (f.state, f.detail) for f in doctor.examine(load_config(topology))}


def test_doctor_tries_the_addresses_a_node_is_to_listen_at(tmp_path: Path) -> None:
    topology = Path(write_topology(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tables = (
            f'[fabric]\ntcp_bind = "tcp://127.99.0.1:0"\n\n[metrics]\nbind = "127.0.0.1:{port}"\n\n[staging]'
        )
        text = topology.read_text().replace("[staging]", tables, 1)
        topology.write_text(text.replace("127.0.0.1:7571", f"127.0.0.1:{port}"))
        found = findings_of(topology)
    assert found["gateway.bind"] == (
        "warn",
        f"cannot listen at 127.0.0.1:{port}: Address already in use",
    )
    assert found["metrics.bind"][0] == "warn"
    assert found["fabric.tcp_bind"] == ("ok", "can listen at a free port of 127.99.0.1")
    assert findings_of(topology)["gateway.bind"][0] == "ok"
    assert "Cannot assign" in doctor._address("gateway.bind", "192.0.2.1", 7571).detail, "of another machine"


def test_doctor_finds_what_serve_would_refuse_on_disk(tmp_path: Path) -> None:
    topology = Path(write_topology(tmp_path))
    path = load_config(topology).bdev[0].full_path(load_config(topology))  # type: ignore[union-attr]
    path.parent.mkdir(exist_ok=True)
    assert not [name for name in findings_of(topology) if name.startswith("data of")]
    path.write_bytes(b"mine" * 4096)
    [(state, detail)] = [f for name, f in findings_of(topology).items() if name.startswith("data of")]
    assert state == "warn", detail
    assert path.read_bytes() == b"mine" * 4096
    path.write_bytes(bytes(1 << 20))
    [(state, _)] = [f for name, f in findings_of(topology).items() if name.startswith("data of")]
    assert state == "ok"


def test_doctor_looks_at_the_run_folder(tmp_path: Path) -> None:
    topology = Path(write_topology(tmp_path))
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    lines = [line for line in topology.read_text().splitlines() if not line.startswith("run_dir")]
    topology.write_text("\n".join(lines).replace("[node]", f'[node]\nrun_dir = "{folder}"', 1))
    assert findings_of(topology)["run folder"][0] == "warn"
    folder.chmod(0o700)
    assert findings_of(topology)["run folder"] == ("ok", str(folder))
    topology.write_text(topology.read_text().replace(str(folder), str(topology / "below")))
    assert findings_of(topology)["run folder"][0] == "warn", "a file is no folder"


def test_doctor_misses_curve_keys(tmp_path: Path) -> None:
    text = Path(write_topology(tmp_path)).read_text()
    curve = '[gateway.curve]\nsecret_key_file = "node.secret"\nauthorized_keys_dir = "clients"\n\n[staging]'
    (tmp_path / "node.toml").write_text(text.replace("[staging]", curve, 1))

    def found() -> tuple[str, str]:
        [finding] = [f for f in doctor.examine(load_config(tmp_path / "node.toml")) if f.name == "CURVE keys"]
        return finding.state, finding.detail

    assert found()[0] == "warn"
    keys.save(keys.generate(), tmp_path / "node")
    assert (found()[0], "no folder of public keys" in found()[1]) == ("warn", True)
    (tmp_path / "clients").mkdir()
    assert (found()[0], "0 clients" in found()[1]) == ("warn", True)
    keys.save(keys.generate(), tmp_path / "clients" / "gpu")
    assert found()[0] == "ok"


def test_doctor_names_the_fabric_and_why() -> None:
    config = load_config("laptop")
    kind, reason = doctor.choose_fabric(config, config.host[0])
    assert (kind, "first usable of shm, tcp" in reason) == ("shm", True)


def test_shm_is_skipped_with_its_reason_where_there_are_no_memfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "shared_memory", lambda: doctor.Finding("memfd", "warn", "no"))
    config = load_config("laptop")
    kind, reason = doctor.choose_fabric(config, config.host[0])
    assert (kind, reason.startswith("shm needs memfds; ")) == ("tcp", True)


# --- bench ---


def bench_module(holds: bool | None) -> SimpleNamespace:
    def run(quick: bool) -> BenchResult:
        result = BenchResult(name="toy", conditions={"seed": 1, "quick_seen": quick})
        result.figures.append(
            Figure(name="speed", value=2.0, unit="GiB/s", peer="toy peer", peer_value=1.0, ratio=2.0,
                   target=">= 3x", holds=holds)
        )  # fmt: skip
        return result

    return SimpleNamespace(run=run)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(bench, "summaries", lambda: {"toy": "a toy"})
    return monkeypatch


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (None, 0), (False, 1)])
def test_bench_fails_when_a_target_is_missed(
    holds: bool | None, code: int, toy: pytest.MonkeyPatch, capsys: Capture
) -> None:
    toy.setitem(sys.modules, "dpurt.bench.toy", bench_module(holds))
    assert cli.main(["bench", "toy", "--quick", "--json", "-"]) == code
    result = json.loads(capsys.readouterr().out)
    assert (result["ratio"], result["holds"], result["peer"]) == (2.0, holds, "toy peer")
    assert result["conditions"]["quick"] is result["conditions"]["quick_seen"] is True
    assert result["conditions"]["cores"] >= 1


def test_bench_all_is_a_list_and_text_names_the_conditions(toy: pytest.MonkeyPatch, capsys: Capture) -> None:
    toy.setitem(sys.modules, "dpurt.bench.toy", bench_module(True))
    assert cli.main(["bench", "all", "--json", "-"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["toy"]
    assert cli.main(["bench", "toy"]) == 0
    out = capsys.readouterr().out
    assert "2.00  >= 3x: holds" in out
    assert "seed: 1" in out


def test_bench_lists_modules_with_a_summary_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('import missing_peer\nSUMMARY = "first"\n')
    (tmp_path / "b.py").write_text('SUMMARY: str = "second"\n')
    (tmp_path / "result.py").write_text("x = 1\n")
    assert bench.summaries(tmp_path) == {"a": "first", "b": "second"}
    assert bench.summaries()


def test_unknown_bench_is_exit_code_2(capsys: Capture) -> None:
    assert cli.main(["bench", "nonsense"]) == 2
    assert "no benchmark 'nonsense'" in capsys.readouterr().err


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_leaves_none_behind() -> None:
    stream = Terminal()
    with Progress("replay", 200, stream, clock=iter(range(100)).__next__) as progress:
        progress.update(100)
        assert stream.getvalue() == "\rreplay [" + "#" * 15 + "." * 15 + "]  50 %"
    assert stream.getvalue().endswith("\r")


def test_progress_elsewhere_is_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    with Progress("replay", 10, stream, clock=iter(range(100)).__next__) as progress:
        for done in range(11):
            progress.update(done)
    assert stream.getvalue().splitlines() == ["replay:  40 % after 5 s", "replay:  90 % after 10 s"]
