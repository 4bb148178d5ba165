"""Which reads leave together: runs of neighbours, a share of what waits, nothing twice and nothing forgotten."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.read_queue import RUN_BYTES, SPREAD, ReadQueue


@dataclass(eq=False)
class Read:
    """A record of one of several chains."""

    at: int
    chain: int = 0
    record_bytes: int = 4096
    waits: bool = True

    def goes_on(self, last: Read) -> bool:
        return self.chain == last.chain and self.at == last.at + 1


def places(run: list[Read]) -> list[int]:
    return [read.at for read in run]


def drain(queue: ReadQueue[Read]) -> list[list[int]]:
    runs = []
    while run := queue.pop():
        runs.append(places(run))
    return runs


def test_a_batch_of_neighbours_leaves_in_as_many_runs_as_a_device_should_have_at_once() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    assert queue.push([Read(i) for i in range(64)]) == SPREAD
    assert [len(run) for run in drain(queue)] == [16] * SPREAD


def test_neighbours_queued_one_by_one_leave_together_too() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    for i in range(16):
        assert queue.push([Read(i)]) == 1
    assert places(queue.pop()) == [0, 1, 2, 3]


def test_what_does_not_lie_side_by_side_is_read_apart() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    reads = [Read(i, chain=i // 2) for i in range(8)]
    assert queue.push(reads) == 4
    assert drain(queue) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_run_is_no_longer_than_its_bytes_allow() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    queue.push([Read(i, record_bytes=RUN_BYTES // 2) for i in range(64)])
    assert {len(run) for run in drain(queue)} == {2}


def test_a_read_larger_than_a_run_may_be_goes_alone() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    queue.push([Read(i, record_bytes=2 * RUN_BYTES) for i in range(8)])
    assert {len(run) for run in drain(queue)} == {1}


def test_a_read_taken_back_leaves_a_gap_that_no_run_spans() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    reads = [Read(i) for i in range(16)]
    queue.push(reads)
    reads[1].waits = False
    assert drain(queue)[:2] == [[0], [2, 3]]


def test_a_run_all_taken_back_is_passed_over() -> None:
    queue: ReadQueue[Read] = ReadQueue()
    reads = [Read(i) for i in range(8)]
    queue.push(reads)
    for read in reads[:2]:
        read.waits = False
    assert drain(queue)[0] == [2, 3]
    assert not queue.pop()
    assert len(queue) == 0


@given(st.lists(st.integers(0, 3), max_size=80))
def test_reads_leave_in_the_order_they_came(chains: list[int]) -> None:
    queue: ReadQueue[Read] = ReadQueue()
    queue.push([Read(i, chain=chain) for i, chain in enumerate(chains)])
    assert [at for run in drain(queue) for at in run] == list(range(len(chains)))


class QueueMachine(RuleBasedStateMachine):
    """Against a plain list of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ReadQueue[Read] = ReadQueue()
        self.waiting: list[Read] = []
        self.next = 0

    @rule(count=st.integers(0, 40), skip=st.integers(0, 1), size=st.sampled_from([4096, 100_000, 300_000]))
    def push(self, count: int, skip: int, size: int) -> None:
        self.next += skip
        reads = [Read(self.next + i, chain=size, record_bytes=size) for i in range(count)]
        self.next += count
        runs = self.queue.push(reads)
        assert min(count, 1) <= runs <= count
        self.waiting += reads

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if self.waiting:
            read = data.draw(st.sampled_from(self.waiting))
            read.waits = False
            self.waiting.remove(read)

    @rule()
    def pop(self) -> None:
        run = self.queue.pop()
        assert run == self.waiting[: len(run)]
        assert bool(run) == bool(self.waiting)
        assert not any(read.waits for read in run)
        assert all(b.goes_on(a) for a, b in itertools.pairwise(run))
        assert sum(read.record_bytes for read in run) <= RUN_BYTES or len(run) == 1
        del self.waiting[: len(run)]

    @invariant()
    def none_is_forgotten(self) -> None:
        assert len(self.queue) >= len(self.waiting)


TestQueueMachine = QueueMachine.TestCase
