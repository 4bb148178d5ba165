"""What makes two KV blocks the same: spaces, fingerprints and 16-byte block keys.

A *space* is everything that must be equal for KV to be reusable. Its fingerprint is a BLAKE2b-256, keyed by the tenant's
salt, over a canonical, length-prefixed encoding of all fields. A *block key* is a BLAKE2b-128 keyed by the fingerprint
over (parent key, token bytes) or over (parent key, an engine's full digest). So any field that differs gives disjoint keys
(facts: U1-U8), two processes agree whatever their PYTHONHASHSEED, and the salt never travels.

Nothing here calls `hash()`. The encoding is frozen: `tests/core/vectors.json` holds vectors that must never change;
a change of the encoding is a new `ENCODING` value.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from dpurt.errors import SpaceMismatch

ENCODING = b"dpurt-space-1"
KEY_BYTES = 16  # NVMe-KV and DOCA Memos keys hold at most 16 bytes
ROOT_KEY = bytes(KEY_BYTES)  # the parent of a first block
MAX_PARTS = 128
_SECRET = "<secret>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """One layer group of a model: the unit a block's *part* holds.

    `part_bytes` is the size of the group's share of one block of one shard, in bytes. `window_tokens` is None for full
    attention, else the group's sliding window. `packing` says how K and V lie in the part (``"kv"``, ``"vk"``,
    ``"packed"``, ``"mla"`` ...): an opaque word, but part of the identity (U51).
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    part_bytes: int
    packing: str = "kv"
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a block of KV is laid out. `token_bytes` is the width of one token on the wire: 4 (int32) or 8 (int64, pairs)."""

    block_tokens: int
    groups: tuple[LayerGroup, ...]
    token_bytes: int = 4

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be >= 1, got {self.block_tokens}")
        if self.token_bytes not in (4, 8):
            raise ValueError(f"token_bytes must be 4 or 8, got {self.token_bytes}")
        if not 1 <= len(self.groups) <= MAX_PARTS:
            raise ValueError(f"a geometry has 1 to {MAX_PARTS} layer groups, got {len(self.groups)}")
        for group in self.groups:
            if group.part_bytes < 1:
                raise ValueError(f"group {group.name!r}: part_bytes must be >= 1, got {group.part_bytes}")

    @property
    def block_token_bytes(self) -> int:
        """Bytes of one block's tokens."""
        return self.block_tokens * self.token_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block's KV, one shard: the parts, contiguous, in order."""
        return sum(group.part_bytes for group in self.groups)

    @property
    def part_offsets(self) -> tuple[int, ...]:
        """Start of each part in the payload, plus the payload's end: ``len(groups) + 1`` numbers."""
        offsets = [0]
        for group in self.groups:
            offsets.append(offsets[-1] + group.part_bytes)
        return tuple(offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that must be equal for two KV blocks to be interchangeable. `salt` is the tenant's secret."""

    model: str
    revision: str
    kv_dtype: str
    geometry: Geometry
    tenant: str
    salt: bytes = field(default=b"", repr=False)
    tp_size: int = 1
    pp_size: int = 1
    lora_name: str | None = None
    lora_version: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise ValueError("tp_size and pp_size must be >= 1")
        if self.epoch < 0:
            raise ValueError("epoch must be >= 0")

    @property
    def num_shards(self) -> int:
        """One shard per rank of the tensor- and pipeline-parallel group."""
        return self.tp_size * self.pp_size

    def encode(self) -> bytes:
        """Canonical bytes of every field but the salt: tagged and length-prefixed, so no two spaces share an encoding."""
        return ENCODING + b"".join(_encode_field(name, value) for name, value in _flat_fields(self))

    def fingerprint(self) -> bytes:
        """32 bytes: BLAKE2b-256 of `encode()`, keyed by the salt (an empty salt is a key of its own, not no key: U8)."""
        salt_key = hashlib.blake2b(self.salt, digest_size=32, person=b"dpurt.salt").digest()
        return hashlib.blake2b(self.encode(), digest_size=32, key=salt_key, person=b"dpurt.space").digest()

    def with_epoch(self, epoch: int) -> Space:
        """The same space for another generation of weights."""
        return replace(self, epoch=epoch)


def _flat_fields(space: Space) -> Iterator[tuple[str, object]]:
    """(dotted name, scalar) for each identity field but the salt, in declaration order."""
    for f in fields(space):
        if f.name == "salt":
            continue
        value = getattr(space, f.name)
        if not isinstance(value, Geometry):
            yield f.name, value
            continue
        yield "geometry.block_tokens", value.block_tokens
        yield "geometry.token_bytes", value.token_bytes
        yield "geometry.num_groups", len(value.groups)
        for i, group in enumerate(value.groups):
            for g in fields(group):
                yield f"geometry.groups[{i}].{g.name}", getattr(group, g.name)


def _encode_field(name: str, value: object) -> bytes:
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, bool):
        raise TypeError(f"{name}: bool is not an identity type")
    elif isinstance(value, int):
        tag, body = b"i", str(value).encode()
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"{name}: {type(value).__name__} is not an identity type")
    key = name.encode()
    return struct.pack("<I", len(key)) + key + tag + struct.pack("<Q", len(body)) + body


