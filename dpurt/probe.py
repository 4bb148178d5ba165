"""Moves real bytes between this machine, as one of a topology's hosts, and its running node, over each fabric the host may use.

For each: a chain of blocks with tokens nobody else has is stored, looked up, loaded and compared byte by byte. What it leaves behind
are these few blocks, which age out of the node like any that are not used again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from dpurt import keys
from dpurt.client import Client, connect
from dpurt.config import Config, HostConfig
from dpurt.core.identity import Space
from dpurt.doctor import Finding
from dpurt.errors import ConfigError, DpurtError
from dpurt.transport import CurveClient

__all__ = ["Keys", "probe_host"]

MAX_BLOCKS = 8
MAX_BYTES = 64 << 20
ROUNDS = 3
TIMEOUT_S = 30.0
_MIB = 1 << 20
_ADVICE = "is the node running, and this the host's machine?"
_ADVICE_KEYS = (  # a node does not answer a key it does not know
    "is the node running, this host's public key in its authorized_keys_dir, and --node-key the node's?"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Files of the host's secret key and the node's public one, where the gateway asks for keys."""

    host_secret: Path
    node_public: Path

    def load(self) -> CurveClient:
        pair = keys.load_pair(self.host_secret)
        node = keys.load_public(self.node_public)
        return CurveClient(pair.public, pair.secret, node)


def probe_host(config: Config, name: str, found: Keys | None) -> list[Finding]:
    """One finding for each of the host's fabrics. Raises ConfigError for what could not be tried at all."""
    host = config.host_named(name)
    if host is None:
        raise ConfigError("--probe", f"no host {name!r}; known: {', '.join(h.name for h in config.host)}")
    if config.gateway.curve is not None and found is None:
        raise ConfigError("--probe", "this gateway takes clients with keys only: give --key and --node-key")
    curve = None if found is None else found.load()
    return [trio.run(_probe, config, host, kind, curve) for kind in host.fabrics]


async def _probe(config: Config, host: HostConfig, kind: str, curve: CurveClient | None) -> Finding:
    name, title = host.spaces[0], f"probe {kind}"
    space = config.to_space(name)
    try:
        async with connect(
            config.gateway.bind, host=host.name, spaces={name: space}, fabrics=[kind], timeout_s=TIMEOUT_S, curve=curve
        ) as client:  # fmt: skip
            reply = await client.session(trio.current_time() + TIMEOUT_S)
            detail = await _move(client, name, space)
            return Finding(
                title, "ok", "; ".join([detail, *_lanes(client), f"chosen: {reply.fabric_reason}"])
            )
    except DpurtError as error:
        return Finding(title, "warn", str(error), _ADVICE if curve is None else _ADVICE_KEYS)


async def _move(client: Client, name: str, space: Space) -> str:
    size = space.geometry.payload_bytes
    count = max(1, min(MAX_BLOCKS, MAX_BYTES // size))
    step = space.geometry.block_token_bytes
    store_s = load_s = float("inf")
    for number in range(ROUNDS):
        request = f"probe-{number}"
        tokens, payloads = (
            secrets.token_bytes(step * count),
            [secrets.token_bytes(size) for _ in range(count)],
        )
        began = trio.current_time()
        statuses = await client.store(name, request, tokens, 0, payloads)
        store_s = min(store_s, trio.current_time() - began)
        if set(statuses) != {"stored"}:
            return f"the node did not store all: {', '.join(statuses)}"
        await client.lookup(name, request, tokens)
        buffers = [memoryview(bytearray(size)) for _ in range(count)]
        began = trio.current_time()
        loaded = await client.load(request, 0, buffers)
        load_s = min(load_s, trio.current_time() - began)
        await client.finish(request)
        wrong = [b.status for b, got, sent in zip(loaded, buffers, payloads, strict=True) if got != sent]
        if wrong:
            return f"{len(wrong)} of {count} blocks did not come back: {', '.join(wrong)}"
    mib = count * size / _MIB
    return f"{count} blocks of {size:,} bytes, every byte compared: stored {mib / store_s:,.0f}, loaded {mib / load_s:,.0f} MiB/s"


def _lanes(client: Client) -> Iterator[str]:
    for lane in client.lanes:
        state = "up" if lane.is_up else f"down ({lane.last_failure})"
        yield f"lane {lane.name} {state}, {lane.carried:,} bytes, {lane.bytes_per_s / _MIB:,.0f} MiB/s"
