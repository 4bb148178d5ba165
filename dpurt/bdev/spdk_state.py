"""What a target holds, as its own answers say it; the fields we look at, checked when they arrive.

Answers have many more fields, which differ between versions: those are dropped here, and missing optional ones are
missing. A field of the wrong type is the target's fault and shows as a RemoteProtocolError where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from dpurt.errors import RemoteProtocolError

__all__ = [
    "ShownBdev", "ShownKey", "ShownStore", "ShownSubsystem", "ShownTransport", "ShownVhost", "TargetState", "checked",
]  # fmt: skip

Checked = TypeVar("Checked")


class ShownBdev(TypedDict):
    name: str
    product_name: str
    block_size: int
    num_blocks: int
    uuid: NotRequired[str]
    aliases: NotRequired[list[str]]
    claimed: NotRequired[bool]
    claim_type: NotRequired[str]
    assigned_rate_limits: NotRequired[dict[str, int]]
    driver_specific: NotRequired[dict[str, Any]]


class ShownStore(TypedDict):
    name: str
    base_bdev: str
    cluster_size: int


class ShownVhost(TypedDict):
    ctrlr: str
    socket: NotRequired[str]
    backend_specific: NotRequired[dict[str, Any]]


class ShownTransport(TypedDict):
    trtype: str
    max_io_size: NotRequired[int]


class ShownHost(TypedDict):
    nqn: str


class ShownNamespace(TypedDict):
    bdev_name: NotRequired[str]


class ShownAddress(TypedDict):
    trtype: str
    traddr: str
    trsvcid: str
    adrfam: NotRequired[str]


class ShownSubsystem(TypedDict):
    nqn: str
    allow_any_host: NotRequired[bool]
    hosts: NotRequired[list[ShownHost]]
    namespaces: NotRequired[list[ShownNamespace]]
    listen_addresses: NotRequired[list[ShownAddress]]


class ShownKey(TypedDict):
    """Holds the key in clear: reduce it to a fingerprint at once."""

    name: str
    key: str
    key2: NotRequired[str]


def checked(method: str, answer: object, shape: type[Checked]) -> Checked:
    """The answer of `method` in this shape. Raises RemoteProtocolError, without showing the answer."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("bad_answer", f"{method}: {error}") from error


@dataclass(frozen=True, slots=True)
class TargetState:
    """Everything that a plan looks at. `methods` are those the target was built with; empty if unknown."""

    bdevs: Sequence[ShownBdev] = ()
    lvstores: Sequence[ShownStore] = ()
    vhost: Sequence[ShownVhost] = ()
    transports: Sequence[ShownTransport] = ()
    subsystems: Sequence[ShownSubsystem] = ()
    keys: Mapping[str, bytes] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()

    def find(self, name: str) -> ShownBdev | None:
        """A bdev by name, alias or UUID."""
        for bdev in self.bdevs:
            if name in (bdev["name"], bdev.get("uuid"), *bdev.get("aliases", ())):
                return bdev
        return None
