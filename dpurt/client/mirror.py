"""A host's own copy of what a node's index says: asked without a round trip, kept up to date by `Client.follow`.

Theory of operation. The node's stream (`wire.messages.IndexBatch`) sets and unsets block keys; `IndexMirror` is the set. It
may be asked from any thread: batches are applied on the client's loop, each change is one operation on a set, and a restart
of the stream puts a new set in the place of the old one.

What it says is advice, as old as `age_s`: a block it names may be gone when it is asked for (a miss), one it does not name
may have come. It never authorises bytes: those come from `load`, checked. While the node is away nothing is held.

Left to others: the longest match (ask key by key, or in order until the first that is not held) and the loop that feeds it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from dpurt.core.identity import KEY_BYTES, Space, digest_key
from dpurt.wire import messages as m

Status = Literal["unknown", "current", "away", "over"]


class IndexMirror:
    """The blocks of one space that a node holds."""

    def __init__(self, space: Space) -> None:
        self.status: Status = "unknown"
        self.reason = ""  # why it is not current, and when it was lost last, why
        self.cursor = b""
        self.losses = 0
        self._space = space
        self._fingerprint: bytes | None = None
        self._epoch = -1
        self._held: set[bytes] = set()
        self._heard_at = time.monotonic()

    # --- asking: from any thread ---

    def __len__(self) -> int:
        return len(self._held)

    @property
    def age_s(self) -> float:
        """Seconds since the node last said how things are: what is told here is at most so old, plus the way."""
        return time.monotonic() - self._heard_at

    def holds(self, key: bytes) -> bool | None:
        """Does the node hold this block (all its shards)? None: not known yet, ask again soon.

        The longest match of a chain is the leading run of held blocks. False while the node is away.
        """
        if self.status == "current":
            return key in self._held
        return None if self.status == "unknown" else False

    def holds_digest(self, digest: bytes) -> bool | None:
        """`holds`, for a block named by its engine's chained digest."""
        fingerprint = self._fingerprint
        if self.status != "current" or fingerprint is None:
            return self.holds(b"")
        return digest_key(fingerprint, digest) in self._held

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the node holds; 0 while that is not known."""
        if self.status != "current":
            return 0
        held = self._held
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    # --- feeding: on the client's loop ---

    def apply(self, batch: m.IndexBatch) -> None:
        """Take the next batch in."""
        if batch.lost:
            self._held = set()
            self.status, self.reason = "unknown", batch.reason
            self.losses += 1
        if batch.epoch != self._epoch:
            self._epoch, self._fingerprint = batch.epoch, self._space.with_epoch(batch.epoch).fingerprint()
        for change in batch.changes:
            self._change(change)
        self.cursor, self._heard_at = batch.cursor, time.monotonic()
        if batch.is_current:
            self.status = "current"
        elif self.status == "away":
            self.status = "unknown"  # it is catching up

    def _change(self, change: m.IndexChange) -> None:
        keys = [change.keys[at : at + KEY_BYTES] for at in range(0, len(change.keys), KEY_BYTES)]
        if change.stored:
            self._held.update(keys)
        else:
            self._held.difference_update(keys)

    def lose_touch(self, why: str) -> None:
        """The node does not answer. What is known is kept, in case it goes on from there, but not told."""
        if self.status != "over":
            self.status, self.reason = "away", why

    def end(self, why: str) -> None:
        """It will not be fed any more: the space has a new epoch, or the node refuses us."""
        self.status, self.reason = "over", why
        self._held = set()
