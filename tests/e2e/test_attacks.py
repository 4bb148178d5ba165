"""What a hostile or broken host may send, and what must come of it: an error, counted, and a node that serves on."""

from __future__ import annotations

import gc
import os
import random
import socket as stdlib_socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import trio

from dpurt.client import Client, connect
from dpurt.client.buffers import part_crcs
from dpurt.config import Config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.errors import RemoteAccessError, RemoteProtocolError
from dpurt.fabric import Endpoint, Piece
from dpurt.fabric.frames import encode_hello
from dpurt.fabric.seqpacket import Channel, dial
from dpurt.node import Node
from dpurt.testing.faulty_bdev import Fault
from dpurt.testing.node import (
    BLOCK_TOKENS,
    PART_BYTES,
    FaultyNode,
    running,
    serving,
    small_config,
    small_host,
    small_space,
    spaces_of,
)
from dpurt.testing.raw_host import RawHost, link_of, raw_host, write_reserved
from dpurt.wire import messages as m

FRAMES = 20_000
PARTS = [PART_BYTES] * 4
PAYLOAD = sum(PARTS)
MAX_MESSAGE = 1 << 20


def payload(block: int) -> bytes:
    return payload_of(block.to_bytes(16, "little"), PAYLOAD)


def tokens(*blocks: int) -> bytes:
    return tokens_of(blocks, BLOCK_TOKENS)


def config_of(tmp_path: Path, **tables: Any) -> Config:
    gateway = {"bind": "tcp://127.0.0.1:0", "session_timeout_s": 5.0, "max_message_bytes": MAX_MESSAGE}
    return small_config(tmp_path / "run", **{"gateway": gateway, **tables})


def two_spaces() -> dict[str, Any]:
    names = ["s", "s2"]
    return {
        "space": [small_space("s"), small_space("s2", model="m2")],
        "staging": {"bytes": 128 * 5 * 4096},
        "host": [small_host("host-a", spaces=names), small_host("host-b", spaces=names)],
    }


def restarts(node: Node) -> dict[str, int]:
    return {agent.name: agent.restarts for agent in node._agents if agent.restarts}


def assert_sound(node: Node) -> None:
    """Nobody crashed, and every structure is whole."""
    assert not restarts(node)
    for slab in node.staging.slabs:
        slab.pool.check_integrity()
    for state in node.index.spaces.values():
        state.index.check_integrity()
    node.store.stores[0].check_integrity()


async def store_and_load(client: Client, start: int) -> None:
    """A well-behaved request: four blocks stored, found and loaded, byte for byte."""
    prompt, name = tokens(*range(start, start + 4)), f"good-{start}"
    stored = await client.store("s", name, prompt, 0, [payload(start + i) for i in range(4)])
    assert stored == ["stored"] * 4
    assert (await client.lookup("s", name, prompt)).matched_blocks == 4
    into = [memoryview(bytearray(PAYLOAD)) for _ in range(4)]
    assert [block.status for block in await client.load(name, 0, into)] == ["ok"] * 4
    assert [bytes(view) for view in into] == [payload(start + i) for i in range(4)]
    await client.cancel(name)


# --- mutants ---------------------------------------------------------------------------------------------------------


def corpus(config: Config) -> list[bytes]:
    """A valid message of every type, and every optional field at least once."""
    prompt = tokens(1, 2, 3)
    claims = [m.claim_of(name, space) for name, space in spaces_of(config).items()]
    messages: list[m.Request] = [
        m.Hello(host="host-a", protocol=1, spaces=claims, fabrics=["shm", "tcp"]),
        m.Lookup(space="s", request="r", tokens=prompt),
        m.Lookup(space="s", request="q", digests=[bytes(16), bytes(32)], intent="probe", shard=0),
        m.Hint(request="r", kind="arrival", space="s", tokens=prompt),
        m.Hint(request="r", kind="pause", expected_ms=5, reason="tool"),
        m.Hint(request="r", kind="resume"),
        m.Hint(request="r", kind="decode", step=3, group=1, touched=[0, 1], ranked=[2], need_ms=4),
        m.Hint(request="r", kind="finish", reason="end_turn"),
        m.Load(request="r", first=0, count=3, parts=(0, 2), deadline_ms=50),
        m.Load(request="r", first=0, count=1, landing=m.Landing(region=1, offsets=[0]), deadline_ms=50),
        m.Reserve(space="s", request="r", first=0, count=2, tokens=prompt),
        m.Commit(request="r", blocks=[m.CommitBlock(reservation=1, crcs=[1, 2, 3, 4])], deadline_ms=50),
        m.Release(leases=[4096, 1 << 40]),
        m.Cancel(request="r"),
        m.Explain(space="s", tokens=prompt),
        m.Stats(),
        m.Ping(),
        m.Bye(),
    ]
    for number, message in enumerate(messages):
        message.id = number + 1
    return [m.encode(message) for message in messages]


