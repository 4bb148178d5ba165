"""The scheduler's side: asks the node what it has of a new request, and turns the engine's schedule into orders (`plan.Book`).

The question leaves when the request arrives, before any scheduler tick, and the node begins to stage what it found; the answer
is usually there when the scheduler looks. If not, the scheduler waits for it, `lookup_wait_ms` in a step at most, then is told to ask
again at its next one; after `lookup_budget_ms` in all the request goes on without. So a step is held up for no more than the
former, whatever the node does and however many requests wait.

A request takes no part, with a counted reason, when its KV is not given by its tokens (images, embeddings), or cannot be shared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpurt.engines.vllm.link import Link, Stopwatch
from dpurt.engines.vllm.marks import Tokens, mark_of, marked
from dpurt.engines.vllm.plan import Book, Step, loadable_tokens
from dpurt.engines.vllm.settings import Settings
from dpurt.wire import messages as m

T = TypeVar("T")
LOOKUP_THREADS = 4
PARAMS = "dpurt"  # key of our hints in a request's kv_transfer_params


@dataclass(slots=True)
class _Asked:
    """A request and the answer it waits for. `answer` holds None when the node gave none."""

    watch: Stopwatch
    answer: Future[m.LookupReply | None]
    hints: Mapping[str, Any]
    priority: int
    loaded_tokens: int = 0
    nvme_tokens: int = 0

    @property
    def expect_ms(self) -> int:
        """Another engine is computing this prompt and storing it: how long to wait for its blocks."""
        return _whole_number(self.hints.get("expect_ms")) or 0


@dataclass(frozen=True, slots=True)
class _Unread:
    """A request whose LoRA adapter's version is being found out."""

    watch: Stopwatch
    version: Future[bytes]
    hints: Mapping[str, Any]


@dataclass(slots=True)
class Adapters:
    """Versions of LoRA adapters: digests of their files, made once a path, in a thread (they may be large)."""

    pool: ThreadPoolExecutor
    known: dict[str, Future[bytes]] = field(default_factory=dict)

    def version(self, path: str, *, again: bool) -> Future[bytes]:
        """`again`: the adapter was just replaced under its old name."""
        if again or path not in self.known:
            self.known[path] = self.pool.submit(digest_of, Path(path))
        return self.known[path]


def digest_of(path: Path) -> bytes:
    """Of an adapter's files, names and content. Raises OSError."""
    total = hashlib.blake2b(digest_size=32, person=b"dpurt.lora")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no files in {path}")
    for file in files:
        name = os.fsencode(file.relative_to(path)) if path.is_dir() else b""
        with file.open("rb") as content:
            body = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=32)).digest()
        total.update(len(name).to_bytes(8, "little") + name + body)
    return total.digest()


