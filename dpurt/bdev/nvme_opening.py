"""What it takes to open a namespace over fabrics, whatever the transport: parameters checked, the login, discovery."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import replace

from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_association import Transport, converse_alone
from dpurt.errors import BdevError, ConfigError, RemoteProtocolError
from dpurt.wire import nvme
from dpurt.wire.nvme_controller import Login, discover

__all__ = ["Address", "find_subsystem", "make_login"]

Address = tuple[str, int]

_MIN_QUEUE, _MAX_QUEUE = 2, 1024
_MAX_QUEUES = 64
_TRTYPES = {"nvme-tcp": (nvme.TRTYPE_TCP, "TCP"), "nvme-rdma": (nvme.TRTYPE_RDMA, "RDMA")}


def make_login(
    addresses: Sequence[Address],
    subnqn: str,
    hostnqn: str | None,
    num_queues: int,
    queue_size: int,
    keep_alive_s: float,
    sq_flow_control: bool,
) -> Login:
    """Raises ConfigError for a parameter that is wrong."""
    _check_addresses(addresses)
    for where, nqn in (("subnqn", subnqn), ("hostnqn", hostnqn)):
        if nqn is not None and not nvme.is_nqn(nqn):
            raise ConfigError(f"$.bdev.{where}", f"{nqn!r} is no NVMe qualified name")
    if not 1 <= num_queues <= _MAX_QUEUES:
        raise ConfigError("$.bdev.num_queues", f"expected 1 to {_MAX_QUEUES}, got {num_queues}")
    if not _MIN_QUEUE <= queue_size <= _MAX_QUEUE:
        raise ConfigError("$.bdev.queue_size", f"expected {_MIN_QUEUE} to {_MAX_QUEUE}, got {queue_size}")
    if keep_alive_s < 0:
        raise ConfigError("$.bdev.keep_alive_s", f"expected 0 or more, got {keep_alive_s}")
    host = hostnqn or f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    return Login(
        host_id=hashlib.blake2b(host.encode(), digest_size=16).digest(),
        host_nqn=host,
        subsystem_nqn=subnqn,
        num_queues=num_queues,
        queue_size=queue_size,
        keep_alive_ms=round(keep_alive_s * 1000),
        sq_flow_control=sq_flow_control,
    )


def _check_addresses(addresses: Sequence[Address]) -> None:
    if not addresses:
        raise ConfigError("$.bdev.addresses", "name at least one (host, port)")
    for address in addresses:
        if not _is_address(address):
            raise ConfigError("$.bdev.addresses", f"expected (host, port), got {address!r}")


def _is_address(address: object) -> bool:
    match address:
        case (str() as host, int() as port):
            return bool(host) and 0 < port < 65536
    return False


async def find_subsystem(
    addresses: Sequence[Address], transport: Transport[Address], login: Login, pacing: Pacing, name: str
) -> list[Address]:
    """Where the subsystem is, by the first discovery controller at these addresses that knows. Raises BdevError."""
    problems = []
    asking = replace(login, subsystem_nqn=nvme.DISCOVERY_NQN, keep_alive_ms=0)
    trtype, word = _TRTYPES[transport.kind]
    for address in addresses:
        try:
            entries = await converse_alone(address, transport, discover(asking), pacing.connect_s)
            ours = [
                entry
                for entry in entries
                if (entry.trtype, entry.subsystem_nqn) == (trtype, login.subsystem_nqn)
            ]
            found = [_address_of(entry) for entry in ours]
        except (OSError, RemoteProtocolError) as error:
            problems.append(f"{address}: {error}")
            continue
        if found:
            return found
        problems.append(f"{address}: knows no {word} address of it")
    raise BdevError(name, "open", 0, 0, "unavailable", "discovery: " + "; ".join(problems))


def _address_of(entry: nvme.DiscoveryEntry) -> Address:
    if not entry.service.isdecimal() or int(entry.service) > 65535:
        raise RemoteProtocolError("nvme_data", f"discovery log: {entry.service!r} is no port")
    return entry.address, int(entry.service)
