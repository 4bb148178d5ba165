"""The tape: what looks on at a node's cores and notes, in order, what they are told, asked and decide. Data and methods, no task.

Theory of operation. A `Tape` is put to the agents that own the cores (`tape` of the prefetch agent, of staging, of the intake
and the gateway), around the prefetch core's view of the tiers (`TapedView`) and around each pool's eviction policy
(`TapedPolicy`); taken away again, the node is as it was. Every method only appends a line to a list, so the node is never
held up: where the list is full because its reader is slow, lines are dropped and counted, and a `Loss` line stands in
their place.

A block is introduced, with a hash of its key under the tape's secret, before the first line that names it.

Leaves writing to the recorder, and what a line may hold to `dpurt.wire.recording`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import trio

from dpurt.core.arbiter import StagingView
from dpurt.core.events import Arrived, DecodeStep, Demanded, Dropped, Event, Evicted, Staged, Stored, Where
from dpurt.core.eviction import EvictionPolicy, Protect
from dpurt.core.prefetch import Command, Fetch
from dpurt.wire import recording as r

from .index import IndexAgent
from .spaces import SpaceState, number_of

MAX_NAMES = 1 << 18  # of blocks, and lines, that wait for the writer
HASH_BYTES = 8


class Tape:
    """See the module's docstring. At most `max_names` names of blocks, and lines, wait for the writer."""

    def __init__(
        self, index: IndexAgent, predictors: Sequence[str], secret: bytes, max_names: int = MAX_NAMES
    ) -> None:
        self._index = index
        self._predictors = tuple(predictors)
        self._secret = secret
        self._max_names = max_names
        self._names = 0  # on the lines that wait
        self._lines: list[r.Line] = []
        self._blocks: set[int] = set()
        self._spaces: set[int] = set()
        self._prompts: dict[int, tuple[int, int, int]] = {}  # of arrivals the core has not heard of yet
        self._missing = 0  # since the last line
        self.lost = 0
        self.num_lines = 0
        self.has_lines = trio.Event()

    # --- for the recorder ---

    def take(self) -> list[r.Line]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        self._names = 0
        self.has_lines = trio.Event()
        return lines

    def end(self, why: r.Why, ledger: tuple[int, ...] | None) -> None:
        """No more lines but this one."""
        self._note_loss()
        self._append(r.End(trio.current_time(), why, self.lost, ledger))

    # --- the prefetch core ---

    def prompt(self, sequence: int, space: int, blocks: int, tokens: int) -> None:
        """An arrival the core will soon be told of is of this space, and its prompt is so long."""
        self._prompts[sequence] = (space, blocks, tokens)

    def told(self, event: Event, now: float, heard: float) -> None:
        """The core is about to be told."""
        space, prompt = 0, (0, 0)
        if isinstance(event, Arrived):
            space, *sizes = self._prompts.pop(event.sequence, (0, 0, 0))
            prompt = (sizes[0], sizes[1])
            self._introduce_space(space)
        self._put(r.told(event, now, heard, space, prompt), _blocks_of(event))

    def ticked(self, now: float) -> None:
        """The core is about to be told the time."""
        self._put(r.Tick(now))

    def decided(self, commands: Sequence[Command]) -> None:
        """What came of it."""
        for command in commands:
            if isinstance(command, Fetch):
                self._put(r.fetched(command, self._predictors), (command.block,))
            else:
                self._put(r.Cancelled(command.job))

    def answered(self, line: r.Answer) -> None:
        """The core asked about the tiers."""
        self._put(line, () if isinstance(line, r.Number) else (line.block,))

    # --- eviction ---

    def policy(self, line: r.PolicyLine, blocks: Sequence[int]) -> None:
        """A pool told or asked its eviction policy."""
        self._put(line, blocks)

    # --- devices and hosts ---

    def queued(self, block: int, num_bytes: int, job: int | None, now: float) -> None:
        """A read was queued."""
        self._put(r.Queued(now, block, num_bytes, job), (block,))

    def wanted(self, block: int, now: float) -> None:
        """A queued prefetch is waited for."""
        self._put(r.Wanted(now, block), (block,))

    def completed(self, block: int, began: float | None, status: str, now: float) -> None:
        """A read ended."""
        self._put(r.Completed(now, block, began, status), (block,))  # type: ignore[arg-type]

    def taken(self, block: int, now: float) -> None:
        """A stored block is in staging."""
        self._put(r.Taken(now, block), (block,))

    def written(self, block: int, is_ok: bool, now: float) -> None:
        """A stored block is on flash, or will not be."""
        self._put(r.Written(now, block, is_ok), (block,))

    def moved(self, op: r.Op, block: int | None, began: float, num_bytes: int, now: float) -> None:
        """Bytes went over a link."""
        self._put(r.Moved(now, op, block, began, num_bytes), () if block is None else (block,))

    def released(self, block: int, now: float) -> None:
        """A host gave back its right to read the block."""
        self._put(r.Released(now, block), (block,))

    # --- inside ---

    def _put(self, line: r.Line, blocks: Sequence[int] = ()) -> None:
        self._names += 1 + len(blocks)
        if self._names > self._max_names:
            self._missing += 1
            return
        self._note_loss()
        for block in blocks:
            if block not in self._blocks and not self._introduce(block):
                self._missing += 1
                return
        self._append(line)

    def _append(self, line: r.Line) -> None:
        self._lines.append(line)
        self.num_lines += 1
        self.has_lines.set()

    def _note_loss(self) -> None:
        if self._missing:
            self.lost += self._missing
            self._append(r.Loss(self._missing))
            self._missing = 0

    def _introduce(self, block: int) -> bool:
        """False for a block of an epoch that is forgotten, or with too large a name."""
        state = self._index.by_number.get(number_of(block))
        if state is None or block > r.MAX_REF:
            return False
        self._introduce_space(state.number)
        handle, shard = state.unref(block)
        block_id = state.block_id(handle)
        is_on_flash = block_id >= 0 and state.extent_of(block_id, shard) >= 0
        staged = f"{state.slab.pool.ready_parts(block):x}"
        self._append(r.Block(block, self._hash(state, block_id, block), state.number, is_on_flash, staged))
        self._blocks.add(block)
        return True

    def _introduce_space(self, number: int) -> None:
        state = self._index.by_number.get(number)
        if number in self._spaces or state is None:
            return
        self._spaces.add(number)
        layout, geometry = state.layout, state.space.geometry
        self._append(
            r.Space(
                number,
                state.slab.number,
                geometry.block_tokens,
                layout.record_bytes,
                tuple(state.part_bytes),
                state.recompute_s,
            )
        )

    def _hash(self, state: SpaceState, block_id: int, block: int) -> str:
        """Of the key and the shard; of the bare name where the key is gone already."""
        what = b"%d" % block
        if block_id >= 0:
            what = b"%b%d" % (state.index.key(block_id), state.unref(block)[1])
        return blake2b(what, digest_size=HASH_BYTES, key=self._secret).hexdigest()


