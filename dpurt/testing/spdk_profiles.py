"""The ready SPDK profiles with all they need on disk: sparse files for devices, a private key file."""

from __future__ import annotations

import json
from pathlib import Path

from dpurt.bdev.spdk_apply import load_keys, load_profile
from dpurt.bdev.spdk_profile import KeyMaterial, Profile
from dpurt.commands.spdk import PROFILES

__all__ = ["KEY", "KEY2", "key_file", "on_disk"]

KEY = "000102030405060708090a0b0c0d0e0f"
KEY2 = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"


def key_file(folder: Path, text: str = f"{KEY}\n{KEY2}\n", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def disk(folder: Path, name: str, mib: int = 64) -> str:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(mib << 20)
    return str(path)


def on_disk(name: str, folder: Path, **chosen: str) -> tuple[Profile, dict[str, KeyMaterial]]:
    """A ready profile on files in this folder, loaded as the command does."""
    declared = json.loads((PROFILES / f"{name}.json").read_text())["variables"]
    values = {"SIZE_MIB": "16", "KEY_FILE": str(key_file(folder)), "BLOCKS": "2048"}
    values |= {file: disk(folder, file.lower()) for file in ("FILE", "FILE_A", "FILE_B")}
    chosen = {**{k: v for k, v in values.items() if k in declared}, **chosen}
    profile = load_profile(PROFILES / f"{name}.json", chosen)
    return profile, load_keys(profile, folder)
