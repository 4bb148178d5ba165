"""A node in a process of its own, for the benchmarks of the control path: `dpurt serve` on a memory bdev, one host.

Also a host that is nothing but a blocking DEALER socket and messages encoded in advance, so that what is measured with it is
the node. Blocks are stored and looked up through `dpurt.Client` where how fast that is does not matter.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
import zmq

from dpurt.client import connect
from dpurt.config import Config, load_config
from dpurt.core.identity import Space
from dpurt.demo.nodes import NodeProcess
from dpurt.wire import messages as m

HOST = "bench"
PATIENCE_MS = 20_000
STORE_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A space of the benchmark, and how much of it there is room for in staging."""

    name: str
    block_tokens: int
    num_parts: int
    part_bytes: int
    slots: int

    def to_toml(self, share: float) -> str:
        """Its `[[space]]` table."""
        groups = "".join(
            f'[[space.geometry.groups]]\nname = "g{i}"\nnum_layers = 1\nnum_kv_heads = 1\nhead_size = 8\n'
            f"part_bytes = {self.part_bytes}\n"
            for i in range(self.num_parts)
        )
        return (
            f'[[space]]\nname = "{self.name}"\nmodel = "bench"\nrevision = "1"\nkv_dtype = "fp16"\ntenant = "bench"\n'
            f"staging_share = {share}\n[space.geometry]\nblock_tokens = {self.block_tokens}\n{groups}"
        )

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot."""
        header = 4096 if 4 * (self.num_parts + self.block_tokens) < 3072 else 8192
        return header + -(-self.num_parts * self.part_bytes // 4096) * 4096


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A running node as its benchmarks see it."""

    process: NodeProcess
    config: Config

    @property
    def endpoint(self) -> str:
        return self.process.endpoint

    def spaces(self) -> Mapping[str, Space]:
        """All its spaces, by name."""
        return {space.name: self.config.to_space(space.name) for space in self.config.space}

    def store(self, space: str, tokens: bytes) -> None:
        """Store zeroes for every block of a prompt."""
        trio.run(self._store, space, tokens)

    async def _store(self, name: str, tokens: bytes) -> None:
        geometry = self.config.to_space(name).geometry
        count = len(tokens) // geometry.block_token_bytes
        payload = bytes(geometry.payload_bytes)
        async with connect(self.endpoint, host=HOST, spaces=self.spaces(), timeout_s=20.0) as client:
            for first in range(0, count, STORE_BLOCKS):
                wanted = [payload] * min(STORE_BLOCKS, count - first)
                statuses = await client.store(name, "fill", tokens, first, wanted)
                if any(status not in ("stored", "exists") for status in statuses):
                    raise RuntimeError(f"could not fill space {name}: {statuses}")
            await client.finish("fill")


def _topology(shapes: list[Shape], folder: Path, flash_bytes: int, prefetch: bool) -> str:
    total = sum(shape.slots * shape.record_bytes for shape in shapes)
    spaces = "".join(shape.to_toml(shape.slots * shape.record_bytes / total) for shape in shapes)
    inbound = max(STORE_BLOCKS * shape.num_parts * shape.part_bytes for shape in shapes)
    names = ", ".join(f'"{shape.name}"' for shape in shapes)
    return f"""\
[node]
name = "bench"
run_dir = "{folder / "run"}"
[gateway]
bind = "tcp://127.0.0.1:0"
[staging]
bytes = {total}
[[bdev]]
name = "memory"
kind = "memory"
size_bytes = {flash_bytes}
segment_bytes = {32 << 20}
[[tenant]]
name = "bench"
salt = "a salt that protects nothing"
{spaces}
[[host]]
name = "{HOST}"
spaces = [{names}]
fabrics = ["shm"]
inbound_bytes = {inbound}
[prefetch]
enabled = {"true" if prefetch else "false"}
"""


@contextmanager
def live_node(
    shapes: list[Shape], *, flash_bytes: int = 256 << 20, prefetch: bool = True, tables: str = ""
) -> Iterator[LiveNode]:
    """Start a node with these spaces (and more `tables` of its topology); it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="dpurt-bench-") as name:
        folder = Path(name)
        path = folder / "bench.toml"
        path.write_text(_topology(shapes, folder, flash_bytes, prefetch) + tables)
        with NodeProcess(path, folder / "run", folder / "node.log") as process:
            yield LiveNode(process, load_config(path))


class BareHost:
    """A blocking DEALER that has said hello. `exchange` sends one frame and returns the frame that answers it."""

    def __init__(self, node: LiveNode) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._socket.connect(node.endpoint)
        claims = [m.claim_of(name, space) for name, space in node.spaces().items()]
        reply = self.ask(m.Hello(id=1, host=HOST, protocol=m.PROTOCOL, spaces=claims, fabrics=["shm"]))
        assert isinstance(reply, m.HelloReply), reply

    def exchange(self, frame: bytes) -> bytes:
        """One round trip."""
        self._socket.send(frame)
        return self._socket.recv()

    def ask(self, request: m.Request) -> m.AnyReply:
        """One round trip of a message."""
        return m.decode_reply(self.exchange(m.encode(request)))

    def tell(self, request: m.Request) -> None:
        """A message without an answer."""
        self._socket.send(m.encode(request))

    def close(self) -> None:
        """Say goodbye."""
        self.tell(m.Bye())
        self._context.destroy(linger=500)


@contextmanager
def bare_host(node: LiveNode) -> Iterator[BareHost]:
    """A bare host of the node."""
    host = BareHost(node)
    try:
        yield host
    finally:
        host.close()


def node_conditions() -> dict[str, object]:
    """What every control-path figure depends on."""
    return {
        "node": "dpurt serve in its own process on a memory bdev",
        "python": platform.python_version(),
        "zmq": zmq.zmq_version(),
        "load": _load(),
    }


def _load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])
