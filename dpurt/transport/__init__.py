"""How control messages travel: ZeroMQ sockets on Trio, with CURVE. Bytes of KV never pass here (see
`dpurt.fabric`).
"""

from dpurt.transport.zap import serve_zap
from dpurt.transport.zmq_socket import (
    CurveClient,
    CurveServer,
    SocketOptions,
    ZmqSocket,
    ZmqStats,
    open_context,
    user_id,
)

__all__ = [
    "CurveClient",
    "CurveServer",
    "SocketOptions",
    "ZmqSocket",
    "ZmqStats",
    "open_context",
    "serve_zap",
    "user_id",
]
