"""Who may reach what: addresses, keys, tenants, secrets and files, tested through the real sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from dpurt import keys
from dpurt.client import Client, connect
from dpurt.config import Config
from dpurt.core.identity import Geometry, Space
from dpurt.demo.content import payload_of, tokens_of
from dpurt.errors import (
    ConfigError,
    DpurtError,
    NodeUnavailable,
    RemoteAccessError,
    RemoteProtocolError,
    SpaceMismatch,
)
from dpurt.fabric import Piece
from dpurt.node import Node
from dpurt.testing.node import BLOCK_TOKENS, running, small_config, small_host, small_space, spaces_of
from dpurt.testing.raw_host import link_of, raw_host
from dpurt.transport import CurveClient
from dpurt.wire import messages as m

PAYLOAD = 4 * 4096
PROMPT = tokens_of([1, 2, 3], BLOCK_TOKENS)
SALTS = {"red": "the salt of tenant red, 0123456789", "blue": "the salt of tenant blue, 987654321"}


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://192.0.2.7:0", "tcp://example.org:7571"],
)
@pytest.mark.parametrize("where", ["gateway", "fabric", "metrics"])
def test_an_address_others_can_reach_is_refused_without_keys(
    tmp_path: Path, endpoint: str, where: str
) -> None:
    tables: dict[str, dict[str, Any]] = {
        "gateway": {"gateway": {"bind": endpoint}},
        "fabric": {"fabric": {"tcp_bind": endpoint}},
        "metrics": {"metrics": {"bind": endpoint.removeprefix("tcp://")}},
    }
    with pytest.raises(ConfigError):
        small_config(tmp_path / "run", **tables[where])


def listening() -> set[str]:
    """What the kernel says this process listens on, as ``host:port``."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the one that listed the folder
    return {address for address, inode in listeners() if f"socket:[{inode}]" in inodes}


def listeners() -> Iterator[tuple[str, str]]:
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                host, _, port = fields[1].partition(":")
                words = bytes.fromhex(host)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                yield f"{socket.inet_ntop(family, packed)}:{int(port, 16)}", fields[9]


async def test_the_kernel_confirms_that_only_the_configured_addresses_are_bound(tmp_path: Path) -> None:
    before = listening()
    config = small_config(
        tmp_path / "run",
        gateway={"bind": "tcp://127.0.0.2:0"},
        fabric={"tcp_bind": "tcp://127.0.0.3:0"},
        metrics={"bind": "127.0.0.4:0"},
    )
    with trio.fail_after(10):
        async with running(config):
            bound = listening() - before
    assert sorted(address.partition(":")[0] for address in bound) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


# --- keys ------------------------------------------------------------------------------------------------------------


class Keys:
    """The node's key pair, one of each host, and one nobody knows."""

    def __init__(self, folder: Path) -> None:
        self.node, self.a, self.b, self.stranger = (keys.generate() for _ in range(4))
        self.secret_file, _ = keys.save(self.node, folder / "node")

    def config(self, run_dir: Path, **tables: Any) -> Config:
        return two_tenants(
            run_dir,
            gateway={
                "bind": "tcp://127.0.0.1:0", "session_timeout_s": 2.0,
                "curve": {"secret_key_file": str(self.secret_file)},
            },
            host=[
                small_host("host-a", spaces=["red"], public_key=self.a.public),
                small_host("host-b", spaces=["blue"], public_key=self.b.public),
            ],
            **tables,
        )  # fmt: skip

    def client(self, pair: keys.KeyPair) -> CurveClient:
        return CurveClient(pair.public, pair.secret, self.node.public)


def two_tenants(run_dir: Path, **tables: Any) -> Config:
    """Two tenants that differ in nothing but their names and salts, a space and a host each."""
    return small_config(
        run_dir,
        **{
            "tenant": [{"name": name, "salt": salt} for name, salt in SALTS.items()],
            "space": [small_space(name, tenant=name) for name in SALTS],
            "staging": {"bytes": 128 * 5 * 4096},
            "host": [small_host("host-a", spaces=["red"]), small_host("host-b", spaces=["blue"])],
            **tables,
        },
    )


@asynccontextmanager
async def client_of(
    node: Node, host: str, space: str, fabric: str = "tcp", **fields: Any
) -> AsyncIterator[Client]:
    spaces = {space: spaces_of(node.config)[space]}
    async with connect(node.gateway.endpoint, host=host, spaces=spaces, fabrics=[fabric], **fields) as client:
        yield client