class Asker:
    """The scheduler's half of the connector. `request` objects are vLLM's, looked at and never kept."""

    def __init__(self, link: Link, settings: Settings, block_tokens: int) -> None:
        self._link = link
        self._settings = settings
        self._block_tokens = block_tokens
        self._book = Book(block_tokens, save=settings.save)
        self._asked: dict[str, _Asked] = {}
        self._pool = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="dpurt-lookup")
        self._adapters = Adapters(self._pool)
        self._unread: dict[str, _Unread] = {}
        self._open: set[str] = set()  # looked up, not ended
        self._generation = b""
        self._waited_s = 0.0  # in this step

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forget_all(self) -> None:
        """The engine's weights may have changed under their name: what was stored is out of reach from now on.

        Other engines are not told; `dpurt epoch bump` does that.
        """
        self._generation = os.urandom(16)

    # --- a request arrives ---

    def arrived(self, request: Any) -> None:
        """Begin to look it up."""
        self._link.tally.count(requests=1)
        hints = _hints_of(request)
        if (resumed := hints.get("resume")) is not None:
            self._link.client.hint(m.Hint(request=str(resumed), kind="resume"))
            self._link.client.finish(str(resumed), "resumed")
        if why := self._why_not(request):
            self._link.tally.why("skipped", [why])
        elif request.lora_request is None:
            self._begin(request, hints, b"")
        else:
            lora = request.lora_request
            version = self._adapters.version(lora.lora_path, again=lora.load_inplace)
            self._unread[request.request_id] = _Unread(Stopwatch(), version, hints)

    def _why_not(self, request: Any) -> str:
        if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return "not_tokens"
        if request.pooling_params is not None:
            return "pooling"
        if len(request.prompt_token_ids) < self._block_tokens:
            return "short"
        return ""

    def _begin(self, request: Any, hints: Mapping[str, Any], adapter: bytes) -> None:
        mark = self._mark(request.cache_salt, request.lora_request, adapter)
        tokens = marked(request.prompt_token_ids, mark)
        if tokens is None:
            self._link.tally.why("skipped", ["vocabulary"])
            return
        self._book.open(request.request_id, tokens)
        self._open.add(request.request_id)
        priority = _priority_of(request, hints)
        if self._settings.load == "none" or hints.get("load") is False:
            answer = _no_answer()
        else:
            answer = self._pool.submit(self._ask, request.request_id, tokens, priority)
        self._asked[request.request_id] = _Asked(Stopwatch(), answer, hints, priority)

    def _is_read(self, request: Any) -> bool:
        """The version of the request's adapter is known, or given up."""
        unread = self._unread.get(request.request_id)
        if unread is None:
            return True
        left = self._settings.lookup_budget_ms / 1000 - unread.watch.s
        try:
            version = self._wait(unread.version, left)
        except (FutureTimeout, OSError) as error:
            if isinstance(error, FutureTimeout) and left > 0:
                return False
            self._link.tally.why("skipped", ["adapter_unread"])
        else:
            self._begin(request, unread.hints, version)
        del self._unread[request.request_id]
        return True

    def _mark(self, salt: str | None, lora: Any, version: bytes) -> Tokens | None:
        fields: list[tuple[str, bytes]] = []
        if salt:
            fields.append(("cache_salt", salt.encode()))
        if lora is not None:
            fields += [("lora_name", lora.lora_name.encode()), ("lora_version", version)]
        if self._generation:
            fields.append(("generation", self._generation))
        return mark_of(fields, self._block_tokens)

    def _ask(self, request: str, tokens: bytes, priority: int) -> m.LookupReply | None:
        """In a thread."""
        if not self._link.is_up:
            return None
        watch = Stopwatch()
        budget = self._settings.lookup_budget_ms / 1000
        reply = self._link.call(
            lambda client: client.lookup(
                self._settings.space, request, tokens,
                will_load="worker" in self._link.roles, priority=priority, timeout_s=budget,
            )
        )  # fmt: skip
        self._link.tally.count(lookup_s=watch.s)
        if request not in self._open:
            self._link.client.finish(
                request, "cancelled"
            )  # it ended meanwhile: this lookup opened its scope again
        return reply

    # --- the scheduler asks ---

    def loadable(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the computed ones or None for "ask again", whether between steps)."""
        if not self._is_read(request):
            return None, False
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        is_known, reply = self._answer(asked)
        if not is_known:
            return None, False
        name, whole = request.request_id, self._settings.load == "async" or asked.expect_ms > 0
        self._catch_up(request, asked)
        self._book.has(name, computed_tokens, reply.matched_blocks if reply else 0)
        if reply is None:
            return 0, False
        promised = request.num_prompt_tokens // self._block_tokens if asked.expect_ms else 0
        tokens = loadable_tokens(
            max(reply.matched_blocks, promised), computed_tokens, request.num_tokens, self._block_tokens,
            whole=whole,
        )  # fmt: skip
        if tokens < self._settings.min_load_blocks * self._block_tokens:
            return 0, False
        asked.nvme_tokens = min(tokens, reply.nvme * self._block_tokens)
        return tokens, whole

    def _answer(self, asked: _Asked) -> tuple[bool, m.LookupReply | None]:
        """(whether it is decided, the answer)."""
        left = self._settings.lookup_budget_ms / 1000 - asked.watch.s
        try:
            return True, self._wait(asked.answer, left)
        except FutureTimeout:
            if left > 0:
                return False, None
            self._link.tally.count(lookups_late=1)
            asked.answer.cancel()
            asked.answer = _no_answer()
            return True, None

    def _wait(self, answer: Future[T], left: float) -> T:
        """Wait for what is left of the step's `lookup_wait_ms`, all requests together. Raises what the future does, or FutureTimeout."""
        watch = Stopwatch()
        wait = min(left, self._settings.lookup_wait_ms / 1000 - self._waited_s)
        try:
            return answer.result(timeout=max(0.0, wait))
        finally:
            self._waited_s += watch.s
            self._link.tally.count(longest_call_s=self._waited_s)

    def allocated(self, request: Any, ids: Sequence[int], num_external_tokens: int) -> None:
        """The request got blocks."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            return
        by_layer = self._settings.load == "layers" and not asked.expect_ms
        self._book.allocated(
            request.request_id, ids, num_external_tokens,
            by_layer=by_layer, expect_ms=asked.expect_ms, priority=asked.priority,
        )  # fmt: skip
        if num_external_tokens:
            asked.loaded_tokens = num_external_tokens
            self._link.tally.count(hit_tokens=num_external_tokens)

    def hit_sources(self, request: Any, num_external_tokens: int) -> tuple[int, int]:
        """Of the tokens to load: (those staged in DRAM, those on flash), as the lookup saw them."""
        asked = self._asked.get(request.request_id)
        flash = min(asked.nvme_tokens, num_external_tokens) if asked else 0
        return num_external_tokens - flash, flash

    # --- a step ---

    def computes(self, request: Any, ids: Sequence[int], computed_tokens: int) -> None:
        """The step under way computes the request up to so many tokens."""
        asked = self._asked.get(request.request_id)
        if asked is not None:
            self._catch_up(request, asked)
            self._book.computes(request.request_id, ids, computed_tokens)

    def _catch_up(self, request: Any, asked: _Asked) -> None:
        """Tokens that were sampled since; all of them are behind the first, marked block."""
        known = self._book.num_tokens(request.request_id)
        if request.num_tokens > known:
            more = marked(request.all_token_ids[known : request.num_tokens], None)
            if more is not None:
                self._book.extend(request.request_id, more)

    def take_step(self, preempted: Sequence[str], *, is_idle: bool) -> Step:
        """The orders for the workers."""
        self._waited_s = 0.0
        self._book.preempted(preempted)
        return self._book.take_step(is_idle=is_idle)

    def moved(self, loaded: Sequence[str], failed_blocks: Set[int]) -> None:
        """Asynchronous loads that ended, and blocks that no load brought.

        A request whose load failed is not told of the match again, or it would try for ever.
        """
        for request in self._book.failed(failed_blocks) if failed_blocks else ():
            self._asked[request].answer = _no_answer()
        for request in loaded:
            self._book.loaded(request)

    # --- a request ends ---

    def ended(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks must be held, what its client is told)."""
        self._unread.pop(request.request_id, None)
        self._open.discard(request.request_id)
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return False, None
        asked.answer.cancel()
        self._link.tally.count(prompt_tokens=request.num_prompt_tokens)
        reason = str(asked.hints.get("finish") or "end_turn")
        held = self._book.end(request.request_id, reason, _whole_number(asked.hints.get("pause_ms")))
        return held, {PARAMS: {"loaded_tokens": asked.loaded_tokens, "node": self._link.state}}


def _hints_of(request: Any) -> Mapping[str, Any]:
    """What the request's sender says in ``kv_transfer_params["dpurt"]``; see the README for what may be there."""
    params = request.kv_transfer_params
    hints = params.get(PARAMS) if isinstance(params, Mapping) else None
    return hints if isinstance(hints, Mapping) else {}


def _priority_of(request: Any, hints: Mapping[str, Any]) -> int:
    """As its sender hints, else as vLLM schedules it; the lower goes first. What a message cannot carry is the nearest it can."""
    hinted = hints.get("priority")
    told = hinted if isinstance(hinted, int) else request.priority
    return max(-m.MAX_PRIORITY, min(told, m.MAX_PRIORITY))


def _no_answer() -> Future[m.LookupReply | None]:
    answer: Future[m.LookupReply | None] = Future()
    answer.set_result(None)
    return answer


def _whole_number(value: object) -> int | None:
    """A client's number, if it is one a message can carry."""
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else None
