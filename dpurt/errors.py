"""Every exception dpurt raises on purpose, on one page.

A miss, a full staging pool or an expired lease is a *value* in a reply, never an exception. For channels that are
closed, broken or busy we raise Trio's own errors. Each class here carries fields, so that a caller need not parse text.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class DpurtError(Exception):
    """Base of the tree. Never raised itself."""


class ConfigError(DpurtError):
    """A configuration or topology file is wrong. `where` is a path into it, e.g. ``$.space[0].geometry``."""

    def __init__(self, where: str, problem: str, file: str = "") -> None:
        super().__init__(f"{file}: {where}: {problem}" if file else f"{where}: {problem}")
        self.where = where
        self.problem = problem
        self.file = file


class ProtocolError(DpurtError):
    """Base of the two below; `code` is a stable word a program may switch on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class LocalProtocolError(ProtocolError):
    """We (or the program calling us) broke the rules of a protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules, or refused; for a node's refusal `code` is the code in its reply."""


class SpaceMismatch(DpurtError):
    """Two peers disagree about a space. Secrets are never shown: for them `mine` and `theirs` are ``"<secret>"``."""

    def __init__(self, field: str, mine: object, theirs: object) -> None:
        shown = (
            "the values differ (secret)" if mine == "<secret>" else f"node has {mine!r}, host has {theirs!r}"
        )
        advice = "; new weights need a new client" if field == "epoch" else ""
        super().__init__(f"space field {field!r} differs: {shown}{advice}")
        self.field = field
        self.mine = mine
        self.theirs = theirs


class DeadlineExceeded(DpurtError):
    """An operation did not end in its time. `stage` says where it was."""

    def __init__(self, stage: str, budget_s: float) -> None:
        super().__init__(f"deadline exceeded in {stage} after {budget_s:.3f} s")
        self.stage = stage
        self.budget_s = budget_s


class NodeUnavailable(DpurtError):
    """No node answers at this endpoint (down, unreachable, draining or refusing). The engine goes on without it."""

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"node at {endpoint} unavailable: {why}")
        self.endpoint = endpoint
        self.why = why


class BdevError(DpurtError):
    """A block device operation failed. When this is raised the device no longer touches the buffers.

    `status` is one of ``"io_error"``, ``"out_of_range"``, ``"unaligned"``, ``"short"``, ``"no_space"``, ``"closed"``,
    ``"unavailable"`` (the device or the way to it is down, maybe for a while) or ``"gone"`` (it no longer exists).
    """

    def __init__(self, bdev: str, op: str, offset: int, length: int, status: str, detail: str = "") -> None:
        super().__init__(
            f"bdev {bdev}: {op} of {length} bytes at {offset} failed: {status}"
            + (f" ({detail})" if detail else "")
        )
        self.bdev = bdev
        self.op = op
        self.offset = offset
        self.length = length
        self.status = status


