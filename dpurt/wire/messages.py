"""The client protocol: every message between a GPU host and a node, as one page of typed msgpack maps.

A host's DEALER socket sends one frame, a map with a `type`, to the node's ROUTER socket; the node answers with one frame
carrying the same `id`. `id` 0 asks for no answer (hints, release, cancel). `deadline_ms` is the host's budget counted from
the node's receipt; an expired request gets an `error` with code ``deadline``. Limits below are checked before anything is
acted on; the frame's size is limited by the socket. Keys that have their default (0, "", [], null) are left out of replies:
read them with a default. A client in another language needs ZeroMQ and msgpack, nothing else.

A *request id* (`request`) names a scope of one session: leases, reservations and prefetches made under it end with it.
Bytes do not travel here but over a fabric (`dpurt.fabric`); descriptors say where they are.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dpurt.core.identity import Geometry, LayerGroup, Space, conformance_vectors
from dpurt.errors import RemoteProtocolError

PROTOCOL = 1
MAX_BLOCKS = 4096  # blocks in one load, reserve, commit or release
MAX_PRIORITY = 100  # so that a client cannot make more queues than that
MAX_TOKEN_BYTES = 16 << 20
MAX_RANKED = 256  # blocks an engine may rank for one layer group

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Short = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Positive = Annotated[int, Meta(ge=1, le=2**48)]
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Millis = Annotated[int, Meta(ge=1, le=3_600_000)]
Tokens = Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=64)]
Digests = Annotated[list[Digest], Meta(max_length=1 << 17)]
BlockList = Annotated[list[Count], Meta(max_length=MAX_BLOCKS)]
RankedList = Annotated[list[Count], Meta(max_length=MAX_RANKED)]
IdList = Annotated[list[Id], Meta(max_length=MAX_BLOCKS)]
RouteIntent = Literal["probe", "will_route"]
Parts = tuple[Annotated[int, Meta(ge=0, le=128)], Annotated[int, Meta(ge=0, le=128)]]


class Request(Struct, kw_only=True, tag_field="type", omit_defaults=True, forbid_unknown_fields=False):
    """What every request has. Unknown map keys are ignored, so a newer host can talk to an older node."""

    id: Id = 0
    deadline_ms: Millis = 5000


class GroupClaim(Struct, kw_only=True):
    """`dpurt.core.identity.LayerGroup` on the wire."""

    name: Name
    num_layers: Count
    num_kv_heads: Count
    head_size: Count
    part_bytes: Positive
    packing: Short = "kv"
    window_tokens: Count | None = None


class SpaceClaim(Struct, kw_only=True):
    """What a host believes a space to be. `fingerprint` and `vectors` are those of epoch 0; the salt does not travel.

    `epoch` None adopts the node's current epoch; a number must be the node's. A host that says hello again names the epochs it
    had (`HelloReply.epochs`), or it would store what old weights made among the new.
    """

    name: Name
    model: Short
    revision: Short
    kv_dtype: Short
    tenant: Short
    block_tokens: Positive
    token_bytes: Positive
    groups: Annotated[list[GroupClaim], Meta(min_length=1, max_length=128)]
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    vectors: Annotated[list[bytes], Meta(max_length=16)]
    tp_size: Positive = 1
    pp_size: Positive = 1
    lora_name: Short | None = None
    lora_version: Short | None = None
    epoch: Count | None = None

    def to_space(self) -> Space:
        """The claimed space at epoch 0, without a salt. Raises ValueError on an impossible geometry."""
        groups = tuple(LayerGroup(**msgspec.structs.asdict(group)) for group in self.groups)
        geometry = Geometry(block_tokens=self.block_tokens, groups=groups, token_bytes=self.token_bytes)
        return Space(
            model=self.model, revision=self.revision, kv_dtype=self.kv_dtype, geometry=geometry, tenant=self.tenant,
            tp_size=self.tp_size, pp_size=self.pp_size, lora_name=self.lora_name, lora_version=self.lora_version,
        )  # fmt: skip


class Hello(Request, tag="hello"):
    """First message of a session. Refused with ``protocol``, ``draining``, ``unknown_host``, ``unauthorised``, ``busy``, ``unknown_space``,
    ``space_mismatch`` (field, mine, theirs), ``no_fabric``, ``no_memory`` or ``malformed``.
    """

    host: Name
    protocol: int
    spaces: Annotated[list[SpaceClaim], Meta(min_length=1, max_length=64)]
    fabrics: Annotated[list[Short], Meta(min_length=1, max_length=8)]


class Lookup(Request, tag="lookup"):
    """How much of a prompt is here? `tokens` (raw little-endian) or `digests` (an engine's chained block digests).

    ``will_load`` opens the scope `request` and starts prefetch; ``probe`` changes nothing. With `chained` false each digest
    stands alone, as hooks give them that name blocks without their parents: it is looked up, stored and kept by itself,
    and `LookupReply.present` says which are here. One space is used one way. `priority` is the scope's until the next
    lookup: reads that loads of it wait for go before those of higher numbers, as vLLM counts.
    """

    space: Name
    request: Name
    tokens: Tokens | None = None
    digests: Digests | None = None
    intent: Literal["probe", "will_load"] = "will_load"
    shard: Count = 0
    chained: bool = True
    priority: Priority = 0


class Hint(Request, tag="hint"):
    """What the engine knows. ``arrival`` opens a scope as ``will_load`` does, before any scheduler tick (U20); with `need_ms`, a
    router's hint: the engine will have the request in so long.

    ``pause`` / ``resume``: the sequence waits for a tool or user (`expected_ms`). ``finish`` ends the scope (`reason` e.g.
    ``end_turn``, ``tool_use``).

    ``decode``: what one layer group (`group`) does in decode step `step`; numbers of blocks are positions in the request's
    chain. `touched`: the blocks it attends to, told as soon as they are chosen: those not staged are read at once, and a
    `load` of them follows. `masses`: their shares of attention, one code a block (q means 2 ** (-q / 8)), or empty.
    `ranked`: blocks the engine expects the group `ranked_group` (null: `group`) to touch at its next turn, best first, wanted
    in `need_ms`. A space with decode staging is told in the order the groups run; others get what they can use of it.
    """

    request: Name
    kind: Literal["arrival", "pause", "resume", "finish", "decode"]
    space: Name = "-"
    tokens: Tokens | None = None
    digests: Digests | None = None
    expected_ms: Count | None = None
    reason: Short = ""
    step: Count = 0
    group: Count = 0
    touched: BlockList = []
    masses: Annotated[bytes, Meta(max_length=MAX_BLOCKS)] = b""
    ranked: RankedList = []
    ranked_group: Count | None = None
    need_ms: Count = 0
    shard: Count = 0


class Landing(Struct, kw_only=True):
    """Where to push: a landing region of the host and one offset a block."""

    region: Id
    offsets: IdList


class Zone(Request, tag="zone"):
    """This host offers a landing region as a zone (`dpurt.core.landing_zone`): `slots` blocks of one shard of a space, which the
    node fills with what it expects to be loaded. Replaces the zone there was. Answered with the slots it will use, 0: none.
    """

    space: Name
    region: Id
    slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    shard: Count = 0


class Used(Request, tag="used"):
    """Blocks of the request's chain (their positions) were taken from the zone, not loaded. Needs no answer."""

    request: Name
    blocks: BlockList
    parts: Parts | None = None
    shard: Count = 0


class Load(Request, tag="load"):
    """Blocks [first, first + count) of the scope's matched chain, or those in `blocks` (positions in it), if there are any.
    Pull: leases come back. Push: bytes do, into `landing`.

    `parts` narrows to layer groups [start, stop).
    """

    request: Name
    first: Count = 0
    count: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] = 1
    blocks: BlockList = []
    parts: Parts | None = None
    shard: Count = 0
    landing: Landing | None = None


