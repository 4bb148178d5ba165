"""How many bytes of KV a token takes: a catalogue of models, each with its formula. Pure data and arithmetic.

Grouped-query attention keeps a key and a value per layer and KV head: 2 x layers x KV heads x head size x bytes
per value. Multi-head latent attention keeps one latent and a rotary part per layer: layers x (latent + rope) x
bytes. A hybrid model keeps *compressed* entries, one per so many tokens, in each group of layers; and besides,
once a request and layer, a window of raw entries, which is not in `bytes_per_token` but in `bytes_per_request`.

`value_bytes` is that of the model's usual KV precision (2: FP16 or BF16); `at_precision` gives the others.
Sources: "article" and "config" (the model's published configuration) are figures as published; "estimate" is
somebody's guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["KV_MODELS", "PRECISIONS", "GroupedQuery", "Hybrid", "KvModel", "Latent", "LayerKind"]

PRECISIONS = {"fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5}


class Attention(Protocol):
    """What a model keeps per token; `value_bytes` is the width of one number."""

    def bytes_per_token(self, value_bytes: float) -> float: ...

    def bytes_per_request(self, value_bytes: float) -> float:
        """What a request keeps whatever its length."""
        ...

    def formula(self, value_bytes: float) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """A key and a value per layer and KV head."""

    layers: int
    kv_heads: int
    head_size: int

    def bytes_per_token(self, value_bytes: float) -> float:
        return 2 * self.layers * self.kv_heads * self.head_size * value_bytes

    def bytes_per_request(self, value_bytes: float) -> float:
        return 0.0

    def formula(self, value_bytes: float) -> str:
        shape = f"{self.layers} layers x {self.kv_heads} KV heads x {self.head_size} values"
        return f"2 x {shape} x {value_bytes:g} B"


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one compressed vector per layer for keys and values together."""

    layers: int
    latent: int
    rope: int

    def bytes_per_token(self, value_bytes: float) -> float:
        return self.layers * (self.latent + self.rope) * value_bytes

    def bytes_per_request(self, value_bytes: float) -> float:
        return 0.0

    def formula(self, value_bytes: float) -> str:
        return f"{self.layers} layers x ({self.latent} latent + {self.rope} rope) x {value_bytes:g} B"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`layers` layers that keep one entry of `entry` values per `tokens_per_entry` tokens, beside it an
    indexer's key of `index` values. `rope` of the entry's values stay at two bytes in any precision."""

    layers: int
    tokens_per_entry: int
    entry: int
    rope: int = 0
    index: int = 0

    def entry_bytes(self, value_bytes: float) -> float:
        """One entry without its indexer key."""
        return (self.entry - self.rope) * value_bytes + self.rope * 2.0

    def index_bytes(self, value_bytes: float) -> float:
        """One indexer key: half the width of the entry's values below two bytes (FP4 beside FP8)."""
        return self.index * (value_bytes if value_bytes >= 2 else value_bytes / 2)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Groups of layers with different compression, and a sliding window of raw entries in every layer."""

    kinds: tuple[LayerKind, ...]
    window_tokens: int

    def bytes_per_token(self, value_bytes: float) -> float:
        return sum(
            kind.layers
            * (kind.entry_bytes(value_bytes) + kind.index_bytes(value_bytes))
            / kind.tokens_per_entry
            for kind in self.kinds
        )

    def bytes_per_request(self, value_bytes: float) -> float:
        return sum(k.layers * self.window_tokens * k.entry_bytes(value_bytes) for k in self.kinds)

    def formula(self, value_bytes: float) -> str:
        kinds = (
            f"{k.layers} layers x ({k.entry_bytes(value_bytes):g} + {k.index_bytes(value_bytes):g} index) B"
            f" / {k.tokens_per_entry} tokens"
            for k in self.kinds
        )
        return " + ".join(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvModel:
    """One model. `weights_bytes` is what its weights take as usually served. `remarks` says where a source's own
    figures do not agree with the formula."""

    name: str
    attention: Attention
    weights_bytes: float
    source: str
    value_bytes: float = 2.0
    remarks: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> float:
        return self.attention.bytes_per_token(self.value_bytes)

    @property
    def formula(self) -> str:
        return self.attention.formula(self.value_bytes)

    def request_bytes(self, context_tokens: float) -> float:
        """KV of one request of this length."""
        return self.bytes_per_token * context_tokens + self.attention.bytes_per_request(self.value_bytes)

    def at_precision(self, name: str) -> KvModel:
        """The same model with its KV kept at a precision of `PRECISIONS`; KeyError for another."""
        return KvModel(
            name=self.name,
            attention=self.attention,
            weights_bytes=self.weights_bytes,
            source=self.source,
            value_bytes=PRECISIONS[name],
            remarks=self.remarks,
        )


_V4_PRO = Hybrid(
    kinds=(
        LayerKind(layers=30, tokens_per_entry=4, entry=512, rope=64, index=128),
        LayerKind(layers=31, tokens_per_entry=128, entry=512, rope=64),
    ),
    window_tokens=128,
)
_CONFIG = "config: the model's published configuration; weights counted at one byte a parameter"
_RECALLED = "recalled, not looked up: check against the model's own config"

KV_MODELS = {
    model.name: model
    for model in (
        KvModel(
            name="llama-3-70b",
            attention=GroupedQuery(80, 8, 128),
            weights_bytes=70e9,
            source="article; config (80 layers, 8 KV heads, 128); weights in FP8",
            remarks=(
                "the article's 109K tokens in flight take 320 KB as 320,000 bytes; 327,680 give 107K, and "
                "the same request counts",
                "the article's 93 ms for a window of 4,096 tokens is 1.3 GB / 14 GB/s; 1.342 GB take 95.9 ms",
                'the article\'s "320 -> 4.8 GB = 35x" is 67x; its Figure 6 has 170 GB where its text has 320 GB; its '
                "17 TB stands beside a gap of 32 TB",
            ),
        ),
        KvModel(
            name="deepseek-v3",
            attention=Latent(61, 512, 64),
            weights_bytes=671e9,
            source="article; config (61 layers, latent 512 + rope 64); weights in FP8",
            remarks=(
                "the article's ~72 GB at 1M takes 68.6 KiB as 68.6 KB: 2^20 tokens take 73.7 GB, 10^6 take "
                "70.3 GB",
                "the article's break-even row (1,600 and 400 requests) does not follow its own formula, "
                "which gives 146 at 32K and 37 at 128K",
            ),
        ),
        KvModel(
            name="deepseek-v4-pro",
            attention=_V4_PRO,
            weights_bytes=800e9,
            source="article (30 CSA at 4 and 31 HCA at 128 tokens an entry, window 128); published "
            "calculations (entry 512 with rope 64, indexer key 128)",
            remarks=(
                "1.20 and 9.62 GiB at 128K and 1M are GiB, although the article writes GB for the first",
                "in FP8 the rope part stays at two bytes and the indexer goes to FP4: 0.502x of BF16, "
                "the article's half",
                "the article leaves out the windows of 128 raw entries a layer, 8 MB a request: 0.30 GiB at "
                "32K is 0.31 with them",
                "the article's requests per B300 (333/83/41/20/10 in BF16, 666/166/83/41/20 in FP8) are of a "
                "budget of 100 and rounded sizes, where its text has 108 to 110 GB; 110 / 0.30 is 366",
            ),
        ),
        KvModel(
            name="glm-5.2",
            attention=GroupedQuery(80, 8, 128),
            weights_bytes=170e9,
            source="estimate in the article: ~328 KB a token, shape assumed as Llama-3-70B's",
            remarks=(
                "the article's break-even row (3 and 1 requests) does not follow its own formula, which "
                "gives 8 at 32K and 2 at 128K",
                "the model's published configuration is latent attention, as glm-5 here: 89,856 bytes a "
                "token and an indexer, not 328 KB",
            ),
        ),
        KvModel(
            name="glm-5",
            attention=Latent(78, 512, 64),
            weights_bytes=744e9,
            source=_CONFIG + "; without its indexer's keys",
        ),
        KvModel(name="glm-4.5", attention=GroupedQuery(92, 8, 128), weights_bytes=355e9, source=_RECALLED),
        KvModel(
            name="glm-4.5-air", attention=GroupedQuery(46, 8, 128), weights_bytes=106e9, source=_RECALLED
        ),
        KvModel(name="qwen3-8b", attention=GroupedQuery(36, 8, 128), weights_bytes=8.2e9, source=_RECALLED),
        KvModel(name="qwen3-32b", attention=GroupedQuery(64, 8, 128), weights_bytes=32.8e9, source=_RECALLED),
        KvModel(
            name="qwen3-235b-a22b", attention=GroupedQuery(94, 4, 128), weights_bytes=235e9, source=_CONFIG
        ),
        KvModel(
            name="qwen2.5-72b", attention=GroupedQuery(80, 8, 128), weights_bytes=72.7e9, source=_RECALLED
        ),
        KvModel(
            name="smollm2-135m",
            attention=GroupedQuery(30, 3, 64),
            weights_bytes=0.135e9,
            source=_CONFIG,
        ),
    )
}
