"""Feeds a recorded node's inputs to the same cores again, and compares every decision with the recorded one.

The cores are the node's own: a prefetch core (`dpurt.core.prefetch_setup`) and a policy for each staging pool, sharing their
outlook. They are told what the recording says they were told - requests, completions of reads, evictions' consequences, the
time - and get the recorded answers when they ask where a block is. What they decide is theirs: which blocks to fetch, which
fetches to cancel, which block leaves staging and what it is worth. `verify` says how many decisions were equal, and which
was the first that was not; at the end the two ledgers are compared.

Needs a recording that began before the node's first request and of which no line is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from dpurt.core.events import Where
from dpurt.core.eviction import EvictionPolicy, make_policy
from dpurt.core.ledger import Totals
from dpurt.core.prefetch import Command, Fetch, PrefetchCore
from dpurt.core.prefetch_setup import PrefetchSetup, outlook_of
from dpurt.core.return_model import Forest
from dpurt.errors import ConfigError
from dpurt.priors import digest_of, shipped_returns
from dpurt.replay.recording import Recording
from dpurt.wire import recording as r

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`decisions` compared, by kind; `difference`: the first that was not equal, and where, or empty. `ledger` is the replayed
    core's at the end, None when the node ran without prefetch."""

    decisions: dict[str, int]
    difference: str
    ledger: Totals | None

    @property
    def is_equal(self) -> bool:
        """Every decision was the recorded one."""
        return not self.difference


class _Differs(Exception):
    """The replayed cores did something else."""


@dataclass(slots=True)
class _TapeView:
    """The tiers as the live core was told they are. Asked in another order, the core is not the one that was recorded.

    The price of room is the replayed policy's answer, and compared.
    """

    ask_price: Callable[[r.Price], None]
    recompute: dict[int, float]  # of each block whose space says so
    answers: deque[r.Answer | r.Price] = field(default_factory=deque)

    def where(self, block: int, parts_mask: int | None) -> Where:
        answer = self._next(f"where block {block} is")
        if not isinstance(answer, r.Whereabouts) or answer.block != block:
            raise _Differs(f"the core asked where block {block} is; recorded: {answer}")
        return answer.where

    def record_bytes(self, block: int, parts_mask: int | None) -> int:
        return self._number("bytes")

    def recompute_s(self, block: int) -> float | None:
        return self.recompute.get(block)

    def demand_backlog_bytes(self) -> int:
        return self._number("backlog")

    def price(self, block: int, now: float) -> float:
        if self.answers and isinstance(self.answers[0], r.Price):
            self.ask_price(self.answers[0])
            self.answers.popleft()
        answer = self._next(f"the price of room for block {block}")
        if not isinstance(answer, r.Priced) or answer.block != block:
            raise _Differs(f"the core asked for the price of room for block {block}; recorded: {answer}")
        return answer.worth

    def free_bytes(self) -> int:
        return self._number("free")

    def _number(self, what: str) -> int:
        answer = self._next(what)
        if not isinstance(answer, r.Number) or answer.what != what:
            raise _Differs(f"the core asked for {what}; recorded: {answer}")
        return answer.value

    def _next(self, what: str) -> r.Answer | r.Price:
        if not self.answers:
            raise _Differs(f"the core asked for {what}; recorded: nothing")
        return self.answers.popleft()


def verify(recording: Recording) -> Verdict:
    """See the module's docstring. ConfigError for a recording that cannot be fed back."""
    _check(recording)
    replay = _Replay(recording)
    difference = ""
    for index in range(_end_of(recording)):
        try:
            replay.take(index)
        except _Differs as differs:
            difference = f"{recording.where(index)}: {differs}"
            break
    ledger = None if replay.core is None else replay.core.ledger.totals()
    difference = difference or _ledger_difference(recording, ledger)
    return Verdict(decisions=replay.decisions, difference=difference, ledger=ledger)


def _ledger_difference(recording: Recording, ledger: Totals | None) -> str:
    end = recording.lines[-1] if recording.lines else None
    made = None if ledger is None else r.outcomes(ledger)
    if not isinstance(end, r.End) or end.ledger == made:
        return ""
    return f"the ledger ({', '.join(r.OUTCOMES)}) ended as {made}; recorded: {end.ledger}"


def _check(recording: Recording) -> None:
    if not recording.header.is_fresh:
        raise ConfigError(
            str(recording.path),
            "expected a recording that began before the node's first request (dpurt serve --record)",
        )
    if recording.lost:
        raise ConfigError(
            str(recording.path), f"expected a recording without loss, got {recording.lost} lost lines"
        )


def _end_of(recording: Recording) -> int:
    """How many lines hold together: what a killed writer left may end in the middle of a turn of the core."""
    lines = recording.lines
    if recording.is_whole:
        return len(lines)
    turns = (at for at in range(len(lines) - 1, -1, -1) if isinstance(lines[at], r.Tick | r.Told))
    return next(turns, 0)


