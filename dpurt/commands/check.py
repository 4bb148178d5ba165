"""`dpurt check TOPOLOGY`: is it right, what does it come to, and what in it is probably not meant?"""

from __future__ import annotations

import argparse

from dpurt.config import Config, load_config, ready_topologies
from dpurt.json_output import add_json_argument, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("topology", help=f"a TOML file, or one of: {', '.join(ready_topologies())}")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Load (which raises what is wrong) and summarise."""
    config = load_config(args.topology)
    summary = summarise(config)
    if args.json is not None:
        write_json(args.json, summary)
        return 0
    print(f"{args.topology}: right")
    for name, space in _spaces(config).items():
        print(
            f"  space {name}: {space['staging_slots']:,} slots of {space['record_bytes']:,} bytes in staging"
        )
    print(f"  run folder: {config.node.run_path}")
    for warning in config.warnings():
        print(f"  warning: {warning}")
    return 0


def summarise(config: Config) -> dict[str, object]:
    """The facts a program may want."""
    return {
        "node": config.node.name,
        "run_dir": str(config.node.run_path),
        "bind": config.gateway.bind,
        "spaces": _spaces(config),
        "hosts": {host.name: list(host.fabrics) for host in config.host},
        "warnings": config.warnings(),
    }


def _spaces(config: Config) -> dict[str, dict[str, int]]:
    shares = {name: share for spaces in config.staging_plan().values() for name, share in spaces.items()}
    return {
        space.name: {
            "record_bytes": space.record_bytes,
            "staging_bytes": shares[space.name],
            "staging_slots": shares[space.name] // space.record_bytes,
        }
        for space in config.space
    }
