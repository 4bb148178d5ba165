"""What must hold between the tables of a topology (`problems`), and what probably is not meant (`warnings`).

Problems are (where, what) pairs in the order of the file, so that a reader fixes causes before consequences.
Nothing is asked of the machine here: whether *this* machine can run a topology is `dpurt.doctor`'s question.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from dpurt.core.eviction import POLICIES

if TYPE_CHECKING:
    from dpurt.config.schema import Config

MAX_SHARDS = 4096  # of a space: as many as an owner has bits for, see dpurt.agents.spaces
MIN_SLOTS = 4  # of staging for each space: fewer cannot even double-buffer a reader and a writer
MIN_SEGMENTS = 4  # of a bdev: one open, one being reclaimed, some that hold blocks
MIN_RECORDS = 4  # of a segment
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path on Linux
SEGMENT_HEADER_BYTES = 8192
DTYPE_BYTES = {
    "fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1,
    "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
LONGEST_SOCKET_NAME = "/admin.sock"

Problem = tuple[str, str]


class Named(Protocol):
    @property
    def name(self) -> str: ...


# --- single values, used by the tables themselves ---


def check_endpoint(endpoint: str, where: str, schemes: Sequence[str]) -> None:
    """ValueError unless this is a full endpoint of one of the schemes."""
    url = urlsplit(endpoint)
    if url.scheme not in schemes:
        raise ValueError(f"{where}: expected {' or '.join(f'{s}://...' for s in schemes)}, got {endpoint!r}")
    if url.scheme != "tcp":
        return
    try:
        is_whole = bool(url.hostname) and url.port is not None and not url.path
    except ValueError:
        is_whole = False
    if not is_whole or url.hostname == "*":
        raise ValueError(
            f"{where}: expected an address and a port, as in tcp://127.0.0.1:0, got {endpoint!r}"
        )


def split_address(address: str, where: str) -> tuple[str, int]:
    """(host, port) of ``host:port`` or ``[v6]:port``. ValueError if it is neither."""
    url = urlsplit(f"//{address}")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host or not port or url.path or url.username:
        raise ValueError(f"{where}: expected host:port, as in 192.0.2.1:4420, got {address!r}")
    return host, port


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach an endpoint. A host name other than localhost could be anything:
    no.
    """
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or url.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(url.hostname or "").is_loopback
    except ValueError:
        return False


def check_loopback(address: str, where: str) -> None:
    """ValueError unless empty (off), or a loopback address and port to serve HTTP on."""
    if not address:
        return
    check_endpoint(f"tcp://{address}", where, ("tcp",))
    if not is_local(f"tcp://{address}"):
        raise ValueError(f"bind {address!r} is not loopback, and the page has no authentication")


def check_capacity(capacity: int | None, size: int | None, segment: int) -> None:
    """ValueError unless cap, size and segments fit into one another."""
    if capacity is not None and size is not None and capacity > size:
        raise ValueError(f"capacity_bytes {capacity:,} is more than size_bytes {size:,}")
    if segment % 4096:
        raise ValueError(f"segment_bytes must be a multiple of 4096, got {segment:,}")
    room = capacity or size or 0
    if room < MIN_SEGMENTS * segment:
        raise ValueError(f"{room:,} bytes hold fewer than {MIN_SEGMENTS} segments of {segment:,} bytes")


def check_shards(tp_size: int, pp_size: int) -> None:
    """ValueError when a space has more ranks than `MAX_SHARDS`."""
    if tp_size * pp_size > MAX_SHARDS:
        raise ValueError(
            f"tp_size {tp_size:,} * pp_size {pp_size:,} is more than the {MAX_SHARDS:,} ranks a space may have"
        )


# --- between tables ---


def problems(config: Config) -> Iterator[Problem]:
    """Everything that is wrong between the tables."""
    yield from _node(config)
    yield from _names(config)
    yield from _gateway(config)
    yield from _staging(config)
    yield from _bdevs(config)
    yield from _spaces(config)
    yield from _hosts(config)
    yield from _engines(config)
    yield from _links(config)
    yield from _envelope(config)


def _node(config: Config) -> Iterator[Problem]:
    path = f"{config.node.run_path}{LONGEST_SOCKET_NAME}"
    if len(path.encode()) > MAX_SOCKET_PATH:
        yield "$.node.run_dir", f"{path} is too long for a Unix socket ({MAX_SOCKET_PATH} bytes)"


def _names(config: Config) -> Iterator[Problem]:
    tables: dict[str, Sequence[Named]] = {
        "bdev": config.bdev,
        "tenant": config.tenant,
        "space": config.space,
        "host": config.host,
        "engine": config.engine,
        "rail": config.rail,
    }
    for table, entries in tables.items():
        seen: set[str] = set()
        for i, entry in enumerate(entries):
            if entry.name in seen:
                yield f"$.{table}[{i}].name", f"{entry.name!r} is there twice"
            seen.add(entry.name)


