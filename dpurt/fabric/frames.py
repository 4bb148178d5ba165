"""The tcp fabric's frames, and the hello that shm shares: a pure codec. `dpurt.fabric.tcp` shows the whole
protocol and a client in a dozen lines.

All numbers are little-endian. One request frame serves all three operations, whoever sends it:

    request   op u32, count u32, then count entries (region u64, offset u64, length u64, lease u64); STORE and PUSH are
              followed by the bytes of all entries, back to back
    reply     status u32, index u32 (of the refused entry); a PULL with status OK is followed by the bytes of all entries
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dpurt.errors import NodeUnavailable, RemoteProtocolError
from dpurt.fabric.access import MAX_TOKEN_BYTES, Entry

PULL, STORE, PUSH = 1, 2, 3
OP_NAMES = {PULL: "pull", STORE: "store", PUSH: "push"}

OK, REFUSED = 0, 1  # a reply's status
WELCOME, DENIED, BUSY, MALFORMED = 0, 1, 2, 3  # a hello's
HELLO_WORDS = {
    DENIED: "wrong session or token",
    BUSY: "the session has a link already, or the node has no room for one",
    MALFORMED: "the node did not understand the hello",
}

REQUESTS, LANDING = 0, 1  # roles of a connection

MAGIC = b"DPT1"
HELLO = struct.Struct("<4sHHQ")  # magic, role, token length, session
HELLO_REPLY = struct.Struct("<4sI")  # magic, status
HEADER = struct.Struct("<II")  # op, count; also a reply: status, index
ENTRY = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What one request may ask for; a frame beyond is malformed and ends the link."""

    max_entries: int = 4096
    max_request_bytes: int = 1 << 32


def encode_hello(magic: bytes, role: int, session: int, token: bytes) -> bytes:
    return HELLO.pack(magic, role, len(token), session) + token


def decode_hello(magic: bytes, head: bytes) -> tuple[int, int, int]:
    """(role, token length, session)"""
    got, role, token_bytes, session = HELLO.unpack(head)
    if got != magic:
        raise RemoteProtocolError("malformed", f"a hello starts with {magic!r}, not {got!r}")
    if role not in (REQUESTS, LANDING) or token_bytes > MAX_TOKEN_BYTES:
        raise RemoteProtocolError("malformed", f"role {role} with a token of {token_bytes} bytes")
    return role, token_bytes, session


def encode_request(op: int, entries: Sequence[Entry]) -> bytes:
    return HEADER.pack(op, len(entries)) + b"".join(ENTRY.pack(*entry) for entry in entries)


def decode_header(head: bytes, allowed: frozenset[int], limits: FrameLimits) -> tuple[int, int]:
    """(op, count)"""
    op, count = HEADER.unpack(head)
    if op not in allowed:
        raise RemoteProtocolError("malformed", f"operation {op} is not served here")
    if count > limits.max_entries:
        raise RemoteProtocolError("malformed", f"{count} entries, the limit is {limits.max_entries}")
    return op, count


def decode_entries(body: bytes, limits: FrameLimits) -> tuple[list[Entry], int]:
    """(entries, their bytes in all)"""
    entries: list[Entry] = list(ENTRY.iter_unpack(body))
    total = sum(entry[2] for entry in entries)
    if total > limits.max_request_bytes:
        raise RemoteProtocolError("malformed", f"{total} bytes, the limit is {limits.max_request_bytes}")
    return entries, total


def check_welcome(where: str, magic_is_right: bool, status: int) -> None:
    """Raise unless a hello's reply says welcome."""
    if not magic_is_right:
        raise RemoteProtocolError("malformed", f"{where} is not a dpurt fabric")
    if status == BUSY:
        raise NodeUnavailable(where, HELLO_WORDS[BUSY])
    if status != WELCOME:
        raise RemoteProtocolError("denied", HELLO_WORDS.get(status, f"hello status {status}"))
