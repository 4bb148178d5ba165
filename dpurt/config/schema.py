"""The tables of a topology, as frozen structs; field names are the TOML keys, units are in the names.

What a single table can tell about itself is checked here (types, ranges, `__post_init__`); what tables say
about each other is in `rules`. Making a struct by calling it checks no types: use `config_from`. Byte fields
may be written as ``"16 GiB"`` in a file (see `reading`). Relative `*_file` and `*_dir` paths belong to the
topology's folder; a bdev's relative `path` to the node's run folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from dpurt import keys
from dpurt.config import rules
from dpurt.core.device_model import DeviceProfile
from dpurt.core.identity import MAX_PARTS, Geometry, LayerGroup, Space
from dpurt.core.rails import RailWish
from dpurt.core.record import RecordLayout
from dpurt.errors import ConfigError

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Micros = Annotated[float, Meta(ge=0)]
FabricKind = Literal["shm", "verbs", "tcp"]
Predictor = Literal[
    "sliding_window", "hint", "attention_prev", "attention_ewma", "attention", "cross_request"
]

MIN_SALT_BYTES = 16
UNLIMITED = 1 << 62
SAFE_DISK_SHARE = 0.8
PRIVATE = 0o700


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all tables share."""


class NodeConfig(Table, frozen=True, kw_only=True):
    """`run_dir` holds sockets and relative bdev paths. A node that is told to stop has `drain_s` for its requests to end and
    its devices to take what they do not have yet.
    """

    name: Name = "dpurt"
    run_dir: Text | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_s: Seconds = 10.0

    @property
    def run_path(self) -> Path:
        """`run_dir`, or a folder per node name under the user's runtime folder or the temporary one."""
        if self.run_dir is not None:
            return Path(self.run_dir)
        if runtime := os.environ.get("XDG_RUNTIME_DIR"):
            return Path(runtime) / f"dpurt-{self.name}"
        return Path(tempfile.gettempdir()) / f"dpurt-{os.getuid()}-{self.name}"

    def make_run_dir(self) -> Path:
        """Make the run folder, mode 0700, if it is missing; ConfigError when others could put or swap sockets in
        it. A default one, whose name anybody can guess, must be ours alone.
        """
        path = self.run_path
        try:
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("$.node.run_dir", f"cannot make {path}: {error.strerror}") from error
        self.check_run_dir()
        return path

    def check_run_dir(self) -> None:
        """ConfigError when others could put or swap sockets in the run folder, which is there."""
        path = self.run_path
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError("$.node.run_dir", f"cannot look at {path}: {error.strerror}") from error
        if self.run_dir is None and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            raise ConfigError("$.node.run_dir", f"{path} exists and others can enter it; remove it")
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            problem = f"{path} belongs to another user, or others can write to it; run chmod 700 on it, or name another"
            raise ConfigError("$.node.run_dir", problem)


class CurveConfig(Table, frozen=True, kw_only=True):
    """Keys of the gateway; made with `dpurt keys generate`. Hosts' `public_key`s are authorised too."""

    secret_key_file: Text
    authorized_keys_dir: Text | None = None

    def secret_key(self) -> bytes:
        """The node's secret key (Z85). ConfigError if it cannot be read or others can read it too."""
        return keys.load_pair(Path(self.secret_key_file)).secret.encode()

    def authorized_keys(self, extra: Iterable[str] = ()) -> frozenset[str]:
        """Public keys of the authorised folder and `extra` ones. See `Config.authorized_keys`."""
        folder = keys.load_authorized(Path(self.authorized_keys_dir)) if self.authorized_keys_dir else {}
        return frozenset(folder) | frozenset(extra)


