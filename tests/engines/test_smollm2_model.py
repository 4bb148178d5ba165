"""The numpy model and its sparse decode, with random weights."""

from __future__ import annotations

import numpy as np
import pytest

from dpurt.engines.smollm2.decode import Ask, InMemory, SparseDecode, SparseSettings
from dpurt.engines.smollm2.model import Halves, Model, Shape
from dpurt.engines.smollm2.sparse import KeyDigests, first_of

SHAPE = Shape(
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    head_size=8,
    hidden=48,
    vocabulary=64,
    context=256,
    rope_base=1000.0,
)
MODEL = Model.random(SHAPE, seed=1)
SETTINGS = SparseSettings(block_tokens=4, sink_tokens=8, window_tokens=16, top=3, ranked=6, ahead=1)
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 64, 60)]


def dense_logits(tokens: list[int]) -> np.ndarray:
    """By prefill, one token more at the end: what a decode that leaves nothing out must give."""
    kv = MODEL.prefill(tokens)
    state, position = MODEL.embed(tokens[-1]), len(tokens) - 1
    for layer in range(SHAPE.layers):
        queries, _ = MODEL.project(layer, state, position)
        state = MODEL.advance(layer, state, MODEL.attend(queries, kv[layer]))
    return MODEL.logits(state)


def test_a_token_decoded_has_the_kv_it_has_in_a_prompt() -> None:
    kv = MODEL.prefill(PROMPT)
    state, position = MODEL.embed(PROMPT[-1]), len(PROMPT) - 1
    for layer in range(SHAPE.layers):
        queries, own = MODEL.project(layer, state, position)
        np.testing.assert_allclose(own, kv[layer, :, position], atol=4e-3)
        state = MODEL.advance(layer, state, MODEL.attend(queries, kv[layer]))


def test_a_prompt_in_chunks_has_the_kv_of_one_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MODEL.prefill(PROMPT)
    monkeypatch.setattr("dpurt.engines.smollm2.model.CHUNK", 7)
    np.testing.assert_allclose(MODEL.prefill(PROMPT), whole, atol=4e-3)


def test_attention_depends_on_distance_not_on_position() -> None:
    state = MODEL.embed(5)
    scores = []
    for at in (0, 90):
        _, key = MODEL.project(0, state, at)
        queries, _ = MODEL.project(0, MODEL.embed(9), at + 7)
        scores.append(np.einsum("grd,gd->gr", queries, key[0].astype(np.float32)))
    np.testing.assert_allclose(scores[0], scores[1], rtol=2e-2, atol=2e-2)


async def test_decode_that_may_attend_to_every_block_is_dense_decode() -> None:
    settings = SparseSettings(block_tokens=4, sink_tokens=8, window_tokens=16, top=1000, temperature=0.0)
    sequence = SparseDecode(MODEL, PROMPT, MODEL.prefill(PROMPT[:-1]), settings, InMemory(4), 5)
    for _ in range(5):
        before = list(sequence.tokens)
        assert await sequence.step() == int(np.argmax(dense_logits(before)))


class Checked(InMemory):
    """In memory, and looks at what it is told."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self.asks: list[Ask] = []
        self.blocks = 0

    async def put(self, tokens: list[int], first: int, kv: Halves) -> None:  # type: ignore[override]
        assert first == self.blocks
        assert np.isfinite(kv).all(), "what is given away is whole"
        self.blocks += kv.shape[2] // 4
        assert len(tokens) == 4 * self.blocks
        await super().put(tokens, first, kv)

    async def get(self, ask: Ask) -> Halves:
        self.asks.append(ask)
        return await super().get(ask)


async def test_blocks_go_when_the_window_has_passed_them_and_are_asked_for_by_layer() -> None:
    cold = Checked(4)
    sequence = SparseDecode(MODEL, PROMPT, MODEL.prefill(PROMPT[:-1]), SETTINGS, cold, 20)
    for step in range(20):
        await sequence.step()
        assert cold.blocks == (60 + step - 16) // 4
    assert [(ask.step, ask.layer) for ask in cold.asks] == [(s, la) for s in range(20) for la in range(3)]
    for ask in cold.asks:
        assert len(set(ask.blocks)) == len(ask.blocks) == len(ask.codes) == 3
        assert min(ask.blocks) >= 2, "the first tokens are always at hand"
        assert list(ask.codes) == sorted(ask.codes), "most attention first"
        assert ask.ranked_layer == (ask.layer + 1 if ask.layer < 2 else None)
        assert len(ask.ranked) == (6 if ask.layer < 2 else 0)


async def test_kv_that_was_given_away_is_not_read_in_memory() -> None:
    class Zeroed(InMemory):
        async def get(self, ask: Ask) -> Halves:
            return np.zeros_like(await super().get(ask))

    sequence = SparseDecode(MODEL, PROMPT, MODEL.prefill(PROMPT[:-1]), SETTINGS, InMemory(4), 4)
    zeroed = SparseDecode(MODEL, PROMPT, MODEL.prefill(PROMPT[:-1]), SETTINGS, Zeroed(4), 4)
    await sequence.step()
    await zeroed.step()
    assert sequence.logits_digest.digest() != zeroed.logits_digest.digest(), "what comes is what is used"
    assert np.isnan(sequence._kv[:, :, 8:44]).all()


async def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    async def tokens(seed: int) -> list[int]:
        settings = SparseSettings(block_tokens=4, sink_tokens=8, window_tokens=16, top=3, seed=seed)
        sequence = SparseDecode(MODEL, PROMPT, MODEL.prefill(PROMPT[:-1]), settings, InMemory(4), 12)
        return [await sequence.step() for _ in range(12)]

    assert await tokens(1) == await tokens(1) != await tokens(2)


def test_no_key_of_a_block_scores_more_than_its_bound() -> None:
    """So a block whose one key matches the query perfectly is never behind one without any key like it."""
    rng = np.random.default_rng(3)
    kv = rng.standard_normal((SHAPE.layers, 2, 40, 2, 8)).astype(np.float16)
    queries = rng.standard_normal((2, 2, 8)).astype(np.float32)
    kv[1, 0, 21] = 6 * queries.mean(axis=1)  # block 5
    digests = KeyDigests(SHAPE, 4, 10, 2)
    digests.extend(kv[:, :, :24])
    digests.extend(kv[:, :, 24:])
    shares = digests.shares(1, queries)
    assert shares.sum() == pytest.approx(1)
    assert (shares[:2] == 0).all(), "the first tokens' blocks are never chosen"
    assert first_of(shares, 3)[0] == 5


def test_too_short_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing cold"):
        SparseDecode(MODEL, PROMPT[:20], MODEL.prefill(PROMPT[:19]), SETTINGS, InMemory(4), 1)