def check_same_space(mine: Space, theirs: Space, their_fingerprint: bytes) -> None:
    """Raise SpaceMismatch naming the first field in which a peer's space differs from ours.

    `theirs` carries no salt (it does not travel); a differing fingerprint with all public fields equal means the salt.
    """
    difference = first_difference(mine, theirs)
    if difference is not None:
        raise SpaceMismatch(*difference)
    if not hmac.compare_digest(their_fingerprint, mine.fingerprint()):  # it proves who knows the salt
        raise SpaceMismatch("salt", _SECRET, _SECRET)


def first_difference(mine: Space, theirs: Space) -> tuple[str, object, object] | None:
    """(dotted field, my value, their value) of the first public field in which two spaces differ."""
    for (name, my_value), (their_name, their_value) in zip(
        _flat_fields(mine), _flat_fields(theirs), strict=False
    ):
        if name != their_name or type(my_value) is not type(their_value) or my_value != their_value:
            return name, my_value, their_value
    return None


# --- block keys ------------------------------------------------------------------------------------------------------


def block_key(fingerprint: bytes, parent: bytes, tokens: bytes | memoryview) -> bytes:
    """Key of the block holding `tokens` (raw little-endian bytes) under `parent` (ROOT_KEY for a first block)."""
    h = hashlib.blake2b(parent, digest_size=KEY_BYTES, key=fingerprint, person=b"dpurt.tokens")
    h.update(tokens)
    return h.digest()


def digest_key(fingerprint: bytes, digest: bytes) -> bytes:
    """Key of a block known only by its engine's own full (chained) digest. Never equal to a token key."""
    return hashlib.blake2b(digest, digest_size=KEY_BYTES, key=fingerprint, person=b"dpurt.digest").digest()


def chain_keys(
    fingerprint: bytes, parent: bytes, tokens: bytes | memoryview, block_token_bytes: int
) -> list[bytes]:
    """Keys of the successive whole blocks in `tokens`; a last partial block has none."""
    view = memoryview(tokens)
    keys: list[bytes] = []
    for start in range(0, len(view) - block_token_bytes + 1, block_token_bytes):
        parent = block_key(fingerprint, parent, view[start : start + block_token_bytes])
        keys.append(parent)
    return keys


def conformance_vectors(fingerprint: bytes) -> tuple[bytes, ...]:
    """Keys of fixed inputs in this space; peers exchange them at `hello`, so a changed formula is noticed (U2)."""
    tokens = struct.pack("<8i", 0, 1, 2, 3, -1, 2**31 - 1, 65536, 7)
    first = block_key(fingerprint, ROOT_KEY, tokens)
    return first, block_key(fingerprint, first, b""), digest_key(fingerprint, tokens)


@dataclass(frozen=True, slots=True)
class PartRun:
    """A run of parts of a block: ``[start, stop)``."""

    start: int
    stop: int

    @property
    def mask(self) -> int:
        """The run as a bit mask, part 0 in the lowest bit."""
        return (1 << self.stop) - (1 << self.start)


def mask_runs(mask: int) -> Sequence[PartRun]:
    """The maximal runs of set bits of a part mask, in order."""
    runs = []
    start = 0
    while mask >> start:
        low = (mask >> start) & -(mask >> start)
        start += low.bit_length() - 1
        length = (~(mask >> start) & ((mask >> start) + 1)).bit_length() - 1
        runs.append(PartRun(start, start + length))
        start += length
    return runs
