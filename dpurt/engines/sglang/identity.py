"""What SGLang's host KV pool says of its pages, as a space of ours: everything that must be equal for a page to be reusable.

SGLang's page keys are full SHA-256 digests over tokens, adapter and cache salt; that they name the same *bytes* only within one
model, dtype, page size, memory layout and rank, is for the storage backend to see to. A page is one block. Its parts are the
buffers SGLang gives for it: K and V for page-first layouts, one for MLA; with the layer-first layout all of a page's buffers
are one part. The layout's name is in the packing, so a node's space that holds another layout refuses the engine by name.

Shards: one a rank, over TP (and attention CP) within PP. MLA pages are the same on every TP rank: one shard, one writer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.core.identity import Geometry, LayerGroup, Space

DIGEST_BYTES = 32
_PAGE_HASH = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class UnsupportedPool(ValueError):
    """A host pool whose pages this backend cannot name or reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands in its model's group."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    is_replicated: bool = False  # MLA: every TP rank has the same page

    @property
    def group_size(self) -> int:
        """Different shards of a page in one pipeline stage."""
        return self.cp_size * (1 if self.is_replicated else self.tp_size)

    @property
    def shard(self) -> int:
        """This process's shard of a page."""
        in_stage = self.cp_rank if self.is_replicated else self.cp_rank * self.tp_size + self.tp_rank
        return self.pp_rank * self.group_size + in_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a host pool says of one page. `buffer_bytes` are its buffers' sizes, in order."""

    page_size: int
    layout: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    buffer_bytes: tuple[int, ...]
    is_mla: bool = False


def space_of(facts: PoolFacts, ranks: Ranks, *, model: str, revision: str, tenant: str, salt: bytes) -> Space:
    """The space this engine's pages belong to, at epoch 0."""
    geometry = Geometry(block_tokens=facts.page_size, groups=tuple(_groups(facts)))
    return Space(
        model=model, revision=revision, kv_dtype=facts.dtype.removeprefix("torch."), geometry=geometry,
        tenant=tenant, salt=salt, tp_size=ranks.group_size, pp_size=ranks.pp_size,
    )  # fmt: skip


def _groups(facts: PoolFacts) -> list[LayerGroup]:
    if not facts.buffer_bytes or min(facts.buffer_bytes) < 1:
        raise UnsupportedPool(f"a page of layout {facts.layout!r} has buffers of {facts.buffer_bytes} bytes")
    parts = {1: ("kv",), 2: ("k", "v")}.get(len(facts.buffer_bytes), ("kv",))
    sizes = facts.buffer_bytes if len(parts) > 1 else (sum(facts.buffer_bytes),)
    kind = "mla" if facts.is_mla else "mha"
    return [
        LayerGroup(
            name=part, num_layers=facts.num_layers, num_kv_heads=facts.num_kv_heads,
            head_size=facts.head_size, part_bytes=size, packing=f"sglang.{kind}.{facts.layout}.{part}",
        )
        for part, size in zip(parts, sizes, strict=True)
    ]  # fmt: skip


def digests_of(keys: Sequence[str]) -> list[bytes]:
    """SGLang's page hashes (hex of SHA-256) as bytes. Any other text is hashed, and is never equal to one of those but by collision."""
    return [bytes.fromhex(key) if _PAGE_HASH.fullmatch(key) else _hashed(key) for key in keys]


def _hashed(key: str) -> bytes:
    text = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"dpurt.sglang").digest()


def topology_table(name: str, space: Space) -> str:
    """The `[[space]]` table a node needs for this engine, to paste. The salt is the tenant's and stays out."""
    rows = [
        "[[space]]", f'name = "{name}"', f'model = "{space.model}"', f'revision = "{space.revision}"',
        f'kv_dtype = "{space.kv_dtype}"', f'tenant = "{space.tenant}"',
        f"tp_size = {space.tp_size}", f"pp_size = {space.pp_size}", "[space.geometry]",
        f"block_tokens = {space.geometry.block_tokens}",
    ]  # fmt: skip
    for group in space.geometry.groups:
        rows += [
            "[[space.geometry.groups]]", f'name = "{group.name}"', f"num_layers = {group.num_layers}",
            f"num_kv_heads = {group.num_kv_heads}", f"head_size = {group.head_size}",
            f"part_bytes = {group.part_bytes}", f'packing = "{group.packing}"',
        ]  # fmt: skip
    return "\n".join(rows)
