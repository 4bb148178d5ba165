"""Which cold blocks a layer attends to: by digests of their keys that stay in memory, after Quest (arXiv 2406.10774).

A block's digest is, for each KV head, the least and the greatest value of each key component in it: in float32 an
eighth of the block's KV, at 16 tokens. With them no key in the block can score more with a query than its *bound*. The bounds'
softmax over the cold blocks, averaged over heads, is taken for the block's share of attention; the blocks with the largest
shares are attended to. With the queries a layer is foretold to have, the same shares rank blocks for it ahead of time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpurt.engines.smollm2.model import Floats, Halves, Shape


class KeyDigests:
    """Digests of the first blocks of one sequence, of all layers. The first `skip` blocks are never chosen."""

    def __init__(self, shape: Shape, block_tokens: int, max_blocks: int, skip: int) -> None:
        self._shape = shape
        self._block_tokens = block_tokens
        self._skip = skip
        self._least = np.empty((shape.layers, shape.kv_heads, max_blocks, shape.head_size), np.float32)
        self._most = np.empty_like(self._least)
        self.blocks = 0

    def extend(self, kv: Halves) -> None:
        """More blocks follow: the KV of all layers, [layers, 2, tokens, KV heads, head size]."""
        shape = self._shape
        keys = kv[:, 0].reshape(shape.layers, -1, self._block_tokens, shape.kv_heads, shape.head_size)
        rows = slice(self.blocks, self.blocks + keys.shape[1])
        self._least[:, :, rows] = keys.min(axis=2).transpose(0, 2, 1, 3)
        self._most[:, :, rows] = keys.max(axis=2).transpose(0, 2, 1, 3)
        self.blocks = rows.stop

    def shares(self, layer: int, queries: Floats) -> Floats:
        """Each block's estimated share of the attention that goes to cold blocks."""
        least, most = self._least[layer, :, : self.blocks], self._most[layer, :, : self.blocks]
        columns = queries.transpose(0, 2, 1)
        bounds = most @ np.maximum(columns, 0) + least @ np.minimum(columns, 0)
        bounds *= np.float32(self._shape.head_size**-0.5)
        bounds[:, : self._skip] = -np.inf
        shares = np.exp(bounds - bounds.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mean: Floats = shares.mean(axis=(0, 2))
        return mean


def first_of(shares: Floats, count: int) -> npt.NDArray[np.intp]:
    """The blocks with the largest shares, largest first, the earlier of equals first; none without any share."""
    best = np.argsort(-shares, kind="stable")[:count]
    return best[shares[best] > 0]
