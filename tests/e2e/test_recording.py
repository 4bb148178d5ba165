"""`dpurt record` on a node that serves: what it decided is decided again from the recorded completions, nothing private is in
the file, a slow or dead disk stalls nobody, and a killed writer leaves a readable file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from dpurt import cli
from dpurt.agents import recorder as recorder_module
from dpurt.agents.recorder import RecorderAgent
from dpurt.agents.tape import Tape, TapedPolicy, TapedView
from dpurt.bench.live_node import Shape, live_node
from dpurt.client import Client, connect
from dpurt.client.admin import ask
from dpurt.core.events import LatencyMeasured
from dpurt.core.eviction import make_policy
from dpurt.core.identity import ROOT_KEY, chain_keys
from dpurt.errors import ConfigError, RemoteProtocolError
from dpurt.node import Node
from dpurt.replay.decisions import verify
from dpurt.replay.lint import lint
from dpurt.replay.recorded import figures_of
from dpurt.replay.recording import Recording, read_recording, requests_of
from dpurt.testing.node import serving, small_config, small_host, small_space, spaces_of
from dpurt.testing.node_steps import PAYLOAD, buffers, load, payloads, slots, statuses, tokens, until
from dpurt.wire import messages as m
from dpurt.wire import recording as r

SLOTS = 12
T = TypeVar("T")
CHAINS = [range(10 * k + 5000, 10 * k + 5006) for k in range(5)]
SECRET_REASON = "the-reason-nobody-may-read"
REQUEST = "request-of-mister-x"


def config_of(tmp_path: Path, **tables: Any) -> Any:
    return small_config(tmp_path / "run", **{**slots(SLOTS), **tables})


async def traffic(client: Client, rounds: int = 2) -> None:
    """Five conversations that do not fit into staging together, and come back."""
    for k, chain in enumerate(CHAINS):
        await client.lookup("s", f"{REQUEST}-{k}", tokens(*chain))
        await client.store("s", f"{REQUEST}-{k}", None, 0, payloads(*chain))
        await client.finish(f"{REQUEST}-{k}", "end_turn")
    for again in range(rounds):
        for k, chain in enumerate(CHAINS):
            assert statuses(await load(client, f"{again}-{k}", *chain)) == ["ok"] * len(chain)
            await client.finish(f"{again}-{k}", "tool_use" if k % 2 else SECRET_REASON)


async def live(tmp_path: Path, **tables: Any) -> Path:
    path = tmp_path / "node.recording"
    config = config_of(tmp_path, **tables)
    async with serving(Node(config, record_to=path)) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await traffic(client)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trio.run(live, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def recording(recorded: Path) -> Recording:
    return read_recording(recorded)


def test_decisions_fed_the_recorded_completions_are_equal_to_the_live_ones(recording: Recording) -> None:
    verdict = verify(recording)
    assert verdict.difference == ""
    assert verdict.decisions["fetch"] > 10
    assert verdict.decisions["victim"] > 10
    assert verdict.ledger is not None
    assert verdict.ledger.planned >= verdict.decisions["fetch"]


def test_without_prefetch_the_victims_are_equal(tmp_path: Path) -> None:
    path = trio.run(lambda: live(tmp_path, prefetch={"enabled": False}))
    verdict = verify(read_recording(path))
    assert verdict.difference == ""
    assert verdict.decisions["victim"] > 10
    assert verdict.ledger is None
    assert lint(path) == []


def changed(recorded: Path, path: Path, change: Callable[[list[r.Line]], None]) -> Recording:
    """The recording with something else in its lines."""
    recording = read_recording(recorded)
    change(recording.lines)
    path.write_bytes(b"".join(r.encode(line) + b"\n" for line in (recording.header, *recording.lines)))
    return read_recording(path)


def first(lines: list[r.Line], kind: type[T]) -> tuple[int, T]:
    return next((at, line) for at, line in enumerate(lines) if isinstance(line, kind))


def test_another_completion_gives_another_ledger(recorded: Path, tmp_path: Path) -> None:
    def fail_one(lines: list[r.Line]) -> None:
        at, staged = first(lines, r.StagedLine)
        lines[at] = r.FailedLine(staged.now, staged.job, "error")

    assert "ledger" in verify(changed(recorded, tmp_path / "r", fail_one)).difference


def test_another_answer_of_the_tiers_gives_other_decisions(recorded: Path, tmp_path: Path) -> None:
    def be_there(lines: list[r.Line]) -> None:
        at = next(
            at for at, line in enumerate(lines) if isinstance(line, r.Whereabouts) and line.where == "nvme"
        )
        lines[at] = r.Whereabouts(lines[at].block, "staging")  # type: ignore[union-attr]

    assert not verify(changed(recorded, tmp_path / "r", be_there)).is_equal


def test_another_order_of_use_gives_another_victim(tmp_path: Path) -> None:
    def turn_round(lines: list[r.Line]) -> None:
        at, touch = next(
            (at, each) for at, each in enumerate(lines) if isinstance(each, r.Touch) and each.blocks
        )
        lines[at] = r.Touch(touch.pool, touch.blocks[::-1], touch.now)

    path = trio.run(lambda: live(tmp_path, staging={**slots(SLOTS)["staging"], "eviction": "lru"}))
    assert verify(read_recording(path)).difference == ""
    assert "victim" in verify(changed(path, tmp_path / "r", turn_round)).difference


def test_a_killed_nodes_recording_is_fed_back_as_far_as_it_goes(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recorded.read_bytes()
    torn = tmp_path / "torn"
    for size in range(len(whole) // 2, len(whole), len(whole) // 23):
        torn.write_bytes(whole[:size])
        recording = read_recording(torn)
        assert not recording.is_whole
        assert verify(recording).difference == ""
        assert lint(torn) == []
    assert cli.main(["replay", str(torn), "--verify"]) == 0
    assert "its end is missing" in capsys.readouterr().err


def test_the_recording_knows_what_hosts_asked_for(recording: Recording) -> None:
    recorded = figures_of(recording)
    assert recorded.references == 6 * 5 * 3
    assert recorded.staging + recorded.in_flight + recorded.nvme == 6 * 5 * 2
    requests = requests_of(recording)
    assert len(requests) == 15
    assert {request.blocks for request in requests[:5]} == {request.blocks for request in requests[5:10]}


def test_there_is_no_token_key_name_or_request_id_in_the_file(recorded: Path, tmp_path: Path) -> None:
    assert lint(recorded) == []
    text = recorded.read_bytes()
    space = config_of(tmp_path).to_space("s")
    step = space.geometry.block_token_bytes
    for chain in CHAINS:
        words = tokens(*chain)
        for at in range(0, len(words), step):
            block = words[at : at + step]
            ids = memoryview(block).cast("i").tolist()
            for form in (block, block.hex().encode(), ",".join(map(str, ids[:3])).encode()):
                assert form not in text
        for key in chain_keys(space.fingerprint(), ROOT_KEY, words, step):
            assert key.hex()[:16].encode() not in text
    for word in (SECRET_REASON, REQUEST, "host-a", "sixteen bytes", '"m"', '"t"', "fp16"):
        assert word.encode() not in text
    assert oct(recorded.stat().st_mode & 0o777) == "0o600"


async def test_two_recordings_of_the_same_blocks_have_no_hash_in_common(tmp_path: Path) -> None:
    """Hashes are keyed with a secret of the recording, which is in no file."""
    hashes = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        recording = read_recording(await live(folder))
        hashes.append({line.hash for line in recording.lines if isinstance(line, r.Block)})
    assert len(hashes[0]) == len(hashes[1]) == 30
    assert not hashes[0] & hashes[1]


async def test_a_running_node_is_recorded_on_request_and_is_as_before_afterwards(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with serving(Node(config)) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await traffic(client, rounds=1)
            path = tmp_path / "late.recording"
            run_path = config.node.run_path
            begun = await trio.to_thread.run_sync(ask, run_path, m.Record(path=str(path)), m.RecordReply)
            assert not begun.is_fresh
            assert isinstance(node.staging.slabs[0].pool._policy, TapedPolicy)
            await traffic(client, rounds=1)
            ended = await trio.to_thread.run_sync(ask, run_path, m.Record(), m.RecordReply)
            assert node.prefetch.core is not None
            assert not isinstance(node.prefetch.core.view, TapedView)
            assert not isinstance(node.staging.slabs[0].pool._policy, TapedPolicy)
            assert node.staging.tape is node.intake.tape is node.prefetch.tape is node.gateway.tape is None
            node.staging.slabs[0].pool.check_integrity()
            lines = path.read_bytes().count(b"\n") - 1
            await traffic(client, rounds=1)
            assert path.read_bytes().count(b"\n") - 1 == lines == ended.lines
    recording = read_recording(path)
    assert recording.is_whole
    assert ended.bytes == path.stat().st_size
    assert lint(path) == []
    with pytest.raises(ConfigError, match="first request"):
        verify(recording)


async def test_a_node_that_only_measured_its_device_is_recorded_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measured before is in the recording, first of all."""
    config = config_of(tmp_path)
    async with serving(Node(config)) as node:
        staging = node.staging
        monkeypatch.setattr(node.storage, "latency_s", lambda: 0.003)
        staging._tell_latency()
        assert node.prefetch.core is not None
        await until(lambda: node.prefetch.core.arbiter.latency_s == staging._latency_told)
        path = tmp_path / "idle.recording"
        assert node.recorder.start(path).is_fresh
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await traffic(client, rounds=2)
    recording = read_recording(path)
    told = [r.event_of(line) for line in recording.lines if isinstance(line, r.Told)]
    assert told[0] == LatencyMeasured(0.003)
    assert verify(recording).difference == ""


