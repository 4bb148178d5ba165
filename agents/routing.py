"""Answers to "which engine should serve this prompt?": over ZeroMQ (the gateway asks) and over HTTP on loopback.

The HTTP pages have the shape of those of Dynamo's indexer and of Mooncake's Conductor, so that a router made for them can ask
this node; all take and give JSON:

- ``POST /query`` with `token_ids` and `model_name` (Dynamo) or `model` (Mooncake): a space, by its name or its model.
  Answered for each engine with the leading *tokens* it holds: `longest_matched`, `gpu`, `cpu` (counts are cumulative), `dp` by
  rank, and `disk`: what the node has. Asked with `model`, the answer has Mooncake's words, under the space's tenant.
- ``POST /route`` with `token_ids`, `model_name`, and optionally `intent`, `queued_ms`, `among`, `cache_salt`: `RouteReply` as JSON.
- ``GET /workers``, ``GET /health``.

Block hashes cannot be asked for (``/query_by_hash``): an engine's hash is good for that engine only. Restart: the listener
starts anew; what was booked is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import trio
from msgspec import Meta

from dpurt.core.routing import Estimate, NodeHolding, Router
from dpurt.engines.residency import label_of
from dpurt.errors import RemoteProtocolError
from dpurt.runtime.actor import Actor
from dpurt.transport import http
from dpurt.transport.http import HttpAnswer, HttpRequest
from dpurt.wire import messages as m

from .engines import EnginesAgent, Rank
from .index import IndexAgent
from .spaces import SpaceState
from .staging import StagingAgent

T = TypeVar("T")
MAX_BODY_BYTES = 12 << 20  # 1.5 million tokens


class RoutingAgent(Actor[None]):
    """Knows engines, what they hold, and what was sent to them."""

    name = "routing"

    def __init__(self, bind: str, engines: EnginesAgent, index: IndexAgent, staging: StagingAgent) -> None:
        super().__init__(1)
        self._bind = bind
        self.port = 0
        self.questions = 0
        self._engines = engines
        self._index = index
        self._staging = staging
        self.router = Router()

    # --- answering ---

    def route(self, state: SpaceState, request: m.Route) -> m.RouteReply:
        """Engines for this prompt, best first. Books the work on the best one, unless it is a probe."""
        self.questions += 1
        now = trio.current_time()
        prompt_tokens = len(request.tokens) // state.space.geometry.token_bytes
        label = label_of([request.cache_salt]) if request.cache_salt else b""
        ranks = {rank.name: rank for rank in self._engines.serving(state.name)}
        if request.among:
            ranks = {name: rank for name, rank in ranks.items() if name in request.among}
        for rank in ranks.values():
            self.router.add(rank.name, rank.config.prefill_tokens_per_s, rank.config.cpu_tokens_per_s)
        holdings = self._engines.holdings(state.name, list(ranks.values()), request.tokens, label)
        node = self._node_holding(state, request)
        queued = {name: ms / 1000 for name, ms in request.queued_ms.items()}
        gone = {name for name, rank in ranks.items() if rank.core.is_unanswered(now)}
        found = self.router.rank(prompt_tokens, holdings, now, node, queued, gone)
        if found and request.intent == "will_route":
            self.router.book(found[0], prompt_tokens, now)
        return m.RouteReply(
            id=request.id, best=found[0].engine if found else "", prompt_tokens=prompt_tokens,
            candidates=[_candidate(one, ranks[one.engine], node, now) for one in found],
        )  # fmt: skip

    def _node_holding(self, state: SpaceState, request: m.Route) -> NodeHolding:
        """What this node has, and how long it takes to have it staged. Nothing under an engine's own salt: spaces have theirs."""
        if request.cache_salt:
            return NodeHolding(0, 0.0)
        ids = self._index.match(state, request.tokens, None)
        if not len(ids):
            return NodeHolding(0, 0.0)
        staged = self._index.count_staged(state, ids, 0)
        ready_ms = self._staging.ready_ms(len(ids) - staged, state.layout.record_bytes)
        return NodeHolding(len(ids) * state.space.geometry.block_tokens, ready_ms / 1000)

    # --- HTTP ---

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        if not self._bind:
            task_status.started()
            await trio.sleep_forever()
        listeners = await http.listen(self._bind)
        self.port = http.port_of(listeners)
        task_status.started()
        await http.serve(listeners, self._answer, MAX_BODY_BYTES)

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        pages: dict[tuple[str, str], Callable[[bytes], object]] = {
            ("POST", "/query"): self._query, ("POST", "/route"): self._route_page,
            ("GET", "/workers"): lambda _: self._workers(), ("GET", "/health"): lambda _: {"status": "ok"},
        }  # fmt: skip
        page = pages.get((request.method, request.path))
        if page is None:
            is_there = any(path == request.path for _, path in pages)
            return (
                HttpAnswer(405, b'{"error":"method"}')
                if is_there
                else HttpAnswer(404, b'{"error":"no such page"}')
            )
        try:
            return HttpAnswer(200, msgspec.json.encode(page(request.body)))
        except RemoteProtocolError as error:
            status = 404 if error.code == "unknown_space" else 400
            return HttpAnswer(status, msgspec.json.encode({"error": error.message, "code": error.code}))

    def _route_page(self, body: bytes) -> m.RouteReply:
        asked = _decoded(body, _RouteBody)
        state = self._space(asked.model_name or asked.model)
        request = m.Route(
            space=state.name, tokens=_packed(asked.token_ids, state), intent=asked.intent, queued_ms=asked.queued_ms,
            among=asked.among, cache_salt=asked.cache_salt,
        )  # fmt: skip
        return self.route(state, request)

    def _query(self, body: bytes) -> dict[str, object]:
        asked = _decoded(body, _QueryBody)
        state = self._space(asked.model_name or asked.model)
        salt = asked.cache_salt or asked.additional_salt
        tokens = _packed(asked.token_ids, state)
        ranks = self._engines.serving(state.name)
        holdings = self._engines.holdings(state.name, ranks, tokens, label_of([salt]) if salt else b"")
        node = self._node_holding(state, m.Route(space=state.name, tokens=tokens, cache_salt=salt)).tokens
        matched = [
            (rank, one.hbm_tokens, one.cached_tokens) for rank, one in zip(ranks, holdings, strict=True)
        ]
        return _as_conductor(state, matched, node) if asked.model else _as_dynamo(matched, node)

    def _workers(self) -> list[dict[str, object]]:
        now = trio.current_time()
        return [
            {
                "instance_id": rank.config.name, "dp_rank": rank.source.rank, "source": "zmq",
                "status": "silent" if rank.core.is_silent(now) else "active", "model_name": rank.config.space,
                "block_size": rank.core.residency.engine.block_tokens, "endpoint": rank.source.events,
            }
            for rank in self._engines.ranks.values()
        ]  # fmt: skip

    def _space(self, name: str) -> SpaceState:
        """By the space's name, or its model's."""
        for state in self._index.spaces.values():
            if name in (state.name, state.space.model):
                return state
        raise RemoteProtocolError(
            "unknown_space", f"no space or model {name!r}: {', '.join(self._index.spaces)}"
        )


