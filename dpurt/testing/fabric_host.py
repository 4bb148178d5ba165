"""A GPU host in another process, for the fabric contract: takes commands as JSON lines, answers each with
one.

`python -m dpurt.testing.fabric_host '{"kind": ..., "address": ..., "session": ..., "token": "hex"}'`.
Commands:

    {"do": "pull" | "view", "region", "offset", "length", "lease"}    -> {"digest": hex or null}
    {"do": "store", "region", "offset", "length", "lease", "fill"}    -> {"stored": length}
    {"do": "landing", "size"}                                         -> {"landing": id}
    {"do": "landing_digest", "landing", "offset", "length"}           -> {"digest": hex}

An operation that raises answers {"error": class name}. End of input closes the endpoint.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import trio

from dpurt.errors import DpurtError
from dpurt.fabric import Endpoint, MemoryRegion, Piece, connect

__all__ = ["digest", "main"]

_TIMEOUT_S = 10.0

Answer = Mapping[str, object]


def digest(data: memoryview | bytes) -> str:
    """How both processes name bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Host:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._landings: dict[int, MemoryRegion] = {}

    async def obey(self, command: Mapping[str, Any]) -> Answer:
        try:
            answer: Answer = await getattr(self, f"_{command['do']}")(command)
        except DpurtError as error:
            return {"error": type(error).__name__}
        return answer

    async def _pull(self, c: Mapping[str, Any]) -> Answer:
        local = memoryview(bytearray(c["length"]))
        piece = Piece(c["region"], c["offset"], c["lease"], local)
        await self._endpoint.pull([piece], trio.current_time() + _TIMEOUT_S)
        return {"digest": digest(local)}

    async def _store(self, c: Mapping[str, Any]) -> Answer:
        local = memoryview(bytearray([c["fill"]]) * c["length"])
        piece = Piece(c["region"], c["offset"], c["lease"], local)
        await self._endpoint.store([piece], trio.current_time() + _TIMEOUT_S)
        return {"stored": len(local)}

    async def _view(self, c: Mapping[str, Any]) -> Answer:
        view = self._endpoint.view(c["region"], c["offset"], c["length"])
        return {"digest": None if view is None else digest(view)}

    async def _landing(self, c: Mapping[str, Any]) -> Answer:
        region = self._endpoint.landing(c["size"])
        self._landings[region.region_id] = region
        return {"landing": region.region_id}

    async def _landing_digest(self, c: Mapping[str, Any]) -> Answer:
        view = self._landings[c["landing"]].view
        return {"digest": digest(view[c["offset"] : c["offset"] + c["length"]])}


async def main(link: Mapping[str, Any]) -> None:
    endpoint = await connect(
        link["kind"],
        link["address"],
        link["session"],
        bytes.fromhex(link["token"]),
        trio.current_time() + _TIMEOUT_S,
    )
    host = _Host(endpoint)
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        print(json.dumps(await host.obey(json.loads(line))), flush=True)
    await endpoint.aclose()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
