"""vLLM: what its KV events mean, and where a running server says it publishes them."""

from __future__ import annotations

import msgspec

from dpurt.core.held_blocks import HostTier
from dpurt.engines.residency import Dialect
from dpurt.engines.sources import Source, checked, from_here
from dpurt.errors import RemoteProtocolError

DISCOVERY_PATH = "/kv_event_sources"

# STORAGE is a store that hosts share, maybe this node: not a host's tier. A clear is of the GPU pool only. Offloaded hashes
# may be told once for each chunk they are in.
DIALECT = Dialect(
    media={"GPU": HostTier.HBM, None: HostTier.HBM, "CPU": HostTier.CPU, "STORAGE": None},
    cleared=(HostTier.HBM,),
    counted=frozenset({HostTier.CPU}),
)


class _Rank(msgspec.Struct):
    """What 0.33 tells in a map by rank, and later versions in a list."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    data_parallel_rank: int = 0


_reply = msgspec.json.Decoder(dict[int, _Rank] | list[_Rank])


def sources(body: bytes, host: str) -> list[Source]:
    """Who publishes, from a server's answer to `DISCOVERY_PATH`; `host` stands for wildcards. RemoteProtocolError if malformed."""
    try:
        ranks = _reply.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("malformed", f"{DISCOVERY_PATH}: {error}") from error
    if isinstance(ranks, list):
        ranks = {rank.data_parallel_rank: rank for rank in ranks}
    return checked(
        Source(
            rank=number,
            events=from_here(rank.endpoint, host),
            replay=from_here(rank.replay_endpoint, host) if rank.replay_endpoint else None,
            topic=rank.topic,
        )
        for number, rank in ranks.items()
    )
