"""Salt and LoRA in the tokens: two requests whose KV must not be shared never look alike to the node.

A space is one model's KV for one tenant of the operator. Within it vLLM tells requests apart further, by `cache_salt` and by
LoRA adapter, of which there may be any number at any time. So the first block's tokens carry a mark: a digest of those fields
in the bits above the vocabulary (ids end at 2^20). A chain is the same only when its first block is, so the whole prompt is set
apart, in the index, in keys and in the records on flash, and no service needs to know the salts. An unmarked prompt (no salt,
no adapter) keeps its plain tokens.

11 bits a token are 176 bits in a block of 16, 352 in one of 32. Blocks of fewer than 8 tokens are refused: too few bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VOCABULARY_BITS = 20
MARK_BITS = 31 - VOCABULARY_BITS
MIN_BLOCK_TOKENS = 8
_DOMAIN = b"dpurt.vllm.mark.1"

Tokens = NDArray[np.int32]


def mark_of(fields: Sequence[tuple[str, bytes]], block_tokens: int) -> Tokens | None:
    """What to add to a first block for (name, value) `fields`; None for none of them.

    Names and values are length-prefixed, so no two lists of fields share a mark but by a collision of SHAKE-256.
    """
    if not fields:
        return None
    if block_tokens < MIN_BLOCK_TOKENS:
        raise ValueError(f"a block of {block_tokens} tokens has no room for a mark, {MIN_BLOCK_TOKENS} has")
    shake = hashlib.shake_256(_DOMAIN)
    for name, value in fields:
        for part in (name.encode(), value):
            shake.update(len(part).to_bytes(8, "little") + part)
    words = np.frombuffer(shake.digest(4 * block_tokens), "<u4") & ((1 << MARK_BITS) - 1)
    words[0] |= 1  # never like an unmarked block
    return (words << VOCABULARY_BITS).astype(np.int32)


def marked(tokens: Sequence[int], mark: Tokens | None) -> bytes | None:
    """A prompt's tokens as the node sees them, little-endian int32; None when an id is no vocabulary entry."""
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << VOCABULARY_BITS):
        return None
    out = ids.astype("<i4")
    if mark is not None:
        head = out[: len(mark)]
        head |= mark[: len(head)]
    return out.tobytes()
