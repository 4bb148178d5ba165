"""What hosts that follow an index are sent: one batch a request (see `dpurt.core.index_feed`). Plain functions of the gateway.

The node keeps nothing of a reader between its requests: the cursor it brings says where it stands, in which life of the node
and which epoch. While it waits, a reader is one parked task, which its session ends.
"""

from __future__ import annotations

import struct

import trio

from dpurt.core.index_feed import Batch, Cursor, read
from dpurt.wire import messages as m

from .hosts import Refusal
from .spaces import SpaceState

LINGER_S = 0.002  # after the first news: the rest of what came with it goes into the same batch
_CURSOR = struct.Struct("<QIqQ")  # incarnation, number of the space at this epoch, page, sequence


async def next_batch(
    state: SpaceState, request: m.Subscribe, incarnation: int, deadline: float
) -> m.IndexBatch:
    """The batch after the request's cursor, as soon as there is one, or an empty one at `deadline`. Raises Refusal."""
    cursor, why_lost = _cursor_of(request.cursor, incarnation, state)
    batch = read(state.index, cursor, request.max_blocks)
    if batch is None:
        why_lost = "slow_reader"
        batch = read(state.index, None, request.max_blocks)
        assert batch is not None, "a reader that begins is never behind"
    elif batch.is_current and not batch.changes and batch.cursor == cursor:
        batch = await _news(state, batch, request, deadline)
        if batch is None:
            return await next_batch(state, request, incarnation, deadline)  # behind, meanwhile
    return _reply(state, request, incarnation, batch, why_lost)


async def _news(state: SpaceState, batch: Batch, request: m.Subscribe, deadline: float) -> Batch | None:
    """Wait until something happened; the batch with it, or an empty one at `deadline`."""
    feed = state.index.feed
    assert feed is not None
    last: Batch | None = batch
    while last is not None and last.is_current and not last.changes:
        news = trio.Event()
        feed.call_once(news.set)
        with trio.move_on_at(deadline) as waiting:
            try:
                await news.wait()
                await trio.sleep(LINGER_S)
            finally:
                feed.forget(news.set)
        if state.retired:
            raise Refusal(
                "stale_epoch", f"space {state.name!r} has a new epoch: new weights need a new client"
            )
        last = read(state.index, last.cursor, request.max_blocks)
        if waiting.cancelled_caught:
            break
    return last


def _cursor_of(text: bytes, incarnation: int, state: SpaceState) -> tuple[Cursor | None, str]:
    """Where the reader stands, None for the beginning; and why it cannot go on from where it thinks it is."""
    if not text:
        return None, ""
    try:
        life, number, page, seq = _CURSOR.unpack(text)
    except struct.error:
        raise Refusal("malformed", "this is no cursor that a node gave") from None
    if life != incarnation:
        return None, "node_restarted"
    if number != state.number:
        return None, "epoch"
    return Cursor(page, seq), ""


def _reply(
    state: SpaceState, request: m.Subscribe, incarnation: int, batch: Batch, lost: str
) -> m.IndexBatch:
    return m.IndexBatch(
        id=request.id, incarnation=incarnation, epoch=state.space.epoch,
        cursor=_CURSOR.pack(incarnation, state.number, *batch.cursor), is_current=batch.is_current,
        lost=bool(lost), reason=lost,
        changes=[m.IndexChange(stored=change.stored, keys=change.keys) for change in batch.changes],
    )  # fmt: skip