async def test_only_one_recording_at_a_time_and_only_to_a_new_file(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with serving(Node(config, record_to=tmp_path / "one")) as node:

        async def refused(request: m.Record) -> str:
            with pytest.raises(RemoteProtocolError) as caught:
                await trio.to_thread.run_sync(ask, config.node.run_path, request, m.RecordReply)
            return caught.value.message

        assert "under way" in await refused(m.Record(path=str(tmp_path / "two")))
        await node.recorder.stop("asked")
        assert "no recording" in await refused(m.Record())
        assert "exists" in await refused(m.Record(path=str(tmp_path / "one")))
        assert "No such file" in await refused(m.Record(path=str(tmp_path / "nowhere" / "x")))
        assert "absolute" in await refused(m.Record(path="here"))
        assert "absolute" in await refused(m.Record(path="/a\0b"))
        assert node.gateway.restarts == 0
    assert read_recording(tmp_path / "one").is_whole


async def test_a_disk_that_stalls_loses_lines_and_says_so_but_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write_lines = RecorderAgent._write_lines

    def stalled(self: RecorderAgent, *rest: Any) -> None:
        go_on.wait(20)
        write_lines(self, *rest)

    monkeypatch.setattr(RecorderAgent, "_write_lines", stalled)
    monkeypatch.setattr(Tape.__init__, "__defaults__", (200,))
    config, path = config_of(tmp_path), tmp_path / "lossy"
    async with serving(Node(config, record_to=path)) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            with trio.fail_after(10):
                await traffic(client)
            assert len(node.recorder.recording.tape._lines) < 400  # type: ignore[union-attr]
            go_on.set()
            with trio.fail_after(10):
                while not node.recorder.recording.num_bytes > 5000:  # type: ignore[union-attr]  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await traffic(client, rounds=1)
    recording = read_recording(path)
    assert recording.lost > 100
    assert recording.is_whole
    assert lint(path) == []
    with pytest.raises(ConfigError, match="lost lines"):
        verify(recording)


async def test_a_disk_that_fails_ends_the_recording_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    async with serving(Node(config, record_to=tmp_path / "full")) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:

            def no_space(fd: int, data: object) -> int:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(recorder_module.os, "write", no_space)
            await traffic(client, rounds=1)
            with trio.fail_after(5):
                while node.recorder.recording is not None:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            monkeypatch.undo()
            assert node.recorder.status["failures"] == 1
            assert node.staging.tape is None
            await traffic(client, rounds=1)
    assert lint(tmp_path / "full") == []


async def test_a_full_disk_is_an_answer_to_who_wants_a_recording_and_the_next_one_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    config, path = config_of(tmp_path), tmp_path / "full"
    async with serving(Node(config)) as node:
        with monkeypatch.context() as full:
            full.setattr(recorder_module.os, "write", no_space)
            with pytest.raises(RemoteProtocolError, match="No space left"):
                await trio.to_thread.run_sync(
                    ask, config.node.run_path, m.Record(path=str(path)), m.RecordReply
                )
        assert (node.gateway.restarts, node.recorder.recording, path.exists()) == (0, None, False)
        assert node.recorder.start(path).path == path
        monkeypatch.setattr(recorder_module.os, "write", no_space)  # and the node ends in order all the same
    monkeypatch.undo()
    assert node.recorder.failures == 2


async def test_a_recording_ends_when_it_is_as_large_as_it_may_be(tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "small"
    node = Node(config, record_to=path)
    async with serving(node):
        node.recorder._max_bytes = 2000
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            await traffic(client, rounds=1)
            with trio.fail_after(5):
                while node.recorder.recording is not None:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            await traffic(client, rounds=1)
    recording = read_recording(path)
    assert isinstance(recording.lines[-1], r.End)
    assert recording.lines[-1].why == "full"


def test_a_taped_policy_is_the_policy(tmp_path: Path) -> None:
    class Notes:
        def __init__(self) -> None:
            self.lines: list[r.PolicyLine] = []

        def policy(self, line: r.PolicyLine, blocks: object) -> None:
            self.lines.append(line)

    notes = Notes()
    plain, taped = make_policy("lru", 4), TapedPolicy(make_policy("lru", 4), 0, notes)  # type: ignore[arg-type]
    for policy in (plain, taped):
        for block in (1, 2, 3):
            policy.insert(block, 0.0)
            policy.unhold(block)
        policy.hold(1)
        policy.touch(iter((2, 1)), 1.0)
        policy.remove(3, evicted=False)
    assert (plain.victim(2.0), len(plain), plain.name) == (taped.victim(2.0), len(taped), taped.name)
    assert notes.lines[-1] == r.Victim(0, 2.0, 2, False)
    assert r.Touch(0, (2, 1), 1.0) in notes.lines
    assert os.sep not in str(notes.lines)


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
async def test_link_completions_are_recorded_as_far_as_the_node_sees_them(
    tmp_path: Path, fabric: str
) -> None:
    config, path = config_of(tmp_path), tmp_path / "moved"
    async with serving(Node(config, record_to=path)) as node:
        endpoint = node.gateway.endpoint
        async with connect(endpoint, host="host-a", spaces=spaces_of(config), fabrics=[fabric]) as client:
            await client.store("s", "fill", tokens(*CHAINS[0]), 0, payloads(*CHAINS[0]))
            assert statuses(await load(client, "again", *CHAINS[0])) == ["ok"] * 6
            await client.finish("again")
    recording = read_recording(path)
    moved = [line for line in recording.lines if isinstance(line, r.Moved)]
    released = [line.block for line in recording.lines if isinstance(line, r.Released)]
    assert len(set(released)) == 6
    if fabric == "tcp":
        assert sum(line.num_bytes for line in moved if line.op == "store") == 6 * PAYLOAD
        pulled = [line for line in moved if line.op == "pull"]
        assert sum(line.num_bytes for line in pulled) == 6 * PAYLOAD
        assert {line.block for line in pulled} == set(released)
        assert all(line.began <= line.now for line in moved)
    assert lint(path) == []
    assert verify(recording).difference == ""


@pytest.mark.slow
def test_the_command_records_until_interrupted_and_says_what_it_got(tmp_path: Path) -> None:
    path = tmp_path / "by-command"
    with live_node([Shape("s", 16, 1, 4096, 8)]) as node:
        command = [
            sys.executable, "-m", "dpurt", "record", str(path), "--topology", str(node.config.node.run_path.parent / "bench.toml"),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            limit = time.monotonic() + 20
            while not path.exists():
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.02)
            node.store("s", bytes(16 * 4 * 3))
            process.send_signal(signal.SIGINT)
            try:
                said, _ = process.communicate(timeout=20)
            finally:
                process.kill()
        assert process.returncode == 0
        assert "0 lines lost" in said
        again = subprocess.run([*command, "--seconds", "0.1"], capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert "exists" in again.stderr
    recording = read_recording(path)
    assert recording.is_whole
    assert sum(isinstance(line, r.Taken) for line in recording.lines) == 3
    assert lint(path) == []
    assert cli.main(["replay", str(path), "--verify"]) == 0


async def test_several_spaces_shards_and_an_epoch_are_fed_back_too(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        **slots(24),
        "space": [small_space("s"), small_space("u", tp_size=2)],
        "host": [small_host("host-a", spaces=["s", "u"]), small_host("host-b")],
    }
    config, path = small_config(tmp_path / "run", **tables), tmp_path / "two"
    async with serving(Node(config, record_to=path)) as node:
        async with connect(node.gateway.endpoint, host="host-a", spaces=spaces_of(config)) as client:
            for turn in range(2):
                for chain in CHAINS:
                    for space, shard in (("s", 0), ("u", 0), ("u", 1)):
                        request = f"{space}-{shard}-{chain.start}-{turn}"
                        found = await client.lookup(space, request, tokens(*chain), shard=shard)
                        first = found.matched_blocks
                        await client.store(space, request, None, first, payloads(*chain[first:]), shard=shard)
                        await client.load(request, 0, buffers(first), shard=shard)
                        await client.finish(request, "end_turn")
            await node.bump_epoch("s")
            await client.lookup("u", "after", tokens(*CHAINS[0]))
            await client.finish("after")
    recording = read_recording(path)
    assert len(recording.header.pools) == 2
    assert len(recording.spaces()) == 2
    verdict = verify(recording)
    assert verdict.difference == ""
    assert verdict.decisions["victim"] > 10
    assert lint(path) == []


async def test_a_recording_ends_once_whoever_asks_at_the_same_time(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with trio.open_nursery() as outer:
        outer.cancel_scope.deadline = trio.current_time() + 20
        async with serving(Node(config)) as node:
            path = tmp_path / "r.rec"
            node.recorder.start(path)
            refused = []

            async def stop() -> None:
                try:
                    await node.recorder.stop("asked")
                except ConfigError as error:
                    refused.append(str(error))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop)
                nursery.start_soon(stop)
            assert len(refused) == 1
            assert "ending already" in refused[0]
            assert read_recording(path).is_whole