async def test_with_curve_a_known_key_is_served_and_any_other_gets_no_answer_at_all(tmp_path: Path) -> None:
    known = Keys(tmp_path)
    with structlog.testing.capture_logs() as logs, trio.fail_after(20):
        async with running(known.config(tmp_path / "run")) as node:
            for curve in (None, known.client(known.stranger)):
                async with client_of(node, "host-a", "red", curve=curve, timeout_s=0.4) as client:
                    with pytest.raises(NodeUnavailable):
                        await client.lookup("red", "r", PROMPT)
            assert node.gateway.messages == 0, "nothing of theirs was even read"
            denied = [line for line in logs if line["event"] == "peer_denied"]
            assert node.stats()["gateway"]["denied"] >= len(denied) > 0  # type: ignore[index]
            assert {line["public_key"] for line in denied} == {known.stranger.public}
            async with client_of(node, "host-a", "red", curve=known.client(known.a)) as client:
                payloads = [payload(i) for i in range(3)]
                assert await client.store("red", "r", PROMPT, 0, payloads) == ["stored"] * 3


async def test_a_node_that_listens_everywhere_is_reached_where_its_gateway_was(tmp_path: Path) -> None:
    known = Keys(tmp_path)
    config = known.config(tmp_path / "run", fabric={"tcp_bind": "tcp://0.0.0.0:0"})
    with trio.fail_after(10):
        async with (
            running(config) as node,
            client_of(node, "host-a", "red", curve=known.client(known.a)) as client,
        ):
            assert set((await client.session(trio.current_time() + 5)).fabric_address) == {"port"}
            assert await client.store("red", "r", PROMPT, 0, [payload(0)]) == ["stored"]


async def test_a_host_name_is_its_keys_alone(tmp_path: Path) -> None:
    known = Keys(tmp_path)
    with trio.fail_after(10):
        async with running(known.config(tmp_path / "run")) as node:
            async with client_of(node, "host-a", "red", curve=known.client(known.b)) as client:
                with (
                    structlog.testing.capture_logs() as logs,
                    pytest.raises(RemoteProtocolError, match="unauthorised"),
                ):
                    await client.lookup("red", "r", PROMPT)
            assert not node.gateway.hosts.sessions
            [line] = [line for line in logs if line["event"] == "hello_refused"]
            assert (line["log_level"], line["host"], line["code"]) == ("warning", "host-a", "unauthorised")


async def test_a_session_is_not_inherited_by_another_key_that_takes_its_routing_id(tmp_path: Path) -> None:
    known = Keys(tmp_path)
    config = known.config(tmp_path / "run")
    with trio.fail_after(10):
        async with running(config) as node:
            curve = known.client(known.a)
            async with raw_host(node.gateway.endpoint, routing_id=b"me", curve=curve) as host:
                assert isinstance(await host.hello(config, "host-a"), m.HelloReply)
            await trio.sleep(0.1)
            assert len(node.gateway.hosts.sessions) == 1, "its host may only have lost the connection"
            curve = known.client(known.b)
            async with raw_host(node.gateway.endpoint, routing_id=b"me", curve=curve) as thief:
                reply = await thief.ask(m.Lookup(space="red", request="r", tokens=PROMPT))
                assert isinstance(reply, m.ErrorReply)
                assert reply.code == "no_session"
            assert not node.gateway.hosts.sessions