def _blocks_of(event: Event) -> Sequence[int]:
    match event:
        case Arrived(blocks=blocks) | Stored(blocks=blocks):
            return blocks
        case Demanded(block=block) | Staged(block=block) | Evicted(block=block) | Dropped(block=block):
            return (block,)
        case DecodeStep(touched=touched, ranked=ranked):
            return [*touched, *(block for hint in ranked for block in hint.blocks)]
        case _:
            return ()


class TapedView:
    """A `StagingView` whose answers to the core are noted."""

    def __init__(self, view: StagingView, tape: Tape) -> None:
        self.view = view
        self._tape = tape

    def where(self, block: int, parts_mask: int | None) -> Where:
        answer = self.view.where(block, parts_mask)
        self._tape.answered(r.Whereabouts(block, answer))
        return answer

    def record_bytes(self, block: int, parts_mask: int | None) -> int:
        answer = self.view.record_bytes(block, parts_mask)
        self._tape.answered(r.Number("bytes", answer))
        return answer

    def recompute_s(self, block: int) -> float | None:  # is in the space's line
        return self.view.recompute_s(block)

    def demand_backlog_bytes(self) -> int:
        answer = self.view.demand_backlog_bytes()
        self._tape.answered(r.Number("backlog", answer))
        return answer

    def price(self, block: int, now: float) -> float:
        answer = self.view.price(block, now)
        self._tape.answered(r.Priced(block, answer))
        return answer

    def free_bytes(self) -> int:
        answer = self.view.free_bytes()
        self._tape.answered(r.Number("free", answer))
        return answer


class TapedPolicy:
    """An `EvictionPolicy` whose calls and answers are noted."""

    def __init__(self, policy: EvictionPolicy, pool: int, tape: Tape) -> None:
        self.policy = policy
        self._pool = pool
        self._tape = tape

    @property
    def name(self) -> str:
        return self.policy.name

    def __len__(self) -> int:
        return len(self.policy)

    def insert(self, block: int, now: float) -> None:
        self._tape.policy(r.Insert(self._pool, block, now), (block,))
        self.policy.insert(block, now)

    def touch(self, blocks: Iterable[int], now: float) -> None:
        touched = tuple(blocks)
        self._tape.policy(r.Touch(self._pool, touched, now), touched)
        self.policy.touch(touched, now)

    def hold(self, block: int) -> None:
        self._tape.policy(r.Hold(self._pool, block), (block,))
        self.policy.hold(block)

    def unhold(self, block: int) -> None:
        self._tape.policy(r.Unhold(self._pool, block), (block,))
        self.policy.unhold(block)

    def victim(self, now: float, protect: Protect | None = None) -> int | None:
        block = self.policy.victim(now, protect)
        line = r.Victim(self._pool, now, block, protect is not None)
        self._tape.policy(line, () if block is None else (block,))
        return block

    def price(self, now: float) -> float:
        worth = self.policy.price(now)
        self._tape.policy(r.Price(self._pool, now, worth), ())
        return worth

    def remove(self, block: int, *, evicted: bool) -> None:
        self._tape.policy(r.Remove(self._pool, block, evicted), (block,))
        self.policy.remove(block, evicted=evicted)