class Reserve(Request, tag="reserve"):
    """Room for storing blocks [first, first + count) of a chain, wherever the reply says; `chained` as for a lookup."""

    space: Name
    request: Name
    first: Count
    count: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    tokens: Tokens | None = None
    digests: Digests | None = None
    shard: Count = 0
    chained: bool = True


class CommitBlock(Struct, kw_only=True):
    """One written reservation, with the CRC-32C of each part."""

    reservation: Id
    crcs: Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(min_length=1, max_length=128)]


class Commit(Request, tag="commit"):
    """The reserved bytes are written. Visible to others once answered ``stored``."""

    request: Name
    blocks: Annotated[list[CommitBlock], Meta(min_length=1, max_length=MAX_BLOCKS)]


class Release(Request, tag="release"):
    """Give leases, and reservations that will not be committed, back. Releasing twice is harmless."""

    leases: IdList = []
    reservations: IdList = []


class Cancel(Request, tag="cancel"):
    """End a scope: everything it holds is free or quarantined before the answer is sent."""

    request: Name


class Delete(Request, tag="delete"):
    """These blocks are not wanted any more, by nobody: all their shards go, and what is chained below them.

    A miss from now on. Their bytes stay on the device until their segment is used again, and a restart before that may
    find them there: to make a space's blocks unreachable for good, bump its epoch.
    """

    space: Name
    digests: Annotated[list[Digest], Meta(min_length=1, max_length=MAX_BLOCKS)]


