"""The client's landing zones: which it wants, which it has, and what of a prompt is in them.

To look for a block its key is needed, and the keys of a prompt are a chain (`dpurt.core.identity`): they are worked out as far as they
are asked for, once a prompt.

Leaves to others: offering zones to a node (`dpurt.client`), how a zone is read (`dpurt.core.landing_zone`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dpurt.client.buffers import Room
from dpurt.core.identity import ROOT_KEY, Space, chain_keys, digest_key
from dpurt.core.landing_zone import ZoneLayout, ZoneReader

__all__ = ["Prompt", "Zones"]

MAX_PROMPTS = 4096


class Prompt:
    """One prompt's block keys, as far as they were asked for."""

    def __init__(
        self, space: str, identity: Space, tokens: bytes | None, digests: list[bytes] | None, shard: int
    ) -> None:
        self.space = space
        self.shard = shard
        self._fingerprint = identity.fingerprint()
        self._step = identity.geometry.block_token_bytes
        self._tokens = tokens
        self._digests = digests
        self._keys: list[bytes] = []

    def key(self, block: int) -> bytes | None:
        """The key of the block at this position; None beyond the last whole one."""
        if self._digests is not None:
            return digest_key(self._fingerprint, self._digests[block]) if block < len(self._digests) else None
        if block >= len(self._keys):
            self._extend(block + 1)
        return self._keys[block] if block < len(self._keys) else None

    def _extend(self, count: int) -> None:
        known = len(self._keys)
        parent = self._keys[-1] if known else ROOT_KEY
        tokens = memoryview(self._tokens or b"")[known * self._step : count * self._step]
        self._keys += chain_keys(self._fingerprint, parent, tokens, self._step)


class Zones:
    """The zones of one client. `wishes`: (space, shard, slots)."""

    def __init__(self) -> None:
        self.wishes: list[tuple[str, int, int]] = []
        self._readers: dict[tuple[str, int], ZoneReader] = {}
        self._prompts: dict[str, Prompt] = {}  # of requests that may load

    def wish(self, space: str, shard: int, slots: int) -> None:
        """From now on such a zone is wanted; instead of one there was."""
        self.wishes = [w for w in self.wishes if w[:2] != (space, shard)] + [(space, shard, slots)]
        self._readers.pop((space, shard), None)

    def unwish(self, space: str, shard: int) -> None:
        """It cannot be had."""
        self.wishes = [w for w in self.wishes if w[:2] != (space, shard)]

    def missing(self) -> list[tuple[str, int, int]]:
        """What is wished for and not open."""
        return [wish for wish in self.wishes if wish[:2] not in self._readers]

    def clear(self) -> None:
        """The memory is gone; so is what of it is known."""
        self._readers.clear()

    def open(self, space: str, shard: int, view: memoryview, layout: ZoneLayout) -> None:
        self._readers[space, shard] = ZoneReader(view, layout)

    def has(self, space: str, shard: int) -> bool:
        return (space, shard) in self._readers

    def remember(self, request: str, prompt: Prompt) -> None:
        self._prompts[request] = prompt
        if len(self._prompts) > MAX_PROMPTS:  # requests that were never finished
            del self._prompts[next(iter(self._prompts))]

    def forget(self, request: str) -> None:
        self._prompts.pop(request, None)

    def leading(self, prompt: Prompt) -> int:
        """How many of its first blocks the directory names."""
        reader = self._readers.get((prompt.space, prompt.shard))
        count = 0
        while reader is not None and (key := prompt.key(count)) is not None:
            if reader.find(key, prompt.shard) is None:
                break
            count += 1
        return count

    def take(
        self,
        request: str,
        first: int,
        into: Sequence[Room],
        parts: tuple[int, int] | None,
        shard: int,
    ) -> dict[int, memoryview]:
        """Copy what is there of blocks [first, first + len(into)); by position in `into`, each copy checked. A block
        scattered over several buffers is left to a load.
        """
        prompt = self._prompts.get(request)
        reader = self._readers.get((prompt.space, shard)) if prompt is not None else None
        if prompt is None or reader is None or prompt.shard != shard:
            return {}
        start, stop = parts or (0, len(reader.layout.part_bytes))
        if not 0 <= start < stop <= len(reader.layout.part_bytes):
            return {}  # as above
        length = sum(reader.layout.part_bytes[start:stop])
        found = {}
        for i, buffer in enumerate(into):
            if not isinstance(buffer, (memoryview, bytearray)):
                continue
            key, room = prompt.key(first + i), memoryview(buffer)
            if key is None or room.readonly or not room.c_contiguous or room.nbytes < length:
                continue  # a load of it says what is wrong
            slot, target = reader.find(key, shard), room.cast("B")[:length]
            if slot is not None and reader.copy(slot, key, shard, (start, stop), target):
                found[i] = target
        return found
