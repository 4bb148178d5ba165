"""The bookkeeping of one reliable-connected (RC) queue pair: a pure core, no pyverbs, no clock.

Theory of operation. A queue pair goes RESET -> INIT -> RTR -> RTS, and from anywhere to ERR, where it stays. Its send queue
has a fixed depth and completes in order, so one completion of the last work request of a chain tells the end of all before it:
only that one is *signalled*. A failed request is reported whether it was signalled or not; it puts the queue pair into ERR,
and then each request behind it is reported too, as flushed. This core hands out work request ids, knows how many more fit,
and says of each completion which posts it ends, each post once, in order:

    posts       [ chain A: 1 2 3* ] [ chain B: 4* ] [ chain C: 5 6* ]        * signalled
    completed 4, success:   A ends well, B ends well; C is under way
    completed 5, failed:    C ends as failed (the completion of 6, flushed, then ends nothing)

Ids of sends are even, of receives odd, as a failed completion does not tell which it was.

Leaves to others: the queue pair itself, waiting for room, what a post was for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["FLUSHED", "SUCCESS", "Ended", "QpState", "QueuePairCore", "is_receive"]

SUCCESS = "success"
FLUSHED = "flushed"


class QpState(Enum):
    """Where a queue pair is on its way."""

    RESET = "reset"
    INIT = "init"
    RTR = "ready to receive"
    RTS = "ready to send"
    ERR = "error"


_NEXT = {QpState.RESET: QpState.INIT, QpState.INIT: QpState.RTR, QpState.RTR: QpState.RTS}


class Ended(NamedTuple):
    """A post that is over: `status` is `SUCCESS`, `FLUSHED`, or what the device said."""

    owner: object
    status: str

    @property
    def is_ok(self) -> bool:
        return self.status == SUCCESS


@dataclass(slots=True)
class _Post:
    owner: object
    first: int  # numbers of its work requests: [first, last)
    last: int


def is_receive(wr_id: int) -> bool:
    """Whether the id was given to a receive."""
    return bool(wr_id & 1)


class QueuePairCore:
    """State, credits and posts of one queue pair. `send_depth` and `receive_depth` are the queues' capacities."""

    def __init__(self, send_depth: int, receive_depth: int) -> None:
        if send_depth < 1 or receive_depth < 0:
            raise ValueError(f"queue depths must be >= 1 and >= 0, got {send_depth} and {receive_depth}")
        self.state = QpState.RESET
        self.send_depth = send_depth
        self.receive_depth = receive_depth
        self._sent = 0  # numbers of work requests ever posted
        self._retired = 0  # and of those that no longer take room
        self._posts: deque[_Post] = deque()
        self._received = 0
        self._receives: dict[int, object] = {}

    # --- state ---

    def advance(self, state: QpState) -> None:
        """The queue pair was moved to `state`, by us."""
        if state is not QpState.ERR and _NEXT.get(self.state) is not state:
            raise ValueError(f"a queue pair does not go from {self.state.value!r} to {state.value!r}")
        self.state = state

    @property
    def is_usable(self) -> bool:
        return self.state is QpState.RTS

    # --- sends ---

    @property
    def room(self) -> int:
        """Work requests that fit into the send queue now; none unless it is ready to send."""
        return self.send_depth - self._sent + self._retired if self.state is QpState.RTS else 0

    @property
    def num_sending(self) -> int:
        return self._sent - self._retired

    @property
    def num_posts(self) -> int:
        """Posts of sends not ended yet."""
        return len(self._posts)

    def post_send(self, owner: object, count: int) -> range:
        """Take room for a chain of `count`; their ids. ValueError: no room.

        The last one must be signalled, or the chain ends with the next that is."""
        if not 1 <= count <= self.room:
            raise ValueError(f"a chain of {count} does not fit: {self.room} fit, state {self.state.value}")
        first = self._sent
        self._sent += count
        self._posts.append(_Post(owner, first, self._sent))
        return range(2 * first, 2 * self._sent, 2)

    def send_completed(self, wr_id: int, status: str) -> list[Ended]:
        """The device reports a send. The posts it ends; posts before it ended well."""
        number = wr_id // 2
        if is_receive(wr_id) or not self._retired <= number < self._sent:
            raise ValueError(f"completion of work request {wr_id}, which is not under way")
        if status != SUCCESS:
            self.state = QpState.ERR
        self._retired = number + 1
        ended = []
        while self._posts and self._posts[0].last <= number:
            ended.append(Ended(self._posts.popleft().owner, SUCCESS))
        if self._posts and self._posts[0].first <= number:
            if status != SUCCESS or number + 1 == self._posts[0].last:
                ended.append(Ended(self._posts.popleft().owner, status))
        return ended

    # --- receives ---

    @property
    def receive_room(self) -> int:
        """Receives that fit; they may be posted before the connection, from INIT on."""
        if self.state in (QpState.RESET, QpState.ERR):
            return 0
        return self.receive_depth - len(self._receives)

    @property
    def num_receiving(self) -> int:
        return len(self._receives)

    def post_receive(self, owner: object) -> int:
        """Take room for one receive; its id. ValueError: no room."""
        if self.receive_room < 1:
            raise ValueError(f"no room for a receive, state {self.state.value}")
        wr_id = 2 * self._received + 1
        self._received += 1
        self._receives[wr_id] = owner
        return wr_id

    def receive_completed(self, wr_id: int, status: str) -> Ended:
        """The device reports a receive."""
        if wr_id not in self._receives:
            raise ValueError(f"completion of receive {wr_id}, which is not under way")
        if status != SUCCESS:
            self.state = QpState.ERR
        return Ended(self._receives.pop(wr_id), status)

    # --- the end ---

    def flush(self) -> tuple[list[Ended], list[Ended]]:
        """The queue pair is gone: whatever it has not reported is over, sends and receives, each in order."""
        self.state = QpState.ERR
        sends = [Ended(post.owner, FLUSHED) for post in self._posts]
        receives = [Ended(owner, FLUSHED) for owner in self._receives.values()]
        self._posts.clear()
        self._receives.clear()
        self._retired = self._sent
        return sends, receives
