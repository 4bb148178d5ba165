"""Imports point one way, cores stay pure, and what must never appear in the source does not. An AST walk,
nothing is run.

Each part of dpurt may import itself and the parts listed for it. `dpurt/agents` and `dpurt/bench` are links,
walked like folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dpurt"

BASE = {"errors"}
PURE = BASE | {"core"}
SANS_IO = PURE | {"wire"}
RDMA = SANS_IO | {"rdma"}
DRIVERS = RDMA | {"bdev", "fabric", "transport", "engines"}
KERNEL = DRIVERS | {"runtime"}
SETTINGS = {"keys", "config"}
AGENTS = KERNEL | SETTINGS | {"agents", "priors"}
ADAPTERS = {
    "vllm",
    "sglang",
    "lmcache",
    "store",
}  # folders of engines/ that run inside an engine, as clients of a node
ANYTHING = AGENTS | {"node", "client", "probe", "commands", "replay", "bench", "testing", "demo", "doctor"} | {
    "json_output", "progress",
}  # fmt: skip

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "core": BASE,
    "wire": PURE,
    "keys": BASE,
    "priors": PURE,
    "config": PURE | {"keys"},
    "progress": BASE,
    "json_output": BASE,
    "engines": SANS_IO,
    "adapters": DRIVERS | {"client"} | SETTINGS,
    "rdma": SANS_IO,
    "bdev": RDMA,
    "fabric": RDMA,
    "transport": SANS_IO,
    "runtime": DRIVERS,
    "agents": KERNEL | SETTINGS,
    "node": AGENTS,
    "client": DRIVERS | {"keys"},
    "testing": ANYTHING,
    "replay": ANYTHING,
    "bench": ANYTHING,
    "doctor": ANYTHING,
    "probe": ANYTHING,
    "demo": ANYTHING,
    "commands": ANYTHING,
    "cli": ANYTHING,
    "__init__": ANYTHING,
    "__main__": {"cli"},
}

# A core has no I/O, no clock, no tasks, no log. `random` only as random.Random(seed).
IMPURE = {
    "asyncio", "logging", "os", "pathlib", "prometheus_client", "secrets", "socket", "structlog", "subprocess",
    "tempfile", "threading", "time", "trio", "zmq",
}  # fmt: skip
SANS_IO_PARTS = {"core", "wire"}

BANNED_MODULES = {
    "agents",
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "tractor",
}
BANNED_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}
WILDCARDS = ("tcp://*", "0.0.0.0", "tcp://[::]", "INADDR_ANY")


def sources() -> list[Path]:
    """Every module of the package, links followed."""
    found = [path for path in PACKAGE.glob("*.py")]
    for folder in sorted(path for path in PACKAGE.iterdir() if path.is_dir()):
        found += sorted(folder.resolve().rglob("*.py"))
    return found


def part_of(path: Path) -> str:
    """The part of dpurt a file belongs to."""
    inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
    if inside.parts[0] == "engines" and inside.parts[1] in ADAPTERS:
        return "adapters"
    return inside.parts[0].removesuffix(".py")


def imported(tree: ast.AST, part: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, f"dpurt.{part}"
        elif isinstance(node, ast.ImportFrom) and node.module == "dpurt":
            yield from ((node.lineno, f"dpurt.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def violations(part: str, source: str) -> list[str]:
    """Everything wrong with a module of this part, as "line: what"."""
    tree = ast.parse(source)
    found = [f"{line}: {what}" for line, what in _wrong_imports(part, tree)]
    found += [f"{line}: {what}" for line, what in _wrong_calls(part, tree)]
    return found


def _wrong_imports(part: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, module in imported(tree, part):
        top, *rest = module.split(".")
        if top == "dpurt" and rest and rest[0] not in ALLOWED[part] | {part}:
            yield line, f"{part} must not import {module}"
        if part != "adapters" and len(rest) > 1 and rest[0] == "engines" and rest[1] in ADAPTERS:
            yield line, f"{part} must not import {module}, which runs inside an engine"
        if top in BANNED_MODULES:
            yield line, f"nobody may import {module}"
        if part in SANS_IO_PARTS and top in IMPURE:
            yield line, f"{part} is sans-I/O and must not import {module}"


def _wrong_calls(part: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if any(word in node.value for word in WILDCARDS) and not _is_doc(node, tree):
                yield node.lineno, f"wildcard address {node.value!r}"
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in BANNED_CALLS:
            yield node.lineno, f"call of {name}"
        if any(word.arg == "shell" and _is_true(word.value) for word in node.keywords):
            yield node.lineno, "shell=True"
        if part in SANS_IO_PARTS and _is_unseeded_random(node):
            yield node.lineno, "randomness without a seed"


def _is_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and not node.value)


def _is_doc(node: ast.Constant, tree: ast.AST) -> bool:
    """A bare string statement: a docstring."""
    return any(isinstance(other, ast.Expr) and other.value is node for other in ast.walk(tree))


def _is_unseeded_random(node: ast.Call) -> bool:
    func = node.func
    if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
        return False
    is_module_function = func.value.id == "random" and func.attr != "Random"
    is_unseeded = func.attr in {"Random", "default_rng"} and not node.args and not node.keywords
    return is_module_function or is_unseeded


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_the_layers(path: Path) -> None:
    assert violations(part_of(path), path.read_text(encoding="utf-8")) == []


def test_every_part_has_its_place_in_the_layers() -> None:
    assert {part_of(path) for path in sources()} <= set(ALLOWED)


def test_allowed_arrows_have_no_cycle_below_the_node() -> None:
    for part in (
        "core",
        "wire",
        "rdma",
        "bdev",
        "fabric",
        "transport",
        "engines",
        "runtime",
        "config",
        "keys",
        "agents",
    ):
        assert not any(part in ALLOWED[other] for other in ALLOWED[part])


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import trio"),
        ("core", "def f():\n    import time"),
        ("core", "from dpurt.wire import messages"),
        ("core", "from dpurt import wire"),
        ("core", "import random\nrandom.random()"),
        ("core", "import random\nrandom.Random()"),
        ("bdev", "from dpurt.runtime.actor import Actor"),
        ("agents", "from dpurt.node import Node"),
        ("agents", "import dpurt.cli"),
        ("node", "import agents.gateway"),
        ("client", "import pickle"),
        ("client", "socket.recv_pyobj()"),
        ("commands", "eval(text)"),
        ("commands", "run(words, shell=True)"),
        ("agents", "from dpurt.engines.vllm.plan import Book"),
        ("transport", "socket.bind('tcp://*:5555')"),
        ("transport", "socket.bind(f'tcp://0.0.0.0:{port}')"),
    ],
)
def test_the_walk_sees_each_kind_of_violation(part: str, source: str) -> None:
    assert len(violations(part, source)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", '"""Never binds tcp://* and has no clock."""\nimport random\nrandom.Random(7)'),
        ("agents", "from .index import IndexAgent\nimport trio"),
        ("commands", "run(words, shell=False)"),
    ],
)
def test_the_walk_lets_proper_code_pass(part: str, source: str) -> None:
    assert violations(part, source) == []


@pytest.mark.parametrize(
    "name", ["kv_events", "publisher", "residency", "sources", "vllm_events", "sglang_events"]
)
def test_reading_engines_events_is_sans_io(name: str) -> None:
    tree = ast.parse((PACKAGE / "engines" / f"{name}.py").read_text(encoding="utf-8"))
    assert not [module for _, module in imported(tree, "engines") if module.split(".")[0] in IMPURE]
