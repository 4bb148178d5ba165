"""Commands and the queue pair they are in flight on, whatever the transport.

A `Command` is a submission entry without its id and data pointer, which the queue pair and the transport put
in when it is submitted, and the buffers its data comes from or goes to. A `QueuePair` gives out ids, keeps at
most `size - 1` commands in flight (so the ring can never run over, with or without SQ flow control), and
finds the command a completion is for. Ids are reused as late as possible: a stale answer is noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpurt.errors import RemoteProtocolError
from dpurt.wire.nvme_status import Status

__all__ = ["Command", "Completion", "QueuePair", "piece_of", "split_blocks", "split_runs"]


class Command:
    """One command. `data_in` is filled by the controller, `data_out` is read by it; at most one is not empty.

    `tag` is the owner's, to know it again; `attempts` is how often it was given to a controller.
    """

    __slots__ = ("attempts", "data_in", "data_out", "length", "sqe", "tag")

    def __init__(
        self,
        sqe: bytearray,
        data_in: Sequence[memoryview] = (),
        data_out: Sequence[memoryview] = (),
        tag: object = None,
    ) -> None:
        assert not (data_in and data_out), "no command moves data both ways"
        self.sqe = sqe
        self.data_in = data_in
        self.data_out = data_out
        self.length = sum(map(len, data_in or data_out))
        self.tag = tag
        self.attempts = 0

    @property
    def opcode(self) -> int:
        return self.sqe[0]


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a command; `result` is dwords 0 and 1."""

    command: Command
    status: Status
    result: int = 0


class QueuePair:
    """The commands in flight on one queue pair of `size` entries."""

    def __init__(self, size: int) -> None:
        assert 2 <= size <= 65536, "an NVMe queue has 2 to 65536 entries"
        self._ids = deque(range(size - 1))
        self._in_flight: dict[int, Command] = {}

    @property
    def room(self) -> int:
        return len(self._ids)

    def __len__(self) -> int:
        return len(self._in_flight)

    def commands(self) -> Iterable[Command]:
        return self._in_flight.values()

    def add(self, command: Command) -> int:
        """Its id, also written into its entry. There must be room."""
        command_id = self._ids.popleft()
        self._in_flight[command_id] = command
        command.sqe[2:4] = command_id.to_bytes(2, "little")
        command.attempts += 1
        return command_id

    def find(self, command_id: int) -> Command:
        """Raises RemoteProtocolError for an id that is not in flight."""
        command = self._in_flight.get(command_id)
        if command is None:
            raise RemoteProtocolError("nvme_command_id", f"no command {command_id} is in flight")
        return command

    def end(self, command_id: int) -> Command:
        """The command is over; its id is free."""
        command = self.find(command_id)
        del self._in_flight[command_id]
        self._ids.append(command_id)
        return command

    def take_all(self) -> list[Command]:
        """Forget what is in flight: the connection is gone."""
        commands = list(self._in_flight.values())
        self._ids.extend(self._in_flight)
        self._in_flight.clear()
        return commands


def piece_of(buffers: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """The part of a scatter list from `offset` on, without a copy. `length` bytes must be there."""
    if len(buffers) == 1:
        return [buffers[0][offset : offset + length]]
    pieces = []
    for buffer in buffers:
        if offset >= len(buffer):
            offset -= len(buffer)
            continue
        pieces.append(buffer[offset : offset + length])
        length -= len(pieces[-1])
        offset = 0
        if not length:
            break
    assert not length, "the list holds what was asked for"
    return pieces


def split_blocks(first_block: int, num_blocks: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of each command of at most `most` blocks."""
    end = first_block + num_blocks
    return [(at, min(most, end - at)) for at in range(first_block, end, most)]


def split_runs(first_block: int, block: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, count) of each command, none of which crosses from one run into the next. A run is (length, most bytes
    of a command in it), both multiples of the block size.
    """
    spans = []
    for length, most in runs:
        count = length // block
        spans += split_blocks(first_block, count, most // block)
        first_block += count
    return spans