class BdevTimeout(BdevError):
    """The deadline passed while the device may still be reading or writing the caller's buffers.

    The buffers must be quarantined until ``await settled()`` returns; only then may they be reused.
    """

    def __init__(
        self, bdev: str, op: str, offset: int, length: int, settled: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(bdev, op, offset, length, "timed_out")
        self.settled = settled


class TargetUnavailable(DpurtError):
    """No SPDK target answers at this socket: it is down, unreachable, or went away with our call in flight (which it
    may or may not have carried out).
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"SPDK target at {path} unavailable: {why}")
        self.path = path
        self.why = why


class RpcError(DpurtError):
    """A JSON-RPC call was answered with an error.

    `code` is a negative errno or one of JSON-RPC's own; `name` is its name either way, ``""`` if it has none.
    Secrets are removed from `params` and `message` for good, as both end up in logs.
    """

    def __init__(self, method: str, code: int, message: str, params: object = None) -> None:
        self.method = method
        self.code = code
        self.name = _JSON_RPC_CODES.get(code) or errno.errorcode.get(-code, "")
        self.params = without_secrets(params)
        self.message = message
        for secret in secrets_in(params):
            self.message = self.message.replace(secret, HIDDEN)
        shown = f"{code} {self.name}".strip()
        super().__init__(f"{method} failed: {self.message} ({shown}); parameters: {self.params}")


HIDDEN = "<secret>"
_SECRET_PARAMS = {
    "key",
    "key2",
    "psk",
    "password",
    "secret",
    "dhchap_key",
    "dhchap_ctrlr_key",
    "hex_key",
    "hex_key2",
}
_JSON_RPC_CODES = {
    -32700: "parse error",
    -32600: "invalid request",
    -32601: "no such method",
    -32602: "invalid parameters",
    -32603: "internal error",
}


def without_secrets(params: object) -> object:
    """A copy of a call's parameters (or result) fit to be shown."""
    if isinstance(params, Mapping):
        return {
            name: HIDDEN if _is_secret(name) and value is not None else without_secrets(value)
            for name, value in params.items()
        }
    return [without_secrets(item) for item in params] if isinstance(params, list | tuple) else params


def secrets_in(params: object) -> Iterator[str]:
    """The secret texts in a call's parameters, so that they can be cut out of other texts."""
    if isinstance(params, Mapping):
        for name, value in params.items():
            if _is_secret(name) and isinstance(value, str) and value:
                yield value
            yield from secrets_in(value)
    elif isinstance(params, list | tuple):
        for item in params:
            yield from secrets_in(item)


def _is_secret(name: object) -> bool:
    word = str(name).lower()
    return word in _SECRET_PARAMS or word.endswith(("password", "_psk", "_secret"))


class FabricError(DpurtError):
    """A transfer to or from a peer failed. `status`: ``"closed"``, ``"timed_out"``, ``"protocol"``, ``"limit"``."""

    def __init__(self, peer: str, stage: str, status: str, bytes_done: int = 0, detail: str = "") -> None:
        super().__init__(
            f"fabric peer {peer}: {stage}: {status} after {bytes_done} bytes"
            + (f" ({detail})" if detail else "")
        )
        self.peer = peer
        self.stage = stage
        self.status = status
        self.bytes_done = bytes_done


class RemoteAccessError(FabricError):
    """The peer refused an access: unknown or expired lease, region, bounds, or direction."""

    def __init__(self, peer: str, stage: str, detail: str) -> None:
        super().__init__(peer, stage, "remote_access", 0, detail)


class RdmaUnavailable(DpurtError):
    """RDMA cannot be used: no device, no pyverbs, or no such device. `device` is what was asked for, or empty."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"RDMA device {device}: {why}" if device else why)
        self.device = device
        self.why = why


class RdmaLimit(DpurtError):
    """The device or the system refuses a resource. `what` names the limit, `remedy` what to set."""

    def __init__(self, device: str, what: str, remedy: str) -> None:
        super().__init__(f"RDMA device {device}: {what}; {remedy}")
        self.device = device
        self.what = what
        self.remedy = remedy


class QueuePairError(DpurtError):
    """Work on a queue pair did not end well; the device touches its memory no more. `status` is ``"timed_out"``,
    ``"closed"``, or what the device said, e.g. ``"remote_access"``, ``"retries_exceeded"``, ``"flushed"``.
    """

    def __init__(self, peer: str, status: str, detail: str = "") -> None:
        super().__init__(f"queue pair to {peer}: {status}" + (f" ({detail})" if detail else ""))
        self.peer = peer
        self.status = status


class ActorCrashed(DpurtError):
    """An agent failed more often than its restart policy allows."""

    def __init__(self, actor: str, restarts: int) -> None:
        super().__init__(f"actor {actor} crashed after {restarts} restarts")
        self.actor = actor
        self.restarts = restarts


def as_fields(error: BaseException) -> Mapping[str, object]:
    """The public fields of an error, for structured logs."""
    return {"error": type(error).__name__, "detail": str(error)}
