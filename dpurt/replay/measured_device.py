"""A device profile by name, or from a file that says what a device was measured to do.

Such a file is what `dpurt bench device --json FILE` writes, or the fields of a `DeviceProfile` as one JSON object.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpurt.core.device_model import DeviceProfile
from dpurt.core.device_profiles import DEVICES
from dpurt.errors import ConfigError

__all__ = ["FIGURES", "device_named"]

# figure of the benchmark -> field of the profile, and what to multiply it by
FIGURES = {
    "read latency": ("read_latency_s", 1e-6),
    "write latency": ("write_latency_s", 1e-6),
    "read rate": ("read_bytes_per_s", 1.0),
    "write rate": ("write_bytes_per_s", 1.0),
}


class _Figure(msgspec.Struct, frozen=True):
    name: str
    value: float


class _Bench(msgspec.Struct, frozen=True):
    name: str
    figures: tuple[_Figure, ...]
    conditions: dict[str, object]


def device_named(name: str) -> DeviceProfile:
    """The profile. ConfigError for a name that is neither known nor a readable file of measurements."""
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError("--device", f"expected one of {', '.join(DEVICES)}, or a file, got {name!r}")
    try:
        return _from_json(path, path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(str(path), f"expected measurements of a device: {error}") from error


def _from_json(path: Path, text: bytes) -> DeviceProfile:
    fields = msgspec.json.decode(text, type=dict[str, object])
    if "figures" not in fields:
        return msgspec.convert({"source": f"given in {path.name}"} | fields, DeviceProfile)
    bench = msgspec.convert(fields, _Bench)
    if bench.name != "device":
        raise ValueError(f"expected the result of `dpurt bench device`, got that of {bench.name!r}")
    measured = {figure.name: figure.value for figure in bench.figures}
    missing = ", ".join(FIGURES.keys() - measured.keys())
    if missing:
        raise ValueError(f"expected the figures {missing}")
    profile = {field: measured[figure] * factor for figure, (field, factor) in FIGURES.items()}
    depth = bench.conditions.get("queue_depth", 64)
    source = f"measured by dpurt bench device, in {path.name}"
    return msgspec.convert(
        profile | {"name": path.stem, "queue_depth": depth, "source": source}, DeviceProfile
    )
