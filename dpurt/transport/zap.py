"""Who may talk to our CURVE sockets: a ZeroMQ authenticator (ZAP, RFC 27) as one Trio task.

libzmq asks `inproc://zeromq.zap.01` of its own context about each connecting client. We answer by the
client's public key; the key then comes with every message as its user id (`dpurt.transport.user_id`). The set
of allowed keys is a question asked each time, so a key may be added or withdrawn at run time; connections
already up are not cut.

Leaves to others: where keys come from (`dpurt.keys`), and what a known client may do (the gateway).
"""

from __future__ import annotations

from collections.abc import Callable, Container

import trio
import zmq
import zmq.utils.z85

from dpurt.transport.zmq_socket import ZAP_DOMAIN, SocketOptions, ZmqSocket

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


async def serve_zap(
    context: zmq.Context[zmq.Socket[bytes]],
    allowed: Container[str],
    on_refused: Callable[[str, str], None] = lambda address, key: None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled. `is_allowed` gets a Z85 public key; `on_refused` the peer's address and that
    key.

    One per context; start it before a socket with `CurveServer` is bound.
    """
    with ZmqSocket(context, "REP", SocketOptions()) as socket:
        socket.bind(ZAP_ENDPOINT)
        task_status.started()
        while True:
            request = await socket.recv()
            await socket.send(_answer(request, allowed, on_refused))


def _answer(
    request: list[bytes], allowed: Container[str], on_refused: Callable[[str, str], None]
) -> list[bytes]:
    version, request_id, domain, address, _routing_id, mechanism, *credentials = request
    assert version == _VERSION, "libzmq speaks ZAP 1.0"
    if mechanism != b"CURVE" or domain != ZAP_DOMAIN:
        return [_VERSION, request_id, b"400", b"only CURVE is accepted", b"", b""]
    key = zmq.utils.z85.encode(credentials[0])
    if key.decode() in allowed:
        return [_VERSION, request_id, b"200", b"OK", key, b""]
    on_refused(address.decode(errors="replace"), key.decode())
    return [_VERSION, request_id, b"400", b"unknown client key", b"", b""]
