"""What the demo's prompts and blocks contain: tokens from block ids, and bytes from block keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOKEN_STEP = 131  # neighbouring blocks differ in every token


def tokens_of(block_ids: Sequence[int], block_tokens: int) -> bytes:
    """Little-endian int32 tokens of a prompt made of these trace blocks; equal ids give equal tokens."""
    ids = np.asarray(block_ids, np.int64)[:, None] * TOKEN_STEP
    tokens = (ids + np.arange(block_tokens, dtype=np.int64)[None, :]) % (2**31 - 1)
    return tokens.astype("<i4").tobytes()


def payload_of(key: bytes, num_bytes: int) -> bytes:
    """The bytes a block with this key must have: SFC64 seeded by the whole key."""
    seed = np.random.SeedSequence(int.from_bytes(key, "little"))
    words = np.random.SFC64(seed).random_raw(-(-num_bytes // 8))
    return words.astype("<u8", copy=False).tobytes()[:num_bytes]