class GatewayConfig(Table, frozen=True, kw_only=True):
    """The clients' door. Anything but loopback and ipc needs `curve`."""

    bind: Text = "tcp://127.0.0.1:7571"
    curve: CurveConfig | None = None
    session_timeout_s: Seconds = 10.0
    max_message_bytes: Annotated[int, Meta(ge=64 << 10, le=1 << 30)] = 8 << 20
    max_clients: Positive = 64
    max_inflight_per_client: Positive = 256
    max_scopes_per_client: Positive = 4096
    max_prompt_bytes_per_client: Positive = 256 << 20

    def __post_init__(self) -> None:
        rules.check_endpoint(self.bind, "gateway.bind", ("tcp", "ipc"))
        if self.curve is None and not rules.is_local(self.bind):
            raise ValueError(
                f"bind {self.bind!r} can be reached from other machines and needs [gateway.curve] keys "
                "(make them with: dpurt keys generate)"
            )


class StagingConfig(Table, frozen=True, kw_only=True):
    """DRAM for blocks on their way. `lease_s` bounds a pull lease."""

    bytes: Positive
    eviction: Name = "predicted"
    lease_s: Seconds = 30.0


class BdevConfig(Table, frozen=True, kw_only=True, tag_field="kind"):
    """What every kind of bdev has. `capacity_bytes` is the most the store on it may use; `drive_writes_per_day` how often
    that may be written over (`dpurt.core.endurance`): given for all bdevs or for none. Subclasses: `AnyBdevConfig`.
    """

    name: Name
    capacity_bytes: Positive | None = None
    segment_bytes: Positive = 64 << 20
    queue_depth: Annotated[int, Meta(ge=1, le=1024)] = 32
    deadline_s: Seconds = 10.0
    drive_writes_per_day: Seconds | None = None

    @property
    def kind(self) -> str:
        """The word in the file: ``file``, ``memory``, ``modelled``, ``vhost-user``, ``nvme-tcp``, ``nvme-rdma`` or ``spdk``."""
        return str(self.__struct_config__.tag)

    def open_params(self, config: Config) -> dict[str, object]:
        """Keyword arguments of `dpurt.bdev.factory.open_bdev` for this kind."""
        raise NotImplementedError

    def capacity(self, config: Config) -> int:
        """How many bytes the store may ever use: the cap, or a safe default. ConfigError if that is too
        little.
        """
        raise NotImplementedError


class ProfileConfig(Table, frozen=True, kw_only=True):
    """What a modelled device can do. `jitter` is +-fraction of the latencies; `source` says where the figures come from."""

    read_latency_us: Micros
    write_latency_us: Micros
    read_bytes_per_s: Positive
    write_bytes_per_s: Positive
    jitter: Share = 0.1
    source: str = ""

    def to_profile(self, name: str, queue_depth: int) -> DeviceProfile:
        return DeviceProfile(
            name=name,
            read_latency_s=self.read_latency_us / 1e6,
            write_latency_s=self.write_latency_us / 1e6,
            read_bytes_per_s=self.read_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            queue_depth=queue_depth,
            jitter=self.jitter,
            source=self.source,
        )


class FileBdevConfig(BdevConfig, frozen=True, kw_only=True, tag="file"):
    """A file or block device. Without `capacity_bytes` the cap is `size_bytes`, but at most 80 % of what is
    free. A file is made as large as the cap, not larger. With `profile` it answers no sooner than such a device.
    """

    path: Text
    size_bytes: Positive | None = None
    profile: ProfileConfig | None = None

    def __post_init__(self) -> None:
        if self.size_bytes is None and self.capacity_bytes is None:
            raise ValueError("give size_bytes, capacity_bytes or both: a byte cap is mandatory")
        rules.check_capacity(self.capacity_bytes, self.size_bytes, self.segment_bytes)

    def full_path(self, config: Config) -> Path:
        """Where the file is."""
        return config.node.run_path / Path(self.path).expanduser()

    def open_params(self, config: Config) -> dict[str, object]:
        return {
            "path": self.full_path(config),
            "size_bytes": self.capacity(config),
            "name": self.name,
            "queue_depth": self.queue_depth,
        }

    def capacity(self, config: Config) -> int:
        if self.capacity_bytes is not None:
            return self.capacity_bytes
        assert self.size_bytes is not None, "one of the two is given"
        path = self.full_path(config)
        cap = self.size_bytes if names_device(path) else min(self.size_bytes, safe_bytes(path))
        if cap < rules.MIN_SEGMENTS * self.segment_bytes:
            raise ConfigError(
                f"$.bdev {self.name!r}",
                f"only {cap:,} bytes are safe to use at {path}: too few for {rules.MIN_SEGMENTS} segments of "
                f"{self.segment_bytes:,}; free some space, or set a smaller segment_bytes",
            )
        return cap


