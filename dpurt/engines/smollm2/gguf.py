"""GGUF files: metadata, and tensors as float32. Of the quantised types those SmolLM2's file has: Q4_1 and Q8_0.

Layout (version 3): magic, version, counts; metadata as (name, type, value); tensor descriptions (name, dimensions with
the contiguous one first, type, offset); then, aligned, the tensors. Everything is checked before it is used: a file that
is cut short or odd is a ConfigError that says where.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpurt.errors import ConfigError

Floats = npt.NDArray[np.float32]
Value = object

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24
_DEFAULT_ALIGNMENT = 32
_QUANTUM = 32  # values that share a scale

_Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", (_QUANTUM // 2,))])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (_QUANTUM,))])


class TensorInfo(NamedTuple):
    """Where a tensor lies; `shape` has the contiguous dimension last."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads little-endian values; never beyond the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self.at = 0

    def take(self, length: int) -> memoryview:
        if length > len(self._data) - self.at:
            raise self.wrong("the file ends here")
        piece = self._data[self.at : self.at + length]
        self.at += length
        return piece

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        value: int | float | bool = struct.unpack("<" + code, self.take(size))[0]
        return value

    def count(self, code: str = "Q", most: int = _MAX_ITEMS) -> int:
        value = int(self.scalar(code))
        if value > most:
            raise self.wrong(f"expected at most {most}, got {value}")
        return value

    def text(self) -> str:
        try:
            return str(self.take(self.count()), "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(str(error)) from error

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 4:
            item = self.count("I")
            return [self.value(item, depth + 1) for _ in range(self.count())]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise self.wrong(f"unknown type {kind} of a value")

    def wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: byte {self.at}", problem)


class GgufFile:
    """An open file. `metadata` and `tensors` by name; `tensor` gives the values."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read or is not GGUF."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), f"expected a readable GGUF file: {error}") from error
        cursor = _Cursor(path, self._data)
        if cursor.take(4) != _MAGIC or cursor.count("I") not in (2, 3):
            raise ConfigError(str(path), "expected a GGUF file of version 2 or 3")
        num_tensors, num_values = cursor.count(), cursor.count()
        self.metadata = {cursor.text(): cursor.value(cursor.count("I")) for _ in range(num_values)}
        self.tensors = dict(_tensor(cursor) for _ in range(num_tensors))
        alignment = self.number("general.alignment", _DEFAULT_ALIGNMENT)
        self._start = -(-cursor.at // int(alignment)) * int(alignment)

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the metadata. Raises ConfigError where there is none."""
        value = self.metadata.get(name, default)
        if not isinstance(value, (int, float)):
            raise ConfigError(f"{self.path}: {name}", f"expected a number, got {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings of the metadata. Raises ConfigError where there is none."""
        value = self.metadata.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.path}: {name}", "expected a list of strings")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        """A tensor's values. Raises ConfigError if it is not there, of another shape, or of a type we do not read."""
        info = self.tensors.get(name)
        if info is None or info.shape != shape:
            have = "none" if info is None else str(list(info.shape))
            raise ConfigError(f"{self.path}: {name}", f"expected a tensor {list(shape)}, got {have}")
        if info.kind not in _KINDS:
            known = ", ".join(f"{kind} {name}" for kind, (name, _, _) in _KINDS.items())
            raise ConfigError(
                f"{self.path}: {name}", f"expected a type of {known} (llama.cpp's numbers), got {info.kind}"
            )
        _, item, decode = _KINDS[info.kind]
        count = math.prod(shape) // (1 if item.fields is None else _QUANTUM)
        start = self._start + info.offset
        if start + count * item.itemsize > len(self._data):
            raise ConfigError(f"{self.path}: {name}", "the file ends before its values do")
        return decode(np.frombuffer(self._data, item, count, start)).reshape(shape)


def _tensor(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.text()
    dimensions = [cursor.count(most=1 << 32) for _ in range(cursor.count("I", most=4))]
    kind = cursor.count("I")
    return name, TensorInfo(tuple(reversed(dimensions)), kind, cursor.count(most=1 << 40))


def _plain(values: npt.NDArray[np.generic]) -> Floats:
    return values.astype(np.float32)


def _from_q4_1(blocks: npt.NDArray[np.generic]) -> Floats:
    nibbles = blocks["nibbles"]  # type: ignore[call-overload]
    quanta = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    scale, least = (blocks[name].astype(np.float32)[:, None] for name in ("scale", "least"))  # type: ignore[call-overload]
    values: Floats = quanta * scale + least
    return values


def _from_q8_0(blocks: npt.NDArray[np.generic]) -> Floats:
    scale = blocks["scale"].astype(np.float32)[:, None]  # type: ignore[call-overload]
    values: Floats = blocks["values"].astype(np.float32) * scale  # type: ignore[call-overload]
    return values


_KINDS: dict[int, tuple[str, np.dtype[np.generic], Callable[[npt.NDArray[np.generic]], Floats]]] = {
    0: ("F32", np.dtype("<f4"), _plain),
    1: ("F16", np.dtype("<f2"), _plain),
    3: ("Q4_1", _Q4_1, _from_q4_1),
    8: ("Q8_0", _Q8_0, _from_q8_0),
}