STRANGE: list[Any] = [
    None, True, False, -1, 0, 1, 127, 2**31, 2**48 + 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "",
    "x" * 300, b"", b"\xff" * 17, [], [[]], [0] * 5000, {}, {"type": "hello"}, {1: 2}, msgpack.Timestamp(1, 2),
    msgpack.ExtType(5, b"abc"),
]  # fmt: skip
HUGE = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
]
NESTED = [b"\x91" * 60_000, b"\x81\xa1a" * 60_000, b"\x81\xa4type\x81" * 30_000]


def flip(frame: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def cut(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randrange(len(frame))]


def confuse(frame: bytes, rng: random.Random) -> bytes:
    """One field has a value of another type or size; or is missing; or is there under another type's tag."""
    tree = msgpack.unpackb(frame)
    field = rng.choice(list(tree))
    if rng.random() < 0.2:
        del tree[field]
    else:
        tree[field] = rng.choice(STRANGE)
    return bytes(msgpack.packb(tree))


def splice(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(frame))
    return frame[:at] + rng.choice([*HUGE, b"\xc1", rng.randbytes(9)]) + frame[at + rng.randrange(3) :]


def junk(frame: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", rng.randbytes(rng.randrange(200)), rng.choice(HUGE), rng.choice(NESTED)])


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    flip,
    flip,
    cut,
    confuse,
    confuse,
    splice,
    junk,
]


def mutants(frames: list[bytes], count: int, seed: int) -> Iterator[tuple[bytes, ...]]:
    """Messages as lists of parts; one in thirty has the wrong number of them."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = rng.choice(MUTATIONS)(rng.choice(frames), rng)
        if rng.random() < 1 / 30:
            yield (mutant,) * rng.choice([2, 3, 30, 62, 70])
        else:
            yield (mutant,)


def is_malformed(parts: tuple[bytes, ...], decode: Callable[[bytes], object]) -> bool:
    if len(parts) != 1:
        return True
    try:
        decode(parts[0])
    except RemoteProtocolError:
        return True
    return False


LAST_ID = 2**40


async def read_until_last(raw: RawHost) -> None:
    """Take answers until the one that ends the conversation."""
    while True:
        reply = m.decode_reply((await raw.socket.recv())[-1])
        if reply.id == LAST_ID:
            return


async def bombard(raw: RawHost, messages: Iterator[tuple[bytes, ...]], hello: bytes) -> int:
    """Send all, with a fresh hello now and then, reading what comes back; how many could not be understood."""
    malformed = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_until_last, raw)
        for number, parts in enumerate(messages):
            if number % 50 == 0:
                await raw.send(hello)
            malformed += is_malformed(parts, m.decode_request)
            await raw.send(*parts)
        await raw.send(m.encode(m.Ping(id=LAST_ID)))
    return malformed


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def good_client(node: Node, config: Config, fabric: str = "shm") -> AsyncIterator[Client]:
    async with connect(
        node.gateway.endpoint, host="host-b", spaces=spaces_of(config), fabrics=[fabric]
    ) as client:
        yield client


async def test_mutated_frames_are_errors_and_never_disturb_another_host(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    frames = corpus(config)
    served = malformed = 0
    with trio.fail_after(90):
        async with running(config) as node, good_client(node, config) as client:

            async def serve_on() -> None:
                nonlocal served
                while True:
                    await store_and_load(client, 1000 + 4 * served)
                    served += 1
                    await trio.sleep(0.02)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_on)
                memory = []
                for seed in range(4):
                    async with raw_host(node.gateway.endpoint) as raw:
                        malformed += await bombard(raw, mutants(frames, FRAMES // 4, seed), frames[0])
                    memory.append(rss_bytes())
                before = served
                await trio.sleep(0.3)
                nursery.cancel_scope.cancel()
            assert served > before > 10, "the well-behaved host was served all along"
            assert node.gateway.errors["malformed"] >= malformed > FRAMES // 2
            assert memory[-1] - memory[0] < 24 << 20, f"memory grows: {memory}"
            assert_sound(node)


async def test_a_frame_over_the_limit_costs_its_sender_the_connection(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with trio.fail_after(20):
        async with running(config) as node, good_client(node, config) as client:
            for size in (MAX_MESSAGE + 1, 8 * MAX_MESSAGE):
                async with raw_host(node.gateway.endpoint) as raw:
                    assert isinstance(await raw.ask(m.Ping()), m.ErrorReply)
                    before = node.gateway.messages
                    await raw.send(bytes(size))
                    await trio.sleep(0.1)
                    assert node.gateway.messages == before, "it never came up"
            await store_and_load(client, 10)
            assert_sound(node)


async def test_bytes_that_are_not_zeromq_are_survived(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rng = random.Random(5)
    with trio.fail_after(20):
        async with running(config) as node, good_client(node, config) as client:
            address = ("127.0.0.1", int(node.gateway.endpoint.rpartition(":")[2]))
            for number in range(100):
                with stdlib_socket.create_connection(address) as junk_socket:
                    start = rng.choice(
                        [b"", b"\x01\x00", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n\r\n"]
                    )
                    junk_socket.sendall(start + rng.randbytes(rng.randrange(2000)))
                if number % 10 == 0:
                    await trio.sleep(0.01)
            await store_and_load(client, 10)
            assert_sound(node)


async def test_mutated_frames_at_the_admin_socket_are_errors(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    messages: list[m.Request] = [
        m.Explain(space="s", tokens=tokens(1)),
        m.Stats(),
        m.Ping(),
        m.EpochBump(space="s"),
    ]
    frames = [m.encode(message) for message in messages]
    with trio.fail_after(30):
        async with running(config) as node, good_client(node, config) as client:
            async with raw_host(f"ipc://{config.node.run_path / 'admin.sock'}") as raw:
                for parts in mutants(frames, 1500, 11):
                    is_bad = len(parts) == 1 and is_malformed(parts, m.decode_admin)
                    await raw.send(*parts)
                    reply = m.decode_reply((await raw.socket.recv())[-1])
                    assert not is_bad or (isinstance(reply, m.ErrorReply) and reply.code == "malformed")
            assert_sound(node)
            client_reply = await client.stats()
            assert client_reply["agents"]


# --- well-formed, and still nasty ------------------------------------------------------------------------------------


class Visit:
    """One hostile session with its fabric link, and a prompt of four blocks stored by somebody else."""

    PROMPT = tokens(1, 2, 3, 4)

    def __init__(self, node: Node, raw: RawHost, link: Endpoint, hello: m.HelloReply) -> None:
        self.node = node
        self.raw = raw
        self.link = link
        self.hello = hello

    async def code(self, request: m.Request) -> str:
        """The code of the refusal, or the type of the answer."""
        reply = await self.raw.ask(request)
        return reply.code if isinstance(reply, m.ErrorReply) else type(reply).__name__

    async def look_up(self, name: str = "r", prompt: bytes = PROMPT, space: str = "s") -> m.LookupReply:
        reply = await self.raw.ask(m.Lookup(space=space, request=name, tokens=prompt))
        assert isinstance(reply, m.LookupReply), reply
        return reply

    async def load(self, **fields: Any) -> m.LoadReply:
        reply = await self.raw.ask(m.Load(**{"request": "r", "first": 0, "count": 1, **fields}))
        assert isinstance(reply, m.LoadReply), reply
        return reply

    async def reserve(self, prompt: bytes, name: str = "w", space: str = "s") -> list[m.Reservation]:
        count = len(prompt) // (4 * BLOCK_TOKENS)
        reply = await self.raw.ask(m.Reserve(space=space, request=name, first=0, count=count, tokens=prompt))
        assert isinstance(reply, m.ReserveReply), reply
        return reply.blocks

    async def commit(self, blocks: list[m.CommitBlock], name: str = "w") -> list[str]:
        reply = await self.raw.ask(m.Commit(request=name, blocks=blocks))
        assert isinstance(reply, m.CommitReply), reply
        return reply.statuses

    async def write(self, reserved: list[m.Reservation], *blocks: int) -> list[m.CommitBlock]:
        return await write_reserved(self.link, reserved, [payload(b) for b in blocks], PARTS)


@asynccontextmanager
async def visit(tmp_path: Path, **tables: Any) -> AsyncIterator[Visit]:
    """The visitor is host-a. Whatever it does, host-b is served afterwards and the node is sound."""
    config = config_of(tmp_path, **{**two_spaces(), **tables})
    with trio.fail_after(30):
        async with running(config) as node, good_client(node, config) as client:
            stored = await client.store("s", "w", Visit.PROMPT, 0, [payload(i) for i in (1, 2, 3, 4)])
            assert stored == ["stored"] * 4
            async with raw_host(node.gateway.endpoint) as raw:
                hello = await raw.hello(config, "host-a")
                link = await link_of(hello)
                assert isinstance(hello, m.HelloReply)
                yield Visit(node, raw, link, hello)
                await link.aclose()
            await store_and_load(client, 100)
            assert_sound(node)


async def test_numbers_at_their_limits_are_answered(tmp_path: Path) -> None:
    last = 2**31 - 1
    async with visit(tmp_path) as v:
        assert (await v.look_up()).matched_blocks == 4
        for first, count in [(0, 4096), (4, 1), (last, 1), (last, 4096)]:
            reply = await v.load(first=first, count=count)
            assert [b.status for b in reply.blocks] == ["ok"] * max(0, 4 - first) + ["miss"] * (
                count - max(0, 4 - first)
            )
        assert await v.code(m.Reserve(space="s", request="r", first=last, count=4096)) == "malformed"
        assert (
            await v.code(m.Reserve(space="s", request="d", first=last, count=1, digests=[bytes(8)]))
            == "malformed"
        )
        assert await v.code(m.Release(leases=[2**63 - 1, 0, 4095, *range(4000)])) == "Ok"
        for hint in (
            m.Hint(request="r", kind="pause", expected_ms=last),
            m.Hint(
                request="r", kind="decode", step=last, touched=[last, 0, 0], ranked=[3] * 256, need_ms=last
            ),
            m.Hint(request="nobody", kind="decode", group=last),
        ):
            assert await v.code(hint) == "Ok"
        assert await v.code(m.Lookup(space="s", request="r" * 256, tokens=b"")) == "LookupReply"


async def test_a_shard_or_group_or_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        await v.look_up()
        prompt = Visit.PROMPT
        for request in (
            m.Lookup(space="s", request="r", tokens=prompt, shard=1, intent="probe"),
            m.Lookup(space="s", request="r", tokens=prompt, shard=2**31 - 1),
            m.Explain(space="s", tokens=prompt, shard=1),
            m.Load(request="r", first=0, count=1, shard=1),
            m.Reserve(space="s", request="r", first=0, count=1, shard=7),
            m.Hint(space="s", request="new", kind="arrival", tokens=prompt, shard=1),
            m.Hint(request="r", kind="decode", group=4, touched=[0]),
            m.Hint(request="r", kind="decode", group=2**31 - 1, ranked=[0]),
            m.Load(request="r", first=0, count=1, parts=(0, 5)),
            m.Load(request="r", first=0, count=1, parts=(2, 2)),
            m.Load(request="r", first=0, count=1, parts=(3, 1)),
        ):
            assert await v.code(request) == "malformed", request


async def test_tokens_are_whole_blocks_or_what_is_over_does_not_count(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        for extra in (1, 3, 63):
            assert (await v.look_up(f"r{extra}", Visit.PROMPT + bytes(extra))).matched_blocks == 4
        assert (await v.look_up("short", Visit.PROMPT[:63])).matched_blocks == 0
        reserve = m.Reserve(space="s", request="w", first=0, count=1, tokens=bytes(63))
        assert await v.code(reserve) == "malformed"
        assert await v.code(m.Explain(space="s", tokens=bytes(63))) == "ExplainReply"


async def test_a_request_speaks_of_tokens_or_digests_and_of_one_space(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        both: dict[str, Any] = {"tokens": Visit.PROMPT, "digests": [bytes(8)]}
        assert await v.code(m.Lookup(space="s", request="x", **both)) == "malformed"
        assert await v.code(m.Lookup(space="s", request="x")) == "malformed"
        assert await v.code(m.Reserve(space="s", request="x", first=0, count=1, **both)) == "malformed"
        assert await v.code(m.Reserve(space="s", request="x", first=0, count=1)) == "malformed"
        await v.look_up("r")
        assert await v.code(m.Lookup(space="s2", request="r", tokens=Visit.PROMPT)) == "malformed"
        assert await v.code(m.Reserve(space="s2", request="r", first=0, count=1)) == "malformed"
        assert await v.code(m.Lookup(space="nowhere", request="q", tokens=b"")) == "unknown_space"


async def test_another_hosts_leases_and_reservations_are_out_of_reach(tmp_path: Path) -> None:
    async with visit(tmp_path) as v, raw_host(v.node.gateway.endpoint) as other:
        hello = await other.hello(v.node.config, "host-b")
        other_link = await link_of(hello)
        await other.ask(m.Lookup(space="s", request="r", tokens=Visit.PROMPT))
        theirs = await other.ask(m.Load(request="r", first=0, count=4))
        room = await other.ask(m.Reserve(space="s", request="w", first=0, count=1, tokens=tokens(50)))
        assert isinstance(theirs, m.LoadReply)
        assert isinstance(room, m.ReserveReply)
        released = await v.raw.ask(m.Release(leases=[grant.lease for grant in theirs.blocks]))
        assert isinstance(released, m.Ok)
        assert released.count == 0
        assert v.node.staging.slabs[0].pool.stats().leases == 4
        await v.look_up()
        await v.reserve(tokens(60))
        stolen = [m.CommitBlock(reservation=one.reservation, crcs=[0] * 4) for one in room.blocks]
        assert await v.commit(stolen) == ["unknown"]
        blocks = await write_reserved(other_link, room.blocks, [payload(50)], PARTS)
        mine = await other.ask(m.Commit(request="w", blocks=blocks))
        assert isinstance(mine, m.CommitReply)
        assert mine.statuses == ["stored"], "the thief changed nothing"
        await other_link.aclose()


async def test_a_commit_of_nonsense_stores_nothing(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        reserved = await v.reserve(tokens(10, 11))
        good = await v.write(reserved, 10, 11)
        assert await v.code(m.Commit(request="no such", blocks=good)) == "unknown_request"
        nonsense = [
            m.CommitBlock(reservation=2**63 - 1, crcs=[0]),
            m.CommitBlock(reservation=0, crcs=[0] * 128),
        ]
        assert await v.commit(nonsense) == ["unknown", "unknown"]
        bad = [m.CommitBlock(reservation=good[0].reservation, crcs=good[0].crcs[:3])]
        assert await v.commit(bad) == ["checksum"], "one CRC a part"
        assert await v.commit(good) == ["unknown", "orphan"], "a reservation is used once"
        assert (await v.look_up("x", tokens(10, 11))).matched_blocks == 0


async def test_a_reservation_committed_twice_in_one_message_counts_once(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        [block] = await v.write(await v.reserve(tokens(10)), 10)
        assert await v.commit([block, block, block]) == ["stored", "unknown", "unknown"]
        reserved = await v.reserve(tokens(10, 11, 12))
        assert reserved[0].status == "exists"
        first, second = await v.write(reserved[1:], 11, 12)
        assert await v.commit([second, first, second]) == ["orphan", "stored", "unknown"], (
            "a child before its parent"
        )
        assert (await v.look_up("x", tokens(10, 11, 12))).matched_blocks == 2


async def test_a_request_id_stands_for_one_prompt_as_long_as_it_is_open(tmp_path: Path) -> None:
    """Loads name blocks by position: two prompts under one id would serve each other's blocks."""
    async with visit(tmp_path) as v:
        blocks = await v.write(await v.reserve(tokens(10, 11)), 10, 11)
        other = tokens(10, 21, 22)
        for request in (
            m.Lookup(space="s", request="w", tokens=other),
            m.Hint(space="s", request="w", kind="arrival", tokens=other),
            m.Reserve(space="s", request="w", first=1, count=1, tokens=other),
            m.Lookup(space="s", request="w", digests=[bytes(8)]),
        ):
            assert await v.code(request) == "malformed"
        assert (await v.look_up("w", tokens(10))).matched_blocks == 0, "a shorter form of it"
        assert await v.code(m.Lookup(space="s", request="w", tokens=other)) == "malformed", (
            "is not forgotten for that"
        )
        assert await v.commit(blocks) == ["stored", "stored"]
        assert (await v.look_up("w", tokens(10, 11, 12))).matched_blocks == 2, "a longer one"
        assert (await v.look_up("x", other)).matched_blocks == 1
        await v.raw.ask(m.Cancel(request="w"))
        assert (await v.look_up("w", other)).matched_blocks == 1


async def test_reservations_committed_under_another_request_are_stored_as_what_they_were_made_for(
    tmp_path: Path,
) -> None:
    async with visit(tmp_path) as v:
        blocks = await v.write(await v.reserve(tokens(10, 11), "w1"), 10, 11)
        await v.reserve(tokens(20, 21), "w2", "s2")
        statuses = await v.commit(blocks, "w2")
        assert statuses in (["stored", "stored"], ["unknown", "unknown"])
        matched = 2 if statuses[0] == "stored" else 0
        assert (await v.look_up("x", tokens(10, 11))).matched_blocks == matched
        for name, prompt, space in (
            ("y", tokens(20, 21), "s"),
            ("z", tokens(20, 21), "s2"),
            ("a", tokens(10, 11), "s2"),
        ):
            assert (await v.look_up(name, prompt, space)).matched_blocks == 0
        assert [b.status for b in (await v.load(request="w2", first=0, count=2)).blocks] == ["miss", "miss"]


async def test_a_push_to_a_landing_that_is_not_there_ends_by_its_deadline_and_holds_nothing(
    tmp_path: Path,
) -> None:
    async with visit(tmp_path) as v:
        await v.look_up()
        region = v.link.landing(4 * PAYLOAD)
        for landing in (
            m.Landing(region=99, offsets=[0]),
            m.Landing(region=region.region_id, offsets=[4 * PAYLOAD - 1]),
            m.Landing(region=region.region_id, offsets=[2**63 - 1]),
        ):
            [grant] = (await v.load(landing=landing, deadline_ms=200)).blocks
            assert grant.status == "error"
            assert not grant.lease
        assert (
            await v.code(m.Load(request="r", first=0, count=2, landing=m.Landing(region=1, offsets=[0])))
            == "malformed"
        )
        pool = v.node.staging.slabs[0].pool.stats()
        assert (pool.leases, pool.transfers) == (0, 0)


async def test_the_fabric_gives_and_takes_only_what_was_granted(tmp_path: Path) -> None:
    """Reads beyond the slot, under another's or an ended lease, writes beyond the cell: refused, the link stays."""
    async with visit(tmp_path) as v:
        await v.look_up()
        [grant] = (await v.load()).blocks
        [room] = await v.reserve(tokens(10))
        here = memoryview(bytearray(grant.length))
        deadline = trio.current_time() + 10

        async def is_refused(
            op: str, region: int, offset: int, lease: int, length: int = grant.length
        ) -> bool:
            piece = Piece(region, offset, lease, here[:length])
            try:
                await (v.link.pull([piece], deadline) if op == "pull" else v.link.store([piece], deadline))
            except RemoteAccessError:
                return True
            return False

        assert await is_refused("pull", grant.region, grant.offset + 4096, grant.lease)
        assert await is_refused("pull", grant.region, 2**63, grant.lease)
        assert await is_refused("pull", grant.region, grant.offset, grant.lease + 4096)
        assert await is_refused("pull", grant.region, grant.offset, 0)
        assert await is_refused("pull", room.region, room.offset, room.reservation)
        assert await is_refused("store", grant.region, grant.offset, grant.lease)
        assert await is_refused("store", room.region, room.offset + 4096, room.reservation)
        assert await is_refused("store", room.region, room.offset, room.reservation + 1)
        assert not await is_refused("pull", grant.region, grant.offset, grant.lease)
        await v.raw.ask(m.Release(leases=[grant.lease]))
        assert await is_refused("pull", grant.region, grant.offset, grant.lease)
        assert not await is_refused("store", room.region, room.offset, room.reservation)


async def test_a_host_that_is_not_in_the_topology_or_says_another_protocol_is_refused(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        claims = [m.claim_of("s", v.node.config.to_space("s"))]

        async def hello(**fields: Any) -> str:
            given = {"host": "host-a", "protocol": 1, "spaces": claims, "fabrics": ["tcp"], **fields}
            async with raw_host(v.node.gateway.endpoint) as raw:
                reply = await raw.ask(m.Hello(**given))
                return reply.code if isinstance(reply, m.ErrorReply) else "ok"

        assert await hello(host="mallory") == "unknown_host"
        assert await hello(protocol=2) == "protocol"
        assert await hello(fabrics=["carrier-pigeon"]) == "no_fabric"
        assert await hello(spaces=[msgspec.structs.replace(claims[0], name="nowhere")]) == "unknown_space"
        assert await hello(spaces=claims * 64) == "ok"


# --- what a host may cost the node -----------------------------------------------------------------------------------


async def test_an_explanation_is_bounded_however_long_the_prompt(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        reply = await v.raw.ask(m.Explain(space="s", tokens=Visit.PROMPT + bytes(MAX_MESSAGE // 2)))
        assert isinstance(reply, m.ExplainReply)
        assert len(reply.blocks) == m.MAX_BLOCKS
        assert [r.reason for r in reply.blocks[:5]] == ["present"] * 4 + ["never_stored"]


async def test_the_prompts_a_client_makes_the_node_remember_are_bounded(tmp_path: Path) -> None:
    gateway = {"bind": "tcp://127.0.0.1:0", "session_timeout_s": 5.0, "max_prompt_bytes_per_client": 100_000}
    async with visit(tmp_path, gateway=gateway) as v:
        big, half = bytes(100_000), bytes(50_000)
        await v.look_up("a", half)
        await v.look_up("a", half)
        await v.look_up("b", half)
        assert await v.code(m.Lookup(space="s", request="c", tokens=half)) == "busy"
        assert await v.code(m.Lookup(space="s", request="c", digests=[bytes(8)] * 200)) == "busy"
        assert await v.code(m.Cancel(request="c")) == "Ok", "a request that was refused left no scope"
        await v.raw.ask(m.Cancel(request="a"))
        await v.look_up("c", half)
        assert await v.code(m.Lookup(space="s", request="c", tokens=big)) == "busy"
        assert await v.code(m.Lookup(space="s", request="d", tokens=big, intent="probe")) == "LookupReply"


async def test_a_host_that_never_reads_its_answers_is_cut_off_and_stalls_nobody(tmp_path: Path) -> None:
    async with visit(tmp_path) as v, raw_host(v.node.gateway.endpoint, recv_hwm=1) as deaf:
        await link_of(await deaf.hello(v.node.config, "host-b"))
        await deaf.ask(m.Lookup(space="s", request="r", tokens=Visit.PROMPT))
        question = m.encode(m.Load(id=5, request="r", first=4, count=512))
        before = rss_bytes()
        with trio.fail_after(20):
            while not v.node.gateway.hosts.ended.get("slow_reader"):
                await deaf.send(question)
        assert rss_bytes() - before < 64 << 20
        await v.look_up()


async def test_memory_a_host_cannot_have_is_a_refusal_and_not_a_crash(tmp_path: Path) -> None:
    greedy = small_host("greedy", inbound_bytes=1 << 50)
    async with (
        visit(tmp_path, host=[*two_spaces()["host"], greedy]) as v,
        raw_host(v.node.gateway.endpoint) as raw,
    ):
        reply = await raw.hello(v.node.config, "greedy")
        assert isinstance(reply, m.ErrorReply)
        assert reply.code == "no_memory"


async def test_a_session_that_ended_counts_while_its_host_may_still_map_the_memory(tmp_path: Path) -> None:
    """Else one host could pile up regions: hello, map, hello again ..."""
    gateway = {"bind": "tcp://127.0.0.1:0", "session_timeout_s": 5.0, "max_clients": 6}
    async with visit(tmp_path, gateway=gateway) as v, raw_host(v.node.gateway.endpoint) as raw:
        channels = []
        for _ in range(4):
            reply = await raw.hello(v.node.config, "host-a", ["shm"])
            assert isinstance(reply, m.HelloReply)
            channels.append(await map_and_keep(reply))
        refused = await raw.hello(v.node.config, "host-a", ["shm"])
        assert isinstance(refused, m.ErrorReply)
        assert refused.code == "busy"
        for channel in channels:
            channel.close()
        await trio.sleep(0.1)
        again = await raw.hello(v.node.config, "host-a", ["shm"])
        assert isinstance(again, m.HelloReply), again


async def map_and_keep(reply: m.HelloReply) -> Channel:
    """Open a shm link as a host does that will not let go of what it maps when told to."""
    channel = await dial(str(reply.fabric_address["path"]), "here")
    await channel.send(encode_hello(b"DPS1", 0, reply.session, reply.token))
    for _ in range(1 + len(reply.regions)):
        _, fd = await channel.receive()
        if fd >= 0:
            os.close(fd)
    return channel


async def test_memory_a_cut_off_host_may_still_read_is_not_reused(tmp_path: Path) -> None:
    """A host that breaks the link's protocol is cut off at once, but maps the arena until its end of file."""
    async with visit(tmp_path) as v, raw_host(v.node.gateway.endpoint) as raw:
        reply = await raw.hello(v.node.config, "host-a", ["shm"])
        assert isinstance(reply, m.HelloReply)
        channel = await map_and_keep(reply)
        await raw.ask(m.Lookup(space="s", request="r", tokens=Visit.PROMPT))
        await raw.ask(m.Load(request="r", first=0, count=4))
        await channel.send(b"no landing")
        await trio.sleep(0.1)
        await raw.ask(m.Bye())
        pool = v.node.staging.slabs[0].pool
        assert (pool.stats().leases, pool.stats().quarantined) == (0, 4)
        channel.close()
        await trio.sleep(0.1)
        assert pool.stats().quarantined == 0


async def test_floods_of_hints_and_loads_leave_no_backlog(tmp_path: Path) -> None:
    async with visit(tmp_path) as v:
        await v.look_up()
        decode = m.encode(
            m.Hint(request="r", kind="decode", step=1, touched=[0, 1, 2, 3] * 1024, ranked=[3, 2] * 2048)
        )
        load = m.encode(m.Load(request="r", first=0, count=4))
        for _ in range(50):
            await v.raw.send(decode)
            await v.raw.send(load)
        await v.look_up("last")
        await trio.sleep(0.5)
        assert len(v.node.prefetch._events) == 0


async def test_a_failing_device_makes_an_epoch_bump_an_error_at_the_admin_socket(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with trio.fail_after(20):
        async with serving(FaultyNode(config)) as node, good_client(node, config) as client:
            async with raw_host(f"ipc://{config.node.run_path / 'admin.sock'}") as raw:
                node.faulty.inject(Fault(op="write", kind="error"))
                reply = await raw.ask(m.EpochBump(space="s"))
                assert isinstance(reply, m.ErrorReply)
                assert reply.code == "device"
                assert (await raw.ask(m.EpochBump(space="s"))).id
            assert node.index.spaces["s"].space.epoch == 1
            await store_and_load(client, 10)
            assert_sound(node)


async def test_a_failed_store_of_one_shard_leaves_the_others_alone(tmp_path: Path) -> None:
    """With two ranks: rank 0's block stays when rank 1 brings bad bytes for it, and a match needs both."""
    async with visit(tmp_path, space=[small_space("s"), small_space("s2", tp_size=2)]) as v:
        prompt = tokens(10, 11)

        async def store(shard: int, *, spoil: bool = False) -> list[str]:
            request = m.Reserve(space="s2", request=f"w{shard}", first=0, count=2, tokens=prompt, shard=shard)
            reply = await v.raw.ask(request)
            assert isinstance(reply, m.ReserveReply)
            if reply.blocks[0].status != "reserved":
                return [one.status for one in reply.blocks]
            blocks = await v.write(reply.blocks, 10 + 100 * shard, 11 + 100 * shard)
            for block in blocks if spoil else []:
                block.crcs[0] ^= 1
            return await v.commit(blocks, f"w{shard}")

        assert await store(0) == ["stored"] * 2
        assert await store(1, spoil=True) == ["checksum"] * 2
        assert (await v.look_up("x", prompt, "s2")).matched_blocks == 0
        assert await store(0) == ["exists"] * 2
        assert await store(1) == ["stored"] * 2
        assert (await v.look_up("x", prompt, "s2")).matched_blocks == 2
        for shard in (0, 1):
            reply = await v.load(request="x", count=2, shard=shard)
            assert [grant.status for grant in reply.blocks] == ["ok"] * 2
            assert reply.blocks[0].crcs == part_crcs((memoryview(payload(10 + 100 * shard)),), PARTS)
