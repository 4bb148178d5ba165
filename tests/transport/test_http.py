"""The small HTTP server and client: what is asked gets there, and what is no request, or too large, is answered so."""

from __future__ import annotations

import os
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from dpurt.errors import NodeUnavailable, RemoteProtocolError
from dpurt.transport import http

SMALL = 100


def echo(request: http.HttpRequest) -> http.HttpAnswer:
    if request.path == "/none":
        return http.HttpAnswer(404, b"{}")
    return http.HttpAnswer(200, f"{request.method} {request.path} ".encode() + request.body, "text/plain")


async def test_a_query_is_sent() -> None:
    asked = b""

    async def note(stream: trio.SocketStream) -> None:
        nonlocal asked
        asked = bytes(await stream.receive_some())
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, note, 0)
        assert await http.get(f"http://127.0.0.1:{http.port_of(listeners)}/a?c=d") == b"ok"
        nursery.cancel_scope.cancel()
    assert asked.startswith(b"GET /a?c=d HTTP/1.1")


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    listeners = await http.listen("127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(http.serve, listeners, echo, SMALL)
        yield http.port_of(listeners)
        nursery.cancel_scope.cancel()


async def said(port: int, *pieces: bytes) -> bytes:
    """All that comes back for these bytes."""
    answer = b""
    with trio.fail_after(10):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for piece in pieces:
                await stream.send_all(piece)
                await trio.lowlevel.checkpoint()
            async for chunk in stream:
                answer += chunk
    return answer


async def test_get_has_the_body_or_says_why_not() -> None:
    async with server() as port:
        assert await http.get(f"http://127.0.0.1:{port}/a/b?c=d") == b"GET /a/b "
        with pytest.raises(NodeUnavailable, match="404"):
            await http.get(f"http://127.0.0.1:{port}/none")
        with pytest.raises(RemoteProtocolError, match="more than 3 bytes"):
            await http.get(f"http://127.0.0.1:{port}/a", max_bytes=3)
    with pytest.raises(NodeUnavailable):
        await http.get(f"http://127.0.0.1:{port}/a")


@pytest.mark.parametrize("path", ["/a b", "/\u00e9", ":99999/"])
async def test_what_cannot_be_asked_for_cannot_be_had(path: str) -> None:
    async with server() as port:
        with pytest.raises(NodeUnavailable):
            await http.get(f"http://127.0.0.1{path}" if path[0] == ":" else f"http://127.0.0.1:{port}{path}")


async def test_a_connection_stays_open_for_the_next_request() -> None:
    async with server() as port:
        answer = await said(
            port,
            b"POST /one HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab", b"cPOST /two HTTP/1.1\r\nHost: x\r\n",
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxy\r\n0\r\n\r\n",
        )  # fmt: skip
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"POST /one abc" in answer
    assert answer.endswith(b"POST /two xy")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # a Host is asked for by the protocol
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, b"413"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * http.MAX_HEAD_BYTES, b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n", b"413"),
        (b"GET //[ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, b"413"),
    ],
)
async def test_what_is_no_request_or_too_large_is_refused(request_bytes: bytes, status: bytes) -> None:
    async with server() as port:
        assert (await said(port, request_bytes)).startswith(b"HTTP/1.1 " + status)
        assert await http.get(f"http://127.0.0.1:{port}/still") == b"GET /still "


async def test_one_connection_too_many_ends_the_one_whose_last_request_is_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    one = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    async with (
        server() as port,
        await trio.open_tcp_stream("127.0.0.1", port) as busy,
        await trio.open_tcp_stream("127.0.0.1", port) as quiet,
    ):
        for stream in (busy, quiet, busy):
            await stream.send_all(one)
            assert await stream.receive_some()
        with trio.fail_after(5):
            assert await http.get(f"http://127.0.0.1:{port}/a") == b"GET /a "
            assert not await quiet.receive_some()
            await busy.send_all(one)
            assert await busy.receive_some()