class _Replay:
    """The cores, on their way through a recording."""

    def __init__(self, recording: Recording) -> None:
        header = recording.header
        self._lines = recording.lines
        self._view = _TapeView(self._compare_price, _recompute_times(recording.lines))
        setup = PrefetchSetup(**msgspec.structs.asdict(header.prefetch))
        predictors = setup.make_predictors(_prior_of(recording)) if header.has_prefetch else []
        outlook = outlook_of(predictors)
        self.core: PrefetchCore | None = setup.build(predictors, self._view) if header.has_prefetch else None
        self._predictors = header.prefetch.predictors
        self._policies: list[EvictionPolicy] = [
            make_policy(header.eviction, pool.slots, outlook) for pool in header.pools
        ]
        self._pending: deque[Command] = deque()  # decided here, not seen in the recording yet
        self.decisions = {"fetch": 0, "cancel": 0, "victim": 0, "price": 0}

    def take(self, index: int) -> None:
        """One line. Raises _Differs."""
        line = self._lines[index]
        if isinstance(line, (r.Fetched, r.Cancelled)):
            self._compare_command(line)
            return
        if isinstance(line, r.Space | r.Block | r.Answer | r.Price):
            return  # looked at when the core asked
        if self._pending:
            raise _Differs(f"the core decided {self._pending[0]}, which is not recorded")
        if isinstance(line, r.PolicyLine):
            self._tell_policy(line)
        elif isinstance(line, r.Tick | r.Told) and self.core is not None:
            self._tell_core(line, self.core, index)

    def _tell_core(self, line: r.Tick | r.Told, core: PrefetchCore, index: int) -> None:
        self._view.answers = deque(_answers_after(self._lines, index))
        if isinstance(line, r.Tick):
            self._pending.extend(core.tick(line.now))
        else:
            self._pending.extend(core.handle(r.event_of(line), line.now))
        if self._view.answers:
            raise _Differs(f"the core did not ask for {self._view.answers[0]}")

    def _compare_command(self, line: r.Fetched | r.Cancelled) -> None:
        if not self._pending:
            raise _Differs(f"the core did not decide {line}")
        command = self._pending.popleft()
        made = (
            r.fetched(command, self._predictors) if isinstance(command, Fetch) else r.Cancelled(command.job)
        )
        if made != line:
            raise _Differs(f"the core decided {made}; recorded: {line}")
        self.decisions["fetch" if isinstance(line, r.Fetched) else "cancel"] += 1

    def _tell_policy(self, line: r.PolicyLine) -> None:
        policy = self._policies[line.pool]
        match line:
            case r.Insert(_, block, now):
                policy.insert(block, now)
            case r.Touch(_, blocks, now):
                policy.touch(blocks, now)
            case r.Hold(_, block):
                policy.hold(block)
            case r.Unhold(_, block):
                policy.unhold(block)
            case r.Remove(_, block, is_evicted):
                policy.remove(block, evicted=is_evicted)
            case r.Victim():
                self._compare_victim(policy, line)

    def _compare_victim(self, policy: EvictionPolicy, line: r.Victim) -> None:
        protect = (lambda block: self._is_wanted(block, line.now)) if line.may_protect else None
        self._compare("victim", policy.victim(line.now, protect), line.block)

    def _compare_price(self, line: r.Price) -> None:
        self._compare("price", self._policies[line.pool].price(line.now), line.worth)

    def _is_wanted(self, block: int, now: float) -> bool:
        return self.core is not None and self.core.is_wanted(block, now)

    def _compare(self, kind: str, made: object, recorded: object) -> None:
        if made != recorded:
            raise _Differs(f"the policy's {kind} is {made}; recorded: {recorded}")
        self.decisions[kind] += 1


def _prior_of(recording: Recording) -> Forest | None:
    """What the predictors knew beforehand. ConfigError when this dpurt knows something else."""
    prior = shipped_returns() if recording.header.prior else None
    if digest_of(prior) != recording.header.prior:
        raise ConfigError(
            str(recording.path),
            "expected a recording of a dpurt with this one's prior for conversations' returns",
        )
    return prior


def _recompute_times(lines: Sequence[r.Line]) -> dict[int, float]:
    """How long a host takes to compute a block, of those whose space says so."""
    spaces = {
        line.number: line.recompute_s
        for line in lines
        if isinstance(line, r.Space) and line.recompute_s is not None
    }
    return {
        line.ref: spaces[line.space] for line in lines if isinstance(line, r.Block) and line.space in spaces
    }


def _answers_after(lines: Sequence[r.Line], index: int) -> list[r.Answer | r.Price]:
    """What the core heard while it was told line `index`: the answers up to the next line of another kind."""
    answers: list[r.Answer | r.Price] = []
    for at in range(index + 1, len(lines)):
        line = lines[at]
        if isinstance(line, r.Answer | r.Price):
            answers.append(line)
        elif not isinstance(line, r.Space | r.Block):
            break
    return answers
