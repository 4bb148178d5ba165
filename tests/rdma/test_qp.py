"""The queue pair's books against a naive model: every post ends once, in order, with the truth."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpurt.rdma.qp import FLUSHED, SUCCESS, Ended, QpState, QueuePairCore, is_receive

DEPTH = 6


def connected(send_depth: int = DEPTH, receive_depth: int = 2) -> QueuePairCore:
    core = QueuePairCore(send_depth, receive_depth)
    for state in (QpState.INIT, QpState.RTR, QpState.RTS):
        core.advance(state)
    return core


def test_states_are_taken_one_by_one_and_error_from_anywhere():
    core = QueuePairCore(1, 1)
    with pytest.raises(ValueError, match="does not go from 'reset' to 'ready to send'"):
        core.advance(QpState.RTS)
    core.advance(QpState.INIT)
    core.advance(QpState.ERR)
    with pytest.raises(ValueError, match="does not go"):
        core.advance(QpState.RESET)


def test_nothing_is_sent_before_it_is_ready_but_receives_may_wait():
    core = QueuePairCore(4, 2)
    assert (core.room, core.receive_room) == (0, 0)
    core.advance(QpState.INIT)
    assert (core.room, core.receive_room) == (0, 2)
    core.post_receive("r")
    with pytest.raises(ValueError, match="does not fit"):
        core.post_send("a", 1)


def test_one_completion_ends_its_chain_and_those_before_it():
    core = connected()
    core.post_send("a", 3)
    b = core.post_send("b", 1)
    c = core.post_send("c", 2)
    assert core.room == 0
    assert core.send_completed(b[-1], SUCCESS) == [Ended("a", SUCCESS), Ended("b", SUCCESS)]
    assert core.room == 4
    assert core.send_completed(c[-1], SUCCESS) == [Ended("c", SUCCESS)]


def test_a_failure_in_the_middle_of_a_chain_ends_it_and_flushes_the_rest():
    core = connected()
    core.post_send("a", 1)
    b = core.post_send("b", 2)
    c = core.post_send("c", 1)
    assert core.send_completed(b[0], "remote_access") == [Ended("a", SUCCESS), Ended("b", "remote_access")]
    assert core.state is QpState.ERR
    assert core.send_completed(b[1], FLUSHED) == []
    assert core.send_completed(c[0], FLUSHED) == [Ended("c", FLUSHED)]
    assert core.num_sending == 0


def test_a_failed_receive_is_an_error_too():
    core = connected()
    number = core.post_receive("r")
    assert is_receive(number)
    assert core.receive_completed(number, FLUSHED) == Ended("r", FLUSHED)
    assert core.state is QpState.ERR
    with pytest.raises(ValueError, match="not under way"):
        core.receive_completed(number, FLUSHED)


class Books(RuleBasedStateMachine):
    """The model is a list of work requests, each with its chain and what the device will say."""

    def __init__(self) -> None:
        super().__init__()
        self.core = connected()
        self.queue: list[tuple[int, int, bool]] = []  # (wr id, chain, is last)
        self.chains = 0
        self.open: list[int] = []
        self.ended: list[Ended] = []
        self.is_broken = False

    @precondition(lambda self: self.core.room)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.core.room))
        ids = self.core.post_send(self.chains, count)
        self.queue += [(wr_id, self.chains, wr_id == ids[-1]) for wr_id in ids]
        self.open.append(self.chains)
        self.chains += 1

    @precondition(lambda self: self.queue and not self.is_broken)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Some signalled request, not always the first, for one poll may find several."""
        at = data.draw(st.sampled_from([i for i, request in enumerate(self.queue) if request[2]]))
        wr_id, last, _ = self.queue[at]
        ended = self.core.send_completed(wr_id, SUCCESS)
        done = [chain for chain in self.open if chain <= last]
        assert ended == [Ended(chain, SUCCESS) for chain in done]
        self._retire(at, ended)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.queue) - 1)) if not self.is_broken else 0
        status = FLUSHED if self.is_broken else "remote_access"
        wr_id, failed, _ = self.queue[at]
        ended = self.core.send_completed(wr_id, status)
        expected = [Ended(chain, SUCCESS) for chain in self.open if chain < failed]
        assert ended == expected + [Ended(failed, status)] * (failed in self.open)
        self.is_broken = True
        self._retire(at, ended)

    @precondition(lambda self: self.is_broken)
    @rule()
    def destroy(self) -> None:
        sends, receives = self.core.flush()
        assert sends == [Ended(chain, FLUSHED) for chain in self.open]
        assert receives == []
        self._retire(len(self.queue) - 1, sends)

    def _retire(self, at: int, ended: list[Ended]) -> None:
        del self.queue[: at + 1]
        self.ended += ended
        self.open = [chain for chain in self.open if chain not in {end.owner for end in ended}]

    @invariant()
    def every_chain_is_open_or_ended_once_and_in_order(self) -> None:
        assert [end.owner for end in self.ended] + self.open == list(range(self.chains))

    @invariant()
    def room_is_what_is_not_under_way(self) -> None:
        assert self.core.num_sending == len(self.queue)
        assert self.core.room == (0 if self.is_broken else DEPTH - len(self.queue))
        assert self.core.is_usable == (not self.is_broken)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