class Explain(Request, tag="explain"):
    """Why did these blocks miss? Answered for the first `MAX_BLOCKS` of them."""

    space: Name
    tokens: Tokens | None = None
    digests: Digests | None = None
    shard: Count = 0


class Subscribe(Request, tag="subscribe"):
    """Follow the index of a space. One request, one batch (`IndexBatch`); the next one goes on from its `cursor`.

    Answered at once while there is something after `cursor`, else when something happens, or with an empty batch when
    `deadline_ms` is up (that nothing happened is news too). An empty `cursor` begins with all that is here. A reader that is
    too far behind is told so (`IndexBatch.lost`) and begins anew: it holds up nobody.
    """

    space: Name
    cursor: Annotated[bytes, Meta(max_length=64)] = b""
    max_blocks: Annotated[int, Meta(ge=1, le=1 << 16)] = 1 << 13


class Route(Request, tag="route"):
    """Which engine should serve this prompt? `tokens` as in `Lookup`.

    ``will_route`` books the work on the answer's `best`, so that the next question sees it; ``probe`` changes nothing.
    `cache_salt`: what the engines are given as such with this prompt.
    `queued_ms`: how long work waits at each engine now, where the caller knows better than the node. `among`: only these.
    """

    space: Name
    tokens: Tokens
    intent: RouteIntent = "will_route"
    cache_salt: Short = ""
    queued_ms: Annotated[dict[Short, Annotated[float, Meta(ge=0, le=1e9)]], Meta(max_length=64)] = {}
    among: Annotated[list[Short], Meta(max_length=64)] = []


class Stats(Request, tag="stats"):
    """The node's counters."""


class Ping(Request, tag="ping"):
    """Keeps the session alive."""


class Bye(Request, tag="bye"):
    """Ends the session and all its scopes."""


AnyRequest = (
    Hello | Lookup | Hint | Zone | Used | Load | Reserve | Commit | Release | Cancel | Delete | Explain | Subscribe
    | Route | Stats | Ping | Bye
)  # fmt: skip


# --- admin: only on the node's own Unix socket (file mode 0600) -------------------------------------------------------


class EpochBump(Request, tag="epoch_bump"):
    """Make every block of a space unreachable (new weights)."""

    space: Name


class Drain(Request, tag="drain"):
    """Refuse new sessions and scopes, finish what runs, flush, end."""


class Record(Request, tag="record"):
    """Begin a recording in a new file of the node's machine (an absolute path), or, with an empty one, end it."""

    path: Annotated[str, Meta(max_length=4096)] = ""


AdminRequest = EpochBump | Drain | Stats | Explain | Route | Ping | Record


# --- replies ---------------------------------------------------------------------------------------------------------


class Reply(Struct, kw_only=True, tag_field="type", omit_defaults=True):
    """What every reply has."""

    id: Id


class RegionInfo(Struct, kw_only=True):
    """A region of the node's memory this session may touch."""

    region: Id
    size: Positive
    access: Literal["read", "write"]


