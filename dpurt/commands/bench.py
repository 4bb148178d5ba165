"""`dpurt bench`: run one of the benchmarks in `dpurt.bench`, or all; each names its peer, its conditions and
its target.

A benchmark is a module of `dpurt.bench` with a `SUMMARY` and `run(quick) -> BenchResult`. `--list` reads the
summaries without importing anything, so a missing peer does not hide a benchmark.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import os
import platform
from pathlib import Path

from dpurt.bench.result import BenchResult, Figure
from dpurt.demo.interrupts import sigterm_interrupts
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, write_json

BENCHES = Path(__file__).parent.parent / "bench"
_VERDICTS = {True: "holds", False: "MISSED", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", nargs="?", help="a benchmark, or all")
    parser.add_argument("--list", action="store_true", help="show the benchmarks and exit")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a smoke test, not a claim")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run; 1 if a target was missed."""
    known = summaries()
    if args.list or args.name is None:
        _show_list(known, args.json)
        return 0
    if args.name != "all" and args.name not in known:
        raise ConfigError("bench", f"no benchmark {args.name!r}; known: {', '.join(known)}, all")
    names = list(known) if args.name == "all" else [args.name]
    with sigterm_interrupts():  # its nodes and peers end with it
        results = [_run_one(name, quick=args.quick, silent=args.json is not None) for name in names]
    if args.json is not None:
        rows = [result.to_json() for result in results]
        write_json(args.json, rows if args.name == "all" else rows[0])
    return 1 if any(result.holds is False for result in results) else 0


def summaries(folder: Path = BENCHES) -> dict[str, str]:
    """Name -> summary of each benchmark module, by name."""
    found = {path.stem: _summary(path) for path in sorted(folder.glob("*.py"))}
    return {name: summary for name, summary in found.items() if summary is not None}


def _summary(path: Path) -> str | None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        is_summary = any(isinstance(target, ast.Name) and target.id == "SUMMARY" for target in targets)
        if is_summary and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            return str(ast.literal_eval(node.value))
    return None


def _show_list(known: dict[str, str], json_to: str | None) -> None:
    if json_to is not None:
        write_json(json_to, known)
        return
    for name, summary in known.items():
        print(f"{name:<16} {summary}")


def _run_one(name: str, *, quick: bool, silent: bool) -> BenchResult:
    module = importlib.import_module(f"dpurt.bench.{name}")
    result: BenchResult = module.run(quick)
    for key, value in machine(quick=quick).items():
        result.conditions.setdefault(key, value)
    if not silent:
        print(as_text(result))
    return result


def machine(*, quick: bool) -> dict[str, object]:
    """Conditions every figure needs (U63)."""
    versions = {name: importlib.metadata.version(name) for name in ("trio", "pyzmq", "msgspec", "numpy")}
    return {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": versions,
        "quick": quick,
    }


def as_text(result: BenchResult) -> str:
    """A small table, then the conditions."""
    lines = [result.name, f"  {'figure':<44} {'ours':>14} {'peer':>14} {'ratio':>8}  target"]
    lines += [_row(figure) for figure in result.figures]
    lines += [f"  {key}: {value}" for key, value in result.conditions.items()]
    return "\n".join(lines) + "\n"


def _row(figure: Figure) -> str:
    ours = f"{_number(figure.value)} {figure.unit}"
    peer = "" if figure.peer_value is None else f"{_number(figure.peer_value)} {figure.unit}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    target = "" if figure.target is None else f"{figure.target}: {_VERDICTS[figure.holds]}"
    return f"  {figure.name:<44} {ours:>14} {peer:>14} {ratio:>8}  {target}".rstrip()


def _number(value: float | int | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
