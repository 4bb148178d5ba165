"""A Llama-architecture model in numpy: weights from GGUF or at random, prefill in chunks, decode a layer at a time.

KV is float16 between the layers and the attention that reads it, in prefill as in decode, so KV that went to a device and
back is exactly the KV that was never away. One layer's KV of some tokens is an array [2, tokens, KV heads, head size], keys
first; that of all layers has the layers in front. Rotary embedding is of neighbouring pairs, as GGUF orders the weights.

Deterministic for one machine, numpy and number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpurt.engines.smollm2.gguf import GgufFile
from dpurt.errors import ConfigError

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

CHUNK = 256  # tokens of a prompt that go through the layers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    context: int
    rope_base: float = 100_000.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_size % 2:
            raise ValueError("heads must be a multiple of kv_heads, and head_size be even")

    @property
    def rows(self) -> tuple[int, int]:
        """Where keys and values begin in the stacked projection."""
        return self.heads * self.head_size, (self.heads + self.kv_heads) * self.head_size


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: `qkv` and `gate_up` are stacked projections [out, in]."""

    attention_norm: Floats
    qkv: Floats
    output: Floats
    ffn_norm: Floats
    gate_up: Floats
    down: Floats


class Model:
    """See the module's docstring."""

    def __init__(self, shape: Shape, embedding: Floats, layers: Sequence[LayerWeights], norm: Floats) -> None:
        self.shape = shape
        self._embedding = embedding
        self._layers = list(layers)
        self._norm = norm
        pairs = np.arange(0, shape.head_size, 2) / shape.head_size
        angles = np.outer(np.arange(shape.context), shape.rope_base**-pairs)
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Model:
        """The model of a file. Raises ConfigError where the file has another architecture, or lacks a part."""
        if file.metadata.get("general.architecture") != "llama":
            raise ConfigError(f"{file.path}: general.architecture", "expected llama")
        shape = _shape_of(file)
        layers = [_layer_of(file, shape, number) for number in range(shape.layers)]
        embedding = file.tensor("token_embd.weight", (shape.vocabulary, shape.width))
        return cls(shape, embedding, layers, file.tensor("output_norm.weight", (shape.width,)))

    @classmethod
    def random(cls, shape: Shape, seed: int = 0) -> Model:
        """A model of noise, for tests: it computes like any other and means nothing."""
        generator = np.random.default_rng(seed)

        def weights(rows: int, columns: int) -> Floats:
            noise: Floats = generator.standard_normal((rows, columns), np.float32)
            return noise * np.float32(1.5 / np.sqrt(columns))

        one, heads = np.ones(shape.width, np.float32), shape.heads + 2 * shape.kv_heads
        layers = [
            LayerWeights(
                one, weights(heads * shape.head_size, shape.width), weights(shape.width, shape.rows[0]), one,
                weights(2 * shape.hidden, shape.width), weights(shape.width, shape.hidden),
            )
            for _ in range(shape.layers)
        ]  # fmt: skip
        return cls(shape, weights(shape.vocabulary, shape.width), layers, one)

    # --- a token, a layer at a time ---

    def embed(self, token: int) -> Floats:
        """The state a token enters the first layer with."""
        state: Floats = self._embedding[token].copy()
        return state

    def project(self, layer: int, state: Floats, position: int) -> tuple[Floats, Halves]:
        """(queries [KV heads, heads per KV head, head size], this token's KV [2, KV heads, head size])."""
        shape, weights = self.shape, self._layers[layer]
        keys_at, values_at = shape.rows
        qkv = weights.qkv @ self._normed(state, weights.attention_norm)
        kv = np.empty((2, shape.kv_heads, shape.head_size), np.float16)
        kv[0] = self._rotated(qkv[keys_at:values_at].reshape(shape.kv_heads, -1), position)
        kv[1] = qkv[values_at:].reshape(shape.kv_heads, -1)
        return self._queries(qkv[:keys_at], position), kv

    def foretell(self, layer: int, state: Floats, position: int) -> Floats:
        """The queries a later layer would have, if the state did not change before it."""
        weights, (keys_at, _) = self._layers[layer], self.shape.rows
        return self._queries(weights.qkv[:keys_at] @ self._normed(state, weights.attention_norm), position)

    def attend(self, queries: Floats, kv: Halves) -> Floats:
        """Attention over KV [2, tokens, KV heads, head size]; the heads' results in one row."""
        keys, values = (part.astype(np.float32).transpose(1, 0, 2) for part in kv)
        shares = _softmax(queries @ keys.transpose(0, 2, 1) * self._scale)
        attended: Floats = (shares @ values).reshape(-1)
        return attended

    def advance(self, layer: int, state: Floats, attended: Floats) -> Floats:
        """The state behind a layer."""
        weights = self._layers[layer]
        state = state + weights.output @ attended
        gate, up = np.split(weights.gate_up @ self._normed(state, weights.ffn_norm), 2)
        new: Floats = state + weights.down @ (_silu(gate) * up)
        return new

    def logits(self, state: Floats) -> Floats:
        """Of the next token."""
        return self._embedding @ self._normed(state, self._norm)

    # --- a prompt ---

    def prefill(self, tokens: Sequence[int]) -> Halves:
        """The KV of a prompt: [layers, 2, tokens, KV heads, head size]."""
        shape = self.shape
        kv = np.empty((shape.layers, 2, len(tokens), shape.kv_heads, shape.head_size), np.float16)
        for start in range(0, len(tokens), CHUNK):
            stop = min(start + CHUNK, len(tokens))
            states = self._embedding[np.array(tokens[start:stop])]
            for layer in range(shape.layers):
                states = self._prefill_layer(layer, states, start, kv[layer])
        return kv

    def _prefill_layer(self, layer: int, states: Floats, start: int, kv: Halves) -> Floats:
        shape, weights, stop = self.shape, self._layers[layer], start + len(states)
        keys_at, values_at = shape.rows
        qkv = self._normed(states, weights.attention_norm) @ weights.qkv.T
        rows = slice(start, stop)
        kv[0, rows] = self._rotated(
            qkv[:, keys_at:values_at].reshape(-1, shape.kv_heads, shape.head_size), rows
        )
        kv[1, rows] = qkv[:, values_at:].reshape(-1, shape.kv_heads, shape.head_size)
        queries = self._rotated(qkv[:, :keys_at].reshape(-1, shape.heads, shape.head_size), rows)
        states = states + self._attend_all(queries, kv[:, :stop], start) @ weights.output.T
        gate, up = np.split(self._normed(states, weights.ffn_norm) @ weights.gate_up.T, 2, axis=-1)
        new: Floats = states + (_silu(gate) * up) @ weights.down.T
        return new

    def _attend_all(self, queries: Floats, kv: Halves, start: int) -> Floats:
        """Causal attention of the tokens from `start` on: [tokens, heads * head size]."""
        shape, count = self.shape, len(queries)
        out = np.empty((count, shape.heads, shape.head_size), np.float32)
        future = np.arange(start + count) > (start + np.arange(count))[:, None]
        for head in range(shape.heads):
            keys, values = kv[:, :, head // (shape.heads // shape.kv_heads)].astype(np.float32)
            scores = queries[:, head] @ keys.T * self._scale
            scores[future] = -np.inf
            out[:, head] = _softmax(scores) @ values
        return out.reshape(count, -1)

    # --- parts of the above ---

    @property
    def _scale(self) -> np.float32:
        return np.float32(self.shape.head_size**-0.5)

    def _normed(self, states: Floats, weight: Floats) -> Floats:
        mean = np.mean(states * states, axis=-1, keepdims=True)
        normed: Floats = states / np.sqrt(mean + np.float32(self.shape.epsilon)) * weight
        return normed

    def _queries(self, row: Floats, position: int) -> Floats:
        shape = self.shape
        queries = self._rotated(row.reshape(shape.heads, shape.head_size), position)
        return queries.reshape(shape.kv_heads, -1, shape.head_size)

    def _rotated(self, heads: Floats, at: int | slice) -> Floats:
        """Heads [..., heads, head size] with their positions in them."""
        cos, sin = self._cos[at], self._sin[at]
        if isinstance(at, slice):
            cos, sin = cos[:, None], sin[:, None]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        rotated = np.empty_like(heads)
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = even * sin + odd * cos
        return rotated


def _shape_of(file: GgufFile) -> Shape:
    def number(name: str) -> int:
        return int(file.number(f"llama.{name}"))

    heads, width = number("attention.head_count"), number("embedding_length")
    return Shape(
        layers=number("block_count"), width=width, heads=heads, kv_heads=number("attention.head_count_kv"),
        head_size=width // heads, hidden=number("feed_forward_length"), vocabulary=number("vocab_size"),
        context=number("context_length"), rope_base=file.number("llama.rope.freq_base"),
        epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
    )  # fmt: skip


def _layer_of(file: GgufFile, shape: Shape, number: int) -> LayerWeights:
    def tensor(name: str, *dimensions: int) -> Floats:
        return file.tensor(f"blk.{number}.{name}.weight", dimensions)

    width, hidden, query, kv = shape.width, shape.hidden, shape.rows[0], shape.kv_heads * shape.head_size
    projections = [tensor("attn_q", query, width), tensor("attn_k", kv, width), tensor("attn_v", kv, width)]
    return LayerWeights(
        tensor("attn_norm", width), np.concatenate(projections), tensor("attn_output", width, query),
        tensor("ffn_norm", width),
        np.concatenate([tensor("ffn_gate", hidden, width), tensor("ffn_up", hidden, width)]),
        tensor("ffn_down", width, hidden),
    )  # fmt: skip


def _softmax(scores: Floats) -> Floats:
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    normed: Floats = shares
    return normed


def _silu(values: Floats) -> Floats:
    smooth: Floats = values / (1 + np.exp(-values))
    return smooth
