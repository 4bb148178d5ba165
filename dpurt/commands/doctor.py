"""`dpurt doctor [TOPOLOGY] [--probe HOST]`: what this machine can do, what is off, and why; and whether bytes get through."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from dpurt.config import load_config
from dpurt.doctor import Finding, direct_io, examine, probe
from dpurt.errors import ConfigError
from dpurt.json_output import add_json_argument, write_json
from dpurt.probe import Keys, probe_host

_MARKS = {"ok": "[ ok ]", "off": "[ off]", "warn": "[warn]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("topology", nargs="?", help="also say whether this machine can run it")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there is any warning")
    parser.add_argument(
        "--probe", metavar="HOST",
        help="as this host of the topology, on its machine: move bytes to and from the running node, over each of its fabrics",
    )  # fmt: skip
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="with --probe: the host's secret key, for a gateway with keys",
    )
    parser.add_argument(
        "--node-key", type=Path, metavar="FILE", help="with --probe: the node's public key (.pub)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Probe and show."""
    findings = _findings(args.topology)
    if args.probe is not None:
        findings += _probe(args)
    if args.json is not None:
        write_json(args.json, [asdict(finding) for finding in findings])
    else:
        print("\n".join(line for finding in findings for line in as_lines(finding)))
    return 1 if args.strict and any(finding.state == "warn" for finding in findings) else 0


def _findings(topology: str | None) -> list[Finding]:
    if topology is None:
        return [*probe(), direct_io(Path(tempfile.gettempdir()))]
    return [*probe(), *examine(load_config(topology))]


def _probe(args: argparse.Namespace) -> list[Finding]:
    if args.topology is None:
        raise ConfigError("--probe", "needs the topology that has this host")
    if (args.key is None) != (args.node_key is None):
        raise ConfigError("--probe", "--key and --node-key go together")
    found = None if args.key is None else Keys(args.key, args.node_key)
    return probe_host(load_config(args.topology), args.probe, found)


def as_lines(finding: Finding) -> list[str]:
    """One line, and one with the advice if there is any."""
    lines = [f"{_MARKS[finding.state]} {finding.name:<16} {finding.detail}"]
    if finding.advice:
        lines.append(f"{'':<24}-> {finding.advice}")
    return lines
