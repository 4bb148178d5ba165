"""vLLM: what its KV events mean, and where a running server says it publishes them."""

from __future__ import annotations

from dpurt.core.host_tiers import HostTier
from dpurt.engines.residency import Dialect

# STORAGE is a store that hosts share, maybe this node: not a host's tier. A clear is of the GPU pool only. Offloaded hashes
# may be told once for each chunk they are in.
DIALECT = Dialect(
    media={"GPU": HostTier.HBM, None: HostTier.HBM, "CPU": HostTier.CPU, "STORAGE": None},
    cleared=(HostTier.HBM,),
    counted=frozenset({HostTier.CPU}),
)
