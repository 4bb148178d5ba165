"""Where an engine publishes: one source for each of its data-parallel ranks, told by the topology or by the engine itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from dpurt.errors import RemoteProtocolError

MAX_RANKS = 1024  # of one engine
MAX_BLOCK_TOKENS = 1 << 16
MAX_PATH_BYTES = 107  # of a Unix socket
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
_ANY = frozenset({"*", "0" + ".0.0.0", "[::]", "::", ""})  # an address to listen on, not to go to


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One rank's sockets. Without `replay` what is lost stays lost."""

    rank: int
    events: str
    replay: str | None = None
    topic: str = ""
    block_tokens: int | None = None


def from_here(endpoint: str, host: str) -> str:
    """An endpoint as it can be connected to: one that listens everywhere is at `host`."""
    scheme, _, rest = endpoint.partition("://")
    where, _, port = rest.rpartition(":")
    return f"tcp://{host}:{port}" if scheme == "tcp" and where in _ANY else endpoint


def checked(found: Iterable[Source]) -> list[Source]:
    """The sources in order of rank. RemoteProtocolError for what is no endpoint, or too many."""
    sources = sorted(found, key=lambda source: source.rank)
    if len(sources) > MAX_RANKS:
        raise RemoteProtocolError("malformed", f"{len(sources)} ranks are more than {MAX_RANKS}")
    for source in sources:
        if source.block_tokens is not None and not 0 < source.block_tokens <= MAX_BLOCK_TOKENS:
            raise RemoteProtocolError("malformed", f"blocks of {source.block_tokens} tokens")
        for endpoint in (source.events, source.replay):
            if endpoint is not None and not _is_endpoint(endpoint):
                raise RemoteProtocolError("malformed", f"{endpoint!r} is no endpoint to connect to")
    return sources


def _is_endpoint(endpoint: str) -> bool:
    url = urlsplit(endpoint)
    try:
        if url.scheme == "ipc":
            return 0 < len(endpoint.encode()) - len("ipc://") <= MAX_PATH_BYTES
        is_whole = bool(_HOST.fullmatch(url.hostname or "")) and bool(url.port)
        return url.scheme == "tcp" and is_whole and not (url.path or url.query or url.fragment)
    except ValueError:
        return False
