"""One publisher's stream of messages: which to apply, which were lost, when to ask for a replay. Sans-I/O.

Theory of operation. Messages are numbered from 0 in each *generation* (a life of the engine's process). The one expected
next is applied at once. Else:

- a higher number is a gap, seen with the very message after it: live messages are held back and a replay is asked for, from
  the last message that was applied. That one must come back as it was, or it is another generation.
- a lower one that is known, by number and time stamp, is a repeat; any other is the first seen of a new generation.
- after an interruption, or of a generation that had said nothing, the first live message may be one that was still on its way
  from the generation before: the next replay begins with that one, and shows whether it is.
- a new generation clears all that the old one said, and is read from its beginning.
- what no replay brings back is lost: what is known is cleared (it may have been removed meanwhile) and the rest of the
  stream is followed. `is_partial` says that the publisher may hold more than is known; as long as its buffer may reach back
  to the beginning, all is asked for again.

A silent publisher is asked for a replay now and then, too: it shows that nothing was lost at the end, that it is the same
process, and that it is alive, and so bounds how stale the answers are (`confirmed_at`).

The agent sends what an `Ask` says and hands in what comes back, `replay_failed` included. `now` is its clock. Nothing here
raises for what a peer sends. `interrupted` makes sure of the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dpurt.engines.kv_events import EndOfReplay, KvBatch, Malformed, decode_live, decode_replay
from dpurt.engines.residency import Residency

MAX_HELD = 4096  # live messages held back during a replay
MAX_TRIES = 3
PROBE_S = 5.0
MAX_LOST = 1 << 53
SILENT_S = 30.0
_REMEMBERED = 1024  # stamps of past messages


class Ask(NamedTuple):
    """Ask the replay socket for all from this number on."""

    start: int


@dataclass(slots=True)
class StreamStats:
    """Counters. `lost`: messages that nothing brought back, as far as they could be counted."""

    messages: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    replays_failed: int = 0
    replayed: int = 0
    repeats: int = 0
    generations: int = 0
    lost: int = 0
    skipped_events: int = 0
    dropped_events: int = 0
    malformed: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Replay:
    """A replay under way. `is_verified`: what was applied last has come back as it was, or there was nothing."""

    is_verified: bool
    is_first: bool = True
    is_wrong: bool = False  # it turned out to be another generation's, and not from its beginning
    is_whole: bool = False  # asked for from 0, to know all again
    is_stale: bool = False  # the way was interrupted since it was asked for
    is_confirming: bool = False  # asked for from the first message that was doubtful


class Publisher:
    """The state of one stream."""

    def __init__(self, residency: Residency, *, has_replay: bool, now: float) -> None:
        self.residency = residency
        self.stats = StreamStats()
        self.is_partial = False
        self.heard_at = now  # of anything from it
        self.confirmed_at: float | None = None  # that nothing was missing
        self._has_replay = has_replay
        self._next: int | None = (
            None  # the number expected; None: at the beginning of a generation, or of listening
        )
        self._born = self._last_ts = 0.0
        self._stamps: list[tuple[int, float]] = [(-1, 0.0)] * _REMEMBERED
        self._held: deque[KvBatch] = deque(maxlen=MAX_HELD)
        self._replay: _Replay | None = None
        self._tries = 0  # replays in this trouble that brought nothing new
        self._probed_at = now
        self._may_be_whole = True  # a replay from 0 was not yet seen to lack the beginning
        self._is_unverified = False  # the way was interrupted, and no replay has shown yet what follows
        self._doubtful: int | None = (
            None  # a live message of this number may have been of the generation before
        )

    # --- what comes in ---

    def live(self, frames: Sequence[bytes], now: float) -> Ask | None:
        """A message of the PUB socket."""
        self.heard_at = now
        message = decode_live(frames)
        if isinstance(message, Malformed):
            return self._unreadable(message)
        if self._replay is not None:
            self._held.append(message)
            return None
        return self._take(message, now)

    def replayed(self, frames: Sequence[bytes], now: float) -> Ask | None:
        """A message of the replay socket. Only those that belong to the replay asked for last must be handed in."""
        message = decode_replay(frames)
        if self._replay is None:
            return None
        self.heard_at = now
        if isinstance(message, EndOfReplay):
            return self._replay_ended(self._replay, now)
        if isinstance(message, KvBatch):
            self._take_replayed(message, self._replay)
            return None
        self._count_malformed(message)
        if message.seq is not None and message.seq == self._next:
            self._pass_over()  # it will not be better the next time
        return None

    def replay_failed(self, now: float) -> Ask | None:
        """The replay asked for did not come to its end in time."""
        self.stats.replays_failed += 1
        self._replay = None
        if self._next is not None and not self._held:
            return None  # it was only to make sure
        self._tries += 1
        if self._tries < MAX_TRIES:
            return self._ask()
        if not self._held:
            self._tries = 0  # nothing is known, and nothing to go on with: again when there is
            return None
        self._surrender()
        return self._drain(now)

    def interrupted(self, now: float) -> Ask | None:
        """The way to it is new, or was interrupted: something may be lost, or it may be another process.

        Call it before any message that came after; nothing of these is applied until a replay has shown what they follow.
        """
        if not self._has_replay:
            return None
        self._is_unverified = True
        if self._replay is not None:
            self._replay.is_stale = True
            return None
        self._probed_at = now
        return self._ask()

    def tick(self, now: float) -> Ask | None:
        """Time passes; call it about once a second."""
        if now - self._probed_at < PROBE_S or not self._has_replay or self._replay is not None:
            return None
        self._probed_at = now
        if self.is_partial and self._may_be_whole:
            self._ask()
            self._replay = _Replay(is_verified=True, is_whole=True)
            return Ask(0)
        return self._ask()

    @property
    def is_replaying(self) -> bool:
        """Is a replay under way that was asked for?"""
        return self._replay is not None

    def is_silent(self, now: float) -> bool:
        """Has nothing been heard of it for long?"""
        return now - self.heard_at > SILENT_S

    def is_unanswered(self, now: float) -> bool:
        """Does it not even answer the replays it is asked for now and then? One without a replay socket may just be idle."""
        return self._has_replay and self.is_silent(now)

    # --- live ---

    def _take(self, batch: KvBatch, now: float) -> Ask | None:
        """Apply a live message, or find out why it cannot be."""
        if self._next is None:
            return self._begin(batch, now)
        if self._is_unverified and self._tries < MAX_TRIES:
            return self._gap(batch, now)
        if batch.seq == self._next:
            self._apply(batch)
            self.confirmed_at = now
            return None
        if batch.seq > self._next:
            return self._gap(batch, now)
        if self._is_repeat(batch):
            self.stats.repeats += 1
            return None
        self._new_generation()
        return self._begin(batch, now)

    def _begin(self, batch: KvBatch, now: float) -> Ask | None:
        """The first message seen of a generation."""
        if batch.seq and self._has_replay and self._tries < MAX_TRIES:
            self._held.append(batch)
            return self._ask()
        self._start_at(batch)
        return self._take(batch, now)

    def _gap(self, batch: KvBatch, now: float) -> Ask | None:
        self.stats.gaps += not self._tries
        if self._has_replay and self._tries < MAX_TRIES:
            self._tries += 1
            self._held.append(batch)
            return self._ask()
        self._surrender(batch.seq)
        return self._begin(batch, now)

    def _is_repeat(self, batch: KvBatch) -> bool:
        seq, ts = self._stamps[batch.seq % _REMEMBERED]
        return ts == batch.ts if seq == batch.seq else batch.ts <= self._last_ts

    def _unreadable(self, message: Malformed) -> Ask | None:
        """A live message that cannot be read. One that was due may be better in a replay."""
        self._count_malformed(message)
        if self._replay is not None or message.seq is None or message.seq != self._next:
            return None
        if self._has_replay:
            return self._ask()
        self._pass_over()
        return None

    # --- replay ---

    def _ask(self) -> Ask:
        """From the last message applied, to see that it is the same generation; from 0 when there is none."""
        start = max((self._next or 0) - 1, 0)
        is_confirming = False
        if self._next and self._doubtful is not None and self._doubtful <= start:
            start, is_confirming = self._doubtful, True
        self._replay = _Replay(is_verified=not self._next, is_confirming=is_confirming)
        self.stats.replays += 1
        return Ask(start)

    def _take_replayed(self, batch: KvBatch, replay: _Replay) -> None:
        if replay.is_first and replay.is_whole:
            self._may_be_whole = batch.seq == 0
            if batch.seq == 0:
                self._forget()
        elif replay.is_first and self._next:
            self._verify(batch, replay)
        replay.is_first = False
        if replay.is_wrong:
            return
        if self._next is None:
            self._start_at(batch)
        if (
            batch.seq == self._next
        ):  # else it is known, or the replay lost something: then a live message shows the gap
            self.stats.replayed += 1
            self._apply(batch)

    def _verify(self, batch: KvBatch, replay: _Replay) -> None:
        """Is the first message of a replay of the generation we know?"""
        assert self._next is not None
        replay.is_verified = True
        if batch.seq > self._next:  # its buffer does not reach back so far
            self._surrender(batch.seq)
        elif batch.seq < self._next and not self._is_repeat(batch):
            self._new_generation()
            replay.is_wrong = True

    def _replay_ended(self, replay: _Replay, now: float) -> Ask | None:
        self._replay = None
        if not replay.is_verified or (replay.is_whole and replay.is_first):
            self._new_generation()  # it does not know the last message we had, or has published nothing at all
        if replay.is_wrong or not replay.is_verified or replay.is_stale:
            return self._ask()
        if replay.is_confirming:
            self._doubtful = None
        if self._is_unverified or not self._next:
            self._doubtful = self._next or 0
        self._is_unverified = False
        if self._next is None:
            self._next = 0  # it has published nothing yet
        return self._drain(now)

    def _drain(self, now: float) -> Ask | None:
        """Apply what was held back."""
        while self._held:
            batch = self._held.popleft()
            if batch.ts < self._born:
                continue  # of a generation that is over
            ask = self._take(batch, now)
            if ask is not None:
                self._held.rotate(1)  # `_take` put it back, at the end
                return ask
        self.confirmed_at = now
        return None

    # --- state ---

    def _apply(self, batch: KvBatch) -> None:
        self._next = batch.seq + 1
        self._tries = 0
        self._last_ts = batch.ts
        self._stamps[batch.seq % _REMEMBERED] = (batch.seq, batch.ts)
        stats = self.stats
        stats.messages += 1
        stats.events += len(batch.events)
        stats.skipped_events += batch.skipped
        stats.dropped_events += batch.dropped
        self.residency.apply(batch.events)

    def _start_at(self, batch: KvBatch) -> None:
        """Follow a generation from this message on."""
        self._next, self._born = batch.seq, batch.ts
        self.is_partial = batch.seq > 0
        self._may_be_whole = True

    def _pass_over(self) -> None:
        """Go on without what the next message said."""
        assert self._next is not None
        self._next += 1
        self.stats.lost += 1
        self.is_partial = True

    def _new_generation(self) -> None:
        self.stats.generations += 1
        self._forget()
        self._tries = 0

    def _surrender(self, found: int | None = None) -> None:
        """Something before `found` is lost for good, and with it the right to say that anything is still there."""
        first = self._held[0].seq if found is None and self._held else found
        lost = max((first or 0) - (self._next or 0), 1)
        self.stats.lost = min(self.stats.lost + lost, MAX_LOST)  # an engine's numbers may be anything
        self._forget()

    def _forget(self) -> None:
        self.residency.reset()
        self._next, self.is_partial, self._is_unverified, self._doubtful = None, False, False, None
        self._stamps = [(-1, 0.0)] * _REMEMBERED

    def _count_malformed(self, message: Malformed) -> None:
        malformed = self.stats.malformed
        malformed[message.category] = malformed.get(message.category, 0) + 1