async def test_no_operators_message_is_understood_at_the_hosts_door(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with trio.fail_after(10):
        async with running(config) as node, raw_host(node.gateway.endpoint) as raw:
            await raw.hello(config, "host-a")
            for message in (m.EpochBump(space="s"), m.Drain()):
                reply = await raw.ask(message)
                assert isinstance(reply, m.ErrorReply)
                assert reply.code == "malformed"
            assert node.index.spaces["s"].space.epoch == 0
            assert not node.gateway.hosts.is_draining


# --- tenants ---------------------------------------------------------------------------------------------------------


async def test_equal_tokens_of_another_tenant_are_never_a_hit_and_nobody_says_why(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with running(two_tenants(tmp_path / "run")) as node:
            async with client_of(node, "host-a", "red") as red, client_of(node, "host-b", "blue") as blue:
                assert (
                    await red.store("red", "r", PROMPT, 0, [payload(i) for i in range(3)]) == ["stored"] * 3
                )
                assert (await red.lookup("red", "x", PROMPT)).matched_blocks == 3
                assert (await blue.lookup("blue", "r", PROMPT)).matched_blocks == 0
                reasons = {reason.reason for reason in await blue.explain("blue", PROMPT)}
                assert reasons == {"never_stored"}
                assert await blue.store("blue", "r", PROMPT, 0, [payload(9)]) == ["stored"], (
                    "nor is it in the way"
                )
                into = memoryview(bytearray(PAYLOAD))
                assert [b.status for b in await red.load("x", 0, [into])] == ["ok"]
                assert into == payload(0)


async def test_a_host_cannot_claim_a_space_that_is_not_its_own_even_with_the_salt(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with running(two_tenants(tmp_path / "run")) as node, client_of(node, "host-b", "red") as client:
            with pytest.raises(RemoteProtocolError, match="unknown_space"):
                await client.lookup("red", "r", PROMPT)


async def test_another_tenants_region_can_be_neither_pulled_nor_mapped(tmp_path: Path) -> None:
    config = two_tenants(tmp_path / "run")
    with trio.fail_after(10):
        async with running(config) as node, client_of(node, "host-a", "red") as red:
            await red.store("red", "r", PROMPT, 0, [payload(i) for i in range(3)])
            theirs = {node.index.spaces["red"].slab.region.region_id}
            for fabric in ("tcp", "shm"):
                async with raw_host(node.gateway.endpoint) as raw, raw_host(node.gateway.endpoint) as victim:
                    await victim.hello(config, "host-a", [fabric])
                    await victim.ask(m.Lookup(space="red", request="r", tokens=PROMPT))
                    load = await victim.ask(m.Load(request="r", first=0, count=1))
                    assert isinstance(load, m.LoadReply)
                    [grant] = load.blocks
                    assert grant.status == "ok"
                    hello = await raw.hello(config, "host-b", [fabric])
                    assert isinstance(hello, m.HelloReply)
                    link = await link_of(hello)
                    assert not theirs & {region.region for region in hello.regions}
                    local = memoryview(bytearray(grant.length))
                    with pytest.raises(RemoteAccessError):
                        await link.pull(
                            [Piece(grant.region, grant.offset, grant.lease, local)], trio.current_time() + 5
                        )
                    if fabric == "shm":
                        with pytest.raises(RemoteAccessError):
                            link.view(grant.region, grant.offset, grant.length)
                    assert not any(local)
                    await link.aclose()


async def test_a_descriptor_for_reading_cannot_be_mapped_for_writing(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with trio.fail_after(10):
        async with running(config) as node, raw_host(node.gateway.endpoint) as raw:
            hello = await raw.hello(config, "host-a", ["shm"])
            assert isinstance(hello, m.HelloReply)
            link = await link_of(hello)
            region = hello.regions[0]
            view = link.view(region.region, 0, 4096)
            assert view is not None
            assert view.readonly
            with pytest.raises(RemoteAccessError):
                await link.store(
                    [Piece(region.region, 0, 0, memoryview(bytearray(1)))], trio.current_time() + 5
                )
            view.release()
            await link.aclose()


async def test_a_fabric_link_needs_the_token_of_its_session(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with trio.fail_after(10):
        async with running(config) as node, raw_host(node.gateway.endpoint) as raw:
            for fabric in ("tcp", "shm"):
                hello = await raw.hello(config, "host-a", [fabric])
                assert isinstance(hello, m.HelloReply)
                wrong = bytes([hello.token[0] ^ 1]) + hello.token[1:]
                for token in (wrong, bytes(32), hello.token[:31]):
                    hello.token = token
                    with pytest.raises(RemoteProtocolError, match="denied"):
                        await link_of(hello)


# --- every field of the identity -------------------------------------------------------------------------------------


def changed_geometry(**fields: Any) -> Callable[[Space], Space]:
    return lambda space: replace(space, geometry=replace(space.geometry, **fields))


def changed_group(**fields: Any) -> Callable[[Space], Space]:
    def change(space: Space) -> Space:
        first, *others = space.geometry.groups
        geometry = Geometry(
            block_tokens=space.geometry.block_tokens, groups=(replace(first, **fields), *others)
        )
        return replace(space, geometry=geometry)

    return change


def fewer_groups(space: Space) -> Space:
    return replace(space, geometry=replace(space.geometry, groups=space.geometry.groups[:3]))


DIFFERENCES: list[tuple[str, object, object, Callable[[Space], Space]]] = [
    ("model", "m", "M", lambda s: replace(s, model="M")),
    ("revision", "r", "r ", lambda s: replace(s, revision="r ")),
    ("kv_dtype", "fp16", "fp8", lambda s: replace(s, kv_dtype="fp8")),
    ("tenant", "t", "u", lambda s: replace(s, tenant="u")),
    ("tp_size", 1, 2, lambda s: replace(s, tp_size=2)),
    ("pp_size", 1, 2, lambda s: replace(s, pp_size=2)),
    ("lora_name", None, "l", lambda s: replace(s, lora_name="l")),
    ("lora_version", None, "", lambda s: replace(s, lora_version="")),
    ("geometry.block_tokens", 16, 32, changed_geometry(block_tokens=32)),
    ("geometry.token_bytes", 4, 8, changed_geometry(token_bytes=8)),
    ("geometry.num_groups", 4, 3, fewer_groups),
    ("geometry.groups[0].name", "g0", "g", changed_group(name="g")),
    ("geometry.groups[0].num_layers", 2, 3, changed_group(num_layers=3)),
    ("geometry.groups[0].num_kv_heads", 2, 1, changed_group(num_kv_heads=1)),
    ("geometry.groups[0].head_size", 16, 32, changed_group(head_size=32)),
    ("geometry.groups[0].part_bytes", 4096, 8192, changed_group(part_bytes=8192)),
    ("geometry.groups[0].packing", "kv", "vk", changed_group(packing="vk")),
    ("geometry.groups[0].window_tokens", None, 4096, changed_group(window_tokens=4096)),
]


async def test_a_hello_that_differs_in_any_field_is_refused_with_the_field_and_both_values(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    truth = spaces_of(config)["s"]
    with trio.fail_after(20):
        async with running(config) as node, raw_host(node.gateway.endpoint) as raw:
            for field, mine, theirs, change in DIFFERENCES:
                claim = m.claim_of("s", change(truth))
                reply = await raw.ask(m.Hello(host="host-a", protocol=1, spaces=[claim], fabrics=["tcp"]))
                assert isinstance(reply, m.ErrorReply), field
                assert (reply.code, reply.field) == ("space_mismatch", field)
                assert (reply.mine, reply.theirs) == (str(mine), str(theirs))
            assert not node.gateway.hosts.sessions


async def test_of_a_wrong_salt_epoch_or_vector_only_what_may_be_known_is_told(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    truth = spaces_of(config)["s"]
    with trio.fail_after(10):
        async with running(config) as node, raw_host(node.gateway.endpoint) as raw:

            async def refusal(claim: m.SpaceClaim) -> tuple[str, str, str]:
                reply = await raw.ask(m.Hello(host="host-a", protocol=1, spaces=[claim], fabrics=["tcp"]))
                assert isinstance(reply, m.ErrorReply)
                assert reply.code == "space_mismatch"
                return reply.field, reply.mine, reply.theirs

            salted = m.claim_of("s", replace(truth, salt=b"another salt, sixteen bytes"))
            assert await refusal(salted) == ("salt", "<secret>", "<secret>")
            assert await refusal(m.claim_of("s", truth, epoch=7)) == ("epoch", "0", "7")
            other_formula = m.claim_of("s", truth)
            other_formula.vectors[1] = bytes(16)
            assert await refusal(other_formula) == ("vectors", "", "")
            client_space = {"s": replace(truth, kv_dtype="fp8")}
            async with connect(node.gateway.endpoint, host="host-a", spaces=client_space) as client:
                with pytest.raises(SpaceMismatch, match=r"kv_dtype.*fp16.*fp8"):
                    await client.lookup("s", "r", PROMPT)


# --- secrets and files -----------------------------------------------------------------------------------------------


async def metrics_page(port: int) -> str:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
    page = b"".join([piece async for piece in stream])
    await stream.aclose()
    return page.decode()


async def test_a_salt_appears_in_no_statistic_log_error_or_description(tmp_path: Path) -> None:
    config = two_tenants(tmp_path / "run", metrics={"bind": "127.0.0.1:0"})
    said: list[object] = [config, config.tenant, spaces_of(config)]
    with structlog.testing.capture_logs() as logs, trio.fail_after(10):
        async with running(config) as node, client_of(node, "host-a", "red") as red:
            await red.store("red", "r", PROMPT, 0, [payload(i) for i in range(3)])
            said += [
                await red.stats(),
                await red.explain("red", PROMPT),
                await metrics_page(node.metrics.port),
            ]
            wrong = {"red": replace(spaces_of(config)["red"], salt=SALTS["blue"].encode())}
            async with connect(node.gateway.endpoint, host="host-a", spaces=wrong) as client:
                with pytest.raises(DpurtError) as refused:
                    await client.lookup("red", "r", PROMPT)
            said += [refused.value, repr(refused.value), vars(refused.value)]
    said.append(logs)
    assert logs
    for salt in SALTS.values():
        for form in (salt, salt.encode().hex()):
            assert not any(form in f"{one} {one!r}" for one in said)


async def test_sockets_and_run_folder_are_the_users_alone(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        bdev=[
            {
                "name": "f",
                "kind": "file",
                "path": "flash.img",
                "size_bytes": 8 << 20,
                "segment_bytes": 1 << 20,
            }
        ],
    )
    old = os.umask(0)
    try:
        with trio.fail_after(10):
            async with running(config):
                modes = {
                    path.name: stat.S_IMODE(path.stat().st_mode)
                    for path in [config.node.run_path, *config.node.run_path.iterdir()]
                }
    finally:
        os.umask(old)
    assert modes == {"run": 0o700, "admin.sock": 0o600, "shm.sock": 0o600, "flash.img": 0o600}
