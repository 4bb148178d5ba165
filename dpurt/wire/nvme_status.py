"""What an NVMe status means to us: decoding, names, and the rule what to do next.

The rule: a path problem (asymmetric access) sends the command down another path; a namespace that is not
there is gone; a range that is not there or a full device is final; anything else is tried again unless the
controller set "do not retry" (DNR), after the delay it asks for (CRD).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GOOD", "TRANSIENT_TRANSPORT_ERROR", "Action", "Status"]

_GENERIC, _SPECIFIC, _MEDIA, _PATH = range(4)

_NAMES = {
    (0, 0x00): "successful completion",
    (0, 0x01): "invalid opcode",
    (0, 0x02): "invalid field in command",
    (0, 0x03): "command id conflict",
    (0, 0x04): "data transfer error",
    (0, 0x06): "internal error",
    (0, 0x07): "abort requested",
    (0, 0x08): "aborted, queue deleted",
    (0, 0x0B): "invalid namespace or format",
    (0, 0x0C): "command sequence error",
    (0, 0x0F): "data SGL length invalid",
    (0, 0x11): "SGL descriptor type invalid",
    (0, 0x20): "namespace is write protected",
    (0, 0x21): "command interrupted",
    (0, 0x22): "transient transport error",
    (0, 0x80): "LBA out of range",
    (0, 0x81): "capacity exceeded",
    (0, 0x82): "namespace not ready",
    (0, 0x83): "reservation conflict",
    (1, 0x80): "incompatible connect format",
    (1, 0x81): "controller busy",
    (1, 0x82): "connect parameters invalid",
    (1, 0x83): "connect: restart discovery",
    (1, 0x84): "connect: host not allowed",
    (2, 0x80): "write fault",
    (2, 0x81): "unrecovered read error",
    (2, 0x86): "access denied",
    (3, 0x00): "internal path error",
    (3, 0x01): "asymmetric access persistent loss",
    (3, 0x02): "asymmetric access inaccessible",
    (3, 0x03): "asymmetric access transition",
    (3, 0x60): "controller pathing error",
    (3, 0x70): "host pathing error",
    (3, 0x71): "aborted by host",
}
_FINAL = {(0, 0x0B): "gone", (0, 0x80): "out_of_range", (0, 0x81): "no_space"}


class Action(enum.Enum):
    """What to do with a command that has this status."""

    ACCEPT = enum.auto()
    OTHER_PATH = enum.auto()
    RETRY = enum.auto()
    FAIL = enum.auto()


@dataclass(frozen=True, slots=True)
class Status:
    """A status field, taken apart: type, code, retry-delay selector (0: none), more, do not retry."""

    sct: int = 0
    sc: int = 0
    crd: int = 0
    more: bool = False
    dnr: bool = False

    @classmethod
    def decode(cls, word: int) -> Status:
        """From the last 16 bits of a completion; the phase bit means nothing over fabrics."""
        if not word & 0xFFFE:
            return GOOD
        return cls(word >> 9 & 7, word >> 1 & 0xFF, word >> 12 & 3, bool(word & 0x4000), bool(word & 0x8000))

    @property
    def is_good(self) -> bool:
        return not self.sct and not self.sc

    @property
    def is_for_path(self) -> bool:
        return self.sct == _PATH

    @property
    def action(self) -> Action:
        if self.is_good:
            return Action.ACCEPT
        if self.is_for_path:
            return Action.OTHER_PATH
        return Action.FAIL if self.dnr or (self.sct, self.sc) in _FINAL else Action.RETRY

    @property
    def bdev_status(self) -> str:
        """The word of `BdevError` for it."""
        word = "unavailable" if self.is_for_path else "io_error"
        return _FINAL.get((self.sct, self.sc), word)

    def retry_delay_s(self, crdt: Sequence[int]) -> float:
        """The controller's wish, `crdt` being its three command retry delay times in units of 100 ms."""
        return crdt[self.crd - 1] / 10 if self.crd else 0.0

    def __str__(self) -> str:
        name = _NAMES.get((self.sct, self.sc), "vendor specific" if self.sct == 7 else "unnamed status")
        return f"{name}, sct {self.sct} sc {self.sc:#04x}{' dnr' if self.dnr else ''}"


GOOD = Status()
TRANSIENT_TRANSPORT_ERROR = Status(0, 0x22)
