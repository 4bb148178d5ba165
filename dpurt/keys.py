"""Secrets on disk: CURVE key pairs, the public keys of known clients, and tenants' salts.

A key file holds one Z85 word and nothing else: `NAME.secret` (mode 0600) and `NAME.pub`. A secret file that
its group or others can read is refused, since it must be taken for known. Directories of authorised keys hold
`*.pub` files. Nothing here prints or logs a secret.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from dpurt.errors import ConfigError

Z85_KEY_CHARS = 40
SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85."""

    public: str
    secret: str = field(repr=False)


def generate() -> KeyPair:
    """A new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def save(pair: KeyPair, stem: Path) -> tuple[Path, Path]:
    """Write `stem.secret` and `stem.pub`; refuses to overwrite. Returns both paths."""
    if not stem.name:
        raise ConfigError(
            str(stem), "is a folder: give the files a name, as in node for node.secret and node.pub"
        )
    secret, public = _beside(stem, ".secret"), _beside(stem, ".pub")
    if public.exists():
        raise ConfigError(str(public), "exists already; remove it first if it is not used any more")
    write_secret(secret, pair.secret)
    try:
        public.write_text(pair.public + "\n")
    except OSError as error:
        for path in (secret, public):  # half a pair is of no use, and would be in the way of the next try
            path.unlink(missing_ok=True)
        raise ConfigError(str(public), f"cannot write: {error.strerror}") from error
    return secret, public


def write_secret(path: Path, text: str) -> None:
    """Make a new file of mode 0600. ConfigError, and no file, where that does not work."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(str(path), "exists already; remove it first if it is not used any more") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot write: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(str(path), f"cannot write: {error.strerror}") from error


def generate_salt() -> str:
    """A new tenant salt as text."""
    return secrets.token_hex(SALT_BYTES)


def read_secret(path: Path) -> bytes:
    """The content of a secret file, without white space at its ends. ConfigError if others can read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read().strip()
    except OSError as error:
        raise ConfigError(str(path), f"cannot read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(str(path), f"mode is {mode:04o}: others can read this secret; run chmod 600 on it")
    return content


def load_pair(path: Path) -> KeyPair:
    """The pair whose secret key is in this file."""
    secret = _z85_word(path, read_secret(path))
    try:
        return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)
    except zmq.ZMQError as error:
        raise ConfigError(str(path), "is no CURVE secret key") from error


def load_public(path: Path) -> str:
    """A public key file's key."""
    try:
        return _z85_word(path, path.read_bytes().strip())
    except OSError as error:
        raise ConfigError(str(path), f"cannot read: {error.strerror}") from error


def load_authorized(folder: Path) -> dict[str, str]:
    """Public key -> file stem (the client's name) of each `*.pub` in a folder."""
    if not folder.is_dir():
        raise ConfigError(str(folder), "is no folder of public keys")
    return {load_public(path): path.stem for path in sorted(folder.glob("*.pub"))}


def _beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _z85_word(path: Path, content: bytes) -> str:
    if len(content) != Z85_KEY_CHARS or not content.isascii():
        raise ConfigError(str(path), f"must hold one Z85 key of {Z85_KEY_CHARS} characters")
    return content.decode()
