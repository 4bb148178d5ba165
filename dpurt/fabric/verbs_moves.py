"""Which bytes go where: cutting local and remote runs to the same lengths, and registering memory for one transfer. Mostly pure.

Leaves to others: who may (`dpurt.fabric.access`), carrying the works out (`dpurt.rdma.queue_pair`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dpurt.fabric.verbs_control import Run
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration, Segment
from dpurt.rdma.queue_pair import Opcode, Sge, Work

__all__ = [
    "Span",
    "aligned",
    "length_of",
    "merged",
    "registered",
    "runs_of",
    "sges_of",
    "striped",
    "with_immediate",
]

MAX_WORK_BYTES = 1 << 20
_PAGE = 4096

Span = tuple[int, int]  # address, length


def aligned(opcode: Opcode, local: Iterable[Sge], remote: Iterable[Run]) -> list[Work]:
    """One work for each stretch that is whole on both sides. Both sides have the same number of bytes."""
    works = []
    theirs = _joined_runs(remote)
    there = Run(0, 0, 0)
    for here in _joined_sges(local):
        at, left = here.address, here.length
        while left:
            while not there.length:
                there = next(theirs)
            size = min(left, there.length, MAX_WORK_BYTES)
            works.append(Work(opcode, (Sge(at, size, here.lkey),), there.address, there.key))
            at, left = at + size, left - size
            there = Run(there.address + size, there.length - size, there.key)
    return works


def _joined_sges(local: Iterable[Sge]) -> Iterator[Sge]:
    """Neighbours as one: a work costs more than its bytes when these are few."""
    last: Sge | None = None
    for sge in local:
        if last is not None and sge.address == last.address + last.length and sge.lkey == last.lkey:
            last = Sge(last.address, last.length + sge.length, last.lkey)
            continue
        if last is not None:
            yield last
        last = sge
    if last is not None:
        yield last


def _joined_runs(remote: Iterable[Run]) -> Iterator[Run]:
    """As `_joined_sges`."""
    last: Run | None = None
    for run in remote:
        if last is not None and run.address == last.address + last.length and run.key == last.key:
            last = Run(last.address, last.length + run.length, last.key)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def with_immediate(works: Sequence[Work], immediate: int) -> list[Work]:
    """The same, but the last one tells the peer."""
    return [*works[:-1], replace(works[-1], opcode=Opcode.WRITE_IMMEDIATE, immediate=immediate & 0xFFFFFFFF)]


def length_of(works: Iterable[Work]) -> int:
    return sum(sge.length for work in works for sge in work.local)


def striped(works: Iterable[Work], step: int) -> list[list[Work]]:
    """The works cut into groups of `step` bytes each, but for the last."""
    groups: list[list[Work]] = []
    room = 0
    for work in works:
        [sge] = work.local
        done = 0
        while done < sge.length:
            if not room:
                groups.append([])
                room = step
            size = min(room, sge.length - done)
            here = Sge(sge.address + done, size, sge.lkey)
            groups[-1].append(replace(work, local=(here,), remote_address=work.remote_address + done))
            done, room = done + size, room - size
    return groups


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans on the same or neighbouring pages become one, so that many small pieces of a buffer cost one registration."""
    found: list[Span] = []
    for address, length in sorted(spans):
        if found and address <= _page_end(found[-1]):
            first = found[-1][0]
            found[-1] = first, max(sum(found[-1]), address + length) - first
        else:
            found.append((address, length))
    return found


def _page_end(span: Span) -> int:
    return -(-sum(span) // _PAGE) * _PAGE


@contextmanager
def registered(
    adapter: Adapter, known: Iterable[Registration], spans: Sequence[Span], access: Access
) -> Iterator[list[Registration]]:
    """Registrations that hold all of `spans`: the known ones that do, and some made for now. Raises RdmaLimit."""
    kept = [registration for registration in known if any(registration.holds(*span) for span in spans)]
    missing = [span for span in spans if not any(registration.holds(*span) for registration in kept)]
    made: list[Registration] = []
    try:
        for address, length in merged(missing):
            made.append(adapter.register(address, length, access))
        yield kept + made
    finally:
        for registration in made:
            registration.close()


def _segments(registrations: Sequence[Registration], spans: Iterable[Span]) -> Iterator[Segment]:
    """Spans that are registered, cut where a registration's chunks end."""
    for span in spans:
        holder = next(registration for registration in registrations if registration.holds(*span))
        yield from holder.segments(*span)


def sges_of(registrations: Sequence[Registration], spans: Iterable[Span]) -> Iterator[Sge]:
    """Registered spans as local elements of our own works."""
    for segment in _segments(registrations, spans):
        yield Sge(segment.address, segment.length, segment.chunk.lkey)


def runs_of(registrations: Sequence[Registration], spans: Iterable[Span]) -> list[Run]:
    """Registered spans as the peer may touch them."""
    return [
        Run(segment.address, segment.length, segment.chunk.rkey)
        for segment in _segments(registrations, spans)
    ]
