"""Which blocks of which request to load and to save: the scheduler side's bookkeeping, pure.

The scheduler tells what it does (a request arrives, gets blocks, is scheduled, is preempted, ends) and `Book` answers with the
orders of one step, a `Step`, for the workers. It knows block numbers, tokens and counts; no bytes, no clock, no node, no vLLM.

    tokens     |--- matched by the node ---|
    blocks     | local hit |<-- loaded --->|<-- computed, then saved -->|  last, partial block: never
               0           first           saved_to

Rules. A load never covers what the engine has, and never the last token of the prompt when it must fit into the step that uses
it (something has to be computed). A block is saved once, in order, when the step at hand completes it, and only if all its
tokens are known: drafts and placeholders of steps under way are not. Tokens travel to the workers once (`Order.more_tokens`).
A request that was sent a save is *held* at its end: its blocks stay until the workers have read them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

SaveWhat = Literal["all", "prompt", "none"]


@dataclass(frozen=True, slots=True)
class Order:
    """Load or save blocks [first, first + len(ids)) of a request's chain, in the engine's blocks `ids`.

    `more_tokens` continue the tokens that were sent before for this request; together they cover the blocks.
    """

    request: str
    first: int
    ids: tuple[int, ...]
    more_tokens: bytes
    by_layer: bool = False  # the step that is about to run reads the blocks
    expect_ms: int = 0  # blocks that are not there yet are on their way: wait so long for them
    priority: int = 0  # whose reads go first at the node: the lower


@dataclass(frozen=True, slots=True)
class Ending:
    """A request is over. `held`: its blocks are kept until the workers report them read. `pause_ms`: it will come back."""

    request: str
    reason: str
    held: bool
    pause_ms: int | None = None


@dataclass(slots=True)
class Step:
    """What the workers do around one step of the engine. `is_idle`: the engine computes nothing in it."""

    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    preempted: tuple[str, ...] = ()
    is_idle: bool = False


@dataclass(slots=True)
class _Request:
    tokens: bytearray  # those known and sent or about to be
    num_prompt_tokens: int
    first: int = 0  # block a load would begin at
    saved_to: int = 0  # blocks below are at the node, or given up
    tokens_sent: int = 0  # bytes
    load: Order | None = None  # the last one
    is_loading: bool = False
    has_saves: bool = False


def loadable_tokens(
    matched_blocks: int, computed_tokens: int, num_tokens: int, block_tokens: int, *, whole: bool
) -> int:
    """Tokens to load beyond the `computed_tokens` the engine has (a multiple of the block size).

    `whole`: the last token of the prompt may be among them, since the load ends before the step that uses it.
    """
    limit = num_tokens if whole else num_tokens - 1
    blocks = min(matched_blocks, limit // block_tokens)
    return max(0, blocks * block_tokens - computed_tokens)


class Book:
    """The requests that take part, by id."""

    def __init__(self, block_tokens: int, token_bytes: int = 4, save: SaveWhat = "all") -> None:
        self._block_tokens = block_tokens
        self._token_bytes = token_bytes
        self._block_bytes = block_tokens * token_bytes
        self._save = save
        self._requests: dict[str, _Request] = {}
        self._step = Step()

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request: str, tokens: bytes) -> None:
        """A request with this prompt (as the node sees it) takes part."""
        self._requests[request] = _Request(bytearray(tokens), len(tokens) // self._token_bytes)

    def num_tokens(self, request: str) -> int:
        """Tokens known of a request."""
        return len(self._requests[request].tokens) // self._token_bytes

    def extend(self, request: str, tokens: bytes) -> None:
        """More tokens of a request became known."""
        self._requests[request].tokens += tokens

    def has(self, request: str, computed_tokens: int, matched_blocks: int) -> None:
        """The engine's own cache has so much of it, a load would begin behind that; the node has the matched blocks.

        What the engine has and the node has not (any more) is saved when the request is next computed.
        """
        one = self._requests[request]
        one.first = computed_tokens // self._block_tokens
        one.saved_to = max(one.saved_to, matched_blocks)

    def allocated(
        self,
        request: str,
        ids: Sequence[int],
        num_external_tokens: int,
        *,
        by_layer: bool,
        expect_ms: int = 0,
        priority: int = 0,
    ) -> None:
        """The request has blocks `ids`, and so many tokens of them are to be loaded."""
        one = self._requests[request]
        count = num_external_tokens // self._block_tokens
        if not count:
            return
        chosen = tuple(ids[one.first : one.first + count])
        assert len(chosen) == count, f"{request}: {len(ids)} blocks, a load of {count} from {one.first}"
        more = self._tokens_until(one, one.first + count)
        one.load = Order(request, one.first, chosen, more, by_layer, expect_ms, priority)
        self._step.loads.append(one.load)
        one.is_loading = not by_layer
        one.saved_to = max(one.saved_to, one.first + count)

    def loaded(self, request: str) -> None:
        """An asynchronous load has ended, well or not."""
        one = self._requests.get(request)
        if one is not None:
            one.is_loading = False

    def failed(self, ids: Set[int]) -> list[str]:
        """Loads into these blocks of the engine failed: what should be there will be computed, and saved then.

        Whose loads they were: the node must not be believed again about these requests.
        """
        affected = []
        for name, one in self._requests.items():
            lost = (
                next((i for i, block in enumerate(one.load.ids) if block in ids), None) if one.load else None
            )
            if one.load is not None and lost is not None:
                one.saved_to = min(one.saved_to, one.load.first + lost)
                one.load = None
                affected.append(name)
        return affected

    def computes(self, request: str, ids: Sequence[int], computed_tokens: int) -> None:
        """After this step the engine will have computed so many tokens of the request, in blocks `ids`: order saves."""
        one = self._requests[request]
        known = len(one.tokens) // self._token_bytes
        if self._save == "none":
            return
        limit = min(computed_tokens, known if self._save == "all" else one.num_prompt_tokens)
        stop = min(limit // self._block_tokens, len(ids))
        if stop <= one.saved_to:
            return
        first, one.saved_to, one.has_saves = one.saved_to, stop, True
        self._step.saves.append(Order(request, first, tuple(ids[first:stop]), self._tokens_until(one, stop)))

    def preempted(self, requests: Sequence[str]) -> None:
        """The engine took these requests' blocks away: what was not read is lost."""
        self._step.preempted += tuple(r for r in requests if r in self._requests)

    def end(self, request: str, reason: str, pause_ms: int | None = None) -> bool:
        """A request is over; True when its blocks must be held until `Ending` is reported back.

        A request that is still loading is waited for by the engine anyway, and must not be reported twice.
        """
        one = self._requests.pop(request, None)
        if one is None:
            return False
        held = one.has_saves and not one.is_loading
        self._step.endings.append(Ending(request, reason, held, pause_ms))
        return held

    def take_step(self, *, is_idle: bool) -> Step:
        """The orders since the last step."""
        step, self._step = self._step, Step()
        step.is_idle = is_idle
        return step

    def _tokens_until(self, one: _Request, block: int) -> bytes:
        stop = block * self._block_bytes
        more = bytes(one.tokens[one.tokens_sent : stop])
        one.tokens_sent = max(one.tokens_sent, stop)
        return more
