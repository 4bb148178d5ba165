"""An inference engine's event sockets, without an engine: it publishes what a test says, and can replay it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from dpurt.transport import ZmqSocket, open_context


class FakeEngine:
    """A publisher as engines have it: a PUB socket, and a ROUTER that replays what it kept."""

    def __init__(self, folder: Path, name: str = "e") -> None:
        self.name = name
        self.events, self.replay = f"ipc://{folder}/{name}.pub", f"ipc://{folder}/{name}.replay"
        self.sent: list[list[bytes]] = []
        self.ts = 0.0
        self.replays = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeEngine]:
        with (
            open_context() as context,
            ZmqSocket(context, "PUB") as self.pub,
            ZmqSocket(context, "ROUTER") as router,
        ):
            self.sent, self.ts = [], self.ts + 100.0
            self.pub.bind(self.events)
            router.bind(self.replay)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.serve_replays, router)
                yield self
                nursery.cancel_scope.cancel()

    async def serve_replays(self, router: ZmqSocket) -> None:
        while True:
            who, _, start = await router.recv()
            self.replays += 1
            with suppress(trio.BrokenResourceError):  # who asked may be gone
                for frames in self.sent[int.from_bytes(start, "big") :]:
                    await router.send([who, b"", *frames])
                await router.send([who, b"", b"", b"\xff" * 8, b""])

    def make(self, *events: Any) -> list[bytes]:
        """A message that does not arrive."""
        self.ts += 1.0
        payload = msgspec.msgpack.encode([self.ts, list(events), 0])
        self.sent.append([b"", len(self.sent).to_bytes(8, "big"), payload])
        return self.sent[-1]

    async def publish(self, *events: Any) -> None:
        await self.pub.send(self.make(*events))


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """A chained 64-bit hash for each block."""
    digest, hashes = b"", []
    for at in range(0, len(tokens), block_tokens):
        digest = hashlib.sha256(digest + repr(tuple(tokens[at : at + block_tokens])).encode()).digest()
        hashes.append(int.from_bytes(digest[-8:], "big"))
    return hashes


def stored(tokens: Sequence[int], block_tokens: int, **fields: Any) -> dict[str, Any]:
    """A vLLM event: all blocks of a prompt, in HBM."""
    return {
        "type": "BlockStored", "block_hashes": block_hashes(tokens, block_tokens), "parent_block_hash": None,
        "token_ids": list(tokens), "block_size": block_tokens, "lora_id": None, "medium": "GPU", **fields,
    }  # fmt: skip
