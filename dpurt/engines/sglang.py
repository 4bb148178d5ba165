"""SGLang: what its KV events mean, and where a running server says it publishes them."""

from __future__ import annotations

from dpurt.core.host_tiers import HostTier
from dpurt.engines.residency import Dialect

# DISK and EXTERNAL are its L3. Its clear is a flush of the radix tree with its host pool.
DIALECT = Dialect(
    media={
        "GPU": HostTier.HBM,
        None: HostTier.HBM,
        "CPU_PINNED": HostTier.CPU,
        "DISK": None,
        "EXTERNAL": None,
    },
    cleared=(HostTier.HBM, HostTier.CPU),
    counted=frozenset(),
)
