"""Attention traces from ``.npz`` files: which cold blocks each decode step's layers wanted, and what was hinted.

Strict: an array that is missing, of another type or shape, or out of range stops the replay with a ConfigError
that names file and array. No pickled object is ever loaded.

Format. ``mass_q`` uint8 [steps, layers, blocks] (blocks past the context are padding): code q means a mass of 2 ** (-q / 8), 105 none.
``prefill_tail_mass_q`` (optional), the same for the last prompt positions: a warm start. ``spec_topk`` uint16
[steps, look-aheads, layers, ranks] (optional): cold blocks by a speculative query, best first, 65535 for none.
``meta``: JSON with ``model``, ``name``, ``workload``, ``block_tokens``, ``n_prefill``, ``steps``, ``layers``; with
hints also ``spec_lookahead_layers``, ``spec_hot_window_tokens`` and ``spec_sink_tokens``; ``demanded`` is how many
blocks a layer wants, if that was recorded. Decode step t reads positions 0 to n_prefill + t. A recording that also has
``layer_us`` uint32 [steps, layers] (from a layer's turn to the next one's, stalls left out), ``read_us`` float32 [steps, 3]
(of that step: mean and standard deviation of a read's time, from the decision until its bytes were there, and how long
after its hint a prefetch was decided) and ``pace`` in ``meta`` can be replayed at the pace at which it was made.

Cold blocks lie outside the first `sink` and the last `window` tokens; they are *columns* 0, 1, 2 ... here, and
become more as the context grows. What a layer wants at a step (its *demand*) is the `top` columns with most mass.

Ties. Codes are coarse and late layers often have fewer than `top` blocks with any mass (in a quarter of the turns
at 8K), so many demands end in a tie, and how ties are broken moves LRU's hits by up to ten points. Equal codes
are told apart by a hash that is mostly lasting (`_Residue.LASTING_PARTS` to one), as masses are: with this
weight LRU's hits are those measured on the masses before they were rounded.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from dpurt.core.attention import MASS_OF, NO_MASS
from dpurt.errors import ConfigError

MAX_ARRAY_BYTES = 2 << 30
NOT_HINTED = 65535
SINK_TOKENS = 64
WINDOW_TOKENS = 1024
TOP = 32
TOP_OF_SHORT_WINDOW = 10  # with a window under WINDOW_TOKENS: the same share of a context half as long

RESIDUE_BITS = 23

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class RecordedPace(msgspec.Struct, frozen=True):
    """The device a trace was recorded on."""

    read_latency_us: Annotated[float, msgspec.Meta(ge=0)]
    read_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    block_bytes: _Positive


class _Meta(msgspec.Struct, frozen=True):
    model: str
    name: str
    block_tokens: _Positive
    n_prefill: _Positive
    steps: _Positive
    layers: _Positive
    workload: str = ""
    spec_lookahead_layers: tuple[_Positive, ...] = ()
    spec_hot_window_tokens: _Positive = WINDOW_TOKENS
    spec_sink_tokens: _Count = SINK_TOKENS
    demanded: _Positive | None = None
    pace: RecordedPace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTrace:
    """Demand and hints of one sequence. The first `warm_turns` turns are prompt positions: history, not scored.

    `codes` are the cold blocks' mass codes, [turns, layers, columns]; `columns[i]` says how many there are at
    turn i. `demand` and `mass` are [turns, layers, top], most mass first. `hints[i, a, l]` are columns, best
    first, -1 for none, for the scored turn i and look-ahead `lookaheads[a]`.
    """

    name: str
    model: str
    workload: str
    block_tokens: int
    context_tokens: tuple[int, int]
    warm_turns: int
    columns: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    demand: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]
    lookaheads: tuple[int, ...]
    hints: npt.NDArray[np.int32] | None
    layer_s: npt.NDArray[np.float64] | None = None
    read_s: npt.NDArray[np.float64] | None = None
    pace: RecordedPace | None = None

    @property
    def layers(self) -> int:
        return int(self.demand.shape[1])

    @property
    def top(self) -> int:
        return int(self.demand.shape[2])

    @property
    def turns(self) -> int:
        """Warm and scored."""
        return int(self.demand.shape[0])

    @property
    def steps(self) -> int:
        """Scored."""
        return self.turns - self.warm_turns

    @property
    def first_columns(self) -> int:
        """Cold blocks at the first scored step: capacities are shares of this."""
        return int(self.columns[self.warm_turns])

    def masses(self, turn: int, layer: int) -> npt.NDArray[np.float32]:
        """The masses of all cold blocks, demanded or not."""
        return MASS_OF[self.codes[turn, layer, : self.columns[turn]]]

    def hint(self, turn: int, lookahead: int, layer: int) -> npt.NDArray[np.int64] | None:
        """The ranked columns for a layer's turn, given so many layers ahead; None where there is no hint."""
        if self.hints is None or lookahead not in self.lookaheads or turn < self.warm_turns:
            return None
        ranked = self.hints[turn - self.warm_turns, self.lookaheads.index(lookahead), layer]
        ranked = ranked[ranked >= 0]
        return ranked.astype(np.int64) if len(ranked) else None