class MemoryBdevConfig(BdevConfig, frozen=True, kw_only=True, tag="memory"):
    """Blocks in plain memory: for tests and trials."""

    size_bytes: Positive

    def __post_init__(self) -> None:
        rules.check_capacity(self.capacity_bytes, self.size_bytes, self.segment_bytes)

    def open_params(self, config: Config) -> dict[str, object]:
        return {"size_bytes": self.size_bytes, "name": self.name, "queue_depth": self.queue_depth}

    def capacity(self, config: Config) -> int:
        return self.capacity_bytes or self.size_bytes


class ModelledBdevConfig(BdevConfig, frozen=True, kw_only=True, tag="modelled"):
    """Memory that answers as slowly as a device of this profile would."""

    size_bytes: Positive
    profile: ProfileConfig

    def __post_init__(self) -> None:
        rules.check_capacity(self.capacity_bytes, self.size_bytes, self.segment_bytes)

    def open_params(self, config: Config) -> dict[str, object]:
        profile = self.profile.to_profile(self.name, self.queue_depth)
        return {"size_bytes": self.size_bytes, "name": self.name, "profile": profile}

    def capacity(self, config: Config) -> int:
        return self.capacity_bytes or self.size_bytes


class RemoteBdevConfig(BdevConfig, frozen=True, kw_only=True):
    """A device whose size only it knows: without `capacity_bytes` the store may use all of it."""

    def capacity(self, config: Config) -> int:
        return self.capacity_bytes or UNLIMITED


class VhostUserBdevConfig(RemoteBdevConfig, frozen=True, kw_only=True, tag="vhost-user"):
    """A vhost-user-blk back end on this machine (SPDK, qemu-storage-daemon): `path` is its socket."""

    path: Text
    num_queues: Annotated[int, Meta(ge=1, le=64)] = 1

    def open_params(self, config: Config) -> dict[str, object]:
        return {"path": config.node.run_path / self.path, "name": self.name, "num_queues": self.num_queues}


class NvmeBdevConfig(RemoteBdevConfig, frozen=True, kw_only=True):
    """A namespace of an NVMe over fabrics subsystem. `addresses` ("host:port") are paths to it, or with `discovery` its
    discovery controllers; `nsid` is needed where it has several namespaces.
    """

    addresses: Annotated[tuple[Text, ...], Meta(min_length=1)]
    subnqn: Text
    nsid: Positive | None = None
    hostnqn: Text | None = None
    num_queues: Annotated[int, Meta(ge=1, le=64)] = 1
    keep_alive_s: Annotated[float, Meta(ge=0)] = 15.0
    discovery: bool = False

    def __post_init__(self) -> None:
        for address in self.addresses:
            rules.split_address(address, "addresses")

    def open_params(self, config: Config) -> dict[str, object]:
        own = msgspec.structs.asdict(self)
        names = ("name", "subnqn", "nsid", "hostnqn", "num_queues", "keep_alive_s", "discovery")
        addresses = [rules.split_address(address, "addresses") for address in self.addresses]
        return {"addresses": addresses, **{name: own[name] for name in names}}


