"""The client protocol: every message round trips, unknown keys are ignored, limits are kept and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.identity import Geometry, LayerGroup, Space, check_same_space
from dpurt.errors import RemoteProtocolError, SpaceMismatch
from dpurt.wire import messages as m

GROUPS = (
    LayerGroup(name="full", num_layers=4, num_kv_heads=8, head_size=128, part_bytes=4096),
    LayerGroup(
        name="win",
        num_layers=2,
        num_kv_heads=1,
        head_size=64,
        part_bytes=512,
        packing="mla",
        window_tokens=128,
    ),
)
SPACE = Space(
    model="m", revision="r", kv_dtype="bf16", tenant="t", salt=b"secret", tp_size=2, pp_size=3,
    lora_name="l", lora_version="7", geometry=Geometry(block_tokens=16, groups=GROUPS, token_bytes=8),
)  # fmt: skip

REQUESTS: list[m.Request] = [
    m.Hello(id=1, host="h", protocol=1, spaces=[m.claim_of("s", SPACE, epoch=3)], fabrics=["shm", "tcp"]),
    m.Lookup(id=2, space="s", request="r", tokens=b"\1\2", intent="probe", shard=1),
    m.Lookup(id=2, space="s", request="r", digests=[b"12345678", b"x" * 64]),
    m.Hint(request="r", kind="decode", step=3, group=1, touched=[1], ranked=[4, 2], need_ms=20, shard=1),
    m.Hint(request="r", kind="arrival", space="s", tokens=b""),
    m.Hint(request="r", kind="pause", expected_ms=0, reason="tool_use"),
    m.Load(id=3, request="r", first=0, count=4096, parts=(0, 128), landing=m.Landing(region=1, offsets=[0])),
    m.Reserve(id=4, space="s", request="r", first=1, count=1, tokens=b"\0" * 8, deadline_ms=3_600_000),
    m.Commit(id=5, request="r", blocks=[m.CommitBlock(reservation=9, crcs=[0, 2**32 - 1])]),
    m.Release(leases=[1, 2**63 - 1]),
    m.Zone(id=4, space="s", region=2, slots=64, shard=1),
    m.Used(request="r", blocks=[0, 5], parts=(1, 2)),
    m.Cancel(id=6, request="r"),
    m.Zone(id=8, space="s", region=3, slots=16),
    m.Used(id=8, request="r", blocks=[1, 2], parts=(0, 1)),
    m.Delete(id=8, space="s", digests=[b"d" * 32]),
    m.Lookup(id=8, space="s", request="r", digests=[b"d" * 32], chained=False),
    m.Explain(id=7, space="s", digests=[b"12345678"], shard=2),
    m.Subscribe(id=9, space="s", cursor=b"c" * 28, max_blocks=1),
    m.Route(id=10, space="s", tokens=b"\0" * 8, intent="probe", queued_ms={"a/1": 2.5}, among=["a/1"]),
    m.Stats(id=8),
    m.Ping(),
    m.Bye(id=2**63 - 1),
]
ADMIN: list[m.Request] = [
    m.EpochBump(id=1, space="s"), m.Drain(id=2), m.Stats(id=3), m.Explain(id=4, space="s", tokens=b""), m.Ping(id=5),
    m.Route(id=6, space="s", tokens=b""), m.Record(id=7, path="/r"),
]  # fmt: skip
REPLIES: list[m.Reply] = [
    m.HelloReply(
        id=1, node="n", incarnation=2, session=3, session_timeout_ms=4, max_message_bytes=5, epochs={"s": 1},
        fabric="tcp", fabric_reason="why", fabric_address={"host": "::1", "port": 9}, token=b"t" * 32,
        regions=[m.RegionInfo(region=1, size=4096, access="write")],
    ),
    m.LookupReply(id=2, matched_blocks=3, matched_tokens=48, staging=1, nvme=2, ready_ms=1, miss="evicted"),
    m.LookupReply(id=2, matched_blocks=2, matched_tokens=32, nvme=2, present=b"\x05"),
    m.LoadReply(
        id=3, part_bytes=[1, 2],
        blocks=[
            m.Grant(status="ok", lease=1, region=2, offset=3, length=4, crcs=[5, 6], source="nvme"),
            m.Grant(status="late", reason="deadline"),
        ],
    ),
    m.ReserveReply(id=4, blocks=[m.Reservation(status="reserved", reservation=1, region=2, length=3)]),
    m.CommitReply(id=5, statuses=["stored", "checksum"]),
    m.Ok(id=6, count=7),
    m.ExplainReply(id=7, blocks=[m.Reason(block=0, reason="evicted", detail="d", age_s=1.5)]),
    m.IndexBatch(
        id=9, incarnation=1, epoch=2, cursor=b"c", is_current=True, lost=True, reason="slow_reader",
        changes=[m.IndexChange(stored=True, keys=b"k" * 16), m.IndexChange(keys=b"l" * 16)],
    ),
    m.RouteReply(
        id=10, best="a/1", prompt_tokens=9,
        candidates=[m.Candidate(host="a/1", hbm_tokens=1, cached_tokens=2, node_tokens=3, ready_ms=1.5, reason="r")],
    ),
    m.RecordReply(id=11, path="/r", lines=1, bytes=2, lost=3, is_fresh=True),
    m.StatsReply(id=8, stats={"a": {"b": 1}}),
    m.ErrorReply(id=9, code="space_mismatch", message="x", field="kv_dtype", mine="a", theirs="b"),
]  # fmt: skip


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_round_trips(message: m.Request) -> None:
    assert m.decode_request(m.encode(message)) == message


@pytest.mark.parametrize("message", ADMIN, ids=lambda message: type(message).__name__)
def test_every_admin_request_round_trips(message: m.Request) -> None:
    assert m.decode_admin(m.encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_every_reply_round_trips(message: m.Reply) -> None:
    assert m.decode_reply(m.encode(message)) == message


def test_presence_is_a_bit_a_digest_the_first_in_the_lowest() -> None:
    reply = m.LookupReply(id=1, matched_blocks=3, matched_tokens=48, present=b"\x05\x80")
    assert [i for i in range(40) if reply.is_present(i)] == [0, 2, 15]


def test_no_message_type_is_left_out_above() -> None:
    assert {type(message) for message in REQUESTS} == set(get_args(m.AnyRequest))
    assert {type(message) for message in ADMIN} == set(get_args(m.AdminRequest))
    assert {type(message) for message in REPLIES} == set(get_args(m.AnyReply))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda message: type(message).__name__)
def test_messages_are_plain_msgpack_maps_with_a_type(message: m.Request | m.Reply) -> None:
    plain = msgpack.unpackb(m.encode(message))
    assert plain["type"] == type(message).__struct_config__.tag


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_unknown_keys_are_ignored(message: m.Request) -> None:
    plain = msgpack.unpackb(m.encode(message))
    frame = msgpack.packb({**plain, "from_a_newer_version": {"a": [1]}})
    assert m.decode_request(frame) == message


def test_keys_with_their_default_may_be_left_out_and_are() -> None:
    assert msgpack.unpackb(m.encode(m.Ping())) == {"type": "ping"}
    assert m.decode_request(msgpack.packb({"type": "lookup", "space": "s", "request": "r"})) == m.Lookup(
        space="s", request="r"
    )


def lookup(**fields: Any) -> dict[str, Any]:
    return {"type": "lookup", "space": "s", "request": "r", **fields}


@pytest.mark.parametrize(
    ("plain", "path"),
    [
        (lookup(id=-1), "$.id"),
        (lookup(id=2**63), "$.id"),
        (lookup(deadline_ms=0), "$.deadline_ms"),
        (lookup(deadline_ms=3_600_001), "$.deadline_ms"),
        (lookup(request=""), "$.request"),
        (lookup(request="x" * 257), "$.request"),
        (lookup(space=7), "$.space"),
        (lookup(intent="maybe"), "$.intent"),
        (lookup(digests=[b"12345678", b"short"]), "$.digests[1]"),
        (lookup(digests=[b"x" * 65]), "$.digests[0]"),
        (lookup(tokens=b"x" * (m.MAX_TOKEN_BYTES + 1)), "$.tokens"),
        (lookup(shard=-1), "$.shard"),
        ({"type": "load", "request": "r", "first": 0, "count": 0}, "$.count"),
        ({"type": "load", "request": "r", "first": 0, "count": m.MAX_BLOCKS + 1}, "$.count"),
        ({"type": "load", "request": "r", "first": 0, "count": 1, "parts": [0, 129]}, "$.parts[1]"),
        ({"type": "load", "request": "r", "first": 0, "count": 1, "parts": [0]}, "$.parts"),
        ({"type": "reserve", "space": "s", "request": "r", "first": -1, "count": 1}, "$.first"),
        ({"type": "commit", "request": "r", "blocks": []}, "$.blocks"),
        (
            {"type": "commit", "request": "r", "blocks": [{"reservation": 1, "crcs": [2**32]}]},
            "$.blocks[0].crcs[0]",
        ),
        ({"type": "commit", "request": "r", "blocks": [{"reservation": 1, "crcs": []}]}, "$.blocks[0].crcs"),
        ({"type": "release", "leases": list(range(m.MAX_BLOCKS + 1))}, "$.leases"),
        ({"type": "hint", "request": "r", "kind": "nap"}, "$.kind"),
        ({"type": "hint", "request": "r", "kind": "decode", "ranked": [0, -1]}, "$.ranked[1]"),
        ({"type": "hello", "host": "h", "protocol": 1, "spaces": [], "fabrics": ["tcp"]}, "$.spaces"),
        ({"type": "hello", "host": "h", "protocol": 1, "spaces": [{}], "fabrics": ["tcp"]}, "$.spaces[0]"),
        ({"type": "epoch_bump", "space": "s"}, "$.type"),
    ],
    ids=str,
)
def test_a_value_beyond_its_limit_is_refused_with_its_path(plain: dict[str, Any], path: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        m.decode_request(msgpack.packb(plain))
    assert caught.value.code == "malformed"
    assert f"`{path}`" in caught.value.message


def test_a_host_cannot_send_admin_requests_nor_an_operator_host_requests() -> None:
    with pytest.raises(RemoteProtocolError, match="epoch_bump"):
        m.decode_request(m.encode(m.EpochBump(space="s")))
    with pytest.raises(RemoteProtocolError, match="lookup"):
        m.decode_admin(m.encode(m.Lookup(space="s", request="r")))


def refusal(decode: Callable[[bytes], object], frame: bytes) -> str | None:
    try:
        decode(frame)
    except RemoteProtocolError as error:
        return error.code
    return None


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_bytes_are_malformed_or_a_message(frame: bytes) -> None:
    for decode in (m.decode_request, m.decode_admin, m.decode_reply):
        assert refusal(decode, frame) in (None, "malformed")
    assert m.request_id(frame) >= 0


def test_the_id_of_a_malformed_message_is_found_where_there_is_one() -> None:
    assert m.request_id(msgpack.packb({"type": "nonsense", "id": 7})) == 7
    assert m.request_id(msgpack.packb({"type": "nonsense"})) == 0
    assert m.request_id(b"\xc1") == 0
    assert m.request_id(msgpack.packb(b"x" * 10)) == 0
    assert m.request_id(b"\x91" * 100_000) == 0


def test_a_claim_says_all_of_a_space_but_its_salt_and_epoch() -> None:
    claim = m.claim_of("s", SPACE.with_epoch(5))
    check_same_space(SPACE, claim.to_space(), claim.fingerprint)
    assert b"secret" not in m.encode(claim)
    assert claim.epoch is None


def test_a_claim_with_another_salt_differs_in_the_salt_alone() -> None:
    other = m.claim_of("s", Space(**{f: getattr(SPACE, f) for f in SPACE.__slots__} | {"salt": b"other"}))
    with pytest.raises(SpaceMismatch) as caught:
        check_same_space(SPACE, other.to_space(), other.fingerprint)
    assert caught.value.field == "salt"
    assert "other" not in str(caught.value)
