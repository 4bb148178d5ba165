"""SGLang: what its KV events mean, and where a running server says it publishes them."""

from __future__ import annotations

import msgspec

from dpurt.core.held_blocks import HostTier
from dpurt.engines.residency import Dialect
from dpurt.engines.sources import MAX_RANKS, Source, checked, from_here
from dpurt.errors import RemoteProtocolError

DISCOVERY_PATH = "/server_info"

# DISK and EXTERNAL are its L3. Its clear is a flush of the radix tree with its host pool.
DIALECT = Dialect(
    media={
        "GPU": HostTier.HBM,
        None: HostTier.HBM,
        "CPU_PINNED": HostTier.CPU,
        "DISK": None,
        "EXTERNAL": None,
    },
    cleared=(HostTier.HBM, HostTier.CPU),
    counted=frozenset(),
)


class _KvEvents(msgspec.Struct):
    endpoint_host: str
    endpoint_port_base: int
    topic: str = ""
    block_size: int | None = None
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _KvEvents | None = None


_reply = msgspec.json.Decoder(_ServerInfo)


def sources(body: bytes, host: str) -> list[Source]:
    """Who publishes, from a server's answer to `DISCOVERY_PATH`; `host` stands for wildcards. RemoteProtocolError if malformed."""
    try:
        told = _reply.decode(body).kv_events
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("malformed", f"{DISCOVERY_PATH}: {error}") from error
    if told is None:
        return []
    replay = told.replay_endpoint_port_base

    def at(port: int) -> str:
        return from_here(f"tcp://{told.endpoint_host}:{port}", host)

    return checked(
        Source(
            rank=rank,
            events=at(told.endpoint_port_base + rank),
            replay=None if replay is None else at(replay + rank),
            topic=told.topic,
            block_tokens=told.block_size,
        )
        for rank in range(min(told.dp_size, MAX_RANKS + 1))
    )
