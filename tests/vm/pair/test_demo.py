"""The demo over two machines: the node here on an NVMe/RDMA drive, two host processes in the other machine, over verbs on two rails.

Every byte a host gets is checked there. That no payload passes through the node's own memory as a Python object, or through a
socket of its, is seen from outside: by what its system calls moved, as strace and /proc/PID/io count it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from dpurt import keys
from dpurt.demo.host import Job, Result
from dpurt.demo.nodes import NodeProcess, observe
from dpurt.demo.plan import HOSTS, SPACE, Plan, make_plan, topology_of
from dpurt.demo.report import ledger_adds_up
from dpurt.replay.trace import read_mooncake

pytestmark = pytest.mark.vm

TRACE = "mooncake_conversation_1600.jsonl.gz"
REQUESTS, BLOCK_BYTES = 24, 128 << 10
START_S = 12.0  # what two host processes take to start
GATEWAY = "tcp://10.9.9.1:7580"
CALLS = "read,pread64,readv,preadv,recvfrom,recvmsg,write,pwrite64,writev,pwritev,sendto,sendmsg"
MIB = 1 << 20


def plan_of() -> Plan:
    """The first requests of the trace."""
    with resources.as_file(resources.files("dpurt.bench") / "traces" / TRACE) as path:
        trace = list(read_mooncake(path, REQUESTS))
    return make_plan(trace, block_bytes=BLOCK_BYTES, staging_share=0.25, speed=4.0)


def topology(plan: Plan, folder: Path, hosts: dict[str, keys.KeyPair], node: keys.KeyPair) -> str:
    """The demo's own, but for the way to the node, its drive, and its rails."""
    text = topology_of(plan, folder, "verbs", "dpurt", 1)
    for old, new in (
        (
            'bind = "tcp://127.0.0.1:1"',
            f'bind = "{GATEWAY}"\nsession_timeout_s = 30.0\n[gateway.curve]\nsecret_key_file = "node.secret"',
        ),
        (
            f'kind = "file"\npath = "{folder / "flash.img"}"\nsize_bytes = {plan.store_bytes}',
            f'kind = "nvme-rdma"\naddresses = ["10.9.0.1:4430"]\nsubnqn = "{os.environ["DPURT_VM_NQN"]}"\n'
            "num_queues = 2\ndeadline_s = 30.0",
        ),
        *(
            (f'name = "{name}"\nspaces', f'name = "{name}"\npublic_key = "{pair.public}"\nspaces')
            for name, pair in hosts.items()
        ),
    ):
        assert old in text, old
        text = text.replace(old, new)
    rails = [f'[[rail]]\nname = "rail{i}"\naddress = "10.9.{i}.1"\n' for i in range(2)]
    return text + "\n".join(rails)


@contextmanager
def traced(pid: int, out: Path) -> Iterator[None]:
    """What its calls move, written down by strace."""
    command = [
        "strace",
        "-f",
        "-qq",
        "-s",
        "0",
        "-e",
        "signal=none",
        "-e",
        f"trace={CALLS}",
        "-p",
        str(pid),
        "-o",
        out,
    ]
    with subprocess.Popen(command) as tracer:
        time.sleep(2)
        assert tracer.poll() is None
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(30)


def moved_by_calls(out: Path) -> int:
    ends = re.findall(r"= (\d+)$", out.read_text(), re.MULTILINE)
    return sum(map(int, ends))


def test_demo_over_two_machines_without_a_payload_byte_through_the_node(tmp_path: Path, far) -> None:  # type: ignore[no-untyped-def]
    subprocess.run(["blkdiscard", "--zeroout", os.environ["DPURT_VM_NVMET_DEVICE"]], check=True)
    plan = plan_of()
    node_keys, host_keys = keys.generate(), {name: keys.generate() for name in HOSTS}
    keys.save(node_keys, tmp_path / "node")
    text = topology(plan, tmp_path, host_keys, node_keys)
    path = tmp_path / "topology.toml"
    path.write_text(text)
    with NodeProcess(path, tmp_path / "run", tmp_path / "node.log") as node:
        before = observe(node.pid)
        with traced(node.pid, tmp_path / "calls"):
            results = []
            for _ in range(2):  # what the first time stores the second one loads
                play = partial(run_host, far, plan, text, host_keys, node_keys, time.time() + START_S)
                with ThreadPoolExecutor(len(HOSTS)) as pool:
                    results.append(list(pool.map(play, range(len(HOSTS)))))
        stats, after = node.stats(), observe(node.pid)
        assert node.terminate() == 0
    check(plan, *results, stats)
    payload = sum(r.bytes_pulled + r.bytes_stored for result in results for r in result)
    calls = moved_by_calls(tmp_path / "calls")
    print(
        f"payload {payload / MIB:.0f} MiB; moved by the node's calls: {calls / MIB:.1f} MiB (strace), "
        f"{(after.bytes_by_calls - before.bytes_by_calls) / MIB:.1f} MiB read (/proc); "
        f"{stats['intake']['landed']} of {stats['intake']['stored']} stores without a copy; "
        f"rails {stats['rails']}"
    )
    assert calls < payload / 8
    assert after.bytes_by_calls - before.bytes_by_calls < payload / 8


def run_host(far, plan: Plan, text: str, pairs, node: keys.KeyPair, start_at: float, index: int) -> Result:  # type: ignore[no-untyped-def]
    name, folder = HOSTS[index], f"/tmp/demo-{HOSTS[index]}"
    job = Job(
        topology=f"{folder}/topology.toml", endpoint=GATEWAY, host=name, space=SPACE, fabric="verbs", start_at=start_at,
        result=f"{folder}/result.json", requests=plan.requests[index::2], max_running=4, timeout_s=60.0,
        curve=(pairs[name].public, pairs[name].secret, node.public),
    )  # fmt: skip
    files = {job.topology: text, f"{folder}/job.json": msgspec.json.encode(job).decode()}
    far.run("python3", "-m", "dpurt.demo.host", f"{folder}/job.json", files=files)
    return msgspec.json.decode(far.run("cat", job.result)["out"], type=Result)


def check(plan: Plan, first: list[Result], second: list[Result], stats) -> None:  # type: ignore[no-untyped-def]
    everything = [*first, *second]
    assert sum(r.requests for r in everything) == 2 * len(plan.requests)
    assert sum(r.wrong_bytes + r.checksum_errors + r.unreachable for r in everything) == 0
    assert sum(r.verified_bytes for r in second) == plan.block_refs * plan.block_bytes
    assert sum(r.nvme for r in second) > 0
    assert sum(r.staging for r in second) > 0
    assert ledger_adds_up(stats)
    assert stats["intake"]["landed"] > stats["intake"]["stored"] / 5, (
        "no copy at commit, while slots are free"
    )
    assert set(stats["fabrics"]) == {"verbs"}
    assert all(rail["bytes_out"] > 0 and rail["bytes_in"] > 0 for rail in stats["rails"].values())
    [bdev] = stats["bdevs"].values()
    assert bdev["kind"] == "nvme-rdma"
