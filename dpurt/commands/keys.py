"""`dpurt keys`: CURVE key pairs and tenant salts, as files only their owner can read."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpurt import keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    generate = actions.add_parser("generate", help="make STEM.secret and STEM.pub")
    generate.add_argument("stem", type=Path, metavar="STEM")
    public = actions.add_parser("public", help="print the public key that belongs to a secret key file")
    public.add_argument("secret", type=Path, metavar="FILE")
    salt = actions.add_parser("salt", help="make a tenant's salt file")
    salt.add_argument("file", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Make or show. A secret is never printed."""
    if args.action == "generate":
        secret, public = keys.save(keys.generate(), args.stem)
        print(f"secret key: {secret} (keep it here)\npublic key: {public} (give it to the other side)")
    elif args.action == "public":
        print(keys.load_pair(args.secret).public)
    else:
        keys.write_secret(args.file, keys.generate_salt())
        print(
            f"salt: {args.file} (every node and every host of the tenant needs the same one; it is never sent)"
        )
    return 0
