"""The engine's KV memory as rows of bytes: what a block of ours is in vLLM's tensors, and how it gets in and out.

vLLM hands one tensor a layer, indexed by block in its first dimension (CPU and most GPU back ends) or its second (K and V
apart). A layer's share of a block is that block's bytes as they lie there, so a block's payload is the layers' shares one after
the other: no conversion, and the order in memory is part of the identity (`LayerGroup.packing`). An engine with another back end,
which orders bytes otherwise, is refused by name rather than served garbage.

On the CPU rows are numpy views and copying them is memcpy. On a device a batch goes through one host buffer a layer, on a
stream of its own: that path was not run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpurt.core.identity import MAX_PARTS, Geometry, LayerGroup

Bytes = NDArray[np.uint8]


class UnsupportedLayout(ValueError):
    """KV that is not one row of bytes a block and layer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its planes (one, or K and V), each [blocks, bytes]."""

    name: str
    planes: tuple[torch.Tensor, ...]
    packing: str

    @property
    def block_bytes(self) -> int:
        return sum(plane.shape[1] for plane in self.planes)


def layer_of(name: str, tensor: torch.Tensor, num_blocks: int) -> Layer:
    """A layer's tensor as rows, one a block of the cache manager's. Raises UnsupportedLayout."""
    shape = tuple(tensor.shape)
    parts: tuple[torch.Tensor, ...]
    if shape[0] % num_blocks == 0 and shape[0]:
        parts, split = (tensor,), shape[0] // num_blocks
    elif len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        parts, split = (tensor[0], tensor[1]), shape[1] // num_blocks
    else:
        raise UnsupportedLayout(f"layer {name}: shape {shape} has no dimension of {num_blocks} blocks")
    planes = tuple(_rows(name, part, num_blocks, split) for part in parts)
    return Layer(name, planes, _packing(parts, split))


def _rows(name: str, part: torch.Tensor, num_blocks: int, split: int) -> torch.Tensor:
    """[num_blocks, bytes]; a manager's block may be `split` blocks of the kernel's, one after the other."""
    try:
        if split > 1:
            part = part.view(num_blocks, split, *part.shape[1:])
        order = sorted(range(1, part.dim()), key=lambda d: part.stride(d), reverse=True)
        return part.permute(0, *order).view(num_blocks, -1).view(torch.uint8)  # views, or an error
    except RuntimeError as error:
        raise UnsupportedLayout(f"layer {name}: a block's bytes are not in one piece: {error}") from error


def _packing(parts: Sequence[torch.Tensor], split: int) -> str:
    """The order of a block's elements in memory, as a word: dimensions outermost first, e.g. ``1:(1.3)x(2.32)x(3.128)``."""
    first = parts[0]
    order = sorted(range(1, first.dim()), key=lambda d: first.stride(d), reverse=True)
    dims = "x".join(f"({d}.{first.shape[d]})" for d in order)
    return f"{len(parts)}:{dims}" + (f":{split}" if split > 1 else "")


class Pages:
    """All layers, in order, and the geometry they make."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], num_blocks: int, heads: Mapping[str, tuple[int, int]],
        windows: Mapping[str, int | None], block_tokens: int,
    ) -> None:  # fmt: skip
        names = sorted(caches, key=_layer_number)
        self.layers = [layer_of(name, caches[name], num_blocks) for name in names]
        self.num_blocks = num_blocks
        self.is_on_cpu = all(p.device.type == "cpu" for layer in self.layers for p in layer.planes)
        self._runs = _runs(len(names))
        self.part_of = {names[i]: part for part, run in enumerate(self._runs) for i in run}
        groups = tuple(self._group(i, run, heads, windows) for i, run in enumerate(self._runs))
        self.geometry = Geometry(block_tokens=block_tokens, groups=groups)
        self._tables = [self._table(part) for part in range(len(self._runs))]

    def _group(
        self, part: int, run: Sequence[int], heads: Mapping[str, tuple[int, int]],
        windows: Mapping[str, int | None],
    ) -> LayerGroup:  # fmt: skip
        layers = [self.layers[i] for i in run]
        first = layers[0]
        if any(other.packing != first.packing for other in layers):
            raise UnsupportedLayout(f"layers {first.name} and on share a part and differ in layout")
        num_heads, size = heads[first.name]
        return LayerGroup(
            name="layer" if len(self._runs) == 1 else f"layer.{part}", num_layers=len(layers), num_kv_heads=num_heads, head_size=size,
            part_bytes=sum(layer.block_bytes for layer in layers), packing=first.packing,
            window_tokens=windows[first.name],
        )  # fmt: skip

    def _table(self, part: int) -> list[tuple[torch.Tensor, int]]:
        """(rows, offset in the payload) of each plane of a part."""
        at, table = self.geometry.part_offsets[part], []
        for i in self._runs[part]:
            for plane in self.layers[i].planes:
                table.append((plane, at))
                at += plane.shape[1]
        return table

    def fence(self) -> Callable[[], object]:
        """The engine's work so far; calling what is returned waits for it, in any thread."""
        if self.is_on_cpu:
            return bool
        event = torch.cuda.Event()
        event.record()
        wait: Callable[[], object] = event.synchronize
        return wait

    # --- bytes out and in. Callers see to it that the blocks are theirs meanwhile ---

    def gather(self, ids: Sequence[int], into: Bytes) -> None:
        """Copy blocks `ids` out, one payload a row of `into`."""
        for table in self._tables:
            for rows, at in table:
                width = rows.shape[1]
                if self.is_on_cpu:
                    source = rows.numpy()
                    for i, block in enumerate(ids):
                        into[i, at : at + width] = source[block]
                else:
                    chosen = rows.index_select(0, torch.tensor(ids, device=rows.device))
                    into[: len(ids), at : at + width] = chosen.cpu().numpy()

    def scatter(self, ids: Sequence[int], payloads: Sequence[Bytes], part: int, start: int = 0) -> None:
        """Copy one part of blocks `ids` in; payloads begin at payload byte `start`."""
        for rows, at in self._tables[part]:
            width, at = rows.shape[1], at - start
            if self.is_on_cpu:
                target = rows.numpy()
                for block, payload in zip(ids, payloads, strict=True):
                    target[block] = payload[at : at + width]
            else:
                stacked = np.stack([payload[at : at + width] for payload in payloads])
                index = torch.tensor(ids, device=rows.device)
                rows.index_copy_(0, index, torch.from_numpy(stacked).to(rows.device))
        if not self.is_on_cpu:
            torch.cuda.current_stream().synchronize()


def _layer_number(name: str) -> tuple[int, str]:
    """By the first number in a layer's name."""
    found = re.search(r"\d+", name)
    return (int(found.group()) if found else -1), name


def _runs(num_layers: int) -> list[range]:
    """One part a layer, or as few layers a part as `MAX_PARTS` allows."""
    size = -(-num_layers // MAX_PARTS)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]
