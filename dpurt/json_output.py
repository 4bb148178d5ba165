"""`--json FILE|-`: what a command has to say as JSON, to a file or to stdout, for programs to read."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from dpurt.errors import ConfigError

__all__ = ["add_json_argument", "check_writable", "write_json", "write_text"]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``; `args.json` is a path, ``"-"`` or None."""
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or to stdout for -, and no text")


def check_writable(path: Path) -> None:
    """ConfigError when no file can be written there; for commands that write only at their end. Writes nothing."""
    try:
        if path.is_dir():
            raise ConfigError(str(path), "cannot write: it is a folder")
        if not path.parent.is_dir():
            raise ConfigError(str(path), f"cannot write: there is no folder {path.parent}")
        may_write = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # a folder on the way that is not ours to look into
        raise ConfigError(str(path), f"cannot write: {error.strerror}") from error
    if not may_write:
        raise ConfigError(str(path), "cannot write: permission denied")


def write_text(path: Path, text: str) -> None:
    """ConfigError when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot write: {error.strerror}") from error


def write_json(target: str, value: object) -> None:
    """Write `value`, indented. ConfigError when the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    write_text(Path(target), text)