class HelloReply(Reply, tag="hello_ok"):
    """`session` numbers this session; `token` is the secret that opens its fabric link. `epochs` by space name.

    A tcp `fabric_address` without a ``host`` is at the host this reply came from.
    """

    node: str
    incarnation: int
    session: int
    session_timeout_ms: int
    max_message_bytes: int
    epochs: dict[str, int]
    fabric: str
    fabric_reason: str
    fabric_address: dict[str, str | int]
    token: bytes
    regions: list[RegionInfo]


class LookupReply(Reply, tag="lookup_ok"):
    """`matched_blocks` can be loaded; split into `staging`, `in_flight` and `nvme` (they add up).

    `ready_ms`: estimate until the whole match is in staging. `miss`: why the block after the match is not here
    (``explain`` says more), empty when the whole prompt is. ``incomplete``: some shards of it are here, not all.
    Where the digests are not a chain, `present` has a bit for each, the first in the lowest of its first byte.
    """

    matched_blocks: int
    matched_tokens: int
    staging: int = 0
    in_flight: int = 0
    nvme: int = 0
    ready_ms: int = 0
    miss: str = ""
    present: bytes = b""

    def is_present(self, position: int) -> bool:
        """Of digests that are not a chain: is this one here?"""
        at, bit = divmod(position, 8)
        return at < len(self.present) and bool(self.present[at] >> bit & 1)


class Grant(Struct, kw_only=True, omit_defaults=True):
    """One block of a load. `status` ``ok`` | ``miss`` | ``late`` | ``no_room`` | ``checksum`` | ``error``.

    For a pull: `lease`, and payload bytes at `offset` of `region`. `crcs` has one CRC-32C for each part asked for;
    `source` is the tier that served it: ``staging`` or ``nvme``.
    """

    status: str
    lease: int = 0
    region: int = 0
    offset: int = 0
    length: int = 0
    crcs: list[int] = []
    source: str = ""
    reason: str = ""


class LoadReply(Reply, tag="load_ok"):
    """One grant for each block asked for, in order. `part_bytes`: sizes of the parts asked for, the same in every block."""

    blocks: list[Grant]
    part_bytes: list[int] = []


class Reservation(Struct, kw_only=True, omit_defaults=True):
    """`status` ``reserved`` (write `length` bytes at `offset` of `region`) | ``exists`` | ``in_flight`` | ``no_room``."""

    status: str
    reservation: int = 0
    region: int = 0
    offset: int = 0
    length: int = 0


class ReserveReply(Reply, tag="reserve_ok"):
    """One reservation for each block asked for, in order."""

    blocks: list[Reservation]


class CommitReply(Reply, tag="commit_ok"):
    """Per block: ``stored`` | ``exists`` | ``checksum`` | ``no_room`` | ``orphan`` | ``unknown`` | ``stale_epoch``."""

    statuses: list[str]


class Ok(Reply, tag="ok"):
    """Done. `count`: how many things it concerned."""

    count: int = 0


class Reason(Struct, kw_only=True):
    """Why one block missed (or ``present``, then in which `tiers`); ``incomplete`` when only some of its shards are here."""

    block: int
    reason: str
    detail: str = ""
    age_s: float = 0.0
    tiers: list[str] = []


class ExplainReply(Reply, tag="explain_ok"):
    """One reason for each whole block."""

    blocks: list[Reason]


class IndexChange(Struct, kw_only=True, omit_defaults=True):
    """Blocks that the node now holds (`stored`), or no more: 16 bytes of `keys` each. Telling one again is harmless.

    Held: all shards are in staging or on flash, so a `Lookup` would count it.
    """

    stored: bool = False
    keys: bytes = b""


class IndexBatch(Reply, tag="index_batch"):
    """Changes in order. `is_current`: with them, the reader knows all that the node knew when it answered.

    `lost`: forget everything known so far, then apply. `reason`: ``node_restarted`` | ``slow_reader`` (the changes after
    its cursor are no longer kept) | ``epoch``. `incarnation` is the node's, `epoch` the space's: keys are of that epoch.
    """

    incarnation: int
    epoch: int
    cursor: bytes
    is_current: bool = False
    lost: bool = False
    reason: str = ""
    changes: list[IndexChange] = []


