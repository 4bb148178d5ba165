"""The events the prefetch core and its predictors live on: facts told by agents, engines and the storage. All
frozen, and made by the thousand a second: a `Struct` costs a fifth of a frozen dataclass, and without cycles it needs no
garbage collector (`gc=False`).

Blocks, sequences and jobs are opaque int handles. `owner` says whose budget and whose statistics. Times
inside events are absolute, on the clock of the `now` they are handed in with.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

Where: TypeAlias = Literal["staging", "in_flight", "nvme", "gone"]


class Owner(NamedTuple):
    """Labels for accounting: the space (any stable short name) and the tenant."""

    space: str
    tenant: str


NOBODY = Owner("", "")


class Arrived(Struct, frozen=True, gc=False):
    """A request came; `blocks` are those of its prefix the node holds, in prefix order. Known before any
    scheduler ran."""

    sequence: int
    owner: Owner
    blocks: tuple[int, ...]
    expected_start: float | None = None


class Consumed(Struct, frozen=True, gc=False):
    """The load cursor moved: the host asked for `count` blocks from index `first` of the arrival's
    `blocks`."""

    sequence: int
    first: int
    count: int


class Stored(Struct, frozen=True, gc=False):
    """The sequence's chain grew: these blocks follow what it matched, in order, and are on our tiers now."""

    sequence: int
    blocks: tuple[int, ...]


class Paused(Struct, frozen=True, gc=False):
    """The sequence waits for something outside (a tool call), for about `expected_s` if anybody knows."""

    sequence: int
    expected_s: float | None = None
    reason: str = ""


class Resumed(Struct, frozen=True, gc=False):
    """The pause is over."""

    sequence: int


class Finished(Struct, frozen=True, gc=False):
    """The sequence ended normally; its conversation may return."""

    sequence: int
    reason: str = ""


class SequenceGone(Struct, frozen=True, gc=False):
    """Cancelled, its client died, or nothing was heard of it for the horizon."""

    sequence: int


class Ranked(Struct, frozen=True, gc=False):
    """Blocks an engine expects a layer group to want, best first, by `need_by`."""

    group: int
    blocks: tuple[int, ...]
    need_by: float


class DecodeStep(Struct, frozen=True, gc=False):
    """A sparse decode step touched these blocks in one layer group; `masses`, if known, are their shares of
    attention."""

    sequence: int
    step: int
    group: int
    touched: tuple[int, ...] = ()
    ranked: tuple[Ranked, ...] = ()
    masses: tuple[float, ...] | None = None


class Demanded(Struct, frozen=True, gc=False):
    """Somebody needs the block (those parts) now, and this is where it was at that moment."""

    block: int
    sequence: int
    where: Where
    parts_mask: int | None = None


class Staged(Struct, frozen=True, gc=False):
    """A job's bytes are in staging. Every `Fetch` is answered once, by this or by `FetchFailed`, cancelled or
    not."""

    block: int
    job: int


class FetchFailed(Struct, frozen=True, gc=False):
    """A job ended without its bytes; `reason` is a stable word (``"cancelled"`` answers a CancelFetch in
    time)."""

    job: int
    reason: str


class Evicted(Struct, frozen=True, gc=False):
    """The block left staging; the device still has it."""

    block: int


class Dropped(Struct, frozen=True, gc=False):
    """The block no longer exists on any of our tiers."""

    block: int


class LatencyMeasured(Struct, frozen=True, gc=False):
    """What a read of the device was lately seen to take beyond the time its bytes need."""

    latency_s: float


Event: TypeAlias = (
    Arrived
    | Consumed
    | Stored
    | Paused
    | Resumed
    | Finished
    | SequenceGone
    | DecodeStep
    | Demanded
    | Staged
    | FetchFailed
    | Evicted
    | Dropped
    | LatencyMeasured
)
