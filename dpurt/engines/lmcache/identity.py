"""What makes two of LMCache's objects the same: the key's fields as one digest, and the space an object belongs to.

An LMCache object is the KV of one chunk, of one rank and layer group. Its key has a full hash of the chunk's prefix, the model's
name, the rank (with the size of its group), the layer group and a cache salt. All but the model go into the digest, length-
prefixed; the model chooses the space, together with the object's size: a model with layer groups of several sizes has as many
spaces. So a space's `block_tokens` is LMCache's chunk size, its `tp_size` is 1 (the rank is in the digest) and the bytes of its
parts add up to an object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpurt.core.identity import Space
from dpurt.errors import SpaceMismatch


def digest_of(chunk_hash: bytes, kv_rank: int, object_group_id: int, cache_salt: str) -> bytes:
    """32 bytes for all of a key but its model."""
    digest = hashlib.blake2b(digest_size=32, person=b"dpurt.lmcache")
    for field in (chunk_hash, b"%d" % kv_rank, b"%d" % object_group_id, cache_salt.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Layout:
    """What LMCache says of an object's memory."""

    num_bytes: int
    dtype: str  # empty where it does not say


class Spaces:
    """The spaces an adapter was given, by model and size of an object."""

    def __init__(self, spaces: Mapping[str, Space]) -> None:
        self._spaces = dict(spaces)

    def of_model(self, model: str) -> list[str]:
        """The names of all spaces of a model."""
        return [name for name, space in self._spaces.items() if space.model == model]

    def choose(self, model: str, layout: Layout) -> str:
        """The name of the space for such objects. Raises SpaceMismatch with the field that no space agrees in."""
        names = self.of_model(model)
        if not names:
            raise SpaceMismatch("model", sorted({space.model for space in self._spaces.values()}), model)
        sizes = {name: self._spaces[name].geometry.payload_bytes for name in names}
        fitting = [name for name in names if sizes[name] == layout.num_bytes]
        if not fitting:
            raise SpaceMismatch("payload_bytes", _one_or_all(list(sizes.values())), layout.num_bytes)
        dtypes = [self._spaces[name].kv_dtype for name in fitting]
        if layout.dtype and layout.dtype not in dtypes:
            raise SpaceMismatch("kv_dtype", _one_or_all(dtypes), layout.dtype)
        return fitting[dtypes.index(layout.dtype) if layout.dtype else 0]


def _one_or_all(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else list(values)