def _gateway(config: Config) -> Iterator[Problem]:
    if config.gateway.curve is None:
        if not is_local(config.fabric.tcp_bind):
            yield "$.fabric.tcp_bind", "can be reached from other machines and needs [gateway.curve] keys"
        return
    if config.gateway.curve.authorized_keys_dir is None and not any(host.public_key for host in config.host):
        yield (
            "$.gateway.curve",
            "no client could ever connect: give authorized_keys_dir, or a host's public_key",
        )


def _shadows(config: Config) -> Iterator[Problem]:
    names = [shadow.name for shadow in config.prefetch.shadow]
    for i, shadow in enumerate(config.prefetch.shadow):
        if shadow.eviction not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            yield f"$.prefetch.shadow[{i}].eviction", f"unknown policy {shadow.eviction!r}; known: {known}"
        if shadow.name in names[:i]:
            yield f"$.prefetch.shadow[{i}].name", f"{shadow.name!r} is taken by another shadow"


def _staging(config: Config) -> Iterator[Problem]:
    if config.staging.eviction not in POLICIES:
        yield (
            "$.staging.eviction",
            f"unknown policy {config.staging.eviction!r}; known: {', '.join(sorted(POLICIES))}",
        )
    yield from _shadows(config)
    total = sum(space.staging_share or 0.0 for space in config.space)
    if total > 1 + 1e-9:
        yield "$.space", f"the staging_shares add up to {total:g}, more than 1"
    for i, space in enumerate(config.space):
        share = config.staging_plan()[space.trust_domain][space.name]
        if share < MIN_SLOTS * space.record_bytes:
            yield (
                f"$.space[{i}]",
                f"its share of staging, {share:,} bytes, holds fewer than {MIN_SLOTS} of its blocks "
                f"({space.record_bytes:,} bytes each, header included)",
            )


def _bdevs(config: Config) -> Iterator[Problem]:
    for i, bdev in enumerate(config.bdev):
        for space in config.space:
            records = (bdev.segment_bytes - SEGMENT_HEADER_BYTES) // space.record_bytes
            if records < MIN_RECORDS:
                yield (
                    f"$.bdev[{i}].segment_bytes",
                    f"{bdev.segment_bytes:,} bytes hold {max(records, 0)} blocks of space {space.name!r} "
                    f"({space.record_bytes:,} bytes each); at least {MIN_RECORDS} are needed",
                )
    if len({bdev.drive_writes_per_day is None for bdev in config.bdev}) > 1:
        yield "$.bdev", "drive_writes_per_day is one budget of all bdevs: give it for each, or for none"


def _spaces(config: Config) -> Iterator[Problem]:
    tenants = [tenant.name for tenant in config.tenant]
    owner: dict[str, str] = {}
    for i, space in enumerate(config.space):
        if space.tenant not in tenants:
            yield f"$.space[{i}].tenant", f"no tenant {space.tenant!r}; known: {', '.join(tenants)}"
        if (space.lora_name is None) != (space.lora_version is None):
            yield f"$.space[{i}]", "lora_name and lora_version go together"
        least = 0 if space.decode is None else space.decode.sequences * len(space.geometry.groups)
        if space.decode_slots < least:
            yield (
                f"$.space[{i}].decode.staging_bytes",
                f"holds {space.decode_slots} slots of {space.part_slot_bytes:,} bytes, fewer than {least}: one for each "
                f"layer group of each sequence",
            )
        other = owner.setdefault(space.trust_domain, space.tenant)
        if space.domain is None and other != space.tenant:
            yield (
                f"$.space[{i}].domain",
                f"tenant {space.tenant!r} is also the trust domain of tenant {other!r}",
            )


def _hosts(config: Config) -> Iterator[Problem]:
    sizes = {space.name: space.record_bytes for space in config.space}
    rails = [rail.name for rail in config.rail]
    for i, host in enumerate(config.host):
        for j, name in enumerate(host.rails):
            if name not in rails:
                yield f"$.host[{i}].rails[{j}]", f"no rail {name!r}; known: {', '.join(rails) or 'none'}"
        for j, name in enumerate(host.spaces):
            if name not in sizes:
                yield f"$.host[{i}].spaces[{j}]", f"no space {name!r}; known: {', '.join(sizes)}"
            elif host.inbound_bytes < sizes[name]:
                yield (
                    f"$.host[{i}].inbound_bytes",
                    f"{host.inbound_bytes:,} bytes do not hold one block of space {name!r} ({sizes[name]:,})",
                )


