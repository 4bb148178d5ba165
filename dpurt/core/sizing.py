"""How much of everything a load needs: KV, staging, bandwidth, money. Pure arithmetic over the catalogues.

Binary units for memory shown as GiB, decimal for GB and for device rates; 128K means 131,072 tokens. Each
function is one formula of the field's articles, computed exactly; where an article's own figures differ, the
model's `remarks` say so.

- *window*: the KV just ahead of the cursor that staging must hold. It takes `bytes / device rate` to read and
  lasts `tokens x decode step`; the margin is their ratio.
- *break-even*: KV optimisation pays when N x KV/token x S >= 0.5 x W (N concurrent requests of S tokens, weights
  W), so N = 0.5 W / (KV/token x S).
- *fits*: requests whose KV a memory budget holds, the budget being what weights and runtime leave.
- *bandwidth*: what the device must read. A running request reads its window over again once per
  `window tokens x step`; a starting one reads the hit share of its context, once in its decode time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.core.device_model import DeviceProfile
from dpurt.core.kv_models import KvModel

__all__ = [
    "DECODE_STEP_S",
    "TIERS",
    "WINDOW_TOKENS",
    "BreakEven",
    "Load",
    "Reading",
    "Tier",
    "TierFit",
    "Window",
    "break_even",
    "fits",
    "reading",
    "tier_fits",
    "window",
]

WINDOW_TOKENS = 4096
DECODE_STEP_S = (0.010, 0.030)  # fast and slow
PAYS_AT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`requests` run at once, each of `context_tokens`, of which the share `hit` is stored already; each
    decodes `output_tokens`."""

    model: KvModel
    context_tokens: int
    requests: int
    hit: float
    output_tokens: int = 512

    def __post_init__(self) -> None:
        if self.context_tokens < 1 or self.requests < 1 or self.output_tokens < 1:
            raise ValueError("context_tokens, requests and output_tokens must be >= 1")
        if not 0 <= self.hit <= 1:
            raise ValueError(f"hit must lie in [0, 1], got {self.hit}")

    @property
    def request_bytes(self) -> float:
        """KV of one request."""
        return self.model.request_bytes(self.context_tokens)

    @property
    def total_bytes(self) -> float:
        """KV of all of them."""
        return self.requests * self.request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place for KV: price range and the capacity range of a node, from the articles' table."""

    name: str
    dollars_per_gb: tuple[float, float]
    node_bytes: tuple[float, float]
    source: str


_TABLE = "tier table of the articles, 2026"
TIERS = (
    Tier(name="hbm", dollars_per_gb=(15, 40), node_bytes=(80e9, 288e9), source=_TABLE),
    Tier(name="dram", dollars_per_gb=(3, 3), node_bytes=(1e12, 4e12), source=_TABLE),
    Tier(name="ai_ssd", dollars_per_gb=(0.3, 0.5), node_bytes=(8e12, 64e12), source=_TABLE),
    Tier(
        name="nvme",
        dollars_per_gb=(0.15, 0.15),
        node_bytes=(8e12, 64e12),
        source=_TABLE + "; capacity taken as the AI SSD tier's",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One request's staging window. `margin` is how many times longer it lasts than it takes to read."""

    tokens: int
    num_bytes: float
    read_s: float
    lasts_s: tuple[float, float]

    @property
    def margin(self) -> tuple[float, float]:
        return (self.lasts_s[0] / self.read_s, self.lasts_s[1] / self.read_s)


def window(model: KvModel, device: DeviceProfile, tokens: int = WINDOW_TOKENS) -> Window:
    """The window of `tokens`, read as one stream."""
    num_bytes = model.bytes_per_token * tokens
    return Window(
        tokens=tokens,
        num_bytes=num_bytes,
        read_s=device.read_latency_s + num_bytes / device.read_bytes_per_s,
        lasts_s=(tokens * DECODE_STEP_S[0], tokens * DECODE_STEP_S[1]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Tokens in flight, and whole requests of some length, from which on KV optimisation pays."""

    tokens: float
    exact_requests: float

    @property
    def requests(self) -> int:
        return math.ceil(self.exact_requests)


def break_even(model: KvModel, context_tokens: int) -> BreakEven:
    """See the module's docstring."""
    tokens = PAYS_AT * model.weights_bytes / model.bytes_per_token
    return BreakEven(tokens=tokens, exact_requests=tokens / context_tokens)


def fits(budget_bytes: float, request_bytes: float) -> int:
    """Whole requests a budget holds."""
    return int(budget_bytes // request_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFit:
    """What the load means to one tier, at its small and its large node."""

    tier: str
    dollars: tuple[float, float]
    requests: tuple[int, int]


def tier_fits(load: Load, tiers: Sequence[Tier] = TIERS) -> list[TierFit]:
    """Cost of holding all of the load's KV in each tier, and how many requests a node of it holds."""
    total_gb = load.total_bytes / 1e9
    return [
        TierFit(
            tier=tier.name,
            dollars=(total_gb * tier.dollars_per_gb[0], total_gb * tier.dollars_per_gb[1]),
            requests=(
                fits(tier.node_bytes[0], load.request_bytes),
                fits(tier.node_bytes[1], load.request_bytes),
            ),
        )
        for tier in tiers
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the device has to read, at the slow and the fast decode step. `restore_s` is the time one request's
    stored context takes alone on the device; `load_share` of the device's rate is what all requests ask."""

    restore_bytes: float
    restore_s: float
    window_bytes_per_s: tuple[float, float]
    restore_bytes_per_s: tuple[float, float]
    load_share: tuple[float, float]


def reading(load: Load, device: DeviceProfile, window_tokens: int = WINDOW_TOKENS) -> Reading:
    """See the module's docstring."""
    restore = load.hit * load.request_bytes
    window_bytes = min(load.context_tokens, window_tokens) * load.model.bytes_per_token
    fast, slow = DECODE_STEP_S
    windows = tuple(load.requests * window_bytes / (window_tokens * step) for step in (slow, fast))
    restores = tuple(load.requests * restore / (load.output_tokens * step) for step in (slow, fast))
    return Reading(
        restore_bytes=restore,
        restore_s=device.read_latency_s + restore / device.read_bytes_per_s,
        window_bytes_per_s=(windows[0], windows[1]),
        restore_bytes_per_s=(restores[0], restores[1]),
        load_share=(
            (windows[0] + restores[0]) / device.read_bytes_per_s,
            (windows[1] + restores[1]) / device.read_bytes_per_s,
        ),
    )
