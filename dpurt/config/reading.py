"""From a TOML file to a `Config`, or to a ConfigError that names the file and the place in it.

Theory of operation. The parsed tree is prepared (sizes such as ``"16 GiB"`` become ints, relative paths of
files become absolute), then msgspec converts and validates it, then `rules.problems` looks at the whole.
msgspec's messages name the path but neither the value found nor near names; we add both by walking the tree
and msgspec's own description of the types. Secrets are never shown.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from dpurt.config import rules
from dpurt.config.schema import AnyBdevConfig, Config
from dpurt.errors import ConfigError

TOPOLOGIES = Path(__file__).parent.parent / "topology"

_UNITS = {
    "": 1, "B": 1,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_IS_SIZE = re.compile(r"bytes$|bytes_per_s$")
_IS_PATH = re.compile(r"_file$|_dir$")
_AT = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<where>\$[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def load_config(path: str | Path) -> Config:
    """Read, check and return a topology: a file, or the bare name of a ready one. Raises ConfigError."""
    found = _find(path)
    try:
        tree = tomllib.loads(found.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("$", f"cannot read: {error.strerror}", str(found)) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ConfigError("$", f"is not TOML: {error}", str(found)) from error
    return config_from(tree, str(found), found.absolute().parent)


def config_from(tree: Mapping[str, object], file: str = "", base: Path | None = None) -> Config:
    """Check and convert a parsed topology. `base` is what relative paths start from (default: the current
    folder).
    """
    try:
        prepared = _prepared(tree, base or Path.cwd())
        config = msgspec.convert(prepared, Config)
    except msgspec.ValidationError as error:
        where, problem = _explained(str(error), prepared)
        raise ConfigError(where, problem, file) from error
    except ConfigError as error:
        raise ConfigError(error.where, error.problem, file) from error
    for where, problem in rules.problems(config):
        raise ConfigError(where, problem, file)
    return config


def ready_topologies() -> list[str]:
    """Names that `load_config` takes beside paths."""
    return sorted(path.stem for path in TOPOLOGIES.glob("*.toml"))


def parse_size(text: str) -> int:
    """Bytes of ``"16 GiB"`` (binary) or ``"14 GB"`` (decimal). ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"expected bytes, as 1048576 or '16 GiB' or '14 GB', got {text!r}")
    return round(Fraction(match[1]) * _UNITS[match[2]])  # exact, unlike a float


def _find(path: str | Path) -> Path:
    if isinstance(path, Path) or "/" in path or path.endswith(".toml"):
        return Path(path)
    if path in ready_topologies():
        return TOPOLOGIES / f"{path}.toml"
    if Path(path).is_file():
        return Path(path)
    near = _near(path, ready_topologies())
    raise ConfigError("$", f"no such file and no ready topology {path!r}{near}", path)


# --- preparing ---


def _prepared(tree: Mapping[str, object], base: Path) -> dict[str, object]:
    def change(where: str, key: str, text: str) -> object:
        if _IS_SIZE.search(key):
            try:
                return parse_size(text)
            except ValueError as error:
                raise ConfigError(where, str(error)) from None
        if _IS_PATH.search(key):
            return str(base / Path(text).expanduser())
        return text

    return {key: _changed(value, key, f"$.{key}", change) for key, value in tree.items()}


def _changed(value: object, key: str, where: str, change: Callable[[str, str, str], object]) -> object:
    """A copy of a subtree with every string replaced by `change(where, key, string)`."""
    if isinstance(value, str):
        return change(where, key, value)
    if isinstance(value, Mapping):
        return {k: _changed(v, k, f"{where}.{k}", change) for k, v in value.items()}
    if isinstance(value, list):
        return [_changed(item, key, f"{where}[{i}]", change) for i, item in enumerate(value)]
    return value


# --- explaining ---


def _explained(message: str, tree: object) -> tuple[str, str]:
    """(where, problem) of one of msgspec's messages."""
    match = _AT.match(message)
    assert match is not None, "the pattern matches any text"
    where, problem = match["where"] or "$", match["problem"].replace("`", "")
    if unknown := re.fullmatch(r"Object contains unknown field (\w+)", problem):
        return f"{where}.{unknown[1]}", "unknown key" + _near(unknown[1], _keys_at(where, tree))
    if missing := re.fullmatch(r"Object missing required field (\w+)", problem):
        return where, f"{missing[1]!r} is missing"
    if problem.startswith("Expected"):
        wanted = problem.partition(", got ")[0]  # msgspec's own "got" is only a type
        return where, f"e{wanted[1:]}, got {_shown(where, tree)}"
    if problem.startswith("Invalid") and (known := _choices_at(where, tree)):
        return where, f"i{problem[1:]}; one of: {known}"
    return where, problem


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 3, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"


def _steps(where: str) -> list[str | int]:
    return [name or int(index) for name, index in _STEP.findall(where)]


def _shown(where: str, tree: object) -> str:
    value: Any = tree
    for step in _steps(where):
        if "salt" in str(step):
            return "<hidden>"
        value = value[step]
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "an array"
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."


def _type_at(where: str, tree: object) -> inspect.Type:
    """msgspec's description of what belongs at a place."""
    kind, value = _choose(inspect.type_info(Config), tree), tree
    for step in _steps(where):
        if isinstance(kind, inspect.StructType) and isinstance(step, str):
            kind = next(field.type for field in kind.fields if field.encode_name == step)
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
        value = value[step] if isinstance(value, (dict, list)) else None  # type: ignore[index]
        kind = _choose(kind, value)
    return kind


def _choose(kind: inspect.Type, value: object) -> inspect.Type:
    """Look through metadata, and pick the member of a union that the value is meant to be."""
    if isinstance(kind, inspect.Metadata):
        return _choose(kind.type, value)
    if not isinstance(kind, inspect.UnionType):
        return kind
    tag = value.get("kind") if isinstance(value, dict) else None
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return next((m for m in members if isinstance(m, inspect.StructType) and m.tag == tag), members[0])


def _keys_at(where: str, tree: object) -> list[str]:
    kind = _type_at(where, tree)
    return [field.encode_name for field in kind.fields] if isinstance(kind, inspect.StructType) else []


def _choices_at(where: str, tree: object) -> str:
    if where.startswith("$.bdev") and where.endswith(".kind"):
        return ", ".join(str(bdev.__struct_config__.tag) for bdev in get_args(AnyBdevConfig))
    kind = _type_at(where, tree)
    return ", ".join(map(repr, kind.values)) if isinstance(kind, inspect.LiteralType) else ""