def _engines(config: Config) -> Iterator[Problem]:
    spaces = [space.name for space in config.space]
    for i, engine in enumerate(config.engine):
        for name in (engine.space, *engine.loras.values()):
            if name not in spaces:
                yield f"$.engine[{i}]", f"no space {name!r}; known: {', '.join(spaces)}"


def _links(config: Config) -> Iterator[Problem]:
    for i, link in enumerate(config.link):
        host = config.host_named(link.host)
        if host is None:
            yield f"$.link[{i}].host", f"no host {link.host!r}"
        elif link.fabric not in host.fabrics:
            yield f"$.link[{i}].fabric", f"host {link.host!r} has only {', '.join(host.fabrics)}"


def _envelope(config: Config) -> Iterator[Problem]:
    if config.envelope is None:
        return
    needed = config.staging.bytes + sum(host.inbound_bytes for host in config.host)
    needed += sum(space.decode_bytes for space in config.space)
    if needed > config.envelope.dram_bytes:
        yield (
            "$.staging.bytes",
            f"staging and the hosts' inbound regions take {needed:,} bytes, DRAM has {config.envelope.dram_bytes:,}",
        )


# --- allowed, but ---


def warnings(config: Config) -> Iterator[str]:
    """What is allowed but probably not meant, as sentences."""
    yield from _small_staging(config)
    yield from _weak_secrets(config)
    yield from _odd_reach(config)
    yield from _odd_parts(config)
    for engine in config.engine:
        if engine.events and not engine.replay:
            yield f"engine {engine.name!r} has no replay endpoint: one lost message empties what is known of it"
    if (
        config.envelope is not None
        and config.prefetch.bandwidth_bytes_per_s > config.envelope.device_bytes_per_s
    ):
        yield "prefetch.bandwidth_bytes_per_s is more than the envelope's device can read"
    for link in config.link:
        if config.placement.enabled and config.placement.bandwidth_bytes_per_s > link.bandwidth_bytes_per_s:
            yield f"placement.bandwidth_bytes_per_s is more than the {link.fabric} link to host {link.host!r} carries"


def _small_staging(config: Config) -> Iterator[str]:
    """Staging that cannot hold what is in flight limits the hit rate, however much is on flash (U19)."""
    for space in config.space:
        slots = config.staging_plan()[space.trust_domain][space.name] // space.record_bytes
        blocks = slots // (space.tp_size * space.pp_size)
        window = 2 * config.prefetch.lookahead_blocks
        if config.prefetch.enabled and blocks < window:
            yield (
                f"staging holds {blocks} blocks of space {space.name!r}, less than twice the prefetch "
                f"lookahead ({window}): it will limit the hit rate"
            )


def _odd_parts(config: Config) -> Iterator[str]:
    """Where packing and dtype tell a part's size, it is that of all heads, or of one shard's."""
    for space in config.space:
        bytes_each = DTYPE_BYTES.get(space.kv_dtype)
        for group in space.geometry.groups:
            if bytes_each is None or group.packing not in ("kv", "vk"):
                continue
            elements = (
                2 * space.geometry.block_tokens * group.num_layers * group.num_kv_heads * group.head_size
            )
            whole = elements * bytes_each
            shares = {whole, whole // space.tp_size, whole // (space.tp_size * space.pp_size)}
            if group.part_bytes not in shares:
                yield (
                    f"part_bytes {group.part_bytes:,} of group {group.name!r} of space {space.name!r} is not what its layers, "
                    f"heads, head_size, block_tokens and {space.kv_dtype} come to: {whole:,}"
                )


def _weak_secrets(config: Config) -> Iterator[str]:
    for tenant in config.tenant:
        if tenant.salt is not None:
            yield f"the salt of tenant {tenant.name!r} stands in the topology: for demos only, use salt_file"
        if tenant.allow_empty_salt:
            yield f"tenant {tenant.name!r} has no salt: whoever knows a prompt can probe for it"
    for host in config.host:
        if config.gateway.curve is not None and host.public_key is None:
            yield f"host {host.name!r} has no public_key: any authorised client may claim its name"


def _odd_reach(config: Config) -> Iterator[str]:
    if not config.host:
        yield "there is no [[host]]: nobody can connect"
    if not is_local(config.fabric.tcp_bind):
        yield "the tcp fabric listens beyond this machine, and block bytes travel unencrypted"
    if is_local(config.fabric.tcp_bind) and not is_local(config.gateway.bind):
        if any("tcp" in host.fabrics for host in config.host):
            yield "hosts on other machines reach the gateway, but the tcp fabric listens on loopback only"
    if any("verbs" in host.fabrics for host in config.host):
        yield "the verbs fabric can be reached from the device's network, and block bytes travel unencrypted"
