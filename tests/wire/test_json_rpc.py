"""JSON-RPC framing: answers find their calls in any order, and no bytes a target can send hang or crash us."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.errors import HIDDEN, LocalProtocolError, RemoteProtocolError, RpcError
from dpurt.wire.json_rpc import MAX_REQUEST_BYTES, Answer, JsonRpcConnection


def line(**fields: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}, separators=(",", ":")).encode() + b"\n"


def waiting(*methods: str) -> JsonRpcConnection:
    """A connection with these calls in flight, ids from 1."""
    connection = JsonRpcConnection()
    for method in methods:
        connection.request(method)
    return connection


def refused(connection: JsonRpcConnection, data: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive(data)
    return caught.value


# --- requests ---


def test_request_is_one_json_object_with_a_fresh_id() -> None:
    connection = JsonRpcConnection()
    first, data = connection.request("bdev_get_bdevs", {"name": "M0"})
    second, bare = connection.request("spdk_get_version")
    assert json.loads(data) == {
        "jsonrpc": "2.0", "method": "bdev_get_bdevs", "id": first, "params": {"name": "M0"},
    }  # fmt: skip
    assert json.loads(bare) == {"jsonrpc": "2.0", "method": "spdk_get_version", "id": second}
    assert connection.in_flight == {first: "bdev_get_bdevs", second: "spdk_get_version"}


def test_request_over_the_targets_limit_is_refused_before_sending() -> None:
    connection = JsonRpcConnection()
    envelope = len(connection.request("m", {"x": ""})[1])
    assert len(connection.request("m", {"x": "a" * (MAX_REQUEST_BYTES - envelope)})[1]) == MAX_REQUEST_BYTES
    with pytest.raises(LocalProtocolError, match="request_too_large") as caught:
        connection.request("m", {"x": "a" * (MAX_REQUEST_BYTES - envelope + 1)})
    assert "262145 bytes, a target takes 262144" in str(caught.value)
    assert len(connection.in_flight) == 2


@pytest.mark.parametrize("value", [object(), {1j: 2}, 1 << 20_000], ids=["object", "key", "huge"])
def test_parameters_that_are_not_json_are_refused(value: object) -> None:
    connection = JsonRpcConnection()
    with pytest.raises(LocalProtocolError, match="bad_params"):
        connection.request("m", {"x": value})
    assert connection.in_flight == {}


# --- answers ---


def test_answers_in_any_order_and_any_pieces_find_their_calls() -> None:
    connection = waiting("a", "b", "c")
    stream = line(id=3, result=[1]) + line(id=1, result=None) + line(id=2, result={"x": "é"})
    answers = [answer for at in range(len(stream)) for answer in connection.receive(stream[at : at + 1])]
    assert answers == [Answer(3, "c", [1]), Answer(1, "a", None), Answer(2, "b", {"x": "é"})]
    assert connection.in_flight == {}
    connection.receive_end()


def test_error_answer_is_structured_and_shows_no_secret() -> None:
    connection = JsonRpcConnection()
    secret = {"name": "k", "key": "0011", "nested": [{"psk": "2233"}], "key_name": "shown"}
    connection.request("accel_crypto_key_create", secret)
    (answer,) = connection.receive(line(id=1, error={"code": -17, "message": "key 0011 exists"}))
    error = answer.error
    assert isinstance(error, RpcError)
    assert (error.method, error.code, error.name) == ("accel_crypto_key_create", -17, "EEXIST")
    assert error.params == {"name": "k", "key": HIDDEN, "nested": [{"psk": HIDDEN}], "key_name": "shown"}
    assert "0011" not in str(error)
    assert "2233" not in repr(error) + str(error)
    assert error.message == f"key {HIDDEN} exists"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (-19, "ENODEV"),
        (-110, "ETIMEDOUT"),
        (-32601, "no such method"),
        (-32602, "invalid parameters"),
        (7, ""),
    ],
)
def test_codes_are_named(code: int, name: str) -> None:
    assert RpcError("m", code, "text").name == name


def test_late_answer_of_a_forgotten_call_is_dropped() -> None:
    connection = waiting("slow", "quick")
    connection.forget(1)
    connection.forget(1)
    answers = connection.receive(line(id=1, error={"code": -110, "message": "late"}) + line(id=2, result=2))
    assert answers == [Answer(2, "quick", 2)]
    assert connection.late_answers == 1


def test_numbers_of_128_bits_stay_exact() -> None:
    assert waiting("m").receive(line(id=1, result=2**128 - 1)) == [Answer(1, "m", 2**128 - 1)]


# --- answers that make the connection unusable ---


def test_unterminated_string_is_an_error_that_names_call_and_object() -> None:
    connection = waiting("spdk_get_version", "bdev_get_bdevs")
    bad = b'{"jsonrpc":"2.0","id":2,"result":[{"name":"crypto0","driver_specific":{"crypto":{"key_name":"\xf0zz}}}]}\n'
    error = refused(connection, bad)
    assert error.code == "invalid_json"
    assert "answer 2 to bdev_get_bdevs, last object named 'crypto0'" in str(error)
    assert "zz" not in str(error)
    assert refused(connection, line(id=1, result=1)) is error  # no way back


def test_newline_inside_a_broken_answer_is_an_error_not_a_wait() -> None:
    assert refused(waiting("m"), b'{"jsonrpc":"2.0","id":1,"result":"ab\n').code == "invalid_json"


def test_error_without_id_names_no_call_and_ends_the_connection() -> None:
    bad = line(id=None, error={"code": -32600, "message": "Invalid request"})
    error = refused(waiting("a", "b"), bad)
    assert error.code == "unattributed_error"
    assert "Invalid request (-32600)" in str(error)


@pytest.mark.parametrize("call_id", [0, -1, 2, 10**30, "1", None])
def test_answer_to_a_call_never_made_ends_the_connection(call_id: object) -> None:
    assert refused(waiting("m"), line(id=call_id, result=1)).code == "unknown_id"


@pytest.mark.parametrize(
    "bad",
    [
        b"[]\n",
        b"null\n",
        b'[{"jsonrpc":"2.0","id":1,"result":1}]\n',
        b'{"jsonrpc":"2.0","id":1}\n',
        b'{"jsonrpc":"1.0","id":1,"result":1}\n',
        b'{"jsonrpc":"2.0","id":1,"error":"x"}\n',
        b'{"jsonrpc":"2.0","id":true,"result":1}\n',
        b'{"jsonrpc":"2.0","id":1,"error":null}\n',
    ],
)
def test_json_that_is_no_answer_ends_the_connection(bad: bytes) -> None:
    assert refused(waiting("m"), bad).code == "invalid_answer"


@pytest.mark.parametrize(
    "result", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"1e999", b'"\xff"', b"nul", b"1}{"]
)
def test_result_that_cannot_be_decoded_ends_the_connection(result: bytes) -> None:
    error = refused(waiting("m"), b'{"jsonrpc":"2.0","id":1,"result":' + result + b"}\n")
    assert error.code in {"invalid_json", "invalid_answer"}


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_answer_over_the_cap_is_refused_with_or_without_its_end(end: bytes) -> None:
    connection = JsonRpcConnection(max_answer_bytes=100)
    connection.request("m")
    assert connection.receive(b"x" * 100) == []
    assert refused(connection, b"x" + end).code == "answer_too_large"


def test_close_inside_an_answer_is_told_from_a_clean_close() -> None:
    connection = waiting("m")
    connection.receive_end()
    connection.receive(b'{"jsonrpc":"2.0","id":1,')
    with pytest.raises(RemoteProtocolError, match=r"cut_short.*answer 1 to m"):
        connection.receive_end()


# --- fuzz ---

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENVELOPE = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "1.0", 2]),
        "id": st.integers(-1, 5) | JSON,
        "result": JSON,
        "error": st.fixed_dictionaries({"code": st.integers(), "message": st.text(max_size=8)}) | JSON,
    },
).map(lambda fields: json.dumps(fields).encode() + b"\n")


def feed(stream: bytes, cut: random.Random) -> None:
    """All of the stream in random pieces: only answers or RemoteProtocolError may come of it."""
    connection = waiting("a", "b", "c", "d")
    seen: set[int] = set()
    try:
        while stream:
            size = cut.randint(1, len(stream))
            answers, stream = connection.receive(stream[:size]), stream[size:]
            assert seen.isdisjoint(answer.id for answer in answers)
            seen |= {answer.id for answer in answers}
        connection.receive_end()
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError) as again:  # it stays unusable, or was at its end
            connection.receive(b"\xff\n")
        assert len(str(again.value)) < 1000


@settings(max_examples=300, deadline=None)
@given(st.lists(ENVELOPE | st.binary(max_size=40), max_size=6), st.randoms(use_true_random=False))
def test_any_answers_are_answers_or_a_protocol_error(pieces: list[bytes], cut: random.Random) -> None:
    feed(b"".join(pieces), cut)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(JSON, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    st.randoms(use_true_random=False),
)
def test_good_answers_with_flipped_bytes_never_hang_or_crash(
    results: list[object], flips: list[tuple[int, int]], cut: random.Random
) -> None:
    stream = bytearray(b"".join(line(id=number + 1, result=result) for number, result in enumerate(results)))
    for at, value in flips:
        stream[at % len(stream)] = value
    feed(bytes(stream), cut)


@given(st.permutations([1, 2, 3, 4]), st.lists(JSON, min_size=4, max_size=4))
def test_every_call_gets_its_own_result_whatever_the_order(order: list[int], results: list[object]) -> None:
    connection = waiting("a", "b", "c", "d")
    stream = b"".join(line(id=number, result=results[number - 1]) for number in order)
    answers = connection.receive(stream)
    assert [answer.id for answer in answers] == order
    assert all(answer.result == results[answer.id - 1] for answer in answers)