def read_attention(path: Path, steps: int | None = None, top: int | None = None) -> AttentionTrace:
    """The first `steps` decode steps of a trace. Raises ConfigError for a file that is not one."""
    with _opened(path) as file:
        return _read(path, _Arrays(path, file), steps, top)


def _read(path: Path, arrays: _Arrays, steps: int | None, top: int | None) -> AttentionTrace:
    meta = arrays.meta()
    all_masses = arrays.codes("mass_q", (meta.steps, meta.layers, None))
    arrays.check_length("mass_q", all_masses, -(-(meta.n_prefill + meta.steps) // meta.block_tokens))
    masses = all_masses[:steps]
    tail_shape = (None, *all_masses.shape[1:])
    tail = arrays.codes("prefill_tail_mass_q", tail_shape) if "prefill_tail_mass_q" in arrays else None
    codes = masses if tail is None else np.concatenate([tail, masses])
    warm = 0 if tail is None else len(tail)
    columns = _columns(path, meta, warm, len(codes))
    if top is None:
        top = meta.demanded
    if top is None:
        top = TOP if meta.spec_hot_window_tokens >= WINDOW_TOKENS else TOP_OF_SHORT_WINDOW
    if columns[0] < top:
        raise ConfigError(
            f"{path}: mass_q", f"expected at least {top} cold blocks at the first turn, got {columns[0]}"
        )
    sink = meta.spec_sink_tokens // meta.block_tokens
    cold = np.ascontiguousarray(codes[:, :, sink : sink + int(columns[-1])])
    demand, mass = _demand(cold, columns, top)
    return AttentionTrace(
        name=meta.name,
        model=meta.model,
        workload=meta.workload,
        block_tokens=meta.block_tokens,
        context_tokens=(meta.n_prefill + 1, meta.n_prefill + len(masses)),
        warm_turns=warm,
        columns=columns,
        codes=cold,
        demand=demand,
        mass=mass,
        lookaheads=meta.spec_lookahead_layers,
        hints=arrays.hints(meta, sink, columns[warm:]) if "spec_topk" in arrays else None,
        layer_s=arrays.times("layer_us", np.uint32, meta, meta.layers)[: len(masses)] if meta.pace else None,
        read_s=arrays.times("read_us", np.float32, meta, 3)[: len(masses)] if meta.pace else None,
        pace=meta.pace,
    )


def _columns(path: Path, meta: _Meta, warm: int, turns: int) -> npt.NDArray[np.int64]:
    """Cold blocks at each turn."""
    positions = meta.n_prefill + 1 + np.arange(turns, dtype=np.int64) - warm
    cold = (positions - meta.spec_hot_window_tokens) // meta.block_tokens
    return np.asarray(cold - meta.spec_sink_tokens // meta.block_tokens)


def _demand(
    codes: npt.NDArray[np.uint8], columns: npt.NDArray[np.int64], top: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    turns, layers, _ = codes.shape
    demand = np.empty((turns, layers, top), np.int64)
    mass = np.empty((turns, layers, top), np.float32)
    residue = _Residue(layers, int(columns[-1]))
    for turn in range(turns):
        n = int(columns[turn])
        keys = (codes[turn, :, :n].astype(np.uint64) << np.uint64(RESIDUE_BITS)) + residue.at(turn, n)
        best = np.argpartition(keys, top - 1, axis=1)[:, :top]
        best_keys = np.take_along_axis(keys, best, axis=1)
        demand[turn] = np.take_along_axis(best, np.argsort(best_keys, axis=1), axis=1)
        mass[turn] = MASS_OF[np.take_along_axis(codes[turn], demand[turn], axis=1)]
    return demand, mass


class _Residue:
    """What tells blocks of equal code apart: a hash, for the format has no finer mass; see the module's docstring."""

    LASTING_PARTS = 5  # to one part that is new each turn

    def __init__(self, layers: int, columns: int) -> None:
        layer, column = np.arange(layers, dtype=np.uint64), np.arange(columns, dtype=np.uint64)
        self._seed = _mixed((layer[:, None] << np.uint64(32)) + column + np.uint64(1))
        self._lasting = (self._seed >> np.uint64(64 - RESIDUE_BITS)) * np.uint64(self.LASTING_PARTS)

    def at(self, turn: int, columns: int) -> npt.NDArray[np.uint64]:
        """Residues of a turn, below 2 ** RESIDUE_BITS."""
        fresh = _mixed(self._seed[:, :columns] ^ np.uint64(turn + 1)) >> np.uint64(64 - RESIDUE_BITS)
        return (self._lasting[:, :columns] + fresh) // np.uint64(self.LASTING_PARTS + 1)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of MurmurHash3: every bit of the input moves half the output's."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _opened(path: Path) -> NpzFile:
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.file_size > MAX_ARRAY_BYTES:
                    problem = f"expected at most {MAX_ARRAY_BYTES} bytes, got {entry.file_size}"
                    raise ConfigError(f"{path}: {entry.filename}", problem)
        file = np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(str(path), f"expected a readable .npz file: {error}") from error
    assert isinstance(file, NpzFile), "a zip file is loaded as one"
    return file


class _Arrays:
    """An open ``.npz`` whose arrays are checked as they are taken."""

    def __init__(self, path: Path, file: NpzFile) -> None:
        self._path = path
        self._file = file

    def __contains__(self, name: str) -> bool:
        return name in self._file.files

    def meta(self) -> _Meta:
        array = self._take("meta")
        if array.shape != () or array.dtype.kind != "U":
            raise self._wrong("meta", "expected one string of JSON")
        try:
            return msgspec.convert(json.loads(str(array)), _Meta)
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            raise self._wrong("meta", str(error)) from error

    def codes(self, name: str, shape: tuple[int | None, ...]) -> npt.NDArray[np.uint8]:
        """An array of mass codes; None in `shape` is any length but 0."""
        array = self._take(name)
        self._check(name, array, np.uint8, shape)
        if array.max() > NO_MASS:
            raise self._wrong(name, f"expected codes up to {NO_MASS}, got {array.max()}")
        return array

    def check_length(self, name: str, array: npt.NDArray[Any], blocks: int) -> None:
        """The last axis may be longer than the context, never shorter."""
        if array.shape[-1] < blocks:
            raise self._wrong(name, f"expected at least {blocks} blocks, got {array.shape[-1]}")

    def hints(self, meta: _Meta, sink: int, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The hints of the scored steps, as columns."""
        array = self._take("spec_topk")
        if not meta.spec_lookahead_layers:
            raise self._wrong("meta", "expected spec_lookahead_layers, for there is spec_topk")
        shape = (meta.steps, len(meta.spec_lookahead_layers), meta.layers, None)
        self._check("spec_topk", array, np.uint16, shape)
        array = array[: len(columns)]
        is_hint = array != NOT_HINTED
        hints = np.where(is_hint, array.astype(np.int32) - sink, -1)
        bad = is_hint & ((hints < 0) | (hints >= columns[:, None, None, None]))
        if bad.any():
            step = int(np.argwhere(bad)[0, 0])
            raise self._wrong("spec_topk", f"expected cold blocks or {NOT_HINTED} at step {step}")
        return hints

    def times(self, name: str, kind: type[np.generic], meta: _Meta, width: int) -> npt.NDArray[np.float64]:
        """Microseconds of each scored step, as seconds."""
        array = self._take(name)
        self._check(name, array, kind, (meta.steps, width))
        seconds = array.astype(np.float64) / 1e6
        if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise self._wrong(name, "expected finite times >= 0")
        return seconds

    def _take(self, name: str) -> npt.NDArray[Any]:
        if name not in self:
            raise self._wrong(name, "expected this array")
        try:
            array: npt.NDArray[Any] = self._file[name]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise self._wrong(name, f"expected a readable array without objects: {error}") from error
        return array

    def _check(
        self, name: str, array: npt.NDArray[Any], kind: type[np.generic], shape: tuple[int | None, ...]
    ) -> None:
        fits = len(shape) == array.ndim and all(
            (want is None and have > 0) or want == have for want, have in zip(shape, array.shape, strict=True)
        )
        if array.dtype != kind or not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            got = f"{array.dtype} {list(array.shape)}"
            raise self._wrong(name, f"expected {kind.__name__} [{wanted}], got {got}")

    def _wrong(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name}", problem)
