"""Sparse decode, step by step: the first tokens and a window of the last are at hand, the blocks between are *cold*.

In each step every layer attends to what is at hand and to the `top` cold blocks with the largest estimated share
(`sparse`). A cold block's KV comes from a `ColdKv`: from memory, or from a node. A block grows cold when the window has
passed it; it is given away, and its place in memory is overwritten with NaN, so that nothing can read it there.

The state that enters a layer foretells the queries of the layer some layers ahead, and so ranks the blocks it will
want (as InfiniGen does, arXiv 2406.19707); for the first layers of the next token nothing is known ahead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dpurt.core.attention import mass_codes
from dpurt.engines.smollm2.model import Floats, Halves, Model
from dpurt.engines.smollm2.sparse import KeyDigests, first_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSettings:
    """`top` cold blocks a layer and step; `ranked` blocks foretold for the layer `ahead` layers on (0: none)."""

    block_tokens: int = 16
    sink_tokens: int = 64
    window_tokens: int = 512
    top: int = 16
    ranked: int = 32
    ahead: int = 0
    temperature: float = 0.8
    seed: int = 0

    def cold_blocks(self, context: int) -> int:
        """How many blocks the window has passed, those of the first tokens included."""
        return max(0, context - self.window_tokens) // self.block_tokens


class Ask(NamedTuple):
    """One layer's turn: the cold blocks it attends to, their mass codes, and blocks ranked for a later layer."""

    step: int
    layer: int
    blocks: list[int]
    codes: bytes
    ranked: list[int]
    ranked_layer: int | None


class ColdKv(Protocol):
    """Where cold KV is."""

    async def put(self, tokens: Sequence[int], first: int, kv: Halves) -> None:
        """Blocks from `first` on, of all layers, [layers, 2, tokens, ...], have grown cold. `tokens`: all up to their end."""
        ...

    async def get(self, ask: Ask) -> Halves:
        """The KV of the asked blocks in this layer, [2, tokens, ...], in the order asked. Valid until the next call."""
        ...


@dataclass(slots=True)
class TurnLog:
    """What each turn asked, when it began and how long its cold KV took: for a recording."""

    asks: list[Ask] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class InMemory:
    """Cold KV that never went anywhere."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._kv: Halves | None = None

    async def put(self, tokens: Sequence[int], first: int, kv: Halves) -> None:
        self._kv = kv.copy() if self._kv is None else np.concatenate([self._kv, kv], axis=2)

    async def get(self, ask: Ask) -> Halves:
        assert self._kv is not None, "blocks are put before they are asked for"
        size = self._block_tokens
        blocks = [self._kv[ask.layer, :, block * size : (block + 1) * size] for block in ask.blocks]
        return np.concatenate(blocks, axis=1)


class SparseDecode:
    """One sequence. `tokens` grow by one a `step`, `log` by one a layer's turn; `logits_digest` is of all logits so far."""

    def __init__(
        self,
        model: Model,
        tokens: Sequence[int],
        kv: Halves,
        settings: SparseSettings,
        cold: ColdKv,
        steps: int,
    ) -> None:
        """`kv`: `Model.prefill` of all `tokens` but the last. Room for so many steps."""
        shape, skip = model.shape, settings.sink_tokens // settings.block_tokens
        if settings.cold_blocks(len(tokens)) <= skip or len(tokens) + steps > shape.context:
            raise ValueError(
                f"a context of {len(tokens)} tokens and {steps} steps leaves nothing cold, or is more than {shape.context}"
            )
        self.tokens = list(tokens)
        self.log = TurnLog()
        self.logits_digest = hashlib.blake2b(digest_size=16)
        self._model = model
        self._settings = settings
        self._cold = cold
        room = len(tokens) + steps
        self._kv = np.full((shape.layers, 2, room, shape.kv_heads, shape.head_size), np.nan, np.float16)
        self._kv[:, :, : kv.shape[2]] = kv
        blocks = settings.cold_blocks(room) + 1
        self._digests = KeyDigests(shape, settings.block_tokens, blocks, skip)
        self._steps = 0

    async def step(self) -> int:
        """The next token."""
        await self.grow_cold()
        model, position = self._model, len(self.tokens) - 1
        state = model.embed(self.tokens[-1])
        for layer in range(model.shape.layers):
            queries, self._kv[layer, :, position] = model.project(layer, state, position)
            ask = self._ask(layer, queries, state, position)
            state = model.advance(layer, state, model.attend(queries, await self._attended(ask, position)))
        logits = model.logits(state)
        self.logits_digest.update(logits.tobytes())
        self.tokens.append(self._sampled(logits))
        self._steps += 1
        return self.tokens[-1]

    async def grow_cold(self) -> None:
        """Give away what the window has passed. `step` does it too."""
        size, first = self._settings.block_tokens, self._digests.blocks
        last = self._settings.cold_blocks(len(self.tokens))
        if last == first:
            return
        kv = self._kv[:, :, first * size : last * size]
        self._digests.extend(kv)
        await self._cold.put(self.tokens[: last * size], first, kv)
        gone = slice(max(first * size, self._settings.sink_tokens), last * size)
        self._kv[:, :, gone] = np.nan

    def _ask(self, layer: int, queries: Floats, state: Floats, position: int) -> Ask:
        settings = self._settings
        shares = self._digests.shares(layer, queries)
        blocks = first_of(shares, settings.top)
        later = layer + settings.ahead
        ranked: npt.NDArray[np.intp] = blocks[:0]
        is_foretold = settings.ahead > 0 and later < self._model.shape.layers
        if is_foretold:
            foretold = self._digests.shares(later, self._model.foretell(later, state, position))
            ranked = first_of(foretold, settings.ranked)
        codes = mass_codes(shares[blocks]).tobytes()
        return Ask(
            self._steps, layer, blocks.tolist(), codes, ranked.tolist(), later if is_foretold else None
        )

    async def _attended(self, ask: Ask, position: int) -> Halves:
        began = time.perf_counter()
        cold = await self._cold.get(ask)
        self.log.asks.append(ask)
        self.log.began.append(began)
        self.log.waited.append(time.perf_counter() - began)
        kv, settings = self._kv[ask.layer], self._settings
        window_at = self._digests.blocks * settings.block_tokens
        return np.concatenate([kv[:, : settings.sink_tokens], cold, kv[:, window_at : position + 1]], axis=1)

    def _sampled(self, logits: Floats) -> int:
        settings = self._settings
        if not settings.temperature:
            return int(np.argmax(logits))
        noise = np.random.default_rng((settings.seed, self._steps)).gumbel(size=len(logits))
        return int(np.argmax(logits / settings.temperature + noise))
