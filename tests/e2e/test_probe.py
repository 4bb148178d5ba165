"""`dpurt doctor --probe`: real bytes over each fabric of a host, and what it says when that does not work."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dpurt.cli import main
from dpurt.config import load_config
from dpurt.demo.nodes import NodeProcess
from dpurt.errors import ConfigError
from dpurt.probe import probe_host

TOPOLOGY = """
[node]
name = "probed"
run_dir = "{folder}/run"
[gateway]
bind = "tcp://127.0.0.1:{port}"
[staging]
bytes = 1048576
[[bdev]]
name = "m"
kind = "memory"
size_bytes = 16777216
segment_bytes = 1048576
[[tenant]]
name = "t"
salt = "sixteen bytes or more"
[[space]]
name = "s"
model = "m"
revision = "r"
kv_dtype = "fp16"
tenant = "t"
[space.geometry]
block_tokens = 16
groups = [{{name = "g", num_layers = 1, num_kv_heads = 1, head_size = 8, part_bytes = 16384}}]
[[host]]
name = "host-a"
spaces = ["s"]
fabrics = ["shm", "tcp"]
inbound_bytes = 1048576
"""


@pytest.fixture
def topology(tmp_path: Path, port: int) -> Path:
    path = tmp_path / "t.toml"
    path.write_text(TOPOLOGY.format(folder=tmp_path, port=port))
    return path


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_probe_moves_bytes_over_each_fabric_of_the_host(
    tmp_path: Path, topology: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with NodeProcess(topology, tmp_path / "run", tmp_path / "log") as node:
        assert main(["doctor", str(topology), "--probe", "host-a"]) == 0
        shown = capsys.readouterr().out
        stats = node.stats()["fabrics"]
    for kind in ("shm", "tcp"):
        assert f"probe {kind}" in shown
    assert shown.count("8 blocks of 16,384 bytes, every byte compared") == 2
    assert stats["tcp"]["bytes_pulled"] == stats["tcp"]["bytes_stored"] == 3 * 8 * 16384  # type: ignore[index]


def test_a_probe_of_a_node_that_is_not_there_says_so(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpurt.probe.TIMEOUT_S", 0.3)
    findings = probe_host(load_config(str(topology)), "host-a", None)
    assert [finding.state for finding in findings] == ["warn", "warn"]
    with pytest.raises(ConfigError, match="no host 'nobody'"):
        probe_host(load_config(str(topology)), "nobody", None)
