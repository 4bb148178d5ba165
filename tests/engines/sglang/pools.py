"""SGLang's own pools in CPU memory, what is in them, and topologies of nodes for their pages."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 16
SPACE = "tiny"


def topology(
    folder: Path, *, space: str, name: str = SPACE, tenant: str = "t", segment: str = "1 MiB",
    size: str = "64 MiB", staging: str = "16 MiB",
) -> Path:  # fmt: skip
    """A node on a file, for one space."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "node.toml"
    path.write_text(
        f"""
[node]
name = "sglang-test"
run_dir = "run"
[gateway]
bind = "tcp://127.0.0.1:{port}"
session_timeout_s = 2.0
[staging]
bytes = "{staging}"
[[bdev]]
name = "flash"
kind = "file"
path = "{folder}/kv.img"
size_bytes = "{size}"
segment_bytes = "{segment}"
[[tenant]]
name = "{tenant}"
salt = "sixteen bytes or more"
[[host]]
name = "localhost"
spaces = ["{name}"]
fabrics = ["shm", "tcp"]
inbound_bytes = "{staging}"
{space}
"""
    )
    return path


def space_table(
    layout: str = "page_first", *, dtype: str = "bfloat16", tp_size: int = 1, head_size: int = HEAD_SIZE
) -> str:
    """The space of `mha_pool`'s pages, written by hand."""
    plane = PAGE * LAYERS * HEADS * HEAD_SIZE * 2
    parts = [("kv", 2 * plane)] if layout == "layer_first" else [("k", plane), ("v", plane)]
    return _table("mha", layout, dtype, tp_size, HEADS, head_size, parts)


def mla_table(width: int) -> str:
    """The space of `mla_pool`'s pages."""
    return _table("mla", "page_first", "bfloat16", 1, 1, width, [("kv", PAGE * LAYERS * width * 2)])


def _table(
    kind: str, layout: str, dtype: str, tp_size: int, heads: int, head_size: int, parts: list[tuple[str, int]]
) -> str:
    groups = "".join(
        f'[[space.geometry.groups]]\nname = "{name}"\nnum_layers = {LAYERS}\nnum_kv_heads = {heads}\n'
        f'head_size = {head_size}\npart_bytes = {size}\npacking = "sglang.{kind}.{layout}.{name}"\n'
        for name, size in parts
    )
    return (
        f'[[space]]\nname = "{SPACE}"\nmodel = "tiny"\nrevision = "r1"\nkv_dtype = "{dtype}"\ntenant = "t"\n'
        f"tp_size = {tp_size}\n[space.geometry]\nblock_tokens = {PAGE}\n{groups}"
    )


@dataclass(frozen=True)
class Shape:
    """A model's KV, and how many tokens the pools hold."""

    page_size: int = PAGE
    layers: int = LAYERS
    heads: int = HEADS
    head_size: int = HEAD_SIZE
    tokens: int = 1024


TINY = Shape()


def device_pool(shape: Shape = TINY) -> Any:
    """SGLang's own device pool, in CPU memory."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=shape.tokens, page_size=shape.page_size, dtype=torch.bfloat16, head_num=shape.heads,
        head_dim=shape.head_size, layer_num=shape.layers, device="cpu", enable_memory_saver=False,
        enable_alt_stream=False,
    )  # fmt: skip


def mha_pool(layout: str = "page_first", device: Any = None, shape: Shape = TINY) -> Any:
    """SGLang's own host pool, filled with bytes that are nowhere the same."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = device or device_pool(shape)
    k, v = tuple(device.k_buffer), tuple(device.v_buffer)
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=shape.page_size, head_num=shape.heads, head_dim=shape.head_size,
        v_head_dim=shape.head_size, dtype=k[0].dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool = MHATokenToKVPoolHost(
        info, 2.0, 0, shape.page_size, layout, pin_memory=False, device="cpu",
        device_capacity_tokens=shape.tokens, start_layer=0, end_layer=shape.layers,
    )  # fmt: skip
    fill(pool, seed=1)
    return pool


def mla_pool() -> Any:
    """SGLang's own host pool of latent KV, which every TP rank holds in full."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    device = MLATokenToKVPool(
        size=1024, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    rows = tuple(device.kv_buffer)
    info = MLABufferInfo(
        buffers=rows, data_ptrs=_pointers(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS,
        page_size=PAGE, kv_lora_rank=32, qk_rope_head_dim=8, kv_cache_dim=40, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, "page_first", pin_memory=False, device="cpu", device_capacity_tokens=1024,
        start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip
    fill(pool, seed=1)
    return pool


def _pointers(tensors: tuple[Any, ...]) -> Any:
    import torch

    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def fill(pool: Any, seed: int) -> None:
    """Every byte of the host pool anew."""
    import torch

    flat = pool.kv_buffer.view(torch.uint8).reshape(-1)
    flat.copy_(
        torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    )


def page(pool: Any, number: int) -> bytes:
    """A page's bytes in the host pool, read by SGLang's own code."""
    import torch

    return bytes(
        pool.get_data_page(number * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy()
    )


def indices(*pages: int, page_size: int = PAGE) -> Any:
    """The host pool's token indices of these pages."""
    import torch

    return torch.cat([torch.arange(number * page_size, (number + 1) * page_size) for number in pages])


def keys(count: int, prompt: int = 0) -> list[str]:
    """A prompt's page hashes, by SGLang's own function."""
    from sglang.srt.mem_cache.utils import get_hash_str

    hashes: list[str] = []
    for number in range(count):
        tokens = list(range(prompt * 1000 + number * PAGE, prompt * 1000 + (number + 1) * PAGE))
        hashes.append(get_hash_str(tokens, hashes[-1] if hashes else None))
    return hashes