class Candidate(Struct, kw_only=True, omit_defaults=True):
    """One engine a prompt could go to. `host` is ``name`` or ``name/rank``; `ready_ms` = wait + fetch + compute.

    Leading tokens of the prompt found in its HBM, in its HBM or CPU memory, and in these or at the node. `stale_ms`: since
    its events were last heard of; -1 when they never were.
    """

    host: str
    hbm_tokens: int = 0
    cached_tokens: int = 0
    node_tokens: int = 0
    wait_ms: float = 0.0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    ready_ms: float = 0.0
    stale_ms: int = 0
    reason: str = ""


class RouteReply(Reply, tag="route_ok"):
    """Candidates, best first; none when the space has no engine. `best` is the first one's name."""

    best: str = ""
    prompt_tokens: int = 0
    candidates: list[Candidate] = []


class StatsReply(Reply, tag="stats_ok"):
    """Nested counters, see README "Statistics"."""

    stats: dict[str, object]


class RecordReply(Reply, tag="record_ok"):
    """A recording that began or ended: lines and bytes written, lines lost because the writer was too slow."""

    path: str
    lines: Count = 0
    bytes: Id = 0
    lost: Count = 0
    is_fresh: bool = False


class ErrorReply(Reply, tag="error"):
    """A refusal. `field`, `mine`, `theirs` for ``space_mismatch``."""

    code: str
    message: str
    field: str = ""
    mine: str = ""
    theirs: str = ""


AnyReply = (
    HelloReply | LookupReply | LoadReply | ReserveReply | CommitReply | Ok | ExplainReply | IndexBatch | RouteReply
    | StatsReply | RecordReply | ErrorReply
)  # fmt: skip

R = TypeVar("R")


class _IdOnly(Struct):
    id: Id = 0


encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(AnyRequest)
_ids = msgspec.msgpack.Decoder(_IdOnly)
_admin_requests = msgspec.msgpack.Decoder(AdminRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)


def decode_request(frame: bytes | memoryview) -> AnyRequest:
    """A host's message. Raises RemoteProtocolError ``malformed`` that says where and what was expected."""
    return _decode(_requests, frame)


def request_id(frame: bytes | memoryview) -> int:
    """The id of a message that is otherwise malformed, so that its sender hears of it; 0 when it has none."""
    try:
        return _ids.decode(frame).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


def decode_admin(frame: bytes | memoryview) -> AdminRequest:
    """An operator's message. Raises RemoteProtocolError ``malformed``."""
    return _decode(_admin_requests, frame)


def decode_reply(frame: bytes | memoryview) -> AnyReply:
    """A node's message. Raises RemoteProtocolError ``malformed``."""
    return _decode(_replies, frame)


def _decode(decoder: msgspec.msgpack.Decoder[R], frame: bytes | memoryview) -> R:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("malformed", str(error)) from error


def claim_of(name: str, space: Space, *, epoch: int | None = None) -> SpaceClaim:
    """The claim a host makes for `space` (with its salt). `name` is the space's name in the node's topology."""
    base = space.with_epoch(0)
    fingerprint = base.fingerprint()
    geometry = base.geometry
    return SpaceClaim(
        name=name, model=base.model, revision=base.revision, kv_dtype=base.kv_dtype, tenant=base.tenant,
        block_tokens=geometry.block_tokens, token_bytes=geometry.token_bytes,
        groups=[
            GroupClaim(
                name=g.name, num_layers=g.num_layers, num_kv_heads=g.num_kv_heads, head_size=g.head_size,
                part_bytes=g.part_bytes, packing=g.packing, window_tokens=g.window_tokens,
            )
            for g in geometry.groups
        ],
        fingerprint=fingerprint, vectors=list(conformance_vectors(fingerprint)),
        tp_size=base.tp_size, pp_size=base.pp_size, lora_name=base.lora_name, lora_version=base.lora_version,
        epoch=epoch,
    )  # fmt: skip