class NvmeTcpBdevConfig(NvmeBdevConfig, frozen=True, kw_only=True, tag="nvme-tcp"):
    """Over TCP."""

    header_digest: bool = False
    data_digest: bool = False

    def open_params(self, config: Config) -> dict[str, object]:
        digests = {"header_digest": self.header_digest, "data_digest": self.data_digest}
        return {**super().open_params(config), **digests}


class NvmeRdmaBdevConfig(NvmeBdevConfig, frozen=True, kw_only=True, tag="nvme-rdma"):
    """Over RDMA: the target moves bytes to and from staging itself."""


class QosConfig(Table, frozen=True, kw_only=True):
    """Limits an SPDK target puts on a bdev; 0 is none. MiB a second, and operations (it rounds up to 1000s)."""

    rw_ios_per_sec: Annotated[int, Meta(ge=0)] = 0
    rw_mbytes_per_sec: Annotated[int, Meta(ge=0)] = 0
    r_mbytes_per_sec: Annotated[int, Meta(ge=0)] = 0
    w_mbytes_per_sec: Annotated[int, Meta(ge=0)] = 0


class SpdkBdevConfig(RemoteBdevConfig, frozen=True, kw_only=True, tag="spdk"):
    """A bdev of an SPDK target, by its RPC socket. `path` is the way its bytes take: "auto" prefers vhost-user, where
    SPDK moves bytes to and from staging itself. With `profile` (a file of spdk/, `set` its variables) the target is
    given what it lacks, now and whenever it comes back empty.
    """

    rpc: Text = "/var/tmp/spdk.sock"
    bdev: Text
    path: Literal["auto", "vhost-user", "nvme-rdma", "nvme-tcp"] = "auto"
    profile: Text | None = None
    set: dict[str, str] = {}
    qos: QosConfig | None = None

    def open_params(self, config: Config) -> dict[str, object]:
        return {
            "rpc": config.node.run_path / self.rpc, "bdev": self.bdev, "path": self.path, "name": self.name,
            "profile": self.profile, "settings": self.set,
            "qos": {} if self.qos is None else msgspec.structs.asdict(self.qos),
        }  # fmt: skip


AnyBdevConfig = (
    FileBdevConfig
    | MemoryBdevConfig
    | ModelledBdevConfig
    | VhostUserBdevConfig
    | NvmeTcpBdevConfig
    | NvmeRdmaBdevConfig
    | SpdkBdevConfig
)


class TenantConfig(Table, frozen=True, kw_only=True):
    """A tenant and where its secret salt is: exactly one of the three, or an explicit `allow_empty_salt`."""

    name: Name
    salt_file: Text | None = None
    salt_env: Name | None = None
    salt: Annotated[str, Meta(min_length=MIN_SALT_BYTES)] | None = None
    allow_empty_salt: bool = False

    def __post_init__(self) -> None:
        given = [word for word in ("salt_file", "salt_env", "salt") if getattr(self, word) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(given)}, not {len(given)}")
        if bool(given) == self.allow_empty_salt:
            raise ValueError(
                "give one of salt_file, salt_env, salt; or none of them with allow_empty_salt = true"
            )

    def __repr__(self) -> str:
        return f"TenantConfig(name={self.name!r})"  # the salt stays out of tracebacks and logs

    def load_salt(self) -> bytes:
        """The secret. ConfigError when it is missing, too short, or readable by others."""
        if self.allow_empty_salt:
            return b""
        salt = self._read()
        if len(salt) < MIN_SALT_BYTES:
            raise ConfigError(
                f"$.tenant {self.name!r}",
                f"its salt must have at least {MIN_SALT_BYTES} bytes, has {len(salt)}",
            )
        return salt

    def _read(self) -> bytes:
        if self.salt_file is not None:
            return keys.read_secret(Path(self.salt_file))
        if self.salt_env is not None:
            return os.environb.get(self.salt_env.encode(), b"")
        return (self.salt or "").encode()