async def test_who_asks_for_a_head_gets_no_body() -> None:
    async with server() as port:
        answer = await said(port, b"HEAD /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Content-Length: 8\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_what_follows_a_head_is_answered_in_full() -> None:
    async with server() as port:
        answer = await said(port, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + b"nonsense\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.endswith(b"}")


async def test_a_question_that_is_here_is_answered_in_one_turn_of_the_loop() -> None:
    """The first turn finds it and answers; the answer is here in the next, or the one after. Over a socket that delivers at once."""
    body = b"x" * SMALL
    ours, theirs = trio.socket.socketpair()
    async with trio.open_nursery() as nursery, trio.SocketStream(ours) as stream:
        nursery.start_soon(http._converse, trio.SocketStream(theirs), echo, SMALL, lambda: None)
        for _ in range(30):  # tasks of one turn run in any order
            await trio.testing.wait_all_tasks_blocked(0.01)
            await stream.send_all(b"POST /q HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % SMALL)
            os.write(stream.socket.fileno(), body)
            turns = 0
            while not select.select([stream.socket], [], [], 0)[0]:
                await trio.lowlevel.checkpoint()
                turns += 1
            assert turns <= 2
            assert (await stream.receive_some()).endswith(body)
        nursery.cancel_scope.cancel()
    theirs.close()


async def test_a_client_of_many_small_chunks_lets_others_have_their_turn() -> None:
    async with server() as port:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:
            head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            await stream.send_all(head + b"1\r\nx\r\n" * SMALL + b"0\r\n\r\n")
            nursery.start_soon(others)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            nursery.cancel_scope.cancel()
        assert turns >= SMALL // 2


@pytest.mark.parametrize(
    "framing",
    [
        b"1;" + b"y" * 100_000 + b"\r\nx\r\n0\r\n\r\n",
        b"0\r\nA: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
    ids=["chunk extension", "trailer"],
)
async def test_what_frames_a_body_is_bounded_too(framing: bytes) -> None:
    async with server() as port:
        head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with trio.fail_after(10), suppress(trio.BrokenResourceError):
                await stream.send_all(head + framing)
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 4")
        assert await http.get(f"http://127.0.0.1:{port}/still") == b"GET /still "


async def test_an_upgrade_that_nobody_makes_is_answered_as_if_it_were_not_asked_for() -> None:
    """As Java's and curl's clients ask for with any first request, its body included."""
    head = b"POST /u HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAE\r\n"
    async with server() as port:
        answer = await said(port, head + b"Content-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"POST /u hello")


async def test_a_trailer_is_no_field_of_the_next_request() -> None:
    async with server() as port:
        first = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: y\r\nExpect: 100-continue\r\n\r\n"
        answer = await said(port, first + b"GET /b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"HTTP/1.1 100" not in answer


async def test_a_client_of_before_gets_an_answer_and_the_end() -> None:
    async with server() as port:
        answer = await said(port, b"GET /old HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"GET /old ")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"ok"),
    ],
)  # fmt: skip
async def test_an_answer_ends_where_it_says_or_with_its_connection(answer: bytes, expected: bytes) -> None:
    assert await _answered(answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"what is this\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
)
async def test_an_answer_that_is_cut_endless_or_nonsense_is_malformed(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        await _answered(answer)


async def _answered(answer: bytes) -> bytes:
    """What `get` makes of it."""

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some()
            await stream.send_all(answer)
        await stream.aclose()

    listeners = await http.listen("127.0.0.1:0")
    outcome: list[bytes | Exception] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        with trio.fail_after(10):
            try:
                outcome.append(await http.get(f"http://127.0.0.1:{http.port_of(listeners)}/"))
            except (NodeUnavailable, RemoteProtocolError) as error:
                outcome.append(error)
        nursery.cancel_scope.cancel()
    [found] = outcome
    if isinstance(found, Exception):
        raise found
    return found


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with server() as port:
        head = b"POST /w HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(head)
            with trio.fail_after(5):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
                await stream.send_all(b"ok")
                assert b"POST /w ok" in await stream.receive_some()
