"""kill -9, again and again: what the device had is served afterwards, byte for byte, and nothing else is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import trio

from dpurt.client import Client, connect
from dpurt.config import load_config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.demo.nodes import NodeProcess
from dpurt.errors import DeadlineExceeded, FabricError, NodeUnavailable, RemoteProtocolError

LIVES = 100
PAYLOAD = 4 * 4096
BLOCK_TOKENS = 16
UNREACHABLE = (NodeUnavailable, DeadlineExceeded, FabricError, RemoteProtocolError)


@pytest.mark.slow
def test_a_node_killed_at_a_hundred_random_points_serves_what_was_written_and_never_a_wrong_byte(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("crash_lives.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(LIVES), "1"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert not run.returncode, run.stderr[-3000:]
    told = json.loads(run.stdout)
    looks = told["looks"]
    assert (told["killed"], told["last"]) == (LIVES, 0), run.stderr[-3000:]
    assert not told["wrong"]
    assert not [block for look in looks for block in look["lost"]]
    assert len(looks) > LIVES // 3, "most lives got as far as to look around"
    assert looks[-1]["checked"] == looks[-1]["expected"] > 200
    assert told["dropped"] > 200, "the device was full and segments were reclaimed"
    for look in looks:
        rebuilt = look["rebuilt"]
        assert rebuilt["records"] == look["index"] == look["live"] >= look["expected"]
        assert look["usage"] >= look["live"] * 5 * 4096
        assert rebuilt["seconds"] < 5
    assert sum(look["rebuilt"]["torn"] for look in looks) > 0, "some died in the middle of a write"
    numbers = [look["incarnation"] for look in looks]
    assert numbers == sorted(set(numbers)), "every start has its own incarnation"


# --- the real command ------------------------------------------------------------------------------------------------

TOPOLOGY = """\
[node]
name = "crash"
run_dir = "{folder}/run"
[gateway]
bind = "tcp://127.0.0.1:{port}"
session_timeout_s = 2.0
[staging]
bytes = 1310720
[[bdev]]
name = "flash"
kind = "file"
path = "{folder}/flash.img"
size_bytes = 67108864
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
{groups}
[[host]]
name = "host-a"
spaces = ["s"]
inbound_bytes = 524288
"""
GROUP = '[[space.geometry.groups]]\nname = "g{}"\nnum_layers = 1\nnum_kv_heads = 1\nhead_size = 8\npart_bytes = 4096\n'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Host:
    """Stores chains of four blocks and loads old ones, for ever, whatever becomes of the node."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = count(1)
        self.stored: dict[int, float] = {}  # chain -> when
        self.wrong = self.unreachable = self.served = 0

    async def run(self) -> None:
        for chain in count(1):
            try:
                await self._store(chain)
                if self.stored:
                    await self.load(next(iter(self.stored)))
            except UNREACHABLE:
                self.unreachable += 1
                await trio.sleep(0.02)

    async def _store(self, chain: int) -> None:
        blocks = range(10 * chain, 10 * chain + 4)
        name = f"w{next(self._numbers)}"
        statuses = await self._client.store(
            "s", name, tokens_of(blocks, BLOCK_TOKENS), 0, [payload(b) for b in blocks], timeout_s=1.0
        )
        await self._client.finish(name)
        if statuses == ["stored"] * 4:
            self.stored[chain] = trio.current_time()

    async def load(self, chain: int) -> bool:
        """Is the whole chain served? Every byte is compared."""
        blocks = range(10 * chain, 10 * chain + 4)
        name = f"r{next(self._numbers)}"
        found = await self._client.lookup("s", name, tokens_of(blocks, BLOCK_TOKENS), timeout_s=1.0)
        into = [memoryview(bytearray(PAYLOAD)) for _ in range(found.matched_blocks)]
        loaded = await self._client.load(name, 0, into, timeout_s=1.0) if into else []
        await self._client.finish(name)
        for block, answer, got in zip(blocks, loaded, into, strict=False):
            self.wrong += answer.is_ok and got != payload(block)
        good = sum(answer.is_ok for answer in loaded)
        self.served += good
        return good == 4


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "kills"), [("shm", 3), ("tcp", 2)])
async def test_a_served_node_is_killed_and_started_again_under_a_client_that_recovers_by_itself(
    tmp_path: Path, fabric: str, kills: int
) -> None:
    groups = "".join(GROUP.format(i) for i in range(4))
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY.format(folder=tmp_path, port=free_port(), groups=groups))
    config = load_config(str(topology))
    process = NodeProcess(topology, config.node.run_path, tmp_path / "node.log")
    with trio.fail_after(60):
        await trio.to_thread.run_sync(process.start)
        try:
            spaces = {"s": config.to_space("s")}
            async with connect(process.endpoint, host="host-a", spaces=spaces, fabrics=[fabric]) as client:
                host = Host(client)
                for _ in range(kills):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(host.run)
                        aim = len(host.stored) + 12
                        while len(host.stored) < aim:  # noqa: ASYNC110
                            await trio.sleep(0.01)
                        await trio.sleep(0.25)  # for the last of them to reach the device
                        killed_at = trio.current_time()
                        await trio.to_thread.run_sync(process.kill)
                        await trio.to_thread.run_sync(process.start)
                        served = host.served
                        while host.served == served:  # noqa: ASYNC110
                            await trio.sleep(0.01)
                        nursery.cancel_scope.cancel()
                    old = [chain for chain, at in host.stored.items() if at < killed_at - 0.2]
                    assert len(old) > 10
                    assert [chain for chain in old if not await host.load(chain)] == []
                assert host.wrong == 0
                assert host.unreachable > 0
        finally:
            assert await trio.to_thread.run_sync(process.terminate) == 0