class _RouteBody(msgspec.Struct):
    token_ids: list[int]
    model_name: str = ""
    model: str = ""
    intent: m.RouteIntent = "will_route"
    queued_ms: Annotated[dict[str, Annotated[float, Meta(ge=0, le=1e9)]], Meta(max_length=64)] = {}
    among: Annotated[list[str], Meta(max_length=64)] = []
    cache_salt: str = ""


class _QueryBody(msgspec.Struct):
    token_ids: list[int]
    model_name: str = ""
    model: str = ""
    cache_salt: str = ""
    additional_salt: str = ""


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("malformed", str(error)) from error


def _packed(token_ids: list[int], state: SpaceState) -> bytes:
    try:
        return np.array(token_ids, f"<i{state.space.geometry.token_bytes}").tobytes()
    except (OverflowError, ValueError) as error:
        raise RemoteProtocolError("malformed", f"token_ids: {error}") from error


def _candidate(one: Estimate, rank: Rank, node: NodeHolding, now: float) -> m.Candidate:
    confirmed = rank.core.confirmed_at
    return m.Candidate(
        host=one.engine, hbm_tokens=one.hbm_tokens, cached_tokens=one.cached_tokens,
        node_tokens=max(one.cached_tokens, node.tokens), wait_ms=_ms(one.wait_s), fetch_ms=_ms(one.fetch_s),
        compute_ms=_ms(one.compute_s), ready_ms=_ms(one.ready_s),
        stale_ms=-1 if confirmed is None else int((now - confirmed) * 1000), reason=_reason(one, rank, now),
    )  # fmt: skip


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _reason(one: Estimate, rank: Rank, now: float) -> str:
    """Why it stands where it does, for people."""
    words = [f"holds {one.cached_tokens} tokens" if one.cached_tokens else "holds nothing of it"]
    if one.used_tokens > one.cached_tokens:
        words.append(f"gets {one.used_tokens - one.cached_tokens} from the node in {_ms(one.fetch_s):g} ms")
    if one.wait_s:
        words.append(f"waits {_ms(one.wait_s):g} ms")
    words.append(f"computes for {_ms(one.compute_s):g} ms")
    if rank.core.is_partial:
        words.append("its events were lost in part")
    if rank.core.is_unanswered(now):
        words.append("has not answered lately")
    return ", ".join(words)


_Matched = list[tuple[Rank, int, int]]


def _as_dynamo(matched: _Matched, node: int) -> dict[str, object]:
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, object]] = {}
    for name, ranks in _by_engine(matched).items():
        scores[name] = {str(rank.source.rank): cached for rank, _, cached in ranks}
        gpu, cpu = max(hbm for _, hbm, _ in ranks), max(cached for _, _, cached in ranks)
        instances[name] = {
            "longest_matched": max(cpu, node), "gpu": gpu, "cpu": cpu, "disk": max(cpu, node),
            "dp": {str(rank.source.rank): hbm for rank, hbm, _ in ranks},
        }  # fmt: skip
    return {"scores": scores, "instances": instances}


def _as_conductor(state: SpaceState, matched: _Matched, node: int) -> dict[str, object]:
    answer: dict[str, object] = {}
    for name, ranks in _by_engine(matched).items():
        gpu, cpu = max(hbm for _, hbm, _ in ranks), max(cached for _, _, cached in ranks)
        answer[name] = {
            "longest_matched": max(cpu, node), "GPU": gpu, "CPU": cpu, "DISK": max(cpu, node),
            "DP": {str(rank.source.rank): hbm for rank, hbm, _ in ranks},
        }  # fmt: skip
    return {state.space.tenant: answer}


def _by_engine(matched: _Matched) -> dict[str, _Matched]:
    engines: dict[str, _Matched] = {}
    for one in matched:
        engines.setdefault(one[0].config.name, []).append(one)
    return engines
