"""LMCache's multi-process server as a process, its own bench client as the engine, and the node's topology for them.

The client is LMCache's (`lmcache bench server`): it registers KV tensors of a simulated worker, stores, looks up and retrieves
through LMCache's request protocol, exactly as an engine's connector does, with its tensors in CPU memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHUNK, BLOCK = 32, 16
LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
OBJECT_BYTES = 2 * LAYERS * CHUNK * HEADS * HEAD_SIZE * 2
MODEL = "test-model"  # the bench client's
SPACE = "tiny"
PATIENT = {"find_s": 10, "load_s": 30, "store_s": 30}  # for machines that do much else


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def space_table(*, dtype: str = "float16", object_bytes: int = OBJECT_BYTES, model: str = MODEL) -> str:
    """The space of the objects that the server makes of the client's tensors."""
    return (
        f'[[space]]\nname = "{SPACE}"\nmodel = "{model}"\nrevision = "r1"\nkv_dtype = "{dtype}"\ntenant = "t"\n'
        f"[space.geometry]\nblock_tokens = {CHUNK}\n[[space.geometry.groups]]\n"
        f'name = "all"\nnum_layers = {LAYERS}\nnum_kv_heads = {HEADS}\nhead_size = {HEAD_SIZE}\n'
        f'part_bytes = {object_bytes}\npacking = "lmcache"\n'
    )


@dataclass(frozen=True)
class Shape:
    """A model's KV in LMCache's chunks, and how many of the engine's blocks there are."""

    chunk: int = CHUNK
    layers: int = LAYERS
    heads: int = HEADS
    head_size: int = HEAD_SIZE
    dtype: str = "float16"
    blocks: int = 256


TINY = Shape()


def write_topology(
    path: Path, space: str, port: int, *, name: str = SPACE, tenant: str = "t", segment: str = "1 MiB",
    size: str = "64 MiB", staging: str = "16 MiB", inbound: str = "4 MiB",
) -> Path:  # fmt: skip
    """A node on a file."""
    path.write_text(
        f"""
[node]
name = "lmcache-test"
run_dir = "run"
[gateway]
bind = "tcp://127.0.0.1:{port}"
session_timeout_s = 2.0
[staging]
bytes = "{staging}"
[[bdev]]
name = "flash"
kind = "file"
path = "{path.parent}/kv.img"
size_bytes = "{size}"
segment_bytes = "{segment}"
[[tenant]]
name = "{tenant}"
salt = "sixteen bytes or more"
[[host]]
name = "localhost"
spaces = ["{name}"]
fabrics = ["shm", "tcp"]
inbound_bytes = "{inbound}"
{space}
"""
    )
    return path


def adapter_config(topology: Path, **params: Any) -> dict[str, Any]:
    """What `--l2-adapter` is given."""
    return {
        "type": "plugin", "module_path": "dpurt.engines.lmcache.adapter", "class_name": "DpurtL2Adapter",
        "adapter_params": {"topology": str(topology), "spaces": [SPACE], **PATIENT, **params}, "shared": True,
    }  # fmt: skip


def command_line(adapter: Mapping[str, Any]) -> list[str]:
    """A small server with this adapter."""
    return [
        "-m", "lmcache.v1.multiprocess.http_server", "--chunk-size", str(CHUNK), "--l1-size-gb", "0.05",
        "--no-l1-use-lazy", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter),
    ]  # fmt: skip


class Server:
    """An LMCache server process, in `folder`. Never outlives its test."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.log = folder / "lmcache.log"
        self.rpc_port, self.http_port = free_port(), free_port()
        command = [
            sys.executable, *arguments, "--host", "127.0.0.1", "--port", str(self.rpc_port), "--http-host", "127.0.0.1",
            "--http-port", str(self.http_port), "--supported-transfer-mode", "engine_driven",
        ]  # fmt: skip
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONWARNINGS": "ignore"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=folder
            )

    def wait_until_up(self) -> None:
        limit = time.monotonic() + 90
        while True:
            try:
                self.get("/healthcheck")
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > limit:
                    raise AssertionError(
                        f"no server; its log ends:\n{self.log.read_text()[-4000:]}"
                    ) from error
                time.sleep(0.1)
            else:
                return

    def request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def clear_l1(self) -> None:
        """From now on everything has to come from L2."""
        self.request("POST", "/cache/clear", {"tier": "l1", "force": True})

    def delete(self, keys: Sequence[Any]) -> Any:
        """Delete objects from L2."""
        encoded = [asdict(key.to_encoded_object_key()) for key in keys]
        return self.request("DELETE", "/cache/objects", {"keys": encoded, "tier": "l2"})

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Engine:
    """LMCache's bench client with simulated workers, whose tensors we look into."""

    def __init__(self, server: Server, num_chunks: int, shape: Shape = TINY, tp_size: int = 1) -> None:
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        self._chunk = shape.chunk
        self.num_tokens = num_chunks * shape.chunk
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{server.rpc_port}", http_url=f"http://127.0.0.1:{server.http_port}",
            mode="cpu", transfer_mode="engine_driven", tp_size=tp_size, use_mla=False,
            num_tokens=self.num_tokens - 1,  # the client puts the sequence's number before
            kvcache_shape_spec=(
                f"(2,{shape.blocks},{BLOCK},{shape.heads},{shape.head_size}):{shape.dtype}:{shape.layers}"
            ),
            num_blocks=shape.blocks, block_size=BLOCK,
        )  # fmt: skip
        self.client = ServerBenchClient(config, log=lambda line: None)
        self.client.start()
        self._count = 0

    def _request(self, sequence: int) -> Any:
        self._count += 1
        request = self.client.create_request(sequence, f"r{os.getpid()}-{self._count}", "test")
        assert request is not None
        return request

    def content(self, sequence: int) -> list[str]:
        """Checksums of the worker's tensors, chunk by chunk."""
        found = self.client.compute_checksums(self._request(sequence), 0, self.num_tokens)
        assert found is not None
        return list(found)

    def store(self, sequence: int) -> None:
        request = self._request(sequence)
        result = self.client.store(request, 0, self.num_tokens)
        assert result is not None
        assert result.succeeded
        self.client.end_session(request)

    def fetch(self, sequence: int) -> int:
        """Look up, retrieve what is found over zeros; how many chunks that were."""
        request = self._request(sequence)
        self.client.zero_destination(request, 0, self.num_tokens)
        found = self.client.lookup(request)
        assert found.succeeded
        if found.hit_chunks:
            result = self.client.retrieve(request, 0, found.hit_chunks * self._chunk)
            assert result is not None
            assert result.succeeded
        self.client.end_session(request)
        return int(found.hit_chunks)

    def keys(self, sequence: int) -> list[Any]:
        """The object keys of a sequence's chunks, as the server makes them."""
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        hasher = TokenHasher(chunk_size=CHUNK, hash_algorithm="blake3")
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        hashes = hasher.compute_chunk_hashes(list(self._request(sequence).token_ids))
        return [ObjectKey(chunk_hash=one, model_name=MODEL, kv_rank=rank) for one in hashes]

    def close(self) -> None:
        self.client.close()


def eventually(condition: Callable[[], object], within_s: float = 15.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, "it did not come true in time"
        time.sleep(0.05)
