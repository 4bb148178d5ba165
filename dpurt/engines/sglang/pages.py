"""SGLang's host pages as buffers, without a copy.

The host pool gives the address and size of every buffer of every page. A memoryview is made over each, once a call; SGLang keeps
the pages allocated until the call returns, and we never keep a view longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpurt.engines.store.memory import memory_at


def page_buffers(addresses: Sequence[int], sizes: Sequence[int], num_pages: int) -> list[list[memoryview]]:
    """Each page's buffers, in order. Raises ValueError when they do not fall evenly on the pages."""
    if len(addresses) != len(sizes) or num_pages < 1 or len(addresses) % num_pages:
        raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes for {num_pages} pages")
    each = len(addresses) // num_pages
    views = [memory_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
    return [views[at : at + each] for at in range(0, len(views), each)]
