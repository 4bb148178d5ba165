"""Wear and health of an NVMe controller as plain numbers, from `bdev_nvme_get_controller_health_info`. Pure.

The target prints what the device's SMART log says, counters of 128 bits included, and a temperature that is the sensor's
Kelvin minus 273 as an unsigned number: a device without a sensor reads 0 K, which comes out as 18446744073709551343.
What no device can mean is None here, never a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpurt.errors import RemoteProtocolError

__all__ = ["NvmeHealth", "health_of"]

DATA_UNIT_BYTES = 1000 * 512  # as the NVMe specification counts
PLAUSIBLE_CELSIUS = range(-60, 151)


@dataclass(frozen=True, slots=True)
class NvmeHealth:
    """SMART, for metrics and the endurance budget. `percentage_used` may pass 100, on a worn device."""

    model: str
    serial: str
    critical_warning: int
    temperature_celsius: int | None
    available_spare_percent: int
    percentage_used: int
    bytes_read: int
    bytes_written: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int

    @property
    def is_healthy(self) -> bool:
        return self.critical_warning == 0 and self.media_errors == 0

    @property
    def is_worn(self) -> bool:
        """Past its rated life, or near the end of its spare blocks (bit 0 of the warnings)."""
        return self.percentage_used >= 100 or bool(self.critical_warning & 1)


def health_of(answer: object) -> NvmeHealth:
    """The numbers of one answer. RemoteProtocolError if it is none."""
    if not isinstance(answer, Mapping):
        raise RemoteProtocolError("bad_health", f"expected an object, got {type(answer).__name__}")

    def number(name: str) -> int:
        value = answer.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RemoteProtocolError("bad_health", f"{name}: expected a number, got {value!r}")
        return value

    return NvmeHealth(
        model=str(answer.get("model_number", "")),
        serial=str(answer.get("serial_number", "")),
        critical_warning=number("critical_warning"),
        temperature_celsius=_celsius(number("temperature_celsius"))
        if "temperature_celsius" in answer
        else None,
        available_spare_percent=number("available_spare_percentage"),
        percentage_used=number("percentage_used"),
        bytes_read=number("data_units_read") * DATA_UNIT_BYTES,
        bytes_written=number("data_units_written") * DATA_UNIT_BYTES,
        power_on_hours=number("power_on_hours"),
        unsafe_shutdowns=number("unsafe_shutdowns"),
        media_errors=number("media_errors"),
    )


def _celsius(value: int) -> int | None:
    signed = value - (1 << 64) if value >= 1 << 63 else value
    return signed if signed in PLAUSIBLE_CELSIUS else None