class LayerGroupConfig(Table, frozen=True, kw_only=True):
    """See `dpurt.core.identity.LayerGroup`: `part_bytes` is of one block of one shard.

    `count` above 1 stands for so many equal groups, named ``NAME.0``, ``NAME.1`` and so on.
    """

    name: Name
    num_layers: Positive
    num_kv_heads: Positive
    head_size: Positive
    part_bytes: Positive
    packing: Text = "kv"
    window_tokens: Positive | None = None
    count: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1

    def to_groups(self) -> list[LayerGroup]:
        fields = msgspec.structs.asdict(self)
        count, name = fields.pop("count"), fields.pop("name")
        names = [name] if count == 1 else [f"{name}.{i}" for i in range(count)]
        return [LayerGroup(name=each, **fields) for each in names]


class GeometryConfig(Table, frozen=True, kw_only=True):
    """See `dpurt.core.identity.Geometry`."""

    block_tokens: Positive
    groups: Annotated[tuple[LayerGroupConfig, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    token_bytes: Literal[4, 8] = 4

    def __post_init__(self) -> None:
        total = sum(group.count for group in self.groups)
        if total > MAX_PARTS:
            raise ValueError(f"groups: at most {MAX_PARTS} in all, their counts add up to {total}")

    def to_geometry(self) -> Geometry:
        groups = tuple(each for group in self.groups for each in group.to_groups())
        return Geometry(block_tokens=self.block_tokens, groups=groups, token_bytes=self.token_bytes)


class DecodeConfig(Table, frozen=True, kw_only=True):
    """Staging for sparse decode, in addition to ``[staging] bytes``: slots of one layer group's part of one block.

    `staging_bytes` are shared evenly by up to `sequences` that decode at once; of each the first `max_blocks` blocks can be
    staged so. `prefetch_per_turn`: prefetches a layer group's turn, on average; 0 is none. `lookahead_groups`: how many
    groups ahead history is asked while the engine ranks nothing. `spare_slots`: beyond the shares, for parts that pass
    through.
    """

    staging_bytes: Positive
    sequences: Positive = 1
    max_blocks: Annotated[int, Meta(ge=1, le=1 << 14)] = 1024
    prefetch_per_turn: Annotated[float, Meta(ge=0, le=64)] = 4.0
    lookahead_groups: Positive = 4
    spare_slots: Positive = 64


class SpaceConfig(Table, frozen=True, kw_only=True):
    """A space: see `dpurt.core.identity.Space`.

    `recompute_tokens_per_s` is the rate at which the engine prefills: with it, prefetch leaves alone what a host computes
    sooner than the devices, as measured, give it. `ttl_s` 0 means blocks do not age (the byte cap still
    reclaims them). `staging_share` is this space's part of staging; what is left over is split evenly among
    the spaces that name none. `domain` is the trust domain: spaces of one domain share a region, which their
    hosts may map whole. By default each tenant is its own. `decode`: see there.
    """

    name: Name
    model: Text
    revision: Text
    kv_dtype: Text
    tenant: Name
    geometry: GeometryConfig
    tp_size: Positive = 1
    pp_size: Positive = 1
    lora_name: Text | None = None
    lora_version: Text | None = None
    ttl_s: Annotated[float, Meta(ge=0)] = 0.0
    staging_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    domain: Name | None = None
    recompute_tokens_per_s: Annotated[float, Meta(gt=0)] | None = None
    decode: DecodeConfig | None = None

    def __post_init__(self) -> None:
        rules.check_shards(self.tp_size, self.pp_size)

    @property
    def block_recompute_s(self) -> float | None:
        """How long computing a block takes, if anybody said."""
        rate = self.recompute_tokens_per_s
        return None if rate is None else self.geometry.block_tokens / rate

    @property
    def trust_domain(self) -> str:
        return self.domain or self.tenant

    def to_space(self, salt: bytes) -> Space:
        """The identity, epoch 0."""
        return Space(
            model=self.model,
            revision=self.revision,
            kv_dtype=self.kv_dtype,
            geometry=self.geometry.to_geometry(),
            tenant=self.tenant,
            salt=salt,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            lora_name=self.lora_name,
            lora_version=self.lora_version,
        )

    @property
    def record_bytes(self) -> int:
        """Bytes of one block of one shard, in staging and on a bdev. Does not need the salt."""
        return RecordLayout.of(self.to_space(b"")).record_bytes

    @property
    def part_slot_bytes(self) -> int:
        """Bytes of a slot of decode staging: a header and the largest part."""
        layout = RecordLayout.of(self.to_space(b""))
        return max(layout.of_part(part).record_bytes for part in range(layout.num_parts))

    @property
    def decode_slots(self) -> int:
        """Slots of decode staging that its sequences share, without the spare ones."""
        return 0 if self.decode is None else self.decode.staging_bytes // self.part_slot_bytes

    @property
    def decode_bytes(self) -> int:
        """DRAM that decode staging takes, spare slots included."""
        spare = 0 if self.decode is None else self.decode.spare_slots
        return (self.decode_slots + spare) * self.part_slot_bytes


class HostConfig(Table, frozen=True, kw_only=True):
    """A GPU host that may connect. `fabrics`: best first. `public_key`: only the bearer of its secret may
    claim the name. `rails` are those of the node that lead to it (none named: all), `switch` is the one it hangs on.
    """

    name: Name
    spaces: Annotated[tuple[Name, ...], Meta(min_length=1)]
    fabrics: Annotated[tuple[FabricKind, ...], Meta(min_length=1)] = ("shm", "tcp")
    inbound_bytes: Positive = 256 << 20
    public_key: Annotated[str, Meta(min_length=keys.Z85_KEY_CHARS, max_length=keys.Z85_KEY_CHARS)] | None = (
        None
    )
    rails: tuple[Name, ...] = ()
    switch: str = ""


class RailConfig(Table, frozen=True, kw_only=True):
    """One way out of this node for RDMA: a port of a NIC, by its device's name or its IPv4 address. `switch`: where its cable
    ends. `numa` and `bandwidth_bytes_per_s` are asked of the kernel where they are not given.
    """

    name: Name
    device: str = ""
    address: str = ""
    switch: str = ""
    numa: Annotated[int, Meta(ge=0)] | None = None
    bandwidth_bytes_per_s: Positive | None = None

    def __post_init__(self) -> None:
        if not self.device and not self.address:
            raise ValueError(f"rail {self.name!r}: give device, address or both")


class EngineConfig(Table, frozen=True, kw_only=True):
    """An inference engine whose KV events tell what its host holds, and to which requests may be routed.

    `events` and `replay`: endpoints, one for each data-parallel rank; or `discovery`, its HTTP address (``http://host:port``),
    and it says so itself. `bind`: the engine connects to us. `space` is what its base model's blocks belong to, `loras` those
    of its adapters, by name. `prefill_tokens_per_s` and `cpu_tokens_per_s` (from its CPU memory) estimate waits.
    """

    name: Name
    kind: Literal["vllm", "sglang"]
    space: Name
    loras: dict[str, Name] = {}
    events: tuple[Text, ...] = ()
    replay: tuple[Text, ...] = ()
    topic: str = ""
    discovery: Text | None = None
    bind: bool = False
    block_tokens: Positive | None = None
    prefill_tokens_per_s: Positive = 8192
    cpu_tokens_per_s: Positive = 200_000

    def __post_init__(self) -> None:
        if bool(self.events) == (self.discovery is not None):
            raise ValueError("give either events, an endpoint a rank, or discovery")
        if self.discovery is not None and (self.bind or self.topic):
            raise ValueError("bind and topic are for events; with discovery the engine says where to connect")
        if self.replay and len(self.replay) != len(self.events):
            raise ValueError(f"{len(self.replay)} replay endpoints for {len(self.events)} ranks")
        for endpoint in (*self.events, *self.replay):
            rules.check_endpoint(endpoint, "events and replay", ("tcp", "ipc"))
        if self.bind and not all(map(rules.is_local, self.events)):
            raise ValueError("an endpoint to bind that is not loopback could be written to by anybody")
        if self.discovery is not None and urlsplit(self.discovery).scheme != "http":
            raise ValueError(f"discovery: expected http://host:port, got {self.discovery!r}")


class LinkConfig(Table, frozen=True, kw_only=True):
    """What a fabric can do between this node and a host."""

    host: Name
    fabric: FabricKind
    bandwidth_bytes_per_s: Positive
    latency_us: Micros


class VerbsConfig(Table, frozen=True, kw_only=True):
    """Which RDMA device the verbs fabric uses: by name, by its IPv4 address, or the only one there is; with `[[rail]]` tables
    it is those. `port`: TCP, of the control connection, on the device's address; 0: any. `queue_pairs`: of a host, on each rail.
    """

    device: str = ""
    address: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    queue_pairs: Annotated[int, Meta(ge=1, le=4)] = 1


class FabricConfig(Table, frozen=True, kw_only=True):
    """Where the tcp and verbs fabrics listen. Their links are opened with a secret from the control channel but not
    encrypted.
    """

    tcp_bind: Text = "tcp://127.0.0.1:0"
    verbs: VerbsConfig = VerbsConfig()

    def __post_init__(self) -> None:
        rules.check_endpoint(self.tcp_bind, "fabric.tcp_bind", ("tcp",))

    def tcp_address(self) -> tuple[str, int]:
        """(host, port)."""
        url = urlsplit(self.tcp_bind)
        return url.hostname or "", url.port or 0


class ShadowConfig(Table, frozen=True, kw_only=True):
    """A policy on trial: it sees what the node sees, reads nothing, and is scored like the node's own. Without predictors it
    reads on demand.
    """

    name: Name
    eviction: Name = "lru"
    predictors: tuple[Predictor, ...] = ()


class PrefetchConfig(Table, frozen=True, kw_only=True):
    """Which predictors run, and the budget they compete for. `prior`: whether they begin with what the package knows of when
    conversations return, or learn from nothing.
    """

    enabled: bool = True
    predictors: tuple[Predictor, ...] = ("sliding_window", "attention", "cross_request")
    lookahead_blocks: Positive = 64
    bandwidth_bytes_per_s: Positive = 1 << 30
    staging_fraction: Share = 0.5
    min_probability: Share = 0.05
    prior: Literal["shipped", "none"] = "shipped"
    shadow: Annotated[tuple[ShadowConfig, ...], Meta(max_length=4)] = ()


class PlacementConfig(Table, frozen=True, kw_only=True):
    """The second hop of prefetch: staged blocks put into the landing zones that hosts offer, under this budget of each host's
    link. `max_slots`: of one zone.
    """

    enabled: bool = True
    predictors: tuple[Predictor, ...] = ("sliding_window", "hint")
    lookahead_blocks: Positive = 16
    bandwidth_bytes_per_s: Positive = 1 << 30
    queue_depth: Annotated[int, Meta(ge=1, le=64)] = 8
    min_probability: Share = 0.05
    max_slots: Annotated[int, Meta(ge=1, le=1 << 16)] = 4096


class MetricsConfig(Table, frozen=True, kw_only=True):
    """Prometheus text over HTTP on loopback, e.g. ``"127.0.0.1:9571"``; empty is off."""

    bind: str = ""

    def __post_init__(self) -> None:
        rules.check_loopback(self.bind, "metrics.bind")


class RouterConfig(Table, frozen=True, kw_only=True):
    """Routing questions over HTTP on loopback, e.g. ``"127.0.0.1:8090"``; empty is off.

    Any user of this machine may then ask which prompts are cached, of every space.
    """

    bind: str = ""

    def __post_init__(self) -> None:
        rules.check_loopback(self.bind, "router.bind")


class EnvelopeConfig(Table, frozen=True, kw_only=True):
    """What the machine the node is meant for can do; with `model` true nothing here was measured on it."""

    cores: Positive
    dram_bytes: Positive
    link_bytes_per_s: Positive
    device_bytes_per_s: Positive
    device_latency_us: Micros
    model: bool = True
    source: Text


class Config(Table, frozen=True, kw_only=True):
    """A whole topology, as seen by one node. Arrays of tables keep the file's order."""

    staging: StagingConfig
    bdev: Annotated[tuple[AnyBdevConfig, ...], Meta(min_length=1)]
    tenant: Annotated[tuple[TenantConfig, ...], Meta(min_length=1)]
    space: Annotated[tuple[SpaceConfig, ...], Meta(min_length=1)]
    host: tuple[HostConfig, ...] = ()
    engine: tuple[EngineConfig, ...] = ()
    link: tuple[LinkConfig, ...] = ()
    rail: Annotated[tuple[RailConfig, ...], Meta(max_length=4)] = ()
    node: NodeConfig = NodeConfig()
    gateway: GatewayConfig = GatewayConfig()
    fabric: FabricConfig = FabricConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()
    router: RouterConfig = RouterConfig()
    envelope: EnvelopeConfig | None = None

    def space_named(self, name: str) -> SpaceConfig:
        """ConfigError if there is none."""
        for space in self.space:
            if space.name == name:
                return space
        known = ", ".join(space.name for space in self.space)
        raise ConfigError("$.space", f"no space {name!r}; known: {known}")

    def host_named(self, name: str) -> HostConfig | None:
        return next((host for host in self.host if host.name == name), None)

    def rails(self) -> tuple[RailWish, ...]:
        """What the verbs fabric should use, at least one."""
        if self.rail:
            return tuple(RailWish(**msgspec.structs.asdict(rail)) for rail in self.rail)
        return (RailWish("rdma", self.fabric.verbs.device, self.fabric.verbs.address),)

    def to_space(self, name: str) -> Space:
        """The identity of a space, its tenant's salt loaded, epoch 0. ConfigError when the salt cannot be
        had.
        """
        space = self.space_named(name)
        tenant = next(tenant for tenant in self.tenant if tenant.name == space.tenant)
        return space.to_space(tenant.load_salt())

    def staging_plan(self) -> dict[str, dict[str, int]]:
        """Trust domain -> space -> bytes of staging."""
        named = sum(space.staging_share or 0.0 for space in self.space)
        unnamed = sum(space.staging_share is None for space in self.space)
        rest = max(0.0, 1.0 - named) / max(unnamed, 1)
        plan: dict[str, dict[str, int]] = {}
        for space in self.space:
            share = rest if space.staging_share is None else space.staging_share
            plan.setdefault(space.trust_domain, {})[space.name] = int(self.staging.bytes * share)
        return plan

    def authorized_keys(self) -> frozenset[str]:
        """Public keys that may open a CURVE channel: the hosts' own and those in the authorised folder."""
        own = {host.public_key for host in self.host if host.public_key is not None}
        return self.gateway.curve.authorized_keys(own) if self.gateway.curve else frozenset(own)

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        return list(rules.warnings(self))


def names_device(path: Path) -> bool:
    """Whether a block device is meant, be it there or not."""
    in_dev = path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    return in_dev or path.is_block_device()


def safe_bytes(path: Path) -> int:
    """How much a file at `path` may come to hold: 80 % of what is free there, counting what it holds already
    as free.
    """
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    held = path.stat().st_blocks * 512 if path.exists() else 0
    return int((disk.f_bavail * disk.f_frsize + held) * SAFE_DISK_SHARE)
